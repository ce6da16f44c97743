"""A run that moves from one machine to another by its mirror, through the real command.

The two machines are two folders of runs.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from harness.mirror.store import Mirror
from harness.mirror.upload import Uploads
from harness.runs.checkpoints import list_checkpoints
from harness.runs.directory import RunDirectory
from tests.support.in_process import InProcess
from tests.support.launch import SAVED_OFTEN, metrics
from tests.support.same_end import assert_same_end

STEPS = 9
SETTINGS = SAVED_OFTEN | {"min_train_tokens": 64 * STEPS}
STOP = {"min_train_tokens": 64 * 5}  # a budget at which the first machine's run ends


@pytest.fixture
def first(tmp_path: Path) -> InProcess:
    """The first machine, whose run has trained five steps and is in the mirror."""
    machine = add_machine(tmp_path, "first", **STOP)
    machine.train_here()
    return machine


def add_machine(folder: Path, name: str, **settings: Any) -> InProcess:
    machine = InProcess(folder / name)
    machine.add_dataset()
    machine.add_run(**SETTINGS | {"mirror": f"file://{folder}/store"} | settings)
    return machine


def remote(machine: InProcess) -> Path:
    return machine.path.parent / "store" / "r"


def url(machine: InProcess) -> str:
    return f"file://{remote(machine).parent}"


def names(folder: Path) -> list[str]:
    return [path.name for _, path in list_checkpoints(folder / "checkpoints")]


def stop_early(machine: InProcess, *arguments: str, step: int = 2) -> None:
    """Train until SIGTERM comes at a step."""
    told = f"from tests.support.faults import *\nbefore(STEP, tell(SIGTERM), rank=0, step={step})\n"
    machine.train("r", *arguments, prelude=told, ranks=1, expect=143)


def damage(checkpoint: Path, file: str = "model.safetensors") -> bytes:
    """Change the last byte of a checkpoint's file, and return what the file had before."""
    whole = (checkpoint / file).read_bytes()
    (checkpoint / file).write_bytes(whole[:-1] + b"x")
    return whole


def test_a_local_checkpoint_that_is_newer_is_taken(first: InProcess, tmp_path: Path) -> None:
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 7})
    first.train_here("r", "--mirror", "none")
    assert not [name for name in names(remote(first)) if name.endswith("-6")]
    first.add_run(**SETTINGS, mirror=f"file://{tmp_path}/store")
    again = first.train_here().stdout
    assert "was fetched from the mirror" not in again
    assert "has no checkpoint" not in again
    assert max(int(name.rpartition("-")[2]) for name in names(remote(first))) == STEPS - 1


def test_a_slip_in_the_address_is_seen_at_the_start(first: InProcess) -> None:
    """The same happens if the mirror's disk is not mounted: training would begin anew without a word."""
    second = add_machine(first.path.parent, "second", mirror=f"{url(first)}e")
    assert f"r: mirror {url(first)}e/r has no checkpoint to continue from" in second.train_here().stdout


def test_checkpoints_that_a_restart_has_left_are_not_denied(first: InProcess) -> None:
    """They are in the mirror, but after a restart that was killed before its first save none is continued from."""
    run = RunDirectory(first.runs / "r")
    run.set_results_aside()
    assert names(remote(first))
    assert f"r: mirror {url(first)}/r has no checkpoint to continue from" in first.train_here().stdout


@pytest.mark.slow
def test_a_folder_in_a_checkpoint_is_not_sent(first: InProcess) -> None:
    """A user has exported the model into the checkpoint. The checkpoint counts as whole in the mirror."""
    latest = (first.runs / "r" / "checkpoints" / "latest").resolve()
    (latest / "exported").mkdir()
    (latest / "exported" / "config.json").write_text("{}")
    before = (remote(first) / "checkpoints" / latest.name / "meta.json").stat().st_mtime_ns
    first.script("mirror.py", "push", "r", url(first))
    assert (remote(first) / "checkpoints" / latest.name / "meta.json").stat().st_mtime_ns == before, "not sent again"
    assert not (remote(first) / "checkpoints" / latest.name / "exported").exists()


