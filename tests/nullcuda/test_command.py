"""The real ddp_train.py on the null device: saving, stopping, resuming, and running out of memory."""

from __future__ import annotations

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
