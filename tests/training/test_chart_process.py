"""Charts are drawn in a separate process during training, and the last chart shows the end of the run."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest

import harness.training.chart_process as chart_process
from harness.runs.directory import RunDirectory
from harness.runs.metrics import MetricsFile, ValidationEvent
from harness.training.chart_process import ChartProcess

PATIENCE_SECONDS = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "r").mkdir()
    return RunDirectory(tmp_path / "r")


def validated(run: RunDirectory, step: int) -> None:
    MetricsFile(run.metrics).append(ValidationEvent(global_step=step, loss=5.0 - step))


def slow_worker(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Replace the drawing process by one that counts the lines of metrics.jsonl, sleeps for `seconds`, and then appends
    the count to the chart's file."""
    source = (
        "import sys, time\n"
        "lines = len(open(sys.argv[1]).readlines())\n"
        f"time.sleep({seconds})\n"
        "open(sys.argv[2], 'a').write(f'{lines}\\n')\n"
    )
    monkeypatch.setattr(chart_process, "WORKER", [sys.executable, "-c", source])


def worker_pid(chart: ChartProcess) -> int:
    assert chart._process is not None
    return chart._process.pid


def test_the_chart_of_the_last_state_is_there_at_the_end(run: RunDirectory) -> None:
    chart = ChartProcess(run)
    validated(run, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chart.draw()
        pid = worker_pid(chart)
        chart.finish(PATIENCE_SECONDS)
    assert run.chart.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted(run.path.iterdir())] == ["metrics.jsonl", "training-run-chart.png"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_training_does_not_wait_for_a_drawing_and_many_requests_are_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 2.0
    slow_worker(monkeypatch, seconds)
    chart = ChartProcess(run)
    began = time.monotonic()
    for step in range(10):
        validated(run, step)
        chart.draw()
    assert not run.chart.exists(), "the first drawing has already ended"
    assert time.monotonic() - began < seconds
    chart.finish(PATIENCE_SECONDS)
    drawn = [int(line) for line in run.chart.read_text().splitlines()]
    assert drawn[-1] == 10
    assert len(drawn) <= 2


def test_no_failure_of_drawing_ends_the_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failure is a warning: no metrics, a process that cannot be started, hangs or is killed. The next chart is
    drawn by another process."""
    chart = ChartProcess(run)
    chart.draw()
    with pytest.warns(UserWarning, match=r"training-run-chart\.png: no chart: .*metrics\.jsonl"):
        chart.finish(PATIENCE_SECONDS)
    validated(run, 0)
    with monkeypatch.context() as patch:
        patch.setattr(chart_process, "WORKER", [str(run.path / "nothing")])
        with pytest.warns(UserWarning, match="no chart: No such file"):
            chart.draw()
        slow_worker(patch, seconds=PATIENCE_SECONDS)
        for patience, kill, warning in (
            (0.1, False, r"no chart: not drawn in 0\.1 s"),
            (PATIENCE_SECONDS, True, "no chart: the process that draws has ended with status -9"),
        ):
            chart.draw()
            pid = worker_pid(chart)
            if kill:
                os.kill(pid, signal.SIGKILL)
            with pytest.warns(UserWarning, match=warning):
                chart.finish(patience)
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    chart.draw()
    chart.finish(PATIENCE_SECONDS)
    assert run.chart.read_bytes().startswith(b"\x89PNG")
