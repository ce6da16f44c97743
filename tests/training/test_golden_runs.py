"""Twenty steps of a tiny run with each lever alone, and with all of them, against losses that were recorded: whatever
changes a run's numbers is seen here.

Whoever means to change them records them again, and says in the commit why they changed:

    uv run python -m tests.training.test_golden_runs
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpt import GPTModel
from harness.data.loader import Microbatch
from harness.runs.experiment import SWITCH_LOSS_SCALE
from harness.runs.train_config import TrainConfig
from harness.training.step import build_step
from tests.model.test_levers import ALL, LEVERS
from tests.model.test_model import shape
from tests.support.configs import SEED_TRAIN

RECORDED = Path(__file__).parent / "golden_losses.json"
STEPS, SHOWN = 20, (0, 4, 9, 14, 19)
# Other processors and versions of torch add up in another order, which training makes larger.
HERE, ELSEWHERE = 1e-5, 2e-3

TRAIN: dict[str, Any] = {"learning_rate": 0.01, "clipping_max_norm": 1.0, "precision": "fp32"}
DROPOUT = {"embedding": 0.1, "attention_weights": 0.2, "attention_output": 0.0, "mlp_output": 0.1}
# By name: keys of model.json, and of train.json.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    **{name: (changes, {}) for name, changes in LEVERS.items()},
    "tied": ({"tie_weights": True}, {}),
    "qkv_bias": ({"qkv_bias": True}, {}),
    "dropout": ({"drop_rate": 0.1}, {}),
    "dropout by place": ({"drop_rate": DROPOUT}, {}),
    "z_loss": ({}, {"z_loss": 0.001}),
    "all": ({**ALL, "drop_rate": DROPOUT, "tie_weights": True}, {"z_loss": 0.001}),
}


def losses_of(name: str) -> list[float]:
    """The cross-entropies of some steps on text that can be learnt: each token decides the next but for some noise."""
    model_json, train_json = RUNS[name]
    torch.manual_seed(42)
    model = GPTModel(shape(**model_json), z_loss=train_json.get("z_loss", 0.0))
    if model.config.moe is not None:
        model.moe_router_loss_scale = SWITCH_LOSS_SCALE / model.config.moe.num_active_experts
    step = build_step(model, model, TrainConfig.model_validate({**SEED_TRAIN, **TRAIN, **train_json}))
    tokens = [1]
    for noise in np.random.default_rng(7).integers(0, 8, STEPS * 2 * 48):
        tokens.append(int(tokens[-1] * 5 + 3 + (noise if noise < 2 else 0)) % 97)
    found = []
    for at in range(STEPS):
        parts = (tokens[start : start + 49] for start in (96 * at, 96 * at + 48))  # two sequences each
        batch = [Microbatch(np.array(part, dtype=np.uint16), model.config.context_length) for part in parts]
        found.append(step.run(batch, multiplier=1.0).losses_A.mean().item())
    return [found[at] for at in SHOWN]


def conditions() -> list[str]:
    return [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_recorded(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    tolerance = HERE if recorded["conditions"] == conditions() else ELSEWHERE
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = losses_of(name)
    finally:
        torch.set_num_threads(threads)
    assert found == pytest.approx(recorded["losses"][name], rel=tolerance)
    assert found[-1] < found[0] - 0.5, "it learns"


def test_every_lever_changes_the_run() -> None:
    """And so none of the recorded runs is another one's."""
    recorded = json.loads(RECORDED.read_text())["losses"]
    assert recorded.keys() == RUNS.keys()
    assert len({losses[-1] for losses in recorded.values()}) == len(RUNS)


def record() -> None:
    """Write down this version's losses."""
    torch.set_num_threads(1)
    losses = {name: losses_of(name) for name in RUNS}
    RECORDED.write_text(json.dumps({"conditions": conditions(), "losses": losses}, indent=1) + "\n")


if __name__ == "__main__":
    record()
