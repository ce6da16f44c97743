"""Trials of a search, as their runs' folders have them, with their results.

No other record of a search is kept: it is resumed from the folders, so that no record can disagree with them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.common.errors import UserError
from harness.common.json_files import parse_config, read_json_object
from harness.comparison.records import last_end
from harness.planning.plan import COLUMNS
from harness.runs.metrics import Event, TrainEvent, ValidationEvent, read_metrics
from harness.sweeps.derived_runs import DERIVED, Base, Derivation, DerivedRun, TrialRecord, derive
from harness.sweeps.file import Sweep, labels, read_sweep
from harness.sweeps.space import Point
from harness.sweeps.standing import Standing, count_states, standing_lines, standing_of, summary_of
from harness.sweeps.sweep import load_base, sweep_name

# What the losses are called in a summary.json, and on the screen.
LOSSES = {
    "final_validation_loss": ("final_validation_loss", "validation loss"),
    "best_validation_loss": ("best_loss", "best validation loss"),
}
WHAT_IT_MEANS = (
    "One seed each: how much of that is training noise is not known, and the lowest of many is low by luck, too. Train "
    "the best few with several random_seeds (a sweep), and compare them with compare_runs.py."
)


@dataclass(frozen=True)
class Trial:
    """One point of a search and the run that tries it."""

    number: int
    point: Point
    run: DerivedRun


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial. `losses` has the validation losses by the tokens seen before them, NaN where one was not
    finite; `loss` is what the search minimizes, of a finished trial."""

    trial: Trial
    state: Literal["finished", "pruned", "diverged", "failed", "unfinished"]
    losses: Mapping[int, float]
    loss: float | None = None


@dataclass(frozen=True)
class Search:
    """A SWEEP.json with "search". `count` trials are to be made."""

    path: Path
    sweep: Sweep
    name: str
    base: Base
    runs_dir: Path
    count: int

    @property
    def loss_name(self) -> str:
        return LOSSES[self.sweep.objective][1]

    def make_trial(self, number: int, point: Point) -> Trial:
        """The trial of this number at a point; nothing is written. Raises UserError for what could not be trained."""
        name = f"{self.name}-{number:03d}-{labels([point])[0]}"
        record = TrialRecord(number=number, point=point)
        return Trial(number, point, derive(self.base, name, {**self.sweep.set, **point}, self.name, record))

    def trials(self) -> list[Trial]:
        """Trials whose folders are there, by number. Raises UserError for a folder that is not what it says."""
        pattern = re.compile(rf"{re.escape(self.name)}-\d{{3,}}-.+")
        folders = [path for path in self.runs_dir.iterdir() if pattern.fullmatch(path.name)]
        found = [trial for trial in map(self._trial_in, folders) if trial is not None]
        return sorted(found, key=lambda trial: trial.number)

    def _trial_in(self, folder: Path) -> Trial | None:
        path = folder / DERIVED
        if not path.is_file():
            return None
        derivation = parse_config(Derivation, read_json_object(path), path)
        if derivation.sweep != self.name or derivation.trial is None:
            return None
        try:
            trial = self.make_trial(derivation.trial.number, derivation.trial.point)
        except UserError as error:
            raise UserError(f"{path}: is a trial of {self.path}, which today makes {error}") from None
        # A copy of a trial under another name is no trial.
        return trial if trial.run.run.path.name == folder.name and trial.run.is_made() else None

    def result_of(self, trial: Trial) -> TrialResult:
        """Read a trial's result. Raises UserError for a file that this program did not write."""
        events = read_events(trial.run)
        losses = validation_losses(events)
        summary, end = summary_of(trial.run), last_end(trial.run.run)
        if summary is not None:
            loss = getattr(summary, LOSSES[self.sweep.objective][0])
            return TrialResult(trial, "diverged" if loss is None else "finished", losses, loss)
        if end is None:
            return TrialResult(trial, "unfinished", losses)
        if end[0] == "failed":
            return TrialResult(trial, "diverged" if _has_diverged(events) else "failed", losses)
        until = [event.tokens_seen for event in events if event.global_step <= end[1]]
        return TrialResult(trial, "pruned", {at: loss for at, loss in losses.items() if at <= max(until, default=0)})


