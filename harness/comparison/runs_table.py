"""Runs side by side: a row for each, and columns in which only like things stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.common.errors import UserError, printable
from harness.common.messages import nearest
from harness.common.units import amount_text
from harness.comparison.comparability import Ground, Group, Measured, Measurement, Missing, comparable_groups
from harness.comparison.progress import percent_done
from harness.comparison.quantities import EVERYWHERE, MONEY, SPENT, TRAINED, Quantity
from harness.comparison.records import RunRecord
from harness.comparison.result_quantities import RESULTS, benchmark_quantities, training_benchmark_quantities
from harness.comparison.settings import NOT_RECORDED, as_text, differing_keys, machine_of, settings_of
from harness.runs.budget import wanted_tokens

# By which runs are sorted unless asked otherwise.
LOSSES = ("test_loss", "validation_loss", "bits_per_byte", "train_loss")
# Columns that are left out where they say the same as another: best losses that are the last ones, and the parameters
# that a token goes through where no model has experts.
REPEATS = {"best_validation_loss": "validation_loss", "active_parameters": "parameters"}
LONGEST_SETTING = 28  # characters
LARGEST_SHOWN = 1e15


@dataclass(frozen=True)
class Cell:
    """A value and how it is written; None and nothing where there is none. `remark` says why, or what must be known."""

    value: Any
    text: str
    remark: str = ""
    is_reported: bool = False


@dataclass(frozen=True)
class Column:
    """`about` says what its numbers were measured on, if that matters; `lower_is_better` is None where neither is."""

    key: str
    title: str
    unit: str
    cells: tuple[Cell, ...]
    about: str = ""
    lower_is_better: bool | None = None
    is_text: bool = False
    is_setting: bool = False

    def reordered(self, order: Sequence[int]) -> Column:
        return replace(self, cells=tuple(self.cells[row] for row in order))

    @property
    def filled(self) -> int:
        return sum(cell.value is not None for cell in self.cells)


@dataclass(frozen=True)
class RunsTable:
    """Table of runs; `absent` names the quantities that no run has."""

    records: tuple[RunRecord, ...]
    columns: tuple[Column, ...]
    absent: tuple[str, ...] = ()
    sorted_by: str = ""  # a column's title, or nothing

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> RunsTable:
        """Build the table with rows in the order of `records`."""
        columns = [*_state_column(records), *_setting_columns(records)]
        absent = []
        benchmarks = (*benchmark_quantities(records), *training_benchmark_quantities(records))
        for quantity in (*TRAINED, *RESULTS, *benchmarks, *SPENT):
            found = _quantity_columns(quantity, records)
            columns += found
            if not found and quantity.key not in REPEATS:
                absent.append(quantity.title)
        return cls(tuple(records), tuple(_without_repetition(columns)), tuple(absent))

    def sorted(self, key: str | None) -> RunsTable:
        """Sort by a column, the best or lowest first and empty cells last, or by "name"; None: by the first of LOSSES
        that two runs have, and those that lack it by the next. Raises UserError naming the nearest for a key of no
        column."""
        if key == "name":
            order = sorted(range(len(self.records)), key=lambda row: self.records[row].name)
            return self._reordered(order, "name")
        if key is not None:
            column = self._column(key)
            return self._reordered(_order(column, range(len(self.records))), column.title)
        losses = [column for name in LOSSES for column in self.columns if column.key == name]
        losses.sort(key=lambda column: column.filled < 2)
        order = list(range(len(self.records)))
        for column in reversed(losses):
            order = _order(column, order)
        return self._reordered(order, losses[0].title) if losses else self.sorted("name")

    def _column(self, key: str) -> Column:
        keys = [column.key for column in self.columns]
        if key in keys:
            return self.columns[keys.index(key)]
        titled = next((column.key for column in self.columns if column.title == key), None)
        near = titled or nearest(key, [*keys, "name"])
        hint = f"did you mean {near}?" if near else f"there are: name, {', '.join(keys)}"
        raise UserError(f"--sort {key}: no column of this table; {hint}")

    def _reordered(self, order: Sequence[int], by: str) -> RunsTable:
        columns = tuple(column.reordered(order) for column in self.columns)
        return RunsTable(tuple(self.records[row] for row in order), columns, self.absent, by)


def is_number(value: object) -> bool:
    """True for numbers except True and False, which are numbers to Python."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(column: Column, rows: Sequence[int]) -> list[int]:
    """The rows with the best or lowest value first; those without one last; equals, as these too, as they were."""
    values = {row: column.cells[row].value for row in rows}
    there = [row for row in rows if values[row] is not None]
    if all(is_number(values[row]) for row in there):
        sign = -1 if column.lower_is_better is False else 1
        there.sort(key=lambda row: sign * values[row])
    else:
        there.sort(key=lambda row: as_text(values[row]))
    return there + [row for row in rows if values[row] is None]


def _state_column(records: Sequence[RunRecord]) -> list[Column]:
    """Column of the runs' states; none if all have finished."""
    if all(record.state.word == "finished" for record in records):
        return []
    cells = [Cell(record.state.word, _state_text(record), record.state.detail) for record in records]
    return [Column("state", "state", "", tuple(cells), is_text=True)]


def _state_text(record: RunRecord) -> str:
    wanted, seen = wanted_tokens(record.train, record.meta.budget if record.meta else None), record.tokens_seen
    if record.state.word in ("going on", "stopped") and wanted and seen:
        return f"{record.state.word}, {percent_done(seen, wanted)}"
    return record.state.word


