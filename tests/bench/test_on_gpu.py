"""bench/on_gpu.py without a GPU: its calls can be read, stages run at tiny shapes, tables show all rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.gpu import commands, kernels, steps
from bench.gpu.results import Results, Row
from bench.gpu.workbench import MissingKeyError, Workbench
from bench.on_gpu import CALLS, main, measure
from harness.runs.train_config import TrainConfig
from tests.support.launch import ROOT
from tests.support.warm import FORK_PYTHONS, warm_server

CALL_SECONDS = 600


@pytest.fixture(autouse=True)
def attention_as_it_was() -> Iterator[None]:
    """Stages choose kernels of their process, which here is that of other tests, too."""
    yield
    for kind in ("cudnn", "flash", "mem_efficient", "math"):
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(True)


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "work", Results(tmp_path / "out" / "results.json"), tiny=True)


def rows_of(bench: Workbench, stage: str) -> list[Row]:
    return [row for row in bench.results.rows() if row["stage"] == stage]


@pytest.mark.parametrize("call", CALLS)
def test_every_stage_of_a_call_can_be_read(call: str) -> None:
    for stage, limit in CALLS[call]:
        options = main.make_context("on_gpu.py", stage.split()).params
        assert options["what"] in {"machine", "ceilings", "attention", "loss", "step", "groups", "search", "saving"} | {
            "stop-and-continue",
            "repeat",
        }
        for setting in options["set"]:
            json.loads(setting.partition("=")[2])
        assert 0 < limit < 300


def test_results_are_kept_and_whole(bench: Workbench) -> None:
    bench.results.add("a", number=1 / 3)
    bench.results.add("b", rows=[1, 2])
    content = json.loads(bench.results.path.read_text())
    assert content == {"rows": [{"stage": "a", "number": 0.33333}, {"stage": "b", "rows": [1, 2]}]}
    assert [path.name for path in bench.results.path.parent.iterdir()] == ["results.json"]


def test_the_machine_and_its_ceilings(bench: Workbench) -> None:
    kernels.measure_machine(bench)
    kernels.measure_ceilings(bench)
    assert rows_of(bench, "machine")[0]["device"] == "CPU"
    assert [row["product"] for row in rows_of(bench, "gemm")] == ["qkv", "out", "fc1", "fc2"]
    assert all(row["forward_tflops"] > 0 for row in rows_of(bench, "gemm") + rows_of(bench, "head"))


def test_the_share_that_attention_drops() -> None:
    assert kernels.share_dropped(0.0) == 0
    assert kernels.share_dropped(0.1, heads=64) == pytest.approx(0.1, abs=0.004)


def test_a_step(bench: Workbench) -> None:
    steps.measure_step(bench, steps.StepOptions(microbatch=3, settings=(("compile", False),)))
    (row,) = rows_of(bench, "step")
    assert (row["microbatch"], row["settings"]) == (3, "compile=False")
    assert row["slowest"] <= row["tokens_per_s"] <= row["fastest"]
    assert 5 < row["loss"] < 7, "it trains, on 512 kinds of token"


def test_a_key_that_this_version_has_not(bench: Workbench) -> None:
    with pytest.raises(MissingKeyError, match=r"train\.json has no key warp_speed"):
        bench.add_run("r", {}, {"microbatch_size": 1, "warp_speed": True})


def test_the_gathered_loss_is_the_loss() -> None:
    """The reference that ours is measured against is no other one."""
    features = torch.randn(64, 32, requires_grad=True)
    weight = (torch.randn(512, 32) / 6).requires_grad_()
    targets = torch.randint(512, (64,))
    found = []
    for loss in (kernels.gathered_loss, kernels.plain_loss):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(features, weight, targets)
        gradients = torch.autograd.grad(value, (features, weight))
        found.append((value.detach(), *gradients))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=2e-4)


def test_the_tables_have_all_rows(bench: Workbench) -> None:
    bench.results.add("step", microbatch=64, tokens_per_s=440123.4)
    bench.results.add("kernels", ms_per_step={"products": 1.5, "other": 0.5})
    bench.results.add("step", microbatch=32, settings="a|b\nc", mfu=None)
    assert bench.results.write_tables().read_text().splitlines()[2:] == [
        *("## step", "", "| microbatch | tokens_per_s | settings | mfu |", "|---|---|---|---|"),
        *("| 64 | 440,120.0 |  |  |", "| 32 |  | a\\|b c |  |", ""),
        *("## kernels", "", "| ms_per_step |", "|---|", "| products 1.5, other 0.5 |"),
    ]


@pytest.mark.parametrize("stage", [stage for stage, _ in CALLS["variants"]])
def test_every_variant_of_a_step(bench: Workbench, stage: str) -> None:
    """But for those whose key this version has not, which is said."""
    options = main.make_context("on_gpu.py", stage.split()).params
    unknown = [each for each in options["set"] if each.partition("=")[0] not in TrainConfig.model_fields]
    if unknown:
        with pytest.raises(MissingKeyError):
            measure(bench, options["what"], options)
    else:
        measure(bench, options["what"], options)
        (row,) = rows_of(bench, "step")
        assert row["tokens_per_s"] > 0
        assert row["drop_rate"] == options["drop_rate"]
        assert len(options["set"]) == row["settings"].count("=") - (options["attention"] != "default")


@pytest.mark.slow
@pytest.mark.timeout(3 * CALL_SECONDS)
def test_a_rehearsal(tmp_path: Path) -> None:
    """Two calls word for word as on a GPU, but for the shapes: no stage fails, all leave rows in the one file. The
    third call has variants of one stage, tested above. Each process is forked from the one that starts it: thirty of
    them would load torch anew."""
    out = tmp_path / "results.json"
    for call in ("first", "commands"):
        command = [str(ROOT / "bench" / "on_gpu.py"), call, "--tiny", "--seconds", str(CALL_SECONDS)]
        command += ["--out", str(out), "--work", str(tmp_path / "work")]
        process = warm_server().spawn(command, tmp_path, {**os.environ}, FORK_PYTHONS)
        assert process.wait(CALL_SECONDS) == 0, process.communicate(1)
    content = json.loads(out.read_text())
    rows = content["rows"]
    assert [row for row in rows if row["stage"] == "failed"] == []
    missing = {row["what"] for row in rows if row["stage"] == "not run"}
    assert all("--set" not in what or what.split()[-1] not in TrainConfig.model_fields for what in missing)
    stages = {row["stage"] for row in rows}
    assert stages >= {"machine", "copy", "gemm", "head", "attention", "loss", "step", "syncs", "kernels", "groups"}
    assert stages >= {"search", "trained", "saving", "stop and continue", "repeat"}
    assert [row["status"] for row in rows if row["stage"] == "trained"] == [0, 2], "a tenth more has no data"
    assert all(row["same_bits"] for row in rows if row["stage"] in ("stop and continue", "repeat"))
    assert all(row["status"] == 0 and row["seconds"] for row in rows if row["stage"] == "saving")
    assert all(row["stopped"] for row in rows if row["stage"] == "stop and continue")
    assert "## step" in out.with_suffix(".md").read_text()
    assert commands.weights_hash(Workbench(tmp_path / "work", Results(out), True), "whole")
