"""The speed that a plan assumes, and its source: the first available of one that the user assumes, one measured by an
earlier run, one reported of this very run (harness/runs/reported.py), and one estimated on paper
(harness/planning/paper_speed.py).
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.common.errors import UserError
from harness.common.gpu_names import gpu_names
from harness.common.json_files import parse_config
from harness.common.options import TrainOptions
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.planning.experiment import Experiment
from harness.planning.intervals import times_due
from harness.planning.paper_speed import DEVICES, UNCERTAINTY, PaperDevice, find_device, paper_speed, too_small, why_not
from harness.runs.reported import Reported, read_reported
from harness.runs.summary import RunSummary, read_summary
from harness.runs.throughput import KERNEL_KEYS, Measured, same_kernels
from harness.runs.train_config import TrainConfig

# Keys of train.json that say what is evaluated, and so how long it takes.
BENCHMARK_KEYS = ("benchmark_interval", "benchmark_tasks", "benchmark_examples")
VALIDATION_KEYS = ("validation_interval", "validation_batches", "validation_ranks")
GIVE_A_SPEED = "give --assume-tps or --assume-tps-with-validation"
OR_A_DEVICE = f"{GIVE_A_SPEED}, or --assume-device for an estimated speed"


@dataclass(frozen=True)
class PlannedSpeed:
    """Tokens per second, or None, and where the number comes from, or why there is none."""

    tokens_per_second: float | None
    source: str
    includes_validation: bool = False  # over training and validation together; else over training alone
    training_share: float | None = None  # of the time that includes validation; None: to be estimated
    benchmark_seconds: float | None = None  # of evaluating all of train.json's benchmark tasks once
    uncertainty: float = 0.0  # the true speed is within this part of it, either way; 0: measured, or given
    device: PaperDevice | None = None  # the GPU whose speed it is, where that is a known one


def plan_speed(
    experiment: Experiment, layout: BatchLayout, options: TrainOptions, *, meant: PaperDevice | None = None
) -> PlannedSpeed:
    """The speed for this model and batch, and how long this run's earlier benchmarks took. `meant`: the device to
    reckon with where none is assumed and this machine has none that is known.

    Raises UserError for an --assume-device that is not known, or a reported.json that is none.
    """
    device = assumed_device(options.assume_device)
    speed = assumed_speed(options) or _measured_speed(experiment, layout, device)
    if speed.tokens_per_second is None:
        own = None if device else own_device(layout.world_size)
        reported = None if device else _reported_speed(experiment, layout, own)
        speed = reported or on_paper(experiment, layout, device or own or meant) or speed
    return replace(speed, benchmark_seconds=earlier_benchmark_seconds(experiment, layout))


def assumed_device(name: str | None) -> PaperDevice | None:
    """The device that --assume-device names. Raises UserError if there is no such one."""
    if name is None:
        return None
    found = find_device(name)
    if found is not None:
        return found
    known = ", ".join(device.name for device in DEVICES)
    raise UserError(f'--assume-device: nothing is known of "{name}"; there is {known}; or {GIVE_A_SPEED}')


def own_device(ranks: int) -> PaperDevice | None:
    """This machine's kind of GPU, if it has one for each rank and they are alike."""
    names = gpu_names()
    return find_device(names[0]) if len(names) >= ranks and len(set(names)) == 1 else None


def on_paper(experiment: Experiment, layout: BatchLayout, device: PaperDevice | None) -> PlannedSpeed | None:
    """Estimated speed on such devices, or the reason why there is none; None without a device."""
    if device is None:
        return None
    train = experiment.config.model_dump(mode="json")
    reason = why_not(train, layout.world_size, experiment.model) or too_small(experiment.model, device, layout, train)
    if reason is not None:
        return PlannedSpeed(None, f"no estimated speed for {device.name}: {reason}; {GIVE_A_SPEED}")
    speed = three_digits(paper_speed(experiment.model, device, layout, train))
    low, high = (three_digits(speed * (1 + sign * UNCERTAINTY)) for sign in (-1, 1))
    source = (
        f"estimated for {layout.world_size} x {device.name}: {low:,.0f} to {high:,.0f}; nobody has measured it, and "
        "docs/performance.md has the arithmetic"
    )
    return PlannedSpeed(speed, source, uncertainty=UNCERTAINTY, device=device)


def three_digits(number: float) -> float:
    """Significant digits that suit an estimate."""
    return float(f"{number:.3g}")


