"""Columns of the table: each holds only values with the same basis, and a run's value is its best checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.comparison.against_baseline import compare_with
from harness.comparison.table import Column, RunsTable
from harness.data.ngrams import Overlap
from harness.runs.results import (
    BenchmarkResult,
    BenchmarkScore,
    InstructionResult,
    MeasuredWeights,
    Result,
    write_result,
)
from tests.support.compared_runs import BEST, DATASET, LATEST, RunFolder, low_and_hot, records, table_of

OLDER = "20260102Z030404-iteration-70"


def columns(table: RunsTable, key: str) -> list[Column]:
    return [column for column in table.columns if column.key.split(":")[0] == key]


def values(table: RunsTable, key: str) -> list[Any]:
    (column,) = columns(table, key)
    return [cell.value for cell in column.cells]


def finished(tmp_path: Path, *names: str) -> list[RunFolder]:
    return [RunFolder(tmp_path, name).finish() for name in names]


OTHER_TEXTS = [{"sha256": "dd" * 32}, {"start_token": 16}, {"windows": 41}, {"context_length": 32}]
OTHER_TEXTS += [{"tokenizer": "ee" * 32}, {"precision": "bf16"}]


@pytest.mark.parametrize("change", OTHER_TEXTS, ids=lambda change: next(iter(change)))
def test_losses_on_the_same_text_stand_in_one_column(tmp_path: Path, change: dict[str, Any]) -> None:
    a, b, c = finished(tmp_path, "a", "b", "c")
    table = table_of(a.test_loss(2.5), b.test_loss(2.25, **change), c.test_loss(2.3))
    assert values(table, "test_loss") == [2.5, None, 2.3]
    assert values(table, "bits_per_byte") == [1.25, 1.125 if "tokenizer" in change else None, 1.15]
    (column,) = columns(table, "test_loss")
    assert column.about == "40 x 16 tokens from token 0 of the test split of me/texts (cccccccc), in fp32"
    assert column.cells[1].remark.startswith("its test loss cannot be compared: 2.250 on ")


def test_two_groups_are_two_columns(tmp_path: Path) -> None:
    a, b, c, d = finished(tmp_path, "a", "b", "c", "d")
    other = {"sha256": "dd" * 32}
    a.test_loss(2.1), b.test_loss(2.2), c.test_loss(2.3, **other), d.test_loss(2.4, **other)
    a.test_loss(1.1, **other)
    first, second = columns(table_of(a, b, c, d), "test_loss")
    assert [cell.value for cell in first.cells] == [1.1, None, 2.3, 2.4]
    assert [cell.value for cell in second.cells] == [2.1, 2.2, None, None]
    assert (first.key, second.key) == ("test_loss", "test_loss:2")
    assert (
        first.cells[1].remark
        == "its test loss is in another column: measured on another text or task, or in another way"
    )


@pytest.mark.parametrize("part", [{"windows": each} for each in range(1, 6)], ids=str)
def test_the_longer_of_two_texts_counts(tmp_path: Path, part: dict[str, Any]) -> None:
    """A short measurement (test_loss.py --batches) of runs that were measured on the whole split is not the one that
    the table and the verdict use, whatever the names of the results' files."""
    runs = [run.test_loss(2.1).test_loss(2.4, **part) for run in low_and_hot(tmp_path, 2.1, 2.2)]
    for measured in (runs, runs[:1]):
        column = columns(table_of(*measured), "test_loss")[0]
        assert {cell.value for cell in column.cells} == {2.1}
    assert "by test loss on 40 x 16 tokens" in compare_with("low-seed1", records(*runs)).title


def test_bits_per_byte_remain_with_another_tokenizer(tmp_path: Path) -> None:
    """Bits per byte of two tokenizers are compared if the measured parts of a split have equally many bytes, to within
    the last batch of 6 windows. Here these are 40 x 16 tokens of 2 / ln 2 bytes each, and 20 x 16 tokens of 4 / ln 2
    bytes each, or 17 x 16 such tokens."""
    a, b, c, d, e = finished(tmp_path, "a", "b", "c", "d", "e")
    other: dict[str, Any] = {"sha256": "dd" * 32, "tokenizer": "ee" * 32, "windows": 20, "bits_per_byte": 1.1}
    a.test_loss(2.4), b.test_loss(4.4, **other)
    c.test_loss(4.4, **(other | {"sha256": "ff" * 32, "windows": 30}))
    d.test_loss(4.4, **(other | {"sha256": "99" * 32, "bits_are_exact": False}))
    e.test_loss(4.4, **(other | {"sha256": "88" * 32, "windows": 17}))
    table = table_of(a, b, c, d, e)
    assert values(table, "test_loss") == [2.4, None, None, None, None]
    assert values(table, "bits_per_byte") == [1.2, 1.1, None, None, 1.1], "c covers more bytes; d is approximate"


