"""Estimated speeds, compared with numbers calculated by hand and with torch's counters; the settings that they depend
on; and the names of devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.planning.estimated_speed import (
    DEVICES,
    MUON_BYTES,
    MUON_LAUNCHES,
    GpuSpec,
    estimated_speed,
    find_device,
)
from harness.runs.optimizer_state import NEWTON_SCHULZ_STEPS, is_muons, newton_schulz_flops
from harness.runs.throughput import peak_flops
from harness.runs.train_config import TrainConfig
from harness.training import muon as muon_module
from harness.training.adamw import AdamW
from harness.training.muon import Muon, orthogonalize
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.configs import SEED_TRAIN
from tests.support.isolation import SHIPPED_RUNS

GPT2_SMALL = load_model_config(SHIPPED_RUNS / "8xh100m80" / "model.json")
MUON: dict[str, Any] = {"optimizer": "muon"}
SHARED: dict[str, Any] = {"shard_optimizer": True}
# The model options of the public speed record for GPT-2 small's loss that model.json has.
FAST: dict[str, Any] = {
    "position": "rope",
    "rope_base": 10_000.0,
    "norm": "rmsnorm",
    "qk_norm": True,
    "norm_gain": True,
    "mlp": "relu2",
    "initialisation": "zero_residual",
    "linear_bias": False,
    "drop_rate": 0.0,
    "value_embeddings": 3,
    "embedding_skip": True,
    "bigram_embedding": 50_000,
}
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


def device(name: str) -> GpuSpec:
    found = find_device(name)
    assert found is not None
    return found


def changed(**values: Any) -> ModelConfig:
    return GPT2_SMALL.model_copy(update=values)


def speed_of(model: ModelConfig, known: GpuSpec, layout: BatchLayout, train: dict[str, Any] | None = None) -> float:
    found = estimated_speed(model, known, layout, train or {})
    assert isinstance(found, float), found
    return found


def test_gpt2_small_on_eight_h200() -> None:
    """The speed equals one computed here by hand in microseconds per token: matrix products, attention, and memory
    traffic per token, per microbatch and per step."""
    found = speed_of(GPT2_SMALL, device("H200"), BatchLayout(8, 2, 64, 1024))
    each = (6 * (84.934656 + 38.597376)) / 593.4 + 66.060288 / 190
    each += (768 * (12 * 139 + 195) + 4 * 50_257) / 3.84e6
    each += 163.009536 * (18 / 3.84 / 65_536 + 36 / 3.84 / 131_072)
    each += 4 * 1.75 * (163.009536 - 84.934656 - 38.597376) / 0.4 / 131_072
    assert found == pytest.approx(8e6 / (1.07 * each), rel=1e-3)


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
def test_no_speed_on_paper_beats_the_products_at_their_peak(known: GpuSpec) -> None:
    attention = 12 * 12 * 768 * 1024  # FLOPs as MFU counts them, without the causal mask
    least = (GPT2_SMALL.flops_per_token - attention) / known.matrix_peak
    assert least < 1 / speed_of(GPT2_SMALL, known, BatchLayout(1, 1, 64, 1024)) < 5 * least


def test_what_a_speed_depends_on() -> None:
    def speed(
        ranks: int = 1, steps: int = 1, microbatch: int = 13, model: ModelConfig = GPT2_SMALL, **train: Any
    ) -> float:
        return speed_of(model, device("A100 40GB"), BatchLayout(ranks, steps, microbatch, 1024), train) / ranks

    assert speed(microbatch=64) > speed()
    assert speed(steps=4) > speed()
    assert 0.94 * speed() < speed(ranks=8) < speed()
    assert speed(model=changed(**FAST)) < speed()
    assert 0.8 * speed(ranks=8) < speed(ranks=8, **MUON) < speed(ranks=8, **MUON, **SHARED) < speed(ranks=8)


def test_no_speed_is_estimated_where_launching_kernels_takes_longest() -> None:
    """No speed is estimated for a step whose kernels take less than 11 µs each on average, because the CPU then limits
    the speed. Kernels are counted as 45 per layer and 20 more for each microbatch, and 39 for each of Muon's 72
    matrices."""
    tiny = changed(n_layers=2, emb_dim=128, n_heads=2, context_length=128, vocab_size=4096)
    layout, h100 = BatchLayout(1, 1, 4, 128), device("H100")
    assert estimated_speed(tiny, h100, layout, {}) == (
        "launching the kernels of a step (about 110, 1.2 ms) takes longer than running them; only a measurement gives "
        "the speed"
    )
    layout = BatchLayout(1, 1, 8, 1024)
    assert speed_of(GPT2_SMALL, h100, layout)
    assert "(about 3,368, 37.0 ms)" in str(estimated_speed(GPT2_SMALL, h100, layout, MUON))
    assert speed_of(GPT2_SMALL, h100, BatchLayout(1, 4, 8, 1024), MUON)


@pytest.mark.parametrize("sides", [(16, 16), (16, 40), (40, 16)])
def test_newton_schulz_is_what_torch_counts(sides: tuple[int, int]) -> None:
    matrix = torch.randn(1, min(sides), max(sides))
    with FlopCounterMode(display=False) as counter:
        orthogonalize(matrix, torch.float32)
    assert newton_schulz_flops(*sides) == counter.get_total_flops()
    bound = 6 * NEWTON_SCHULZ_STEPS * max(sides) * min(sides) ** 2  # of Muon's writeup; square matrices reach it
    assert newton_schulz_flops(*sides) <= bound
    assert (newton_schulz_flops(*sides) == bound) == (sides[0] == sides[1])


class Traffic(TorchDispatchMode):
    """Mode that counts kernels, and the bytes that all kernels but matrix products read and write."""

    VIEWS = frozenset(["view", "slice", "detach", "transpose", "expand", "_unsafe_view", "unbind"])

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in self.VIEWS:
            # A product that adds another matrix (baddbmm) first copies that matrix.
            self.kernels += 2 if name == "baddbmm" else 1
        if name not in self.VIEWS and "bmm" not in name:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.bytes += sum(each.nbytes for each in tensors if each.numel() > 1)
        return result


def test_muons_kernels_and_bytes_are_those_of_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(muon_module.BATCH_ELEMENTS, "cpu", 1)  # each matrix alone
    model = random_model(shape(emb_dim=64))
    model(random_tokens(model.config), random_tokens(model.config, seed=4)).backward()
    muon = Muon(model, TrainConfig.model_validate({**SEED_TRAIN, **MUON}), torch.bfloat16)
    monkeypatch.setattr(AdamW, "update", lambda *_: None)  # the matrices alone
    not_skipped = torch.zeros(())
    muon.update(not_skipped, None)  # the first step creates the state
    with Traffic() as traffic:
        muon.update(not_skipped, None)
    sizes = [each.numel() for name, each in model.to_checkpoint_names().items() if is_muons(name, each.shape)]
    assert traffic.bytes / sum(sizes) == pytest.approx(MUON_BYTES, rel=0.001)
    assert traffic.kernels / len(sizes) == pytest.approx(MUON_LAUNCHES, abs=1)


def test_names_of_devices() -> None:
    """A device is found by the name that its driver gives and by names that people use. A device is not found if its
    memory or clocks differ from those in the table, or if it is only a part of a GPU (MIG)."""
    for driver, name in DRIVER_NAMES.items():
        assert device(driver).name == name
        assert device(driver).matrix_peak == peak_flops(driver), "MFU uses another peak for the same device"
    for people, name in (("a100-40gb", "A100 40GB"), ("A100 40 GB", "A100 40GB"), ("h100 sxm", "H100")):
        assert device(people).name == name
    for other in (
        *("A100", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"),
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "Tesla T4", "H1000", ""),
    ):
        assert find_device(other) is None, other


def test_what_the_arithmetic_does_not_cover() -> None:
    covered = {"precision": "auto", "compile": "auto", "activation_checkpointing": False, "deterministic": False}

    def found(ranks: int, **keys: Any) -> float | str:
        return estimated_speed(GPT2_SMALL, device("H200"), BatchLayout(ranks, 2, 64, 1024), keys)

    assert found(8) == found(8, **covered), "keys that another version did not record must not matter"
    assert isinstance(found(8, **covered, optimizer="muon", shard_optimizer=True), float)
    assert found(1, **covered | {"precision": "fp32"}) == 'the estimate does not cover "precision": "fp32"'
    assert found(1, **covered | {"compile": False}) == 'the estimate does not cover "compile": false'
    assert found(1, **covered | {"deterministic": True}) == 'the estimate does not cover "deterministic": true'
    assert found(16, **covered) == "16 ranks do not fit on one machine of 8 GPUs"
