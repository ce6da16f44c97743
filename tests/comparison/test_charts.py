"""Curves of runs over each axis, and the image: it shows losses on one text only, and says why a run is left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.comparison.charts import GRAY, Chart, Curve, charts_of, shown_range, write_png
from harness.runs.metrics import MetricsFile, ValidationEvent
from tests.support.compared_runs import DATASET, LATEST, RunFolder, records

NO_VALIDATION = {"validation_interval": None, "validation_batches": None, "checkpoint_interval": 10}


def chart_of(*runs: RunFolder, axis: str = "tokens", baseline: str | None = None) -> Chart:
    (chart,) = charts_of(records(*runs), [axis], baseline)
    return chart


def trained(tmp_path: Path, name: str, seed: int = 1, rate: float = 0.001, **train: Any) -> RunFolder:
    return RunFolder(tmp_path, name, {"random_seed": seed, "learning_rate": rate, **train}).finish().train_to(0, 10, 20)


@pytest.mark.parametrize(
    ("axis", "places"),
    [
        ("steps", [0, 10, 20]),
        ("tokens", [128, 11 * 128, 21 * 128]),
        ("hours", [0, 0.01, 0.02]),
        ("dollars", [0, 0.36, 0.72]),
        ("flops", [tokens * 172032 for tokens in (128, 11 * 128, 21 * 128)]),
    ],
)
def test_each_axis(tmp_path: Path, axis: str, places: list[float]) -> None:
    (curve,) = chart_of(trained(tmp_path, "a"), axis=axis).curves
    assert curve.x == pytest.approx(places)
    assert curve.y == pytest.approx([4.1, 4.0, 3.9])


def test_a_loss_is_drawn_at_the_dollars_that_the_run_had_cost(tmp_path: Path) -> None:
    """The run went on at a tenth of its first price."""
    run = trained(tmp_path, "a")
    for step, dollars in ((30, 5.0), (40, 5.5)):
        place: dict[str, Any] = {"global_step": step, "tokens_seen": step * 128, "seconds": 3.6 * step}
        MetricsFile(run.directory.metrics).append(ValidationEvent(**place, dollars=dollars, loss=3.0))
    assert chart_of(run, axis="dollars").curves[0].x == pytest.approx([0, 0.36, 0.72, 1.08, 1.44]), "an older beginning"
    lines = run.directory.metrics.read_text().splitlines(keepends=True)
    run.directory.metrics.write_text("".join(line for line in lines if "dollars" in line))
    assert chart_of(run, axis="dollars").curves[0].x == [5.0, 5.5]


def test_replicates_are_one_curve_with_a_band_and_the_lowest_comes_first(tmp_path: Path) -> None:
    a, b, other = trained(tmp_path, "a-seed1"), trained(tmp_path, "a-seed2", 2), trained(tmp_path, "b", 1, 0.002)
    last = ValidationEvent(global_step=30, tokens_seen=31 * 128, seconds=108.0, loss=3.0)
    MetricsFile(other.directory.metrics).append(last)
    b.directory.metrics.write_text(b.directory.metrics.read_text().replace('"loss": 4.1', '"loss": 4.3'))
    first, second = chart_of(a, b, other).curves
    assert (first.label, first.run_count, first.low) == ("b", 1, [])
    assert (second.label, second.run_count) == ("a", 2)
    assert second.y == pytest.approx([4.2, 4.0, 3.9])
    assert (second.low[0], second.high[0]) == (4.1, 4.3)
    lines = b.directory.metrics.read_text().splitlines(keepends=True)
    b.directory.metrics.write_text("".join(line for line in lines if '"global_step": 10,' not in line))
    assert chart_of(a, b, axis="steps").curves[0].x == [0, 20], "only steps that both runs have give a mean"
    b.directory.metrics.write_text("".join(line.replace('step": ', 'step": 7') for line in lines))
    chart = chart_of(a, b, other, axis="steps")
    assert [each.label for each in chart.curves] == ["b"]
    assert next(line for line in chart.problems if line.startswith("a: ")).endswith("no loss at the same step")


def test_the_baselines_curve_is_called_as_in_the_verdicts(tmp_path: Path) -> None:
    runs = (trained(tmp_path, "one", 1), trained(tmp_path, "two", 2), trained(tmp_path, "b", 1, 0.002))
    assert sorted((each.label, each.run_count) for each in chart_of(*runs, baseline="two").curves) == [
        ("b", 1),
        ("two", 2),
    ]
    unfinished = RunFolder(tmp_path, "base").add_checkpoint(LATEST, "latest").train_to(0, 10)
    found = chart_of(trained(tmp_path, "base-seed1"), trained(tmp_path, "base-seed2", 2), unfinished)
    assert sorted((each.label, each.run_count) for each in found.curves) == [("base", 1), ("base-seed1", 2)]


def test_what_is_not_drawn_is_said_with_its_reason(tmp_path: Path) -> None:
    other = {**DATASET, "validation": {"tokens": 10_000, "sha256": "00" * 32}}
    chart = chart_of(
        trained(tmp_path, "a"),
        RunFolder(tmp_path, "c").finish(dataset=other).train_to(0, 10),
        RunFolder(tmp_path, "d"),
        RunFolder(tmp_path, "e"),
        RunFolder(tmp_path, "young").add_checkpoint(LATEST, "latest").train_to(0),
        RunFolder(tmp_path, "without", NO_VALIDATION).finish(final_validation_loss=None).train_to(0, 10),
    )
    assert ([each.label for each in chart.curves], chart.kind) == (["a"], "validation")
    assert chart.problems == [
        "c: in no chart: no loss is known to be measured on 20 x 16 tokens from token 0 of the validation split of "
        "me/texts (bbbbbbbb)",
        "d, e: in no chart: never trained",
        "young: nothing to draw: metrics.jsonl has 1 finite validation loss, but a curve needs 2",
        "without: in no chart: trained without validation, while the charts show validation losses",
    ]
    free = trained(tmp_path, "free", 2, price_per_hour=None)
    chart = chart_of(trained(tmp_path, "paid"), free, axis="dollars")
    assert [(each.label, each.run_count) for each in chart.curves] == [("paid", 1)], "without its replicate"
    assert chart.problems == ['free: train.json had no "price_per_hour", so losses cannot be drawn over dollars']
    chart = chart_of(trained(tmp_path, "own", price_per_hour=0.0), axis="dollars")
    assert (chart.curves, chart.problems) == ([], ["own: it cost nothing, so losses cannot be drawn over dollars"])
    unknown = chart_of(RunFolder(tmp_path, "f").train_to(0, 10))
    assert (unknown.curves, unknown.problems) == (
        [],
        ["there are no losses, or the text that they were measured on is not recorded"],
    )


def test_a_file_that_cannot_be_read_keeps_no_other_run_from_being_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable, locked = trained(tmp_path, "a"), trained(tmp_path, "locked")
    read = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path == locked.directory.metrics:
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    chart = chart_of(readable, locked)
    assert [each.label for each in chart.curves] == ["a"]
    reason = f"locked: in no chart: {locked.directory.metrics}: cannot be read: Permission denied"
    assert chart.problems == [reason]
    assert chart_of(locked).problems == [reason]


def test_training_losses_where_no_run_has_validated_twice(tmp_path: Path) -> None:
    without = RunFolder(tmp_path, "a", NO_VALIDATION).finish(final_validation_loss=None).train_to(0, 10)
    once = RunFolder(tmp_path, "b").finish().train_to(0, 10, 20)
    lines = once.directory.metrics.read_text().splitlines(keepends=True)
    once.directory.metrics.write_text("".join(line for line in lines[:-1] if '"validation"' not in line) + lines[-1])
    for run, losses in ((without, [4.0, 3.9]), (once, [4.0, 3.9, 3.8])):
        chart = chart_of(run)
        assert (chart.kind, chart.problems) == ("training", [])
        assert chart.curves[0].y == pytest.approx(losses)


def test_losses_that_are_not_finite_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    run = trained(tmp_path, "a")
    lines = run.directory.metrics.read_bytes().splitlines(keepends=True)
    for lost in (b'null, "x": 1', b'1e308, "x": 1', b'-1e308, "x": 1', b"\xff"):
        changed = [line.replace(b": 3.99", b": " + lost) if b'"validation"' in line else line for line in lines]
        assert changed != lines
        run.directory.metrics.write_bytes(b"".join(changed))
        assert chart_of(run, axis="steps").curves[0].x == [0, 20]


def test_a_run_that_diverged_is_a_curve_of_its_own(tmp_path: Path) -> None:
    """Its replicates' curve goes on to their end, and the last of its finite losses is not called its last loss."""
    other = trained(tmp_path, "a-seed1")
    lost = RunFolder(tmp_path, "a-seed2", {"random_seed": 2, "learning_rate": 0.001}).finish().train_to(0, 10)
    MetricsFile(lost.directory.metrics).append(ValidationEvent(global_step=20, tokens_seen=21 * 128, loss=math.nan))
    for baseline in (None, "a-seed2"):
        healthy, diverged = chart_of(lost, other, baseline=baseline).curves
        assert (healthy.run_count, diverged.label) == (1, "a-seed2, diverged after")
        ends = [healthy.x[-1], healthy.y[-1], diverged.x[-1], diverged.y[-1]]
        assert ends == pytest.approx([21 * 128, 3.9, 11 * 128, 4.0])
        assert diverged.is_baseline == bool(baseline)


