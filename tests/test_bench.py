"""The comparison with other programs runs, and its contestants compute the same."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from bench import contestants, system
from bench.compare_steps import line_of, main
from bench.turns import Player, Shape, race

TINY = Shape(1, 16, 2, 8, 64, 2)


@pytest.mark.parametrize("name", [name for name in contestants.BUILDERS if name != "litgpt"])
def test_every_contestant_takes_the_same_step(name: str) -> None:
    """From a fresh start the loss is that of a uniform guess, and steps on one batch lower it."""
    case = contestants.case_of(TINY)
    contestant = contestants.BUILDERS[name](case)
    batch = case.batch(np.random.default_rng(0))
    inputs, targets = batch.to(case.device)

    def loss() -> float:
        with torch.no_grad():
            found = contestant.model(inputs)
            logits = getattr(found, "logits", found)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    before = loss()
    for _ in range(5):
        contestant.step(batch)
    assert before < math.log(64) + 1.5
    assert loss() < before
    expected = case.shape.model_copy(update={"tie_weights": contestant.tied}).parameters
    assert sum(each.numel() for each in contestant.model.parameters()) == expected


def test_a_race_in_processes_gives_times_and_peaks() -> None:
    with Player("ddp-pretrain", TINY) as ours:
        assert ours.begin() is None
        race([ours], seconds=0, at_least=3, warm_up=1)
        assert len(ours.turns) == 3
        assert all(turn.wall > 0 for turn in ours.turns)
        assert ours.peak_bytes() >= 0


def test_who_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litgpt.config", None)
    with pytest.raises(contestants.NotToBeHadError, match="uv pip install --no-deps"):
        contestants.litgpt(contestants.case_of(TINY))
    assert line_of({"program": "litgpt", "not_run": "no such module"}).endswith("not run: no such module")


def test_help_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = CliRunner().invoke(main, ["--quick", "--only", "help", "--json", str(file)])
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    assert [row["what"] for row in found["further"]] == ["--help"]
    assert found["further"][0]["seconds"] > 0
    assert found["machine"]["matrix_gflops"].keys() == {"fp32", "bf16"}


def test_a_part_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(quick: bool) -> list[system.Row]:
        raise OSError("no space left")

    monkeypatch.setitem(system.PARTS, "help", fail)
    assert system.measure("help", quick=True) == [{"what": "help", "not_run": "no space left"}]
