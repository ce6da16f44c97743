"""mirror.py: a run in a mirror, seen from another machine."""

from __future__ import annotations

import codecs
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from harness.common.lock import release
from harness.mirror import home
from harness.runs.directory import RunDirectory
from tests.mirror.test_two_machines import SETTINGS, STOP, add_machine, names, remote, url
from tests.support.in_process import InProcess
from tests.support.launch import metrics
from tests.support.same_end import assert_same_end


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    machine = add_machine(tmp_path_factory.mktemp("home"), "away")
    machine.train_here()
    return machine


@pytest.fixture
def store(trained: InProcess, tmp_path: Path) -> Path:
    """A copy of the mirror, which tests may change."""
    return Path(shutil.copytree(remote(trained).parent, tmp_path / "store"))


@pytest.fixture
def here(tmp_path: Path) -> InProcess:
    """A machine without runs."""
    machine = InProcess(tmp_path / "home")
    machine.runs.mkdir(parents=True)
    return machine


def test_list(trained: InProcess, tmp_path: Path) -> None:
    listed = trained.script("mirror.py", "list", url(trained)).stdout
    assert listed == f"r: {names(remote(trained))[-1]}, 0.00 GB\n"
    (remote(trained) / "owner.json").write_text(json.dumps({"host": "box", "id": "x", "heard": 0.0}))
    assert 'trained on "box", last heard from' in trained.script("mirror.py", "list", url(trained)).stdout
    (remote(trained) / "owner.json").write_text("damaged")
    assert "trained on" in trained.script("mirror.py", "list", url(trained)).stdout
    (remote(trained) / "owner.json").unlink()
    assert "no such place" in trained.script("mirror.py", "list", f"file://{tmp_path}/empty").stdout


def test_fetch_everything(trained: InProcess, here: InProcess) -> None:
    here.script("mirror.py", "fetch", url(trained), "r")
    assert_same_end(trained.runs / "r", here.runs / "r")
    for name in ("model.json", "train.json", "summary.json"):
        assert (here.runs / "r" / name).read_bytes() == (trained.runs / "r" / name).read_bytes()
    here.script("mirror.py", "fetch", url(trained), "r")
    assert not (here.runs / "r" / "aside").exists()


def test_compare_what_was_fetched_without_weights(trained: InProcess, here: InProcess) -> None:
    here.script("mirror.py", "fetch", url(trained), "r", "--without-weights")
    assert not (here.runs / "r" / "checkpoints").exists()
    assert "mirror.py fetch" in here.command("test_loss.py", "datasets", "r").refuses()
    own, fetched = (json.loads(machine.script("compare_runs.py", "r", "--json").stdout) for machine in (trained, here))
    assert fetched == own
    assert metrics(here.runs / "r") == metrics(trained.runs / "r")


@pytest.mark.parametrize("weights", [[], ["--without-weights"]], ids=["all", "without-weights"])
def test_a_fetched_run_that_trains_elsewhere_is_not_stopped(store: Path, here: InProcess, weights: list[str]) -> None:
    (store / "r" / "summary.json").unlink()
    owner = store / "r" / "owner.json"
    owner.write_text(json.dumps({"host": "box", "pid": 7, "id": "x", "heard": 1e12}))

    def fetched_state() -> str:
        here.script("mirror.py", "fetch", f"file://{store}", "r", *weights)
        return str(json.loads(here.script("compare_runs.py", "r", "--json").stdout)["runs"][0]["state"])

    assert fetched_state() == "going on"
    owner.write_text(json.dumps({"host": "box", "pid": 7, "id": "x", "heard": time.time() - 86400}))  # it was lost
    assert fetched_state() == "stopped"
    owner.write_text(json.dumps({"host": "box", "pid": 7, "id": "x", "heard": time.time()}))
    assert fetched_state() == "going on"
    owner.unlink()  # the run has stopped there
    assert fetched_state() == "stopped"


def test_fetching_metrics_leaves_the_lock_of_a_run_that_trains_here(
    trained: InProcess, store: Path, here: InProcess
) -> None:
    (store / "r" / "owner.json").write_text(json.dumps({"host": "box", "pid": 7, "id": "x", "heard": 1e12}))
    run = RunDirectory(Path(shutil.copytree(trained.runs / "r", here.runs / "r", symlinks=True)))
    run.lock()
    before = run.lock_file.read_bytes()
    home.fetch_run(f"file://{store}", "r", here.runs, with_weights=False)
    assert run.lock_file.read_bytes() == before
    release(run.lock_file)


