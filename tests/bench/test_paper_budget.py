"""docs/performance.md's arithmetic is that of the program, to the digit."""

from __future__ import annotations

import pytest

from bench.paper_budget import tables
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import ROOT

DOCUMENT = ROOT / "docs" / "performance.md"


@pytest.mark.parametrize("name", ["work", "floors", "terms", "optimizers", "machines"])
def test_the_documents_tables(name: str) -> None:
    lines = tables(SHIPPED_RUNS)[name]
    assert len(lines) > 5
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "\n".join(lines) in text, f"uv run bench/paper_budget.py prints what {DOCUMENT.name} has to say"


def test_what_the_text_says_of_the_h200() -> None:
    """The goals that the text names are those that the numbers on paper reach."""
    terms = {row.split(" | ")[0].strip("| "): row.split(" | ")[4] for row in tables(SHIPPED_RUNS)["terms"]}
    assert terms["tokens/s"] == "450k"
    assert int(terms["tokens/s with drop_rate 0"].removesuffix("k")) >= 500
