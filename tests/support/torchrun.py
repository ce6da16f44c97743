"""The real torchrun, or --processes, with faults in the ranks, and everything that it leaves running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.isolation import ROOT
from tests.support.launch import TORCHRUN, Workshop
from tests.support.straight import FAULTS
from tests.support.warm import FORK_PYTHONS, WarmProcess

# What ddp_train.py does first, before a prelude imports torch.
FIRST = "from harness.common.libraries import configure_libraries\nconfigure_libraries()\n"
MARK = "JOB_OF_A_TEST"  # a variable in the environment of all processes of a job


def with_faults(shop: Workshop, run: Path, prelude: str) -> Path:
    """A script that is ddp_train.py after `prelude`, Python source, in each rank."""
    script = shop.path / f"{run.name}.py"
    # Not by runpy, which makes the name of what it runs the one of the command that --processes starts again.
    script.write_text(
        f"import os, sys\nsys.path.insert(0, {str(ROOT)!r})\n{FIRST}"
        f"if 'RANK' in os.environ or '--processes' not in sys.argv:\n    exec({prelude!r})\n"
        f"exec(compile(open({str(ROOT / 'ddp_train.py')!r}).read(), 'ddp_train.py', 'exec'))\n"
    )
    return script


@dataclass(frozen=True)
class Torchrun:
    """A job of two ranks that a torchrun has started: cold processes, or `are_forked` from it, which takes seconds less
    of each and leaves them its children. With `by_processes` ddp_train.py --processes has, in place of torchrun."""

    shop: Workshop
    run: Path
    are_forked: bool = False
    by_processes: bool = False

    def start(self, prelude: str, *options: str, arguments: Sequence[str] = (), faults: str = FAULTS) -> WarmProcess:
        """Start torchrun with `options`, and ddp_train.py with `arguments` in each rank, where `faults` and `prelude`,
        Python source, run first."""
        script = with_faults(self.shop, self.run, faults + prelude)
        launcher = self.shop.path / "torchrun"
        launcher.write_text(TORCHRUN)
        command = [self.run.name, str(self.shop.datasets), *arguments, "--runs-dir", str(self.shop.runs)]
        launch = [str(launcher), "--standalone", "--nproc_per_node=2", *options, str(script), *command]
        if self.by_processes:
            launch = [str(script), *command, "--processes", "2"]
        return self.shop.fork(launch, {MARK: self.mark}, FORK_PYTHONS if self.are_forked else "")

    @property
    def mark(self) -> str:
        return str(self.run)

    def processes(self) -> list[int]:
        """The pids of all processes of this job that run, wherever they have got to: torchrun and its descendants. Not
        those that are forked: the system shows what environment a program was started with."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def describe(self) -> str:
        """The processes of this job that run: number, state, the kernel's function that they wait in, and command; and
        the last line of the run's metrics."""
        lines = []
        for pid in self.processes():
            with suppress(OSError):  # it may end meanwhile
                folder = Path(f"/proc/{pid}")
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                lines.append(f"{pid} {status['State'].strip()} {(folder / 'wchan').read_text()}: {command}")
        path = self.run / "metrics.jsonl"
        return "\n".join([*lines, *(path.read_text().splitlines()[-1:] if path.exists() else [])])

    def seconds_to_the_end(self, patience: float) -> float:
        """Wait until no process of the job runs any more; how long that took. Those that stay are killed."""
        began = time.monotonic()
        while self.processes():
            if time.monotonic() - began > patience:
                alive = self.describe()
                for pid in self.processes():
                    os.kill(pid, signal.SIGKILL)
                raise AssertionError(f"alive after {patience} s:\n{alive}")
            time.sleep(0.05)
        return time.monotonic() - began


def await_file(path: Path, process: WarmProcess) -> None:
    deadline = time.monotonic() + 100
    while not path.exists():
        assert process.poll() is None, process.communicate(timeout=1)
        assert time.monotonic() < deadline
        time.sleep(0.02)