def test_files_that_the_mirror_has_lost_are_sent_again(first: InProcess) -> None:
    """Someone has emptied the bucket, or its rules delete files after some days. Without train.json, it has no run."""
    uploads = Uploads(RunDirectory(first.runs / "r"), Mirror(url(first), "r"), keep=None, start_step=4)
    uploads.push()
    sent = sorted(path.name for path in remote(first).iterdir())
    shutil.rmtree(remote(first))
    uploads.push()
    assert sorted(path.name for path in remote(first).iterdir()) == sent


def test_a_damaged_checkpoint_gives_way_to_an_older_one(first: InProcess) -> None:
    second = add_machine(first.path.parent, "second", min_train_tokens=64 * 7)
    second.train_here()
    newest = names(remote(first))[-1]
    damage(remote(first) / "checkpoints" / newest)
    third = add_machine(first.path.parent, "third")
    result = third.train_here()
    assert f"{newest} is damaged" in result.stderr
    assert f"{names(first.runs / 'r')[-1]} was fetched from the mirror" in result.stdout
    aside = remote(first) / "checkpoints" / newest / "meta-aside.json"
    assert aside.exists(), "no machine continues from it any more"
    assert metrics(third.runs / "r")[-1]["global_step"] == STEPS - 1


@pytest.mark.parametrize("by_command", [False, True])
def test_a_checkpoint_that_is_damaged_here_alone_is_fetched(first: InProcess, by_command: bool) -> None:
    run = first.runs / "r"
    latest = (run / "checkpoints" / "latest").resolve()
    whole = damage(latest)
    if by_command:
        first.script("mirror.py", "fetch", url(first), "r")
        assert (latest / "model.safetensors").read_bytes() == whole
    first.add_run(**SETTINGS | {"mirror": url(first)})
    result = first.train_here()
    assert by_command or f"{latest.name} was fetched from the mirror" in result.stdout
    assert list((run / "aside").glob("*/*-iteration-*/model.safetensors")), "nothing is deleted"
    straight = add_machine(first.path.parent, "straight", mirror=None)
    straight.train_here()
    assert_same_end(straight.runs / "r", run)


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
@pytest.mark.parametrize("there", ["none", "cut", "stale"])
def test_a_finished_run_keeps_its_summary_when_it_is_fetched(first: InProcess, there: str, is_damaged: bool) -> None:
    """Nothing is fetched, or the copy of a checkpoint that is damaged here."""
    run, summary = first.runs / "r", remote(first) / "summary.json"
    before = (run / "summary.json").read_bytes()
    if is_damaged:
        damage(run / "checkpoints" / "latest")
    summary.unlink()
    if there != "none":
        stale = before.replace(b'"tokens_seen": 320', b'"tokens_seen": 64')
        summary.write_bytes(before[:50] if there == "cut" else stale)
    first.script("mirror.py", "fetch", url(first), "r")
    assert (run / "summary.json").read_bytes() == before


@pytest.mark.parametrize("store", ["store", "empty"])
@pytest.mark.parametrize(("file", "size"), [("model.safetensors", -1), ("optimizer.pt", 100)])
def test_a_damaged_checkpoint_is_not_pushed(first: InProcess, store: str, file: str, size: int) -> None:
    """No new try can help, and what is whole in the mirror stays as it is."""
    latest = (first.runs / "r" / "checkpoints" / "latest").resolve()
    whole = (latest / file).read_bytes()
    (latest / file).write_bytes(whole[:size] + b"x")
    result = first.command("mirror.py", "push", "r", f"file://{first.path.parent}/{store}")
    assert (result.status, f"{latest.name}: cannot be verified here, and was not sent" in result.stderr) == (2, True)
    assert f"warning: runs/r/checkpoints/{latest.name}/{file}: damaged" in result.stderr
    there = first.path.parent / store / "r" / "checkpoints" / latest.name
    assert (there / "meta.json").exists() == (there / file).exists() == (store == "store")
    assert store == "empty" or (there / file).read_bytes() == whole


