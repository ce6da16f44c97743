"""Two machines and one mirror: which of them may train the run."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.mirror import owner
from harness.mirror.owner import Lease, LeaseLost
from harness.mirror.store import Mirror
from harness.mirror.upload import Uploads
from harness.runs.directory import RunDirectory
from tests.mirror.test_two_machines import add_machine, remote


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "LEASE_SECONDS", 1.0)


def lease_of(folder: Path, machine: str) -> Lease:
    run = folder / machine
    run.mkdir(exist_ok=True)
    return Lease(Mirror(f"file://{folder}/store", "r"), RunDirectory(run))


@pytest.fixture
def first(tmp_path: Path) -> Lease:
    """The lease of a machine that trains the run."""
    lease = lease_of(tmp_path, "a")
    lease.take(wait=False, take_over=False)
    return lease


@pytest.fixture
def second(tmp_path: Path) -> Lease:
    return lease_of(tmp_path, "b")


def test_a_second_machine_is_refused_waits_or_takes_over(tmp_path: Path, first: Lease, second: Lease) -> None:
    time.sleep(1.5)  # the first is alive, and keeps its lease
    with pytest.raises(UserError, match=r'"\S+" trains this run, last heard from 0 s ago.*--take-over.*--wait'):
        second.take(wait=False, take_over=False)
    waiting = threading.Thread(target=second.take, kwargs={"wait": True, "take_over": False})
    waiting.start()
    waiting.join(0.6)
    assert waiting.is_alive()
    first.release()
    waiting.join(10)
    assert not waiting.is_alive()
    third = lease_of(tmp_path, "c")
    third.take(wait=False, take_over=True)
    with pytest.raises(LeaseLost):
        second.check()
    second.release()
    third.check()
    third.release()
    assert not (tmp_path / "store/r/owner.json").exists()


def test_a_machine_that_fell_silent_has_lost_the_run(first: Lease, second: Lease) -> None:
    first._released.set()  # as if the machine were gone
    time.sleep(1.2)
    second.take(wait=False, take_over=False)
    with pytest.raises(LeaseLost):
        first.check()
    second.release()


def test_a_machine_that_fell_silent_has_lost_a_run_that_was_released_since(first: Lease, second: Lease) -> None:
    first._released.set()  # as if the machine were frozen
    first._mirror.write("train.json", b"{}")
    time.sleep(1.2)
    second.take(wait=False, take_over=False)
    second.release()
    with pytest.raises(LeaseLost, match="another machine"):
        first.check()


def test_a_store_that_was_away_for_long_was_taken_by_nobody(
    tmp_path: Path, first: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    first._mirror.write("train.json", b"{}")
    first._released.set()  # nothing is written to the store while it is away
    store = (tmp_path / "store").rename(tmp_path / "unmounted")
    time.sleep(1.2)
    first.check()

    def comes_back(path: str) -> bytes | None:
        content = Mirror.read(first._mirror, path)
        if store.exists():
            store.rename(tmp_path / "store")
        return content

    monkeypatch.setattr(first._mirror, "read", comes_back)
    first.check()  # the store is there again after the first of several readings


def test_a_store_that_was_emptied_was_taken_by_nobody(tmp_path: Path, first: Lease) -> None:
    (first._run.path / "train.json").write_text("{}")
    uploads = Uploads(first._run, first._mirror, first, keep=None, start_step=-1)
    uploads.push()
    first._released.set()  # nothing is written to the store while it is away
    shutil.rmtree(tmp_path / "store")
    time.sleep(1.2)
    uploads.push()
    assert (tmp_path / "store/r/train.json").exists()
    first.check()


def test_a_machine_that_was_frozen_in_an_upload_does_not_take_the_run_back(
    first: Lease, second: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first._run.path / "train.json").write_text("{}")
    uploads = Uploads(first._run, Mirror(first._mirror.url, "r"), first, keep=None, start_step=-1)
    uploads.push()
    first._released.set()  # as if the machine were frozen
    list_files = uploads.mirror.files

    def frozen() -> dict[str, int]:
        time.sleep(1.2)
        second.take(wait=False, take_over=False)
        second.release()
        return list_files()

    monkeypatch.setattr(uploads.mirror, "files", frozen)
    with pytest.raises(LeaseLost, match="another machine"):
        uploads.push()


def test_one_failure_of_the_store_ends_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """owner.json cannot be read, and later not be written, at the first try."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    lease, failing = lease_of(tmp_path, "a"), ["read", "write"]

    def failing_once(name: str) -> Callable[..., Any]:
        work = getattr(Mirror, name)

        def attempt(*arguments: Any) -> Any:
            if failing[:1] == [name]:
                raise ConnectionError(failing.pop(0))
            return work(*arguments)

        return attempt

    for name in tuple(failing):
        monkeypatch.setattr(Mirror, name, failing_once(name))
    lease.take(wait=True, take_over=False)
    lease.check()
    lease.release()
    assert not failing


