"""Many questions to a judge at once, with patience for one that is busy, out of reach or confused."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass

from tqdm import tqdm

from harness.common.errors import RunError, UserError
from harness.evaluation.judge.cache import JudgeCache, Record
from harness.evaluation.judge.client import Endpoint, JudgeClient, Reply, UnavailableError
from harness.evaluation.judge.prompt import InvalidAnswerError, Place, Prompt

TOGETHER = "together"
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 120.0  # for a judge that asks to be left alone; beyond it the user decides
IN_FLIGHT_SECONDS = 10.0  # for answers that are on their way, and perhaps paid for, when the judging fails
HOPELESS_QUESTIONS = 8  # so many without any valid answer: this judge cannot do it, and each one costs


@dataclass(frozen=True)
class JudgeSettings:
    """Settings of a judging. `attempts` is how often to ask again for a valid answer, and how often in a row the judge
    may fail to answer at all; `seed` decides the order in which it sees the models. `prompt` is TOGETHER, or a key of
    alone.WORDINGS."""

    endpoint: Endpoint
    repeats: int = 1
    attempts: int = 5
    parallel: int = 8
    seed: int = 0
    prompt: str = TOGETHER

    @property
    def judges_together(self) -> bool:
        return self.prompt == TOGETHER


@dataclass(frozen=True)
class Ask:
    """A prompt, where it belongs, and a key that only the same judge, prompt and repeat have."""

    place: Place
    prompt: Prompt
    key: str


class _StoppedAskingError(Exception):
    """Another thread has found out that there is no use in it."""


class JudgeRequests:
    """Requests to a judge, under way in threads."""

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
        """Number of the judge's answers so far, valid or not."""
        return len(self._cache.records) - self._known

    @property
    def _kept(self) -> int:
        return self._kept_before + sum(record.scores is not None for record in self._cache.records[self._known :])

    def run(self, asks: Sequence[Ask]) -> dict[str, str]:
        """Ask all; valid answers are then in the cache. Returns why there is none to some, by key.

        Raises UserError if the judge cannot be asked like this, RunError if it does not answer or cannot do it.
        """
        reasons: dict[str, str] = {}
        pool = ThreadPoolExecutor(self._settings.parallel)
        futures = {pool.submit(self._ask, ask): ask for ask in asks}
        try:
            with tqdm(total=len(asks), unit="answer", disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar:
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
                f"last one: {last}); try another judge"
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
        """Seconds to wait: more after each failure, and different in each thread, lest all retry together."""
        return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (failures - 1)) * self._jitter.uniform(0.5, 1.5)

    def _check_patience(self, error: UnavailableError, failures: int) -> None:
        name, wait_seconds = self._settings.endpoint.name, error.wait_seconds or 0.0
        kept = "judging again asks again"
        if self._kept:
            answers = "answer is" if self._kept == 1 else "answers are"
            kept = f"{self._kept:,} {answers} kept in {self._cache.path}, and judging again goes on from there"
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
    return prompt.parse(reply.text)


def _record(ask: Ask, reply: Reply | None, scores: dict[str, float] | None, reason: str | None) -> Record:
    record = Record(
        key=ask.key,
        question=ask.place.question + 1,
        repeat=ask.place.repeat + 1,
        scores=scores,
        prompt=ask.prompt.wording,
        reason=reason,
        time=time.time(),
    )
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens} if reply else {}
    return record.model_copy(update=counts)
