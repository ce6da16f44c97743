"""Status of each run of a sweep, judged by the contents of its folder. All sweep commands use this module, so that they
agree."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from harness.common.errors import UserError, printable
from harness.common.units import amount_text
from harness.comparison.progress import describe_progress
from harness.comparison.records import SWEEP_MARK, RunRecord, StateWord, log_tail
from harness.runs.budget import wanted_tokens
from harness.sweeps.derived_runs import DerivedRun

COLUMNS = 79
TAIL_LINES, TAIL_COLUMNS = 5, 200  # of a log: enough for the error, which is the last line, and what led to it


@dataclass(frozen=True)
class Status:
    """Status of one run. `said` describes it: losses or progress, or the reason and the remedy. `dollars` is what the
    run has cost so far."""

    run: DerivedRun
    state: StateWord
    said: str = ""
    dollars: float = 0.0

    @property
    def is_done(self) -> bool:
        """True if nothing of the run is left to train."""
        return self.state in ("finished", "pruned")


def status_of(run: DerivedRun) -> Status:
    """Return the status of a run, in the words of compare_runs.py. It is `damaged` if the run's folder holds something
    other than the sweep's run."""
    try:
        if not run.is_made():
            return Status(run, "not made")
    except UserError as error:
        return Status(run, "damaged", str(error))
    record = RunRecord.read(run.run)
    state, said, summary = record.state.word, record.state.detail, record.summary
    if state == "finished" and summary is not None:
        losses = (("validation", summary.final_validation_loss), ("train", summary.final_train_loss))
        parts = [next((f"{kind} loss {value:.3f}" for kind, value in losses if value is not None), "no finite loss")]
        if (seconds := summary.seconds.get("total")) is not None:
            parts.append(f"{seconds:,.0f} s")
        if dollars := (summary.dollars or {}).get("total"):
            parts.append(f"${amount_text(dollars)}")
        said = ", ".join(parts)
    elif state == "failed":
        said = f"{said}; {run.run.sweep_log} ends:"
    elif state in ("going on", "stopped") and record.progress is not None:
        wanted = wanted_tokens(record.train, record.meta.budget if record.meta else None)
        said = describe_progress(record.progress, wanted, goes_on=state == "going on")
    return Status(run, state, said, record.dollars.get("total", 0.0))


def count_states(statuses: Sequence[Status]) -> str:
    """Return the number of runs in each state as text."""
    counts = Counter(each.state for each in statuses)
    return ", ".join(f"{counts[state]:,} {state}" for state in get_args(StateWord) if counts[state])


def status_lines(statuses: Sequence[Status]) -> list[str]:
    """Return a line for each run, or a paragraph if the line is wider than a terminal. The lines of a failed run end
    with the end of its log."""
    lines = []
    width = max((len(each.run.name) for each in statuses), default=0)
    for each in statuses:
        said = printable(each.said)
        line = f"{each.run.name:<{width}}  {each.state:<9}  {said}".rstrip()
        if len(line) <= COLUMNS or not said:
            lines.append(line)
        else:
            lines.append(f"{each.run.name:<{width}}  {each.state}")
            lines += wrapped(said, "    ", "")
        if each.state == "failed":
            log = [text for text in log_tail(each.run.run) if text.strip() and not SWEEP_MARK.fullmatch(text)]
            lines += [f"    {printable(text)[:TAIL_COLUMNS]}" for text in log[-TAIL_LINES:] or ["(no output)"]]
    return lines


def wrapped(text: str, indent: str = "", following: str = "    ") -> list[str]:
    """Wrap text to a terminal's width. Lines begin with `indent`, and those after the first also with `following`."""
    following = indent + following
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=following, break_on_hyphens=False)
