"""Loss curves of several runs over a common axis, drawn by matplotlib. Finished runs that differ only in the seed share
one curve with a band."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import atomic_file
from harness.common.messages import abbreviated
from harness.comparison.against_baseline import BaselineComparison
from harness.comparison.arms import find_arms
from harness.comparison.quantities import Basis, training_basis, validation_basis
from harness.comparison.records import RunRecord
from harness.comparison.table import cut_names
from harness.runs.metrics import Event, TrainEvent, ValidationEvent, newest_first

LEAST_POINTS = 2
# Length of a curve's first part, as a fraction of the place of its last point. Losses there begin near ln(vocabulary
# size), and would squeeze the rest of the curves against the lower edge.
WARM_PART = 0.2
HEADROOM = 0.06
CUT_RATIO = 2.0  # the first part is cut off if it makes the range of losses more than this many times as large
LEAST_REACH = 0.1  # nats; a reference is shown if it is at most this, or the curves' height, away from the curves
MOST_MARKERS = 12  # along a curve, without the last point's
LARGEST_LOSS = 1e6  # nats per token; larger losses, of runs that have diverged, are not drawn
# Losses of more than PEAK_RATIO times the highest first loss, and more than LEAST_PEAK nats, do not stretch the range:
# one peak would squeeze all curves against the lower edge. Runs that began with trained weights have low first losses.
PEAK_RATIO = 1.5
LEAST_PEAK = 16.0
# Three shades, which differ in lightness, and four line styles: twelve curves can be told apart, also in grayscale.
SHADES = ("#1b2a49", "#c8553d", "#5fa8a0")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
MOST_NAMED = len(SHADES) * len(LINES)  # curves with a style and a name in the legend; the others are thin and gray
FAINT = "#555555"
GRAY = "#bbbbbb"
LONGEST_LABEL = 40
KINDS: dict[str, tuple[type[TrainEvent | ValidationEvent], Callable[[RunRecord], Basis | None]]] = {
    "validation": (ValidationEvent, validation_basis),
    "training": (TrainEvent, training_basis),
}
# Label of each axis, by the name of the axis.
AXES = {
    "tokens": "tokens seen",
    "steps": "global steps",
    "hours": "hours",
    "dollars": "US dollars",
    "flops": "FLOPs of training",
}
PLAIN_AXES = ("hours", "dollars")  # axes whose numbers are written without a prefix such as M


@dataclass(frozen=True)
class Curve:
    """One line in a chart: the loss of one run, or the mean loss of several runs."""

    label: str
    x: list[float]  # places on the axis
    y: list[float]  # loss at each place, in nats per token; for several runs, their mean loss
    low: list[float] = field(default_factory=list)  # the lowest loss at each place; empty for a single run
    high: list[float] = field(default_factory=list)  # the highest, likewise
    run_count: int = 1
    is_baseline: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves of one kind of loss over one axis."""

    axis: str  # a key of AXES
    kind: str  # "validation" or "training"
    curves: list[Curve]  # sorted by their last loss, the lowest first; diverged runs are last
    problems: list[str]  # a line for each reason why something is not drawn


def charts_of(records: Sequence[RunRecord], axes: Sequence[str], baseline: str | None = None) -> list[Chart]:
    """Return one chart for each of the `axes` (keys of AXES). All charts show validation losses, or training losses if
    only these are enough for a curve.

    - The runs of an arm share a curve. Runs in no arm, and runs whose last loss is not finite or not below
      LARGEST_LOSS, have curves of their own.
    - Only losses measured on the most common text are drawn. Runs with fewer than LEAST_POINTS of them are left out.
    - A chart may have no curves. Its `problems` have the reasons.
    """
    events: dict[str, list[Event]] = {}
    reasons: dict[str, list[str]] = {}  # names of the runs that are not drawn, by the reason
    for record in records:
        try:
            events[record.name] = [*newest_first(record.directory.metrics)][::-1]
        except UserError as error:
            reasons[f"in no chart: {error}"] = [record.name]
    records = [record for record in records if record.name in events]
    for kind in (*KINDS, "validation"):  # the first kind with enough losses for a curve, or else validation
        of_kind, basis_of = KINDS[kind]
        bases = {record.name: basis_of(record) for record in records}
        every = {name: [each for each in of_run if isinstance(each, of_kind)] for name, of_run in events.items()}
        losses = {name: [each for each in of_run if _counts(each)] for name, of_run in every.items()}
        if any(basis and len(losses[name]) >= LEAST_POINTS for name, basis in bases.items()):
            break
    known = [basis for basis in bases.values() if basis is not None]
    main = max(known, key=known.count) if known else None
    drawn: dict[str, RunRecord] = {}
    for record in records if main else []:
        is_on_main, points = bases[record.name] == main, len(losses[record.name])
        if is_on_main and points >= LEAST_POINTS:
            drawn[record.name] = record
            continue
        reason = f"in no chart: no loss is known to be measured on {main.words if main else ''}"
        if is_on_main:
            reason = f"nothing to draw: metrics.jsonl has {points} finite {kind} loss{'' if points == 1 else 'es'}"
            reason += f", but a curve needs {LEAST_POINTS}"
        elif record.state.word in ("never trained", "not trained here"):
            reason = f"in no chart: {record.state.word}"
        elif kind == "validation" and record.train and record.train.get("validation_interval") is None:
            reason = "in no chart: trained without validation, while the charts show validation losses"
        reasons.setdefault(reason, []).append(record.name)
    arms = find_arms(records, baseline)
    diverged = [name for name in drawn if not _counts(every[name][-1])]
    lost = {f"{name}, diverged after": (name,) for name in diverged}
    run_names = {arm: tuple(name for name in names if name not in diverged) for arm, names in arms.run_names.items()}
    run_names |= {name: (name,) for name in drawn if name not in diverged and not arms.arm_of(name)} | lost
    charts = []
    for axis in axes:
        curves, not_placed = _curves_on(axis, drawn, losses, run_names)
        curves = [replace(curve, is_baseline=baseline in run_names[curve.label]) for curve in curves]
        problems = [f"{abbreviated(names)}: {reason}" for reason, names in (reasons | not_placed).items()]
        if records and not main:
            problems.append("there are no losses, or the text that they were measured on is not recorded")
        curves.sort(key=lambda curve: (curve.label in lost, curve.y[-1]))
        charts.append(Chart(axis, kind, curves, problems))
    return charts


