"""Comparison of models by a judge's scores: as text of 80 columns, as JSON, and as results in the models' runs."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np

from harness.common.errors import RunError, printable
from harness.common.messages import WIDTH, abbreviated, paragraph, tell
from harness.common.statistics import Estimate, estimate_of_mean, question_means, resampled_means
from harness.evaluation.instruct.responses import Responses
from harness.evaluation.judge.requests import JudgeSettings, Judgment, Tokens, judge
from harness.runs.directory import RunDirectory
from harness.runs.results import InstructionResult, now, write_result
from harness.runs.trained_model import find_measured, warned_if_not_kept

LABEL_INDENT = 32
MOST_FOR_ALL_PAIRS = 8  # with more models, only pairs of neighbors in the ranking are printed
TIE = 1e-9  # two models' scores on a question that differ by at most this count as equal: rounding


@dataclass(frozen=True)
class Pair:
    """Comparison of two models, given by their indices into the list of models."""

    first: int
    second: int
    win_rate: float  # share of questions on which `first` has the higher score; a tie counts as half a question
    difference: Estimate  # mean score of `first` minus that of `second`


@dataclass(frozen=True)
class Comparison:
    """Comparison of all models."""

    questions: int  # on which all models have scores
    means: tuple[Estimate, ...]  # by the models' indices
    ranking: tuple[int, ...]  # the models' indices, best mean first
    pairs: tuple[Pair, ...]  # all pairs; `first` is the model with the better mean


def compare(scores_QxRxM: np.ndarray, seed: int) -> Comparison | None:
    """Compare M models by their scores on Q questions in R repeats. A missing score is NaN. A repeat of a question
    counts only if all models have a score in it. If none counts, return None. `seed` is that of the bootstrap."""
    scores_QxM = question_means(scores_QxRxM)
    if not len(scores_QxM):
        return None
    resampled_BxM = resampled_means(scores_QxM, seed)
    values = scores_QxM.mean(axis=0)
    ranking = sorted(range(len(values)), key=lambda model: -values[model])
    pairs = []
    for first, second in combinations(ranking, 2):
        difference_Q = scores_QxM[:, first] - scores_QxM[:, second]
        wins, ties = (difference_Q > TIE).mean(), (np.abs(difference_Q) <= TIE).mean()
        resampled_B = resampled_BxM[:, first] - resampled_BxM[:, second]
        difference = estimate_of_mean(difference_Q.mean(), resampled_B, count=len(difference_Q), bounds=(-100.0, 100.0))
        pairs.append(Pair(first, second, float(wins + ties / 2), difference))
    means = tuple(
        estimate_of_mean(value, resampled_B, count=len(scores_QxM), bounds=(0.0, 100.0))
        for value, resampled_B in zip(values, resampled_BxM.T, strict=True)
    )
    return Comparison(len(scores_QxM), means, tuple(ranking), tuple(pairs))


@dataclass(frozen=True)
class JudgeReport:
    """Report of a judgment."""

    judgment: Judgment
    settings: JudgeSettings
    prices: tuple[float, float] | None = None  # dollars for a million tokens of prompts, and of answers

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison of the models, or None if no repeat of a question has scores of all models."""
        return compare(self.judgment.scores, self.settings.seed)

    def lines(self) -> Iterator[str]:
        """Yield the report's lines for a terminal, of at most 80 columns."""
        if self.comparison is not None:
            yield from self._tables(self.comparison)
            if not self.settings.judges_together:
                text = f"Compare these means only with means from the {self.settings.prompt}'s prompt and the same "
                yield from [*paragraph(f"{text}judge, not with those of models judged together.", indent=0), ""]
        now, ever = self.judgment.spent_now, self.judgment.spent
        costs = {"Tokens": now} if now == ever else {"Tokens in this run": now, "Tokens for all answers": ever}
        for what, tokens in costs.items():
            text = f"{what}: {tokens.prompt:,} of prompts, {tokens.completion:,} of answers"
            text += "" if self.prices is None else f", ${self._dollars(tokens):,.4f}"
            text += f" ({tokens.uncounted:,} of the answers came without a count)" if tokens.uncounted else ""
            yield from paragraph(text)

    def as_json(self) -> dict[str, Any]:
        """Return the report for JSON, with all scores by model and question. A score is null if the judge gave no valid
        answer."""
        judgment, labels = self.judgment, self.judgment.labels
        scores = judgment.scores.astype(object)
        scores[np.isnan(judgment.scores)] = None
        spent = {"this_run": judgment.spent_now, "all_answers": judgment.spent}
        result: dict[str, Any] = {
            "judge": {"model": self.settings.model, "base_url": self.settings.base_url},
            "prompt": self.settings.prompt,
            "questions": len(judgment.scores),
            "repeats": self.settings.repeats,
            "seed": self.settings.seed,
            "unanswered": [asdict(each) for each in judgment.unanswered],
            "tokens": {
                key: asdict(tokens) | ({} if self.prices is None else {"dollars": self._dollars(tokens)})
                for key, tokens in spent.items()
            },
            "models": [
                {"model": label, "scores": scores_QxR.tolist()}
                for label, scores_QxR in zip(labels, scores.transpose(2, 0, 1), strict=True)
            ],
            "pairs": [],
        }
        if self.comparison is not None:
            questions = self.comparison.questions
            result["questions_compared"] = questions
            result["pairs"] = [
                asdict(pair) | {"first": labels[pair.first], "second": labels[pair.second], "questions": questions}
                for pair in self.comparison.pairs
            ]
            for model, mean in zip(result["models"], self.comparison.means, strict=True):
                model["mean"] = asdict(mean)
        return result

    def shortfall(self) -> str | None:
        """Return a one-line error message, or None if every prompt has a valid answer of the judge."""
        missing = self.judgment.unanswered
        if not missing:
            return None
        prompts = 1 if self.settings.judges_together else len(self.judgment.labels)
        asked = len(self.judgment.scores) * self.settings.repeats * prompts
        where = abbreviated([str(number) for number in dict.fromkeys(each.question for each in missing)])
        return (
            f"{self.settings.name}: no valid answer to {len(missing):,} of {asked:,} prompts, after "
            f"{self.settings.attempts} attempts each (question {where}; the last answer: {missing[-1].reason}); "
            "judging again sends only these prompts"
        )

    def _dollars(self, tokens: Tokens) -> float:
        assert self.prices is not None
        return (tokens.prompt * self.prices[0] + tokens.completion * self.prices[1]) / 1e6

    def _tables(self, comparison: Comparison) -> Iterator[str]:
        """Yield the lines of a heading, of the models' means (best first), and of the differences between pairs of
        models."""
        repeats, asked = self.settings.repeats, len(self.judgment.scores)
        together = "all models in one prompt" if len(comparison.means) > 1 else "the model"
        if not self.settings.judges_together:
            together = f"each answer alone, with the {self.settings.prompt}'s prompt"
        some = f" of {asked:,}" if comparison.questions < asked else ""
        times = f", {repeats} times each" if repeats > 1 else ""
        judge = f"{self.settings.model} judged {together}"
        heading = f"{judge}; {comparison.questions:,}{some} questions{times}. Scores from 0 to 100:"
        yield from [*paragraph(heading, indent=0), ""]
        yield f"{'#':>4}  {'mean':>6}  {'95 % interval':<16}  model"
        places = {model: place for place, model in enumerate(comparison.ranking, start=1)}
        for model, place in places.items():
            mean = comparison.means[model]
            label = printable(self.judgment.labels[model])
            first, *others = textwrap.wrap(label, WIDTH - LABEL_INDENT, break_on_hyphens=False) or [""]
            interval = f"[{mean.low:.2f}, {mean.high:.2f}]"
            yield f"{place:>4}  {mean.value:>6.2f}  {interval:<16}  {first}".rstrip()
            yield from (" " * LABEL_INDENT + other for other in others)
        yield ""
        pairs: Sequence[Pair] = comparison.pairs
        if not pairs:
            return
        if len(places) > MOST_FOR_ALL_PAIRS:
            pairs = [pair for pair in pairs if places[pair.second] - places[pair.first] == 1]
            yield "Pairs of neighbors in the ranking (--json has all pairs):"
        yield f"{'pair':>9}  {'wins':>7}  {'difference':>10}  95 % interval"
        for pair in pairs:
            difference = pair.difference
            yield (
                f"{places[pair.first]:>4} :{places[pair.second]:>3}  {100 * pair.win_rate:>5.1f} %  "
                f"{difference.value:>+10.2f}  [{difference.low:+.2f}, {difference.high:+.2f}]"
            )
        yield from [
            f"wins: share of {comparison.questions:,} questions where the first scores higher; a tie counts half",
            "",
        ]


