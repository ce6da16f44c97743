"""Plan of a sweep: estimated hours, dollars and disk of all its runs that are not finished."""

from __future__ import annotations

import heapq
import json
import os
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.gpu_names import gpu_names
from harness.common.options import TrainOptions
from harness.common.units import GIB, amount_text
from harness.data.loader import BatchLayout
from harness.planning.experiment import Experiment
from harness.planning.machines import hourly_price
from harness.planning.plan import COLUMNS, Plan, make_plan, planned_start
from harness.planning.planned_speed import PlannedSpeed, plan_speed
from harness.runs.throughput import KERNEL_KEYS
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.standing import summary_of
from harness.sweeps.sweep import SweepRuns

# Of a run whose speed is not known, and for which nobody can be expected to know it.
OR_TRAIN_ONE = "or train one of them first, which measures it"


@dataclass(frozen=True)
class MachineUse:
    """Resources of a sweep's runs: `groups` of them at a time, each of `processes` ranks with a device of its own."""

    datasets_dir: Path
    groups: int
    processes: int

    @classmethod
    def of(cls, datasets_dir: Path, groups: int, processes: int | None) -> MachineUse:
        """Share this machine's GPUs out among the groups, unless a number of processes is given; one process each if
        there are none."""
        return cls(datasets_dir, groups, processes or max(1, len(visible_gpus()) // groups))


def visible_gpus() -> list[str]:
    """Entries for CUDA_VISIBLE_DEVICES, one for each GPU of this machine that it shows; none without a driver."""
    names = gpu_names()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not names or visible is None:
        return [str(index) for index in range(len(names))]
    return [each.strip() for each in visible.split(",")]


@dataclass(frozen=True)
class RunPlan:
    """Remaining work of one run. `seconds` and `dollars` are None where the speed, the length or the price is not
    known; dollars are its part of the machine's, which groups share. `price` says whose an hour's price is, or why
    there is none."""

    run: DerivedRun
    plan: Plan
    speed: PlannedSpeed
    seconds: float | None
    dollars: float | None
    price: str


@dataclass(frozen=True)
class SweepPlan:
    """Remaining work of a sweep, in the order in which it is done."""

    name: str
    use: MachineUse
    finished: int
    left: list[RunPlan]
    refused: list[str]  # why some cannot be trained, by their names

    @property
    def disk_bytes(self) -> int:
        """Bytes of all checkpoints to come; without those of runs whose length is not known."""
        return sum(each.plan.disk_bytes() for each in self.left if each.plan.position is not None)

    def disk_shortage(self, folder: Path) -> str | None:
        """Shortage and remedy if the disk under `folder` cannot hold all checkpoints to come; None if it can."""
        free = shutil.disk_usage(folder).free
        if self.disk_bytes <= free:
            return None
        return (
            f"the checkpoints of the sweep's {len(self.left):,} runs need {self.disk_bytes / GIB:.2f} "
            f'GiB, but {free / GIB:.2f} GiB are free; put "keep_checkpoints": 1 into the sweep\'s "set", or use '
            "another disk (--runs-dir)"
        )

    def check_disk(self, folder: Path) -> None:
        """Raise UserError if the disk under `folder` cannot hold all checkpoints to come."""
        if shortage := self.disk_shortage(folder):
            raise UserError(f"{folder}: {shortage}")

    def seconds(self) -> float:
        """Wall-clock seconds, if each free group takes the next run; without runs whose time is not known."""
        ends = [0.0] * self.use.groups
        for each in self.left:
            heapq.heapreplace(ends, ends[0] + (each.seconds or 0.0))
        return max(ends)


class Planner:
    """Plans runs one by one; runs of the same shape have the same speed, which is looked up once."""

    def __init__(self, use: MachineUse, options: TrainOptions) -> None:
        self.use = use
        self.options = options
        self._speeds: dict[str, PlannedSpeed] = {}

    def plan(self, run: DerivedRun) -> RunPlan:
        """Plan the remaining work of a run, which may be partly done. Raises UserError for what training would
        refuse."""
        experiment = run.experiment(self.use.datasets_dir)
        try:
            experiment.check_together()
            start = planned_start(experiment, self.use.processes, None)
            plan = make_plan(experiment, self.use.processes, start)
        except UserError as error:
            raise UserError(f"{run.name}: {error}") from None
        speed = self._speed(experiment, plan.layout)
        gpus = self.use.groups * self.use.processes
        price, said = hourly_price(run.train_config.price_per_hour, speed.device, gpus)
        seconds = None
        if plan.position is not None and speed.tokens_per_second is not None:
            seconds = sum(plan.seconds(speed).values())
        dollars = None if seconds is None or price is None else seconds * price / 3600 / self.use.groups
        return RunPlan(run, plan, speed, seconds, dollars, said)

    def forget_speeds(self) -> None:
        """Clear the looked-up speeds, since a run that has ended measured one."""
        self._speeds.clear()

    def _speed(self, experiment: Experiment, layout: BatchLayout) -> PlannedSpeed:
        train = experiment.config.model_dump(mode="json")
        asked = {key: train[key] for key in (*KERNEL_KEYS, "benchmark_tasks", "benchmark_interval")}
        key = json.dumps([experiment.model.model_dump(mode="json"), vars(layout), asked])
        if key not in self._speeds:
            self._speeds[key] = plan_speed(experiment, layout, self.options)
        return self._speeds[key]


@dataclass(frozen=True)
class AssumedSpeed:
    """Speed options as those of ddp_train.py --plan; at most one is given."""

    tps: float | None = None
    tps_with_validation: float | None = None
    device: str | None = None

    def options(self, runs_dir: Path) -> TrainOptions:
        """Raise UserError if two are given."""
        options = TrainOptions(
            find=False,
            memory_limit_gib=None,
            write=False,
            plan=True,
            assume_tps=self.tps,
            assume_tps_with_validation=self.tps_with_validation,
            assume_world_size=None,
            assume_device=self.device,
            restart=False,
            runs_dir=runs_dir,
        )
        options.check(None)
        return options


def plan_sweep(sweep: SweepRuns, planner: Planner) -> SweepPlan:
    """Plan what is not finished, whether it is made or not. Raises UserError if nothing is finished, and all runs are
    such as training would refuse, or have something else or damaged files in their folders."""
    finished = 0
    plans: list[RunPlan] = []
    refused: list[str] = []
    for run in sweep.runs:
        try:
            if run.is_made() and summary_of(run):
                finished += 1
            else:
                plans.append(planner.plan(run))
        except UserError as error:
            refused.append(str(error))
    if refused and not plans and not finished:
        raise UserError(refused[0])
    return SweepPlan(sweep.name, planner.use, finished, plans, refused)


def describe_sweep_plan(plan: SweepPlan, runs_dir: Path) -> str:
    """The plan as text for a terminal."""
    count = len(plan.left) + plan.finished + len(plan.refused)
    lines = [*_wrap(f"Plan of sweep {plan.name}, {count:,} runs: nothing is trained or downloaded"), ""]
    if plan.finished:
        lines += [f"{plan.finished:,} finished already", ""]
    if plan.left:
        lines += [*_rows(plan), "", *_speeds(plan), "", *_totals(plan, runs_dir)]
    for reason in plan.refused:
        lines += _wrap(f"Cannot be trained: {reason}")
    if not lines[-1]:
        lines.pop()
    return "\n".join(lines)


def _rows(plan: SweepPlan) -> list[str]:
    titles = ("tokens", "time", "dollars", "disk GiB")
    cells = [(each.run.name, _cells(each)) for each in plan.left]
    widths = [max(len(title), *(len(row[place]) for _, row in cells)) for place, title in enumerate(titles)]
    room = COLUMNS - sum(width + 2 for width in widths)
    width = min(room, max(len(name) for name, _ in cells))
    rows = [f"{'':<{width}}" + _aligned(titles, widths)]
    for name, row in cells:
        if len(name) > width:
            rows.append(name)
            name = ""
        rows.append(f"{name:<{width}}" + _aligned(row, widths))
    return rows


def _aligned(cells: tuple[str, ...], widths: list[int]) -> str:
    return "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _cells(each: RunPlan) -> tuple[str, ...]:
    if each.plan.position is None:
        return "unknown", "unknown", "unknown", "unknown"
    time = "unknown" if each.seconds is None else _duration(each.seconds)
    dollars = "unknown" if each.dollars is None else f"${amount_text(each.dollars)}"
    return f"{each.plan.tokens():,}", time, dollars, f"{each.plan.disk_bytes() / GIB:.2f}"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"


def _speeds(plan: SweepPlan) -> list[str]:
    """Lines with the speeds and their sources, and the runs without a known speed."""
    sources: dict[str, list[str]] = {}
    for each in plan.left:
        rate = each.speed.tokens_per_second
        if rate is None:
            said = f"unknown: {each.speed.source}; {OR_TRAIN_ONE}"
        else:
            said = f"{rate:,.0f} tokens/s ({each.speed.source})"
        sources.setdefault(said, []).append(each.run.name)
    lines = []
    for said, names in sources.items():
        of = f"Speed of all {len(names):,} runs" if len(sources) == 1 else f"Speed of {', '.join(names)}"
        lines += _wrap(f"{of}: {said}")
    return lines


def _totals(plan: SweepPlan, runs_dir: Path) -> list[str]:
    groups = "one after the other" if plan.use.groups == 1 else f"{plan.use.groups} at a time"
    ranks = f"{plan.use.processes} {'process' if plan.use.processes == 1 else 'processes'} each"
    place = next(path for path in (runs_dir, *runs_dir.absolute().parents) if path.is_dir())
    free, shortage = shutil.disk_usage(place).free / GIB, plan.disk_shortage(place)
    cost = sum(each.dollars or 0.0 for each in plan.left)
    untimed = [each.run.name for each in plan.left if each.seconds is None]
    uncosted = [each.run.name for each in plan.left if each.dollars is None]
    lines = _wrap(f"Together, {groups}, {ranks}, without start-up and checkpoints:")
    lines += _wrap(_sum("time", _duration(plan.seconds()), untimed, len(plan.left)), "    ")
    lines += _wrap(_sum("cost", f"${amount_text(cost)}", uncosted, len(plan.left)), "    ")
    lines += _wrap(f"price: {'; '.join(sorted({each.price for each in plan.left}))}", "    ")
    if any(each.run.train_config.price_per_hour is None for each in plan.left):
        lines += _wrap('for the cost, put the machine\'s "price_per_hour" into the sweep\'s "set"', "    ")
    lines.append(f"    disk: {plan.disk_bytes / GIB:.2f} GiB of checkpoints at most; {free:,.2f} GiB are free")
    return lines + (_wrap(f"note: {shortage}") if shortage else [])


def _sum(what: str, known: str, unknown: list[str], runs: int) -> str:
    """A sum, and which of the runs are not in it."""
    if len(unknown) == runs:
        return f"{what}: unknown"
    return f"{what}: {known}" + (f", and what {', '.join(unknown)} will take (unknown)" if unknown else "")


def _wrap(text: str, indent: str = "") -> list[str]:
    following = indent + "    "
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=following, break_on_hyphens=False)
