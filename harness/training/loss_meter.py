"""Training loss, gradient norm, skipped steps and experts' loads of the steps since the last report, over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from harness.distributed.world import World
from harness.model.config import ModelConfig
from harness.training.step import StepResult

LOAD_DIGITS = 4  # decimal places of each expert's load in metrics.jsonl


@dataclass(frozen=True)
class TrainMetrics:
    """Metrics over all ranks and all steps since the last report. The losses are NaN if the loss of any microbatch is
    not finite."""

    loss: float  # mean over the microbatches
    loss_min: float  # of a microbatch
    loss_max: float
    gradient_norm: float  # the largest among the steps' norms, before clipping; NaN if any is NaN
    skipped_steps: int
    microbatches: int
    skipped_in_a_row: int  # largest number of consecutive skipped steps, including those before the last report
    own_seconds: list[float]  # by rank: median time of the rank's own part of a step (see Watchdog)
    # With experts only. An expert's load is its number of tokens divided by the mean over the experts of its block.
    expert_load_min: float | None = None
    expert_load_max: float | None = None
    expert_load: list[list[float]] | None = None  # by block and expert


class LossMeter:
    """Accumulates the results of steps on the device. Adding a step does not wait for the device; a report does."""

    # Indices into the fp64 tensor of accumulated values: sum, number, smallest and largest of the microbatches' losses,
    # largest gradient norm, number of skipped steps, number of consecutive skipped steps up to now (ROW, which a report
    # does not reset), and the largest ROW since the last report.
    SUM, COUNT, MIN, MAX, NORM, SKIPPED, ROW, LONGEST_ROW = range(8)
    EMPTY = (0.0, 0.0, math.inf, -math.inf, 0.0, 0.0, 0.0, 0.0)

    def __init__(self, device: torch.device, model: ModelConfig | None = None) -> None:
        """Create an empty meter. `model` gives the number of experts; None means a model without experts."""
        experts = (model.n_layers, model.moe.num_experts) if model and model.moe else (0, 0)
        self._values = torch.tensor(self.EMPTY, dtype=torch.float64, device=device)
        self._expert_tokens = torch.zeros(experts, dtype=torch.float64, device=device)

    def add(self, step: StepResult) -> None:
        """Add the result of a step."""
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
        self._values.cpu()

    def reduce(self, world: World, own_seconds: float = 0.0) -> TrainMetrics:
        """Return on every rank the metrics since the last report, and reset the meter. `own_seconds` is this rank's
        entry in the result's list of that name. With empty meters, `microbatches` is 0. Waits for the device.
        Collective."""
        states, seconds = zip(*world.gather((self.state(), own_seconds)), strict=True)
        columns = list(zip(*states, strict=True))
        sums, counts, minima, maxima, norms, skipped, rows, longest = columns[: len(self.EMPTY)]
        experts: dict[str, Any] = {}
        if self._expert_tokens.numel():
            tokens = [math.fsum(each) for each in columns[len(self.EMPTY) :]]
            tokens_LxE = torch.tensor(tokens, dtype=torch.float64).view_as(self._expert_tokens)
            load_LxE = tokens_LxE / tokens_LxE.mean(1, keepdim=True)
            experts = {"expert_load_min": load_LxE.min().item(), "expert_load_max": load_LxE.max().item()}
            experts["expert_load"] = [[round(load, LOAD_DIGITS) for load in block] for block in load_LxE.tolist()]
        following = torch.tensor(self.EMPTY, dtype=torch.float64)
        following[self.ROW] = rows[0]
        self._values = following.to(self._values.device)
        self._expert_tokens = torch.zeros_like(self._expert_tokens)
        total = math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan
        # Gradients are the same on every rank, so rank 0's norm and skipped steps hold for all ranks.
        return TrainMetrics(
            loss=total / max(1, sum(counts)),
            loss_min=math.nan if math.isnan(total) else min(minima),
            loss_max=math.nan if math.isnan(total) else max(maxima),
            gradient_norm=norms[0],
            skipped_steps=int(skipped[0]),
            microbatches=int(sum(counts)),
            skipped_in_a_row=int(longest[0]),
            own_seconds=list(seconds),
            **experts,
        )

    def state(self) -> list[float]:
        """Return this rank's accumulated values as a list, for a checkpoint: those with the indices SUM to
        LONGEST_ROW, then the experts' tokens by block and expert. Waits for the device."""
        return [*self._values.tolist(), *self._expert_tokens.flatten().tolist()]

    def load_state(self, ranks: list[list[float]]) -> None:
        """Load the values of one or more ranks, as `state` returned them, in place of this meter's. Raises ValueError
        if the values do not fit this meter.

        Each rank must load its own values. If the number of ranks has changed, rank 0 alone must load those of all
        former ranks.
        """
        # Values from NORM on, except for the experts' tokens, are the same on all ranks, so those of rank 0 are used.
        columns, own = list(zip(*ranks, strict=True)), len(self.EMPTY)
        if len(columns) != own + self._expert_tokens.numel():
            raise ValueError(f"{len(columns)} numbers where there should be {own + self._expert_tokens.numel()}")
        sums, counts, minima, maxima, *others = columns[:own]
        values = [math.fsum(sums), sum(counts), min(minima), max(maxima), *(each[0] for each in others)]
        self._values = self._values.new_tensor(values)
        tokens = [math.fsum(each) for each in columns[own:]]
        self._expert_tokens = self._expert_tokens.new_tensor(tokens).view_as(self._expert_tokens)
