"""One question to a judge behind an OpenAI-compatible endpoint: its reply, or what went wrong in words."""

from __future__ import annotations

import email.utils
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.common.errors import RunError, UserError, printable
from harness.common.json_files import RecordedCount
from harness.common.messages import is_unicode, quoted
from harness.evaluation.judge.prompt import InvalidAnswerError

if TYPE_CHECKING:
    import openai


NOTEBOOK_JUDGE = "gpt-5.1"


KEY_VARIABLE = "OPENAI_API_KEY"
OPENAI_URL = "https://api.openai.com/v1"
LARGEST_REPLY_BYTES = 2**22
SHORTEST_SECRET = 8  # a local server's "none" is no secret, and part of other words
PASSING_STATUSES = {408, 409, 425, 429}  # and 5xx: asking again can help
# A question that this judge does not take; another one it may.
REFUSED_QUESTION_CODES = {"content_filter", "content_policy_violation", "context_length_exceeded", "invalid_prompt"}


class UnavailableError(Exception):
    """The judge did not answer, and may later. `wait_seconds` is how long it asks to be left alone, if it says so."""

    def __init__(self, problem: str, wait_seconds: float | None = None, *, busy: bool = False) -> None:
        super().__init__(problem)
        self.wait_seconds = wait_seconds
        self.busy = busy  # it answers others, or other requests of this process


@dataclass(frozen=True)
class Endpoint:
    """The judge's name and address, and the longest time that a request to it may take in all."""

    model: str
    base_url: str
    timeout_seconds: float = 120.0

    @classmethod
    def choose(cls, model: str, base_url: str | None, timeout_seconds: float = 120.0) -> Endpoint:
        """The endpoint at `base_url`; without it the one in OPENAI_BASE_URL, else OpenAI's. Raises UserError if it is
        no address, or if `model` is no name."""
        if not model or not is_unicode(model):
            raise UserError(f"the judge: {quoted(model)} is not the name of a model")
        url = base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        fault = _url_fault(url)
        if fault:
            raise UserError(f"--base-url: {fault}; give one like {OPENAI_URL}")
        return cls(model, url.rstrip("/"), timeout_seconds)

    @property
    def name(self) -> str:
        return f"the judge {self.model} at {self.base_url}"


def _url_fault(url: str) -> str | None:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.username or parts.password:
            return f"no name or password belongs in it, the key is taken from {KEY_VARIABLE}"
        if parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and url.isprintable():
            return None
    return f"{quoted(url)} is not the address of a server"


@dataclass(frozen=True)
class Reply:
    """The judge's answer, and its cost; tokens are None where the endpoint does not count them."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    refusal: str | None = None


class _Outside(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Outside):
    content: str | None = None
    refusal: str | None = None


class _Choice(_Outside):
    message: _Message


class _Completion(_Outside):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: Any = None


class _Usage(_Outside):
    prompt_tokens: RecordedCount
    completion_tokens: RecordedCount


class JudgeClient:
    """Asks an endpoint, from any number of threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Raises UserError without a key in the environment, or without the openai package."""
        self.endpoint = endpoint
        self._key = key_from_environment()
        try:
            import openai
        except ImportError:
            command = Path(sys.argv[0]).name
            raise UserError(f"the openai package is missing: uv run --extra judge {command} ...") from None
        self._openai = openai
        # The caller decides how often to retry: it also sees the replies to other requests.
        try:
            self._client = openai.OpenAI(
                api_key=self._key, base_url=endpoint.base_url, timeout=endpoint.timeout_seconds, max_retries=0
            )
        except Exception as error:  # what proxies and certificates can be guilty of has no common class
            reason = f"{type(error).__name__}: {self.without_key(str(error))}"
            remedy = "check the variables of proxies and certificates (ALL_PROXY, HTTPS_PROXY, SSL_CERT_FILE, ...)"
            raise UserError(f"no connection can be set up ({reason}); {remedy}") from None

    def ask(self, prompt: str) -> Reply:
        """One request. Raises UnavailableError, InvalidAnswerError if the reply is not one of a chat, and UserError or
        RunError where asking again, whatever the question, is of no use."""
        try:
            body = self._exchange(prompt)
        except self._openai.APIStatusError as error:
            raise self._refused(error) from None
        except (UnavailableError, InvalidAnswerError):
            raise
        except self._openai.APITimeoutError:
            raise self._late() from None
        except Exception as error:  # the client's, and below it the network's, which differ with its version
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {self.without_key(str(cause))}".rstrip(": ")
            raise UnavailableError(f"the connection failed ({reason})") from None
        return self._parse_reply(body)

    def without_key(self, text: str) -> str:
        """A line that quotes what others wrote, fit to be shown and kept."""
        hidden = text.replace(self._key, "***") if len(self._key) >= SHORTEST_SECRET else text
        return printable(" ".join(hidden.split()))[:300]

    def _exchange(self, prompt: str) -> bytes:
        """The reply's bytes. A server may send a blank now and then to keep the connection, so that the time of each
        read is no measure of the whole."""
        deadline = time.monotonic() + self.endpoint.timeout_seconds
        create = self._client.chat.completions.with_streaming_response.create
        messages: Any = [{"role": "user", "content": prompt}]
        body = b""
        with create(model=self.endpoint.model, messages=messages) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > LARGEST_REPLY_BYTES:
                    raise InvalidAnswerError(f"a reply of more than {LARGEST_REPLY_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise self._late()
        return body

    def _late(self) -> UnavailableError:
        return UnavailableError(f"no answer within {self.endpoint.timeout_seconds:g} seconds")

    def _parse_reply(self, body: bytes) -> Reply:
        try:
            completion = _Completion.model_validate_json(body)
        except ValidationError:
            said = self.without_key(quoted(body[:200].decode(errors="replace")))
            raise InvalidAnswerError(f"not the reply of a chat: {said}") from None
        message = completion.choices[0].message
        reply = Reply(message.content or "", refusal=message.refusal)
        with suppress(ValidationError):
            usage = _Usage.model_validate(completion.usage)
            return replace(reply, prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        return reply

    def _refused(self, error: openai.APIStatusError) -> Exception:
        status, name = error.status_code, self.endpoint.name
        said = f"status {status}: {self.without_key(error.message)}"
        if error.code in REFUSED_QUESTION_CODES:
            return InvalidAnswerError(f"the question was refused ({said})")
        if error.code == "insufficient_quota":
            return RunError(f"{name}: the account has no credit left ({said})")
        if status in PASSING_STATUSES or status >= 500:
            return UnavailableError(said, _retry_after(error.response.headers), busy=status == 429)
        if status in {401, 403}:
            return UserError(f"{name}: does not accept the key in {KEY_VARIABLE} ({said}); check the key")
        if status == 404:
            return UserError(f"{name}: not found ({said}); check the judge's name and --base-url")
        return UserError(f"{name}: does not take the request ({said}); check the judge's name and --base-url")


def key_from_environment() -> str:
    """The judge's key from the environment. Raises UserError if there is none, or none that could be one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key:
        raise UserError(
            f"{KEY_VARIABLE} is not in the environment: put the judge's key there (a local server that needs none "
            "takes any value)"
        )
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY_VARIABLE}: holds characters that no key has")
    return key


def _retry_after(headers: Any) -> float | None:
    """Seconds: RFC 9110, section 10.2.3, has a number or a date."""
    value = headers.get("retry-after")
    if value is None:
        return None
    with suppress(ValueError):
        seconds = float(value)
        return max(0.0, seconds) if seconds == seconds else None
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
