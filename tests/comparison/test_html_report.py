"""The page of a comparison: escaped, self-contained, and driven in a browser where the machine has one."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.comparison.curves import AXES, Curve, number_text
from harness.comparison.html_report import Answer, Cell, Column, Report, render, write_report
from harness.comparison.line_drawing import LineDrawing, ticks

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((found for name in BROWSERS if (found := shutil.which(name))), None)
# As root, without a display, and without asking for anything on a network.
BROWSER_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--dump-dom", "--virtual-time-budget=2000"),
)
CURVES = [Curve("fast", [0, 5, 10], [5, 4, 3]), Curve("<slow>", [0, 5, 10], [5, 4.5, 4], [5, 4, 3.5], [5, 5, 4.5], 3)]
REPORT = Report(
    title="Two & more",
    columns=[Column("run"), Column("loss", "nats per token")],
    rows=[
        [Cell("fast", "fast"), Cell("10.0", 10.0)],
        [Cell("<slow>", "<slow>"), Cell("9.5", 9.5)],
        [Cell("none", "none"), Cell("–", None, "no result")],
    ],
    answer=Answer(["fast is better than <slow>"], "Against <slow>, by test loss:", ["by <two> seeds"]),
    below_table=["Sorted by loss."],
    remarks=["none: no result"],
    charts=[(AXES["steps"], CURVES), (AXES["tokens"], CURVES), (AXES["hours"], CURVES)],
    chart_note="The verdicts are by test loss.",
    references={"a reference": 3.5},
    provenance={"fast": ["torch 2.15.0"]},
    made="Made today by: compare_runs.py '<a>'",
)


def test_names_of_runs_are_text() -> None:
    page = render(REPORT)
    assert "<slow>" not in page
    assert page.count("&lt;slow&gt;") >= 4
    assert "<h1>Two &amp; more</h1>" in page


def test_the_verdict_stands_out_and_the_rest_in_its_place() -> None:
    page = render(REPORT)
    parts = [
        '<p class="">Against &lt;slow&gt;, by test loss:</p>',
        '<p class="verdict">fast is better than &lt;slow&gt;</p>',
        '<p class="note">by &lt;two&gt; seeds</p>',
        "<table>",
        '<p class="note">Sorted by loss.</p>',
        '<p class="note">The verdicts are by test loss.</p>',
        '<p class="note">Made today by: compare_runs.py &#x27;&lt;a&gt;&#x27;</p>',
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_tokens_are_the_axis_at_first() -> None:
    assert re.findall('value="([a-z]*)" checked', render(REPORT)) == ["tokens"]
    assert re.findall('<figure data-axis="([a-z]*)">', render(REPORT)) == ["tokens"]
    hours_only = Report("t", REPORT.columns, REPORT.rows, charts=[(AXES["hours"], CURVES)])
    assert re.findall('value="([a-z]*)" checked', render(hours_only)) == ["hours"]


def test_a_drawing_marks_its_points_whole_and_says_where_it_is_cut() -> None:
    steep = [Curve("a", [0, 50, 100], [11.0, 4.0, 3.0])]
    drawing = LineDrawing(AXES["dollars"], steep, {"near": 3.5, "far": 1.0}).svg()
    assert drawing.count("<circle") == 2, "the first lies above"
    assert ">↑ cut off here: the first losses go up to 11.00</text>" in drawing
    assert re.search(r"</g><circle[^>]*/><circle[^>]*/></g>", drawing), "not within what is clipped"
    assert "near: 3.500" in drawing
    assert "far: 1.000" not in drawing
    whole = LineDrawing(AXES["dollars"], [Curve("a", [0, 50, 100], [4.0, 3.5, 3.0])], {}).svg()
    assert whole.count("<circle") == 3
    assert "cut off" not in whole


def test_it_needs_nothing_else() -> None:
    page = render(REPORT)
    assert not re.search(r"(?:src|href)=|url\((?!#)|@import|https?://", page)


def test_what_is_not_there_has_no_heading() -> None:
    page = render(Report("t", REPORT.columns, REPORT.rows))
    assert re.findall("<h2>(.*?)</h2>", page) == ["Runs"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (3.1, 3.9, [3.2, 3.4, 3.6, 3.8]), (0, 1.6e6, [0, 5e5, 1e6, 1.5e6]), (2, 2, [2])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_numbers_of_ticks() -> None:
    assert [number_text(value) for value in (0, 0.02, 12, 1500, 2.5e6, 3e18)] == [
        "0",
        "0.02",
        "12",
        "1.5k",
        "2.5M",
        "3E",
    ]


def in_browser(page: str, script: str, tmp_path: Path, *options: str) -> str:
    """Return the result of the script, run at the end of the page: it becomes the document's title."""
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", f"<script>document.title = (() => {{{script}}})()</script></body>"))
    assert BROWSER is not None
    command = [BROWSER, *BROWSER_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = re.search("<title>(.*?)</title>", done.stdout)
    assert found
    return html.unescape(found[1])


ORDER = "[...document.querySelectorAll('tbody tr')].map((row) => row.cells[0].textContent).join(' ')"


@pytest.mark.skipif(BROWSER is None, reason="no browser on this machine")
def test_in_a_browser(tmp_path: Path) -> None:
    """Sorting by number and by name, both ways, choosing curves and the axis; at a telephone's width nothing but the
    table is wider than the window, and if the table is, that is said."""
    script = f"""
        const said = [], order = () => {ORDER}, heading = (at) => document.querySelectorAll('th button')[at];
        for (const at of [1, 1, 0]) {{ heading(at).click(); said.push(order()); }}
        const curves = () => [...document.querySelectorAll('g[data-curve="1"]')].map((each) => each.style.display);
        const box = document.querySelector('input[data-curve="1"]');
        box.click(); said.push(curves().join());
        box.click(); said.push('[' + curves().join() + ']');
        const shown = () => [...document.querySelectorAll('figure')].map((each) => each.hidden).join();
        said.push(shown());
        document.querySelector('input[value=hours]').click(); said.push(shown());
        said.push(document.documentElement.scrollWidth <= window.innerWidth);
        said.push(document.querySelector('#more').hidden);
        document.querySelector('table').style.width = '900px'; window.dispatchEvent(new Event('resize'));
        said.push(document.querySelector('#more').hidden);
        return said.join('; ');
    """
    said = in_browser(render(REPORT), script, tmp_path, "--window-size=500,900").split("; ")
    assert said == [
        "<slow> fast none",
        "fast <slow> none",
        "<slow> fast none",
        "none,none,none",
        "[,,]",
        "true,false,true",
        "true,true,false",
        "true",
        "true",
        "false",
    ]


def test_it_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")
    write_report(path, REPORT)
    assert path.read_text() == render(REPORT)
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
