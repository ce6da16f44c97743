"""A table of runs for a terminal: blocks of columns, each with the runs' names first, and numbered remarks below.

Text may quote a file, and the terminal is to obey none of it: names, headings and prose are made `printable` here, the
text of a cell by its maker.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.common.errors import printable
from harness.comparison.runs_table import Cell, Column, RunsTable

COLUMNS = 80
LONGEST_NAME = 34  # of a run; a longer one is cut in its middle
LONGEST_WORD = 28  # of a heading; a longer one is broken
GAP = "  "
EMPTY = "-"
REPORTED = "r"


@dataclass(frozen=True)
class Block:
    """Columns that stand side by side, as lines of cells."""

    width: int
    header: list[str]
    rows: list[str]


class _Remarks:
    """Numbers for remarks, the same for the same."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def mark(self, cell: Cell) -> str:
        reported = REPORTED if cell.is_reported else ""
        number = f"[{self.known.setdefault(cell.remark, len(self.known) + 1)}]" if cell.remark else ""
        return reported + number


def table_lines(table: RunsTable) -> Iterator[str]:
    """The table in lines of 80 columns, with what its numbers were measured on and its remarks."""
    remarks = _Remarks()
    names = cut_names([record.name for record in table.records])
    name_block = Block(max(map(len, [*names, "run"])), ["run"], names)
    blocks = [_block(column, remarks) for column in table.columns]
    yield from block_lines(name_block, blocks)
    yield ""
    if table.sorted_by and len(table.records) > 1:
        yield from paragraph(f"Sorted by {table.sorted_by}.")
    yield from _reported_lines(table)
    for column in table.columns:
        if column.about:
            yield from paragraph(f"{column.title}: on {column.about}")
    for remark, number in remarks.known.items():
        yield from paragraph(f"[{number}] {remark}", indent=4)
    for problem in [each for record in table.records for each in record.problems if each not in record.state.detail]:
        yield from paragraph(problem)
    if table.absent:
        yield from paragraph(f"No run has: {', '.join(table.absent)}")


def paragraph(text: str, indent: int = 2) -> list[str]:
    """Lines of 80 columns; those after the first are indented."""
    following = " " * indent
    return textwrap.wrap(printable(text), COLUMNS, subsequent_indent=following, break_on_hyphens=False)


def _reported_lines(table: RunsTable) -> Iterator[str]:
    sources = {record.reported.source: None for record in table.records if record.reported}
    if any(cell.is_reported for column in table.columns for cell in column.cells):
        yield from paragraph(f"{REPORTED}: reported, or worked out from it, not measured here: {'; '.join(sources)}")


def cut_names(names: Sequence[str]) -> list[str]:
    """Names cut in the middle where they are long; whole, if two of them would look the same then."""
    whole = [printable(name) for name in names]
    half = (LONGEST_NAME - 3) // 2
    cut = [name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}" for name in whole]
    return cut if len(set(cut)) == len(set(names)) else whole


def _block(column: Column, remarks: _Remarks) -> Block:
    """A column's lines: numbers to the right, text to the left, and marks behind them in a field of their own."""
    texts = [cell.text or EMPTY for cell in column.cells]
    marks = [remarks.mark(cell) for cell in column.cells]
    mark_width = max(map(len, marks))
    text_width = max(map(len, texts))
    title_words = [word[:LONGEST_WORD] for word in _title_words(column)]
    unit = [column.unit] if column.unit else []
    width = max(text_width + (1 + mark_width if mark_width else 0), *map(len, [*title_words, *unit]))
    header = [*_title_lines(column, width), *unit]
    if column.is_text:
        rows = [f"{text} {mark}".rstrip().ljust(width) for text, mark in zip(texts, marks, strict=True)]
        return Block(width, [line.ljust(width) for line in header], rows)
    rows = [
        f"{text:>{text_width}}{f' {mark:<{mark_width}}' if mark_width else ''}".rjust(width)
        for text, mark in zip(texts, marks, strict=True)
    ]
    numbers = width - (1 + mark_width if mark_width else 0)  # where they end: the heading, too, if it is as short
    end = numbers if all(len(line) <= numbers for line in header) else width
    return Block(width, [line.rjust(end) for line in header], rows)


def _title_lines(column: Column, width: int) -> list[str]:
    """The title in lines of that width; the name of a setting is broken behind its underscores."""
    words = _title_words(column)
    if not column.is_setting:
        return textwrap.wrap(" ".join(words), width)
    lines = [""]
    for part in [piece for word in words for piece in textwrap.wrap(word, width)]:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def _title_words(column: Column) -> list[str]:
    title = printable(column.title)
    return (title.replace("_", "_ ") if column.is_setting else title).split()


def block_lines(name: Block, blocks: Sequence[Block]) -> Iterator[str]:
    """The blocks in lines of at most 80 columns: as many side by side as fit, the others below, each time with the
    names first."""
    for number, line_of_blocks in enumerate(_filled(name, blocks)):
        yield from ["", *_side_by_side(line_of_blocks)] if number else _side_by_side(line_of_blocks)


def _filled(name: Block, blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """The blocks in lines of at most 80 columns, each with the names first."""
    line: list[Block] = [name]
    for block in blocks:
        if len(line) > 1 and sum(each.width + len(GAP) for each in line) + block.width > COLUMNS:
            yield line
            line = [name]
        line.append(block)
    yield line


def _side_by_side(blocks: Sequence[Block]) -> Iterator[str]:
    height = max(len(block.header) for block in blocks)
    headers = [[""] * (height - len(block.header)) + block.header for block in blocks]
    for lines in (zip(*headers, strict=True), zip(*(block.rows for block in blocks), strict=True)):
        for cells in lines:
            yield GAP.join(cell.ljust(block.width) for cell, block in zip(cells, blocks, strict=True)).rstrip()
