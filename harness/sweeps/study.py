"""Optuna's part in a search: the next point, and whether to prune a trial. No other module has Optuna.

Every answer is computed from the trials' results alone, in a study that is made for it and discarded: a search that was
killed gets the answers of one that was not. The random state is the trial's own, by its number: no folder would hold
one that continued from trial to trial.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.common.errors import UserError
from harness.sweeps.file import Pruning
from harness.sweeps.space import Choices, Domain, Point, contains
from harness.sweeps.trials import TrialResult

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.study import Study
    from optuna.trial import FrozenTrial


def check_installed() -> None:
    """Raise UserError if the extra with Optuna is not installed."""
    _optuna()


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("the optuna package is missing: uv run --extra sweep sweep_runs.py search ...") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Sampler:
    """Chooses points: at random for the first ten finished trials, then by a tree-structured Parzen estimator over all
    keys together (Bergstra et al. 2011, https://papers.nips.cc/paper/4443; Optuna's TPESampler)."""

    def __init__(self, domains: Mapping[str, Domain], seed: int) -> None:
        """Raise UserError without Optuna."""
        self.domains = domains
        self.seed = seed
        self._optuna = _optuna()
        self._distributions = {key: _distribution(domain) for key, domain in domains.items()}

    def suggest(self, results: Sequence[TrialResult], number: int, draw: int) -> Point:
        """A point for the trial of this number. `draw` counts those that it could not use, for another one."""
        seed = hashlib.sha256(f"{self.seed} {number} {draw}".encode()).digest()
        sampler = self._optuna.samplers.TPESampler(seed=int.from_bytes(seed[:4], "big"), constant_liar=True)
        study = self._optuna.create_study(direction="minimize", sampler=sampler)
        for result in results:
            if contains(self.domains, result.trial.point):
                study.add_trial(self._frozen(result))
        params = study.ask(self._distributions).params
        return {key: _value(domain, params[key]) for key, domain in self.domains.items()}

    def _frozen(self, result: TrialResult) -> FrozenTrial:
        """A trial as Optuna has it. One that diverged is a pruned one without any losses, which are the worst: the
        sampler ignores failed ones and would look there again. Unfinished ones count as bad, so that trials at the same
        time are not alike (`constant_liar`)."""
        states = self._optuna.trial.TrialState
        state = {
            "finished": states.COMPLETE,
            "pruned": states.PRUNED,
            "diverged": states.PRUNED,
            "failed": states.FAIL,
            "unfinished": states.RUNNING,
        }[result.state]
        point = result.trial.point
        return self._optuna.trial.create_trial(
            state=state,
            value=result.loss if state == states.COMPLETE else None,
            params={key: _param(domain, point[key]) for key, domain in self.domains.items()},
            distributions=self._distributions,
            intermediate_values=dict(result.losses) if result.state == "pruned" else {},
        )


class Pruner:
    """Gives trials up by the median rule (Golovin et al. 2017, section 3.5, "Google Vizier"; Optuna's MedianPruner).

    Losses are compared after as many tokens, not after as many steps, which may have different batches. A finished
    trial that was not validated there counts by its last validation before."""

    def __init__(self, pruning: Pruning) -> None:
        """Raise UserError without Optuna."""
        self.pruning = pruning
        self._optuna = _optuna()

    def gives_up(self, losses: Mapping[int, float], finished: Sequence[TrialResult], tokens: int) -> bool:
        """True if a trial with these losses so far, the last of which is judged, is to be pruned. `tokens` is its
        total, beside those of the other, finished trials."""
        warmup = math.ceil(self.pruning.after_share * tokens)
        pruner = self._optuna.pruners.MedianPruner(self.pruning.after_trials, warmup)
        study: Study = self._optuna.create_study(direction="minimize")
        for result in finished:
            study.add_trial(self._frozen("COMPLETE", _at(result.losses, losses), value=result.loss))
        study.add_trial(self._frozen("RUNNING", losses))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where all losses are NaN
            # Not should_prune() of the trial: that of one which was not asked for is always False.
            return bool(pruner.prune(study, study.get_trials(deepcopy=False)[-1]))

    def _frozen(self, state: str, losses: Mapping[int, float], value: float | None = None) -> FrozenTrial:
        states = self._optuna.trial.TrialState
        return self._optuna.trial.create_trial(state=states[state], value=value, intermediate_values=dict(losses))


def _at(losses: Mapping[int, float], places: Mapping[int, float]) -> dict[int, float]:
    """The losses at other places: each one's last before or at it, where there is one."""
    known = sorted(losses)
    before = {place: bisect.bisect_right(known, place) for place in places}
    return {place: losses[known[count - 1]] for place, count in before.items() if count}


def _distribution(domain: Domain) -> BaseDistribution:
    distributions = _optuna().distributions
    if isinstance(domain, Choices):
        return distributions.CategoricalDistribution(domain.texts())
    if isinstance(domain.min, int):
        return distributions.IntDistribution(domain.min, domain.max, log=domain.log, step=domain.step or 1)
    return distributions.FloatDistribution(domain.min, domain.max, log=domain.log, step=domain.step)


def _value(domain: Domain, param: Any) -> Any:
    return json.loads(param) if isinstance(domain, Choices) else domain.rounded(param)


def _param(domain: Domain, value: Any) -> Any:
    """Inverse of `_value`, for a value in a folder."""
    if isinstance(domain, Choices):
        return json.dumps(value)
    return value if isinstance(domain.min, int) else float(value)
