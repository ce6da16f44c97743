"""What a run will do and cost, worked out without doing any of it."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.common.errors import UserError
from harness.common.options import TrainOptions
from harness.common.units import GIB
from harness.data.dataset import Dataset, check_token_ids, is_present
from harness.data.loader import BatchLayout
from harness.model.tensor_names import check_weights_file
from harness.runs.checkpoint_lookup import choose_start, refuse_unnamed
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta, upgrade_notebook_meta
from harness.runs.experiment import Experiment, Position
from harness.runs.intervals import times_due
from harness.runs.optimizer_state import optimizer_state_bytes
from harness.runs.planned_speed import PlannedSpeed, plan_speed
from harness.runs.train_config import TrainConfig

COLUMNS = 79
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

    def validations(self) -> int:
        every = self.config.validation_interval
        return self._times(every) if every else 0

    def benchmarks(self) -> int:
        """How often train.json's benchmark tasks will be evaluated."""
        every = self.config.benchmark_interval
        return self._times(every) if every else 0

    def checkpoints(self) -> int:
        """How many checkpoints will be written from here on."""
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

    def check_disk(self, folder: Path) -> None:
        """Raises UserError if the disk under `folder` cannot hold the checkpoints: better now than after hours."""
        free = shutil.disk_usage(folder).free
        if self.position is not None and self.disk_bytes() > free:
            raise UserError(
                f"{folder}: the run's {self.checkpoints():,} checkpoints need {self.disk_bytes() / GIB:.2f} GiB, but "
                f"{free / GIB:.2f} GiB are free; set keep_checkpoints in train.json, raise checkpoint_interval, or "
                "use another disk (--runs-dir)"
            )

    def tokens(self) -> int:
        assert self.position is not None
        return (self.position.total_steps - self.position.first_step) * self.layout.global_tokens


def describe_plan(plan: Plan, model: BaseModel, speed: PlannedSpeed) -> str:
    """The plan as text for a terminal."""
    layout, config = plan.layout, plan.config
    lines = [*_wrap(f"Plan for {plan.name}: nothing is trained or downloaded", following=""), ""]
    lines += _settings("model.json", model.model_dump()) + _settings("train.json", config.model_dump())
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        *([("starts from", str(plan.initial_weights))] if plan.initial_weights else []),
        ("FLOPs per token", f"{plan.flops_per_token:,}"),
        (
            "global batch",
            f"{layout.world_size} ranks x {layout.microbatch_size} sequences x {layout.accumulation_steps} "
            "accumulation steps\n"
            f"= {layout.global_tokens // layout.context_length:,} sequences = {layout.global_tokens:,} tokens",
        ),
        *_share_rows(plan),
        *(_work_rows(plan, speed) if plan.position else [("global steps", _unknown(config))]),
    ]
    return "\n".join(lines + _table(rows))


def _share_rows(plan: Plan) -> list[tuple[str, str]]:
    if not plan.config.shard_optimizer:
        return []
    whole, ranks = plan.optimizer_bytes / GIB, plan.layout.world_size
    return [("optimizer", f"{whole:.2f} GiB of state, about {whole / ranks:.2f} on each of {ranks} ranks")]


def _work_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    assert plan.position is not None
    position, config = plan.position, plan.config
    rows = [("global steps", f"{position.total_steps:,}"), ("tokens", f"{plan.tokens():,}")]
    if position.first_step:
        done = f"{position.first_step:,} steps, {position.tokens_seen:,} tokens"
        more = f"{position.total_steps - position.first_step:,} more"
        rows = [("done already", done), ("global steps", more), ("tokens", f"{plan.tokens():,} more")]
    each = f"{config.validation_batches} microbatches" if config.validates else "without validation"
    disk = f"{plan.disk_bytes() / GIB:.2f} GiB at most, {plan.checkpoint_bytes() / GIB:.2f} each"
    rows += [("validations", f"{plan.validations():,} ({each})"), *_benchmark_rows(plan, speed)]
    return [*rows, ("checkpoints", f"{plan.checkpoints():,} ({disk})"), *_time_rows(plan, speed)]


def _benchmark_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    tasks = plan.config.benchmark_tasks
    if tasks is None:
        return []
    each = f"{', '.join(tasks)}; {plan.config.benchmark_examples:,} examples each"
    said = f"{plan.benchmarks():,} ({each})"
    if speed.benchmark_seconds is None:
        said += "\nhow long they take is not known, and not counted"
    return [("benchmarks", said)]


def _time_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    """What it takes at that speed. Validation is an estimate; saving checkpoints is not in it."""
    if speed.tokens_per_second is None:
        return [("time and cost", f"unknown: {speed.source}")]
    parts = planned_seconds(plan, speed)
    training, validating = parts["training"], parts["validation"]
    over = "training and validation together" if speed.includes_validation else "training alone, without validation"
    said = f"{speed.tokens_per_second:,.0f} tokens/s of {over}\n({speed.source})"
    told = "estimated" if speed.training_share is None else "as reported"
    time = f"{_hours(training)} training + {_hours(validating)} validation ({told})"
    if speed.includes_validation and training:
        time += f"\n= {_hours(training + validating)}, at {plan.tokens() / training:,.0f} tokens/s of training"
    if "benchmarks" in parts:
        time += f"\n+ {_hours(parts['benchmarks'])} benchmarks, as this run's earlier ones"
    cost = _cost(plan.config.price_per_hour, parts)
    if speed.uncertainty:
        seconds, price = sum(parts.values()), plan.config.price_per_hour
        time += f"\non paper: {_range(seconds, speed.uncertainty, _hours)} in all"
        if price is not None:
            cost += f"\non paper: {_range(seconds * price / 3600, speed.uncertainty, '${:,.2f}'.format)}"
    return [("speed", said), ("time", time), ("cost", cost)]


