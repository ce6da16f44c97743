"""The real ddp_train.py on the null device: -f, evaluations, saving, stopping, resuming, and running out of memory."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.nullcuda.device import environment, why_not
from tests.support.isolation import ROOT
from tests.support.launch import Workshop, metrics

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=why_not() or ""), pytest.mark.slow]

SETTINGS: dict[str, Any] = {"compile": False, "checkpoint_interval": 5, "async_checkpoint": True, "precision": "bf16"}


def start(shop: Workshop, *options: str, gib: float = 8.0) -> subprocess.Popen[str]:
    """Start training the run "r" of the workshop on a null device of `gib` GiB."""
    command = [sys.executable, "-m", "tests.nullcuda.command", "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *options], env=environment(gib=gib), cwd=ROOT, **pipes)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset(tokens=80_000)
    return made


def test_a_run_is_stopped_and_resumed(shop: Workshop) -> None:
    run = shop.add_run("r", **SETTINGS, min_train_tokens=64_000, report_interval=1)
    process = start(shop)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("global step 7/"):
            process.send_signal(signal.SIGTERM)
            break
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    assert "Traceback" not in stderr
    steps = [event["global_step"] for event in metrics(run) if event["event"] == "train"]
    assert steps[-1] >= 7
    shop.add_run("r", **SETTINGS, min_train_tokens=64 * (steps[-1] + 4), report_interval=1)
    stdout, stderr = start(shop).communicate(timeout=120)
    assert "continuing from" in stdout, stderr
    assert "Training complete" in stdout
    again = [event["global_step"] for event in metrics(run) if event["event"] == "train"]
    assert again[: len(steps)] == steps
    assert again == [*range(again[-1] + 1)]


def test_out_of_memory_is_one_line(shop: Workshop) -> None:
    shop.add_run("r", model={"emb_dim": 2048, "n_layers": 4}, **SETTINGS)
    process = start(shop, gib=3.0)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "memory" in line
    assert "Traceback" not in stderr


def on_ranks(shop: Workshop, *commands: str, gib: float) -> list[dict[str, Any]]:
    """Run ddp_train.py as rank 0 of eight with each of these commands in turn. Returns what tests/nullcuda/ranks.py
    prints of each."""
    words = " then ".join(f"{each} --runs-dir {shop.runs}" for each in commands).split()
    command = [sys.executable, "-m", "tests.nullcuda.ranks", "8", *words]
    done = subprocess.run(command, env=environment(gib=gib), cwd=ROOT, capture_output=True, text=True, timeout=280)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"status"')]
    assert len(found) == len(commands), done.stderr
    assert "Traceback" not in done.stderr
    return found


def test_the_microbatch_that_f_finds_trains_on_eight_ranks(tmp_path: Path) -> None:
    """The answer of -f, whose gradients are in no buckets, holds for training by DistributedDataParallel with
    validation, samples and checkpoints. A microbatch that is 5 % larger does not fit. After the first step no step
    waits or keeps more memory."""
    shop = Workshop(tmp_path)
    folder = shop.add_dataset(tokens=3_000_000)
    shutil.copyfile(folder / "train.safetensors", folder / "validation.safetensors")
    settings = {"dataset": "local/letters", "compile": False, "validation_batches": 8, "validation_interval": 2}
    settings |= {"sample_interval": 2, "sample_prompt": "a", "warmup_steps": 1, "min_train_tokens": 800_000}
    run = shop.add_shipped_run("8xh100m80-fast", **settings)
    model = json.loads((run / "model.json").read_text())
    (run / "model.json").write_text(json.dumps(model | {"n_layers": 2, "value_embeddings": 1}))
    training = f"{run.name} {shop.datasets}"
    search, trained = on_ranks(shop, f"{training} -f --write", training, gib=10)
    assert (search["status"], trained["status"]) == (0, 0)
    later = trained["steps"][1:]
    assert len(later) > 2
    assert {(each["waits"], each["compiled"], each["allocated"]) for each in later} == {(0, 0, later[0]["allocated"])}
    events = [event["event"] for event in metrics(run)]
    assert {"train", "validation", "sample", "checkpoint"} <= set(events)
    found = json.loads((run / "train.json").read_text())["microbatch_size"]
    shop.add_shipped_run(run.name, **settings, microbatch_size=math.ceil(found * 1.05))
    (run / "model.json").write_text(json.dumps(model | {"n_layers": 2, "value_embeddings": 1}))
    (larger,) = on_ranks(shop, f"{training} --restart", gib=10)
    assert larger["status"] == 1, "out of memory"
