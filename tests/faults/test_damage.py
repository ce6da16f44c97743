"""Checkpoints and links that are damaged.

A message names the file that cannot be read, and a remedy.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.common.errors import UserError
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import read_meta
from tests.support.in_process import InProcess
from tests.support.jobs import for_each, train
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end
from tests.support.stopped_run import FILES, copy_of_stopped


@pytest.fixture(scope="module")
def shop(stopped_shop: Workshop) -> Workshop:
    return stopped_shop


@dataclass(frozen=True)
class Damage:
    """Damage to the checkpoint that a link points to, or to the link."""

    what: str
    do: Callable[[Path], object]  # called with the file, or with the link
    file: str | None = None  # the damaged file of the checkpoint; None damages the link itself
    words: str = ""

    def to(self, link: Path) -> None:
        self.do(link.resolve() / self.file if self.file else link)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file. In meta.json, flip one in the number of tokens seen."""
    content = bytearray(path.read_bytes())
    place = content.index(b'"tokens_seen": ') + 15 if path.name == "meta.json" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)


def lead_out(path: Path) -> None:
    """Move what is at the path elsewhere, and put a link to it in its place."""
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
    """Return some of the damages, at least one of each kind and one to each file. With --exhaustive, return all."""
    return cases if exhaustive else cases[:: len(FILES) + 1]


@pytest.mark.fault(
    "latest is damaged",
    "refused with the file's name; the newest whole checkpoint is offered, and leads to the same end",
)
def test_damaged_latest(shop: Workshop, exhaustive: bool) -> None:
    runs = []
    for number, damage in enumerate(few(FILE_DAMAGES, exhaustive) + LINK_DAMAGES):
        run = copy_of_stopped(shop, f"damaged-{number}")
        damage.to(run / "checkpoints" / "latest")
        line = line_of_refusal(shop, run)
        assert damage.words in line, line
        offered = next(path.name for step, path in checkpoints.list_checkpoints(run / "checkpoints") if step == 4)
        if damage.file or damage.do == lead_out:
            assert f"the newest whole checkpoint is {offered}: give that name as CHECKPOINT" in line
        runs.append((run, offered))

    def go_on(case: tuple[Path, str]) -> None:
        run, offered = case
        train(shop, run.name, offered)
        assert_same_end(shop.runs / "straight", run)

    for_each(runs, go_on)


def line_of_refusal(shop: Workshop, run: Path) -> str:
    result = InProcess(shop.path).attempt(run=run.name)
    assert result.status == 2, result
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.slow
@pytest.mark.fault("best is damaged", "training continues from latest to the same end")
def test_damaged_best(shop: Workshop, exhaustive: bool) -> None:
    def try_one(case: tuple[int, Damage]) -> None:
        number, damage = case
        run = copy_of_stopped(shop, f"best-{number}")
        damage.to(run / "checkpoints" / "best")
        train(shop, run.name)
        assert_same_end(shop.runs / "straight", run)
        checkpoints.verify_checkpoint(run / "checkpoints" / "best")

    cases = [*few(FILE_DAMAGES, exhaustive), *LINK_DAMAGES, Damage("missing", Path.unlink)]
    for_each(enumerate(cases), try_one)


@pytest.mark.slow
@pytest.mark.fault(
    "latest is no link", "training continues from the checkpoint of the highest step, and latest is a link again"
)
def test_latest_is_no_link(shop: Workshop) -> None:
    """A run is resumed even if `latest` is missing, a file or a folder, as programs leave it that do not copy links or
    that follow them."""
    cases: list[Callable[[Path], object]] = [Path.unlink, become_a_file, become_a_copy]
    for number, do in enumerate(cases):
        run = copy_of_stopped(shop, f"linkless-{number}")
        do(run / "checkpoints" / "latest")
        assert "continuing from" in train(shop, run.name).stdout
        (run / "checkpoints" / "latest").resolve()
        assert_same_end(shop.runs / "straight", run)


def become_a_copy(path: Path) -> None:
    target = path.resolve()
    path.unlink()
    shutil.copytree(target, path)


@pytest.mark.fault("every checkpoint is damaged", "refused with --restart offered, which moves them all aside")
def test_all_damaged(shop: Workshop) -> None:
    run = copy_of_stopped(shop, "all-damaged")
    folders = [path for _, path in checkpoints.list_checkpoints(run / "checkpoints")]
    for path, file in zip(folders, FILES, strict=False):
        cut(path / file)
    line = line_of_refusal(shop, run)
    assert "no other is known to be whole, or use --restart" in line
    train(shop, run.name, "--restart")
    assert_same_end(shop.runs / "straight", run)
    (aside,) = (run / "aside").iterdir()
    assert {path.name for path in (aside / "checkpoints").iterdir()} == {*(path.name for path in folders), *LINKS}


LINKS = ("latest", "best")


@pytest.mark.fault("a bit flips anywhere", "found in each file of a checkpoint by the check that every start makes")
def test_any_bit_is_found(shop: Workshop, tmp_path: Path, exhaustive: bool) -> None:
    """The check that every start makes first finds any flipped bit. The test calls the check in this process."""
    checkpoint = shutil.copytree((shop.runs / "stopped" / "checkpoints" / "latest").resolve(), tmp_path / "checkpoint")
    dice, tried, harmless = random.Random(0), 0, 0
    meta = read_meta(checkpoint)
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
            else:  # a flip that changes no value, as from 1e-08 to 1E-08
                assert file == "meta.json"
                assert read_meta(checkpoint) == meta
                harmless += 1
        (checkpoint / file).write_bytes(content)
        assert not verdict(checkpoint)


def verdict(checkpoint: Path) -> str:
    """Return the error message for a checkpoint, or an empty string if the checkpoint is whole."""
    try:
        checkpoints.verify_checkpoint(checkpoint)
    except UserError as error:
        return str(error)
    return ""
