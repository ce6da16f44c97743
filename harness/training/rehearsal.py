"""What training does after a step, done once for the memory it takes, and for what it leaves in the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from harness.common.errors import RunError, UserError
from harness.common.memory import is_out_of_memory
from harness.distributed.replicas import weight_checksums
from harness.distributed.world import World
from harness.runs.checkpoint_meta import TrainState
from harness.runs.metrics import ValidationEvent
from harness.training.evaluations import Evaluations
from harness.training.loss_meter import LossMeter
from harness.training.reporter import Reporter
from harness.training.step import OptimizerStep, StepResult


class Saver(Protocol):
    """Of checkpointing.Checkpointer, what is used here."""

    def save(self, state: TrainState) -> None: ...
    def finish(self) -> None: ...


class RehearsedTrainer(Protocol):
    """Of ddp_train.Trainer, what is used here. Its run directory is a folder that goes away."""

    world: World  # of this process alone
    state: TrainState
    optimizer_step: OptimizerStep
    meter: LossMeter
    evaluations: Evaluations
    reporter: Reporter

    @property
    def checkpointer(self) -> Saver: ...


@dataclass
class Rehearsal:
    """On the ranks of `world`, each on its own; the first saves and draws."""

    world: World
    build_trainer: Callable[[World], RehearsedTrainer]
    _trainer: RehearsedTrainer | None = None

    def build_step(self) -> OptimizerStep:
        self._trainer = self.build_trainer(World(0, self.world.local_rank, 1, 1, self.world.device))
        return self._trainer.optimizer_step

    def rehearse(self, result: StepResult) -> None:
        """Report, draw, save and sample as after a step. On a GPU nothing of that takes its memory.

        Raises what is_out_of_memory knows, if that is what happens; a disk that is full is said, and no more.
        """
        trainer = self._trainer
        if trainer is None or self.world.device.type != "cpu":
            return
        weight_checksums(trainer.optimizer_step.bare_model)
        if not self.world.is_main:
            return
        trainer.state.advance(0, 0)
        trainer.meter.add(result)
        metrics = trainer.meter.reduce(trainer.world)
        trainer.reporter.training(metrics, trainer.state, trainer.optimizer_step.optimizer.learning_rate)
        self._draw(trainer, metrics.loss)
        try:
            trainer.checkpointer.save(trainer.state)
            trainer.checkpointer.finish()
        except RunError as error:
            if is_out_of_memory(error):
                raise
            print(f"a checkpoint's memory is not counted: {error}", file=sys.stderr, flush=True)
        if trainer.evaluations.config.sample_interval is not None:
            with suppress(UserError):  # training will say it
                trainer.reporter.sample(trainer.evaluations.sample(), trainer.state)

    def _draw(self, trainer: RehearsedTrainer, loss: float) -> None:
        from harness.runs.chart import draw_training_chart

        run = trainer.reporter.run
        trainer.reporter.metrics.append(ValidationEvent(global_step=0, loss=loss))
        try:
            draw_training_chart(run.metrics, run.chart, title=run.path.name)
        except Exception as error:
            if is_out_of_memory(error):  # anything else is a warning in training, too
                raise
