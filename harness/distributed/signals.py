"""Orderly end of a run when a signal asks for it, or when the launcher of its ranks has been killed.

`StopSignal` holds the signal that one rank has received. The ranks exchange their signals between two steps, and
`RunStopped` is then raised on all of them at the same place.
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
    """The signal that asked this process to stop, or 0 if there was none.

    The signal handler only stores its number, because a collective in the handler could run in the middle of another
    one.
    """

    def __init__(self) -> None:
        self.signal = 0

    def is_set(self) -> bool:
        return bool(self.signal)

    def listen(self) -> None:
        handle_stopping_signals(self._note)
        on_launcher_death(self.hang_up)

    def hang_up(self) -> None:
        """Record SIGHUP as the signal that asks this process to stop. Called when the process's launcher has ended, or
        when nobody reads its output any more. If the process ignores SIGHUP, as under nohup, do nothing unless the
        launcher has ended."""
        if is_launcher_gone() or not ignores_hangup():
            self.signal = signal.SIGHUP

    def steps(self, world: World, steps: range, between: Callable[[], None]) -> Iterator[int]:
        """Yield the steps, calling `between()` before each. Collective.

        Raises RunStopped before the same step on all ranks if any rank was asked to stop. The ranks exchange their
        signals while the previous step computes, so that no rank waits for the exchange.
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
            # After a long step, exchange the signals at once. The next step may take longer than the 30 seconds after
            # which torchrun kills a rank that has received a signal. `longest` is the same on all ranks. After a long
            # step the ranks have waited for one another anyway, so the exchange costs nothing.
            if longest >= LONG_STEP_SECONDS and step != steps[-1]:
                self.raise_if_set(world)
        agreed()

    def raise_if_set(self, world: World, during: str | None = None) -> None:
        """Raise RunStopped on every rank if any rank has been asked to stop. Collective."""
        signal_number = max(world.gather(self.signal))
        if signal_number:
            raise RunStopped(signal_number, during)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = EXIT.stop_signal = number


class Interrupted(Exception):  # noqa: N818 - not an error
    """Exception that ends this rank's part of shared work early, because a rank was asked to stop. The other ranks
    learn of it when all ranks exchange their results (`raise_if_interrupted`)."""


@dataclass(frozen=True)
class SharedWork:
    """Work in numbered pieces, such as the microbatches of a validation, which a signal to stop interrupts. If `shared`
    is true, rank r of N does the pieces r, r + N, r + 2 N and so on; otherwise rank 0 does all pieces."""

    world: World
    shared: bool
    stop: StopSignal
    place: Place

    def guarded(self, indexes: range) -> AbstractContextManager[object]:
        """Return the context in which this rank does the pieces of work numbered `indexes`. Inside it, the watchdog
        reports a fault if this rank makes no progress for too long. If `indexes` is empty, mark this rank as idle and
        return a null context instead."""
        if indexes:
            return self.world.watchdog.guard(self.place)
        self.world.watchdog.idle(self.place)
        return contextlib.nullcontext()

    def until_stopped(self, indexes: Iterable[int]) -> Iterator[int]:
        """Yield `indexes`, the numbers of this rank's pieces of work. Before each, raises Interrupted if this rank was
        asked to stop, or if another rank's last heartbeat (its regular status message) says that this other rank was
        asked to stop."""
        for index in indexes:
            if self.stop.signal or self.world.watchdog.is_anyone_stopping():
                raise Interrupted
            yield index
            self.world.watchdog.beat()

    def raise_if_interrupted(self, results: Sequence[object]) -> None:
        """Raise RunStopped if any rank was interrupted. `results` has the result of each rank, and None for an
        interrupted one. Collective."""
        if any(each is None for each in results):
            self.stop.raise_if_set(self.world, during=self.place.name)
