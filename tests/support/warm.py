"""Processes that start without delay, because they are forked from one that has already imported torch. The import
takes seconds.

A forked process runs a root script or torchrun from its first line to its own exit, in its own session, folder and
environment, like a process that was started cold. With the prelude FORK_PYTHONS, the Python processes that it starts
itself are forks, too: torchrun's ranks, a sweep's runs.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FORK_PYTHONS = "from tests.support.forking import fork_pythons\nfork_pythons()\n"

# For each line on standard input, the server forks one process, and another that writes the pid and the exit status of
# the first to files. huggingface_hub is not imported here, because it reads its environment when it is imported.
SERVER = """
import gc, json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import ddp_train, harness.runs.checkpoints, gpt, torch, safetensors.torch
import checkpointing, harness.training.batch_size_finder, harness.planning.plan
import harness.data.fetch, harness.training.startup, torch._dynamo
from harness.training.chart_process import ChartProcess
from tests.support.forking import Script, run_to_the_end

def note(path, number):
    with open(path + ".draft", "w") as file:
        file.write(str(number))
    os.rename(path + ".draft", path)

def become(job):
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, path in ((0, "/dev/null"), (1, job["base"] + ".out"), (2, job["base"] + ".err")):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
    os.chdir(job["cwd"])
    os.umask(job["umask"])
    os.environ.clear()
    os.environ.update(job["environment"])
    if not job["draws"]:
        ChartProcess.draw = lambda self: None

gc.freeze()  # so that no collection touches, and so copies, what is shared
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    job = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        note(job["base"] + ".pid", child)
        note(job["base"] + ".status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    become(job)

    def program():
        exec(compile(job["prelude"], "prelude", "exec"), {})
        Script.of([sys.executable, *job["command"]]).run()

    run_to_the_end(program)
os._exit(0)
"""


def umask() -> int:
    """Return this process's umask. It can only be read by setting it, so it is set to 0 for a moment."""
    current = os.umask(0)
    os.umask(current)
    return current


@dataclass
class WarmProcess:
    """A forked process, with those methods of `subprocess.Popen` that tests use."""

    base: Path
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        status = self.base.with_suffix(".status")
        if self.returncode is None and status.exists():
            self.returncode = int(status.read_text())
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([str(self.base)], timeout)
            time.sleep(0.004)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.wait(timeout)
        return self.read(".out"), self.read(".err")

    def read(self, suffix: str) -> str:
        """Return what the process has written to .out or .err so far."""
        return self.base.with_suffix(suffix).read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass
class WarmServer:
    """The process from which all others are forked."""

    path: Path
    process: subprocess.Popen[str]
    count: int = 0
    writing: threading.Lock = field(default_factory=threading.Lock)

    def spawn(
        self, command: list[str], cwd: Path, environment: dict[str, str], prelude: str = "", *, draws: bool = False
    ) -> WarmProcess:
        """Fork a process that runs `command`, the arguments of a Python command line (a script or TORCHRUN, and their
        arguments), after the Python source `prelude`.

        A run draws its chart only if `draws` is True. Threads may call this at the same time.
        """
        with self.writing:
            self.count += 1
            base = self.path / str(self.count)
            for suffix in (".out", ".err"):  # they exist even if the process is killed before it writes
                base.with_suffix(suffix).touch()
            job: dict[str, Any] = {"command": command, "environment": environment, "prelude": prelude}
            job |= {"cwd": str(cwd), "base": str(base), "umask": umask(), "draws": draws}
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
        note = base.with_suffix(".pid")
        while not note.exists():
            assert self.process.poll() is None, "the server that processes are forked from has ended"
            time.sleep(0.002)
        return WarmProcess(base, int(note.read_text()))


@cache
def warm_server() -> WarmServer:
    """Return the server of this test run, which the first call starts."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))  # a fork that skips `stop` must not delete it
    command = [sys.executable, "-c", SERVER, str(ROOT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)

    def stop() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=30)
        shutil.rmtree(folder)

    atexit.register(stop)
    return WarmServer(folder, process)
