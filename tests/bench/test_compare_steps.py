"""bench/compare_steps.py: the real command compares our training steps with those of other programs, and says if ours
are slower."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import compare_steps
from bench.compare_steps import Case, peers_loss

TINY = Case(1, 16, 2, 8, 64, 2)


@pytest.mark.parametrize("program", compare_steps.PEERS)
def test_every_peer_trains_the_same_model(program: str) -> None:
    """A fresh model of each peer has the loss of a uniform guess, and as many parameters as ours."""
    torch.manual_seed(0)
    loss = peers_loss(program, TINY)
    tokens = torch.randint(64, (2, 9))
    assert loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).item() == pytest.approx(math.log(64), abs=0.5)
    config = TINY.model_config(tied=program != "upstream")
    assert sum(each.numel() for each in loss.parameters()) == config.parameters


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_race_of_the_real_command(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program takes the same number of steps, and an impossible --at-least exits with status 1 and the reason."""
    monkeypatch.setattr(compare_steps, "SHAPES", (TINY,))
    monkeypatch.setattr(compare_steps, "WARM_UP", 1)
    monkeypatch.setattr(compare_steps, "PRECISIONS", compare_steps.PRECISIONS[2:])
    file = tmp_path / "rows.json"
    given = ["--peer", "nanogpt", "--shape", "1", "--ranks", str(ranks), "--seconds", "0", "--steps", "2"]
    result = CliRunner().invoke(compare_steps.main, [*given, "--at-least", "1e9", "--json", str(file)])
    assert result.exit_code == 1, result.output
    assert "behind nanogpt bf16: 1 × 16" in result.output
    (row,) = json.loads(file.read_text())
    assert (row["ours"], row["peer"], row["steps"]) == ("auto", "nanogpt bf16", 2)
    assert all(each > 0 for what in ("processor_ms", "wall_ms") for each in row[what])
