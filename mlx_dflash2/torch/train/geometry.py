"""The config.json of a new drafter, from the target's and what was asked for."""

from collections.abc import Mapping
from typing import Any

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import FAMILIES

from .config import Shape

DRAFTED = 7  # tokens of a block, where nothing else is asked for


def spread_taps(depth: int, count: int) -> tuple[int, ...]:
    """Target layers to read, spread as published drafters have them.

    One tap lies in the middle; more run from layer 1 to the third but last, rounded
    to even numbers at a half as Python rounds (z-lab/dflash, SpecForge).

    Args:
        depth: Layers of the target.
        count: Taps wanted.
    """
    if count == 1:
        return (depth // 2,)
    step = (depth - 4) / (count - 1)
    taps = tuple(round(1 + index * step) for index in range(count))
    if len(set(taps)) < count or not 0 <= taps[0] < taps[-1] < depth - 1:
        raise DFlash2Error(
            f"drafter.num_taps is {count}, more than a target of {depth} layers has "
            "room for; ask for fewer or list drafter.taps"
        )
    return taps


def new_drafter(shape: Shape, target: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's config.json in its family's published spelling.

    Args:
        shape: What was asked for; sizes it leaves out are the target's.
        target: The target's config.json.

    Raises:
        DFlash2Error: The mask token is missing, or the parts do not fit each other.
    """
    if shape.mask_token_id is None:
        raise DFlash2Error(
            "drafter.mask_token_id is missing; give a token that text of the target "
            "hardly holds (for MiniCPM5: 75982), or a warm start that has one"
        )
    heads = target["num_attention_heads"]
    rope = target.get("rope_parameters") or {}
    raw = {
        "architectures": [family_of(shape).architecture],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate or target["intermediate_size"],
        "num_attention_heads": shape.heads or heads,
        "num_key_value_heads": shape.kv_heads or target["num_key_value_heads"],
        "head_dim": shape.head_dim
        or target.get("head_dim")
        or target["hidden_size"] // heads,
        "vocab_size": target["vocab_size"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": float(target.get("rope_theta") or rope["rope_theta"]),
        "max_position_embeddings": target["max_position_embeddings"],
        "attention_bias": False,
        "is_causal": False,
        "layer_types": ["full_attention"] * shape.layers,
        "num_target_layers": target["num_hidden_layers"],
        "tie_word_embeddings": False,
    }
    for name, value in _own_fields(shape, target["num_hidden_layers"]).items():
        _put(raw, family_of(shape).places[name], value)
    return raw


def read_geometry(raw: Mapping[str, Any]) -> DrafterConfig:
    """A config.json that `new_drafter` or a warm start gave, read and checked."""
    return _claiming(raw["architectures"][0]).from_dict(dict(raw), where="drafter")


def family_of(shape: Shape) -> type[DrafterConfig]:
    return next(family for family in FAMILIES if family.kind == shape.family)


def _claiming(architecture: str) -> type[DrafterConfig]:
    return next(family for family in FAMILIES if family.claims(architecture))


def _own_fields(shape: Shape, depth: int) -> dict[str, Any]:
    """What the family's table of places has, by field of its config."""
    family = family_of(shape)
    known = {
        "block_size": shape.block_size or DRAFTED + family.default_first_row,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps or spread_taps(depth, shape.num_taps)),
        "conv_kernel_size": shape.conv_kernel_size,
        "conv_group_size": shape.conv_group_size,
        "selector_rank": shape.selector_rank,
        "selector_top_k": shape.selector_top_k,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "has_confidence": shape.confidence,
        "confidence_sees_token": shape.confidence,
    }
    return {name: known[name] for name in family.places}


def _put(raw: dict[str, Any], place: str, value: Any) -> None:
    *parents, name = place.split(".")
    for parent in parents:
        raw = raw.setdefault(parent, {})
    raw[name] = value
