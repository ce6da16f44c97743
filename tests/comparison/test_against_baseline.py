"""Verdicts from folders of runs: which runs form an arm, which losses are compared, and which runs are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.comparison.against_baseline import compare_with
from harness.comparison.arms import find_arms
from harness.runs.results import LossResult, read_results, write_loss
from tests.support.compared_runs import (
    BEST,
    DATASET,
    LATEST,
    RunFolder,
    diverged_run,
    finished_run,
    low_and_hot,
    records,
)
from tests.support.isolation import SHIPPED_RUNS


def arm(tmp_path: Path, rate: float, losses: tuple[float, ...]) -> list[RunFolder]:
    return [
        finished_run(tmp_path, f"lr-{rate}-seed-{seed}", rate, seed, loss + 0.1).test_loss(loss, windows=600)
        for seed, loss in enumerate(losses, start=1)
    ]


def scatter_windows(run: RunFolder, own: int) -> None:
    """Write window losses around the run's test loss: noise shared by all runs, and a little from the seed `own`."""
    (result,) = read_results(run.directory).of(LossResult)
    text, chance = np.random.default_rng(1), np.random.default_rng(own)
    windows = result.text.windows
    shared, little = text.normal(0, 0.5, windows), chance.normal(0, 0.001, windows)
    losses = shared - shared.mean() + little - little.mean() + (result.loss or 0.0)
    write_loss(run.directory, result, losses)


def replicates(tmp_path: Path, rate: float, *names: str) -> list[RunFolder]:
    return [finished_run(tmp_path, name, rate, seed, 2 + rate) for seed, name in enumerate(names)]


@pytest.mark.parametrize(
    ("first", "second", "baseline", "named"),
    [
        (["lr-0.003-seed-10", "lr-0.003-seed-11"], ["lr-0.1-seed1"], None, {"lr-0.003", "lr-0.1-seed1"}),
        (["base_random_seed_1", "base_random_seed_2"], ["x"], None, {"base", "x"}),
        (["wide-1", "wide-2"], ["x"], None, {"wide-1", "x"}),
        (["one", "two"], ["x"], "two", {"two", "x"}),
        (["one", "two"], ["x"], "x", {"one", "x"}),
        (["base-seed1", "base-seed2"], ["base"], "base-seed2", {"base-seed2", "base"}),
        (["a-seed1", "a-seed2"], ["a-seed3", "a-seed4"], "a-seed4", {"a-seed1", "a-seed4"}),
        (["seed1", "seed2"], ["x"], None, {"seed1", "x"}),
    ],
)
def test_an_arm_is_called_as_its_runs_without_their_seeds_or_as_one_of_them(
    tmp_path: Path, first: list[str], second: list[str], baseline: str | None, named: set[str]
) -> None:
    runs = [*replicates(tmp_path, 1, *first), *replicates(tmp_path, 2, *second)]
    arms = find_arms(records(*runs), baseline)
    assert {*arms.run_names} == named
    assert sorted(map(sorted, arms.run_names.values())) == sorted([sorted(first), sorted(second)])
    if named == {"base", "x"}:  # an unfinished run has a curve of its own in the chart, so its name is not free
        unfinished = RunFolder(tmp_path, "base").train_to(0)
        assert {*find_arms(records(*runs, unfinished)).run_names} == {"base_random_seed_1", "x"}


def test_a_baseline_whose_seed_was_trained_before_stands_for_that_seed(tmp_path: Path) -> None:
    (again,) = replicates(tmp_path, 1, "again")
    runs = [*replicates(tmp_path, 1, "a-1", "a-2"), again, *replicates(tmp_path, 2, "b")]
    arms = find_arms(records(*runs), "again")
    assert arms.run_names == {"again": ("a-2", "again"), "b": ("b",)}
    assert arms.notes == ["a-1: not counted, because another run has the same seed and settings"]
    assert compare_with("again", records(*runs)).title.startswith("Against again (2 runs), by ")


