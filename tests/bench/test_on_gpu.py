"""bench/on_gpu.py without a GPU: its stages run with tiny shapes, a second call repeats only what failed, nothing is
left running, and the tables have all rows."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import click
import psutil  # type: ignore[import-untyped]
import pytest

from bench import on_gpu
from bench.gpu import kernels, training
from bench.gpu.only_rank import OnlyRank
from bench.gpu.workbench import Row, Workbench
from bench.on_gpu import LIMIT_SECONDS, MODULES, main, measured_rows
from harness.common.json_files import read_json_object
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig
from tests.support.isolation import ROOT, SHIPPED_RUNS
from tests.support.launch import PATIENCE_SECONDS, wait_until
from tests.support.warm import FORK_PYTHONS, WarmProcess, warm_server

# The other stages start the same kinds of processes.
REHEARSED = ("step --fast --ddp", "search", "continue", "saving")
ENDING_SECONDS = 20  # for processes that end within two seconds on an idle machine


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(SHIPPED_RUNS, tmp_path / "work", tmp_path / "out" / "results.json", tiny=True)


def rows_of(bench: Workbench, table: str) -> list[Row]:
    return [row for row in bench.rows() if row["table"] == table]


def start(bench: Workbench, *options: str) -> WarmProcess:
    """Start the command. Each of its processes is forked from the one that starts it, so that torch is not imported
    again."""
    command = [
        str(ROOT / "bench" / "on_gpu.py"),
        "--tiny",
        "--out",
        str(bench.out),
        "--runs-dir",
        str(SHIPPED_RUNS),
        *options,
    ]
    return warm_server().spawn(command, ROOT, {**os.environ}, FORK_PYTHONS)


@pytest.mark.parametrize("stage", LIMIT_SECONDS)
def test_every_stage_can_be_read(stage: str, bench: Workbench) -> None:
    name, *options = stage.split()
    assert name in MODULES
    if name == "step":
        given = training.step.make_context("step", options).params
        bench.add_run("r", given["model"], given["train"], fast=given["fast"])
        for kind, config in (("model", ModelConfig), ("train", TrainConfig)):
            config.model_validate_json((bench.runs / "r" / f"{kind}.json").read_text())


def test_all_stages_take_less_than_half_an_hour() -> None:
    seconds = main.make_context("on_gpu.py", []).params["seconds"]
    assert sum(LIMIT_SECONDS.values()) <= seconds < 1800


@pytest.mark.parametrize(
    ("gpu", "runs"),
    [("NVIDIA A100-SXM4-40GB", ("8xa100m40", "8xh100m80-fast")), ("NVIDIA L4", ("8xh100m80", "8xh100m80-fast"))],
)
def test_the_shipped_runs_for_the_gpu(gpu: str, runs: tuple[str, str], bench: Workbench) -> None:
    """A run has the model, optimizer and microbatch of the shipped one for this kind of GPU, or of an H100's."""
    large = replace(bench, tiny=False)
    large.add("machine", device=gpu)
    for fast, run in zip((False, True), runs, strict=True):
        large.add_run("r", {}, {}, fast=fast)
        model, train = (read_json_object(large.runs / "r" / f"{kind}.json") for kind in ("model", "train"))
        assert model == read_json_object(SHIPPED_RUNS / run / "model.json")
        shipped = read_json_object(SHIPPED_RUNS / run / "train.json")
        changed = {key for key in {*train, *shipped} if train.get(key) != shipped.get(key)}
        assert changed.isdisjoint({"microbatch_size", "optimizer", "learning_rate", "shard_optimizer", "precision"})
        assert ("muon" in train.values()) == fast


