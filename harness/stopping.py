"""Ending a run in good order when a signal asks for it."""

from __future__ import annotations

import signal
from types import FrameType

STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Remembers that SIGTERM or SIGINT came; the training loop asks between steps.

    The handler only takes a note: a collective there could run in the middle of another one.
    """

    def __init__(self) -> None:
        self.signal = 0

    def listen(self) -> None:
        for number in STOPPING_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