def _setting_columns(records: Sequence[RunRecord]) -> list[Column]:
    settings = [settings_of(record) for record in records]
    for row, record in enumerate(records):
        if machine_of(record) is None and record.reported is not None:
            settings[row] = {**settings[row], "machine": record.reported.machine}
    columns = []
    for key in differing_keys(settings):
        cells = [_setting_cell(each, key, record) for each, record in zip(settings, records, strict=True)]
        is_text = not all(cell.value is None or is_number(cell.value) for cell in cells)
        columns.append(Column(key, key, "", tuple(cells), is_text=is_text, is_setting=True))
    return columns


def _setting_cell(settings: Mapping[str, Any], key: str, record: RunRecord) -> Cell:
    if key not in settings:
        return Cell(None, "", NOT_RECORDED)
    text = printable(as_text(settings[key]))
    if len(text) > LONGEST_SETTING:
        half = (LONGEST_SETTING - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    return Cell(settings[key], text, is_reported=key == "machine" and machine_of(record) is None)


def _quantity_columns(quantity: Quantity, records: Sequence[RunRecord]) -> list[Column]:
    """A column for each group of two or more runs that compare, or else for the first; and those of what others have
    reported."""
    measured = quantity.measure(records)
    groups = comparable_groups(measured)
    shown = [group for number, group in enumerate(groups) if number == 0 or len(group.members) > 1]
    columns = _numbered([_measured_column(quantity, group, shown, measured) for group in shown])
    reported = _numbered(_reported_columns(quantity, records, [] if columns else measured))
    if columns:
        reported = [replace(each, key=f"reported_{each.key}", title=f"{each.title}, reported") for each in reported]
    return columns + reported


def _measured_column(quantity: Quantity, group: Group, shown: Sequence[Group], measured: Sequence[Measured]) -> Column:
    cells = []
    for row, of_run in enumerate(measured):
        member = group.members.get(row)
        if member is not None:
            cells.append(_number(quantity, member))
        elif isinstance(of_run, Missing):
            cells.append(Cell(None, "", of_run.reason))
        else:
            cells.append(Cell(None, "", _elsewhere(quantity, of_run, shown)))
    return _column(quantity, group.ground, cells)


def _elsewhere(quantity: Quantity, of_run: Sequence[Measurement], shown: Sequence[Group]) -> str:
    """The reason why a run that has measurements has none in a group's column."""
    if any(measurement.ground == group.ground for measurement in of_run for group in shown):
        return f"its {quantity.title} is in another column: measured on other ground"
    values = "; ".join(
        f"{number_text(measurement.value, quantity.style)} on "
        f"{measurement.ground.words_beside(group.ground for group in shown)}"
        for measurement in of_run
    )
    return f"its {quantity.title} does not compare: {values}"


def _reported_columns(quantity: Quantity, records: Sequence[RunRecord], measured: Sequence[Measured]) -> list[Column]:
    """Columns of the reported values. `measured`, where there is no other column of this quantity, has the reasons why
    no run has a number of its own: an empty cell of a run without reported values shows that reason."""
    reported = [_reported(quantity, record) for record in records]
    reasons = ["not reported"] * len(records)
    for row, (record, own) in enumerate(zip(records, measured, strict=False)):
        if record.reported is None and isinstance(own, Missing):
            reasons[row] = own.reason
    columns = []
    for group in comparable_groups(reported):
        members = [group.members.get(row) for row in range(len(records))]
        cells = [
            _number(quantity, each, is_reported=True) if each else Cell(None, "", reason)
            for each, reason in zip(members, reasons, strict=True)
        ]
        columns.append(_column(quantity, group.ground, cells))
    return columns


def _reported(quantity: Quantity, record: RunRecord) -> Measured:
    if record.reported is None or quantity.report is None:
        return Missing("not reported")
    value = quantity.report(record.reported, record)
    if value is None:
        return Missing("not reported")
    ground = Ground(("reported", record.reported.source), record.reported.source) if quantity.is_score else EVERYWHERE
    return [Measurement(value, ground)]


def number_text(value: float, style: str) -> str:
    """A number in a format, or as money; a power of ten if it is too large to be meant, since it would take hundreds of
    digits."""
    if style == MONEY and abs(value) < LARGEST_SHOWN:
        return amount_text(value)
    return format(value, style if abs(value) < LARGEST_SHOWN else ".2e")


def _number(quantity: Quantity, measurement: Measurement, *, is_reported: bool = False) -> Cell:
    text = f"{number_text(measurement.value, quantity.style)} {measurement.error}".rstrip()
    return Cell(measurement.value, text, measurement.remark, is_reported)


def _column(quantity: Quantity, ground: Ground, cells: Sequence[Cell]) -> Column:
    about = "" if any(cell.is_reported for cell in cells) else ground.words
    return Column(quantity.key, quantity.title, quantity.unit, tuple(cells), about, quantity.lower_is_better)


def _numbered(columns: Sequence[Column]) -> list[Column]:
    """Columns of one quantity with distinct keys and titles, numbered if there are several."""
    if len(columns) < 2:
        return list(columns)
    return [
        replace(column, key=f"{column.key}:{number}" if number > 1 else column.key, title=f"{column.title} ({number})")
        for number, column in enumerate(columns, 1)
    ]


def _without_repetition(columns: Sequence[Column]) -> list[Column]:
    by_key = {column.key: column for column in columns}
    return [
        column for column in columns if column.key not in REPEATS or not _same(column, by_key.get(REPEATS[column.key]))
    ]


def _same(one: Column, other: Column | None) -> bool:
    return other is not None and [cell.text for cell in one.cells] == [cell.text for cell in other.cells]