def test_a_clear_difference_and_one_within_the_noise(tmp_path: Path) -> None:
    runs = [
        *arm(tmp_path, 0.001, (2.600, 2.602, 2.604)),
        *arm(tmp_path, 0.002, (2.500, 2.503, 2.501)),
        *arm(tmp_path, 0.004, (2.601, 2.604, 2.602)),
    ]
    for number, run in enumerate(runs):
        scatter_windows(run, number)
    found = compare_with("lr-0.001-seed-2", records(*runs))
    assert found.title == (
        "Against lr-0.001 (3 runs), by test loss on 600 x 16 tokens from token 0 of the test split of me/texts "
        "(cccccccc), "
        "in fp32:"
    )
    better, unclear = found.verdicts
    assert (better.arm, better.verdict, better.runs) == ("lr-0.002", "better", (3, 3))
    assert better.difference is not None
    assert better.difference.value == pytest.approx(-0.1007, abs=1e-4)
    assert "this text only" not in better.sentence, "the windows' losses were found"
    assert (unclear.arm, unclear.verdict) == ("lr-0.004", "inconclusive")
    assert "Detecting a difference of 0.01 nats in 80 % of cases takes " in found.closing
    assert "Seeds of each arm needed to detect a difference as large as the one seen: " in found.closing
    assert " for lr-0.004 (0.0003 nats; " in found.closing


@pytest.mark.parametrize("is_measured", [False, True])
def test_validation_losses_serve_where_no_other_arm_has_a_test_loss(tmp_path: Path, is_measured: bool) -> None:
    a = RunFolder(tmp_path, "a").finish(final_validation_loss=2.5)
    b = RunFolder(tmp_path, "b", {"learning_rate": 0.1}).finish(final_validation_loss=2.7)
    if is_measured:
        a.test_loss(2.4)
    found = compare_with("a", records(a, b))
    assert found.title.startswith("Against a (1 run), by validation loss on 20 x 16 tokens from token 0 ")
    (verdict,) = found.verdicts
    assert (verdict.arm, verdict.verdict) == ("b", "inconclusive")
    assert "training noise is unknown" in verdict.sentence


def test_the_kinds_of_chance_are_those_of_the_runs_whose_losses_are_compared(tmp_path: Path) -> None:
    """A shuffled arm without test losses adds nothing to the spread, so the spread does not cover the data's order."""
    runs = [*arm(tmp_path, 0.001, (2.600, 2.602)), *arm(tmp_path, 0.002, (2.500, 2.503))]
    for seed in (1, 2):
        run = RunFolder(tmp_path, f"shuffled-seed{seed}", {"shuffle": True, "random_seed": seed})
        runs.append(run.finish(final_validation_loss=2.5))
    assert "Seeds (of the initial weights) alone" in compare_with("lr-0.001-seed-1", records(*runs)).closing
    runs[-2].test_loss(2.4, windows=600), runs[-1].test_loss(2.41, windows=600)
    both = "Seeds (of the initial weights and the order of the data) alone"
    assert both in compare_with("lr-0.001-seed-1", records(*runs)).closing


def test_an_arm_measured_on_another_text_is_in_no_verdict_but_a_sentence(tmp_path: Path) -> None:
    a, b, c = (finished_run(tmp_path, name, rate) for rate, name in enumerate("abc", start=1))
    a.test_loss(2.5), b.test_loss(2.4), c.test_loss(2.3, sha256="00" * 32)
    found = compare_with("a", records(a, b, c))
    assert [verdict.sentence for verdict in found.verdicts if verdict.arm == "c"] == [
        "c against a: inconclusive, because c has no run with this loss"
    ]


def test_a_verdict_on_another_text_is_told_too(tmp_path: Path) -> None:
    """Each dataset of a mixture is a text of its own, on which another arm may be better."""
    runs = low_and_hot(tmp_path, 2.5, 2.4, seeds=3)
    for run, loss in zip(runs, (2.501, 2.502, 2.503, 2.401, 2.402, 2.403), strict=True):
        run.test_loss(loss)
    for run, on_web in zip(runs[:-1], (3.501, 3.502, 3.503, 3.801, 3.802), strict=True):  # the last is not measured yet
        run.test_loss(on_web, sha256="dd" * 32, dataset="me/web")
    found = compare_with("low-seed1", records(*runs))
    told = [found.title + found.verdicts[0].sentence, *found.notes]
    for text, word in (("me/web", "worse"), (DATASET["name"], "better")):
        (verdict,) = [each for each in told if each.startswith("Against low") and text in each.partition(", in ")[0]]
        assert f"hot is {word} than low" in verdict
    assert "hot-seed3: not compared by test loss: measured on" in next(each for each in told if "me/web" in each)
    assert not any(each.startswith("hot-seed3: not compared") for each in found.notes), "it is, on the other text"


def test_an_arm_that_is_worse_without_its_diverged_seed_is_worse(tmp_path: Path) -> None:
    runs, lost = low_and_hot(tmp_path, 2.6, 4.5), diverged_run(tmp_path, "hot-seed3", 0.01, 3)
    assert compare_with("low-seed1", records(*runs, lost)).verdicts[0].verdict == "worse"
    assert compare_with("hot-seed1", records(*runs, lost)).verdicts[0].verdict == "better"


