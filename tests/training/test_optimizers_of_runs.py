"""The optimizers through the real command: shared out or not, stopped or not, the end is the same to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.runs.checkpoints import list_checkpoints
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end

SETTINGS: dict[str, Any] = {
    "min_train_tokens": 512,
    "gradient_accumulation_steps": 1,
    "validation_interval": 3,
    "learning_rate": 0.01,
    "clipping_max_norm": 0.5,
    "precision": "fp32",
}
MUON = {"optimizer": "muon", "muon_momentum_warmup_steps": 6, "vector_learning_rate": 0.003}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset()
    return made


@pytest.mark.parametrize("optimizer", [{}, MUON], ids=["adamw", "muon"])
def test_a_shared_out_optimizer_trains_and_saves_the_same(shop: Workshop, optimizer: dict[str, Any]) -> None:
    """On two ranks; on four from a checkpoint of two, whichever of them saved it."""
    runs = [shop.add_run(f"{flag}", **SETTINGS, **optimizer, shard_optimizer=flag) for flag in (True, False)]
    for run in runs:
        shop.train(run.name)
    assert_same_end(*runs)
    ends = [run / "checkpoints" / "latest" / "optimizer.pt" for run in runs]
    assert ends[0].read_bytes() == ends[1].read_bytes()
    for run, flag in zip(runs, (False, True), strict=True):
        shop.add_run(run.name, **SETTINGS | {"min_train_tokens": 768}, **optimizer, shard_optimizer=flag)
        said = shop.train(run.name, ranks=4).stdout
        assert f"train.json has changed since: shard_optimizer: {json.dumps(not flag)} -> {json.dumps(flag)}" in said
    assert_same_end(*runs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_muon_goes_back_to_a_checkpoint_and_comes_to_the_same_end(shop: Workshop, ranks: int) -> None:
    run = shop.add_run("straight", **SETTINGS, **MUON)
    other = shop.add_run("back", **SETTINGS, **MUON)
    for each in (run, other):
        shop.train(each.name, ranks=ranks)
    earlier = dict(list_checkpoints(other / "checkpoints"))[3]
    shop.train("back", earlier.name, ranks=ranks)
    assert_same_end(run, other)


def test_another_optimizer_than_the_checkpoints_is_refused(shop: Workshop) -> None:
    """Before anything is touched; another run may start from its weights."""
    run = shop.add_run("r", **SETTINGS)
    shop.train(ranks=1)
    shop.add_run("r", **SETTINGS | {"min_train_tokens": 1024}, **MUON)
    for arguments in ([], ["--plan"]):
        result = shop.attempt(*arguments)
        assert result.status == 2
        (line,) = result.error_lines
        assert 'made with "optimizer": "adamw", but train.json has "muon"; put it back, use --restart' in line
    shop.add_run("new", **SETTINGS, **MUON, initial_weights=str(run / "checkpoints" / "latest" / "model.safetensors"))
    assert "starting from" in shop.train("new", ranks=1).stdout


def test_a_tied_heads_own_rate_is_refused(shop: Workshop) -> None:
    shop.add_run(model={"tie_weights": True}, **SETTINGS, head_learning_rate=0.1)
    for arguments in ([], ["--plan"]):
        (line,) = shop.attempt(*arguments).error_lines
        assert 'r/train.json: key "head_learning_rate": with "tie_weights" in model.json' in line
        assert 'use "embedding_learning_rate"' in line


def test_the_plan_knows_what_optimizers_keep(shop: Workshop) -> None:
    """Disk for whole checkpoints; of a shared-out state each rank's part."""
    shop.add_run("r", model={"emb_dim": 512}, **SETTINGS, **MUON, shard_optimizer=True)
    said = shop.attempt("--plan", "--assume-world-size", "4").stdout
    assert "0.02 GiB of state, about 0.01 on each of 4 ranks" in said
    assert "0.05 each" in said  # with two moments of each matrix, 0.07


@pytest.mark.parametrize("optimizer", [{}, MUON], ids=["adamw", "muon"])
def test_the_largest_microbatch_is_found_with_a_share_of_the_state(shop: Workshop, optimizer: dict[str, Any]) -> None:
    shop.add_run("r", **SETTINGS, **optimizer, shard_optimizer=True)
    assert "Max microbatch size was " in shop.train("r", "-f", "--memory-limit-gib", "3", ranks=2).stdout
