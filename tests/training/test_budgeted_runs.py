"""Real runs with a budget in steps, a batch ramp or scaled rates: the tokens that they train on, what they record, and
how they resume."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.common.program import program_commit
from tests.support.in_process import InProcess
from tests.support.isolation import ROOT
from tests.support.launch import meta_of, metrics, summary_of
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS
from tests.training.test_runs_by_hand import SEQUENCES
from tests.training.test_runs_by_hand import SETTINGS as RAMP

BATCHES = [16 * sequences for sequences in SEQUENCES]  # tokens of each of the 14 steps
STOP = FAULTS + "before(STEP, tell(SIGTERM), rank=0, step={step})\n"


@pytest.fixture
def shop(tmp_path: Path) -> InProcess:
    shop = InProcess(tmp_path)
    shop.add_dataset()
    return shop


def end_of(run: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return meta.json of the latest checkpoint, and summary.json."""
    return meta_of(run), summary_of(run)


@pytest.mark.slow
def test_a_ramp_continues_to_the_bit(shop: InProcess) -> None:
    """A run with a batch ramp that is stopped and resumed three times ends as one that never stopped. The stops are in
    the first batch size, at the last step before the batch grows, and in the last batch size. Each of the run's tokens
    is read once."""
    straight, stopped = shop.add_run("straight", **RAMP), shop.add_run("stopped", **RAMP)
    said = shop.train("straight").stdout
    assert "14 global steps of 32 to 128 tokens" in said
    assert "  batch_ramp: 2 sequences from 0, 4 sequences from 160, 8 sequences from 352" in said
    seen = shop.path / "seen"
    seen.mkdir()
    record = f"{FAULTS}record_windows({str(seen)!r})\n"
    for step in (2, 4, 10):
        shop.train("stopped", prelude=record + STOP.format(step=step), expect=128 + 15)
    shop.train("stopped", prelude=record)
    assert_same_end(straight, stopped)
    meta, summary = end_of(stopped)
    assert (meta["global_step"], meta["tokens_seen"], summary["tokens_seen"]) == (13, sum(BATCHES), sum(BATCHES))
    assert summary["accumulation_steps"] == 4
    windows = sorted(tuple(map(int, line.split())) for path in seen.iterdir() for line in path.read_text().splitlines())
    assert [start for start, _ in windows] == list(range(7, 7 + sum(BATCHES), 16))
    tokens = {event["global_step"]: event["tokens_seen"] for event in metrics(straight, "train")}
    assert tokens == {step: sum(BATCHES[: step + 1]) for step in tokens}


def test_scaled_rates_are_trained_with_printed_and_recorded(shop: InProcess) -> None:
    """A run with scaling rules equals, to the bit, a run whose train.json has the scaled values."""
    both = {"min_train_tokens": None, "train_steps": 4, "precision": "fp32", "report_interval": 1}
    rules = {"scale_with_batch": {"reference_tokens": 16}, "scale_with_depth": {"reference_layers": 4}}
    scaled = shop.add_run("scaled", learning_rate=0.01, weight_decay=0.1, **both, **rules)
    by_hand = shop.add_run("by_hand", learning_rate=0.02, weight_decay=0.1 * 2 * 4, **both)
    said = shop.train_here("scaled").stdout
    assert "  scaled: learning_rate 0.01 x sqrt(64 / 16) = 0.02\n" in said
    assert "  scaled: weight_decay 0.1 x sqrt(64 / 16) x (4 / 2)^2 = 0.8\n" in said
    shop.train_here("by_hand")
    assert_same_end(scaled, by_hand)
    for record in end_of(scaled):
        assert record["scaled"] == pytest.approx({"learning_rate": 0.02, "weight_decay": 0.8}, rel=1e-12)
        assert (record["train"]["learning_rate"], record["train"]["scale_with_batch"]["reference_tokens"]) == (0.01, 16)
    assert all("scaled" not in record for record in end_of(by_hand))


def test_steps_that_are_asked_for_later_are_that_many_in_all(shop: InProcess) -> None:
    """`train_steps` counts all steps of the run, also those done with another global batch."""
    shop.add_run(min_train_tokens=64 * 4)
    shop.train_here()
    run = shop.add_run(min_train_tokens=None, train_steps=10, gradient_accumulation_steps=4)
    planned = " ".join(shop.attempt("--plan").stdout.split())
    assert "done already 4 steps, 256 tokens global steps 6 more tokens 768 more" in planned
    shop.train_here()
    meta, summary = end_of(run)
    assert (meta["global_step"], meta["tokens_seen"], summary["global_steps"]) == (9, 64 * 4 + 128 * 6, 10)
    assert meta["budget"] == {"key": "train_steps", "value": 10, "tokens": 64 * 4 + 128 * 6}
    shop.add_run(min_train_tokens=None, train_steps=3, gradient_accumulation_steps=4)
    assert "is finished: 10 global steps" in shop.train_here().stdout


