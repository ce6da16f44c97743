"""What a user sees of a job under the real torchrun, which has much to say itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import Workshop

pytestmark = pytest.mark.slow


def test_the_last_words_are_ours(tmp_path: Path) -> None:
    """torchrun ends with a page of its own: a traceback, and a box that says which rank has failed."""
    shop = Workshop(tmp_path)
    run = shop.add_run(report_intervall=3)
    result = shop.torchrun("r", expect=1)
    line = f'error: {run}/train.json: key "report_intervall": unknown; did you mean "report_interval"?'
    lines = result.stderr.splitlines()
    assert line in lines, "at once"
    assert lines[-2].strip() == line, "below torchrun's report"
    assert set(lines[-1]) == {"="}, "the lower edge of its box"
