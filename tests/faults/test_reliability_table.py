"""docs/RELIABILITY.md tells of every fault test there is, and of no other; how such a table is made."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.isolation import ROOT
from tests.support.reliability import Row, render, sections_of

SECTIONS = sections_of(Path(__file__).parent)


def table_of(text: str) -> dict[str, list[list[str]]]:
    """The cells of each row, by section."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")]
        found[heading] = [[cell.strip() for cell in row] for row in rows[1:]]
    return found


def test_every_fault_has_its_row() -> None:
    found = table_of((ROOT / "docs" / "RELIABILITY.md").read_text())
    expected = {heading: set(faults) for heading, faults in SECTIONS.values()}
    assert {heading: {row[0] for row in rows} for heading, rows in found.items()} == expected
    for rows in found.values():
        assert all(len(row) == 4 and all(row) for row in rows), rows
        assert all(int(row[2].replace(",", "")) > 0 for row in rows)


def test_faults_have_names_of_their_own() -> None:
    for _, faults in SECTIONS.values():
        assert len(faults) == len(set(faults))


def test_a_table_holds_what_was_seen_to_pass() -> None:
    sections = {"test_a": ("Heading", ["one", "two"]), "test_b": ("Other", ["three"])}
    one, two = Row("test_a", "one", "x | y", 1, "fine"), Row("test_a", "two", "z", 1234, "fine")
    text = render([two, one], sections, "today")
    assert table_of(text) == {"Heading": [["one", "x \\| y", "1", "fine"], ["two", "z", "1,234", "fine"]]}
    both = render([Row("test_b", "three", "z", 2, "fine")], sections, "tomorrow", text)
    assert list(table_of(both)) == ["Heading", "Other"]
    assert both.startswith(text.rstrip())
    assert render([one], sections, "the day after", both) == both, "a section is renewed as a whole"
    for empty in (Row("test_a", "two", "", 1, "fine"), Row("test_a", "two", "z", 0, "fine")):
        with pytest.raises(ValueError, match="empty cell"):
            render([one, empty], sections, "today")
