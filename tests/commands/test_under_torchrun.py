"""Output of a job of several processes: of --processes, and under the real torchrun."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import Workshop, finish
from tests.support.torchrun import Torchrun


@pytest.mark.slow
def test_the_last_words_are_ours(shop: Workshop) -> None:
    """torchrun ends with a page of its own: a traceback, and a box that says which rank has failed."""
    run = shop.add_run(report_intervall=3)
    result = shop.torchrun("r", expect=1)
    line = f'error: {run}/train.json: key "report_intervall": unknown; did you mean "report_interval"?'
    lines = result.stderr.splitlines()
    assert line in lines, "at once"
    assert lines[-2].strip() == line, "below torchrun's report"
    assert set(lines[-1]) == {"="}, "the lower edge of its box"


def test_a_rank_that_is_killed_ends_the_job_in_one_line(shop: Workshop) -> None:
    """Nobody else can say it; the other rank is told to end, and the same command continues."""
    job = Torchrun(shop, shop.add_run(), are_forked=True, by_processes=True)
    result = finish([job.start("before(STEP, kill, rank=1, step=8)")], expect=137, timeout=60)
    (line,) = result.stderr.split("\n", 1)[-1].splitlines()
    assert re.fullmatch(
        r"error: rank 1 \(pid \d+\) was ended by SIGKILL \(out of memory\?\); run the same command again to continue",
        line,
    )
    again = finish([job.start("")], expect=0, timeout=60)
    assert "continuing from" in again.stdout


def test_a_defect_of_one_rank_ends_the_job_with_its_status(shop: Workshop) -> None:
    job = Torchrun(shop, shop.add_run(), are_forked=True, by_processes=True)
    result = finish([job.start("before(STEP, fail, rank=1, step=8)")], expect=1, timeout=60)
    assert result.stderr.count("Traceback") == 1
    assert not result.error_lines
