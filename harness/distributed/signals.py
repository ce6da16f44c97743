"""Ending a run in good order when a signal asks for it, or when the launcher of its ranks has been killed.

`StopSignal` is what one rank knows; ranks agree on it between two steps, and `StopRequested` is then raised on all of
them at the same place.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from harness.common.exit import EXIT, handle_stopping_signals, ignores_hangup
from harness.common.processes import is_launcher_gone, on_launcher_death

if TYPE_CHECKING:
    from harness.distributed.world import World

LONG_STEP_SECONDS = 2


class StopRequested(Exception):  # noqa: N818 - not an error
    """A rank was asked to stop. `during` is the evaluation that was left off for it, if it was one."""

    def __init__(self, signal_number: int = 0, during: str | None = None) -> None:
        super().__init__(signal_number, during)
        self.signal = signal_number
        self.during = during


class StopSignal:
    """Remembers that a signal came.

    The handler only takes a note: a collective there could run in the middle of another one.
    """

    def __init__(self) -> None:
        self.signal = 0

    def is_set(self) -> bool:
        return bool(self.signal)

    def listen(self) -> None:
        handle_stopping_signals(self._note)
        on_launcher_death(self.hang_up)

    def hang_up(self) -> None:
        """Whoever could stop this process, or read what it says, is gone."""
        if is_launcher_gone() or not ignores_hangup():
            self.signal = signal.SIGHUP

    def steps(self, world: World, steps: range, between: Callable[[], None]) -> Iterator[int]:
        """The steps one by one, `between()` being called before each. Collective.

        Raises StopRequested before the same step on all ranks, if any of them was asked to stop. Ranks find that out
        while the step before computes, and wait for nothing.
        """
        answer, seconds = world.async_max(self.signal, 0), 0.0
        for step in steps:
            signal_number, longest = answer.result()
            if signal_number:
                raise StopRequested(signal_number)
            between()
            answer, began = world.async_max(self.signal, int(seconds)), time.monotonic()
            yield step
            seconds = time.monotonic() - began
            # torchrun kills after 30 seconds, and another such step may be too long. It is the same on all ranks; they
            # have waited for one another, and lose nothing by asking.
            if longest >= LONG_STEP_SECONDS and step != steps[-1]:
                self.raise_if_set(world)
        answer.result()

    def raise_if_set(self, world: World, during: str | None = None) -> None:
        """Raises StopRequested, on every rank, if any of them was asked to stop by now. Collective."""
        signal_number = max(world.gather(self.signal))
        if signal_number:
            raise StopRequested(signal_number, during)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = EXIT.stop_signal = number
