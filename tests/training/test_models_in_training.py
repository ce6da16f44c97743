"""Real commands on a run with all model options in model.json and a mixture of experts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt import GPTModel
from harness.distributed.world import World
from harness.model.config import load_model_config
from harness.runs.checkpoints import list_checkpoints
from harness.runs.metrics import TrainEvent, read_metrics
from harness.runs.train_config import TrainConfig
from harness.training.loss_meter import LossMeter
from harness.training.muon import Muon
from harness.training.step import StepResult
from tests.hf.test_convert_hf import convert, write_checkpoint
from tests.model.test_levers import ALL
from tests.model.test_model import shape
from tests.support.configs import SEED_TRAIN
from tests.support.in_process import InProcess, module_shop
from tests.support.launch import Result, Workshop, meta_of, metrics, summary_of
from tests.support.same_end import assert_goes_on_to_the_same_end

MOE = {"num_experts": 4, "num_active_experts": 2}
MODEL: dict[str, Any] = {
    **ALL,
    "moe": MOE,
    "qkv_bias": False,
    "n_heads": 4,
    "head_dim": 6,
    "drop_rate": {"embedding": 0.1, "attention_weights": 0.1, "mlp_output": 0.2},
}
SETTINGS: dict[str, Any] = {"learning_rate": 0.01, "clipping_max_norm": 1.0, "precision": "fp32"}
CPU = torch.device("cpu")


Trained = tuple[InProcess, Path, Result]


shop = module_shop(tokens=40_000)


@pytest.fixture(scope="module")
def trained(shop: InProcess) -> Trained:
    run = shop.add_run("experts", model=MODEL, **SETTINGS)
    return shop, run, shop.train("experts")


def train_events(run: Path) -> list[TrainEvent]:
    return [event for event in read_metrics(run / "metrics.jsonl") if isinstance(event, TrainEvent)]


def loads_of(event: TrainEvent) -> list[list[float]]:
    """Return the loads of each block's experts."""
    assert event.expert_load is not None
    return [[load for load in block if load is not None] for block in event.expert_load]


def test_it_learns_on_two_ranks(trained: Trained) -> None:
    run = trained[1]
    losses = [event["loss"] for event in metrics(run, "validation")]
    assert losses[-1] < losses[0] - 0.3
    summary = summary_of(run)
    assert summary["model"]["rope_base"] == 10_000, "the default is recorded"
    config = load_model_config(run / "model.json")
    assert (summary["parameters"], summary["flops_per_token"]) == (config.parameters, config.flops_per_token)


def test_it_goes_on_bit_for_bit(trained: Trained) -> None:
    """A run resumed from a checkpoint between two reports ends as it did without the resume, to the bit. The checkpoint
    holds the experts' loads since the last report."""
    assert_goes_on_to_the_same_end(trained[0], trained[1])


@pytest.mark.parametrize("is_dense", [False, True])
def test_the_plan_counts_it(shop: InProcess, is_dense: bool) -> None:
    run = shop.add_run("planned", model=MODEL | {"moe": None if is_dense else MOE})
    said = shop.attempt("--plan", run=run.name).stdout
    config = load_model_config(run / "model.json")
    assert re.search(rf"^parameters +{config.parameters:,}$", said, re.M)
    assert re.search(rf"^FLOPs per token +{config.flops_per_token:,}$", said, re.M)
    on_paper = " ".join(shop.attempt("--plan", "--assume-device", "H100", run=run.name).stdout.split())
    if is_dense:
        assert "estimated" in on_paper
        return
    assert re.search(rf"^active +{config.active_parameters:,} parameters for each token$", said, re.M)
    assert re.search(r"^balancing loss +x 0.005 \(moe_router_loss_scale\)$", said, re.M)
    assert 'the estimate does not cover "moe" in model.json' in on_paper


# Experts


def test_the_load_is_reported(trained: Trained) -> None:
    _, run, result = trained
    for event in train_events(run):
        blocks = loads_of(event)
        flat = [load for block in blocks for load in block]
        assert [len(block) for block in blocks] == [4, 4]
        assert all(sum(block) == pytest.approx(4, abs=1e-3) for block in blocks), "the mean load is not 1"
        assert (event.expert_load_min, event.expert_load_max) == pytest.approx((min(flat), max(flat)), abs=1e-4)
        shown = f"experts {event.expert_load_min:.2f}-{event.expert_load_max:.2f}"
        assert re.search(rf"^global step {event.global_step}/.* {re.escape(shown)}", result.stdout, re.M), result.stdout
    config = load_model_config(run / "model.json")
    summary = summary_of(run)
    assert summary["active_parameters"] == config.active_parameters
    meta = meta_of(run)
    assert meta["active_parameters"] == config.active_parameters
    assert "moe_router_loss_scale" not in json.loads((run / "train.json").read_text())
    assert summary["moe_router_loss_scale"] == meta["moe_router_loss_scale"] == 0.01 / MOE["num_active_experts"]