@pytest.mark.slow
def test_kernels(bench: Workbench) -> None:
    for measure in (kernels.measure_machine, kernels.measure_attention, kernels.measure_loss, kernels.measure_nanogpt):
        measure(bench)
    assert rows_of(bench, "machine")[0]["device"] == "CPU"
    assert [row["bytes"] for row in rows_of(bench, "all-reduce")] == [4, 25 * 2**20, 2**20]
    attention = {(row["backend"], row["drop_rate"]): row for row in rows_of(bench, "attention")}
    assert attention["default", 0.0]["dropped"] == 0
    assert attention["default", 0.1]["dropped"] == pytest.approx(0.1, abs=0.02)
    assert "refused" in attention["cudnn", 0.0]
    assert len(rows_of(bench, "loss")) == 2
    assert all(row["ms"] > 0 for table in ("all-reduce", "loss", "nanogpt") for row in rows_of(bench, table))


def test_the_only_rank_counts_as_several() -> None:
    """The number of ranks is 1 in arithmetic and in files, and not 1 where code compares it with 1."""
    size = OnlyRank(1)
    others = [1]
    assert size > 1
    assert (size == 1, size == OnlyRank(1), size > 2) == (False, True, False)
    assert (len(others) != size) is False, "a checkpoint has the states of as many ranks"
    assert (8 // size, json.dumps(size), [0.0] * size, list(range(size))) == (8, "1", [0.0], [0])


def test_the_tables_have_all_rows(bench: Workbench) -> None:
    bench.add("step", microbatch=64, tokens_per_s=440123.4)
    bench.add("kernels", ms_per_step={"products": 1.5, "other": 0.5})
    bench.add("step", microbatch=32, settings="a|b\nc", mfu=None)
    first = {"table": "step", "stage": "", "microbatch": 64, "tokens_per_s": 440120.0}
    assert json.loads(bench.out.read_text())["rows"][0] == first
    assert bench.write_tables().read_text().splitlines()[2:] == [
        *("## step", "", "| stage | microbatch | tokens_per_s | settings | mfu |", "|---|---|---|---|---|"),
        *("|  | 64 | 440,120.0 |  |  |", "|  | 32 |  | a\\|b c |  |", ""),
        *("## kernels", "", "| stage | ms_per_step |", "|---|---|", "|  | products 1.5, other 0.5 |"),
    ]


@pytest.mark.parametrize(
    ("gpu", "starts"),
    [
        ("NVIDIA H100 80GB HBM3", ["| 8 x H100 | 490,249 |", "| 8 x H100, `-fast` | – |"]),
        ("NVIDIA L4", ["| 1 x NVIDIA L4 | – |", "| 1 x NVIDIA L4, `-fast` | – |"]),
    ],
)
def test_the_rows_for_the_documents(gpu: str, starts: list[str], bench: Workbench) -> None:
    """The table of docs/performance.md gets the measured speeds of this GPU's rows, or rows for a GPU without any."""
    bench.add("machine", device=gpu)
    for stage, speed in (("step --ddp", 391_234.0), ("step --fast --ddp", 352_000.0), ("step", 1.0)):
        replace(bench, stage=stage).add("step", tokens_per_second=speed)
    rows = measured_rows(bench)
    assert [row.startswith(start) for row, start in zip(rows, starts, strict=True)] == [True, True], rows
    assert [row.split("|")[-2] for row in rows] == [" 391.2k ", " 352k "]
    header = next(line for line in (ROOT / "docs" / "performance.md").read_text().splitlines() if "notebook |" in line)
    assert {row.count("|") for row in rows} == {header.count("|")}


@pytest.mark.slow
def test_a_rehearsal(bench: Workbench) -> None:
    """A call of the command runs the stages that earlier calls have not finished, and replaces their rows. It has the
    same commands as on a GPU, but tiny shapes."""
    for stage in LIMIT_SECONDS:
        own = replace(bench, stage=stage)
        own.add("step", error="from an earlier call")
        own.add("stages", status=1 if stage in REHEARSED else 0, seconds=1.0)
    process = start(bench)
    assert process.wait(PATIENCE_SECONDS) == 0, process.communicate(1)
    assert [(row["stage"], row["status"]) for row in rows_of(bench, "stages")[-4:]] == [(each, 0) for each in REHEARSED]
    (step,) = [row for row in rows_of(bench, "step") if row["stage"] == REHEARSED[0]]
    assert (step["status"], step["microbatch_size"]) == (0, 4)
    assert step["tokens_per_second"] > 0
    assert rows_of(bench, "search")[0]["error"] is None
    assert [row["status"] for row in rows_of(bench, "trained")] == [0, 2], "there is no data for a tenth more"
    ends = {row["what"]: row for row in rows_of(bench, "continue")}
    assert {what: row["statuses"] for what, row in ends.items()} == {
        "whole": [0],
        "killed": [-signal.SIGKILL, 0],
        "stopped": [128 + signal.SIGTERM, 0],
    }
    assert all(row["same_bits"] for row in ends.values())
    assert all(len(ends[what]["continued"]) == 1 for what in ("killed", "stopped"))
    assert [row["after_step"] for row in rows_of(bench, "checkpoint")] == [0, 12, 24]
    assert "## step" in bench.out.with_suffix(".md").read_text()
    assert not list(bench.out.parent.glob("on_gpu-*")), "no run is left"


def test_a_stage_that_fails_or_is_late(bench: Workbench) -> None:
    """A stage whose training fails is a failed stage, and one that takes too long is stopped."""
    assert start(bench, "step --set nonsense=1").wait(PATIENCE_SECONDS) == 1
    assert start(bench, "saving", "--seconds", "0").wait(PATIENCE_SECONDS) == 1
    # the first call has also measured the machine
    assert [row["status"] for row in rows_of(bench, "stages")] == [0, 1, "stopped after 0 s"]
    assert "nonsense" in rows_of(bench, "step")[0]["error"]
    assert start(bench, "nonsense").wait(PATIENCE_SECONDS) == 2


def repeat_finished(bench: Workbench, monkeypatch: pytest.MonkeyPatch, *, measured: str, driver: list[str]) -> None:
    """Call the command, with the GPUs that the driver names, when all stages have succeeded on the GPU `measured`.
    Assert that no row changes."""
    bench.add("machine", device=measured)
    for stage in LIMIT_SECONDS:
        replace(bench, stage=stage).add("stages", status=0, seconds=1.0)
    before, handler = bench.rows(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(on_gpu, "gpu_names", lambda: driver)
    try:
        main.main(["--out", str(bench.out)], standalone_mode=False)
    finally:
        signal.signal(signal.SIGTERM, handler)
        assert bench.rows() == before


@pytest.mark.parametrize("here", ["NVIDIA H100 80GB HBM3", "NVIDIA A10"])
def test_results_of_another_gpu_are_not_taken_for_this_ones(
    here: str, bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(click.UsageError, match=f"has the results of NVIDIA A100-SXM4-40GB, not of {here}"):
        repeat_finished(bench, monkeypatch, measured="NVIDIA A100-SXM4-40GB", driver=[here])


@pytest.mark.parametrize(
    ("measured", "driver"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", ["NVIDIA A100-SXM4-40GB"]),
        ("NVIDIA H200", ["NVIDIA L4", "NVIDIA H200"]),
    ],
)
def test_results_of_a_part_or_the_second_of_the_gpus_are_this_machines(
    measured: str, driver: list[str], bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch, but not the driver, names the part of a GPU (MIG), and may count the fastest GPU first."""
    with pytest.raises(SystemExit, match=r"^0$"):
        repeat_finished(bench, monkeypatch, measured=measured, driver=driver)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM))],
)
def test_nothing_is_left_running(number: signal.Signals, bench: Workbench) -> None:
    """When a signal ends the command, so do the stage that it has started and the training that the stage has started,
    even if the command cannot tell them."""
    process = start(bench, "continue")
    wait_until(lambda: list(bench.out.parent.glob("on_gpu-*/runs/*/metrics.jsonl")), process)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(number)
    assert process.wait(PATIENCE_SECONDS) != 0
    assert psutil.wait_procs(started, ENDING_SECONDS)[1] == []
    if number != signal.SIGKILL:
        assert not list(bench.out.parent.glob("on_gpu-*")), "no run is left"
