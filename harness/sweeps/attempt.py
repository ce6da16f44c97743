"""One run of a sweep under way: the command that trains it, its devices and its process."""

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

from harness.common.errors import UserError
from harness.common.libraries import usable_cores
from harness.sweeps.derived_runs import DerivedRun
from harness.sweeps.plan import MachineUse, RunPlan, visible_gpus

PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class DeviceGroup:
    """Devices of one run at a time: environment variables that show its processes their devices."""

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
    """A run under way. `dollars_before` is what the run had cost when this began."""

    planned: RunPlan
    group: DeviceGroup
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    began: float
    dollars_before: float
    is_stopped: bool = False
    is_pruned: bool = False

    @classmethod
    def start(
        cls, planned: RunPlan, group: DeviceGroup, script: Path, use: MachineUse, *, dollars_before: float
    ) -> Attempt:
        """Start the run's process; what it prints is added to the run's log."""
        run = planned.run
        command = training_command(script, run, use)
        log = run.run.sweep_log.open("ab")
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
        return cls(planned, group, process, log, time.monotonic(), dollars_before)

    @property
    def run(self) -> DerivedRun:
        return self.planned.run

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def stop(self) -> None:
        """Ask the process, once, to end with a checkpoint."""
        if not self.is_stopped:
            self.is_stopped = True
            self.process.terminate()

    def prune(self, step: int) -> None:
        """Prune the run, judged at this global step. The log has the mark before the process is asked to end: if this
        process is killed in between, the run is not resumed."""
        self.is_pruned = True
        self.log.write(f"# pruned at global step {step}\n".encode())
        self.log.flush()
        self.stop()

    def close_log(self, failed_with: int | None) -> None:
        """Write the exit status of one that failed into its log."""
        with suppress(OSError), self.log:  # a full disk, say: no reason to end the other runs
            if failed_with is not None:
                self.log.write(f"\n# failed with exit status {failed_with}\n".encode())


_C_LIBRARY = ctypes.CDLL(None)  # loaded now: little is allowed between a fork and what follows it


def _end_with_parent() -> None:
    """Have the system end this process, in good order, when the one that started it is killed. Linux alone can; on
    other systems the run continues, and a sweep that is started again waits for it."""
    if sys.platform == "linux":
        _C_LIBRARY.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
