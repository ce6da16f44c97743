"""Plan of a sweep: estimated hours, dollars and disk of all its runs that are not finished."""

from __future__ import annotations

import heapq
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.options import TrainOptions
from harness.common.program import gpu_names
from harness.common.units import GIB, amount_text
from harness.planning.machines import hourly_price
from harness.planning.plan import Plan, make_plan, planned_start
from harness.planning.planned_speed import BENCHMARK_KEYS, PlannedSpeed, plan_speed
from harness.runs.throughput import KERNEL_KEYS
from harness.sweeps.derived_runs import DerivedRun, explained
from harness.sweeps.file import SweepRuns
from harness.sweeps.status import COLUMNS, count_states, status_of, wrapped


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


class Planner:
    """Plans runs one by one: `groups` of them at a time, each of `processes` ranks with a device of its own. Runs of
    the same shape have the same speed, which is looked up once."""

    def __init__(
        self, datasets_dir: Path, runs_dir: Path, *, groups: int = 1, processes: int | None = None, **assumed: Any
    ) -> None:
        """Share this machine's GPUs out among the groups, unless a number of processes is given; one process each if
        there are none. `assumed`: the options of ddp_train.py that begin so. Raises UserError if two speeds are
        assumed."""
        self.datasets_dir = datasets_dir
        self.groups = groups
        self.processes = processes or max(1, len(visible_gpus()) // groups)
        self.options = TrainOptions(plan=True, runs_dir=runs_dir, **assumed)
        self.options.check(None)
        self.speeds: dict[str, PlannedSpeed] = {}  # by shape; to be cleared when a run has measured one

    def plan(self, run: DerivedRun) -> RunPlan:
        """Plan the remaining work of a run, which may be partly done. Raises UserError for what training would
        refuse."""
        experiment = run.experiment(self.datasets_dir)
        with explained(f"{run.name}: "):
            experiment.check_together()
            plan = make_plan(experiment, self.processes, planned_start(experiment, self.processes, None))
        train = {key: run.settings[key] for key in (*KERNEL_KEYS, *BENCHMARK_KEYS)}
        shape = json.dumps([run.model_config.model_dump(mode="json"), vars(plan.layout), train])
        if shape not in self.speeds:
            self.speeds[shape] = plan_speed(experiment, plan.layout, self.options)
        speed = self.speeds[shape]
        price, said = hourly_price(run.train_config.price_per_hour, speed.device, self.groups * self.processes)
        seconds = dollars = None
        if plan.position is not None and speed.tokens_per_second is not None:
            seconds = sum(plan.seconds(speed).values())
            dollars = None if price is None else seconds * price / 3600 / self.groups
        return RunPlan(run, plan, speed, seconds, dollars, said)


@dataclass(frozen=True)
class SweepPlan:
    """Remaining work of a sweep, in the order in which it is done."""

    name: str
    planner: Planner
    count: int  # of all runs
    done: str  # how many runs are in a state of which nothing is left to train
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

    def seconds(self) -> float:
        """Wall-clock seconds, if each free group takes the next run; without runs whose time is not known."""
        ends = [0.0] * self.planner.groups
        for each in self.left:
            heapq.heapreplace(ends, ends[0] + (each.seconds or 0.0))
        return max(ends)


def plan_sweep(sweep: SweepRuns, planner: Planner) -> SweepPlan:
    """Plan what is left to train, whether it is made or not. Raises UserError if nothing is done, and all runs are
    such as training would refuse, or have something else or damaged files in their folders."""
    statuses = [status_of(run) for run in sweep.runs]
    done = [each for each in statuses if each.is_done]
    plans: list[RunPlan] = []
    refused = [each.said for each in statuses if each.state == "damaged"]
    for each in statuses:
        if not each.is_done and each.state != "damaged":
            try:
                plans.append(planner.plan(each.run))
            except UserError as error:
                refused.append(str(error))
    if refused and not plans and not done:
        raise UserError(refused[0])
    return SweepPlan(sweep.name, planner, len(sweep.runs), count_states(done), plans, refused)


def describe_sweep_plan(plan: SweepPlan, runs_dir: Path) -> str:
    """The plan as text for a terminal: a line for each run, the speeds and their sources, and the sums."""
    parts = [wrapped(f"Plan of sweep {plan.name}, {plan.count:,} runs: nothing is trained or downloaded")]
    if plan.done:
        parts.append([f"{plan.done} already"])
    if plan.left:
        parts += [_table(plan.left), _speeds(plan.left), _totals(plan, runs_dir)]
    parts.append([line for reason in plan.refused for line in wrapped(f"Cannot be trained: {reason}")])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _table(left: list[RunPlan]) -> list[str]:
    rows = [("", ("tokens", "time", "dollars", "disk GiB"))]
    for each in left:
        cells = ("unknown",) * 4
        if each.plan.position is not None:
            time = "unknown" if each.seconds is None else _duration(each.seconds)
            dollars = "unknown" if each.dollars is None else f"${amount_text(each.dollars)}"
            cells = (f"{each.plan.tokens():,}", time, dollars, f"{each.plan.disk_bytes() / GIB:.2f}")
        rows.append((each.run.name, cells))
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    width = min(COLUMNS - sum(width + 2 for width in widths), max(len(name) for name, _ in rows))
    lines = []
    for name, cells in rows:
        if len(name) > width:  # in a line of its own
            lines.append(name)
            name = ""
        written = [f"{cell:>{size}}" for cell, size in zip(cells, widths, strict=True)]
        lines.append("  ".join([f"{name:<{width}}", *written]))
    return lines


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"


def _speeds(left: list[RunPlan]) -> list[str]:
    """Lines with the speeds and their sources, and the runs without a known speed."""
    sources: dict[str, list[str]] = {}
    for each in left:
        rate = each.speed.tokens_per_second
        if rate is None:
            said = f"unknown: {each.speed.source}; or train one of them first, which measures it"
        else:
            said = f"{rate:,.0f} tokens/s ({each.speed.source})"
        sources.setdefault(said, []).append(each.run.name)
    lines = []
    for said, names in sources.items():
        of = f"all {len(names):,} runs" if len(sources) == 1 else ", ".join(names)
        lines += wrapped(f"Speed of {of}: {said}")
    return lines


def _totals(plan: SweepPlan, runs_dir: Path) -> list[str]:
    left, planner = plan.left, plan.planner
    groups = "one after the other" if planner.groups == 1 else f"{planner.groups} at a time"
    ranks = f"{planner.processes} {'process' if planner.processes == 1 else 'processes'} each"
    place = next(path for path in (runs_dir, *runs_dir.absolute().parents) if path.is_dir())
    cost = amount_text(sum(each.dollars or 0.0 for each in left))
    said = [
        _sum("time", _duration(plan.seconds()), [each.run.name for each in left if each.seconds is None], len(left)),
        _sum("cost", f"${cost}", [each.run.name for each in left if each.dollars is None], len(left)),
        f"price: {'; '.join(sorted({each.price for each in left}))}",
        f"disk: {plan.disk_bytes / GIB:.2f} GiB of checkpoints at most; "
        f"{shutil.disk_usage(place).free / GIB:,.2f} GiB are free",
    ]
    if any(each.run.train_config.price_per_hour is None for each in left):
        said.insert(3, 'for the cost, put the machine\'s "price_per_hour" into the sweep\'s "set"')
    lines = wrapped(f"Together, {groups}, {ranks}, without start-up and checkpoints:")
    lines += [line for each in said for line in wrapped(each, "    ")]
    shortage = plan.disk_shortage(place)
    return lines + (wrapped(f"note: {shortage}") if shortage else [])


def _sum(what: str, known: str, unknown: list[str], runs: int) -> str:
    """A sum, and which of the runs are not in it."""
    if len(unknown) == runs:
        return f"{what}: unknown"
    return f"{what}: {known}" + (f", and what {', '.join(unknown)} will take (unknown)" if unknown else "")
