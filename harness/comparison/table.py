"""Table with a row for each run, as text for a terminal and as JSON. Numbers are in the same column only if they can be
compared."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.common.errors import UserError, printable
from harness.common.messages import GAP, WIDTH, abbreviated, aligned, amount_text, nearest, paragraph
from harness.common.statistics import Inconclusive
from harness.comparison.quantities import (
    COUNT,
    MONEY,
    NATS,
    SPENT,
    TRAINED,
    UNKNOWN,
    ByBasis,
    Quantity,
    by_basis,
    quantities,
)
from harness.comparison.records import RunRecord
from harness.model.config import ModelConfig
from harness.runs.budget import wanted_tokens
from harness.runs.metrics import percent_done

LOSSES = ("test_loss", "validation_loss", "bits_per_byte", "train_loss")  # default sort keys, in order of preference
LONGEST_NAME = 34  # of a run; a longer name is cut
LEAST_AROUND = 14  # characters kept around the part in which long names differ
LEAST_ROOM = 24  # for columns beside the names, however long these are
FEW_SETTINGS = 4  # if more settings differ, each run lists only its unusual values
LONGEST_SETTING = 28
LONGEST_WORD = 28  # of a heading
MOST_COLUMNS = 10  # of the table as text
HASH_CHARACTERS = 8
LARGEST_SHOWN = 1e15
PREFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
# Short headings of the columns of the table as text, the most important first. Columns that do not fit in 80 characters
# are in --json and --html only.
HEADINGS = {
    "state": "state",
    "test_loss": "test loss",
    "validation_loss": "val loss",
    "test_text_trained_on": "test text trained on %",
    "dollars": "cost $",
    "hours": "hours",
    "tokens_per_second": "tokens per second",
    "tokens": "tokens",
    "epochs": "epochs",
    "bits_per_byte": "bits per byte",
    "parameters": "params",
}


@dataclass(frozen=True)
class Cell:
    """Value of one run in one column, and its text."""

    value: Any  # None in an empty cell, or for a setting that is null
    text: str  # "" in an empty cell
    remark: str = ""  # what a reader must know about the value; in an empty cell, the reason
    is_reported: bool = False


@dataclass(frozen=True)
class Column:
    """One column of the table. `about` describes what its numbers were measured on, or is empty. `lower_is_better` is
    None if neither low nor high numbers are known to be better."""

    key: str
    title: str
    unit: str
    cells: tuple[Cell, ...]
    about: str = ""
    lower_is_better: bool | None = None
    is_setting: bool = False

    @property
    def is_text(self) -> bool:
        return not all(cell.value is None or is_number(cell.value) for cell in self.cells)

    @property
    def quantity(self) -> str:
        """Key of the quantity that the column shows: `key` without the prefix "reported_" and without a suffix such as
        ":2"."""
        return self.key.removeprefix("reported_").partition(":")[0]

    @property
    def is_alike(self) -> bool:
        """True if there are several cells, all equal and not empty, and `lower_is_better` is None."""
        first, *others = self.cells
        is_fact = self.lower_is_better is None and first.value is not None
        return bool(others) and is_fact and all(cell == first for cell in others)

    @property
    def heading(self) -> str:
        """Short heading for the table as text."""
        if self.quantity not in HEADINGS:
            unit = "" if self.unit == NATS else self.unit
            return " ".join(word[:LONGEST_WORD] for word in printable(f"{self.title} {unit}").split())
        further = next(iter(re.findall(r"\(\d+\)", self.title)), "")
        reported = "reported" if self.key.startswith("reported_") else ""
        return " ".join(filter(None, [HEADINGS[self.quantity], reported, further]))

    def sort_key(self, row: int) -> tuple[bool, Any]:
        """Return the key by which this column sorts a row. The best value comes first, or the lowest if
        `lower_is_better` is None. If `is_text` is true, values are compared as text. Rows whose value is None come
        last."""
        value = self.cells[row].value
        if value is None:
            return True, 0
        return False, _as_text(value) if self.is_text else -value if self.lower_is_better is False else value


@dataclass(frozen=True)
class RunsTable:
    """Table of runs. `absent` has the titles of the quantities that no run has."""

    records: tuple[RunRecord, ...]
    columns: tuple[Column, ...]
    absent: tuple[str, ...] = ()
    sorted_by: str = ""  # a column's title, or "name"; "" if not sorted

    @classmethod
    def of(cls, records: Sequence[RunRecord]) -> RunsTable:
        """Build the table with rows in the order of `records`."""
        found = [(quantity, _quantity_columns(quantity, records)) for quantity in quantities(records)]
        columns = [*_state_column(records), *_setting_columns(records)]
        columns += [column for _, those in found for column in those]
        return cls(tuple(records), tuple(columns), tuple(quantity.title for quantity, those in found if not those))

    def sorted(self, key: str | None) -> RunsTable:
        """Return the table sorted by `key`:

        - the key of a column: the best value comes first (see `Column.sort_key`)
        - "name": by the runs' names
        - None: by the losses, or by the runs' names if there are no losses

        Raises UserError for any other `key`.
        """
        named = {column.key: column for column in self.columns}
        by = [named[each] for each in (LOSSES if key is None else [key]) if each in named]
        order = list(range(len(self.records)))
        if key == "name" or (key is None and not by):
            order.sort(key=lambda row: self.records[row].name)
        elif not by:
            titled = next((column.key for column in self.columns if column.title == key), None)
            near = titled or nearest(str(key), [*named, "name"])
            hint = f"did you mean {near}?" if near else f"there are: name, {', '.join(named)}"
            raise UserError(f"--sort {key}: no column of this table; {hint}")
        by.sort(key=lambda column: sum(cell.value is not None for cell in column.cells) < 2)
        for column in reversed(by):
            order.sort(key=column.sort_key)
        columns = tuple(replace(each, cells=tuple(each.cells[row] for row in order)) for each in self.columns)
        records = tuple(self.records[row] for row in order)
        return RunsTable(records, columns, self.absent, by[0].title if by else "name")


def is_number(value: object) -> bool:
    """Return True for an int or float, but False for a bool, which is an int in Python."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_text(value: float, style: str) -> str:
    """Format a number. `style` is MONEY, COUNT or a format specification."""
    if abs(value) >= LARGEST_SHOWN:
        return format(value, ".2e")
    if style == MONEY:
        return amount_text(value)
    if style == COUNT:
        rounded = float(f"{value:.4g}")  # before the prefix is chosen, so that 999,999 becomes 1M and not 1000k
        size, prefix = next(((size, prefix) for size, prefix in PREFIXES if abs(rounded) >= size), (1.0, ""))
        return f"{rounded / size:.4g}{prefix}"
    return format(value, style)


