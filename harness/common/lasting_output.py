"""Standard output and error that may go away while a run trains: a terminal is closed, a reader of a pipe ends.

What can no longer be read by anybody must not end hours of training without a checkpoint.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any


class LastingFile(io.FileIO):
    """A file descriptor for writing. Once nobody is at its other end, what is written to it goes nowhere."""

    def __init__(self, descriptor: int, when_gone: Callable[[], None]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # What writing to a closed terminal, and to a pipe without a reader, comes to.
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
    """Make lost output no error from now on: the rest is dropped, and `when_gone` is called once for each of the two
    streams."""
    sys.stdout = _lasting(sys.stdout, when_gone)
    sys.stderr = _lasting(sys.stderr, when_gone)


def _lasting(stream: Any, when_gone: Callable[[], None]) -> Any:
    if stream is None:  # closed from the beginning
        return None
    stream.flush()
    buffer = io.BufferedWriter(LastingFile(stream.fileno(), when_gone))
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
