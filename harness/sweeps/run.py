"""Execution of a sweep: ddp_train.py trains each run in a process of its own, until all runs are finished.

ddp_train.py leaves a finished run unchanged and resumes a stopped run, and the state of each run is read from its
folder. Therefore a sweep that was killed can simply be started again.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from harness.common.errors import RunError, RunStopped, UserError, handle_stopping_signals, ignores_hangup
from harness.common.libraries import usable_cores
from harness.common.lock import is_held
from harness.common.units import amount_text
from harness.comparison.progress import describe_progress, read_progress
from harness.data.dataset import is_present
from harness.runs.throughput import cost
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.plan import Planner, RunPlan, Status, count_states, status_lines, status_of, visible_gpus

POLL_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two readings of the runs' progress
CLEAR_LINE = "\r\x1b[2K"
REPORT_SECONDS = 60.0  # between two printed lines of progress, if the output is not a terminal
PR_SET_PDEATHSIG = 1  # prctl(2)
C_LIBRARY = ctypes.CDLL(None)  # loaded here, because little is allowed between fork and exec

START_MARK = re.compile(r"^\$ .* UTC(?:, 1 of (\d+) groups)?$", re.MULTILINE)  # written by `_open_process`
NOT_STARTED = 126  # the exit status that shells give to a command that cannot be started

Group = tuple[str, dict[str, str]]  # devices for one run at a time: name, and environment variables that select them


def is_on_terminal() -> bool:
    """Return True if standard output is a terminal, and False also if it was closed before Python started."""
    return sys.stdout is not None and sys.stdout.isatty()


def say(text: str) -> None:
    """Print a line. On a terminal, it replaces the line that `show` has written."""
    print(f"{CLEAR_LINE}{text}" if is_on_terminal() else text, flush=True)


def show(text: str) -> None:
    """Replace the last line on the terminal with this text, cut to the terminal's width."""
    print(f"{CLEAR_LINE}{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def device_groups(groups: int, processes: int) -> list[Group]:
    """Divide the machine's GPUs, or its cores if it has no GPUs, among the groups. A single group has the whole
    machine, as a run outside a sweep has. Raises UserError if the groups need more GPUs than there are."""
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


def groups_before(run: DerivedRun) -> int:
    """Return the number of groups among which the machine was divided when earlier sweeps trained the run: the smallest
    of them, or 1 if its sweep.log does not say, or if the run was trained without a sweep since."""
    log, metrics = run.run.sweep_log, run.run.metrics
    if not log.is_file() or (metrics.is_file() and metrics.stat().st_mtime > log.stat().st_mtime):
        return 1
    marks = START_MARK.findall(log.read_text(encoding="utf-8", errors="replace"))
    return min((int(groups or 1) for groups in marks), default=1)


@dataclass
class Attempt:
    """A run that is being trained. `tokens` is the number of tokens it will have seen at its end, or None if that is
    not known. Its dollars, those when the attempt began and those planned for its end, are at the price of the whole
    machine."""

    run: DerivedRun
    group: Group
    process: subprocess.Popen[bytes]
    tokens: int | None
    dollars_before: float
    dollars_at_end: float
    began: float = field(default_factory=time.monotonic)
    is_stopped: bool = False

    def seconds(self) -> float:
        """Return the seconds since the attempt began."""
        return time.monotonic() - self.began

    def dollars(self) -> float:
        """Return what the run has cost by this process's clock: the machine is paid for from the attempt's beginning,
        whether the run has reported anything or not."""
        return self.dollars_before + cost(self.seconds(), self.run.train_config.price_per_hour or 0.0)


def _end_with_parent() -> None:
    """Have Linux send SIGTERM to this process when its parent process is killed, so that this process stops with a
    checkpoint. Other systems cannot do this. There the run continues, and a sweep that is started again waits for
    it."""
    if sys.platform == "linux":
        C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _note_failure(run: DerivedRun, exit_status: int, error: str = "") -> None:
    """Append to the run's sweep.log that the run has failed."""
    with suppress(OSError), run.run.sweep_log.open("ab") as log:  # such as a full disk, which must not end other runs
        log.write(f"{error}\n# failed with exit status {exit_status}\n".encode())


class SweepRunner:
    """Runner that trains the runs that are not finished. Runs with a file that cannot be read are left unchanged.

    `planner` plans the remaining work of a run. `max_dollars` limits the cost of all `runs` together, including what
    they have cost before. `reason` says why the sweep ended before all runs were trained, and `signal` is the signal
    that ended it, or 0.
    """

    def __init__(
        self, runs: Sequence[DerivedRun], planner: Planner, script: Path, max_dollars: float | None = None
    ) -> None:
        """Raise UserError if `max_dollars` is given and a run has no price, or if there are not enough GPUs."""
        unpriced = [run.name for run in runs if run.train_config.price_per_hour is None]
        if max_dollars is not None and unpriced:
            raise UserError(
                f'--max-dollars: train.json of {unpriced[0]} has no "price_per_hour", so its cost is unknown; put it '
                'into the sweep\'s "set", and make the sweep anew under another name'
            )
        self.runs, self.planner, self.script, self.max_dollars = list(runs), planner, script, max_dollars
        self.free = device_groups(planner.groups, planner.processes)
        statuses = [status_of(run) for run in runs]
        self.waiting = [each.run for each in statuses if not each.is_done and each.state != "damaged"]
        # What each run has cost at the price of the whole machine, and what all have cost together, who share it.
        self.dollars = {each.run.name: each.dollars for each in statuses}
        self.spent = sum(each.dollars / groups_before(each.run) for each in statuses)
        self.attempts: list[Attempt] = []
        self.has_started_runs = False
        self.reason = ""
        self.signal = 0
        self._said_waiting: set[str] = set()

    def run(self) -> None:
        """Train the runs. Returns when all runs are finished or have failed, or when a signal or the budget has ended
        the sweep and its processes have stopped. Shows progress in place of the last line on a terminal, and prints it
        every REPORT_SECONDS elsewhere."""
        handle_stopping_signals(self._note_signal)
        looked = said = time.monotonic()
        while self.attempts or (self.waiting and not self.reason):
            self._stop_if_due()
            while self.free and not self.reason and (chosen := self._first_startable()):
                self.reason = self._why_unaffordable(*chosen)
                if not self.reason:
                    self._start(*chosen)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if self.attempts and now - looked >= LOOK_SECONDS:
                looked, lines = now, [self._look_at(attempt) for attempt in self.attempts]
                if is_on_terminal():
                    show("; ".join(lines))
                elif now - said >= REPORT_SECONDS:
                    said = now
                    for line in lines:
                        say(line)
            for attempt in [each for each in self.attempts if each.process.poll() is not None]:
                self._end(attempt)

    def _note_signal(self, number: int, frame: FrameType | None = None) -> None:
        self.signal = self.signal or number

    def hang_up(self) -> None:
        """Treat output that nobody reads any more as a SIGHUP, which ends the sweep, unless this process ignores
        SIGHUP."""
        if not ignores_hangup():
            self._note_signal(signal.SIGHUP)

    def _stop_if_due(self) -> None:
        """Ask all processes to write a checkpoint and to end, after a signal or once the budget is spent."""
        if self.signal:
            self.reason = f"stopped by {signal.Signals(self.signal).name}"
        elif self.max_dollars is not None and self.spent >= self.max_dollars:
            self.reason = f"--max-dollars {amount_text(self.max_dollars)} are spent"
        else:
            return
        going_on = [attempt for attempt in self.attempts if not attempt.is_stopped]
        if going_on:
            say(f"{self.reason}: waiting for the checkpoints of {', '.join(each.run.name for each in going_on)}")
        for attempt in going_on:
            attempt.is_stopped = True
            attempt.process.terminate()

    def _first_startable(self) -> tuple[DerivedRun, RunPlan | None] | None:
        """Return the first waiting run that can be trained now, with its plan, which is None if the run will fail at
        once. None if there is no such run.

        A run cannot be trained while another process trains it, such as one left by a killed sweep, or while another
        run is downloading its dataset.
        """
        fetched = {attempt.run.train_config.dataset for attempt in self.attempts}
        for run in self.waiting:
            if is_held(run.run.path / ".lock"):
                if run.name not in self._said_waiting:
                    self._said_waiting.add(run.name)
                    say(f"{run.name}: is being trained by another process; waiting for it")
                continue
            planned = None
            with suppress(UserError):  # the run itself will fail with this error and print it
                experiment = run.experiment(self.planner.datasets_dir)
                dataset = experiment.config.dataset
                if dataset in fetched and not is_present(experiment.datasets_dir, dataset, experiment.splits):
                    continue
                planned = self.planner.plan(run)
            return run, planned
        return None

    def _why_unaffordable(self, run: DerivedRun, planned: RunPlan | None) -> str:
        """Return why the budget does not cover the machine until this run and those that are being trained have ended.
        Empty if it does, or without a budget. A run of unknown cost counts as free."""
        if self.max_dollars is None:
            return ""
        wanted = (planned.dollars if planned else None) or 0.0
        to_come = (each.dollars_at_end - self.dollars[each.run.name] for each in self.attempts)
        total = self.spent + max([wanted, *to_come])
        if total <= self.max_dollars and self.spent < self.max_dollars:
            return ""
        others = " and the runs under way" if self.attempts else ""
        said = f", and with {run.name}{others} they would be ${amount_text(total)}" if wanted else ""
        return f"--max-dollars {amount_text(self.max_dollars)}: ${amount_text(self.spent)} are spent{said}"

    def _start(self, run: DerivedRun, planned: RunPlan | None) -> None:
        """Start the run's process, whose output is appended to the run's sweep.log. If the system refuses that, the run
        has failed, and the next run gets the devices."""
        self.waiting.remove(run)
        name, variables = group = self.free.pop(0)
        try:
            process = self._open_process(run, variables)
        except OSError as error:
            self.free.append(group)
            place = f"{error.filename}: " if error.filename else ""
            reason = f"cannot be started: {place}{error.strerror or error}"
            say(f"{run.name}: failed, {reason}")
            _note_failure(run, NOT_STARTED, f"error: {reason}")
            return
        tokens, before, planned_dollars, expected = None, status_of(run).dollars, 0.0, ""
        if planned is not None and planned.plan.position is not None:
            tokens = planned.plan.position.tokens_seen + planned.plan.tokens()
        if planned is not None and planned.seconds is not None:
            planned_dollars = planned.dollars or 0.0
            expected = f", about {planned.seconds:,.0f} s"
        elif self.max_dollars is not None:
            say(f"{run.name}: what it costs is not known yet; it is stopped when the budget is spent")
        self.attempts.append(Attempt(run, group, process, tokens, before, before + planned_dollars))
        self.has_started_runs = True
        say(f"{run.name}: started{f' on {name}' if name else ''}{expected}")

    def _open_process(self, run: DerivedRun, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ddp_train.py with these environment variables, after a line with the command in the run's sweep.log."""
        command = [sys.executable, str(self.script), run.name, str(self.planner.datasets_dir)]
        command += ["--runs-dir", str(run.run.path.parent), "--processes", str(self.planner.processes)]
        shared = f", 1 of {self.planner.groups} groups" if self.planner.groups > 1 else ""
        begun = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        log = run.run.sweep_log.open("ab", buffering=0)
        try:
            log.write(f"\n$ {' '.join(command)}  # {begun}{shared}\n".encode())
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,  # a Ctrl-C reaches only the sweep, which stops the runs by SIGTERM
                preexec_fn=_end_with_parent,
            )
        finally:
            with suppress(OSError):  # of a network disk; the process may have been started
                log.close()

    def _look_at(self, attempt: Attempt) -> str:
        """Return the progress of a run that is being trained, as text. If there is a budget, also count its cost."""
        progress = None
        with suppress(UserError):
            progress = read_progress(attempt.run.run.metrics)
        if self.max_dollars is not None:
            self._count(attempt, status_of(attempt.run))
        place = f"run {self.runs.index(attempt.run) + 1:,} of {len(self.runs):,}"
        return f"{place}, {attempt.run.name}: {describe_progress(progress, attempt.tokens)}"

    def _count(self, attempt: Attempt, status: Status) -> None:
        """Add to `spent` what a run has cost since this was last called, by its records or by the clock, whichever is
        more. Only the runs under way share the machine's cost: it costs as much while some groups have no run."""
        dollars = max(status.dollars, attempt.dollars())
        self.spent += (dollars - self.dollars[attempt.run.name]) / len(self.attempts)
        self.dollars[attempt.run.name] = dollars

    def _end(self, attempt: Attempt) -> None:
        """Record how a run's process has ended. If it failed, its exit status is written to the run's log."""
        name, code, status = attempt.run.name, attempt.process.returncode, status_of(attempt.run)
        self._count(attempt, status)
        self.attempts.remove(attempt)
        self.free.append(attempt.group)
        self.planner.speeds.clear()  # the run may have measured a speed
        seconds = attempt.seconds()
        is_stopped = attempt.is_stopped and code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        is_finished = code == 0 and status.state == "finished"  # a run may finish before the signal to stop reaches it
        if is_finished:
            say(f"{name}: finished, {status.said}")
        elif is_stopped:
            say(f"{name}: stopped after {seconds:,.0f} s; the same command continues it")
        else:
            say(f"{name}: failed with exit status {code} after {seconds:,.0f} s")
            _note_failure(attempt.run, code)

    def leave(self) -> None:
        """Print how many runs are in each state, why the sweep ended, and which runs are not finished. Raises
        RunStopped if a signal ended the sweep, and RunError if runs failed, are left or are damaged."""
        statuses = [status_of(run) for run in self.runs]
        unfinished = [each for each in statuses if not each.is_done]
        said = count_states(statuses)
        if not self.has_started_runs and not unfinished:
            said = "Nothing to do: all runs are finished" + (" or pruned" if "pruned" in said else "")
        reason = f" ({self.reason})" if self.reason else ""
        say("\n".join([f"\n{said}{reason}", *status_lines(unfinished)]))
        if self.signal:
            raise RunStopped(self.signal)
        left = sum(each.state != "damaged" for each in unfinished)
        if left:
            why = f"are left: {self.reason}" if self.reason else "failed; the same command tries them again"
            raise RunError(f"{left:,} of {len(statuses):,} runs {why}")
        if unfinished:
            raise RunError(f"{len(unfinished):,} of {len(statuses):,} runs are damaged and were left as they are")
