"""Checkpoints: saving and loading, links and file modes, damaged meta.json, and pruning."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from gpt import GPTModel, ModelConfig
from harness.common.errors import RunError, UserError
from harness.common.files import sha256
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta, verify_meta, write_meta
from harness.runs.checkpoints import Checkpoint, save_checkpoint
from harness.runs.directory import RunDirectory
from tests.support.configs import refusal
from tests.support.in_process import InProcess
from tests.support.launch import MODEL, Workshop

STATE_FILES = ["model.safetensors", "optimizer.pt", "scaler.pt", "train_state.pt"]


def a_checkpoint(step: int = 0, *, is_best: bool = False, **meta: Any) -> Checkpoint:
    """Return a checkpoint with weights, optimizer state, scaler state, train state and metadata. The weights differ
    from step to step."""
    torch.manual_seed(step)
    weights = GPTModel(ModelConfig(**MODEL)).to_checkpoint_names()
    return Checkpoint(
        weights=weights,
        optimizer={name: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4)} for name in list(weights)[:3]},
        scaler={"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 7},
        train_state={"ranks": [{"random": {"cpu": torch.get_rng_state()}, "window": [1.5, float("inf")]}]},
        meta=CheckpointMeta(
            **{"global_step": step, "is_best": is_best, "tokens_seen": 128 * (step + 1), "best_step": None, **meta}
        ),
    )


def save_steps(folder: Path, steps: list[int], *, best: int | None = None) -> dict[int, Path]:
    return {step: save_checkpoint(folder, a_checkpoint(step, is_best=step == best, best_step=best)) for step in steps}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_what_is_loaded_is_what_was_saved(folder: Path) -> None:
    saved = replace(a_checkpoint(7, is_best=True), tokenizer=("letters.json", b'{"a": 1}'))
    path = save_checkpoint(folder, saved)
    assert re.fullmatch(r"\d{8}Z\d{6}-iteration-7", path.name)
    assert {file.name for file in path.iterdir()} == {*STATE_FILES, "meta.json", "letters.json"}
    assert (path / "letters.json").read_bytes() == b'{"a": 1}'
    checkpoints.verify_checkpoint(path)
    loaded = checkpoints.load_checkpoint(path)
    for part in ("weights", "optimizer", "scaler", "train_state"):
        torch.testing.assert_close(getattr(loaded, part), getattr(saved, part), rtol=0, atol=0)
    numbers = [repr((each.scaler, each.train_state)) for each in (loaded, saved)]
    assert numbers[0] == numbers[1], "numbers keep their types"
    hashes = loaded.meta.sha256
    assert len(hashes.pop("meta.json")) == 64
    assert loaded.meta == saved.meta.model_copy(update={"sha256": hashes})
    assert hashes == {name: sha256(path / name) for name in [*STATE_FILES, "letters.json"]}


def test_latest_and_best_are_relative_links(folder: Path) -> None:
    first = save_checkpoint(folder, a_checkpoint(0, is_best=True))
    second = save_checkpoint(folder, a_checkpoint(5))
    assert (folder / "latest").readlink() == Path(second.name)
    assert (folder / "best").readlink() == Path(first.name)
    moved = folder.rename(folder.with_name("elsewhere"))
    assert (moved / "latest" / "meta.json").is_file()
    assert checkpoints.find_checkpoint(moved, "best") == moved / first.name
    assert checkpoints.choose_start(moved, None) == moved / second.name
    assert checkpoints.choose_start(moved, first.name) == moved / first.name


def test_a_folder_in_place_of_latest(folder: Path) -> None:
    """`latest` is a folder if the checkpoints were copied by a program that follows links. The newest dated checkpoint
    is then taken. If there is none, a message says how to rename the folder, and training does not start."""
    run = RunDirectory(folder.parent)
    path = save_checkpoint(folder, a_checkpoint(3))
    (folder / "latest").unlink()
    shutil.copytree(path, folder / "latest")
    assert checkpoints.choose_start(folder, None) == checkpoints.choose_start(folder, "latest") == path
    shutil.rmtree(path)
    for name in (None, "latest"):
        with pytest.raises(UserError, match=r"latest: a folder, not a link .* rename it to DATE-iteration-STEP"):
            checkpoints.open_start(run, name)
    (folder / "latest").rename(path)
    assert checkpoints.open_start(run, None) == (path, read_meta(path))


def test_a_link_is_never_missing_while_it_is_replaced(folder: Path) -> None:
    """The link is there whenever it is read in a loop while another thread replaces it."""
    paths = list(save_steps(folder, [1, 2]).values())

    def turn_it() -> None:
        for turn in range(50):
            checkpoints.point(folder, "latest", paths[turn % 2])

    with ThreadPoolExecutor() as pool:
        turned, looks = pool.submit(turn_it), 0
        while not turned.done():
            (folder / "latest").readlink()  # raises an error if there is no link
            looks += 1
    turned.result()
    assert looks > 50


def test_names_never_collide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of the same step get different names even if the clock shows the same second."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    paths = [save_checkpoint(folder, a_checkpoint(3, count=count)) for count in range(4)]
    assert len({path.name for path in paths}) == 4
    assert [read_meta(path).model_extra for path in paths] == [{"count": count} for count in range(4)]
    assert [path for _, path in checkpoints.list_checkpoints(folder)] == paths, "names must sort in order of saving"


def test_order_is_by_global_step_not_by_the_clock(folder: Path) -> None:
    """Checkpoints are ordered by global step, as numbers (9 before 10), even if the clock was set back between them.
    Other things in the folder are not checkpoints."""
    named = {step: f"{year}0101Z000000-iteration-{step}" for step, year in ((9, 2030), (10, 2020), (100, 2021))}
    for step, path in save_steps(folder, list(named)).items():
        path.rename(folder / named[step])
    (folder / "latest").unlink()
    checkpoints.point(folder, "latest", folder / named[100])
    (folder / "20260101Z000000-iteration-9").write_text("a file")
    for other in ("notes", "20260101Z000000-iteration-x", "my-20260101Z000000-iteration-8-backup"):
        (folder / other).mkdir()
    assert checkpoints.list_checkpoints(folder) == [(step, folder / name) for step, name in named.items()]
    checkpoints.prune(folder, 2, set())
    assert len(checkpoints.list_checkpoints(folder)) == 3, "latest is none of the two that are kept"
    checkpoints.prune(folder, 1, set())
    assert [step for step, _ in checkpoints.list_checkpoints(folder)] == [10, 100]
    checkpoints.rewind_to(folder, folder / named[10], RunDirectory(folder.parent).new_aside)
    assert checkpoints.choose_start(folder, None) == folder / named[10]


def test_meta_json_that_is_none_or_vouches_for_nothing(folder: Path, tmp_path: Path) -> None:
    """A checkpoint is refused if the content of its meta.json is not valid. It is refused, too, if the list of hashes
    in it is missing or incomplete, or names a file outside the checkpoint."""
    path = save_checkpoint(folder, a_checkpoint())
    meta = read_meta(path)
    for text in ("", "{", "[]", "{}", *(f'{{"global_step": {each}}}' for each in ('"1"', "null", '1, "sha256": []'))):
        (path / "meta.json").write_text(text)
        refusal(checkpoints.verify_checkpoint, path, begins=str(path / "meta.json"))
    (tmp_path / "secret").write_text("x")
    for hashes, words in (
        ({}, "damaged: no SHA-256 of model"),
        ({"optimizer.pt": meta.sha256["optimizer.pt"]}, "damaged: no SHA-256 of model"),
        ({"../../secret": "0", **meta.sha256}, "plain name"),
    ):
        write_meta(path, meta.model_copy(update={"sha256": hashes}))
        assert words in refusal(checkpoints.verify_checkpoint, path, begins=str(path))


def test_a_changed_meta_json_is_damaged(folder: Path) -> None:
    """A changed value in meta.json is found as damage, because training resumes from these numbers. The order and
    layout of the keys do not matter."""
    path = save_checkpoint(folder, a_checkpoint(7, is_best=True, tokens=1.25))
    text = (path / "meta.json").read_text()
    meta = json.loads(text)
    (path / "meta.json").write_text(json.dumps(dict(reversed(meta.items()))))
    checkpoints.verify_checkpoint(path)
    for old, new in (("1024", "1025"), ("1.25", "1.24"), ('"is_best": true', '"is_best": false'), ("tokens", "tokenr")):
        (path / "meta.json").write_text(text.replace(old, new))
        refusal(checkpoints.verify_checkpoint, path, begins=f"{path / 'meta.json'}: damaged")
    del meta["sha256"]["meta.json"]  # as earlier versions wrote it
    (path / "meta.json").write_text(json.dumps(meta))
    checkpoints.verify_checkpoint(path)


@pytest.mark.parametrize(
    ("steps", "records", "at"),
    [([0, 5, 10, 15], (5,), 5), ([0, 5, 10], (0, 10), 5), ([5, 50, 60], (5, 60), 50), ([1, 10, 11, 20], (1, 20), 11)],
)
def test_later_checkpoints_are_moved_aside_whole(
    folder: Path, steps: list[int], records: tuple[int, ...], at: int
) -> None:
    """Checkpoints after the one to resume from are moved aside with all their files. `best` then links to the best
    checkpoint up to that step, as its meta.json records it. Steps are compared as numbers: 5 is not 50."""
    paths = {}
    for step in steps:
        best = max((record for record in records if record <= step), default=None)
        paths[step] = save_checkpoint(folder, a_checkpoint(step, is_best=step == best, best_step=best))
    checkpoints.rewind_to(folder, paths[at], RunDirectory(folder.parent).new_aside)
    moved = sorted(folder.parent.glob("aside/*/checkpoints/*"))
    assert [path.name for path in moved] == [paths[step].name for step in steps if step > at]
    for path in moved:
        checkpoints.verify_checkpoint(path)
    assert (folder / "latest").readlink() == Path(paths[at].name)
    assert (folder / "best").readlink() == Path(paths[max(record for record in records if record <= at)].name)


def test_nothing_later_moves_nothing(folder: Path) -> None:
    """If no checkpoint is later than the one to resume from, none is moved. A kill may have left `best` at an older
    checkpoint. Then `best` is set to the best step, as the checkpoint to resume from records it."""
    paths = save_steps(folder, [0, 5], best=5)

    for best in (5, 0):
        checkpoints.point(folder, "best", paths[best])
        checkpoints.rewind_to(folder, paths[5], lambda: pytest.fail("asks for a folder for moved checkpoints"))
        assert {(folder / link).readlink() for link in ("latest", "best")} == {Path(paths[5].name)}


STARVED = """
import resource
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta, write_meta
from harness.common.memory import _status_bytes
write = checkpoints._write_files
def write_without_memory(draft, checkpoint):
    used, (_, hard) = _status_bytes("VmData"), resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + 2**22, hard))  # half of a thread's stack
    write(draft, checkpoint)
