"""The lock file of a run directory: the owner that it names, and the case in which a restarted worker takes over a run
that an earlier owner began."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.lock import RunLock


def work(path: Path, *, under_torchrun: bool = True) -> bool:
    """Take the lock in a forked worker whose launcher is this process, and note that it has begun to train. Return True
    if an earlier worker of the same launcher had begun."""
    child = os.fork()
    if not child:
        status = 70
        try:
            os.environ.update({"TORCHELASTIC_RUN_ID": "x"} if under_torchrun else {})
            lock = RunLock.take(path, "trained")
            lock.note_begun()
            status = int(lock.began_before)
        finally:
            os._exit(status)  # the fork must never return and run tests
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1)
    return status == 1


def test_only_a_restarted_worker_takes_over_what_was_begun(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert [work(path) for _ in range(3)] == [False, True, True]
    path.unlink()
    assert [work(path, under_torchrun=False) for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("host", lambda host: f"{host}x"),
        ("namespace", lambda namespace: f"{namespace}x"),
        ("began", lambda began: False),
        ("torchrun", lambda parent: f"{parent}0"),  # a process with the same pid and another start time
        ("torchrun", lambda parent: f"1{parent}"),
        ("pid", lambda pid: str(pid)),
    ],
)
def test_a_run_of_another_owner_is_not_taken_over(tmp_path: Path, key: str, change: Any) -> None:
    path = tmp_path / ".lock"
    work(path)
    owner = json.loads(path.read_text())
    path.write_text(json.dumps(owner | {key: change(owner[key])}))
    assert work(path) is False


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"pid": null}', "\x00" * 5000])
def test_a_file_with_any_other_content_is_locked_and_overwritten(tmp_path: Path, text: str) -> None:
    path = tmp_path / ".lock"
    path.write_text(text)
    assert work(path) is False
    assert json.loads(path.read_text())["began"] is True


def test_a_held_lock_with_a_damaged_launcher_is_refused(tmp_path: Path) -> None:
    """int() does not accept every digit of Unicode, such as a superscript."""
    path = tmp_path / ".lock"
    RunLock.take(path, "trained")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torchrun": "² ²"}))
    with pytest.raises(UserError, match="is being trained by another process"):
        RunLock.take(path, "trained")
