"""docs/RELIABILITY.md names every fault test there is, and no other."""

from __future__ import annotations

from tests.support.isolation import ROOT
from tests.support.reliability import FOLDER, faults_of, render


def test_the_document_is_made_of_the_tests_marks() -> None:
    """`python -m tests.support.reliability > docs/RELIABILITY.md` makes it."""
    assert (ROOT / "docs" / "RELIABILITY.md").read_text() == render()
    names = [name for path in FOLDER.glob("test_*.py") for name, _ in faults_of(path)]
    assert len(names) == len(set(names)) > 50
