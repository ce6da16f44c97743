"""Ending a run in good order when a signal asks for it, or when the launcher of its ranks has been killed.

`StopSignal` is what one rank knows; ranks agree on it between two steps, and `RunStopped` is then raised on all of
them at the same place.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

from harness.common.errors import EXIT, RunStopped, handle_stopping_signals, ignores_hangup
from harness.common.processes import is_launcher_gone, on_launcher_death
from harness.distributed.watchdog import Place

if TYPE_CHECKING:
    from harness.distributed.world import World

LONG_STEP_SECONDS = 2


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
        """Stop as for SIGHUP: nobody is left who could stop this process or read its output."""
        if is_launcher_gone() or not ignores_hangup():
            self.signal = signal.SIGHUP

    def steps(self, world: World, steps: range, between: Callable[[], None]) -> Iterator[int]:
        """The steps one by one, `between()` being called before each. Collective.

        Raises RunStopped before the same step on all ranks, if any of them was asked to stop. Ranks find that out
        while the step before computes, and wait for nothing.
        """
        agreed, seconds = world.async_max(self.signal, 0), 0.0
        for step in steps:
            signal_number, longest = agreed()
            if signal_number:
                raise RunStopped(signal_number)
            between()
            agreed, began = world.async_max(self.signal, int(seconds)), time.monotonic()
            yield step
            seconds = time.monotonic() - began
            # torchrun kills after 30 seconds, and another such step may be too long. It is the same on all ranks; they
            # have waited for one another, and lose nothing by asking.
            if longest >= LONG_STEP_SECONDS and step != steps[-1]:
                self.raise_if_set(world)
        agreed()

    def raise_if_set(self, world: World, during: str | None = None) -> None:
        """Raises RunStopped, on every rank, if any of them was asked to stop by now. Collective."""
        signal_number = max(world.gather(self.signal))
        if signal_number:
            raise RunStopped(signal_number, during)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = EXIT.stop_signal = number


class Interrupted(Exception):  # noqa: N818 - not an error
    """This rank leaves its pieces undone, because a rank was asked to stop. The others hear of it when all exchange
    their results: see `raise_if_interrupted`."""


@dataclass(frozen=True)
class SharedWork:
    """Who works on the pieces of something: rank 0 alone, or all, each on every world-size-th piece; and the signal
    that interrupts them."""

    world: World
    shared: bool
    stop: StopSignal
    place: Place

    def guarded(self, indexes: range) -> AbstractContextManager[object]:
        """The watchdog's guard, for a rank that has pieces to work on and does not only wait."""
        if indexes:
            return self.world.watchdog.guard(self.place)
        self.world.watchdog.idle(self.place)
        return contextlib.nullcontext()

    def until_stopped(self, indexes: Iterable[int]) -> Iterator[int]:
        """The indexes one by one. Raises Interrupted if this rank, or another one as far as is known, was asked to
        stop."""
        for index in indexes:
            if self.stop.signal or self.world.watchdog.is_anyone_stopping():
                raise Interrupted
            yield index
            self.world.watchdog.beat()

    def raise_if_interrupted(self, results: Sequence[object]) -> None:
        """Raises RunStopped if one of all ranks' results is None: of a rank that was interrupted. Collective."""
        if any(each is None for each in results):
            self.stop.raise_if_set(self.world, during=self.place.name)
