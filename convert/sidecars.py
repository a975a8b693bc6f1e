"""The files beside the weights: which travel along, and which stay behind."""

import shutil
from pathlib import Path

from mlx_dflash2.errors import DFlash2Error

TEXT = {".json", ".md", ".txt"}  # data and prose; nothing here can run code
LEGAL = ("license", "notice")
LEGAL_TEXT = {"", ".md", ".rst", ".html"}


def copy_sidecars(source: Path, destination: Path) -> tuple[str, ...]:
    """Copy model card, licence and result files byte for byte; return their names.

    Raises:
        DFlash2Error: A file is a link that leads nowhere.
    """
    names = sorted(path.name for path in source.iterdir() if _travels(path))
    for name in names:
        if not (source / name).exists():
            raise DFlash2Error(
                f"{source / name}: a link that leads nowhere; restore the file or "
                "remove the link"
            )
        shutil.copyfile(source / name, destination / name)
    return tuple(names)


def left_behind(source: Path, used: set[str]) -> tuple[str, ...]:
    """Names in `source` that a conversion neither reads nor copies.

    Args:
        source: The folder converted.
        used: Names of the weight files that were read.
    """
    return tuple(
        sorted(
            path.name + "/" * path.is_dir()
            for path in source.iterdir()
            if path.name not in used
            and not path.name.startswith(".")
            and not _is_rewritten(path.name)
            and not _travels(path)
        )
    )


def _travels(path: Path) -> bool:
    if path.is_dir() or path.name.startswith(".") or _is_rewritten(path.name):
        return False
    ending = path.suffix.lower()
    legal = path.name.lower().startswith(LEGAL)
    return ending in TEXT or (legal and ending in LEGAL_TEXT)


def _is_rewritten(name: str) -> bool:
    """Whether a file describes the weights, so that a copy would be wrong."""
    name = name.lower()
    return name == "config.json" or name.endswith(".index.json")
