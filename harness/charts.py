"""Charts from the files of a run: metrics in, picture out. The only module that imports matplotlib."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # machines without a display

import matplotlib.pyplot as plt
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.metrics import read_metrics

TRAIN_COLOUR, VALIDATION_COLOUR = "#3b75af", "#d1602f"
# Losses of the first steps, near ln(vocabulary), would squeeze the rest of the curve into the lower edge.
WARM_PART = 0.02
HEADROOM = 1.08


def draw_training_chart(metrics: Path, picture: Path, title: str) -> None:
    """Draw training loss (mean, and the range of its microbatches) and validation loss over global steps."""
    events = read_metrics(metrics)
    train = [event for event in events if event["event"] == "train" and event.get("loss") is not None]
    validation = [event for event in events if event["event"] == "validation" and event.get("loss") is not None]
    with plt.xkcd() if (font := xkcd_font()) else plt.style.context("default"):
        if font:
            plt.rcParams["font.family"] = font
        figure, axes = plt.subplots(figsize=(9, 5), dpi=150, layout="constrained")
        try:
            _draw_train(axes, train)
            _draw_validation(axes, validation)
            _dress(axes, title, train + validation)
            figure.savefig(picture, metadata={"Software": None})
        finally:
            plt.close(figure)


def xkcd_font() -> str | None:
    """The name of an installed font of the xkcd family, if there is one."""
    return next((font.name for font in font_manager.fontManager.ttflist if "xkcd" in font.name.lower()), None)


def _draw_train(axes: Axes, events: list[dict[str, Any]]) -> None:
    steps = [event["global_step"] for event in events]
    low, high = ([event[f"loss_{end}"] for event in events] for end in ("min", "max"))
    axes.fill_between(steps, low, high, color=TRAIN_COLOUR, alpha=0.18, linewidth=0, label="training, min–max")
    axes.plot(steps, [event["loss"] for event in events], color=TRAIN_COLOUR, linewidth=1.4, label="training, mean")


def _draw_validation(axes: Axes, events: list[dict[str, Any]]) -> None:
    if not events:
        return
    steps, losses = zip(*[(event["global_step"], event["loss"]) for event in events], strict=True)
    axes.plot(steps, losses, color=VALIDATION_COLOUR, linewidth=1.6, marker="o", markersize=3.5, label="validation")
    step, loss = min(zip(steps, losses, strict=True), key=lambda point: point[1])
    label = f"best: {loss:.3f} at step {step:,}"
    axes.plot([step], [loss], color=VALIDATION_COLOUR, marker="*", markersize=13, linestyle="none", label=label)


def _dress(axes: Axes, title: str, events: list[dict[str, Any]]) -> None:
    axes.set_title(title)
    axes.set_xlabel("global step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    last = max((event["global_step"] for event in events), default=0)
    settled = [event["loss"] for event in events if event["global_step"] >= WARM_PART * last]
    if len(settled) > 10 and all(map(math.isfinite, settled)):
        axes.set_ylim(top=max(settled) * HEADROOM)
    if events:
        axes.legend(frameon=False)
