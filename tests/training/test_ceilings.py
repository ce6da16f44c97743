"""A run stops, in order and on all ranks, once it has reached max_hours or max_dollars."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process import InProcess, module_shop
from tests.support.launch import meta_of, summary_of
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS

SETTINGS: dict[str, Any] = {
    "min_train_tokens": 2560,
    "learning_rate": 0.01,
    "price_per_hour": 3.0,
    "validation_ranks": "all",
}


shop = module_shop(tokens=20_000)


@pytest.fixture(scope="module")
def straight(shop: InProcess) -> Path:
    run = shop.add_run("straight", **SETTINGS)
    shop.train("straight")
    return run


@pytest.mark.fault(
    "`max_hours` or `max_dollars` is reached", "stops with a checkpoint; with a higher ceiling, the same end"
)
@pytest.mark.parametrize(
    ("key", "jump", "step"),
    [
        ("max_hours", "before(STEP, two_hours_later, rank=1, step=7)", 8),  # the exchange of step 8 was under way
        pytest.param(
            *("max_dollars", "if own_rank() == 0: after_first_evaluated(two_hours_later, step=10)", 10),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_stops_with_a_checkpoint_and_goes_on_to_the_same_end(
    shop: InProcess, straight: Path, key: str, jump: str, step: int
) -> None:
    """Two hours at three dollars an hour are above either ceiling. The run goes on after the ceiling is raised."""
    run = shop.add_run(key, **SETTINGS, **{key: 1.5})
    ended = shop.train(key, prelude=FAULTS + jump, expect=3)
    assert ended.error_lines == [
        f"stopped by {key} 1.5 of train.json after global step {step}; to continue, raise {key} and run the same "
        "command again"
    ]
    assert (run / "checkpoints" / "latest").resolve().name.endswith(f"-iteration-{step}")
    shop.add_run(key, **SETTINGS, **{key: 9.0})
    shop.train(key)
    assert_same_end(straight, run)


@pytest.mark.parametrize("key", ["max_hours", "max_dollars"])
def test_a_ceiling_that_earlier_processes_have_reached_is_refused_and_planned(shop: InProcess, key: str) -> None:
    name = f"reached-{key}"
    run = shop.add_run(name, **SETTINGS | {"min_train_tokens": 256})
    shop.train(name)
    spent = sum(meta_of(run)["dollars" if key == "max_dollars" else "seconds"].values())
    lower = {key: 0.9 * spent if key == "max_dollars" else 0.9 * spent / 3600}
    shop.add_run(name, **SETTINGS | lower)
    refused = shop.train(name, expect=2)
    assert re.search(rf'train\.json: key "{key}": the run has reached [\d.e-]+ already; raise it', refused.stderr)
    said = shop.attempt("--plan", "--assume-tps", "1", run=name).stdout
    assert f"{key} is reached; raise it to continue" in said
    assert "would stop" not in said
    shop.add_run(name, **SETTINGS | {key: 0.25})
    said = " ".join(shop.attempt("--plan", "--assume-tps", "1", run=name).stdout.split())
    assert re.search(rf"ceiling +{key} 0\.25: [\d.,]+ (s|h) left; the run would stop there, before its end", said)
    assert "would stop there" not in shop.attempt("--plan", "--assume-tps", "100000", run=name).stdout


def test_the_plan_names_a_ceiling_that_bars_the_work_of_a_step_that_has_become_the_last(shop: InProcess) -> None:
    run = shop.add_run("shorter", **SETTINGS)
    shop.train("shorter", prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=7)", ranks=1, expect=143)
    tokens = meta_of(run)["tokens_seen"]
    shop.add_run("shorter", **SETTINGS | {"min_train_tokens": tokens, "max_hours": 1e-9})
    shop.attempt(run="shorter").refuses('key "max_hours": the run has reached')
    assert "max_hours is reached" in shop.attempt("--plan", run="shorter").stdout


def test_the_plan_counts_seconds_without_a_price_as_training_does(shop: InProcess) -> None:
    """They count at today's price."""
    run = shop.add_run("priceless", **SETTINGS | {"min_train_tokens": 256, "price_per_hour": None})
    shop.train_here("priceless")
    seconds = sum(meta_of(run)["seconds"].values())
    shop.add_run("priceless", **SETTINGS | {"price_per_hour": 3600.0, "max_dollars": 0.9 * seconds})
    assert "max_dollars is reached" in shop.attempt("--plan", "--assume-tps", "1", run="priceless").stdout
    shop.attempt(run="priceless").refuses('key "max_dollars": the run has reached')


def test_a_start_up_that_outlasts_the_ceiling_is_no_earlier_process(shop: InProcess) -> None:
    shop.add_run("slow-start", **SETTINGS | {"max_hours": 1e-9})
    shop.attempt(run="slow-start").refuses('key "max_hours": start-up alone has reached 1e-09')


@pytest.mark.slow
@pytest.mark.fault(
    "a ceiling is reached while a continued run starts", "its seconds are recorded, so that the next start is refused"
)
def test_a_ceiling_during_start_up(shop: InProcess) -> None:
    run = shop.add_run("start-up", **SETTINGS)
    shop.train("start-up", prelude=f"{FAULTS}before(STEP, tell(SIGTERM), rank=1, step=5)", expect=143)
    shop.add_run("start-up", **SETTINGS, max_hours=1.0)
    ended = shop.train("start-up", prelude=f"{FAULTS}before(WARM_UP, two_hours_later)", expect=3)
    assert "stopped by max_hours" in ended.error_lines[0]
    assert "the run has reached 1 already" in shop.train("start-up", expect=2).stderr
    shop.add_run("start-up", **SETTINGS, max_hours=9.0)
    shop.train("start-up")
    assert summary_of(run)["seconds"]["total"] > 7200


def test_a_ceiling_in_the_last_validation(shop: InProcess) -> None:
    """The run has done all its steps, but not its last validation. No start adds a checkpoint."""
    run = shop.add_run("last", **SETTINGS | {"min_train_tokens": 640}, max_hours=1.0)
    shop.train("last", ranks=1, prelude=f"{FAULTS}after_first_evaluated(two_hours_later, step=9)", expect=3)
    before = sorted((run / "checkpoints").iterdir())
    assert "the run has reached 1 already" in shop.train("last", ranks=1, expect=2).stderr
    assert "max_hours is reached" in shop.train("last", "--plan", ranks=1).stdout
    assert sorted((run / "checkpoints").iterdir()) == before
    shop.add_run("last", **SETTINGS | {"min_train_tokens": 640}, max_hours=9.0)
    shop.train("last", ranks=1)
    assert (run / "summary.json").exists()
