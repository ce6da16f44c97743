"""Running a sweep: each run by the command that trains a single one, in a process of its own, until all are finished.

What is done is read from the runs' folders each time, so that a sweep that was killed resumes from its runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from harness.common.errors import RunError, RunStopped, UserError
from harness.common.lock import is_held
from harness.common.units import amount_text
from harness.comparison.progress import describe_progress, read_progress
from harness.comparison.records import RunRecord
from harness.data.dataset import is_present
from harness.sweeps.attempt import Attempt, DeviceGroup, device_groups
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.plan import Planner, RunPlan
from harness.sweeps.standing import count_states, standing_lines, standing_of

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks at how far the runs are
REPORT_SECONDS = 60.0  # between two lines that say so, where no line can be replaced by the next
STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Say = Callable[[str], None]


@dataclass
class Ends:
    """Names of the runs that were not finished, by the way in which they ended."""

    finished: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)  # which file of a run cannot be read, and what to do
    reason: str = ""  # why some were stopped or not begun
    signal: int = 0


class SweepRunner:
    """Runs what is not finished of some runs. `planner` says what is left of a run, `max_dollars` limits what all of
    `runs` may cost together, with what they have cost before."""

    def __init__(self, runs: Sequence[DerivedRun], planner: Planner, script: Path, max_dollars: float | None) -> None:
        """Prepare the runs; those with a file that cannot be read are left out, and named at the end. Raises UserError
        for a budget without a price, and for one where such a file hides what is spent."""
        self.runs = list(runs)
        unpriced = [run.name for run in runs if run.train_config.price_per_hour is None]
        if max_dollars is not None and unpriced:
            raise UserError(
                f'--max-dollars: train.json of {unpriced[0]} has no "price_per_hour", so that nothing would count; put '
                'it into the sweep\'s "set", and make the sweep anew under another name'
            )
        self.planner = planner
        self.script = script
        self.max_dollars = max_dollars
        self.free = device_groups(planner.use)
        self.ends = Ends()
        self.waiting = [run for run in runs if self._is_waiting(run)]
        self.attempts: list[Attempt] = []
        self.dollars = {run.name: _dollars(run) for run in runs} if max_dollars is not None else {}
        self._said_waiting: set[str] = set()

    def _is_waiting(self, run: DerivedRun) -> bool:
        standing = standing_of(run)
        if standing.state == "damaged":
            self.ends.damaged[run.name] = standing.said
        return standing.state not in ("finished", "pruned", "damaged")

    @property
    def spent(self) -> float:
        """The runs' own dollars, each by the price of the whole machine, which the groups share."""
        return sum(self.dollars.values()) / self.planner.use.groups

    @property
    def count(self) -> int:
        """Number of all runs of the sweep."""
        return len(self.runs)

    def run(self, say: Say, show: Say | None = None) -> Ends:
        """Return when all are finished or have failed, or when a signal or the budget has ended it. `show` replaces
        what it showed before: how far the runs are. Without it, `say` says so now and then."""
        self._listen()
        looked = said = time.monotonic()
        while self.attempts or (self.is_work_left() and not self.ends.reason):
            self._stop_if_due(say)
            self.watch(say)
            if not self.ends.reason:
                self.start_what_can(say)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if self.attempts and now - looked >= LOOK_SECONDS:
                looked, lines = now, [self._look_at(attempt) for attempt in self.attempts]
                if show is not None:
                    show("; ".join(lines))
                elif now - said >= REPORT_SECONDS:
                    said = now
                    for line in lines:
                        say(line)
            for attempt in [each for each in self.attempts if each.process.poll() is not None]:
                self._end(attempt, say)
        self.ends.not_begun = [run.name for run in self.waiting]
        return self.ends

    def _listen(self) -> None:
        for number in STOPPING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup's, say
                signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self.ends.signal = self.ends.signal or number

    def hang_up(self) -> None:
        """Note SIGHUP, unless it is ignored, since the output has no reader any more."""
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._note_signal(signal.SIGHUP, None)

    def _look_at(self, attempt: Attempt) -> str:
        """Progress of a run under way; with a budget, update its cost in `dollars`."""
        run, plan, progress = attempt.run, attempt.planned.plan, None
        with suppress(UserError):
            progress = read_progress(run.run.metrics)
        wanted = plan.position.tokens_seen + plan.tokens() if plan.position else None
        if self.max_dollars is not None:
            self.dollars[run.name] = _dollars(run)
        number = self.runs.index(run) + 1
        return f"run {number:,} of {self.count:,}, {run.name}: {describe_progress(progress, wanted)}"

    def _stop_if_due(self, say: Say) -> None:
        if self.ends.signal:
            self.ends.reason = f"stopped by {signal.Signals(self.ends.signal).name}"
        elif self.max_dollars is not None and self.spent >= self.max_dollars:
            self.ends.reason = f"--max-dollars {amount_text(self.max_dollars)} are spent"
        else:
            return
        going_on = [attempt for attempt in self.attempts if not attempt.is_stopped]
        if going_on:
            names = ", ".join(attempt.run.name for attempt in going_on)
            say(f"{self.ends.reason}: waiting for the checkpoints of {names}")
        for attempt in going_on:
            attempt.stop()

    def is_work_left(self) -> bool:
        """True if a run waits to be started."""
        return bool(self.waiting)

    def watch(self, say: Say) -> None:
        """Hook that is called often, with `attempts` under way."""

    def start_what_can(self, say: Say) -> None:
        """Start waiting runs on what is free."""
        while self.free:
            run = next((run for run in self.waiting if self._can_start(run, say)), None)
            if run is None:
                return
            try:
                planned = self.planner.plan(run)
            except UserError as error:
                self.waiting.remove(run)
                self._refuse(run, str(error), say)
                continue
            if not self._is_affordable(planned, say):
                return
            self.waiting.remove(run)
            self._start(planned, self.free.pop(0), say)

    def _refuse(self, run: DerivedRun, reason: str, say: Say) -> None:
        """Record a run that training would refuse as failed, in its log and in `ends`."""
        with run.run.sweep_log.open("a", encoding="utf-8") as log:
            log.write(f"error: {reason}\n# failed with exit status {UserError.exit_status}\n")
        self.ends.failed.append(run.name)
        say(f"{run.name}: failed: {reason}")

    def _can_start(self, run: DerivedRun, say: Say) -> bool:
        """False if another process trains the run, such as one that a killed sweep has left, or if another run is
        fetching its dataset."""
        if is_held(run.run.path / ".lock"):
            if run.name not in self._said_waiting:
                self._said_waiting.add(run.name)
                say(f"{run.name}: is being trained by another process; waiting for it")
            return False
        experiment = run.experiment(self.planner.use.datasets_dir)
        fetched = {attempt.run.train_config.dataset for attempt in self.attempts}
        dataset = experiment.config.dataset
        return dataset not in fetched or is_present(experiment.datasets_dir, dataset, experiment.splits)

    def _is_affordable(self, planned: RunPlan, say: Say) -> bool:
        """True if the budget covers what is spent, what the runs under way will need, and this run."""
        if self.max_dollars is None:
            return True
        under_way = sum(max(0.0, (each.planned.dollars or 0.0) - self._dollars_since(each)) for each in self.attempts)
        spent = self.spent
        total, name = spent + under_way + (planned.dollars or 0.0), planned.run.name
        if total > self.max_dollars or spent >= self.max_dollars:
            said = f", and with {name} they would be ${amount_text(total)}" if planned.dollars else ""
            self.ends.reason = f"--max-dollars {amount_text(self.max_dollars)}: ${amount_text(spent)} are spent{said}"
            return False
        if planned.dollars is None:
            say(f"{name}: what it costs is not known yet; it is stopped when the budget is spent")
        return True

    def _dollars_since(self, attempt: Attempt) -> float:
        """The part of the machine's price that is an attempt's so far."""
        return (self.dollars[attempt.run.name] - attempt.dollars_before) / self.planner.use.groups

    def _start(self, planned: RunPlan, group: DeviceGroup, say: Say) -> None:
        run, before = planned.run, self.dollars.get(planned.run.name, 0.0)
        attempt = Attempt.start(planned, group, self.script, self.planner.use, dollars_before=before)
        self.attempts.append(attempt)
        where = f" on {group.name}" if group.name else ""
        expected = f", about {planned.seconds:,.0f} s" if planned.seconds is not None else ""
        say(f"{run.name}: started{where}{expected}")

    def _end(self, attempt: Attempt, say: Say) -> None:
        self.attempts.remove(attempt)
        self.free.append(attempt.group)
        self.planner.forget_speeds()
        run, status = attempt.run, attempt.process.returncode
        standing = standing_of(run)
        is_finished = status == 0 and standing.state == "finished"  # perhaps before it could be stopped
        is_failed = not is_finished and not attempt.is_stopped
        attempt.close_log(failed_with=status if is_failed else None)
        if self.max_dollars is not None:
            self.dollars[run.name] = _dollars(run)
        if is_finished:
            self.ends.finished.append(run.name)
            say(f"{run.name}: finished, {standing.said}")
        elif is_failed:
            self.ends.failed.append(run.name)
            say(f"{run.name}: failed with exit status {status} after {attempt.seconds:,.0f} s")
        elif attempt.is_pruned:
            self.ends.pruned.append(run.name)
        else:
            self.ends.stopped.append(run.name)
            say(f"{run.name}: stopped after {attempt.seconds:,.0f} s; the same command continues it")


