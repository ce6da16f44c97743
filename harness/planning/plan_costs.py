"""A run's arithmetic: steps, tokens, how often what is due, disk, and the time it takes at a speed."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.units import GIB
from harness.data.loader import BatchLayout, BatchSchedule
from harness.planning.experiment import Position
from harness.planning.intervals import times_due
from harness.planning.planned_speed import PlannedSpeed
from harness.planning.rates import UNSCALED, ScaledSettings
from harness.runs.budget import Budget, batch_schedule
from harness.runs.train_config import TrainConfig

WEIGHT_BYTES = 4  # per parameter: fp32
OTHER_BYTES = 2**20  # the rest of a checkpoint: random states, tokenizer, meta.json


@dataclass(frozen=True)
class Plan:
    """A run's arithmetic. `position` is None while the dataset's length is needed and not known yet."""

    name: str
    config: TrainConfig
    parameters: int
    flops_per_token: int
    layout: BatchLayout
    position: Position | None
    optimizer_bytes: int = 0  # of its state, over all ranks together
    initial_weights: Path | None = None  # the file that the run will start from, if it is one
    budget: Budget | None = None  # what train.json's came to, if that is not in tokens
    scaled: ScaledSettings = UNSCALED
    active_parameters: int | None = None  # of a mixture of experts
    moe_router_loss_scale: float = 0.0
    dataset_remark: str | None = None

    def validations(self) -> int:
        every = self.config.validation_interval
        return self._times(every) if every else 0

    def benchmarks(self) -> int:
        """Number of evaluations of train.json's benchmark tasks from here on."""
        every = self.config.benchmark_interval
        return self._times(every) if every else 0

    def checkpoints(self) -> int:
        """Number of checkpoints to be written from here on."""
        return self._times(self.config.checkpoint_every)

    def _times(self, every: int) -> int:
        """Steps of this plan that are a multiple of `every`, or the last."""
        assert self.position is not None
        return times_due(range(self.position.first_step, self.position.total_steps), every)

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return self.parameters * WEIGHT_BYTES + self.optimizer_bytes + OTHER_BYTES

    def disk_bytes(self) -> int:
        """The most that the checkpoints of this plan occupy at once."""
        kept = self.checkpoints()
        if self.config.keep_checkpoints is not None:
            # best and latest besides, and the one being written.
            kept = min(kept, self.config.keep_checkpoints + 3)
        return kept * self.checkpoint_bytes()

    def disk_shortage(self, folder: Path) -> str | None:
        """Message with a remedy if the disk under `folder` cannot hold the checkpoints; None if it can, or without a
        position."""
        free = shutil.disk_usage(folder).free
        if self.position is None or self.disk_bytes() <= free:
            return None
        return (
            f"the run's {self.checkpoints():,} checkpoints need {self.disk_bytes() / GIB:.2f} GiB, but "
            f"{free / GIB:.2f} GiB are free; set keep_checkpoints in train.json, raise checkpoint_interval, or "
            "use another disk (--runs-dir)"
        )

    def check_disk(self, folder: Path) -> None:
        """Raises UserError if the disk under `folder` cannot hold the checkpoints: better now than after hours."""
        if shortage := self.disk_shortage(folder):
            raise UserError(f"{folder}: {shortage}")

    @property
    def batches(self) -> BatchSchedule:
        """The global batches from where the plan begins."""
        return batch_schedule(self.config, self.layout, self.position.tokens_seen if self.position else 0)

    def tokens(self) -> int:
        assert self.position is not None
        return self.batches.tokens_before(self.position.total_steps - self.position.first_step)


def planned_seconds(plan: Plan, speed: PlannedSpeed) -> dict[str, float]:
    """Seconds of each phase of the plan: training, validation, and the benchmarks if there are any and their time is
    known. Start-up and checkpoints are not included. The speed must be known, and the plan's position."""
    assert speed.tokens_per_second is not None
    training, validating = _seconds(plan, speed, speed.tokens_per_second)
    parts = {"training": training, "validation": validating}
    if plan.benchmarks() and speed.benchmark_seconds is not None:
        parts["benchmarks"] = plan.benchmarks() * speed.benchmark_seconds
    return parts


def _seconds(plan: Plan, speed: PlannedSpeed, tokens_per_second: float) -> tuple[float, float]:
    """Seconds of training and of validation."""
    layout = plan.layout
    # The microbatches of the rank that has most of them: the others wait for it.
    microbatches = plan.config.validation_batches or 0
    if plan.config.validation_ranks == "all":
        microbatches = math.ceil(microbatches / layout.world_size)
    training = plan.tokens() / tokens_per_second
    # A forward pass is a third of a step's work.
    work = plan.validations() * microbatches * layout.microbatch_tokens * layout.world_size / 3
    validating = work / tokens_per_second
    if speed.includes_validation and training:
        share = training / (training + validating) if speed.training_share is None else speed.training_share
        return training * share, training * (1 - share)
    return training, validating
