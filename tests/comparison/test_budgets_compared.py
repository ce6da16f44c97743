"""Runs whose budget is not in tokens, in the commands that read many runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.comparison.arms import find_arms
from harness.comparison.records import RunRecord
from harness.comparison.table import RunsTable
from harness.sweeps.derived_runs import derive, load_base, write_runs
from harness.sweeps.plan import status_of
from tests.support.compared_runs import RunFolder
from tests.support.in_process import run_here
from tests.support.launch import Workshop


def test_progress_is_the_share_of_a_budget_in_steps(tmp_path: Path) -> None:
    """A sweep's status and the table of runs show which share of a budget in steps is done. A finished run counts as
    stopped once its budget grows."""
    RunFolder(tmp_path, "base")
    derived = derive(load_base(tmp_path, "base"), "r", {"train_steps": 8})
    write_runs([derived])
    trained = RunFolder(tmp_path / "trained", "r", {"min_train_tokens": None, "train_steps": 8})
    budget = {"key": "train_steps", "value": 8, "tokens": 8 * 128}
    trained.add_checkpoint("20260102Z030405-iteration-3", "latest", budget=budget).train_to(0, 3)
    for path in (trained.directory.checkpoints, trained.directory.metrics):
        path.rename(derived.directory.path / path.name)
    standing = status_of(derived)
    assert standing.state == "stopped"
    assert ", 50 %, loss " in standing.said
    assert "stopped, 50 %" in run_here("compare_runs.py", "r", "base", "--runs-dir", str(tmp_path)).stdout
    done: dict[str, Any] = {"budget": budget, "global_steps": 8, "tokens_seen": 8 * 128}
    trained.finish(**done).directory.summary.rename(derived.directory.summary)
    assert status_of(derived).state == "finished"
    longer = derive(load_base(tmp_path, "base"), "r", {"train_steps": 9})
    longer.directory.train_json.write_text(json.dumps(longer.train))
    assert status_of(longer).state == "stopped"
    assert RunRecord.read(longer.directory).state.word == "stopped", "compare_runs says the same as the sweep"
    longer.directory.summary.unlink()
    assert "%" not in status_of(longer).said, "the recorded budget is not that of train.json any more"


def test_replicates_are_those_that_saw_as_many_tokens(tmp_path: Path) -> None:
    """A run with a budget in steps is a replicate of one with a budget in tokens if both see equally many tokens. A run
    that sees more tokens is not a replicate."""
    runs = []
    for seed, (name, key, value, tokens) in enumerate(
        [("longer", "train_steps", 6, 768), ("steps", "train_steps", 5, 640), ("tokens", "min_train_tokens", 640, 640)]
    ):
        run = RunFolder(tmp_path, name, {"min_train_tokens": None, "random_seed": seed, key: value})
        budget = None if name == "tokens" else {"key": key, "value": value, "tokens": tokens}
        runs.append(RunRecord.read(run.finish(tokens_seen=tokens, budget=budget).directory))
    groups = {frozenset(members) for members in find_arms(runs).run_names.values()}
    assert groups == {frozenset({"steps", "tokens"}), frozenset({"longer"})}
    settings = {column.key for column in RunsTable.of(runs).columns if column.is_setting}
    assert settings == {"random_seed", "train_steps", "min_train_tokens"}


@pytest.mark.slow
def test_fit_scaling_predicts_a_run_by_its_budget(tmp_path: Path) -> None:
    shop, points = Workshop(tmp_path), tmp_path / "points.csv"
    sizes = [(size, tokens) for size in (1e5, 2e5, 4e5, 8e5) for tokens in (1e6, 2e6, 4e6, 8e6)]
    rows = [f"{size},{tokens},{6 * size * tokens},{1.5 + 30 / size**0.3 + 40 / tokens**0.3}" for size, tokens in sizes]
    points.write_text("\n".join(["parameters,tokens,flops,loss", *rows, ""]))
    asked = ["--points", str(points), "--runs-dir", str(shop.runs), "--predict", "r", "--resamples", "100"]
    shop.add_run(min_train_tokens=None, tokens_per_parameter=20)
    assert "178K tokens" in run_here("fit_scaling.py", *asked).stdout
    shop.add_run(min_train_tokens=None, train_steps=2)
    refused = run_here("fit_scaling.py", *asked, status=2)
    assert 'key "train_steps": 2 does not determine the number of tokens; give --predict parameters=' in refused.stderr
    budget = {"key": "train_steps", "value": 2, "tokens": 178_000}
    RunFolder(shop.runs, "t", {"min_train_tokens": None, "train_steps": 2}).finish(budget=budget)
    asked[asked.index("r")] = "t"
    assert "178K tokens" in run_here("fit_scaling.py", *asked).stdout