def test_a_long_failure_of_the_store_ends_no_wait(first: Lease, second: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails for more tries than those of one look, while the owner of the run is waited for."""
    pause, read, failures = time.sleep, Mirror.read, [ConnectionError()] * 20
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.01)))
    waiting = threading.Thread(target=second.take, kwargs={"wait": True, "take_over": False})
    waiting.start()
    pause(0.2)

    def failing(mirror: Mirror, path: str) -> bytes | None:
        if mirror is second._mirror and failures:
            raise failures.pop()
        return read(mirror, path)

    monkeypatch.setattr(Mirror, "read", failing)
    pause(0.5)
    assert waiting.is_alive()
    first.release()
    waiting.join(10)
    assert not failures
    second.check()
    second.release()


def test_the_machines_clocks_do_not_matter(tmp_path: Path, first: Lease, second: Lease) -> None:
    first._released.set()
    file = tmp_path / "store/r/owner.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"heard": 0.0}))  # a clock that is decades slow
    with pytest.raises(UserError, match="last heard from 0 s ago"):
        second.take(wait=False, take_over=False)


def test_a_killed_run_does_not_wait_for_its_own_lease(tmp_path: Path, first: Lease) -> None:
    first._released.set()
    lease_of(tmp_path, "a").take(wait=False, take_over=False)


def test_a_copy_of_the_folder_is_another_machine(tmp_path: Path, first: Lease) -> None:
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="trains this run"):
        lease_of(tmp_path, "b").take(wait=False, take_over=False)


@pytest.mark.fault(
    "a second machine starts a run that another one trains",
    "refused with that machine named; with --take-over it trains the run",
)
def test_through_the_command(tmp_path: Path) -> None:
    machine = add_machine(tmp_path, "first")
    other = lease_of(tmp_path, "other")
    other.take(wait=False, take_over=False)
    machine.attempt().refuses(f'"{socket.gethostname()}" trains this run')
    assert not (machine.runs / "r" / "metrics.jsonl").exists()
    machine.attempt("--wait", "--take-over").refuses("--wait and --take-over")
    other._released.set()  # a renewal between its reading and its writing could overwrite the take-over
    machine.train_here("r", "--take-over")
    assert not (remote(machine) / "owner.json").exists()


@pytest.mark.fault(
    "another machine takes the run", "a warning; no checkpoint is completed in the mirror, and its metrics stay"
)
def test_a_run_that_was_taken_says_so_once_and_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = add_machine(tmp_path, "first", report_interval=1)
    thief, send, taken = lease_of(tmp_path, "thief"), Mirror.send, threading.Event()

    def send_and_lose(self: Mirror, *arguments: Any) -> None:
        send(self, *arguments)
        if not taken.is_set():  # in the middle of the first checkpoint
            thief.take(wait=False, take_over=True)
            thief._mirror.write("metrics.jsonl", b"the other machine's")
            taken.set()

    monkeypatch.setattr(Mirror, "send", send_and_lose)
    result = machine.train_here()
    told = [line for line in result.stderr.splitlines() if "has taken this run" in line]
    missing = [line for line in result.stderr.splitlines() if "not in the mirror: " in line]
    thief.release()
    assert len(told) == 1
    assert len(missing) == 1
    assert "mirror.py push r" in missing[0]
    assert "Training complete" in result.stdout
    assert not list(remote(machine).glob("checkpoints/*/meta.json")), "no checkpoint became whole after that"
    assert (remote(machine) / "metrics.jsonl").read_text() == "the other machine's"
