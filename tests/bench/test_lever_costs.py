"""The step that bench/lever_costs.py measures is the step that ddp_train.py runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.lever_costs import Contestant, contestant
from harness.distributed.world import World
from harness.sweeps.file import load_sweep
from tests.support.launch import Workshop


def contestant_of(tmp_path: Path, **settings: Any) -> Contestant:
    shop = Workshop(tmp_path)
    shop.add_run("base")
    (tmp_path / "s.json").write_text(json.dumps({"base": "base", "set": settings, "vary": {"random_seed": [1]}}))
    (run,) = load_sweep(tmp_path / "s.json", shop.runs).runs
    return contestant(run, World(0, 0, 1, 1, torch.device("cpu")))


def test_every_lever_of_train_json_is_in_the_model(tmp_path: Path) -> None:
    levers = {"activation_checkpointing": True, "residual_precision": "bf16", "precision": "bf16"}
    moe = {"num_experts": 4, "num_active_experts": 2}
    model = contestant_of(tmp_path, **levers, moe=moe, moe_router_loss_scale=0.3).step.bare_model
    found = (model.recompute_blocks, model.residual_dtype, model.moe_router_loss_scale)
    assert found == (True, torch.bfloat16, 0.3)


BATCHES: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 3},
    {"global_batch_size": 6},
    {"batch_ramp": [[0, 2], [64, 6]]},
]


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_a_step_has_the_microbatches_of_one_rank(tmp_path: Path, batch: dict[str, Any]) -> None:
    """A step of a ramp has the microbatches of its largest batch."""
    each = contestant_of(tmp_path, **batch)
    assert (each.microbatches, each.batch_BxT[0]) == (3, 2)
    each.take(0, counts=True)
    assert len(each.seconds) == 1
