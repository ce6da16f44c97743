"""The length of a run for each kind of budget: numbers calculated by hand, the plan's text, and impossible budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.model.config import load_model_config
from harness.planning.experiment import Experiment
from harness.planning.plan import make_plan
from harness.runs.budget import Budget, as_tokens, batch_schedule, stated_tokens, tokens_of_budget
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import RunDirectory
from tests.support.configs import refusal
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import MODEL, Workshop
from tests.support.planning import experiment_of, number, rows

BATCH = 2 * 2 * 16  # tokens in a global batch on one rank
PARAMETERS, FLOPS = 8_896, 49_152  # parameters and FLOPs per token of MODEL, as --plan prints them
MOE = {"num_experts": 8, "num_active_experts": 2}


def experiment(shop: Workshop, **train: Any) -> Experiment:
    shop.add_run(**{"min_train_tokens": None, **train})
    return experiment_of(shop)


def tokens(shop: Workshop, **train: Any) -> int | None:
    asked = experiment(shop, **train)
    return tokens_of_budget(asked.config, asked.model, asked.batches(asked.layout(1)))


def refused(shop: Workshop, **train: Any) -> str:
    asked = experiment(shop, **train)
    return refusal(asked.budget, asked.layout(1), None)


@pytest.mark.parametrize(
    ("train", "batches"),
    [
        ({"train_steps": 1}, 1),
        ({"train_steps": 17}, 17),
        ({"tokens_per_parameter": 0.1}, -(-889.6 // BATCH)),  # rounded up to whole batches
        ({"tokens_per_parameter": BATCH * 3 / PARAMETERS}, 3),  # exactly three batches are not rounded up
        ({"target_flops": FLOPS * BATCH * 5}, 5),
        ({"target_flops": FLOPS * BATCH * 5 - 1}, 4),  # rounded down to whole batches
        ({"target_flops": FLOPS * BATCH * 5.9}, 5),
        ({"min_train_tokens": BATCH + 1}, 2),
        # of the parameters for each token: in 2 blocks a second expert (2,128 parameters) and the router (16 x 8)
        ({"tokens_per_parameter": 20, "model": {"moe": MOE}}, -(-20 * (PARAMETERS + 2 * (2_128 + 128)) // BATCH)),
    ],
    ids=str,
)
def test_tokens_by_hand(shop: Workshop, train: dict[str, Any], batches: int) -> None:
    assert tokens(shop, **train) == batches * BATCH


def test_twenty_tokens_per_parameter_are_the_notebooks_run() -> None:
    run = RunDirectory(SHIPPED_RUNS / "8xa100m40")
    asked = Experiment.load(run, SHIPPED_RUNS)
    config = asked.config.model_copy(update={"min_train_tokens": None, "tokens_per_parameter": 20.0})
    assert stated_tokens(config, asked.model) == asked.config.min_train_tokens
    assert tokens_of_budget(config, asked.model, batch_schedule(config, asked.layout(8))) == 3_260_268_544


def test_a_ramp_counts_its_own_batches(shop: Workshop) -> None:
    ramp: dict[str, Any] = {"batch_ramp": [[0, 2], [70, 4], [200, 8]], "gradient_accumulation_steps": None}
    # Tokens of the steps: 32, 32, 32, then 64, 64, then 128. The batch grows after 96 and 224 tokens, the first totals
    # of at least 70 and 200.
    assert tokens(shop, train_steps=6, **ramp) == 96 + 2 * 64 + 128
    assert tokens(shop, target_flops=FLOPS * 351, **ramp) == 224
    assert tokens(shop, target_flops=FLOPS * 352, **ramp) == 352
    found = rows(shop, assume_tps=10.0)
    assert (number(found["global steps"]), number(found["tokens"])) == (6, 352)
    assert "from 96 tokens on: 1 rank x 2 sequences x 2 accumulation steps = 4 sequences" in found["global batch"]
    plan = make_plan(experiment(shop, train_steps=6, **ramp), 1, None)
    assert (plan.tokens(), plan.layout.accumulation_steps) == (352, 4), "the layout is that of the largest batch"
    assert plan.batches.at(0) == replace(plan.layout, accumulation_steps=1)
    assert Budget(key="train_steps", value=1234567, tokens=5).describe() == "train_steps 1,234,567: 5 tokens"
    assert Budget(key="target_flops", value=3e15, tokens=5000).describe() == "target_flops 3e+15: 5,000 tokens"


def test_what_was_recorded_holds_until_another_budget_is_asked_for(shop: Workshop) -> None:
    began = Budget(key="target_flops", value=3e6, tokens=5 * BATCH)
    same, other = (experiment(shop, target_flops=flops) for flops in (3e6, 3e7))
    belongs = vars(same.provenance(same.open_data()))
    meta = CheckpointMeta(global_step=1, tokens_seen=2 * BATCH, budget=began, **belongs)
    assert same.budget(same.layout(1), meta) == began
    assert make_plan(same, 1, meta).tokens() == 3 * BATCH
    changed = other.budget(other.layout(1), meta)
    assert changed is not None
    assert changed.value == 3e7
    assert changed.tokens > began.tokens
    larger = experiment(shop, target_flops=2.9e7, microbatch_size=5)
    assert (2 * BATCH + make_plan(larger, 1, meta).tokens()) * FLOPS <= 2.9e7, "also with other batches than before"
    # On two ranks the run trains on the same total, in whole batches of two ranks.
    assert make_plan(same, 2, meta).tokens() == 4 * BATCH


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"tokens_per_parameter": 0.001}, ": 0.001 gives less than one global batch (0.14 of one)"),
        ({"target_flops": 1e6}, ": 1e+06 gives less than one global batch (0.32 of one); raise it, or make"),
        ({"train_steps": 2**61}, "comes to 1.5e+20 tokens, more than can be counted (4.6e+18); lower it"),
        ({"target_flops": 1e40}, "comes to 2e+35 tokens"),
        ({"target_flops": 5e-324}, "gives less than one global batch (0 of one)"),
    ],
    ids=str,
)
def test_too_little_and_too_much(shop: Workshop, train: dict[str, Any], words: str) -> None:
    """A budget that is too small or too large is refused with one line that names the key, even at the limits of
    floating point."""
    message = refused(shop, **train)
    assert message.startswith(f'train.json: key "{next(iter(train))}": ')
    assert words in message


def test_a_budget_compares_as_the_tokens_it_came_to() -> None:
    """Two runs with equal `train_steps` are not replicates if they have trained on different numbers of tokens."""
    train = {"min_train_tokens": None, "train_steps": 10, "target_flops": None}
    large, small = (Budget(key="train_steps", value=10, tokens=count) for count in (640, 320))
    assert as_tokens(train, large) == {"min_train_tokens": 640, "train_steps": None, "target_flops": None}
    assert as_tokens(train, large) != as_tokens(train, small)
    assert as_tokens(train, None) == train


def test_what_a_budget_names_without_the_number_of_ranks(shop: Workshop) -> None:
    model = load_model_config(shop.add_run() / "model.json")
    assert (model.parameters, model.flops_per_token) == (PARAMETERS, FLOPS)

    def stated(**train: Any) -> float | None:
        return stated_tokens(experiment(shop, **train).config, model)

    assert stated(min_train_tokens=1280) == 1280
    assert stated(min_train_tokens=-1) is None
    assert stated(tokens_per_parameter=2) == 2 * PARAMETERS
    assert stated(target_flops=10 * FLOPS) == 10
    assert stated(train_steps=3) is None
    batch = {"global_batch_size": 4, "gradient_accumulation_steps": None}
    assert stated(train_steps=3, **batch) == 3 * 4 * MODEL["context_length"]
