"""Losses of the steps between two reports, accumulated on the device and reported for all ranks together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from harness.distributed.world import World
from harness.model.config import ModelConfig
from harness.training.step import StepResult

LOAD_DIGITS = 4  # decimal places of each expert's load in metrics.jsonl


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics over all ranks and all steps since the last report."""

    loss: float
    loss_min: float
    loss_max: float
    microbatches: int
    gradient_norm: float
    skipped_steps: int
    skipped_in_a_row: int
    # Mixture of experts only, by block and expert: the expert's tokens divided by what it would get under an even load.
    expert_load: list[list[float]] | None = None

    @property
    def load_range(self) -> tuple[float, float] | None:
        """Smallest and largest load of any expert in any block; None without experts."""
        if self.expert_load is None:
            return None
        return min(map(min, self.expert_load)), max(map(max, self.expert_load))

    def check_skipped_steps(self, step: int, max_skipped_steps: int, world: World) -> None:
        """Raise RunError if too many steps in a row were skipped. Every rank has the same metrics, and so all of them
        raise."""
        if self.skipped_in_a_row >= max_skipped_steps:
            raise world.collective_error(
                f"gradients were not finite in {self.skipped_in_a_row} steps in a row up to global step {step} "
                "(train.json: max_skipped_steps); lower learning_rate or set clipping_max_norm, and go back to an "
                "earlier checkpoint by its name"
            )


class LossMeter:
    """Accumulates the results of steps on the device. Only a report waits for the device."""

    # Columns of the fp64 tensor with all values. ROW counts the steps skipped in a row up to now; LONGEST_ROW is its
    # maximum.
    SUM, COUNT, MIN, MAX, NORM, SKIPPED, ROW, LONGEST_ROW = range(8)

    def __init__(self, device: torch.device, model: ModelConfig | None = None) -> None:
        """Create an empty meter. `model` gives the number of experts; None means a model without experts."""
        experts = (model.n_layers, model.moe.num_experts) if model and model.moe else (0, 0)
        self._values = self._empty().to(device)
        self._expert_tokens = torch.zeros(experts, dtype=torch.float64, device=device)

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
        if step.expert_tokens is not None:
            self._expert_tokens = self._expert_tokens + step.expert_tokens

    def synchronize(self) -> None:
        """Wait until the device has finished all steps added so far."""
        self._values = self._values.cpu().to(self._values.device)

    def reduce(self, world: World) -> TrainMetrics:
        """Wait for the device, combine the values of all ranks, and reset the meter. Returns the same metrics on every
        rank. Collective."""
        ranks = world.gather(self.state())
        columns = list(zip(*ranks, strict=True))
        sums, counts, minima, maxima, norms, skipped, rows, longest = columns[: len(self._values)]
        expert_tokens = [math.fsum(each) for each in columns[len(self._values) :]]
        following = self._empty()
        following[self.ROW] = rows[0]
        self._values = following.to(self._values.device)
        self._expert_tokens = torch.zeros_like(self._expert_tokens)
        # Gradients are the same on every rank, so that rank 0's norm and skipped steps are those of all.
        return TrainMetrics(
            loss=_total(sums) / sum(counts),
            loss_min=math.nan if math.isnan(_total(sums)) else min(minima),
            loss_max=math.nan if math.isnan(_total(sums)) else max(maxima),
            microbatches=int(sum(counts)),
            gradient_norm=norms[0],
            skipped_steps=int(skipped[0]),
            skipped_in_a_row=int(longest[0]),
            expert_load=self._load(expert_tokens),
        )

    def _load(self, expert_tokens: list[float]) -> list[list[float]] | None:
        """Return the load of each expert, by block: its tokens divided by the mean over the block's experts.
        `expert_tokens` lists the experts block after block. Returns None without experts."""
        if not expert_tokens:
            return None
        tokens_LxE = torch.tensor(expert_tokens, dtype=torch.float64).view_as(self._expert_tokens)
        return (tokens_LxE / tokens_LxE.mean(1, keepdim=True)).tolist()

    def state(self) -> list[float]:
        """Return this rank's values since the last report, for a checkpoint between two reports."""
        return [*self._values.tolist(), *self._expert_tokens.flatten().tolist()]

    def load_state(self, values: list[float]) -> None:
        """Load what `state` returned. Raises ValueError if the number of values is wrong."""
        own, device = len(self._values), self._values.device
        if len(values) != own + self._expert_tokens.numel():
            raise ValueError(f"{len(values)} numbers where there should be {own + self._expert_tokens.numel()}")
        self._values = torch.tensor(values[:own], dtype=torch.float64, device=device)
        tokens = torch.tensor(values[own:], dtype=torch.float64, device=device)
        self._expert_tokens = tokens.view_as(self._expert_tokens)

    def load_merged(self, ranks: list[list[float]]) -> None:
        """Load the combined values of all ranks, when the run was saved with another number of ranks. Called on rank 0
        only."""
        sums, counts, minima, maxima, *others = zip(*ranks, strict=True)
        # Number of columns of `others` before those of the experts' tokens.
        own = len(self._values) - self.NORM
        tokens = [math.fsum(each) for each in others[own:]]
        first = [each[0] for each in others[:own]]  # rank 0's
        self.load_state([math.fsum(sums), sum(counts), min(minima), max(maxima), *first, *tokens])


def _total(sums: tuple[float, ...]) -> float:
    return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan


def metric_values(metrics: TrainMetrics) -> dict[str, Any]:
    """Return the metrics as the keys and values of a line in metrics.jsonl."""
    values = asdict(metrics)
    del values["microbatches"], values["skipped_in_a_row"], values["expert_load"]
    if metrics.expert_load is not None and metrics.load_range is not None:
        values["expert_load_min"], values["expert_load_max"] = metrics.load_range
        values["expert_load"] = [[round(load, LOAD_DIGITS) for load in block] for block in metrics.expert_load]
    return values
