"""Verdicts on arms (groups of runs that differ only in the seed) against the baseline: better, worse or inconclusive,
with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from harness.common.messages import abbreviated
from harness.common.statistics import Inconclusive
from harness.comparison.noise import (
    ALPHA,
    DIFFERENCE_TO_DETECT,
    MOST_SEEDS,
    LossEstimate,
    Variance,
    holm,
    pooled_variance,
    satterthwaite,
    seeds_needed,
    text_noise,
)

Word = Literal["better", "worse", "inconclusive"]


@dataclass(frozen=True)
class Arm:
    """One run, or several runs that differ in `random_seed` alone. `losses` has the loss of each run in nats per token;
    all arms of a comparison are measured on the same text. `windows` has, for each run, the losses of the text's
    windows (sequences of context length) as an array [windows], or is None if a run lacks them. `names` has the names
    of the runs, if they are known."""

    name: str
    losses: Sequence[float]
    windows: Sequence[np.ndarray] | None = None
    names: Sequence[str] = ()

    @property
    def runs(self) -> int:
        return len(self.losses)

    @property
    def flaw(self) -> str:
        """Reason why the arm cannot be compared: it has no run, or a loss that is not finite. Empty if the arm can be
        compared."""
        if not self.losses:
            return f"{self.name} has no run with this loss"
        if np.isfinite(self.losses).all():
            return ""
        lost = [name for name, loss in zip(self.names, self.losses, strict=False) if not np.isfinite(loss)]
        return f"the loss of {abbreviated(lost) or self.name} is not finite"

    @cached_property
    def mean_windows(self) -> np.ndarray:
        """Mean loss of each window (sequence of context length) over the arm's runs, [windows]."""
        return np.mean([windows.astype(np.float64) for windows in self.windows or []], axis=0)

    @cached_property
    def variance_by_text(self) -> float | None:
        """Part of the variance of a run's loss, in nats², that comes from the choice of the text: other text would
        change the losses of the arm's runs by different amounts. None if the arm has a single run, or if the losses of
        windows are missing, differ in number, are too few or are not finite."""
        if self.windows is None or self.runs < 2 or len({windows.size for windows in self.windows}) > 1:
            return None
        estimates = [text_noise(windows.astype(np.float64) - self.mean_windows) for windows in self.windows]
        found = [each.error**2 for each in estimates if isinstance(each, LossEstimate)]
        return sum(found) / (self.runs - 1) if len(found) == self.runs else None


@dataclass(frozen=True)
class Difference:
    """Mean loss of an arm (a group of runs that differ only in the seed) minus the mean loss of the baseline, in nats.
    Negative if the arm is better."""

    value: float
    training: LossEstimate | None  # with training noise alone; None if it is not known
    text: LossEstimate | Inconclusive  # with text noise alone: the same trained models on other text
    # With both kinds of noise, or with training noise alone if text noise is not known. None if training noise is not
    # known, or is estimated as 0: replicates that are equal to the last digit do not prove that training has no noise.
    both: LossEstimate | None
    is_pooled: bool = False  # the spread over seeds is estimated from all arms together
    is_limited_by_text: bool = False  # text noise that more runs would not reduce could alone explain the difference


@dataclass(frozen=True)
class Verdict:
    """Verdict on one arm, a group of runs that differ only in the seed. Differences are the arm's loss minus the
    baseline's, in nats: negative is better."""

    arm: str
    baseline: str
    runs: tuple[int, int]  # numbers of runs of the arm and of the baseline
    word: Word
    sentence: str  # the verdict in words
    reason: str | None = None  # why it is inconclusive
    difference: Difference | None = None  # None if one of the arms lacks finite losses
    interval: tuple[float, float] | None = None  # includes all noise that is known
    level: float | None = None  # of the interval, in percent: 95, or more with Holm's correction
    adjusted_p: float | None = None  # with Holm's correction; None if not tested


