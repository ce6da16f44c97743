"""The table of runs: its columns, its order, and its text for a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.comparison.fits import fits
from harness.comparison.records import RunRecord
from harness.comparison.table import Column, RunsTable, number_text, table_json, table_lines
from harness.data.ngrams import Overlap
from harness.runs.directory import RunDirectory
from harness.runs.metrics import MetricsFile, TrainEvent
from tests.runs.test_reported import COSTS, LOSSES
from tests.support.compared_runs import BEST, LATEST, TEXT, RunFolder, table_of
from tests.support.isolation import SHIPPED_RUNS

NOTEBOOK = (*COSTS, "original")


def column(table: RunsTable, key: str) -> Column:
    return next(each for each in table.columns if each.key == key)


def texts(table: RunsTable, key: str) -> list[str]:
    return [cell.text for cell in column(table, key).cells]


def row_of(table: RunsTable, name: str) -> dict[str, Any]:
    row = [record.name for record in table.records].index(name)
    return {each.key: each.cells[row].value for each in table.columns}


def test_settings_that_differ_and_no_others(tmp_path: Path) -> None:
    a = RunFolder(tmp_path, "a").finish()
    b = RunFolder(tmp_path, "b", {"learning_rate": 0.003, "betas": [0.9, 0.95]}).finish(precision="bf16")
    c = RunFolder(tmp_path, "c", n_layers=3).finish(torch="2.16.0", world_size=4, precision="fp32")
    table = table_of(a, b, c)
    assert [each.key for each in table.columns if each.is_setting] == [
        *("n_layers", "learning_rate", "betas", "machine", "torch", "trained_in")
    ]
    assert texts(table, "learning_rate") == ["0.0004", "0.003", "0.0004"]
    assert texts(table, "betas") == ["[0.9, 0.999]", "[0.9, 0.95]", "[0.9, 0.999]"]
    assert texts(table, "machine") == ["2 x NVIDIA H100", "2 x NVIDIA H100", "4 x NVIDIA H100"]
    assert texts(table, "trained_in") == ["", "bf16", "fp32"]
    assert [cell.value for cell in column(table, "global_batch").cells] == [8, 8, 16]


def test_a_setting_with_the_name_of_a_number_has_a_key_of_its_own(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path, name, {"epochs": epochs}).finish() for name, epochs in (("a", 1), ("b", 2))]
    table = table_of(*runs)
    values = [run["values"] for run in table_json(table)["runs"]]
    assert [each["setting_epochs"]["value"] for each in values] == [1, 2]
    assert all(each["epochs"]["value"] == pytest.approx(0.128, abs=1e-3) for each in values)
    assert "  b: epochs 2.0" in table_lines(table)


def test_of_many_settings_those_of_most_runs_are_named_once(tmp_path: Path) -> None:
    a, b = RunFolder(tmp_path, "a").finish(), RunFolder(tmp_path, "b", {"learning_rate": 0.003}).finish()
    c = RunFolder(tmp_path, "c", {"betas": [0.9, 0.95], "clipping_max_norm": 1.0}, n_layers=3).finish(world_size=4)
    lines = list(table_lines(table_of(a, b, c)))
    assert lines[lines.index("Settings that differ:") + 1 :][:6] == [
        "  most runs: n_layers 2, learning_rate 0.0004, betas [0.9, 0.999], machine 2 x",
        "    NVIDIA H100",
        "  a: as most runs",
        "  b: learning_rate 0.003",
        "  c: n_layers 3, betas [0.9, 0.95], clipping_max_norm 1.0, machine 4 x NVIDIA",
        "    H100",
    ]
    d = RunFolder(tmp_path, "d", {"learning_rate": 0.005}).finish()
    lines = list(table_lines(table_of(a, b, c, d)))
    assert "  a: learning_rate 0.0004" in lines, "two runs of four are not most"


def test_active_parameters_where_a_model_has_experts(tmp_path: Path) -> None:
    """Only the experts that a token uses count as active parameters; in a dense model all parameters do. Each of the
    two blocks has a router of 4 x 32 and four experts as wide as the dense layer, two of them active."""
    dense = RunFolder(tmp_path, "dense").finish()
    experts = RunFolder(tmp_path, "experts", moe={"num_experts": 4, "num_active_experts": 2}).finish()
    table, expert = table_of(dense, experts), 8 * 32**2 + 5 * 32
    assert row_of(table, "dense")["parameters"] == row_of(table, "dense")["active_parameters"] == 29_888
    assert row_of(table, "experts")["parameters"] == 29_888 + 2 * (3 * expert + 4 * 32)
    assert row_of(table, "experts")["active_parameters"] == 29_888 + 2 * (expert + 4 * 32)


def test_a_key_that_an_earlier_version_did_not_write_makes_no_difference(tmp_path: Path) -> None:
    a, b = RunFolder(tmp_path, "a").finish(), RunFolder(tmp_path, "b").finish()
    summary = json.loads(b.directory.summary.read_text())
    del summary["train"]["deterministic"], summary["torch"], summary["mfu"]
    b.directory.summary.write_text(json.dumps(summary))
    table = table_of(a, b)
    assert [each.key for each in table.columns if each.is_setting] == []


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    """The run takes 360 s, 60 s of them for validation, at 36 dollars an hour. Its parameters are counted by hand."""
    table = table_of(RunFolder(tmp_path, "a").finish(best_loss=2.55, best_step=80))
    values = row_of(table, "a")
    by_hand = 2 * (12 * 32**2 + 10 * 32) + 2 * 32 + (64 + 16) * 32 + 64 * 32
    assert values["parameters"] == by_hand == 29_888
    assert values["flops"] == 12_800 * (6 * (2 * 12 * 32**2 + 64 * 32) + 12 * 2 * 32 * 16)
    assert (values["hours"], values["hours_without_validation"]) == pytest.approx((0.1, 300 / 3600))
    assert (values["dollars"], values["dollars_without_validation"]) == pytest.approx((3.6, 3.0))
    assert (values["mfu"], values["validation_loss"], values["best_validation_loss"]) == (25, 2.6, 2.55)
    assert "state" not in values, "there is no such column if all runs have finished"
    assert table.absent == ("test loss", "bits per byte", "instruction score")


def test_every_empty_cell_says_why(tmp_path: Path) -> None:
    finished = RunFolder(tmp_path, "a", {"price_per_hour": None}).finish(mfu=None)
    priced = RunFolder(tmp_path, "b").finish().test_loss(2.5)
    fresh, stopped = RunFolder(tmp_path, "c"), RunFolder(tmp_path, "d").add_checkpoint(LATEST, "latest").train_to(0)
    table = table_of(finished, priced, fresh, stopped)
    empty = [(each.key, cell) for each in table.columns for cell in each.cells if cell.value is None and not cell.text]
    assert len(empty) > 10
    assert [key for key, cell in empty if not cell.remark] == []
    assert column(table, "dollars").cells[0].remark == "train.json had no price_per_hour"
    assert column(table, "test_loss").cells[0].remark == "no result of test_loss.py"
    assert {cell.remark for key, cell in empty if cell is column(table, key).cells[2]} >= {"never trained"}


def test_a_damaged_result_is_not_said_never_to_have_been_measured(tmp_path: Path) -> None:
    damaged, half = RunFolder(tmp_path, "a").finish().test_loss(2.5), RunFolder(tmp_path, "b")
    half.add_checkpoint(BEST, "best").add_checkpoint(LATEST, "latest").finish().test_loss(2.4).test_loss(2.6, LATEST)
    lost = RunFolder(tmp_path, "c").finish().test_loss(2.7, bits_per_byte=None)
    for path in (*damaged.directory.results.glob("*.json"), *half.directory.results.glob(f"*{BEST}*.json")):
        path.write_text(path.read_text().replace('"loss": 2.', '"loss": NaN, "was": 2.'))
    (path,) = lost.directory.results.glob("*.json")
    path.write_text(path.read_text().replace('"loss": 2.7', '"loss": null'))
    table = table_of(damaged, half, lost)
    for key in ("test_loss", "bits_per_byte"):
        remarks = [cell.remark for cell in column(table, key).cells]
        assert remarks[0] == "no result of test_loss.py"
        assert remarks[1] == f"of checkpoint {LATEST} (latest): the best checkpoint has no comparable result"
        assert remarks[2] == "its test loss is not finite"
    text = " ".join(" ".join(table_lines(table)).split())
    assert text.count("measure again, or move the file away") == 2


def test_a_run_that_stopped_shows_how_far_it_came(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").add_checkpoint(LATEST, "latest").train_to(0, 10, 49)
    table = table_of(run)
    assert texts(table, "state") == ["stopped, 50 %"]
    assert table.records[0].state.detail.startswith("last line ")
    extended = RunFolder(tmp_path, "extended").finish()
    extended.directory.train_json.write_text(json.dumps(extended.train | {"min_train_tokens": 10**6}))
    assert texts(table_of(extended), "state") == ["stopped"], "its summary has the share of another budget"
    values = row_of(table, "a")
    assert (values["tokens"], values["global_batch"]) == (6400, 8)
    assert (values["train_loss"], values["validation_loss"]) == pytest.approx((3.51, 3.61))
    assert values["dollars"] == pytest.approx(3.6 * 49 / 3600 * 36)
    shutil.rmtree(run.directory.checkpoints)  # as it is fetched without weights
    MetricsFile(run.directory.metrics).append(TrainEvent(global_step=50, seconds=180.0, dollars=0.5))
    assert row_of(table_of(run), "a")["dollars"] == 0.5, "its seconds at the price that train.json has here"


def test_sorted_by_the_best_loss_or_by_what_is_asked(tmp_path: Path) -> None:
    figures = {"a": (2.5, 0.001, 50.0), "b": (2.4, 0.01, 70.0), "c": (2.6, 0.005, 60.0)}
    runs = [
        RunFolder(tmp_path, name, {"learning_rate": rate}).finish(tokens_per_second=speed).test_loss(loss)
        for name, (loss, rate, speed) in figures.items()
    ]
    table = table_of(*runs, RunFolder(tmp_path, "d", {"learning_rate": 0.02}))
    for key, names in ((None, "bacd"), ("name", "abcd"), ("learning_rate", "acbd"), ("tokens_per_second", "bcad")):
        assert [record.name for record in table.sorted(key).records] == [*names], key
    assert column(table.sorted(None), "test_loss").cells[0].value == 2.4, "cells are sorted with their runs"
    for key, hint in (("learning_rat", "did you mean learning_rate"), ("time", "did you mean hours")):
        with pytest.raises(UserError, match=hint):
            table.sorted(key)
    with pytest.raises(UserError, match="there are: name, state, learning_rate, "):
        table.sorted("xyz")


def test_the_notebooks_bills_to_the_cent() -> None:
    """The table's bills are those that the notebook reports. They differ from seconds times price by at most a cent,
    because the notebook truncates seconds."""
    table = RunsTable.of([RunRecord.read(RunDirectory(SHIPPED_RUNS / name)) for name in NOTEBOOK])
    for name, (seconds, dollars, *_, without_validation, _) in COSTS.items():
        values = row_of(table, name)
        price = json.loads((SHIPPED_RUNS / name / "train.json").read_text())["price_per_hour"]
        assert values["hours"] * 3600 == pytest.approx(seconds, abs=0.7)
        assert values["hours"] * price == pytest.approx(dollars, abs=0.01)
        assert values["hours_without_validation"] * price == pytest.approx(without_validation, abs=0.01)
        keys = ("dollars", "dollars_without_validation", "test_loss")
        assert [values[key] for key in keys] == [dollars, without_validation, LOSSES[name][2]]
    # The notebook prints the coefficients 0.032313, -0.295715 and 4.368746 for the natural logarithm of the batch.
    assert [*fits(table)] == [
        "Loss over the global batch: 0.0323 x² − 0.2957 x + 4.3687, x = ln(sequences); lowest near 97 sequences "
        "(5 points, each within 0.018 nats of this curve)",
        "Memory over the microbatch: 2.346 GiB a sequence + 11.48 GiB (4 points, each within 5.17 GiB of this line)",
    ]


def reported(tmp_path: Path, name: str, **changes: str) -> RunFolder:
    run = RunFolder(tmp_path, name)
    values = json.loads((SHIPPED_RUNS / "8xa100m40" / "reported.json").read_text())
    (run.path / "reported.json").write_text(json.dumps(values | changes))
    return run


def test_reported_figures_are_marked_and_in_columns_of_their_own(tmp_path: Path) -> None:
    measured, other = (
        RunFolder(tmp_path, "a").finish(mfu=None).test_loss(3.7),
        RunFolder(tmp_path, "b").finish(mfu=None),
    )
    theirs = reported(tmp_path, "c")
    table = table_of(measured, theirs)
    assert [cell.value for cell in column(table, "test_loss").cells] == [3.7, None]
    assert [cell.value for cell in column(table, "reported_test_loss").cells] == [None, 3.674]
    text = "\n".join(table_lines(table))
    assert "3.674 r" in text
    assert "r: reported, or computed from reported figures, not measured here: Giles Thomas" in text
    table = table_of(other, theirs)  # an own run says why it has no number
    assert {key: column(table, key).cells[0].remark for key in ("test_loss", "mfu", "reported_hours")} == {
        "test_loss": "no result of test_loss.py",
        "mfu": "speed or peak FLOP/s of the device not known",
        "reported_hours": "not reported",
    }


def test_figures_reported_by_different_sources_do_not_compare(tmp_path: Path) -> None:
    table = table_of(*(reported(tmp_path, source, source=source) for source in ("one", "two")))
    assert [cell.value for cell in column(table, "test_loss").cells] == [3.674, None]
    assert [cell.value for cell in column(table, "test_loss:2").cells] == [None, 3.674]
    assert [cell.value for cell in column(table, "dollars").cells] == [39.86, 39.86], "dollars compare across sources"


def test_no_curve_over_batches_where_something_else_differs_too(tmp_path: Path) -> None:
    def run(size: int, loss: float, **other: Any) -> RunFolder:
        batch = {"microbatch_size": size, "validation_batches": 20 // size}
        made = RunFolder(tmp_path / str(loss), f"b{size}", batch | other)
        return made.finish(microbatch_size=size).test_loss(loss)

    alike = [run(size, 2 + (size - 2) ** 2 / 100) for size in (1, 2, 5)]
    assert "lowest near 3 sequences" in next(fits(table_of(*alike)))
    falling = [run(size, 3 - size / 100) for size in (1, 2, 5)]
    assert "no lowest point between these batch sizes" in next(fits(table_of(*falling)))
    equal = [run(size, 2.3) for size in (1, 2, 5)]
    assert "no lowest point between these batch sizes" in next(fits(table_of(*equal)))
    assert [*fits(table_of(*alike, run(10, 2.1, learning_rate=0.1)))] == [
        "Loss over the global batch: inconclusive, because learning_rate differs, too"
    ]
    assert [*fits(table_of(*alike[:2]))] == []
    young = run(10, 4.0).add_checkpoint(LATEST, "latest", microbatch_size=10)
    young.directory.summary.unlink()
    assert [*fits(table_of(*alike[:2], young))] == [], "an unfinished run gives no point"
    lost = run(10, 5.0).finish(microbatch_size=10, has_diverged=True)
    assert [*fits(table_of(*alike[:2], lost))] == [], "a run that diverged gives no point"
    longer = run(10, 2.2).finish(microbatch_size=10, tokens_seen=25_600)
    assert [*fits(table_of(*alike, longer))] == [
        "Loss over the global batch: inconclusive, because the number of tokens differs, too"
    ]


def test_lines_are_of_80_columns(tmp_path: Path) -> None:
    name = "a-rather-long-name-of-a-run-in-a-sweep-over-many-settings-seed-1"
    first = RunFolder(tmp_path, name, {"dataset": "somebody-with-a-long-name/some-texts-with-a-long-name"}).finish()
    first.test_loss(2.5).test_loss(2.5, LATEST).test_loss(2.4, BEST, start_token=7)
    second = RunFolder(tmp_path, "b").finish().test_loss(2.5, LATEST)
    lines = list(table_lines(table_of(first, second, RunFolder(tmp_path, "c")).sorted(None)))
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_one_block_has_the_most_important_columns_and_a_line_the_others(tmp_path: Path) -> None:
    a = RunFolder(tmp_path, "first").finish().test_loss(2.5)
    b = RunFolder(tmp_path, "second", {"learning_rate": 0.1}).finish(tokens_seen=1_000_000).test_loss(2.4)
    lines = list(table_lines(table_of(a, b).sorted(None)))
    assert lines[:5] == [
        "                                   tokens           bits",
        "         test    val  cost            per            per",
        "run      loss   loss     $  hours  second  tokens   byte",
        "second  2.400  2.600  3.60  0.100      50      1M  1.200",
        "first   2.500  2.600  3.60  0.100      50   12.8k  1.250",
    ]
    assert "  second: learning_rate 0.1" in lines
    text = " ".join(" ".join(lines).split())
    assert "The same for all runs: parameters 29.89k, active parameters 29.89k, global batch 8 sequences." in text
    assert "More columns in --json and --html: training FLOPs, train loss, " in text
    by_memory = list(table_lines(table_of(a, b).sorted("peak_memory")))
    assert "peak" in " ".join(by_memory[: by_memory.index("")]), "the column that it is sorted by is shown"


def test_numbers_end_at_one_place_and_marks_follow(tmp_path: Path) -> None:
    a, b = (RunFolder(tmp_path, name, {"learning_rate": n}).finish() for n, name in enumerate("ab", 1))
    lines = list(table_lines(table_of(a.test_loss(2.5), b.test_loss(12.25, LATEST))))
    rows = [line for line in lines if line.startswith(("a  ", "b  "))]
    assert rows[0].index("2.500") == rows[1].index("12.250") + 1
    assert "12.250 [1]" in rows[1]


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (163_009_536, "count", "163M"),
        (3.26e9, "count", "3.26B"),
        (500, "count", "500"),
        (999_999, "count", "1M"),
        (0.0051, "money", "0.0051"),
        (1e20, ",.0f", "1.00e+20"),
    ],
)
def test_numbers_are_short(value: float, style: str, text: str) -> None:
    assert number_text(value, style) == text


def test_long_names_keep_the_part_in_which_they_differ(tmp_path: Path) -> None:
    """The names begin and end alike. A loss stands beside each, even if the parts that differ are long."""
    for differing, widest in ((("0.0003", "0.0006"), 80), (("a" * 75, "b" * 75), 120)):
        names = [f"long-name-of-an-experiment-lr{each}-with-8-of-h100-seed1" for each in differing]
        runs = [RunFolder(tmp_path, name).finish(final_validation_loss=2.25) for name in names]
        lines = [*table_lines(table_of(*runs))]
        assert [sum(each in line and "2.250" in line for line in lines) for each in differing] == [1, 1]
        assert max(map(len, lines)) <= widest


def test_long_settings_that_differ_are_not_shown_alike(tmp_path: Path) -> None:
    """A run that alone has another number of experts is not listed "as most runs"."""
    others: dict[str, Any] = {"learning_rate": 0.1, "betas": [0.9, 0.9], "clipping_max_norm": 1.0, "weight_decay": 0.5}
    experts = [{"num_experts": count, "num_active_experts": 2} for count in (4, 4, 4, 8)]
    runs = [
        RunFolder(tmp_path, f"r{n}", others if n == 0 else {}, moe=moe).finish(precision="fp32" if n == 1 else "bf16")
        for n, moe in enumerate(experts)
    ]
    lines = [*table_lines(table_of(*runs))]
    assert "  r2: as most runs" in lines
    [own] = [line for line in lines if line.startswith("  r3: ")]
    assert own.startswith("  r3: moe {")
    assert ": 8," in own


def test_how_much_of_the_test_text_was_trained_on(tmp_path: Path) -> None:
    """It is a column beside the losses, in percent of the 13-grams. A result of an earlier version does not have
    it."""
    some = Overlap(documents=40, copied_documents=3, ngrams=1000, copied_ngrams=152)
    finished = [RunFolder(tmp_path, name).finish() for name in ("a", "b", "c")]
    finished[0].test_loss(3.5, trained_on=some)
    finished[1].test_loss(3.6)
    table = table_of(*finished)
    shares = [row_of(table, name)["test_text_trained_on"] for name in ("a", "b", "c")]
    assert shares == [pytest.approx(15.2), None, None]
    [shown] = [line.split() for line in table_lines(table) if line.startswith("a ")]
    assert shown[1:4] == ["3.500", "2.600", "15.2"]
    reasons = [cell.remark for cell in column(table, "test_text_trained_on").cells]
    assert reasons[1:] == [
        "not known; test_loss.py prints the percentage, or why it is not known",
        "no result of test_loss.py",
    ]
    finished[2].test_loss(3.7, trained_on=some, windows=TEXT.windows // 2)  # the share is that of the whole split
    (both,) = [each for each in table_of(*finished).columns if each.key.startswith("test_text_trained_on")]
    assert sorted(cell.value or 0 for cell in both.cells) == [0, pytest.approx(15.2), pytest.approx(15.2)]
