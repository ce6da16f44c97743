"""Verdicts of arms against the baseline: better, worse or inconclusive, with the reason."""

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
    combine,
    holm,
    pooled_variance,
    seeds_needed,
    text_noise,
    variance_of_mean,
)

Word = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class Arm:
    """A setting, tried with one run or with several that differ in `random_seed` alone. `losses` has one run each, in
    nats per token: of the same text for all arms of a comparison. `windows`, where known for every run, has the losses
    of that text's windows, [windows] each. `names` has the runs' names, where they are known."""

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
        """The mean over runs, [windows]."""
        return np.mean([windows.astype(np.float64) for windows in self.windows or []], axis=0)

    @cached_property
    def variance_by_text(self) -> float | None:
        """Variance, by the choice of text, of one run's loss against those of its replicates, nats²; None where it
        cannot be estimated."""
        if self.windows is None or self.runs < 2 or len({windows.size for windows in self.windows}) > 1:
            return None
        estimates = [text_noise(windows.astype(np.float64) - self.mean_windows) for windows in self.windows]
        found = [each.error**2 for each in estimates if isinstance(each, Estimate)]
        return sum(found) / (self.runs - 1) if len(found) == self.runs else None


@dataclass(frozen=True)
class Difference:
    """Mean loss of an arm less that of the baseline, in nats: negative where the arm is better."""

    value: float
    training: Estimate | None  # by the seeds alone; None: not known
    text: Estimate | Inconclusive  # by the text alone: these very models on other text
    both: Estimate | None  # by both kinds, or by the seeds alone where there is no estimate of the other
    is_pooled: bool = False  # the spread over seeds is that of all arms

    @property
    def is_tested(self) -> bool:
        """True if training noise is estimated above 0: replicates alike to the last digit do not show training without
        noise."""
        return self.training is not None and self.training.error > 0


@dataclass(frozen=True)
class Verdict:
    """One arm against the baseline. Differences are the arm's loss less the baseline's, in nats: negative is better."""

    arm: str
    baseline: str
    word: Word
    sentence: str  # all of this for a reader
    runs: tuple[int, int]  # of the arm, of the baseline
    reason: str | None = None  # why it is inconclusive
    difference: Difference | None = None  # None: no two finite losses
    interval: tuple[float, float] | None = None  # by all noise that is known
    level: float | None = None  # of that interval, in per cent: 95, and more under Holm
    adjusted_p: float | None = None  # by Holm; None: not tested


def compare_arms(baseline: Arm, arms: Sequence[Arm]) -> list[Verdict]:
    """A verdict on each arm, in their order, with Holm's correction for all that can be tested.

    The caller sees to it that all losses are of the same text, and that the runs of an arm are replicates
    (harness/comparison/arms.py). Losses may be of any such kind: test, validation.

    - Both arms with two runs or more: Welch's interval for seeds, and the text noise added where it is known.
    - One of them with a single run: the pooled spread of all arms that have replicates; the sentence says so.
      Where the single run's arm is 4 times as noisy, the interval covers 65 %, or less.
    - No arm with replicates: inconclusive. `difference.text` still has the interval for these very models.

    Intervals for 3 to 5 runs an arm cover 93.4 to 96.5 % for normal losses whose standard deviations differ by up to a
    factor of 4; with 2 runs in an arm it is 90 to 98 %, as Welch's degrees of freedom are then hardly an estimate.
    Under Holm, 2 to 8 arms without effect give a false alarm in 1.5 to 5 % of experiments if all have as many runs and
    their standard deviations differ by no more than a factor of 2. The intervals of several arms that do differ hold
    together less often than each (5 arms of 10 runs: 91 %).
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
    """Estimate the difference of two arms, which are among `arms`. Inconclusive without finite losses."""
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
    training = combine(value, parts)
    if isinstance(text, Estimate):
        # The spread over seeds already has what this text does to one run and not to the next.
        parts.append(Variance(max(0.0, text.error**2 - by_text), text.df))
    return Difference(value, training, text, combine(value, parts), is_pooled=any(each.runs < 2 for each in both))


def _replicated(arms: Sequence[Arm]) -> list[Arm]:
    """The arms that tell of the spread over seeds; one with a loss that is not finite does not."""
    return [arm for arm in arms if arm.runs > 1 and arm.is_finite]


def _diverged(arm: Arm) -> str:
    """An arm of one run has its name."""
    lost = [name for name, loss in zip(arm.names, arm.losses, strict=False) if not np.isfinite(loss)]
    if list(arm.names) == [arm.name]:
        return f"the loss of {arm.name} is not finite"
    which = f" ({abbreviated(lost)})" if lost else ""
    count, are = (f"{len(lost)} losses", "are") if len(lost) > 1 else ("a loss", "is")
    return f"{count} of {arm.name}{which} {are} not finite"


# Sentences


def _untested(baseline: Arm, arm: Arm, difference: Difference) -> Verdict:
    """Verdict without an estimate of training noise; text noise may be known."""
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
    level = 100 - float(f"{100 * alpha:.2g}")  # two digits of the rest: 98.3, 99.58
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
    """Kinds of noise that could each alone explain the difference; "both kinds of noise" if neither could alone."""
    kinds = {"training noise": (difference.training, alpha), "text noise": (difference.text, 0.05)}
    found = []
    for kind, (noise, level) in kinds.items():
        if isinstance(noise, Estimate):
            low, high = noise.interval(level)
            found += [kind] if low <= 0 <= high else []
    return {0: "both kinds of noise", 1: "".join(found), 2: "either kind of noise"}[len(found)]


def seeds_sentences(verdicts: Sequence[Verdict], arms: Sequence[Arm]) -> str:
    """Sentences on training noise and the number of seeds: to detect 0.01 nats, and to detect differences as large as
    those seen, for verdicts that are inconclusive by the seeds alone. `arms` are all that are compared, the baseline
    too. The numbers are those of a t test of two arms, without Holm's correction and text noise."""
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
    """Decimals that show two digits of half the interval's width, three at least."""
    half = (interval[1] - interval[0]) / 2
    return 3 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
