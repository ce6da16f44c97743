"""One run of a sweep under way: the command that trains it, its devices, its process and its costs."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.analysis.derived_runs import DerivedRun
from harness.analysis.sweep_plan import MachineUse, RunPlan, visible_gpus
from harness.analysis.sweep_standing import LOG, Attempts, UnderWay, read_attempts, write_attempts
from harness.common.errors import UserError
from harness.common.libraries import usable_cores

PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class DeviceGroup:
    """What one run at a time gets: environment variables that show its processes their devices."""

    name: str
    environment: dict[str, str]


def device_groups(use: MachineUse) -> list[DeviceGroup]:
    """The machine's GPUs shared out, or else its cores; one group gets what a run alone would. Raises UserError for
    more than there are GPUs."""
    if use.groups == 1:
        return [DeviceGroup("", {})]
    gpus, wanted = visible_gpus(), use.groups * use.processes
    if gpus and wanted > len(gpus):
        raise UserError(
            f"--groups {use.groups} with {use.processes} processes each: needs {wanted} GPUs, and there are {len(gpus)}"
        )
    if not gpus:
        cores = max(1, usable_cores() // wanted)
        threads = os.environ.get("OMP_NUM_THREADS", str(cores))
        return [DeviceGroup(f"group {group + 1}", {"OMP_NUM_THREADS": threads}) for group in range(use.groups)]
    starts = range(0, wanted, use.processes)
    names = [",".join(gpus[start : start + use.processes]) for start in starts]
    return [DeviceGroup(f"GPU {each}", {"CUDA_VISIBLE_DEVICES": each}) for each in names]


def training_command(script: Path, run: DerivedRun, use: MachineUse) -> list[str]:
    """The command that starts a run, continues it, or finds it finished."""
    words = [str(script), run.name, str(use.datasets_dir), "--runs-dir", str(run.run.path.parent)]
    return [sys.executable, *words, "--processes", str(use.processes)]


@dataclass
class Attempt:
    """A run under way. `dollars` is its part of what the machine has cost since it began."""

    planned: RunPlan
    group: DeviceGroup
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    before: Attempts
    began: float
    noted: float
    dollars: float = 0.0
    is_stopped: bool = False
    pruned_at_step: int | None = None

    @classmethod
    def start(cls, planned: RunPlan, group: DeviceGroup, script: Path, use: MachineUse) -> Attempt:
        """Start the run's process; what it prints is added to the run's log."""
        run = planned.run
        command = training_command(script, run, use)
        log = (run.run.path / LOG).open("ab")
        log.write(f"\n$ {' '.join(command)}  # {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **group.environment},
            start_new_session=True,  # a Ctrl-C is the sweep's, which passes it on in its own way
            preexec_fn=_end_with_parent,
        )
        now = time.monotonic()
        attempt = cls(planned, group, process, log, read_attempts(run), now, now)
        attempt.note()
        return attempt

    @property
    def run(self) -> DerivedRun:
        return self.planned.run

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, exit_status: int | None = None) -> None:
        """Write down what it has cost so far, and how it failed, if it did."""
        self.noted = time.monotonic()
        has_price = self.run.train_config.price_per_hour is not None
        record = Attempts(
            attempts=self.before.attempts + 1,
            seconds=round(self.before.seconds + self.seconds, 3),
            dollars=round((self.before.dollars or 0.0) + self.dollars, 6) if has_price else None,
            exit_status=exit_status,
            under_way=UnderWay.of(self.process.pid) if self.process.poll() is None else None,
            pruned_at_step=self.pruned_at_step,
        )
        with suppress(OSError):  # a full disk, say: no reason to end the other runs
            write_attempts(self.run, record)

    def stop(self) -> None:
        """Ask it, once, to end with a checkpoint."""
        if not self.is_stopped:
            self.is_stopped = True
            self.process.terminate()

    def prune(self, step: int) -> None:
        """Give it up by what it came to at this global step, and write that down before it is asked to end: whatever
        kills this process in between, nobody trains it on."""
        self.pruned_at_step = step
        self.note()
        self.log.write(f"# given up by the search after global step {step:,}\n".encode())
        self.log.flush()
        self.stop()


_C_LIBRARY = ctypes.CDLL(None)  # loaded now: little is allowed between a fork and what follows it


def _end_with_parent() -> None:
    """Have the system end this process, in good order, when the one that started it is killed. Linux alone can; on
    other systems the run goes on, and a sweep that is started again waits for it."""
    if sys.platform == "linux":
        _C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
