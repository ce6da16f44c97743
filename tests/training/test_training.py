"""The real training command, end to end, on two gloo ranks."""

from __future__ import annotations

import json
import math
import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from harness.common.messages import amount_text
from harness.common.program import program_commit
from harness.model.precision import Precision
from tests.support.in_process import InProcess
from tests.support.launch import ROOT, Result, Workshop, finish, meta_of, metrics, summary_of
from tests.support.straight import FAULTS

STEPS = 10  # 1,280 tokens in global batches of 2 ranks x 2 sequences x 2 accumulation steps x 16 tokens

SETTINGS: dict[str, Any] = {
    "price_per_hour": 7.2,
    "clipping_max_norm": 1.0,
    "learning_rate": 0.01,
    "lr_schedule": "cosine",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[InProcess, Path, Result]:
    shop = InProcess(tmp_path_factory.mktemp("training"))
    shop.add_dataset()
    run = shop.add_run(**SETTINGS)
    return shop, run, replace(shop, draws=True).torchrun()


def test_every_report_is_there_and_strict_json(trained: tuple[InProcess, Path, Result]) -> None:
    _, run, _ = trained
    events = metrics(run)
    kinds = ("train", "validation", "checkpoint")
    steps = {kind: [event["global_step"] for event in metrics(run, kind)] for kind in kinds}
    # Train events come every third step and with every validation. Validations come every fifth step and at the last.
    assert steps == {"train": [0, 3, 5, 6, 9], "validation": [0, 5, 9], "checkpoint": [0, 5, 9]}
    for event in events:
        assert event["tokens_seen"] == (event["global_step"] + 1) * 128
        assert event["seconds"] > 0
    train = metrics(run, "train")
    assert all(event["loss_min"] <= event["loss"] <= event["loss_max"] for event in train)
    assert train[-1]["learning_rate"] == pytest.approx(0.001)


def test_it_learns(trained: tuple[InProcess, Path, Result]) -> None:
    losses = [event["loss"] for event in metrics(trained[1], "validation")]
    assert losses[0] == pytest.approx(math.log(64), rel=0.05)
    assert losses[-1] < losses[0] - 0.2


def test_checkpoints_chart_and_links(trained: tuple[InProcess, Path, Result]) -> None:
    _, run, _ = trained
    folders = sorted(path.name for path in (run / "checkpoints").iterdir() if not path.is_symlink())
    assert [re.fullmatch(r"\d{8}Z\d{6}-iteration-(\d+)", name).group(1) for name in folders] == ["0", "5", "9"]  # type: ignore[union-attr]
    assert (run / "checkpoints" / "latest").readlink() == Path(folders[-1])
    assert (run / "checkpoints" / "best").readlink() == Path(folders[-1])
    meta = json.loads((run / "checkpoints" / "best" / "meta.json").read_text())
    assert meta["is_best"]
    assert meta["global_step"] == 9
    with safe_open(run / "checkpoints" / "best" / "model.safetensors", "pt") as file:
        assert "trf_blocks.1.att.W_query.weight" in file.keys()  # noqa: SIM118
        assert not any(name.startswith(("module.", "_orig_mod.")) for name in file.keys())  # noqa: SIM118
    assert (run / "training-run-chart.png").read_bytes().startswith(b"\x89PNG")


def test_summary_and_what_is_printed(trained: tuple[InProcess, Path, Result]) -> None:
    _, run, result = trained
    summary = summary_of(run)
    assert summary["tokens_seen"] == STEPS * 128
    assert summary["world_size"] == 2
    seconds = summary["seconds"]
    assert seconds["total"] == pytest.approx(sum(seconds[phase] for phase in seconds if phase != "total"), abs=0.01)
    assert summary["dollars"]["training"] == pytest.approx(seconds["training"] * 0.002, abs=1e-4)
    assert f"Final validation loss: {summary['final_validation_loss']:.3f}" in result.stdout
    total, setup = (amount_text(summary["dollars"][phase]) for phase in ("total", "setup"))
    assert f"Cost: ${total} (setup ${setup}, " in result.stdout
    assert result.stdout.count("Training complete") == 1  # only rank 0 prints
    last = metrics(run, "train")[-1]
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("global step 9/9  loss ")]
    assert f" lr {last['learning_rate']:.2g} left 00:00 $ " in line
    assert line.endswith(f" norm {last['gradient_norm']:.2f}")


@pytest.mark.parametrize("interval", [2, 8])
def test_the_final_loss_is_that_of_the_last_report(shop: Workshop, interval: int) -> None:
    """It is not the mean since the checkpoint before."""
    unvalidated = dict.fromkeys(("validation_interval", "validation_batches", "start_val_token"))
    run = shop.add_run(f"every{interval}", **unvalidated, checkpoint_interval=interval, min_train_tokens=64 * 9)
    result = shop.attempt(run=run.name)
    assert result.status == 0, result
    last = metrics(run, "train")[-1]["loss"]
    assert summary_of(run)["final_train_loss"] == last
    assert f"Final train loss: {last:.3f}\n" in result.stdout


