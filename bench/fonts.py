"""Fonts for the labels of pictures, which may be in any script."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.ft2font import FT2Font

USUAL = "DejaVu Sans"  # comes with matplotlib
BOXES = "Last Resort"  # a box for every character


@dataclass(frozen=True)
class Fonts:
    """Families that together draw as many characters as can be drawn here.

    Attributes:
        missing: Characters that none of them has, and those that are no glyphs.
    """

    families: list[str]
    missing: set[str]

    def shown(self, text: str) -> str:
        """Text with its missing characters escaped, as `\\u4e2d`."""
        return "".join(
            each.encode("unicode_escape").decode() if each in self.missing else each
            for each in text
        )


def find_fonts(texts: Iterable[str]) -> Fonts:
    """matplotlib's own font, and installed ones for the characters it lacks."""
    characters = set("".join(texts))
    missing = {each for each in characters if each.isprintable()}
    unprintable, families = characters - missing, [USUAL]
    for family, font in _installed():
        if not missing:
            break
        drawn = {each for each in missing if font.get_char_index(ord(each))}
        missing -= drawn
        if drawn and family not in families:
            families.append(family)
    return Fonts(families, missing | unprintable)


def _installed() -> Iterator[tuple[str, "FT2Font"]]:
    """Upright fonts by their family, matplotlib's own before all others."""
    from matplotlib.font_manager import findfont, fontManager, get_font

    yield USUAL, get_font(findfont(USUAL))
    for entry in fontManager.ttflist:
        if entry.style != "normal" or BOXES in entry.name:
            continue
        try:
            font = get_font(entry.fname)
        except (OSError, RuntimeError):
            continue  # listed once and gone since, or of a kind that cannot be read
        if font.scalable:
            yield entry.name, font