@pytest.mark.parametrize(
    ("active", "train", "weight"),
    [
        # As in Switch Transformers, over the active experts.
        (2, {}, 0.005),
        (4, {}, 0.0025),
        (2, {"moe_router_loss_scale": 0.0}, 0),
        # Runs of the notebook's program have a balancing loss only if train.json sets one.
        (2, {"schedule_learning_rate": True}, 0),
        (2, {"schedule_learning_rate": True, "moe_router_loss_scale": 0.01}, 0.01),
    ],
)
def test_experts_are_balanced_by_this_much(shop: InProcess, active: int, train: dict[str, Any], weight: float) -> None:
    """The balancing loss has the weight that train.json sets, or else a default. A derived run has the same weight. The
    key "log_moe_balance_file" in "moe" has no effect."""
    moe = {"num_experts": 4, "num_active_experts": active, "log_moe_balance_file": "routing_logits.jsonl"}
    run = shop.add_run("balanced", model={"moe": moe}, **train)
    shutil.rmtree(shop.runs / "derived", ignore_errors=True)
    derived = shop.command("derive_run.py", run.name, "derived", "--set", "random_seed=1", "--runs-dir", str(shop.runs))
    assert "  random_seed: 42 -> 1\n" in derived.stdout, derived.stderr
    for name in (run.name, "derived"):
        plan = shop.attempt("--plan", run=name)
        assert f"\nbalancing loss   x {weight:g} " in plan.stdout, plan.stderr


@pytest.mark.slow
def test_half_precision_ends_near_fp32(trained: Trained) -> None:
    """The final loss in bf16 is within 0.03 of fp32's. Rounding may route a token to another expert if two scores are
    nearly equal, so the losses are close but not equal."""
    shop, run, _ = trained
    shop.add_run("bf16", model=MODEL, **SETTINGS | {"precision": "bf16", "activation_checkpointing": True})
    shop.train("bf16")
    ends = [metrics(each, "validation")[-1]["loss"] for each in (run, shop.runs / "bf16")]
    assert ends[1] == pytest.approx(ends[0], abs=0.03)


def test_it_goes_on_with_another_number_of_ranks(trained: Trained) -> None:
    """A run is resumed on another number of ranks, from a checkpoint between two reports. Its next report includes the
    tokens before the checkpoint."""
    shop, run, _ = trained
    folder = Path(shutil.copytree(run, shop.runs / "one", symlinks=True))
    shop.train_here("one", list_checkpoints(run / "checkpoints")[1][1].name)
    assert train_events(folder)[-1].tokens_seen == 1280
    for event in train_events(folder):
        assert all(sum(block) == pytest.approx(4, abs=1e-3) for block in loads_of(event))


def test_muon_sees_each_experts_matrices_and_the_router() -> None:
    """Muon updates all matrices but embeddings and head, as in Moonlight (arXiv:2502.16982) and GLM-4.5
    (arXiv:2508.06471)."""
    model = GPTModel(shape(moe=MOE, mlp="swiglu"))
    config = TrainConfig.model_validate({**SEED_TRAIN, "optimizer": "muon", "precision": "fp32"})
    shapes = Muon(model, config).state_shapes()
    muons = [name for name, state in shapes.items() if "momentum_buffer" in state]
    block = [name.removeprefix("trf_blocks.0.") for name in muons if name.startswith("trf_blocks.0.")]
    experts = [f"ff.experts.{number}.{part}.weight" for number in range(4) for part in ("layers.0", "layers.2", "gate")]
    assert sorted(block) == sorted(["att.qkv.weight", "att.out_proj.weight", "ff.router.weight", *experts])


# Commands


def test_it_is_sampled_tuned_and_exported_with_its_code(tmp_path: Path) -> None:
    config = shape(vocab_size=300, context_length=256, n_layers=1, emb_dim=16, moe=MOE)
    write_checkpoint(tmp_path / "c", config)
    (tmp_path / "model.json").write_text(config.model_dump_json())
    files = [str(tmp_path / "model.json"), str(tmp_path / "c" / "model.safetensors")]
    shop = Workshop(tmp_path)  # in processes of one thread
    said = shop.script("test_smoke.py", *files, "--prompt", "def f(", "--num-tokens", "5", "--temperature", "0").stdout
    assert said.startswith("def f(")
    examples = [{"instruction": "f", "input": "", "output": "def"}] * 20
    (tmp_path / "data.json").write_text(json.dumps(examples))
    tuned = shop.script(
        "test_ift.py", *files, "--data", str(tmp_path / "data.json"), "--responses-only", "--max-epochs", "1"
    )
    assert "epoch 1: training loss" in tuned.stdout + tuned.stderr
    said = convert(tmp_path, "export", str(tmp_path / "c"), str(tmp_path / "out")).stdout
    assert "with code of its own" in said


# The load between two reports


def test_the_load_is_of_all_microbatches_since_the_last_report() -> None:
    model, alone = shape(n_layers=2, moe={"num_experts": 4, "num_active_experts": 2}), World(0, 0, 1, 1, CPU)
    meter, zero = LossMeter(CPU, model), torch.tensor(0.0)
    loads = ([[4, 0, 4, 0], [2, 2, 2, 2]], [[4, 4, 0, 0], [0, 2, 4, 2]])
    for load in loads:
        meter.add(StepResult(torch.ones(2, dtype=torch.float64), zero, zero, torch.tensor(load)))
    state, empty = meter.state(), LossMeter(CPU, model).state()
    for ranks, microbatches in ([state], 4), ([state, empty], 4), ([state, state], 8):
        other = LossMeter(CPU, model)
        other.load_state(ranks)
        report = other.reduce(alone)
        assert (report.expert_load, report.microbatches) == ([[2, 1, 1, 0], [0.5, 1, 1.5, 1]], microbatches)
        assert other.state() == empty, "a report resets the meter"
    with pytest.raises(ValueError, match="16 numbers where there should be 8"):
        LossMeter(CPU).load_state([state])
