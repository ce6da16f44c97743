"""How far each run of a sweep has come, from what lies in its folder, and what its attempts have cost."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.analysis.derived_runs import DerivedRun
from harness.analysis.progress import percent_done
from harness.common.errors import UserError, printable
from harness.common.files import replace_text
from harness.common.json_files import parse_config, read_json_object
from harness.common.lock import is_held
from harness.common.processes import ProcessName, start_time
from harness.common.units import amount_text
from harness.runs.budget import wanted_tokens
from harness.runs.checkpoint_lookup import choose_start, list_checkpoints
from harness.runs.checkpoint_meta import read_meta
from harness.runs.metrics import read_metrics
from harness.runs.summary import RunSummary, read_summary
from harness.runs.train_config import BUDGETS

ATTEMPTS, LOG = "sweep-attempts.json", "sweep.log"
# Of a log's end: enough for an error in one line, which comes last, and what led to it.
COLUMNS = 79
TAIL_LINES, TAIL_BYTES, TAIL_COLUMNS = 5, 8192, 200

State = Literal["finished", "starting", "going on", "pruned", "failed", "stopped", "not begun", "not made", "damaged"]
WHAT_TIMES_ARE = (
    "Times and costs are from the start of a run's processes to their end, in all attempts together; those of "
    "compare_runs.py begin later, with the training's set-up."
)

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class UnderWay(BaseModel):
    """The process of an attempt, as others can know it; `started` tells it from a later one of the same number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    host: str
    pid: int = Field(gt=0)
    namespace: str
    started: str

    @classmethod
    def of(cls, pid: int) -> UnderWay:
        """A process of this machine that has not been waited for."""
        own = ProcessName.own()
        return cls(host=own.host, pid=pid, namespace=own.namespace, started=start_time(pid))


