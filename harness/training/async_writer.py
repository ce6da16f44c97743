"""Writing a checkpoint while training goes on, or at once: two classes with the same methods."""

from __future__ import annotations

import threading
from collections.abc import Callable


class SyncWriter:
    """Does the work when it is asked to."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def check(self) -> None:
        """Raise what work that was submitted earlier has raised since."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when nothing is left to do; raises like `check`."""


class AsyncWriter(SyncWriter):
    """Does one piece of work at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Begin the work; returns once any earlier one has ended, and raises if that failed."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True, name="checkpoint-writer")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
        self.check()


def build_writer(*, in_background: bool) -> SyncWriter:
    return AsyncWriter() if in_background else SyncWriter()
