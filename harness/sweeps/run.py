"""Execution of a sweep: each run is trained by a ddp_train.py process of its own, one run after another or several at a
time. A run's state is read from its folder, so a killed sweep can be started again."""

from __future__ import annotations

import calendar
import ctypes
import errno
import math
import os
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

from harness.common.errors import (
    AGAIN,
    CEILING,
    DIVERGED,
    STATUSES,
    RunError,
    RunStopped,
    UserError,
    handle_stopping_signals,
    ignores_hangup,
    printable,
)
from harness.common.libraries import usable_cores
from harness.common.lock import is_held
from harness.common.messages import amount_text
from harness.comparison.records import SWEEP_MARK
from harness.runs.metrics import describe_progress, read_progress
from harness.runs.throughput import cost
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.plan import Planner, RunPlan, Status, count_states, status_lines, status_of, visible_gpus

POLL_SECONDS = 0.2
RAISE_LIMITS = "raise the sweep's max_hours or max_dollars"  # the remedy if one of them is reached
LOOK_SECONDS = 1.0  # between two readings of the runs' progress
CLEAR_LINE = "\r\x1b[2K"
REPORT_SECONDS = 60.0  # between two reports of progress, if the output is not a terminal
PR_SET_PDEATHSIG = 1  # prctl(2)
C_LIBRARY = ctypes.CDLL(None)  # loaded here, because little is allowed between fork and exec

TIME_FORMAT = "%Y-%m-%d %H:%M:%S UTC"  # of the lines that SWEEP_MARK matches

# Devices that train one run at a time: their name, which is "" for the whole machine, and the environment variables
# that give a process these devices.
DeviceGroup = tuple[str, dict[str, str]]


def say(text: str) -> None:
    """Print `text` at once. On a terminal, it replaces the text that `show` has written."""
    print(f"{CLEAR_LINE}{text}" if sys.stdout.isatty() else text, flush=True)


