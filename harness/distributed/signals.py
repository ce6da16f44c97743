"""Ending a run in good order when a signal asks for it, or when the torchrun that started it has been killed."""

from __future__ import annotations

import signal
from types import FrameType

from harness.common import launcher

# SIGHUP: the terminal has been closed, or the connection to it has broken. SIGQUIT: Ctrl-\\, which torchrun passes on.
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class StopSignal:
    """Remembers that a signal came; the training loop asks between steps.

    The handler only takes a note: a collective there could run in the middle of another one.
    """

    def __init__(self) -> None:
        self.signal = 0

    def listen(self) -> None:
        for number in STOPPING_SIGNALS:
            if number != signal.SIGHUP or not ignores_hangup():
                signal.signal(number, self._note)
        launcher.ask_before_the_end(self.hang_up)

    def hang_up(self) -> None:
        """Whoever could stop this process, or read what it says, is gone."""
        if launcher.is_gone() or not ignores_hangup():
            self.signal = signal.SIGHUP

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


def ignores_hangup() -> bool:
    """Whether this process was started to outlive its terminal, by nohup say."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def described(signal_number: int) -> str:
    """The signal by its name, and what it means if that is more than a request."""
    name = signal.Signals(signal_number).name
    if signal_number != signal.SIGHUP:
        return name
    return f"{name} (the terminal, torchrun or the reader of the output is gone)"
