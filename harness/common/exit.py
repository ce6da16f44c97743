"""Signals that ask a process to stop, and how far this one is on its way out, so that its threads say once, and not
over one another, why it ends.

Three parts of the program can end the process: the main thread with an error (common/errors.py), the watchdog that
found a rank at fault (distributed/watchdog.py), and the thread that waits for the launcher's end (common/launcher.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

# SIGHUP: the terminal has been closed, or the connection to it has broken. SIGQUIT: Ctrl-\\, which torchrun passes on.
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Exit:
    """State of this process's exit: reasons and signals so far. No entry is reset."""

    def __init__(self) -> None:
        self.has_own_reason = False
        self.has_lost_peer = False
        self.is_explained = False
        self.stop_signal = 0  # the last one that has asked this process to end in good order; 0: none has

    def begin_for_own_reason(self) -> None:
        """The main thread ends the process, and says itself what there is to say."""
        self.has_own_reason = True

    def begin_for_lost_peer(self) -> None:
        """The main thread ends the process soon, because another rank has gone; which one and why it does not know, but
        the watchdog may find out."""
        self.has_lost_peer = True

    def note_explained(self) -> None:
        """The user has been told why the processes of this machine end, or is told in this moment."""
        self.is_explained = True


EXIT = Exit()  # of this process


def handle_stopping_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Have `handler` called for every signal that asks a run to stop."""
    for number in STOPPING_SIGNALS:
        if number != signal.SIGHUP or not ignores_hangup():
            signal.signal(number, handler)


def ignores_hangup() -> bool:
    """True if this process ignores SIGHUP, as nohup has it do, to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def described(signal_number: int) -> str:
    """The signal by its name, and what it means if that is more than a request."""
    name = signal.Signals(signal_number).name
    if signal_number != signal.SIGHUP:
        return name
    return f"{name} (the terminal, the launcher or the reader of the output is gone)"