def show(text: str) -> None:
    """Replace the last line on the terminal with this text, cut to the terminal's width. Only for a terminal."""
    print(f"{CLEAR_LINE}{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)


def device_groups(groups: int, processes: int) -> list[DeviceGroup]:
    """Divide the machine's GPUs, or its cores if it has no GPUs, into `groups` groups. Each group trains one run at a
    time, with `processes` processes. A single group gets the whole machine. Raises UserError for several groups if
    there are GPUs, but too few."""
    if groups == 1:
        return [("", {})]
    gpus, wanted = visible_gpus(), groups * processes
    if gpus and wanted > len(gpus):
        raise UserError(
            f"--groups {groups} with {processes} processes each: needs {wanted} GPUs, and there are {len(gpus)}; "
            "lower --groups or --processes"
        )
    if not gpus:
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, usable_cores() // wanted)))
        return [(f"group {number}", {"OMP_NUM_THREADS": threads}) for number in range(1, groups + 1)]
    shares = [",".join(gpus[start : start + processes]) for start in range(0, wanted, processes)]
    return [(f"GPU {share}", {"CUDA_VISIBLE_DEVICES": share}) for share in shares]


def earlier_attempts(run: DerivedRun, recorded: float) -> list[tuple[float, float]]:
    """Return the start (seconds since 1970) and the duration (seconds) of each earlier attempt in the run's sweep.log.

    An attempt whose sweep was killed has no duration in the log. Its duration is estimated from `recorded`, the seconds
    that the run itself has recorded. Raises UserError if the log has a date that does not exist.
    """
    log = run.directory.sweep_log
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    begins: list[float] = []
    durations: list[float] = []
    for mark in filter(None, map(SWEEP_MARK.fullmatch, text.splitlines())):
        if mark["begun"]:
            try:
                begins.append(calendar.timegm(time.strptime(mark["begun"], TIME_FORMAT)))
            except ValueError:
                raise UserError(f"{log}: {mark['begun']} is no date; correct the line or remove it") from None
            durations.append(0.0)
        elif mark["took"] and durations:
            durations[-1] = float(mark["took"])
    missing, next_begin = max(0.0, recorded - sum(durations)), time.time()
    for at in reversed(range(len(begins))):
        if not durations[at]:
            durations[at] = min(missing, max(0.0, next_begin - begins[at]))
            missing -= durations[at]
        next_begin = begins[at]
    return list(zip(begins, durations, strict=True))


def earlier_costs(statuses: Sequence[Status]) -> tuple[dict[str, float], float, float]:
    """Return the cost and time of the runs' training so far:

    - the dollars of each run at the price of the whole machine, by the run's name
    - the dollars of all runs together
    - the seconds for which sweeps have used the machine

    The last two count the time of overlapping attempts once. Training outside of sweeps adds to the dollars only. After
    a killed sweep, all three are estimates (see `earlier_attempts`). Raises UserError if a sweep.log has a date that
    does not exist.
    """
    by_run: dict[str, float] = {}
    attempts: list[tuple[float, float, float]] = []
    dollars = seconds = end = 0.0
    for status in statuses:
        own, price = earlier_attempts(status.run, status.seconds), status.run.train_config.price_per_hour or 0.0
        if status.dollars and status.seconds:  # train.json's price may have changed since
            price = 3600 * status.dollars / status.seconds
        in_sweeps = cost(sum(duration for _, duration in own), price)
        by_run[status.run.name] = max(status.dollars, in_sweeps)
        dollars += by_run[status.run.name] - in_sweeps
        attempts += [(begin, duration, price) for begin, duration in own]
    for begin, duration, price in sorted(attempts):
        added = max(0.0, min(duration, begin + duration - end))
        dollars, seconds, end = dollars + cost(added, price), seconds + added, max(end, begin + duration)
    return by_run, dollars, seconds


@dataclass
class Attempt:
    """A run that is being trained on the devices `group`. All dollars are at the price of the whole machine."""

    run: DerivedRun
    group: DeviceGroup
    process: subprocess.Popen[bytes]
    tokens: int | None  # that the run will have seen at its end; None if not known
    dollars_before: float  # cost of the run when the attempt began
    dollars_at_end: float  # planned cost of the run at its end; `dollars_before` if not known
    began: float = field(default_factory=time.monotonic)
    is_stopped: bool = False  # True once the sweep has asked the process to stop

    def seconds(self) -> float:
        """Return the seconds since the attempt began."""
        return time.monotonic() - self.began

    def dollars(self) -> float:
        """Return what the run has cost so far, measured by this process's clock. The machine is paid for even before
        the run has reported anything."""
        return self.dollars_before + cost(self.seconds(), self.run.train_config.price_per_hour or 0.0)


def _end_with_parent() -> None:
    """Make Linux send SIGTERM to this process when its parent process ends. If a sweep is killed, its runs then stop
    with a checkpoint. On other systems the runs continue, and a sweep that is started again waits for them."""
    if sys.platform == "linux":
        C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _note(run: DerivedRun, *lines: str) -> None:
    """Append lines to the run's sweep.log, or do nothing if it cannot be written."""
    with suppress(OSError), run.directory.sweep_log.open("ab") as log:  # a full disk must not end other runs
        log.write("".join(f"{line}\n" for line in lines).encode())


class SweepRunner:
    """Runner of all runs of a sweep that need training (`Status.needs_training`).

    - The folders of the `runs` must exist before `run` is called.
    - `script` is the path of ddp_train.py.
    - `max_dollars` limits the cost of all `runs` together, earlier costs included.
    - `max_hours` limits the time for which sweeps train the `runs`, earlier sweeps included.
    """

    def __init__(
        self,
        runs: Sequence[DerivedRun],
        planner: Planner,
        script: Path,
        max_dollars: float | None = None,
        max_hours: float | None = None,
    ) -> None:
        """Raise UserError if `max_dollars` is given and a run has no price, if GPUs are too few for several groups, or
        if a run's train.json or sweep.log is damaged."""
        runs = [run.as_made() for run in runs]
        unpriced = [run.name for run in runs if run.train_config.price_per_hour is None]
        if max_dollars is not None and unpriced:
            raise UserError(
                f'max_dollars: train.json of {unpriced[0]} has no "price_per_hour", so its cost is unknown; put '
                "the machine's price into the sweep's \"set\" (and into train.json of the runs that exist already)"
            )
        self.runs, self.planner, self.script, self.max_dollars = runs, planner, script, max_dollars
        self.free_groups = device_groups(planner.groups, planner.processes)
        statuses = [status_of(run) for run in runs]
        self.waiting = [each.run for each in statuses if each.needs_training]
        # `dollars` has what each run has cost at the price of the whole machine, by the run's name. `spent` is what all
        # runs have cost together: runs that were trained at the same time shared the machine's cost.
        self.dollars, self.spent, earlier = earlier_costs(statuses)
        self.max_hours, self.ends_at = max_hours, time.monotonic() + 3600 * (max_hours or math.inf) - earlier
        self.attempts: list[Attempt] = []
        self.stop_reason: str | None = None  # why no more runs are started; None while runs are started
        self.signal = 0  # number of the first signal that asked the sweep to stop; 0 if there was none
        self._said_waiting: set[str] = set()

    def run(self) -> None:
        """Train the runs until all have ended, or until a signal, `max_dollars` or `max_hours` has stopped them.
        Handles the signals that ask a process to stop."""
        handle_stopping_signals(self._note_signal)
        looked = said = time.monotonic()
        while self.attempts or (self.waiting and self.stop_reason is None):
            self._stop_if_due()
            while self.free_groups and self.stop_reason is None and (run := self._next_run()):
                planned = None
                with suppress(UserError):  # if training refuses the run, the run's process will print the error
                    planned = self.planner.plan(run)
                # After a message no further run is started, not even a cheaper one.
                self.stop_reason = self._why_unaffordable(run, planned)
                if self.stop_reason is None:
                    self._start(run, planned)
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if self.attempts and now - looked >= LOOK_SECONDS:
                if self.max_dollars is not None:
                    for attempt in self.attempts:
                        self._count(attempt, status_of(attempt.run))
                looked, lines = now, [self._progress_line(attempt) for attempt in self.attempts]
                if sys.stdout.isatty():
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
        """End the sweep as SIGHUP does, because nobody reads its output any more. Do nothing if SIGHUP is ignored."""
        if not ignores_hangup():
            self._note_signal(signal.SIGHUP)

    def _stop_if_due(self) -> None:
        """Start no more runs, and ask the runs under way to write a checkpoint and end, if a signal has arrived, or if
        `max_dollars` or `max_hours` is spent."""
        if self.signal:
            self.stop_reason = f"stopped by {signal.Signals(self.signal).name}"
        elif self.max_dollars is not None and self.spent >= self.max_dollars:
            self.stop_reason = f"max_dollars ({amount_text(self.max_dollars)}) is spent"
        elif time.monotonic() >= self.ends_at:
            self.stop_reason = f"max_hours ({self.max_hours:g}) has passed"
        else:
            return
        going_on = [attempt for attempt in self.attempts if not attempt.is_stopped]
        if going_on:
            say(f"{self.stop_reason}: waiting for the checkpoints of {', '.join(each.run.name for each in going_on)}")
        for attempt in going_on:
            attempt.is_stopped = True
            attempt.process.terminate()

    def _next_run(self) -> DerivedRun | None:
        """Return the first waiting run that can be started now, or None. A run has to wait in these cases:

        - Another process on this machine holds its lock, in most cases to train it.
        - A run under way may be downloading a dataset that the run needs, too.
        """
        downloading = {name for attempt in self.attempts for name in attempt.run.train_config.dataset_weights}
        for run in self.waiting:
            # None, which means unknown, if the owner is on another machine. If that machine holds the lock, the run's
            # process fails.
            if is_held(run.directory.lock_file):
                if run.name not in self._said_waiting:
                    self._said_waiting.add(run.name)
                    say(f"{run.name}: is being trained by another process; waiting for it")
                continue
            experiment = run.experiment(self.planner.datasets_dir)
            with suppress(UserError):  # a faulty folder; the run's process will fail with this error and print it
                if not downloading.isdisjoint(experiment.config.dataset_weights) and not experiment.has_data():
                    continue
            return run
        return None

    def _why_unaffordable(self, run: DerivedRun, planned: RunPlan | None) -> str | None:
        """Return a message if `max_dollars`, not spent yet, is too low to finish `run` and the runs under way.
        Return None if `run` may start. A run of unknown cost counts as free."""
        if self.max_dollars is None:
            return None
        wanted = (planned.dollars if planned else None) or 0.0
        to_come = (each.dollars_at_end - self.dollars[each.run.name] for each in self.attempts)
        # The largest, not the sum: the runs share the machine, which costs its whole price until the last of them ends.
        total = self.spent + max([wanted, *to_come])
        if total <= self.max_dollars:
            return None
        others = " and the runs under way" if self.attempts else ""
        said = f", and with {run.name}{others} the total would be ${amount_text(total)}" if wanted else ""
        return f"max_dollars ({amount_text(self.max_dollars)}): ${amount_text(self.spent)} is spent{said}"

    def _start(self, run: DerivedRun, planned: RunPlan | None) -> None:
        """Start the run's process on the first of the `free_groups`, or print why it cannot be started. `planned` is
        the run's plan, or None if the run cannot be planned."""
        self.waiting.remove(run)
        name, variables = group = self.free_groups.pop(0)
        try:
            process = self._open_process(run, variables)
        except OSError as error:
            self.free_groups.append(group)
            place = f"{error.filename}: " if error.filename else ""
            say(f"{run.name}: failed, because it cannot be started: {place}{error.strerror or error}")
            return
        tokens, before, planned_dollars, expected = None, self.dollars[run.name], 0.0, ""
        if planned is not None and planned.plan.position is not None:
            tokens = planned.plan.position.tokens_seen + planned.plan.tokens()
        if planned is not None and planned.seconds is not None:
            planned_dollars = planned.dollars or 0.0
            expected = f", about {planned.seconds:,.0f} s"
        elif self.max_dollars is not None:
            say(f"{run.name}: its cost is not known yet; the run will be stopped when max_dollars is spent")
        self.attempts.append(Attempt(run, group, process, tokens, before, before + planned_dollars))
        say(f"{run.name}: started{f' on {name}' if name else ''}{expected}")

    def _open_process(self, run: DerivedRun, variables: dict[str, str]) -> subprocess.Popen[bytes]:
        """Append a line with the command to the run's sweep.log, and start ddp_train.py with `variables` added to its
        environment. Raises OSError if either fails."""
        command = [sys.executable, str(self.script), run.name, str(self.planner.datasets_dir)]
        command += ["--runs-dir", str(run.directory.path.parent), "--processes", str(self.planner.processes)]
        shared = f", 1 of {self.planner.groups} groups" if self.planner.groups > 1 else ""
        begun = time.strftime(TIME_FORMAT, time.gmtime())
        path = run.directory.sweep_log
        if path.is_fifo():  # opening a pipe waits until somebody reads it
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        log = path.open("ab", buffering=0)
        try:
            # `printable`: a folder's name can hold line breaks, and bytes that are not UTF-8
            log.write(f"\n$ {printable(' '.join(command))}  # {begun}{shared}\n".encode())
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
            with suppress(OSError):  # closing may fail on a network disk, though the process has started
                log.close()

    def _progress_line(self, attempt: Attempt) -> str:
        """Return the progress of a run that is being trained, as text."""
        progress = None
        with suppress(UserError):
            progress = read_progress(attempt.run.directory.metrics)
        place = f"run {self.runs.index(attempt.run) + 1:,} of {len(self.runs):,}"
        return f"{place}, {attempt.run.name}: {describe_progress(progress, attempt.tokens)}"

    def _count(self, attempt: Attempt, status: Status) -> None:
        """Update `dollars` for the run of `attempt`. Add the increase, divided by the number of runs under way, to
        `spent`. The `attempt` must still be in `attempts`."""
        dollars = max(status.dollars, attempt.dollars())
        # Not divided by the number of groups, because a group without a run does not make the machine cheaper.
        self.spent += (dollars - self.dollars[attempt.run.name]) / len(self.attempts)
        self.dollars[attempt.run.name] = dollars

    def _end(self, attempt: Attempt) -> None:
        """Record the end of an attempt: count its cost, free its devices, print how it ended, and log its seconds."""
        name, code, status = attempt.run.name, attempt.process.returncode, status_of(attempt.run)
        self._count(attempt, status)
        self.attempts.remove(attempt)
        self.free_groups.append(attempt.group)
        self.planner.speeds.clear()  # the run may have measured a speed
        seconds = attempt.seconds()
        _note(attempt.run, "", f"# took {seconds:.1f} s")
        is_stopped = attempt.is_stopped and code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        # A run may finish before the signal to stop reaches it.
        is_finished = status.state == "finished" and (code == 0 or is_stopped)
        if is_finished:
            say(f"{name}: finished, {status.said}")
        elif is_stopped:
            how = AGAIN if self.signal else RAISE_LIMITS
            say(f"{name}: stopped after {seconds:,.0f} s; to continue it, {how}")
        elif code == STATUSES[CEILING]:
            say(
                f"{name}: stopped by its own max_hours or max_dollars after {seconds:,.0f} s; to continue it, raise "
                'them in its train.json and in the sweep\'s "set"'
            )
        elif code == STATUSES[DIVERGED]:
            say(f"{name}: diverged after {seconds:,.0f} s")
        else:
            say(f"{name}: failed with exit status {code} after {seconds:,.0f} s")
            _note(attempt.run, f"# failed with exit status {code}")

    def report_end(self) -> None:
        """Print the states of the runs, and why the sweep was stopped, if it was. Raises RunStopped if a signal ended
        the sweep. Otherwise raises RunError if a run is neither finished nor diverged."""
        statuses = [status_of(run) for run in self.runs]
        unfinished = [each for each in statuses if each.state != "finished"]
        reason = f" ({self.stop_reason})" if self.stop_reason else ""
        say("\n".join([f"\n{count_states(statuses)}{reason}", *status_lines(unfinished)]))
        if self.signal:
            raise RunStopped(self.signal)
        left = sum(each.needs_training for each in unfinished)
        if left:
            why = (
                f"are left: {self.stop_reason}; to continue, {RAISE_LIMITS}"
                if self.stop_reason
                else "have not finished; the same command tries them again"
            )
            raise RunError(f"{left:,} of {len(statuses):,} runs {why}")
        if damaged := sum(each.state == "damaged" for each in unfinished):
            raise RunError(f"{damaged:,} of {len(statuses):,} runs are damaged and were left as they are")
