"""Judging: all models' answers to a question in one prompt or each alone, and no answer paid for twice."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.common.errors import RunStopped
from harness.evaluation.instruct.responses import Responses
from harness.evaluation.judge.alone import alone_prompt
from harness.evaluation.judge.cache import JudgeCache, Record
from harness.evaluation.judge.client import Endpoint, JudgeClient
from harness.evaluation.judge.prompt import Place, Prompt, build_prompt
from harness.evaluation.judge.requests import Ask, JudgeRequests, JudgeSettings


@dataclass(frozen=True)
class Tokens:
    """Cost of answers in tokens, invalid ones too. `uncounted` of them came without a count."""

    answers: int = 0
    prompt: int = 0
    completion: int = 0
    uncounted: int = 0

    @classmethod
    def of(cls, records: Sequence[Record]) -> Tokens:
        prompt = sum(record.prompt_tokens or 0 for record in records)
        completion = sum(record.completion_tokens or 0 for record in records)
        return cls(len(records), prompt, completion, sum(record.prompt_tokens is None for record in records))


@dataclass(frozen=True)
class Unanswered:
    """A question and repeat, from 1, that has no valid answer, and what was wrong with the last one."""

    question: int
    repeat: int
    reason: str


@dataclass(frozen=True)
class Judgement:
    """Scores from 0 to 100 of M models on Q questions in R repeats, QxRxM; NaN where the judge gave no valid answer."""

    labels: tuple[str, ...]
    scores: np.ndarray
    unanswered: tuple[Unanswered, ...]
    spent: Tokens  # for all answers to these questions, whenever they were given
    spent_now: Tokens


def judge(models: Sequence[Responses], settings: JudgeSettings, cache_path: Path) -> Judgement:
    """Have what is not in the cache judged. The models have different labels and the same questions.

    Raises UserError if the judge cannot be asked like this, RunError if it does not answer; what it has answered by
    then is in the cache.
    """
    asks = _all_asks(models, settings)
    with JudgeCache(cache_path) as cache:
        known = len(cache.records)
        reasons = _ask_missing(asks, settings, cache)
        scores, unanswered = _gather(asks, _answers(asks, cache.records), reasons=reasons, models=len(models))
        keys = {ask.key for ask in asks}
        spent = Tokens.of([record for record in cache.records if record.key in keys])
        labels = tuple(model.model for model in models)
        return Judgement(labels, scores, unanswered, spent, Tokens.of(cache.records[known:]))


def _ask_missing(asks: Sequence[Ask], settings: JudgeSettings, cache: JudgeCache) -> dict[str, str]:
    """Why there is still no valid answer to some, by key."""
    answers = _answers(asks, cache.records)
    missing = {ask.key: ask for ask in asks if ask.key not in answers}
    if not missing:  # nor is a key needed
        return {}
    requests = JudgeRequests(JudgeClient(settings.endpoint), settings, cache=cache, kept=len(answers))
    try:
        return requests.run(list(missing.values()))
    except KeyboardInterrupt:
        raise RunStopped(signal.SIGINT) from None


def _all_asks(models: Sequence[Responses], settings: JudgeSettings) -> list[Ask]:
    questions, repeats = range(len(models[0].responses)), range(settings.repeats)
    places = [Place(question, repeat, settings.seed) for question in questions for repeat in repeats]
    return [
        Ask(place, prompt, _cache_key(settings.endpoint, prompt, place.repeat))
        for place in places
        for prompt in _prompts(models, place, settings)
    ]


def _prompts(models: Sequence[Responses], place: Place, settings: JudgeSettings) -> list[Prompt]:
    """One about all models' answers to a question, or one about each."""
    answers = [model.responses[place.question] for model in models]
    if settings.judges_together:
        return [build_prompt({model.model: answer for model, answer in zip(models, answers, strict=True)}, place)]
    return [alone_prompt(settings.prompt, answer, number) for number, answer in enumerate(answers)]


def _cache_key(endpoint: Endpoint, prompt: Prompt, repeat: int) -> str:
    """The key of an answer in the cache: a hash of all that the answer depends on."""
    parts = [endpoint.model, endpoint.base_url, prompt.text, repeat]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _answers(asks: Sequence[Ask], records: Sequence[Record]) -> dict[str, dict[str, float]]:
    """Scores by name of the answers to these prompts, by key."""
    names = {ask.key: set(ask.prompt.names) for ask in asks}
    return {
        record.key: record.scores
        for record in records
        if record.scores is not None and record.scores.keys() == names.get(record.key)
    }


def _gather(
    asks: Sequence[Ask], answers: Mapping[str, dict[str, float]], *, reasons: Mapping[str, str], models: int
) -> tuple[np.ndarray, tuple[Unanswered, ...]]:
    """Scores, QxRxM, and what has none."""
    last = asks[-1].place
    scores_QxRxM = np.full((last.question + 1, last.repeat + 1, models), np.nan)
    unanswered = []
    for ask in asks:
        question, repeat = ask.place.question, ask.place.repeat
        if ask.key in answers:
            for model, score in ask.prompt.by_model(answers[ask.key]).items():
                scores_QxRxM[question, repeat, model] = score
        else:
            unanswered.append(Unanswered(question + 1, repeat + 1, reasons[ask.key]))
    return scores_QxRxM, tuple(unanswered)
