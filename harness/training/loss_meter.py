"""The losses of the steps between two reports, gathered on the device and reported for all ranks together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from harness.distributed.world import World
from harness.training.step import StepResult


@dataclass(frozen=True)
class TrainMetrics:
    """What happened on all ranks since the last report."""

    loss: float
    loss_min: float
    loss_max: float
    microbatches: int
    gradient_norm: float
    skipped_steps: int
    skipped_in_a_row: int

    def check_skipped_steps(self, step: int, max_skipped_steps: int, world: World) -> None:
        """Raises RunError if too many steps in a row were skipped. Every rank has the same metrics, and so comes to the
        same end."""
        if self.skipped_in_a_row >= max_skipped_steps:
            raise world.collective_error(
                f"gradients were not finite in {self.skipped_in_a_row} steps in a row up to global step {step} "
                "(train.json: max_skipped_steps); lower learning_rate or set clipping_max_norm, and go back to an "
                "earlier checkpoint by its name"
            )


class LossMeter:
    """Gathers steps' results on the device, without waiting for any of them, until a report asks."""

    # Columns of the tensor that holds it all, fp64.
    SUM, COUNT, MIN, MAX, NORM, SKIPPED, ROW, LONGEST_ROW = range(8)

    def __init__(self, device: torch.device) -> None:
        self._values = self._empty().to(device)

    @classmethod
    def _empty(cls) -> Tensor:
        values = torch.zeros(8, dtype=torch.float64)
        values[cls.MIN], values[cls.MAX] = math.inf, -math.inf
        return values

    def add(self, step: StepResult) -> None:
        values, losses, skipped = self._values, step.losses_A, step.skipped.double()
        row = (values[self.ROW] + skipped) * skipped
        self._values = torch.stack(
            [
                values[self.SUM] + losses.sum(),
                values[self.COUNT] + len(losses),
                torch.minimum(values[self.MIN], losses.min()),
                torch.maximum(values[self.MAX], losses.max()),
                torch.maximum(values[self.NORM], step.gradient_norm.double()),
                values[self.SKIPPED] + skipped,
                row,
                torch.maximum(values[self.LONGEST_ROW], row),
            ]
        )

    def synchronize(self) -> None:
        """Wait until the device has done the steps that were added."""
        self._values = self._values.cpu().to(self._values.device)

    def reduce(self, world: World) -> TrainMetrics:
        """Wait for the device, combine what all ranks have added, and begin anew; the same on every rank."""
        ranks = world.gather(self._values.tolist())
        sums, counts, minima, maxima, norms, skipped, rows, longest = zip(*ranks, strict=True)
        following = self._empty()
        following[self.ROW] = rows[0]
        self._values = following.to(self._values.device)
        # A gradient is the same on every rank, so that rank 0 speaks for its norm and for what was skipped.
        return TrainMetrics(
            loss=_total(sums) / sum(counts),
            loss_min=math.nan if math.isnan(_total(sums)) else min(minima),
            loss_max=math.nan if math.isnan(_total(sums)) else max(maxima),
            microbatches=int(sum(counts)),
            gradient_norm=norms[0],
            skipped_steps=int(skipped[0]),
            skipped_in_a_row=int(longest[0]),
        )

    def state(self) -> list[float]:
        """This rank's unreported part, for a checkpoint between two reports."""
        return self._values.tolist()

    def load_state(self, values: list[float]) -> None:
        """Raises ValueError for anything else than what `state` has given."""
        if len(values) != len(self._empty()):
            raise ValueError(f"{len(values)} numbers where there should be {len(self._empty())}")
        self._values = torch.tensor(values, dtype=torch.float64, device=self._values.device)

    def load_merged(self, ranks: list[list[float]]) -> None:
        """Take over the unreported parts of ranks of a world of another size."""
        sums, counts, minima, maxima, *_ = zip(*ranks, strict=True)
        self.load_state([math.fsum(sums), sum(counts), min(minima), max(maxima), *ranks[0][self.NORM :]])


def _total(sums: tuple[float, ...]) -> float:
    return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan


def metric_values(metrics: TrainMetrics) -> dict[str, Any]:
    """The metrics as metrics.jsonl has it."""
    values = asdict(metrics)
    del values["microbatches"], values["skipped_in_a_row"]
    return values
