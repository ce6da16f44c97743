"""Scores that judge_ift.py writes into the runs whose weights gave the answers."""

from __future__ import annotations

import pytest

from harness.common.files import sha256
from harness.evaluation.instruct.responses import AnsweringModel, write_responses
from harness.runs.directory import RunDirectory
from harness.runs.results import InstructionResult, read_results
from tests.support.fake_judge import text
from tests.support.in_process import call
from tests.support.judging import LABELS, QUESTIONS, Bench, make_models, true_scores

CHECKPOINT = "20260101Z000000-iteration-9"
ONE_BY_ONE = ("--attempts", "1", "--parallel", "1")


@pytest.fixture
def bench(bench: Bench) -> Bench:
    """The answers and the fake judge, with a run for each model. The run has the checkpoint that gave the model's
    answers."""
    for number, model in enumerate(bench.models):
        folder = bench.folder / model.model / "checkpoints" / CHECKPOINT
        folder.mkdir(parents=True)
        (folder.parents[1] / "model.json").write_text("{}")
        (folder / "model.safetensors").write_text(model.model)  # judging needs only its hash
        (folder.parent / "latest").symlink_to(CHECKPOINT)
        digest = sha256(folder / "model.safetensors")
        weights = AnsweringModel(checkpoint=CHECKPOINT, sha256=digest, device="a CPU", torch="2.15.0")
        bench.models[number] = model.model_copy(update={"weights": weights})
    return bench


def kept(bench: Bench, name: str) -> list[InstructionResult]:
    results = read_results(RunDirectory(bench.folder / name))
    assert results.problems == []
    return results.of(InstructionResult)


@pytest.mark.slow
def test_each_run_keeps_its_own_scores(bench: Bench) -> None:
    done = bench.command("--repeats", "2")
    assert done.stderr == ""
    for number, name in enumerate(LABELS):
        [result] = kept(bench, name)
        scores = true_scores(bench.models)[:, number]
        assert result.scores == scores.tolist()
        assert result.mean == pytest.approx(scores.mean())
        assert f"{result.mean:.2f}  [{result.low:.2f}, {result.high:.2f}]" in done.stdout
        assert (result.weights.checkpoint, result.weights.is_latest) == (CHECKPOINT, True)
        assert result.weights.sha256 == sha256(bench.folder / name / "checkpoints" / "latest" / "model.safetensors")
        assert (result.judge, result.base_url, result.prompt) == ("referee", bench.judge.url, "together")
        assert (result.questions, result.repeats, result.judged_with) == (QUESTIONS, 2, list(LABELS))
        assert (result.device, result.torch) == ("a CPU", "2.15.0")
    assert len({kept(bench, name)[0].judging for name in LABELS}) == 1


def test_the_same_judging_is_one_result_and_another_company_is_another(bench: Bench) -> None:
    """Judging the same answers again leaves one result, and judging them together with other models' answers makes
    another one. With the prompt "book", each answer is judged alone, so that other models do not matter."""
    bench.command()
    bench.command("--prompt", "book")
    bench.models.reverse()
    bench.command()
    bench.models = bench.models[-1:]
    bench.command()
    bench.command("--prompt", "book")
    book, alone, together = sorted(kept(bench, "small"), key=lambda each: (each.prompt, len(each.judged_with)))
    assert (len(together.judged_with), alone.judged_with, book.judged_with) == (3, ["small"], ["small"])
    assert (book.prompt, alone.prompt, together.prompt) == ("book", "together", "together")
    assert together.judging != alone.judging
    assert len(kept(bench, "large")) == 2


def test_two_answers_of_one_checkpoint_are_two_results(bench: Bench) -> None:
    """Two fine-tunings of the same weights, judged together."""
    weights = bench.models[0].weights
    bench.models = [model.model_copy(update={"weights": weights}) for model in bench.models[:2]]
    paths = [bench.folder / LABELS[0] / f"{model.model}.json" for model in bench.models]
    for path, model in zip(paths, bench.models, strict=True):
        write_responses(path, model)
    call("judge_ift", *paths, "--model", "referee", "--base-url", bench.judge.url, folder=bench.folder)
    found = sorted(result.scores for result in kept(bench, LABELS[0]))
    assert found == sorted(true_scores(bench.models).T.tolist())


def test_another_models_missing_answer_leaves_no_question_out(bench: Bench) -> None:
    """If one model has no valid score for a question, the other model keeps its score for that question. Both are
    judged alone, with the prompt "book"."""
    bench.judge.faults = [text("no number")]
    done = bench.command("--prompt", "book", *ONE_BY_ONE, expect=1)
    assert "no valid answer to 1 of 15 prompts" in done.error_lines[0]
    [gap], [whole] = kept(bench, "small"), kept(bench, "large")
    scores = true_scores(bench.models)
    assert gap.scores == [None, *scores[1:, 0].tolist()]
    assert gap.mean == pytest.approx(scores[1:, 0].mean())
    assert whole.scores == scores[:, 2].tolist()
    assert whole.mean == pytest.approx(scores[:, 2].mean())


def test_answers_that_belong_to_no_known_weights(bench: Bench) -> None:
    """Scores are not kept if it is unknown which weights gave the answers. A line says so for answers in a run's
    folder. For answers elsewhere, nothing is printed."""
    bench.models[0] = make_models()[0]
    (bench.folder / "medium").rename(bench.folder / "elsewhere")
    (bench.folder / "large" / "checkpoints" / CHECKPOINT / "model.safetensors").write_bytes(b"trained anew")
    done = bench.command()
    assert "2   " in done.stdout
    assert done.stderr.splitlines() == [
        f"{bench.folder}/{name}/{name}.json: its scores are not kept among the run's results: it does not name weights "
        "that the run still has; make it again with test_ift.py --overwrite"
        for name in ("small", "large")
    ]
    assert not list(bench.folder.rglob("results"))


@pytest.mark.parametrize("name", ["../checkpoints", "a\0b", "/etc"])
def test_a_checkpoint_that_cannot_be_one_is_a_warning(bench: Bench, name: str) -> None:
    weights = AnsweringModel(checkpoint=name, sha256="00" * 32, device="", torch="")
    bench.models = [bench.models[0].model_copy(update={"weights": weights})]
    done = bench.command()
    assert done.stderr.startswith("warning: the result is not written to the run's results: checkpoint ")
    assert done.stderr.count("\n") == 1