@pytest.mark.parametrize(
    ("losses", "references", "low", "high"),
    [
        ([11.0, 9.0, 4.0, 3.0], {"near": 2.0}, 1.9, 4.1),  # the steep beginning is cut off
        ([4.9, 4.5, 4.0, 3.0], {}, 2.9, 5.0),  # not cut off, if the rest has half of the height
        ([5.0, 4.9, 4.5, 4.0], {"far": 2.0, "farther": 9.0}, 3.94, 5.06),
        ([5.0, 4.9, 900.0, 4.0], {}, 3.76, 4.24),  # a peak does not stretch the range
        ([5.0, 4.9, 900.0, 800.0], {}, 4.89, 5.01),
        ([3.0, 2.8, 2.8, 7.3], {}, 2.53, 7.57),  # begins with trained weights and diverges
        ([5.0, 4.9, 4.5, 4.0], {"near": 3.2, "far": 2.0}, 3.1, 5.1),
    ],
)
def test_the_range_that_is_shown(losses: list[float], references: dict[str, float], low: float, high: float) -> None:
    assert shown_range([Curve("a", [0, 1, 50, 100], losses)], references) == pytest.approx((low, high), abs=0.03)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that a test saves, in a list that grows."""
    from matplotlib.figure import Figure  # imported here because every process that runs tests loads this file

    saved: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *given: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [12, 90])
def test_of_many_curves_the_lowest_and_the_baselines_are_named(tmp_path: Path, figures: list[Any], count: int) -> None:
    """The other curves are gray, no two named ones look alike, and the plot keeps its size."""
    curves = [Curve(f"arm{n}", [0, 1, 2], [9.0, 5.0, 3 + n / 100], is_baseline=n == count - 1) for n in range(count)]
    for kind in (curves[:3], curves):
        write_png(Chart("tokens", "validation", kind, []), tmp_path / "c.png", {"GPT-2": 3.2})
    few, axes = (figure.axes[0] for figure in figures)
    names = [text.get_text().partition(":")[0] for text in axes.get_legend().get_texts()]
    lowest = [f"arm{n}" for n in range(12 if count == 12 else 11)]
    more = [] if count == 12 else [f"arm{count - 1}", f"and {count - 12} more"]
    assert names == [*lowest, *more, "GPT-2"]
    styles = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines[:12]]
    assert len({*styles}) == 12
    assert {line.get_color() for line in axes.lines[12:-1]} <= {GRAY}
    assert len(axes.lines) == count + 1 + (count > 12)
    assert axes.get_position().width == pytest.approx(few.get_position().width, rel=0.05)


def test_long_names_in_the_legend_are_distinct(tmp_path: Path, figures: list[Any]) -> None:
    curves = [Curve(f"{'x' * 45}-{each}{end}", [0, 1], [4.0, 3.0]) for each in "ab" for end in ("", "x" * 45)]
    write_png(Chart("tokens", "validation", curves, []), tmp_path / "c.png", {})
    labels = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert len({*labels}) == 4
    assert max(map(len, labels)) < 50


def test_the_picture_has_its_signs(tmp_path: Path, figures: list[Any]) -> None:
    """An arrow in the title marks losses above the shown range, and an arrow in the legend a reference below it. The
    given note is shown. Labels may begin with "_", which matplotlib would hide, or contain "$", which it would read as
    a formula."""
    curve = Curve("_a", [0, 0.02, 0.05], [11.0, 4.0, 3.0])
    chart = Chart("hours", "validation", [curve], [])
    write_png(chart, tmp_path / "c.png", {"far": 1.0, r"A$\frac{$": 3.5}, "a note")
    [figure] = figures
    axes = figure.axes[0]
    assert axes.get_title(loc="left") == "↑ cut off here: losses as high as 11.00"
    legend = axes.get_legend()
    assert legend is not None
    labels = [each.get_text().strip() for each in legend.get_texts()]
    assert labels == ["_a: 3.000", "↓ far: 1.000", r"A$\frac{$: 3.500"]
    assert (axes.get_ylabel(), figure.get_supxlabel()) == ("validation loss (nats per token)", "a note")
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "0.01", "0.02"]
    assert (tmp_path / "c.png").stat().st_size > 1000
