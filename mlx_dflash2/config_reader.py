"""A model's JSON files, and fields that may stand in several places of one."""

import json
import logging
import math
from pathlib import Path
from typing import Any

from .errors import DFlash2Error

CODE_KEYS = ("auto_map", "model_file")  # name Python files to run; never followed
LARGEST = 3.4e38  # of float32

logger = logging.getLogger("mlx_dflash2")


def read_json(path: Path) -> dict:
    """Read a JSON object.

    Raises:
        DFlash2Error: The file is missing, unreadable or not a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DFlash2Error(f"{path}: no such file; is this a model folder?") from None
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DFlash2Error(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise DFlash2Error(
            f"{path}: expected a JSON object, found {type(raw).__name__}"
        )
    return raw


def warn_of_code(raw: dict, path: Path) -> None:
    """Say that a setting which names Python files is ignored."""
    for key in CODE_KEYS:
        if raw.get(key) is not None:
            logger.warning("%s: %s is ignored, no code of a model is run", path, key)


def without_code(raw: dict, path: Path) -> dict:
    """Settings without the keys that name Python files; a warning tells of each."""
    warn_of_code(raw, path)
    return {key: value for key, value in raw.items() if key not in CODE_KEYS}


class ConfigReader:
    """Looks a field up in several places and refuses places that disagree."""

    def __init__(self, raw: dict, where: str):
        self.raw, self.where = raw, where
        self.found: dict[str, None] = {}  # places that held a value, in order

    def fail(self, message: str) -> DFlash2Error:
        return DFlash2Error(f"{self.where}: {message}")

    def at(self, place: str):
        """The value at a dotted place; None where absent or null."""
        value = self.raw
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def find(self, *places: str) -> tuple[str, Any]:
        """The one value found and its place; None and the first place without one."""
        found = [(p, v) for p in places if (v := self.at(p)) is not None]
        self.found |= dict.fromkeys(place for place, _ in found)
        for place, value in found[1:]:
            first, known = found[0]
            if value != known:
                raise self.fail(
                    f"{first} is {known!r} but {place} is {value!r}; they name one "
                    "setting, keep the right one"
                )
        return found[0] if found else (places[0], None)

    def need(self, *places: str, default: Any = None) -> tuple[str, Any]:
        place, value = self.find(*places)
        if value is None:
            value = default
        if value is None:
            raise self.fail(
                f"{' or '.join(places)} is missing; it changes the result, so it has "
                "no default"
            )
        return place, value

    def integer(
        self, *places: str, minimum: int = 1, default: int | None = None
    ) -> int:
        place, value = self.need(*places, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(
                f"{place} is {value!r}, expected a whole number of at least {minimum}"
            )
        return value

    def number(
        self, *places: str, default: float | None = None, minimum: float = -math.inf
    ) -> float:
        place, value = self.need(*places, default=default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(f"{place} is {value!r}, expected a number")
        if not abs(value) <= LARGEST or value < minimum:
            least = f" of at least {minimum:g}" if math.isfinite(minimum) else ""
            raise self.fail(f"{place} is {value!r}, expected a finite number{least}")
        return float(value)

    def flag(self, *places: str, default: bool | None = None) -> bool | None:
        place, value = self.find(*places)
        if value is not None and not isinstance(value, bool):
            raise self.fail(f"{place} is {value!r}, expected true or false")
        return default if value is None else value

    def nested_integer(self, name: str) -> int:
        return self.integer(f"dflash_config.{name}", name)

    def nested_number(self, name: str, *, default: float) -> float:
        return self.number(f"dflash_config.{name}", name, default=default)
