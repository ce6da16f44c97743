"""bench/on_gpu.py without a GPU: its calls can be read, stages run at tiny shapes, conclusions follow from rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import commands, kernels, steps
from bench.gpu.conclusions import conclusions
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
    bench.results.conclude(["so"])
    bench.results.add("b", rows=[1, 2])
    content = json.loads(bench.results.path.read_text())
    assert content == {
        "rows": [{"stage": "a", "number": 0.33333}, {"stage": "b", "rows": [1, 2]}],
        "conclusions": ["so"],
    }
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


def step_row(tokens_per_s: float, **values: Any) -> Row:
    row = {"stage": "step", "microbatch": 64, "drop_rate": 0.1, "settings": "", "tokens_per_s": tokens_per_s}
    return row | {"mfu": 0.38, "allocated_gib": 25.0} | values


MEASURED: list[Row] = [
    {"stage": "machine", "device": "NVIDIA H200"},
    step_row(440_000),
    step_row(430_000, microbatch=32, allocated_gib=14.0),
    step_row(520_000, drop_rate=0.0, allocated_gib=23.0),
    step_row(441_000, settings="coordinate_descent_tuning=True"),
    step_row(330_000, settings="activation_checkpointing=True", allocated_gib=10.0),
    {"stage": "syncs", "found": None, "where": None},
    {"stage": "attention", "backend": "default", "drop_rate": 0.1, "dropped": 0.125, "ms": 1.0},
    {"stage": "attention", "backend": "cudnn", "drop_rate": 0.1, "dropped": 0.125, "ms": 1.0},
    {"stage": "attention", "backend": "flash", "drop_rate": 0.1, "dropped": 0.1016, "ms": 2.0},
    {"stage": "attention", "backend": "efficient", "drop_rate": 0.1, "dropped": 0.1001, "ms": 3.0},
    {"stage": "attention", "backend": "cudnn", "drop_rate": 0.0, "refused": "no"},
    {"stage": "loss", "kind": "ours", "rows": 65536, "chunk": 2671, "compiled": True, "ms": 30.0},
    {"stage": "search", "status": 0, "seconds": 100.0, "said": [], "recompile_limit_hit": False},
    {"stage": "trained", "what": "answer", "size": 370, "status": 0},
    {"stage": "trained", "what": "a tenth more", "size": 415, "status": 1},
    {"stage": "stop and continue", "deterministic": True, "stopped": True, "same_bits": True},
    {"stage": "repeat", "deterministic": False, "same_bits": False, "tokens_per_s": [420_000, 425_000]},
    {"stage": "repeat", "deterministic": True, "same_bits": True, "tokens_per_s": [None, 408_000]},
    {"stage": "saving", "in_background": False, "status": 0, "seconds": {"training": 20.0, "checkpointing": 5.0}},
    {"stage": "saving", "in_background": True, "status": 0, "seconds": {"training": 21.0, "checkpointing": 0.5}},
    {"stage": "failed", "what": "groups", "status": 1},
]


def test_conclusions() -> None:
    said = "\n".join(conclusions(MEASURED))
    assert "440,000 tokens/s, MFU 38.0%; goal 400,000: met" in said
    assert "goal 450,000: MISSED by 2.2%" in said
    assert "520,000 tokens/s, MFU 38.0%; goal 500,000: met" in said
    assert "0.344 GiB a sequence + 3.00 GiB fixed; goal 0.4: met" in said
    assert "454,413 tokens/s on H200; measured / paper: 0.97" in said
    assert "waits for the device in a step: none" in said
    assert "attention, dropout 0.1: flash 2.00 ms, efficient 3.00 ms; cudnn drops 0.1250" in said
    assert "attention, dropout 0.0: no kernel" in said
    assert "head and loss, 65,536 rows: ours (chunk 2,671, compiled) 30.00 ms" in said
    assert "coordinate_descent_tuning=True: +0.2% tokens/s, +0.0 GiB: no difference" in said
    assert "activation_checkpointing=True: -25.0% tokens/s, -15.0 GiB: costs speed" in said
    assert "dropout 0.0: +18.2% tokens/s, -2.0 GiB: worth having" in said
    assert "-f: true: answer (370): trains; a tenth more (415): is refused; 100 s" in said
    assert "stop and continue, two ranks, deterministic: the weights are the same" in said
    assert "the same run twice, usual: other bits" in said
    assert '"deterministic": true costs 4.0% of the speed' in said
    assert "5.0 s of pauses in front, 0.5 s in the background" in said
    assert "the background is worth having" in said
    assert "NOT MEASURED: groups: 1" in said


def test_conclusions_of_what_went_wrong() -> None:
    """An answer of -f that does not train, or that was too small, is not true; nor is one that took too long fast."""
    wrong = [row for row in MEASURED if row["stage"] not in ("trained", "search")]
    wrong += [{"stage": "search", "status": 0, "seconds": 200.0, "said": [], "recompile_limit_hit": True}]
    wrong += [{"stage": "trained", "what": "answer", "size": 370, "status": 1}]
    said = "\n".join(conclusions(wrong))
    assert "-f: NOT SHOWN TO BE TRUE: answer (370): is refused; 200 s, TOO LONG; RECOMPILED TOO OFTEN" in said


def test_conclusions_of_nothing() -> None:
    said = conclusions([])
    assert len(said) >= 6
    assert all("not measured" in line or "nothing to compare" in line for line in said)


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
    assert content["conclusions"]
    assert commands.weights_hash(Workbench(tmp_path / "work", Results(out), True), "whole")
