"""The losses of runs along a common axis, and runs that are replicates as one curve with a band."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.common.errors import UserError
from harness.common.messages import abbreviated, nearest
from harness.runs.metrics import Event, TrainEvent, ValidationEvent
from harness.runs.throughput import cost

LEAST_POINTS = 2
# The losses of the first part of an axis are near ln(vocabulary), and would squeeze the rest into the lower edge.
WARM_PART = 0.2
HEADROOM = 0.06
CUT_RATIO = 2.0  # times the losses after that part: if the whole curves take no more height, nothing is cut off
REACH = 1.0  # times the curves' range: a reference further off would leave most of a picture empty, and is only named
LEAST_REACH = 0.1  # nats
MOST_MARKERS = 12  # along a curve
LARGEST_LOSS = 1e6  # nats per token: beyond it a run has diverged, which is left out as a loss that is not finite is
PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
KIND_WORDS: Mapping[type[Event], str] = {ValidationEvent: "validation", TrainEvent: "training"}


@dataclass(frozen=True)
class Axis:
    """An x axis of a loss curve."""

    name: str
    label: str  # with its unit
    is_counted: bool = True  # in numbers that may take a prefix such as M; hours and dollars may not

    def number(self, value: float) -> str:
        """A tick's label: 1.2M tokens, but 0.05 hours."""
        return number_text(value) if self.is_counted else plain_number(value)


def number_text(value: float) -> str:
    """A count, with a prefix where it is large: 1.2M."""
    size, prefix = next(((size, prefix) for size, prefix in PREFIXES if abs(value) >= size), (1.0, ""))
    return f"{value / size:.4g}{prefix}"


def plain_number(value: float) -> str:
    """A number without prefix and power of ten: 0.0005, or 1,250."""
    text = f"{value:,.10f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


AXES = {
    axis.name: axis
    for axis in (
        Axis("steps", "global steps"),
        Axis("tokens", "tokens seen"),
        Axis("hours", "hours", is_counted=False),
        Axis("dollars", "US dollars", is_counted=False),
        Axis("flops", "FLOPs of training"),
    )
}
DEFAULT_AXIS = "tokens"


@dataclass(frozen=True)
class CurveSource:
    """Data of one run to draw: `flops_per_token` and `price_per_hour` are None where they are not known."""

    name: str
    events: Sequence[Event]
    flops_per_token: int | None = None
    price_per_hour: float | None = None


@dataclass(frozen=True)
class Curve:
    """Losses, in nats per token, along an axis; of several runs their mean and range."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list)  # empty for a single run
    high: list[float] = field(default_factory=list)
    runs: int = 1
    kind: str = ""  # of the losses: "validation" or "training"; nothing where that is not said


def choose_axis(name: str) -> Axis:
    """Raise UserError for a name that is none of AXES."""
    if name in AXES:
        return AXES[name]
    near = nearest(name, list(AXES))
    raise UserError(
        f'--over: no axis "{name}"; there is {", ".join(AXES)}' + (f"; did you mean {near}?" if near else "")
    )


def losses_of(events: Sequence[Event], kind: type[Event]) -> list[Event]:
    """The events of a kind that have a finite loss, and one that can be drawn."""
    return [event for event in events if isinstance(event, kind) and _can_be_drawn(getattr(event, "loss", None))]


def _can_be_drawn(loss: float | None) -> bool:
    return loss is not None and abs(loss) < LARGEST_LOSS


def loss_title(curves: Sequence[Curve]) -> str:
    """Title of a loss axis: validation or training, if all curves of the chart are of that kind."""
    kinds = {curve.kind for curve in curves}
    return f"{kinds.pop()} loss (nats per token)".lstrip() if len(kinds) == 1 else "loss (nats per token)"


def curve_of(source: CurveSource, axis: Axis, kind: type[Event]) -> Curve:
    """A single run's. Raises UserError if the axis needs what is not known of the run, or nothing was measured."""
    place = _place_on(source, axis)
    points = [(place(event), float(event.loss)) for event in losses_of(source.events, kind)]  # type: ignore[attr-defined]
    if len(points) < LEAST_POINTS:
        there = f"{len(points)} {KIND_WORDS[kind]} loss{'' if len(points) == 1 else 'es'} in metrics.jsonl"
        raise UserError(f"{source.name}: nothing to draw: {there}, and a curve takes {LEAST_POINTS}")
    return Curve(source.name, [x for x, _ in points], [y for _, y in points], kind=KIND_WORDS[kind])