def test_the_time_left_does_not_count_the_first_validation_again(shop: Workshop) -> None:
    """On a GPU the first validation compiles for half a minute. If that counted for all steps to come, a run of ten
    minutes would seem to need hours, and hundreds of dollars. Here it would seem to need a minute more."""
    shop.add_run("r", train_steps=40, min_train_tokens=None, validation_interval=100, report_interval=1)
    stdout = shop.train("r", ranks=1, prelude=f"{FAULTS}before(VALIDATION, pause(3), step=0)").stdout
    left = [60 * int(minutes) + int(seconds) for minutes, seconds in re.findall(r"tps.* left (\d\d):(\d\d)", stdout)]
    assert len(left) == 40
    assert max(left[1:10]) < 12, left


def test_a_finished_run_says_so_and_changes_nothing(trained: tuple[InProcess, Path, Result]) -> None:
    shop, run, _ = trained

    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}

    before = times()
    assert "r is finished: 10 global steps" in shop.train_here().stdout
    assert times() == before


def test_one_process_without_torchrun(shop: Workshop) -> None:
    run = shop.add_run(validation_interval=None, validation_batches=None, start_val_token=None, checkpoint_interval=4)
    rising = "around(FORWARD, lambda original, *a: original(*a) * (1 + Now.step))\n"  # losses rise from the first step
    minutes = "clock = time.perf_counter; time.perf_counter = lambda: clock() + 60 * max(0, Now.step)\n"
    result = shop.train(ranks=1, prelude=f"import time\n{FAULTS}" + rising + minutes)
    assert re.search(r"^global step 9/19  loss .* left 10:\d\d norm ", result.stdout, re.MULTILINE), result.stdout
    saved = metrics(run, "checkpoint")
    assert [event["global_step"] for event in saved] == [0, 4, 8, 12, 16, 19]
    assert all(event["is_best"] for event in saved)
    best, latest = ((run / "checkpoints" / link).resolve() for link in ("best", "latest"))
    assert best == latest
    meta = json.loads((latest / "meta.json").read_text())
    assert (meta["best_step"], meta["best_loss"], meta["val_loss"]) == (19, None, None)
    assert "Best loss" not in result.stdout


def test_checkpoints_and_summary_say_what_was_run_and_by_which_program(trained: tuple[InProcess, Path, Result]) -> None:
    """meta.json and summary.json record all settings, defaults included, and the precision, versions, commit, device
    and seed."""
    _, run, result = trained
    meta = meta_of(run)
    name = Precision.for_training("auto", torch.device("cpu")).name
    assert f"2 x cpu, {name}, " in result.stdout
    assert meta["train"]["precision"] == "auto"
    for record in (meta, summary_of(run)):
        assert record["versions"]["torch"] == record["torch"] == torch.__version__
        assert record["versions"]["python"] == platform.python_version()
        assert {"numpy", "safetensors", "pydantic"} <= record["versions"].keys()
        assert record["commit"] == program_commit()
        assert record["device"].endswith(" CPU")
        assert record["precision"] == name
        assert record["train"]["random_seed"] == 42
        assert {"eps", "warmup_steps", "scale_with_batch", "train_steps"} <= record["train"].keys()
        assert {"norm", "n_kv_heads"} <= record["model"].keys()
        assert not {"budget", "scaled"} & record.keys()


# Removes what only Linux has and training might use: functions of `os`, and files in /proc and /sys.
LIKE_MACOS = """
import builtins, io, os, sys
sys.platform = "darwin"
for name in ("sched_getaffinity", "sched_setaffinity", "copy_file_range", "memfd_create", "posix_fadvise", "splice"):
    delattr(os, name)
opened = io.open
def open_here(file, *options, **named):
    if str(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return opened(file, *options, **named)
builtins.open = io.open = open_here
"""


@pytest.mark.slow
def test_training_and_measuring_without_what_only_linux_has(shop: Workshop) -> None:
    run = shop.add_run(min_train_tokens=256)
    replace(shop, draws=True).train(ranks=1, prelude=LIKE_MACOS)
    assert summary_of(run)["global_steps"] == 4
    files = [str(run / "model.json"), str(run / "checkpoints" / "best" / "model.safetensors")]
    command = [str(ROOT / "test_loss.py"), str(shop.datasets), *files]
    assert "Loss on the test split" in finish([shop.fork(command, {}, LIKE_MACOS)], expect=0, timeout=60).stdout
