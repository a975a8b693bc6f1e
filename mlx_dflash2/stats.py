"""What a generation counted, cycle by cycle."""

from dataclasses import dataclass, field


@dataclass
class AcceptanceStats:
    """Counts of one generation.

    A cycle emits its accepted drafted tokens and the target's own token after them.
    `accepted` counts drafted tokens that were handed out, never the bonus token and
    nothing after an end of sequence. The first token of a generation comes from the
    prefill and belongs to no cycle, so
    `1 + sum(emitted_per_cycle) + plain_steps == len(tokens)`.

    Attributes:
        drafted_per_cycle: Drafted tokens the target verified, per cycle.
        accepted_per_cycle: Drafted tokens kept, per cycle.
        emitted_per_cycle: Tokens handed out, per cycle.
        plain_steps: Tokens decoded one by one while speculation was off.
    """

    drafted_per_cycle: list[int] = field(default_factory=list)
    accepted_per_cycle: list[int] = field(default_factory=list)
    emitted_per_cycle: list[int] = field(default_factory=list)
    plain_steps: int = 0

    def record_cycle(self, drafted: int, accepted: int, emitted: int) -> None:
        self.drafted_per_cycle.append(drafted)
        self.accepted_per_cycle.append(min(accepted, emitted))
        self.emitted_per_cycle.append(emitted)

    @property
    def cycles(self) -> int:
        return len(self.emitted_per_cycle)

    @property
    def drafted(self) -> int:
        return sum(self.drafted_per_cycle)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_cycle)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted per cycle; None before the first cycle."""
        return sum(self.emitted_per_cycle) / self.cycles if self.cycles else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None while nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    def as_dict(self) -> dict:
        """The counts as `--json` prints them."""
        return {
            "cycles": self.cycles,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "plain_steps": self.plain_steps,
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "accepted_per_cycle": self.accepted_per_cycle,
            "emitted_per_cycle": self.emitted_per_cycle,
        }