def _counts(event: TrainEvent | ValidationEvent) -> bool:
    """Return True if the event's loss is finite and below LARGEST_LOSS."""
    return event.loss is not None and abs(event.loss) < LARGEST_LOSS


def _curves_on(
    axis: str,
    drawn: Mapping[str, RunRecord],
    losses: Mapping[str, Sequence[TrainEvent | ValidationEvent]],
    run_names: Mapping[str, Sequence[str]],
) -> tuple[list[Curve], dict[str, list[str]]]:
    """Return the curves of the runs `drawn` over `axis`, and the names of the runs and curves left out, by the reason.
    `run_names` has the names of each curve's runs, by the curve's label."""
    places: dict[str, dict[int, tuple[float, float]]] = {}  # run: {step: (place on the axis, loss)}
    left_out: dict[str, list[str]] = {}
    for name, record in drawn.items():
        try:
            key, factor = _place_on(axis, record, losses[name])
        except UserError as error:
            left_out.setdefault(str(error), []).append(name)
        else:
            places[name] = {
                each.global_step: (place * factor, each.loss or 0.0)
                for each in losses[name]
                if (place := getattr(each, key)) is not None
            }
    runs = {label: [places[name] for name in names if name in places] for label, names in run_names.items()}
    curves = [_mean_curve(label, those) for label, those in runs.items() if those]
    for curve in curves:
        if not curve.x:
            reason = f"{axis} are not recorded in metrics.jsonl, or its runs have no loss at the same step"
            left_out.setdefault(reason, []).append(curve.label)
    return [curve for curve in curves if curve.x], left_out


def _mean_curve(label: str, runs: Sequence[Mapping[int, tuple[float, float]]]) -> Curve:
    """Return the mean curve of `runs` at the steps that all of them have. Each run maps a global step to a place on the
    axis and a loss; both are averaged."""
    steps = [step for step in runs[0] if all(step in run for run in runs)]
    x, y = ([sum(run[step][part] for run in runs) / len(runs) for step in steps] for part in (0, 1))
    if len(runs) < 2:
        return Curve(label, x, y)
    low, high = ([end(run[step][1] for run in runs) for step in steps] for end in (min, max))
    return Curve(label, x, y, low, high, len(runs))


def _place_on(axis: str, record: RunRecord, events: Sequence[Event]) -> tuple[str, float]:
    """Return the name of the field of `events` that gives the place on the axis, and the factor that converts it to the
    axis's unit. Raises UserError if the factor is 0 or unknown."""
    if axis == "dollars":
        dollars, seconds = record.dollars.get("total"), record.seconds.get("total")
        if not dollars or not seconds:
            missing = "it cost nothing" if dollars == 0 else 'train.json had no "price_per_hour"'
            raise UserError(f"{missing}, so losses cannot be drawn over dollars")
        if all(each.dollars is not None for each in events):
            return "dollars", 1.0
        return "seconds", dollars / seconds  # an earlier version's lines, or there was no price yet
    if axis == "flops":
        if record.shape is None:
            raise UserError(
                "FLOPs per token are not known: the model's shape is missing or invalid; check model.json "
                "and, if there is one, summary.json"
            )
        return "tokens_seen", record.shape.flops_per_token
    return {"tokens": ("tokens_seen", 1.0), "steps": ("global_step", 1.0), "hours": ("seconds", 1 / 3600)}[axis]


def chart_note(comparison: BaselineComparison | None, chart: Chart) -> str:
    """Return a note if there are verdicts based on a loss that the chart does not show, otherwise ""."""
    drawn = f"{chart.kind} loss"
    if comparison is None or comparison.loss in ("", drawn):
        return ""
    return f"The verdicts are based on the {comparison.loss}; these curves show the {drawn}."


