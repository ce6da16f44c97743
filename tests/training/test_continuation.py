"""A run that stopped and went on is the run that never stopped: bit for bit, through the real command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.runs.checkpoints import list_checkpoints
from tests.support.launch import Process, Workshop, finish, metrics
from tests.support.same_end import assert_same_end

# Dropout 0.1 and accumulation 2 come from the launcher's defaults.
COMMON: dict[str, Any] = {
    "min_train_tokens": 2560,  # 20 global steps on two ranks
    "learning_rate": 0.01,
    "lr_schedule": "cosine",
    "warmup_steps": 4,
    "clipping_max_norm": 0.5,
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("continuation"))
    shop.add_dataset(tokens=40_000)
    return shop


def stop_after(shop: Workshop, name: str, step: int, number: signal.Signals = signal.SIGTERM) -> Sequence[Process]:
    """Start a run and send rank 0 a signal once its metrics have reached a step."""
    processes = shop.start(name)
    path = shop.runs / name / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while f'"global_step": {step},' not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, finish(processes, expect=None, timeout=10)
        assert processes[0].poll() is None, finish(processes, expect=None, timeout=10)
        time.sleep(0.002)
    os.kill(processes[0].pid, number)
    return processes


def test_continued_from_a_named_checkpoint(shop: Workshop) -> None:
    """Everything after the named checkpoint is moved aside, not deleted, and the new end is the old one."""
    run = shop.add_run("named", **COMMON)
    shop.train("named")
    shutil.copytree(run, shop.runs / "first", symlinks=True)
    old, lines = list_checkpoints(run / "checkpoints"), metrics(run)
    assert [step for step, _ in old] == [0, 5, 10, 15, 19]
    assert f"continuing from {old[1][1].name}" in shop.train("named", old[1][1].name).stdout
    aside = list((run / "aside").rglob("*-iteration-*"))
    assert sorted(path.name for path in aside) == [path.name for _, path in old[2:]]
    (tail,) = (run / "aside").rglob("metrics.jsonl")
    kept = [json.loads(line) for line in tail.read_text().splitlines()]
    # The named checkpoint's own line stays; all later ones are in the tail, and the end's summary and chart beside it.
    assert kept == [line for line in lines if line["global_step"] > 5]
    assert {path.name for path in tail.parent.iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "summary.json",
        "training-run-chart.png",
    }
    assert_same_end(shop.runs / "first", run)


def test_restart_moves_everything_aside(shop: Workshop) -> None:
    other = shop.add_run("again", **COMMON | {"min_train_tokens": 256})
    shop.train("again", ranks=1)
    files = [path for path in other.iterdir() if path.is_file() and path.suffix != ".json" and path.name != ".lock"]
    before = {path.name: path.read_bytes() for path in files}
    shop.train("again", "--restart", ranks=1)
    (aside,) = (other / "aside").iterdir()
    assert {path.name for path in aside.iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "summary.json",
        "training-run-chart.png",
    }
    assert all((aside / name).read_bytes() == content for name, content in before.items())
    assert [step for step, _ in list_checkpoints(other / "checkpoints")] == [0, 3]


def test_another_world_goes_on_at_the_same_token(tmp_path: Path) -> None:
    """Two ranks stop, one rank with another microbatch and accumulation continues: no token twice, none left out."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=4000)
    shop.add_run(**COMMON | {"min_train_tokens": 1280, "lr_schedule": "constant"})
    shop.train(ranks=2)
    run = shop.add_run(
        **COMMON
        | {"min_train_tokens": 2000, "lr_schedule": "constant", "microbatch_size": 3, "gradient_accumulation_steps": 1}
    )
    result = shop.train(ranks=1)
    assert "train.json has changed since: microbatch_size: 2 -> 3" in result.stdout
    meta = json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())
    # 1,280 tokens in ten steps, then the smallest number of batches of 48 that reaches 2,000.
    assert meta["tokens_seen"] == 1280 + 15 * 48
    assert meta["global_step"] == 24
    assert [event["tokens_seen"] for event in metrics(run)] == sorted(event["tokens_seen"] for event in metrics(run))


