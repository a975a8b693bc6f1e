"""A saved report as its dataclasses, every field, number and index of it checked."""

import json
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from mlx_dflash2.errors import DFlash2Error

from .damage import Damage, damaged_arms, damaged_prompts, damaged_results, wild_numbers
from .record import Record
from .report import Report


def record_from(content: dict[str, Any]) -> Record:
    """The record that `Record.as_dict` wrote.

    Raises:
        DFlash2Error: It is damaged; says where, and what is wrong there.
    """
    record = _rebuild(Record, content)
    _refuse(damaged_arms(record))
    _refuse(damaged_prompts(record))
    return record


def report_from(content: dict[str, Any]) -> Report:
    """A report, or its summary, as JSON holds it.

    Raises:
        DFlash2Error: It is damaged; says where, and what is wrong there.
    """
    report = _rebuild(Report, content)
    _refuse(damaged_arms(report))
    _refuse(damaged_results(report))
    return report


@cache
def _adapter(kind: type) -> TypeAdapter:
    return TypeAdapter(kind)


def _rebuild(kind: type, content: dict[str, Any]) -> Any:
    """A dataclass from what `asdict` made of it; what is not its own is left out."""
    missing = [field.name for field in fields(kind) if field.name not in content]
    _refuse(((name,), "field required") for name in missing)
    _refuse(wild_numbers(content))
    try:
        return _adapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        _refuse(_told(error))


def _told(error: ValidationError) -> Iterable[Damage]:
    for each in error.errors():
        what = each["msg"].removeprefix("Value error, ")
        if not isinstance(each["input"], dict | list):
            what += f", found {json.dumps(each['input'])[:40]}"
        yield each["loc"], what[0].lower() + what[1:]


def _refuse(damages: Iterable[Damage]) -> None:
    """Raise DFlash2Error for the first damage."""
    for place, what in damages:
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
        where = "".join(parts).removeprefix(".")
        raise DFlash2Error(f"the report is damaged: {where}: {what}")
