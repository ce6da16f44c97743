"""bench/on_gpu.py without a GPU: its stages run with tiny shapes, a second call skips finished stages, and the tables
have all rows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bench.gpu import kernels
from bench.gpu.workbench import Row, Workbench
from bench.on_gpu import LIMIT_SECONDS, main
from harness.runs.train_config import TrainConfig
from tests.support.launch import ROOT
from tests.support.warm import FORK_PYTHONS, warm_server

SESSION_SECONDS = 600
REHEARSED = ("step", "search", "stop-and-continue", "saving")  # the other stages start the same kinds of processes


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "work", tmp_path / "out" / "results.json", tiny=True)


def rows_of(bench: Workbench, stage: str) -> list[Row]:
    return [row for row in bench.rows() if row["stage"] == stage]


@pytest.mark.parametrize("stage", LIMIT_SECONDS)
def test_every_stage_of_the_session_can_be_read(stage: str) -> None:
    options = main.make_context("on_gpu.py", stage.split()).params
    settings = {key: json.loads(value) for key, _, value in (each.partition("=") for each in options["settings"])}
    needed = {"dataset": "a/b", "microbatch_size": 1, "train_steps": 1, "start_train_token": 0}
    TrainConfig.model_validate({**needed, "checkpoint_interval": 1, **settings})


def test_kernels(bench: Workbench) -> None:
    for measure in (kernels.measure_machine, kernels.measure_ceilings, kernels.measure_attention, kernels.measure_loss):
        measure(bench)
    assert rows_of(bench, "machine")[0]["device"] == "CPU"
    products = [row["product"] for row in rows_of(bench, "gemm")]
    assert products == ["qkv", "out", "fc1", "fc2", "head", "head, whole tiles"]
    assert all(row["forward_tflops"] > 0 for row in rows_of(bench, "gemm"))
    attention = {(row["backend"], row["drop_rate"]): row for row in rows_of(bench, "attention")}
    assert attention["default", 0.0]["dropped"] == 0
    assert attention["default", 0.1]["dropped"] == pytest.approx(0.1, abs=0.02)
    assert "refused" in attention["cudnn", 0.0]
    assert {row["kind"] for row in rows_of(bench, "loss")} == {"ours", "torch"}


def test_the_tables_have_all_rows(bench: Workbench) -> None:
    bench.add("step", microbatch=64, tokens_per_s=440123.4)
    bench.add("kernels", ms_per_step={"products": 1.5, "other": 0.5})
    bench.add("step", microbatch=32, settings="a|b\nc", mfu=None)
    assert json.loads(bench.out.read_text())["rows"][0] == {"stage": "step", "microbatch": 64, "tokens_per_s": 440120.0}
    assert bench.write_tables().read_text().splitlines()[2:] == [
        *("## step", "", "| microbatch | tokens_per_s | settings | mfu |", "|---|---|---|---|"),
        *("| 64 | 440,120.0 |  |  |", "| 32 |  | a\\|b c |  |", ""),
        *("## kernels", "", "| ms_per_step |", "|---|", "| products 1.5, other 0.5 |"),
    ]


@pytest.mark.slow
@pytest.mark.timeout(SESSION_SECONDS)
def test_a_rehearsal(bench: Workbench, tmp_path: Path) -> None:
    """A call of bench/on_gpu.py runs the stages that earlier calls have not finished, with the same commands as on a
    GPU but tiny shapes. Each process is forked from the one that starts it, so that torch is not imported again."""
    for stage in LIMIT_SECONDS:
        if stage not in REHEARSED:
            bench.add("stages", what=stage, status=0, seconds=1.0)
    command = [str(ROOT / "bench" / "on_gpu.py"), "--tiny", "--seconds", str(SESSION_SECONDS)]
    command += ["--out", str(bench.out), "--work", str(bench.work)]
    process = warm_server().spawn(command, tmp_path, os.environ | {"OMP_NUM_THREADS": "1"}, FORK_PYTHONS)
    assert process.wait(SESSION_SECONDS) == 0, process.communicate(1)
    assert [(row["what"], row["status"]) for row in rows_of(bench, "stages")[-4:]] == [(each, 0) for each in REHEARSED]
    (step,) = rows_of(bench, "step")
    assert (step["status"], step["microbatch"]) == (0, 4)
    assert step["tokens_per_second"] > 0
    assert rows_of(bench, "search")[0]["error"] is None
    assert [row["status"] for row in rows_of(bench, "trained")] == [0, 2], "there is no data for a tenth more"
    (continued,) = rows_of(bench, "stop and continue")
    assert continued["stopped"]
    assert continued["same_bits"]
    assert all(row["status"] == 0 and row["seconds"] for row in rows_of(bench, "saving"))
    assert "## step" in bench.out.with_suffix(".md").read_text()