def _place_on(source: CurveSource, axis: Axis) -> Callable[[Event], float]:
    """A function from an event of the run to its place on the axis. Raises UserError if the price or the FLOPs per
    token are not known."""
    price, flops = source.price_per_hour, source.flops_per_token
    if axis.name == "dollars" and price is None:
        raise UserError(f'{source.name}: no "price_per_hour" in train.json, so that losses have no dollars')
    if axis.name == "flops" and flops is None:
        raise UserError(f"{source.name}: FLOPs per token are not known")
    places: dict[str, Callable[[Event], float]] = {
        "steps": lambda event: event.global_step,
        "tokens": lambda event: event.tokens_seen,
        "hours": lambda event: (event.seconds or 0.0) / 3600,
        "dollars": lambda event: cost(event.seconds or 0.0, price or 0.0),
        "flops": lambda event: event.tokens_seen * (flops or 0),
    }
    return places[axis.name]


def merged(label: str, curves: Sequence[Curve]) -> Curve:
    """Replicates as one curve: of their points, in order, as many as each has. They took them at the same steps, and so
    at the same tokens, and at about the same time."""
    if len(curves) == 1:
        return replace(curves[0], label=label)
    points = range(min(len(curve.x) for curve in curves))
    columns = [[curve.y[at] for curve in curves] for at in points]
    return Curve(
        label,
        [sum(curve.x[at] for curve in curves) / len(curves) for at in points],
        [sum(column) / len(column) for column in columns],
        [min(column) for column in columns],
        [max(column) for column in columns],
        len(curves),
        curves[0].kind,
    )


def curves_of(
    sources: Sequence[CurveSource],
    axis: Axis,
    kind: type[Event] = ValidationEvent,
    groups: Mapping[str, Sequence[str]] | None = None,
) -> tuple[list[Curve], list[str]]:
    """A curve of the losses of that kind for each group of replicates (label: names of runs), or for each run, the
    lowest last loss first; and a line for each reason why runs cannot be drawn."""
    drawn: dict[str, Curve] = {}
    problems: dict[str, list[str]] = {}
    for source in sources:
        try:
            drawn[source.name] = curve_of(source, axis, kind)
        except UserError as error:
            problems.setdefault(str(error).removeprefix(f"{source.name}: "), []).append(source.name)
    curves = []
    for label, names in (groups or {source.name: [source.name] for source in sources}).items():
        members = [drawn[name] for name in names if name in drawn]
        if members:
            curves.append(merged(label, members))
    lines = [f"{abbreviated(names)}: {reason}" for reason, names in problems.items()]
    return sorted(curves, key=lambda curve: curve.y[-1]), lines


def shown_range(curves: Sequence[Curve], references: Mapping[str, float]) -> tuple[float, float]:
    """The lowest and the highest loss to show: of the whole curves, or, where their first, steep part would take more
    than half of the height, of the rest; and of the references that are near."""
    settled = [y for curve in curves for x, y in zip(curve.x, curve.y, strict=True) if x >= WARM_PART * curve.x[-1]]
    settled += [low for curve in curves for low in curve.low[-1:]]
    whole = [*settled, *(y for curve in curves for y in curve.y)]
    shown = whole if _extent(whole) <= CUT_RATIO * _extent(settled) else settled
    reach = max(REACH * _extent(shown), LEAST_REACH)
    near = [loss for loss in references.values() if min(shown) - reach <= loss <= max(shown) + reach]
    shown = [*shown, *near]
    room = HEADROOM * _extent(shown) or HEADROOM * max(shown)
    return min(shown) - room, max(shown) + room


def _extent(losses: Sequence[float]) -> float:
    return max(losses) - min(losses)


def cut_note(curves: Sequence[Curve], top: float) -> str:
    """A note above a chart that ends at the loss `top`; "" if no curve is cut off there."""
    highest = max(y for curve in curves for y in curve.y)
    return f"↑ cut off here: the first losses go up to {highest:.2f}" if highest > top else ""


def marked_points(curve: Curve, shown: tuple[float, float]) -> list[tuple[float, float]]:
    """The points to mark, as (x, loss): evenly spaced ones and the last, as far as they lie in the range of losses that
    is shown."""
    every = max(1, len(curve.x) // MOST_MARKERS)
    chosen = sorted({*range(0, len(curve.x), every), len(curve.x) - 1})
    return [(curve.x[at], curve.y[at]) for at in chosen if shown[0] <= curve.y[at] <= shown[1]]