def compare_arms(baseline: Arm, arms: Sequence[Arm]) -> list[Verdict]:
    """Return a verdict on each arm against the baseline, in the order of `arms`. The verdicts have Holm's correction
    for the number of arms that can be tested. An arm is a group of runs; the baseline is an arm, too.

    The caller ensures that all losses are of the same text, and that the runs of an arm are replicates, which differ
    only in the seed (harness/comparison/arms.py). The losses are of one kind, such as test losses or validation losses.
    Training noise comes from the seed, text noise from the choice of the text.

    - The arm and the baseline have two runs or more each: Welch's interval for training noise. Text noise is added if
      it is known.
    - The arm or the baseline has a single run: the spread over seeds is pooled from all arms that have replicates, and
      the sentence says so. If the arm of the single run is 4 times as noisy as the others, the 95 % interval contains
      the true difference in 65 % of experiments or fewer.
    - No arm has replicates: inconclusive. `difference.text` still has the interval of the difference that these trained
      models would have on other text.

    With 3 to 5 runs per arm, 93.4 to 96.5 % of the 95 % intervals contain the true difference, for normal losses whose
    standard deviations differ by up to a factor of 4. With 2 runs in an arm, 90 to 98 % of them do, because Welch's
    degrees of freedom are then a poor estimate. With Holm's correction, 2 to 8 arms without effect give a false alarm
    in 1.5 to 5 % of experiments if all arms have the same number of runs and their standard deviations differ by at
    most a factor of 2. If several arms do differ from the baseline, all intervals together contain their true
    differences less often than a single interval does (5 arms of 10 runs: 91 %).
    """
    differences = [difference_of(baseline, arm, [baseline, *arms]) for arm in arms]
    tested = [each.both for each in differences if isinstance(each, Difference) and each.both]
    corrected = iter(zip(*holm([each.p for each in tested]), strict=True))
    verdicts = []
    for arm, difference in zip(arms, differences, strict=True):
        if isinstance(difference, Inconclusive):
            sentence = f"{arm.name} against {baseline.name}: {difference}"
            runs = (arm.runs, baseline.runs)
            verdicts.append(Verdict(arm.name, baseline.name, runs, "inconclusive", sentence, difference.reason))
        elif difference.both is None:
            verdicts.append(_untested(baseline, arm, difference))
        else:
            verdicts.append(_tested(baseline, arm, difference, difference.both, len(tested), *next(corrected)))
    return verdicts


def difference_of(baseline: Arm, arm: Arm, arms: Sequence[Arm]) -> Difference | Inconclusive:
    """Estimate the loss of `arm`, a group of runs that differ only in the seed, minus the loss of `baseline`. `arms`
    has all arms of the comparison: if one of the two has a single run, the spread over seeds is pooled from all arms.
    Returns Inconclusive if one of the two has no run or a loss that is not finite."""
    if flaw := arm.flaw or baseline.flaw:
        return Inconclusive(flaw)
    pair = (baseline, arm)
    value = float(np.mean(arm.losses) - np.mean(baseline.losses))
    text: LossEstimate | Inconclusive = Inconclusive("the losses of the windows were not kept")
    if baseline.windows is not None and arm.windows is not None:
        sizes = sorted({windows.size for windows in (*baseline.windows, *arm.windows)})
        text = Inconclusive(f"they were measured on texts of {' and '.join(f'{size:,}' for size in sizes)} windows")
        if len(sizes) == 1:
            text = text_noise(arm.mean_windows - baseline.mean_windows)  # paired by window
    is_pooled = any(each.runs < 2 for each in pair)
    if not is_pooled:  # Welch: the variance of each arm's mean, estimated from its own runs
        parts = [Variance(float(np.var(each.losses, ddof=1)) / each.runs, each.runs - 1) for each in pair]
        by_text = sum((each.variance_by_text or 0.0) / each.runs for each in pair)
    else:
        usable = [each for each in arms if not each.flaw]
        pooled = pooled_variance([each.losses for each in usable])
        if pooled is None:
            return Difference(value, None, text, None)
        share = sum(1 / each.runs for each in pair)
        parts = [Variance(pooled.value * share, pooled.df)]
        known = [(each.variance_by_text, each.runs - 1) for each in usable if each.variance_by_text is not None]
        by_text = share * sum(variance * df for variance, df in known) / max(1, sum(df for _, df in known))
    training, is_limited = satterthwaite(value, parts), False
    if isinstance(text, LossEstimate):
        # The spread over seeds already includes text noise that differs from run to run.
        common = Variance(max(0.0, text.error**2 - by_text), text.df)
        is_limited = satterthwaite(value, [common]).may_be_zero()
        parts.append(common)
    both = satterthwaite(value, parts) if training.error else None
    return Difference(value, training, text, both, is_pooled, is_limited)


# Sentences


def _untested(baseline: Arm, arm: Arm, difference: Difference) -> Verdict:
    """Return an inconclusive verdict on an arm (runs that differ only in the seed), because training noise, which comes
    from the seed, is unknown or is estimated as 0. If text noise, which comes from the choice of the text, is known,
    the verdict's sentence says whether the difference is within it."""
    reason = "training noise is unknown"
    if difference.training is not None:
        reason = "the runs of an arm have exactly the same loss, as if the seed had no effect"
    models = f"these models differ by {difference.value:+.3f} nats on this text"
    if isinstance(difference.text, LossEstimate):
        low, high = interval = difference.text.interval()
        within = "is within text noise, too" if difference.text.may_be_zero() else "is beyond text noise"
        digits = _digits(interval)
        ends = f"{low:+.{digits}f} to {high:+.{digits}f}"
        models = f"{difference.value:+.{digits}f} nats {within} (95 % interval {ends})"
    sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}; {models}"
    return Verdict(arm.name, baseline.name, (arm.runs, baseline.runs), "inconclusive", sentence, reason, difference)


