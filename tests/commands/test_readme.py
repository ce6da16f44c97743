"""What README shows of the commands' output is what they print, but for numbers."""

from __future__ import annotations

import re

from tests.support.isolation import ROOT
from tests.support.launch import Workshop

NUMBER = re.compile(r"\d[\d,.]*")


def forms(text: str) -> set[str]:
    """The lines without their numbers."""
    return {NUMBER.sub("N", line.strip()) for line in text.splitlines()}


def shown(first: str, last: str) -> set[str]:
    """The forms of README's lines from one to another, those left out there not counted."""
    readme = (ROOT / "README.md").read_text()
    start = readme.index(first)
    return forms(readme[start : readme.index(last, start)]) - {"…", ""}


def test_the_quickstarts_output(quickstart: Workshop) -> None:
    printed = forms((quickstart.path / "printed").read_text().replace(f"{quickstart.path}/", ""))
    for line in shown("    quickstart: starting", "![Training"):
        assert line in printed, line
