"""Old checkpoints that are deleted, and deletions that fail.

File operations fail while a save deletes an old checkpoint.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from harness.runs import checkpoints
from tests.support import file_operations
from tests.support.jobs import for_each, start, train, wait_for
from tests.support.launch import Workshop, finish
from tests.support.same_end import assert_same_end
from tests.support.stopped_run import SETTINGS, steps_of


@pytest.fixture(scope="module")
def shop(stopped_shop: Workshop) -> Workshop:
    return stopped_shop


AFTER_EACH_PRUNE = """
import json, os
from harness.runs import checkpoints
prune = checkpoints.prune
def noted(folder, keep, protected):
    prune(folder, keep, protected)
    names = [path.name for _, path in checkpoints.list_checkpoints(folder)]
    links = {{link: os.path.basename(os.path.realpath(folder / link)) for link in ("latest", "best")}}
    with open({path!r}, "a") as file:
        file.write(json.dumps({{"names": names, **links}}) + chr(10))
checkpoints.prune = noted
"""
# The clock is a day earlier at each checkpoint than at the one before.
CLOCK_BACKWARDS = """
import itertools, time, types
from harness.runs import checkpoints
days = itertools.count()
checkpoints.time = types.SimpleNamespace(**vars(time))
checkpoints.time.time = lambda: time.time() - 86400 * next(days)
"""


def assert_kept(path: Path, keep: int, start: str | None) -> None:
    """Assert that each removal leaves `best`, `latest`, the checkpoint that the run was resumed from, and the newest
    `keep` others."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ever = {name: int(name.rpartition("-")[2]) for line in lines for name in line["names"]}
    for line in lines:
        named = {line["latest"], line["best"], *([start] if start else [])}
        assert named <= set(line["names"]), line
        others = [name for name in ever if name not in named and ever[name] < ever[line["latest"]]]
        newest = sorted(others, key=ever.__getitem__)[-keep:]
        assert set(line["names"]) == named | set(newest), line
    assert lines


@pytest.mark.slow
@pytest.mark.fault(
    "old checkpoints are deleted",
    "best, latest, the one resumed from and the `keep_checkpoints` newest others are kept",
)
def test_what_is_kept(shop: Workshop, exhaustive: bool) -> None:
    """The right checkpoints are kept when `best` is an early one because losses grow, when the run is resumed from
    neither `best` nor `latest`, and when the clock goes back."""
    rates = {"learning_rate": 1.0, "warmup_steps": 21}
    settings = SETTINGS | rates | {"min_train_tokens": 64 * 21, "precision": "fp32"}
    whole = shop.add_run("kept-straight", **settings)
    train(shop, "kept-straight")
    assert steps_of(whole)[2] == 0, "losses grow, so that best is an old one"
    for keep in (1, 2, 3) if exhaustive else (1,):
        run, path = shop.add_run(f"kept-{keep}", **settings, keep_checkpoints=keep), shop.path / f"kept-{keep}-log"
        watch = AFTER_EACH_PRUNE.format(path=str(path)) + CLOCK_BACKWARDS
        stop = file_operations.prelude("save", 6, "kill", 0)
        wait_for(start(shop, run.name, prelude=watch + stop)[0], 60)
        assert_kept(path, keep, None)
        folder, path = run / "checkpoints", path.with_name(f"kept-{keep}-again")
        oldest = next(path.name for step, path in checkpoints.list_checkpoints(folder) if step)
        watch = AFTER_EACH_PRUNE.format(path=str(path)) + CLOCK_BACKWARDS
        time.sleep(0.1)
        (folder / "latest").unlink()  # so that only a checkpoint's step shows that it is the newest
        finish(start(shop, run.name, oldest, prelude=watch), expect=0, timeout=60)
        assert_kept(path, keep, oldest)
        assert_same_end(whole, run)


@pytest.mark.slow
@pytest.mark.fault(
    "deleting an old checkpoint fails", "training continues, and the next save deletes what is left of it"
)
def test_a_delete_fails(shop: Workshop, exhaustive: bool) -> None:
    settings, path = SETTINGS | {"keep_checkpoints": 1}, shop.path / "deletes"
    whole = shop.add_run("deletes", **settings)
    shop.train("deletes", ranks=1, prelude=file_operations.prelude("save", 2, "log", path))
    names = path.read_text().splitlines()
    begins = next(
        number for number, name in enumerate(names) if name.startswith("os.rename 2") and "-iteration-0" in name
    )
    places = [number for number in range(begins, len(names)) if names[number].startswith("os.")]

    def try_one(place: int) -> None:
        run = shop.add_run(f"delete-{place}", **settings)
        finish(start(shop, run.name, prelude=file_operations.prelude("save", 2, "fail", place)), expect=0, timeout=60)
        assert_same_end(whole, run)
        assert steps_of(run) == steps_of(whole)
        assert not list((run / "checkpoints").glob(".*")), "the next save deletes what is left"

    for_each(places if exhaustive else places[::3], try_one)
