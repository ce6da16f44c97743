"""Charts over several runs: curves in, picture out."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from harness.common.errors import printable
from harness.common.files import atomic_file
from harness.comparison.curves import Axis, Curve, cut_note, loss_title, marked_points, shown_range

matplotlib.use("Agg")  # machines without a display

# Three shades that differ in lightness, four ways to draw a line: twelve curves are told apart in greyscale, too.
SHADES = ("#1b2a49", "#c8553d", "#5fa8a0")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D")
FAINT = "#555555"
GAP = 0.032  # between the labels at the right edge, as a part of the height
LABEL = 32  # characters that find room there


def draw_curves(
    curves: Sequence[Curve], axis: Axis, picture: Path, references: Mapping[str, float], note: str = ""
) -> None:
    """Draw the curves, each named at its end, with a dotted line for each reference (label: loss); one that is far off
    is only named, with an arrow. Replicates have a band from the lowest to the highest. `note` stands below. A picture
    that is there is replaced in one rename."""
    figure, axes = plt.subplots(figsize=(10, 6), dpi=150)
    figure.subplots_adjust(left=0.08, right=0.72, top=0.95, bottom=0.12)
    try:
        _dress(axes, curves, axis, references)
        for number, curve in enumerate(curves):
            _draw(axes, curve, number)
        _name(axes, curves, references)
        figure.text(0.08, 0.015, note, fontsize=9, color=FAINT, parse_math=False)
        drawn = io.BytesIO()
        with warnings.catch_warnings():  # of letters that the font lacks: they are drawn as boxes
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            figure.savefig(drawn, format="png", metadata={"Software": None})
    finally:
        plt.close(figure)
    with atomic_file(picture.resolve()) as draft:
        draft.write_bytes(drawn.getvalue())


def style(number: int) -> tuple[str, str, str]:
    """Colour, line and marker of a curve by its number; they repeat after twelve."""
    line = number // len(SHADES) % len(LINES)
    return SHADES[number % len(SHADES)], LINES[line], MARKERS[line]


def _draw(axes: Axes, curve: Curve, number: int) -> None:
    colour, line, marker = style(number)
    axes.plot(curve.x, curve.y, color=colour, linestyle=line, lw=1.5)
    # Markers of their own, so that one on the frame's edge is whole.
    for x, loss in marked_points(curve, axes.get_ylim()):
        axes.plot(x, loss, color=colour, marker=marker, markersize=4, clip_on=False, zorder=3)
    if curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)


def _dress(axes: Axes, curves: Sequence[Curve], axis: Axis, references: Mapping[str, float]) -> None:
    axes.set_xlabel(axis.label)
    axes.set_ylabel(loss_title(curves))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: axis.number(value)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_xlim(left=0, right=max(curve.x[-1] for curve in curves))
    axes.set_ylim(*shown_range(curves, references))
    note = cut_note(curves, axes.get_ylim()[1])
    axes.text(0.005, 1.012, note, transform=axes.transAxes, fontsize=9, color=FAINT, va="bottom")
    for loss in references.values():
        axes.axhline(loss, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))


def _name(axes: Axes, curves: Sequence[Curve], references: Mapping[str, float]) -> None:
    """Write each label at the right edge, with a line from the end of its curve, as near as the others leave room; that
    of a reference beyond the picture at its edge, with an arrow."""
    bottom, top = axes.get_ylim()
    right = axes.get_xlim()[1]
    labels = [
        (curve.y[-1], _label(curve), curve.x[-1] / right, *style(number)[:2]) for number, curve in enumerate(curves)
    ]
    for name, loss in references.items():
        arrow = "↓ " if loss < bottom else "↑ " if loss > top else ""
        labels.append((loss, f"{arrow}{printable(name)}: {loss:.3f}", 1.0, FAINT, ":"))
    labels.sort()
    heights = spread([min(1.0, max(0.0, (loss - bottom) / (top - bottom))) for loss, *_ in labels], GAP)
    for height, (loss, text, end, colour, line) in zip(heights, labels, strict=True):
        own = (loss - bottom) / (top - bottom)
        place: dict[str, Any] = {"transform": axes.transAxes, "color": colour}
        if 0 <= own <= 1:
            if end < 1:  # the curve ends before the others
                axes.plot([end, 1.0], [own, own], linestyle=(0, (1, 4)), linewidth=0.8, **place)
            axes.plot([1.0, 1.02, 1.06], [own, height, height], linestyle=line, linewidth=1.2, clip_on=False, **place)
        axes.text(1.07, height, text, fontsize=9, va="center", parse_math=False, **place)  # $ is no formula here


def _label(curve: Curve) -> str:
    name = printable(curve.label)
    loss = f": {curve.y[-1]:.3f}" + (f" ({curve.runs} runs)" if curve.runs > 1 else "")
    room = LABEL - len(loss)
    return (name if len(name) <= room else f"{name[: room - 1]}…") + loss


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Places in ascending order, moved apart to at least `gap`, each as little as that takes: neighbours that would
    overlap become a block around their middle."""
    blocks: list[tuple[float, int]] = []  # middle, and how many
    for place in places:
        blocks.append((place, 1))
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            (above, many), (below, some) = blocks.pop(), blocks.pop()
            blocks.append(((above * many + below * some) / (many + some), many + some))
    return [middle + gap * (at - (count - 1) / 2) for middle, count in blocks for at in range(count)]
