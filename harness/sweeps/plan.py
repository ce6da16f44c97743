"""State of each run of a sweep, and a plan of the unfinished runs: hours, dollars and disk space."""

from __future__ import annotations

import heapq
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from harness.common.errors import UserError, explained, printable
from harness.common.messages import GIB, WIDTH, aligned, amount_text, counted, distinct_sizes, duration, paragraph
from harness.common.options import TrainOptions
from harness.common.program import gpu_names
from harness.comparison.records import SWEEP_MARK, RunRecord, StateWord, log_tail
from harness.comparison.table import cut_names
from harness.planning.machines import hourly_price
from harness.planning.plan import Plan, checked_plan
from harness.planning.planned_speed import PlannedSpeed, plan_speed
from harness.runs.budget import wanted_tokens
from harness.runs.metrics import describe_progress
from harness.runs.throughput import KERNEL_KEYS, cost
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.file import SweepRuns

TAIL_LINES, TAIL_COLUMNS = 5, 400  # of a log: enough for the error in the last line and its cause


@dataclass(frozen=True)
class Status:
    """Status of one run of a sweep."""

    run: DerivedRun
    state: StateWord
    said: str = ""  # loss, time and cost of a finished run; otherwise the progress or what is wrong; may be empty
    dollars: float = 0.0  # that the run has cost so far; 0 if that is not known
    seconds: float = 0.0  # that training has taken so far, as the run records; 0 if it records nothing

    @property
    def needs_training(self) -> bool:
        """True if a sweep starts or continues the run."""
        return self.state not in ("finished", "diverged", "damaged")


def status_of(run: DerivedRun) -> Status:
    """Return the status of a sweep's run. Its state is that of compare_runs.py, or one of these:

    - "not made": nothing is at the run's path.
    - "damaged": what is at the path is not this run, or a file cannot be read.
    """
    try:
        if not run.is_made():
            return Status(run, "not made")
    except UserError as error:
        return Status(run, "damaged", str(error))
    record = RunRecord.read(run.directory)
    state, said, summary = record.state.word, record.state.detail, record.summary
    if state == "finished" and summary is not None:
        losses = (("validation", summary.final_validation_loss), ("train", summary.final_train_loss))
        parts = [next((f"{kind} loss {value:.3f}" for kind, value in losses if value is not None), "no finite loss")]
        if (seconds := summary.seconds.get("total")) is not None:
            parts.append(f"{seconds:,.0f} s")
        if dollars := (summary.dollars or {}).get("total"):
            parts.append(f"${amount_text(dollars)}")
        said = ", ".join(parts)
    elif state == "failed":
        said = f"{said}; {run.directory.sweep_log} ends:"
    elif state in ("going on", "stopped") and record.progress is not None:
        wanted = wanted_tokens(record.train, record.meta.budget if record.meta else None)
        said = describe_progress(record.progress, wanted, goes_on=state == "going on")
    return Status(run, state, said, record.dollars.get("total", 0.0), record.seconds.get("total", 0.0))


def count_states(statuses: Sequence[Status]) -> str:
    """Return the number of runs in each state as text: "3 finished, 1 failed"."""
    counts = Counter(each.state for each in statuses)
    return ", ".join(f"{counts[state]:,} {state}" for state in get_args(StateWord) if counts[state])


def status_lines(statuses: Sequence[Status]) -> list[str]:
    """Return a line for each run, or several lines if the text is wider than a terminal. A failed run is followed by
    the last lines of its last attempt's log."""
    lines = []
    width = max((len(each.run.name) for each in statuses), default=0)
    for each in statuses:
        said = printable(each.said)
        line = f"{each.run.name:<{width}}  {each.state:<9}  {said}".rstrip()
        if len(line) <= WIDTH or not said:
            lines.append(line)
        else:
            lines.append(f"{each.run.name:<{width}}  {each.state}")
            lines += paragraph(f"    {said}", indent=4)
        if each.state == "failed":
            log: list[str] = []  # of the last attempt
            for text in log_tail(each.run.directory):
                if not SWEEP_MARK.fullmatch(text):
                    log += [text] if text.strip() else []
                elif text.startswith("$"):
                    log.clear()
            for text in map(printable, log[-TAIL_LINES:] or ["(no output)"]):
                lines.append(f"    {text if len(text) <= TAIL_COLUMNS else text[: TAIL_COLUMNS - 1] + '…'}")
    return lines


