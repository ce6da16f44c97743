"""What a run will do and cost, worked out without doing any of it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from harness.config import TrainConfig
from harness.continuation import Position
from harness.errors import UserError
from harness.experiment import Experiment
from harness.tokens import BatchShape, Dataset, check_vocabulary, is_present

GIB = 2**30
COLUMNS = 79
WEIGHT_BYTES, OPTIMIZER_BYTES = 4, 8  # per parameter: fp32 weights; AdamW's two fp32 averages
OTHER_BYTES = 2**20  # the rest of a checkpoint: random states, tokenizer, meta.json


@dataclass(frozen=True)
class Plan:
    """A run's arithmetic. `position` is None while the dataset's length is needed and not known yet."""

    name: str
    config: TrainConfig
    parameters: int
    flops_per_token: int
    shape: BatchShape
    position: Position | None

    def validations(self) -> int:
        every = self.config.validation_interval
        return self._times(every) if every else 0

    def checkpoints(self) -> int:
        """How many checkpoints will be written from here on."""
        return self._times(self.config.checkpoint_every)

    def _times(self, every: int) -> int:
        """Steps of this plan that are a multiple of `every`, or the last."""
        assert self.position is not None
        first, last = self.position.first_step, self.position.total_steps - 1
        if first > last:
            return 0
        # Counted, not walked through: there may be more steps than anyone can wait for.
        return last // every - (first - 1) // every + (last % every != 0)

    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return self.parameters * (WEIGHT_BYTES + OPTIMIZER_BYTES) + OTHER_BYTES

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
        return (self.position.total_steps - self.position.first_step) * self.shape.global_tokens


def describe_plan(plan: Plan, model: BaseModel, speed: tuple[float, str] | None) -> str:
    """The plan as text for a terminal; `speed` is tokens per second and where the number comes from."""
    shape, config = plan.shape, plan.config
    lines = [*_wrap(f"Plan for {plan.name}: nothing is trained or downloaded", following=""), ""]
    lines += _settings("model.json", model.model_dump()) + _settings("train.json", config.model_dump())
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        ("FLOPs per token", f"{plan.flops_per_token:,}"),
        (
            "global batch",
            f"{shape.world_size} ranks x {shape.microbatch_size} sequences x {shape.accumulation_steps} accumulation "
            f"steps\n= {shape.global_tokens // shape.context_length:,} sequences = {shape.global_tokens:,} tokens",
        ),
        *(_work_rows(plan, speed) if plan.position else [("global steps", _unknown(config))]),
    ]
    return "\n".join(lines + _table(rows))


def _work_rows(plan: Plan, speed: tuple[float, str] | None) -> list[tuple[str, str]]:
    assert plan.position is not None
    position, config = plan.position, plan.config
    rows = [("global steps", f"{position.total_steps:,}"), ("tokens", f"{plan.tokens():,}")]
    if position.first_step:
        done = f"{position.first_step:,} steps, {position.tokens_seen:,} tokens"
        more = f"{position.total_steps - position.first_step:,} more"
        rows = [("done already", done), ("global steps", more), ("tokens", f"{plan.tokens():,} more")]
    each = f"{config.validation_batches} microbatches" if config.validates else "without validation"
    disk = f"{plan.disk_bytes() / GIB:.2f} GiB at most, {plan.checkpoint_bytes() / GIB:.2f} each"
    rows += [("validations", f"{plan.validations():,} ({each})"), ("checkpoints", f"{plan.checkpoints():,} ({disk})")]
    if speed is None:
        rows.append(("time and cost", "unknown: no earlier run of this shape; give --assume-tps"))
        return rows
    tokens_per_second, source = speed
    validation_tokens = plan.validations() * (config.validation_batches or 0) * plan.shape.microbatch_tokens
    training = plan.tokens() / tokens_per_second
    # A forward pass is a third of a step's work; on rank 0 alone, the other devices wait.
    devices = plan.shape.world_size if config.validation_ranks == "rank0" else 1
    validating = validation_tokens * devices / 3 / tokens_per_second
    rows.append(("speed", f"{tokens_per_second:,.0f} tokens/s ({source})"))
    rows.append(("time", f"{_hours(training)} training + {_hours(validating)} validation (estimated)"))
    rows.append(("cost", _cost(config.price_per_hour, training, validating)))
    return rows


def _cost(price: float | None, training: float, validating: float) -> str:
    if price is None:
        return "unknown: no price_per_hour in train.json"
    parts = [seconds * price / 3600 for seconds in (training, validating)]
    return f"${parts[0]:,.2f} training + ${parts[1]:,.2f} validation = ${sum(parts):,.2f} at ${price}/h"


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


def make_plan(experiment: Experiment, world_size: int, meta: dict[str, Any] | None) -> Plan:
    """The plan of what is left to do after the checkpoint that `meta` describes, or of the whole run.

    The dataset is consulted if it is on this machine. Raises UserError for what cannot work.
    """
    shape = experiment.shape(world_size)
    config, model = experiment.config, experiment.model
    position = None
    if is_present(experiment.datasets_dir, config.dataset, experiment.splits):
        dataset = Dataset.open(experiment.datasets_dir, config.dataset)
        if meta is not None:
            experiment.check_checkpoint(meta, dataset)
        experiment.check_validation_slice(shape, dataset)
        for split in experiment.splits:
            check_vocabulary(dataset, split, model.vocab_size)
        position = experiment.position(shape, len(dataset.split("train")), meta)
    elif config.min_train_tokens != -1:
        position = experiment.position(shape, sys.maxsize, meta)
    return Plan(experiment.run.path.name, config, model.parameters, model.flops_per_token, shape, position)


def plan_speed(experiment: Experiment, shape: BatchShape, assumed: float | None) -> tuple[float, str] | None:
    """Tokens per second and where the number comes from: given, or measured by an earlier run of this shape."""
    if assumed is not None:
        return assumed, "assumed"
    wanted = {
        "model": experiment.model.model_dump(mode="json"),
        "world_size": shape.world_size,
        "microbatch_size": shape.microbatch_size,
        "accumulation_steps": shape.accumulation_steps,
    }
    return earlier_speed(experiment.run.path.parent, experiment.run.path.name, wanted)


def earlier_speed(runs_dir: Path, name: str, wanted: dict[str, Any]) -> tuple[float, str] | None:
    """Tokens per second of a finished run of the same shape, this run's own first; None if there is none.

    `wanted` holds the keys of summary.json that must be equal (model, world size, batch).
    """
    summaries = sorted(runs_dir.glob("*/summary.json"), key=lambda path: (path.parent.name != name, path))
    for path in summaries:
        try:
            summary = json.loads(path.read_text())
            if all(summary[key] == value for key, value in wanted.items()):
                return float(summary["tokens_per_second"]), f"measured in {path} on {summary['device']}"
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a summary of ours; a plan does not depend on it
    return None
