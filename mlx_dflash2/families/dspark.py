"""DSpark: a Markov head over the backbone's rows, and a confidence head."""

from dataclasses import dataclass
from typing import Any

from ..config import DrafterConfig, Shapes
from ..config_reader import ConfigReader


def _places(*names: str) -> list[str]:
    parts = ("", "dflash_config.", "dspark_config.")
    return [f"{part}{name}" for name in names for part in parts]


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(DrafterConfig):
    """A DSpark drafter with a vanilla Markov head.

    Its block size counts proposals: the anchor's row already predicts the first.

    Attributes:
        markov_rank: Columns of the two Markov tables.
        has_confidence: A head tells how sure each slot is.
        confidence_sees_token: That head also reads the Markov row of the token before.
    """

    kind = "dspark"
    title = "DSpark"
    architecture = "Qwen3DSparkModel"
    network_class = "DSparkDrafter"
    places = {
        "block_size": "block_size",
        "mask_token_id": "mask_token_id",
        "target_layer_ids": "target_layer_ids",
        "markov_rank": "markov_rank",
        "markov_head_type": "markov_head_type",
        "has_confidence": "enable_confidence_head",
        "confidence_sees_token": "confidence_head_with_markov",
    }
    own_settings = (
        *("markov_rank", "dspark_markov_rank", "markov_head_type", "dspark_config"),
        *("enable_confidence_head", "confidence_head_with_markov"),
    )
    markov_head_type = "vanilla"
    default_first_row = 0
    sliding_is_causal = False

    markov_rank: int
    has_confidence: bool
    confidence_sees_token: bool

    @classmethod
    def own_fields(cls, read: ConfigReader) -> dict[str, Any]:
        place, head = read.find(*_places("markov_head_type"))
        if head not in (None, "vanilla"):
            raise read.fail(f"{place} is {head!r}; only 'vanilla' is supported")
        confident = read.flag(*_places("enable_confidence_head"), default=False)
        sees_token = read.flag(*_places("confidence_head_with_markov"))
        if confident and sees_token is None:
            raise read.fail(
                "confidence_head_with_markov is missing beside enable_confidence_head"
            )
        return {
            "markov_rank": read.integer(*_places("markov_rank", "dspark_markov_rank")),
            "has_confidence": confident,
            "confidence_sees_token": bool(confident and sees_token),
        }

    def own_tensors(self) -> Shapes:
        table = (self.vocab_size, self.markov_rank)
        shapes: Shapes = {
            "markov_head.markov_w1.weight": table,
            "markov_head.markov_w2.weight": table,
        }
        if self.has_confidence:
            width = self.hidden_size
            width += self.markov_rank if self.confidence_sees_token else 0
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    @classmethod
    def owns(cls, tensor: str) -> bool:
        return tensor.startswith(("markov_head.", "confidence_head."))

    @classmethod
    def claims(cls, architecture: str) -> bool:
        return "dspark" in architecture.lower()
