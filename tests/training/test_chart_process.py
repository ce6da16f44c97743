"""Charts are drawn in a separate process during training, and the last chart shows the end of the run."""

from __future__ import annotations

import math
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import harness.training.chart_process as chart_process
from harness.runs.directory import RunDirectory
from harness.runs.metrics import BenchmarkEvent, Event, MetricsFile, TrainEvent, ValidationEvent, read_metrics
from harness.training.chart_process import ChartProcess

PATIENCE_SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "r").mkdir()
    return RunDirectory(tmp_path / "r")


def validated(run: RunDirectory, step: int, loss: float = 5.0) -> None:
    MetricsFile(run.metrics).append(ValidationEvent(global_step=step, loss=loss))


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file that the test creates, and replace the drawing process by one that waits for this file.
    The process counts the lines of metrics.jsonl, waits, and then appends the count to the chart's file."""
    source = (
        "import os, sys, time\n"
        "lines = len(open(sys.argv[1]).readlines())\n"
        f"while not os.path.exists({str(tmp_path / 'gate')!r}): time.sleep(0.01)\n"
        "open(sys.argv[2], 'a').write(f'{lines}\\n')\n"
    )
    monkeypatch.setattr(chart_process, "WORKER", [sys.executable, "-S", "-c", source])
    return tmp_path / "gate"


def worker_pid(chart: ChartProcess) -> int:
    assert chart._process is not None
    return chart._process.pid


@pytest.mark.slow
def test_the_last_state_is_drawn_even_while_the_file_is_being_written(run: RunDirectory) -> None:
    metrics = MetricsFile(run.metrics)
    for step in range(0, 300, 3):
        loss = 3 + 7 * math.exp(-step / 50)
        metrics.append(TrainEvent(global_step=step, loss=loss, loss_min=loss - 0.3, loss_max=loss + 0.3))
        if step % 60 == 0:
            validated(run, step, loss + 0.1)
    metrics.append(TrainEvent(global_step=300, loss=math.nan, loss_min=math.nan, loss_max=math.nan))
    with metrics.path.open("a") as file:
        file.write('{"event": "train", "global_st')
    assert len(read_metrics(metrics.path)) == 106
    chart = ChartProcess(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chart.draw()
        pid = worker_pid(chart)
        chart.finish(PATIENCE_SECONDS)
    with PIL.Image.open(run.chart) as picture:
        assert picture.format == "PNG"
        assert picture.width >= 1200
        assert picture.height >= 700
        assert len(picture.getcolors(2**24) or []) > 50
    assert [path.name for path in sorted(run.path.iterdir())] == ["metrics.jsonl", "training-run-chart.png"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def drawn(run: RunDirectory, monkeypatch: pytest.MonkeyPatch, *events: Event) -> Any:
    """Return the figure of the chart of these events."""
    from harness.runs.chart import draw_training_chart  # imported here, because it loads matplotlib

    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", figures.append)
    for event in events:
        MetricsFile(run.metrics).append(event)
    draw_training_chart(run.metrics, run.chart, "r")
    return figures[-1]


def test_losses_that_are_not_finite_and_a_peak_are_seen(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark shows each step whose loss is not finite. A peak does not stretch the axis, and a single report is a
    point. Lines of earlier versions have no lowest and highest loss."""
    losses = [11.0, *[4.0] * 20, 900.0, *[3.5] * 20, *[math.nan] * 40]
    events = [TrainEvent(global_step=n, loss=each, loss_min=each, loss_max=each) for n, each in enumerate(losses)]
    [axes] = drawn(run, monkeypatch, *events).axes
    marks = next(line for line in axes.lines if line.get_label() == "loss not finite")
    assert [*marks.get_xdata()] == [*range(42, 82)]
    assert axes.get_xlim()[1] >= 81
    assert (3.0 < axes.get_ylim()[0] < 3.5, 4.0 < axes.get_ylim()[1] < 12) == (True, True)
    run.metrics.unlink()
    [axes] = drawn(run, monkeypatch, TrainEvent(global_step=5, loss=4.0)).axes
    assert axes.lines[0].get_marker() == "o"


@pytest.mark.parametrize(("tasks", "length"), [(4, 8), (4, 60), (20, 25)])
def test_the_benchmarks_legend_fits(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tasks: int, length: int
) -> None:
    """At most twelve tasks are named, and no two of these look alike."""
    named = [
        BenchmarkEvent(global_step=s, task=f"{n:x>{length}}", metric="acc", value=0.3)
        for n in range(tasks)
        for s in (0, 9)
    ]
    figure = drawn(run, monkeypatch, *named)
    legend = figure.axes[1].get_legend()
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert len(legend.get_texts()) == min(tasks, 13)
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[1].lines[:12]}) == min(tasks, 12)


def test_training_does_not_wait_for_a_drawing_and_many_requests_are_one(run: RunDirectory, gate: Path) -> None:
    chart = ChartProcess(run)
    for step in range(10):
        validated(run, step)
        chart.draw()
    assert not run.chart.exists(), "the first drawing has already ended"
    gate.touch()
    chart.finish(PATIENCE_SECONDS)
    drawn = [int(line) for line in run.chart.read_text().splitlines()]
    assert drawn[-1] == 10
    assert len(drawn) <= 2


def test_without_metrics_there_is_no_chart(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    chart = ChartProcess(run)
    chart.draw()
    chart.finish(PATIENCE_SECONDS)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {run.chart}: no new chart: ")
    assert "metrics.jsonl" in warning


def test_no_failure_of_drawing_ends_the_run(
    run: RunDirectory, gate: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A drawing process that cannot be started, hangs or is killed causes only a warning. Another process draws the
    next chart."""
    chart = ChartProcess(run)
    validated(run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(chart_process, "WORKER", [str(run.path / "nothing")])
        chart.draw()
    assert f"warning: {run.chart}: no new chart: No such file" in capsys.readouterr().err
    for patience, kill, warning in (
        (0.1, False, "no new chart: not drawn in 0.1 s"),
        (PATIENCE_SECONDS, True, "no new chart: the process that draws it ended with status -9"),
    ):
        chart.draw()
        pid = worker_pid(chart)
        if kill:
            os.kill(pid, signal.SIGKILL)
        chart.finish(patience)
        assert capsys.readouterr().err == f"warning: {run.chart}: {warning}\n"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    gate.touch()
    chart.draw()
    chart.finish(PATIENCE_SECONDS)
    assert run.chart.read_text() == "1\n"
