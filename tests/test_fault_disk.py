"""Damage, full disks, failing deletes, and two jobs on one run.

What cannot be read is named, with a way out; what cannot be written ends the run on every rank and harms nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import checkpointing
from harness.errors import UserError
from harness.processes import ProcessName
from tests import file_operations
from tests.conftest import Evidence
from tests.file_operations import WITHOUT_CHARTS
from tests.jobs import VANISH_SECONDS, assert_named_are_whole, ends_of, for_each, set_pace, start, train, wait_for
from tests.launch import Result, Workshop, finish, metrics
from tests.same_end import assert_same_end

# Checkpoints at steps 0, 2, 4, …; those of 0, 4, 8, … are validated and may become the best; fp16 and a tokenizer, so
# that a checkpoint has all the files it can have.
SETTINGS: dict[str, Any] = {
    "min_train_tokens": 128 * 11,
    "validation_interval": 4,
    "checkpoint_interval": 2,
    "report_interval": 2,
    "learning_rate": 0.01,
    "precision": "fp16",
}
FILES = ("model.safetensors", "optimizer.pt", "scaler.pt", "train_state.pt", "letters.json", "meta.json")
SAME_END = "the end is that of a run that nothing happened to, bit for bit"


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    """A run that nothing happens to, and one that was killed after step 6: `latest` is 6 and `best` is 4."""
    set_pace(exhaustive)
    shop = Workshop(tmp_path_factory.mktemp("disk"))
    folder = shop.add_dataset(tokens=8000)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "letters.json"}))
    (folder / "letters.json").write_text(json.dumps({"letters": 64}))
    shop.add_run("straight", **SETTINGS)
    shop.train("straight", prelude=WITHOUT_CHARTS)
    stopped = shop.add_run("stopped", **SETTINGS)
    result = shop.train("stopped", prelude=file_operations.prelude("save", 4, "kill", 0), expect=-signal.SIGKILL)
    assert {path.name for path in (stopped / "checkpoints" / "latest").iterdir()} == set(FILES), result
    assert steps_of(stopped) == ([0, 2, 4, 6], 6, 4)
    return shop


def steps_of(run: Path) -> tuple[list[int], int | None, int | None]:
    """The steps of the checkpoints, of `latest` and of `best`."""
    folder = run / "checkpoints"
    at = {path.name: step for step, path in checkpointing.list_checkpoints(folder)}
    latest, best = (at.get((folder / link).resolve().name) for link in ("latest", "best"))
    return sorted(at.values()), latest, best


def copy_of_stopped(shop: Workshop, name: str) -> Path:
    return Path(shutil.copytree(shop.runs / "stopped", shop.runs / name, symlinks=True))


# Damage


@dataclass(frozen=True)
class Damage:
    """What is done to the checkpoint that a link points to, or to the link."""

    what: str
    do: Callable[[Path], object]  # given the file, or the link
    file: str | None = None  # in the checkpoint; None for the link itself
    words: str = ""

    def to(self, link: Path) -> None:
        self.do(link.resolve() / self.file if self.file else link)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """One bit in the middle; of meta.json in the digit that counts the tokens seen."""
    content = bytearray(path.read_bytes())
    place = content.index(b'"tokens_seen": ') + 15 if path.name == "meta.json" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


def lead_out(path: Path) -> None:
    """In its place a link to the same contents elsewhere."""
    elsewhere = path.parent.parent.parent / f"elsewhere-{path.name}"
    (path.resolve() if path.is_symlink() else path).rename(elsewhere)
    path.unlink(missing_ok=True)
    path.symlink_to(elsewhere)


def dangle(path: Path) -> None:
    path.unlink()
    path.symlink_to("20200101Z000000-iteration-6")


def point_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def become_a_file(path: Path) -> None:
    path.unlink()
    path.write_text("20200101Z000000-iteration-6")


FILE_DAMAGES = [
    *(Damage("cut in half", cut, file, file) for file in FILES),
    *(Damage("emptied", empty, file, file) for file in FILES),
    *(Damage("one bit flipped", flip, file, file) for file in FILES),
    *(Damage("missing", Path.unlink, file, file) for file in FILES),
    *(Damage("a link that leads out", lead_out, file, "leads out") for file in FILES),
    *(Damage("a link to itself", point_to_itself, file, file) for file in FILES),
]
LINK_DAMAGES = [
    Damage("dangling", dangle, words="latest: no such checkpoint"),
    Damage("leading to itself", point_to_itself, words="latest: no such checkpoint"),
    Damage("leading out", lead_out, words="leads out"),
]


def few(cases: list[Damage], exhaustive: bool) -> list[Damage]:
    """One for each kind and each file at least."""
    return cases if exhaustive else cases[:: len(FILES) + 1]


@pytest.mark.fault("latest is damaged")
def test_damaged_latest(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    def try_one(case: tuple[int, Damage]) -> None:
        number, damage = case
        run = copy_of_stopped(shop, f"damaged-{number}")
        damage.to(run / "checkpoints" / "latest")
        refused = train(shop, run.name, expect=2)
        (line,) = refused.error_lines
        assert damage.words in line, line
        offered = next(path.name for step, path in checkpointing.list_checkpoints(run / "checkpoints") if step == 4)
        if damage.file or damage.do == lead_out:
            assert f"the newest whole checkpoint is {offered}: give that name as CHECKPOINT" in line
        train(shop, run.name, offered)
        assert_same_end(shop.runs / "straight", run)

    cases = few(FILE_DAMAGES, exhaustive) + LINK_DAMAGES
    for_each(enumerate(cases), try_one)
    evidence(
        injected="in the checkpoint that latest points to, any one file cut in half, emptied, with one bit flipped, "
        "missing, a link that leads out or to itself; latest dangling, leading to itself, or leading out",
        times=len(cases),
        outcome="refused by one line with the file's name, which offers the newest checkpoint that is whole; given "
        f"that name, {SAME_END}",
    )


@pytest.mark.fault("best is damaged")
def test_damaged_best(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    def try_one(case: tuple[int, Damage]) -> None:
        number, damage = case
        run = copy_of_stopped(shop, f"best-{number}")
        damage.to(run / "checkpoints" / "best")
        train(shop, run.name)
        assert_same_end(shop.runs / "straight", run)
        checkpointing.verify_checkpoint(run / "checkpoints" / "best")

    cases = [*few(FILE_DAMAGES, exhaustive), *LINK_DAMAGES, Damage("missing", Path.unlink)]
    for_each(enumerate(cases), try_one)
    evidence(
        injected="the same in the checkpoint that best points to, or to best, or no best at all",
        times=len(cases),
        outcome=f"training goes on from latest; {SAME_END}",
    )


@pytest.mark.fault("latest is no link")
def test_latest_is_no_link(shop: Workshop, evidence: Evidence) -> None:
    """As something leaves it that does not copy links, or follows them."""
    cases: list[Callable[[Path], object]] = [Path.unlink, become_a_file, become_a_copy]
    for number, do in enumerate(cases):
        run = copy_of_stopped(shop, f"linkless-{number}")
        do(run / "checkpoints" / "latest")
        assert "continuing from" in train(shop, run.name).stdout
        (run / "checkpoints" / "latest").resolve()
        assert_same_end(shop.runs / "straight", run)
    evidence(
        injected="latest missing, a file, or a copy of the checkpoint, as programs leave it that do not know links",
        times=len(cases),
        outcome=f"training goes on from the checkpoint of the highest step, and latest is a link again; {SAME_END}",
    )


def become_a_copy(path: Path) -> None:
    target = path.resolve()
    path.unlink()
    shutil.copytree(target, path)


@pytest.mark.fault("every checkpoint is damaged")
def test_all_damaged(shop: Workshop, evidence: Evidence) -> None:
    run = copy_of_stopped(shop, "all-damaged")
    folders = [path for _, path in checkpointing.list_checkpoints(run / "checkpoints")]
    for path, file in zip(folders, FILES, strict=False):
        cut(path / file)
    (line,) = train(shop, run.name, expect=2).error_lines
    assert "none is whole, or use --restart" in line
    train(shop, run.name, "--restart")
    assert_same_end(shop.runs / "straight", run)
    (aside,) = (run / "aside").iterdir()
    assert {path.name for path in (aside / "checkpoints").iterdir()} == {*(path.name for path in folders), *LINKS}
    evidence(
        injected="each of four checkpoints cut short in another file",
        times=len(folders),
        outcome=f"refused by one line, which offers --restart; it moves them all aside, and {SAME_END}",
    )


LINKS = ("latest", "best")


@pytest.mark.fault("a bit flips anywhere")
def test_any_bit_is_found(shop: Workshop, tmp_path: Path, exhaustive: bool, evidence: Evidence) -> None:
    """In this process: what every start calls first."""
    checkpoint = shutil.copytree((shop.runs / "stopped" / "checkpoints" / "latest").resolve(), tmp_path / "checkpoint")
    dice, tried, harmless = random.Random(0), 0, 0
    meta = checkpointing.read_meta(checkpoint)
    for file in FILES:
        content = (checkpoint / file).read_bytes()
        most = len(content) if exhaustive and file == "meta.json" else 400 if exhaustive else 40
        for place in dice.sample(range(len(content)), min(most, len(content))):
            harmed = bytearray(content)
            harmed[place] ^= 1 << dice.randrange(8)
            (checkpoint / file).write_bytes(harmed)
            tried += 1
            if found := verdict(checkpoint):
                assert str(checkpoint) in found
            else:  # 1E-08 is 1e-08
                assert file == "meta.json"
                assert checkpointing.read_meta(checkpoint) == meta
                harmless += 1
        (checkpoint / file).write_bytes(content)
        assert not verdict(checkpoint)
    evidence(
        injected="one bit flipped at a random place of each file of a checkpoint"
        + (", and at every byte of meta.json" if exhaustive else "")
        + "; only the check that every start makes, in one process",
        times=tried,
        outcome="found, every time" + (f", but for {harmless} that changed no value" if harmless else ""),
    )


def verdict(checkpoint: Path) -> str:
    """What is wrong with it, or nothing."""
    try:
        checkpointing.verify_checkpoint(checkpoint)
    except UserError as error:
        return str(error)
    return ""


# Full disks


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own at `folder`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def shop_on_small_disk(shop: Workshop, name: str, options: str = "size=12m,nr_inodes=120") -> Iterator[Workshop]:
    """A workshop whose runs are on a small disk, and whose datasets are not."""
    with small_disk(shop.path / name, options) as disk:
        (disk / "datasets").symlink_to(shop.datasets)
        yield Workshop(disk)


def assert_out_of_space(result: Result, place: Path) -> None:
    """The job has ended with one line that says where there was no space."""
    assert result.status == 1, result
    assert "Traceback" not in result.stderr, result.stderr
    (line,) = result.error_lines
    assert "No space left on device" in line, line
    assert str(place) in line, line


@dataclass(frozen=True)
class Full:
    """When a disk becomes full: at a file operation of a call of file_operations.CALLS."""

    call: str
    number: int
    operation: int
    room: int  # bytes that are left; -1: bytes enough, but no inodes

    def prelude(self, disk: Path) -> str:
        return file_operations.prelude(self.call, self.number, "fill", self.operation, disk, self.room)


def assert_survived(shop: Workshop, run: Path, *arguments: str) -> None:
    """After a disk has been full: what is left is whole, and with space the same command comes to the same end."""
    assert_named_are_whole(run)
    assert not list((run / "checkpoints").glob(".*")), "what was half written is gone"
    file_operations.empty_disk(run.parent.parent)
    train(Workshop(run.parent.parent), run.name, *arguments)
    assert_same_end(shop.runs / "straight", run)


def operations_of(shop: Workshop, call: str, number: int, *arguments: str) -> list[str]:
    """The file operations of a call; of a run that starts, or that continues from where `stopped` is."""
    name, path = f"count-{call.replace(' ', '-')}", shop.path / f"count-{call}"
    run = copy_of_stopped(shop, name) if arguments else shop.add_run(name, **SETTINGS)
    prelude = file_operations.prelude(call, number, "log", path)
    finish(start(shop, run.name, *arguments, prelude=prelude), expect=0, timeout=60)
    return path.read_text().splitlines()


@pytest.mark.fault("disk full in a save")
@pytest.mark.timeout(900)
def test_disk_full_in_a_save(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    def try_one(case: tuple[int, Full]) -> None:
        number, full = case
        with shop_on_small_disk(shop, f"full-{number}") as small:
            run = small.add_run(**SETTINGS)
            ended = ends_of(start(small, prelude=full.prelude(small.path)), VANISH_SECONDS)
            assert_out_of_space(ended, run)
            assert_survived(shop, run)

    operations = operations_of(shop, "save", 2)
    places = [Full("save", 2, at, room) for at in range(len(operations)) for room in (0, -1) if not (room and at % 3)]
    rooms = [Full("save", 2, 0, kib * 1024) for kib in range(4, 200, 16)]
    cases = places + rooms if exhaustive else places[4::16] + rooms[1::4]
    for_each(enumerate(cases), try_one)
    rest = sum(case in rooms for case in cases)
    evidence(
        injected="a small disk (tmpfs) that somebody else fills before a file operation of a save, with data or with "
        f"files (no inode left), or that has room for a part of the checkpoint only ({rest} sizes)",
        times=len(cases),
        outcome="the run ends with one line that names the run and the reason, rank 1 "
        f"within {VANISH_SECONDS} s; all checkpoints are whole and nothing half written is left; with space again the "
        f"same command goes on, and {SAME_END}",
    )


@pytest.mark.fault("disk too small")
def test_disk_too_small(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    sizes = [*range(500, 9000, 500)] if exhaustive else [500, 4000, 7000, 8500]

    def try_one(size: int) -> bool:
        with shop_on_small_disk(shop, f"small-{size}", f"size={size}k") as small:
            run = small.add_run(**SETTINGS)
            ended = ends_of(start(small), VANISH_SECONDS)
            if ended.status:
                assert ended.status == 2, ended
                (line,) = ended.error_lines
                assert "checkpoints need" in line
                assert "are free" in line
                assert not (run / "metrics.jsonl").exists()
                return False
            assert_same_end(shop.runs / "straight", run)
            return True

    trained = for_each(sizes, try_one)
    assert {True, False} == set(trained)
    evidence(
        injected=f"disks (tmpfs) of {sizes[0]} to {sizes[-1]} KB",
        times=len(sizes),
        outcome=f"{trained.count(False)} refused before the first step, by one line that says what is needed and what "
        f"is free; on the other {trained.count(True)} the run comes to its end",
    )


@pytest.mark.fault("disk full at a line of metrics")
def test_disk_full_at_a_line_of_metrics(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    """Lines enough for four pages of memory, of which what is left of one is all that a full tmpfs has."""
    settings = SETTINGS | {"min_train_tokens": 128 * 40, "report_interval": 1}
    settings |= {"validation_interval": 500, "checkpoint_interval": 500}
    shop.add_run("lines", **settings)
    train(shop, "lines")

    def try_one(line: int) -> None:
        with shop_on_small_disk(shop, f"line-{line}") as small:
            run = small.add_run("lines", **settings)
            ended = ends_of(start(small, "lines", prelude=Full("metrics", line, 0, 0).prelude(small.path)), 15)
            assert_out_of_space(ended, run / "metrics.jsonl")
            assert_named_are_whole(run)
            file_operations.empty_disk(small.path)
            train(small, "lines")
            assert_same_end(shop.runs / "lines", run)

    lines = range(2, 26, 2) if exhaustive else [5, 20]
    for_each(lines, try_one)
    evidence(
        injected="the same before a line of metrics.jsonl",
        times=len(lines),
        outcome=f"the same, with metrics.jsonl named; {SAME_END}",
    )


def stages(shop: Workshop, call: str, arguments: list[str]) -> list[tuple[list[str], Full]]:
    count = len(operations_of(shop, call, 0, *(arguments or ["latest"])))
    return [(arguments, Full(call, 0, at, room)) for at in range(count) for room in (0, -1)]


def fill_a_continued_run(shop: Workshop, case: tuple[list[str], Full]) -> None:
    """Copy `stopped` to a small disk, continue there until that is full, and then to the end."""
    arguments, full = case
    name = f"{full.call}-{full.operation}-{full.room}".replace(" ", "-")
    with shop_on_small_disk(shop, name) as small:
        run = Path(shutil.copytree(shop.runs / "stopped", small.runs / "r", symlinks=True))
        ended = ends_of(start(small, "r", *arguments, prelude=full.prelude(small.path)), VANISH_SECONDS)
        assert_out_of_space(ended, run)
        assert_survived(shop, run, *arguments)
        assert (run / "summary.json").exists()
        for aside in (run / "aside").rglob("*-iteration-*"):
            checkpointing.verify_checkpoint(aside)


@pytest.mark.fault("disk full while results are moved")
@pytest.mark.timeout(900)
def test_disk_full_while_results_are_moved(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    earlier = next(path for step, path in checkpointing.list_checkpoints(shop.runs / "stopped" / "checkpoints") if step)
    cases = stages(shop, "moving aside", ["--restart"])
    cases += stages(shop, "going back", [earlier.name]) + stages(shop, "cutting the metrics", [earlier.name])
    cases = cases if exhaustive else cases[3::12]
    for_each(cases, partial(fill_a_continued_run, shop))
    evidence(
        injected="the same before a file operation of moving earlier results aside, for --restart and for a CHECKPOINT",
        times=len(cases),
        outcome="the same; every checkpoint is whole, where it was or aside",
    )


@pytest.mark.fault("disk full at the end")
def test_disk_full_at_the_end(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    # Before anything is there; before it is opened; before it is written, which needs no inode any more.
    needs = {(0, 0), (0, -1), (1, 0), (1, -1), (2, 0)}
    cases = [case for case in stages(shop, "summary", []) if (case[1].operation, case[1].room) in needs]
    cases = cases if exhaustive else cases[1:3]
    for_each(cases, partial(fill_a_continued_run, shop))
    evidence(
        injected="the same before summary.json is made or written",
        times=len(cases),
        outcome="one line that names summary.json; with space again the same command writes it",
    )


@pytest.mark.fault("disk full at the lock")
def test_disk_full_at_the_lock(shop: Workshop, evidence: Evidence) -> None:
    for room in (0, -1):
        with shop_on_small_disk(shop, f"lock-{room}") as small:
            run = small.add_run(**SETTINGS)
            file_operations.fill_disk(small.path, room)
            assert_out_of_space(ends_of(start(small), VANISH_SECONDS), run / ".lock")
            assert_survived(shop, run)
    evidence(
        injected="a disk full from the beginning, of data or of files",
        times=2,
        outcome=f"one line that names the lock file; rank 1 ends within {VANISH_SECONDS} s",
    )


@pytest.mark.fault("disk full for the chart")
def test_disk_full_for_the_chart(shop: Workshop, evidence: Evidence) -> None:
    run = shop.add_run("chart", **SETTINGS)
    with small_disk(shop.path / "chart-disk", "size=64k") as disk:
        (run / "training-run-chart.png").symlink_to(disk / "chart.png")
        file_operations.fill_disk(disk, 0)
        ended = finish(start(shop, "chart", prelude=""), expect=0, timeout=100)
        warnings = [line for line in ended.stderr.splitlines() if "no chart" in line]
        assert warnings
        assert all("No space left on device" in line for line in warnings)
    assert_same_end(shop.runs / "straight", run)
    evidence(
        injected="training-run-chart.png is on a full disk",
        times=sum(event["event"] == "validation" for event in metrics(run)),
        outcome=f"a warning that names the file; training goes on, and {SAME_END}",
    )


SMALL_LIBRARY = """
import harness.builtin as b
everything = b.read_documents
b.read_documents = lambda: dict(list(everything().items())[:80])
"""


@pytest.mark.fault("disk full for the data set")
def test_disk_full_for_the_data_set(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    """Kilobytes enough for nothing, for the tokenizer, or for a split as well."""
    model = {"vocab_size": 4096, "context_length": 16}
    settings = {"dataset": "builtin/python-stdlib", "precision": "fp32"}
    sizes = [0, 60, 400] if exhaustive else [60]

    def try_one(size: int) -> None:
        with small_disk(shop.path / f"data-{size}", "size=1m") as disk:
            small = Workshop(shop.path / f"data-shop-{size}")
            run = small.add_run(model=model, **SETTINGS | settings)
            small.datasets.symlink_to(disk)
            file_operations.fill_disk(disk, size * 1024)
            ended = ends_of(start(small, prelude=SMALL_LIBRARY), VANISH_SECONDS)
            assert ended.status in (1, 2), ended
            assert "Traceback" not in ended.stderr, ended.stderr
            assert len(ended.error_lines) == 1, ended.stderr
            assert "No space left on device" in ended.error_lines[0]
            assert "python-stdlib" in ended.error_lines[0]
            assert not (run / "metrics.jsonl").exists()
            assert [path.name for path in (disk / "builtin").glob("*")] == []
            (disk / "ballast").unlink()
            subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
            finish(start(small, prelude=SMALL_LIBRARY + WITHOUT_CHARTS), expect=0, timeout=100)

    for_each(sizes, try_one)
    evidence(
        injected="builtin/python-stdlib is to be built on a disk that becomes full",
        times=len(sizes),
        outcome="one line that names the data set; nothing half written is left; with space again the same command "
        "builds it and trains",
    )


# Retention


AFTER_EACH_PRUNE = """
import json, os, checkpointing
prune = checkpointing.prune
def noted(folder, keep, protected):
    prune(folder, keep, protected)
    names = [path.name for _, path in checkpointing.list_checkpoints(folder)]
    links = {{link: os.path.basename(os.path.realpath(folder / link)) for link in ("latest", "best")}}
    with open({path!r}, "a") as file:
        file.write(json.dumps({{"names": names, **links}}) + chr(10))
