"""Runs with every option of model.json, through the real commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.model.test_levers import ALL
from tests.support.launch import DATASET, Result, Workshop, finish, metrics
from tests.support.same_end import assert_goes_on_to_the_same_end
from tests.training.test_microbatch_search import cold_command

LEVERS: dict[str, Any] = {
    **ALL,
    "qkv_bias": False,
    "n_heads": 4,
    "head_dim": 6,
    "drop_rate": {"embedding": 0.1, "attention_weights": 0.1, "mlp_output": 0.2},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workshop, Path, Result]:
    shop = Workshop(tmp_path_factory.mktemp("levers"))
    shop.add_dataset(tokens=40_000)
    run = shop.add_run(model=LEVERS, learning_rate=0.01, clipping_max_norm=1.0)
    return shop, run, shop.train("r")


def test_a_run_with_all_levers_learns_on_two_ranks(trained: tuple[Workshop, Path, Result]) -> None:
    losses = [event["loss"] for event in metrics(trained[1]) if event["event"] == "validation"]
    assert losses[-1] < losses[0] - 0.3
    config = json.loads((trained[1] / "summary.json").read_text())["model"]
    assert config["rope_base"] == 10_000, "what is recorded says it"


def test_it_goes_on_bit_for_bit(trained: tuple[Workshop, Path, Result]) -> None:
    assert_goes_on_to_the_same_end(trained[0], trained[1])


def test_its_test_loss_is_measured(trained: tuple[Workshop, Path, Result]) -> None:
    shop, run, _ = trained
    files = [str(run / "model.json"), str(run / "checkpoints" / "latest" / "model.safetensors")]
    said = shop.script("test_loss.py", str(shop.datasets), *files, "--dataset", DATASET, "--split", "test").stdout
    loss = re.search(r"\d\.\d+", said)
    assert loss is not None, said
    assert 2 < float(loss[0]) < 4.2


def test_the_plan_counts_it(trained: tuple[Workshop, Path, Result]) -> None:
    shop, run, _ = trained
    said = shop.attempt("--plan", "--restart").stdout
    summary = json.loads((run / "summary.json").read_text())
    assert re.search(rf"parameters +{summary['parameters']:,}\n", said)
    assert re.search(rf"FLOPs per token +{summary['flops_per_token']:,}\n", said)
    on_paper = shop.attempt("--plan", "--restart", "--assume-device", "H100").stdout
    assert "estimated" in on_paper


@pytest.mark.slow
def test_the_largest_microbatch_is_found(trained: tuple[Workshop, Path, Result]) -> None:
    """Started cold: a forked process holds its parent's memory, too."""
    command = cold_command(trained[0], "r", "-f", "--memory-limit-gib", "1")
    result = finish([trained[0].spawn(command, {})], expect=0, timeout=240)
    assert re.search(r"Max microbatch size was [1-9]", result.stdout)
    assert "leaked" not in result.stderr, "nothing of Triton's at the end"
