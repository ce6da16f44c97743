"""How much a run trains by each kind of budget: the numbers by hand, what --plan prints, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.options import TrainOptions
from harness.data.dataset import Dataset
from harness.data.loader import BatchLayout
from harness.model.config import load_model_config
from harness.runs.budget import Budget, as_tokens, batch_schedule, stated_tokens, tokens_of_budget
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import RunDirectory
from harness.runs.experiment import Experiment
from harness.runs.plan import make_plan
from harness.runs.plan_costs import planned_seconds
from harness.runs.planned_speed import plan_speed
from harness.runs.timed_budget import find_budget
from tests.runs.test_plan import add_summary, narrow, number, rows
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import DATASET, MODEL, Workshop

BATCH = 2 * 2 * 16  # tokens of a global batch of one rank
PARAMETERS, FLOPS = 8_896, 49_152  # of MODEL, by --plan


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset()
    return made


def experiment(shop: Workshop, **train: Any) -> Experiment:
    run = shop.add_run(**{"min_train_tokens": None, **train})
    return Experiment.load(RunDirectory(run), shop.datasets)


def tokens(shop: Workshop, **train: Any) -> int | None:
    asked = experiment(shop, **train)
    return tokens_of_budget(asked.config, asked.model, asked.batches(asked.layout(1)))


def refused(shop: Workshop, options: TrainOptions | None = None, **train: Any) -> str:
    asked = experiment(shop, **train)
    with pytest.raises(UserError) as caught:
        find_budget(asked, asked.layout(1), None, options or TrainOptions())
    assert str(caught.value).splitlines() == [str(caught.value)]
    return str(caught.value)


@pytest.mark.parametrize(
    ("train", "batches"),
    [
        ({"train_steps": 1}, 1),
        ({"train_steps": 17}, 17),
        ({"tokens_per_parameter": 0.1}, -(-889.6 // BATCH)),  # at least so many
        ({"tokens_per_parameter": BATCH * 3 / PARAMETERS}, 3),  # an exact multiple gets no more
        ({"target_flops": FLOPS * BATCH * 5}, 5),
        ({"target_flops": FLOPS * BATCH * 5 - 1}, 4),  # at most so many
        ({"target_flops": FLOPS * BATCH * 5.9}, 5),
        ({"min_train_tokens": BATCH + 1}, 2),
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
    # 32, 32, 32 | 64, 64 | 128, ...: 96 and 224 are the first not below 70 and 200.
    assert tokens(shop, train_steps=6, **ramp) == 96 + 2 * 64 + 128
    assert tokens(shop, target_flops=FLOPS * 351, **ramp) == 224
    assert tokens(shop, target_flops=FLOPS * 352, **ramp) == 352
    found = rows(shop.attempt("--plan", "--assume-tps", "10"))
    assert (number(found["global steps"]), number(found["tokens"])) == (6, 352)
    assert "from 96 tokens on: 1 ranks x 2 sequences x 2 accumulation steps = 4 sequences" in found["global batch"]
    plan = make_plan(experiment(shop, train_steps=6, **ramp), 1, None)
    assert (plan.tokens(), plan.layout.accumulation_steps) == (352, 4)


@pytest.mark.parametrize("key", ["target_hours", "target_dollars"])
@pytest.mark.parametrize("speed", [{"assume_tps": 100.0}, {"assume_tps_with_validation": 100.0}], ids=str)
def test_time_and_money_are_the_most_that_they_pay_for(shop: Workshop, key: str, speed: dict[str, Any]) -> None:
    """By the plan's own arithmetic: the run fits, and one of another step does not."""
    options = TrainOptions(**speed)
    for value in (0.001, 0.0031, 0.007):
        asked = experiment(shop, **{key: value, "price_per_hour": 1.0}, validation_interval=2)
        layout = asked.layout(1)
        budget = find_budget(asked, layout, None, options)
        assert budget is not None
        assert budget.tokens % BATCH == 0
        assert budget.speed == "100 tokens/s (assumed)"
        for more, fits in ((0, True), (BATCH, False)):
            plan = make_plan(asked, 1, None, budget.model_copy(update={"tokens": budget.tokens + more}))
            seconds = sum(planned_seconds(plan, plan_speed(asked, layout, options)).values())
            assert (seconds <= value * 3600) == fits