def assumed_speed(options: TrainOptions) -> PlannedSpeed | None:
    """Speed given by --assume-tps or --assume-tps-with-validation, of which at most one is set; None without."""
    if options.assume_tps_with_validation is not None:
        return PlannedSpeed(options.assume_tps_with_validation, "assumed", includes_validation=True)
    return None if options.assume_tps is None else PlannedSpeed(options.assume_tps, "assumed")


def _measured_speed(experiment: Experiment, layout: BatchLayout, device: PaperDevice | None) -> PlannedSpeed:
    """Speed measured by an earlier run; on `device`, if one is given."""
    run = experiment.run.path
    found = earlier_speeds(run.parent, experiment, layout)
    if device is not None:
        found = [earlier for earlier in found if find_device(earlier.device) == device]
    best = max(found, key=lambda earlier: earlier.preference(run), default=None)
    if best is None:
        return PlannedSpeed(None, f"no earlier run of this shape; {OR_A_DEVICE}")
    return best.planned()


def _reported_speed(experiment: Experiment, layout: BatchLayout, own: PaperDevice | None) -> PlannedSpeed | None:
    """Speed reported of this run; None unless it is of the same model and batch, and of this machine's devices if those
    are known."""
    reported = read_reported(experiment.run)
    if reported is None or reported.layout != layout or not _is_reported_of(reported, experiment):
        return None
    if own is not None and own != find_device(reported.device):
        return None
    return _as_reported(reported, experiment.config)


def _is_reported_of(reported: Reported, experiment: Experiment) -> bool:
    """True if `reported` is of this model, and train.json sets nothing that makes a step slower or faster than
    there."""
    now = experiment.config.model_dump(mode="json")
    usual = {key: TrainConfig.model_fields[key].default for key in KERNEL_KEYS}
    if reported.model is None or any(now[key] not in (usual[key], reported.train.get(key)) for key in KERNEL_KEYS):
        return False
    return parse_config(ModelConfig, reported.model, experiment.run.reported) == experiment.model


def _as_reported(reported: Reported, config: TrainConfig) -> PlannedSpeed | None:
    """Over training and validation together if the run validates as it did there, else over training alone."""
    now, there = config.model_dump(mode="json"), reported.train
    settings = ", ".join(f"{key}={json.dumps(there[key])}" for key in KERNEL_KEYS if key in there)
    source = f"reported of {reported.machine}{settings and f' with {settings}'} by {reported.source}; not measured here"
    device = find_device(reported.device)
    if device is not None:
        source += f'; --assume-device "{device.name}" for this program\'s estimated speed'
    whole, training = reported.whole_run_speed, reported.training_speed
    if whole is not None and all(key in there and there[key] == now[key] for key in VALIDATION_KEYS):
        share = None if training is None else whole / training
        return PlannedSpeed(whole, source, includes_validation=True, training_share=share, device=device)
    return None if training is None else PlannedSpeed(training, source, device=device)


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


@dataclass(frozen=True)
class EarlierSpeed:
    """Speed recorded in a run's summary.json."""

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
            source = f"measured over {over} of training on {self.device}, in {self.summary}"
            return PlannedSpeed(self.tokens_per_second, source, device=find_device(self.device))
        short = f"less than {self.measured.shortfall} of training is too little to tell"
        return PlannedSpeed(None, f"{self.summary} measured {over}, and {short}; {GIVE_A_SPEED}")


def earlier_speeds(runs_dir: Path, experiment: Experiment, layout: BatchLayout) -> list[EarlierSpeed]:
    """The speeds that runs in `runs_dir` have measured with this model and batch, if their train.json let a step take
    as long as this one's does."""
    train = experiment.config.model_dump(mode="json")
    found = []
    for path in sorted(runs_dir.glob("*/summary.json")):
        with suppress(UserError):  # not a summary of ours; a plan does not depend on it
            summary = read_summary(path)
            speed = summary.tokens_per_second
            is_alike = summary.has_shape(experiment.model) and _layout(summary) == _layout(layout)
            if is_alike and same_kernels(summary.train, train) and speed is not None and 0 < speed < math.inf:
                found.append(EarlierSpeed(path, speed, summary.measured, summary.device))
    return found


def _layout(record: RunSummary | BatchLayout) -> tuple[int | None, ...]:
    return record.world_size, record.microbatch_size, record.accumulation_steps
