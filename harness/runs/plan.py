"""What a run will do and cost, worked out without doing any of it."""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from contextlib import suppress
from dataclasses import dataclass, replace
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
from harness.runs.optimizer_state import optimizer_state_bytes
from harness.runs.summary import RunSummary, read_summary
from harness.runs.throughput import Measured, same_kernels
from harness.runs.train_config import TrainConfig

COLUMNS = 79
WEIGHT_BYTES = 4  # per parameter: fp32
# Keys of train.json that say what is evaluated, and so how long it takes.
BENCHMARK_KEYS = ("benchmark_interval", "benchmark_tasks", "benchmark_examples")
GIVE_A_SPEED = "give --assume-tps or --assume-tps-with-validation"
OTHER_BYTES = 2**20  # the rest of a checkpoint: random states, tokenizer, meta.json


def times_due(steps: range, every: int) -> int:
    """How many of the steps are a multiple of `every`, or the last."""
    if not steps:
        return 0
    # Counted, not walked through: there may be more steps than anyone can wait for.
    return steps[-1] // every - (steps[0] - 1) // every + (steps[-1] % every != 0)


@dataclass(frozen=True)
class Plan:
    """A run's arithmetic. `position` is None while the dataset's length is needed and not known yet."""

    name: str
    config: TrainConfig
    parameters: int
    flops_per_token: int
    layout: BatchLayout
    position: Position | None
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
        weights, optimizer = self.parameters * WEIGHT_BYTES, optimizer_state_bytes(self.config, self.parameters)
        return weights + optimizer + OTHER_BYTES

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


@dataclass(frozen=True)
class PlannedSpeed:
    """Tokens per second, or None, and where the number comes from, or why there is none."""

    tokens_per_second: float | None
    source: str
    includes_validation: bool = False  # over training and validation together; else over training alone
    benchmark_seconds: float | None = None  # of evaluating all of train.json's benchmark tasks once


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
        *(_work_rows(plan, speed) if plan.position else [("global steps", _unknown(config))]),
    ]
    return "\n".join(lines + _table(rows))


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
    training, validating = _seconds(plan, speed.tokens_per_second, speed.includes_validation)
    over = "training and validation together" if speed.includes_validation else "training alone, without validation"
    said = f"{speed.tokens_per_second:,.0f} tokens/s of {over}\n({speed.source})"
    time = f"{_hours(training)} training + {_hours(validating)} validation (estimated)"
    if speed.includes_validation and training:
        time += f"\n= {_hours(training + validating)}, at {plan.tokens() / training:,.0f} tokens/s of training"
    parts = {"training": training, "validation": validating}
    if plan.benchmarks() and speed.benchmark_seconds is not None:
        parts["benchmarks"] = plan.benchmarks() * speed.benchmark_seconds
        time += f"\n+ {_hours(parts['benchmarks'])} benchmarks, as this run's earlier ones"
    return [("speed", said), ("time", time), ("cost", _cost(plan.config.price_per_hour, parts))]


def _seconds(plan: Plan, tokens_per_second: float, includes_validation: bool) -> tuple[float, float]:
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
    if includes_validation and training:
        share = training / (training + validating)
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
    return Plan(experiment.run.path.name, config, model.parameters, model.flops_per_token, layout, position, initial)


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


def plan_speed(experiment: Experiment, layout: BatchLayout, assumed: PlannedSpeed | None) -> PlannedSpeed:
    """The assumed speed, or the one that an earlier run of this model and batch has measured; and how long this run's
    earlier benchmarks took."""
    speed = assumed or _measured_speed(experiment, layout)
    return replace(speed, benchmark_seconds=earlier_benchmark_seconds(experiment, layout))


def earlier_benchmark_seconds(experiment: Experiment, layout: BatchLayout) -> float | None:
    """Seconds of evaluating the benchmark tasks once, by this run's own summary.json; None if that does not say it of
    today's tasks on as many ranks."""
    try:
        summary = read_summary(experiment.run.summary)
    except UserError:
        return None
    now = experiment.config.model_dump(mode="json")
    is_alike = all(summary.train.get(key) == now[key] for key in BENCHMARK_KEYS)
    spent = summary.seconds.get("benchmarks", 0.0)
    every, steps = experiment.config.benchmark_interval, summary.global_steps or 0
    if (
        every is None
        or not is_alike
        or summary.world_size != layout.world_size
        or steps < 1
        or not 0 < spent < math.inf
    ):
        return None
    return spent / times_due(range(steps), every)


