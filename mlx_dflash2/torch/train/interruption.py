"""Signals that ask a run to end."""

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Notes the first SIGTERM or Ctrl-C, so that a step can be finished and saved.

    A second one has its usual effect.

    Attributes:
        number: Of the signal; None so far.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        self._former = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
