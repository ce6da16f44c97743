"""The training speed that a plan assumes, and its source: given by the user, measured, reported
(harness/runs/reported.py) or estimated (harness/planning/estimated_speed.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.json_files import parse_config
from harness.common.options import TrainOptions
from harness.common.program import gpu_names
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.planning.estimated_speed import (
    DEVICES,
    UNCERTAINTY,
    GpuSpec,
    estimated_speed,
    find_device,
)
from harness.planning.experiment import Experiment
from harness.runs.reported import read_reported
from harness.runs.summary import RunSummary, read_summary
from harness.runs.throughput import KERNEL_KEYS, Measured, same_kernels
from harness.runs.train_config import TrainConfig

# Keys of train.json that decide how much is validated, and therefore how long that takes.
VALIDATION_KEYS = ("validation_interval", "validation_sequences", "validation_batches", "validation_ranks")
GIVE_A_SPEED = "give --assume-tps or --assume-tps-with-validation"
OR_A_DEVICE = f"{GIVE_A_SPEED}, or --assume-device for an estimated speed"


@dataclass(frozen=True)
class PlannedSpeed:
    """Tokens per second and the source of that number. If there is no number, `tokens_per_second` is None and `source`
    is the reason."""

    tokens_per_second: float | None
    source: str
    includes_validation: bool = False  # False: over training alone; True: over training and validation together
    # Training's share of the time of training and validation together; None: to be estimated
    training_share: float | None = None
    uncertainty: float = 0.0  # relative error of the speed, up or down; 0 if it is not an estimate
    device: GpuSpec | None = None  # the GPU that the speed is for; None if it is unknown or not in DEVICES


def plan_speed(
    experiment: Experiment, layout: BatchLayout, options: TrainOptions, *, meant: GpuSpec | None = None
) -> PlannedSpeed:
    """Return the speed for this model and batch from the first source that has one:

    1. --assume-tps or --assume-tps-with-validation
    2. a measurement on the device, by an earlier run or check_machine.py
    3. the run's reported.json
    4. an estimate for the device

    The device is the first of these that is in DEVICES. Without one, any measurement counts.

    - the device of --assume-device. reported.json is not used then.
    - this machine's GPUs, if alike and enough for all ranks. reported.json must be for them then.
    - `meant`, the GPU of the machine that the run is meant for. Measurements on this machine's GPUs count, too.

    Raises UserError for an unknown --assume-device or a wrong reported.json.
    """
    device = None if options.assume_device is None else find_device(options.assume_device)
    if options.assume_device is not None and device is None:
        known = ", ".join(each.name for each in DEVICES)
        raise UserError(f'--assume-device: unknown device "{options.assume_device}"; known: {known}; or {GIVE_A_SPEED}')
    own, names = device, gpu_names()
    if own is None and len(names) >= layout.world_size and len(set(names)) == 1:
        own = find_device(names[0])
    target = own or meant
    if given := options.assume_tps or options.assume_tps_with_validation:
        return PlannedSpeed(given, "assumed", includes_validation=options.assume_tps is None, device=target)
    measured = _measured_speed(experiment, layout, target, [] if device else names)
    if measured.tokens_per_second is not None:
        return measured
    reported = None if device else _reported_speed(experiment, layout, own)
    return reported or (measured if target is None else estimated(experiment, layout, target))


def estimated(experiment: Experiment, layout: BatchLayout, device: GpuSpec) -> PlannedSpeed:
    """Return the estimated speed on `device`, or a PlannedSpeed without a number if there is no estimate."""
    train = experiment.config.model_dump(mode="json")
    found = estimated_speed(experiment.model, device, layout, train)
    if isinstance(found, str):
        return PlannedSpeed(None, f"no estimated speed for {device.name}: {found}; {GIVE_A_SPEED}")
    speed = float(f"{found:.3g}")  # three digits are enough for an estimate
    low, high = (f"{float(f'{speed * (1 + sign * UNCERTAINTY):.3g}'):,.0f}" for sign in (-1, 1))
    source = (
        f"estimated for {layout.world_size} x {device.name}: {low} to {high} tokens/s; not measured; "
        "docs/performance.md explains the estimate"
    )
    return PlannedSpeed(speed, source, uncertainty=UNCERTAINTY, device=device)


def _measured_speed(
    experiment: Experiment, layout: BatchLayout, device: GpuSpec | None, here: Sequence[str]
) -> PlannedSpeed:
    """Return a speed that was measured for this model, batch and settings by a run in the folder of runs, or by
    check_machine.py.

    If `device` is given, only measurements on it or on a device named in `here` count. If none was long enough, the
    result has a reason instead of a number.
    """
    train, folder = experiment.config.model_dump(mode="json"), experiment.run.path
    found: list[tuple[tuple[bool, bool, bool, bool, float], Path, RunSummary, Measured]] = []
    names = (experiment.run.summary.name, experiment.run.machine_check.name)
    for path in [path for name in names for path in sorted(folder.parent.glob(f"*/{name}"))]:
        with suppress(UserError):  # not a valid summary.json; a plan can do without it
            summary = read_summary(path)
            speed, measured = summary.tokens_per_second, summary.measured
            size = (summary.world_size, summary.microbatch_size, summary.accumulation_steps)
            is_alike = size == (layout.world_size, layout.microbatch_size, layout.accumulation_steps)
            is_alike = is_alike and summary.has_shape(experiment.model) is True
            is_known = speed is not None and 0 < speed < math.inf
            is_here = summary.device in here
            is_there = device is None or is_here or find_device(summary.device) == device
            # Summaries of earlier versions lack `measured`.
            if measured and is_alike and is_known and is_there and same_kernels(summary.train, train):
                is_of_training = path.name == experiment.run.summary.name
                rank = (not measured.shortfall, is_here, path.parent == folder, is_of_training, measured.seconds)
                found.append((rank, path, summary, measured))
    if not found:
        return PlannedSpeed(None, f"no earlier run measured the speed of this model, batch and settings; {OR_A_DEVICE}")
    _, path, summary, measured = max(found, key=lambda each: each[0])
    over = f"{measured.global_steps:,} steps, {measured.tokens:,} tokens, {measured.seconds:,.1f} s"
    if not measured.shortfall:
        source = f"measured over {over} of training on {summary.device}, in {path}"
        return PlannedSpeed(summary.tokens_per_second, source, device=find_device(summary.device))
    short = f"a plan needs at least {measured.shortfall} of training"
    return PlannedSpeed(None, f"the speed in {path} was measured over {over}; {short}; {GIVE_A_SPEED}")


def _reported_speed(experiment: Experiment, layout: BatchLayout, own: GpuSpec | None) -> PlannedSpeed | None:
    """Return the speed in the run's reported.json for this model and batch on the device `own` (None: any), or None.

    Each setting in train.json that affects speed must have its default or the report's value (a missing one is
    null). If the report has the same validation settings, its speed of training and validation together is preferred.
    """
    reported = read_reported(experiment.run)
    if reported is None or reported.layout != layout or reported.model is None:
        return None
    now, there = experiment.config.model_dump(mode="json"), reported.train
    usual = {key: TrainConfig.model_fields[key].default for key in KERNEL_KEYS}
    device = find_device(reported.device)
    if any(now[key] not in (usual[key], there.get(key)) for key in KERNEL_KEYS) or own not in (None, device):
        return None
    if parse_config(ModelConfig, reported.model, experiment.run.reported) != experiment.model:
        return None
    settings = ", ".join(f"{key}={json.dumps(there[key])}" for key in KERNEL_KEYS if key in there)
    source = (
        f"reported for {reported.machine}{settings and f' with {settings}'} by {reported.source}; not measured here"
    )
    if device is not None:
        source += f'; --assume-device "{device.name}" for this program\'s estimated speed'
    whole, training = reported.whole_run_speed, reported.training_speed
    validates_alike = "validation_interval" in there and all(there.get(key) == now[key] for key in VALIDATION_KEYS)
    if whole is not None and validates_alike:
        share = None if training is None else whole / training
        return PlannedSpeed(whole, source, includes_validation=True, training_share=share, device=device)
    return None if training is None else PlannedSpeed(training, source, device=device)
