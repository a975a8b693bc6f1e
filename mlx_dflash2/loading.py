"""Load a target and a drafter, and see that they fit."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.utils import load_model

from .checkpoint import Source, StoredTensor, stored_tensors
from .config import DrafterConfig, check_fit
from .config_reader import read_json, warn_of_code
from .drafter import Drafter
from .errors import DFlash2Error
from .families import read_drafter_config
from .names import check_tensors, published_names, quantizable
from .sources import find_drafter, find_target
from .target import Target
from .target_files import read_target_config, read_tokenizer


def load_target(
    path_or_repo, *, revision: str | None = None, offline: bool = False
) -> tuple[Target, object]:
    """Load an mlx-lm llama model and its tokenizer.

    Args:
        path_or_repo: A folder or a Hub repository, quantized by mlx-lm or not; or
            `demo`.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only.

    Returns:
        The target and mlx-lm's tokenizer wrapper.

    Raises:
        DFlash2Error: It cannot be found, is not a llama model, is incomplete, or its
            cache cannot be rolled back.
    """
    source = find_target(path_or_repo, revision=revision, offline=offline)
    config = read_target_config(source)
    model, config = _load_model(source, config)
    _check_target(model, config, source)
    _compute_tables(model)
    return Target(model, config, source), read_tokenizer(source, config)


def _load_model(source: Source, config: dict) -> tuple[nn.Module, dict]:
    """Load through mlx-lm from a view of the folder without stale files or code."""
    shards = sorted({tensor.file for tensor in stored_tensors(source.folder).values()})
    with tempfile.TemporaryDirectory(prefix="mlx-dflash2-") as temporary:
        view = Path(temporary)
        (view / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for number, shard in enumerate(shards):
            (view / f"model-{number:05}.safetensors").symlink_to(shard.resolve())
        for name in ("generation_config.json", "hf_quant_config.json"):
            if (source.folder / name).exists():
                read_json(source.folder / name)
                (view / name).symlink_to((source.folder / name).resolve())
        try:
            return load_model(view)
        except Exception as error:  # a wrong value in config.json may raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise DFlash2Error(
                f"{source.name}: mlx-lm cannot load it as a llama model: {reason}"
            ) from error


def _compute_tables(model: nn.Module) -> None:
    """Evaluate what is no parameter, such as rope frequencies.

    Left for the first forward, it could be computed in the loading thread only.
    """
    held = (value for module in model.modules() for value in module.values())
    mx.eval([value for value in held if isinstance(value, mx.array)])


def _check_target(model: nn.Module, config: dict, source: Source) -> None:
    """Hold the loaded model against its file where mlx-lm has silent defaults."""
    if not isinstance(model, llama.Model):
        raise DFlash2Error(f"{source.name}: not one of mlx-lm's llama models")
    rope = model.layers[0].self_attn.rope
    theta = config.get("rope_theta")
    if isinstance(rope, nn.RoPE) and theta is not None and rope.base != theta:
        raise DFlash2Error(
            f"{source.name}: mlx-lm uses rope base {rope.base}, the file says {theta}"
        )
    if ("lm_head" in model) == bool(config["tie_word_embeddings"]):
        raise DFlash2Error(
            f"{source.name}: tie_word_embeddings is {config['tie_word_embeddings']}, "
            "but mlx-lm built the model the other way"
        )


def load_drafter(
    path_or_repo,
    target: Target,
    *,
    revision: str | None = None,
    offline: bool = False,
    bits: int | None = None,
    kind: str | None = None,
) -> Drafter:
    """Load a drafter of any family for a target; its tensors tell which.

    It computes in the dtype it is stored in; a file that mixes dtypes or is float16,
    which the target's largest activations overflow, computes in float32.

    Args:
        path_or_repo: A folder or a Hub repository, in any known spelling; or `demo`.
        bits: Quantize the backbone's linear layers to 4 or 8 bits (groups of 64).
        kind: The family that is expected, such as "dspark"; another is refused.

    Raises:
        DFlash2Error: It cannot be found, is of no known family or not of the expected
            one, is incomplete, or does not fit the target.
    """
    source = find_drafter(path_or_repo, revision=revision, offline=offline)
    path = source.folder / "config.json"
    warn_of_code(read_json(path), path)
    stored = stored_tensors(source.folder)
    names = published_names(stored, where=source.name)
    config = read_drafter_config(source.folder, kind=kind, tensors=names.values())
    check_fit(config, target, where=str(path), name=target.source.name)
    weights = _read_weights(source, stored, names, config)
    drafter = config.network(__package__)(
        config,
        own_embedding="embed_tokens.weight" in weights,
        own_head="lm_head.weight" in weights,
        source=source,
    )
    if config.quantization is not None:
        nn.quantize(
            drafter,
            **config.quantization,
            class_predicate=lambda name, _: f"{name}.scales" in weights,
        )
        if not any(name.endswith(".scales") for name in weights):
            raise DFlash2Error(
                f"{path}: has quantization, but no tensor is quantized; remove it"
            )
    drafter.load_weights(list(weights.items()), strict=True)
    _refuse_broken(weights, source)
    if bits is not None:
        _quantize(drafter, bits, source)
    mx.eval(drafter.parameters())
    return drafter


def _refuse_broken(weights: dict[str, mx.array], source: Source) -> None:
    """Raise DFlash2Error for a tensor that holds infinities or no numbers."""
    for name, array in weights.items():
        if array.dtype != mx.uint32 and not mx.isfinite(array).all().item():
            raise DFlash2Error(
                f"{source.name}: {name} holds values that are not finite; the file is "
                "damaged or its training failed"
            )


def _read_weights(
    source: Source,
    stored: dict[str, StoredTensor],
    published: dict[str, str],
    config: DrafterConfig,
) -> dict[str, mx.array]:
    """Every tensor by published name, in one dtype to compute in."""
    shapes = {new: stored[old].shape for old, new in published.items()}
    check_tensors(shapes, config, where=source.name)
    weights = {}
    for file in sorted({stored[name].file for name in published}):
        arrays = mx.load(str(file))
        weights |= {
            published[name]: arrays[name] for name in arrays if name in published
        }
    dtypes = {array.dtype for array in weights.values()} - {mx.uint32}
    unknown = dtypes - {mx.float32, mx.float16, mx.bfloat16}
    if unknown:
        raise DFlash2Error(
            f"{source.name}: tensors of type {unknown.pop()}; expected float32, "
            "float16 or bfloat16"
        )
    if dtypes in ({mx.float32}, {mx.bfloat16}):
        return weights
    return {
        name: array if array.dtype == mx.uint32 else array.astype(mx.float32)
        for name, array in weights.items()
    }


def _quantize(drafter: Drafter, bits: int, source: Source) -> None:
    if drafter.config.quantization is not None:
        raise DFlash2Error(
            f"{source.name}: already quantized to "
            f"{drafter.config.quantization['bits']} bits; leave out the draft bits"
        )
    if bits not in (4, 8):
        raise DFlash2Error(f"draft bits is {bits}, expected 4 or 8")
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear) and quantizable(name):
            if module.weight.shape[1] % 64:
                raise DFlash2Error(
                    f"{source.name}: {name} has {module.weight.shape[1]} columns, "
                    "which groups of 64 do not divide; convert it with "
                    "-q --q-group-size 32"
                )
    settings = {"group_size": 64, "bits": bits}
    nn.quantize(
        drafter,
        **settings,
        class_predicate=lambda name, m: isinstance(m, nn.Linear) and quantizable(name),
    )
    drafter.config = replace(drafter.config, quantization=settings)
