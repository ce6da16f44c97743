"""A run's folder as a comparison reads it: its state, its figures, and its damaged files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.lock import RunLock, is_held
from harness.comparison.arms import find_arms
from harness.comparison.records import RunRecord, find_runs
from harness.runs.metrics import read_progress
from harness.runs.train_config import BUDGETS
from tests.support.compared_runs import LATEST, RunFolder


def test_a_finished_run_is_what_its_summary_says_and_another_what_its_files_ask_for(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").finish()
    run.directory.train_json.write_text(run.directory.train_json.read_text().replace("36.0", "99.0"))
    record, never = RunRecord.read(run.directory), RunRecord.read(RunFolder(tmp_path, "b").directory)
    assert (record.state.word, never.state.word) == ("finished", "never trained")
    assert record.train["price_per_hour"] == 36.0, "the value it was trained with, not today's in train.json"
    assert (record.tokens_seen, record.global_batch, record.recorded("world_size")) == (12_800, 8, 2)
    assert record.shape is not None
    assert record.shape.n_layers == 2
    assert record.dataset["name"] == "me/texts"
    assert record.problems == ()
    assert never.tokens_seen is None
    assert never.train["learning_rate"] == 0.0004, "with the defaults"


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize(("skipped", "without_end"), [(9, "stopped"), (10, "diverged")])
def test_a_run_with_a_high_loss_has_diverged_if_that_ends_it(
    tmp_path: Path, ends: bool, skipped: int, without_end: str
) -> None:
    """With stop_if_diverged false, max_skipped_steps (10) alone ends a run; another stop is to be continued."""
    run = RunFolder(tmp_path, "a", {"stop_if_diverged": ends}).train_to(0)
    run.add_checkpoint(LATEST, "latest", has_diverged=True, skipped_steps=skipped)
    assert RunRecord.read(run.directory).state.word == ("diverged" if ends else without_end)


def test_a_run_that_had_diverged_at_its_end_and_was_extended_is_stopped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").train_to(0)
    run.add_checkpoint(LATEST, "latest", has_diverged=True, last_step=int(LATEST.rpartition("-")[2]))
    assert RunRecord.read(run.directory).state.word == "stopped"


@pytest.mark.parametrize("dataset", ["x", ["x"], 3])
def test_a_dataset_that_a_checkpoint_records_as_no_object_is_not_recorded(tmp_path: Path, dataset: Any) -> None:
    run = RunFolder(tmp_path, "a").train_to(0, 10).add_checkpoint(LATEST, "latest", dataset=dataset)
    assert RunRecord.read(run.directory).dataset == {}


def test_a_run_that_goes_on_is_told_by_its_lock(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").train_to(0)
    lock = RunLock.take(run.path / ".lock", "trained")
    assert is_held(run.path / ".lock")
    assert RunRecord.read(run.directory).state.word == "going on"
    os.close(lock.descriptor)
    assert is_held(run.path / ".lock") is False, "this process is alive, but has released the lock"
    assert RunRecord.read(run.directory).state.word == "stopped"


def test_on_another_machine_the_last_lines_age_decides(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").train_to(0)
    (run.path / ".lock").write_text('{"host": "elsewhere", "pid": 1, "namespace": "x"}')
    assert is_held(run.path / ".lock") is None
    assert RunRecord.read(run.directory).state.word == "going on"
    hours_ago = time.time() - 3 * 3600
    os.utime(run.directory.metrics, (hours_ago, hours_ago))
    state = RunRecord.read(run.directory).state
    assert (state.word, state.detail) == (
        "stopped",
        "last line in metrics.jsonl 3 h ago, on another machine or before a reboot",
    )
    run.add_checkpoint(LATEST, "latest").directory.metrics.unlink()
    state = RunRecord.read(run.directory).state
    assert (state.word, state.detail) == ("stopped", "no line in metrics.jsonl, on another machine or before a reboot")


def test_on_another_machine_a_diverged_run_goes_on_if_it_has_lines_after_its_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a", {"stop_if_diverged": False}).train_to(99)
    run.add_checkpoint(LATEST, "latest", has_diverged=True, skipped_steps=10)
    (run.path / ".lock").write_text('{"host": "elsewhere", "pid": 1, "namespace": "x"}')
    assert RunRecord.read(run.directory).state.word == "diverged"
    assert RunRecord.read(run.train_to(100).directory).state.word == "going on"


def test_a_damaged_file_is_one_line_with_the_key_or_the_remedy(tmp_path: Path) -> None:
    run, wrong = RunFolder(tmp_path, "a").finish().train_to(0, 10), RunFolder(tmp_path, "b")
    run.directory.summary.write_text(run.directory.summary.read_text()[:200])
    record = RunRecord.read(run.directory)
    assert record.state.word == "damaged"
    assert record.state.detail.startswith(f"{run.directory.summary}:1: not valid JSON")
    assert record.state.detail.endswith(
        "move the file away, and start the run again, to rewrite the file from the last checkpoint"
    )
    assert record.progress is not None, "the other files are still read"
    wrong.directory.train_json.write_text('{"learning_rat": 1}')
    state = RunRecord.read(wrong.directory).state
    assert state.word == "damaged"
    assert 'did you mean "learning_rate"' in state.detail
    impossible: dict[str, Any] = {"world_size": 0, "tokens_seen": -5, "final_validation_loss": -3.0}
    for key, value in impossible.items():
        state = RunRecord.read(RunFolder(tmp_path, key).finish(**{key: value}).directory).state
        assert state.word == "damaged"
        assert f'key "{key}"' in state.detail


def test_a_summary_whose_recorded_settings_cannot_be_is_damaged_and_one_of_another_version_is_not(
    tmp_path: Path,
) -> None:
    good = RunFolder(tmp_path, "good").finish()
    recorded = json.loads(good.directory.summary.read_text())["train"]
    wrong: dict[str, Any] = dict.fromkeys((*BUDGETS, "global_batch_size", "betas", "random_seed"), "x")
    for key, value in (wrong | {"train_steps": 1.5, "scale_with_batch": {"reference_tokens": "x"}}).items():
        state = RunRecord.read(RunFolder(tmp_path, key).finish(train=recorded | {key: value}).directory).state
        assert state.word == "damaged"
        assert f'summary.json: key "train.{key}' in state.detail
    shape = json.loads(good.directory.summary.read_text())["model"] | {"context_length": [1]}
    state = RunRecord.read(RunFolder(tmp_path, "shape").finish(model=shape).directory).state
    assert (state.word, 'key "model.context_length"' in state.detail) == ("damaged", True)
    other = {"exact_dropout": True, "optimizer": "lion", "compile": "later", "microbatch_size": None, "$schema": 5}
    contradicting = {"warmup_steps": 3, "warmup_period_percent": 1.0}
    del recorded["dataset"]
    record = RunRecord.read(RunFolder(tmp_path, "other").finish(train=recorded | other | contradicting).directory)
    assert (record.state.word, record.train["optimizer"], record.problems) == ("finished", "lion", ())


def test_a_finished_run_that_continues_shows_its_last_lines_and_is_in_no_arm(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").finish(tokens_seen=21 * 128).train_to(0, 10, 20)
    train = json.loads(run.directory.train_json.read_text())
    for tokens, steps, state in ((64, (), "finished"), (10**6, (), "stopped"), (10**6, (30,), "stopped")):
        run.directory.train_json.write_text(json.dumps(train | {"min_train_tokens": tokens}))
        run.train_to(*steps)
        record = RunRecord.read(run.directory)
        assert record.state.word == state
        assert list(find_arms([record]).run_names) == (["a"] if state == "finished" else [])
        assert record.tokens_seen == (31 if 30 in steps else 21) * 128


def test_a_run_of_the_whole_split_is_finished_for_a_smaller_budget(tmp_path: Path) -> None:
    """With `min_train_tokens` -1 a run has read all tokens that there are, so that a budget up to these is reached."""
    run = RunFolder(tmp_path, "a", {"min_train_tokens": -1}).finish(tokens_seen=21 * 128)
    train = json.loads(run.directory.train_json.read_text())
    for tokens, state in ((64, "finished"), (21 * 128, "finished"), (10**6, "stopped")):
        run.directory.train_json.write_text(json.dumps(train | {"min_train_tokens": tokens}))
        assert RunRecord.read(run.directory).state.word == state


@pytest.mark.parametrize(
    ("key", "largest"), [("train_steps", 21), ("tokens_per_parameter", 0.08), ("target_flops", 4.6e8)]
)
def test_a_run_that_has_reached_a_budget_of_another_kind_is_finished(tmp_path: Path, key: str, largest: float) -> None:
    run = RunFolder(tmp_path, "a").finish(tokens_seen=21 * 128, global_steps=21)
    for value, state in ((largest, "finished"), (2 * largest, "stopped")):
        run.directory.train_json.write_text(json.dumps(run.train | {"min_train_tokens": None, key: value}))
        assert RunRecord.read(run.directory).state.word == state


def test_metrics_without_a_line_of_ours_are_no_progress(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('half a li\n{"x": 1}\n')
    assert read_progress(tmp_path / "metrics.jsonl") is None
    assert read_progress(tmp_path / "none") is None


@pytest.mark.parametrize("name", ["sweep.log", "metrics.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    run = RunFolder(tmp_path, "a").directory
    os.mkfifo(run.path / name)
    state = RunRecord.read(run).state
    refused = f"{run.metrics}: not a regular file; move it away, or give another path"
    expected = ("never trained", "") if name == "sweep.log" else ("damaged", refused)
    assert (state.word, state.detail) == expected


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_link_that_leads_to_itself_is_no_checkpoint(tmp_path: Path, is_finished: bool) -> None:
    run = RunFolder(tmp_path, "a").train_to(0, 10)
    run.directory.checkpoints.mkdir()
    for link in ("best", "latest"):
        (run.directory.checkpoints / link).symlink_to(link)
    record = RunRecord.read((run.finish() if is_finished else run).directory)
    assert (record.best, record.latest) == (None, None)
    assert record.state.word == ("finished" if is_finished else "damaged")


def test_all_runs_of_a_folder_or_those_named(tmp_path: Path) -> None:
    for name in ("b", "a", "c", ".c.partial-1"):  # the last one is a draft that a killed process has left
        RunFolder(tmp_path, name)
    (tmp_path / "notes").mkdir()
    for names, found in (
        ((), ["a", "b", "c"]),
        (("c", "a", f"{tmp_path}/c/"), ["c", "a"]),
        (("*[abc1]",), ["a", "b", "c"]),
        (("[bc]", f"{tmp_path}/?", "a"), ["b", "c", "a"]),
    ):
        assert [run.path.name for run in find_runs(tmp_path, names)] == found
    (tmp_path / "c copy").mkdir()
    (tmp_path / "d copy").mkdir()
    (tmp_path / "d copy" / "train.json").touch()
    assert [run.path.name for run in find_runs(tmp_path, ("c*",))] == ["c"]
    refused: list[tuple[Path, tuple[str, ...], str]] = [
        (tmp_path, ("a**b",), r"a\*\*b: no run in .* matches"),
        (tmp_path, ("d*",), "run 'd copy': must be a plain name"),
        (tmp_path, ("bb",), "no such run; did you mean b"),
        (tmp_path, ("notes",), "not a run; it has neither train"),
        (tmp_path, ("n*",), "no run in .* matches"),
        (tmp_path / "notes", (), "there are no runs; --runs-dir names"),
    ]
    for folder, asked, message in refused:
        with pytest.raises(UserError, match=message):
            find_runs(folder, asked)


def test_a_pattern_or_no_name_leaves_out_the_runs_that_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder(tmp_path / "runs", "a")
    RunFolder(tmp_path / "runs", "b copy")
    (tmp_path / "runs" / "out").symlink_to(RunFolder(tmp_path, "elsewhere").path)
    for names, found in (((), ["a", "b copy"]), (("*",), ["a"])):
        assert [run.path.name for run in find_runs(tmp_path / "runs", names)] == found
    out, odd = capsys.readouterr().err.splitlines()
    assert odd.startswith("left out: run 'b copy': must be a plain name")
    assert out.startswith(f"left out: {tmp_path}/runs/out: leads out of ")
