"""A picture of scaling laws: profiles of equal FLOPs, the best size and tokens over FLOPs, and the loss over FLOPs."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.common.files import atomic_file
from harness.common.statistics import Estimate
from harness.comparison.inconclusive import Inconclusive
from harness.scaling.data import CostLaw, Points
from harness.scaling.isoflop import IsoFlop, Optimum, PowerLaw, Profile
from harness.scaling.laws import LawFit, bounded
from harness.scaling.report import Analysis, power, short

matplotlib.use("Agg")  # machines without a display

# From dark to light in print without colours, too; the lightest part would vanish on white.
COLOURS = matplotlib.colormaps["viridis"].resampled(256)
LIGHTEST = 0.85
LINE_COLOUR, LAW_COLOUR = "#3b75af", "#a63d10"
CURVE_POINTS = 200
MARGIN = 0.15  # of ln FLOPs, beyond the points
REASON_WIDTH = 44
ROUND = ((1.0, (1, 2, 3, 5)), (1.6, (1, 2, 5)), (2.6, (1, 3)))  # numbers to write on axes of fewer powers of ten


def draw_scaling_chart(analysis: Analysis, picture: Path) -> None:
    """Draw four panels into a file of the kind its name says. One that is there is replaced in one rename."""
    with plt.style.context("default"), plt.rc_context({"font.size": 10, "svg.fonttype": "none"}):
        figure, axes = plt.subplots(2, 2, figsize=(11, 8.5), dpi=150, layout="constrained")
        try:
            _draw_profiles(axes[0, 0], analysis.points, analysis.isoflop)
            _draw_best(axes[0, 1], analysis, "parameters")
            _draw_best(axes[1, 1], analysis, "tokens")
            _draw_losses(axes[1, 0], analysis)
            for each in axes.flat:
                each.spines[["top", "right"]].set_visible(False)
                each.grid(alpha=0.25, linewidth=0.6)
            drawn = io.BytesIO()
            kind = picture.suffix.lower().removeprefix(".")
            figure.savefig(drawn, format=kind, metadata={"Software": None} if kind == "png" else {})
        finally:
            plt.close(figure)
    with atomic_file(picture.resolve()) as draft:  # a link stays one
        draft.write_bytes(drawn.getvalue())


def _colours(values: np.ndarray) -> ScalarMappable:
    """Colours for sizes or FLOPs, by their logarithms."""
    colours = matplotlib.colors.ListedColormap(COLOURS(np.linspace(0, LIGHTEST, 256)))
    high = values.max() if values.max() > values.min() else values.min() * 1.01
    return ScalarMappable(LogNorm(values.min(), high), colours)


def _say(axes: Axes, reason: Inconclusive, y: float = 0.5) -> None:
    text = "\n".join(textwrap.wrap(str(reason), REASON_WIDTH))
    axes.text(0.5, y, text, transform=axes.transAxes, ha="center", va="center", fontsize="small", color="0.35")


def _draw_profiles(axes: Axes, points: Points, isoflop: IsoFlop | Inconclusive) -> None:
    axes.set_xscale("log")
    _mark(axes.xaxis, points.parameters, short)
    axes.set_title("Profiles of equal FLOPs")
    axes.set_xlabel("parameters")
    axes.set_ylabel("loss (nats per token)")
    if isinstance(isoflop, Inconclusive):
        axes.plot(points.parameters, points.loss, "o", color="0.5", markersize=3.5)
        _say(axes, isoflop, y=0.9)
        return
    colours = _colours(np.array([profile.flops for profile in isoflop.profiles]))
    for profile in isoflop.profiles:
        _draw_profile(axes, points, profile, colours.to_rgba(np.array(profile.flops)))
    if any(isinstance(profile.optimum, Optimum) for profile in isoflop.profiles):
        axes.plot([], [], "*", color="0.2", markersize=10, label="lowest point, 95% interval")
        axes.legend(frameon=False, fontsize="small")
    if len(isoflop.profiles) > 1:
        bar = axes.figure.colorbar(colours, ax=axes, label="FLOPs", pad=0.01)
        _mark(bar.ax.yaxis, np.array([profile.flops for profile in isoflop.profiles]), power)


def _draw_profile(axes: Axes, points: Points, profile: Profile, colour: np.ndarray) -> None:
    sizes = points.parameters[profile.members]
    axes.plot(sizes, points.loss[profile.members], "o", color=colour, markersize=3.5)
    along = np.geomspace(sizes.min(), sizes.max(), CURVE_POINTS)
    is_told = isinstance(profile.optimum, Optimum)
    axes.plot(along, profile.loss(along), color=colour, linewidth=1.3, linestyle="-" if is_told else ":")
    if isinstance(profile.optimum, Optimum):
        best, loss = profile.optimum.parameters, profile.optimum.loss
        axes.errorbar(
            best.value, loss.value, xerr=_error(best), color="0.2", marker="*", markersize=9, capsize=2, linewidth=1
        )


def _error(value: Estimate) -> list[list[float]]:
    """Lengths to both ends of the interval, as matplotlib takes them."""
    lengths = [max(value.value - value.low, 0), max(value.high - value.value, 0)]
    return [[length if math.isfinite(length) else math.nan] for length in lengths]


def _mark(axis: Axis, values: np.ndarray, write: Callable[[float], str]) -> None:
    """Write a few round numbers on a logarithmic axis over these values, however many powers of ten they span."""
    decades = np.log10(values.max() / values.min())
    within = next((each for most, each in ROUND if decades < most), (1,))
    axis.set_major_locator(LogLocator(subs=within, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_formatter(NullFormatter())


def _along(points: Points, further: Sequence[float] = ()) -> np.ndarray:
    """FLOPs from below the smallest to above the largest of the points, and of `further`."""
    flops = np.log([points.flops.min(), points.flops.max(), *further])
    low, high = flops.min(), flops.max()
    margin = MARGIN * (high - low) + 0.05
    return np.exp(np.linspace(low - margin, high + margin, CURVE_POINTS))


def _draw_best(axes: Axes, analysis: Analysis, quantity: str) -> None:
    """The best size, or its tokens, over FLOPs: by the profiles, and by the law."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"Best {'size' if quantity == 'parameters' else 'number of tokens'}")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel(quantity)
    isoflop, law, along = analysis.isoflop, analysis.law, _along(analysis.points)
    _mark(axes.xaxis, along, power)
    _mark(axes.yaxis, getattr(analysis.points, quantity), short)
    if isinstance(isoflop, IsoFlop):
        for profile in isoflop.profiles:
            if isinstance(profile.optimum, Optimum):
                best = getattr(profile.optimum, quantity)
                axes.errorbar(profile.flops, best.value, yerr=_error(best), color=LINE_COLOUR, marker="o", capsize=2)
        if not isinstance(isoflop.laws, Inconclusive):
            _draw_power_law(axes, getattr(isoflop.laws, quantity), along)
    if isinstance(law, LawFit):
        middle, low, high = _best_of_law(law, analysis.cost, along, quantity)
        axes.fill_between(along, low, high, color=LAW_COLOUR, alpha=0.12, linewidth=0)
        axes.plot(along, middle, color=LAW_COLOUR, linestyle="--", linewidth=1.4, label="law L(N, D)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize="small", loc="upper left")
    elif not axes.has_data():
        _say(axes, isoflop if isinstance(isoflop, Inconclusive) else _reason(isoflop))


def _reason(isoflop: IsoFlop) -> Inconclusive:
    return isoflop.laws if isinstance(isoflop.laws, Inconclusive) else Inconclusive("no profile has an optimum")


def _draw_power_law(axes: Axes, law: PowerLaw, along: np.ndarray) -> None:
    exponent = law.exponent
    label = f"profiles: exponent {exponent.value:.3f} [{exponent.low:.3f}, {exponent.high:.3f}]"
    axes.fill_between(along, *law.interval_at(along), color=LINE_COLOUR, alpha=0.15, linewidth=0)
    axes.plot(along, law.at(along), color=LINE_COLOUR, linewidth=1.4, label=label)


def _best_of_law(
    fit: LawFit, cost: CostLaw, along: np.ndarray, quantity: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The law's best size or tokens at each of these FLOPs, and its 95 % interval."""
    middle, low, high = [], [], []
    for flops in along:
        value, drawn = fit.law.best_size(flops, cost), fit.resampled.best_size(flops, cost)
        if quantity == "tokens":
            with np.errstate(divide="ignore", over="ignore"):  # of a size of 0
                value, drawn = cost.tokens(flops, value), cost.tokens(flops, drawn)
        middle.append(value)
        interval = bounded(value, drawn)
        low.append(interval.low)
        high.append(interval.high)
    # Left open where the interval has no bound, or goes down to zero, which no logarithmic axis has.
    ends = np.array([low, high])
    ends = np.where((ends > 0) & np.isfinite(ends), ends, np.nan)
    return np.array(middle), ends[0], ends[1]


def _draw_losses(axes: Axes, analysis: Analysis) -> None:
    """All points over FLOPs, and what the law says of the best size at each."""
    points, law, cost = analysis.points, analysis.law, analysis.cost
    axes.set_xscale("log")
    axes.set_title("Loss over FLOPs")
    axes.set_xlabel("FLOPs")
    axes.set_ylabel("loss (nats per token)")
    colours = _colours(points.parameters)
    axes.scatter(points.flops, points.loss, c=colours.to_rgba(points.parameters), s=14)
    bar = axes.figure.colorbar(colours, ax=axes, label="parameters", pad=0.01)
    _mark(bar.ax.yaxis, points.parameters, short)
    _mark(axes.xaxis, points.flops, power)
    if isinstance(law, Inconclusive):
        _say(axes, Inconclusive(f"of the law: {law.reason}"), y=0.9)
        return
    along = _along(points, [prediction.plan.flops for prediction in analysis.predictions])
    best = np.array([law.law.best_size(flops, cost) for flops in along])
    axes.plot(along, law.law.loss(best, cost.tokens(along, best)), "--", color=LAW_COLOUR, label="law, best size")
    for number, prediction in enumerate(analysis.predictions):
        label = "predicted, 95% interval" if not number else None
        loss = prediction.loss
        axes.errorbar(
            prediction.plan.flops, loss.value, yerr=_error(loss), color="0.2", marker="D", capsize=3, label=label
        )
    axes.legend(frameon=False, fontsize="small")
