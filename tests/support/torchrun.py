"""Jobs under the real torchrun or --processes, with faults in their ranks, and the processes that they leave
running."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.isolation import ROOT
from tests.support.launch import TORCHRUN, Workshop
from tests.support.straight import FAULTS
from tests.support.warm import FORK_PYTHONS, WarmProcess

# ddp_train.py does this first. Here it must run before a prelude imports torch.
FIRST = "from harness.common.libraries import configure_libraries\nconfigure_libraries()\n"
MARK = "JOB_OF_A_TEST"  # the name of a variable in the environment of all processes of a job


def with_faults(shop: Workshop, run: Path, prelude: str) -> Path:
    """Write a script that runs the Python source `prelude` and then ddp_train.py in each rank. Return its path."""
    script = shop.path / f"{run.name}.py"
    # Without runpy, which would put ddp_train.py into sys.argv, so that --processes would start ddp_train.py and not
    # this script.
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n{FIRST}"
        f"if 'RANK' in os.environ or '--processes' not in sys.argv:\n    exec({prelude!r})\n"
        f"exec(compile(open({str(ROOT / 'ddp_train.py')!r}).read(), 'ddp_train.py', 'exec'))\n"
    )
    return script


@dataclass(frozen=True)
class Torchrun:
    """Job of two ranks that the real torchrun starts.

    The ranks start cold. With `are_forked`, they are forked from torchrun and remain its children. Each rank then
    starts seconds sooner. With `by_processes`, ddp_train.py --processes starts them in place of torchrun.
    """

    shop: Workshop
    run: Path
    are_forked: bool = False
    by_processes: bool = False

    def start(self, prelude: str, *options: str, arguments: Sequence[str] = (), faults: str = FAULTS) -> WarmProcess:
        """Start torchrun with `options`. Each rank runs the Python source of `faults` and `prelude`, and then
        ddp_train.py with `arguments`."""
        script = with_faults(self.shop, self.run, faults + prelude)
        command = [self.run.name, str(self.shop.datasets), *arguments, "--runs-dir", str(self.shop.runs)]
        launch = [*TORCHRUN, "--standalone", "--nproc_per_node=2", *options, str(script), *command]
        if self.by_processes:
            launch = [str(script), *command, "--processes", "2"]
        return self.shop.fork(launch, {MARK: str(self.run)}, FORK_PYTHONS if self.are_forked else "")

    def processes(self) -> list[psutil.Process]:
        """Return the running processes of this job, whatever their parents are now. Forked processes are not found,
        because the system shows the environment with which a program was started."""
        running = psutil.process_iter(["environ", "status", "cmdline"])  # with None for what cannot be read
        return [each for each in running if (each.info["environ"] or {}).get(MARK) == str(self.run)]

    def describe(self) -> str:
        """Return a line for each running process of this job (pid, state, kernel function in which it waits, command),
        and the last line of the run's metrics."""
        lines = []
        for each in self.processes():
            with suppress(OSError):  # it may end meanwhile
                place = Path(f"/proc/{each.pid}/wchan").read_text()
                lines.append(f"{each.pid} {each.info['status']} {place}: {each.info['cmdline']}")
        path = self.run / "metrics.jsonl"
        return "\n".join([*lines, *(path.read_text().splitlines()[-1:] if path.exists() else [])])

    def seconds_to_the_end(self, patience: float) -> float:
        """Return the seconds until no process of the job runs any more. Processes that still run after `patience`
        seconds are killed, and AssertionError is raised."""
        began = time.monotonic()
        while self.processes():
            if time.monotonic() - began > patience:
                alive = self.describe()
                for process in self.processes():
                    process.kill()
                raise AssertionError(f"alive after {patience} s:\n{alive}")
            time.sleep(0.05)
        return time.monotonic() - began
