"""Golden losses: ten steps of a tiny run, with each model option, optimizer and schedule alone and with all together,
are compared with recorded losses. Every change of a run's numbers fails a test here, on any machine.

Each run is compared in three ways:
- In fp64 its losses equal the recorded ones to a relative error of `EXACT`. Instruction sets and the order of additions
  change only the last of sixteen digits there, so any larger difference is a changed formula.
- In the run's own precision its losses differ from the recorded fp64 losses by less than `MARGIN` times `rounding`.
  `rounding` was measured in fp64 when the losses were recorded. Before each step every weight was changed by one
  roundoff of the run's precision, and every nonzero gradient by one roundoff of the largest gradient of its tensor.
  The error of a step is the root mean square of the change of its loss over a few draws of the signs, plus one roundoff
  of the loss. `rounding` is the largest error up to the step.
- In the run's own precision its losses equal the recorded ones to the bit, if the conditions are those of the
  recording: the same build of torch, processor model and instruction sets.

If a run changes on purpose, record the losses again and give the reason in the commit. To compare bits before and after
another change on a machine other than the one that recorded the file, first record the losses on that machine:

    uv run python -m tests.training.test_golden_runs
"""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpt import GPTModel
from harness.data.loader import BatchLayout, Microbatch
from harness.model.precision import DTYPES, Precision
from harness.planning.experiment import SWITCH_LOSS_SCALE
from harness.planning.rates import build_schedule, scale_settings
from harness.runs.budget import batch_schedule
from harness.runs.train_config import TrainConfig
from harness.training.step import OptimizerStep
from tests.model.test_levers import ALL, LEVERS
from tests.model.test_model import shape
from tests.support.configs import SEED_TRAIN

RECORDED = Path(__file__).parent / "golden_losses.json"
CPUINFO = Path("/proc/cpuinfo")
PROCESSOR = ("vendor_id", "model name", "cpu family", "model", "stepping", "cache size", "CPU implementer", "CPU part")
INSTRUCTIONS = ("sse", "avx", "amx", "fma", "f16c")  # prefixes of the processor flags for arithmetic instructions
LIBRARIES = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_")  # prefixes of environment variables that choose a library's kernels
STEPS, SHOWN = 10, (0, 2, 4, 6, 9)
EXACT, MARGIN, DRAWS = 1e-9, 8, 4
FP64 = {"precision": "fp32", "residual_precision": "fp32"}  # nothing is computed in less than the weights' precision

TRAIN: dict[str, Any] = {
    "learning_rate": 0.01,
    "eps": 1e-3,  # with the default, AdamW updates weights by full steps where the gradient is only rounding error
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
# The reference of SCALED has as many layers as this model, so its "scale_with_depth" changes nothing. This one does.
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
# The model options of runs/quickstart, in a smaller model.
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
# Name of the run -> changed keys of model.json and of train.json.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    **{name: (changes, {}) for name, changes in LEVERS.items()},
    "tied": ({"tie_weights": True}, {}),
    "qkv_bias": ({"qkv_bias": True}, {}),
    "dropout": ({"drop_rate": 0.1}, {}),
    "dropout by place": ({"drop_rate": DROPOUT}, {}),
    "all": ({**ALL, "drop_rate": DROPOUT, "tie_weights": True}, {}),
    **{f"drop {place.replace('_', ' ')}": ({"drop_rate": {place: 0.2}}, {}) for place in DROPOUT},
    "balancing loss": (EXPERTS, {"moe_router_loss_scale": 0.5}),
    "betas": ({}, {"betas": [0.8, 0.95]}),
    "eps": ({}, {"eps": 1e-8}),
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
    "muon, ramp and schedule": ({}, {**MUON, **RAMP, **SCALED, **LINEAR}),
    "everything": (
        {**ALL, "drop_rate": DROPOUT},
        {**MUON, **RAMP, **SCALED, **LINEAR},
    ),
    "everything, with experts": (
        {**ALL, **EXPERTS, "drop_rate": DROPOUT},
        {**MUON, **RAMP, **SCALED, **DEEPER, **LINEAR, "moe_router_loss_scale": 0.5},
    ),
    "bf16": ({}, BF16),
    "bf16 residual stream": ({}, {**BF16, "residual_precision": "bf16"}),
    "the quickstart's levers": (STACK, {"optimizer": "muon", **LINEAR, "betas": [0.9, 0.98]}),
}


