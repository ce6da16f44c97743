"""Work that is shared out among ranks and can be left off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.distributed.watchdog import Place

if TYPE_CHECKING:
    from harness.distributed.world import World


class StopRequested(Exception):  # noqa: N818 - not an error
    """Ends an evaluation whose process was asked to stop."""


@dataclass(frozen=True)
class Ranks:
    """Who evaluates: rank 0 alone, or all, each every world-size-th microbatch; `stop` tells whether to leave off."""

    world: World
    shared: bool
    stop: Callable[[], bool]
    step: int  # the global step they are at
    place: str = "validation"  # what of it, as the watch knows it

    def at_work(self, indexes: range) -> AbstractContextManager[object]:
        """The watch's attention, for a rank that has microbatches to evaluate and does not only wait."""
        place = Place(self.step, self.place)
        if indexes:
            return self.world.watchdog.guard(place)
        self.world.watchdog.idle(place)
        return contextlib.nullcontext()

    def heeding(self, indexes: Iterable[int]) -> Iterator[int]:
        for index in indexes:
            if self.stop():
                raise StopRequested
            yield index
            self.world.watchdog.beat()