checkpoints._write_files = write_without_memory
"""


def test_a_save_without_memory_does_not_blame_the_disk(shop: Workshop) -> None:
    run = shop.add_run()
    said = f"{run / 'checkpoints'}: out of memory while writing the checkpoint of step 0: can't start new thread"
    result = shop.train(run.name, "--restart", ranks=1, expect=1, prelude=STARVED)
    line = result.refuses(said, "-f finds the largest", "without --restart", status=1)
    assert "GiB free" not in line
    assert list((run / "checkpoints").iterdir()) == []


def test_a_failed_write_leaves_the_folder_as_it_was(folder: Path) -> None:
    kept = save_checkpoint(folder, a_checkpoint(1, is_best=True))
    broken = replace(a_checkpoint(2, is_best=True), tokenizer=("no/folder.json", b""))
    with pytest.raises(RunError):
        save_checkpoint(folder, broken)
    assert {entry.name for entry in folder.iterdir()} == {kept.name, "latest", "best"}
    assert (folder / "latest").readlink() == Path(kept.name)


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run trained by the real command in fp16, with a umask that lets the group read files."""
    shop = InProcess(tmp_path_factory.mktemp("real"))
    shop.add_dataset()
    run = shop.add_run(precision="fp16", keep_checkpoints=2, checkpoint_interval=2)
    before = os.umask(0o027)
    try:
        assert shop.attempt().status == 0
    finally:
        os.umask(before)
    return run