@pytest.mark.parametrize("weights", [[], ["--without-weights"]], ids=["all", "without-weights"])
def test_fetch_keeps_the_files_of_a_run_that_is_further_here(
    trained: InProcess, tmp_path: Path, weights: list[str]
) -> None:
    here = InProcess(shutil.copytree(trained.path, tmp_path / "home", symlinks=True))
    here.add_run(**SETTINGS | {"min_train_tokens": 64 * 13})
    here.train_here("r", "--mirror", "none")
    run = RunDirectory(here.runs / "r")
    kept = {path: path.read_bytes() for path in (run.summary, run.metrics)}
    here.script("mirror.py", "fetch", url(trained), "r", *weights)
    assert {path: path.read_bytes() for path in kept} == kept


def test_fetch_without_weights_brings_the_rest_of_the_metrics(tmp_path: Path, here: InProcess) -> None:
    """A checkpoint of an earlier step is here, and a line that followed it on a machine that was lost, which the next
    machine has written anew. Metrics that do not begin as those in the mirror stay, with a note."""
    away = add_machine(tmp_path, "away", **STOP)
    away.train_here()
    here.script("mirror.py", "fetch", url(away), "r")
    with (here.runs / "r" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(away.runs / "r")[-1] | {"seconds": 1e6}) + "\n")
    away.add_run(**SETTINGS, mirror=url(away))
    away.train_here()
    assert "note" not in here.script("mirror.py", "fetch", url(away), "r", "--without-weights").stderr
    assert metrics(here.runs / "r") == metrics(away.runs / "r")
    own = here.runs / "r" / "metrics.jsonl"
    own.write_text("mine\n")
    noted = here.script("mirror.py", "fetch", url(away), "r", "--without-weights").stderr
    assert noted == "note: runs/r/metrics.jsonl: kept, because the mirror's metrics do not begin with its lines\n"
    assert own.read_text() == "mine\n"


@pytest.mark.parametrize("command", ["fetch", "follow"])
def test_a_run_that_is_not_in_the_mirror_is_refused(trained: InProcess, here: InProcess, command: str) -> None:
    here.command("mirror.py", command, url(trained), "q").refuses("no such run")
    assert not list(here.runs.iterdir())


