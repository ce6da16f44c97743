"""Progress of each run of a sweep, from the contents of its folder."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from harness.common.errors import UserError, printable
from harness.common.units import amount_text
from harness.comparison.progress import describe_progress
from harness.comparison.records import SWEEP_MARK, RunRecord, StateWord, asks_for_more, log_tail, summary_in
from harness.runs.budget import wanted_tokens
from harness.runs.directory import RunDirectory
from harness.runs.summary import RunSummary
from harness.sweeps.derived_runs import DerivedRun

COLUMNS = 79
TAIL_LINES, TAIL_COLUMNS = 5, 200  # of a log: enough for an error in one line, which comes last, and what led to it


def summary_of(run: DerivedRun) -> RunSummary | None:
    """The summary of a run that is finished; None of one that is not: its summary is missing, or another training's.
    Raises UserError, with the remedy, for one that cannot be read."""
    summary = summary_in(run.run)
    return None if summary is None or asks_for_more(summary, run.model_config, run.train_config) else summary


@dataclass(frozen=True)
class Standing:
    """Status of one run. `said` has the numbers."""

    run: DerivedRun
    state: StateWord
    said: str = ""


def standing_of(run: DerivedRun) -> Standing:
    """The run's state as every command has it; one that is not the sweep's is `damaged`."""
    try:
        if not run.is_made():
            return Standing(run, "not made")
    except UserError as error:
        return Standing(run, "damaged", str(error))
    record = RunRecord.read(run.run)
    return Standing(run, record.state.word, _said(record))


def _said(record: RunRecord) -> str:
    state, summary = record.state, record.summary
    if state.word == "finished" and summary is not None:
        return _result(summary)
    if state.word == "failed":
        return f"{state.detail}; {record.directory.sweep_log} ends:"
    if state.word in ("going on", "stopped"):
        wanted = wanted_tokens(record.train, record.meta.budget if record.meta else None)
        return describe_progress(record.progress, wanted, goes_on=state.word == "going on")
    return state.detail


def _result(summary: RunSummary) -> str:
    losses = (("validation", summary.final_validation_loss), ("train", summary.final_train_loss))
    loss = next((f"{kind} loss {value:.3f}" for kind, value in losses if value is not None), "no finite loss")
    seconds, dollars = summary.seconds.get("total"), (summary.dollars or {}).get("total")
    parts = [loss, f"{seconds:,.0f} s" if seconds is not None else "", f"${amount_text(dollars)}" if dollars else ""]
    return ", ".join(part for part in parts if part)


def end_of_log(run: RunDirectory) -> list[str]:
    """The last lines that a run has said, without what a terminal would obey."""
    said = [line for line in log_tail(run) if line.strip() and not SWEEP_MARK.fullmatch(line)]
    return [printable(line)[:TAIL_COLUMNS] for line in said][-TAIL_LINES:] or ["(it has said nothing)"]


def describe_standings(name: str, standings: Sequence[Standing], runs_dir: Path) -> str:
    """Describe a sweep for a terminal: one line a run, and the end of the log of those that failed."""
    return "\n".join([f"Sweep {name} in {runs_dir}: {count_states(standings)}", "", *standing_lines(standings)])


def count_states(standings: Sequence[Standing], unmade: int = 0) -> str:
    """List the number of runs in each state; `unmade`: number of further runs that have not even been made."""
    counts = Counter({"not made": unmade})
    counts.update(each.state for each in standings)
    return ", ".join(f"{counts[state]:,} {state}" for state in get_args(StateWord) if counts[state])


def standing_lines(standings: Sequence[Standing]) -> list[str]:
    lines = []
    width = max((len(each.run.name) for each in standings), default=0)
    for each in standings:
        said = printable(each.said)
        line = f"{each.run.name:<{width}}  {each.state:<9}  {said}".rstrip()
        if len(line) > COLUMNS and said:
            indented = textwrap.fill(
                said, COLUMNS, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
            )
            line = f"{each.run.name:<{width}}  {each.state}\n{indented}"
        lines.append(line)
        if each.state == "failed":
            lines += [f"    {text}" for text in end_of_log(each.run.run)]
    return lines
