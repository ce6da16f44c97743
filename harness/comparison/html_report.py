"""A comparison as one HTML file that needs nothing else: a table to sort, curves to choose from, verdicts, provenance.

The caller that fills a `Report` decides what is shown; this module renders it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.common.errors import RunError
from harness.common.files import replace_text
from harness.comparison.curves import DEFAULT_AXIS, Axis, Curve
from harness.comparison.line_drawing import LineDrawing, escaped, swatch

FOLDER = Path(__file__).parent
STYLE, SCRIPT = FOLDER / "html_report.css", FOLDER / "html_report.js"


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, its sort key (None sorts last), and, if it is empty, the reason."""

    text: str
    value: float | str | None = None
    note: str = ""


@dataclass(frozen=True)
class Column:
    """A column's heading, and what it means."""

    heading: str
    meaning: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to which was better: `verdicts` stand out, `about` says which loss they use, `notes` their basis."""

    verdicts: Sequence[str] = ()
    about: str = ""
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """All that a page shows. `rows` have a cell for each column; the first names the run. `charts` has for each axis
    the same curves; `provenance` a few lines on each run; `made` says when and how the page was."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    answer: Answer = Answer()
    below_table: Sequence[str] = ()
    remarks: Sequence[str] = ()  # why cells are empty, and what was left out
    charts: Sequence[tuple[Axis, Sequence[Curve]]] = ()
    chart_note: str = ""
    references: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Sequence[str]] = field(default_factory=dict)
    made: str = ""


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
        _answer(report.answer),
        _table(report),
        _list("Remarks", report.remarks),
        _charts(report),
        _provenance(report.provenance),
        _paragraphs("note", [report.made]),
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


def _answer(answer: Answer) -> str:
    if not answer.verdicts:
        return ""
    verdicts = _paragraphs("verdict", answer.verdicts)
    return f"<h2>Which was better</h2>{_paragraphs('', [answer.about])}{verdicts}{_paragraphs('note', answer.notes)}"


def _paragraphs(kind: str, lines: Sequence[str]) -> str:
    """The non-empty lines as <p> elements of the CSS class `kind`."""
    return "".join(f'<p class="{kind}">{escaped(line)}</p>' for line in lines if line)


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
    table = f"<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>"
    return (
        f'<h2>Runs</h2><div class="wide" tabindex="0" role="region" aria-label="Runs">{table}</div>'
        '<p class="note" id="more" hidden>The table goes on to the right: scroll it sideways.</p>'
        f"{_paragraphs('note', report.below_table)}"
    )


def _cell(cell: Cell, kind: str) -> str:
    value = "" if cell.value is None else f' data-value="{escaped(str(cell.value))}"'
    note = f' title="{escaped(cell.note)}"' if cell.note else ""
    return f'<td class="{kind}"{value}{note}>{escaped(cell.text)}</td>'


def _charts(report: Report) -> str:
    if not report.charts:
        return ""
    names = [axis.name for axis, _ in report.charts]
    first = DEFAULT_AXIS if DEFAULT_AXIS in names else names[0]
    choices = "".join(
        f'<label><input type="radio" name="axis" value="{axis.name}"{" checked" * (axis.name == first)}> '
        f"{axis.label}</label>"
        for axis, _ in report.charts
    )
    drawings = "".join(
        f'<figure data-axis="{axis.name}"{" hidden" * (axis.name != first)}>'
        f"{LineDrawing(axis, curves, report.references).svg()}</figure>"
        for axis, curves in report.charts
    )
    legend = "".join(_legend(curve, number) for number, curve in enumerate(report.charts[0][1]))
    named = ", ".join(f"{name} {loss:.3f}" for name, loss in report.references.items())
    lines = _paragraphs("note", [f"Dotted across, where the curves come near it: {named}." * bool(named)])
    return (
        f"<h2>{_losses(report)}</h2>{_paragraphs('note', [report.chart_note])}"
        f'<form class="choices" aria-label="What losses are drawn over">{choices}</form>{drawings}'
        f'<form class="legend" aria-label="Which curves are drawn">{legend}</form>{lines}'
    )


def _losses(report: Report) -> str:
    """Kind of losses that the charts show, for a heading; "Loss" if they are of several kinds or of none."""
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
