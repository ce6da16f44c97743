"""The live objects of a run as plain data for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.common.errors import UserError
from harness.distributed.world import World
from harness.model.config import ModelConfig
from harness.runs.notebook import optimizer_by_name
from harness.training.loss_meter import LossMeter
from harness.training.rng import random_state, seed_for_rank, set_random_state
from harness.training.step import OptimizerStep


def capture_ranks(meter: LossMeter, world: World) -> dict[str, Any]:
    """What each rank has of its own: its random state and the losses it has not reported yet. Collective."""
    return {"ranks": world.gather({"random": random_state(world.device), "window": meter.state()})}


def restore_ranks(saved: dict[str, Any], meter: LossMeter, world: World, *, seed: int, step: int) -> None:
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
            own_losses, own_random = ranks[world.rank]
            meter.load_state(own_losses)
            set_random_state(own_random, world.device)
            return
        seed_for_rank(seed, world.rank, step)
        if world.is_main:
            meter.load_merged([values for values, _ in ranks])


def capture_optimizer(step: OptimizerStep, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's and the scaler's states: rank 0's are the ones to save. Collective."""
    return step.optimizer.named_state(world), step.scaler.state_dict()


def restore_optimizer(step: OptimizerStep, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Take over what `capture_optimizer` has given on rank 0; called on every rank.

    Raises UserError, naming the file, for states of something else.
    """
    optimizer, scaler = saved
    with explaining("optimizer.pt"):
        step.optimizer.load_named_state(optimizer)
    if scaler and step.scaler.is_enabled():
        with explaining("scaler.pt"):
            step.scaler.load_state_dict({key: _number(scaler[key]) for key in step.scaler.state_dict()})


def load_notebook_optimizer(
    step: OptimizerStep, config: ModelConfig, saved: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """`restore_optimizer` of a notebook's states; without an optimizer's, it starts afresh."""
    optimizer, scaler = saved
    if optimizer:
        with explaining("optimizer.pt"):
            restore_optimizer(step, (optimizer_by_name(optimizer, step.optimizer.state_shapes(), config), scaler))


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
