"""What a comparison gives to its chart and its page: curves of runs that compare, and the table with its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.comparability import Ground, training_ground, validation_ground
from harness.analysis.curves import AXES, LEAST_POINTS, Axis, Curve, CurveSource, curves_of, losses_of
from harness.analysis.html_report import Cell, Column, Report
from harness.analysis.quantities import GroundOf
from harness.analysis.records import RunRecord
from harness.analysis.replicated_arms import named_arms
from harness.analysis.runs_table import Cell as TableCell
from harness.analysis.runs_table import RunsTable, is_number
from harness.analysis.settings import machine_of
from harness.common.messages import abbreviated
from harness.runs.metrics import Event, TrainEvent, ValidationEvent, read_metrics

KINDS: tuple[tuple[type[Event], GroundOf], ...] = (
    (ValidationEvent, validation_ground),
    (TrainEvent, training_ground),
)


@dataclass(frozen=True)
class Curves:
    """What can be drawn, and a line for each reason why a run cannot."""

    kind: type[Event]  # of validation or of training: which losses all curves are of
    sources: list[CurveSource]
    groups: dict[str, Sequence[str]]  # by the label of a curve the runs that it is of
    problems: list[str]

    def over(self, axis: Axis) -> tuple[list[Curve], list[str]]:
        """The curves along an axis, and all reasons for what is not among them."""
        curves, problems = curves_of(self.sources, axis, self.kind, self.groups)
        return curves, [*self.problems, *problems]


def comparable_curves(records: Sequence[RunRecord], baseline: str | None = None) -> Curves:
    """The losses of the runs that were measured on the text that most of them were: their validation losses, or, where
    no run has enough of those, their training losses. Replicates that have finished are one curve, which is called as
    in the verdicts against the run `baseline`."""
    sources = {record.name: _source(record) for record in records}
    kind, ground_of = next((each for each in KINDS if _can_be_drawn(records, sources, each)), KINDS[0])
    grounds = {record.name: ground_of(record) for record in records}
    main = _most_common([ground for ground in grounds.values() if ground is not None])
    if main is None:
        return Curves(kind, [], {}, ["the text that losses were measured on is not recorded"])
    there = [record for record in records if grounds[record.name] == main]
    problems = _why_left_out([record for record in records if grounds[record.name] != main], kind, main)
    arms = named_arms(records, baseline)
    alone: dict[str, Sequence[str]] = {record.name: [record.name] for record in there if not arms.arm_of(record.name)}
    groups: dict[str, Sequence[str]] = {**arms.runs, **alone}
    return Curves(kind, [sources[record.name] for record in there], groups, problems)


def _can_be_drawn(
    records: Sequence[RunRecord], sources: Mapping[str, CurveSource], kind: tuple[type[Event], GroundOf]
) -> bool:
    """Whether one of the runs has a curve of these losses."""
    events, ground_of = kind
    return any(
        ground_of(record) is not None and len(losses_of(sources[record.name].events, events)) >= LEAST_POINTS
        for record in records
    )


def _why_left_out(records: Sequence[RunRecord], kind: type[Event], main: Ground) -> list[str]:
    """A line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for record in records:
        if record.state.word == "never trained":
            reason = "never trained"
        elif kind is ValidationEvent and record.train and record.train.get("validation_interval") is None:
            reason = "trained without validation, and validation losses are drawn"
        else:
            reason = f"not known to have losses on {main.words}"
        by_reason.setdefault(reason, []).append(record.name)
    return [f"{abbreviated(names)}: in no chart: {reason}" for reason, names in by_reason.items()]


def _most_common(grounds: Sequence[Ground]) -> Ground | None:
    return max(grounds, key=grounds.count, default=None)


def _source(record: RunRecord) -> CurveSource:
    path, price = record.directory.metrics, record.train.get("price_per_hour")
    return CurveSource(
        name=record.name,
        events=last_training(read_metrics(path)) if path.is_file() else [],
        flops_per_token=record.shape.flops_per_token if record.shape else None,
        price_per_hour=price if isinstance(price, int | float) else None,
    )


def last_training(events: Sequence[Event]) -> list[Event]:
    """The events behind the last one that begins again at an earlier step."""
    starts = [at for at in range(1, len(events)) if events[at].global_step < events[at - 1].global_step]
    return list(events[starts[-1] if starts else 0 :])


def report_of(
    table: RunsTable, verdicts: Sequence[str], references: Mapping[str, float], baseline: str | None = None
) -> Report:
    """The page of a table, with the curves that can be drawn over each axis. `baseline` is the run that the verdicts
    are against."""
    curves = comparable_curves(table.records, baseline)
    drawn = [(axis, curves.over(axis)[0]) for axis in AXES.values()]
    charts = [(axis, found) for axis, found in drawn if len(found) == len(drawn[0][1]) and found]
    columns = [Column("run"), *(Column(_heading(each.title, each.unit), each.about) for each in table.columns)]
    rows = [
        [Cell(record.name, record.name), *(_cell(column.cells[row]) for column in table.columns)]
        for row, record in enumerate(table.records)
    ]
    sources = {record.reported.source: None for record in table.records if record.reported}
    return Report(
        title="Comparison of runs",
        columns=columns,
        rows=rows,
        verdicts=verdicts,
        remarks=[
            *(f"r: reported, or worked out from it, not measured here: {source}" for source in sources),
            *(f"{column.title}: on {column.about}" for column in table.columns if column.about),
            *(problem for record in table.records for problem in record.problems),
            *curves.over(AXES["steps"])[1],
        ],
        charts=charts,
        references=references if charts else {},
        provenance={record.name: _provenance(record) for record in table.records},
    )


def _heading(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit else title


def _cell(cell: TableCell) -> Cell:
    value = cell.value if is_number(cell.value) else cell.text or None
    return Cell(f"{cell.text or '-'}{' r' if cell.is_reported else ''}", value, cell.remark)


def _provenance(record: RunRecord) -> list[str]:
    """Where it lies, on what it was trained, and what was measured of it when."""
    named = {
        "folder": str(record.directory.path),
        "state": f"{record.state.word} {record.state.detail}".strip(),
        "machine": machine_of(record),
        "torch": record.torch,
        "data": record.dataset.get("name"),
    }
    results = [f"{result.kind} of {result.weights.checkpoint}, {result.date}" for result in record.results.found]
    return [*(f"{key}: {value}" for key, value in named.items() if value), *results]
