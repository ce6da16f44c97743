"""A store that is cut, full, forbidden or lying while a run trains. The run goes on, and the mirror is whole later."""

from __future__ import annotations

import errno
import itertools
import shlex
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from harness.common.errors import RunError, UserError
from harness.mirror import upload
from harness.mirror.store import Mirror, open_mirror
from harness.mirror.upload import Uploads
from harness.runs.directory import RunDirectory
from tests.mirror.test_two_machines import SETTINGS, STOP, add_machine
from tests.support import faulty_store
from tests.support.jobs import start, wait_for
from tests.support.launch import Workshop, wait_until
from tests.support.same_end import assert_same_end

SECRET = "token-that-must-not-be-shown"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(upload, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(upload, "LONGEST_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv("A_TOKEN", SECRET)
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


@pytest.mark.fault(
    "a mirror that is cut, full or forbidden",
    "a warning, retries, and a line when it is over; the run reaches its end, and the mirror is whole",
)
@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(f"no answer from https://host/path?signature={SECRET}"),
        PermissionError(f"403 Forbidden for {SECRET}"),
        OSError(errno.ENOSPC, "quota exceeded"),
        RuntimeError(f"an error of a library\nwith a second line and {SECRET}"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_told_when_it_begins_and_when_it_is_over(tmp_path: Path, memory: None, error: Exception) -> None:
    machine = add_machine(tmp_path, "first", mirror="memory://store")
    undo = faulty_store.watch("memory", faulty_store.fail(error, window=range(40, 60)))
    try:
        result = machine.train_here()
    finally:
        undo()
    begun, over = result.stderr.splitlines()
    assert begun.startswith("warning: mirror memory://store/r: ")
    assert type(error).__name__ in begun
    assert "training is not affected" in begun
    assert "works again after" in over
    assert SECRET not in result.stderr + result.stdout
    second = add_machine(tmp_path, "second", mirror="memory://store")
    assert "is finished" in second.train_here().stdout
    assert_same_end(machine.runs / "r", second.runs / "r")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionError("no route"), RunError),
        (OSError("Server error '503 Service Unavailable' for url 'https://hub/40'"), RunError),
        (PermissionError(), UserError),
        (ConnectionError("Network error: Request error: HTTP status client error (401 Unauthorized)"), UserError),
        (OSError("404 Client Error. (Request ID: 1) Bucket not found"), UserError),
        (paramiko.AuthenticationException("Authentication failed."), UserError),
    ],
)
def test_a_store_that_does_not_answer_is_no_wrong_input(
    memory: None, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    """The upload before `on_end` is tried again after a RunError, and given up after a UserError."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    undo = faulty_store.watch("memory", faulty_store.fail(error, window=range(100)))
    try:
        with pytest.raises(kind, match="cannot be written to"):
            open_mirror("memory://store", "r")
    finally:
        undo()


def test_a_full_disk_keeps_no_half_of_a_file_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an optimizer.pt would leave no room for owner.json, so that another machine would take the run."""

    def write_half(self: LocalFileSystem, source: str, target: str, **options: object) -> None:
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", target)

    monkeypatch.setattr(LocalFileSystem, "put_file", write_half)
    monkeypatch.setattr(LocalFileSystem, "pipe_file", lambda self, target, data: write_half(self, "", target))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (tmp_path / "optimizer.pt").write_bytes(b"whole")
    mirror = Mirror((tmp_path / "store").as_uri(), "r")
    with pytest.raises(OSError, match="No space left"):
        mirror.send("optimizer.pt", tmp_path / "optimizer.pt", lambda _: None)
    with pytest.raises(RunError, match=r"No space left on device.*\): make room there; ddp_train.py --mirror none"):
        open_mirror(mirror.url, "r")
    assert not list((tmp_path / "store" / "r").iterdir())


def test_a_full_store_is_cleared_of_what_was_overtaken_before_more_is_sent(tmp_path: Path, memory: None) -> None:
    machine = add_machine(tmp_path, "first", mirror="memory://store", **STOP)
    machine.train_here("r", "--mirror", "none")
    overtaken = "/store/r/checkpoints/20260101Z000000-iteration-1/model.safetensors"
    MemoryFileSystem().pipe_file(overtaken, b"half")

    def is_full(number: int, name: str, half: object) -> None:
        if overtaken in MemoryFileSystem.store and name.startswith("put_file") and number < 100:
            raise OSError(errno.ENOSPC, "no space left")

    undo = faulty_store.watch("memory", is_full)
    try:
        assert machine.train_here().stderr == ""
    finally:
        undo()


def test_setting_aside_is_completed_after_a_failure_at_any_operation(tmp_path: Path, memory: None) -> None:
    machine = add_machine(tmp_path, "first", mirror="memory://store", **STOP)
    machine.train_here()
    machine.add_run("restarted")
    run, store = RunDirectory(machine.runs / "restarted"), MemoryFileSystem()
    stored = {path: store.cat_file(path) for path in store.find("/store")}
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        store.pipe(stored)
        undo = faulty_store.watch("memory", faulty_store.fail(TimeoutError(), window=range(number, number + 1)))
        try:
            Uploads(run, Mirror("memory://store", "r"), keep=None, start_step=-1).push()
            break  # the push has fewer operations
        except TimeoutError:
            pass
        finally:
            undo()
        Uploads(run, Mirror("memory://store", "r"), keep=None, start_step=-1).push()
        names = {path.removeprefix("/store/r/") for path in store.find("/store")}
        assert not names & {"summary.json", "training-run-chart.png"}, number
        assert not store.glob("/store/r/checkpoints/*/meta.json")
    assert number > 10


@pytest.mark.fault("a store that keeps half of a file", "found, and sent again")
def test_a_store_that_keeps_half_of_a_file_is_found_out(
    tmp_path: Path, memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, lies = MemoryFileSystem.put_file, iter(range(3))

    def put_file(self: MemoryFileSystem, source: str, target: str, **options: object) -> None:
        if next(lies, None) is None:
            honest(self, source, target, **options)
        else:
            self.pipe_file(target, Path(source).read_bytes()[:10])

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    machine = add_machine(tmp_path, "first", mirror="memory://store")
    result = machine.train_here()
    assert "bytes were sent, and the store holds 10" in result.stderr
    second = add_machine(tmp_path, "second", mirror="memory://store")
    second.train_here()
    assert_same_end(machine.runs / "r", second.runs / "r")


def test_an_ssh_server_that_hangs_up_is_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(paramiko.SSHException):
            Mirror(f"sftp://me@127.0.0.1:{server.getsockname()[1]}/runs", "r").files()
    assert not caplog.records


@pytest.mark.parametrize("folder", ["r", "checkpoints"])
def test_a_listing_that_fails_is_no_empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """After hours of `--wait`, for example, the connection of sftp:// may be lost."""
    mirror, ls = Mirror(f"file://{tmp_path}/store", "r"), LocalFileSystem.ls
    mirror.write("checkpoints/a/meta.json", b"{}")
    mirror.write("train.json", b"{}")
    assert mirror.files() == {"checkpoints/a/meta.json": 2, "train.json": 2}
    assert Mirror(mirror.url, "none").files() == {}

    def fails(self: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:
        if path.endswith(f"/{folder}"):
            raise OSError("Socket is closed")
        return ls(self, path, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", fails)
    with pytest.raises(OSError, match="Socket is closed"):
        mirror.files()


def test_a_store_that_fails_in_the_middle_of_a_file_is_given_up(
    tmp_path: Path, memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an S3 store that is full after the first parts. The bytes of failed tries are no progress."""
    monkeypatch.setattr(upload, "END_PATIENCE_SECONDS", 0.5)
    send, until = Mirror.send, time.monotonic() + 20

    def send_half(self: Mirror, path: str, local: Path, progress: Callable[[int], None]) -> None:
        if path.endswith("optimizer.pt") and time.monotonic() < until:
            progress(local.stat().st_size // 2)
            raise OSError(errno.ENOSPC, "quota exceeded")
        send(self, path, local, progress)

    monkeypatch.setattr(Mirror, "send", send_half)
    machine = add_machine(tmp_path, "first", mirror="memory://store")
    assert "not in the mirror: " in machine.train_here().stderr


CUT = """
from tests.support import faulty_store
faulty_store.watch("file", faulty_store.fail(TimeoutError("no answer"), window=range(100, 10**9)))
"""


def test_a_stopped_run_names_what_is_missing_once(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=20_000)
    run = shop.add_run(**SETTINGS | {"min_train_tokens": 64 * 200}, mirror=f"file://{tmp_path}/my store")
    slowly = "from tests.support.faults import *\nbefore(STEP, pause(0.1))\n"
    (process,) = start(shop, "r", prelude=faulty_store.HASTE + CUT + slowly)
    error = process.base.with_suffix(".err")  # type: ignore[union-attr]
    wait_until(lambda: "sending is retried" in error.read_text(), process)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "waiting for the mirror" in error.read_text(), process)
    process.send_signal(signal.SIGTERM)
    assert wait_for(process, 20) == 128 + signal.SIGTERM
    [missing] = [line for line in error.read_text().splitlines() if "not in the mirror: " in line]
    assert (run / "checkpoints" / "latest").exists()
    command = shlex.split(missing.split("`")[1])
    assert command[:2] == ["uv", "run"]
    assert shop.script(*command[2:]).stdout.endswith(": complete\n")


@pytest.mark.fault(
    "told to stop while it waits for a mirror that does not answer", "ends, with the missing checkpoint named"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_mirror_that_does_not_answer(shop: Workshop, tmp_path: Path, number: int) -> None:
    """The run has ended, and waits for its mirror. It says what is missing, and the same command sends it later."""
    run = shop.add_run(**SETTINGS, mirror=f"file://{tmp_path}/store")
    (process,) = start(shop, "r", prelude=faulty_store.HASTE + CUT)
    error = process.base.with_suffix(".err")  # type: ignore[union-attr]
    wait_until(lambda: "waiting for the mirror" in error.read_text(), process)
    time.sleep(0.5)
    assert error.read_text().count("waiting for the mirror") == 1
    process.send_signal(number)
    assert wait_for(process, 20) == 0
    newest = (run / "checkpoints" / "latest").resolve().name
    assert f"not in the mirror: {newest}" in error.read_text()
    assert not (tmp_path / "store/r/checkpoints" / newest / "meta.json").exists()
    shop.train(ranks=1)
    assert (tmp_path / "store/r/checkpoints" / newest / "meta.json").exists()


def test_a_stopped_run_is_in_the_mirror_before_it_ends(shop: Workshop, tmp_path: Path) -> None:
    """Also with two ranks, whose launcher ends all when the first has ended."""
    run = shop.add_run(**SETTINGS | {"min_train_tokens": 3000}, mirror=f"file://{tmp_path}/store")
    told = "from tests.support.faults import *\nbefore(STEP, tell(15), step=5)"
    shop.train(ranks=2, prelude=told, expect=128 + signal.SIGTERM)
    newest = (run / "checkpoints" / "latest").resolve().name
    assert (tmp_path / "store/r/checkpoints" / newest / "meta.json").exists()
    assert not (tmp_path / "store/r/owner.json").exists()


def test_training_makes_no_call_to_the_store(shop: Workshop, tmp_path: Path) -> None:
    """Between its start and its end, only the threads of the mirror use the store."""
    shop.add_run(**SETTINGS, mirror=f"file://{tmp_path}/store")
    log = tmp_path / "threads"
    prelude = f"""
import threading
from harness.mirror.store import Mirror
from tests.support.faults import *
training = []
before(STEP, lambda: training.append(1))
original = Mirror._fs.fget
def used(self):
    if training:
        with open({str(log)!r}, "a") as file:
            file.write(threading.current_thread().name + "\\n")
    return original(self)
Mirror._fs = property(used)
"""
    shop.train(ranks=1, prelude=prelude)
    assert {*log.read_text().splitlines()} <= {"mirror-uploads", "mirror-lease"}
