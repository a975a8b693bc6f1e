"""DFlash 2: dynamic convolutions in every layer, and a candidate selector."""

from dataclasses import dataclass
from typing import Any

from ..config import DrafterConfig, Shapes
from ..config_reader import ConfigReader
from ..errors import DFlash2Error

SETTINGS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DrafterConfig):
    """A DFlash 2 drafter."""

    kind = "dflash2"
    title = "DFlash 2"
    architecture = "DFlash2DraftModel"
    network_class = "DFlash2Drafter"
    places = {
        name: f"dflash_config.{name}"
        for name in ("block_size", "mask_token_id", "target_layer_ids", *SETTINGS)
    }
    own_settings = SETTINGS
    first_row_varies = False

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    @classmethod
    def own_fields(cls, read: ConfigReader) -> dict[str, Any]:
        return {name: read.nested_integer(name) for name in SETTINGS}

    def own_tensors(self) -> Shapes:
        codebook = (self.vocab_size, self.selector_rank)
        return {
            "candidate_selector.hidden_projection.weight": (
                self.selector_rank,
                self.hidden_size,
            ),
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
        }

    def own_layer_tensors(self) -> Shapes:
        size, kernel = self.hidden_size, self.conv_kernel_size
        groups = size // self.conv_group_size
        shapes: Shapes = {}
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{conv}.base_kernel"] = (2, kernel, size)
            shapes[f"{conv}.kernel_projection.weight"] = (2 * kernel * groups, size)
        return shapes

    @classmethod
    def owns(cls, tensor: str) -> bool:
        return "_conv." in tensor or tensor.startswith("candidate_selector.")

    @classmethod
    def claims(cls, architecture: str) -> bool:
        name = architecture.lower()
        return "dflash2" in name and "dspark" not in name

    def check(self, where: str) -> None:
        super().check(where)
        if self.first_row != 1:
            raise DFlash2Error(
                f"{where}: drafting from the anchor's row (logits_start "
                f"{self.first_row}) is not supported for DFlash 2, whose selector "
                "begins after it"
            )
        if self.hidden_size % self.conv_group_size:
            raise DFlash2Error(
                f"{where}: conv_group_size {self.conv_group_size} does not divide "
                f"hidden_size {self.hidden_size}"
            )
        if self.selector_top_k > self.vocab_size:
            raise DFlash2Error(
                f"{where}: selector_top_k {self.selector_top_k} exceeds the vocabulary "
                f"of {self.vocab_size}"
            )
