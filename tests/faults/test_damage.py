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
    """Damage to a file of the checkpoint that a link leads to, or to the link itself. `words` are in the message about
    it."""

    do: Callable[[Path], object]  # called with the file, or with the link
    words: str = ""
    file: str | None = None  # the damaged file of the checkpoint; None damages the link itself

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


def become_a_copy(path: Path) -> None:
    target = path.resolve()
    path.unlink()
    shutil.copytree(target, path)


LINKS = ("latest", "best")
FILE_DAMAGES = [
    *(Damage(do, file, file) for do in (cut, empty, flip, Path.unlink) for file in FILES),
    *(Damage(lead_out, "leads out", file) for file in FILES),
    *(Damage(point_to_itself, file, file) for file in FILES),
]
LINK_DAMAGES = [
    Damage(dangle, "latest: no such checkpoint"),
    Damage(point_to_itself, "latest: no such checkpoint"),
    Damage(lead_out, "leads out"),
]


def few(cases: list[Damage], exhaustive: bool) -> list[Damage]:
    """Return some of the damages, at least one of each kind and one to each file. With --exhaustive, return all."""
    return cases if exhaustive else cases[:: len(FILES) + 1]


@pytest.mark.fault(
    "latest is damaged", "refused; the newest whole checkpoint is offered; resumed from it, the same end"
)
def test_damaged_latest(shop: Workshop, exhaustive: bool) -> None:
    runs = []
    for number, damage in enumerate(few(FILE_DAMAGES, exhaustive) + LINK_DAMAGES):
        run = copy_of_stopped(shop, f"damaged-{number}")
        damage.to(run / "checkpoints" / "latest")
        line = InProcess(shop.path).attempt(run=run.name).refuses(damage.words)
        names = {step: path.name for step, path in checkpoints.list_checkpoints(run / "checkpoints")}
        if damage.file or damage.do == lead_out:
            offered = names[4]
            assert f"the newest whole checkpoint is {offered}: give that name as CHECKPOINT" in line
        else:
            offered = names[6]
            assert f"there are: best, {offered}, {names[4]}" in line
        runs.append((run, offered))

    def resume(case: tuple[Path, str]) -> None:
        run, offered = case
        train(shop, run.name, offered)
        assert_same_end(shop.runs / "straight", run)

    for_each(runs if exhaustive else runs[-len(LINK_DAMAGES) - 1 :], resume)


@pytest.mark.slow
@pytest.mark.fault("best is damaged", "training continues from latest to the same end")
@pytest.mark.fault("latest is no link", "training continues from the highest step, and latest is a link again")
def test_other_damages(shop: Workshop, exhaustive: bool) -> None:
    """A run is resumed even if `best` is damaged, and even if `latest` is no link. Programs that do not copy links
    leave nothing or a file in its place; programs that follow links leave a folder."""
    best = [*(FILE_DAMAGES if exhaustive else FILE_DAMAGES[:: 2 * len(FILES) + 1]), *LINK_DAMAGES, Damage(Path.unlink)]
    latest = [Damage(Path.unlink), Damage(become_a_file), Damage(become_a_copy)]

    def try_one(case: tuple[int, tuple[str, Damage]]) -> None:
        number, (link, damage) = case
        run = copy_of_stopped(shop, f"other-{number}")
        damage.to(run / "checkpoints" / link)
        highest = checkpoints.list_checkpoints(run / "checkpoints")[-1][1]
        assert f"continuing from {highest.name}" in train(shop, run.name).stdout
        assert_same_end(shop.runs / "straight", run)
        for name in LINKS:
            assert (run / "checkpoints" / name).is_symlink()
            checkpoints.verify_checkpoint(run / "checkpoints" / name)

    for_each(enumerate([*(("best", damage) for damage in best), *(("latest", damage) for damage in latest)]), try_one)


@pytest.mark.fault("every checkpoint is damaged", "refused with --restart offered, which moves them all aside")
def test_all_damaged(shop: Workshop) -> None:
    run = copy_of_stopped(shop, "all-damaged")
    folders = [path for _, path in checkpoints.list_checkpoints(run / "checkpoints")]
    for path, file in zip(folders, FILES, strict=False):
        cut(path / file)
    remedy = "no other checkpoint is known to be whole: fix the cause, or use --restart"
    InProcess(shop.path).attempt(run=run.name).refuses(remedy)
    train(shop, run.name, "--restart")
    assert_same_end(shop.runs / "straight", run)
    (aside,) = (run / "aside").iterdir()
    assert {path.name for path in (aside / "checkpoints").iterdir()} == {*(path.name for path in folders), *LINKS}


@pytest.mark.fault(
    "a flipped bit in any file of a checkpoint", "found by the check that every start makes, if a value has changed"
)
def test_any_bit_is_found(shop: Workshop, tmp_path: Path, exhaustive: bool) -> None:
    """Every start first makes a check of the checkpoint, which finds any flipped bit that changes a value. The test
    calls this check in its own process."""
    checkpoint = shutil.copytree((shop.runs / "stopped" / "checkpoints" / "latest").resolve(), tmp_path / "checkpoint")
    dice = random.Random(0)
    meta = read_meta(checkpoint)
    for file in FILES:
        content = (checkpoint / file).read_bytes()
        most = len(content) if exhaustive and file == "meta.json" else 400 if exhaustive else 40
        for place in dice.sample(range(len(content)), min(most, len(content))):
            harmed = bytearray(content)
            harmed[place] ^= 1 << dice.randrange(8)
            (checkpoint / file).write_bytes(harmed)
            if found := verdict(checkpoint):
                assert str(checkpoint) in found if file == "meta.json" else f"{checkpoint / file}: damaged" in found
            else:  # a flip that changes no value, as from 1e-08 to 1E-08
                assert file == "meta.json"
                assert read_meta(checkpoint) == meta
        for cut_off in () if file == "meta.json" else (content[:-1], b""):
            (checkpoint / file).write_bytes(cut_off)
            assert f"{checkpoint / file}: damaged" in verdict(checkpoint)
        (checkpoint / file).unlink()
        assert file == "meta.json" or f"{checkpoint / file}: missing" in verdict(checkpoint)
        (checkpoint / file).write_bytes(content)
        assert not verdict(checkpoint)


def verdict(checkpoint: Path) -> str:
    """Return the error message for a checkpoint, or an empty string if the checkpoint is whole."""
    try:
        checkpoints.verify_checkpoint(checkpoint)
    except UserError as error:
        return str(error)
    return ""
