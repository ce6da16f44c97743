"""The HTML page of a comparison: its text is escaped, it needs no other file, and its parts are in reading order."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness.comparison.against_baseline import BaselineComparison, compare_with
from harness.comparison.page import render
from tests.support.compared_runs import RunFolder, table_of

REFERENCES = {"<b>&": 3.8}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs")
    a, b = (
        RunFolder(folder, name, {"learning_rate": rate}).finish().train_to(0, 10, 20).test_loss(loss)
        for name, rate, loss in (("<a>", 0.001, 2.5), ("b", 0.002, 2.4))
    )
    table = table_of(a, b, RunFolder(folder, "third", {"learning_rate": 0.1})).sorted(None)
    return render(table, compare_with("<a>", table.records), REFERENCES, "<a>", "Made today by: compare_runs.py '<a>'")


def test_names_and_labels_are_text(page: str) -> None:
    assert "<a>" not in page
    assert "<b>" not in page
    assert page.count("&lt;a&gt;") >= 4


def test_it_is_read_from_the_verdict_to_the_provenance(page: str) -> None:
    parts = [
        "<p>Against &lt;a&gt; (1 run), by test loss on",
        '<p class="verdict">b against &lt;a&gt;: inconclusive',
        '<p class="note">Training noise is unknown',
        "<table>",
        "<td>b</td>",
        "<td>third</td>",
        '<p class="note">Sorted by test loss.</p>',
        "The same for all runs: ",
        "third: in no chart: never trained",
        "<h2>Validation loss</h2>",
        "The verdicts are based on the test loss; these curves show the validation loss.",
        "<svg",
        "<summary>over hours</summary>",
        "machine: 2 x NVIDIA H100",
        "Made today by: compare_runs.py &#39;&lt;a&gt;&#39;",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)


def test_the_table_begins_with_the_losses_and_what_differs(page: str) -> None:
    headings = re.findall('<th scope="col"[^>]*>(.*?)</th>', page)
    losses = [at for at, heading in enumerate(headings) if "loss" in heading and "best" not in heading]
    assert headings[:2] == ["run", "test loss, nats/token"], "the column that it is sorted by"
    assert losses == [1, 2, 4], "validation loss, bits per byte, train loss"
    assert headings[5:7] == ["state", "learning_rate"]
    assert not any("parameters" in heading for heading in headings), "the same in all runs"
    assert '<td class="number">2.400</td>' in page
    assert '<td title="no result of test_loss.py">-</td>' in page or '<td title="never trained">-</td>' in page


def test_it_needs_no_network_and_its_drawings_are_whole(page: str) -> None:
    assert not re.search(r"<script|<link|(?:src|href)=\"(?!#)|url\((?!#)|@import", page.replace("xlink:href", "href"))
    drawings = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 5, "one for each axis"
    for drawing in drawings:
        texts = [each.text for each in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
        assert {"<b>&: 3.800", "<a>: 3.900", "validation loss (nats per token)"} <= {*texts}


def test_long_names_in_the_table_are_distinct_and_whole_in_their_titles(tmp_path: Path) -> None:
    names = [f"{'x' * 45}-{each}{'x' * 45}" for each in "ab"]
    page = render(table_of(*(RunFolder(tmp_path, name).finish() for name in names)), None, {})
    rows = re.findall('<tr><td title="(.*?)">(.*?)</td>', page)
    assert [title for title, _ in rows] == names
    assert ["-a" in rows[0][1], "-b" in rows[1][1], max(len(text) for _, text in rows) <= 34] == [True, True, True]


def test_a_single_run_without_curves_has_all_its_columns(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "a").finish()
    page = render(table_of(run), BaselineComparison("no verdict, and why"), {})
    assert page.endswith("</html>\n")
    assert re.findall("<h2>(.*?)</h2>", page) == ["Which was better", "Runs", "Remarks", "Where this comes from"]
    assert '<p class="verdict">no verdict, and why</p>' in page
    assert ">parameters</th>" in page
    assert "The same for all" not in page
