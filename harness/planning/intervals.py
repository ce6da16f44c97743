"""Work that is due after a step, such as a validation. The step and train.json alone decide which work is due, so that
the decision is the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.planning.experiment import Position
    from harness.runs.train_config import TrainConfig


def due_after(step: int, position: Position, config: TrainConfig, *, first: str = "report") -> set[str]:
    """Return the names of the work that is due after a global step. Work is done in the order "report", "validation",
    "benchmarks", "sample", "checkpoint", "weights_check", and names before `first` in this order are left out."""
    intervals = {  # in the order in which it is done
        "report": config.report_interval,
        "validation": config.validation_interval,
        "benchmarks": config.benchmark_interval,
        "sample": config.sample_interval,
        "checkpoint": config.checkpoint_every,
        "weights_check": config.weights_check_interval,
    }
    due = {name for name, interval in intervals.items() if position.is_due(step, interval)}
    # A validation or a checkpoint waits for the device anyway, and records the loss up to this step. So the step is
    # reported, too.
    if due & {"validation", "checkpoint"}:
        due.add("report")
    names = list(intervals)
    return due & set(names[names.index(first) :])


def times_due(steps: range, every: int) -> int:
    """Return how many of `steps` are multiples of `every`; the last step is always counted."""
    if not steps:
        return 0
    # Computed without iterating over the steps, because there may be too many.
    return steps[-1] // every - (steps[0] - 1) // every + (steps[-1] % every != 0)
