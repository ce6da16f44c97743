"""The optimizer's protocol: AdamW is torch's, its state goes by name, and nothing else of training assumes AdamW."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from checkpointing import OptimizerStates, capture_optimizer, load_notebook_optimizer, restore_optimizer
from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model.precision import Precision
from harness.runs.optimizer_state import optimizer_state_bytes
from harness.runs.train_config import TrainConfig
from harness.training.adamw import AdamW
from harness.training.optimizer import Optimizer, build_optimizer
from harness.training.step import OptimizerStep, build_step
from harness.training.zero1 import NamedState, StateShapes, check_state

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU)
CONFIG = ModelConfig(vocab_size=50, context_length=8, emb_dim=16, n_heads=2, n_layers=1, drop_rate=0.0, qkv_bias=True)
TRAIN = TrainConfig(
    dataset="a/b", microbatch_size=2, min_train_tokens=1, start_train_token=0, checkpoint_interval=1, learning_rate=0.01
)
MATRICES_ONLY = TRAIN.model_copy(update={"decay_all_parameters": False})
NO_SCALER = Precision("fp32", "cpu").scaler()
BATCHES = [[Microbatch(np.arange(17, dtype=np.uint16) * factor % 50, 8)] for factor in (1, 2, 3, 7, 11)]


def fresh_model(seed: int = 0, config: ModelConfig = CONFIG) -> GPTModel:
    torch.manual_seed(seed)
    return GPTModel(config)


def trained_step(config: TrainConfig = TRAIN, steps: int = 3) -> OptimizerStep:
    model = fresh_model()
    step = build_step(model, model, config)
    for batch in BATCHES[:steps]:
        step.run(batch, 1.0)
    return step


def alike(left: NamedState, right: NamedState) -> bool:
    """Same parameters, same tensors to the bit."""
    return left.keys() == right.keys() and all(
        left[name].keys() == right[name].keys()
        and all(torch.equal(left[name][key], right[name][key]) for key in left[name])
        for name in left
    )


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    return all(map(torch.equal, left.parameters(), right.parameters()))


# AdamW


def test_adamw_is_torchs_to_the_bit() -> None:
    """Without clipping; over steps of different rates, with both kinds of groups."""
    for config in (TRAIN, MATRICES_ONLY):
        ours, theirs = fresh_model(), fresh_model()
        optimizer = AdamW(ours, config)
        matrices = [p for p in theirs.parameters() if p.dim() >= 2 or config.decay_all_parameters]
        vectors = [p for p in theirs.parameters() if p.dim() < 2 and not config.decay_all_parameters]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        reference = torch.optim.AdamW([group for group in groups if group["params"]], betas=config.betas, fused=True)
        for number, batch in enumerate(BATCHES):
            multiplier = 1.0 / (number + 1)
            for model in (ours, theirs):
                model.zero_grad()
                model(*batch[0].to(CPU)).backward()
            optimizer.set_multiplier(multiplier)
            optimizer.update(NO_SCALER, None)
            for group in reference.param_groups:
                group["lr"] = config.learning_rate * multiplier
            reference.step()
            assert optimizer.learning_rate == config.learning_rate * multiplier
        assert same_weights(ours, theirs)
        names: dict[Tensor, str] = {parameter: name for name, parameter in theirs.named_parameters()}
        assert alike(
            optimizer.named_state(ALONE), {names[parameter]: state for parameter, state in reference.state.items()}
        )


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_step_is_torchs_adamw_with_clipping(max_norm: float | None) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.nn.Linear(7, 5), torch.nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    optimizer = AdamW(ours, TRAIN)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        x = torch.randn(3, 7)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().sum().backward()
        norm, skipped = optimizer.update(NO_SCALER, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or math.inf)
        reference.step()
        torch.testing.assert_close(norm, expected)
        assert skipped == 0
    for left, right in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(precision: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer, scaler = AdamW(model, TRAIN), Precision(precision, "cpu").scaler()
    for _ in range(2):
        scaler.scale(model(torch.randn(2, 4)).sum()).backward()
        optimizer.update(scaler, 1.0)
        model.zero_grad()
    weights = [parameter.clone() for parameter in model.parameters()]
    state = copy.deepcopy(optimizer.named_state(ALONE))
    scaler.scale(model(torch.full((2, 4), math.inf)).sum()).backward()
    _, skipped = optimizer.update(scaler, 1.0)
    assert skipped == 1
    assert all(map(torch.equal, weights, model.parameters()))
    assert len(state) == 2
    assert alike(optimizer.named_state(ALONE), state)


def test_weight_decay_on_matrices_only() -> None:
    model = GPTModel(CONFIG)
    groups = AdamW(model, MATRICES_ONLY).param_groups
    assert {parameter.dim() for parameter in groups[0]["params"]} == {2}
    assert {parameter.dim() for parameter in groups[1]["params"]} == {1}
    assert (groups[0]["weight_decay"], groups[1]["weight_decay"]) == (0.1, 0.0)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_groups_keep_their_own_peak_rates() -> None:
    optimizer = AdamW(fresh_model(), MATRICES_ONLY)
    optimizer.param_groups[1]["peak_learning_rate"] = 0.5
    for multiplier in (0.5, 0.25):
        optimizer.set_multiplier(multiplier)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01 * multiplier, 0.5 * multiplier]
        assert optimizer.learning_rate == 0.01 * multiplier


# State by name


def test_the_state_is_that_of_every_parameter_by_name_in_fp32() -> None:
    step = trained_step()
    assert isinstance(step.model, GPTModel)
    state = step.optimizer.named_state(ALONE)
    assert list(state) == [name for name, _ in step.model.named_parameters()]
    shapes = step.optimizer.state_shapes()
    for name, parameter in step.model.named_parameters():
        assert list(state[name]) == ["step", "exp_avg", "exp_avg_sq"]
        assert {key: value.shape for key, value in state[name].items()} == shapes[name]
        assert shapes[name]["exp_avg"] == shapes[name]["exp_avg_sq"] == parameter.shape
        assert {value.dtype for value in state[name].values()} == {torch.float32}
        assert state[name]["step"] == 3


def test_the_state_is_the_optimizers_own_and_rank_0s_alone() -> None:
    """Nothing is copied twice: HostCopies does it."""
    step = trained_step()
    state = step.optimizer.named_state(ALONE)
    kept = copy.deepcopy(state)
    step.run(BATCHES[3], 1.0)
    assert alike(step.optimizer.named_state(ALONE), state)
    assert not alike(state, kept)
    assert step.optimizer.named_state(World(1, 1, 2, 2, CPU)) == {}


def test_before_the_first_step_there_is_no_state() -> None:
    assert AdamW(fresh_model(), TRAIN).named_state(ALONE) == {}


@pytest.mark.parametrize("saved_by", [TRAIN, MATRICES_ONLY])
@pytest.mark.parametrize("loaded_by", [TRAIN, MATRICES_ONLY])
def test_a_state_does_not_depend_on_how_parameters_are_grouped(saved_by: TrainConfig, loaded_by: TrainConfig) -> None:
    """The groups' own settings stay those of train.json as it is now."""
    saved = trained_step(saved_by).optimizer.named_state(ALONE)
    optimizer = AdamW(fresh_model(), loaded_by)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_named_state(saved)
    assert alike(optimizer.named_state(ALONE), saved)
    assert groups == [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved.pop("out_head.weight"), "others than the model's"),
        (lambda saved: saved.update(more={}), "others than the model's"),
        (lambda saved: saved["out_head.weight"].pop("exp_avg"), "out_head.weight has ['exp_avg_sq', 'step']"),
        (
            lambda saved: saved["out_head.weight"].update(exp_avg=torch.zeros(3)),
            "exp_avg of out_head.weight is torch.float32 [3]",
        ),
        (
            lambda saved: saved["out_head.weight"].update(step=torch.tensor(3)),
            "step of out_head.weight is torch.int64 []",
        ),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(change: Any, words: str) -> None:
    step = trained_step()
    before = copy.deepcopy(step.optimizer.named_state(ALONE))
    saved = copy.deepcopy(before)
    change(saved)
    with pytest.raises(UserError, match=r"optimizer\.pt") as refused:
        restore_optimizer(step, OptimizerStates(saved, {}))
    assert words in str(refused.value)
    assert alike(step.optimizer.named_state(ALONE), before)