def test_a_best_checkpoint_that_is_damaged_here_alone_is_fetched_with_a_later_one(first: InProcess) -> None:
    run, best = first.runs / "r", names(first.runs / "r")[-1]
    second = add_machine(first.path.parent, "second", min_train_tokens=64 * 7, learning_rate=5.0)
    second.train_here()
    whole = damage(run / "checkpoints" / best)
    first.script("mirror.py", "fetch", url(first), "r")
    assert (run / "checkpoints" / "latest").resolve().name == names(remote(first))[-1] != best
    assert (run / "checkpoints" / "best").resolve().name == best
    assert (run / "checkpoints" / best / "model.safetensors").read_bytes() == whole
    (aside,) = (run / "aside").glob(f"*/{best}/model.safetensors")
    assert aside.read_bytes() == whole[:-1] + b"x"


def test_a_checkpoint_that_is_damaged_in_both_places_stays(first: InProcess) -> None:
    run, before = first.runs / "r", names(first.runs / "r")
    for folder in (run, remote(first)):
        damage(folder / "checkpoints" / before[-1], "optimizer.pt")
    first.command("mirror.py", "fetch", url(first), "r")
    assert names(run) == before
    assert (run / "checkpoints" / "latest").resolve().name == before[-1]
    first.add_run(**SETTINGS | {"mirror": url(first)})
    assert "--restart" in first.train_here(expect=2).stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["meta.json", "model.safetensors"])
def test_with_nothing_but_damaged_checkpoints_no_new_run_begins(first: InProcess, file: str) -> None:
    for name in names(remote(first)):
        (remote(first) / "checkpoints" / name / file).write_bytes(b"[]")
    second = add_machine(first.path.parent, "second")
    line = second.train_here(expect=2).stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "--restart" in line
    second.train_here("r", "--restart")
    assert metrics(second.runs / "r")[-1]["global_step"] == STEPS - 1