checkpointing.prune = noted
"""
# At each checkpoint it is a day earlier than at the one before.
CLOCK_BACKWARDS = """
import checkpointing, itertools, time, types
days = itertools.count()
checkpointing.time = types.SimpleNamespace(**vars(time))
checkpointing.time.time = lambda: time.time() - 86400 * next(days)
"""


def assert_kept(path: Path, keep: int, start: str | None) -> int:
    """After each removal there are `best`, `latest`, the start, and of the others the newest; how many removals."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    ever = {name: int(name.rpartition("-")[2]) for line in lines for name in line["names"]}
    for line in lines:
        named = {line["latest"], line["best"], *([start] if start else [])}
        assert named <= set(line["names"]), line
        others = [name for name in ever if name not in named and ever[name] < ever[line["latest"]]]
        newest = sorted(others, key=ever.__getitem__)[-keep:]
        assert set(line["names"]) == named | set(newest), line
    return len(lines)


@pytest.mark.fault("old checkpoints are deleted")
def test_what_is_kept(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    """`best` early, because losses grow; continued from neither `best` nor `latest`; with a clock that goes back."""
    settings = SETTINGS | {"min_train_tokens": 128 * 21, "learning_rate": 20.0, "precision": "fp32"}
    whole = shop.add_run("kept-straight", **settings)
    train(shop, "kept-straight")
    assert steps_of(whole)[2] == 0, "losses grow, so that best is an old one"
    times = 0
    for keep in (1, 2, 3) if exhaustive else (1,):
        run, path = shop.add_run(f"kept-{keep}", **settings, keep_checkpoints=keep), shop.path / f"kept-{keep}-log"
        watch = WITHOUT_CHARTS + AFTER_EACH_PRUNE.format(path=str(path)) + CLOCK_BACKWARDS
        stop = file_operations.prelude("save", 6, "kill", 0)
        wait_for(start(shop, run.name, prelude=watch + stop)[0], 60)
        times += assert_kept(path, keep, None)
        folder, path = run / "checkpoints", path.with_name(f"kept-{keep}-again")
        oldest = next(path.name for step, path in checkpointing.list_checkpoints(folder) if step)
        watch = WITHOUT_CHARTS + AFTER_EACH_PRUNE.format(path=str(path)) + CLOCK_BACKWARDS
        time.sleep(0.1)
        (folder / "latest").unlink()  # and nothing says which one is the newest, but its step
        finish(start(shop, run.name, oldest, prelude=watch), expect=0, timeout=60)
        times += assert_kept(path, keep, oldest)
        assert_same_end(whole, run)
    evidence(
        injected="keep_checkpoints with a clock that goes back a day at each checkpoint, best at step 0 for ever, "
        "continued from a checkpoint that is neither best nor latest",
        times=times,
        outcome="after each save there are best, latest, the one continued from, and the newest others by global step",
    )


@pytest.mark.fault("a delete fails")
@pytest.mark.timeout(900)
def test_a_delete_fails(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    settings, path = SETTINGS | {"keep_checkpoints": 1}, shop.path / "deletes"
    whole = shop.add_run("deletes", **settings)
    shop.train("deletes", prelude=file_operations.prelude("save", 2, "log", path))
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
        assert not list((run / "checkpoints").glob(".*")), "the next save has tried again"

    for_each(places if exhaustive else places[::3], try_one)
    evidence(
        injected="an I/O error at an operation of deleting an old checkpoint: "
        + ", ".join(sorted({names[place].split()[0].removeprefix("os.") for place in places})),
        times=len(places if exhaustive else places[::3]),
        outcome=f"training goes on, the next save deletes it, and {SAME_END}",
    )


@pytest.mark.fault("a broken disk")
@pytest.mark.timeout(900)
def test_an_operation_of_a_save_fails(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    # Without the first, which makes the folder if it is not there, and a copy's announcement, which is no operation.
    names = operations_of(shop, "save", 2)
    possible = [place for place, name in enumerate(names) if place and not name.startswith("shutil.")]

    def try_one(place: int) -> None:
        run = shop.add_run(f"broken-{place}", **SETTINGS)
        ended = ends_of(start(shop, run.name, prelude=file_operations.prelude("save", 2, "fail", place)), 15)
        assert ended.status == 1, ended
        assert "Traceback" not in ended.stderr, ended.stderr
        (line,) = ended.error_lines
        assert "Input/output error" in line
        assert str(run) in line
        assert_survived_anywhere(shop, run)

    places = possible if exhaustive else possible[4::16]
    for_each(places, try_one)
    evidence(
        injected="an I/O error at a file operation of a save",
        times=len(places),
        outcome="one line that names the run and the reason; all checkpoints are whole; the same command goes on, and "
        + SAME_END,
    )


def assert_survived_anywhere(shop: Workshop, run: Path) -> None:
    assert_named_are_whole(run)
    train(shop, run.name)
    assert_same_end(shop.runs / "straight", run)
    assert not list((run / "checkpoints").glob(".*"))


# Two jobs


# After the third step, when metrics have been written.
LONG_STEPS = """
import itertools, time
from harness.step import TrainStep
run, steps = TrainStep.run, itertools.count()
TrainStep.run = lambda self, *values: (next(steps) > 2 and time.sleep(100), run(self, *values))[1]
"""
WITHOUT_LOCKS = """
import errno, fcntl, os
def flock(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = flock
"""


def owner_of(run: Path) -> dict[str, Any]:
    return json.loads((run / ".lock").read_text())


def await_metrics(run: Path, lines: int) -> None:
    path, deadline = run / "metrics.jsonl", time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.fault("two jobs on one run")
def test_a_second_job(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    """Refused while the first one lives, whatever it asks for, with locks and without; let in when that is dead."""

    def try_one(locks: str) -> int:
        run = copy_of_stopped(shop, f"two-jobs-{bool(locks)}")
        first = start(shop, run.name, prelude=WITHOUT_CHARTS + LONG_STEPS + locks)
        await_metrics(run, len(metrics(run)) + 1)
        owner, aside = owner_of(run), sorted((run / "aside").rglob("*"))
        assert (owner["host"], owner["pid"], owner["began"]) == (socket.gethostname(), first[0].pid, True)
        wanted = [[], ["--restart"], ["best"]] if exhaustive else [["--restart"]]
        for arguments in wanted:
            second = finish(start(shop, run.name, *arguments, prelude=locks), expect=2, timeout=60)
            (line,) = second.error_lines
            assert f"is being trained by another process ({socket.gethostname()}, pid {first[0].pid}, since" in line
            assert owner_of(run) == owner
            assert sorted((run / "aside").rglob("*")) == aside
        first[0].kill()
        third = start(shop, run.name, prelude=WITHOUT_CHARTS + locks)
        finish(third, expect=0, timeout=60)
        assert owner_of(run)["pid"] == third[0].pid
        assert_same_end(shop.runs / "straight", run)
        wait_for(first[1], VANISH_SECONDS)
        return len(wanted)

    times = sum(for_each(("", WITHOUT_LOCKS), try_one))
    evidence(
        injected="a second job on the run directory of a job that trains"
        + (" (as it is, with --restart, with a CHECKPOINT)" if exhaustive else " (with --restart)")
        + ", on a file system with locks and on one without (simulated); then the first is killed by SIGKILL",
        times=times,
        outcome="refused by one line that names the first one's host and pid, and nothing is touched; at once after "
        f"the kill another job takes over, and {SAME_END}",
    )


@pytest.mark.fault("a lock file that is left")
def test_left_lock_files(shop: Workshop, evidence: Evidence) -> None:
    """With locks the lock alone decides; without, an owner that may live is believed."""
    dead = {"host": socket.gethostname(), "pid": 2**22 + 1, "namespace": ProcessName.own().namespace, "since": "then"}
    living = [dead | {"host": "node-7", "namespace": "another boot"}, dead | {"pid": os.getpid()}]
    texts = [json.dumps(dead), json.dumps(dead)[:40], "", "[]", "\0" * 100, *map(json.dumps, living)]

    def try_one(case: tuple[int, tuple[str, str]]) -> None:
        number, (locks, text) = case
        run = copy_of_stopped(shop, f"left-{number}")
        (run / ".lock").write_text(text)
        if locks and text in texts[-len(living) :]:
            owner = json.loads(text)
            (line,) = finish(start(shop, run.name, prelude=locks), expect=2, timeout=60).error_lines
            assert f"another process ({owner['host']}, pid {owner['pid']}, since then); if it is dead, delete" in line
            (run / ".lock").unlink()
        started = start(shop, run.name, prelude=WITHOUT_CHARTS + locks)
        finish(started, expect=0, timeout=60)
        assert owner_of(run)["pid"] == started[0].pid

    cases = list(itertools.product(("", WITHOUT_LOCKS), texts))
    for_each(enumerate(cases), try_one)
    evidence(
        injected="a lock file of a dead process, cut short, empty, of something else, of another machine, or of a "
        "process that never had the lock, on a file system with locks and on one without (simulated)",
        times=len(cases),
        outcome="taken over; only without locks, one of another machine or of a process that lives is believed: "
        "refused by one line that names it and says what to delete",
    )


@pytest.mark.fault("torchrun restarts its workers")
def test_torchrun_restarts_its_workers(shop: Workshop, exhaustive: bool, evidence: Evidence) -> None:
    """What --restart or a CHECKPOINT asked for was done the first time: the second goes on from latest."""
    same_torchrun = "import os\nos.environ['TORCHELASTIC_RUN_ID'] = 'x'\nos.getppid = lambda: 1\n"
    fault = file_operations.prelude("save", 3, "kill", 20)

    def try_one(argument: str) -> None:
        run = copy_of_stopped(shop, f"restarted-{argument[-4:]}")
        killed = start(shop, run.name, argument, prelude=same_torchrun + fault)
        assert wait_for(killed[0], 60) == -signal.SIGKILL
        wait_for(killed[1], VANISH_SECONDS)
        latest = (run / "checkpoints" / "latest").resolve().name
        again = finish(start(shop, run.name, argument, prelude=WITHOUT_CHARTS + same_torchrun), expect=0, timeout=60)
        assert f"continuing from {latest}" in again.stdout
        assert_same_end(shop.runs / "straight", run)

    earlier = next(path for step, path in checkpointing.list_checkpoints(shop.runs / "stopped" / "checkpoints") if step)
    for_each(["--restart", earlier.name], try_one)
    evidence(
        injected="rank 0 killed in a save after --restart or a CHECKPOINT was asked for, and started again with the "
        "same words by the same torchrun (--max-restarts; simulated)",
        times=2,
        outcome=f"it goes on from latest instead of doing that a second time; {SAME_END}",
    )
