"""A search: like a sweep, but each next run is chosen by the results of the others, and is pruned if it does worse than
they did.

No other record of a search is kept than its trials' folders, so that no record can disagree with them: each point is
chosen by a study that is made of their results for it and discarded. Its random state is the trial's own, by its
number: a search that was killed gets the points of one that was not.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.common.errors import RunError, UserError
from harness.common.json_files import json_schema, parse_config, read_json_object
from harness.model.config import ModelConfig
from harness.runs.metrics import TrainEvent, ValidationEvent, read_metrics
from harness.runs.train_config import TrainConfig
from harness.sweeps.derived_runs import (
    DERIVED,
    Base,
    Derivation,
    DerivedRun,
    TrialRecord,
    derive,
    explained,
    write_runs,
)
from harness.sweeps.file import Pruning, Range, Settings, Sweep, labels, name_and_base, read_sweep
from harness.sweeps.plan import Planner
from harness.sweeps.run import Attempt, Say, SweepRunner
from harness.sweeps.status import Status, count_states, status_lines, status_of, wrapped

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

LARGEST_DRAWS = 200  # for one trial; where even they are of no use, hardly any point is
LARGEST_FAILURES = 5  # one after the other, for which no point's values are to blame
RESOLUTION_DIGITS = 3  # a range without a step is divided into some thousands of values: short numbers, short names
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
class Result:
    """A trial: its number, point and run, and how far it came. `losses` has the validation losses by the tokens seen
    before them, infinite where one was not finite; `loss` is what the search minimizes, of a finished trial."""

    number: int
    point: Settings
    status: Status
    losses: Mapping[int, float]
    loss: float | None = None
    has_diverged: bool = False

    @property
    def run(self) -> DerivedRun:
        return self.status.run


@dataclass(frozen=True)
class Search:
    """A SWEEP.json with "search". `count` trials are to be made."""

    path: Path
    sweep: Sweep
    name: str
    base: Base
    runs_dir: Path
    count: int

    def derive(self, number: int, point: Settings) -> DerivedRun:
        """The run of the trial of this number at a point; nothing is written. Raises UserError for what could not be
        trained."""
        name = f"{self.name}-{number:03d}-{labels([point])[0]}"
        record = TrialRecord(number=number, point=point)
        return derive(self.base, name, {**self.sweep.set, **point}, self.name, record)

    def results(self) -> list[Result]:
        """The trials whose folders are there, by number. Raises UserError for a folder that is not what it says."""
        found = []
        for path in self.runs_dir.glob(f"*/{DERIVED}"):
            if not re.fullmatch(rf"{re.escape(self.name)}-\d{{3,}}-.+", path.parent.name):
                continue
            derivation = parse_config(Derivation, read_json_object(path), path)
            trial = derivation.trial
            if derivation.sweep != self.name or trial is None:
                continue
            with explained(f"{path}: is a trial of {self.path}, which today makes "):
                run = self.derive(trial.number, trial.point)
            if run.name == path.parent.name and run.is_made():  # a copy under another name is no trial
                found.append(self.result_of(run))
        return sorted(found, key=lambda result: result.number)

    def result_of(self, run: DerivedRun) -> Result:
        """Read a trial's result from its folder."""
        trial, status = run.derivation.trial, status_of(run)
        assert trial is not None
        events = []
        with suppress(OSError):
            events = read_metrics(run.run.metrics)
        reports = [event for event in events if isinstance(event, TrainEvent)]
        validations = [event for event in events if isinstance(event, ValidationEvent)]
        losses = {each.tokens_seen: math.inf if each.loss is None else float(each.loss) for each in validations}
        loss = getattr(status.summary, LOSSES[self.sweep.objective][0]) if status.state == "finished" else None
        has_diverged = status.state == "finished" and loss is None
        has_diverged |= status.state == "failed" and bool(reports) and reports[-1].loss is None
        return Result(trial.number, trial.point, status, losses, loss, has_diverged)


