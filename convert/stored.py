"""A drafter's folder, opened for conversion: every tensor accounted for."""

from dataclasses import dataclass

from mlx_dflash2.checkpoint import Source, StoredTensor, stored_tensors
from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import check_tensors, published_names

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter on disk whose names, shapes and types have been checked.

    Attributes:
        source: Where it lies and how the user named it.
        raw: Its config.json as it is written there.
        config: The same, read.
        tensors: Where each tensor lies, by published name.
        spelled: Each tensor's name in its own file, by published name.
        left_out: Stored names that carry nothing: rotary buffers.
    """

    source: Source
    raw: dict
    config: DrafterConfig
    tensors: dict[str, StoredTensor]
    spelled: dict[str, str]
    left_out: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        """The tensors, with a quantized weight's scales and biases left to it."""
        return [name for name in self.tensors if name not in self._companions]

    @property
    def is_quantized(self) -> bool:
        return bool(self._companions)

    @property
    def _companions(self) -> set[str]:
        weights = [name for name in self.tensors if self.holds_quantized(name)]
        return {part for name in weights for part in parts(name)[1:]}

    def holds_quantized(self, name: str) -> bool:
        """Whether `name` is a weight stored with scales and biases."""
        return parts(name)[1] in self.tensors

    def dtype_of(self, name: str) -> str:
        """The floating type of `name`; of its scales where it is quantized."""
        part = parts(name)[1] if self.holds_quantized(name) else name
        return FLOATS[self.tensors[part].dtype]


def parts(name: str) -> tuple[str, str, str]:
    """The three tensors of a quantized weight: itself, scales, biases."""
    stem = name.removesuffix("weight")
    return name, f"{stem}scales", f"{stem}biases"


def read_drafter(source: Source) -> StoredDrafter:
    """Open a drafter's folder and hold its tensors against its config.

    Raises:
        DFlash2Error: It is not a drafter, or a tensor is missing, unknown,
            of another shape or of a type that cannot be carried over.
    """
    path = source.folder / "config.json"
    raw = read_json(path)
    _refuse_target(raw, source.name)
    stored = stored_tensors(source.folder)
    names = published_names(stored, where=source.name)
    config = read_drafter_config(source.folder, tensors=names.values())
    tensors = {names[name]: stored[name] for name in names}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    check_tensors(shapes, config, where=source.name)
    spelled = {published: name for name, published in names.items()}
    left_out = tuple(sorted(stored.keys() - names.keys()))
    drafter = StoredDrafter(source, raw, config, tensors, spelled, left_out)
    _check_types(drafter)
    return drafter


def _refuse_target(raw: dict, where: str) -> None:
    names = raw.get("architectures") or []
    names = [names] if isinstance(names, str) else [str(name) for name in names]
    drafts = raw.get("dflash_config") or raw.get("target_layer_ids")
    if drafts or any("dflash" in name.lower() for name in names):
        return
    causal = [name for name in names if name.endswith("ForCausalLM")]
    if causal or (not names and raw.get("model_type") == "llama"):
        raise DFlash2Error(
            f"{where}: this is a target ({(causal or ['llama'])[0]}), not a drafter; "
            "mlx-lm loads it as it is, so there is nothing to convert"
        )


def _check_types(drafter: StoredDrafter) -> None:
    for name, tensor in drafter.tensors.items():
        packed = drafter.holds_quantized(name)
        if tensor.dtype not in ({"U32"} if packed else FLOATS):
            raise DFlash2Error(
                f"{tensor.file}: {drafter.spelled[name]} is stored as {tensor.dtype}, "
                f"expected {'U32' if packed else ', '.join(FLOATS)}; convert an export "
                "that holds one of these types"
            )