def built(name: str, config: TrainConfig) -> GPTModel:
    """Return the run's model in fp64. Weights are drawn in fp64 for every precision, because draws in fp32 depend on
    the processor's instructions."""
    precision = Precision.for_training(config.precision, torch.device("cpu"))
    residual_dtype = precision.residual_dtype(config.residual_precision)
    torch.manual_seed(42)
    torch.set_default_dtype(torch.float64)
    try:
        model = GPTModel(shape(**RUNS[name][0]), residual_dtype=residual_dtype)
    finally:
        torch.set_default_dtype(torch.float32)
    if model.config.moe is not None:
        given, active = config.moe_router_loss_scale, model.config.moe.num_active_experts
        model.moe_router_loss_scale = SWITCH_LOSS_SCALE / active if given is None else given
    return model


@torch.no_grad()
def put_off(numbers: Tensor, sizes: Tensor, signs: torch.Generator) -> None:
    """Add each element of `sizes` to the same element of `numbers`, or subtract it, at random. In place."""
    numbers += sizes * (torch.randint(2, numbers.shape, generator=signs) * 2 - 1)


def losses_of(name: str, *, fp64: bool = False, roundoff: float = 0.0, seed: int = 0) -> list[float]:
    """Train the run `name` and return its losses at the steps in SHOWN. In the text, each token determines the next
    one, except for some noise. With a `roundoff`, errors of this relative size are added to weights and gradients, with
    signs drawn from `seed`."""
    config = TrainConfig.model_validate({**SEED_TRAIN, **TRAIN, **RUNS[name][1], **(FP64 if fp64 else {})})
    model = built(name, config) if fp64 else built(name, config).float()
    layout = BatchLayout(1, config.accumulation_steps(1), config.microbatch_size, model.config.context_length)
    batches, rates = batch_schedule(config, layout), build_schedule(config, STEPS, layout.global_tokens)
    work = {"batch_tokens": layout.global_tokens, "train_tokens": batches.tokens_before(STEPS)}
    scaled = scale_settings(config, **work, layers=model.config.n_layers).values
    step = OptimizerStep(model, config.model_copy(update=scaled))
    tokens = [1]
    for noise in np.random.default_rng(7).integers(0, 8, STEPS * 2 * 48):
        tokens.append(int(tokens[-1] * 5 + 3 + (noise if noise < 2 else 0)) % 97)
    signs, disturbed = torch.Generator().manual_seed(seed), list(model.parameters()) if roundoff else []

    def put_gradient_off(parameter: Tensor) -> None:
        assert parameter.grad is not None
        largest, is_rounded = parameter.grad.abs().max(), parameter.grad != 0
        put_off(parameter.grad, roundoff * largest * is_rounded, signs)

    for parameter in disturbed:
        parameter.register_post_accumulate_grad_hook(put_gradient_off)
    found = []
    for at in range(STEPS):
        before, here = batches.tokens_before(at), batches.at(at)
        starts = range(before, before + here.global_tokens, here.microbatch_tokens)
        parts = (tokens[start : start + here.microbatch_tokens + 1] for start in starts)
        batch = [Microbatch.consecutive(np.array(part, dtype=np.uint16), here.context_length) for part in parts]
        for parameter in disturbed:
            put_off(parameter, roundoff * parameter.abs(), signs)
        found.append(step.run(batch, *rates.at(at, here.global_tokens)).losses_A.mean().item())
    return [found[at] for at in SHOWN]