def test_an_interrupted_download_resumes(first: InProcess) -> None:
    second = add_machine(first.path.parent, "second")
    newest = names(remote(first))[-1]
    content = (remote(first) / "checkpoints" / newest / "optimizer.pt").read_bytes()
    draft = second.runs / "r" / "checkpoints" / f".fetching-{newest}"
    draft.mkdir(parents=True)
    (draft / "optimizer.pt.part").write_bytes(content[: len(content) // 2])
    (draft / "model.safetensors.part").write_bytes(b"damaged")  # found by its hash, and fetched again
    second.train_here()
    assert (second.runs / "r" / "checkpoints" / newest / "optimizer.pt").read_bytes() == content
    assert not list((second.runs / "r").rglob(".fetching-*"))


@pytest.mark.slow
def test_restart_leaves_nothing_to_go_back_to(first: InProcess) -> None:
    before = names(remote(first))
    first.add_run(**SETTINGS | {"learning_rate": 0.02}, mirror=url(first))
    first.train_here("r", "--restart")
    assert all((remote(first) / "checkpoints" / name / "meta-aside.json").exists() for name in before)
    second = add_machine(first.path.parent, "second", learning_rate=0.02)
    assert "is finished" in second.train_here().stdout
    assert_same_end(first.runs / "r", second.runs / "r")


@pytest.mark.slow
@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("option", ["--restart", "a checkpoint"])
def test_going_back_holds_although_the_mirror_does_not_know_of_it_yet(
    first: InProcess, option: str, has_all: bool
) -> None:
    """The machine may lack checkpoints that are in the mirror."""
    here = names(first.runs / "r")
    back, until = (here[0], 1) if option == "a checkpoint" else (option, 0)
    for name in [] if has_all else here[1:-1]:
        shutil.rmtree(first.runs / "r" / "checkpoints" / name)
    stop_early(first, back, "--mirror", "none", step=until)
    assert "would continue" not in first.train_here("r", "--plan").stdout
    assert "was fetched" not in first.train_here().stdout
    steps = [line["global_step"] for line in metrics(first.runs / "r") if line["event"] == "train"]
    assert steps == sorted(set(steps))
    assert len(list(remote(first).glob("checkpoints/*/meta-aside.json"))) >= 1


def test_push_and_fetch_after_going_back_without_the_mirror(first: InProcess) -> None:
    store, run = url(first), first.runs / "r"
    stop_early(first, "--restart", "--mirror", "none")
    first.script("mirror.py", "fetch", store, "r")
    assert not (run / "summary.json").exists(), "it is that of the training before the restart"
    first.script("mirror.py", "push", "r", store)
    assert names(remote(first))[-1] == names(run)[-1] or list(remote(first).glob("checkpoints/*/meta-aside.json"))


def test_a_trial_that_was_left_hides_nothing_of_another_machine(first: InProcess) -> None:
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    second = add_machine(first.path.parent, "second")
    stop_early(second, "--mirror", "none")
    stop_early(second, "--restart", "--mirror", "none", step=1)
    assert f"{names(first.runs / 'r')[-1]} was fetched from the mirror" in second.train_here().stdout


def test_what_lies_before_the_checkpoint_that_a_run_went_back_to_stays_in_the_mirror(first: InProcess) -> None:
    """The checkpoint gone back to may have been overtaken before it was sent."""
    run = first.runs / "r"
    before, back, _ = names(run)
    shutil.rmtree(run / "checkpoints" / before)
    shutil.rmtree(remote(first) / "checkpoints" / back)
    stop_early(first, back, step=3)
    assert (remote(first) / "checkpoints" / before / "meta.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_fetch_brings_nothing_of_what_was_left_by_going_back(first: InProcess, is_damaged: bool) -> None:
    """Also if the checkpoint that the run went back to is damaged, so that its copy is fetched."""
    store, run = url(first), first.runs / "r"
    first.script("test_loss.py", str(first.datasets), "r")
    first.script("mirror.py", "push", "r", store)
    killed = "from tests.support.faults import *\nbefore(STEP, tell(9), rank=0, step=1)\n"
    first.train("r", names(run)[0], "--mirror", "none", prelude=killed, ranks=1, expect=-9)
    before = metrics(run)
    if is_damaged:
        damage(run / "checkpoints" / "latest")
    first.script("mirror.py", "fetch", store, "r")
    assert metrics(run) == before
    assert not (run / "summary.json").exists()
    assert not [*run.glob("results/*")]


def test_a_summary_of_later_steps_than_the_fetched_checkpoint_is_not_fetched(first: InProcess) -> None:
    """Also not by the second fetch, which finds the checkpoint here."""
    add_machine(first.path.parent, "second").train_here()
    (remote(first) / "checkpoints" / names(remote(first))[-1] / "optimizer.pt").unlink()
    third = InProcess(first.path.parent / "third")
    third.path.mkdir()
    for _ in range(2):
        third.script("mirror.py", "fetch", url(first), "r")
        assert not (third.runs / "r" / "summary.json").exists()


def test_an_empty_summary_is_not_fetched(first: InProcess) -> None:
    (remote(first) / "summary.json").write_bytes(b"")
    first.script("mirror.py", "fetch", url(first), "r", "--without-weights", "--runs-dir", "elsewhere")
    assert not (first.path / "elsewhere" / "r" / "summary.json").exists()


@pytest.mark.slow
def test_the_best_checkpoint_is_fetched_although_it_is_in_aside(first: InProcess) -> None:
    """This machine went back without its mirror, while another one continued from the best checkpoint there."""
    run, best = first.runs / "r", names(first.runs / "r")[-1]
    stop_early(first, names(run)[0], "--mirror", "none")
    worse = {"learning_rate": 5.0, "mirror": url(first)}
    add_machine(first.path.parent, "second", min_train_tokens=64 * 7, **worse).train_here()
    first.add_run(**SETTINGS | worse | {"keep_checkpoints": 1})
    first.train_here()
    assert (run / "checkpoints" / "best").resolve().name == best
    assert best in names(remote(first))


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_of_the_same_step_is_fetched_if_it_is_newer(first: InProcess, is_damaged: bool) -> None:
    """Another machine has done the last validation, which was interrupted here."""
    store, run = f"file://{remote(first).parent}", first.runs / "r"
    told = f"from tests.support.faults import *\nafter_first_evaluated(tell(SIGTERM), step={STEPS - 1})\n"
    first.add_run(**SETTINGS, mirror=store)
    first.train("r", prelude=told, ranks=1, expect=143)
    interrupted = names(run)[-1]
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    add_machine(first.path.parent, "second").train_here()
    assert "which is newer" in first.command("mirror.py", "push", "r", store).stderr
    if is_damaged:
        (run / "checkpoints" / interrupted / "model.safetensors").write_bytes(b"")
    assert first.command("mirror.py", "fetch", store, "r").status == 0
    newest = names(first.path.parent / "second" / "runs" / "r")[-1]
    assert newest.partition("-")[2] == interrupted.partition("-")[2]
    assert {(run / "checkpoints" / link).resolve().name for link in ("latest", "best")} == {newest}
    assert "is finished" in first.train_here().stdout


@pytest.mark.slow
@pytest.mark.parametrize("is_ancestor", [False, True])
def test_what_was_left_without_the_mirror_is_set_aside_there(first: InProcess, is_ancestor: bool) -> None:
    """Unless another machine has continued from it, and this one continues that training."""
    old, store = names(first.runs / "r")[-1], f"file://{remote(first).parent}"
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 7})
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    first.train_here("r", "--restart", "--mirror", "none")
    if is_ancestor:
        add_machine(first.path.parent, "second").train_here()
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 11}, mirror=store)
    first.train_here()
    assert not (first.runs / "r" / "checkpoints" / old).exists()
    assert (remote(first) / "checkpoints" / old / "meta.json").exists() == is_ancestor


