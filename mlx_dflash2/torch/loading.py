"""load_target and load_drafter for PyTorch, and whether the two fit each other."""

import os

import torch
from torch import Tensor

from mlx_dflash2.checkpoint import Source, StoredTensor, stored_tensors
from mlx_dflash2.config import DrafterConfig, check_fit
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import BORROWED, check_tensors, published_names
from mlx_dflash2.sources import find_drafter, find_target

from .drafter import Drafter
from .target import Target

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_drafter(
    path_or_repo: str | os.PathLike,
    target: Target | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    kind: str | None = None,
) -> Drafter:
    """Load a drafter of any family from a folder or the Hub; its tensors tell which.

    Args:
        path_or_repo: A folder, a Hub repository, or `demo`.
        target: If given, the drafter must fit it.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only.
        dtype: None computes in the stored one, and in float32 where the file mixes
            dtypes or is float16, which a target's largest activations overflow.
        device: Where to put it.
        kind: The family that is expected, such as "dspark"; another is refused.

    Raises:
        DFlash2Error: The folder does not hold a drafter, not one of the expected
            family, or not one that fits the target.
    """
    source = find_drafter(path_or_repo, revision=revision, offline=offline)
    config = read_drafter_config(source.folder, kind=kind)
    if config.quantization is not None:
        raise DFlash2Error(
            f"{source.name}: the drafter is quantized by MLX, which PyTorch cannot "
            "read; first run `mlx-dflash2 convert --to-torch -d` on it"
        )
    if target is not None:
        name = target.model.config.name_or_path
        check_fit(config, target, where=source.name, name=name)
    weights = read_weights(source, config)
    with torch.device("meta"):
        drafter = config.network(__package__)(
            config,
            own_embedding=BORROWED[0] in weights,
            own_head=BORROWED[1] in weights,
            source=source,
        )
    if dtype is None:
        dtype = _common_dtype(weights)
    weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    drafter.load_state_dict(weights, assign=True)
    return drafter.eval()


def load_target(
    path_or_repo: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Target:
    """Load a llama target from a folder or the Hub, without running code of its own.

    Args:
        path_or_repo: A folder, a Hub repository, or `demo`.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only.
        dtype: None keeps the stored one; float32 where the file mixes several.
        device: Where to put it.

    Raises:
        DFlash2Error: The folder does not hold a complete llama model that can be
            rolled back.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    source = find_target(path_or_repo, revision=revision, offline=offline)
    raw = read_json(source.folder / "config.json")
    _check_target_config(raw, where=f"{source.name}/config.json")
    stored = stored_tensors(source.folder)
    _refuse_other_dtypes(stored, where=source.name)
    if raw.get("tie_word_embeddings") is None:
        raw["tie_word_embeddings"] = "lm_head.weight" not in stored
    model, info = LlamaForCausalLM.from_pretrained(
        source.folder,
        config=LlamaConfig.from_dict(raw),
        dtype=dtype or _stored_dtype(stored),
        local_files_only=True,
        use_safetensors=True,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    _refuse_incomplete(info, where=source.name)
    _check_rope(raw, model.config.rope_parameters, where=f"{source.name}/config.json")
    return Target(model.to(device), source)


def _check_target_config(raw: dict, *, where: str) -> None:
    if raw.get("model_type") != "llama":
        raise DFlash2Error(
            f"{where}: model_type is {raw.get('model_type')!r}; only llama targets are "
            "supported"
        )
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise DFlash2Error(
            f"{where}: layer_types has sliding_attention; such a target cannot be "
            "rolled back"
        )
    if raw.get("quantization") is not None:
        raise DFlash2Error(
            f"{where}: the target is quantized by MLX, which PyTorch cannot read; use "
            "the unquantized model"
        )


def _refuse_incomplete(info: dict, *, where: str) -> None:
    """Refuse a load that left weights out; `info` is transformers' report of it."""
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(
            name for name in map(str, info[kind]) if "rotary_emb." not in name
        )
        if names:
            raise DFlash2Error(
                f"{where}: {kind.replace('_keys', '')} tensors: "
                f"{', '.join(names[:4])}; not a complete llama model"
            )


def _check_rope(raw: dict, loaded: dict, *, where: str) -> None:
    """The rope base in use must be the one the file names, wherever it names it."""
    nested = raw.get("rope_parameters") or {}
    for place, base in (
        ("rope_theta", raw.get("rope_theta")),
        ("rope_parameters.rope_theta", nested.get("rope_theta")),
    ):
        if base is not None and base != loaded["rope_theta"]:
            raise DFlash2Error(
                f"{where}: {place} is {base}, but {loaded['rope_theta']} is in use; "
                "if config.json names two rope bases, keep the right one"
            )


def _refuse_other_dtypes(found: dict[str, StoredTensor], *, where: str) -> None:
    for name, tensor in found.items():
        if tensor.dtype not in FLOATS:
            raise DFlash2Error(
                f"{where}: {name} is stored as {tensor.dtype}, expected one of "
                f"{', '.join(sorted(FLOATS))}"
            )


def read_weights(source: Source, config: DrafterConfig) -> dict[str, Tensor]:
    """Every tensor of a drafter's files, checked, under its published name."""
    from safetensors import safe_open

    stored = stored_tensors(source.folder)
    mapping = published_names(stored, where=source.name)
    found = {published: stored[name] for name, published in mapping.items()}
    shapes = {name: tensor.shape for name, tensor in found.items()}
    check_tensors(shapes, config, where=source.name)
    _refuse_other_dtypes(found, where=source.name)
    weights = {}
    for file in sorted({tensor.file for tensor in found.values()}):
        with safe_open(file, framework="pt") as opened:
            weights |= {
                published: opened.get_tensor(name)
                for name, published in mapping.items()
                if stored[name].file == file
            }
    return weights


def _common_dtype(weights: dict[str, Tensor]) -> torch.dtype:
    """What a drafter computes in unless told otherwise."""
    dtypes = {tensor.dtype for tensor in weights.values()}
    return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32


def _stored_dtype(found: dict[str, StoredTensor]) -> torch.dtype:
    """The dtype of the tensors themselves, whatever config.json says."""
    names = {tensor.dtype for tensor in found.values()}
    return FLOATS[names.pop()] if len(names) == 1 else torch.float32
