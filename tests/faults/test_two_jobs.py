"""Two jobs on one run.

The second job is refused while the first one lives.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from harness.common.processes import ProcessName
from tests.support.jobs import for_each, start
from tests.support.launch import Workshop, finish, metrics, wait_until
from tests.support.same_end import assert_same_end
from tests.support.stopped_run import copy_of_stopped


@pytest.fixture(scope="module")
def shop(stopped_shop: Workshop) -> Workshop:
    return stopped_shop


# Steps are long after the third one, when metrics have been written.
LONG_STEPS = """
import itertools, time
from harness.training.step import OptimizerStep
run, steps = OptimizerStep.run, itertools.count()
OptimizerStep.run = lambda self, *values: (next(steps) > 2 and time.sleep(100), run(self, *values))[1]
"""
WITHOUT_LOCKS = """
import errno, fcntl, os
def flock(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock
"""


def owner_of(run: Path) -> dict[str, Any]:
    return json.loads((run / ".lock").read_text())


@pytest.mark.fault(
    "two jobs on one run",
    "the second is refused with the first one's pid; after a kill of the first, another starts",
)
def test_a_second_job(shop: Workshop, exhaustive: bool) -> None:
    """A second job is refused while the first one lives, with any arguments, with file locks and without them. It is
    let in when the first one is dead."""

    def try_one(locks: str) -> None:
        run = copy_of_stopped(shop, f"two-jobs-{bool(locks)}")
        first = start(shop, run.name, prelude=LONG_STEPS + locks)
        path, lines = run / "metrics.jsonl", len(metrics(run)) + 1
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= lines)
        owner, aside = owner_of(run), sorted((run / "aside").rglob("*"))
        assert (owner["host"], owner["pid"], owner["began"]) == (socket.gethostname(), first[0].pid, True)
        wanted = [[], ["--restart"], ["best"]] if exhaustive else [["--restart"]]
        for arguments in wanted:
            second = finish(start(shop, run.name, *arguments, ranks=2, prelude=locks), expect=2, timeout=60)
            second.refuses(f"is being trained by another process ({socket.gethostname()}, pid {first[0].pid}, since")
            assert owner_of(run) == owner
            assert sorted((run / "aside").rglob("*")) == aside
        first[0].kill()
        finish(first, expect=None, timeout=60)  # the system releases the lock when it has removed the process
        third = start(shop, run.name, prelude=locks)
        finish(third, expect=0, timeout=60)
        assert owner_of(run)["pid"] == third[0].pid
        assert_same_end(shop.runs / "straight", run)

    for_each(("", WITHOUT_LOCKS), try_one)


@pytest.mark.slow
@pytest.mark.fault(
    "a lock file that is left",
    "taken over; without file locks, refused if the file's owner may still be alive",
)
def test_left_lock_files(shop: Workshop) -> None:
    """With file locks, the lock alone decides, whatever the lock file says. Without them, a run is refused if the owner
    in its lock file may still live. tests/common/test_lock.py has lock files with other contents."""
    dead = {"host": socket.gethostname(), "pid": 2**22 + 1, "namespace": ProcessName.own().namespace, "since": "then"}
    living = [dead | {"host": "node-7", "namespace": "another boot"}, dead | {"pid": os.getpid()}]
    texts = [json.dumps(dead), json.dumps(dead)[:40], *map(json.dumps, living)]

    def try_one(case: tuple[int, tuple[str, str]]) -> None:
        number, (locks, text) = case
        run = copy_of_stopped(shop, f"left-{number}")
        (run / ".lock").write_text(text)
        if locks and text in texts[-len(living) :]:
            owner = json.loads(text)
            owned = f"another process ({owner['host']}, pid {owner['pid']}, since then); if it is dead, delete"
            finish(start(shop, run.name, prelude=locks), expect=2, timeout=60).refuses(owned)
            return
        started = start(shop, run.name, prelude=locks)
        finish(started, expect=0, timeout=60)
        assert owner_of(run)["pid"] == started[0].pid

    cases = [*itertools.product((WITHOUT_LOCKS,), texts), ("", texts[-1])]
    for_each(enumerate(cases), try_one)
