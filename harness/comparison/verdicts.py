"""Verdicts on arms against the baseline: better, worse or inconclusive, with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from harness.common.messages import abbreviated
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.noise import (
    DIFFERENCE_TO_DETECT,
    MOST_SEEDS,
    Estimate,
    Variance,
    holm,
    pooled_variance,
    satterthwaite,
    seeds_needed,
    text_noise,
    variance_of_mean,
)

Word = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class Arm:
    """A setting, trained in one run or in several runs that differ in `random_seed` alone. `losses` has the loss of
    each run in nats per token; all arms of a comparison use the same text. `windows` has an array [windows] per run
    with the losses of the text's windows, or is None if a run lacks them. `names` has the names of the runs, if they
    are known."""

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

    @cached_property
    def mean_windows(self) -> np.ndarray:
        """Loss of each window, averaged over runs, [windows]."""
        return np.mean([windows.astype(np.float64) for windows in self.windows or []], axis=0)

    @cached_property
    def variance_by_text(self) -> float | None:
        """Variance that the choice of text gives to a run's loss relative to its replicates, in nats². None if it
        cannot be estimated."""
        if self.windows is None or self.runs < 2 or len({windows.size for windows in self.windows}) > 1:
            return None
        estimates = [text_noise(windows.astype(np.float64) - self.mean_windows) for windows in self.windows]
        found = [each.error**2 for each in estimates if isinstance(each, Estimate)]
        return sum(found) / (self.runs - 1) if len(found) == self.runs else None


@dataclass(frozen=True)
class Difference:
    """Mean loss of an arm minus that of the baseline, in nats. Negative if the arm is better."""

    value: float
    training: Estimate | None  # with training noise alone; None if it is not known
    text: Estimate | Inconclusive  # with text noise alone: the same trained models on other text
    both: Estimate | None  # with both kinds of noise, or with training noise alone if text noise is not known
    is_pooled: bool = False  # the spread over seeds is estimated from all arms together

    @property
    def is_tested(self) -> bool:
        """True if the estimate of training noise is above 0. Replicates that are equal to the last digit do not prove
        that training has no noise."""
        return self.training is not None and self.training.error > 0


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm. Differences are the arm's loss minus the baseline's, in nats: negative is better."""

    arm: str
    baseline: str
    word: Word
    sentence: str  # the verdict in words
    runs: tuple[int, int]  # numbers of runs of the arm and of the baseline
    reason: str | None = None  # why it is inconclusive
    difference: Difference | None = None  # None if one of the arms lacks finite losses
    interval: tuple[float, float] | None = None  # includes all noise that is known
    level: float | None = None  # of the interval, in percent: 95, or more with Holm's correction
    adjusted_p: float | None = None  # with Holm's correction; None if not tested


def compare_arms(baseline: Arm, arms: Sequence[Arm]) -> list[Verdict]:
    """Return a verdict on each arm, in the order of `arms`, with Holm's correction for all arms that can be tested.

    The caller ensures that all losses are of the same text, and that the runs of an arm are replicates
    (harness/comparison/arms.py). The losses are of one kind, such as test losses or validation losses.

    - Both arms have two runs or more: Welch's interval for training noise. Text noise is added if it is known.
    - One of the two arms has a single run: the pooled spread of all arms that have replicates is used, and the sentence
      says so. If the arm of the single run is 4 times as noisy, the interval covers 65 % or less.
    - No arm has replicates: inconclusive. `difference.text` still has the interval for these trained models on other
      text.

    Intervals for 3 to 5 runs per arm cover 93.4 to 96.5 % for normal losses whose standard deviations differ by up to a
    factor of 4. With 2 runs in an arm they cover 90 to 98 %, because Welch's degrees of freedom are then a poor
    estimate. With Holm's correction, 2 to 8 arms without effect give a false alarm in 1.5 to 5 % of experiments if all
    arms have the same number of runs and their standard deviations differ by at most a factor of 2. If several arms do
    differ from the baseline, it is less likely that all their intervals hold than that each one holds (5 arms of 10
    runs: 91 %).
    """
    every = [baseline, *arms]
    differences = [difference_of(baseline, arm, every) for arm in arms]
    tested = [each for each in differences if isinstance(each, Difference) and each.is_tested]
    corrected = iter(zip(*holm([each.both.p for each in tested if each.both is not None]), strict=True))
    verdicts = []
    for arm, difference in zip(arms, differences, strict=True):
        if isinstance(difference, Inconclusive):
            sentence = f"{arm.name} against {baseline.name}: {difference}"
            runs = (arm.runs, baseline.runs)
            verdicts.append(Verdict(arm.name, baseline.name, "inconclusive", sentence, runs, difference.reason))
        elif difference.is_tested:
            verdicts.append(_tested(baseline, arm, difference, len(tested), *next(corrected)))
        else:
            verdicts.append(_untested(baseline, arm, difference))
    return verdicts