def _measured_speed(experiment: Experiment, layout: BatchLayout) -> PlannedSpeed:
    run = experiment.run.path
    found = earlier_speeds(run.parent, experiment, layout)
    best = max(found, key=lambda earlier: earlier.preference(run), default=None)
    if best is None:
        return PlannedSpeed(None, f"no earlier run of this shape; {GIVE_A_SPEED}")
    return best.planned()


def assumed_speed(training: float | None, with_validation: float | None) -> PlannedSpeed | None:
    """What the options --assume-tps and --assume-tps-with-validation say, of which at most one is given."""
    if with_validation is not None:
        return PlannedSpeed(with_validation, "assumed", includes_validation=True)
    return None if training is None else PlannedSpeed(training, "assumed")


@dataclass(frozen=True)
class EarlierSpeed:
    """What a run's summary.json tells of its speed."""

    summary: Path
    tokens_per_second: float
    measured: Measured | None  # None: it does not say
    device: str

    def preference(self, run: Path) -> tuple[bool, bool, float]:
        """The higher, the better: what can be believed, then this run's own, then the longest."""
        if self.measured is None:
            return False, self.summary.parent == run, 0.0
        return self.measured.is_believable, self.summary.parent == run, self.measured.seconds

    def planned(self) -> PlannedSpeed:
        if self.measured is None:
            reason = "is an earlier version's, and does not say what its speed was measured over"
            return PlannedSpeed(None, f"{self.summary} {reason}; {GIVE_A_SPEED}")
        over = f"{self.measured.global_steps:,} steps, {self.measured.tokens:,} tokens, {self.measured.seconds:,.1f} s"
        if self.measured.is_believable:
            return PlannedSpeed(
                self.tokens_per_second, f"measured over {over} of training on {self.device}, in {self.summary}"
            )
        short = f"less than {self.measured.shortfall} of training is too little to tell"
        return PlannedSpeed(None, f"{self.summary} measured {over}, and {short}; {GIVE_A_SPEED}")


def earlier_speeds(runs_dir: Path, experiment: Experiment, layout: BatchLayout) -> list[EarlierSpeed]:
    """The speeds that runs in `runs_dir` have measured with this model and batch, if their train.json let a step take
    as long as this one's does."""
    model, train = experiment.model.model_dump(mode="json"), experiment.config.model_dump(mode="json")
    found = []
    for path in sorted(runs_dir.glob("*/summary.json")):
        with suppress(UserError):  # not a summary of ours; a plan does not depend on it
            summary = read_summary(path)
            speed = summary.tokens_per_second
            is_alike = summary.model == model and _layout(summary) == _layout(layout)
            if is_alike and same_kernels(summary.train, train) and speed is not None and 0 < speed < math.inf:
                found.append(EarlierSpeed(path, speed, summary.measured, summary.device))
    return found


def _layout(record: RunSummary | BatchLayout) -> tuple[int | None, ...]:
    return record.world_size, record.microbatch_size, record.accumulation_steps


def print_plan(experiment: Experiment, checkpoint: str | None, ranks: int, options: TrainOptions) -> None:
    """Print what the command would do with `checkpoint` (None: with the latest) on so many ranks, if no other number is
    assumed. Raises UserError for what training would refuse, but for the names of benchmarks."""
    ranks = options.assume_world_size or ranks
    plan = make_plan(experiment, ranks, None if options.restart else planned_start(experiment, ranks, checkpoint))
    if plan.initial_weights is not None:
        check_weights_file(plan.initial_weights, experiment.model)
    assumed = assumed_speed(options.assume_tps, options.assume_tps_with_validation)
    print(describe_plan(plan, experiment.model, plan_speed(experiment, plan.layout, assumed)), flush=True)
    if options.assume_world_size is None:  # else it is another machine's disk that counts
        plan.check_disk(experiment.run.path)
