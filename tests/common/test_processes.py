"""Detection of processes that are alive, and ranks that end when their launcher has ended. Small scripts take the place
of torchrun and of `ddp_train.py --processes`, because they start quickly."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from harness.common.processes import ProcessName, start_time
from tests.support.isolation import ROOT
from tests.support.launch import free_port, wait_until

# Script named torchrun. It opens a store's port, starts a command, writes the pid of that process into a file, and
# waits. Without TORCHELASTIC_RUN_ID it takes the place of `ddp_train.py --processes`, which has no store.
TORCHRUN = """
import os, pathlib, socket, subprocess, sys
if "TORCHELASTIC_RUN_ID" in os.environ:
    store = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
else:
    os.environ["DDP_TRAIN_PARENT"] = str(os.getpid())
process = subprocess.Popen(sys.argv[2:], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(process.pid))
process.wait()
"""
# Script of a rank. It runs {before}, then starts to watch its launcher as ddp_train.py does, writes the file {mark},
# and runs {after}.
WORKER = """
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
{before}
from harness.common import processes
processes.POLL_SECONDS = 0.05
processes.exit_when_launcher_dies()
pathlib.Path({mark!r}).write_text(str(os.getpid()))
{after}
time.sleep(600)
"""
# Starts a command and becomes the parent of its orphans, as a container's first process does. It is a Python process,
# as a launcher is.
ADOPTER = """
import ctypes, subprocess, sys, time
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
subprocess.Popen(sys.argv[1:])
time.sleep(60)
"""
ADOPTED = (sys.executable, "-c", ADOPTER)
STORE = {"GROUP_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1"}
SOON = 60.0  # seconds within which a worker must end; on an idle machine it takes 0.2


def process(pid: int) -> ProcessName:
    return replace(ProcessName.own(), pid=pid)


def test_a_process_that_has_ended_is_gone_before_its_parent_asks() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    assert not process(child.pid).is_gone()
    assert start_time(child.pid).isdigit()
    child.stdin.close()
    wait_until(process(child.pid).is_gone)
    assert child.returncode is None
    assert os.path.exists(f"/proc/{child.pid}")
    assert start_time(child.pid) == ""
    child.wait()
    assert process(child.pid).is_gone()


def test_this_process() -> None:
    own = ProcessName.own()
    assert not own.is_gone()
    assert start_time(own.pid) == start_time(own.pid) != ""
    for beyond in (2**22 + 1, 2**70):  # the system's largest, and any number of a pid
        assert process(beyond).is_gone()
        assert start_time(beyond) == ""
    assert own.is_neighbor_of(replace(own, pid=1))
    assert not own.is_neighbor_of(replace(own, host=f"{own.host}x"))
    assert not own.is_neighbor_of(replace(own, namespace=f"{own.namespace}x"))
    assert str(own) == f"{own.host}, pid {os.getpid()}"


@dataclass
class Job:
    """Launcher script with one worker process, started with the environment variables `launched`."""

    folder: Path
    processes: list[subprocess.Popen[bytes]]
    launched: dict[str, str]

    def start(self, *, above: tuple[str, ...] = (), **worker: str) -> None:
        """Start the launcher and its worker. `above` is a command to which the launcher's command line is appended, and
        `worker` has values for the fields of WORKER."""
        (self.folder / "torchrun").write_text(TORCHRUN)
        program = WORKER.format(**{"before": "", "after": "", "root": str(ROOT), "mark": str(self.mark), **worker})
        (self.folder / "worker.py").write_text(program)
        torchrun = [sys.executable, str(self.folder / "torchrun"), str(self.started)]
        whole = [*above, *torchrun, sys.executable, str(self.folder / "worker.py")]
        environment = {**os.environ, **STORE, **self.launched, "LOCAL_RANK": "0"}
        environment["MASTER_PORT"] = str(free_port())
        self.processes.append(subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, start_new_session=True))

    def __post_init__(self) -> None:
        self.mark, self.started = self.folder / "mark", self.folder / "started"

    def running(self, script: str) -> list[int]:
        """Return the pids of the Python processes that run `script`, "torchrun" or "worker.py"."""
        wanted = [sys.executable, str(self.folder / script)]
        running = psutil.process_iter(["cmdline"])
        return [each.pid for each in running if (each.info["cmdline"] or [])[:2] == wanted]

    def kill_launcher(self) -> None:
        (pid,) = self.running("torchrun")
        os.kill(pid, signal.SIGKILL)

    def assert_gone_soon(self) -> None:
        wait_until(lambda: not self.running("worker.py"), seconds=SOON)


@pytest.fixture(params=[{"TORCHELASTIC_RUN_ID": "x"}, {}], ids=["torchrun", "--processes"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, [], request.param)
    yield job
    for process in job.processes:
        process.kill()
    for pid in job.running("torchrun") + job.running("worker.py"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in job.processes:
        process.communicate()


@pytest.mark.parametrize("after", ["", "while True: print('x' * 9999, file=sys.stderr)"], ids=["waits", "writes"])
def test_a_worker_ends_with_its_launcher(job: Job, after: str) -> None:
    """A worker ends with its launcher even while its main thread waits to write to stderr, whose pipe is full because
    nothing reads it, as with a pager."""
    job.start(after=after)
    wait_until(lambda: job.mark.exists() and job.mark.read_text())
    time.sleep(0.2)  # it has looked four times
    assert job.running("worker.py"), "the worker ends with its launcher, and not before"
    job.kill_launcher()
    job.assert_gone_soon()


def test_a_worker_whose_launcher_has_ended_before_its_first_line(job: Job) -> None:
    """A worker whose launcher ended before the worker's first line ends at once. By then the worker is a child of
    another process, here also a Python process."""
    go = job.folder / "go"
    job.start(above=ADOPTED, before=f"while not os.path.exists({str(go)!r}): time.sleep(0.01)")
    wait_until(lambda: job.started.exists() and job.started.read_text())
    job.kill_launcher()
    time.sleep(0.2)
    go.touch()
    job.assert_gone_soon()
    assert not job.mark.exists()


@pytest.mark.parametrize("has_store", [True, False], ids=["a torchrun that is not seen", "a leftover of torchrun"])
def test_a_worker_alone(tmp_path: Path, has_store: bool) -> None:
    """A worker whose torchrun is not visible, for example outside its container, keeps running if torchrun's store
    answers. So does a worker that only has a variable left over from an earlier torchrun."""
    with closing(socket.create_server(("127.0.0.1", 0))) as store:
        variables = STORE | {"MASTER_PORT": str(store.getsockname()[1])} if has_store else {}
        program = WORKER.format(
            root=str(ROOT), before="", after="time.sleep(0.3); sys.exit(7)", mark=str(tmp_path / "mark")
        )
        environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x", **variables}
        assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 7
        assert (tmp_path / "mark").exists()
