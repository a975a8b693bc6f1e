"""A target's folder as mlx-lm should see it: nothing misread, no code."""

import logging
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import MODEL_REMAPPING, load_tokenizer

from .checkpoint import Source, StoredTensor, stored_tensors
from .config_fields import SLIDING
from .config_reader import read_json, without_code
from .errors import DFlash2Error
from .tokenizer_files import read_as_stored

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

logger = logging.getLogger("mlx_dflash2")


def read_target_config(source: Source) -> dict:
    """config.json with what mlx-lm would misread spelled out for it.

    Raises:
        DFlash2Error: It is not a llama model, contradicts itself or its tensors, or
            cannot be rolled back.
    """
    path = source.folder / "config.json"
    config = read_llama_config(path)
    stored = stored_tensors(source.folder)
    _check_depth(config, stored, path)
    _settle_tying(config, stored, path)
    return config


def read_llama_config(path: Path) -> dict:
    """A target's config.json by itself, with nothing mlx-lm would misread.

    Raises:
        DFlash2Error: It is not a llama model, or contradicts itself.
    """
    config = without_code(read_json(path), path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or MODEL_REMAPPING.get(kind, kind) != "llama":
        raise DFlash2Error(
            f"{path}: model_type is {kind!r}; only llama-type targets are supported"
        )
    _refuse_wrong_types(config, path)
    if SLIDING in (config.get("layer_types") or ()):
        raise DFlash2Error(
            f"{path}: layer_types has {SLIDING}, whose cache cannot be rolled back "
            "after a rejected draft; use a target with full attention in every layer"
        )
    _flatten_rope(config, path)
    return config


def _refuse_wrong_types(config: dict, path: Path) -> None:
    kinds = {
        "rope_parameters": dict,
        "rope_scaling": dict,
        "layer_types": list,
        "tie_word_embeddings": bool,
        "rope_theta": (int, float),
        "rope_traditional": bool,
    }
    for name, kind in kinds.items():
        value = config.get(name)
        wrong = kind == (int, float) and isinstance(value, bool)
        if value is not None and (wrong or not isinstance(value, kind)):
            named = getattr(kind, "__name__", "number")
            raise DFlash2Error(f"{path}: {name} is {value!r}, expected a {named}")


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
    if "rope_theta" not in config:
        logger.warning("%s: rope_theta is missing; 10000, llama's default", path)
    elif not 0 < config["rope_theta"] < 1e30:
        raise DFlash2Error(
            f"{path}: rope_theta is {config['rope_theta']}, expected a number above 0"
        )


def _check_depth(config: dict, stored: dict[str, StoredTensor], path: Path) -> None:
    """The files hold as many layers as config.json says."""
    numbers = [
        int(name.split(".")[2])
        for name in stored
        if name.startswith("model.layers.") and name.split(".")[2].isdecimal()
    ]
    layers = config.get("num_hidden_layers")
    if layers != max(numbers, default=-1) + 1:
        raise DFlash2Error(
            f"{path}: num_hidden_layers is {layers!r}, but the files hold "
            f"{max(numbers, default=-1) + 1} layers"
        )


def _settle_tying(config: dict, stored: dict[str, StoredTensor], path: Path) -> None:
    """Say whether the head is the embedding, and that the file agrees.

    mlx-lm takes a missing setting as true, and drops a stored head then.
    """
    if config.get("tie_word_embeddings") is None:
        config["tie_word_embeddings"] = HEAD not in stored
    if config["tie_word_embeddings"] and {HEAD, EMBEDDING} <= stored.keys():
        head, embedding = (
            mx.load(str(stored[name].file))[name] for name in (HEAD, EMBEDDING)
        )
        if head.shape != embedding.shape or not mx.array_equal(head, embedding).item():
            raise DFlash2Error(
                f"{path}: tie_word_embeddings is true, but the files hold a head that "
                "is not the embedding; set it to false"
            )


def read_tokenizer(source: Source, config: dict):
    """mlx-lm's wrapper of the tokenizer that the files describe."""
    load = partial(load_tokenizer, eos_token_ids=config.get("eos_token_id"))
    return read_as_stored(source, config, load)
