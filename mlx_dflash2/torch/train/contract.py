"""What a run is of, and how far it has come."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_dflash2.errors import DFlash2Error

from .settings import flat

LABELS = ("target.name", "target.revision", "code")  # recorded, and free to change


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: Optimizer steps, skipped ones included.
        skipped: Steps whose gradient overflowed fp16.
        blocks, slots, tokens: Trained on so far: blocks, their labels, and the tokens
            of all rows.
        seconds: Of wall time, over all parts of the run.
        best: The best evaluation: acceptance length, then loss; () before the first.
        evaluation: The last one.
    """

    step: int = 0
    skipped: int = 0
    blocks: int = 0
    slots: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: tuple[float, ...] = ()
    evaluation: dict[str, Any] = field(default_factory=dict)

    def after(self, **added: float) -> "Progress":
        """With numbers added."""
        return replace(self, **{n: getattr(self, n) + v for n, v in added.items()})


@dataclass(frozen=True)
class Contract:
    """What a run is of; a run that goes on must be of the same.

    Attributes:
        settings: Of the configuration, those that decide the result.
        target: Its fingerprint, the hashes of its text side, and where it was found.
        data: What the manifests say, each with the sha256 of its rows.
        drafter: Its config.json.
        parent: What a warm start took, and from where; None without one.
        code: Version of this package.
    """

    settings: dict[str, Any]
    target: dict[str, Any]
    data: dict[str, Any]
    drafter: dict[str, Any]
    parent: dict[str, Any] | None
    code: str

    def demand(self, known: Mapping[str, Any], where: Path) -> None:
        """Refuse to go on with a checkpoint of another contract.

        Raises:
            DFlash2Error: It names every field that differs.
        """
        plain = json.loads(json.dumps(asdict(self)))  # as the checkpoint's was written
        ours, theirs = flat(plain), flat(known)
        differing = [
            f"{name} was {theirs.get(name)!r} and is {ours.get(name)!r}"
            for name in sorted((ours.keys() | theirs.keys()) - {*LABELS})
            if ours.get(name) != theirs.get(name)
        ]
        if differing:
            raise DFlash2Error(
                f"{where}: the run cannot go on under other conditions: "
                f"{'; '.join(differing)}; restore them, or start a new run from it "
                "with --warm-start"
            )
