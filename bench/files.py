"""Files that appear whole, and never in the place of another."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from mlx_dflash2.checkpoint import refuse_existing
from mlx_dflash2.errors import DFlash2Error

STDOUT = "-"  # as the name of a file


def as_json(content: dict[str, Any]) -> str:
    """Indented JSON; a number that is none is an error of ours."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def refuse_unwritable(name: str) -> None:
    """Raise DFlash2Error for a file that exists or has no place to be."""
    path = Path(name)
    if not path.name or name == STDOUT:
        raise DFlash2Error(f"{name!r} is no name for a file")
    refuse_existing(path)
    if not path.parent.is_dir():
        raise DFlash2Error(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK):
        raise DFlash2Error(f"{path}: the folder {path.parent} cannot be written to")


def write_whole(path: Path, text: str, *, new: bool = True) -> None:
    """Write a file beside its place, then move it there.

    Args:
        new: Take the name only if nothing has it, not even since it was last looked.
    """
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if new:
            path.open("x").close()
        partial.replace(path)
    except FileExistsError:
        raise DFlash2Error(
            f"{path}: already exists, something else wrote it meanwhile"
        ) from None
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)
