"""The drafter families, told apart by their tensors."""

from collections.abc import Iterable
from pathlib import Path

from ..checkpoint import stored_tensors
from ..config import DrafterConfig
from ..config_reader import ConfigReader, read_json
from ..errors import DFlash2Error
from ..names import published_names
from .dflash import DFlashConfig
from .dflash2 import DFlash2Config
from .dspark import DSparkConfig

FAMILIES: tuple[type[DrafterConfig], ...] = (DFlash2Config, DFlashConfig, DSparkConfig)
PLAIN = DFlashConfig  # the backbone alone


def family_of(tensors: Iterable[str], *, where: str) -> type[DrafterConfig]:
    """The family whose tensors these are.

    Args:
        tensors: Published names.

    Raises:
        DFlash2Error: Tensors of two families, or of none that is known.
    """
    tensors = list(tensors)
    owners: dict[type[DrafterConfig], str] = {}
    for family in FAMILIES:
        owned = next((name for name in tensors if family.owns(name)), None)
        if owned is not None:
            owners[family] = owned
    if len(owners) > 1:
        said = " and ".join(f"{n} of {f.title}" for f, n in owners.items())
        raise DFlash2Error(f"{where}: holds {said}; a drafter is of one family")
    return next(iter(owners), PLAIN)


def check_agreement(family: type[DrafterConfig], raw: dict, *, where: str) -> None:
    """Refuse a config.json that describes another family than its tensors show.

    `projector_type` refines an architecture that only says DFlash.

    Raises:
        DFlash2Error: An architecture, a projector type or a setting is another
            family's, or the schema is none that is known.
    """
    read, tensors = ConfigReader(raw, where), f"the tensors are those of {family.title}"
    if read.at("transformer_layer_config") or read.at("speculators_config"):
        raise read.fail("the speculators schema is not supported; export in z-lab's")
    place, projector = read.find("dflash_config.projector_type", "projector_type")
    if projector not in (None, family.kind):
        raise read.fail(f"{place} is {projector!r}, but {tensors}; it is not supported")
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        claimed = [other for other in FAMILIES if other.claims(str(name))]
        if projector is not None and PLAIN in claimed:
            continue
        if family not in claimed:
            said = claimed[0].title if claimed else "no family known here"
            if not claimed and str(name).endswith("ForCausalLM"):
                said += ", is it a target?"
            raise read.fail(f"architectures names {name} ({said}), but {tensors}")
    for other in FAMILIES:
        if other is not family:
            _refuse_settings(other, read, tensors)


def _refuse_settings(
    other: type[DrafterConfig], read: ConfigReader, tensors: str
) -> None:
    """Refuse the settings of another family, unless they are switched off."""
    for name in other.own_settings:
        for place in (name, f"dflash_config.{name}", f"dspark_config.{name}"):
            if read.at(place):
                raise read.fail(
                    f"{place} is {read.at(place)!r}, which belongs to {other.title}, "
                    f"but {tensors}"
                )


def read_drafter_config(
    folder: Path, *, kind: str | None = None, tensors: Iterable[str] | None = None
) -> DrafterConfig:
    """Read `folder/config.json` as the family its tensors show.

    Args:
        kind: The family that is expected; any if None.
        tensors: Published names, if they are known already.

    Raises:
        DFlash2Error: A field is missing, contradictory or not supported, or the
            family is not the expected one.
    """
    known = [family.kind for family in FAMILIES]
    if kind is not None and kind not in known:
        raise DFlash2Error(f"kind is {kind!r}, expected one of {', '.join(known)}")
    path = Path(folder) / "config.json"
    raw = read_json(path)
    if tensors is None:
        stored = stored_tensors(Path(folder))
        tensors = published_names(stored, where=str(folder)).values()
    family = family_of(tensors, where=str(folder))
    if kind is not None and kind != family.kind:
        raise DFlash2Error(
            f"{folder}: is a {family.title} drafter ({family.kind}), but {kind} was "
            "expected"
        )
    check_agreement(family, raw, where=str(path))
    return family.from_dict(raw, where=str(path))