def test_what_a_budget_comes_to_is_in_the_plan(shop: Workshop) -> None:
    experiment(shop, target_dollars=0.1, price_per_hour=36.0)
    result = shop.attempt("--plan", "--assume-tps", "100")
    narrow(result)
    found = rows(result)
    assert found["budget"] == f"target_dollars 0.1: {number(found['tokens']):,} tokens 100 tokens/s (assumed)"
    cost = re.search(r"= \$([\d.]+) at", found["cost"])
    assert cost
    assert 0.08 < float(cost[1]) <= 0.1


def test_a_measured_speed_is_found(shop: Workshop) -> None:
    asked = experiment(shop, target_hours=0.002)
    add_summary(shop.runs / "r", asked)  # 96 tokens a second
    budget = find_budget(asked, asked.layout(1), None, TrainOptions())
    assert budget is not None
    assert str(budget.speed).startswith("96 tokens/s (measured over 30 steps")
    assert 0.8 < budget.tokens / (96 * 7.2) <= 1


def test_what_was_recorded_holds_until_another_budget_is_asked_for(shop: Workshop) -> None:
    began = Budget(key="target_hours", value=0.002, tokens=5 * BATCH, speed="44 tokens/s (then)")
    now = TrainOptions(assume_tps=1000.0)
    same, other = (experiment(shop, target_hours=hours) for hours in (0.002, 0.004))
    belongs = vars(same.provenance(Dataset.open(shop.datasets, DATASET)))
    meta = CheckpointMeta(global_step=1, tokens_seen=2 * BATCH, budget=began, **belongs)
    assert find_budget(same, same.layout(1), meta, now) == began
    assert make_plan(same, 1, meta).tokens() == 3 * BATCH
    changed = find_budget(other, other.layout(1), meta, now)
    assert changed is not None
    assert changed.value == 0.004
    assert changed.tokens > began.tokens
    # On two ranks the run still sees what it was to see, in whole batches of theirs.
    assert make_plan(same, 2, meta).tokens() == 4 * BATCH


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"tokens_per_parameter": 0.001}, ['"tokens_per_parameter": 0.001 is below one global batch (0.14 of it)']),
        ({"target_flops": 1e6}, ['"target_flops": 1e+06 is below one global batch', "raise it to at least 3.15e+06"]),
        ({"target_hours": 1e-5}, ['"target_hours": 1e-05 is below one global batch', "or make the global batch sm"]),
        ({"target_dollars": 1e-5, "price_per_hour": 1.0}, ['"target_dollars": 1e-05 is below one global batch']),
    ],
    ids=str,
)
def test_below_one_global_batch(shop: Workshop, train: dict[str, Any], words: list[str]) -> None:
    message = refused(shop, TrainOptions(assume_tps=100.0), **train)
    assert message.startswith("train.json: key ")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"train_steps": 2**61}, "comes to 1.5e+20 tokens, more than can be counted (4.6e+18); lower it"),
        ({"target_flops": 1e40}, "comes to 2e+35 tokens"),
        ({"target_hours": 1e9}, "comes to 3.6e+24 tokens"),
        ({"target_dollars": 3.0, "price_per_hour": 5e-324}, "comes to inf tokens"),
        ({"target_flops": 5e-324}, "is below one global batch (0 of it); raise it, or make the global batch smaller"),
        ({"target_dollars": 5e-324, "price_per_hour": 10.0}, "is below one global batch (0 of it); raise it, or"),
    ],
    ids=str,
)
def test_numbers_at_the_ends_of_what_there_is(shop: Workshop, train: dict[str, Any], words: str) -> None:
    """One line that names the key, as for all others."""
    message = refused(shop, TrainOptions(assume_tps=1e12), **train)
    assert message.startswith(f'train.json: key "{next(iter(train))}": ')
    assert words in message