@pytest.mark.slow
def test_measurements_of_the_training_before_a_restart_are_set_aside(first: InProcess, tmp_path: Path) -> None:
    """They do not come to a machine that fetches the run, and are moved on one that has fetched them before."""
    store, measured = url(first), first.runs / "r" / "results"
    first.script("test_loss.py", str(first.datasets), "r")
    first.script("mirror.py", "push", "r", store)
    old = {path.name: path.read_bytes() for path in measured.iterdir()}
    home = InProcess(tmp_path / "home")
    home.runs.mkdir(parents=True)
    home.script("mirror.py", "fetch", store, "r", "--without-weights")
    assert {path.name for path in (home.runs / "r" / "results").iterdir()} == {*old}
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    first.train_here("r", "--restart")
    assert {path.name: path.read_bytes() for path in (remote(first) / "results-aside").iterdir()} == old
    home.script("mirror.py", "fetch", store, "r", "--without-weights")
    assert not list((home.runs / "r" / "results").iterdir())
    assert {path.name for path in (home.runs / "r" / "aside").glob("*/results/*")} == {*old}
    time.sleep(1.1)
    assert (home.runs / "r" / "summary.json").exists()
    stop_early(first, "--restart")
    home.script("mirror.py", "fetch", store, "r", "--without-weights")
    assert not (home.runs / "r" / "summary.json").exists(), "it is of the training before"
    time.sleep(1.1)
    first.train_here()
    shutil.rmtree(home.runs / "r")
    home.script("mirror.py", "fetch", store, "r")
    assert not (home.runs / "r" / "results").exists()


def test_measurements_after_the_checkpoint_that_a_run_went_back_to_are_set_aside(first: InProcess) -> None:
    early, late = names(first.runs / "r")[0], names(first.runs / "r")[-1]
    for name in (early, late):
        first.script("test_loss.py", str(first.datasets), f"r:{name}")
    first.script("mirror.py", "push", "r", url(first))
    first.train_here("r", early)
    for folder, name in (("results", early), ("results-aside", late)):
        assert {path.name for path in (remote(first) / folder).glob("*.json") if name in path.name}
        assert not [path for path in (remote(first) / folder).iterdir() if name not in path.name]


