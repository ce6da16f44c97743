"""Running a search: like a sweep, but each next run is chosen by the results of the others, and is pruned if it does
worse than they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import RunError, UserError
from harness.runs.budget import stated_tokens
from harness.runs.metrics import MetricsFile, ValidationEvent
from harness.sweeps.attempt import Attempt
from harness.sweeps.derived_runs import write_runs
from harness.sweeps.plan import Planner
from harness.sweeps.run import Say, SweepRunner
from harness.sweeps.space import count_points
from harness.sweeps.study import Pruner, Sampler
from harness.sweeps.trials import Search, Trial, TrialResult, read_events, validation_losses

LARGEST_DRAWS = 200  # for one trial; where even they are of no use, hardly any point is
LARGEST_FAILURES = 5  # one after the other, for which no point's values are to blame


@dataclass(frozen=True)
class SearchLimits:
    """Limits of a search; `prunes`: whether it prunes trials."""

    max_dollars: float | None
    prunes: bool


class SearchRunner(SweepRunner):
    """Makes and runs the trials of a search. Those that were begun before come first."""

    def __init__(self, search: Search, planner: Planner, script: Path, limits: SearchLimits) -> None:
        """Raise UserError without Optuna, for a budget without a price, for more trials than there are points, and for
        a trial with a file that cannot be read."""
        self.search = search
        self.trials = search.trials()
        self.sampler = Sampler(search.sweep.search, search.sweep.sampler_seed)
        self.pruner = Pruner(search.sweep.pruning) if limits.prunes else None
        settings = {**search.base.configs, **search.sweep.set}
        if limits.max_dollars is not None and settings["price_per_hour"] is None:
            raise UserError(f'{search.path}: key "price_per_hour": --max-dollars needs it in "set"')
        points = count_points(search.sweep.search)
        if points is not None and points < search.count:
            raise UserError(f'{search.path}: key "search": has {points:,} points, fewer than {search.count:,} trials')
        super().__init__([trial.run for trial in self.trials], planner, script, limits.max_dollars)
        if self.ends.damaged:  # what the next points are chosen by is not to be read
            raise UserError(next(iter(self.ends.damaged.values())))
        self._ended: dict[str, TrialResult] = {}  # by the run's name: these do not change any more
        self._judged: dict[str, int] = {}  # by the run's name: how many of its losses are
        self._sizes: dict[str, int] = {}  # by the run's name: of its metrics.jsonl, when it was last read
        self._said_impossible = False

    @property
    def count(self) -> int:
        return self.search.count

    @property
    def unmade(self) -> int:
        """Number of trials that are still to be made."""
        return max(0, self.search.count - len(self.trials))

    def describe_start(self) -> str:
        """Describe how many trials are done, to be resumed and to be chosen."""
        done = len(self.trials) - len(self.waiting)
        counts = {"are done": done, "go on": len(self.waiting), "are to be chosen": self.unmade}
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)

    def results(self) -> list[TrialResult]:
        """Results of all trials so far."""
        return [self._result(trial) for trial in self.trials]

    def _result(self, trial: Trial) -> TrialResult:
        name = trial.run.name
        if name in self._ended:
            return self._ended[name]
        result = self.search.result_of(trial)
        if result.state in ("finished", "pruned") and name not in {each.run.name for each in self.attempts}:
            self._ended[name] = result
        return result

    # What a sweep's runner asks

    def is_work_left(self) -> bool:
        return bool(self.waiting or self.unmade)

    def start_what_can(self, say: Say) -> None:
        super().start_what_can(say)
        while self.free and self.unmade and not self.waiting and not self.ends.reason:
            if self._fail_one_after_the_other():
                self.ends.reason = f"{LARGEST_FAILURES} trials one after the other have failed"
                return
            self._make_next(say)
            super().start_what_can(say)

    def watch(self, say: Say) -> None:
        for attempt in self.attempts:
            if self.pruner and not attempt.is_stopped:
                self._judge(attempt, self.pruner, say)

    # Choosing

    def _make_next(self, say: Say) -> None:
        number = max((trial.number for trial in self.trials), default=-1) + 1
        try:
            trial = self._choose(number, self.results(), say)
            write_runs([trial.run])
        except (UserError, RunError) as error:  # no reason to end the trials under way
            self.ends.reason = str(error)
            return
        self.trials.append(trial)
        self.runs.append(trial.run)
        self.waiting.append(trial.run)

    def _choose(self, number: int, results: Sequence[TrialResult], say: Say) -> Trial:
        """The next trial: one that can be trained, and that none before was. Raises UserError if no such one is found.

        Optuna itself may say the same point again and again, above all where there are few."""
        known = [trial.run.settings for trial in self.trials]
        refusal = "all that were drawn are trials already"
        for draw in range(LARGEST_DRAWS):
            try:
                trial = self.search.make_trial(number, self.sampler.suggest(results, number, draw))
                trial.run.check_startable()
            except UserError as error:
                refusal = str(error)
                if not self._said_impossible:
                    self._said_impossible = True
                    say(f"A point that cannot be trained is left out, as others like it will be: {error}")
                continue
            if trial.run.settings not in known:
                return trial
        raise UserError(f"no new point was found among {LARGEST_DRAWS} that were drawn: {refusal}")

    def _fail_one_after_the_other(self) -> bool:
        """True if the last trials to end in this process have all failed, and not by diverging."""
        begun = {*self.ends.finished, *self.ends.pruned, *self.ends.failed}
        last = [result.state for result in self.results() if result.trial.run.name in begun][-LARGEST_FAILURES:]
        return last == ["failed"] * LARGEST_FAILURES

    # Pruning

    def _judge(self, attempt: Attempt, pruner: Pruner, say: Say) -> None:
        """Look at validation losses that are new, one after the other, as if each had been seen at once."""
        name, size = attempt.run.name, MetricsFile(attempt.run.run.metrics).size()
        if size == self._sizes.get(name, 0):
            return
        self._sizes[name] = size
        events = [event for event in read_events(attempt.run) if isinstance(event, ValidationEvent)]
        for count in range(self._judged.get(name, 0) + 1, len(events) + 1):
            self._judged[name] = count
            finished = [result for result in self.results() if result.state == "finished"]
            last = events[count - 1]
            if pruner.gives_up(validation_losses(events[:count]), finished, _tokens_of(attempt, finished)):
                attempt.prune(last.global_step)
                loss = "not finite" if last.loss is None else f"{last.loss:.3f}"
                say(f"{name}: pruned at global step {last.global_step:,}, validation loss {loss}")
                return


def _tokens_of(attempt: Attempt, finished: Sequence[TrialResult]) -> int:
    """Number of tokens of the whole trial; the most that a finished trial had where its settings do not state it: all
    there are, or steps, hours and dollars."""
    stated = stated_tokens(attempt.run.train_config, attempt.run.model_config)
    return int(stated) if stated else max((max(result.losses, default=0) for result in finished), default=0)