def load_search(path: Path, runs_dir: Path, trials: int | None = None) -> Search:
    """Read a SWEEP.json with "search". `trials` takes the place of its own number. Raises UserError naming the file,
    the key and the remedy."""
    sweep = read_sweep(path)
    if not sweep.is_search:
        raise UserError(f'{path}: key "search": missing; without it, `sweep_runs.py run` trains what it says')
    name, base = name_and_base(sweep, path, runs_dir)
    if {**base.configs, **sweep.set}["validation_interval"] is None:
        raise UserError(
            f'{path}: key "validation_interval": the runs would have no validation loss to minimize; give '
            '"validation_interval", "validation_batches" and "start_val_token" in "set"'
        )
    return Search(path, sweep, name, base, runs_dir, trials or sweep.trials or 0)


class Sampler:
    """Chooses points: at random for the first ten finished trials, then by a tree-structured Parzen estimator over all
    keys (Bergstra et al. 2011, https://papers.nips.cc/paper/4443; Optuna's TPESampler)."""

    def __init__(self, search: Search) -> None:
        """Raise UserError without Optuna, and for what is no range."""
        try:
            import optuna
        except ImportError:
            raise UserError("the optuna package is missing: uv run --extra sweep sweep_runs.py search ...") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna: Any = optuna
        self.search = search
        self.seed = search.sweep.sampler_seed
        self.distributions: dict[str, BaseDistribution] = {}
        for key, domain in search.sweep.search.items():
            try:
                self.distributions[key] = self._distribution(key, domain)
            except ValueError as error:
                raise UserError(f'{search.path}: in "search": key "{key}": {error}') from None

    def _distribution(self, key: str, domain: Range | list[Any]) -> BaseDistribution:
        """Optuna's distribution of a key's values. Raises ValueError for what is none."""
        kinds = self.optuna.distributions
        if isinstance(domain, list):
            texts = [json.dumps(value) for value in domain]  # in which 1, 1.0 and true differ
            if len(set(texts)) < max(2, len(texts)):
                raise ValueError('give at least two values, each once; one for all trials belongs in "set"')
            return kinds.CategoricalDistribution(texts)
        if domain.min >= domain.max:
            raise ValueError(f'"min" ({domain.min}) must be below "max" ({domain.max})')
        if domain.step and domain.log:
            raise ValueError('give a list of values in place of "log" and "step"')
        if domain.step and (Decimal(str(domain.max)) - Decimal(str(domain.min))) % Decimal(str(domain.step)):
            raise ValueError(f'"step" ({domain.step}) does not divide the range')
        schema = {**json_schema(ModelConfig)["properties"], **json_schema(TrainConfig)["properties"]}[key]
        if "number" in {each.get("type") for each in (schema, *schema.get("anyOf", []))}:
            return kinds.FloatDistribution(float(domain.min), float(domain.max), log=domain.log, step=domain.step)
        if not all(isinstance(each, int) for each in (domain.min, domain.max, domain.step or 1)):
            raise ValueError('"min", "max" and "step" must be whole numbers')
        return kinds.IntDistribution(domain.min, domain.max, log=domain.log, step=domain.step or 1)

    def suggest(self, results: Sequence[Result], number: int, draw: int) -> Settings:
        """A point for the trial of this number. `draw` counts those that it could not use, for another one."""
        seed = hashlib.sha256(f"{self.seed} {number} {draw}".encode()).digest()
        # Unfinished trials count as bad (`constant_liar`), so that trials at the same time are not alike.
        sampler = self.optuna.samplers.TPESampler(seed=int.from_bytes(seed[:4], "big"), constant_liar=True)
        study = self.optuna.create_study(direction="minimize", sampler=sampler)
        lists = {key for key, domain in self.search.sweep.search.items() if isinstance(domain, list)}
        states = self.optuna.trial.TrialState
        state = {"finished": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        for result in results:
            # One that diverged is a pruned one without any losses, which are the worst: the sampler ignores failed ones
            # and would look there again.
            with suppress(ValueError):  # a trial outside ranges that have been changed since
                trial = self.optuna.trial.create_trial(
                    state=states.PRUNED if result.has_diverged else state.get(result.status.state, states.RUNNING),
                    value=result.loss,
                    params={key: json.dumps(value) if key in lists else value for key, value in result.point.items()},
                    distributions=self.distributions,
                    intermediate_values=dict(result.losses) if result.status.state == "pruned" else {},
                )
                study.add_trial(trial)
        return {key: self._value(key, param) for key, param in study.ask(self.distributions).params.items()}

    def _value(self, key: str, param: Any) -> Any:
        """A value for a run: a number of a range in few digits, that can be read, written and put into a name."""
        domain = self.search.sweep.search[key]
        if isinstance(domain, list):
            return json.loads(param)
        if isinstance(param, int):
            return param
        scale = param * math.log(domain.max / domain.min) if domain.log else domain.max - domain.min
        places = 12 if domain.step else RESOLUTION_DIGITS - math.floor(math.log10(scale))
        return float(min(max(round(param, places), domain.min), domain.max))


def is_worse_than_median(losses: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> bool:
    """Return whether the lowest of these losses is above the median of the losses that others had after as many tokens
    as the last of them, or at their last validation before (Golovin et al. 2017, section 3.5, "Google Vizier")."""
    rivals = []
    for other in others:
        places = sorted(other)
        if before := bisect.bisect_right(places, max(losses)):
            rivals.append(other[places[before - 1]])
    return bool(rivals) and min(losses.values()) > statistics.median(rivals)


class SearchRunner(SweepRunner):
    """Makes and runs the trials of a search. Those that were begun before come first. `pruning` None: no pruning."""

    def __init__(
        self,
        search: Search,
        planner: Planner,
        script: Path,
        *,
        max_dollars: float | None = None,
        pruning: Pruning | None = None,
    ) -> None:
        """Raise UserError without Optuna, for a budget without a price, and for a trial with a file that cannot be
        read."""
        self.search = search
        self.sampler = Sampler(search)
        if max_dollars is not None and {**search.base.configs, **search.sweep.set}["price_per_hour"] is None:
            raise UserError(f'{search.path}: key "price_per_hour": --max-dollars needs it in "set"')
        self.pruning = pruning
        self.results = {result.run.name: result for result in search.results()}
        for result in self.results.values():
            if result.status.state == "damaged":  # what the next points are chosen by is not to be read
                raise UserError(result.status.said)
        super().__init__([each.run for each in self.results.values()], planner, script, max_dollars=max_dollars)
        self.unmade = max(0, search.count - len(self.results))
        self.failures = 0  # the last ones, without a success in between
        self._judged: dict[str, int] = {}  # by the run's name: how many of its validations are
        self._said_impossible = False

    def describe_start(self) -> str:
        """Describe how many trials are done, to be resumed and to be chosen."""
        done = len(self.results) - len(self.waiting)
        counts = {"are done": done, "go on": len(self.waiting), "are to be chosen": self.unmade}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)

    def start_what_can(self, say: Say) -> None:
        super().start_what_can(say)
        while self.free and self.unmade and not self.waiting and not self.reason:
            if self.failures >= LARGEST_FAILURES:
                self.reason = f"{LARGEST_FAILURES} trials one after the other have failed"
                return
            try:
                run = self._choose(say)
                write_runs([run])
            except (UserError, RunError) as error:  # no reason to end the trials under way
                self.reason = str(error)
                return
            self.results[run.name] = self.search.result_of(run)
            self.unmade -= 1
            self.runs.append(run)
            self.waiting.append(run)
            super().start_what_can(say)

    def _choose(self, say: Say) -> DerivedRun:
        """The next trial's run: one that can be trained, and that none before was. Raises UserError if no such one is
        found: Optuna itself may say the same point again and again, above all where there are few."""
        results = list(self.results.values())
        number = max((result.number for result in results), default=-1) + 1
        refusal = "all that were drawn are trials already"
        for draw in range(LARGEST_DRAWS):
            try:
                run = self.search.derive(number, self.sampler.suggest(results, number, draw))
                run.check_startable()
            except UserError as error:
                refusal = str(error)
                if not self._said_impossible:
                    self._said_impossible = True
                    say(f"A point that cannot be trained is left out, as others like it will be: {error}")
                continue
            if run.settings not in [result.run.settings for result in results]:
                return run
        raise UserError(f"no new point was found among {LARGEST_DRAWS} that were drawn: {refusal}")

    def end(self, attempt: Attempt, say: Say) -> None:
        super().end(attempt, say)
        result = self.results[attempt.run.name] = self.search.result_of(attempt.run)
        is_failure = result.status.state == "failed" and not result.has_diverged
        self.failures = self.failures + 1 if is_failure else 0

    def watch(self, say: Say) -> None:
        """Judge validations that are new, one after the other, as if each had been seen at once."""
        finished = [result.losses for result in self.results.values() if result.loss is not None]
        if self.pruning is None or len(finished) < self.pruning.after_trials:
            return
        for attempt in [each for each in self.attempts if not each.is_stopped]:
            name = attempt.run.name
            tokens = attempt.tokens or max(max(losses, default=0) for losses in finished)
            events = []
            with suppress(OSError):
                events = [each for each in read_metrics(attempt.run.run.metrics) if isinstance(each, ValidationEvent)]
            losses: dict[int, float] = {}
            for count, event in enumerate(events):
                losses[event.tokens_seen] = math.inf if event.loss is None else event.loss
                if count < self._judged.get(name, 0) or event.tokens_seen < self.pruning.after_share * tokens:
                    continue
                self._judged[name] = count + 1
                if is_worse_than_median(losses, finished):
                    attempt.stop(f"# pruned at global step {event.global_step}\n")
                    loss = "not finite" if event.loss is None else f"{event.loss:.3f}"
                    say(f"{name}: pruned at global step {event.global_step:,}, validation loss {loss}")
                    break


def _rank(result: Result) -> tuple[int, float, int]:
    """Sort key: finished trials by their loss, then the others, those with the most tokens first."""
    if result.loss is not None:
        return 0, result.loss, result.number
    return 1, -max(result.losses, default=0), result.number


def describe_search(search: Search) -> str:
    """Describe a search for a terminal: one line a trial, the best first."""
    statuses = [result.status for result in sorted(search.results(), key=_rank)]
    said = count_states(statuses) or "nothing is made yet"
    head = f"Search {search.name} in {search.runs_dir}, {len(statuses):,} of {search.count:,} trials made: {said}"
    return "\n".join([head, "", *status_lines(statuses)]).rstrip()


def describe_best(search: Search, results: Sequence[Result]) -> list[str]:
    """The best trials, and what their difference means."""
    finished = sorted((result for result in results if result.loss is not None), key=_rank)
    if not finished:
        return []
    what, best = LOSSES[search.sweep.objective][1], finished[0]
    chosen = ", ".join(f"{key} {value}" for key, value in best.point.items())
    lines = ["", f"Best of {len(finished):,} finished trials: {best.run.name}", f"    {what} {best.loss:.3f}"]
    lines += wrapped(chosen, "    ", "")
    if len(finished) > 1:
        second = finished[1]
        more = (second.loss or 0.0) - (best.loss or 0.0)
        lines += [f"Next: {second.run.name}", f"    {what} {second.loss:.3f}, {more:.3f} more"]
        lines += wrapped(WHAT_IT_MEANS, following="")
    return lines
