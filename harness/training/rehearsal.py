"""What training does between two steps, done once for the memory it takes, and for what it leaves in the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from harness.common.errors import RunError, UserError
from harness.common.memory import is_out_of_memory
from harness.distributed.replicas import weight_checksums
from harness.distributed.world import World
from harness.runs.metrics import ValidationEvent
from harness.training.job import Job
from harness.training.step import OptimizerStep, StepResult


@dataclass
class Rehearsal:
    """A job of one process whose run directory is a folder that goes away."""

    world: World  # of all ranks: the first saves and draws
    build_job: Callable[[World], Job]
    kept: list[Any] = field(default_factory=list)
    _job: Job | None = None

    def build_step(self) -> OptimizerStep:
        silent = World(1, self.world.local_rank, 1, 1, self.world.device)  # no progress is shown to anyone but rank 0
        self._job = self.build_job(silent)
        self._job.world = replace(silent, rank=0)
        return self._job.step

    def rehearse(self, result: StepResult) -> None:
        """Report, draw, save and sample as after a step. On a GPU nothing of that takes its memory.

        Raises what is_out_of_memory knows, if that is what happens; a disk that is full is said, and no more.
        """
        job = self._job
        if job is None or self.world.device.type != "cpu":
            return
        weight_checksums(job.model)
        if not self.world.is_main:
            return
        job.state.global_step = 0
        job.meter.add(result)
        report = job.meter.report(job.world)
        job.record_report(report)
        self._draw(job, report.loss)
        try:
            self._save(job)
        except RunError as error:
            if is_out_of_memory(error):
                raise
            print(f"a checkpoint's memory is not counted: {error}", file=sys.stderr, flush=True)
        if job.config.sample_interval is not None:
            with suppress(UserError):  # training will say it
                job.print_sample()

    def _draw(self, job: Job, loss: float) -> None:
        from harness.runs.chart import draw_training_chart

        job.metrics.append(ValidationEvent(global_step=0, loss=loss))
        try:
            draw_training_chart(job.run.metrics, job.run.chart, title=job.run.path.name)
        except Exception as error:
            if is_out_of_memory(error):  # anything else is a warning in training, too
                raise

    def _save(self, job: Job) -> None:
        write = job.write_checkpoint

        def write_and_keep(parts: dict[str, Any], protected: set[str]) -> None:
            if job.config.async_checkpoint:  # the next steps run while the copies are still there
                self.kept.append(parts)
            write(parts, protected)

        job.write_checkpoint = write_and_keep
        job.save(planned=True)
        job.finish_saving()
