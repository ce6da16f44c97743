"""Speeds on paper: against closed forms, what the terms depend on, and which devices are meant by a name."""

from __future__ import annotations

from typing import Any

import pytest

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.runs.paper_speed import (
    DEVICES,
    PaperDevice,
    Work,
    find_device,
    paper_speed,
    too_small,
    why_not,
)
from harness.runs.throughput import peak_flops
from tests.support.isolation import SHIPPED_RUNS

GPT2_SMALL = load_model_config(SHIPPED_RUNS / "8xh100m80" / "model.json")
DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


def device(name: str) -> PaperDevice:
    found = find_device(name)
    assert found is not None
    return found


def changed(**values: Any) -> ModelConfig:
    return GPT2_SMALL.model_copy(update=values)


def test_the_work_of_gpt2_small() -> None:
    """Counted by hand: 12 layers of 12·768² weights, a head of 768 × 50,257, half of 1,024² seven times."""
    work = Work.of(GPT2_SMALL)
    assert work.layer_flops == 6 * 84_934_656
    assert work.head_flops == 231_584_256
    assert work.attention_flops == 7 * 1024 * 768 * 12 == 66_060_288
    assert work.logit_bytes == 201_028
    assert work.numbers == 19_200
    assert work.layer_bytes == pytest.approx(12 * 107e3 + 150e3, rel=0.005)
    assert (work.parameters, work.embedding_parameters) == (163_009_536, 38_597_376)


def test_products_are_those_that_mfu_counts() -> None:
    """But for attention: uncausal and without what is computed again there."""
    work = Work.of(GPT2_SMALL)
    assert work.layer_flops + work.head_flops == GPT2_SMALL.flops_per_token - 12 * 12 * 768 * 1024


@pytest.mark.parametrize("known", DEVICES, ids=lambda known: known.name)
@pytest.mark.parametrize("drop_rate", [0.0, 0.1])
def test_no_speed_on_paper_beats_the_roofline(known: PaperDevice, drop_rate: float) -> None:
    """Arithmetic at the peak and memory at the full bandwidth, the two at once (Williams et al. 2009)."""
    model = changed(drop_rate=drop_rate)
    found = paper_speed(model, known, BatchLayout(1, 1, 64, 1024))
    work = Work.of(model)
    floor = max(work.matrix_flops / known.chip.matrix_peak, work.bytes / known.bandwidth)
    assert floor < found.seconds < 4 * floor
    assert found.seconds == pytest.approx(sum(found.terms.values()))


def test_an_h200_term_by_term() -> None:
    """Microseconds, each with its own pen-and-paper number."""
    terms = paper_speed(GPT2_SMALL, device("H200"), BatchLayout(8, 2, 64, 1024)).terms
    expected = {
        "layers' products": 509.6 / 593.4,
        "head's products": 231.6 / 593.4,
        "attention": 66.06 / 190,
        "between products": 1.4309 / 3.84,
        "loss": 0.2010 / 3.84,
        "dropout": 19_200 / 2.4e5,
        "weights, per microbatch": 163.0 * 18 / 3.84 / 65_536,
        "optimizer, per step": 163.0 * 36 / 3.84 / 131_072,
        "waiting for the CPU": 0.0,
        "exchange": 1.75 * 4 * 38.597 / 0.4 / 131_072,
    }
    assert {key: 1e6 * value for key, value in terms.items() if key != "rest"} == pytest.approx(expected, rel=1e-3)
    others = sum(value for key, value in terms.items() if key not in ("rest", "exchange"))
    assert terms["rest"] == pytest.approx(0.04 * others)


@pytest.mark.parametrize(
    "levers",
    [
        {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "n_kv_heads": 4, "linear_bias": False},
        {"head_dim": 128, "mlp_dim": 1000, "qk_norm": True},
        {"value_embeddings": 3, "embedding_skip": True, "bigram_embedding": 10_000},
    ],
)
def test_levers_count_by_what_they_multiply_and_move(levers: dict[str, Any]) -> None:
    model, plain = changed(**levers), Work.of(GPT2_SMALL)
    work = Work.of(model)
    attention = 12 * model.n_layers * model.query_width * model.context_length
    assert work.layer_flops + work.head_flops == model.flops_per_token - attention
    assert work.attention_flops == pytest.approx(attention * 7 / 12)
    if "head_dim" not in levers:
        assert work.layer_bytes > plain.layer_bytes, "they move more"