def test_a_changed_model_or_dataset_is_refused(shop: Workshop) -> None:
    other = shop.add_run("changed", **COMMON | {"min_train_tokens": 256})
    shop.train("changed", ranks=1)
    shop.add_run("changed", model={"emb_dim": 32}, **COMMON | {"min_train_tokens": 256})
    result = shop.train("changed", ranks=1, expect=2)
    assert "made with another model: emb_dim: 16 -> 32" in result.stderr
    shop.add_run("changed", **COMMON | {"min_train_tokens": 256})
    second = Workshop(shop.path / "elsewhere")
    second.add_dataset(tokens=40_000, seed=1)
    (second.runs).symlink_to(shop.runs)
    result = second.train("changed", ranks=1, expect=2)
    assert "made with another dataset" in result.stderr
    assert [step for step, _ in list_checkpoints(other / "checkpoints")] == [0, 3]


def test_a_second_process_is_refused(shop: Workshop) -> None:
    """Two jobs would overwrite one another's results."""
    run = shop.add_run("twice", **COMMON | {"min_train_tokens": 128 * 300, "validation_interval": 250})
    first = stop_after(shop, "twice", 30, signal.SIGSTOP)  # frozen, not ended
    before = list_checkpoints(run / "checkpoints")
    result = shop.train("twice", ranks=1, expect=2)
    assert "is being trained by another process" in result.stderr
    assert list_checkpoints(run / "checkpoints")[: len(before)] == before
    assert not (run / "aside").exists()
    os.kill(first[0].pid, signal.SIGCONT)
    finish(first, expect=0, timeout=60)


def test_stopped_in_a_validation_and_continued(shop: Workshop) -> None:
    """A validation may outlast torchrun's patience: it is left off, and done when the run continues."""
    settings = COMMON | {"min_train_tokens": 512, "validation_interval": 2, "validation_batches": 15}
    run = shop.add_run("validating", **settings)
    slow = "import time, harness.distributed.signals as e; f = e.SharedWork.until_stopped\n"
    slow += "def g(self, i):\n    for x in f(self, i):\n        time.sleep(0.3); yield x\n"
    (process,) = shop.start("validating", ranks=1, prelude=slow + "e.SharedWork.until_stopped = g")
    path = run / "metrics.jsonl"
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.5)  # fifteen microbatches take four and a half seconds
    os.kill(process.pid, signal.SIGTERM)
    began = time.monotonic()
    finish([process], expect=128 + signal.SIGTERM, timeout=60)
    assert time.monotonic() - began < 4
    assert [event["event"] for event in metrics(run)] == ["train"]
    shop.train("validating", ranks=1)
    straight = shop.add_run("validated", **settings)
    shop.train("validated", ranks=1)
    assert_same_end(straight, run)


def test_the_best_checkpoint_stays_best_in_other_microbatches(shop: Workshop) -> None:
    """Validation is over the same text if the same tokens are cut into other microbatches."""
    slices = ({"microbatch_size": 2, "validation_batches": 4}, {"microbatch_size": 1, "validation_batches": 8})
    for tokens, rate, keys in zip((512, 1024), (0.01, 1.0), slices, strict=True):
        run = shop.add_run("sliced", min_train_tokens=tokens, learning_rate=rate, **keys)
        shop.train("sliced", ranks=1)
    best = {
        step: json.loads((path / "meta.json").read_text())["best_loss"]
        for step, path in list_checkpoints(run / "checkpoints")
    }
    later = [event for event in metrics(run) if event["event"] == "validation" and event["tokens_seen"] > 512]
    assert all(event["loss"] > best[max(best)] for event in later), "the high rate has made it worse"
