"""Full disks.

A file that cannot be written ends the run on every rank, and nothing is harmed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.planning.experiment import Experiment
from harness.planning.plan import make_plan
from harness.runs import checkpoints
from harness.runs.directory import RunDirectory
from tests.support import file_operations
from tests.support.jobs import VANISH_SECONDS, assert_named_are_whole, ends_of, for_each, start, train
from tests.support.launch import Workshop, finish
from tests.support.same_end import assert_same_end
from tests.support.stopped_run import SETTINGS, operations_of


@pytest.fixture(scope="module")
def shop(stopped_shop: Workshop) -> Workshop:
    return stopped_shop


@contextmanager
def shop_on_small_disk(shop: Workshop, name: str, options: str = "size=12m,nr_inodes=120") -> Iterator[Workshop]:
    """Yield a workshop whose runs are on a small disk. Its datasets are not."""
    with file_operations.small_disk(shop.path / name, options) as disk:
        (disk / "datasets").symlink_to(shop.datasets)
        yield Workshop(disk)


@dataclass(frozen=True)
class Fault:
    """Disk fault just before one of the file operations in a call of a function of file_operations.CALLS."""

    call: str
    number: int
    operation: int
    room: int | None  # bytes that are left; -1 stands for enough bytes, but no inodes; None for an I/O error
    arguments: tuple[str, ...] = ()  # with them, a copy of `stopped` is resumed
    ranks: int = 1

    def prelude(self, disk: Path) -> str:
        values = ("fail", self.operation) if self.room is None else ("fill", self.operation, disk, self.room)
        return file_operations.prelude(self.call, self.number, *values)


def survive(shop: Workshop, fault: Fault, file: str = "", straight: str = "straight", **changes: Any) -> None:
    """Train on a small disk until the fault, and assert that all checkpoints are whole. On one rank, assert also that
    the same command, run again without the fault, ends as the undisturbed run `straight` did."""
    reason = "Input/output error" if fault.room is None else "No space left on device"
    name = "-".join(map(str, vars(fault).values())).replace(" ", "")
    with shop_on_small_disk(shop, name) as small:
        run = small.runs / "r"
        if fault.arguments:
            shutil.copytree(shop.runs / "stopped", run, symlinks=True)
        else:
            small.add_run(**SETTINGS | changes)
        command = ["r", *(argument for argument in fault.arguments if argument != "latest")]
        processes = start(small, *command, ranks=fault.ranks, prelude=fault.prelude(small.path))
        ends_of(processes, VANISH_SECONDS).refuses(reason, str(run / file), status=1)
        assert_named_are_whole(run)
        assert fault.room is None or not list((run / "checkpoints").glob(".*")), "half-written files are removed"
        if fault.ranks > 1:
            return  # the batch is another one than that of the straight run
        file_operations.empty_disk(small.path)
        train(small, *command)
        assert_same_end(shop.runs / straight, run)
        assert (run / "summary.json").exists()
        assert not list((run / "checkpoints").glob(".*"))
        for aside in (run / "aside").rglob("*-iteration-*"):
            checkpoints.verify_checkpoint(aside)


@pytest.mark.slow
@pytest.mark.fault(
    "disk full in a save", "ends on all ranks; all checkpoints are whole; once there is space, resumed to the same end"
)
@pytest.mark.fault("a broken disk", "an I/O error at any operation of a save ends the run; resumed to the same end")
def test_disk_full_in_a_save(shop: Workshop, exhaustive: bool) -> None:
    names = operations_of(shop, "save", 2)
    full = [Fault("save", 2, at, room) for at in range(len(names)) for room in (0, -1) if not (room and at % 3)]
    rooms = [Fault("save", 2, 0, kib * 1024) for kib in range(4, 200, 16)]
    # Left out are the creation of the folder, which may fail if the folder exists, and shutil's events, which only
    # announce other operations.
    harmless = ("os.mkdir checkpoints", "shutil.")
    broken = [Fault("save", 2, at, None) for at, name in enumerate(names) if not name.startswith(harmless)]
    cases = full + rooms + broken if exhaustive else full[4::16] + rooms[2::5] + broken[4::16]
    for_each([Fault("save", 2, 9, 0, ranks=2), *cases], partial(survive, shop))


@pytest.mark.fault("disk too small", "refused before the first step, with what is needed and what is free")
def test_disk_too_small(shop: Workshop, exhaustive: bool) -> None:
    sizes = [*range(500, 9000, 500)] if exhaustive else [4000, 7000, 8500]

    def try_one(size: int) -> bool:
        with shop_on_small_disk(shop, f"small-{size}", f"size={size}k") as small:
            run = small.add_run(**SETTINGS)
            ended = ends_of(start(small), VANISH_SECONDS)
            if ended.status:
                ended.refuses("the run needs", "are free")
                assert not (run / "metrics.jsonl").exists()
                return False
            assert_same_end(shop.runs / "straight", run)
            return True

    trained = for_each(sizes, try_one)
    assert {True, False} == set(trained)


@pytest.mark.slow
@pytest.mark.fault(
    "a disk with room only for the checkpoints that `keep_checkpoints` keeps",
    "a killed run continues there; the old ones that it will delete count as room",
)
def test_a_run_continues_on_the_smallest_disk_that_admits_it(shop: Workshop) -> None:
    """A run is stopped on the smallest disk on which its plan lets it begin, and continues there. With the old
    checkpoints kept and the rest of the disk full, it is refused."""
    settings = SETTINGS | {"min_train_tokens": 64 * 15, "keep_checkpoints": 1, "model": {"emb_dim": 128}}
    shop.add_run("measured", **settings)
    planned = make_plan(Experiment.load(RunDirectory(shop.runs / "measured"), shop.datasets), 1, None)
    assert planned.checkpoints() > planned.added_checkpoints()
    kib = planned.disk_bytes() // 1024 + 64  # 64: the run's own files
    with shop_on_small_disk(shop, "smallest", f"size={kib}k") as small:
        run = small.add_run(**settings)
        killed = file_operations.prelude("save", 5, "kill", 0)
        finish(start(small, prelude=killed), expect=-signal.SIGKILL, timeout=VANISH_SECONDS)
        assert shutil.disk_usage(run).free < planned.disk_bytes(), "a new run would be refused"
        file_operations.fill_disk(small.path, planned.checkpoint_bytes())
        ends_of(start(small), VANISH_SECONDS).refuses("the run needs")
        file_operations.empty_disk(small.path)
        train(small)
        assert (run / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.fault(
    "disk full when a line of metrics is written",
    "ends with metrics.jsonl named; once there is space, resumed to the same end",
)
def test_disk_full_at_a_line_of_metrics(shop: Workshop, exhaustive: bool) -> None:
    """A run ends with one line if the disk is full when a line of metrics is written, and completes once there is
    space. The lines fill four pages of memory, because a full tmpfs can still write the rest of the last page."""
    settings = SETTINGS | {"min_train_tokens": 64 * 40, "report_interval": 1}
    settings |= {"validation_interval": 500, "checkpoint_interval": 500}
    shop.add_run("lines", **settings)
    train(shop, "lines")
    lines = [Fault("metrics", line, 0, 0) for line in range(2, 26, 2 if exhaustive else 20)]
    for_each(lines, lambda fault: survive(shop, fault, "metrics.jsonl", "lines", **settings))


@pytest.mark.slow
@pytest.mark.fault(
    "disk full while results are moved to aside/",
    "every checkpoint stays whole; once there is space, resumed to the same end",
)
@pytest.mark.fault(
    "disk full when the summary is written", "ends with summary.json named; once there is space, it is written"
)
def test_disk_full_in_a_resumed_run(shop: Workshop, exhaustive: bool) -> None:
    """A killed run is resumed, and the disk becomes full. The run ends with one line and whole checkpoints, and
    completes once there is space. The disk becomes full while earlier results are moved aside or metrics.jsonl is cut,
    or when summary.json is written at the end."""
    earlier = next(path for step, path in checkpoints.list_checkpoints(shop.runs / "stopped" / "checkpoints") if step)

    def stages(call: str, argument: str) -> list[Fault]:
        count = len(operations_of(shop, call, 0, argument))
        return [Fault(call, 0, at, room, (argument,)) for at in range(count) for room in (0, -1)]

    moved = stages("moving aside", "--restart") + stages("going back", earlier.name)
    moved += stages("cutting the metrics", earlier.name)
    # The disk is full before the first operation, before the file is opened, or before it is written. Writing needs no
    # more inodes.
    needs = {(0, 0), (0, -1), (1, 0), (1, -1), (2, 0)}
    end = [fault for fault in stages("summary", "latest") if (fault.operation, fault.room) in needs]
    for_each(moved if exhaustive else moved[3::12], partial(survive, shop))
    for_each(end if exhaustive else end[1:3], lambda fault: survive(shop, fault, "summary.json"))


@pytest.mark.slow
@pytest.mark.fault("disk full when the lock file is written", "ends on all ranks with the lock file named")
def test_disk_full_at_the_lock(shop: Workshop) -> None:
    for room in (0, -1):
        with shop_on_small_disk(shop, f"lock-{room}") as small:
            run = small.add_run(**SETTINGS)
            file_operations.fill_disk(small.path, room)
            ended = ends_of(start(small, ranks=2), VANISH_SECONDS)
            ended.refuses("No space left on device", str(run / ".lock"), status=1)
            file_operations.empty_disk(small.path)
            train(small)
            assert_same_end(shop.runs / "straight", run)


@pytest.mark.slow
@pytest.mark.fault("disk full for the chart", "a warning with the file's name; training continues")
def test_disk_full_for_the_chart(shop: Workshop) -> None:
    run = shop.add_run("chart", **SETTINGS)
    with file_operations.small_disk(shop.path / "chart-disk", "size=64k") as disk:
        (run / "training-run-chart.png").symlink_to(disk / "chart.png")
        file_operations.fill_disk(disk, 0)
        ended = finish(start(replace(shop, draws=True), "chart"), expect=0, timeout=100)
        warnings = [line for line in ended.stderr.splitlines() if "no new chart" in line]
        assert warnings
        assert all(line.startswith(f"warning: {run}/training-run-chart.png: ") for line in warnings)
        assert all("No space left on device" in line for line in warnings)
    assert_same_end(shop.runs / "straight", run)


SMALL_LIBRARY = """
import harness.data.preparation.builtin as b
everything = b.standard_library
b.standard_library = lambda: dict(list(everything().items())[:80])
"""


@pytest.mark.slow
@pytest.mark.fault("disk full while a dataset is built", "ends, and no part of it is left; with space, it is built")
def test_disk_full_for_the_data_set(shop: Workshop, exhaustive: bool) -> None:
    """If the disk is too small for the dataset, the run ends with one line, and no part of the dataset is left. With
    more space, the same command completes. The free space is for nothing, for the tokenizer alone, or for the tokenizer
    and one split."""
    model = {"vocab_size": 4096, "context_length": 16}
    settings = {"dataset": "builtin/python-stdlib", "precision": "fp32"}
    sizes = [0, 60, 400] if exhaustive else [60]

    def try_one(size: int) -> None:
        with file_operations.small_disk(shop.path / f"data-{size}", "size=1m") as disk:
            small = Workshop(shop.path / f"data-shop-{size}")
            run = small.add_run(model=model, **SETTINGS | settings)
            small.datasets.symlink_to(disk)
            file_operations.fill_disk(disk, size * 1024)
            ended = ends_of(start(small, prelude=SMALL_LIBRARY), VANISH_SECONDS)
            assert ended.status in (1, 2), ended
            ended.refuses("No space left on device", "python-stdlib", status=ended.status)
            assert not (run / "metrics.jsonl").exists()
            assert [path.name for path in (disk / "builtin").glob("*")] == []
            (disk / "ballast").unlink()
            subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
            finish(start(small, prelude=SMALL_LIBRARY), expect=0, timeout=100)

    for_each(sizes, try_one)