@pytest.mark.parametrize(
    ("other", "loss", "value", "remark"),
    [
        (BEST, 2.5, 2.5, f"of checkpoint {BEST} (best); also measured: {LATEST}"),
        (OLDER, 2.4, 2.6, f"of checkpoint {LATEST} (latest): the best checkpoint has no comparable result"),
    ],
)
def test_the_best_checkpoints_result_is_taken_or_else_the_latests(
    tmp_path: Path, other: str, loss: float, value: float, remark: str
) -> None:
    run = RunFolder(tmp_path, "a").finish().add_checkpoint(BEST, "best").add_checkpoint(LATEST, "latest")
    run.test_loss(2.6, LATEST).test_loss(loss, other)
    cell = columns(table_of(run), "test_loss")[0].cells[0]
    assert (cell.value, cell.remark) == (value, remark)


def test_the_best_checkpoint_is_the_one_that_the_link_names_today(tmp_path: Path) -> None:
    """The best checkpoint is the one that the link `best` names when the table is made. If the run's checkpoints are
    missing, it is that of the summary's best step. Results of a checkpoint that was set aside do not count."""
    run = RunFolder(tmp_path, "a").finish().test_loss(2.6, LATEST).test_loss(2.5, BEST)
    assert values(table_of(run), "test_loss") == [2.5]
    run.add_checkpoint(LATEST, "best", "latest")
    assert values(table_of(run), "test_loss") == [2.6]
    for name in (BEST, LATEST):
        (run.path / "aside" / "20260105Z000000" / "checkpoints" / name).mkdir(parents=True)
    assert columns(table_of(run), "test_loss") == []


def test_checkpoints_of_an_earlier_fetch_are_not_the_best_ones_of_a_finished_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").finish().add_checkpoint(OLDER, "best", "latest")
    run.test_loss(4.9, OLDER).test_loss(2.4, BEST)
    assert values(table_of(run), "test_loss") == [2.4]


@pytest.mark.parametrize("is_here", [True, False])
def test_a_loss_measured_before_the_end_is_not_that_of_a_finished_run(tmp_path: Path, is_here: bool) -> None:
    """The checkpoint was the best one when it was measured. The verdict is then one by validation loss, which is better
    although the early test loss is worse."""
    runs, none = low_and_hot(tmp_path, 2.6, 2.4), Overlap(documents=1, copied_documents=0, ngrams=9, copied_ngrams=0)
    for run in runs:
        run.test_loss(*((2.5,) if run.path.name.startswith("low") else (3.5, OLDER)), is_best=True, trained_on=none)
        if is_here:
            run.add_checkpoint(OLDER).add_checkpoint(BEST, "best").add_checkpoint(LATEST, "latest")
    (column,) = columns(table_of(*runs), "test_loss")
    assert [cell.value for cell in column.cells] == [2.5, 2.5, None, None]
    assert column.cells[2].remark.startswith(f"measured only at {OLDER}, before the run's end")
    (trained_on,) = columns(table_of(*runs), "test_text_trained_on")
    assert trained_on.cells[2].remark == column.cells[2].remark
    found = compare_with("low-seed1", records(*runs))
    assert found.title.startswith("Against low (2 runs), by validation loss")
    assert found.verdicts[0].verdict == "better"


def test_training_losses_on_other_data_do_not_compare(tmp_path: Path) -> None:
    other = {**DATASET, "train": {"tokens": 100_000, "sha256": "00" * 32}}
    a, b = RunFolder(tmp_path, "a").finish(), RunFolder(tmp_path, "b").finish(dataset=other)
    table = table_of(a, b)
    assert values(table, "train_loss") == [2.5, None]
    assert values(table, "validation_loss") == [2.6, 2.6]
    assert [cell.text for cell in columns(table, "dataset_content")[0].cells] == [
        "aaaaaaaa bbbbbbbb",
        "00000000 bbbbbbbb",
    ]


def write(run: RunFolder, kind: type[Result], values: dict[str, Any]) -> RunFolder:
    """Write a result of the best checkpoint."""
    weights = MeasuredWeights(checkpoint=BEST, sha256=run.path.name, is_best=True)
    write_result(
        run.directory, kind(weights=weights, date="2026-01-03T00:00:00Z", device="CPU", torch="2.15", **values)
    )
    return run


def judged(run: RunFolder, mean: float, judging: str, *others: str, **changes: Any) -> RunFolder:
    judge = {"judge": "gpt", "prompt": "p", "questions_sha256": "0" * 64, "questions": 2, "repeats": 1}
    scores = {"mean": mean, "low": 1.0, "high": 90.0, "scores": [mean, mean], "judged_with": [run.path.name, *others]}
    return write(run, InstructionResult, {**judge, **scores, "judging": judging, **changes})


def test_scores_of_one_judging_compare_and_so_do_answers_judged_alone(tmp_path: Path) -> None:
    a, b, c = finished(tmp_path, "a", "b", "c")
    judged(a, 20.0, "one", "b"), judged(b, 30.0, "one", "a"), judged(c, 40.0, "two", "d")
    table = table_of(a, b, c)
    assert values(table, "instruction_score") == [20.0, 30.0, None]
    assert columns(table, "instruction_score")[0].cells[0].text == "20.00 (1.0 to 90.0)"
    d, e, f = finished(tmp_path, "d", "e", "f")
    judged(d, 20.0, "one"), judged(e, 30.0, "two"), judged(f, 40.0, "three", judge="another")
    assert values(table_of(d, e, f), "instruction_score") == [20.0, 30.0, None]
    judged(f, 60.0, "four", scores=[None, 60.0])
    assert values(table_of(d, e, f), "instruction_score") == [20.0, 30.0, None], "a question without a score"


