"""Requests to a judge, a model behind an OpenAI-compatible endpoint: settings, requests in threads, and the resulting
scores."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from tqdm import tqdm

from harness.common.errors import RunError, UserError, printable
from harness.common.messages import is_unicode, quoted
from harness.common.options import NOTEBOOK_JUDGE
from harness.evaluation.instruct.responses import Responses
from harness.evaluation.judge.cache import JudgeCache, Record
from harness.evaluation.judge.prompts import (
    TOGETHER,
    InvalidAnswerError,
    Prompt,
    alone_prompt,
    together_prompt,
)

OPENAI_URL = "https://api.openai.com/v1"
KEY_VARIABLE = "OPENAI_API_KEY"
SHORTEST_SECRET = 8  # shorter keys, like a local server's "none", are not secret and may be part of other words
# Error codes by which the judge refuses this question, but not necessarily others.
REFUSED_QUESTION_CODES = {"content_filter", "content_policy_violation", "context_length_exceeded", "invalid_prompt"}
IN_FLIGHT_SECONDS = 10.0  # after a failure, wait at most this long for running requests, which may be paid for
HOPELESS_PROMPTS = 8  # stop if 8 prompts are done and no prompt has a valid answer: more requests would cost money


@dataclass(frozen=True)
class JudgeSettings:
    """Settings for judging answers."""

    model: str = NOTEBOOK_JUDGE
    base_url: str = OPENAI_URL
    timeout: float = 120.0  # seconds, for a single try of a request
    repeats: int = 1  # times that each answer is judged
    attempts: int = 5  # most requests for a valid answer to one prompt, and most tries of each of these requests
    parallel: int = 8  # requests at a time
    seed: int = 0  # of the order in which the judge sees the models' answers, and of the bootstrap resamples
    prompt: str = TOGETHER  # or a key of prompts.ALONE

    @classmethod
    def choose(cls, model: str, base_url: str | None, **others: Any) -> JudgeSettings:
        """Return settings for the judge `model` at `base_url` (None: the address in the environment variable
        OPENAI_BASE_URL, or else OpenAI's). Raises UserError if the address or the name is not valid."""
        if not model or not is_unicode(model):
            raise UserError(f"the judge: {quoted(model)} is not the name of a model; give one like {NOTEBOOK_JUDGE}")
        url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        fault = f"{quoted(url)} is not the address of a server"
        with suppress(ValueError):
            parts = urlsplit(url)
            if parts.username or parts.password:
                fault = f"must not contain a user name or password; the key is taken from {KEY_VARIABLE}"
            elif parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and url.isprintable():
                return cls(model, url.rstrip("/"), **others)
        place = "--base-url" if base_url else "OPENAI_BASE_URL"
        raise UserError(f"{place}: {fault}; give an address like {OPENAI_URL}")

    @property
    def judges_together(self) -> bool:
        return self.prompt == TOGETHER

    @property
    def name(self) -> str:
        return f"the judge {self.model} at {self.base_url}"


class UnavailableError(Exception):
    """Error for a judge that does not answer, even after all retries."""


class JudgeClient:
    """Thread-safe client for a judge's endpoint."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Create the client. Raises UserError if the environment has no valid key, if the openai package is missing, or
        if the settings of proxies or certificates are wrong."""
        self.settings = settings
        self._key = os.environ.get(KEY_VARIABLE, "").strip()
        if not self._key or not (self._key.isascii() and self._key.isprintable()):
            fault = "holds characters that no key has" if self._key else "is empty or not in the environment"
            remedy = "set it to the judge's key (a local server that needs none takes any value)"
            raise UserError(f"{KEY_VARIABLE} {fault}: {remedy}")
        try:
            import openai
        except ImportError:
            command = Path(sys.argv[0]).name
            raise UserError(f"the openai package is missing: uv run --extra judge {command} ...") from None
        self._openai = openai
        try:
            self._client = openai.OpenAI(
                api_key=self._key,
                base_url=settings.base_url,
                timeout=settings.timeout,
                max_retries=settings.attempts - 1,
            )
        except Exception as error:  # errors in the settings of proxies and certificates have no common class
            reason = f"{type(error).__name__}: {self.without_key(str(error))}"
            remedy = "check the variables of proxies and certificates (ALL_PROXY, HTTPS_PROXY, SSL_CERT_FILE, ...)"
            raise UserError(f"no connection can be set up ({reason}); {remedy}") from None

    def without_key(self, text: str) -> str:
        """Return a server's or library's text as one line of at most 300 printable characters, with "***" in place of
        an API key of at least SHORTEST_SECRET characters."""
        hidden = text.replace(self._key, "***") if len(self._key) >= SHORTEST_SECRET else text
        return printable(" ".join(hidden.split()))[:300]

    def ask(self, key: str, prompt: Prompt) -> Record:
        """Send a prompt, and return the judge's answer, valid or not, as a record with this `key`. Raises
        UnavailableError if the judge does not answer, and UserError if other prompts would fail in the same way."""
        scores = reason = None
        counts: dict[str, int] = {}
        try:
            body = self._reply(prompt.text)
            try:
                completion = json.loads(body)
                message = completion["choices"][0]["message"]
                text, refusal = (message.get(name) or "" for name in ("content", "refusal"))
                if not isinstance(text + refusal, str):
                    raise TypeError
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                said = quoted(body[:200].decode(errors="replace"))
                raise InvalidAnswerError(f"the reply is not a chat completion: {said}") from None
            usage = completion.get("usage")
            names = ("prompt_tokens", "completion_tokens")
            if isinstance(usage, dict) and all(
                type(usage.get(name)) is int and 0 <= usage[name] < 2**62 for name in names
            ):
                counts = {name: usage[name] for name in names}
            if refusal:
                raise InvalidAnswerError(f"refused: {refusal}")
            scores = prompt.parse(text)
        except InvalidAnswerError as error:
            reason = self.without_key(str(error))
        return Record(
            key=key,
            question=prompt.question + 1,
            repeat=prompt.repeat + 1,
            scores=scores,
            prompt=prompt.wording,
            reason=reason,
            time=time.time(),
            **counts,
        )

    def _reply(self, prompt: str) -> bytes:
        """Return the body of the reply to a prompt."""
        body: bytes | None = None
        create = self._client.chat.completions.with_streaming_response.create
        try:
            with create(model=self.settings.model, messages=[{"role": "user", "content": prompt}]) as response:
                # The client's timeout applies to each read, so a server that sends a blank now and then never hits it.
                body, deadline = b"", time.monotonic() + self.settings.timeout
                for chunk in response.iter_bytes():
                    body += chunk
                    if time.monotonic() > deadline:
                        raise InvalidAnswerError(f"the reply took more than {self.settings.timeout:g} seconds")
                return body
        except InvalidAnswerError:
            raise
        except self._openai.APIStatusError as error:
            raise self._explained(error) from None
        except self._openai.APITimeoutError:
            raise UnavailableError(f"no answer within {self.settings.timeout:g} seconds") from None
        except Exception as error:  # of the client or of its network library; the classes differ by version
            cause = error.__cause__ or error
            reason = f"({type(cause).__name__}: {self.without_key(str(cause))}".rstrip(": ") + ")"
            if body is not None:  # a reply had begun, which may have been paid for
                raise InvalidAnswerError(f"the reply broke off {reason}") from None
            raise UnavailableError(f"the connection failed {reason}") from None

    def _explained(self, error: Any) -> Exception:
        """Return the exception to raise for an openai.APIStatusError."""
        status, name = error.status_code, self.settings.name
        said = f"status {status}: {self.without_key(error.message)}"
        if error.code in REFUSED_QUESTION_CODES:
            return InvalidAnswerError(f"the question was refused ({said})")
        if status in {408, 409, 429} or status >= 500:  # even after all retries
            wait = error.response.headers.get("retry-after")
            return UnavailableError(said + (f"; Retry-After: {self.without_key(wait)}" if wait else ""))
        if status in {401, 403}:
            return UserError(f"{name}: refuses the key in {KEY_VARIABLE} ({said}); check the key and what it may use")
        problem = "not found" if status == 404 else "rejects the request"
        return UserError(f"{name}: {problem} ({said}); check the judge's name and --base-url")


@dataclass(frozen=True)
class Tokens:
    """Number of a judge's answers, including invalid ones, and of the tokens that they cost."""

    answers: int = 0
    prompt: int = 0  # tokens of prompts
    completion: int = 0  # tokens of answers
    uncounted: int = 0  # answers whose tokens the endpoint did not count

    @classmethod
    def of(cls, records: Sequence[Record]) -> Tokens:
        prompt = sum(record.prompt_tokens or 0 for record in records)
        completion = sum(record.completion_tokens or 0 for record in records)
        return cls(len(records), prompt, completion, sum(record.prompt_tokens is None for record in records))


@dataclass(frozen=True)
class Unanswered:
    """Prompt to which the judge gave no valid answer."""

    question: int  # from 1
    repeat: int  # from 1
    reason: str  # what was wrong with the judge's last answer


@dataclass(frozen=True)
class Judgment:
    """Scores from 0 to 100 of M models on Q questions in R repeats, (Q, R, M). A score is NaN if the judge gave no
    valid answer."""

    labels: tuple[str, ...]
    scores: np.ndarray
    unanswered: tuple[Unanswered, ...]
    spent: Tokens  # for all answers to these prompts, including answers that were already in the cache
    spent_now: Tokens  # in this judging


def judge(models: Sequence[Responses], settings: JudgeSettings, caches: Sequence[Path]) -> Judgment:
    """Ask the judge for all scores that are not in the cache files, and return all scores. New answers cost money, and
    are added to the first file. The models must have different labels and the same questions.

    Raises UserError if the judge cannot be asked with these settings, if the first file is in use, or if a file is no
    cache file. Raises RunError if the judge does not answer, or if no answer is valid after HOPELESS_PROMPTS prompts.
    Raises RunError or OSError if a file cannot be read or written. The answers before an error are in the first file.
    """
    prompts = list(_prompts(models, settings))
    names = {key: set(prompt.names) for key, prompt in prompts}
    with JudgeCache(*caches) as cache:

        def own_records() -> list[Record]:
            return [record for record in cache.records if record.key in names]

        def valid_answers() -> dict[str, dict[str, float]]:
            return {
                each.key: each.scores for each in own_records() if each.scores and each.scores.keys() == names[each.key]
            }

        known, answers = len(cache.records), valid_answers()
        missing = {key: prompt for key, prompt in prompts if key not in answers}
        # If nothing is missing, neither an API key nor the openai package is needed.
        reasons = ask_all(missing, JudgeClient(settings), cache, kept=len(answers)) if missing else {}
        answers, spent, spent_now = valid_answers(), Tokens.of(own_records()), Tokens.of(cache.records[known:])
    scores_QxRxM = np.full((len(models[0].responses), settings.repeats, len(models)), np.nan)
    unanswered = []
    for key, prompt in prompts:
        if key in answers:
            for model, name in zip(prompt.order, prompt.names, strict=True):
                scores_QxRxM[prompt.question, prompt.repeat, model] = answers[key][name]
        else:
            unanswered.append(Unanswered(prompt.question + 1, prompt.repeat + 1, reasons[key]))
    labels = tuple(model.model for model in models)
    return Judgment(labels, scores_QxRxM, tuple(unanswered), spent, spent_now)


def _prompts(models: Sequence[Responses], settings: JudgeSettings) -> Iterator[tuple[str, Prompt]]:
    """Yield all prompts, each as (key of its answer in the cache, prompt)."""
    for question in range(len(models[0].responses)):
        answers = {model.model: model.responses[question] for model in models}
        for repeat in range(settings.repeats):
            if settings.judges_together:
                prompts = [together_prompt(answers, question=question, repeat=repeat, seed=settings.seed)]
            else:
                prompts = [
                    alone_prompt(settings.prompt, answer, number, question=question, repeat=repeat)
                    for number, answer in enumerate(answers.values())
                ]
            for prompt in prompts:
                parts = [settings.model, settings.base_url, prompt.text, repeat]  # all that the answer depends on
                yield hashlib.sha256(json.dumps(parts).encode()).hexdigest(), prompt


def ask_all(prompts: Mapping[str, Prompt], client: JudgeClient, cache: JudgeCache, *, kept: int) -> dict[str, str]:
    """Send all prompts, in parallel threads, and add all answers to the cache. For each prompt without a valid answer,
    return what was wrong with the last answer. `prompts` and the result have the keys of the cache's records. `kept` is
    the number of valid answers that the cache had already."""
    settings, known, reasons = client.settings, len(cache.records), dict[str, str]()
    stop = threading.Event()

    def ask(key: str) -> str | None:
        """Ask the judge until an answer is valid, at most `attempts` times. Return what was wrong with the last answer,
        or None if it is valid."""
        reason = None
        try:
            for _ in range(settings.attempts):
                if stop.is_set():  # another thread has failed, and nobody reads this result
                    break
                record = client.ask(key, prompts[key])
                cache.append(record)
                reason = record.reason
                if reason is None:
                    break
        except BaseException:
            stop.set()  # set here, since this thread might begin another request before the main thread sees the error
            raise
        return reason

    pool = ThreadPoolExecutor(settings.parallel)
    futures: dict[Future[str | None], str] = {pool.submit(ask, key): key for key in prompts}
    bar: dict[str, Any] = {"unit": "answer", "disable": None, "dynamic_ncols": True}
    try:
        for future in tqdm(as_completed(futures), total=len(futures), **bar):
            if (reason := future.result()) is not None:
                reasons[futures[future]] = reason
            has_valid = kept or any(record.scores for record in cache.records[known:])
            if len(reasons) >= HOPELESS_PROMPTS and not has_valid:
                raise RunError(
                    f"{settings.name}: no valid answer to any of the first {len(reasons)} prompts (the last answer: "
                    f"{reason}); try another judge"
                )
    except Exception as error:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in futures if future.running()], timeout=IN_FLIGHT_SECONDS)
        if not isinstance(error, UnavailableError):
            raise
        advice = "judge again later, which asks only for the answers that are missing"
        raise RunError(f"{settings.name}: does not answer: {error}; {advice}") from None
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return reasons
