"""What a drafter is trained to do: the terms of the loss and how slots are weighed."""

from dataclasses import dataclass
from typing import Any

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families.dflash2 import DFlash2Config
from mlx_dflash2.families.dspark import DSparkConfig

SELECTOR_TERMS = frozenset({"selector_ce", "selector_tv"})
TERMS = ("ce", "kl", "tv", "nla", "lk", *sorted(SELECTOR_TERMS), "confidence")
WEIGHTINGS = ("decay", "dpace", "dpace_p", "dpace_f")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A mix of terms. Each is a mean over slots, and 0 leaves it out.

    With q the drafter's distribution of a slot's token, p the target's at the same
    place after the true tokens, and y the token of the text:

    - `ce`: -log q(y).
    - `kl`: sum p (log p - log q).
    - `tv`: 1 - sum min(p, q), the chance that sampling rejects the token. Half of the
      distance sum |p - q|, of which some recipes state the weight.
    - `nla`: -log sum min(p, q), the same aim with a gradient where p and q share
      next to nothing.
    - `lk`: c kl + (1 - c) tv, where c = exp(-3 sum min(p, q)) is held constant.
    - `selector_ce`, `selector_tv` (DFlash 2): the first and third of these over a
      slot's candidates, p and q renormalised to them, after the true token before.
      The mean is over slots among whose candidates y is; the others are left out.
    - `confidence` (DSpark): binary cross entropy of the confidence against the chance
      of acceptance, sum min(p, q), held constant.

    Slots are weighed, and every term's mean is over the sum of the weights:

    - "decay": exp(-g / gamma) for slot g = 0, 1, ...; gamma 0 weighs all alike.
    - "dpace" (D-PACE, arXiv 2605.18810): all alike, but in `ce` slot g weighs as much
      as reaching it and going on from it is worth: the sum of the products
      P_j = s_0 ... s_j over all valid j >= g, where s = (1 - alpha) q(y) + alpha is
      held constant. Divided by the number of valid slots, not by these weights.
    - "dpace_p": P_g alone, how likely the slot is reached.
    - "dpace_f": the sum divided by P_g, how far drafting goes on from it.

    Attributes:
        detach_selector: The selector's terms train the selector only.
    """

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    nla: float = 0.0
    lk: float = 0.0
    selector_ce: float = 0.0
    selector_tv: float = 0.0
    confidence: float = 0.0
    detach_selector: bool = False
    weighting: str = "decay"
    gamma: float = 4.0
    alpha: float = 0.5

    @property
    def mix(self) -> dict[str, float]:
        """The terms that count, and by how much."""
        return {term: getattr(self, term) for term in TERMS if getattr(self, term)}

    @property
    def needs_teacher(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return any(self.mix.keys() - {"ce", "selector_ce"})

    def check(self, config: DrafterConfig) -> None:
        """Refuse what this drafter cannot be trained to do.

        Raises:
            DFlash2Error: A value is out of range, or a term is of another family.
        """
        for name in (*TERMS, "gamma"):
            self._demand(getattr(self, name) >= 0, name, "0 or more")
        self._demand(0 <= self.alpha <= 1, "alpha", "0 to 1")
        self._demand(self.weighting in WEIGHTINGS, "weighting", " or ".join(WEIGHTINGS))
        if not self.mix:
            raise DFlash2Error(f"objective: every one of {', '.join(TERMS)} is 0")
        if not isinstance(config, DFlash2Config):
            for name in sorted(SELECTOR_TERMS):
                self._refuse(name, f"a {config.title} drafter has no selector")
        if not isinstance(config, DSparkConfig) or not config.has_confidence:
            self._refuse("confidence", "this drafter has no confidence head")

    def _demand(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            found: Any = getattr(self, name)
            raise DFlash2Error(f"objective: {name} is {found!r}, expected {expected}")

    def _refuse(self, name: str, why: str) -> None:
        if getattr(self, name):
            raise DFlash2Error(
                f"objective: {name} is {getattr(self, name)}, but {why}; set it to 0"
            )
