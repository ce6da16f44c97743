"""Whole runs of the real command end in the weights of a reference implementation in this file, which computes the same
steps from their formulas in fp64: batch ramp, schedule, scaling rules, clipping, Muon and AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from signal import SIGTERM
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt import GPTModel, ModelConfig
from tests.support.launch import DATASET, MODEL, Workshop, meta_of, metrics
from tests.support.straight import FAULTS

# Without biases of keys, because their gradient is only rounding error, by which AdamW would still make full updates.
SHAPE = MODEL | {"drop_rate": 0.0, "emb_dim": 24, "qkv_bias": False}
SETTINGS: dict[str, Any] = {
    "gradient_accumulation_steps": None,
    "microbatch_size": 1,
    "batch_ramp": [[0, 2], [150, 4], [300, 8]],
    "min_train_tokens": 1000,
    "start_train_token": 7,
    "learning_rate": 0.004,
    "weight_decay": 0.5,
    "betas": [0.9, 0.98],
    "scale_with_batch": {"reference_tokens": 64, "reference_train_tokens": 2240},
    "lr_schedule": "linear",
    "warmup_steps": 3,
    "clipping_max_norm": 0.5,
    "report_interval": 1,
    "precision": "fp32",
}
# Number of 16-token sequences in each step's global batch. The batch grows after 160 and 352 of the 1,120 tokens.
SEQUENCES = [2] * 5 + [4] * 3 + [8] * 6
MUON: dict[str, Any] = {
    "optimizer": "muon",
    "muon_learning_rate": 0.01,
    "muon_weight_decay": 0.9,
    "muon_momentum": 0.9,
    "muon_momentum_warmup_steps": 8,
    "embedding_learning_rate": 0.006,
    "head_learning_rate": 0.002,
    "vector_learning_rate": 0.003,
    "decay_all_parameters": False,
}


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return the matrix, divided by its norm, after five steps x -> a·x + b·x³ + c·x⁵ on its singular values x."""
    u, s, vh = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vh


@dataclass
class ByHand:
    """Reference implementation of training in fp64."""

    train: dict[str, Any]
    model: GPTModel
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)

    def run(self, tokens: Tensor) -> None:
        at = self.train["start_train_token"]
        for step, sequences in enumerate(SEQUENCES):
            count = sequences * 16
            loss = self.loss(tokens[at : at + count].view(-1, 16), tokens[at + 1 : at + count + 1].view(-1, 16))
            names, parameters = zip(*self.model.named_parameters(), strict=True)
            gradients = torch.autograd.grad(loss, parameters)
            norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
            clipped = max(1.0, (norm + 1e-6) / self.train["clipping_max_norm"])
            with torch.no_grad():
                for name, gradient in zip(names, gradients, strict=True):
                    self.update(step, name, gradient / clipped)
            at += count

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(inputs).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten())

    def multiplier(self, step: int) -> float:
        """Return the factor of the learning rate: linear warm-up over three steps, then linear decay that would reach
        zero at step 14."""
        return (step + 1) / 3 if step < 3 else 1 - (step - 3) / 11

    def update(self, step: int, name: str, gradient: Tensor) -> None:
        train, weight = self.train, self.model.get_parameter(name).detach()
        by_batch = math.sqrt(SEQUENCES[step] * 16 / 64)
        horizon = 2240 / 1120
        is_matrix = weight.dim() == 2 and name.startswith("trf_blocks")
        if is_matrix and "optimizer" in train:
            rate = train["muon_learning_rate"] * by_batch * self.multiplier(step)
            weight *= 1 - rate * train["muon_weight_decay"] * by_batch * horizon
            weight -= rate * self.muon(step, name, gradient)
            return
        kind = "vector" if weight.dim() == 1 else "embedding" if "_emb" in name else "head"
        own = train.get(f"{kind}_learning_rate", train["learning_rate"])
        rate = own * by_batch * self.multiplier(step)
        if weight.dim() > 1 or train.get("decay_all_parameters", True):
            weight *= 1 - rate * train["weight_decay"] * by_batch * horizon
        weight -= rate * self.adamw(step, name, gradient)
        if name == "tok_emb.weight":
            self.learning_rates.append(train["learning_rate"] * by_batch * self.multiplier(step))

    def adamw(self, step: int, name: str, gradient: Tensor) -> Tensor:
        first, second = self.moments.setdefault(name, [torch.zeros_like(gradient) for _ in range(2)])
        low, high = self.train["betas"]
        first.mul_(low).add_(gradient, alpha=1 - low)
        second.mul_(high).add_(gradient.square(), alpha=1 - high)
        return (first / (1 - low ** (step + 1))) / ((second / (1 - high ** (step + 1))).sqrt() + 1e-8)

    def muon(self, step: int, name: str, gradient: Tensor) -> Tensor:
        """Return Muon's update. Query, key and value of the fused tensor are orthogonalized separately."""
        (average,) = self.moments.setdefault(name, [torch.zeros_like(gradient)])
        momentum = 0.85 + (self.train["muon_momentum"] - 0.85) * min(step / 8, 1)
        average.mul_(momentum).add_(gradient, alpha=1 - momentum)
        ahead = (1 - momentum) * gradient + momentum * average
        parts = ahead.split(24) if ".qkv." in name else [ahead]
        return torch.cat([self.scale(part) * orthogonalized(part) for part in parts])

    def scale(self, matrix: Tensor) -> float:
        rows, columns = matrix.shape
        if self.train.get("muon_update_scale") == "original":
            return math.sqrt(max(1, rows / columns))
        return 0.2 * math.sqrt(max(rows, columns))


