"""Ends of this process: signals that ask it to stop, output that nobody reads any more, and the state of its exit.

Three parts of the program can end the process: the main thread with an error (common/errors.py), the watchdog that
found a rank at fault (distributed/watchdog.py), and the thread that waits for the launcher's end (common/processes.py).
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

# SIGHUP: the terminal has been closed, or the connection to it has broken. SIGQUIT: Ctrl-\\, which torchrun passes on.
STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Exit:
    """State of this process's exit, shared by its threads, so that the reason is printed once. No entry is reset."""

    has_own_reason: bool = False  # the main thread ends the process, and says why
    # The main thread ends it soon, because another rank has gone; the watchdog may find out which one, and why.
    has_lost_peer: bool = False
    is_explained: bool = False  # the user has been told why the processes of this machine end, or is being told
    stop_signal: int = 0  # the last one that has asked this process to end in good order; 0: none has


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


class DetachableOutput(io.FileIO):
    """A file descriptor for writing. Once nobody is at its other end, what is written to it is dropped."""

    def __init__(self, descriptor: int, when_gone: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # What writing to a closed terminal, and to a pipe without a reader, fails with.
        self._signs = {errno.EIO} if self.isatty() else {errno.EPIPE}
        self._when_gone = when_gone

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._signs:
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())  # also for what libraries in C++ say
        os.close(nowhere)
        self._when_gone()
        return memoryview(data).nbytes


def survive_closed_output(when_gone: Callable[[], None]) -> None:
    """Make lost output no error from now on, which would end hours of training without a checkpoint: the rest is
    dropped, and `when_gone` is called once for each of standard output and error."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # None: closed from the beginning
            stream.flush()
            buffer = io.BufferedWriter(DetachableOutput(stream.fileno(), when_gone))
            setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
