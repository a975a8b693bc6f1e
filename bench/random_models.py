"""Models with random weights, from their config.json alone."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlx_dflash2.checkpoint import Source, find_source
from mlx_dflash2.config import DrafterConfig, check_fit
from mlx_dflash2.config_reader import ConfigReader, read_json
from mlx_dflash2.drafter import Drafter
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import FAMILIES, check_agreement
from mlx_dflash2.names import quantizable
from mlx_dflash2.sources import find_drafter, find_target
from mlx_dflash2.target import Target
from mlx_dflash2.target_files import read_llama_config

CONFIG = "config.json"
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SIZES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"),
    "num_attention_heads",
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings")
TABLES = ("embed_tokens", "codebook", "markov_w1")  # looked up, not multiplied


def random_target(
    name: str, *, dtype: str | None = None, seed: int = 0, **where: Any
) -> Target:
    """A llama target, quantized if its config says so.

    Args:
        name: A folder, a config.json or a Hub repository.
        dtype: None takes the config's, or bfloat16.
        where: `revision` and `offline` of `find_source`.

    Raises:
        DFlash2Error: The config is not of a llama target, or a size is none.
    """
    source, path = _find_config(find_target, name, **where)
    config = read_llama_config(path)
    _check_sizes(config, path)
    config.setdefault("tie_word_embeddings", False)
    try:
        model = Model(ModelArgs.from_dict(config))
        _randomize(model, _dtype(config, dtype, path), seed)
        _quantize_target(model, config, path)
        mx.eval(model.parameters())
    except (TypeError, ValueError, ZeroDivisionError, KeyError) as error:
        raise DFlash2Error(
            f"{path}: mlx-lm cannot build a llama model of it: {error}"
        ) from None
    return Target(model, config, source)


def random_drafter(
    name: str,
    target: Target,
    *,
    dtype: str | None = None,
    kind: str | None = None,
    seed: int = 0,
    **where: Any,
) -> Drafter:
    """A drafter for `target`, of the family its config describes.

    Args:
        kind: The family, where the config leaves it open; else it must agree.

    Raises:
        DFlash2Error: The config is incomplete, or does not fit the target.
    """
    source, path = _find_config(find_drafter, name, **where)
    raw = read_json(path)
    config = _family(raw, kind, path).from_dict(raw, where=str(path))
    check_fit(config, target, where=str(path), name=target.source.name)
    drafter = config.network("mlx_dflash2")(config, source=source)
    _randomize(drafter, _dtype(raw, dtype, path), seed)
    if config.quantization is not None:
        nn.quantize(
            drafter,
            **config.quantization,
            class_predicate=lambda name, m: (
                isinstance(m, nn.Linear) and quantizable(name)
            ),
        )
    mx.eval(drafter.parameters())
    return drafter


def _check_sizes(config: dict[str, Any], path: Path) -> None:
    read = ConfigReader(config, str(path))
    given = [name for name in OPTIONAL_SIZES if config.get(name) is not None]
    for name in (*SIZES, *given):
        read.integer(name)
    read.number("rms_norm_eps")


def _find_config(
    find: Callable[..., Source], name: str, **where: Any
) -> tuple[Source, Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return replace(find_source(path.parent, **where), name=name), path
    source = find(name, files=(CONFIG,), **where)
    return source, source.folder / CONFIG


def _family(raw: dict, kind: str | None, path: Path) -> type[DrafterConfig]:
    """The one family a config.json does not contradict."""
    fitting, refusals = [], []
    for family in FAMILIES:
        if kind in (None, family.kind):
            try:
                check_agreement(family, raw, where=str(path))
                fitting.append(family)
            except DFlash2Error as error:
                refusals.append(error)
    if not fitting:
        raise refusals[0]
    if len(fitting) > 1:
        raise DFlash2Error(
            f"{path}: architectures does not name a family; say which with --draft-kind"
        )
    return fitting[0]


def _dtype(raw: dict, asked: str | None, path: Path) -> mx.Dtype:
    name = asked or raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise DFlash2Error(f"{path}: dtype is {name!r}, expected {', '.join(DTYPES)}")
    return DTYPES[name]


def _randomize(model: nn.Module, dtype: mx.Dtype, seed: int) -> None:
    """Norms of one, tables of unit variance, matrices that keep their input's."""
    parameters = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), len(parameters))
    model.update(
        tree_unflatten(
            [
                (name, _draw(name, array.shape, dtype, key))
                for (name, array), key in zip(parameters, keys, strict=True)
            ]
        )
    )


def _draw(name: str, shape: Iterable[int], dtype: mx.Dtype, key: mx.array) -> mx.array:
    if len(shape) == 1:
        return mx.ones(shape, dtype)
    table = any(part in name for part in TABLES)
    scale = 1.0 if table else shape[-1] ** -0.5
    return mx.random.normal(shape, dtype, scale=scale, key=key)


def _quantize_target(model: Model, config: dict, path: Path) -> None:
    """By mlx-lm's rule: layers named in the settings have their own."""
    settings = config.get("quantization")
    if settings is None:
        if config.get("quantization_config") is not None:
            raise DFlash2Error(
                f"{path}: quantization_config without MLX's quantization; random "
                "weights can only be quantized as MLX does"
            )
        return
    own = {k: settings[k] for k in ("group_size", "bits", "mode") if k in settings}

    def rule(name: str, module: nn.Module) -> bool | dict:
        if not hasattr(module, "to_quantized"):
            return False
        fits = module.weight.shape[-1] % own["group_size"] == 0
        return settings.get(name, fits)

    nn.quantize(model, **own, class_predicate=rule)