@pytest.mark.slow
def test_old_measurements_that_an_earlier_version_has_left_are_not_fetched(first: InProcess) -> None:
    first.script("test_loss.py", str(first.datasets), "r")
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    first.train_here("r", "--restart")
    shutil.copytree(next((first.runs / "r" / "aside").glob("*/results")), remote(first) / "results")
    second = add_machine(first.path.parent, "second", **STOP)
    second.train_here()
    assert names(second.runs / "r")
    assert not (second.runs / "r" / "results").exists()


def test_a_run_that_another_machine_has_restarted_is_brought_with_its_new_summary(first: InProcess) -> None:
    store = url(first)
    second = add_machine(first.path.parent, "second", **STOP)
    second.train_here()
    old = (second.runs / "r" / "summary.json").read_bytes()
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    first.add_run(**SETTINGS | STOP | {"learning_rate": 0.02}, mirror=store)
    first.train_here("r", "--restart")
    before = (remote(first) / "summary.json").read_bytes()
    second.add_run(**SETTINGS | STOP | {"learning_rate": 0.02}, mirror=store)
    (second.runs / "r" / "checkpoints").rename(second.path / "elsewhere")
    assert "is finished" in second.train_here().stdout
    assert (remote(first) / "summary.json").read_bytes() == before != old
    assert (second.runs / "r" / "summary.json").read_bytes() == before
    (aside,) = (second.runs / "r" / "aside").glob("*/summary.json")
    assert aside.read_bytes() == old


def test_a_run_that_was_restarted_and_lost_is_not_finished(first: InProcess) -> None:
    """The mirror has no summary of the results that the restart has set aside, and none is fetched from a mirror that
    an earlier version has left so."""
    stale = (remote(first) / "summary.json").read_bytes()
    stop_early(first, "--restart", step=0)
    assert not (remote(first) / "summary.json").exists()
    (remote(first) / "summary.json").write_bytes(stale)
    second = add_machine(first.path.parent, "second", **STOP)
    stop_early(second)
    assert not (second.runs / "r" / "summary.json").exists()
    third = add_machine(first.path.parent, "third")
    third.script("mirror.py", "fetch", url(first), "r")
    assert not (third.runs / "r" / "summary.json").exists()


@pytest.mark.slow
def test_a_checkpoint_that_was_set_aside_does_not_hide_the_best(first: InProcess) -> None:
    """The machine that set it aside had a clock that was behind, so this checkpoint seems to be the newer one."""
    changed = {"learning_rate": 10.0}  # so the best checkpoint is not the newest
    first.add_run(**SETTINGS | changed, mirror=url(first))
    first.train_here()
    best = (first.runs / "r" / "checkpoints" / "best").resolve()
    assert best.name.endswith("-4")
    aside = Path(shutil.copytree(best, remote(first) / "checkpoints" / "20991231Z235959-iteration-4"))
    (aside / "meta.json").rename(aside / "meta-aside.json")
    second = add_machine(first.path.parent, "second", **changed)
    second.train_here()
    assert (second.runs / "r" / "checkpoints" / "best").resolve().name == best.name


@pytest.mark.fault("the run was restarted on another machine", "the first one is refused; the mirror stays as it is")
def test_a_machine_does_not_overwrite_a_run_that_another_has_restarted(first: InProcess, tmp_path: Path) -> None:
    first.train_here()
    second = add_machine(tmp_path, "second", learning_rate=0.02)
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    second.train_here("r", "--restart")
    before = {path: path.read_bytes() for path in remote(first).rglob("*") if path.is_file()}
    for refused in (
        first.attempt(),
        first.attempt("--plan"),
        first.command("mirror.py", "push", "r", url(first)),
        first.command("mirror.py", "fetch", url(first), "r"),
    ):
        refused.refuses("another machine has restarted this run")
    assert {path: path.read_bytes() for path in remote(first).rglob("*") if path.is_file()} == before


