"""Running a sweep: each run by the command that trains a single one, in a process of its own, until all are finished.

The command leaves a finished run alone and continues a stopped one, and what is done is read from the runs' folders: a
sweep that was killed resumes from its runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from harness.common.errors import RunError, RunStopped, UserError, handle_stopping_signals, ignores_hangup
from harness.common.libraries import usable_cores
from harness.common.lock import is_held
from harness.common.units import amount_text
from harness.comparison.progress import describe_progress, read_progress
from harness.data.dataset import is_present
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.plan import Planner, RunPlan, visible_gpus
from harness.sweeps.status import count_states, status_lines, status_of

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks at how far the runs are
REPORT_SECONDS = 60.0  # between two lines that say so, where no line can be replaced by the next
PR_SET_PDEATHSIG = 1  # prctl(2)
C_LIBRARY = ctypes.CDLL(None)  # loaded now: little is allowed between a fork and what follows it

Say = Callable[[str], None]
Group = tuple[str, dict[str, str]]  # devices of one run at a time: their name, and variables that show them


def device_groups(groups: int, processes: int) -> list[Group]:
    """The machine's GPUs shared out, or else its cores; one group gets what a run alone would. Raises UserError for
    more than there are GPUs."""
    if groups == 1:
        return [("", {})]
    gpus, wanted = visible_gpus(), groups * processes
    if gpus and wanted > len(gpus):
        raise UserError(
            f"--groups {groups} with {processes} processes each: needs {wanted} GPUs, and there are {len(gpus)}"
        )
    if not gpus:
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // wanted)))
        return [(f"group {number}", {"OMP_NUM_THREADS": threads}) for number in range(1, groups + 1)]
    shares = [",".join(gpus[start : start + processes]) for start in range(0, wanted, processes)]
    return [(f"GPU {share}", {"CUDA_VISIBLE_DEVICES": share}) for share in shares]


@dataclass
class Attempt:
    """A run under way. `tokens` is what it will have seen at its end, if that is known; `committed` is the dollars that
    it will have cost then."""

    run: DerivedRun
    group: Group
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    tokens: int | None
    committed: float
    began: float = field(default_factory=time.monotonic)
    is_stopped: bool = False

    def stop(self) -> None:
        """Ask the process to end with a checkpoint."""
        self.is_stopped = True
        self.process.terminate()


def _end_with_parent() -> None:
    """Have the system end this process, in good order, when the one that started it is killed. Linux alone can; on
    other systems the run continues, and a sweep that is started again waits for it."""
    if sys.platform == "linux":
        C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class SweepRunner:
    """Trains the runs that are not finished; those with a file that cannot be read are left as they are.

    `planner` says what is left of a run, `max_dollars` limits what all of `runs` may cost together, with what they have
    cost before. `reason` says why runs are left, and `signal` is the one that has ended the sweep.
    """

    def __init__(
        self, runs: Sequence[DerivedRun], planner: Planner, script: Path, *, max_dollars: float | None = None
    ) -> None:
        """Raise UserError for a budget without a price."""
        unpriced = [run.name for run in runs if run.train_config.price_per_hour is None]
        if max_dollars is not None and unpriced:
            raise UserError(
                f'--max-dollars: train.json of {unpriced[0]} has no "price_per_hour", so its cost is unknown; put it '
                'into the sweep\'s "set", and make the sweep anew under another name'
            )
        self.runs = list(runs)
        self.planner = planner
        self.script = script
        self.max_dollars = max_dollars
        self.free = device_groups(planner.groups, planner.processes)
        statuses = [status_of(run) for run in runs]
        self.waiting = [each.run for each in statuses if not each.is_done and each.state != "damaged"]
        self.dollars = {each.run.name: each.dollars for each in statuses}
        self.attempts: list[Attempt] = []
        self.is_idle = True  # nothing has been started so far
        self.reason = ""
        self.signal = 0
        self._said_waiting: set[str] = set()

    def run(self, say: Say, show: Say | None = None) -> None:
        """Return when all are finished or have failed, or when a signal or the budget has ended it. `show` replaces
        what it showed before: how far the runs are. Without it, `say` says so now and then."""
        handle_stopping_signals(self._note_signal)
        looked = said = time.monotonic()
        while self.attempts or (self.waiting and not self.reason):
            self._stop_if_due(say)
            if not self.reason:
                self._start_what_can(say)
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

    def _note_signal(self, number: int, frame: FrameType | None = None) -> None:
        self.signal = self.signal or number

    def hang_up(self) -> None:
        """Note SIGHUP, unless it is ignored, since the output has no reader any more."""
        if not ignores_hangup():
            self._note_signal(signal.SIGHUP)

    def _spent(self) -> float:
        """Dollars so far: each run's own, by the price of the whole machine, which the groups share."""
        return sum(self.dollars.values()) / self.planner.groups

    def _look_at(self, attempt: Attempt) -> str:
        """Progress of a run under way; with a budget, update its cost."""
        name, progress = attempt.run.name, None
        with suppress(UserError):
            progress = read_progress(attempt.run.run.metrics)
        if self.max_dollars is not None:
            self.dollars[name] = status_of(attempt.run).dollars
        place = f"run {self.runs.index(attempt.run) + 1:,} of {len(self.runs):,}"
        return f"{place}, {name}: {describe_progress(progress, attempt.tokens)}"

    def _stop_if_due(self, say: Say) -> None:
        if self.signal:
            self.reason = f"stopped by {signal.Signals(self.signal).name}"
        elif self.max_dollars is not None and self._spent() >= self.max_dollars:
            self.reason = f"--max-dollars {amount_text(self.max_dollars)} are spent"
        else:
            return
        going_on = [attempt for attempt in self.attempts if not attempt.is_stopped]
        if going_on:
            say(f"{self.reason}: waiting for the checkpoints of {', '.join(each.run.name for each in going_on)}")
        for attempt in going_on:
            attempt.stop()

    def _start_what_can(self, say: Say) -> None:
        """Start waiting runs on what is free."""
        while self.free and not self.reason:
            run = next((run for run in self.waiting if self._can_start(run, say)), None)
            if run is None:
                return
            planned = None
            with suppress(UserError):  # the run itself fails by it, and says so
                planned = self.planner.plan(run)
            if self.max_dollars is not None and not self._can_pay(run, planned, say):
                return
            self.waiting.remove(run)
            self._start(run, planned, say)

    def _can_start(self, run: DerivedRun, say: Say) -> bool:
        """False if another process trains the run, such as one that a killed sweep has left, or if another run is
        fetching its dataset."""
        if is_held(run.run.path / ".lock"):
            if run.name not in self._said_waiting:
                self._said_waiting.add(run.name)
                say(f"{run.name}: is being trained by another process; waiting for it")
            return False
        experiment = run.experiment(self.planner.datasets_dir)
        fetched = {attempt.run.train_config.dataset for attempt in self.attempts}
        dataset = experiment.config.dataset
        return dataset not in fetched or is_present(experiment.datasets_dir, dataset, experiment.splits)

    def _can_pay(self, run: DerivedRun, planned: RunPlan | None, say: Say) -> bool:
        """True if the budget covers what is spent, what the runs under way will need, and this run; else it is the
        reason to end."""
        assert self.max_dollars is not None
        wanted, spent = (planned.dollars if planned else None) or 0.0, self._spent()
        to_come = sum(max(0.0, each.committed - self.dollars[each.run.name]) for each in self.attempts)
        total = spent + to_come / self.planner.groups + wanted
        if total > self.max_dollars or spent >= self.max_dollars:
            said = f", and with {run.name} they would be ${amount_text(total)}" if wanted else ""
            self.reason = f"--max-dollars {amount_text(self.max_dollars)}: ${amount_text(spent)} are spent{said}"
            return False
        if not wanted:
            say(f"{run.name}: what it costs is not known yet; it is stopped when the budget is spent")
        return True

    def _start(self, run: DerivedRun, planned: RunPlan | None, say: Say) -> None:
        """Start the run's process; what it prints is added to the run's log."""
        name, variables = group = self.free.pop(0)
        command = [sys.executable, str(self.script), run.name, str(self.planner.datasets_dir)]
        command += ["--runs-dir", str(run.run.path.parent), "--processes", str(self.planner.processes)]
        log = run.run.sweep_log.open("ab")
        log.write(f"\n$ {' '.join(command)}  # {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
            start_new_session=True,  # a Ctrl-C is the sweep's, which passes it on in its own way
            preexec_fn=_end_with_parent,
        )
        tokens, committed = None, self.dollars.get(run.name, 0.0)
        if planned is not None and planned.plan.position is not None:
            tokens = planned.plan.position.tokens_seen + planned.plan.tokens()
            committed += (planned.dollars or 0.0) * self.planner.groups
        self.attempts.append(Attempt(run, group, process, log, tokens, committed))
        self.is_idle = False
        expected = f", about {planned.seconds:,.0f} s" if planned and planned.seconds is not None else ""
        say(f"{run.name}: started{f' on {name}' if name else ''}{expected}")

    def _end(self, attempt: Attempt, say: Say) -> None:
        """Note how a run's process has ended. The exit status of one that failed goes into its log."""
        self.attempts.remove(attempt)
        self.free.append(attempt.group)
        self.planner.speeds.clear()
        name, code, status = attempt.run.name, attempt.process.returncode, status_of(attempt.run)
        seconds = time.monotonic() - attempt.began
        self.dollars[name] = status.dollars
        is_finished = code == 0 and status.state == "finished"  # perhaps before it could be stopped
        if is_finished:
            say(f"{name}: finished, {status.said}")
        elif not attempt.is_stopped:
            say(f"{name}: failed with exit status {code} after {seconds:,.0f} s")
        else:
            say(f"{name}: stopped after {seconds:,.0f} s; the same command continues it")
        with suppress(OSError), attempt.log:  # a full disk, say: no reason to end the other runs
            if not is_finished and not attempt.is_stopped:
                attempt.log.write(f"\n# failed with exit status {code}\n".encode())

    def leave(self) -> None:
        """Say for a terminal how many of all runs are in which state, why, and what is left. Raises RunStopped if a
        signal has ended them, and RunError if some failed, are left or are damaged."""
        statuses = [status_of(run) for run in self.runs]
        unfinished = [each for each in statuses if not each.is_done]
        said = count_states(statuses)
        if self.is_idle and not unfinished:
            said = "Nothing to do: all runs are finished" + (" or pruned" if "pruned" in said else "")
        reason = f" ({self.reason})" if self.reason else ""
        print("\n".join([f"\n{said}{reason}", *status_lines(unfinished)]), flush=True)
        if self.signal:
            raise RunStopped(self.signal)
        states, of = [each.state for each in unfinished], f"of {len(statuses):,} runs"
        left = len(states) - states.count("damaged")
        if left and self.reason:
            raise RunError(f"{left:,} {of} are left: {self.reason}")
        if left:
            raise RunError(f"{left:,} {of} failed; the same command tries them again")
        if states:
            raise RunError(f"{len(states):,} {of} are damaged and were left as they are")
