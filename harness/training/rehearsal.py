"""The work of training between two steps, done once for the memory it takes, and for what it leaves in the process."""

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
from harness.training.evaluations import Evaluations
from harness.training.loss_meter import LossMeter
from harness.training.reporter import Reporter
from harness.training.step import OptimizerStep, StepResult


class Saver(Protocol):
    """The methods of checkpointing.Checkpointer that are used here."""

    def save(self, state: TrainState) -> None: ...
    def finish(self) -> None: ...


class RehearsedTrainer(Protocol):
    """The attributes of ddp_train.Trainer that are used here. Its run directory is a temporary folder."""

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
    """On the ranks of `world`, each on its own; the first saves."""

    world: World
    build_trainer: Callable[[World], RehearsedTrainer]
    _trainer: RehearsedTrainer | None = None

    def build_step(self) -> OptimizerStep:
        here = self.world
        alone = World(0, here.local_rank, 1, 1, here.device, stands_for=(here.rank, here.size))
        self._trainer = self.build_trainer(alone)
        return self._trainer.optimizer_step

    def rehearse(self, result: StepResult) -> None:
        """Report, save and sample as after a step. On a GPU nothing of that takes its memory.

        Raises what is_out_of_memory knows, if that is what happens; a disk that is full is said, and no more.
        """
        trainer = self._trainer
        if trainer is None or self.world.device.type != "cpu":
            return
        weight_checksums(trainer.optimizer_step.bare_model)
        if not self.world.is_main:
            return
        trainer.state.advance(0, trainer.reporter.start.layout.global_tokens)
        trainer.meter.add(result)
        metrics = trainer.meter.reduce(trainer.world)
        trainer.reporter.training(metrics, trainer.state, trainer.optimizer_step.optimizer.learning_rate)
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
