"""harness/distributed/environment.py reads this process's rank from environment variables and refuses incomplete or
impossible ones, which an earlier launch may have left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from harness.common.errors import UserError
from harness.common.processes import PARENT
from harness.distributed import environment
from tests.support.configs import refusal
from tests.support.launch import ROOT, wait_until

WHOLE = {
    "RANK": "9",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in WHOLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def without(*names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in (WHOLE | changes).items() if name not in names}


ALONE = (0, 0, 1, 1)
ONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # needs no place to meet


@pytest.mark.parametrize(
    ("variables", "ranking"),
    [({}, ALONE), ({"MASTER_ADDR": "node-0", "MASTER_PORT": "x"}, ALONE), (ONE, ALONE), (WHOLE, (9, 1, 16, 8))],
)
def test_the_place_of_this_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], ranking: tuple[int, ...]
) -> None:
    set_all(monkeypatch, variables)
    assert environment.read_ranking() == ranking


def test_which_process_starts_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {})
    assert [environment.ranks_to_start(processes) for processes in (None, 1, 8)] == [0, 0, 8]
    set_all(monkeypatch, WHOLE)
    assert environment.ranks_to_start(None) == 0
    for processes in (1, 8):
        with pytest.raises(UserError, match="RANK is set: leave out --processes under torchrun; otherwise `unset RANK"):
            environment.ranks_to_start(processes)
    monkeypatch.setenv(PARENT, "123")
    assert environment.ranks_to_start(8) == 0, "ranks that --processes started have its command line"


STRAY = [
    ({"WORLD_SIZE": "8"}, ["WORLD_SIZE is set", "RANK is not", "unset WORLD_SIZE"]),
    ({"LOCAL_RANK": "0"}, ["LOCAL_RANK is set", "RANK is not", "unset LOCAL_RANK"]),
    (without("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ["RANK is set", "LOCAL_RANK is not", "unset RANK WORLD_SIZE"]),
    (without(WORLD_SIZE="many"), ["WORLD_SIZE is", "many", "not a whole number"]),
    (without(WORLD_SIZE=""), ["WORLD_SIZE is not"]),
    (without(RANK="-1"), ["RANK is", "-1", "not a whole number"]),
    (without(RANK="\u0661"), ["RANK is", "not a whole number"]),
    (without(RANK="9" * 5000), ["RANK is", "not a whole number"]),
    (without(RANK="16"), ["RANK=16 LOCAL_RANK=1 WORLD_SIZE=16 LOCAL_WORLD_SIZE=8", "cannot all be right"]),
    (without(LOCAL_RANK="8"), ["LOCAL_RANK=8", "cannot all be right"]),
    (without(RANK="0", WORLD_SIZE="0"), ["WORLD_SIZE=0", "cannot all be right"]),
    (without(RANK="1", WORLD_SIZE="2"), ["LOCAL_WORLD_SIZE=8", "cannot all be right"]),
    (without(RANK="0"), ["RANK=0 LOCAL_RANK=1", "cannot all be right"]),
    (without("MASTER_ADDR"), ["MASTER_ADDR", "is not"]),
    (without(MASTER_PORT=""), ["MASTER_PORT", "is not"]),
    (without(MASTER_PORT="http"), ["MASTER_PORT is", "not a whole number"]),
    (without(MASTER_PORT="70000"), ["MASTER_PORT=70000", "cannot all be right"]),
]


@pytest.mark.parametrize(("variables", "words"), STRAY)
def test_leftovers_are_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: list[str]
) -> None:
    set_all(monkeypatch, variables)
    message = refusal(environment.read_ranking, begins="environment: ")
    assert len(message) < 250
    for word in [*words, "torchrun", "unset"]:
        assert word in message


def test_more_ranks_than_a_machine_can_hold_are_refused() -> None:
    with pytest.raises(UserError, match="--processes 100000: at most"):
        environment.run_ranks(100_000, lambda pid: None)


# Rank 1 has no handler for SIGTERM yet. Rank 0 has one, and exits without a line because it has lost rank 1.
TWO_RANKS = """
import os, pathlib, signal, sys, time
from harness.distributed.environment import ranks_to_start, run_ranks, unblock_stopping_signals
if count := ranks_to_start(2):
    run_ranks(count, lambda pid: None)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(143)))
unblock_stopping_signals()
pathlib.Path("ready" + os.environ["RANK"]).touch()
time.sleep(60)
"""


def test_a_stop_before_all_ranks_can_agree_says_how_to_continue(tmp_path: Path) -> None:
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, str(script)]
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"}
    with subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=PIPE, stderr=PIPE, text=True) as launcher:
        wait_until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)), launcher)
        launcher.send_signal(signal.SIGTERM)
        stdout, stderr = launcher.communicate(timeout=30)
    assert launcher.returncode == 143
    assert "stopped by SIGTERM; to continue, run the same command again" in stdout + stderr
