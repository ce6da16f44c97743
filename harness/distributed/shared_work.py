"""Work on many pieces (microbatches, batches of a benchmark) that ranks divide among them and can interrupt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from harness.distributed.signals import StopSignal
from harness.distributed.watchdog import Place
from harness.distributed.world import World


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
        """Raises StopRequested if one of all ranks' results is None: of a rank that was interrupted. Collective."""
        if any(each is None for each in results):
            self.stop.raise_if_set(self.world, during=self.place.name)
