"""`Muon` equals torch.optim.Muon on the matrices of the transformer blocks and torch.optim.AdamW on all other
parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt import GPTModel
from harness.common.errors import UserError
from harness.model.precision import Precision
from harness.runs.train_config import TrainConfig
from harness.training.muon import BATCH_ELEMENTS, Matrix, Muon, batches_of, orthogonalize
from harness.training.step import OptimizerStep
from tests.training.test_optimizer import CONFIG, TRAIN, fresh_model, update

MUON = TRAIN.model_copy(update={"optimizer": "muon"})
RATES = {"muon_learning_rate": 0.02, "muon_weight_decay": 0.3, "muon_momentum": 0.9}


class InFp64(TorchFunctionMode):
    """Mode in which torch.optim.Muon orthogonalizes in fp64 instead of rounding every matrix to bf16."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.bfloat16:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def with_gradients(model: nn.Module, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def as_in_checkpoints(model: GPTModel, name: str, tensor: Tensor) -> list[Tensor]:
    """Return `tensor` as checkpoints store it: split into query, key and value if it is fused, else whole."""
    return list(tensor.split(model.trf_blocks[0].att.qkv_sizes)) if ".qkv." in name else [tensor]  # type: ignore[union-attr]


class Reference:
    """torch.optim.Muon and torch.optim.AdamW for one model. Muon updates copies of the matrices that are split as in
    checkpoints, so that query, key and value are orthogonalized separately."""

    def __init__(self, model: GPTModel, config: TrainConfig) -> None:
        is_muons = lambda name, each: name.startswith("trf_blocks.") and each.dim() == 2  # noqa: E731
        self.muons = {name: each for name, each in model.named_parameters() if is_muons(name, each)}
        self.others = [each for name, each in model.named_parameters() if name not in self.muons]
        self.model = model
        self.parts = {
            name: [nn.Parameter(part.clone()) for part in as_in_checkpoints(model, name, each.detach())]
            for name, each in self.muons.items()
        }
        self.muon = torch.optim.Muon(
            [part for parts in self.parts.values() for part in parts],
            lr=config.muon_learning_rate or config.learning_rate,
            weight_decay=config.weight_decay if config.muon_weight_decay is None else config.muon_weight_decay,
            momentum=config.muon_momentum,
            adjust_lr_fn=config.muon_update_scale,
        )
        self.adamw = torch.optim.AdamW(self.others, lr=config.learning_rate, fused=True)
        self.adamw.defaults["weight_decay"] = self.adamw.param_groups[0]["weight_decay"] = config.weight_decay

    def step(self, multiplier: float, momentum: float | None) -> None:
        for optimizer in (self.muon, self.adamw):
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * multiplier
        for group in self.muon.param_groups if momentum is not None else ():
            group["momentum"] = momentum
        for name, parts in self.parts.items():
            gradient = self.muons[name].grad
            assert gradient is not None
            for part, own in zip(parts, as_in_checkpoints(self.model, name, gradient), strict=True):
                part.grad = own.clone()
        with InFp64():
            self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for name, parts in self.parts.items():
                self.muons[name].copy_(torch.cat([part.detach() for part in parts]))


# Momentum rises from 0.85 to 0.95 over the first four steps.
WARM_UP = (0.85, 0.875, 0.9, 0.925, 0.95, 0.95)


@pytest.mark.parametrize(
    ("keys", "momenta", "tolerance"),
    [
        ({"muon_update_scale": "original"}, (None,) * 6, 1e-12),
        ({"muon_update_scale": "match_rms_adamw", **RATES}, (None,) * 6, 1e-12),
        ({"muon_momentum_warmup_steps": 4}, WARM_UP, 1e-12),
        ({"clipping_max_norm": 0.5}, (None,) * 6, 1e-5),  # gradients are divided by a norm in fp32
    ],
    ids=str,
)
def test_muon_is_torchs_in_fp64(keys: dict[str, Any], momenta: Sequence[float | None], tolerance: float) -> None:
    """Over steps with different learning rates, weights equal torch's up to a small tolerance. Without clipping, the
    weights that AdamW updates equal torch's to the bit. Gradients are clipped by their norm over all parameters. A
    skipped step does not count as one of momentum's warm-up."""
    config = MUON.model_copy(update=keys)
    ours, theirs = fresh_model().double(), fresh_model().double()
    step, reference = OptimizerStep(ours, config), Reference(theirs, config)
    for number, momentum in enumerate(momenta):
        if number == 2:
            with_gradients(ours, number, math.inf)
            assert update(step).skipped == 1
        for model in (ours, theirs):
            with_gradients(model, number, size=1.0 + number)
        norm = update(step, 1 / (number + 1)).gradient_norm
        if config.clipping_max_norm:
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).float())
        reference.step(1 / (number + 1), momentum)
        assert step.learning_rate == config.learning_rate * (1 / (number + 1))
    assert len(reference.muons) == 4 * CONFIG.n_layers
    for (name, left), right in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance / 100)
        assert config.clipping_max_norm or name in reference.muons or torch.equal(left, right), name