def difference_of(baseline: Arm, arm: Arm, arms: Sequence[Arm]) -> Difference | Inconclusive:
    """Estimate the difference of two arms. `arms` has all arms of the comparison, for the pooled spread. Returns
    Inconclusive if one of the two arms has no run or a loss that is not finite."""
    both = (baseline, arm)
    for each in (arm, baseline):
        if not each.runs:
            return Inconclusive(f"{each.name} has no run with this loss")
        if not each.is_finite:
            return Inconclusive(_diverged(each))
    value = float(np.mean(arm.losses) - np.mean(baseline.losses))
    text: Estimate | Inconclusive = Inconclusive("the losses of the windows were not kept")
    if baseline.windows is not None and arm.windows is not None:
        sizes = sorted({windows.size for windows in (*baseline.windows, *arm.windows)})
        text = Inconclusive(f"they were measured on texts of {' and '.join(f'{size:,}' for size in sizes)} windows")
        if len(sizes) == 1:
            text = text_noise(arm.mean_windows - baseline.mean_windows)  # paired by window
    if all(each.runs > 1 for each in both):
        parts = [variance_of_mean(each.losses) for each in both]
        by_text = sum((each.variance_by_text or 0.0) / each.runs for each in both)
    else:
        usable = _replicated(arms)
        pooled = pooled_variance([each.losses for each in usable])
        if pooled is None:
            return Difference(value, None, text, None)
        share = sum(1 / each.runs for each in both)
        parts = [Variance(pooled.value * share, pooled.df)]
        known = [(each.variance_by_text, each.runs - 1) for each in usable if each.variance_by_text is not None]
        by_text = share * sum(variance * df for variance, df in known) / max(1, sum(df for _, df in known))
    training = satterthwaite(value, parts)
    if isinstance(text, Estimate):
        # The spread over seeds already includes text noise that differs from run to run.
        parts.append(Variance(max(0.0, text.error**2 - by_text), text.df))
    return Difference(value, training, text, satterthwaite(value, parts), is_pooled=any(each.runs < 2 for each in both))


def _replicated(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms that show the spread over seeds: those with at least two runs, all of whose losses are finite."""
    return [arm for arm in arms if arm.runs > 1 and arm.is_finite]


def _diverged(arm: Arm) -> str:
    """Return the reason why an arm cannot be compared: which of its losses are not finite. An arm of one run has the
    run's name, which is then given once."""
    lost = [name for name, loss in zip(arm.names, arm.losses, strict=False) if not np.isfinite(loss)]
    if list(arm.names) == [arm.name]:
        return f"the loss of {arm.name} is not finite"
    which = f" ({abbreviated(lost)})" if lost else ""
    count, are = (f"{len(lost)} losses", "are") if len(lost) > 1 else ("a loss", "is")
    return f"{count} of {arm.name}{which} {are} not finite"


# Sentences


def _untested(baseline: Arm, arm: Arm, difference: Difference) -> Verdict:
    """Return the verdict on an arm without an estimate of training noise. Text noise may be known."""
    reason = "training noise is unknown"
    if difference.training is not None:
        reason = "the runs of an arm are alike to the last digit, as if the seed did nothing"
    models = f"these models differ by {_signed(difference.value)} nats on this text"
    if isinstance(difference.text, Estimate):
        low, high = interval = difference.text.interval()
        within = "is within text noise, too" if low <= 0 <= high else "is beyond text noise"
        ends = f"{_signed(low, interval)} to {_signed(high, interval)}"
        models = f"{_signed(difference.value, interval)} nats {within} (95 % interval {ends})"
    sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}; {models}"
    return Verdict(arm.name, baseline.name, "inconclusive", sentence, (arm.runs, baseline.runs), reason, difference)


