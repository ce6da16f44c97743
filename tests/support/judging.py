"""Answers of several models, a local judge, and ways to have the answers judged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness.evaluation.instruct.responses import Response, Responses, write_responses
from harness.evaluation.judge.requests import JudgeSettings, Judgment, judge
from tests.support.fake_judge import FakeJudge, score
from tests.support.in_process import call
from tests.support.launch import Result

KEY = "sk-averysecretkeyindeed"
LABELS = ("small", "medium", "large")
QUESTIONS = 5


def make_models(questions: int = QUESTIONS, labels: tuple[str, ...] = LABELS) -> list[Responses]:
    """Return the answers of several models, one model for each label. Each model knows more words of the references
    than the one before."""
    random = np.random.default_rng(0)
    models: list[list[Response]] = [[] for _ in labels]
    for question in range(questions):
        words = [f"word{number}" for number in range(10)]
        for number, responses in enumerate(models):
            known = " ".join(word for word in words if random.random() < (number + 1) / (len(labels) + 1))
            responses.append(
                Response(instruction=f"Question {question}", input="", output=" ".join(words), response=known)
            )
    return [Responses(model=label, responses=responses) for label, responses in zip(labels, models, strict=True)]


def true_scores(models: list[Responses]) -> np.ndarray:
    """Return the scores that an honest judge would give, from the words of each model's own answers. The array has the
    shape (questions, models)."""
    return np.array([[score(each.response, each.output) for each in model.responses] for model in models]).T


@dataclass
class Bench:
    """A local judge, a folder with responses files, and ways to have them judged."""

    judge: FakeJudge
    folder: Path
    models: list[Responses] = field(default_factory=make_models)

    @property
    def cache(self) -> Path:
        return self.folder / "judgements.jsonl"

    @property
    def settings(self) -> JudgeSettings:
        return JudgeSettings("referee", self.judge.url, 5.0, attempts=3)

    def run(self, **changes: Any) -> Judgment:
        return judge(self.models, replace(self.settings, **changes), [self.cache])

    def assert_true(self, judgment: Judgment) -> None:
        """Assert that the judge answered every request, and that each model has the true scores of its own answers in
        every repeat."""
        assert not judgment.unanswered
        for repeat in range(judgment.scores.shape[1]):
            assert (judgment.scores[:, repeat] == true_scores(self.models)).all()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.cache.read_text().splitlines()]

    def invalid(self) -> list[str]:
        """Return the reasons of the invalid answers in the cache."""
        return [line["reason"] for line in self.lines() if "scores" not in line]

    def kept(self) -> int:
        """Return the number of complete lines in the cache, which another process may be writing."""
        return self.cache.read_bytes().count(b"\n") if self.cache.exists() else 0

    def write(self) -> list[str]:
        """Write each model's responses file, and return the paths. The file is written into the subfolder with the
        model's name if there is one, else into `folder`."""
        paths = []
        for model in self.models:
            own = self.folder / model.model
            paths.append(f"{own if own.is_dir() else self.folder}/{model.model}.json")
            write_responses(Path(paths[-1]), model)
        return paths

    def command(self, *options: str, expect: int = 0, **environment: str) -> Result:
        """Run judge_ift.py on all models."""
        arguments = [*self.write(), "--model", "referee", "--base-url", self.judge.url, *options]
        done = call("judge_ift", *arguments, folder=self.folder, environment=environment)
        assert done.status == expect, done
        assert KEY not in done.stdout + done.stderr
        return done
