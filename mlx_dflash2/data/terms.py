"""SOURCE_TERMS.md: what the texts come from, and what that asks of the weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from .recipes import is_non_commercial

HEAD = """\
# Source terms

What the training text was made from, and what its licences ask of weights trained on
it. Obligations are from memory of the data sets' cards; before publishing weights,
check each card at the revision named here. Nothing here is legal advice.

| source | revision | licence | the card says | obligations | effect on weights |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class SourceTerms:
    """One source of text.

    Attributes:
        name: A repository, or the name of a file.
        revision: A commit, or a file's sha256.
        obligations: What its licence asks for.
        effect: On the licence of weights trained on it.
        licence: As it is known to us; None if it is not.
        card_licence: As the Hub's card states it at that revision; None without one.
        card_sha256: Of the card's text.
    """

    name: str
    revision: str
    obligations: str
    effect: str
    licence: str | None = None
    card_licence: str | None = None
    card_sha256: str | None = None

    def warnings(self) -> list[str]:
        """What the user should know before publishing weights."""
        found = []
        licences = {self.licence, self.card_licence} - {None}
        for licence in sorted(filter(is_non_commercial, licences)):
            found.append(
                f"{self.name}: licence {licence} bars commercial use; weights trained "
                "on it are for research and non-commercial use"
            )
        if self.licence and self.card_licence:
            known, stated = _plain(self.licence), _plain(self.card_licence)
            if not (known.startswith(stated) or stated.startswith(known)):
                found.append(
                    f"{self.name}: its card says the licence is {self.card_licence}, "
                    f"the recipe says {self.licence}; check the card"
                )
        return found


def terms_text(sources: Sequence[SourceTerms]) -> str:
    """The content of SOURCE_TERMS.md."""
    lines = []
    for source in sources:
        licence = source.licence or "not known here"
        stated = source.card_licence or "-"
        if source.card_sha256:
            stated += f" (card sha256 {source.card_sha256[:16]})"
        lines.append(
            f"| {source.name} | {source.revision} | {licence} | {stated} | "
            f"{source.obligations} | {source.effect} |"
        )
    warnings = [warning for source in sources for warning in source.warnings()]
    notes = "".join(f"\n- {warning}" for warning in warnings)
    return HEAD + "\n".join(lines) + "\n" + (f"{notes}\n" if notes else "")


def _plain(licence: str) -> str:
    return licence.lower().replace(" ", "-")
