"""Two arms of an experiment side by side: the difference of their mean losses, and what both kinds of noise leave of
it. An arm is a setting, tried with one run or with several that differ in `random_seed` alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harness.comparison.inconclusive import Inconclusive
from harness.comparison.noise import MeanEstimate, MeanVariance, difference_noise, variance_of_mean
from harness.comparison.training_noise import Part, Spread, Uncertain, combine, own_part, pooled_spread, shared_part


@dataclass(frozen=True)
class Arm:
    """`losses` has one run each, in nats per token: for all arms of a comparison of the same text. `windows`, where
    known for every run, has the losses of that text's windows, [windows] each, in the order of `losses`. `names` has
    the runs' names, in the same order, where they are known."""

    name: str
    losses: Sequence[float]
    windows: Sequence[np.ndarray] | None = None
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.windows is not None and len(self.windows) != len(self.losses):
            raise ValueError(f"{self.name}: {len(self.windows)} runs with windows, {len(self.losses)} with losses")

    @property
    def runs(self) -> int:
        return len(self.losses)

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.losses).all())

    @property
    def not_finite(self) -> list[str]:
        """The names of the runs whose losses are not finite."""
        return [name for name, loss in zip(self.names, self.losses, strict=False) if not np.isfinite(loss)]

    @property
    def texts(self) -> set[int]:
        """The numbers of windows that its runs were measured on."""
        return {windows.size for windows in self.windows or []}

    @cached_property
    def mean_windows(self) -> np.ndarray:
        """The mean over runs, [windows]."""
        return np.mean([windows.astype(np.float64) for windows in self.windows or []], axis=0)

    @cached_property
    def variance_by_text(self) -> float | None:
        """Variance, by the choice of text, of one run's loss against those of its replicates, nats²; None where it
        cannot be estimated."""
        if self.windows is None or self.runs < 2 or len(self.texts) > 1:
            return None
        estimates = [variance_of_mean(windows.astype(np.float64) - self.mean_windows) for windows in self.windows]
        found = [each.variance for each in estimates if isinstance(each, MeanVariance)]
        return sum(found) / (self.runs - 1) if len(found) == self.runs else None


@dataclass(frozen=True)
class Borrowed:
    """Noise estimates pooled over the replicates of all arms, for an arm of one run."""

    spread: Spread | None  # None: no arm has two runs
    by_text: float  # the part of a run's variance that other text would change, nats²; 0 where it is not known


@dataclass(frozen=True)
class Difference:
    """Mean loss of an arm less that of the baseline, in nats: negative where the arm is better."""

    value: float
    training: Uncertain | None  # by the seeds alone; None: not known
    evaluation: MeanEstimate | Inconclusive  # by the text alone: these very models on other text
    both: Uncertain | None  # by both kinds, or by the seeds alone where there is no estimate of the other
    is_borrowed: bool = False


def borrowed_from(arms: Sequence[Arm]) -> Borrowed:
    """The spread within the arms that have two runs or more; a run whose loss is not finite tells nothing of it."""
    usable = [arm for arm in arms if arm.runs > 1 and arm.is_finite]
    spread = pooled_spread([arm.losses for arm in usable])
    known = [(variance, arm.runs - 1) for arm in usable if (variance := arm.variance_by_text) is not None]
    by_text = sum(variance * df for variance, df in known) / sum(df for _, df in known) if known else 0.0
    return Borrowed(spread, by_text)


def difference_of(baseline: Arm, arm: Arm, borrowed: Borrowed) -> Difference:
    """Estimate the difference of two arms that have at least one run each and finite losses."""
    value = float(np.mean(arm.losses) - np.mean(baseline.losses))
    evaluation = _evaluation_noise(baseline, arm)
    parts, by_text, is_borrowed = _training_parts(baseline, arm, borrowed)
    if not parts:
        return Difference(value, None, evaluation, None)
    training = combine(value, parts)
    if isinstance(evaluation, MeanEstimate):
        # The spread over seeds already has what this text does to one run and not to the next.
        parts.append(Part(max(0.0, evaluation.noise.variance - by_text), evaluation.noise.df))
    return Difference(value, training, evaluation, combine(value, parts), is_borrowed)


def _training_parts(baseline: Arm, arm: Arm, borrowed: Borrowed) -> tuple[list[Part], float, bool]:
    """The variance of the difference by seeds, how much of it is by the text too, and whether it is borrowed."""
    both = (baseline, arm)
    if all(each.runs > 1 for each in both):
        by_text = sum((each.variance_by_text or 0.0) / each.runs for each in both)
        return [own_part(each.losses) for each in both], by_text, False
    if borrowed.spread is None:
        return [], 0.0, False
    by_text = borrowed.by_text * sum(1 / each.runs for each in both)
    return [shared_part(borrowed.spread, *(each.runs for each in both))], by_text, True


def _evaluation_noise(baseline: Arm, arm: Arm) -> MeanEstimate | Inconclusive:
    if baseline.windows is None or arm.windows is None:
        return Inconclusive("the losses of the windows were not kept")
    texts = sorted(baseline.texts | arm.texts)
    if len(texts) > 1:
        return Inconclusive(f"they were measured on texts of {' and '.join(f'{size:,}' for size in texts)} windows")
    return difference_noise(arm.mean_windows, baseline.mean_windows)
