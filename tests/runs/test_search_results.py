"""Results of -f: written, read again, told apart, and no more than a warning where they cannot be written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.runs.directory import RunDirectory
from harness.runs.results import MicrobatchSearch, TriedMicrobatch, read_results, write_result
from harness.training.batch_size_finder import keep_search

SEARCH = MicrobatchSearch(
    date="2026-01-02T03:04:05Z",
    device="NVIDIA A100-SXM4-40GB",
    torch="2.15.0",
    world_size=8,
    limit_gib=39.5,
    usable_gib=38.0,
    largest=13,
    smallest_failed=14,
    tried=[TriedMicrobatch(microbatch_size=1, gib=4.5), TriedMicrobatch(microbatch_size=13, gib=36.25)],
    accumulation_steps=1,
    compiled=True,
    model={"emb_dim": 768},
    train={"precision": "auto"},
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def test_a_search_is_read_as_it_was_written(run: RunDirectory) -> None:
    assert read_results(run).found == []
    write_result(run, SEARCH)
    assert read_results(run).found == [SEARCH]
    assert read_results(run).problems == []


def test_the_same_question_takes_the_place_of_the_earlier_one(run: RunDirectory) -> None:
    later = SEARCH.model_copy(update={"largest": 12, "limit_gib": 38.0, "date": "2026-02-02T03:04:05Z"})
    assert write_result(run, SEARCH) == write_result(run, later)
    assert read_results(run).found == [later]


@pytest.mark.parametrize(
    "other", [{"device": "H100"}, {"world_size": 2}, {"asked_gib": 24.0}, {"model": {"emb_dim": 64}}], ids=str
)
def test_another_question_stands_beside(run: RunDirectory, other: dict[str, Any]) -> None:
    write_result(run, SEARCH)
    write_result(run, SEARCH.model_copy(update=other))
    assert len(read_results(run).found) == 2


def test_what_cannot_be_read_is_named(run: RunDirectory) -> None:
    path = write_result(run, SEARCH)
    for name, text in (("half", '{"kind": "microbatch_'), ("other", '{"largest": "many"}')):
        path.with_name(f"microbatch-search-{name}.json").write_text(text)
    searches = read_results(run)
    assert searches.found == [SEARCH]
    assert ["microbatch-search-half" in problem for problem in searches.problems] == [True, False]
    assert searches.problems[1].endswith("not a result of this version; use -f again, or move the file away")


def test_a_folder_that_takes_nothing_is_a_warning(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """A file in the folder's place stands for a folder that is read-only to anybody but root."""
    run.results.write_text("")
    experiment: Any = SimpleNamespace(run=run)
    keep_search(experiment, SEARCH)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"warning: {run.results}/microbatch-search-")
    assert len(said.err.splitlines()) == 1