class Attempts(BaseModel):
    """A sweep-attempts.json: how often a sweep has started a run, and what that took by the clock and in money."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    attempts: int = Field(default=0, ge=0)
    seconds: Amount = 0.0
    dollars: Amount | None = None  # None: the price is not known
    exit_status: int | None = None  # of the last that failed; None: it did not, or is not at its end
    under_way: UnderWay | None = None  # the attempt under way; None: there is none
    pruned_at_step: int | None = (
        None  # by the validation at which global step a search has given it up; None: it has not
    )


def read_attempts(run: DerivedRun) -> Attempts:
    """Raises UserError, with the remedy, for a file that is none of ours."""
    path = run.run.path / ATTEMPTS
    if not path.exists():
        return Attempts()
    try:
        return parse_config(Attempts, read_json_object(path), path)
    except UserError as error:
        raise UserError(f"{error}; move it away: only what the attempts have cost is forgotten with it") from None


def write_attempts(run: DerivedRun, attempts: Attempts) -> None:
    replace_text(run.run.path / ATTEMPTS, json.dumps(attempts.model_dump(exclude_none=True)) + "\n")


def is_under_way(attempts: Attempts) -> bool:
    """Whether the process that a sweep has started lives; False of one on another machine, which is not to be seen."""
    named = attempts.under_way
    if named is None:
        return False
    process = ProcessName(named.host, named.pid, named.namespace)
    is_seen = process.is_neighbour_of(ProcessName.own()) and not process.is_gone()
    return is_seen and start_time(process.pid) == named.started


def summary_of(run: DerivedRun) -> RunSummary | None:
    """The summary of a run that is finished; None of one that is not: its summary is missing, or another training's.

    Raises UserError, with the remedy, for one that cannot be read: training, too, leaves it as it is.
    """
    if not run.run.summary.exists():
        return None
    try:
        summary = read_summary(run.run.summary)
    except UserError as error:
        raise UserError(
            f"{error}; move it away, and `sweep_runs.py run` writes it again from the last checkpoint"
        ) from None
    wanted = run.train_config.model_dump(include={*BUDGETS})
    is_same = all(summary.train.get(key, value) == value for key, value in wanted.items())
    return summary if is_same and summary.has_shape(run.model_config) is not False else None


def is_done(run: DerivedRun) -> bool:
    """Whether a sweep has no more to do with a run: it is finished, or a search has given it up. Raises UserError for
    a file that cannot be read."""
    attempts = read_attempts(run)  # of a finished run, too, so that all commands call the same runs damaged
    return summary_of(run) is not None or attempts.pruned_at_step is not None


def dollars_spent(run: DerivedRun) -> float:
    """What a run has cost so far: by the sweep's clock, or else, of one that was trained by hand, by its summary.
    Raises UserError for a file that cannot be read."""
    spent = read_attempts(run).dollars
    if spent is None:
        summary = summary_of(run)
        spent = summary.dollars.get("total", 0.0) if summary and summary.dollars else 0.0
    return float(spent)


@dataclass(frozen=True)
class Standing:
    """Where one run stands. `said` has the numbers."""

    run: DerivedRun
    state: State
    said: str = ""


def standing_of(run: DerivedRun) -> Standing:
    """Never fails for what lies in its folder: such as another run, or a file that cannot be read, is `damaged`."""
    try:
        return _standing_of(run)
    except UserError as error:
        return Standing(run, "damaged", str(error))


def _standing_of(run: DerivedRun) -> Standing:
    if not run.is_made():
        return Standing(run, "not made")
    summary = summary_of(run)
    if summary is not None:
        return Standing(run, "finished", _result(summary, read_attempts(run)))
    if is_held(run.run.path / ".lock"):
        return Standing(run, "going on", _progress(run))
    attempts = read_attempts(run)
    if attempts.pruned_at_step is not None:
        return Standing(run, "pruned", f"at global step {attempts.pruned_at_step:,}")
    if is_under_way(attempts):  # it has no lock yet: it loads its libraries
        return Standing(run, "starting", _progress(run) if list_checkpoints(run.run.checkpoints) else "")
    if attempts.exit_status is not None:
        return Standing(run, "failed", f"exit status {attempts.exit_status}; {run.run.path / LOG} ends:")
    if list_checkpoints(run.run.checkpoints):
        return Standing(run, "stopped", _progress(run))
    return Standing(run, "not begun")


def _result(summary: RunSummary, attempts: Attempts) -> str:
    losses = (("validation", summary.final_validation_loss), ("train", summary.final_train_loss))
    loss = next((f"{kind} loss {value:.3f}" for kind, value in losses if value is not None), "no finite loss")
    seconds = attempts.seconds or summary.seconds.get("total")
    dollars = attempts.dollars if attempts.dollars is not None else (summary.dollars or {}).get("total")
    parts = [loss, f"{seconds:,.0f} s" if seconds is not None else "", f"${amount_text(dollars)}" if dollars else ""]
    return ", ".join(part for part in parts if part)


def _progress(run: DerivedRun) -> str:
    """By the last line of metrics.jsonl."""
    with suppress(OSError, UnicodeDecodeError, UserError):
        events = read_metrics(run.run.metrics)
        if events:
            seen, wanted = events[-1].tokens_seen, _wanted_tokens(run)
            share = f", {percent_done(seen, wanted)}" if wanted else ""
            return f"global step {events[-1].global_step:,}, {seen:,} tokens{share}"
    return "nothing reported yet"


def _wanted_tokens(run: DerivedRun) -> int | None:
    """Of the whole run, by its train.json or else by what its latest checkpoint says of its budget."""
    latest = choose_start(run.run.checkpoints, None)
    recorded = read_meta(latest).budget if latest else None
    return wanted_tokens(run.train_config.model_dump(mode="json"), recorded)


def end_of_log(run: DerivedRun) -> list[str]:
    """The last lines that a run has said, without what a terminal would obey."""
    try:
        with (run.run.path / LOG).open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ["(there is no log)"]
    return [printable(line)[:TAIL_COLUMNS] for line in lines if line.strip()][-TAIL_LINES:]


def describe_standings(name: str, standings: Sequence[Standing], runs_dir: Path) -> str:
    """For a terminal: one line a run, and the end of the log of those that failed."""
    said = count_states(standings)
    lines = [f"Sweep {name} in {runs_dir}: {said}", "", *standing_lines(standings)]
    if any(each.state == "finished" and read_attempts(each.run).attempts for each in standings):
        lines += ["", *textwrap.wrap(WHAT_TIMES_ARE, COLUMNS)]
    return "\n".join(lines)


def count_states(standings: Sequence[Standing]) -> str:
    counts = Counter(each.state for each in standings)
    order: tuple[State, ...] = (
        "finished",
        "going on",
        "starting",
        "stopped",
        "pruned",
        "failed",
        "not begun",
        "not made",
        "damaged",
    )
    return ", ".join(f"{counts[state]:,} {state}" for state in order if counts[state])


def standing_lines(standings: Sequence[Standing]) -> list[str]:
    lines = []
    width = max((len(each.run.name) for each in standings), default=0)
    for each in standings:
        said = printable(each.said)
        line = f"{each.run.name:<{width}}  {each.state:<9}  {said}".rstrip()
        if len(line) > COLUMNS and said:
            line = f"{each.run.name:<{width}}  {each.state}\n{_indented(said)}"
        lines.append(line)
        if each.state == "failed":
            lines += [f"    {text}" for text in end_of_log(each.run)]
    return lines


def _indented(text: str) -> str:
    return textwrap.fill(text, COLUMNS, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
