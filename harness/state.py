"""The live objects of a run as plain data for a checkpoint, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from harness.errors import UserError
from harness.losses import LossWindow
from harness.measured import Measured
from harness.notebook_checkpoint import optimizer_by_name
from harness.optim import load_optimizer_state, optimizer_state
from harness.randomness import random_state, seed_for_rank, set_random_state
from harness.step import TrainStep
from harness.world import World


@dataclass
class Tally:
    """What a run has come to so far: the same on every rank, and in every checkpoint's meta.json."""

    global_step: int = -1  # the last one done
    tokens_seen: int = 0
    train_loss: float | None = None  # at the last report; after a checkpoint, the mean since the one before
    val_loss: float | None = None  # at the last validation
    best_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    loss_sum: float = 0.0  # over the microbatches reported since the last checkpoint
    loss_count: int = 0
    foreign_tokens: int = 0  # of those seen, what another program trained: no seconds of ours belong to them
    # Where the speed's measurement began: at the start, or when training went on with another batch or machine.
    measured_from_step: int = -1
    measured_from_tokens: int = 0
    measured_from_seconds: float = 0.0  # of training

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> Tally:
        values = {key: meta[key] for key in asdict(cls()) if key in meta}
        if values.get("loss_sum", 0.0) is None:  # JSON's way to say that it was not finite
            values["loss_sum"] = math.nan
        tally = cls(**values)
        if "measured_from_step" not in meta:
            # An earlier version's: some of its tokens may be another program's, and its seconds another machine's.
            tally.measure_from_here(meta.get("seconds", {}).get("training", 0.0))
        return tally

    @property
    def trained_tokens(self) -> int:
        """The tokens that the recorded seconds of training belong to."""
        return max(0, self.tokens_seen - self.foreign_tokens)

    def measure_from_here(self, training_seconds: float) -> None:
        """What was trained up to now, in so many seconds, says nothing of the speed from here on."""
        self.measured_from_step, self.measured_from_tokens = self.global_step, self.tokens_seen
        self.measured_from_seconds = training_seconds

    def measured(self, training_seconds: float) -> Measured:
        """The training that the speed is measured over, after so many seconds of it in all."""
        return Measured(
            self.global_step - self.measured_from_step,
            self.tokens_seen - self.measured_from_tokens,
            training_seconds - self.measured_from_seconds,
        )

    def forget_best(self) -> None:
        """Losses from here on are measured on other text, and cannot be compared with those before."""
        self.best_loss = self.best_step = self.val_loss = None


def capture_ranks(window: LossWindow, world: World) -> dict[str, Any]:
    """What each rank has of its own: its random state and the losses it has not reported yet. Collective."""
    return {"ranks": world.gather({"random": random_state(world.device), "window": window.state()})}


def restore_ranks(saved: dict[str, Any], window: LossWindow, world: World, *, seed: int, step: int) -> None:
    """Put this rank's own state back; with another number of ranks than before, give it a new one of its own.

    Raises UserError for a state of something else.
    """
    with explaining("train_state.pt"):
        if not isinstance(saved, dict):  # a tensor would only warn of being asked for a name
            raise ValueError("not a table of states")
        ranks = [(rank["window"], rank["random"]) for rank in saved["ranks"]]
        if not ranks:
            raise ValueError("no ranks")
        if len(ranks) == world.size:
            own_window, own_random = ranks[world.rank]
            window.load_state(own_window)
            set_random_state(own_random, world.device)
            return
        seed_for_rank(seed, world.rank, step)
        if world.is_main:
            window.load_merged([values for values, _ in ranks])


def capture_optimizer(step: TrainStep, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's and the scaler's states."""
    return optimizer_state(step.optimizer, model), step.scaler.state_dict()


def restore_optimizer(step: TrainStep, model: nn.Module, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Raises UserError, naming the file, for states of something else."""
    optimizer, scaler = saved
    with explaining("optimizer.pt"):
        load_optimizer_state(step.optimizer, model, optimizer)
    if scaler and step.scaler.is_enabled():
        with explaining("scaler.pt"):
            step.scaler.load_state_dict({key: _number(scaler[key]) for key in step.scaler.state_dict()})


def restore_notebooks(step: TrainStep, model: nn.Module, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """`restore_optimizer` of a notebook's states; without an optimizer's, it starts afresh."""
    optimizer, scaler = saved
    if optimizer:
        with explaining("optimizer.pt"):
            restore_optimizer(step, model, (optimizer_by_name(optimizer, model.state_dict()), scaler))


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is not a number")
    return value


@contextmanager
def explaining(file: str) -> Iterator[None]:
    """Turn what a state of unknown structure raises into UserError. Its file was read without harm, and its hash is
    right, but it holds something else."""
    try:
        yield
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:100] if str(error) else type(error).__name__
        raise UserError(f"{file}: holds something else than this run's state: {reason}") from None