def test_orthogonalized_in_bf16_a_step_is_torchs() -> None:
    """With fp32 weights, `orthogonalize` and torch.optim.Muon both compute in bf16. Their steps agree to a few units in
    bf16's last place."""
    torch.manual_seed(0)
    matrix = torch.randn(48, 16)
    parameter, theirs = nn.Parameter(torch.zeros(48, 16)), nn.Parameter(torch.zeros(48, 16))
    theirs.grad = matrix.clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, adjust_lr_fn="original").step()
    with torch.no_grad():
        parameter.sub_(orthogonalize(matrix.mT.unsqueeze(0), torch.bfloat16)[0].mT.float() * math.sqrt(3))
    torch.testing.assert_close(parameter, theirs, rtol=0, atol=2**-7)


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (5, 7), (1, 9)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    """Orthogonalising U·S·Vᵀ gives U·p(S)·Vᵀ, where p applies the quintic polynomial five times. p(s) is between 0.65
    and 1.25 for every s above 0.02."""
    torch.manual_seed(0)
    rows, columns = shape
    u, _, vh = torch.linalg.svd(torch.randn(3, rows, columns, dtype=torch.float64), full_matrices=False)
    s = torch.linspace(0.05, 1, rows, dtype=torch.float64).expand(3, rows)
    found = orthogonalize(u @ torch.diag_embed(s) @ vh, torch.float64)
    values = s / s.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(found, u @ torch.diag_embed(values) @ vh, rtol=1e-10, atol=1e-12)
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_a_tied_head_is_one_parameter_with_the_embeddings_rate() -> None:
    model = fresh_model(config=CONFIG.model_copy(update={"tie_weights": True}))
    config = MUON.model_copy(update={"embedding_learning_rate": 0.5})
    assert "out_head.weight" not in Muon(model, config).state_shapes()
    before = model.tok_emb.weight.detach().clone()
    with_gradients(model, 0)
    update(OptimizerStep(model, config))
    # AdamW's first update is the learning rate, in the direction of the gradient's sign.
    assert (model.out_head.weight.detach() - before).abs().median().item() == pytest.approx(0.5, rel=0.1)


# Which matrices are orthogonalized in one batch, and in which dtype


def test_large_matrices_are_orthogonalized_alone() -> None:
    shapes = [(8, 8), (8, 16), (16, 8)] * 2
    small = [Matrix(f"trf_blocks.{at // 3}.ff.layers.0.weight", 0, *shape) for at, shape in enumerate(shapes)]
    assert list(map(len, batches_of(small, "cpu"))) == [1, 2, 1, 2]
    assert list(map(len, batches_of(small, "cuda"))) == [2, 4]
    for device, numbers in BATCH_ELEMENTS.items():
        side = math.isqrt(numbers // 2)
        large = [Matrix("trf_blocks.0.att.qkv.weight", at, side, side) for at in range(5)]
        assert list(map(len, batches_of(large, device))) == [2, 2, 1]
        assert list(map(len, batches_of([Matrix("trf_blocks.0.ff.layers.0.weight", 0, 2 * side, side)], device))) == [1]


def test_products_are_in_bf16_where_training_is_and_the_device_has_units_for_it(monkeypatch: Any) -> None:
    for has_units in (False, True):
        monkeypatch.setattr("harness.model.precision.has_fast_bf16", lambda has=has_units: has)
        assert Precision("fp32", "cpu").update_dtype() is None
        assert Precision("bf16", "cpu").update_dtype() is (torch.bfloat16 if has_units else None)
        assert Precision("bf16", "cuda").update_dtype() is torch.bfloat16


def test_fp16_is_refused_where_the_device_would_choose_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(Precision, "for_training", lambda *_: Precision("fp16", "cpu"))
    with pytest.raises(UserError, match=r'train.json: key "optimizer": "muon" .*fp16') as refused:
        OptimizerStep(fresh_model(), MUON.model_copy(update={"precision": "fp16"}))  # as resolved at the start
    assert '"precision": "auto" means fp16' in str(refused.value)
    assert "\n" not in str(refused.value)
