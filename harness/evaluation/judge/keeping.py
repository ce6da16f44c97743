"""A judge's scores of a model's answers, kept in the run whose weights answered."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.evaluation.instruct.responses import Responses
from harness.evaluation.judge.report import JudgeReport
from harness.evaluation.judge.statistics import Comparison, compare
from harness.runs.directory import RunDirectory
from harness.runs.results import InstructionResult, now, write_result
from harness.runs.trained_model import ModelInRun, find_measured, warned_if_not_kept


def keep_scores(paths: Sequence[Path], models: Sequence[Responses], report: JudgeReport) -> None:
    """Leave each model's scores in the run that its responses file lies in. `paths` are the files of `models`, in the
    order of the judging.

    A file in no run leaves nothing; one that does not tell which of the run's weights answered leaves a line on
    standard error. What cannot be written is a warning.
    """
    for number, (path, responses) in enumerate(zip(paths, models, strict=True)):
        run = RunDirectory(path.absolute().parent)
        own = compare(report.judgement.scores[:, :, [number]], report.settings.seed)
        if own is None or not run.model_json.is_file():  # no valid answer, or no run
            continue
        with warned_if_not_kept():
            model = _model_that_answered(run, responses)
            if model is None:
                _say_unknown(path, run, responses)
            else:
                write_result(run, _result(report, model, models, number, own))


def _model_that_answered(run: RunDirectory, responses: Responses) -> ModelInRun | None:
    weights = responses.weights
    return None if weights is None else find_measured(run, weights.checkpoint, weights.sha256)


def _say_unknown(path: Path, run: RunDirectory, responses: Responses) -> None:
    if responses.weights is None:
        reason = "it does not say which weights answered; test_ift.py --overwrite makes it anew"
    else:
        reason = f"the weights that answered are no checkpoint of {run.path} any more"
    print(f"{path}: its scores are not kept among the run's results: {reason}", file=sys.stderr, flush=True)


def _result(
    report: JudgeReport, model: ModelInRun, models: Sequence[Responses], number: int, comparison: Comparison
) -> InstructionResult:
    """The scores of the model with this number. `comparison` is of it alone: the others' missing answers leave it no
    question out."""
    settings, own, mean = report.settings, models[number], comparison.means[0]
    assert own.weights is not None
    together = models if settings.judges_together else [own]
    return InstructionResult(
        weights=model.weights,
        date=now(),
        device=own.weights.device,
        torch=own.weights.torch,
        judge=settings.endpoint.model,
        base_url=settings.endpoint.base_url,
        prompt=settings.prompt,
        questions_sha256=own.questions_sha256,
        questions=len(own.responses),
        repeats=settings.repeats,
        judging=_judging(together),
        judged_with=[each.model for each in together],
        mean=mean.value,
        low=mean.low,
        high=mean.high,
        scores=_by_question(report.judgement.scores[:, :, number]),
    )


def _judging(models: Sequence[Responses]) -> str:
    """A hash of all that was judged together, in whatever order it was given."""
    return hashlib.sha256(json.dumps(sorted(each.answers_sha256 for each in models)).encode()).hexdigest()


def _by_question(scores_QxR: np.ndarray) -> list[float | None]:
    """The mean over the repeats that have a score; None where none has one."""
    rows = [row[~np.isnan(row)] for row in scores_QxR]
    return [float(row.mean()) if len(row) else None for row in rows]
