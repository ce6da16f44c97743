"""An optimizer's step on paper: against torch's counters of a real one, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from gpt import GPTModel
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.runs.optimizer_state import NEWTON_SCHULZ_STEPS, is_muons, newton_schulz_flops
from harness.runs.paper_optimizer import MUON_BYTES, MUON_LAUNCHES, OptimizerWork
from harness.runs.paper_speed import paper_speed, too_small
from harness.runs.train_config import TrainConfig
from harness.training import matrices
from harness.training.muon import Muon
from harness.training.newton_schulz import orthogonalise
from tests.model.test_model import random_model, random_tokens, shape
from tests.runs.test_paper_speed import GPT2_SMALL, changed, device
from tests.support.configs import SEED_TRAIN

MUON = {"optimizer": "muon"}
SHARED = {"shard_optimizer": True}
# The stack of the public speed record for GPT-2 small's loss, as far as model.json has it.
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


@pytest.mark.parametrize("sides", [(16, 16), (16, 40), (40, 16)])
def test_newton_schulz_is_what_torch_counts(sides: tuple[int, int]) -> None:
    matrix = torch.randn(1, min(sides), max(sides))
    with FlopCounterMode(display=False) as counter:
        orthogonalise(matrix, torch.float32)
    assert newton_schulz_flops(*sides) == counter.get_total_flops()
    bound = 6 * NEWTON_SCHULZ_STEPS * max(sides) * min(sides) ** 2  # the writeup's, which is reached by squares
    assert newton_schulz_flops(*sides) <= bound
    assert (newton_schulz_flops(*sides) == bound) == (sides[0] == sides[1])


class Traffic(TorchDispatchMode):
    """Counts kernels, and bytes of tensors that those besides the products read and write."""

    VIEWS = frozenset(["view", "slice", "detach", "transpose", "expand", "_unsafe_view", "unbind"])

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name not in self.VIEWS:
            # A product that adds to another matrix copies that one first.
            self.kernels += 2 if name == "baddbmm" else 1
        if name not in self.VIEWS and "bmm" not in name:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.bytes += sum(each.nbytes for each in tensors if each.numel() > 1)
        return result


def test_muons_kernels_and_bytes_are_those_of_a_real_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "BATCH_NUMBERS", 1)  # one by one, as matrices of GPT-2's size are
    model = random_model(shape(emb_dim=64))
    model(random_tokens(model.config), random_tokens(model.config, seed=4)).backward()
    muon = Muon(model, TrainConfig.model_validate({**SEED_TRAIN, **MUON}), torch.bfloat16)
    not_skipped = torch.zeros(())
    muon._step_matrices(not_skipped, None)  # makes its state
    with Traffic() as traffic:
        muon._step_matrices(not_skipped, None)
    sizes = [each.numel() for name, each in model.to_checkpoint_names().items() if is_muons(name, each.shape)]
    assert traffic.bytes / sum(sizes) == pytest.approx(MUON_BYTES, rel=0.001)
    assert traffic.kernels / len(sizes) == pytest.approx(MUON_LAUNCHES, abs=1)


def test_the_work_of_gpt2_small() -> None:
    """By hand: in each of 12 layers four matrices of 768 x 768, and two of 768 x 3,072."""
    work = OptimizerWork.of(GPT2_SMALL, MUON, 8)
    assert sorted(set(work.muon_matrices)) == [(768, 768), (768, 3072)]
    assert len(work.muon_matrices) == 72
    assert work.bytes == 8 * 163_009_536 + 86 * 84_934_656 + 28 * (163_009_536 - 84_934_656)
    assert OptimizerWork.of(GPT2_SMALL, {}, 8).bytes == 36 * 163_009_536
    # 36 tiles of 128 x 128 on 132 processors, or 144 on all of them
    square, whole = 2 * 768**3, 2 * 768**2 * 3072
    layer = 4 * 3 * square / (36 / 132) + 2 * ((whole + square) / (36 / 132) + whole)
    assert work.newton_schulz_seconds(600e12, 132) == pytest.approx(12 * 5 * layer / 600e12)
    assert (
        0.25
        < 12
        * (4 * newton_schulz_flops(768, 768) + 2 * newton_schulz_flops(768, 3072))
        / 600e12
        / (work.newton_schulz_seconds(600e12, 132))
        < 1
    ), "a device that is always busy would need that part of it"


def test_what_ranks_share_out() -> None:
    alone, eight = (OptimizerWork.of(GPT2_SMALL, MUON | SHARED, ranks) for ranks in (1, 8))
    assert alone.exchange_seconds(4e11) == 0
    assert eight.bytes - 8 * 163_009_536 == pytest.approx((alone.bytes - 8 * 163_009_536) / 8)
    assert eight.newton_schulz_seconds(1e15, 132) == pytest.approx(alone.newton_schulz_seconds(1e15, 132) / 8)
    assert (alone.launches, eight.launches) == (72 * 45, 9 * 45)
    assert eight.exchange_seconds(4e11) == pytest.approx(163_009_536 * 4 / 4e11 + (72 + 3 + 8) * 20e-6)
    seven = OptimizerWork.of(GPT2_SMALL, MUON | SHARED, 7)
    assert seven.own_matrices == 11, "matrices are not cut"
    unshared = OptimizerWork.of(GPT2_SMALL, MUON, 8)
    assert (unshared.exchange_seconds(4e11), unshared.own_matrices) == (0, 72)


def test_muon_takes_longer_and_sharing_it_out_less() -> None:
    layout = BatchLayout(8, 1, 27, 1024)
    adamw, muon, shared = (
        paper_speed(GPT2_SMALL, device("H100"), layout, train) for train in ({}, MUON, MUON | SHARED)
    )
    assert adamw.terms == paper_speed(GPT2_SMALL, device("H100"), layout).terms
    assert 1.05 < muon.seconds / adamw.seconds < 1.25
    assert adamw.seconds < shared.seconds < muon.seconds
    more_steps = paper_speed(GPT2_SMALL, device("H100"), BatchLayout(8, 4, 27, 1024), MUON)
    name = "Newton and Schulz, per step"
    assert more_steps.terms[name] == pytest.approx(muon.terms[name] / 4)


def test_muons_many_kernels_count_where_the_cpu_decides() -> None:
    """8 sequences of GPT-2 small's are work enough for a microbatch's 560 launches, not for Muon's 3,240 besides."""
    layout = BatchLayout(1, 1, 8, 1024)
    assert too_small(GPT2_SMALL, device("H100"), layout) is None
    assert too_small(GPT2_SMALL, device("H100"), layout, MUON) == (
        "launching the kernels of a step (about 3,800, 41.8 ms) takes longer than their work; only a measurement tells "
        "the speed"
    )
    assert too_small(GPT2_SMALL, device("H100"), BatchLayout(1, 4, 8, 1024), MUON) is None


def test_embeddings_besides_the_tokens_move_and_travel() -> None:
    """Three tables of values: read and written in each step like all weights; the last gradients that the ranks send
    are those of tokens, bigrams and the first block's values."""
    fast = ModelConfig.model_validate({**GPT2_SMALL.model_dump(), **FAST})
    assert fast.parameters == sum(each.numel() for each in GPTModel(fast).parameters())
    layout, h100 = BatchLayout(8, 1, 27, 1024), device("H100")
    terms = paper_speed(fast, h100, layout).terms
    assert terms["optimizer, per step"] == pytest.approx(fast.parameters * 36 / (0.8 * 3.35e12) / 27_648)
    late = (50_257 + 50_000 + 50_257) * 768
    assert terms["exchange"] == pytest.approx(1.75 * 4 * late / 4e11 / 27_648)
    without = changed(**{**FAST, "bigram_embedding": None})
    kB = 1e3 * (terms["between products"] - paper_speed(without, h100, layout).terms["between products"])
    assert kB == pytest.approx(768 * 16 / (0.8 * 3.35e9))
