"""Runs with every lever of model.json and z-loss, through the real commands; and what z-loss adds to a step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt import GPTModel
from harness.data.loader import Microbatch
from harness.evaluation.loss import microbatch_losses
from harness.model.precision import Precision
from harness.runs.experiment import Experiment
from harness.runs.train_config import TrainConfig
from harness.training.step import build_step
from tests.model.test_levers import ALL
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.configs import SEED_TRAIN
from tests.support.launch import DATASET, MODEL, Result, Workshop, finish, metrics
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
    run = shop.add_run(model=LEVERS, z_loss=0.001, learning_rate=0.01, clipping_max_norm=1.0)
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


def test_the_tiny_twin_of_such_a_run_can_be_built(trained: tuple[Workshop, Path, Result]) -> None:
    from harness.runs.directory import RunDirectory

    tiny = Experiment.load(RunDirectory(trained[1]), trained[0].datasets).tiny()
    model = GPTModel(tiny.model)
    assert model(torch.tensor([[1, 2]]), torch.tensor([[2, 3]])).isfinite()
    assert MODEL["n_layers"] != tiny.model.n_layers


# z-loss


def one_step(z_loss: float) -> tuple[GPTModel, float]:
    """A model after an accumulation of two microbatches, whose gradients are still there, and the loss reported."""
    model = random_model(shape(logit_softcap=5.0))
    model.z_loss = z_loss
    config = TrainConfig.model_validate({**SEED_TRAIN, "precision": "fp32", "z_loss": z_loss})
    rows = random_tokens(model.config, batch=4).numpy().astype(np.uint16)
    batches = [Microbatch(np.append(part.ravel(), np.uint16(1)), 24) for part in (rows[:2], rows[2:])]
    return model, build_step(model, model, config).accumulate(batches).mean().item()


def test_z_loss_moves_gradients_and_leaves_reported_losses() -> None:
    plain, loss = one_step(0.0)
    model, same_loss = one_step(0.5)
    assert same_loss == pytest.approx(loss, rel=1e-6)
    tokens = np.append(random_tokens(model.config, batch=4).numpy().ravel(), 1)
    inputs, targets = torch.tensor(tokens[:-1]).view(4, 24), torch.tensor(tokens[1:]).view(4, 24)
    targets[1, -1] = targets[3, -1] = 1  # where each microbatch ends
    copy = random_model(model.config)
    logits = copy(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (expected + 0.5 * logits.logsumexp(-1).square().mean()).backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in copy.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert not torch.allclose(plain.out_head.weight.grad, model.out_head.weight.grad)  # type: ignore[arg-type]


def test_validation_knows_nothing_of_z_loss() -> None:
    model = random_model(shape())
    batch = [Microbatch(np.arange(49, dtype=np.uint16), 24)]
    precision = Precision("fp32", "cpu")
    before = microbatch_losses(model, batch, precision)
    model.z_loss = 1.0
    assert microbatch_losses(model, batch, precision) == before


@pytest.mark.parametrize("value", [-0.1, "0.1", True])
def test_impossible_z_loss(tmp_path: Path, value: Any) -> None:
    from tests.support.configs import refusal, train_in

    assert 'key "z_loss": ' in refusal(train_in(tmp_path), z_loss=value)