def judge_and_report(
    paths: Sequence[Path],
    models: Sequence[Responses],
    settings: JudgeSettings,
    caches: Sequence[Path],
    *,
    prices: tuple[float, float] | None = None,
    as_json: bool = False,
) -> None:
    """Ask the judge to score the models' answers, print the report, and call `keep_scores`.

    `paths` are the responses files of `models`, in the same order. `prices` is as in JudgeReport. `caches` and
    errors are as in `judge`. Also raises RunError, after the report, if a prompt has no valid answer.
    """
    report = JudgeReport(judge(models, settings, caches), settings, prices)
    click.echo(json.dumps(report.as_json(), indent=1) if as_json else "\n".join(report.lines()))
    keep_scores(paths, models, report)
    if (shortfall := report.shortfall()) is not None:
        raise RunError(shortfall)


def keep_scores(paths: Sequence[Path], models: Sequence[Responses], report: JudgeReport) -> None:
    """Write each model's scores to the run whose folder contains its responses file. Prints a note instead if the file
    names no weights that the run still has. `paths` are the files of `models`, in the order of the judgment."""
    settings = report.settings
    for number, (path, own) in enumerate(zip(paths, models, strict=True)):
        run = RunDirectory(path.absolute().parent)
        # Compute this model's mean alone, so that no question is left out because another model's score is missing.
        alone = compare(report.judgment.scores[:, :, [number]], settings.seed)
        if alone is None or not run.model_json.is_file():  # no valid score, or the file is in no run's folder
            continue
        with warned_if_not_kept():
            measured = find_measured(run, own.weights.checkpoint, own.weights.sha256) if own.weights else None
            if own.weights is None or measured is None:
                reason = "it does not name weights that the run still has; make it again with test_ift.py --overwrite"
                tell(f"{path}: its scores are not kept among the run's results: {reason}")
                continue
            together = models if settings.judges_together else [own]
            # The text is the same whenever the same answers are judged together, in any order of the files.
            judging = json.dumps(sorted(each.answers_sha256 for each in together))
            scores_by_question = [row[~np.isnan(row)] for row in report.judgment.scores[:, :, number]]
            result = InstructionResult(
                weights=measured.weights,
                date=now(),
                device=own.weights.device,
                torch=own.weights.torch,
                judge=settings.model,
                base_url=settings.base_url,
                prompt=settings.prompt,
                questions_sha256=own.questions_sha256,
                answers_sha256=own.answers_sha256,
                questions=len(own.responses),
                repeats=settings.repeats,
                judging=hashlib.sha256(judging.encode()).hexdigest(),
                judged_with=[each.model for each in together],
                mean=alone.means[0].value,
                low=alone.means[0].low,
                high=alone.means[0].high,
                scores=[float(scores.mean()) if len(scores) else None for scores in scores_by_question],
            )
            write_result(run, result)
