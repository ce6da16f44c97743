"""Verdicts on arms against the baseline: better, worse or inconclusive, with the reason. An arm is one run, or several
runs that differ only in the seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from harness.common.messages import abbreviated
from harness.common.statistics import Inconclusive
from harness.comparison.noise import (
    DIFFERENCE_TO_DETECT,
    MOST_SEEDS,
    LossEstimate,
    Variance,
    holm,
    pooled_variance,
    satterthwaite,
    seeds_needed,
    text_noise,
    variance_of,
)

Word = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class Arm:
    """One run, or several runs that differ only in their seeds."""

    name: str
    losses: Sequence[float]  # of each run, in nats per token
    # For each run, the losses of the windows (sequences of context length), [windows]. None if not known for all runs.
    # All arms of a comparison have equally many windows.
    windows: Sequence[np.ndarray] | None = None
    names: Sequence[str] = ()  # of the runs, for messages
    diverged: Sequence[str] = ()  # names of the arm's runs that have diverged

    @property
    def run_count(self) -> int:
        return len(self.losses)

    @property
    def flaw(self) -> str:
        """Reason why the arm cannot be compared: no loss is known, or one is not finite. Empty if it can be
        compared."""
        if not self.losses:
            return f"{self.name} has no run with this loss"
        if np.isfinite(self.losses).all():
            return ""
        lost = [name for name, loss in zip(self.names, self.losses, strict=False) if not np.isfinite(loss)]
        return f"the loss of {abbreviated(lost) or self.name} is not finite"

    @cached_property
    def mean_windows(self) -> np.ndarray:
        """Mean loss of each window over the arm's runs, [windows]. Only for an arm that has `windows`."""
        return np.mean([windows.astype(np.float64) for windows in self.windows or []], axis=0)

    @cached_property
    def variance_by_text(self) -> float | None:
        """Part of the variance between the runs' losses that is due to the choice of the text, in nats². None for a
        single run, and for too few windows with known losses."""
        if self.windows is None or self.run_count < 2:
            return None
        estimates = [text_noise(windows.astype(np.float64) - self.mean_windows) for windows in self.windows]
        found = [each.error**2 for each in estimates if each is not None]
        return sum(found) / (self.run_count - 1) if found else None


