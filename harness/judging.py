"""Judging: all models' answers to a question in one prompt, question by question, and no answer paid for twice."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from harness.errors import RunError, StoppedError, UserError
from harness.judge_cache import JudgeCache, Record
from harness.judge_client import Endpoint, JudgeClient, Reply, UnavailableError
from harness.judge_prompt import InvalidAnswerError, Place, Prompt, build_prompt, parse_scores
from harness.responses import Responses

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 120.0  # for a judge that asks to be left alone; beyond it the user decides
IN_FLIGHT_SECONDS = 10.0  # for answers that are on their way, and perhaps paid for, when the judging fails
HOPELESS_QUESTIONS = 8  # so many without any valid answer: this judge cannot do it, and each one costs


@dataclass(frozen=True)
class JudgeSettings:
    """How to judge. `attempts` is how often to ask again for a valid answer, and how often in a row the judge may fail
    to answer at all; `seed` decides the order in which it sees the models."""

    endpoint: Endpoint
    repeats: int = 1
    attempts: int = 5
    parallel: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Ask:
    """A prompt, where it belongs, and a key that only the same judge, prompt and repeat have."""

    place: Place
    prompt: Prompt
    key: str


@dataclass(frozen=True)
class Tokens:
    """What answers cost, invalid ones too. `uncounted` of them came without a count."""

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
        answers = _answers(asks, cache.records)
        missing = {ask.key: ask for ask in asks if ask.key not in answers}
        reasons: dict[str, str] = {}
        if missing:
            judging = _Judging(JudgeClient(settings.endpoint), settings, cache=cache, kept=len(answers))
            try:
                reasons = judging.run(list(missing.values()))
            except KeyboardInterrupt:
                print("stopped by SIGINT; the same command goes on from there", file=sys.stderr, flush=True)
                raise StoppedError(signal.SIGINT) from None
        scores, unanswered = _gather(asks, _answers(asks, cache.records), reasons=reasons, models=len(models))
        keys = {ask.key for ask in asks}
        spent = Tokens.of([record for record in cache.records if record.key in keys])
        labels = tuple(model.model for model in models)
        return Judgement(labels, scores, unanswered, spent, Tokens.of(cache.records[known:]))


def _all_asks(models: Sequence[Responses], settings: JudgeSettings) -> list[Ask]:
    asks = []
    for question in range(len(models[0].responses)):
        answers = {model.model: model.responses[question] for model in models}
        for repeat in range(settings.repeats):
            place = Place(question, repeat, settings.seed)
            prompt = build_prompt(answers, place)
            asks.append(Ask(place, prompt, _key(settings.endpoint, prompt, repeat)))
    return asks


def _key(endpoint: Endpoint, prompt: Prompt, repeat: int) -> str:
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
            scores_QxRxM[question, repeat] = ask.prompt.in_model_order(answers[ask.key])
        else:
            unanswered.append(Unanswered(question + 1, repeat + 1, reasons[ask.key]))
    return scores_QxRxM, tuple(unanswered)


class _StoppedAskingError(Exception):
    """Another thread has found out that there is no use in it."""


class _Judging:
    """Requests under way in threads."""

    def __init__(self, client: JudgeClient, settings: JudgeSettings, *, cache: JudgeCache, kept: int) -> None:
        """`kept`: how many valid answers to these questions are in the cache already."""
        self._client = client
        self._settings = settings
        self._cache = cache
        self._known = len(cache.records)
        self._kept_before = kept
        self._stop = threading.Event()
        self._failure: Exception | None = None  # why the others stop
        self._jitter = random.SystemRandom()  # the global generator may be a training's

    @property
    def _replies(self) -> int:
        """How often the judge has answered so far, be it with something valid or not."""
        return len(self._cache.records) - self._known

    @property
    def _kept(self) -> int:
        return self._kept_before + sum(record.scores is not None for record in self._cache.records[self._known :])

    def run(self, asks: Sequence[Ask]) -> dict[str, str]:
        """Ask all; why there is no valid answer to some, by key."""
        reasons: dict[str, str] = {}
        pool = ThreadPoolExecutor(self._settings.parallel)
        futures = {pool.submit(self._ask, ask): ask for ask in asks}
        try:
            with tqdm(total=len(asks), unit="question", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
                for future in as_completed(futures):
                    reason = future.result()
                    if reason is not None:
                        reasons[futures[future].key] = reason
                    self._check_hope(reasons)
                    bar.update()
        except Exception as error:
            self._stop_asking(pool)
            _wait_for(futures)
            raise self._failure or error from None
        finally:
            self._stop_asking(pool)
        return reasons

    def _stop_asking(self, pool: ThreadPoolExecutor) -> None:
        self._stop.set()
        pool.shutdown(wait=False, cancel_futures=True)

    def _check_hope(self, reasons: dict[str, str]) -> None:
        if len(reasons) >= HOPELESS_QUESTIONS and not self._kept:
            last = next(reversed(reasons.values()))
            raise RunError(
                f"{self._settings.endpoint.name}: no valid answer to any of the first {len(reasons)} questions (the "
                f"last one: {last}); try another --model"
            )

    def _ask(self, ask: Ask) -> str | None:
        try:
            return self._ask_until_valid(ask)
        except (UserError, RunError) as error:
            self._failure = error
            self._stop.set()  # here, so that this thread does not begin another request before the first one hears
            raise

    def _ask_until_valid(self, ask: Ask) -> str | None:
        """None when a valid answer is in the cache, else what was wrong with the last one."""
        reason = None
        for _ in range(self._settings.attempts):
            reply: Reply | None = None
            scores = None
            try:
                reply = self._reach(ask.prompt.text)
                scores = _scores(reply, ask.prompt)
                reason = None
            except InvalidAnswerError as error:
                reason = self._client.without_key(str(error))
            self._cache.append(_record(ask, reply, scores, reason))
            if scores is not None:
                break
        return reason

    def _reach(self, prompt: str) -> Reply:
        """The judge's reply, after patience with one that is busy or out of reach."""
        failures, replies = 0, self._replies
        while True:
            if self._stop.is_set():
                raise _StoppedAskingError
            try:
                return self._client.ask(prompt)
            except UnavailableError as error:
                if error.busy and self._replies > replies:  # it is alive: its turns are only hard to get
                    failures, replies = 0, self._replies
                failures += 1
                self._check_patience(error, failures)
                self._stop.wait(max(self._pause_seconds(failures), error.wait_seconds or 0.0))

    def _pause_seconds(self, failures: int) -> float:
        """Longer after each failure, and different in each thread, so that they do not all come back together."""
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1)) * self._jitter.uniform(0.5, 1.5)

    def _check_patience(self, error: UnavailableError, failures: int) -> None:
        name, wait_seconds = self._settings.endpoint.name, error.wait_seconds or 0.0
        kept = "the same command tries again"
        if self._kept:
            answers = "answer is" if self._kept == 1 else "answers are"
            kept = f"{self._kept:,} {answers} kept in {self._cache.path}, and the same command goes on from there"
        if wait_seconds > LONGEST_WAIT_SECONDS:
            raise RunError(f"{name}: asks to be left alone for {wait_seconds:,.0f} seconds ({error}); {kept}")
        if failures >= self._settings.attempts:
            times = f" ({failures} times in a row)" if failures > 1 else ""
            raise RunError(f"{name}: does not answer: {error}{times}; {kept}")


def _wait_for(futures: dict[Future[str | None], Ask]) -> None:
    wait([future for future in futures if future.running()], timeout=IN_FLIGHT_SECONDS)


def _scores(reply: Reply, prompt: Prompt) -> dict[str, float]:
    if reply.refusal:
        raise InvalidAnswerError(f"refused: {reply.refusal}")
    return parse_scores(reply.text, prompt.names)


def _record(ask: Ask, reply: Reply | None, scores: dict[str, float] | None, reason: str | None) -> Record:
    record = Record(
        key=ask.key,
        question=ask.place.question + 1,
        repeat=ask.place.repeat + 1,
        scores=scores,
        reason=reason,
        time=time.time(),
    )
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens} if reply else {}
    return record.model_copy(update=counts)
