"""Work on many pieces (microbatches, batches of a benchmark) that ranks divide among them and can interrupt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from harness.distributed.signals import StopRequested, StopSignal
from harness.distributed.watchdog import Place
from harness.distributed.world import World


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
        """The indexes one by one. Raises StopRequested if this rank, or another one as far as is known, was asked to
        stop: only here; the others find out when they exchange their results."""
        for index in indexes:
            if self.stop.signal or self.world.watchdog.is_anyone_stopping():
                raise StopRequested
            yield index
            self.world.watchdog.beat()
