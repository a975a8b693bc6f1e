"""Load a target and a drafter, and see that they fit."""

import json
import logging
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.utils import MODEL_REMAPPING, load_model, load_tokenizer
from tokenizers import Tokenizer

from .checkpoint import (
    TARGET_FILES,
    Source,
    StoredTensor,
    find_source,
    stored_tensors,
)
from .config import CODE_KEYS, SLIDING, DrafterConfig, check_fit, read_json
from .drafter import Drafter
from .errors import DFlash2Error
from .families import read_drafter_config
from .names import check_tensors, published_names, quantizable
from .target import Target

TOKENIZER_CONFIG = "tokenizer_config.json"

logger = logging.getLogger("mlx_dflash2")


def load_target(
    path_or_repo, *, revision: str | None = None, offline: bool = False
) -> tuple[Target, object]:
    """Load an mlx-lm llama model and its tokenizer.

    Args:
        path_or_repo: A folder or a Hub repository, quantized by mlx-lm or not.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only.

    Returns:
        The target and mlx-lm's tokenizer wrapper.

    Raises:
        DFlash2Error: It cannot be found, is not a llama model, is incomplete, or its
            cache cannot be rolled back.
    """
    source = find_source(
        path_or_repo, revision=revision, offline=offline, files=TARGET_FILES
    )
    config = _target_config(source)
    model, config = _load_model(source, config)
    _check_target(model, config, source)
    _compute_tables(model)
    return Target(model, config, source), _load_tokenizer(source, config)


def _target_config(source: Source) -> dict:
    """config.json with what mlx-lm would misread spelled out for it."""
    path = source.folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    if MODEL_REMAPPING.get(kind, kind) != "llama":
        raise DFlash2Error(
            f"{path}: model_type is {kind!r}; only llama-type targets are supported"
        )
    for key in CODE_KEYS:
        if config.pop(key, None) is not None:
            logger.warning("%s: %s is ignored, no code of a model is run", path, key)
    if SLIDING in (config.get("layer_types") or ()):
        raise DFlash2Error(
            f"{path}: layer_types has {SLIDING}, whose cache cannot be rolled back "
            "after a rejected draft; use a target with full attention in every layer"
        )
    _flatten_rope(config, path)
    if config.get("tie_word_embeddings") is None:
        stored = stored_tensors(source.folder)
        config["tie_word_embeddings"] = "lm_head.weight" not in stored
    return config


def _flatten_rope(config: dict, path: Path) -> None:
    """Put what stands under rope_parameters where mlx-lm looks for it."""
    if config.get("rope_theta") is None:
        config.pop("rope_theta", None)
    nested = config.get("rope_parameters") or {}
    theta = nested.get("rope_theta")
    if theta is not None and config.setdefault("rope_theta", theta) != theta:
        raise DFlash2Error(
            f"{path}: rope_theta is {config['rope_theta']} but "
            f"rope_parameters.rope_theta is {theta}; keep the right one"
        )
    if nested.get("rope_type", "default") != "default":
        config["rope_scaling"] = config.get("rope_scaling") or nested


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
                (view / name).symlink_to((source.folder / name).resolve())
        try:
            return load_model(view)
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:300]
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
    if ("lm_head" in model) == config["tie_word_embeddings"]:
        raise DFlash2Error(
            f"{source.name}: tie_word_embeddings is {config['tie_word_embeddings']}, "
            "but mlx-lm built the model the other way"
        )


def _load_tokenizer(source: Source, config: dict):
    """Load through mlx-lm, from a view of the folder without code.

    The class that transformers picks may replace what tokenizer.json says: a llama
    class loses the spaces of a byte-level file. The file is then read as it is.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-dflash2-") as temporary:
        view = Path(temporary)
        for path in source.folder.iterdir():
            if path.suffix != ".py" and path.name != TOKENIZER_CONFIG:
                (view / path.name).symlink_to(path.resolve())
        settings = _tokenizer_settings(source)
        try:
            tokenizer = _read_tokenizer(view, settings, config)
            if _loses_text(tokenizer, view / "tokenizer.json"):
                settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
                tokenizer = _read_tokenizer(view, settings, config)
        except Exception as error:  # of any type: a library in Rust raises plain ones
            reason = " ".join(str(error).split())[:300]
            raise DFlash2Error(
                f"{source.name}: its tokenizer cannot be loaded: {reason}"
            ) from error
    return tokenizer


def _tokenizer_settings(source: Source) -> dict:
    path = source.folder / TOKENIZER_CONFIG
    settings = read_json(path) if path.exists() else {}
    for key in CODE_KEYS:
        if settings.pop(key, None) is not None:
            logger.warning("%s: %s is ignored, no code of a model is run", path, key)
    return settings


def _read_tokenizer(view: Path, settings: dict, config: dict):
    content = json.dumps(settings)
    (view / TOKENIZER_CONFIG).write_text(content, encoding="utf-8")
    return load_tokenizer(view, eos_token_ids=config.get("eos_token_id"))


def _loses_text(tokenizer, file: Path) -> bool:
    """Whether a text survives the tokenizer of `file`, but not the loaded one."""
    if not file.exists():
        return False
    text = "a b  c\n\td"
    plain = Tokenizer.from_file(str(file))
    kept = plain.decode(plain.encode(text, add_special_tokens=False).ids)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return kept == text != tokenizer.decode(ids)


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
        path_or_repo: A folder or a Hub repository, in any known spelling.
        bits: Quantize the backbone's linear layers to 4 or 8 bits (groups of 64).
        kind: The family that is expected, such as "dspark"; another is refused.

    Raises:
        DFlash2Error: It cannot be found, is of no known family or not of the expected
            one, is incomplete, or does not fit the target.
    """
    source = find_source(path_or_repo, revision=revision, offline=offline)
    path = source.folder / "config.json"
    raw = read_json(path)
    for key in CODE_KEYS:
        if raw.get(key) is not None:
            logger.warning("%s: %s is ignored, no code of a model is run", path, key)
    stored = stored_tensors(source.folder)
    names = published_names(stored, where=source.name)
    config = read_drafter_config(source.folder, kind=kind, tensors=names.values())
    check_fit(
        config,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        where=str(path),
        target=target.source.name,
    )
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
    drafter.load_weights(list(weights.items()), strict=True)
    if bits is not None:
        _quantize(drafter, bits, source)
    mx.eval(drafter.parameters())
    return drafter


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
    nn.quantize(
        drafter,
        group_size=64,
        bits=bits,
        class_predicate=lambda name, m: isinstance(m, nn.Linear) and quantizable(name),
    )
