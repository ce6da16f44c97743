"""Output of a job of several processes, started by --processes or by the real torchrun."""

from __future__ import annotations

import re

import pytest

from tests.support.launch import Workshop, finish
from tests.support.torchrun import Torchrun


@pytest.mark.slow
def test_the_last_words_are_ours(shop: Workshop) -> None:
    """The error line is printed at once, and again at the end of torchrun's own report, which has a traceback and a box
    that names the failed rank."""
    run = shop.add_run(report_intervall=3)
    result = shop.torchrun("r", expect=1)
    line = f'error: {run}/train.json: key "report_intervall": unknown; did you mean "report_interval"?'
    lines = result.stderr.splitlines()
    assert line in lines, "printed by the rank itself"
    assert lines[-2].strip() == line, "repeated at the end of torchrun's report"
    assert set(lines[-1]) == {"="}, "the lower edge of its box"


def test_a_rank_that_is_killed_ends_the_job_in_one_line(shop: Workshop) -> None:
    """The launcher reports a killed rank in one line, because the rank cannot, and ends the other rank. The same
    command resumes the run."""
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