# Columns


def _state_column(records: Sequence[RunRecord]) -> list[Column]:
    """Return a list of one column, the runs' states. The list is empty if all runs have finished."""
    cells = []
    for record in records:
        text, seen = str(record.state.word), record.tokens_seen
        # Beside an outdated summary, `record.train` is the summary's, not the train.json that asks for more.
        wanted = None if record.summary else wanted_tokens(record.train, record.meta.budget if record.meta else None)
        if record.state.word in ("going on", "stopped") and wanted and seen:
            text += f", {percent_done(seen, wanted)}"
        cells.append(Cell(record.state.word, text, record.state.detail))
    return [Column("state", "state", "", tuple(cells))] if any(each.value != "finished" for each in cells) else []


def machine_of(record: RunRecord) -> str | None:
    """Return the devices that the run was trained on, such as "2 x NVIDIA H100", or None if they are not known."""
    device, ranks = record.recorded("device"), record.recorded("world_size")
    return None if device is None or ranks is None else f"{ranks} x {device}"


def _setting_columns(records: Sequence[RunRecord]) -> list[Column]:
    """Return a column for each setting or other fact of training that differs between runs. A missing value does not
    count as a difference."""
    settings: list[dict[str, Any]] = []
    for record in records:
        splits = [split for split in record.dataset.values() if isinstance(split, Mapping) and "sha256" in split]
        hashes = [str(split["sha256"])[:HASH_CHARACTERS] for split in splits]
        facts = {
            "dataset_content": " ".join(hashes) or None,
            "machine": machine_of(record) or (record.reported.machine if record.reported else None),
            "torch": record.recorded("torch"),
            "trained_in": record.recorded("precision"),
            "attention": record.recorded("attention"),  # in place of train.json's, which may be "auto"
        }
        known = {**(ModelConfig.defaults() if record.model else {}), **record.model, **record.train}
        settings.append(known | {key: value for key, value in facts.items() if value is not None})
    columns = []
    for key in dict.fromkeys(key for each in settings for key in each):
        # Runs of an earlier version lack some keys.
        if len({_as_text(each[key]) for each in settings if key in each}) > 1:
            cells = [Cell(None, "", UNKNOWN)] * len(records)
            rows = [row for row, each in enumerate(settings) if key in each]
            texts = cut_names([_as_text(settings[row][key]) for row in rows], LONGEST_SETTING)
            for row, text in zip(rows, texts, strict=True):
                is_reported = key == "machine" and machine_of(records[row]) is None
                cells[row] = Cell(settings[row][key], text, "", is_reported)
            own = "setting_epochs" if key == "epochs" else key  # "epochs" is the key of a quantity
            columns.append(Column(own, key, "", tuple(cells), is_setting=True))
    return columns


def _as_text(value: object) -> str:
    """Return a setting as JSON text, or a string as it is."""
    return value if isinstance(value, str) else json.dumps(value)


