"""Tables of settings: read, merged, and turned into dataclasses with typed fields."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from mlx_dflash2.errors import DFlash2Error


def read_table(path: Path) -> dict:
    """The settings of a TOML file, or of a JSON file by its ending.

    Raises:
        DFlash2Error: It cannot be read or parsed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        parse = json.loads if path.suffix == ".json" else tomllib.loads
        raw = parse(text)
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # both parsers' errors are
        raise DFlash2Error(f"{path}: cannot be parsed ({error})") from None
    if not isinstance(raw, dict):
        raise DFlash2Error(f"{path}: expected a table of settings")
    return raw


def read_flag(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` of the command line, the value as TOML has it or as plain text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise DFlash2Error(f"{text!r}: expected NAME=VALUE, as optimizer.lr=3e-4")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def flat(tree: Mapping[str, Any], stem: str = "") -> dict[str, Any]:
    """Nested tables as one, by dotted name; tuples as lists, as files have them."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{stem}{name}.")
        else:
            found[f"{stem}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def merged(base: Mapping, changes: Mapping) -> dict:
    """`changes` over `base`, table by table."""
    done = dict(base)
    for name, value in changes.items():
        known = done.get(name)
        both = isinstance(value, Mapping) and isinstance(known, Mapping)
        done[name] = merged(known, value) if both else value
    return done


def build(cls: type, raw: Any, where: str, stem: str) -> Any:
    """A dataclass of a parsed table; `stem` is its place with a dot at the end."""
    if not isinstance(raw, Mapping):
        raise DFlash2Error(f"{where}: {stem[:-1]} is {raw!r}, expected a table")
    known = {item.name for item in fields(cls)}
    for name in raw:
        if name not in known:
            raise DFlash2Error(
                f"{where}: {stem}{name} is no setting; known are "
                f"{', '.join(sorted(known))}"
            )
    hints = get_type_hints(cls)
    values = {}
    for name, value in raw.items():
        if is_dataclass(hints[name]):
            values[name] = build(hints[name], value, where, f"{stem}{name}.")
        else:
            values[name] = _typed(value, hints[name], f"{where}: {stem}{name}")
    return cls(**values)


def _typed(value: Any, hint: Any, place: str) -> Any:
    """The value as the type of its field, or an error that says what was expected."""
    optional = [part for part in get_args(hint) if part is not NoneType]
    if NoneType in get_args(hint):
        return None if value is None else _typed(value, optional[0], place)
    if getattr(hint, "__origin__", None) is tuple:
        if not isinstance(value, list | tuple):
            raise wrong(place, value, "a list")
        return tuple(_typed(item, optional[0], place) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        names = {int: "a whole number", float: "a number", bool: "true or false"}
        raise wrong(place, value, names.get(hint, "text"))
    return value


def wrong(place: str, found: Any, expected: str) -> DFlash2Error:
    """What a value is and should have been, to be raised."""
    return DFlash2Error(f"{place} is {found!r}, expected {expected}")


def at_least(place: str, found: float, least: int) -> None:
    """Raise DFlash2Error where a value is too small."""
    if found < least:
        raise wrong(place, found, f"{least} or more")


def one_of(place: str, found: Any, known: tuple[str, ...]) -> None:
    """Raise DFlash2Error where a value is not among those known."""
    if found not in known:
        raise wrong(place, found, f"one of {', '.join(known)}")
