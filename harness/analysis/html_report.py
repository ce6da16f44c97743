"""A comparison as one HTML file that needs nothing else: a table to sort, curves to choose from, verdicts, provenance.

What is shown is decided by whoever fills a `Report`; here it becomes a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.curves import Axis, Curve
from harness.analysis.line_drawing import LineDrawing, escaped, swatch
from harness.common.errors import RunError
from harness.common.files import replace_text

FOLDER = Path(__file__).parent
STYLE, SCRIPT = FOLDER / "html_report.css", FOLDER / "html_report.js"


@dataclass(frozen=True)
class Cell:
    """What a cell shows, what it is sorted by (None: at the end), and, if it is empty, why."""

    text: str
    value: float | str | None = None
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column's heading, and what it means."""

    heading: str
    meaning: str = ""


@dataclass(frozen=True)
class Report:
    """All that a page shows. `rows` have a cell for each column; the first names the run. `charts` has for each axis
    the same curves; `provenance` a few lines on each run."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    verdicts: Sequence[str] = ()
    remarks: Sequence[str] = ()  # why cells are empty, and what was left out
    charts: Sequence[tuple[Axis, Sequence[Curve]]] = ()
    references: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Sequence[str]] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> None:
    """Write the page, replacing one that is there in one rename. Raises RunError if that fails."""
    try:
        replace_text(path, render(report))
    except OSError as error:
        raise RunError(f"{path}: cannot write the page: {error.strerror}") from None


def render(report: Report) -> str:
    """The page's text. Whatever comes from files is escaped: names of runs are other people's, too."""
    title = escaped(report.title)
    body = [
        f"<h1>{title}</h1>",
        _list("Which was better", report.verdicts),
        _table(report),
        _list("Remarks", report.remarks),
        _charts(report),
        _provenance(report.provenance),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>",
            STYLE.read_text(encoding="utf-8"),
            "</style></head><body>",
            *filter(None, body),
            "<script>",
            SCRIPT.read_text(encoding="utf-8"),
            "</script></body></html>",
            "",
        ]
    )


def _list(heading: str, lines: Sequence[str]) -> str:
    return f"<h2>{escaped(heading)}</h2>{_items(lines)}" if lines else ""


def _table(report: Report) -> str:
    """A heading sorts by its column; a run's box says whether its curve is drawn."""
    kinds = [
        "number" if any(isinstance(row[number].value, (int, float)) for row in report.rows) else "text"
        for number in range(len(report.columns))
    ]
    headings = "".join(
        f'<th scope="col" class="{kind}"><button type="button" data-column="{number}" '
        f'title="{escaped(column.meaning)}">{escaped(column.heading)}</button></th>'
        for number, (column, kind) in enumerate(zip(report.columns, kinds, strict=True))
    )
    rows = "".join(
        f"<tr>{''.join(_cell(cell, kind) for cell, kind in zip(row, kinds, strict=True))}</tr>" for row in report.rows
    )
    return (
        f'<h2>Runs</h2><div class="wide"><table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cell(cell: Cell, kind: str) -> str:
    value = "" if cell.value is None else f' data-value="{escaped(str(cell.value))}"'
    note = f' title="{escaped(cell.note)}"' if cell.note else ""
    return f'<td class="{kind}"{value}{note}>{escaped(cell.text)}</td>'


def _charts(report: Report) -> str:
    if not report.charts:
        return ""
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{axis.name}"{" checked" * (not number)}> {axis.label}</label>'
        for number, (axis, _) in enumerate(report.charts)
    )
    drawings = "".join(
        f'<figure data-axis="{axis.name}"{" hidden" * bool(number)}>'
        f"{LineDrawing(axis, curves, report.references).svg()}</figure>"
        for number, (axis, curves) in enumerate(report.charts)
    )
    legend = "".join(_legend(curve, number) for number, curve in enumerate(report.charts[0][1]))
    named = ", ".join(f"{escaped(name)} {loss:.3f}" for name, loss in report.references.items())
    lines = f"<p>Dotted across: {named}.</p>" if named else ""
    return (
        f"<h2>{_losses(report)}</h2>"
        f'<form class="choices" aria-label="What losses are drawn over">{choices}</form>{drawings}'
        f'<form class="legend" aria-label="Which curves are drawn">{legend}</form>{lines}'
    )


def _losses(report: Report) -> str:
    """Which losses the charts show."""
    (kind, *others) = {curve.kind for _, curves in report.charts for curve in curves}
    return escaped(f"{kind.capitalize()} loss") if kind and not others else "Loss"


def _legend(curve: Curve, number: int) -> str:
    runs = f" ({curve.runs} runs)" if curve.runs > 1 else ""
    return (
        f'<label><input type="checkbox" data-curve="{number}" checked>{swatch(number)} '
        f"{escaped(curve.label)}: {curve.y[-1]:.3f}{runs}</label>"
    )


def _provenance(provenance: Mapping[str, Sequence[str]]) -> str:
    entries = "".join(
        f"<details><summary>{escaped(name)}</summary>{_items(lines)}</details>" for name, lines in provenance.items()
    )
    return f"<h2>Where this comes from</h2>{entries}" if entries else ""


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escaped(line)}</li>' for line in lines)}</ul>"