def _quantity_columns(quantity: Quantity, records: Sequence[RunRecord]) -> list[Column]:
    """Return the columns of a quantity: one for the most common basis, and one for each other basis of two or more
    runs. Numbers that others reported have columns of their own."""
    values = [quantity.values(record) for record in records]
    found = by_basis(values)
    shown = {basis: runs for number, (basis, runs) in enumerate(found.items()) if number == 0 or len(runs) > 1}
    reasons = []
    for of_run in values:
        if isinstance(of_run, Inconclusive):
            reasons.append(of_run.reason)
        elif any(each.basis in shown for each in of_run):
            reasons.append(
                f"its {quantity.title} is in another column: measured on another text or task, or in another way"
            )
        else:
            alone = [f"{number_text(each.value, quantity.style)} on {each.basis.words}" for each in of_run]
            reasons.append(f"its {quantity.title} cannot be compared: {'; '.join(alone)}")
    columns = _columns(quantity, shown, reasons)
    reported = by_basis([quantity.reported(record) for record in records])
    if columns:
        theirs = _columns(quantity, reported, ["not reported"] * len(records), is_reported=True)
        theirs = [replace(each, key=f"reported_{each.key}", title=f"{each.title}, reported") for each in theirs]
        return columns + theirs
    # A run without reported.json has no number of either kind. Its remark says why it has none of its own.
    reasons = ["not reported" if record.reported else own for record, own in zip(records, reasons, strict=True)]
    return _columns(quantity, reported, reasons, is_reported=True)


def _columns(quantity: Quantity, found: ByBasis, reasons: Sequence[str], *, is_reported: bool = False) -> list[Column]:
    """Return a column for each basis in `found`, with distinct keys and titles. `reasons[row]` becomes the remark of
    the row's empty cells."""
    columns = []
    for number, (basis, measured) in enumerate(found.items(), 1):
        cells = []
        for row, reason in enumerate(reasons):
            if own := measured.get(row):
                text = f"{number_text(own.value, quantity.style)} {own.error}".rstrip()
                cells.append(Cell(own.value, text, own.remark, is_reported))
            else:
                cells.append(Cell(None, "", reason))
        key = f"{quantity.key}:{number}" if number > 1 else quantity.key
        title = f"{quantity.title} ({number})" if len(found) > 1 else quantity.title
        about = "" if is_reported else basis.words
        columns.append(Column(key, title, quantity.unit, tuple(cells), about, quantity.lower_is_better))
    return columns


# Text


def table_lines(table: RunsTable) -> Iterator[str]:
    """Yield the lines of the table for a terminal: the most important columns in one block, then the settings that
    differ, then notes and the remarks on cells."""
    remarks: dict[str, int] = {}  # the number of each remark, by its text; the cells show the number
    names = cut_names([record.name for record in table.records])
    shown = _fitting(table, max(WIDTH - max(map(len, [*names, "run"])), LEAST_ROOM))
    texts = [_texts(column, remarks) for column in shown]
    left = ["run", *(column.heading for column in shown if column.is_text)]
    yield from aligned(["run", *(column.heading for column in shown)], list(zip(names, *texts, strict=True)), left)
    yield ""
    settings = [column for column in table.columns if column.is_setting]
    if settings:
        yield "Settings that differ:"
        usual: list[str] = []
        texts = [[f"{each.title} {text.rstrip()}" for text in _texts(each, remarks)] for each in settings]
        if len(settings) > FEW_SETTINGS:
            common = [Counter(text).most_common(1)[0] for text in texts]
            usual = [text for text, runs in common if 2 * runs > len(names)]
            given = [text for text in usual if not re.search(r" (null|- \[\d+\])$", text)]
            if given:
                yield from paragraph(f"  most runs: {', '.join(given)}", indent=4)
        for row, name in enumerate(names):
            own = [text[row] for text in texts if text[row] not in usual]
            yield from paragraph(f"  {name}: {', '.join(own) or 'as most runs'}", indent=4)
    alike = [column for column in table.columns if column.is_alike]
    below = [*below_lines(table, alike)]
    others = [column.title for column in table.columns if column not in (*shown, *settings, *alike)]
    if others:
        below.append(f"More columns in --json and --html: {', '.join(others)}.")
    below += [f"{column.title}: measured on {column.about}" for column in shown if column.about]
    yield from (line for text in below for line in paragraph(text))
    for remark, number in remarks.items():
        yield from paragraph(f"[{number}] {remark}", indent=4)
    for problem in [each for record in table.records for each in record.problems if each not in record.state.detail]:
        yield from paragraph(problem)