def _dollars(run: DerivedRun) -> float:
    """Dollars that a run has cost so far; 0 where it is not made."""
    return RunRecord.read(run.run).dollars.get("total", 0.0)


def describe_ends(ends: Ends, runs: Sequence[DerivedRun], unmade: int = 0) -> str:
    """Describe for a terminal how many of all runs are in which state, why, and what is left. `unmade`: number of
    further runs that have not even been made."""
    standings = [standing_of(run) for run in runs]
    left = [each for each in standings if each.state not in ("finished", "pruned")]
    said = count_states(standings, unmade)
    if not left and not unmade and not ends.finished and not ends.pruned:
        said = "Nothing to do: all runs are finished" + (" or pruned" if "pruned" in said else "")
    return "\n".join([f"\n{said}{f' ({ends.reason})' if ends.reason else ''}", *standing_lines(left)])


def leave(ends: Ends, runs: Sequence[DerivedRun], unmade: int = 0) -> None:
    """Say how the runs ended, of which `unmade` have not even been made. Raises RunStopped if a signal ended them, and
    RunError if some failed or are damaged, or if the budget was not enough."""
    print(describe_ends(ends, runs, unmade), flush=True)
    if ends.signal:
        raise RunStopped(ends.signal)
    left, count = len(ends.stopped) + len(ends.not_begun) + unmade, len(runs) + unmade
    if ends.failed:
        raise RunError(f"{len(ends.failed):,} of {count:,} runs failed; the same command tries them again")
    if left:
        raise RunError(f"{left:,} of {count:,} runs are left: {ends.reason}")
    if ends.damaged:
        raise RunError(f"{len(ends.damaged):,} of {count:,} runs are damaged and were left as they are")