def test_a_state_of_another_model_is_refused() -> None:
    wider = fresh_model(config=CONFIG.model_copy(update={"vocab_size": 51}))
    with pytest.raises(ValueError, match=r"tok_emb\.weight"):
        AdamW(wider, TRAIN).load_named_state(trained_step().optimizer.named_state(ALONE))


def test_bytes_of_state_are_those_that_there_are() -> None:
    """The numbers of steps, of four bytes each, are left out."""
    step = trained_step()
    state = step.optimizer.named_state(ALONE)
    there = sum(value.nbytes for values in state.values() for key, value in values.items() if key != "step")
    assert optimizer_state_bytes(TRAIN, CONFIG) == there


# Any optimizer


class Momentum:
    """SGD with momentum, the textbook's, one velocity for each parameter."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.parameters = dict(model.named_parameters())
        self.velocities: dict[str, Tensor] = {}
        self.peak = self.learning_rate = config.learning_rate

    def set_multiplier(self, multiplier: float, decay: float = 1.0) -> None:
        self.learning_rate = self.peak * multiplier

    @torch.no_grad()
    def update(self, scaler: torch.amp.GradScaler, max_norm: float | None) -> tuple[Tensor, Tensor]:
        assert not scaler.is_enabled()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), math.inf if max_norm is None else max_norm)
        skipped = (~torch.isfinite(norm)).float()
        for name, parameter in self.parameters.items() if not skipped else ():
            assert parameter.grad is not None
            velocity = self.velocities.setdefault(name, torch.zeros_like(parameter))
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(velocity, alpha=self.learning_rate)
        return norm.float(), skipped

    def state_shapes(self) -> StateShapes:
        return {name: {"velocity": parameter.shape} for name, parameter in self.parameters.items()}

    def named_state(self, world: World) -> NamedState:
        return {name: {"velocity": velocity.clone()} for name, velocity in self.velocities.items()}

    def load_named_state(self, saved: NamedState) -> None:
        check_state(saved, self.state_shapes())
        self.velocities = {name: state["velocity"].clone() for name, state in saved.items()}


def momentum_step(model: nn.Module) -> OptimizerStep:
    optimizer: Optimizer = Momentum(model, TRAIN)
    return OptimizerStep(model, optimizer, Precision("fp32", "cpu"), TRAIN)


def test_another_optimizer_steps_is_saved_and_goes_on() -> None:
    """Three steps, a checkpoint, two more: the weights of five steps at once, and of torch's own SGD."""
    at_once, stopped, torchs = fresh_model(), fresh_model(), fresh_model()
    step, first, reference = (
        momentum_step(at_once),
        momentum_step(stopped),
        torch.optim.SGD(torchs.parameters(), lr=TRAIN.learning_rate, momentum=0.9),
    )
    for batch in BATCHES:
        step.run(batch, 1.0)
        reference.zero_grad()
        torchs(*batch[0].to(CPU)).backward()
        torch.nn.utils.clip_grad_norm_(torchs.parameters(), TRAIN.clipping_max_norm or math.inf)
        reference.step()
    for batch in BATCHES[:3]:
        first.run(batch, 1.0)
    saved, weights = capture_optimizer(first, ALONE), stopped.to_checkpoint_names()
    continued = fresh_model(seed=1)
    following = momentum_step(continued)
    continued.load_state_dict(stopped.state_dict())
    restore_optimizer(following, saved)
    for batch in BATCHES[3:]:
        following.run(batch, 1.0)
    assert same_weights(continued, at_once)
    assert not all(torch.equal(weights[name], tensor) for name, tensor in continued.to_checkpoint_names().items())
    for ours, theirs in zip(at_once.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_optimizers_refuse_each_others_state() -> None:
    velocities = capture_optimizer(ran(momentum_step(fresh_model())), ALONE)
    moments = capture_optimizer(trained_step(), ALONE)
    with pytest.raises(UserError, match=r"optimizer.pt: .*tok_emb.weight has \['velocity'\]"):
        restore_optimizer(trained_step(), velocities)
    with pytest.raises(UserError, match=r"optimizer.pt: .*tok_emb.weight has \['exp_avg', 'exp_avg_sq', 'step'\]"):
        restore_optimizer(momentum_step(fresh_model()), moments)


def ran(step: OptimizerStep) -> OptimizerStep:
    step.run(BATCHES[0], 1.0)
    return step


def test_a_notebooks_state_is_of_no_use_to_another_optimizer() -> None:
    """The notebook's is AdamW's: numbered, and without velocities."""
    model = fresh_model()
    tensors = model.to_checkpoint_names().values()  # as many as the notebook has parameters
    numbered = {index: {"step": 3.0, "exp_avg": tensor} for index, tensor in enumerate(tensors)}
    with pytest.raises(UserError, match=r"optimizer.pt: .*velocity"):
        load_notebook_optimizer(momentum_step(model), OptimizerStates({"state": numbered}, {}))


def test_train_json_chooses_the_optimizer() -> None:
    assert isinstance(build_optimizer(fresh_model(), TRAIN), AdamW)
