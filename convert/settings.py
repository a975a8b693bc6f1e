"""The config.json of a converted drafter, in the spelling every runtime reads."""

import copy

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.config_fields import SLIDING
from mlx_dflash2.config_reader import CODE_KEYS

SCALING = {
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "input_embedding_scale": 1.0,
}
ORIGIN = "mlx_dflash2_source"


def published_config(
    raw: dict,
    config: DrafterConfig,
    *,
    dtype: str | None = None,
    quantization: dict | None = None,
    origin: dict | None = None,
) -> dict:
    """Write a drafter's settings where published drafters have them.

    Starts from `raw` and keeps whatever it does not concern; a config that is already
    published comes back with the same content.

    Args:
        raw: The source's config.json.
        config: The same, read.
        dtype: Type of the tensors written; None keeps what `raw` says.
        quantization: Group size and bits of the tensors written; None if they are not
            quantized.
        origin: The Hub repository and commit the drafter was read from.
    """
    written = {key: copy.deepcopy(raw[key]) for key in raw if key not in CODE_KEYS}
    written["architectures"] = [config.architecture]
    schema = str(raw.get("model_type") or "dflash").lower()
    if "dflash" in schema or "dspark" in schema:
        written["model_type"] = "qwen3"  # a schema of its own, known to no runtime
    for field, place in config.places.items():
        _put(written, place, getattr(config, field))
    written["num_target_layers"] = config.num_target_layers
    nested = written.get("dflash_config") or {}
    if "num_target_layers" in nested:
        nested["num_target_layers"] = config.num_target_layers
    _spell_out(written, config)
    _name_types(written, dtype, quantization)
    if origin is not None:
        written[ORIGIN] = origin
    return written


def _spell_out(written: dict, config: DrafterConfig) -> None:
    """Repeat in its usual place what stands only where few runtimes look."""
    usual = {"head_dim": config.head_dim, "rope_theta": config.rope_theta}
    if config.is_causal is not None:
        usual["is_causal"] = config.is_causal
    if SLIDING in config.layer_types:
        usual["layer_types"] = list(config.layer_types)
        usual["sliding_window"] = config.sliding_window
    for name, value in usual.items():
        if written.get(name) is None:
            written[name] = value
    for name, neutral in SCALING.items():
        value = getattr(config, name)
        nested = written.get("dflash_config") or {}
        if value != neutral and nested.get(name) is None and not written.get(name):
            _put(written, f"dflash_config.{name}", value)


def _put(written: dict, place: str, value: object) -> None:
    """Set a dotted place; a tuple becomes a list, as JSON has it."""
    *parents, name = place.split(".")
    for parent in parents:
        written[parent] = written.get(parent) or {}
        written = written[parent]
    written[name] = list(value) if isinstance(value, tuple) else value


def _name_types(written: dict, dtype: str | None, quantization: dict | None) -> None:
    if dtype is not None:
        written["dtype"] = dtype
        if "torch_dtype" in written:
            written["torch_dtype"] = dtype
    if quantization is None:
        written.pop("quantization", None)
        written.pop("quantization_config", None)
        return
    known = written.get("quantization") or {}
    if any(known.get(key) != quantization[key] for key in quantization):
        written["quantization"] = quantization
    if "quantization_config" in written:
        written["quantization_config"] = dict(written["quantization"])