def test_what_each_term_depends_on() -> None:
    def speed(drop_rate: float = 0.1, ranks: int = 1, steps: int = 1, microbatch: int = 13) -> float:
        layout = BatchLayout(ranks, steps, microbatch, 1024)
        return paper_speed(changed(drop_rate=drop_rate), device("H100"), layout).tokens_per_second / ranks

    assert speed(microbatch=64) > speed()
    assert speed(steps=4) > speed()
    assert speed(ranks=8) < speed()
    assert speed(drop_rate=0.125) > speed(), "cuDNN has eighths"
    assert speed(drop_rate=0.0) > speed(drop_rate=0.125)
    assert speed(drop_rate=0.1) == speed(drop_rate=0.3)


def test_eight_ranks_are_nearly_eight_times_as_fast() -> None:
    one, eight = (paper_speed(GPT2_SMALL, device("A100 40GB"), BatchLayout(n, 1, 13, 1024)) for n in (1, 8))
    assert 7.5 < eight.tokens_per_second / one.tokens_per_second < 8


def test_a_tiny_model_waits_for_the_cpu() -> None:
    tiny = changed(n_layers=2, emb_dim=128, n_heads=2, context_length=128, vocab_size=4096)
    found = paper_speed(tiny, device("H100"), BatchLayout(1, 1, 4, 128))
    assert found.seconds * 4 * 128 == pytest.approx((2 * 45 + 20) * 11e-6)


def test_where_the_cpu_decides_nothing_is_told() -> None:
    """A microbatch is refused as soon as its kernels are done sooner than 11 µs each, 45 a layer and 20 besides."""
    tiny = changed(n_layers=2, emb_dim=128, n_heads=2, context_length=128, vocab_size=4096)
    assert too_small(tiny, device("H100"), BatchLayout(1, 1, 8, 128)) == (
        "launching the kernels of a microbatch (about 110, 1.2 ms) takes longer than their work; only a measurement "
        "tells the speed"
    )
    assert too_small(GPT2_SMALL, device("H100"), BatchLayout(8, 1, 13, 1024)) is None
    refused = []
    for microbatch in range(1, 2000):
        layout = BatchLayout(1, 1, microbatch, 128)
        terms = paper_speed(tiny, device("H100"), layout).terms
        work = sum(value for key, value in terms.items() if key != "waiting for the CPU") * layout.microbatch_tokens
        assert (too_small(tiny, device("H100"), layout) is not None) == (work < 110 * 11e-6)
        refused.append(too_small(tiny, device("H100"), layout) is not None)
    assert 0 < sum(refused) < len(refused), "both happen"
    assert refused == sorted(refused, reverse=True)


@pytest.mark.parametrize(("driver", "name"), DRIVER_NAMES.items())
def test_the_drivers_names(driver: str, name: str) -> None:
    found = device(driver)
    assert found.name == name
    assert found.chip.matrix_peak == peak_flops(driver), "the same data sheet as for MFU"


def test_names_as_people_write_them() -> None:
    assert device("a100-40gb").name == device("A100 40 GB").name == "A100 40GB"
    assert device("h100 sxm").name == "H100"


@pytest.mark.parametrize(
    "name",
    [
        *("A100", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"),
        *("NVIDIA GH200 480GB", "NVIDIA GB200", "Tesla T4", "H1000", ""),
    ],
)
def test_what_is_not_on_paper(name: str) -> None:
    """Other memory, clocks or shares of a card than those in the table."""
    assert find_device(name) is None


def test_what_the_arithmetic_does_not_cover() -> None:
    covered = {"precision": "auto", "compile": "auto", "activation_checkpointing": False, "deterministic": False}
    assert why_not(covered, 8) is None
    assert why_not({}, 1) is None, "keys of other versions"
    assert why_not(covered | {"optimizer": "muon", "shard_optimizer": True, "z_loss": 1e-4}, 8) is None
    assert why_not(covered | {"precision": "fp32"}, 1) == '"precision": "fp32" is not covered'
    assert why_not(covered | {"compile": False}, 1) == '"compile": false is not covered'
    assert why_not(covered | {"deterministic": True}, 1) == '"deterministic": true is not covered'
    assert why_not(covered, 16) == "16 ranks are more than one machine of 8 GPUs"
