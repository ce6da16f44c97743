"""Scores that judge_ift.py leaves in the runs whose weights answered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.common.files import sha256
from harness.evaluation.instruct.responses import AnsweringModel, Response, Responses, write_responses
from harness.runs.directory import RunDirectory
from harness.runs.results import InstructionResult, read_results
from tests.support.fake_judge import FakeJudge, score, text
from tests.support.in_process import call
from tests.support.launch import Result, Workshop

CHECKPOINT = "20260101Z000000-iteration-9"
WORDS = [f"word{number}" for number in range(10)]
QUESTIONS = 6


def answers(known: int) -> list[Response]:
    """Answers of a model that knows so many words of each reference, by turns one more."""
    random = np.random.default_rng(known)
    return [
        Response(
            instruction=f"Question {number}",
            input="",
            output=" ".join(WORDS),
            response=" ".join(random.choice(WORDS, known + number % 2, replace=False).tolist()),
        )
        for number in range(QUESTIONS)
    ]


def true_scores(responses: list[Response]) -> list[float]:
    return [float(score(each.response, each.output)) for each in responses]


class Bench:
    """Two runs with a checkpoint each and their answers, and a judge."""

    def __init__(self, folder: Path, judge: FakeJudge) -> None:
        self.judge = judge
        self.shop = Workshop(folder)
        self.files = {name: self.add_run(name, known) for name, known in (("small", 3), ("large", 7))}

    def add_run(self, name: str, known: int) -> Path:
        run = self.shop.add_run(name)
        weights = run / "checkpoints" / CHECKPOINT / "model.safetensors"
        weights.parent.mkdir(parents=True)
        weights.write_bytes(name.encode())  # judging needs no more of it than its hash
        (run / "checkpoints" / "latest").symlink_to(CHECKPOINT)
        of = AnsweringModel(checkpoint=CHECKPOINT, sha256=sha256(weights), device="a CPU", torch="2.15.0")
        return self.write(run / "ift-responses.json", name, known, of)

    def write(self, path: Path, name: str, known: int, weights: AnsweringModel | None) -> Path:
        write_responses(path, Responses(model=name, weights=weights, responses=answers(known)))
        return path

    def run(self, *names: str, options: tuple[str, ...] = ()) -> Result:
        paths = [str(self.files[name]) for name in names]
        judged = f"--model referee --base-url {self.judge.url} --attempts 1 --parallel 1 --cache cache.jsonl".split()
        environment = {"OPENAI_API_KEY": "sk-loopback", "NO_PROXY": "127.0.0.1"}
        return call("judge_ift", *paths, *judged, *options, folder=self.shop.path, environment=environment)

    def kept(self, name: str) -> list[InstructionResult]:
        results = read_results(RunDirectory(self.shop.runs / name))
        assert results.problems == []
        return results.of(InstructionResult)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with FakeJudge() as judge:
        yield Bench(tmp_path, judge)


def test_each_run_keeps_its_own_scores(bench: Bench) -> None:
    done = bench.run("small", "large", options=("--repeats", "2"))
    assert (done.status, done.stderr) == (0, "")
    for name, known in (("small", 3), ("large", 7)):
        [result] = bench.kept(name)
        assert result.scores == true_scores(answers(known))
        assert result.mean == pytest.approx(np.mean(true_scores(answers(known))))
        assert result.low is not None
        assert result.high is not None
        assert f"{result.mean:.2f}  [{result.low:.2f}, {result.high:.2f}]" in done.stdout
        assert (result.weights.checkpoint, result.weights.is_latest) == (CHECKPOINT, True)
        assert result.weights.sha256 == sha256(
            bench.shop.runs / name / "checkpoints" / CHECKPOINT / "model.safetensors"
        )
        assert (result.judge, result.base_url, result.prompt) == ("referee", bench.judge.url, "together")
        assert (result.questions, result.repeats, result.judged_with) == (QUESTIONS, 2, ["small", "large"])
        assert (result.device, result.torch) == ("a CPU", "2.15.0")
    assert bench.kept("small")[0].judging == bench.kept("large")[0].judging


def test_the_same_judging_is_one_result_and_another_company_is_another(bench: Bench) -> None:
    for names in (("small", "large"), ("large", "small"), ("small",)):
        assert bench.run(*names).status == 0
    together, alone = sorted(bench.kept("small"), key=lambda result: len(result.judged_with), reverse=True)
    assert (len(together.judged_with), alone.judged_with) == (2, ["small"])
    assert together.judging != alone.judging
    assert len(bench.kept("large")) == 1


def test_answers_judged_alone_are_the_same_in_any_company(bench: Bench) -> None:
    for names in (("small", "large"), ("small",)):
        assert bench.run(*names, options=("--prompt", "book")).status == 0
    [result] = bench.kept("small")
    assert (result.prompt, result.judged_with) == ("book", ["small"])


def test_another_models_missing_answer_leaves_no_question_out(bench: Bench) -> None:
    """A gap in one model's scores, judged alone, leaves the other model's scores whole."""
    bench.judge.faults = [text("no number")]
    done = bench.run("small", "large", options=("--prompt", "book"))
    assert done.status == 1
    assert "no valid answer to 1 of 12 prompts" in done.error_lines[0]
    [gap], [whole] = bench.kept("small"), bench.kept("large")
    assert gap.scores == [None, *true_scores(answers(3))[1:]]
    assert gap.mean == pytest.approx(np.mean(true_scores(answers(3))[1:]))
    assert whole.scores == true_scores(answers(7))
    assert whole.mean == pytest.approx(np.mean(true_scores(answers(7))))


def test_answers_of_weights_that_are_not_known_leave_a_line(bench: Bench) -> None:
    bench.write(bench.files["small"], "small", 3, None)
    (bench.shop.runs / "large" / "checkpoints" / CHECKPOINT / "model.safetensors").write_bytes(b"trained anew")
    done = bench.run("small", "large")
    assert done.status == 0
    assert "2   " in done.stdout
    first, second = done.stderr.splitlines()
    assert first == (
        f"{bench.files['small']}: its scores are not kept among the run's results: it does not say which weights "
        "answered; test_ift.py --overwrite makes it anew"
    )
    assert second.startswith(f"{bench.files['large']}: its scores are not kept")
    assert "no checkpoint of" in second
    assert bench.kept("small") == bench.kept("large") == []


def test_answers_outside_a_run_leave_nothing_and_say_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.files["small"] = bench.files["small"].rename(tmp_path / "small.json")
    done = bench.run("small", "large")
    assert (done.status, done.stderr) == (0, "")
    assert bench.kept("small") == []
    assert len(bench.kept("large")) == 1


@pytest.mark.parametrize("name", ["../checkpoints", "a\0b", "/etc"])
def test_a_checkpoint_that_cannot_be_one_is_a_warning(bench: Bench, name: str) -> None:
    of = AnsweringModel(checkpoint=name, sha256="00" * 32, device="", torch="")
    bench.write(bench.files["small"], "small", 3, of)
    done = bench.run("small")
    assert done.status == 0
    assert done.stderr.startswith("warning: not kept among the run's results: checkpoint ")
    assert done.stderr.count("\n") == 1