def _tested(
    baseline: Arm, arm: Arm, difference: Difference, both: LossEstimate, tests: int, adjusted_p: float, alpha: float
) -> Verdict:
    """Return the verdict on an arm, a group of runs that differ only in the seed. `both` estimates its difference from
    the baseline, with an error that combines training noise and, if that is known, text noise. The verdict is
    inconclusive if the interval of `both` at level 1 − alpha contains 0. Its sentence mentions `tests`, the number of
    tested arms, if there are several."""
    low, high = interval = both.interval(alpha)
    level = 100 - float(f"{100 * alpha:.2g}")  # 100 * alpha rounded to two digits: 98.3, 99.58
    digits, is_unclear = _digits(interval), both.may_be_zero(alpha)
    facts = f"{arm.runs} and {baseline.runs} runs"
    if difference.is_pooled:
        single = " and ".join(each.name for each in (arm, baseline) if each.runs == 1)
        facts += f", pooled spread, assuming that seeds spread {single} as much as the others"
    if not is_unclear and not isinstance(difference.text, LossEstimate):
        facts += ", this text only"
    if tests > 1:
        facts += f", Holm for {tests} arms"
    word: Word = "inconclusive" if is_unclear else "better" if difference.value < 0 else "worse"
    if is_unclear:
        kinds = {"training noise": (difference.training, alpha), "text noise": (difference.text, ALPHA)}
        alone = [
            kind for kind, (noise, own) in kinds.items() if isinstance(noise, LossEstimate) and noise.may_be_zero(own)
        ]
        which = alone[0] if len(alone) == 1 else "either kind of noise" if alone else "both kinds of noise"
        reason = f"{difference.value:+.{digits}f} nats is within {which}"
        ends = f"{low:+.{digits}f} to {high:+.{digits}f}"
        sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}"
    else:
        reason = None
        near, far = sorted(map(abs, interval))
        ends = f"{near:.{digits}f} to {far:.{digits}f}"
        sentence = f"{arm.name} is {word} than {baseline.name} by {abs(difference.value):.{digits}f} nats"
    sentence += f" ({level:g} % interval {ends}; {facts})"
    runs = (arm.runs, baseline.runs)
    return Verdict(arm.name, baseline.name, runs, word, sentence, reason, difference, interval, level, adjusted_p)


def seeds_sentences(verdicts: Sequence[Verdict], arms: Sequence[Arm]) -> str:
    """Return sentences on training noise (the spread of the loss over seeds), and on the number of seeds that it takes
    to detect a difference of 0.01 nats. `arms` are all compared groups of runs, including the baseline; the runs of an
    arm differ only in the seed.

    Up to two more sentences are about inconclusive verdicts. One gives the number of seeds to detect a difference of
    the size that was measured, for each arm where training noise alone can explain this difference. The other names the
    arms where text noise (from the choice of the text) can explain the difference. More seeds would not reduce text
    noise.

    The numbers of seeds are those of a t test of two arms, without Holm's correction and text noise.
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
    degrees = f"{spread.df:.0f} {'degree' if spread.df == 1 else 'degrees'} of freedom"
    text = (
        f"Seeds alone spread the loss by {math.sqrt(spread.value):.4f} nats ({degrees}). Detecting a difference of "
        f"{DIFFERENCE_TO_DETECT} nats in 80 % of cases takes {likely} seeds of each arm ({low} to {high}, because this "
        "spread is itself uncertain)."
    )
    seeds, limited = [], []
    for verdict in verdicts:
        found = verdict.difference
        if verdict.word != "inconclusive" or verdict.interval is None or found is None or found.training is None:
            continue
        if found.is_limited_by_text:
            limited.append(verdict.arm)
        if found.training.may_be_zero():
            size = abs(found.value)
            likely, low, high = numbers(size)
            seeds.append(f"{likely} for {verdict.arm} ({size:.{_digits(verdict.interval)}f} nats; {low} to {high})")
    if seeds:
        text += f" Seeds of each arm to detect a difference as large as the one seen: {', '.join(seeds)}."
    if limited:
        text += (
            f" More seeds alone may not settle {abbreviated(limited)}: text noise alone could explain the difference, "
            "too. Only more text reduces text noise (test_loss.py --batches)."
        )
    return text


def _digits(interval: tuple[float, float]) -> int:
    """Return the number of decimals that shows two digits of half the interval's width, at least 3 and at most 6."""
    half = (interval[1] - interval[0]) / 2
    return 3 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
