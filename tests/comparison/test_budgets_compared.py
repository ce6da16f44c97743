"""Runs with other budgets than tokens in the commands that read many runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.comparison.arms import find_arms
from harness.comparison.records import RunRecord
from harness.runs.directory import RunDirectory
from harness.sweeps.derived_runs import Base, derive, write_runs
from harness.sweeps.status import status_of
from tests.support.launch import Workshop

TELL = "from tests.support.faults import *\nbefore(STEP, tell(SIGTERM), rank=0, step=3)\n"


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset(tokens=20_000)
    return made


def test_how_far_a_run_is_by_what_its_budget_came_to(shop: Workshop) -> None:
    """The status of a sweep and the table of runs give it; a finished run is unfinished once its budget grows."""
    shop.add_run("base")
    derived = derive(Base.load(shop.runs, "base"), "r", {"train_steps": 8})
    write_runs([derived])
    shop.train(ranks=1, prelude=TELL, expect=128 + 15)
    standing = status_of(derived)
    assert standing.state == "stopped"
    assert ", 50 %, loss " in standing.said
    shop.add_run("never")
    said = shop.script("compare_runs.py", "r", "never", "--runs-dir", str(shop.runs)).stdout
    assert "stopped, 50 %" in said
    shop.train(ranks=1)
    assert status_of(derived).state == "finished"
    longer = derive(Base.load(shop.runs, "base"), "r", {"train_steps": 9})
    longer.run.train_json.write_text(json.dumps(longer.train))
    assert status_of(longer).state == "stopped"
    said = shop.script("compare_runs.py", "r", "--runs-dir", str(shop.runs), "--json").stdout
    assert json.loads(said)["runs"][0]["state"] == "stopped", "the same word"


@pytest.mark.slow
def test_compare_runs_shows_budgets_that_differ(shop: Workshop) -> None:
    shop.add_run("steps", min_train_tokens=None, train_steps=5)
    shop.add_run("ratio", min_train_tokens=None, tokens_per_parameter=0.05)
    for name in ("steps", "ratio"):
        shop.train(name, ranks=1)
    said = shop.script("compare_runs.py", "steps", "ratio", "--runs-dir", str(shop.runs), "--json").stdout
    table = json.loads(said)
    assert {"train_steps", "tokens_per_parameter"} <= table["columns"].keys()
    assert "min_train_tokens" not in table["columns"]


@pytest.mark.slow
def test_replicates_are_those_that_saw_as_many_tokens(shop: Workshop) -> None:
    """Steps that see as many tokens as another run's budget in tokens are a replicate of it; longer ones are not."""
    records = []
    for name, keys in (
        ("longer", {"train_steps": 6, "random_seed": 1}),
        ("steps", {"train_steps": 5, "random_seed": 3}),
        ("tokens", {"min_train_tokens": 320, "random_seed": 4}),
    ):
        shop.add_run(name, **{"min_train_tokens": None, **keys})
        shop.train(name, ranks=1)
        records.append(RunRecord.read(RunDirectory(shop.runs / name)))
    tokens = {record.name: record.tokens_seen for record in records}
    assert tokens == {"longer": 384, "steps": 320, "tokens": 320}
    groups = {frozenset(runs) for runs in find_arms(records).runs.values()}
    assert groups == {frozenset({"steps", "tokens"}), frozenset({"longer"})}


def test_fit_scaling_predicts_a_run_by_its_budget(shop: Workshop) -> None:
    points = shop.path / "points.csv"
    rows = ["parameters,tokens,flops,loss"]
    for parameters in (1e5, 2e5, 4e5, 8e5):
        for tokens in (1e6, 2e6, 4e6, 8e6):
            rows.append(
                f"{parameters},{tokens},{6 * parameters * tokens},{1.5 + 30 / parameters**0.3 + 40 / tokens**0.3}"
            )
    points.write_text("\n".join(rows) + "\n")
    arguments = ("fit_scaling.py", "--points", str(points), "--runs-dir", str(shop.runs), "--predict", "r")
    shop.add_run(min_train_tokens=None, tokens_per_parameter=20)
    assert "178K tokens" in shop.command(*arguments).stdout
    shop.add_run(min_train_tokens=None, train_steps=2)
    refused = shop.command(*arguments)
    assert 'key "train_steps": 2 names no number; give parameters=,tokens=' in refused.stderr
