"""bench/compare_steps.py: the real command compares our training steps with those of other programs, and says if ours
are slower."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from bench import compare_steps
from bench.compare_steps import Case, peers_loss
from harness.model.config import ModelConfig
from tests.support.isolation import ROOT
from tests.support.launch import PATIENCE_SECONDS
from tests.support.warm import FORK_PYTHONS, warm_server

TINY = Case(1, 16, 2, 8, 64, 2)


@pytest.mark.parametrize("program", compare_steps.PEERS)
def test_every_peer_trains_the_same_model(program: str) -> None:
    """A fresh model of each peer has the loss of a uniform guess, and as many parameters as ours."""
    torch.manual_seed(0)
    keys = ("n_layers", "emb_dim", "n_heads", "context_length", "vocab_size")
    shape: dict[str, Any] = dict(zip(keys, TINY, strict=False))
    config = ModelConfig(**shape, drop_rate=0.0, qkv_bias=True, tie_weights=program != "upstream")
    loss = peers_loss(program, config)
    tokens = torch.randint(64, (2, 9))
    assert loss(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).item() == pytest.approx(math.log(64), abs=0.5)
    assert sum(each.numel() for each in loss.parameters()) == config.parameters


def test_all_programs_compute_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = "import os, json; print(json.dumps({'wall': 1, 'processor': len(os.environ['CUDA_VISIBLE_DEVICES'])}))"
    monkeypatch.setattr(compare_steps, "CONTESTANT", seen)
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"})
    player = compare_steps.Player(compare_steps.OWN, tmp_path, ranks=1, threads=1)
    try:
        player.step()
    finally:
        player.end()
    assert player.steps == [{"wall": 1, "processor": 0}]


def test_a_program_that_has_ended_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_steps, "CONTESTANT", "raise SystemExit('no such thing')")
    player = compare_steps.Player(compare_steps.OWN, tmp_path, ranks=1, threads=1)
    player.processes[0].wait()
    with pytest.raises(click.ClickException, match=r"ended: no such thing"):
        player.step()


# Runs the command with a tiny shape.
RACE = f"""
from bench import compare_steps
from bench.compare_steps import Case
compare_steps.SHAPES, compare_steps.WARM_UP, compare_steps.STEPS = ({TINY},), 1, 6
compare_steps.PRECISIONS = compare_steps.PRECISIONS[2:]
compare_steps.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seconds", "steps"), [(1, "0", 2), (2, "0", 2), (1, "1000", 4)])
def test_a_race_of_the_real_command(ranks: int, seconds: str, steps: int, tmp_path: Path) -> None:
    """Each program takes the same number of steps, and an impossible --at-least exits with status 1 and the reason. A
    row ends with our run, if not before. Each process is forked from the one that starts it, so that torch is not
    imported again."""
    program, file = tmp_path / "race.py", tmp_path / "rows.json"
    program.write_text(RACE)
    given = ["--peer", "nanogpt", "--shape", "1", "--ranks", str(ranks), "--seconds", seconds, "--steps", "2"]
    command = [str(program), *given, "--at-least", "1e9", "--json", str(file)]
    process = warm_server().spawn(command, ROOT, {**os.environ}, FORK_PYTHONS)
    output, errors = process.communicate(PATIENCE_SECONDS)
    assert process.returncode == 1, output + errors
    assert "behind nanogpt bf16: 1 × 16" in errors
    (row,) = json.loads(file.read_text())
    assert (row["ours"], row["peer"], row["steps"]) == ("auto", "nanogpt bf16", steps)
    assert all(each > 0 for what in ("processor_ms", "wall_ms") for each in row[what])