def _tested(baseline: Arm, arm: Arm, difference: Difference, tests: int, adjusted_p: float, alpha: float) -> Verdict:
    assert difference.both is not None, "it is tested"
    low, high = interval = difference.both.interval(alpha)
    level = 100 - float(f"{100 * alpha:.2g}")  # 100 * alpha rounded to two digits: 98.3, 99.58
    facts = f"{arm.runs} and {baseline.runs} runs"
    if difference.is_pooled:
        single = " and ".join(each.name for each in (arm, baseline) if each.runs == 1)
        facts += f", pooled spread as if seeds spread {single} like the others"
    if not low <= 0 <= high and not isinstance(difference.text, Estimate):
        facts += ", this text only"
    if tests > 1:
        facts += f", Holm for {tests} arms"
    word: Word = "inconclusive" if low <= 0 <= high else "better" if difference.value < 0 else "worse"
    reason = None
    if word == "inconclusive":
        reason = f"{_signed(difference.value, interval)} nats is within {_which_noise(difference, alpha)}"
        ends = f"{_signed(low, interval)} to {_signed(high, interval)}"
        sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}"
    else:
        near, far = sorted(map(abs, interval))
        digits = _digits(interval)
        ends = f"{near:.{digits}f} to {far:.{digits}f}"
        sentence = f"{arm.name} is {word} than {baseline.name} by {abs(difference.value):.{digits}f} nats"
    sentence += f" ({level:g} % interval {ends}; {facts})"
    runs = (arm.runs, baseline.runs)
    return Verdict(arm.name, baseline.name, word, sentence, runs, reason, difference, interval, level, adjusted_p)


def _which_noise(difference: Difference, alpha: float) -> str:
    """Return which kinds of noise could each explain the difference alone, or "both kinds of noise" if neither could
    alone."""
    kinds = {"training noise": (difference.training, alpha), "text noise": (difference.text, 0.05)}
    found = []
    for kind, (noise, level) in kinds.items():
        if isinstance(noise, Estimate):
            low, high = noise.interval(level)
            found += [kind] if low <= 0 <= high else []
    return {0: "both kinds of noise", 1: "".join(found), 2: "either kind of noise"}[len(found)]


def seeds_sentences(verdicts: Sequence[Verdict], arms: Sequence[Arm]) -> str:
    """Return sentences on training noise and on the number of seeds that it takes to detect 0.01 nats. For inconclusive
    verdicts that training noise alone can explain, they also give the seeds to detect a difference as large as the one
    seen. `arms` are all compared arms, including the baseline. The numbers are those of a t test of two arms, without
    Holm's correction and text noise."""
    spread = pooled_variance([arm.losses for arm in _replicated(arms)])
    if spread is None:
        return "Training noise is unknown: 3 seeds of each arm would give a first idea of it."
    if spread.value == 0:
        return "Training noise is unknown: the seeds of an arm came out exactly alike, as if they did nothing."
    likely, low, high = map(_count, seeds_needed(spread))
    degrees = f"{spread.df:.0f} {'degree' if spread.df == 1 else 'degrees'} of freedom"
    text = (
        f"Seeds alone spread the loss by {math.sqrt(spread.value):.4f} nats ({degrees}): to detect "
        f"{DIFFERENCE_TO_DETECT} nats in 80 % of cases takes {likely} seeds of each arm ({low} to {high}, as that "
        "spread is itself uncertain)."
    )
    parts = []
    for verdict in verdicts:
        if verdict.interval is None or verdict.word != "inconclusive" or verdict.difference is None:
            continue
        training = verdict.difference.training
        if training is not None and training.interval()[0] <= 0 <= training.interval()[1]:
            size = abs(verdict.difference.value)
            likely, low, high = map(_count, seeds_needed(spread, size))
            parts.append(f"{likely} for {verdict.arm} ({size:.{_digits(verdict.interval)}f} nats; {low} to {high})")
    seen = f" Seeds of each arm to detect a difference as large as the one seen: {', '.join(parts)}."
    return text + (seen if parts else "")


def _count(seeds: int | None) -> str:
    return f"over {MOST_SEEDS:,}" if seeds is None else f"{seeds:,}"


def _signed(number: float, interval: tuple[float, float] = (0.0, 0.0)) -> str:
    return f"{number:+.{_digits(interval)}f}"


def _digits(interval: tuple[float, float]) -> int:
    """Return the number of decimals that shows two digits of half the interval's width, at least 3 and at most 6."""
    half = (interval[1] - interval[0]) / 2
    return 3 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
