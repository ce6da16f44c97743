"""Chart of scaling laws in four panels: the loss over size in groups of equal FLOPs; the best size, the best number of
tokens, and the loss, each over FLOPs."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.common.files import atomic_file
from harness.common.statistics import Estimate, Inconclusive
from harness.scaling.isoflop import IsoFlop, Optimum
from harness.scaling.laws import LawFit
from harness.scaling.report import Analysis, power, short

# Viridis runs from dark to light, also when printed in grayscale. Its lightest part would vanish on white.
COLORS = matplotlib.colors.ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, 0.85, 256)))
LINE_COLOR, LAW_COLOR = "#3b75af", "#a63d10"
CURVE_POINTS = 200
REASON_WIDTH = 44
# Pairs (n, digits): an axis that spans fewer than n powers of ten is labeled at numbers that begin with these digits.
ROUND = ((1.0, (1, 2, 3, 5)), (1.6, (1, 2, 5)), (2.6, (1, 3)))
QUIET = {"frameon": False, "fontsize": "small"}


def draw_scaling_chart(analysis: Analysis, picture: Path) -> None:
    """Draw the chart into the file `picture`, in the format of its suffix. An existing file is replaced atomically.
    Raises OSError if the file cannot be written."""
    kind = picture.suffix.lower().removeprefix(".")
    with matplotlib.style.context("default"), matplotlib.rc_context({"font.size": 10, "svg.fonttype": "none"}):
        figure = Figure(figsize=(11, 8.5), dpi=150, layout="constrained")
        axes = figure.subplots(2, 2)
        _draw_profiles(axes[0, 0], analysis)
        _draw_best(axes[0, 1], analysis, "parameters")
        _draw_best(axes[1, 1], analysis, "tokens")
        _draw_losses(axes[1, 0], analysis)
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(alpha=0.25, linewidth=0.6)
        with atomic_file(picture.resolve()) as draft:  # a symlink stays a symlink
            figure.savefig(draft, format=kind, metadata={"Software": None} if kind == "png" else {})


def _colors(values: np.ndarray) -> ScalarMappable:
    """Return a logarithmic color scale for sizes or FLOPs."""
    return ScalarMappable(LogNorm(values.min(), max(values.max(), values.min() * 1.01)), COLORS)


def _write_reason(axes: Axes, reason: str, y: float) -> None:
    text = "\n".join(textwrap.wrap(reason, REASON_WIDTH))
    axes.text(0.5, y, text, transform=axes.transAxes, ha="center", va="center", fontsize="small", color="0.35")
    axes.margins(y=0.3)  # room for the text above the points


def _mark(axis: Axis, values: np.ndarray, write: Callable[[float], str]) -> None:
    """Label a logarithmic axis over these values with a few round numbers."""
    decades = np.ptp(np.log10(values))
    within = next((each for most, each in ROUND if decades < most), (1,))
    axis.set_major_locator(LogLocator(subs=within, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def _error(value: Estimate) -> list[list[float]]:
    """Return the distances from the value to both ends of its interval, in the form of matplotlib's `xerr` and `yerr`.
    A distance that is not finite is NaN."""
    lengths = [max(value.value - value.low, 0), max(value.high - value.value, 0)]
    return [[length if math.isfinite(length) else math.nan] for length in lengths]


def _along(analysis: Analysis, *, predictions: bool = False) -> np.ndarray:
    """Return CURVE_POINTS numbers of FLOPs, at which a curve is drawn. Their range is a little wider than that of the
    points and, with `predictions`, of the predictions."""
    further = [prediction.flops for prediction in analysis.predictions] if predictions else []
    flops = np.log([*analysis.points.flops, *further])
    margin = 0.15 * np.ptp(flops) + 0.05
    return np.geomspace(np.exp(flops.min() - margin), np.exp(flops.max() + margin), CURVE_POINTS)


def _draw_profiles(axes: Axes, analysis: Analysis) -> None:
    points, isoflop = analysis.points, analysis.isoflop
    axes.set(xscale="log", title="Profiles of equal FLOPs", xlabel="parameters", ylabel="loss (nats per token)")
    _mark(axes.xaxis, points.parameters, short)
    if isinstance(isoflop, Inconclusive):
        axes.plot(points.parameters, points.loss, "o", color="0.5", markersize=3.5)
        _write_reason(axes, str(isoflop), y=0.9)
        return
    compute = np.array([profile.flops for profile in isoflop.profiles])
    colors = _colors(compute)
    label = "lowest point, 95% interval"
    for profile in isoflop.profiles:
        color, optimum = colors.to_rgba(np.array(profile.flops)), profile.optimum
        sizes = points.parameters[profile.members]
        along = np.geomspace(sizes.min(), sizes.max(), CURVE_POINTS)
        style = "-" if isinstance(optimum, Optimum) else ":"
        axes.plot(sizes, points.loss[profile.members], "o", color=color, markersize=3.5)
        axes.plot(along, profile.loss(along), style, color=color, linewidth=1.3)
        if isinstance(optimum, Optimum):
            best, interval = optimum.parameters, _error(optimum.parameters)
            axes.errorbar(best.value, optimum.loss.value, xerr=interval, color="0.2", fmt="*", capsize=2, label=label)
            label = ""
    if not label:
        axes.legend(**QUIET)
    if len(compute) > 1:
        _mark(axes.figure.colorbar(colors, ax=axes, label="FLOPs", pad=0.01).ax.yaxis, compute, power)


def _draw_best(axes: Axes, analysis: Analysis, quantity: str) -> None:
    """Draw the best size, or the best number of tokens (`quantity`), over FLOPs: once by the isoFLOP profiles, and once
    by the fitted law. If nothing is drawn, write the reason that the profiles give."""
    isoflop, law, along = analysis.isoflop, analysis.law, _along(analysis)
    title = f"Best {'size' if quantity == 'parameters' else 'number of tokens'}"
    axes.set(xscale="log", yscale="log", xlim=along[[0, -1]], title=title, xlabel="FLOPs", ylabel=quantity)
    _mark(axes.xaxis, along, power)
    reason = isoflop
    if isinstance(isoflop, IsoFlop):
        reason = isoflop.laws if isinstance(isoflop.laws, Inconclusive) else reason
        for profile in isoflop.profiles:
            if isinstance(profile.optimum, Optimum):
                best = getattr(profile.optimum, quantity)
                axes.errorbar(profile.flops, best.value, yerr=_error(best), color=LINE_COLOR, marker="o", capsize=2)
        if isinstance(isoflop.laws, dict):
            power_law = isoflop.laws[quantity]
            exponent = power_law.exponent
            label = f"profiles: exponent {exponent.value:.3f} [{exponent.low:.3f}, {exponent.high:.3f}]"
            axes.fill_between(along, *power_law.interval_at(along), color=LINE_COLOR, alpha=0.15, linewidth=0)
            axes.plot(along, power_law.at(along), color=LINE_COLOR, linewidth=1.4, label=label)
    if isinstance(law, LawFit):
        intervals = [law.best(flops, analysis.cost)[quantity] for flops in along]
        # The band is left out where the interval is unbounded or reaches zero, which a logarithmic axis cannot show.
        ends = np.array([[each.low for each in intervals], [each.high for each in intervals]])
        low, high = np.where((ends > 0) & np.isfinite(ends), ends, np.nan)
        axes.fill_between(along, low, high, color=LAW_COLOR, alpha=0.12, linewidth=0)
        middle = [each.value for each in intervals]
        axes.plot(along, middle, color=LAW_COLOR, linestyle="--", linewidth=1.4, label="law L(N, D)")
    _mark(axes.yaxis, np.array(axes.get_ylim()), short)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", **QUIET)
    elif not axes.has_data():
        _write_reason(axes, str(reason), y=0.5)


def _draw_losses(axes: Axes, analysis: Analysis) -> None:
    """Draw the losses of all points over FLOPs, the law's loss at the best size for each number of FLOPs, and the
    predictions. Without a law, draw the points only, and write the reason."""
    points, law, cost, along = analysis.points, analysis.law, analysis.cost, _along(analysis, predictions=True)
    axes.set(xscale="log", xlim=along[[0, -1]], title="Loss over FLOPs", xlabel="FLOPs", ylabel="loss (nats per token)")
    colors = _colors(points.parameters)
    axes.scatter(points.flops, points.loss, c=colors.to_rgba(points.parameters), s=14)
    if np.ptp(points.parameters) > 0:
        bar = axes.figure.colorbar(colors, ax=axes, label="parameters", pad=0.01)
        _mark(bar.ax.yaxis, points.parameters, short)
    _mark(axes.xaxis, along, power)
    if isinstance(law, Inconclusive):
        _write_reason(axes, f"the law is {law}", y=0.9)
        return
    best = np.array([law.law.best_size(flops, cost) for flops in along])
    axes.plot(along, law.law.loss(best, cost.tokens(along, best)), "--", color=LAW_COLOR, label="law, best size")
    label = "predicted, 95% interval"
    for prediction in analysis.predictions:
        loss = prediction.loss
        axes.errorbar(prediction.flops, loss.value, yerr=_error(loss), color="0.2", marker="D", capsize=3, label=label)
        label = ""
    axes.legend(**QUIET)