def planned_seconds(plan: Plan, speed: PlannedSpeed) -> dict[str, float]:
    """How long each phase of the plan takes: training, validation, and the benchmarks if there are any and their time
    is known. Start-up and checkpoints are not in it. The speed must be known, and the plan's position."""
    assert speed.tokens_per_second is not None
    training, validating = _seconds(plan, speed, speed.tokens_per_second)
    parts = {"training": training, "validation": validating}
    if plan.benchmarks() and speed.benchmark_seconds is not None:
        parts["benchmarks"] = plan.benchmarks() * speed.benchmark_seconds
    return parts


def _range(quantity: float, uncertainty: float, write: Callable[[float], str]) -> str:
    """What a quantity that is inverse to an uncertain speed may come to."""
    return f"{write(quantity / (1 + uncertainty))} to {write(quantity / (1 - uncertainty))}"


def _seconds(plan: Plan, speed: PlannedSpeed, tokens_per_second: float) -> tuple[float, float]:
    """Of training and of validation."""
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


def _cost(price: float | None, seconds: dict[str, float]) -> str:
    if price is None:
        return "unknown: no price_per_hour in train.json"
    dollars = {part: spent * price / 3600 for part, spent in seconds.items()}
    parts = " + ".join(f"${cost:,.2f} {part}" for part, cost in dollars.items())
    return f"{parts} = ${sum(dollars.values()):,.2f} at ${price}/h"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"


def _unknown(config: TrainConfig) -> str:
    return f"unknown until {config.dataset} is on this machine (min_train_tokens is -1)"


def _settings(title: str, values: dict[str, Any]) -> list[str]:
    """A configuration with its defaults filled in."""
    items = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return [*_wrap(f"{title}:  {'  '.join(items)}", following=" " * 4), ""]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, value in rows:
        for index, text in enumerate(value.split("\n")):
            lines += _wrap(f"{'' if index else label:<{width}}{text}", following=" " * width)
    return lines


def _wrap(text: str, following: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=following, break_on_hyphens=False, drop_whitespace=True)


def make_plan(experiment: Experiment, world_size: int, meta: CheckpointMeta | None) -> Plan:
    """The plan of what is left to do after the checkpoint that `meta` describes, or of the whole run.

    The dataset is consulted if it is on this machine. Raises UserError for what cannot work.
    """
    layout = experiment.layout(world_size)
    config, model = experiment.config, experiment.model
    position = None
    if is_present(experiment.datasets_dir, config.dataset, experiment.splits):
        dataset = Dataset.open(experiment.datasets_dir, config.dataset)
        if meta is not None:
            experiment.check_checkpoint(meta, dataset)
        experiment.check_validation_slice(layout, dataset)
        for split in experiment.splits:
            check_token_ids(dataset, split, model.vocab_size)
        position = experiment.position(layout, len(dataset.split("train")), meta)
    elif config.min_train_tokens != -1:
        position = experiment.position(layout, sys.maxsize, meta)
    initial = experiment.initial_weights if meta is None else None
    return Plan(
        *(experiment.run.path.name, config, model.parameters, model.flops_per_token, layout, position),
        optimizer_bytes=optimizer_state_bytes(config, model),
        initial_weights=initial,
    )


def planned_start(experiment: Experiment, world_size: int, checkpoint: str | None) -> CheckpointMeta | None:
    """The meta.json of the checkpoint that training would continue from: the named one, or the latest; None if it would
    start. A notebook's is completed, and refused where training would refuse it. Raises UserError."""
    start = choose_start(experiment.run.checkpoints, checkpoint)
    if start is None:
        return None
    meta, config = read_meta(start), experiment.config
    refuse_unnamed(start, meta, checkpoint)
    here = is_present(experiment.datasets_dir, config.dataset, experiment.splits)
    provenance = experiment.provenance(Dataset.open(experiment.datasets_dir, config.dataset)) if here else None
    return upgrade_notebook_meta(meta, provenance, experiment.layout(world_size).global_tokens)


def print_plan(experiment: Experiment, checkpoint: str | None, ranks: int, options: TrainOptions) -> None:
    """Print what the command would do with `checkpoint` (None: with the latest) on so many ranks, if no other number is
    assumed. Raises UserError for what training would refuse, but for the names of benchmarks."""
    ranks = options.assume_world_size or ranks
    plan = make_plan(experiment, ranks, None if options.restart else planned_start(experiment, ranks, checkpoint))
    if plan.initial_weights is not None:
        check_weights_file(plan.initial_weights, experiment.model)
    speed = plan_speed(experiment, plan.layout, options)
    print(describe_plan(plan, experiment.model, speed), flush=True)
    if options.assume_world_size is None:  # else it is another machine's disk that counts
        plan.check_disk(experiment.run.path)