def rounding_of(name: str, exact: list[float]) -> list[float]:
    """Return the expected error that rounding in the run's own precision causes in the loss, for each step in SHOWN.
    `exact` has the losses without rounding. The module's docstring says how the error is measured."""
    dtype = DTYPES.get(RUNS[name][1].get("precision", ""), torch.float32)
    roundoff = torch.finfo(dtype).eps / 2
    draws = [losses_of(name, fp64=True, roundoff=roundoff, seed=seed) for seed in range(DRAWS)]
    off = np.sqrt(np.square(np.array(draws) - exact).mean(0)) + roundoff * np.array(exact)
    return [float(each) for each in np.maximum.accumulate(off)]


def conditions() -> list[str]:
    """Return all that decides the last bits of a result on one thread: torch's version, the processor and the
    instructions in use."""
    first = CPUINFO.read_text().split("\n\n")[0] if CPUINFO.exists() else f"model name: {platform.processor()}"
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    processor = [known[key] for key in PROCESSOR if key in known]
    processor += [flag for flag in known.get("flags", "").split() if flag.startswith(INSTRUCTIONS)]
    environment = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(LIBRARIES)]
    return [torch.__version__, torch.backends.cpu.get_cpu_capability(), " ".join(processor), *environment]


@pytest.fixture(name="recorded", scope="module")
def _recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


# Runs with many settings are quick tests. If one fails, the slow ones find the setting. Some settings, such as biases
# and bf16 residuals, are only in slow ones.
QUICK = {
    "none",
    "all",
    "muon, ramp and schedule",
    "everything",
    "everything, with experts",
    "bf16",
    "the quickstart's levers",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in RUNS])
def test_in_fp64_losses_are_those_recorded(recorded: dict[str, Any], name: str) -> None:
    assert losses_of(name, fp64=True) == pytest.approx(recorded["fp64"][name], rel=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_in_its_own_precision_a_run_is_off_by_rounding(recorded: dict[str, Any], name: str) -> None:
    found = losses_of(name)
    off = np.abs(np.array(found) - recorded["fp64"][name]) / recorded["rounding"][name]
    assert off.max() < MARGIN, f"the losses {found} differ from those in fp64 by {off} times the expected rounding"
    if conditions() == recorded["bits"]["conditions"]:
        assert found == recorded["bits"]["losses"][name], "the losses are not the recorded ones to the bit"


def test_every_lever_changes_the_run(recorded: dict[str, Any]) -> None:
    """Each option changes the losses: no two recorded runs end with the same loss."""
    losses = recorded["bits"]["losses"]
    assert losses.keys() == recorded["fp64"].keys() == recorded["rounding"].keys() == RUNS.keys()
    assert len({each[-1] for each in losses.values()}) == len(RUNS)


def test_conditions_tell_processors_and_instructions_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = [conditions()]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "none of this machine's")
    found.append(conditions())
    monkeypatch.setattr(f"{__name__}.CPUINFO", tmp_path / "cpuinfo")
    for processor in ("model\t: 143\nflags\t: avx512f amx_tile", "model\t: 143\nflags\t: avx512f", "model\t: 17"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{processor}\n\nprocessor\t: 1\n")
        found.append(conditions())
    assert all(found.count(each) == 1 for each in found)


def record() -> None:
    """Record the losses of this version. Losses in fp64 are written with only the digits that are equal on all
    machines."""
    torch.set_num_threads(1)
    fp64 = {name: losses_of(name, fp64=True) for name in RUNS}
    content = {
        "fp64": {name: [float(f"{each:.12g}") for each in losses] for name, losses in fp64.items()},
        "rounding": {name: [float(f"{each:.1e}") for each in rounding_of(name, fp64[name])] for name in RUNS},
        "bits": {"conditions": conditions(), "losses": {name: losses_of(name) for name in RUNS}},
    }
    text = json.dumps(content, indent=1)
    RECORDED.write_text(re.sub(r"\s+(?=[\d\]])", " ", text) + "\n")  # one line for each run


if __name__ == "__main__":
    record()