@pytest.mark.parametrize("whole", ["one", "two"])
def test_the_judging_of_the_most_questions_comes_first(tmp_path: Path, whole: str) -> None:
    runs = finished(tmp_path, "a", "b")
    for judge in ("one", "two"):
        for run in runs:
            judged(run, 30.0, judge, judge=judge, scores=[30.0, 30.0 if judge == whole else None])
    first, _ = columns(table_of(*runs), "instruction_score")
    assert f"judge {whole}" in first.about


def benchmarked(run: RunFolder, value: float, **changes: Any) -> RunFolder:
    score = BenchmarkScore(task="piqa", metric="acc", value=value, stderr=0.0123, examples=9, higher_is_better=True)
    values = {"lm_eval": "0.4", "tasks": ["piqa"], "precision": "fp32", "scores": [score]}
    return write(run, BenchmarkResult, {**values, **changes})


@pytest.mark.parametrize("change", [{"limit": 10}, {"num_fewshot": 5}, {"lm_eval": "0.5"}, {"precision": "bf16"}])
def test_benchmarks_compare_with_the_same_settings_only(tmp_path: Path, change: dict[str, Any]) -> None:
    a, b, c = finished(tmp_path, "a", "b", "c")
    table = table_of(benchmarked(a, 0.5), benchmarked(b, 0.625), benchmarked(c, 0.75, **change))
    assert values(table, "piqa_acc") == [0.5, 0.625, None]
    (column,) = columns(table, "piqa_acc")
    assert column.cells[1].text == "0.625 ±0.012"
    assert column.lower_is_better is False


IN_TRAINING = "piqa_acc_while_training"


def test_benchmarks_while_training_are_in_a_column_of_their_own(tmp_path: Path) -> None:
    """Only the last evaluation counts, even if lines of other kinds follow it."""
    a, b, c, d = (RunFolder(tmp_path, name).finish(precision="fp32") for name in "abcd")
    a.benchmark_at(50, 200, piqa=0.4, sciq=0.8).benchmark_at(99, 200, piqa=0.5)
    a.train_to(100)
    b.benchmark_at(99, 200, piqa=0.625)
    c.benchmark_at(80, 200, piqa=0.75)
    benchmarked(a, 0.45), benchmarked(d, 0.55)
    table = table_of(a, b, c, d)
    assert values(table, IN_TRAINING) == [0.5, 0.625, 0.75, None]
    assert values(table, "piqa_acc") == [0.45, None, None, 0.55]
    assert columns(table, "sciq_acc_while_training") == [], "the last evaluation has no sciq"
    (column,) = columns(table, IN_TRAINING)
    assert (column.title, column.lower_is_better) == ("piqa acc while training", False)
    assert column.about == "200 examples, in fp32, lm-eval's version not recorded"
    assert [cell.text for cell in column.cells] == ["0.5 ±0.012", "0.625 ±0.012", "0.75 ±0.012", ""]
    assert [cell.remark for cell in column.cells] == [
        "measured while training, after global step 99",
        "measured while training, after global step 99",
        "measured while training, after global step 80",
        "not measured while training",
    ]
    assert [record.name for record in table.sorted(IN_TRAINING).records] == ["c", "b", "a", "d"]


def test_benchmarks_while_training_compare_on_as_many_examples_in_the_same_precision(tmp_path: Path) -> None:
    """Scores are compared only if they are of equally many examples and in the same precision. Summaries of earlier
    versions do not record the precision."""
    trained = {"a": "fp32", "b": "fp32", "c": "fp32", "d": "fp32", "e": "bf16", "f": None}
    runs = {name: RunFolder(tmp_path, name).finish(precision=each) for name, each in trained.items()}
    for name, run in runs.items():
        run.benchmark_at(99, 100 if name == "c" else 200, piqa=None if name == "d" else 0.5)
    (column,) = columns(table_of(*runs.values()), IN_TRAINING)
    assert [cell.value for cell in column.cells] == [0.5, 0.5, None, None, None, None]
    remarks = ("0.5 on 100 examples", "its score is not finite", "in bf16", "in a precision not recorded")
    for cell, remark in zip(column.cells[2:], remarks, strict=True):
        assert remark in cell.remark


def test_benchmarks_of_a_run_under_way(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "r").train_to(0, 10).benchmark_at(10, 200, piqa=0.5).train_to(20)
    with run.directory.metrics.open("a") as file:
        file.write('{"event": "benchmark", "global_step": 20, "task": "pi')
    table = table_of(run)
    assert values(table, IN_TRAINING) == [0.5]
    assert columns(table, IN_TRAINING)[0].cells[0].remark.endswith("global step 10")
