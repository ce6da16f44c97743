"""Results in a run directory are written, read and told apart: measurements of its weights, and microbatch searches
(-f)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.common.errors import UserError
from harness.runs.directory import RunDirectory
from harness.runs.results import (
    BenchmarkResult,
    BenchmarkScore,
    InstructionResult,
    LossResult,
    MeasuredWeights,
    Text,
    read_results,
    read_window_losses,
    write_loss,
    write_result,
    write_search,
)
from tests.support.configs import refusal

WEIGHTS = MeasuredWeights(checkpoint="20260102Z030405-iteration-9", sha256="ab" * 32, global_step=9, is_best=True)
TEXT = Text(
    dataset="me/d", sha256="cd" * 32, tokenizer="gpt2", split="test", start_token=0, windows=3, context_length=8
)
MEASURED: dict[str, Any] = {"weights": WEIGHTS, "date": "2026-01-02T03:04:05Z", "device": "CPU", "torch": "2.15.0"}
LOSS = LossResult(**MEASURED, text=TEXT, precision="fp32", loss=2.5, bits_per_byte=1.25)
LOSSES = np.array([2.0, 2.5, 3.0], np.float32)
SCORES = [BenchmarkScore(task="piqa", metric="acc", value=0.5, stderr=0.01, examples=100, higher_is_better=True)]
BENCHMARKS = BenchmarkResult(**MEASURED, lm_eval="0.4", tasks=["piqa"], precision="fp32", scores=SCORES)
JUDGED = InstructionResult(
    **MEASURED,
    judge="a judge",
    prompt="together",
    questions_sha256="ef" * 32,
    questions=2,
    repeats=1,
    judging="0" * 12,
    judged_with=["a", "b"],
    mean=50.0,
    low=40.0,
    high=60.0,
    scores=[40.0, None],
)

SEARCH = {
    "kind": "microbatch_search",
    "date": "2026-01-02T03:04:05Z",
    "device": "NVIDIA A100-SXM4-40GB",
    "world_size": 8,
    "asked_gib": None,
    "limit_gib": 39.5,
    "largest": 13,
    "accumulation_steps": 1,
    "model": {"emb_dim": 768},
    "train": {"precision": "auto"},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_results_are_read_as_they_were_written(run: RunDirectory) -> None:
    assert (read_results(run).found, read_results(run).problems) == ([], [])
    write_loss(run, LOSS, LOSSES)
    for each in (BENCHMARKS, JUDGED):
        write_result(run, each)
    results = read_results(run)
    assert results.problems == []
    for written in (LOSS, BENCHMARKS, JUDGED):
        assert results.of(type(written)) == [written]
    np.testing.assert_array_equal(read_window_losses(run, LOSS), LOSSES)


def test_the_same_measurement_takes_the_place_of_the_earlier_one(run: RunDirectory) -> None:
    later = LOSS.model_copy(update={"loss": 2.4, "date": "2026-02-02T03:04:05Z", "device": "another"})
    assert write_loss(run, LOSS, LOSSES) == write_loss(run, later, LOSSES - 0.1)
    assert read_results(run).found == [later]
    np.testing.assert_array_equal(read_window_losses(run, later), LOSSES - np.float32(0.1))


@pytest.mark.parametrize(
    "changes",
    [
        {"text": TEXT.model_copy(update={"start_token": 1})},
        {"text": TEXT.model_copy(update={"sha256": "00" * 32})},
        {"precision": "bf16"},
        {"weights": WEIGHTS.model_copy(update={"sha256": "00" * 32})},
    ],
)
def test_a_result_of_another_measurement_does_not_replace_the_first(run: RunDirectory, changes: dict[str, Any]) -> None:
    write_result(run, LOSS)
    write_result(run, LOSS.model_copy(update=changes))
    assert len(read_results(run).found) == 2


def test_a_search_takes_the_place_of_the_same_search_and_is_no_measurement(run: RunDirectory) -> None:
    path = write_search(run, SEARCH)
    again = SEARCH | {"largest": 12, "limit_gib": 38.0, "date": "2026-02-02T03:04:05Z"}
    assert write_search(run, again) == path
    assert json.loads(path.read_text()) == again
    for key, other in {"device": "H100", "world_size": 2, "asked_gib": 24.0, "model": {"emb_dim": 64}}.items():
        assert write_search(run, SEARCH | {key: other}) != path
    assert (read_results(run).found, read_results(run).problems) == ([], [])


@pytest.mark.parametrize(
    "text", ['{"kind": "test_loss", "wei', '{"kind": "horoscope"}', '{"kind": "test_loss", "loss": 1.0}']
)
def test_what_cannot_be_read_is_named_and_the_rest_is_read(run: RunDirectory, text: str) -> None:
    write_loss(run, LOSS, LOSSES)
    (run.results / "other.json").write_text(text)
    results = read_results(run)
    assert results.found == [LOSS]
    (problem,) = results.problems
    assert problem.startswith(f"{run.results / 'other.json'}:")
    assert problem.endswith("; measure again, or move the file away")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"loss": 2.5', '"loss": 5000', "its loss is 5000, but the mean of its windows' losses (NAME) is 2.5"),
        ('"loss": 2.5', '"loss": 2.6', "its loss is 2.6, but the mean of its windows' losses (NAME) is 2.5"),
        ('"loss": 2.5', '"loss": -1', "not a result of this version"),
        ('"loss": 2.5', '"loss": NaN', "NaN is not a JSON number"),
    ],
)
def test_a_loss_that_its_windows_contradict_is_left_out(run: RunDirectory, old: str, new: str, said: str) -> None:
    path = write_loss(run, LOSS, LOSSES)
    path.write_text(path.read_text().replace(old, new))
    results = read_results(run)
    assert results.found == []
    (problem,) = results.problems
    assert problem == f"{path}: {said.replace('NAME', LOSS.windows_name)}; measure again, or move the file away"
    path.with_suffix(".safetensors").unlink()
    is_plausible = "mean" in said  # without its file of windows a loss cannot be contradicted
    assert len(read_results(run).found) == is_plausible


def test_losses_of_windows_that_are_missing_too_few_or_of_another_type(run: RunDirectory) -> None:
    path = write_loss(run, LOSS, LOSSES[:2])
    windows = path.with_suffix(".safetensors")
    refusal(read_window_losses, run, LOSS, begins=f"{windows}: has losses of shape [2], not [3]; measure again")
    save_file({"losses": torch.ones(3, dtype=torch.bfloat16)}, windows)
    refusal(read_window_losses, run, LOSS, begins=f"{windows}: cannot read the losses of the windows")
    windows.unlink()
    refusal(read_window_losses, run, LOSS, begins=f"{windows}: cannot read the losses of the windows")


def test_a_name_that_leaves_the_folder_is_refused(run: RunDirectory) -> None:
    away = LOSS.model_copy(update={"weights": WEIGHTS.model_copy(update={"checkpoint": "../../x"})})
    with pytest.raises(UserError, match="result"):
        write_result(run, away)
