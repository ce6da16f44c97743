"""Contents of a comparison's chart and page: curves of runs that compare, and the table with its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.common.messages import abbreviated
from harness.comparison.against_baseline import BaselineComparison
from harness.comparison.comparability import Ground, training_ground, validation_ground
from harness.comparison.curves import AXES, KIND_WORDS, LEAST_POINTS, Axis, Curve, CurveSource, curves_of, losses_of
from harness.comparison.html_report import Answer, Cell, Column, Report
from harness.comparison.quantities import GroundOf
from harness.comparison.records import RunRecord
from harness.comparison.replicated_arms import named_arms
from harness.comparison.runs_table import Cell as TableCell
from harness.comparison.runs_table import Column as TableColumn
from harness.comparison.runs_table import RunsTable, is_number
from harness.comparison.settings import machine_of
from harness.comparison.table_fits import fit_lines
from harness.runs.metrics import Event, TrainEvent, ValidationEvent, read_metrics
from harness.runs.results import Result

KINDS: tuple[tuple[type[Event], GroundOf], ...] = (
    (ValidationEvent, validation_ground),
    (TrainEvent, training_ground),
)
# In which order a page has them, before what takes less of a reader's first look.
LOSSES = ("test_loss", "validation_loss", "best_validation_loss", "bits_per_byte", "train_loss")


@dataclass(frozen=True)
class Curves:
    """Curves that can be drawn, and a line for each reason why a run cannot."""

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
    """True if one of the runs has a curve of these losses."""
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


def chart_note(comparison: BaselineComparison | None, kind: type[Event]) -> str:
    """A note that names the verdicts' loss, if it is not the one that is drawn; else ""."""
    drawn = f"{KIND_WORDS[kind]} loss"
    if comparison is None or comparison.loss in ("", drawn):
        return ""
    return f"The verdicts are by {comparison.loss}; these curves are of the {drawn}."


def report_of(
    table: RunsTable,
    comparison: BaselineComparison | None,
    references: Mapping[str, float],
    baseline: str | None = None,
    made: str = "",
) -> Report:
    """The page of a table, with the curves that can be drawn over each axis. `baseline` is the run that the comparison
    is against; `made` says when and by which command the page was made."""
    curves = comparable_curves(table.records, baseline)
    drawn = [(axis, curves.over(axis)[0]) for axis in AXES.values()]
    charts = [(axis, found) for axis, found in drawn if len(found) == len(drawn[0][1]) and found]
    shown, alike = _arranged(table)
    rows = [
        [Cell(record.name, record.name), *(_cell(column.cells[row]) for column in shown)]
        for row, record in enumerate(table.records)
    ]
    sources = {record.reported.source: None for record in table.records if record.reported}
    return Report(
        title="Comparison of runs",
        columns=[Column("run"), *(Column(_heading(each.title, each.unit), each.about) for each in shown)],
        rows=rows,
        answer=_answer(comparison),
        below_table=_below(table, alike),
        remarks=[
            *(f"r: reported, or worked out from it, not measured here: {source}" for source in sources),
            *(f"{column.title}: on {column.about}" for column in table.columns if column.about),
            *(problem for record in table.records for problem in record.problems),
            *_unbroken(fit_lines(table)),
            *curves.over(AXES["steps"])[1],
        ],
        charts=charts,
        chart_note=chart_note(comparison, curves.kind),
        references=references if charts else {},
        provenance={record.name: _provenance(record) for record in table.records},
        made=made,
    )


def _unbroken(lines: Iterable[str]) -> list[str]:
    """Lines for a terminal as whole paragraphs: those that are indented go on from the one before."""
    whole: list[str] = []
    for line in lines:
        if whole and line.startswith(" "):
            whole[-1] += f" {line.strip()}"
        else:
            whole.append(line)
    return whole


def _answer(comparison: BaselineComparison | None) -> Answer:
    if comparison is None:
        return Answer()
    notes = [*filter(None, [comparison.closing]), *comparison.notes]
    if not comparison.verdicts:  # the title says why there are none
        return Answer([comparison.title], notes=notes)
    return Answer([verdict.sentence for verdict in comparison.verdicts], comparison.title, notes)


def _arranged(table: RunsTable) -> tuple[list[TableColumn], list[TableColumn]]:
    """The columns as a page has them: what the table is sorted by and the losses first, so that they are seen without
    scrolling, then what differs, then the rest; and those that say the same of all runs, which are not among them."""
    alike = [column for column in table.columns if _is_alike(column)]
    shown = [column for column in table.columns if column not in alike]

    def rank(column: TableColumn) -> tuple[int, int]:
        quantity = column.key.removeprefix("reported_").partition(":")[0]
        if quantity in LOSSES or column.title == table.sorted_by:
            return 0, -1 if column.title == table.sorted_by else LOSSES.index(quantity)
        return (1, 0) if column.is_setting or column.key == "state" else (2, 0)

    return sorted(shown, key=rank), alike


def _is_alike(column: TableColumn) -> bool:
    """True if a setting or fact, not a result, has the same value in all of two runs or more."""
    first, *others = column.cells
    is_result = column.lower_is_better is not None
    return bool(others) and not is_result and first.value is not None and all(cell == first for cell in others)


def _below(table: RunsTable, alike: Sequence[TableColumn]) -> list[str]:
    """Lines below the table: its sort key, columns that are alike in all runs, and quantities that no run has."""
    values = [f"{_heading(column.title, column.unit)}: {_cell(column.cells[0]).text}" for column in alike]
    return [
        f"Sorted by {table.sorted_by}." * bool(table.sorted_by and len(table.records) > 1),
        f"The same for all runs: {'; '.join(values)}." * bool(values),
        f"No run has: {', '.join(table.absent)}." * bool(table.absent),
    ]


def _heading(title: str, unit: str) -> str:
    return f"{title}, {unit}" if unit else title


def _cell(cell: TableCell) -> Cell:
    value = cell.value if is_number(cell.value) else cell.text or None
    return Cell(f"{cell.text or '-'}{' r' if cell.is_reported else ''}", value, cell.remark)


def _provenance(record: RunRecord) -> list[str]:
    """Folder, state, machine, torch and data of a run, then each result with its date."""
    named = {
        "folder": str(record.directory.path),
        "state": f"{record.state.word} {record.state.detail}".strip(),
        "machine": machine_of(record),
        "torch": record.torch,
        "data": record.dataset.get("name"),
    }
    results = [f"{result.kind} of {result.weights.checkpoint}, {result.date}" for result in record.results.of(Result)]
    return [*(f"{key}: {value}" for key, value in named.items() if value), *results]