def test_the_commands_own_checkpoints(real_run: Path) -> None:
    folder = real_run / "checkpoints"
    assert not list(folder.glob(".*"))
    latest = checkpoints.find_checkpoint(folder, "latest")
    checkpoints.verify_checkpoint(latest)
    saved = checkpoints.load_checkpoint(latest)
    assert {file.name for file in latest.iterdir()} == {*STATE_FILES, "meta.json"}
    assert {oct(file.stat().st_mode & 0o777) for file in (latest, *latest.iterdir())} == {"0o640", "0o750"}
    with safe_open(latest / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == GPTModel(ModelConfig(**MODEL)).to_checkpoint_names().keys()
    assert not re.findall(r"module\.|_orig_mod\.|mask", " ".join([*saved.weights, *saved.optimizer]))
    assert len(saved.train_state["ranks"]) == 1
    assert (saved.meta.global_step, saved.meta.tokens_seen) == (19, 1280)
    for key in ("model", "train", "dataset", "torch", "world_size", "val_loss", "best_loss", "best_step", "sha256"):
        assert getattr(saved.meta, key) is not None, key
    # keep_checkpoints is 2, so two more are kept than best and latest, which may be the same checkpoint.
    best = checkpoints.find_checkpoint(folder, "best")
    others = {path for _, path in checkpoints.list_checkpoints(folder)} - {latest, best}
    assert len(others) == 2


def test_a_meta_json_without_hashes_cannot_be_verified(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"global_step": 3}')
    verify_meta(tmp_path)


@pytest.mark.parametrize("price", [-1, "x", None])
def test_a_damaged_price_costs_nothing(price: Any) -> None:
    """The train.json that a damaged meta.json records may have any price."""
    meta = a_checkpoint(1).meta.model_copy(update={"dollars": {}, "seconds": {"training": 9.0}})
    meta.train["price_per_hour"] = price
    assert meta.costs == {}