@pytest.mark.parametrize("interval", [None, 7], ids=["stopped", "at-a-checkpoint"])
def test_a_budget_that_is_lowered_to_what_is_done_ends_the_run_with_a_validation(
    shop: InProcess, interval: int | None
) -> None:
    """The run ends as one that had this budget from its start. It was stopped after step 7, in one case with a
    checkpoint that was due there."""
    keys = {"min_train_tokens": None, "validation_interval": 4, "report_interval": 3, "learning_rate": 0.01}
    keys |= {"checkpoint_interval": interval}
    straight, cut = shop.add_run("straight", **keys, train_steps=8), shop.add_run("cut", **keys, train_steps=12)
    shop.train_here("straight")
    shop.train("cut", prelude=STOP.format(step=6), expect=128 + 15, ranks=1)
    shop.add_run("cut", **keys, train_steps=8)
    shop.train_here("cut")
    if interval is None:  # else the checkpoint's line is before that of the validation
        assert_same_end(straight, cut)
    lines = [sorted((each["event"], each["global_step"]) for each in metrics(run)) for run in (straight, cut)]
    assert lines[0] == lines[1]
    losses = [{key: value for key, value in end_of(run)[1].items() if "loss" in key} for run in (straight, cut)]
    assert losses[0] == losses[1]
    assert losses[0]["best_loss"] == losses[0]["final_validation_loss"]
    assert (cut / "checkpoints" / "best").resolve() == (cut / "checkpoints" / "latest").resolve()
    assert "is finished" in shop.train_here("cut").stdout


def test_the_summary_records_a_budget_that_was_lowered_to_a_checkpoint(shop: InProcess) -> None:
    """At a step at which everything was done that is due at a last step, so that no step or evaluation follows."""
    keys = {"min_train_tokens": None, "validation_interval": 3, "report_interval": 3}
    run = shop.add_run("r", **keys, train_steps=12)
    shop.train("r", prelude=f"{FAULTS}before(STEP, kill, step=5)", expect=-9, ranks=1)
    shop.add_run("r", **keys, train_steps=2, learning_rate=1.0)
    assert "is finished" in shop.train_here().stdout
    summary = summary_of(run)
    assert (summary["global_steps"], summary["budget"]["value"], summary["train"]["train_steps"]) == (4, 2, 2)
    assert summary["train"]["learning_rate"] != 1.0, "no step was trained with it"


def test_a_budget_that_is_lowered_to_a_step_that_was_reported(shop: InProcess) -> None:
    """Its report is due again, since the interval has changed, but there is nothing to report."""
    keys: dict[str, Any] = {"min_train_tokens": None, "validation_interval": 4}
    run = shop.add_run(**keys, report_interval=3, train_steps=12)
    shop.train("r", prelude=STOP.format(step=5), expect=128 + 15, ranks=1)
    reports = [event["global_step"] for event in metrics(run, "train")]
    shop.add_run(**keys, report_interval=4, train_steps=reports[-1] + 1)
    shop.train_here()
    assert [event["global_step"] for event in metrics(run, "train")] == reports
    assert [event["global_step"] for event in metrics(run, "validation")][-1] == reports[-1]


def test_a_tied_heads_own_rate_is_refused(shop: InProcess) -> None:
    shop.add_run(model={"tie_weights": True}, head_learning_rate=0.1)
    for arguments in ([], ["--plan"]):
        said = 'r/train.json: key "head_learning_rate": with "tie_weights" in model.json'
        shop.attempt(*arguments).refuses(said, 'use "embedding_learning_rate"')


def test_the_plan_knows_what_optimizers_keep(shop: InProcess) -> None:
    """The plan prints the disk space of whole checkpoints, and each rank's part of a sharded optimizer state."""
    shop.add_run("r", model={"emb_dim": 512}, optimizer="muon", shard_optimizer=True)
    said = shop.attempt("--plan", "--assume-world-size", "4").stdout
    assert "0.02 GiB of state, about 0.01 on each of 4 ranks" in said
    assert "0.05 each" in said  # it would be 0.07 with AdamW's two moments of each matrix


def test_the_commit_is_the_checkouts_own(tmp_path: Path) -> None:
    assert program_commit(tmp_path) is None, "a folder without a Git repository"

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    program_commit.cache_clear()
    assert program_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    program_commit.cache_clear()
    assert program_commit(tmp_path) == f"{head}-dirty"
    inside = tmp_path / "inside"
    inside.mkdir()
    assert program_commit(inside) is None, "a folder inside another project's repository"
    if (ROOT / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", str(program_commit()))
