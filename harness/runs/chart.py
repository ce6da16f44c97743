"""The chart of one run, drawn from its metrics.jsonl.

harness/training/chart_process.py runs this file as `python -m harness.runs.chart METRICS PICTURE TITLE`.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from harness.common.files import atomic_file
from harness.runs.metrics import BenchmarkEvent, Event, TrainEvent, ValidationEvent, read_metrics

matplotlib.use("Agg")  # works on machines without a display

TRAIN_COLOR, VALIDATION_COLOR = "#3b75af", "#d1602f"
# The upper end of the loss axis is HEADROOM times the largest loss after the first WARM_PART of all steps. Losses above
# both LEAST_PEAK and PEAK_RATIO times the first loss do not count. Losses of the first steps, near ln(vocabulary), or a
# peak above them would squeeze the rest of the curve into the bottom of the chart.
WARM_PART = 0.02
HEADROOM = 1.08
PEAK_RATIO = 1.5
LEAST_PEAK = 16.0  # nats; keeps the divergence of a run that began with a low loss (trained weights) in view
LABELS_IN_A_ROW, ROW_CHARACTERS = 4, 120  # limits of a row in the legend of the benchmarks
LINE_CHARACTERS = 9  # width, in characters, of the line beside each label
MOST_NAMED = 12  # benchmark tasks with a color and a label; the others are thin and gray
COLORS = 10  # of matplotlib's lines; later tasks have dashed lines
# Only one metric of each benchmark task is drawn: the first of these that the task has.
ACCURACIES = ("acc_norm", "acc", "exact_match")


def draw_training_chart(metrics: Path, picture: Path, title: str) -> None:
    """Draw the chart of the file `metrics` into the PNG file `picture`: losses over global steps, and below them
    accuracies in benchmarks."""
    events = read_metrics(metrics)
    accuracies = benchmark_lines(events)
    # an installed font of the xkcd family
    font = next((font.name for font in font_manager.fontManager.ttflist if "xkcd" in font.name.lower()), None)
    with plt.xkcd() if font else plt.style.context("default"):
        if font:
            plt.rcParams["font.family"] = font
        sizes = {"figsize": (9, 8), "height_ratios": [3, 2]} if accuracies else {"figsize": (9, 5)}
        rows = 2 if accuracies else 1  # losses, and below them benchmarks over the same steps
        figure, axes = plt.subplots(rows, 1, dpi=150, sharex=True, layout="constrained", squeeze=False, **sizes)
        try:
            for panel in axes.flat:
                panel.spines[["top", "right"]].set_visible(False)
                panel.grid(axis="y", alpha=0.25, linewidth=0.6)
            axes[0, 0].set_title(title)
            _draw_losses(axes[0, 0], events)
            if accuracies:
                _draw_benchmarks(axes[1, 0], accuracies)
            axes[-1, 0].set_xlabel("global step")
            drawn = io.BytesIO()
            figure.savefig(drawn, format="png", metadata={"Software": None})
        finally:
            plt.close(figure)
    with atomic_file(picture.resolve()) as draft:  # resolved, so that a symbolic link remains a link
        draft.write_bytes(drawn.getvalue())


def benchmark_lines(events: Sequence[Event]) -> dict[str, list[tuple[int, float]]]:
    """Return the points (global step, accuracy) of each benchmark task, by the label of the task's line in the chart.
    Tasks without a metric in ACCURACIES are left out."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for event in events:
        if isinstance(event, BenchmarkEvent) and event.value is not None:
            found.setdefault((event.task, event.metric), []).append((event.global_step, event.value))
    lines = {}
    for task in dict.fromkeys(task for task, _ in found):
        # A metric may be named "exact_match,strict-match": lm-eval's name, a comma, and the filter that was applied to
        # the answers. Of several filters, the first is drawn.
        metrics = {metric.partition(",")[0]: metric for name, metric in reversed(found) if name == task}
        shown = next((metrics[metric] for metric in ACCURACIES if metric in metrics), None)
        if shown is not None:
            lines[f"{task}, {shown}"] = found[task, shown]
    return lines


def _draw_benchmarks(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Draw a line for each task."""
    named, others = [*lines.items()][:MOST_NAMED], [*lines.values()][MOST_NAMED:]
    for number, (label, points) in enumerate(named):
        shape: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 3.5, "color": f"C{number % COLORS}"}
        axes.plot(*zip(*points, strict=True), linestyle="-" if number < COLORS else "--", label=label, **shape)
    for number, points in enumerate(others):
        label = f"and {len(others):,} more" if number == 0 else ""
        axes.plot(*zip(*points, strict=True), linewidth=0.6, color="#bbbbbb", zorder=1, label=label)
    axes.set_ylabel("accuracy in benchmarks")
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    widest = max(len(label) for label, _ in named) + LINE_CHARACTERS
    columns = max(1, min(len(lines), LABELS_IN_A_ROW, ROW_CHARACTERS // widest))
    axes.legend(frameon=False, fontsize="small", ncols=columns, **place)


def _draw_losses(axes: Axes, events: Sequence[Event]) -> None:
    train = [event for event in events if isinstance(event, TrainEvent) and event.loss is not None]
    steps, losses = ([getattr(event, key) for event in train] for key in ("global_step", "loss"))
    ranges = [(each.global_step, each.loss_min, each.loss_max) for each in train if each.loss_min is not None]
    within, low, high = zip(*ranges, strict=True) if ranges else ((), (), ())  # lines of earlier versions have none
    axes.fill_between(within, low, high, color=TRAIN_COLOR, alpha=0.18, linewidth=0, label="training, min–max")
    marker = "o" if len(steps) == 1 else ""  # a line of one point would not be seen
    axes.plot(steps, losses, color=TRAIN_COLOR, linewidth=1.4, marker=marker, label="training, mean")
    validated = [
        (event.global_step, event.loss)
        for event in events
        if isinstance(event, ValidationEvent) and event.loss is not None
    ]
    if validated:
        shape: dict[str, Any] = {"linewidth": 1.6, "marker": "o", "markersize": 3.5, "label": "validation"}
        axes.plot(*zip(*validated, strict=True), color=VALIDATION_COLOR, **shape)
        step, loss = min(validated, key=lambda point: point[1])
        label = f"best: {loss:.3f} at step {step:,}"
        axes.plot([step], [loss], color=VALIDATION_COLOR, marker="*", markersize=13, linestyle="none", label=label)
    with_loss = [event for event in events if isinstance(event, TrainEvent | ValidationEvent)]
    if lost := [event.global_step for event in with_loss if event.loss is None]:
        bottom: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "linestyle": "none", "marker": "|"}
        axes.plot(lost, [0.02] * len(lost), color="#b00020", label="loss not finite", **bottom)
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    points = [*zip(steps, losses, strict=True), *validated]
    first, last = (end((step for step, _ in points), default=0) for end in (min, max))
    peak = max(LEAST_PEAK, PEAK_RATIO * max((loss for step, loss in points if step == first), default=0.0))
    settled = [loss for step, loss in points if step >= WARM_PART * last and loss <= peak]
    if len(settled) > 10:
        axes.set_ylim(min([*settled, *low]) / HEADROOM, max(settled) * HEADROOM)
    if points or lost:
        axes.legend(frameon=False)


def main() -> None:
    metrics, picture, title = sys.argv[1:]
    draw_training_chart(Path(metrics), Path(picture), title)


if __name__ == "__main__":
    main()