def test_a_seed_that_was_ended_because_it_diverged_counts_against_its_arm(tmp_path: Path) -> None:
    runs, lost = low_and_hot(tmp_path, 2.6, 2.5), diverged_run(tmp_path, "hot-seed3", 0.01, 3)
    assert compare_with("low-seed1", records(*runs)).verdicts[0].verdict == "better"
    found = compare_with("low-seed1", records(*runs, lost))
    assert found.verdicts[0].sentence == "hot against low: inconclusive, because hot-seed3, of hot, diverged"
    assert found.notes == ["hot-seed3: diverged, so hot is not called better"]
    (lost.path / ".lock").write_text('{"host": "rented", "pid": 1, "namespace": "x"}')  # copied from another machine
    assert compare_with("low-seed1", records(*runs, lost)) == found
    (verdict,) = compare_with("hot-seed1", records(*runs, lost)).verdicts
    assert compare_with("hot-seed3", records(*runs, lost)).verdicts == [verdict], "the diverged run is of the arm"
    assert verdict.verdict == "inconclusive", "low is worse only than the seeds of hot that did not diverge"
    assert verdict.difference is not None
    assert verdict.interval is not None
    again = diverged_run(tmp_path, "hot-seed1-again", 0.01)
    notes = " ".join(compare_with("low-seed1", records(*runs, again)).notes)
    assert "in no comparison" in notes, "that seed is counted"
    found = compare_with("low-seed1", records(*runs, diverged_run(tmp_path, "hotter-seed1", 0.1)))
    assert found.verdicts[0].verdict == "better"
    assert "hotter-seed1: diverged, and so in no comparison" in found.notes


def test_the_precision_that_only_a_checkpoint_records_divides_arms(tmp_path: Path) -> None:
    """Summaries of earlier versions do not record which precision "auto" stood for."""
    old = RunFolder(tmp_path, "low-seed1", {"random_seed": 1}).finish()
    new = RunFolder(tmp_path, "low-seed2", {"random_seed": 2}).finish(precision="bf16")
    assert find_arms(records(old, new)).run_names == {"low": ("low-seed1", "low-seed2")}
    old.add_checkpoint(LATEST, "latest", precision="fp32")
    assert len(find_arms(records(old, new)).run_names) == 2


def test_a_seed_that_diverged_and_reached_its_end_counts_against_its_arm(tmp_path: Path) -> None:
    """With stop_if_diverged false, a run reaches its end although it has diverged."""
    runs = low_and_hot(tmp_path, 3.5, 2.5)
    runs[3].finish(final_validation_loss=2.52, has_diverged=True)
    found = compare_with("low-seed1", records(*runs))
    assert found.verdicts[0].sentence == "hot against low: inconclusive, because hot-seed2, of hot, diverged"
    assert found.notes == ["hot-seed2: diverged, so hot is not called better"]
    assert compare_with("hot-seed1", records(*runs)).verdicts[0].verdict == "inconclusive"


@pytest.mark.parametrize("measured", ["validation", "test"])
def test_a_seed_that_diverged_is_no_reason_to_compare_the_others_alone(tmp_path: Path, measured: str) -> None:
    """An arm with a diverged seed is inconclusive. It must not be better only because that seed is not counted."""
    runs = []
    for rate, losses in ((0.001, (2.50, 2.52)), (0.002, (2.40, 2.41, None)), (0.1, (None,))):
        for seed, loss in enumerate(losses, start=1):
            run = finished_run(tmp_path, f"lr-{rate}-seed-{seed}", rate, seed, loss)
            runs.append(run.test_loss(loss) if measured == "test" else run)
    found = compare_with("lr-0.001-seed-1", records(*runs))
    lost = "the loss of lr-0.002-seed-3 is not finite"
    assert f"by {measured} loss on" in found.title
    reasons = [verdict.sentence.partition(": ")[2] for verdict in found.verdicts]
    assert reasons == [f"inconclusive, because {each}" for each in (lost, "the loss of lr-0.1-seed-1 is not finite")]
    assert [verdict.runs for verdict in found.verdicts] == [(3, 2), (1, 2)]
    of_baseline = compare_with("lr-0.002-seed-1", records(*runs[:5])).verdicts
    assert [verdict.sentence.partition(": ")[2] for verdict in of_baseline] == [f"inconclusive, because {lost}"]
    assert compare_with("lr-0.1-seed-1", records(runs[0], runs[5])).verdicts[0].verdict == "inconclusive"