def write_png(chart: Chart, path: Path, references: Mapping[str, float], note: str = "") -> None:
    """Draw a chart with at least one curve into a PNG file. An existing file is replaced atomically. `references` are
    losses by label; `note` is printed below the axes. Raises OSError if the file cannot be written."""
    with atomic_file(path.resolve()) as draft:
        _draw(chart, references, note, "png", draft)


def svg(chart: Chart, references: Mapping[str, float]) -> str:
    """Return a chart with at least one curve as an <svg> element. Labels are <text> elements, in which matplotlib
    escapes XML. `references` are losses by label."""
    drawn = io.StringIO()
    _draw(chart, references, "", "svg", drawn)
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _draw(chart: Chart, references: Mapping[str, float], note: str, kind: str, target: Path | io.StringIO) -> None:
    """Draw the chart, which has at least one curve, into `target`. `references` are losses by label, drawn as dotted
    lines. `note` is printed below the axes. `kind` is "png" or "svg"."""
    import matplotlib  # imported here, so that commands that draw nothing do not wait for it
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, FuncFormatter

    figure = Figure(figsize=(10, 6), dpi=150, layout="constrained")
    axes = figure.subplots()
    low, high = shown_range(chart.curves, references)
    axes.set_xlim(left=0, right=1.01 * max(curve.x[-1] for curve in chart.curves))  # the last markers are whole
    axes.set_ylim(low, high)
    baseline = [curve for curve in chart.curves[MOST_NAMED:] if curve.is_baseline]
    named = [*chart.curves[: MOST_NAMED - len(baseline)], *baseline]
    labels = cut_names([*(curve.label for curve in named), *references], LONGEST_LABEL)
    # matplotlib leaves labels that begin with an underscore out of the legend.
    names = iter([f" {label}" if label.startswith("_") else label for label in labels])
    for number, curve in enumerate(named):
        color, line, marker = SHADES[number % 3], LINES[number // 3 % 4], MARKERS[number // 3 % 4]
        label = f"{next(names)}: {curve.y[-1]:.3f}" + (f" ({curve.run_count} runs)" if curve.run_count > 1 else "")
        every, last = math.ceil(len(curve.x) / MOST_MARKERS), len(curve.x) - 1
        marked = sorted({*range(0, last, every), last})
        axes.plot(curve.x, curve.y, line, c=color, lw=1.5, marker=marker, ms=4, markevery=marked, label=label)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
    others = [curve for curve in chart.curves if curve not in named]
    for curve in others:
        axes.plot(curve.x, curve.y, c=GRAY, lw=0.6, zorder=1)
    if others:
        axes.plot([], [], c=GRAY, lw=0.6, label=f"and {len(others):,} more")
    for loss in references.values():
        arrow = "↓ " if loss < low else "↑ " if loss > high else ""
        label = f"{arrow}{next(names)}: {loss:.3f}"
        axes.axhline(loss, label=label, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.set_xlabel(AXES[chart.axis])
    axes.set_ylabel(f"{chart.kind} loss (nats per token)")
    plain = FuncFormatter(lambda x, _: f"{x:,.6f}".rstrip("0").rstrip("."))
    axes.locator_params("x", integer=chart.axis == "steps")
    axes.xaxis.set_major_formatter(plain if chart.axis in PLAIN_AXES else EngFormatter(sep=""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    highest = max(loss for curve in chart.curves for loss in curve.y)
    cut = f"↑ cut off here: losses as high as {highest:.2f}" if highest > high else ""
    axes.set_title(cut, loc="left", fontsize=9, color=FAINT)
    legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a label does not begin a formula
    if note:
        figure.supxlabel(note, x=0.02, ha="left", fontsize=9, color=FAINT, parse_math=False)
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none"}):
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # missing glyphs are drawn as boxes
        empty = {"Software": None} if kind == "png" else dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format=kind, metadata=empty)


def shown_range(curves: Sequence[Curve], references: Mapping[str, float]) -> tuple[float, float]:
    """Return the lowest and the highest loss to show, with a margin. `curves` is not empty. High peaks, a steep first
    part of the curves, and `references` far from the curves may lie outside."""
    top = max(LEAST_PEAK, PEAK_RATIO * max(abs(curve.y[0]) for curve in curves))
    settled = [y for curve in curves for x, y in zip(curve.x, curve.y, strict=True) if x >= WARM_PART * curve.x[-1]]
    settled += [low for curve in curves for low in curve.low[-1:]]
    whole = [y for y in (*settled, *(y for curve in curves for y in curve.y)) if y <= top]
    settled = [y for y in settled if y <= top] or whole
    shown = whole if max(whole) - min(whole) <= CUT_RATIO * (max(settled) - min(settled)) else settled
    reach = max(max(shown) - min(shown), LEAST_REACH)
    shown = [*shown, *(loss for loss in references.values() if min(shown) - reach <= loss <= max(shown) + reach)]
    room = HEADROOM * (max(shown) - min(shown)) or HEADROOM * max(shown)
    return min(shown) - room, max(shown) + room
