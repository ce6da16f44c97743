"""Verdicts of arms against the baseline: better, worse or inconclusive, with the reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from harness.common.messages import abbreviated
from harness.comparison.arms import Arm, Difference, borrowed_from, difference_of
from harness.comparison.noise import MeanEstimate
from harness.comparison.training_noise import DIFFERENCE_TO_TELL, MOST_SEEDS, Uncertain, holm, seeds_needed

FIRST_SEEDS = 3  # runs of each arm that give a first idea of training noise


class Word(Enum):
    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """One arm against the baseline. Differences are the arm's loss less the baseline's, in nats: negative is better."""

    arm: str
    baseline: str
    word: Word
    sentence: str  # all of this for a reader, at most three lines of 80 columns with names of usual length
    runs: tuple[int, int]  # of the arm, of the baseline
    reason: str | None = None  # why it is inconclusive
    difference: Difference | None = None  # None: no two finite losses
    interval: tuple[float, float] | None = None  # by all noise that is known
    level: float | None = None  # of that interval, in per cent: 95, and more under Holm
    adjusted_p: float | None = None  # by Holm; None: not tested


def compare_arms(baseline: Arm, arms: Sequence[Arm]) -> list[Verdict]:
    """A verdict on each arm, in their order, with Holm's correction for all that can be tested.

    The caller sees to it that all losses were measured on the same text, with the same tokenizer, and that the runs
    of an arm are replicates (harness/comparison/replicates.py). Losses may be of any such kind: test, validation.
    `windows` may be missing; an interval then holds on this text only.

    - Both arms with two runs or more: Welch's interval for seeds, and the evaluation noise added where it is known.
    - One of them with a single run: the spread of all arms that have replicates is borrowed, and the sentence says so
      and what that assumes: where the single run's arm is 4 times as noisy, the interval covers 65 %, or less.
    - No arm with replicates: inconclusive. `difference.evaluation` still has the interval for these very models.

    Intervals for 3 to 5 runs an arm cover 93.4 to 96.5 % for normal losses, whose standard deviations may differ by a
    factor of 4; with 2 runs in an arm it is 90 to 98 %, as Welch's degrees of freedom are then hardly an estimate.
    Under Holm, 2 to 8 arms that do nothing give a false alarm in 1.5 to 5 % of experiments if all have as many runs
    and their standard deviations differ by no more than a factor of 2; docs/LOG.md has what happens beyond that. It is
    the false alarms that Holm keeps below 5 % in all. The intervals of several arms that do differ hold together less
    often than each (5 arms of 10 runs: 91 %).
    """
    borrowed = borrowed_from([baseline, *arms])
    reasons = [_not_comparable(baseline, arm) for arm in arms]
    found = [None if why else difference_of(baseline, arm, borrowed) for arm, why in zip(arms, reasons, strict=True)]
    tested = [each.both for each in found if each is not None and _is_tested(each)]
    corrected = iter(zip(*holm([each.p for each in tested if each is not None]), strict=True))
    verdicts = []
    for arm, difference, reason in zip(arms, found, reasons, strict=True):
        if difference is None:
            verdicts.append(_unknown(baseline, arm, str(reason)))
        elif difference.both is None or not _is_tested(difference):
            verdicts.append(_untested(baseline, arm, difference))
        else:
            adjusted_p, rate = next(corrected)
            verdicts.append(_tested(_Test(baseline, arm, difference, difference.both, len(tested)), adjusted_p, rate))
    return verdicts


def seeds_sentence(arms: Sequence[Arm]) -> str:
    """Sentence on training noise by the replicates at hand, and the number of seeds that would detect 0.01 nats."""
    spread = borrowed_from(arms).spread
    if spread is not None and spread.deviation == 0:
        return "Training noise is unknown: the seeds of an arm came out exactly alike, as if they did nothing."
    if spread is None:
        return f"Training noise is unknown: {FIRST_SEEDS} seeds of each arm would give a first idea of it."
    needed = seeds_needed(spread)
    low, high = (_seeds(each) for each in (needed.low, needed.high))
    degrees = f"{spread.df} {'degree' if spread.df == 1 else 'degrees'} of freedom"
    return (
        f"Seeds alone spread the loss by {spread.deviation:.4f} nats ({degrees}): to tell "
        f"{DIFFERENCE_TO_TELL} nats apart in 80 % of cases takes {_seeds(needed.likely)} seeds of each arm "
        f"({low} to {high}, as that spread is itself uncertain)."
    )


def seeds_for_seen(verdicts: Sequence[Verdict], arms: Sequence[Arm]) -> str:
    """Sentence on the number of seeds that would detect differences as large as those seen, for the verdicts that are
    inconclusive by the seeds so far; "" if there are none. `arms` are all that are compared, the baseline too. The
    formula is that of `seeds_sentence`: a t test of two arms, without what Holm's correction and other text would
    add."""
    spread = borrowed_from(arms).spread
    if spread is None or spread.deviation == 0:
        return ""
    parts = []
    for verdict in verdicts:
        if verdict.difference is None or not _is_within_seeds(verdict):
            continue
        size = abs(verdict.difference.value)
        needed = seeds_needed(spread, size)
        low, high = (_seeds(each) for each in (needed.low, needed.high))
        digits = _digits(verdict.interval or (0.0, 0.0))
        parts.append(f"{_seeds(needed.likely)} for {verdict.arm} ({size:.{digits}f} nats; {low} to {high})")
    return f"Seeds of each arm to tell a difference as large as the one seen: {', '.join(parts)}." if parts else ""


def _is_within_seeds(verdict: Verdict) -> bool:
    """True if training noise alone hides the difference: elsewhere more seeds would not show it."""
    if verdict.word is not Word.INCONCLUSIVE or verdict.difference is None or not _is_tested(verdict.difference):
        return False
    assert verdict.difference.training is not None, "it was tested"
    low, high = verdict.difference.training.interval()
    return low <= 0 <= high


def _seeds(number: int | None) -> str:
    return f"over {MOST_SEEDS:,}" if number is None else f"{number:,}"


@dataclass(frozen=True)
class _Test:
    baseline: Arm
    arm: Arm
    difference: Difference
    both: Uncertain
    comparisons: int


def _is_tested(difference: Difference) -> bool:
    """True if training noise is estimated above 0: replicates alike to the last digit do not show training without
    noise."""
    return difference.training is not None and difference.training.error > 0


def _not_comparable(baseline: Arm, arm: Arm) -> str | None:
    for each in (arm, baseline):
        if not each.runs:
            return f"{each.name} has no run with this loss"
        if not each.is_finite:
            return _diverged(each)
    return None


def _diverged(arm: Arm) -> str:
    """An arm of one run has its name."""
    if list(arm.names) == [arm.name]:
        return f"the loss of {arm.name} is not finite"
    which = f" ({abbreviated(arm.not_finite)})" if arm.not_finite else ""
    if len(arm.not_finite) > 1:
        return f"{len(arm.not_finite)} losses of {arm.name}{which} are not finite"
    return f"a loss of {arm.name}{which} is not finite"


def _unknown(baseline: Arm, arm: Arm, reason: str) -> Verdict:
    sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}"
    return Verdict(arm.name, baseline.name, Word.INCONCLUSIVE, sentence, (arm.runs, baseline.runs), reason)


def _untested(baseline: Arm, arm: Arm, difference: Difference) -> Verdict:
    """Verdict without an estimate of training noise; evaluation noise may be known."""
    if difference.training is not None:
        reason = "the runs of an arm are alike to the last digit, as if the seed did nothing"
    else:
        reason = "training noise is unknown"
    sentence = f"{arm.name} against {baseline.name}: inconclusive, because {reason}; {_of_these_models(difference)}"
    runs = (arm.runs, baseline.runs)
    return Verdict(arm.name, baseline.name, Word.INCONCLUSIVE, sentence, runs, reason, difference)


def _tested(test: _Test, adjusted_p: float, rate: float) -> Verdict:
    low, high = interval = test.both.interval(rate)
    level = _level(rate)
    names = (test.arm.name, test.baseline.name)
    runs = (test.arm.runs, test.baseline.runs)
    if low <= 0 <= high:
        reason = f"{_signed(test.both.value, interval)} nats is within {_which_noise(test.difference, rate)}"
        sentence = (
            f"{names[0]} against {names[1]}: inconclusive, because {reason} ({level:g} % interval "
            f"{_signed(low, interval)} to {_signed(high, interval)}; {_facts(test)})"
        )
        return Verdict(*names, Word.INCONCLUSIVE, sentence, runs, reason, test.difference, interval, level, adjusted_p)
    word = Word.BETTER if test.both.value < 0 else Word.WORSE
    near, far = sorted(map(abs, interval))
    digits = _digits(interval)
    sentence = (
        f"{names[0]} is {word.value} than {names[1]} by {abs(test.both.value):.{digits}f} nats "
        f"({level:g} % interval {near:.{digits}f} to {far:.{digits}f}; {_facts(test, is_told=True)})"
    )
    return Verdict(*names, word, sentence, runs, None, test.difference, interval, level, adjusted_p)


def _level(rate: float) -> float:
    """Return in how many per cent of experiments an interval for this rate of misses holds, with two digits of the
    rest: 98.3, 99.58."""
    return 100 - float(f"{100 * rate:.2g}")


def _which_noise(difference: Difference, rate: float) -> str:
    """Kinds of noise that could each alone explain the difference; "both kinds of noise" if neither could alone."""
    assert difference.training is not None, "it was tested"
    low, high = difference.training.interval(rate)
    kinds = ["training noise"] if low <= 0 <= high else []
    if isinstance(difference.evaluation, MeanEstimate) and difference.evaluation.low <= 0 <= difference.evaluation.high:
        kinds.append("evaluation noise")
    return {0: "both kinds of noise", 1: "".join(kinds), 2: "either kind of noise"}[len(kinds)]


def _facts(test: _Test, *, is_told: bool = False) -> str:
    """Basis of an interval; with `is_told`, also how far the difference holds."""
    facts = f"{test.arm.runs} and {test.baseline.runs} runs"
    if test.difference.is_borrowed:
        single = " and ".join(each.name for each in (test.arm, test.baseline) if each.runs == 1)
        facts += f", spread borrowed as if seeds spread {single} like the others"
    if is_told and not isinstance(test.difference.evaluation, MeanEstimate):
        facts += ", this text only"
    if test.comparisons > 1:
        facts += f", Holm for {test.comparisons} arms: 5 % false alarms in all"
    return facts


def _of_these_models(difference: Difference) -> str:
    """Comparison of two arms without training noise."""
    noise = difference.evaluation
    if not isinstance(noise, MeanEstimate):
        return f"these models differ by {_signed(difference.value)} nats on this text"
    interval = (noise.low, noise.high)
    low, high = (_signed(each, interval) for each in interval)
    told = "is within evaluation noise, too" if noise.low <= 0 <= noise.high else "is beyond evaluation noise"
    return f"{_signed(difference.value, interval)} nats {told} (95 % interval {low} to {high})"


def _signed(number: float, interval: tuple[float, float] = (0.0, 0.0)) -> str:
    return f"{number:+.{_digits(interval)}f}"


def _digits(interval: tuple[float, float]) -> int:
    """Decimals that show two digits of half the interval's width, three at least."""
    half = (interval[1] - interval[0]) / 2
    return 3 if half <= 0 else min(6, max(3, 1 - math.floor(math.log10(half))))
