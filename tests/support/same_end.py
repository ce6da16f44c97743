"""Bit-for-bit comparison of the ends of two runs, for tests of resumed runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from harness.runs.checkpoints import list_checkpoints
from tests.support.launch import Workshop, metrics, without_times


def assert_same_end(one: Path, other: Path) -> None:
    """Assert that the last checkpoints of two runs have the same weights, optimizer, random states and losses, and that
    their metrics are the same except for times."""
    ends = [run / "checkpoints" / "latest" for run in (one, other)]
    weights = [load_file(end / "model.safetensors") for end in ends]
    assert_equal(weights[0], weights[1], "model.safetensors")
    for file in ("optimizer.pt", "train_state.pt", "scaler.pt"):
        assert (ends[0] / file).exists() == (ends[1] / file).exists()
        if (ends[0] / file).exists():
            states = [torch.load(end / file, weights_only=True) for end in ends]
            assert_equal(states[0], states[1], file)
    metas = [json.loads((end / "meta.json").read_text()) for end in ends]
    for key in ("global_step", "tokens_seen", "train_loss", "val_loss", "best_loss", "best_step"):
        assert metas[0][key] == metas[1][key], key
    # A checkpoint's name has a time and a step. Only the step must be the same.
    for link in ("latest", "best"):
        assert len({end.with_name(link).resolve().name.partition("-")[2] for end in ends}) == 1, link
    assert without_times(metrics(one)) == without_times(metrics(other))


def assert_goes_on_to_the_same_end(shop: Workshop, run: Path) -> None:
    """Assert that a copy of a finished run, resumed from its second checkpoint, reaches the same end."""
    again = Path(shutil.copytree(run, run.with_name(f"{run.name}-again"), symlinks=True))
    shop.train(again.name, list_checkpoints(run / "checkpoints")[1][1].name)
    assert_same_end(run, again)


def assert_equal(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}/{index}")
    else:
        assert one == other, where