def test_a_machine_that_trained_on_unsent_does_not_overwrite_a_run_that_another_has_resumed_earlier(
    first: InProcess,
) -> None:
    """The newest checkpoint of the first machine was never sent, but an older one was, and is set aside there."""
    store = url(first)
    second = add_machine(first.path.parent, "second")
    shutil.copytree(first.runs / "r" / "checkpoints", second.runs / "r" / "checkpoints", symlinks=True)
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    second.train_here("r", next(name for name in names(second.runs / "r") if name.endswith("-2")))
    time.sleep(1.1)
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 12})
    first.train_here()
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 14}, mirror=store)
    first.attempt().refuses("another machine has restarted this run, or continued it without")


def test_a_machine_whose_checkpoint_was_chosen_after_another_machines_restart_continues(
    first: InProcess, tmp_path: Path
) -> None:
    """The older checkpoints of the first machine stay set aside in the mirror, but its training is the run's again."""
    second = add_machine(tmp_path, "second", learning_rate=0.02)
    time.sleep(1.1)  # a checkpoint's name has its time in seconds
    second.train_here("r", "--restart")
    time.sleep(1.1)
    first.train_here("r", names(first.runs / "r")[-1])
    first.add_run(**SETTINGS | {"min_train_tokens": 64 * 12}, mirror=url(first))
    assert "continuing from" in first.train_here().stdout
    first.script("mirror.py", "push", "r", url(first))


def test_old_checkpoints_are_deleted_there_too(tmp_path: Path) -> None:
    machine = add_machine(tmp_path, "first", keep_checkpoints=1, min_train_tokens=64 * 5)
    machine.train_here()
    machine.add_run(**SETTINGS | {"keep_checkpoints": 1}, mirror=f"file://{tmp_path}/store")
    machine.train_here()
    there = names(remote(machine))
    assert len(there) <= 3, "latest, best and one more"
    assert {(machine.runs / "r/checkpoints" / link).resolve().name for link in ("latest", "best")} <= {*there}


def test_local_files_that_are_replaced_are_kept(first: InProcess) -> None:
    second = add_machine(first.path.parent, "second")
    (second.runs / "r" / "metrics.jsonl").write_text("mine\n")
    second.train_here()
    assert [path.read_text() for path in (second.runs / "r" / "aside").rglob("metrics.jsonl")] == ["mine\n"]


def test_another_experiment_is_refused(first: InProcess) -> None:
    before = {path: path.read_bytes() for path in remote(first).rglob("*") if path.is_file()}
    for settings, key in ({"model": {"n_layers": 1}}, "n_layers"), ({"start_train_token": 64}, "start_train_token"):
        second = add_machine(first.path.parent, f"second-{key}", **settings)
        remedies = "; restore the old value; to keep both, give another mirror or rename the run"
        second.attempt().refuses("holds another experiment", key, remedies)
        assert not (second.runs / "r" / "metrics.jsonl").exists()
    after = {path: path.read_bytes() for path in remote(first).rglob("*") if path.is_file()}
    after.pop(remote(first) / "owner.json", None)
    assert before == after


