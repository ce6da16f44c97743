"""The chart and the page of a comparison: only curves that compare, and every reason that the table has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.comparison.against_baseline import BaselineComparison, compare_with
from harness.comparison.comparison_report import chart_note, comparable_curves, last_training, report_of
from harness.comparison.curves import AXES
from harness.comparison.html_report import render
from harness.comparison.records import RunRecord
from harness.comparison.runs_table import RunsTable
from harness.runs.directory import RunDirectory
from harness.runs.metrics import TrainEvent, ValidationEvent, read_metrics
from tests.support.compared_runs import DATASET, LATEST, RunFolder
from tests.support.isolation import SHIPPED_RUNS


def records(*runs: RunFolder) -> list[RunRecord]:
    return [RunRecord.read(run.directory) for run in runs]


def trained(tmp_path: Path, name: str, seed: int, rate: float = 0.001) -> RunFolder:
    return RunFolder(tmp_path, name, {"random_seed": seed, "learning_rate": rate}).finish().train_to(0, 10, 20)


def test_replicates_are_one_curve_and_another_text_is_none(tmp_path: Path) -> None:
    other = {**DATASET, "validation": {"tokens": 10_000, "sha256": "00" * 32}}
    runs = [trained(tmp_path, "a-seed-1", 1), trained(tmp_path, "a-seed-2", 2), trained(tmp_path, "b", 1, 0.002)]
    runs.append(RunFolder(tmp_path, "c").finish(dataset=other).train_to(0, 10))
    curves, problems = comparable_curves(records(*runs)).over(AXES["tokens"])
    assert sorted((curve.label, curve.runs) for curve in curves) == [("a", 2), ("b", 1)]
    assert curves[0].x == [128, 128 * 11, 128 * 21]
    assert problems == [
        "c: in no chart: not known to have losses on 20 x 16 tokens from 0 of the validation split of me/texts "
        "(bbbbbbbb)"
    ]
    never = [RunFolder(tmp_path, name) for name in ("d", "e")]
    assert comparable_curves(records(*runs, *never)).problems == [*problems, "d, e: in no chart: never trained"]


def test_the_baselines_curve_is_called_as_in_the_verdicts(tmp_path: Path) -> None:
    runs = records(trained(tmp_path, "one", 1), trained(tmp_path, "two", 2), trained(tmp_path, "b", 1, 0.002))
    curves, _ = comparable_curves(runs, "two").over(AXES["tokens"])
    assert sorted((curve.label, curve.runs) for curve in curves) == [("b", 1), ("two and others", 2)]
    report = report_of(RunsTable.of(runs), None, {}, "two")
    assert "two and others" in {curve.label for curve in report.charts[0][1]}


def test_an_unfinished_run_is_no_arms_curve(tmp_path: Path) -> None:
    runs = [trained(tmp_path, "base-1", 1), trained(tmp_path, "base-2", 2)]
    runs.append(RunFolder(tmp_path, "base").add_checkpoint(LATEST, "latest").train_to(0, 10))
    curves, _ = comparable_curves(records(*runs)).over(AXES["tokens"])
    assert sorted((curve.label, curve.runs) for curve in curves) == [("base", 1), ("base-1 and others", 2)]


def test_runs_without_validation_are_drawn_by_their_training_losses(tmp_path: Path) -> None:
    none = {"validation_interval": None, "validation_batches": None, "checkpoint_interval": 10}
    run = RunFolder(tmp_path, "a", none).finish(final_validation_loss=None).train_to(0, 10)
    curves, problems = comparable_curves(records(run)).over(AXES["steps"])
    assert (curves[0].y, curves[0].kind, problems) == ([4.0, 3.9], "training", [])


def test_a_run_without_validation_is_not_drawn_among_validation_losses(tmp_path: Path) -> None:
    none = {"validation_interval": None, "validation_batches": None, "checkpoint_interval": 10}
    without = RunFolder(tmp_path, "without", none).finish(final_validation_loss=None).train_to(0, 10)
    curves, problems = comparable_curves(records(trained(tmp_path, "a", 1), without)).over(AXES["steps"])
    assert [(curve.label, curve.kind) for curve in curves] == [("a", "validation")]
    assert problems == ["without: in no chart: trained without validation, and validation losses are drawn"]


def test_a_run_that_has_validated_once_hides_no_other(tmp_path: Path) -> None:
    young = RunFolder(tmp_path, "young").add_checkpoint(LATEST, "latest").train_to(0)
    curves, problems = comparable_curves(records(trained(tmp_path, "a", 1), young)).over(AXES["steps"])
    assert [curve.label for curve in curves] == ["a"]
    assert problems == ["young: nothing to draw: 1 validation loss in metrics.jsonl, and a curve takes 2"]


def test_where_no_run_has_validated_twice_training_losses_are_drawn(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").finish().train_to(0, 10, 20)
    lines = run.directory.metrics.read_text().splitlines(keepends=True)
    run.directory.metrics.write_text("".join(line for line in lines[:-1] if '"validation"' not in line) + lines[-1])
    curves, problems = comparable_curves(records(run)).over(AXES["steps"])
    assert ([curve.kind for curve in curves], problems) == (["training"], [])


def test_chart_and_page_say_which_losses_they_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes  # here, since every process that runs tests loads this file

    from harness.comparison import charts

    none = {"validation_interval": None, "validation_batches": None, "checkpoint_interval": 10}
    without = RunFolder(tmp_path, "without", none).finish(final_validation_loss=None).train_to(0, 10)
    said = []
    monkeypatch.setattr(Axes, "set_ylabel", lambda _self, text: said.append(text))
    for run, kind in ((trained(tmp_path, "a", 1), "validation"), (without, "training")):
        table = RunsTable.of(records(run))
        page = render(report_of(table, None, {}))
        assert f"<h2>{kind.capitalize()} loss</h2>" in page
        for axis in ("steps", "hours"):
            assert f'aria-label="{kind.capitalize()} loss (nats per token) over {AXES[axis].label}"' in page
        assert page.count(f">{kind.capitalize()} loss (nats per token)</text>") == len(AXES)
        curves, _ = comparable_curves(table.records).over(AXES["steps"])
        charts.draw_curves(curves, AXES["steps"], tmp_path / "c.png", {})
        assert said.pop() == f"{kind} loss (nats per token)"


def test_runs_whose_text_is_not_recorded_are_not_drawn(tmp_path: Path) -> None:
    curves, problems = comparable_curves(records(RunFolder(tmp_path, "a").train_to(0, 10))).over(AXES["steps"])
    assert curves == []
    assert problems == ["the text that losses were measured on is not recorded"]


def test_of_metrics_that_begin_again_the_last_training_counts(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").train_to(0, 10, 20)
    again = run.train_to(0, 5)
    assert [event.global_step for event in last_training(read_metrics(again.directory.metrics))] == [0, 0, 5, 5]


def test_the_page_has_the_table_its_reasons_and_the_curves(tmp_path: Path) -> None:
    measured, other = trained(tmp_path, "first", 1).test_loss(2.5), trained(tmp_path, "second", 1, 0.002)
    table = RunsTable.of(records(measured, other, RunFolder(tmp_path, "third")))
    report = report_of(table, BaselineComparison("no verdict, and why"), {"GPT-2 small": 3.5}, made="Made today")
    assert [axis.name for axis, _ in report.charts] == list(AXES), "prices are known: dollars, too"
    page = render(report)
    for text in ("first", "second", "third", "2.500", "not measured by test_loss.py", "GPT-2 small 3.500"):
        assert text in page
    assert '<p class="verdict">no verdict, and why</p>' in page
    assert '<p class="note">Made today</p>' in page
    headings = [column.heading for column in report.columns]
    assert headings[0] == "run"
    row = dict(zip(headings, report.rows[0], strict=True))
    assert row["test loss, nats/token"].value == 2.5
    assert row["learning_rate"].value == 0.001


def test_the_page_begins_with_the_losses_and_what_differs(tmp_path: Path) -> None:
    runs = [trained(tmp_path, "a", 1).test_loss(2.5), trained(tmp_path, "b", 1, 0.002).test_loss(2.4)]
    table = RunsTable.of(records(*runs)).sorted(None)
    report = report_of(table, compare_with("a", table.records), {})
    headings = [column.heading for column in report.columns]
    losses = [at for at, heading in enumerate(headings) if "loss" in heading or heading == "bits per byte"]
    assert headings[:2] == ["run", "test loss, nats/token"], "what it is sorted by"
    assert losses == list(range(1, len(losses) + 1))
    assert headings[losses[-1] + 1] == "learning_rate"
    [sorted_by, same, absent] = report.below_table
    assert sorted_by == "Sorted by test loss."
    assert "global batch, sequences: " in same
    assert not any("global batch" in heading or "parameters" in heading for heading in headings)
    assert absent.startswith("No run has: ")
    assert report.answer.about.startswith("Against a (1 run), by test loss on")
    assert len(report.answer.verdicts) == 1
    assert report.answer.verdicts[0].startswith("b against a: inconclusive")
    assert report.chart_note == "The verdicts are by test loss; these curves are of the validation loss."


def test_a_fit_is_one_remark(tmp_path: Path) -> None:
    for name in ("8xa100m40", "8xh100m80", "8xb200m160"):
        shutil.copytree(SHIPPED_RUNS / name, tmp_path / name)
    shipped = [RunRecord.read(RunDirectory(path)) for path in tmp_path.iterdir()]
    remarks = report_of(RunsTable.of(shipped), None, {}).remarks
    assert len([text for text in remarks if text.startswith("Memory over the microbatch: ")]) == 1
    assert not any(text.startswith((" ", "(")) for text in remarks)


def test_a_single_run_has_all_its_columns(tmp_path: Path) -> None:
    report = report_of(RunsTable.of(records(trained(tmp_path, "a", 1))).sorted(None), None, {})
    assert "parameters" in [column.heading for column in report.columns]
    assert not any(line.startswith(("The same", "Sorted")) for line in report.below_table)


def test_a_chart_says_which_losses_verdicts_are_by_where_it_shows_others(tmp_path: Path) -> None:
    by_validation = compare_with("a", records(trained(tmp_path, "a", 1), trained(tmp_path, "b", 1, 0.002)))
    assert chart_note(by_validation, ValidationEvent) == ""
    assert chart_note(by_validation, TrainEvent) == (
        "The verdicts are by validation loss; these curves are of the training loss."
    )
    assert chart_note(None, ValidationEvent) == chart_note(BaselineComparison("nothing"), ValidationEvent) == ""


def test_the_picture_has_its_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart has its note and signs for the cut top and a far reference; markers are whole, ticks plain."""
    import matplotlib.pyplot as plt  # here, since every process that runs tests loads this file
    from matplotlib.figure import Figure

    from harness.comparison.charts import draw_curves
    from harness.comparison.curves import Curve

    figures: list[Figure] = []
    monkeypatch.setattr(plt, "close", figures.append)
    curve = Curve("a", [0, 0.02, 0.05], [11.0, 4.0, 3.0])
    draw_curves([curve], AXES["hours"], tmp_path / "c.png", {"far": 1.0}, "a note")
    monkeypatch.undo()
    [figure] = figures
    axes = figure.axes[0]
    assert {"↑ cut off here: the first losses go up to 11.00", "↓ far: 1.000"} <= {
        each.get_text() for each in axes.texts
    }
    assert [each.get_text() for each in figure.texts] == ["a note"]
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "0.01", "0.02"]
    markers = [line for line in axes.lines if line.get_marker() == "o"]
    places = [np.concatenate([line.get_xdata(), line.get_ydata()]).tolist() for line in markers]
    assert places == [[0.02, 4.0], [0.05, 3.0]]
    assert not any(line.get_clip_on() for line in markers)
    plt.close(figure)


def test_a_byte_that_is_no_text_costs_one_line_of_the_curve(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").train_to(10, 20, 30)
    lines = run.directory.metrics.read_bytes().splitlines(keepends=True)
    run.directory.metrics.write_bytes(b"\xff" + b"".join(lines))
    assert len(read_metrics(run.directory.metrics)) == len(lines) - 1


def test_a_label_is_no_formula(tmp_path: Path) -> None:
    from harness.comparison.charts import draw_curves  # here, since every process that runs tests loads this file
    from harness.comparison.curves import Curve

    draw_curves([Curve("a", [0, 1], [2.0, 1.0])], AXES["tokens"], tmp_path / "c.png", {r"A$\frac{$": 1.5})
    assert (tmp_path / "c.png").stat().st_size > 1000