@dataclass(frozen=True)
class Part:
    """Part of a run: its number of ranks, whether the optimizer state is sharded, and its last step (None for the end
    of the run)."""

    ranks: int
    is_shared: bool = False
    last: int | None = None

    @property
    def prelude(self) -> str:
        if self.last is None:
            return ""
        return f"{FAULTS}before(STEP, tell(SIGTERM), rank=0, step={self.last})\n"


def start_and_end(shop: Workshop, train: dict[str, Any], parts: Sequence[Part]) -> Iterator[GPTModel]:
    """Yield a model with the run's initial weights, then train all parts and yield a model with the final weights. Both
    are in fp64."""
    torch.manual_seed(3)
    model = GPTModel(ModelConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():  # so that no weight is zero and all gradients are of similar size
            parameter.add_(0.05 * torch.randn(parameter.shape))
    start = shop.path / "start.safetensors"
    save_file({name: each.contiguous() for name, each in model.to_checkpoint_names().items()}, start)
    yield model.double()
    keys = SETTINGS | train | {"initial_weights": str(start), "checkpoint_interval": 4}
    for part in parts:
        run = shop.add_run("r", model=SHAPE, **keys, shard_optimizer=part.is_shared)
        shop.train("r", ranks=part.ranks, prelude=part.prelude, expect=0 if part.last is None else 128 + SIGTERM)
    end = GPTModel(ModelConfig(**SHAPE))
    end.load_checkpoint_tensors(load_file(run / "checkpoints" / "latest" / "model.safetensors"), run)
    yield end.double()


# Stopped in the first batch size and in the second. After each stop the number of ranks and `shard_optimizer` change.
PARTS = (Part(2, True, 3), Part(1, False, 6), Part(2, True))


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ({}, [Part(1)]),
        (MUON, [Part(2, True)]),
        pytest.param({**MUON, "muon_update_scale": "original"}, [Part(1)], marks=pytest.mark.slow),
        pytest.param(MUON, PARTS, marks=pytest.mark.slow),
    ],
    ids=["adamw", "muon-shared", "muon-original", "muon-in-parts"],
)
def test_a_run_ends_in_the_weights_of_the_formulas(
    shop: Workshop, train: dict[str, Any], parts: Sequence[Part]
) -> None:
    weights = start_and_end(shop, train, parts)
    model = next(weights)
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    tokens = load_file(shop.datasets / DATASET / "train.safetensors")["tokens"].long()
    by_hand = ByHand({**SETTINGS, **train}, model)
    by_hand.run(tokens)
    for name, found in next(weights).named_parameters():
        wanted = model.get_parameter(name)
        moved = (wanted - start[name]).norm()
        assert (found - wanted).norm() < 2e-3 * moved, name
    rates = [event["learning_rate"] for event in metrics(shop.runs / "r", "train")]
    assert rates == pytest.approx(by_hand.learning_rates, rel=1e-12)
    meta = meta_of(shop.runs / "r")
    assert (meta["global_step"], meta["tokens_seen"]) == (13, 1120)
