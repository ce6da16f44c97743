"""Twenty steps of a tiny run with each lever, optimizer and schedule alone, and with all of them, against losses that
were recorded: whatever changes a run's numbers is seen here.

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
from harness.data.loader import BatchLayout, Microbatch
from harness.model.precision import Precision
from harness.runs.budget import batch_schedule
from harness.runs.experiment import SWITCH_LOSS_SCALE
from harness.runs.scaling_rules import Setup, ramp_multipliers, scale_settings
from harness.runs.schedule import build_schedule
from harness.runs.train_config import TrainConfig
from harness.training.step import build_step
from tests.model.test_levers import ALL, LEVERS
from tests.model.test_model import shape
from tests.support.configs import SEED_TRAIN

RECORDED = Path(__file__).parent / "golden_losses.json"
STEPS, SHOWN = 20, (0, 4, 9, 14, 19)
# Other processors and versions of torch add up in another order, which training makes larger.
HERE, ELSEWHERE = 1e-5, 2e-3

TRAIN: dict[str, Any] = {
    "learning_rate": 0.01,
    "clipping_max_norm": 1.0,
    "precision": "fp32",
    "microbatch_size": 2,
    "global_batch_size": 4,
    "min_train_tokens": None,
    "train_steps": STEPS,
}
RATES = {"embedding_learning_rate": 0.02, "head_learning_rate": 0.005, "vector_learning_rate": 0.03}
RAMP: dict[str, Any] = {"global_batch_size": None, "batch_ramp": [[0, 2], [240, 4]]}
SCALED: dict[str, Any] = {
    "scale_with_batch": {"reference_tokens": 64, "reference_train_tokens": 1200},
    "scale_with_depth": {"reference_layers": 3},
}
# SCALED's own reference is as deep as the model here, and changes nothing.
DEEPER: dict[str, Any] = {"scale_with_depth": {"reference_layers": 9}}
WRITEUPS = {"optimizer": "muon", "muon_update_scale": "original", "muon_learning_rate": 0.02}
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_learning_rate": 0.02,
    "muon_weight_decay": 0.5,
    "muon_momentum": 0.9,
    "muon_momentum_warmup_steps": 10,
    "decay_all_parameters": False,
    **RATES,
}
BF16 = {"precision": "bf16"}
LINEAR = {"lr_schedule": "linear", "warmup_steps": 3}
EXPERTS: dict[str, Any] = {"moe": {"num_experts": 5, "num_active_experts": 2}}
# As runs/quickstart, but for its size and its rates.
STACK: dict[str, Any] = {
    "position": "rope",
    "qk_norm": True,
    "mlp": "relu2",
    "initialisation": "zero_residual",
    "linear_bias": False,
    "value_embeddings": 1,
    "embedding_skip": True,
    "bigram_embedding": 50,
}
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
    "drop attention weights": ({"drop_rate": {"attention_weights": 0.2}}, {}),
    "drop attention output": ({"drop_rate": {"attention_output": 0.2}}, {}),
    "drop embedding": ({"drop_rate": {"embedding": 0.2}}, {}),
    "drop mlp output": ({"drop_rate": {"mlp_output": 0.2}}, {}),
    "balancing loss": (EXPERTS, {"moe_router_loss_scale": 0.5}),
    "betas": ({}, {"betas": [0.8, 0.95]}),
    "eps": ({}, {"eps": 1e-3}),
    "no weight decay": ({}, {"weight_decay": 0.0}),
    "decay of matrices only": ({}, {"decay_all_parameters": False}),
    "no clipping": ({}, {"clipping_max_norm": None}),
    "rates of kinds": ({}, RATES),
    **{name: ({}, {name: rate}) for name, rate in RATES.items()},
    "muon": ({}, {"optimizer": "muon"}),
    "muon at the writeup's scale": ({}, WRITEUPS),
    "muon with rates of its own": ({}, MUON),
    "muon's rate": ({}, {"optimizer": "muon", "muon_learning_rate": 0.02}),
    "muon's weight decay": ({}, {"optimizer": "muon", "muon_weight_decay": 2.0}),
    "muon's momentum": ({}, {"optimizer": "muon", "muon_momentum": 0.8}),
    "muon's momentum warms up": ({}, {"optimizer": "muon", "muon_momentum_warmup_steps": 10}),
    "warm-up": ({}, {"warmup_steps": 3}),
    "cosine": ({}, {"lr_schedule": "cosine"}),
    "cosine to zero": ({}, {"lr_schedule": "cosine", "min_lr_ratio": 0.0}),
    "wsd": ({}, {"lr_schedule": "wsd", "decay_period_percent": 40}),
    "linear": ({}, {"lr_schedule": "linear"}),
    "batch_ramp": ({}, RAMP),
    "scaled": ({}, SCALED),
    "scale_with_depth": ({}, DEEPER),
    "batch_ramp, scaled": ({}, {**RAMP, **SCALED}),
    "muon, ramp and schedule": ({}, {**MUON, **RAMP, **SCALED, **LINEAR, "z_loss": 0.001}),
    "everything": (
        {**ALL, "drop_rate": DROPOUT},
        {**MUON, **RAMP, **SCALED, **LINEAR, "z_loss": 0.001},
    ),
    "everything, with experts": (
        {**ALL, **EXPERTS, "drop_rate": DROPOUT},
        {**MUON, **RAMP, **SCALED, **DEEPER, **LINEAR, "z_loss": 0.001, "moe_router_loss_scale": 0.5},
    ),
    "bf16": ({}, BF16),
    "bf16 residual stream": ({}, {**BF16, "residual_precision": "bf16"}),
    "the quickstart's levers": (STACK, {"optimizer": "muon", **LINEAR, "betas": [0.9, 0.98]}),
}


def losses_of(name: str) -> list[float]:
    """The cross-entropies of some steps on text that can be learnt: each token decides the next but for some noise."""
    model_json, train_json = RUNS[name]
    config = TrainConfig.model_validate({**SEED_TRAIN, **TRAIN, **train_json})
    torch.manual_seed(42)
    precision = Precision.for_training(config.precision, torch.device("cpu"))
    residual_dtype = precision.residual_dtype(config.residual_precision)
    model = GPTModel(shape(**model_json), z_loss=config.z_loss, residual_dtype=residual_dtype)
    if model.config.moe is not None:
        given, active = config.moe_router_loss_scale, model.config.moe.num_active_experts
        model.moe_router_loss_scale = SWITCH_LOSS_SCALE / active if given is None else given
    layout = BatchLayout(1, config.accumulation_steps(1), config.microbatch_size, model.config.context_length)
    batches, schedule = batch_schedule(config, layout), build_schedule(config, STEPS)
    setup = Setup(layout.global_tokens, batches.tokens_before(STEPS), model.config.n_layers)
    step = build_step(model, model, scale_settings(config, setup).apply(config))
    tokens = [1]
    for noise in np.random.default_rng(7).integers(0, 8, STEPS * 2 * 48):
        tokens.append(int(tokens[-1] * 5 + 3 + (noise if noise < 2 else 0)) % 97)
    found = []
    for at in range(STEPS):
        before, here = batches.tokens_before(at), batches.at(at)
        starts = range(before, before + here.global_tokens, here.microbatch_tokens)
        parts = (tokens[start : start + here.microbatch_tokens + 1] for start in starts)
        batch = [Microbatch(np.array(part, dtype=np.uint16), here.context_length) for part in parts]
        ramp = ramp_multipliers(config, here.global_tokens, layout.global_tokens)
        found.append(step.run(batch, schedule.multiplier(at) * ramp.rate, ramp.decay).losses_A.mean().item())
    return [found[at] for at in SHOWN]


def conditions() -> list[str]:
    return [torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_recorded(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())
    # Conditions do not tell which matrix units compute in bf16.
    here = recorded["conditions"] == conditions() and BF16.items().isdisjoint(RUNS[name][1].items())
    tolerance = HERE if here else ELSEWHERE
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
