"""Machines that are lost with their disks, and mirrors that fail.

A run's only copy is then the one in its mirror. The same command on a machine with nothing but the run's two JSON files
must reach the end of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import random
import shutil
import signal
import threading
from pathlib import Path

import pytest

from harness.runs.directory import step_of
from tests.support import faulty_store, file_operations
from tests.support.jobs import for_each, said, set_pace, start, train, wait_for
from tests.support.launch import ROOT, SAVED_OFTEN, Workshop, finish, wait_until
from tests.support.s3_server import BUCKET, client_of, s3_server
from tests.support.same_end import assert_same_end
from tests.support.two_hosts import two_hosts

SETTINGS = SAVED_OFTEN | {"min_train_tokens": 64 * 11, "keep_checkpoints": 1}
# Steps are as slow as uploads, so that most checkpoints are sent before the next one overtakes them.
SLOWLY = "from tests.support.faults import *\nbefore(STEP, pause(0.1))\n"
STORE = "from tests.support import faulty_store, file_operations\nfaulty_store.watch('file', file_operations.{fault})\n"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    set_pace(exhaustive)
    shop = Workshop(tmp_path_factory.mktemp("mirror"))
    shop.add_dataset()
    shop.add_run("straight", **SETTINGS)
    train(shop, "straight")
    return shop


def add_machine(shop: Workshop, name: str) -> Path:
    """Return a run's folder as on a new machine, without what an earlier machine has left there."""
    shutil.rmtree(shop.runs / name, ignore_errors=True)
    return shop.add_run(name, **SETTINGS, mirror=f"file://{shop.path}/store")


def go_on_after_loss(shop: Workshop, name: str) -> None:
    """Run the same command on a new machine, and compare its end, here and in the mirror, with "straight"."""
    run = add_machine(shop, name)
    processes = start(shop, name, "--wait", prelude=faulty_store.HASTE)
    finish(processes, expect=0, timeout=100)
    assert_same_end(shop.runs / "straight", run)
    there = shop.path / "store" / name
    left = [path for path in (there / "checkpoints").iterdir() if any(path.iterdir())]
    assert all((path / "meta.json").exists() for path in left), "what is unfinished is deleted"
    for link in ("latest", "best"):
        end = (run / "checkpoints" / link).resolve()
        for path in end.iterdir():
            assert (there / "checkpoints" / end.name / path.name).read_bytes() == path.read_bytes()
    assert (there / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    assert not (there / "owner.json").exists()
    assert not [path for path in there.rglob("*") if path.name.startswith(".")]


def at_operations(place: str, fault: str, value: object) -> str:
    """Return the prelude of a fault at operations of the store, or at those of a save."""
    if place == "save":
        return faulty_store.HASTE + file_operations.prelude("save", 2, fault, value)
    return SLOWLY + faulty_store.HASTE + STORE.format(fault=f"{fault}({value!r})")


@pytest.mark.slow
@pytest.mark.fault(
    "killed at each operation of an upload, and the disk lost",
    "at each of over 200 reads and writes of the store, or in the middle of a write: the same command on a new machine "
    "reaches the same end",
)
@pytest.mark.fault(
    "killed at each operation of a save, and the disk lost",
    "while the checkpoint before may still be uploading: the same end on a new machine",
)
@pytest.mark.parametrize("place", ["store", "save"])
def test_killed_at_each_operation(shop: Workshop, exhaustive: bool, place: str) -> None:
    add_machine(shop, f"{place}-dry")
    log = shop.path / f"{place}-operations"
    finish(start(shop, f"{place}-dry", "--wait", prelude=at_operations(place, "log", str(log))), expect=0, timeout=100)
    count = len(log.read_text().splitlines())
    assert count > {"store": 200, "save": 20}[place], log.read_text()

    def lose_machine(operation: int) -> None:
        name = f"{place}-{operation}"
        add_machine(shop, name)
        processes = start(shop, name, "--wait", prelude=at_operations(place, "kill", operation))
        others = {"store": {0} if operation > count / 2 else set(), "save": {-signal.SIGXFSZ}}
        assert wait_for(processes[0], 100) in {-signal.SIGKILL, *others[place]}, said(processes)
        go_on_after_loss(shop, name)

    some = {"store": range(count // 10, count, count // 4), "save": range(5, count, 12)}
    for_each(range(count) if exhaustive else some[place], lose_machine)


# A machine is lost a random time after it has brought the run forward.
LOST_MACHINES = 6


@pytest.mark.slow
@pytest.mark.fault(
    "six machines lost in one run, on an S3 server of another host",
    "each killed with all its processes, its disk deleted: one unchanged command reaches the same end on the seventh",
)
def test_six_lost_machines(shop: Workshop, tmp_path: Path) -> None:
    dice, settings = random.Random(0), {**SETTINGS, "min_train_tokens": 64 * 41}
    shop.add_run("long", **settings)
    train(shop, "long")
    prelude = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SLOWLY}{faulty_store.HASTE}"
    with two_hosts(tmp_path) as pair, s3_server(pair.first) as variables:
        machine, reached, brought = pair.second, -1, 0
        machine.shop.add_dataset()

        def newest_step() -> int:
            """Return the step of the newest whole checkpoint on the server, or -1 if there is none."""
            listed = machine.at_home(lambda: client_of(variables).list_objects_v2(Bucket=BUCKET)).get("Contents", [])
            whole = [each["Key"].split("/")[2] for each in listed if each["Key"].endswith("/meta.json")]
            return max((step_of(name) for name in whole), default=-1)

        for number in range(LOST_MACHINES + 1):
            shutil.rmtree(machine.shop.runs / "moving", ignore_errors=True)
            run = machine.shop.add_run("moving", **settings, mirror=f"s3://{BUCKET}")
            process = machine.start([*machine.training("moving"), "--wait"], variables, prelude)
            if number < LOST_MACHINES:
                wait_until(lambda: newest_step() > reached, process)  # noqa: B023
                threading.Event().wait(dice.uniform(0, 0.4))
                machine.crash()
                process.wait(10)
                reached = newest_step()
            else:
                finish([process], expect=0, timeout=200)
            brought += "was fetched from the mirror" in process.read(".out")
        assert brought == LOST_MACHINES
        assert_same_end(shop.runs / "long", run)
