"""Curves as SVG for a page: its style sheet gives them their colours, light or dark."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.common.errors import printable
from harness.comparison.curves import Axis, Curve, cut_note, loss_title, marked_points, shown_range

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 88, 12, 32, 56
TITLE = 20  # of the losses' axis: how far from the left edge its line of text stands
TICKS = 5
SHADES, DASHES = 3, ("", "9 4", "9 3 2 3", "2 3")  # as in charts.py: twelve that differ without colour, too
MARKER = 3  # the radius of a point on a curve


def ticks(low: float, high: float) -> list[float]:
    """About TICKS round numbers between the two."""
    if not high > low:
        return [low]
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step)
    return [step * at for at in range(first, math.floor(high / step + 1e-9) + 1)]


def stroke(number: int) -> str:
    """The attributes of a curve's line: its class names the shade, and dashes tell it from others of that shade."""
    dash = DASHES[number // SHADES % len(DASHES)]
    return f'class="line shade{number % SHADES}"' + (f' stroke-dasharray="{dash}"' if dash else "")


def swatch(number: int) -> str:
    """A piece of a curve's line, for the legend."""
    return f'<svg class="swatch" viewBox="0 0 44 10" aria-hidden="true"><path {stroke(number)} d="M1 5H43"/></svg>'


def escaped(text: str) -> str:
    """Text from files, escaped for HTML content or attributes and `printable`: it can neither be tags nor move other
    text."""
    return html.escape(printable(text))


@dataclass(frozen=True)
class LineDrawing:
    """Curves over an axis, with a line across for each reference loss that is near them."""

    axis: Axis
    curves: Sequence[Curve]
    references: Mapping[str, float]

    def svg(self) -> str:
        """An element for a page; each curve is a group with its number as `data-curve`."""
        low, high = shown_range(self.curves, self.references)
        right = max(curve.x[-1] for curve in self.curves)
        parts = [self._grid(low, high, right)]
        parts += [self._curve(number, curve, (low, high), right) for number, curve in enumerate(self.curves)]
        parts += [
            self._reference(name, loss, (low, high)) for name, loss in self.references.items() if low <= loss <= high
        ]
        title = html.escape(f"{self._losses} over {self.axis.label}")
        frame = f"M{LEFT} {TOP}H{WIDTH - RIGHT}V{HEIGHT - BOTTOM}H{LEFT}Z"
        clip = f'<clipPath id="frame-{self.axis.name}"><path d="{frame}"/></clipPath>'
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{clip}{"".join(parts)}</svg>'

    @property
    def _losses(self) -> str:
        title = loss_title(self.curves)
        return title[:1].upper() + title[1:]

    def _x(self, value: float, right: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value / right if right else 0.0)

    def _y(self, loss: float, shown: tuple[float, float]) -> float:
        low, high = shown
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    def _grid(self, low: float, high: float, right: float) -> str:
        base = HEIGHT - BOTTOM
        lines = [f'<path class="frame" d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}"/>']
        for loss in ticks(low, high):
            y = self._y(loss, (low, high))
            lines.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            lines.append(f'<text class="up" x="{LEFT - 8}" y="{y:.1f}">{loss:.4g}</text>')
        for value in ticks(0, right):
            x, number = self._x(value, right), self.axis.number(value)
            lines.append(f'<text class="along" x="{x:.1f}" y="{base + 20}">{number}</text>')
        lines.append(f'<text x="{LEFT}" y="{TOP - 10}">{cut_note(self.curves, high)}</text>')
        lines.append(f'<text class="along" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">{self.axis.label}</text>')
        turned = f'transform="translate({TITLE} {(TOP + base) / 2}) rotate(-90)"'
        lines.append(f'<text class="along" {turned}>{html.escape(self._losses)}</text>')
        return "".join(lines)

    def _curve(self, number: int, curve: Curve, shown: tuple[float, float], right: float) -> str:
        def path(losses: Sequence[float], places: Sequence[float]) -> str:
            pairs = zip(places, losses, strict=True)
            return "L".join(f"{self._x(x, right):.1f} {self._y(y, shown):.1f}" for x, y in pairs)

        band = ""
        if curve.low:
            around = f"M{path(curve.high, curve.x)}L{path(curve.low[::-1], curve.x[::-1])}Z"
            band = f'<path class="band shade{number % SHADES}" d="{around}"/>'
        title = f"<title>{escaped(curve.label)}: {curve.y[-1]:.3f}</title>"
        line = f'<path {stroke(number)} d="M{path(curve.y, curve.x)}"/>'
        clipped = f'<g clip-path="url(#frame-{self.axis.name})">{band}{line}</g>'
        dots = "".join(  # not clipped: those at the edge are whole
            f'<circle class="dot shade{number % SHADES}" r="{MARKER}" '
            f'cx="{self._x(x, right):.1f}" cy="{self._y(loss, shown):.1f}"/>'
            for x, loss in marked_points(curve, shown)
        )
        return f'<g data-curve="{number}">{title}{clipped}{dots}</g>'

    def _reference(self, name: str, loss: float, shown: tuple[float, float]) -> str:
        y = self._y(loss, shown)
        title = f"<title>{escaped(name)}: {loss:.3f}</title>"
        return f'<path class="reference" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}">{title}</path>'
