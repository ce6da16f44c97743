"""Verdicts: their wording, and simulations of how often they are wrong."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy

from harness.comparison.noise import LossEstimate
from harness.comparison.verdicts import Arm, Difference, Verdict, compare_arms, difference_of, seeds_sentences

BASELINE = Arm("lr-0.0015", [3.50, 3.51, 3.49])
THREE_LINES = 240


def compare(*arms: Arm, baseline: Arm = BASELINE) -> list[Verdict]:
    verdicts = compare_arms(baseline, arms)
    assert [each.arm for each in verdicts] == [arm.name for arm in arms]
    assert all(len(each.sentence) <= THREE_LINES for each in verdicts)
    return verdicts


def window_losses(difference: float, *, runs: int, seed: int, windows: int = 400, by_seed: float = 0.004) -> Arm:
    """Return an arm of runs, with the loss of each run in each window of one text. Each window is equally hard for all
    arms. Each run adds noise of its own to the whole text, and more noise to each window.

    `seed` draws the noise; `by_seed` is the standard deviation of the noise per run.
    """
    text = 3 + np.random.default_rng(0).gamma(4, 0.1, windows)
    generator = np.random.default_rng(seed)
    losses = [
        text + difference + by_seed * generator.normal() + 0.03 * generator.normal(size=windows) for _ in range(runs)
    ]
    return Arm(f"arm-{seed}", [float(each.mean()) for each in losses], losses)


def test_better_worse_and_inconclusive() -> None:
    verdicts = compare(
        Arm("lr-0.003", [3.40, 3.41, 3.42]), Arm("lr-0.01", [3.60, 3.61, 3.62]), Arm("lr-0.002", [3.49, 3.51, 3.52])
    )
    assert [each.verdict for each in verdicts] == ["better", "worse", "inconclusive"]
    assert [each.sentence for each in verdicts] == [
        "lr-0.003 is better than lr-0.0015 by 0.090 nats (97.5 % interval 0.061 to 0.119; 3 and 3 runs, for this "
        "text only, Holm's correction for 3 arms)",
        "lr-0.01 is worse than lr-0.0015 by 0.110 nats (98.3 % interval 0.078 to 0.142; 3 and 3 runs, for this "
        "text only, Holm's correction for 3 arms)",
        "lr-0.002 against lr-0.0015: inconclusive, because +0.007 nats is within training noise (95 % interval "
        "-0.025 to +0.038; 3 and 3 runs, Holm's correction for 3 arms)",
    ]
    assert verdicts[2].runs == (3, 3)


def test_an_interval_is_welchs_at_the_level_that_is_printed() -> None:
    """An interval is Welch's at the level that is printed. By Holm's method with k arms left, this level is not 95 %
    but 100 % − 5 % / k."""
    arms = [Arm(f"b{number}", [3.5 + loss, 3.51 + loss, 3.47 + loss]) for number, loss in enumerate((0.09, 0.2, 0.0))]
    alone = Arm("b", [3.47, 3.455, 3.46, 3.5, 3.44])
    for arm, verdict in [*zip(arms, compare(*arms), strict=True), (alone, compare(alone)[0])]:
        theirs = scipy.stats.ttest_ind(arm.losses, BASELINE.losses, equal_var=False)
        low, high = verdict.interval or (math.nan, math.nan)
        error = abs((np.mean(arm.losses) - np.mean(BASELINE.losses)) / theirs.statistic)
        assert verdict.interval_level == pytest.approx(
            100 - 200 * scipy.stats.t.sf((high - low) / 2 / error, theirs.df), abs=0.05
        )
        assert f"({verdict.interval_level:g} % interval " in verdict.sentence
    assert verdict.interval == pytest.approx(tuple(theirs.confidence_interval()))
    assert verdict.adjusted_p == pytest.approx(theirs.pvalue)


def test_an_arm_of_one_run_has_the_pooled_spread() -> None:
    verdict, *_ = compare(Arm("lr-0.01", [3.60]), Arm("lr-0.02", [3.7, 3.72]))
    assert verdict.verdict == "worse"
    assert verdict.difference is not None
    assert verdict.difference.is_pooled
    assert "spread over seeds pooled from all arms, assuming that it is the same for lr-0.01, for" in verdict.sentence
    # Pooled over the baseline and the other arm: 3 degrees of freedom.
    deviation = math.sqrt((2e-4 + 2e-4) / 3)
    reach = scipy.stats.t.ppf(1 - 0.05 / 2, 3) * deviation * math.sqrt(1 + 1 / 3)
    p = 2 * scipy.stats.t.sf(0.1 / (deviation * math.sqrt(4 / 3)), 3)
    assert isinstance(verdict.difference.training, LossEstimate)
    assert verdict.difference.training.interval() == pytest.approx((0.1 - reach, 0.1 + reach))
    assert verdict.difference.training.p == pytest.approx(p)


def test_single_runs_on_both_sides() -> None:
    first, second = window_losses(0, runs=1, seed=1, by_seed=0), window_losses(-0.02, runs=1, seed=2, by_seed=0)
    verdict = compare(second, baseline=first)[0]
    assert verdict.verdict == "inconclusive"
    assert "inconclusive, because training noise is unknown; " in verdict.sentence
    assert "beyond text noise (95 % interval -0.0" in verdict.sentence
    assert verdict.adjusted_p is None
    verdict = compare(window_losses(0, runs=1, seed=4, by_seed=0), baseline=first)[0]
    assert "is within text noise (95 % interval -0.0" in verdict.sentence
    verdict = compare(Arm("b", [3.4]), baseline=Arm("a", [3.5]))[0]
    assert verdict.sentence == (
        "b against a: inconclusive, because training noise is unknown; these models differ by -0.100 nats on this text"
    )


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        (Arm("lr-1", []), "lr-1 has no run with this loss"),
        (Arm("lr-1", [3.0, math.nan]), "the loss of lr-1 is not finite"),
        (Arm("lr-1", [math.inf]), "the loss of lr-1 is not finite"),
    ],
)
def test_what_cannot_be_compared(arm: Arm, reason: str) -> None:
    verdict, other = compare(arm, Arm("lr-0.003", [3.40, 3.41, 3.42]))
    assert verdict.sentence == f"lr-1 against lr-0.0015: inconclusive, because {reason}"
    assert (verdict.interval, verdict.difference) == (None, None)
    assert other.verdict == "better"
    assert "Holm" not in other.sentence, "one comparison is left"


@pytest.mark.parametrize(
    ("by_seed", "difference", "which"),
    [(0.02, 0.03, "training noise"), (0.0005, 0.0, "either kind of noise")],
)
def test_which_noise_a_difference_is_within(by_seed: float, difference: float, which: str) -> None:
    baseline = window_losses(0, runs=3, seed=4, by_seed=by_seed)
    verdict = compare(window_losses(difference, runs=3, seed=6, by_seed=by_seed), baseline=baseline)[0]
    assert f"nats is within {which} (95 % interval" in verdict.sentence


def test_each_kind_of_noise_is_judged_at_the_level_that_is_printed() -> None:
    """With Holm's correction for four arms, the level is 98.8 %. A difference beyond text noise at 95 %, but within it
    at 98.8 %, is within either kind of noise."""
    baseline, *arms = (
        window_losses(loss, runs=3, seed=seed, by_seed=0.002)
        for loss, seed in ((0, 4), (0.003, 6), (0, 100), (0, 101), (0, 102))
    )
    verdict, *_ = compare(*arms, baseline=baseline)
    assert verdict.difference is not None
    assert isinstance(verdict.difference.text, LossEstimate)
    assert not verdict.difference.text.may_be_zero()
    assert "nats is within either kind of noise (98.8 % interval " in verdict.sentence


def test_text_noise_widens_the_interval() -> None:
    """Windows that are harder for one arm than for the other widen the interval."""
    baseline, arm = window_losses(0, runs=3, seed=1), window_losses(-0.02, runs=3, seed=2)
    to_arm = np.random.default_rng(5).normal(0, 0.1, 400)
    to_arm -= to_arm.mean()
    arm = Arm("b", arm.losses, [each + to_arm for each in arm.windows or []])
    both = compare(arm, baseline=baseline)[0].interval
    seeds_only = compare(Arm("b", arm.losses), baseline=baseline)[0].interval
    assert both is not None
    assert seeds_only is not None
    assert both[0] < seeds_only[0] < seeds_only[1] < both[1]


def test_what_the_text_does_to_replicates_is_in_their_spread_already() -> None:
    """Each run has noise of its own in every window of the text, which increases the variance of its loss by 0.03² /
    windows. The spread of the replicates includes this noise already, so that the interval counts it once."""
    arms = [window_losses(0, runs=10, seed=seed, windows=2000) for seed in range(1, 6)]
    found = [arm.variance_by_text for arm in arms]
    assert np.mean([each for each in found if each is not None]) == pytest.approx(0.03**2 / 2000, rel=0.1)
    difference = difference_of(arms[0], arms[1], arms)
    assert isinstance(difference, Difference)
    assert isinstance(difference.training, LossEstimate)
    assert isinstance(difference.total, LossEstimate)
    assert isinstance(difference.text, LossEstimate)
    assert difference.total.error < math.hypot(difference.training.error, difference.text.error)


def test_what_replicates_say_of_seeds() -> None:
    one, other, alike = Arm("a", [3.0]), Arm("b", [3.1]), Arm("c", [5.3375] * 3)
    assert np.var(alike.losses) > 0, "the mean of equal losses is rounded"
    assert seeds_sentences(compare(other, baseline=one), [one, other]) == (
        "Training noise is unknown: 3 seeds of each arm would give a first idea of it."
    )
    verdicts = compare(other, baseline=alike)
    assert (
        "because the runs of an arm have exactly the same loss, as if the seed had no effect; " in verdicts[0].sentence
    )
    assert "the runs of each arm have exactly the same loss" in seeds_sentences(verdicts, [alike, other])
    assert seeds_sentences([], [one, Arm("b", [3.49, 3.50, 3.51])]) == (
        "Seeds alone spread the loss with a standard deviation of 0.0100 nats (2 degrees of freedom). Detecting a "
        "difference of 0.01 nats in 80 % of cases takes 17 seeds of each arm (6 to 621, because this spread is itself "
        "uncertain)."
    )
    assert "over 10,000 seeds" in seeds_sentences([], [Arm("b", [1.0, 9.0])])


def test_more_text_is_advised_where_seeds_may_not_help() -> None:
    """A note advises more text if text noise alone could explain a difference. If all runs of an
    arm have the same error on each window of text, more runs do not reduce that error."""
    baseline, own = (window_losses(0, runs=3, seed=seed, by_seed=0.002) for seed in (4, 6))
    to_arm = np.random.default_rng(5).normal(0, 0.1, 400)
    shared = Arm("shared", own.losses, [each + to_arm - to_arm.mean() for each in own.windows or []])
    said = seeds_sentences(compare(shared, baseline=baseline), [baseline, shared])
    assert " More seeds may not settle the verdict on shared: text noise alone could explain the" in said
    far = window_losses(0.03, runs=3, seed=6, by_seed=0.02)
    near = window_losses(0, runs=3, seed=4, by_seed=0.02)
    said = seeds_sentences(compare(far, baseline=near), [near, far])
    assert f" for {far.name} (" in said
    assert "More seeds alone" not in said


def test_how_many_seeds_would_tell_a_difference_like_the_one_seen() -> None:
    """The advised number of seeds is the smallest with which a t test has a power of 80 % or more. An independent
    implementation computes this power."""
    arms = [
        Arm("lr-0.003", [3.48, 3.49, 3.50]),
        Arm("lr-0.01", [3.60, 3.61, 3.62]),
        Arm("lr-0.002", [3.49, 3.51, 3.53]),
    ]
    verdicts = compare(*arms)
    assert [each.verdict for each in verdicts] == ["inconclusive", "worse", "inconclusive"]
    said = seeds_sentences(verdicts, [BASELINE, *arms])
    deviation = math.sqrt(sum(float(np.var(arm.losses)) * 3 for arm in [BASELINE, *arms]) / 8)

    def least(difference: float) -> int:
        return next(runs for runs in range(2, 10_000) if welch_power(difference / deviation, runs) >= 0.8)

    assert f"to detect a difference as large as the one seen: {least(0.01)} for lr-0.003 (0.010 nats; " in said
    assert f", {least(0.01)} for lr-0.002 (0.010 nats; " in said
    assert "lr-0.01 " not in said, "it has a verdict already"


def welch_power(shift: float, runs: int) -> float:
    """Return the power of a two-sided t test at 5 % between two arms of `runs` runs each. The arms' means are `shift`
    standard deviations apart."""
    df, noncentrality = 2 * runs - 2, shift * math.sqrt(runs / 2)
    reach = scipy.stats.t.ppf(0.975, df)
    return float(scipy.stats.nct.sf(reach, df, noncentrality) + scipy.stats.nct.cdf(-reach, df, noncentrality))


# How often verdicts are wrong -----------------------------------------------------------------------------------------


def coverage(runs: tuple[int, int], ratio: float, experiments: int) -> float:
    """Return the percentage of intervals for a difference that contain the true one.

    The standard deviation of the first arm's losses is `ratio` times that of the second arm's.
    """
    generator = np.random.default_rng(7)
    truth, hits = 0.02, 0
    for _ in range(experiments):
        arm = Arm("b", generator.normal(3.5 + truth, 0.01 * ratio, runs[0]).tolist())
        baseline = Arm("a", generator.normal(3.5, 0.01, runs[1]).tolist())
        low, high = compare_arms(baseline, [arm])[0].interval or (math.nan, math.nan)
        hits += low <= truth <= high
    return 100 * hits / experiments


@pytest.mark.parametrize(("runs", "ratio", "share"), [(3, 1, 95), (3, 4, 65), (20, 4, 40)])
def test_a_pooled_spread_holds_if_the_arms_spread_alike(runs: int, ratio: float, share: float) -> None:
    """An interval from a pooled spread holds the true difference in 95 % of cases if the arms spread alike. If the
    single run's arm is four times as noisy, it does so in 65 % with three other runs, and in 40 % with twenty.
    docs/comparing.md states these shares."""
    assert coverage((1, runs), ratio, 1000) == pytest.approx(share, abs=5)


def test_intervals_of_arms_that_differ_do_not_hold_all_together() -> None:
    """Holm's method limits false alarms only: all intervals together contain their true differences in 91 % of cases,
    as docs/comparing.md states."""
    generator, differences = np.random.default_rng(10), [0.05, 0.1, 0.2, 0.4, 0.8]
    hits = 0
    for _ in range(300):
        arms = [Arm(str(each), generator.normal(3.5 + each, 0.01, 10).tolist()) for each in [0.0, *differences]]
        intervals = [each.interval or (math.nan, math.nan) for each in compare_arms(arms[0], arms[1:])]
        hits += all(low <= true <= high for (low, high), true in zip(intervals, differences, strict=True))
    assert 100 * hits / 300 == pytest.approx(91, abs=5)


def few_or_many(quick: object, *others: object) -> list[Any]:
    """Return pytest parameters of which the first runs always and the others only with `-m slow`."""
    return [pytest.param(quick), *(pytest.param(each, marks=pytest.mark.slow) for each in others)]


def three_errors(experiments: int) -> float:
    """Return three standard errors, in percent, of a share of 95 % that is measured in `experiments` experiments."""
    return 300 * math.sqrt(0.05 * 0.95 / experiments)


@pytest.mark.parametrize(
    "case", few_or_many(((3, 5), 1), *product([(3, 3), (3, 5), (5, 5)], [1, 2, 0.5, 4, 0.25])), ids=str
)
def test_welchs_intervals_cover_their_share(case: tuple[tuple[int, int], float], exhaustive: bool) -> None:
    """Welch's intervals contain the true difference in 93.44 % to 96.49 % of cases, by an exact formula. The share is
    lowest for 3 runs that are four times as noisy as 5 others, and highest for 3 and 3 equally noisy runs."""
    experiments = 20_000 if exhaustive else 1500
    covered = coverage(*case, experiments)
    print(f"runs, and ratio of standard deviations {case}: {covered:.2f} %")
    assert 93.5 - three_errors(experiments) <= covered <= 96.5 + three_errors(experiments)


@pytest.mark.parametrize("case", few_or_many((4, 3), *product([2, 3, 5, 8], [3, 5])), ids=str)
def test_false_alarms_of_all_arms_together(case: tuple[int, int], exhaustive: bool) -> None:
    experiments = 4000 if exhaustive else 500
    arms, runs = case
    losses = np.random.default_rng(8).normal(3.5, 0.01, (experiments, arms + 1, runs)).tolist()
    verdicts = [compare_arms(Arm("a", each[0]), [Arm("b", arm) for arm in each[1:]]) for each in losses]
    alarms = 100 * float(np.mean([any(one.verdict != "inconclusive" for one in each) for each in verdicts]))
    print(f"arms, runs of each {case}: {alarms:.2f} %")
    assert alarms <= 5.5 + (0 if exhaustive else three_errors(experiments) / 2)


@pytest.mark.parametrize("runs", few_or_many((3, 3), (5, 5), (3, 5)), ids=str)
def test_intervals_for_both_kinds_cover_their_share(runs: tuple[int, int], exhaustive: bool) -> None:
    """Intervals contain the true difference in 93.5 to 96.5 % of cases, except for sampling error, if seeds and the
    text both add noise. The text adds noise to all runs alike, to each arm, and to each run. The noise of seeds, of the
    text per arm and of the text per run is of similar size."""
    experiments = 2000 if exhaustive else 250
    generator, windows, hits = np.random.default_rng(9), 500, 0
    for _ in range(experiments):
        text = generator.normal(3.5, 0.5, windows)
        arms = []
        for name, number in zip("ba", runs, strict=True):
            to_arm = scipy.signal.lfilter([1], [1, -0.4], generator.normal(0, 0.08, windows))
            seeds = generator.normal(0, 0.005, number)
            losses = [text + to_arm + seed + generator.normal(0, 0.1, windows) for seed in seeds]
            arms.append(Arm(name, [float(each.mean()) for each in losses], losses))
        low, high = compare_arms(arms[1], [arms[0]])[0].interval or (math.nan, math.nan)
        hits += low <= 0 <= high
    covered = 100 * hits / experiments
    print(f"both kinds, {runs}: {covered:.2f} %")
    assert 93.5 - three_errors(experiments) <= covered <= 96.5 + three_errors(experiments)
