"""The lock file of a run directory: the owner that it names, and the earlier owners whose run a restarted worker
continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.isolation import ROOT

# Takes the lock, prints whether an earlier process of the same torchrun had begun to train, and notes that this one
# has.
WORKER = """
import sys
from pathlib import Path
from harness.common.lock import RunLock
lock = RunLock.take(Path(sys.argv[1]), "trained")
print(lock.began_before)
lock.note_begun()
"""


def work(path: Path, *, under_torchrun: bool = True) -> bool:
    """Run a worker whose launcher is this process. Return True if an earlier worker of it had begun to train."""
    environment = {**os.environ, "TORCHELASTIC_RUN_ID": "x"}
    if not under_torchrun:
        del environment["TORCHELASTIC_RUN_ID"]
    command = [sys.executable, "-c", WORKER, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout == "True\n"


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
