"""docs/RELIABILITY.md: the table of faults that were injected, made of what the fault tests saw."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INTRODUCTION = """# Faults survived

Every row is a test that injects the fault into the real `ddp_train.py`, with two or more processes unless the row says
otherwise, and compares what is left with a run that nothing happened to. The table is written by those tests:

    uv run pytest -m fault --exhaustive --reliability=docs/RELIABILITY.md

Exhaustive means: a kill and an I/O error at every file operation of a save. Where two things multiply (the step of a
stop and the number of ranks, an operation and what a full disk has no room for) not each pair is taken. Without
`--exhaustive` the same tests take some of the places, and are a part of every test run. Sections whose
tests are not run (`uv run pytest tests/faults/test_kills.py --exhaustive …`) stay as they are.

All of this was seen on CPUs. "Bit for bit" holds there; on GPUs some kernels add in an order that changes from run to
run (the backward passes of attention and of the embedding use atomic additions), so that no two runs are equal to the
last bit, whether or not one of them was stopped; `"deterministic": true` in train.json keeps to operations that add in
a fixed order, which has not been tried on a GPU yet.
"""


@dataclass(frozen=True)
class Row:
    """One fault: what was done to the program, how many times or in how many places, and what happened."""

    module: str
    fault: str
    injected: str
    times: int
    outcome: str


def sections_of(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Heading (the docstring's first line) and faults' names, in order, of each module with fault tests."""
    sections = {}
    for path in sorted(folder.glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [name for node in tree.body if isinstance(node, ast.FunctionDef) for name in _faults(node)]
        if names:
            heading = (ast.get_docstring(tree) or path.stem).splitlines()[0].rstrip(".")
            sections[path.stem] = (heading, names)
    return sections


def _faults(function: ast.FunctionDef) -> list[str]:
    calls = [node for node in function.decorator_list if isinstance(node, ast.Call)]
    marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.fault"]
    return [str(ast.literal_eval(mark.args[0])) for mark in marks]


def render(rows: Sequence[Row], sections: dict[str, tuple[str, list[str]]], caption: str, before: str = "") -> str:
    """The document. Sections whose tests have not all been run, and passed, are taken from `before`, an earlier one.

    Raises ValueError for a row with an empty cell.
    """
    text = [INTRODUCTION]
    for module, (heading, faults) in sections.items():
        own = [row for row in rows if row.module == module]
        complete = {row.fault for row in own} == set(faults)
        text.append(_section(heading, faults, own, caption) if complete else _section_of(before, heading))
    return "\n".join(filter(None, text))


def _section(heading: str, faults: Sequence[str], rows: Sequence[Row], caption: str) -> str:
    lines = [f"## {heading}\n", f"{caption}\n", "| fault | injected | times | what happened |", "|---|---|---|---|"]
    for fault in faults:
        lines += [_line(row) for row in rows if row.fault == fault]
    return "\n".join(lines) + "\n"


def _section_of(document: str, heading: str) -> str:
    for section in document.split("\n## ")[1:]:
        if section.splitlines()[0] == heading:
            return f"## {section.rstrip()}\n"
    return ""


def _line(row: Row) -> str:
    cells = [row.fault, row.injected, f"{row.times:,}" if row.times else "", row.outcome]
    if not all(cell.strip() for cell in cells):
        raise ValueError(f"{row.module}: the fault {row.fault!r} has an empty cell")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