def test_a_seed_measured_elsewhere_or_not_at_all_is_named_below_the_verdict(tmp_path: Path) -> None:
    own, other = arm(tmp_path, 0.001, (2.50, 2.52)), arm(tmp_path, 0.002, (2.40, 2.41))
    rest = [finished_run(tmp_path, f"lr-0.002-seed-{seed}", 0.002, seed) for seed in (3, 4, 5, 6)]
    rest[0].test_loss(2.0, windows=600, precision="bf16"), rest[1].test_loss(2.0, windows=600, tokenizer="ab" * 32)
    found = compare_with("lr-0.001-seed-1", records(*own, *other, *rest))
    assert [verdict.runs for verdict in found.verdicts] == [(2, 2)]
    text = "measured on 600 x 16 tokens from token 0 of the test split of me/texts (cccccccc)"
    assert found.notes == [
        f"lr-0.002-seed-3: not compared by test loss: {text}, in bf16",
        f"lr-0.002-seed-4: not compared by test loss: {text}, in fp32, tokenizer abababab",
        "lr-0.002-seed-5, lr-0.002-seed-6: not compared by test loss: no result of test_loss.py",
    ]


@pytest.mark.parametrize("recorded", [{}, {"sha256": None}])
def test_texts_whose_content_is_not_recorded_are_not_the_same(tmp_path: Path, recorded: dict[str, None]) -> None:
    dataset = {"name": "me/texts", "train": {"tokens": 100_000}, "validation": {"tokens": 10_000, **recorded}}
    runs = [RunFolder(tmp_path, name, {"learning_rate": n}).finish(dataset=dataset) for n, name in enumerate("ab", 1)]
    found = compare_with("a", records(*runs))
    assert found.verdicts == []
    assert "no other arm has a test loss on the same text and in the same precision" in found.title


def test_losses_of_other_checkpoints_than_the_best_are_told(tmp_path: Path) -> None:
    a, b = (
        finished_run(tmp_path, name, rate).add_checkpoint(BEST, "best").add_checkpoint(LATEST, "latest")
        for rate, name in enumerate("ab", start=1)
    )
    a.test_loss(2.5).test_loss(2.6, LATEST), b.test_loss(2.4, LATEST)
    assert compare_with("a", records(a, b)).notes == [
        f"b: test loss of checkpoint {LATEST} (latest): the best checkpoint has no comparable result"
    ]


def test_windows_that_are_lost_or_not_those_of_the_loss_are_told(tmp_path: Path) -> None:
    runs = [*arm(tmp_path, 0.001, (2.5, 2.6)), *arm(tmp_path, 0.002, (2.4, 2.5))]
    for run, wrong in ((runs[0], np.nan), (runs[3], 9.0)):
        (path,) = run.directory.results.glob("*.safetensors")
        save_file({"losses": np.full(600, wrong, np.float32)}, path)
    read = records(*runs)
    assert [bool(record.problems) for record in read] == [True, False, False, True]
    for record in (read[0], read[3]):
        assert "its loss is 2.5, but the mean of its windows' losses (" in record.problems[0]
        assert not record.results.found, "the result is in no column"
    found = compare_with("lr-0.001-seed-1", read)
    assert [verdict.verdict for verdict in found.verdicts] == ["inconclusive"]
    for path in runs[1].directory.results.glob("*.safetensors"):
        path.unlink()
    found = compare_with("lr-0.001-seed-2", records(runs[1], runs[2]))
    assert any("cannot read the losses of the windows" in note for note in found.notes)


ONLY_TRAINED = "only runs that were trained here to their end are compared"


@pytest.mark.parametrize(
    ("baseline", "reason"),
    [
        ("stopped", f'Against stopped: inconclusive, because its state is "stopped": {ONLY_TRAINED}'),
        ("reported", f'Against reported: inconclusive, because its state is "never trained": {ONLY_TRAINED}'),
        ("lr-0.001-seed-1", "Against lr-0.001: inconclusive, because no other arm has finished"),
    ],
)
def test_a_baseline_that_compares_with_nothing(tmp_path: Path, baseline: str, reason: str) -> None:
    stopped, reported = RunFolder(tmp_path, "stopped").train_to(0, 10), RunFolder(tmp_path, "reported")
    (reported.path / "reported.json").write_text((SHIPPED_RUNS / "8xa100m40" / "reported.json").read_text())
    found = compare_with(baseline, records(*arm(tmp_path, 0.001, (2.5, 2.6)), stopped, reported))
    assert (found.title, found.verdicts) == (reason, [])
    assert found.notes == [
        "stopped: stopped, and so in no comparison",
        "reported: never trained, and so in no comparison",
    ]
