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
    places = {
        "block_size": "block_size",
        "mask_token_id": "dflash_config.mask_token_id",
        "target_layer_ids": "dflash_config.target_layer_ids",
    }
    draft_sampling = "argmax"

    @classmethod
    def claims(cls, architecture: str) -> bool:
        name = architecture.lower()
        return "dflash" in name and "dflash2" not in name and "dspark" not in name