def test_follow(trained: InProcess, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come as the metrics grow, and the command ends with the run."""
    monkeypatch.setattr(home, "POLL_SECONDS", 0.01)
    content = (store / "r" / "metrics.jsonl").read_bytes()
    (store / "r" / "metrics.jsonl").write_bytes(content[: len(content) // 2])
    (store / "r" / "owner.json").write_text(json.dumps({"host": "box", "id": "x", "heard": 1e12}))
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(home.follow_run(f"file://{store}", "r")))
    thread.start()
    (store / "r" / "more").write_bytes(content)
    (store / "r" / "more").rename(store / "r" / "metrics.jsonl")  # whole at once, as uploads are
    (store / "r" / "owner.json").unlink()
    thread.join(20)
    events = [event for event in metrics(trained.runs / "r") if event["event"] in ("train", "validation")]
    losses = [f"{event['loss']:.3f}" for event in events]
    assert [line.split("loss ")[1].split()[0] for line in lines[:-1]] == losses
    assert lines[-1] == "no machine trains this run now"


def test_follow_a_run_that_goes_back_and_gets_further_between_two_looks(
    trained: InProcess, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (store / "r" / "owner.json").write_text(json.dumps({"host": "box", "id": "x", "heard": time.time()}))
    path = store / "r" / "metrics.jsonl"
    first, *_ = losses = [event for event in metrics(trained.runs / "r") if event["event"] == "train"]
    path.write_text("".join(f"{json.dumps(event)}\n" for event in losses[:2]))

    def train_anew(_: float) -> None:
        path.write_text("".join(f"{json.dumps(event | {'loss': 1.0})}\n" for event in losses))
        (store / "r" / "owner.json").unlink()

    monkeypatch.setattr("harness.mirror.home.time.sleep", train_anew)
    lines = list(home.follow_run(f"file://{store}", "r"))
    assert lines[2] == "the run has gone back to an earlier step:"
    assert lines[3].startswith(f"global step {first['global_step']}  loss 1.000")
    assert len(lines) == 2 + 1 + len(losses) + 1


@pytest.mark.parametrize("is_alive", [True, False])
def test_follow_a_machine_whose_clock_is_slow(store: Path, monkeypatch: pytest.MonkeyPatch, is_alive: bool) -> None:
    monkeypatch.setattr(home, "REFRESH_SECONDS", 1.0)
    monkeypatch.setattr(home, "POLL_SECONDS", 0.01)
    owner = store / "r" / "owner.json"
    owner.write_text(json.dumps({"host": "box", "id": "x", "heard": 0.0}))
    lines: list[str] = []
    thread = threading.Thread(target=lambda: lines.extend(home.follow_run(f"file://{store}", "r")))
    thread.start()
    for number in range(30 if is_alive else 0):
        thread.join(0.1)
        (store / "new").write_text(json.dumps({"host": "box", "id": "x", "heard": number}))
        (store / "new").rename(owner)
    if is_alive:
        assert thread.is_alive()
        owner.unlink()
    thread.join(20)
    assert ("no machine trains" if is_alive else '"box" has been silent for') in lines[-1]


def test_push_a_run_that_had_no_mirror(tmp_path: Path, here: InProcess) -> None:
    machine = add_machine(tmp_path, "first", mirror=None)
    machine.train_here()
    store = f"file://{tmp_path}/store"
    assert "complete" in machine.script("mirror.py", "push", "r", store).stdout
    here.script("mirror.py", "fetch", store, "r")
    assert_same_end(machine.runs / "r", here.runs / "r")
    older = add_machine(tmp_path, "older", min_train_tokens=64 * 3, mirror=None)
    older.train_here()
    older.command("mirror.py", "push", "r", store).refuses("which is newer")


def test_push_sends_again_what_the_mirror_has_lost_or_has_otherwise(tmp_path: Path, here: InProcess) -> None:
    """A checkpoint is whole in a mirror if each file is there as it is here, also if its meta.json is there."""
    machine, other = (add_machine(tmp_path, name, mirror=None) for name in ("first", "other"))
    machine.add_run("r", learning_rate=0.01, min_train_tokens=64 * 3)
    other.add_run("r", learning_rate=0.02, min_train_tokens=64 * 3)
    for each in (other, machine):  # the second push finds checkpoints of the same names and sizes
        each.train_here()
        each.script("mirror.py", "push", "r", f"file://{tmp_path}/store")
    lost = remote(machine) / "checkpoints" / names(machine.runs / "r")[-1] / "model.safetensors"
    assert lost.read_bytes() == (machine.runs / "r" / lost.relative_to(remote(machine))).read_bytes()
    lost.unlink()
    machine.script("mirror.py", "push", "r", f"file://{tmp_path}/store")
    here.script("mirror.py", "fetch", f"file://{tmp_path}/store", "r")
    assert_same_end(machine.runs / "r", here.runs / "r")


def test_another_experiment_is_noticed_if_an_editor_has_written_a_byte_order_mark(tmp_path: Path) -> None:
    first, second = (add_machine(tmp_path, name, mirror=None) for name in ("first", "second"))
    for machine, seed in ((first, 1), (second, 2)):
        train_json = machine.add_run("r", random_seed=seed, min_train_tokens=64) / "train.json"
        train_json.write_bytes(codecs.BOM_UTF8 + train_json.read_bytes())
        machine.train_here()
    place = f"file://{tmp_path}/store"
    first.script("mirror.py", "push", "r", place)
    second.command("mirror.py", "push", "r", place).refuses("holds another experiment: train.json: random_seed")


def test_another_experiment_is_neither_sent_nor_fetched(trained: InProcess, here: InProcess) -> None:
    here.script("mirror.py", "fetch", url(trained), "r", "--without-weights")
    path = here.runs / "r" / "model.json"
    model = json.loads(path.read_text())
    path.write_text(json.dumps(model | {"n_layers": model["n_layers"] + 1}))
    before = {path: path.read_bytes() for path in remote(trained).rglob("*") if path.is_file()}
    for words in (["push", "r", url(trained)], ["fetch", url(trained), "r"]):
        here.command("mirror.py", *words).refuses("holds another experiment")
    assert before == {path: path.read_bytes() for path in remote(trained).rglob("*") if path.is_file()}
    assert not (here.runs / "r" / "checkpoints").exists()