def test_a_run_with_another_dataset_of_the_same_name_is_refused_until_it_is_restarted(first: InProcess) -> None:
    second = InProcess(first.path.parent / "second")
    second.add_dataset(seed=1)
    second.add_run(**SETTINGS | {"mirror": url(first)})
    remedies = "; restore the old dataset, or use --restart; to keep both, give another mirror or rename the run"
    second.attempt().refuses("holds another experiment: made with another dataset: ", remedies)
    second.train_here("r", "--restart")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s4://bucket", "unknown scheme; use one of hf://, s3://, gs://, sftp://, file://"),
        ("s3://key:secret@bucket", "must have no credentials"),
        ("s3://key:with/secret@bucket/x", "must have no credentials"),
        ("sftp://me:with@secret@host/x", "must have no credentials"),
        ("s3://bucket?token=secret", "must have no credentials"),
        ("hf://owner/name", "must be hf://buckets/OWNER/NAME"),
        ("gs://bucket", "uv run --extra gcs"),
        ("file:///proc/nowhere", "cannot be written"),
        ("file:///a/../b", "must be a plain address"),
        ("file://tmp/store", "must be an absolute path, as in file:///mnt/disk/runs"),
        ("me:secret@host/x", "unknown scheme"),
        ("s3:/key:secret@host/x", "unknown scheme"),
        ("s3://bucket/x#secret", "must be a plain address"),
        (["s3://key:secret@bucket"], "valid string"),
    ],
)
def test_a_wrong_url_is_one_line_before_anything_is_trained(shop: InProcess, url: Any, said: str) -> None:
    machine = InProcess(shop.path)
    run = machine.add_run(mirror=url)
    result = machine.attempt()
    assert result.stdout == ""
    assert "secret" not in result.refuses(said)
    assert not (run / "metrics.jsonl").exists()
    if isinstance(url, str):
        assert machine.attempt("--mirror", "none", "--plan").status == 0


def test_what_is_no_mirror_is_refused(shop: InProcess) -> None:
    run = InProcess(shop.path).add_run(mirror=f"file://{shop.runs}")
    for options, said in (
        ([], "the copy would be in the run's own folder"),
        (["--mirror", run.as_uri()], "the copy would be in the run's own folder"),
        (["--mirror", ""], "unknown scheme"),
        (["--mirror", "none", "--take-over"], "--take-over belongs with a mirror"),
    ):
        shop.attempt(*options).refuses(said)
        assert not (run / "metrics.jsonl").exists()
    for words in (["push", "r", f"file://{shop.runs}"], ["fetch", f"file://{shop.runs}", "r"]):
        result = shop.command("mirror.py", *words, "--runs-dir", str(shop.runs))
        result.refuses("the copy would be in the run's own folder")


def test_without_a_mirror_there_is_nothing_to_wait_for(shop: InProcess) -> None:
    """A scheduler's script can say --wait for all runs."""
    shop.add_run("alone", min_train_tokens=64)
    assert shop.attempt("--wait", run="alone").status == 0


def test_the_plan_says_where_it_would_continue_and_what_a_loss_costs(first: InProcess) -> None:
    second = add_machine(first.path.parent, "second", price_per_hour=36.0)
    planned = second.attempt("--plan", "--assume-tps", "128").stdout
    told = " ".join(planned.split())
    assert f"would continue from {names(first.runs / 'r')[-1]} there" in told
    assert "a lost machine costs at most 1 s, $0.01 and the upload of 0.00 GiB, whose speed is not measured" in told
    assert "done already 5 steps" in told
    assert not (second.runs / "r" / "checkpoints").exists(), "nothing is fetched"
    anew = " ".join(second.attempt("--plan", "--restart").stdout.split())
    assert "would use no checkpoint there" in anew, "a newer one is there"
    third = add_machine(first.path.parent, "third", checkpoint_interval=1000)
    told = " ".join(third.attempt("--plan").stdout.split())
    more = re.search(r"global steps (\d+) more", told)
    assert more is not None
    assert f"a lost machine costs at most {more[1]} steps" in told, "all that is left"
    assert "a lost machine costs" not in first.attempt("--plan").stdout, "nothing is left to train"
    first.add_run(**SETTINGS, mirror=url(first))
    again = " ".join(first.attempt("--plan", "--assume-tps", "128").stdout.split())
    assert "would use no checkpoint there" in again
    assert "MB/s as last measured" in again


def test_a_file_of_the_mirror_has_no_machine_in_it(first: InProcess) -> None:
    """Names of machines stand in owner.json alone, which is deleted at the end, and in the run's folder."""
    kept = json.loads((first.runs / "r" / ".mirror.json").read_text())
    assert kept.keys() == {"host", "folder", "id", "bytes_per_second"}
    assert not [path for path in remote(first).rglob("*") if path.name.startswith(".")]
