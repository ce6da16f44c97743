"""Budgets in hours and dollars: the most global steps whose planned time, at the speed that is known, stays within."""

from __future__ import annotations

from harness.common.errors import UserError
from harness.common.options import TrainOptions
from harness.data.loader import BatchLayout
from harness.runs.budget import SECONDS_PER_HOUR, Budget, check_countable, check_one_batch
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.experiment import Experiment, Position
from harness.runs.plan_costs import Plan, planned_seconds
from harness.runs.planned_speed import PlannedSpeed, plan_speed
from harness.runs.train_config import TrainConfig


def find_budget(
    experiment: Experiment, layout: BatchLayout, meta: CheckpointMeta | None, options: TrainOptions
) -> Budget | None:
    """What train.json's budget comes to, with the speed that `options` assume or that an earlier run has measured; as
    the checkpoint that `meta` describes has recorded it, if that is of the same budget. None for `min_train_tokens`.

    Raises UserError for a budget below one global batch, and for hours or dollars without a speed.
    """
    config = experiment.config
    known = experiment.budget(layout, meta)
    if known is not None or not config.is_timed:
        return known
    speed = _known_speed(experiment, layout, options)
    assert speed.tokens_per_second is not None
    tokens = _affordable_tokens(experiment, layout, speed)
    said = f"{speed.tokens_per_second:,.0f} tokens/s ({speed.source})"
    return Budget.of(config, tokens, said)


def _known_speed(experiment: Experiment, layout: BatchLayout, options: TrainOptions) -> PlannedSpeed:
    """Raises UserError if there is none, or only an estimated one that nobody has asked for."""
    speed, key = plan_speed(experiment, layout, options), experiment.config.budget
    if speed.tokens_per_second is None:
        raise UserError(f'train.json: key "{key}": needs a speed, and none is known: {speed.source}')
    if speed.uncertainty and options.assume_device is None:
        raise UserError(
            f'train.json: key "{key}": needs a measured speed, and there is one {speed.source}; give --assume-tps, or '
            "--assume-device to reckon with the estimate"
        )
    return speed


def _affordable_tokens(experiment: Experiment, layout: BatchLayout, speed: PlannedSpeed) -> int:
    """The most tokens in whole global batches whose training, validation and benchmarks, as planned, take no longer
    than the budget. Start-up and checkpoints are not in it, as in the plan."""
    config, model, batches = experiment.config, experiment.model, experiment.batches(layout)
    seconds = _seconds(config)

    def planned(steps: int) -> float:
        position = Position(0, steps, config.start_train_token, 0)
        plan = Plan(experiment.run.path.name, config, model.parameters, model.flops_per_token, layout, position)
        return sum(planned_seconds(plan, speed).values())

    check_one_batch(config, seconds / planned(1))
    # More steps never take less time: the most that fit are found by halving.
    assert speed.tokens_per_second is not None
    check_countable(config, seconds * speed.tokens_per_second)
    fits, too_many = 1, batches.steps_within(int(seconds * speed.tokens_per_second)) + 2
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if planned(middle) <= seconds else (fits, middle)
    return batches.tokens_before(fits)


def _seconds(config: TrainConfig) -> float:
    if config.target_hours is not None:
        return config.target_hours * SECONDS_PER_HOUR
    assert config.target_dollars is not None
    assert config.price_per_hour, "train.json is refused before"
    return config.target_dollars / config.price_per_hour * SECONDS_PER_HOUR