def load_search(path: Path, runs_dir: Path, trials: int | None = None) -> Search:
    """Read a SWEEP.json with "search". `trials` takes the place of its own number. Raises UserError naming the file,
    the key and the remedy."""
    sweep = read_sweep(path)
    if not sweep.is_search:
        raise UserError(f'{path}: key "search": missing; without it, `sweep_runs.py run` trains what it says')
    base = load_base(sweep, path, runs_dir)
    if {**base.configs, **sweep.set}["validation_interval"] is None:
        raise UserError(
            f'{path}: key "validation_interval": the runs would have no validation loss to minimize; give '
            '"validation_interval", "validation_batches" and "start_val_token" in "set"'
        )
    return Search(path, sweep, sweep_name(sweep, path), base, runs_dir, trials or sweep.trials or 0)


def read_events(run: DerivedRun) -> list[Event]:
    """Read the events of a run's metrics.jsonl, as far as it is written; none if it cannot be read."""
    with suppress(OSError, UnicodeDecodeError):
        return read_metrics(run.run.metrics)
    return []


def validation_losses(events: Sequence[Event]) -> dict[int, float]:
    """Losses by the tokens seen before them; NaN where one was not finite."""
    found = [event for event in events if isinstance(event, ValidationEvent)]
    return {event.tokens_seen: float("nan") if event.loss is None else float(event.loss) for event in found}


def _has_diverged(events: Sequence[Event]) -> bool:
    """True if the last reported training loss was not finite."""
    reports = [event for event in events if isinstance(event, TrainEvent)]
    return bool(reports) and reports[-1].loss is None


def describe_search(search: Search) -> str:
    """Describe a search for a terminal: one line a trial, the best first."""
    results = [_result_to_show(search, trial) for trial in search.trials()]
    standings = [_standing(result) for result in sorted(results, key=_rank)]
    said = count_states(standings) or "nothing is made yet"
    head = f"Search {search.name} in {search.runs_dir}, {len(results):,} of {search.count:,} trials made: {said}"
    return "\n".join([head, "", *standing_lines(standings)]).rstrip()


def _result_to_show(search: Search, trial: Trial) -> TrialResult:
    """Result of a trial, empty if a file of it cannot be read; its standing has the reason."""
    try:
        return search.result_of(trial)
    except UserError:
        return TrialResult(trial, "unfinished", {})


def _standing(result: TrialResult) -> Standing:
    found = standing_of(result.trial.run)
    if found.state != "pruned" or not result.losses:
        return found
    return Standing(found.run, found.state, f"{found.said}, validation loss {[*result.losses.values()][-1]:.3f}")


def _rank(result: TrialResult) -> tuple[int, float, int]:
    """Sort key: finished trials by their loss, then the others by state, those with the most tokens first."""
    order = ("finished", "unfinished", "pruned", "diverged", "failed")
    far = -max(result.losses, default=0)
    return order.index(result.state), far if result.loss is None else result.loss, result.trial.number


def describe_best(search: Search, results: Sequence[TrialResult]) -> list[str]:
    """The best trials, and what their difference means."""
    finished = sorted((result for result in results if result.loss is not None), key=_rank)
    if not finished:
        return []
    best = finished[0]
    chosen = ", ".join(f"{key} {value}" for key, value in best.trial.point.items())
    lines = ["", f"Best of {len(finished):,} finished trials: {best.trial.run.name}"]
    lines.append(f"    {search.loss_name} {best.loss:.3f}")
    lines += textwrap.wrap(chosen, COLUMNS, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    if len(finished) == 1:
        return lines
    second = finished[1]
    lines.append(f"Next: {second.trial.run.name}")
    lines.append(f"    {search.loss_name} {second.loss:.3f}, {(second.loss or 0) - (best.loss or 0):.3f} more")
    return [*lines, *textwrap.wrap(WHAT_IT_MEANS, COLUMNS)]