def visible_gpus() -> list[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES, or the indices of all GPUs if it is not set. Empty if this machine
    has no GPU, or if CUDA_VISIBLE_DEVICES hides all."""
    names = gpu_names()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not names or visible is None:
        return [str(index) for index in range(len(names))]
    return [each.strip() for each in visible.split(",")]


@dataclass(frozen=True)
class RunPlan:
    """Remaining work of one run."""

    run: DerivedRun
    plan: Plan
    speed: PlannedSpeed
    seconds: float | None  # up to the run's own ceilings; None if the speed or the run's length is not known
    dollars: float | None  # cost of the whole machine for that time; None if `seconds` or the price is not known
    price: str  # the price per hour in words, with its source, or why there is none


class Planner:
    """Planner of single runs. `groups` is the number of runs that are trained at the same time, each with `processes`
    ranks."""

    def __init__(self, datasets_dir: Path, *, groups: int = 1, processes: int | None = None, **assumed: Any) -> None:
        """Raise UserError if two of the `assumed` options (those of ddp_train.py that begin with --assume) exclude each
        other. If `processes` is None, the GPUs of this machine are divided among the groups."""
        self.datasets_dir = datasets_dir
        self.groups = groups
        self.processes = processes or max(1, len(visible_gpus()) // groups)
        self.options = TrainOptions(plan=True, **assumed)
        self.options.check(None)
        self.speeds: dict[str, PlannedSpeed] = {}  # by shape; cleared after each run, which may measure a speed

    def plan(self, run: DerivedRun) -> RunPlan:
        """Plan the remaining work of a run. Raises UserError as `check_together`, `checked_plan` and `plan_speed` do,
        or if the run's train.json is damaged."""
        run = run.as_made()
        experiment = run.experiment(self.datasets_dir)
        with explained(f"{run.name}: "):
            experiment.check_together()
            plan = checked_plan(experiment, None, self.processes, restart=False)
        train = {key: run.settings[key] for key in (*KERNEL_KEYS, "batch_ramp")}
        shape = json.dumps([run.model_config.model_dump(mode="json"), vars(plan.layout), train])
        if shape not in self.speeds:
            self.speeds[shape] = plan_speed(experiment, plan.layout, self.options)
        speed = self.speeds[shape]
        price, said = hourly_price(run.train_config.price_per_hour, speed.device, self.groups * self.processes)
        seconds = dollars = None
        if plan.position is not None and speed.tokens_per_second is not None:
            ceilings = run.train_config.ceilings(plan.seconds_before, plan.dollars_before).values()
            seconds = min(sum(plan.seconds(speed).values()), *(max(0.0, left) for left in ceilings), math.inf)
            dollars = None if price is None else cost(seconds, price)
        return RunPlan(run, plan, speed, seconds, dollars, said)


@dataclass(frozen=True)
class SweepPlan:
    """Remaining work of a sweep."""

    name: str
    planner: Planner
    count: int  # number of all runs, finished or not
    ended: list[Status]  # runs that have finished or diverged
    left: list[RunPlan]  # in the order of training
    refused: list[str]  # why some runs cannot be trained, one message per run

    @property
    def disk_bytes(self) -> int:
        """Largest number of bytes that the checkpoints of the runs in `left` can still need at a time. Runs of unknown
        length are left out."""
        plans = [each.plan for each in self.left if each.plan.position is not None]
        # What each run keeps at its end, and the largest temporary needs of as many runs as are trained at a time.
        stay = [plan.added_checkpoints(at_end=True) * plan.checkpoint_bytes() for plan in plans]
        more = (plan.disk_bytes() - size for plan, size in zip(plans, stay, strict=True))
        return sum(stay) + sum(heapq.nlargest(self.planner.groups, more))

    def disk_shortage(self, folder: Path) -> str | None:
        """Return a message with a remedy if the disk of `folder` cannot hold the checkpoints of the unfinished runs, or
        None."""
        free = shutil.disk_usage(folder).free
        if self.disk_bytes <= free:
            return None
        needed, available = distinct_sizes(self.disk_bytes, free)
        remedy = ""
        if any(each.plan.config.keep_checkpoints != 1 for each in self.left):
            remedy = 'put "keep_checkpoints": 1 into the sweep\'s "set" (and into train.json of the runs that exist '
            remedy += "already), or "
        return (
            f"the sweep needs {needed} for the checkpoints of {counted(len(self.left), 'unfinished run')}, but "
            f"{available} are free; {remedy}use another disk (--runs-dir)"
        )

    def seconds(self) -> float:
        """Return the wall-clock seconds until all runs have ended. A group of devices takes the next run as soon as its
        previous run has ended. Runs of unknown duration are left out."""
        ends = [0.0] * self.planner.groups
        for each in self.left:
            heapq.heapreplace(ends, ends[0] + (each.seconds or 0.0))
        return max(ends)


def plan_sweep(sweep: SweepRuns, planner: Planner) -> SweepPlan:
    """Plan the runs that are left to train, whether their folders exist or not. Raises UserError if no run has ended
    and no run can be planned."""
    statuses = [status_of(run) for run in sweep.runs]
    ended = [each for each in statuses if each.state in ("finished", "diverged")]
    plans: list[RunPlan] = []
    refused = [each.said for each in statuses if each.state == "damaged"]
    for each in statuses:
        if each.needs_training:
            try:
                plans.append(planner.plan(each.run))
            except UserError as error:
                refused.append(str(error))
    if refused and not plans and not ended:
        raise UserError(refused[0])
    return SweepPlan(sweep.name, planner, len(sweep.runs), ended, plans, refused)


def describe_sweep_plan(plan: SweepPlan, runs_dir: Path) -> str:
    """Return the plan as text for a terminal."""
    parts = [paragraph(f"Plan of sweep {plan.name}, {counted(plan.count, 'run')}: nothing is trained or downloaded")]
    if plan.ended:
        parts.append([f"{count_states(plan.ended)} already"])
    if plan.left:
        parts += [_table(plan), _speeds(plan.left), _totals(plan, runs_dir)]
    parts.append([line for reason in plan.refused for line in paragraph(f"Cannot be trained: {reason}")])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _table(plan: SweepPlan) -> list[str]:
    """Return the lines of a table with a row for each run that is left to train. A row's cost is the price of
    the machine for the run's time, divided by the number of groups."""
    rows = []
    for name, each in zip(cut_names([each.run.name for each in plan.left]), plan.left, strict=True):
        time = "unknown" if each.seconds is None else duration(each.seconds)
        dollars = "unknown" if each.dollars is None else f"${amount_text(each.dollars / plan.planner.groups)}"
        is_known = each.plan.position is not None
        disk = f"{each.plan.disk_bytes() / GIB:.2f}" if is_known else "unknown"
        rows.append((name, f"{each.plan.tokens():,}" if is_known else "unknown", time, dollars, disk))
    return [*aligned(("run", "tokens", "time", "dollars", "disk GiB"), rows, left=("run",))]


def _speeds(left: list[RunPlan]) -> list[str]:
    """Return lines that give each speed, its source, and the runs that have it."""
    sources: dict[str, list[str]] = {}
    for each in left:
        rate, said = each.speed.tokens_per_second, each.speed.source
        known = f"{rate or 0:,.0f} tokens/s ({said})"
        unknown = f"unknown: {said}; or train one of these runs first, to measure the speed"
        sources.setdefault(unknown if rate is None else known, []).append(each.run.name)
    lines = []
    for said, names in sources.items():
        of = f"all {len(names):,} runs" if len(sources) == 1 < len(names) else ", ".join(names)
        lines += paragraph(f"Speed of {of}: {said}")
    return lines


def _totals(plan: SweepPlan, runs_dir: Path) -> list[str]:
    left, planner = plan.left, plan.planner
    groups = "one after the other" if planner.groups == 1 else f"{planner.groups} at a time"
    ranks = f"{planner.processes} {'process' if planner.processes == 1 else 'processes'} each"
    # Runs that are trained at the same time share the machine's cost. The machine costs its whole price even while some
    # groups have no run.
    seconds = sum(each.seconds or 0.0 for each in left)
    cost = sum(each.dollars or 0.0 for each in left) * (plan.seconds() / seconds if seconds else 1.0)
    said = []
    for what, known, key in (
        ("time", duration(plan.seconds()), "seconds"),
        ("cost", f"${amount_text(cost)}", "dollars"),
    ):
        unknown = [each.run.name for each in left if getattr(each, key) is None]
        more = f", not counting {', '.join(unknown)} (unknown)" if unknown else ""
        said.append(f"{what}: unknown" if len(unknown) == len(left) else f"{what}: {known}{more}")
    said.append(f"price: {'; '.join(sorted({each.price for each in left}))}")
    free = shutil.disk_usage(runs_dir).free / GIB
    unknown = [each.run.name for each in left if each.plan.position is None]
    more = f", not counting {', '.join(unknown)} (unknown)" if unknown else ""
    said.append(f"disk: {plan.disk_bytes / GIB:.2f} GiB of checkpoints at most{more}; {free:,.2f} GiB are free")
    without = "time and cost without start-up, benchmarks and checkpoints"
    lines = paragraph(f"All these runs, {groups}, {ranks} ({without}):")
    lines += [line for each in said for line in paragraph(f"    {each}", indent=8)]
    remarks = dict.fromkeys(each.plan.dataset_remark for each in left)
    notes = [note for note in (*remarks, plan.disk_shortage(runs_dir)) if note]
    timed = [(each, each.seconds) for each in left if each.seconds is not None]
    if early := [run.run.name for run, seconds in timed if seconds < sum(run.plan.seconds(run.speed).values())]:
        notes.append(f"{', '.join(early)}: would end unfinished, because of max_hours or max_dollars in train.json")
    return lines + [line for note in notes for line in paragraph(f"note: {note}")]
