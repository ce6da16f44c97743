"""Orderly end of a run when a signal asks for it, when the launcher of its ranks has been killed, or when the run has
reached a ceiling of time or cost."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from harness.common.errors import CEILING, EXIT, RunStopped, handle_stopping_signals, ignores_hangup
from harness.common.processes import is_launcher_gone, on_launcher_death
from harness.distributed.watchdog import Place

if TYPE_CHECKING:
    from harness.distributed.world import World

T = TypeVar("T")

LONG_STEP_SECONDS = 2


class StopRequest:
    """Request to stop the run, made by a signal or by a ceiling of time or cost."""

    def __init__(self) -> None:
        self.signal = 0  # number of the signal that asked for the stop; 0 if there was none
        self.ceiling_at = math.inf  # time, by time.monotonic, at which max_hours or max_dollars is reached

    @property
    def reason(self) -> int:
        """The signal's number; without a signal, CEILING from the time `ceiling_at` on, and 0 before that time."""
        return self.signal or (CEILING if time.monotonic() >= self.ceiling_at else 0)

    def listen(self) -> None:
        """Make this process record a signal that asks it to stop, or the end of its launcher, instead of ending at
        once."""
        handle_stopping_signals(self._note)
        on_launcher_death(self.hang_up)

    def hang_up(self) -> None:
        """Record SIGHUP as the signal that asks this process to stop. Called when the launcher has ended, or when
        nobody reads the output any more. Under nohup, unread output is no reason to stop."""
        if is_launcher_gone() or not ignores_hangup():
            self.signal = signal.SIGHUP

    def steps_until_stop(self, world: World, steps: range, between: Callable[[], None]) -> Iterator[int]:
        """Yield each of `steps`, after a call of `between`. If any rank has a reason to stop, raises RunStopped before
        the same step on every rank, but not after the last step. Collective."""
        wait_for_maxima, step_seconds = world.async_max(self.reason, 0), 0.0
        for step in steps:
            reason, longest_seconds = wait_for_maxima()  # sent before the previous step began
            if reason:
                raise RunStopped(reason)
            between()
            # The ranks exchange their reasons while the step computes, so that no rank waits for the exchange.
            wait_for_maxima, began = world.async_max(self.reason, int(step_seconds)), time.monotonic()
            yield step
            step_seconds = time.monotonic() - began
            # If steps are long, exchange the signals at once. The next step may take longer than the 30 seconds after
            # which torchrun kills a rank that has received a signal. `longest_seconds`, the time of an earlier step on
            # the slowest rank, is the same on all ranks, so all make this exchange or none. After a long step the ranks
            # have waited for one another anyway, so the exchange costs nothing.
            if longest_seconds >= LONG_STEP_SECONDS and step != steps[-1]:
                self.raise_if_set(world)
        wait_for_maxima()

    def raise_if_set(self, world: World, interrupted_evaluation: str | None = None) -> None:
        """Raise RunStopped(reason, `interrupted_evaluation`) on every rank if any rank has a reason to stop.
        Collective."""
        reason = max(world.gather(self.reason))
        if reason:
            raise RunStopped(reason, interrupted_evaluation)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only stored, because a collective in a signal handler could interrupt another collective.
        # The training loop reads self.signal. EXIT is for `one_line_errors`, which has no StopRequest.
        self.signal = EXIT.stop_signal = number


class Interrupted(Exception):  # noqa: N818 - not an error
    """Exception that ends this rank's part of shared work early, because a rank has a reason to stop."""


@dataclass(frozen=True)
class SharedWork:
    """Evaluation in numbered pieces, such as the microbatches of a validation. A request to stop interrupts it."""

    world: World
    shared: bool  # true: rank r of N does the pieces r, r + N, r + 2 N and so on; false: rank 0 does all pieces
    stop: StopRequest
    place: Place  # names the evaluation in messages, and in meta.json if it was interrupted

    def share(self, count: int, work: Callable[[Iterator[int]], list[T]]) -> list[T]:
        """Return the results of the pieces 0 .. `count` - 1, in this order, on every rank. Collective.

        `work` is given an iterator over the numbers of this rank's pieces, and returns their results in this order. The
        results must be small and picklable. `work` must not catch Interrupted, which the iterator can raise.

        Raises RunStopped on every rank if a request to stop has interrupted any rank. Also raises an exception that
        another rank has passed to `gather_results`.
        """
        watchdog, rank = self.world.watchdog, self.world.rank
        ranks = self.world.size if self.shared else 1
        own = range(rank, count, ranks) if rank < ranks else range(0)
        results: list[T] | None = None
        if own:
            with suppress(Interrupted), watchdog.guard(self.place):
                results = work(self.until_stopped(own))
        else:
            watchdog.idle(self.place)
            results = []
        parts = self.gather_results(results)
        # In the order of the pieces, so that the sum of the results does not depend on how the ranks divided the work.
        return [parts[index % ranks][index // ranks] for index in range(count)]

    def until_stopped(self, indexes: Iterable[int]) -> Iterator[int]:
        """Yield `indexes`, the numbers of this rank's pieces of work. Before each, raises Interrupted if a rank is
        known to have a reason to stop."""
        for index in indexes:
            if self.stop.reason or self.world.watchdog.is_anyone_stopping():
                raise Interrupted
            yield index
            self.world.watchdog.beat()

    def gather_results(self, value: T | Exception | None) -> list[T]:
        """Return the values of all ranks, in the order of the ranks. On every rank, raises the first exception among
        the values, or RunStopped if an interrupted rank has passed None. Collective."""
        values: list[Any] = self.world.gather(value)
        for each in values:
            # On every rank, because otherwise a rank would wait for the failed one in a later call.
            if isinstance(each, Exception):
                raise each
        if any(each is None for each in values):
            self.stop.raise_if_set(self.world, interrupted_evaluation=self.place.name)
        return values
