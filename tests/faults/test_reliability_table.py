"""docs/RELIABILITY.md names every fault test that exists, and no other."""

from __future__ import annotations

import pytest

from tests.support.isolation import ROOT
from tests.support.reliability import FOLDER, faults_of, render


@pytest.mark.slow
def test_the_document_is_made_of_the_tests_marks() -> None:
    """docs/RELIABILITY.md is the output of `python -m tests.support.reliability`."""
    assert (ROOT / "docs" / "RELIABILITY.md").read_text() == render()
    names = [name for path in FOLDER.rglob("test_*.py") for name, _ in faults_of(path)]
    assert len(names) == len(set(names)) > 50
