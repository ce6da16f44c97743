"""The mean loss of a model over microbatches, on one rank or shared out among all."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from harness.language_model import evaluating
from harness.precision import Precision
from harness.tokens import MicrobatchReader, Window
from harness.watch import order

if TYPE_CHECKING:
    from harness.world import World


def microbatch_losses(model: nn.Module, windows: Iterable[Window], precision: Precision) -> list[float]:
    """The loss of each window, in order, with dropout off; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    with evaluating(model), precision.autocast():
        losses = [model(*window.on(device)).double() for window in windows]
    return torch.stack(losses).tolist() if losses else []


def validation_loss(
    model: nn.Module, reader: MicrobatchReader, count: int, precision: Precision, ranks: Ranks
) -> float | None:
    """Mean loss over the reader's first `count` microbatches, or None if a rank was asked to stop meanwhile.

    On rank 0 alone or shared out, all ranks return the same number: the losses are summed in the microbatches' order.
    """
    world = ranks.world
    mine = range(world.rank, count, world.size) if ranks.shared else range(count if world.is_main else 0)
    losses: list[float] | None = None
    with contextlib.suppress(StopAsked), ranks.at_work(mine):
        losses = microbatch_losses(model, map(reader.window, ranks.heeding(mine)), precision)
    gathered = world.gather(losses)
    shares = [share for share in gathered if share is not None]
    if len(shares) < world.size:
        return None
    if not ranks.shared:
        return mean(shares[0])
    return mean([shares[index % world.size][index // world.size] for index in range(count)])


class StopAsked(Exception):  # noqa: N818 - not an error
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
        place = order(self.step, self.place)
        if indexes:
            return self.world.watch.attended(f"the {self.place} of global step {self.step}", place)
        self.world.watch.passed(place)
        return contextlib.nullcontext()

    def heeding(self, indexes: Iterable[int]) -> Iterator[int]:
        for index in indexes:
            if self.stop():
                raise StopAsked
            yield index
            self.world.watch.beat()


def mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan
