"""A local judge that speaks OpenAI's chat completions. It scores honestly unless a test gives it faults.

    with FakeJudge() as judge:
        judge.faults = [status(429, retry_after="1"), text("no JSON")]
        subprocess.run([..., "--base-url", judge.url])

It reads the question out of the prompt, and scores each answer by the words that it shares with the reference. To try
judge_ift.py without an account, start the judge by hand:

    python tests/support/fake_judge.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Scores = dict[str, float]


def score(answer: str, reference: str) -> int:
    """Return 100 times the number of words that occur in both texts, divided by the number of words that occur in at
    least one. Each word counts once."""
    words, wanted = set(answer.split()), set(reference.split())
    return round(100 * len(words & wanted) / max(1, len(words | wanted)))


ALONE = re.compile(
    r"Given the input `(.*)` and correct output `(.*)`, score the model response `(.*)` on a scale (?:from|of) 0 to "
    r"100, where 100 is the best score\. Respond with the integer number only\.",
    re.DOTALL,
)


def question_of(prompt: str) -> dict[str, Any]:
    """Return the JSON object at the end of a prompt. A prompt in the book's form (ALONE) has no JSON: for it, return
    the same keys, with one answer named ""."""
    if alone := ALONE.fullmatch(prompt):
        asked, reference, answer = alone.groups()
        instruction = asked.split("### Instruction:\n")[1].split("\n\n### Input")[0]
        return {"instruction": instruction, "reference": reference, "answers": {"": answer}}
    return json.loads(prompt[prompt.index("\n{\n") :])


@dataclass(frozen=True)
class Fault:
    """Reaction to one request. The default is the honest answer.

    `write` makes the text of the reply from the honest scores. `body` is sent unchanged in place of a reply. The
    reply is sent after a pause of `delay_seconds`. With `trickle`, 1000 blanks are sent before the body instead, each
    followed by this pause, to keep the connection open. `hang_up` closes the connection without a reply.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    write: Callable[[Scores], str] | None = None
    body: bytes | None = None
    refusal: str | None = None
    has_usage: bool = True
    delay_seconds: float = 0.0
    trickle: bool = False
    hang_up: bool = False


def text(content: str) -> Fault:
    return Fault(write=lambda scores: content)


def status(number: int, *, code: str | None = None, message: str = "no", retry_after: str | None = None) -> Fault:
    error = {"error": {"message": message, "type": "error", "code": code}}
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return Fault(number, headers, body=json.dumps(error).encode())


@dataclass
class Seen:
    """A request. `answered` is True once the whole reply, honest or not, has been sent."""

    prompt: str
    model: str
    authorization: str | None
    at: float = field(default_factory=time.monotonic)
    answered: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class FakeJudge:
    """Local server that judges answers: honestly, or with the reactions that a test sets.

    `faults` are the reactions to the first requests, in order. `always` holds the reactions to later requests, by the
    instruction of their question, or under None for all other questions. Only the first `honest_requests` requests are
    answered. Later ones wait until `released` is set, and get no answer.
    """

    faults: list[Fault] = field(default_factory=list)
    always: dict[str | None, Fault] = field(default_factory=dict)
    honest_requests: int | None = None
    port: int = 0  # 0 takes any free port
    requests: list[Seen] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.released = threading.Event()
        self._server = _Server(self)

    def __enter__(self) -> FakeJudge:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def paid(self) -> list[str]:
        """Return the prompts of the requests whose replies have been sent."""
        return [seen.prompt for seen in self.requests if seen.answered]

    def reaction(self, question: dict[str, Any]) -> Fault:
        with self.lock:
            if self.faults:
                return self.faults.pop(0)
        return self.always.get(question["instruction"], self.always.get(None, Fault()))


