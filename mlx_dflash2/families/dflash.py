"""DFlash (v1): the backbone alone, every row decided by itself."""

from dataclasses import dataclass

from ..config import DrafterConfig


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(DrafterConfig):
    """A DFlash drafter, trained with cross entropy or D-PACE."""

    kind = "dflash"
    title = "DFlash"
    architecture = "DFlashDraftModel"
    network_class = "DFlashDrafter"
    draft_sampling = "argmax"

    @classmethod
    def claims(cls, architecture: str) -> bool:
        name = architecture.lower()
        return "dflash" in name and "dflash2" not in name and "dspark" not in name
