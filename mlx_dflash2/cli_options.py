"""Options and types of options that several commands share."""

import json
from collections.abc import Callable
from typing import TypeVar

import click

from .families import FAMILIES

TARGET = "openbmb/MiniCPM5-2B"
ABOVE_ZERO = click.FloatRange(min=0, min_open=True)
Command = TypeVar("Command", bound=Callable)


class JSONObject(click.ParamType):
    """A JSON object on the command line."""

    name = "json"

    def convert(self, value, param, context) -> dict:
        if isinstance(value, dict):
            return value
        try:
            parsed = json.loads(value)
        except ValueError as error:
            self.fail(f"not valid JSON ({error})", param, context)
        if not isinstance(parsed, dict):
            self.fail(f"expected a JSON object, found {value!r}", param, context)
        return parsed


class TokenBias(JSONObject):
    """A JSON object of token ids to numbers."""

    def convert(self, value, param, context) -> dict[int, float]:
        parsed = super().convert(value, param, context)
        try:
            return {int(token): float(bias) for token, bias in parsed.items()}
        except (TypeError, ValueError):
            self.fail('expected token ids and numbers, as {"42": -5}', param, context)


class Numbers(click.ParamType):
    """Whole numbers with commas between them, none given twice."""

    name = "numbers"

    def __init__(self, minimum: int):
        self.minimum = minimum

    def convert(self, value, param, context) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: expected whole numbers, as 2,4,8", param, context)
        if min(numbers) < self.minimum:
            found = f"{min(numbers)} is too small, expected at least {self.minimum}"
            self.fail(found, param, context)
        if len(set(numbers)) < len(numbers):
            self.fail(f"{value!r} names a number twice", param, context)
        return numbers


def pair_options(drafter: str | None = "auto") -> Callable[[Command], Command]:
    """A decorator for the options that name a target and its drafter.

    Args:
        drafter: The default; None for a command that works without one.
    """
    named = "Folder, Hub id or demo; auto takes the strongest known for the target."
    options = [
        click.option(
            "--model",
            "--target",
            default=TARGET,
            show_default=True,
            help="Folder or Hub id of the target, or demo.",
        ),
        click.option(
            "--draft-model",
            "--drafter",
            default=drafter,
            show_default=True,
            help=named,
        ),
        click.option(
            "--draft-kind",
            type=click.Choice([family.kind for family in FAMILIES]),
            help="The family you expect; another is an error.",
        ),
        click.option("--revision", help="The target's branch, tag or commit."),
        click.option("--draft-revision", help="The drafter's."),
        click.option("--offline", is_flag=True, help="Open no connection."),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate
