"""Compiled steps of the shipped runs on the null device. They stand apart because compiling takes a minute each."""

from __future__ import annotations

import pytest

from harness.common.json_files import parse_config, read_json_object
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.planning.memory import step_bytes
from harness.runs.train_config import TrainConfig
from tests.nullcuda.device import why_not
from tests.nullcuda.test_steps import MICROBATCHES, TWO_FAST_LAYERS, Case, assert_no_waits, run
from tests.support.isolation import SHIPPED_RUNS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

COMPILED = {"compile": True}
ONE_LAYER = {"n_layers": 1}
ONE_FAST_LAYER = {"n_layers": 1, "value_embeddings": 1}
CASES: dict[str, tuple[int, Case]] = {
    "gpt-2 on A100s": (80, Case("8xa100m40", 8, ONE_LAYER, COMPILED, 106)),
    "gpt-2 on H100s": (90, Case("8xh100m80", 8, ONE_LAYER, COMPILED, 118)),
    "gpt-2 on B200s": (100, Case("8xb200m160", 8, ONE_LAYER, COMPILED, 146)),
    "the fast model on A100s": (80, Case("8xa100m40-fast", 8, TWO_FAST_LAYERS, COMPILED, 285, broadcasts=24)),
    "the fast model on H100s": (90, Case("8xh100m80-fast", 8, ONE_FAST_LAYER, COMPILED, 214, broadcasts=18)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_step_never_waits_and_compiles_nothing_later(case: str) -> None:
    """The promises of an eager step hold for a compiled one. Its one graph is compiled before the first step, and
    validation's by the first validation. Its memory is what a plan says."""
    sm, asked = CASES[case]
    name, ranks, model, train, *_ = asked
    (found,) = run({"run": name, "ranks": ranks, "model": model, "train": train}, sm=sm)
    assert_no_waits(found, asked, tolerance=0.05)
    folder = SHIPPED_RUNS / name
    shape = parse_config(ModelConfig, read_json_object(folder / "model.json") | model, folder)
    config = parse_config(TrainConfig, read_json_object(folder / "train.json") | train, folder)
    for step, microbatches in zip(found[1:], MICROBATCHES[1:], strict=True):
        layout = BatchLayout(ranks, microbatches, config.microbatch_size, shape.context_length)
        planned = step_bytes(shape, config, layout)
        assert planned == pytest.approx(step["peak_allocated"], rel=0.05)