@dataclass(frozen=True)
class Difference:
    """Mean loss of an arm minus the mean loss of the baseline, in nats: negative if the arm is better. `training` and
    `text` estimate it with one kind of noise each, `total` with both."""

    value: float
    training: LossEstimate | None  # other seeds, the same text; None if no arm has replicates
    text: LossEstimate | None  # the same trained models on other text; None if too few windows' losses are known
    # Other seeds and other text, or other seeds alone if text noise is not known. Inconclusive if training noise is not
    # known, or is estimated as 0: replicates that are equal to the last digit do not prove that training has no noise.
    total: LossEstimate | Inconclusive
    is_pooled: bool = False  # the spread over seeds is estimated from all arms together
    is_limited_by_text: bool = False  # the text noise that more runs cannot reduce may by itself explain the difference


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm. Differences are the arm's loss minus the baseline's, in nats: negative is better. The fields
    have the names of the keys in the output of --json, where `difference` is its `value`."""

    arm: str
    baseline: str
    verdict: Word
    sentence: str  # the verdict in words; if it is inconclusive, with the reason
    runs: tuple[int, int]  # numbers of runs of the arm and of the baseline
    difference: Difference | None = None  # None if one of the two has no run, or a loss that is not finite
    # These are None if the difference could not be tested.
    interval: tuple[float, float] | None = None  # includes all noise that is known
    interval_level: float | None = None  # in percent: 95, or more with Holm's correction
    adjusted_p: float | None = None  # with Holm's correction


def compare_arms(baseline: Arm, arms: Sequence[Arm]) -> list[Verdict]:
    """Return a verdict on each arm against the baseline, in the order of `arms`, with Holm's correction for the number
    of arms that can be tested. All losses must be of one kind and of the same text. The runs of an arm must differ only
    in the seed.

    A verdict is inconclusive in these cases:

    - The arm or the baseline has no loss, or one that is not finite.
    - Training noise is not known, or estimated as 0.
    - The interval contains 0.
    - The better one of the two has a run that diverged.

    For normally distributed losses:

    - If all arms have 3 to 5 runs, 93.4 to 96.5 % of the 95 % intervals contain the true difference. If an arm has 2
      runs, 87 to 98 % do. The standard deviations may differ by a factor of 4.
    - If all arms have equally many runs, 2 to 8 arms without effect give a false alarm in 1 to 5 % of experiments. The
      standard deviations may differ by a factor of 2.
    """
    differences = [difference_of(baseline, arm, [baseline, *arms]) for arm in arms]
    estimates = [each.total if isinstance(each, Difference) else each for each in differences]
    p_values = {index: each.p for index, each in enumerate(estimates) if isinstance(each, LossEstimate)}
    corrected = dict(zip(p_values, zip(*holm([*p_values.values()]), strict=True), strict=True))
    verdicts = []
    for index, (arm, difference) in enumerate(zip(arms, differences, strict=True)):
        if isinstance(difference, Difference) and isinstance(difference.total, LossEstimate):
            adjusted_p, alpha = corrected[index]
            verdict = _tested(baseline, arm, difference, difference.total, len(corrected), adjusted_p, alpha)
            better = {"better": arm, "worse": baseline}.get(verdict.verdict)
            if better and better.diverged:  # a run that diverged early has no loss, so its arm looks too good
                lost = Inconclusive(f"{abbreviated(better.diverged)}, of {better.name}, diverged")
                sentence = f"{arm.name} against {baseline.name}: {lost}"
                verdict = replace(verdict, verdict="inconclusive", sentence=sentence)
            verdicts.append(verdict)
        else:
            verdicts.append(_untested(baseline, arm, difference))
    return verdicts


def difference_of(baseline: Arm, arm: Arm, arms: Sequence[Arm]) -> Difference | Inconclusive:
    """Estimate the mean loss of `arm` minus the mean loss of `baseline`. Returns Inconclusive if one of the two has a
    flaw (`Arm.flaw`). `arms` has all arms of the comparison, these two included.

    - If both have two runs or more, training noise is estimated as in Welch's test.
    - Otherwise, the spread over seeds is pooled from all arms without a flaw. The interval is too narrow if an arm with
      a single run is noisier than the others.
    """
    if flaw := arm.flaw or baseline.flaw:
        return Inconclusive(flaw)
    pair = (baseline, arm)
    value = float(np.mean(arm.losses) - np.mean(baseline.losses))
    text = None
    if baseline.windows is not None and arm.windows is not None:
        text = text_noise(arm.mean_windows - baseline.mean_windows)  # paired by window
    is_pooled = any(each.run_count < 2 for each in pair)
    if not is_pooled:  # Welch: the variance of each arm's mean, estimated from its own runs
        parts = [Variance(variance_of(each.losses) / each.run_count, each.run_count - 1) for each in pair]
        by_text = sum((each.variance_by_text or 0.0) / each.run_count for each in pair)
    else:
        usable = [each for each in arms if not each.flaw]
        pooled = pooled_variance([each.losses for each in usable])
        if pooled is None:
            return Difference(value, None, text, Inconclusive("training noise is unknown"))
        share = sum(1 / each.run_count for each in pair)
        parts = [Variance(pooled.value * share, pooled.df)]
        known = [(each.variance_by_text, each.run_count - 1) for each in usable if each.variance_by_text is not None]
        by_text = share * sum(variance * df for variance, df in known) / max(1, sum(df for _, df in known))
    training, is_limited = satterthwaite(value, parts), False
    if text is not None:
        # The spread over seeds already includes text noise that differs from run to run.
        common = Variance(max(0.0, text.error**2 - by_text), text.df)
        is_limited = satterthwaite(value, [common]).may_be_zero()
        parts.append(common)
    total: LossEstimate | Inconclusive = satterthwaite(value, parts)
    if not training.error:
        total = Inconclusive("the runs of an arm have exactly the same loss, as if the seed had no effect")
    return Difference(value, training, text, total, is_pooled, is_limited)


# Sentences


def _untested(baseline: Arm, arm: Arm, difference: Difference | Inconclusive) -> Verdict:
    """Return the inconclusive verdict on an arm whose difference from the baseline cannot be tested."""
    head, runs = f"{arm.name} against {baseline.name}", (arm.run_count, baseline.run_count)
    if isinstance(difference, Inconclusive):
        return Verdict(arm.name, baseline.name, "inconclusive", f"{head}: {difference}", runs)
    models = f"these models differ by {difference.value:+.3f} nats on this text"
    if difference.text is not None:
        low, high = interval = difference.text.interval()
        within = "is within text noise" if difference.text.may_be_zero() else "is beyond text noise"
        digits = _digits(interval)
        ends = f"{low:+.{digits}f} to {high:+.{digits}f}"
        models = f"{difference.value:+.{digits}f} nats {within} (95 % interval {ends})"
    sentence = f"{head}: {difference.total}; {models}"
    return Verdict(arm.name, baseline.name, "inconclusive", sentence, runs, difference)


def _tested(
    baseline: Arm, arm: Arm, difference: Difference, total: LossEstimate, tests: int, adjusted_p: float, alpha: float
) -> Verdict:
    """Return the verdict on an arm. It is inconclusive if the interval of `total` (`difference.total`) at level 1 −
    alpha contains 0. `tests` is the number of tested arms."""
    low, high = interval = total.interval(alpha)
    level = 100 - float(f"{100 * alpha:.2g}")  # two digits of 100 * alpha: 100 - 1.7 = 98.3, 100 - 0.42 = 99.58
    digits, is_unclear = _digits(interval), total.may_be_zero(alpha)
    facts = f"{arm.run_count} and {baseline.run_count} runs"
    if difference.is_pooled:
        single = " and ".join(each.name for each in (arm, baseline) if each.run_count == 1)
        facts += f", spread over seeds pooled from all arms, assuming that it is the same for {single}"
    if not is_unclear and difference.text is None:
        facts += ", for this text only"
    if tests > 1:
        facts += f", Holm's correction for {tests} arms"
    word: Word = "inconclusive" if is_unclear else "better" if difference.value < 0 else "worse"
    if is_unclear:
        kinds = {"training noise": difference.training, "text noise": difference.text}
        alone = [kind for kind, each in kinds.items() if each is not None and each.may_be_zero(alpha)]
        which = alone[0] if len(alone) == 1 else "either kind of noise" if alone else "both kinds of noise together"
        ends = f"{low:+.{digits}f} to {high:+.{digits}f}"
        reason = Inconclusive(f"{difference.value:+.{digits}f} nats is within {which}")
        sentence = f"{arm.name} against {baseline.name}: {reason}"
    else:
        near, far = sorted(map(abs, interval))
        ends = f"{near:.{digits}f} to {far:.{digits}f}"
        sentence = f"{arm.name} is {word} than {baseline.name} by {abs(difference.value):.{digits}f} nats"
    sentence += f" ({level:g} % interval {ends}; {facts})"
    runs = (arm.run_count, baseline.run_count)
    return Verdict(arm.name, baseline.name, word, sentence, runs, difference, interval, level, adjusted_p)


def seeds_sentences(verdicts: Sequence[Verdict], arms: Sequence[Arm], chance: Sequence[str] = ()) -> str:
    """Return sentences on training noise (the spread over seeds), and on the number of seeds needed to detect these
    differences:

    - 0.01 nats
    - each difference from the baseline that training noise could explain

    The numbers of seeds are for a test of one arm, without Holm's correction and without the text noise that all runs
    share. `arms` are all compared arms, including the baseline. `chance` is the result of `kinds_of_chance`.
    """
    spread = pooled_variance([arm.losses for arm in arms if not arm.flaw])
    if spread is None:
        return "Training noise is unknown: 3 seeds of each arm would give a first idea of it."
    if spread.value == 0:
        return (
            "Training noise is unknown: the runs of each arm have exactly the same loss, as if the seed had no effect."
        )

    def numbers(difference: float) -> list[str]:
        return [f"over {MOST_SEEDS:,}" if each is None else f"{each:,}" for each in seeds_needed(spread, difference)]

    likely, low, high = numbers(DIFFERENCE_TO_DETECT)
    of = ""
    if chance:
        *others, last = chance
        of = f" (of {', '.join(others)}{' and ' if others else ''}{last})"
    degrees = f"{spread.df:.0f} {'degree' if spread.df == 1 else 'degrees'} of freedom"
    text = (
        f"Seeds{of} alone spread the loss with a standard deviation of {math.sqrt(spread.value):.4f} nats ({degrees}). "
        f"Detecting a difference of {DIFFERENCE_TO_DETECT} nats in 80 % of cases takes {likely} seeds of each arm "
        f"({low} to {high}, because this spread is itself uncertain)."
    )
    seeds, limited = [], []
    for verdict in verdicts:
        found, interval = verdict.difference, verdict.interval
        if found is None or interval is None or not interval[0] <= 0 <= interval[1]:
            continue
        if found.is_limited_by_text:
            limited.append(verdict.arm)
        if found.training is not None and found.training.may_be_zero():
            size = abs(found.value)
            likely, low, high = numbers(size)
            seeds.append(f"{likely} for {verdict.arm} ({size:.{_digits(interval)}f} nats; {low} to {high})")
    if seeds:
        text += f" Seeds of each arm needed to detect a difference as large as the one seen: {', '.join(seeds)}."
    if limited:
        text += (
            f" More seeds may not settle the verdict on {abbreviated(limited)}: text noise alone could explain the "
            "difference, too. Only more text reduces text noise: a longer split, or more --batches of test_loss.py."
        )
    return text


def _digits(interval: tuple[float, float]) -> int:
    """Return the number of decimals that shows two digits of half the interval's width, at least 3 and at most 6."""
    half = (interval[1] - interval[0]) / 2
    return 3 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
