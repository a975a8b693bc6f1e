"""Headings, lines and grids, as aligned text or as markdown."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """The title, at level 1, that of a section, or that of a grid."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Lines:
    """Sentences, one a line."""

    lines: list[str]


@dataclass(frozen=True)
class Grid:
    """Cells under a header; the first column names the row."""

    header: list[str]
    rows: list[list[str]]


Block = Heading | Lines | Grid


def as_text(blocks: Iterable[Block]) -> str:
    """Blocks with an empty line between them, for a terminal."""
    return "\n\n".join(_text(block) for block in blocks) + "\n"


def as_markdown(blocks: Iterable[Block]) -> str:
    """The same as GitHub renders it."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _text(block: Block) -> str:
    match block:
        case Heading(text, 3):
            return f"{text}:"
        case Heading(text, level):
            return f"{text}\n{'=-'[level - 1] * len(text)}"
        case Lines(lines):
            return "\n".join(lines)
        case Grid(header, rows):
            table = [header, *rows]
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            return "\n".join(_aligned(row, widths) for row in table)


def _aligned(row: list[str], widths: list[int]) -> str:
    """Names to the left, numbers to the right."""
    cells = [row[0].ljust(widths[0])]
    cells += [
        cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
    ]
    return "  ".join(cells).rstrip()


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {text}"
        case Lines(lines):
            return "\n".join(f"- {line}" for line in lines)
        case Grid(header, rows):
            rule = ["---", *["---:"] * (len(header) - 1)]
            return "\n".join(_pipes(row) for row in (header, rule, *rows))


def _pipes(row: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
