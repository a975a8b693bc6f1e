"""The drafter families, told apart by their tensors."""

from collections.abc import Iterable
from pathlib import Path

from ..checkpoint import stored_tensors
from ..config import DrafterConfig, read_json
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
    """Refuse a config.json that names another family than its tensors show.

    `projector_type` refines an architecture that only says DFlash.
    """
    nested = raw.get("dflash_config")
    projector = nested.get("projector_type") if isinstance(nested, dict) else None
    if projector not in (None, family.kind):
        raise DFlash2Error(
            f"{where}: dflash_config.projector_type is {projector!r}, but the tensors "
            f"are those of {family.title}"
        )
    names = raw.get("architectures") or []
    for name in names if isinstance(names, list) else [names]:
        claimed = [other for other in FAMILIES if other.claims(str(name))]
        if projector is not None and PLAIN in claimed:
            continue
        if family not in claimed:
            said = claimed[0].title if claimed else "no family known here"
            raise DFlash2Error(
                f"{where}: architectures names {name} ({said}), but the tensors are "
                f"those of {family.title}"
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
