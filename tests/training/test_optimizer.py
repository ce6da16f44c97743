"""Both optimizers: AdamW equals torch's, the state is stored by parameter name, and a skipped step changes nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpointing import restore_optimizer
from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.planning.memory import optimizer_state_bytes
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.checkpoints import Checkpoint
from harness.runs.train_config import TrainConfig
from harness.training.adamw import AdamW
from harness.training.muon import Muon
from harness.training.step import OptimizerStep, StepResult
from harness.training.zero1 import NamedState, empty_state
from tests.support.configs import SEED_TRAIN
from tests.support.same_end import assert_equal

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU)
PATH = Path("20260101Z000000-iteration-2")
CONFIG = ModelConfig(vocab_size=50, context_length=8, emb_dim=16, n_heads=2, n_layers=1, drop_rate=0.0, qkv_bias=True)
TRAIN = TrainConfig(**SEED_TRAIN, learning_rate=0.01, precision="fp32")
MUON = TRAIN.model_copy(update={"optimizer": "muon", "muon_momentum_warmup_steps": 4})
EACH = pytest.mark.parametrize("config", [TRAIN, MUON], ids=["adamw", "muon"])
HEAD, QKV = "out_head.weight", "trf_blocks.0.att.qkv.weight"
MATRICES_ONLY = TRAIN.model_copy(update={"decay_all_parameters": False})
BATCHES = [[Microbatch.consecutive(np.arange(17, dtype=np.uint16) * factor % 50, 8)] for factor in (1, 2, 3, 7, 11)]


def fresh_model(config: ModelConfig = CONFIG) -> GPTModel:
    torch.manual_seed(0)
    return GPTModel(config)


def trained_step(config: TrainConfig = TRAIN, steps: int = 3) -> OptimizerStep:
    step = OptimizerStep(fresh_model(), config)
    for batch in BATCHES[:steps]:
        step.run(batch, 1.0)
    return step


def update(step: OptimizerStep, multiplier: float = 1.0) -> StepResult:
    """Run a step with the gradients that the parameters already have."""
    with mock.patch.object(step, "accumulate", return_value=(torch.zeros(1), None)):
        return step.run([], multiplier)


def state_of(optimizer: AdamW | Muon) -> NamedState:
    return optimizer.named_state(ALONE, empty_state(optimizer.state_shapes()))


def checkpoint_of(state: NamedState) -> Checkpoint:
    return Checkpoint({}, state, {}, {}, CheckpointMeta(global_step=2, tokens_seen=96))


# AdamW


def test_adamw_is_torchs_to_the_bit() -> None:
    """Without clipping, weights and state equal torch's AdamW to the bit over steps with different learning rates, with
    weight decay of all parameters and of matrices only."""
    for config in (TRAIN, MATRICES_ONLY):
        ours, theirs = fresh_model(), fresh_model()
        step = OptimizerStep(ours, config)
        decays = [0.1 if p.dim() >= 2 or config.decay_all_parameters else 0.0 for p in theirs.parameters()]
        groups = [{"params": p, "weight_decay": by} for p, by in zip(theirs.parameters(), decays, strict=True)]
        reference = torch.optim.AdamW(groups, betas=config.betas, fused=True)
        for number, batch in enumerate(BATCHES):
            multiplier = 1.0 / (number + 1)
            step.run(batch, multiplier)
            theirs.zero_grad()
            theirs(*batch[0].to(CPU)).backward()
            for group in reference.param_groups:
                group["lr"] = config.learning_rate * multiplier
            reference.step()
            assert step.learning_rate == config.learning_rate * multiplier
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        names: dict[Tensor, str] = {parameter: name for name, parameter in theirs.named_parameters()}
        found = {names[parameter]: state for parameter, state in reference.state.items()}
        assert_equal(state_of(step.optimizer), found, "state")


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("config", "precision"), [(TRAIN, "fp32"), (TRAIN, "fp16"), (MUON, "fp32")], ids=["adamw", "scaled", "muon"]
)
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    config: TrainConfig, precision: str, value: float
) -> None:
    step = trained_step(config.model_copy(update={"precision": precision, "clipping_max_norm": 1.0}), steps=2)
    weights = [parameter.clone() for parameter in step.bare_model.parameters()]
    state = state_of(step.optimizer)
    assert state.keys() == {name for name, _ in step.bare_model.named_parameters()}
    step.accumulate(BATCHES[2])
    step.bare_model.trf_blocks[0].att.qkv.weight.grad[3, 3] = value
    assert update(step).skipped == 1
    assert all(map(torch.equal, weights, step.bare_model.parameters()))
    assert_equal(state_of(step.optimizer), state, "state")


# State by name


@EACH
def test_the_state_is_that_of_every_parameter_by_name_in_fp32(config: TrainConfig) -> None:
    """The state has an entry in fp32 for every parameter, under the parameter's name. Its size in bytes is what
    `optimizer_state_bytes` returns, not counting the "step" tensors."""
    model = fresh_model()
    step = OptimizerStep(model, config)
    assert state_of(step.optimizer) == {}, "there is no state before the first step"
    for batch in BATCHES[:3]:
        step.run(batch, 1.0)
    state = state_of(step.optimizer)
    assert list(state) == [name for name, _ in model.named_parameters()]
    shapes = {name: {key: value.shape for key, value in each.items()} for name, each in state.items()}
    assert shapes == step.optimizer.state_shapes()
    is_muon = config is MUON
    matrix = ["step", "momentum_buffer"] if is_muon else ["step", "exp_avg", "exp_avg_sq"]
    assert list(state[QKV]) == matrix
    assert list(state["trf_blocks.0.att.qkv.bias"]) == ["step", "exp_avg", "exp_avg_sq"]
    assert {value.dtype for each in state.values() for value in each.values()} == {torch.float32}
    assert {float(each["step"]) for each in state.values()} == {3.0}
    there = sum(value.nbytes for each in state.values() for key, value in each.items() if key != "step")
    assert there == optimizer_state_bytes(config, CONFIG) <= optimizer_state_bytes(TRAIN, CONFIG)


@EACH
def test_the_state_is_a_copy_and_rank_0s_alone(config: TrainConfig) -> None:
    """A further step does not change a state that is being saved. Other ranks than rank 0 have an empty dict."""
    step = trained_step(config)
    state = state_of(step.optimizer)
    kept = copy.deepcopy(state)
    step.run(BATCHES[3], 1.0)
    assert_equal(state, kept, "state")
    assert state_of(step.optimizer)[HEAD]["step"] == 4
    assert step.optimizer.named_state(World(1, 1, 2, 2, CPU), {}) == {}


@pytest.mark.parametrize(("one", "other"), [(TRAIN, MATRICES_ONLY), (MATRICES_ONLY, TRAIN)])
def test_a_state_does_not_depend_on_how_parameters_are_grouped(one: TrainConfig, other: TrainConfig) -> None:
    """A state saved with one grouping of parameters can be loaded with another. Loading leaves the settings of the
    groups as the current train.json has them."""
    saved = state_of(trained_step(one).optimizer)
    optimizer = AdamW(fresh_model(), other)
    groups = [group | {"params": []} for group in optimizer.param_groups]
    optimizer.load_named_state(saved)
    assert_equal(state_of(optimizer), saved, "state")
    assert groups == [group | {"params": []} for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("own", "other", "change", "words"),
    [
        (TRAIN, TRAIN, lambda saved: saved.pop(HEAD), "not the model's"),
        (TRAIN, TRAIN, lambda saved: saved.update(more={}), "not the model's"),
        (TRAIN, TRAIN, lambda saved: saved[HEAD].pop("exp_avg"), f"{HEAD} has ['exp_avg_sq', 'step']"),
        (
            TRAIN,
            TRAIN,
            lambda saved: saved[HEAD].update(exp_avg=torch.zeros(3)),
            f"exp_avg of {HEAD} is torch.float32 [3]",
        ),
        (TRAIN, TRAIN, lambda saved: saved[HEAD].update(step=torch.tensor(3)), f"step of {HEAD} is torch.int64 []"),
        (TRAIN, MUON, len, f"{QKV} has ['momentum_buffer', 'step']"),
        (MUON, TRAIN, len, f"{QKV} has ['exp_avg', 'exp_avg_sq', 'step']"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    own: TrainConfig, other: TrainConfig, change: Callable[[NamedState], object], words: str
) -> None:
    step, saved = trained_step(own), state_of(trained_step(other).optimizer)
    before = state_of(step.optimizer)
    change(saved)
    with pytest.raises(UserError, match=r"optimizer\.pt") as refused:
        restore_optimizer(step, checkpoint_of(saved), PATH)
    assert words in str(refused.value)
    assert_equal(state_of(step.optimizer), before, "state")


def test_a_notebooks_state_is_of_no_use_to_another_optimizer() -> None:
    """Muon refuses a checkpoint of the notebook, whose AdamW state has numbers in place of parameter names and has no
    momentum."""
    step = trained_step(MUON)
    tensors = step.bare_model.to_checkpoint_names().values()  # as many as the notebook has parameters
    numbered = {index: {"step": 3.0, "exp_avg": tensor} for index, tensor in enumerate(tensors)}
    with pytest.raises(UserError, match=r"optimizer.pt: does not hold this run's state"):
        restore_optimizer(step, Checkpoint({}, {"state": numbered}, {}, {}, CheckpointMeta(global_step=2)), PATH)


def test_a_state_without_memory_is_not_taken_for_another_runs() -> None:
    """Training says that memory has run out, and does not advise to give the checkpoint up."""
    step = trained_step(MUON)
    saved = checkpoint_of(state_of(step.optimizer))
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.")
    with mock.patch.object(Muon, "load_named_state", side_effect=short), pytest.raises(torch.OutOfMemoryError):
        restore_optimizer(step, saved, PATH)