class _Server(ThreadingHTTPServer):
    def __init__(self, judge: FakeJudge) -> None:
        super().__init__(("127.0.0.1", judge.port), _Handler)
        self.judge = judge

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing, because tests kill clients or let them time out."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        judge = self.server.judge
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["messages"][-1]["content"]
        seen = Seen(prompt, request["model"], self.headers["Authorization"])
        with judge.lock:
            judge.requests.append(seen)
            number = len(judge.requests)
        if self.path != "/v1/chat/completions":
            self._send(status(404, message="no such path"), b"{}")
            return
        if judge.honest_requests is not None and number > judge.honest_requests:
            judge.released.wait()
            self.close_connection = True
            return
        question = question_of(prompt)
        self._react(judge.reaction(question), question, seen)

    def _react(self, fault: Fault, question: dict[str, Any], seen: Seen) -> None:
        if not fault.trickle:
            self.server.judge.released.wait(fault.delay_seconds)
        if fault.hang_up:
            self.close_connection = True
            return
        scores: Scores = {name: score(answer, question["reference"]) for name, answer in question["answers"].items()}
        # A prompt with one answer without a name is answered by the number alone.
        honest = str(scores[""]) if "" in scores else json.dumps(scores)
        content = fault.write(scores) if fault.write else honest
        seen.prompt_tokens, seen.completion_tokens = len(seen.prompt) // 4, max(1, len(content) // 4)
        message = {"role": "assistant", "content": None if fault.refusal else content, "refusal": fault.refusal}
        completion: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": seen.model,
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }
        if fault.has_usage:
            counts = {"prompt_tokens": seen.prompt_tokens, "completion_tokens": seen.completion_tokens}
            completion["usage"] = counts | {"total_tokens": sum(counts.values())}
        self._send(fault, fault.body if fault.body is not None else json.dumps(completion).encode())
        seen.answered = True

    def _send(self, fault: Fault, body: bytes) -> None:
        blanks = 1000 if fault.trickle else 0
        self.send_response(fault.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(blanks + len(body)))
        for key, value in fault.headers.items():
            self.send_header(key, value)
        self.end_headers()
        for _ in range(blanks):
            self.wfile.write(b" ")
            self.server.judge.released.wait(fault.delay_seconds)
        self.wfile.write(body)


# By hand -------------------------------------------------------------------------------------------------------------

# Three ways to answer without understanding, by the names of the files in which judge_ift.py gets the answers.
WAYS: dict[str, tuple[str, Callable[[dict[str, str]], str]]] = {
    "small.json": ("the-input-again", lambda question: question["input"]),
    "medium.json": ("the-instruction-again", lambda question: question["instruction"]),
    "large.json": (
        "half-of-the-reference",
        lambda question: " ".join((words := question["output"].split())[: (len(words) + 1) // 2]),
    ),
}
INSTRUCTIONS = """\
A judge that counts words listens at {url}; Ctrl-C ends it. In another terminal:

    export OPENAI_API_KEY=none
    uv run --extra judge judge_ift.py {files} --model word-counter --base-url {url}
"""


def write_ways(responses: Path, folder: Path) -> list[Path]:
    """Write one file for each way of answering in WAYS, with its answers to the questions of the file `responses`.
    Return the paths. Raises SystemExit if `responses` cannot be read or one of the files exists."""
    keys = ("instruction", "input", "output")
    try:
        questions = [{key: each[key] for key in keys} for each in json.loads(responses.read_text())["responses"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {responses}: not a file of answers, as test_ift.py writes them: {error}")
    paths = [folder / name for name in WAYS]
    if there := [path for path in paths if path.exists()]:
        sys.exit(f"error: {there[0]}: exists; start this in another folder")
    for path, (model, answer) in zip(paths, WAYS.values(), strict=True):
        answers = [{**question, "response": answer(question)} for question in questions]
        path.write_text(json.dumps({"model": model, "responses": answers}, indent=1))
    return paths


def main() -> None:
    """Print how to ask the judge, and serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="A judge for judge_ift.py that needs no account: it counts words.")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free  [default: 8000]")
    told = "write small.json, medium.json and large.json with answers to the questions of this file"
    parser.add_argument("--questions", type=Path, metavar="RESPONSES", help=told)
    options = parser.parse_args()
    try:
        judge = FakeJudge(port=options.port)
    except (OSError, OverflowError) as error:
        sys.exit(f"error: port {options.port}: {error}; give another one by --port")
    files = write_ways(options.questions, Path()) if options.questions else [Path("RESPONSES.json ...")]
    with judge:
        print(INSTRUCTIONS.format(url=judge.url, files=" ".join(map(str, files))), end="", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