def test_the_remedy_for_too_small_a_budget_is_enough(shop: Workshop) -> None:
    for key in ("tokens_per_parameter", "target_flops", "target_hours"):
        said = re.search(r"at least ([\d.e+-]+),", refused(shop, TrainOptions(assume_tps=100.0), **{key: 1e-6}))
        assert said
        asked = experiment(shop, **{key: float(said[1])})
        budget = find_budget(asked, asked.layout(1), None, TrainOptions(assume_tps=100.0))
        assert budget is not None
        # Rounded up to three digits, it asks for a token or two more than a batch where batches are rounded up, too.
        assert budget.tokens == (2 * BATCH if key == "tokens_per_parameter" else BATCH)


def test_time_without_a_speed_is_refused(shop: Workshop) -> None:
    message = refused(shop, target_hours=1)
    assert message.startswith('train.json: key "target_hours": needs a speed, and none is known: no earlier run')
    assert "give --assume-tps" in message
    experiment(shop, target_hours=1)
    for arguments in (["--plan"], []):
        result = shop.attempt(*arguments)
        assert (result.status, result.stderr) == (2, f"error: {message}\n")


def test_more_than_the_data_names_the_budget(shop: Workshop) -> None:
    experiment(shop, train_steps=100)
    assert "lower train_steps or the batch" in shop.attempt("--plan").stderr


def test_a_speed_belongs_with_a_plan_or_a_budget_of_time(shop: Workshop) -> None:
    experiment(shop, train_steps=3)
    result = shop.attempt("--assume-tps", "100")
    assert (result.status, result.stderr) == (2, "error: --assume-tps belongs with --plan\n")


def test_a_budget_compares_as_the_tokens_it_came_to() -> None:
    """Two runs of as many hours may have seen other numbers of tokens, and are no replicates then."""
    train = {"min_train_tokens": None, "target_hours": 1.0, "train_steps": None}
    fast, slow = (Budget(key="target_hours", value=1.0, tokens=count) for count in (640, 320))
    assert as_tokens(train, fast) == {"min_train_tokens": 640, "target_hours": None, "train_steps": None}
    assert as_tokens(train, fast) != as_tokens(train, slow)
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
    assert stated(target_hours=3) is None


def test_the_layout_of_a_ramp_is_its_largest(shop: Workshop) -> None:
    asked = experiment(shop, train_steps=5, batch_ramp=[[0, 4], [64, 12]], gradient_accumulation_steps=None)
    layout = asked.layout(2)
    assert layout == BatchLayout(2, 3, 2, 16)
    assert asked.batches(layout).at(0) == replace(layout, accumulation_steps=1)


def test_counts_are_printed_to_the_last_digit() -> None:
    assert Budget(key="train_steps", value=1234567, tokens=5).describe() == "train_steps 1,234,567: 5 tokens"
    assert Budget(key="target_flops", value=3e15, tokens=5000).describe() == "target_flops 3e+15: 5,000 tokens"


def test_a_damaged_budget_is_named(shop: Workshop, tmp_path: Path) -> None:
    run = shop.add_run(min_train_tokens=None, train_steps=2)
    assert shop.attempt().status == 0
    path = run / "checkpoints" / "latest" / "meta.json"
    meta = json.loads(path.read_text())
    assert meta["budget"] == {"key": "train_steps", "value": 2, "tokens": 2 * BATCH}
    meta["budget"]["tokens"] = 0
    path.write_text(json.dumps(meta))
    assert "budget.tokens" in shop.attempt().stderr