def below_lines(table: RunsTable, alike: Sequence[Column]) -> Iterator[str]:
    """Yield texts below the table, such as its sort key and the values of the columns `alike`, which are the same in
    all runs."""
    if table.sorted_by and len(table.records) > 1:
        yield f"Sorted by {table.sorted_by}."
    if alike:
        values = [f"{each.title} {each.cells[0].text} {each.unit}".strip() for each in alike]
        yield f"The same for all runs: {', '.join(values)}."
    if any(cell.is_reported for column in table.columns for cell in column.cells):
        sources = {record.reported.source: None for record in table.records if record.reported}
        yield f"r: reported, or computed from reported figures, not measured here: {'; '.join(sources)}"
    for record in table.records:
        if record.changes:
            changes = abbreviated(record.changes, separator="; ")
            said = "changed during training, so it is not a replicate of a run without these changes"
            yield f"{record.name}: {said}: {changes}"
    if table.absent:
        yield f"No run has: {', '.join(table.absent)}."


def _fitting(table: RunsTable, room: int) -> list[Column]:
    """Return the columns that the table shows in `room` characters, the most important first."""
    order = [*HEADINGS]
    omitted = {each.key for each in (*TRAINED, *SPENT)}.difference(order)

    def importance(column: Column) -> tuple[bool, bool, int]:
        rank = order.index(column.quantity) if column.quantity in order else len(order)
        return column.key != "state", column.title != table.sorted_by, rank

    columns = [each for each in table.columns if each.quantity not in omitted or each.title == table.sorted_by]
    chosen: list[Column] = []
    for column in sorted((each for each in columns if not each.is_setting and not each.is_alike), key=importance):
        # Remarks are numbered later. Assume a number of two digits, which is enough for 99 remarks.
        texts = _texts(column, {cell.remark: 12 for cell in column.cells})
        width = len(GAP) + max(map(len, [*texts, *column.heading.split()]))
        if width <= room and len(chosen) + 1 < MOST_COLUMNS:
            chosen.append(column)
            room -= width
    return chosen


def _texts(column: Column, remarks: dict[str, int]) -> list[str]:
    """Return the text of each cell and its marks: "r" for a reported figure, and the number of its remark. A new remark
    is added to `remarks` with the next number."""
    marks = []
    for cell in column.cells:
        number = f" [{remarks.setdefault(cell.remark, len(remarks) + 1)}]" if cell.remark else ""
        marks.append(f"{' r' if cell.is_reported else ''}{number}")
    widest = max(map(len, marks))
    return [f"{cell.text or '-'}{mark:<{widest}}" for cell, mark in zip(column.cells, marks, strict=True)]


def cut_names(names: Sequence[str], most: int = LONGEST_NAME) -> list[str]:
    """Return the names with control characters escaped. Names of more than `most` characters are cut in the middle.
    Those that would then look the same are cut less, or not at all."""
    whole = [printable(name) for name in names]
    shown = {name: _cut(name, most) for name in whole}
    alike: dict[str, list[str]] = {}
    for name, cut in shown.items():
        alike.setdefault(cut, []).append(name)
    for group in alike.values():
        if len(group) > 1:
            shown |= _cut_around_differences(group, most)
    return [shown[name] for name in whole] if len({*shown.values()}) == len(shown) else whole


def _cut_around_differences(names: Sequence[str], most: int) -> dict[str, str]:
    """Return a short form of each of the distinct `names`, by name. The middle, in which they differ, is kept whole."""
    start = _shared(names)
    end = min(_shared([name[::-1] for name in names]), min(map(len, names)) - start)
    around = max(most - max(map(len, names)) + start + end, LEAST_AROUND)
    after = min(end, around // 2)
    return {
        name: _cut(name[:start], around - after) + name[start : len(name) - end] + _cut(name[len(name) - end :], after)
        for name in names
    }


def _shared(names: Sequence[str]) -> int:
    """Return the number of characters at the beginning that are the same in all names."""
    return sum(1 for _ in itertools.takewhile(lambda each: len({*each}) == 1, zip(*names, strict=False)))


def _cut(text: str, most: int) -> str:
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


# JSON


def table_json(table: RunsTable) -> dict[str, Any]:
    """Return the table as JSON: `columns` by key, and `runs` in the table's order. The `values` of a run have the
    columns' keys. The value of an empty cell is null, with a `remark` that says why."""
    return {
        "columns": {
            column.key: {
                "title": column.title,
                "unit": column.unit,
                "measured_on": column.about,
                "lower_is_better": column.lower_is_better,
            }
            for column in table.columns
        },
        "runs": [
            {
                "name": record.name,
                "path": str(record.directory.path),
                "state": record.state.word,
                "detail": record.state.detail,
                "problems": list(record.problems),
                "changes": record.changes,
                "values": {
                    column.key: {"value": cell.value, "reported": cell.is_reported, "remark": cell.remark}
                    for column in table.columns
                    for cell in [column.cells[row]]
                },
            }
            for row, record in enumerate(table.records)
        ],
    }
