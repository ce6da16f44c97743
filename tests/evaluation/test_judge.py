"""Judging by a fake judge on this machine that is slow, busy or unreachable, or gives invalid answers."""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.common.errors import RunError, UserError
from harness.evaluation.instruct.responses import Responses, write_responses
from harness.evaluation.judge.cache import JudgeCache, Record
from harness.evaluation.judge.report import JudgeReport
from harness.evaluation.judge.requests import HOPELESS_PROMPTS, JudgeSettings, Judgment, Tokens
from tests.support.configs import refusal
from tests.support.fake_judge import Fault, status, text
from tests.support.in_process import call
from tests.support.judging import KEY, LABELS, QUESTIONS, Bench, make_models, true_scores
from tests.support.launch import ROOT, Workshop, finish, wait_until

GUIDE = (ROOT / "docs" / "after-training.md").read_text()


# Whole ---------------------------------------------------------------------------------------------------------------


def test_every_model_gets_its_own_scores_and_nothing_is_asked_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    judgment = bench.run(repeats=3)
    bench.assert_true(judgment)
    requests = bench.judge.requests
    assert len(requests) == QUESTIONS * 3
    assert {request.model for request in requests} == {"referee"}
    assert {request.authorization for request in requests} == {f"Bearer {KEY}"}
    assert not any(label in request.prompt for request in requests for label in LABELS)
    spent = judgment.spent
    assert (spent.answers, spent.uncounted) == (len(requests), 0)
    assert spent.prompt == sum(request.prompt_tokens for request in requests)
    assert spent.completion == sum(request.completion_tokens for request in requests)
    assert KEY not in bench.cache.read_text()

    with monkeypatch.context() as patch:
        patch.delenv("OPENAI_API_KEY")  # no request is sent, so no key is needed
        bench.models.reverse()
        again = bench.run(repeats=3)
        bench.assert_true(again)
        assert again.labels == tuple(reversed(LABELS))
        assert (again.spent, again.spent_now.answers) == (spent, 0)

    others = make_models(labels=(*LABELS, "largest"))
    for change in ({"repeats": 4}, {"model": "another"}, {"models": others[:2]}, {"models": [*others[:2], others[3]]}):
        asked = len(requests)
        bench.models = change.pop("models", bench.models)  # type: ignore[assignment]
        bench.assert_true(bench.run(**change))
        assert len(requests) == asked + QUESTIONS
    # Scores of other names in the cache are no answer.
    bench.cache.write_text(bench.cache.read_text().replace('"C":', '"X":'))
    bench.assert_true(bench.run())
    assert len(requests) == asked + 2 * QUESTIONS


def test_a_question_that_is_there_twice_is_asked_once(bench: Bench) -> None:
    """Equal prompts are asked once; another order of the answers is another prompt."""
    bench.models = [
        Responses(model=model.model, responses=[model.responses[0]] * 20) for model in make_models(labels=LABELS[:2])
    ]
    bench.assert_true(bench.run())
    assert len(bench.judge.requests) == 2
    bench.models = [model.model_copy(update={"responses": bench.models[0].responses}) for model in bench.models]
    bench.assert_true(bench.run(prompt="book"))
    assert len(bench.judge.requests) == 3, "equal answers, each judged alone, have equal prompts"


def test_each_answer_alone_is_kept_apart_from_those_together(bench: Bench) -> None:
    """The same answers are judged again for each of the three prompts, and only once for each."""
    together = bench.run()
    for number, prompt in enumerate(("book", "notebook"), start=1):
        alone = bench.run(prompt=prompt, repeats=2)
        bench.assert_true(alone)
        assert alone.spent.answers == len(LABELS) * QUESTIONS * 2
        assert len(bench.judge.requests) == QUESTIONS + number * alone.spent.answers
        assert bench.run(prompt=prompt, repeats=2).spent_now.answers == 0
        report = JudgeReport(alone, replace(bench.settings, prompt=prompt))
        assert report.as_json()["prompt"] == prompt
        printed = " ".join("\n".join(report.lines()).split())
        assert f"referee judged each answer alone, with the {prompt}'s prompt; 5 questions." in printed
        assert "not with those of models judged together" in printed
    assert bench.run().spent == together.spent
    assert [line.get("prompt") for line in bench.lines()] == [None] * 5 + ["book"] * 30 + ["notebook"] * 30


def test_answers_that_were_judged_model_by_model_are_not_asked_again(bench: Bench) -> None:
    """Each model's answers are judged in its own folder, and then all together. --cache names the only file to use."""
    models = bench.models
    for model in models:
        (bench.folder / model.model).mkdir()
        bench.models = [model]
        bench.command("--prompt", "book")
    bench.models = models
    asked = len(bench.judge.requests)
    bench.command("--prompt", "book")
    assert len(bench.judge.requests) == asked == len(LABELS) * QUESTIONS
    bench.command("--prompt", "book", "--cache", str(bench.folder / "anew.jsonl"))
    assert len(bench.judge.requests) == 2 * asked


# Faults --------------------------------------------------------------------------------------------------------------

NO_CHAT = [b"<html>Welcome!</html>", b"", b"\xff\xfe", b"1", b'{"error": {"code": 502}}']
NO_CHAT += [
    b'{"choices": ' + each + b"}" for each in (b"[]", b"[{}]", b'[{"message": []}]', b'[{"message": {"content": 1}}]')
]
INVALID = [
    (text("The best one is A."), "not valid JSON"),
    (Fault(write=lambda scores: json.dumps(scores | {"D": 50})), 'scores for "D"'),
    (Fault(write=lambda scores: json.dumps({"A": scores["A"], "B": scores["B"]})), "no score for C"),
    (text(f"your key is {KEY}"), "your key is ***"),
    (Fault(refusal="I would rather not"), "refused: I would rather not"),
    *((Fault(body=body), "the reply is not a chat completion") for body in NO_CHAT),
    (Fault(delay_seconds=0.05, trickle=True), "the reply took more than 1 seconds"),
]


def test_an_invalid_answer_is_asked_for_again_and_its_cost_is_counted(bench: Bench) -> None:
    bench.judge.faults = [*(fault for fault, _ in INVALID), Fault(has_usage=False)]
    judgment = bench.run(timeout=1.0, parallel=1, attempts=len(INVALID) + 1)
    bench.assert_true(judgment)
    assert len(bench.judge.requests) == judgment.spent.answers == QUESTIONS + len(INVALID)
    for said, (_, reason) in zip(bench.invalid(), INVALID, strict=True):
        assert reason in said
    # A reply that is not a chat's, that did not end, or that has no usage has no token count.
    counted = [*bench.judge.requests[:5], *bench.judge.requests[len(INVALID) + 1 :]]
    assert judgment.spent.prompt == sum(request.prompt_tokens for request in counted)
    assert judgment.spent.completion == sum(request.completion_tokens for request in counted)
    assert judgment.spent.uncounted == len(bench.judge.requests) - len(counted)
    assert KEY not in bench.cache.read_text()


def test_a_judge_that_fails_for_a_while(bench: Bench) -> None:
    """A judge that fails for a while is asked again until all questions have valid answers. A new request waits for as
    long as Retry-After asks."""
    bench.judge.faults = [
        *(status(429, retry_after="0.7"), status(500), status(529, retry_after="soon"), Fault(hang_up=True)),
        *(status(503, retry_after="Fri, 31 Dec 1999 23:59:59 GMT"), status(408), Fault(delay_seconds=60)),
    ]
    failures, began = len(bench.judge.faults), time.monotonic()
    bench.assert_true(bench.run(timeout=0.8, parallel=1, attempts=failures + 1))
    assert time.monotonic() - began < 20
    first, second, *others = bench.judge.requests
    assert second.at >= first.at + 0.7
    assert len(others) + 2 == QUESTIONS + failures
    assert len(bench.lines()) == QUESTIONS


# Failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "words", "requests"),
    [
        (status(500), RunError, "status 500", 3),
        (Fault(hang_up=True), RunError, "the connection failed", 3),
        (Fault(delay_seconds=60), RunError, "no answer within 0.3 seconds", 3),
        (status(429, code="insufficient_quota"), RunError, "status 429", 3),
        (status(429, retry_after="86400"), RunError, "; Retry-After: 86400; judge again later", 1),
        (status(401, message=f"wrong key: {KEY}"), UserError, "status 401", 1),
        (status(403), UserError, "check the key", 1),
        (status(404, code="model_not_found"), UserError, "check the judge's name and --base-url", 1),
        (status(400), UserError, "rejects the request", 1),
    ],
)
def test_a_judge_that_never_answers_or_refuses(
    bench: Bench, fault: Fault, error: type[Exception], words: str, requests: int
) -> None:
    """A request is sent three times if its failure may be temporary. After a long Retry-After or another failure, it is
    sent only once."""
    bench.judge.always = {None: fault}
    with pytest.raises(error) as caught:
        bench.run(parallel=1, timeout=0.3 if fault.delay_seconds else 60)
    assert words in str(caught.value)
    assert KEY not in str(caught.value)
    assert ("; judge again later, which asks only for " in str(caught.value)) == (error is RunError)
    assert len(bench.judge.requests) == requests
    assert list(bench.folder.iterdir()) == []


def test_a_judge_that_goes_away_leaves_what_it_answered(bench: Bench) -> None:
    bench.judge.always = {"Question 3": Fault(hang_up=True)}
    with pytest.raises(RunError, match="judge again later, which asks only for the answers that are missing"):
        bench.run(parallel=1)
    assert len(bench.lines()) == 3
    bench.judge.always = {}
    bench.assert_true(bench.run())
    assert len(bench.judge.paid) == len(set(bench.judge.paid)) == QUESTIONS


def test_questions_without_a_valid_answer_are_left_out_and_asked_again_next_time(bench: Bench) -> None:
    """One question gets an invalid reply, one is too long for the judge, and one is a prompt that the judge refuses."""
    codes = ("context_length_exceeded", "invalid_prompt")
    faults = [text("no"), *(status(400, code=code) for code in codes)]
    bench.judge.always = {f"Question {number}": fault for number, fault in enumerate(faults, start=2)}
    judgment = bench.run()
    assert [(each.question, each.repeat) for each in judgment.unanswered] == [(3, 1), (4, 1), (5, 1)]
    assert np.isnan(judgment.scores[2:]).all()
    report = JudgeReport(judgment, bench.settings)
    assert report.comparison is not None
    answered = true_scores(bench.models)[:2]
    assert [mean.value for mean in report.comparison.means] == pytest.approx(answered.mean(axis=0))
    assert "no valid answer to 3 of 5 prompts, after 3 attempts each (question 3, 4, 5; " in str(report.shortfall())

    asked = len(bench.judge.requests)
    assert asked == 2 + 3 * 3
    bench.judge.always = {}
    bench.assert_true(bench.run())
    assert len(bench.judge.requests) == asked + 3


def test_a_judge_that_cannot_do_it_is_not_paid_to_the_end(bench: Bench) -> None:
    bench.models = make_models(60)
    bench.judge.always = {None: text("Both are fine!")}
    with pytest.raises(RunError, match=r"no valid answer to any of the first 8 prompts .*try another judge"):
        bench.run(parallel=2)
    assert len(bench.judge.requests) <= (HOPELESS_PROMPTS + 4) * 3


def test_without_the_openai_package(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr(sys, "argv", ["/somewhere/judge_ift.py"])
    with pytest.raises(UserError, match=r"uv run --extra judge judge_ift\.py"):
        bench.run()
    assert not bench.cache.exists()


def test_the_endpoint_is_the_options_or_the_environments_or_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, option, expected in (
        ("", None, "https://api.openai.com/v1"),
        ("http://127.0.0.1:8000/v1", None, "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:9000/v1/", "http://127.0.0.1:9000/v1"),
    ):
        monkeypatch.setenv("OPENAI_BASE_URL", environment)
        assert JudgeSettings.choose("m", option).base_url == expected
    for url in ("judge", "ftp://judge/v1", "http://", "http://judge:99999", "http://[", "https://me:password@judge/v1"):
        assert "password@" not in refusal(JudgeSettings.choose, "m", url, begins="--base-url: ")
    for model in ("", "gpt-\udcff"):
        with pytest.raises(UserError, match=r"^the judge: "):
            JudgeSettings.choose(model, None)


# Cache ---------------------------------------------------------------------------------------------------------------


def record(number: int) -> Record:
    return Record(key=f"{number}" * 4, question=number, repeat=1, scores={"A": 1.0, "B": number}, time=1e9)


def test_a_line_cut_off_anywhere_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    with JudgeCache(path) as cache:
        cache.append(record(1))
        cache.append(record(2))
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last + 1):
        path.write_bytes(whole[:-cut])
        with JudgeCache(path) as cache:
            # A line that lacks only its newline is whole.
            assert cache.records == ([record(1), record(2)] if cut == 1 else [record(1)])
            cache.append(record(3))
        with JudgeCache(path) as cache:
            assert cache.records[-1] == record(3)
            assert len(cache.records) == (3 if cut == 1 else 2)


def test_what_cannot_be_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    for content in ('{"model": "small"}', "# Notes\n", "\n\nx", '{"key": "1"}\n{"other": 1}\n'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"notes:\d: not a judge's answer; give --cache another file"):
            JudgeCache(path)
        assert path.read_text() == content
    for folder in (Path("/dev/null"), tmp_path):
        with pytest.raises(UserError, match="not a file"):
            JudgeCache(folder)
    with pytest.raises(RunError, match="No such file or directory"):
        JudgeCache(tmp_path / "missing" / "cache.jsonl")
    with JudgeCache(tmp_path / "cache.jsonl") as cache:
        with pytest.raises(UserError, match="another process is using it"):
            JudgeCache(cache.path)
        cache.append(record(1))
    with JudgeCache(cache.path) as cache:
        assert cache.records == [record(1)]


# The command ---------------------------------------------------------------------------------------------------------


def test_command_prints_a_table_and_the_same_as_json(bench: Bench) -> None:
    done = bench.command("--repeats", "2", "--price-in", "2", "--price-out", "10")
    stdout = done.stdout
    assert done.stderr == ""  # no progress bar without a terminal
    assert all(len(line) <= 80 for line in stdout.splitlines())
    means = true_scores(bench.models).mean(axis=0)
    table = [line.split() for line in stdout.splitlines()]
    for place, model in enumerate(np.argsort(-means), start=1):
        (row,) = [row for row in table if row and row[-1] == LABELS[model]]
        assert row[:2] == [str(place), f"{means[model]:.2f}"]
    assert bench.cache.is_file()

    prompt = sum(request.prompt_tokens for request in bench.judge.requests)
    completion = sum(request.completion_tokens for request in bench.judge.requests)
    assert (
        f"Tokens: {prompt:,} of prompts, {completion:,} of answers, ${(2 * prompt + 10 * completion) / 1e6:.4f}"
        in stdout
    )

    bench.judge.always = {None: status(401)}  # the second time nothing is asked, so that no key is needed either
    result = json.loads(bench.command("--repeats", "2", "--json", OPENAI_API_KEY="").stdout)
    assert [model["model"] for model in result["models"]] == list(LABELS)
    assert [model["mean"]["value"] for model in result["models"]] == pytest.approx(means)
    scores = np.array([model["scores"] for model in result["models"]])
    assert (scores == true_scores(bench.models).T[:, :, None]).all()
    assert result["tokens"]["this_run"]["answers"] == 0
    assert result["tokens"]["all_answers"]["prompt"] == prompt
    assert len(result["pairs"]) == 3
    wins = (scores[2].mean(axis=1) > scores[0].mean(axis=1)).mean()
    assert [p["win_rate"] for p in result["pairs"] if (p["first"], p["second"]) == ("large", "small")] == [wins]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT])
def test_a_judging_that_is_stopped_continues_and_pays_for_nothing_twice(bench: Bench, number: signal.Signals) -> None:
    bench.models = make_models(12)
    bench.judge.honest_requests = 5
    judged = [*bench.write(), "--model", "referee", "--base-url", bench.judge.url, "--parallel", "3"]
    environment = {"NO_PROXY": "127.0.0.1", "OPENAI_API_KEY": KEY}
    process = Workshop(bench.folder).fork([str(ROOT / "judge_ift.py"), *judged], environment)
    wait_until(lambda: bench.kept() == 5 and len(bench.judge.requests) == 8)
    began = time.monotonic()
    process.send_signal(number)
    stopped = number == signal.SIGINT
    stderr = finish([process], expect=128 + number if stopped else -number, timeout=60).stderr
    assert time.monotonic() - began < 5
    if stopped:
        assert stderr == "stopped by SIGINT; to continue, run the same command again\n"
    assert len(bench.lines()) == 5
    bench.judge.released.set()
    bench.judge.honest_requests = None
    bench.assert_true(bench.run())
    assert len(bench.judge.paid) == len(set(bench.judge.paid)) == 12


def test_a_disk_that_fills_up_loses_no_answer_that_was_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.models = make_models(12)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode files would be cut short, too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        with pytest.raises(RunError, match=f"^{re.escape(str(bench.cache))}: File too large; "):
            bench.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert bench.cache.stat().st_size == 1024
    *lines, cut = bench.cache.read_text().split("\n")
    whole = len(lines) + cut.endswith("}")  # a line that only lacks its newline is whole
    assert whole >= 4
    before = len(bench.judge.paid)
    bench.assert_true(bench.run())
    assert len(bench.judge.paid) == before + 12 - whole


@pytest.mark.parametrize(
    ("options", "environment", "words"),
    [
        ([], {"OPENAI_API_KEY": ""}, "OPENAI_API_KEY is empty or not"),
        ([], {"OPENAI_API_KEY": "  "}, "OPENAI_API_KEY is empty or not"),
        ([], {"OPENAI_API_KEY": "clé"}, "OPENAI_API_KEY"),
        (["other.json"], {}, "/small.json and other.json: not the same questions: number 5 differs"),
        (["none.json"], {}, "none.json: no such file"),
        (["--price-in", "1"], {}, "--price-in and --price-out: give both or neither"),
        ([], {"ALL_PROXY": "gopher://127.0.0.1:1"}, "no connection can be set up"),
        ([], {"SSL_CERT_FILE": "/nowhere"}, "no connection can be set up"),
    ],
)
def test_wrong_commands_end_with_one_line_and_leave_nothing(
    bench: Bench, options: list[str], environment: dict[str, str], words: str
) -> None:
    write_responses(bench.folder / "other.json", Responses(model="other", responses=make_models(4)[0].responses))
    before = sorted([*bench.folder.iterdir(), *map(Path, bench.write())])
    bench.command(*options, expect=2, **environment).refuses(words, *environment)
    assert sorted(bench.folder.iterdir()) == before
    assert not bench.judge.requests


def test_the_guides_example_needs_no_account(bench: Bench) -> None:
    """The guide's command starts a fake judge, which writes files of answers and prints a command that judges them."""
    write_responses(bench.folder / "ift-responses.json", bench.models[0])
    (shown,) = re.findall(r"`uv run (tests/support/fake_judge\.py\s[^`]*)`", GUIDE)
    script, *options = shown.replace("runs/quickstart/ift-responses.json", "ift-responses.json").split()
    shop = Workshop(bench.folder)
    command = [str(ROOT / script), *options, "--port", "0"]
    server = shop.fork(command, {})
    try:
        wait_until(lambda: len(server.read(".out").splitlines()) > 3)
        _, *words = server.read(".out").splitlines()[3].split("judge_ift.py")[1].split()
        assert "--model word-counter --base-url http://127.0.0.1:" in " ".join(words)
        done = call("judge_ift", "small.json", *words, folder=bench.folder, environment={"OPENAI_API_KEY": "none"})
        assert (done.status, done.stderr) == (0, "")
        ranking = re.findall(r"^ +\d +(\S+) .*  (\S+)$", done.stdout, re.M)
        assert ranking[0] == ("50.00", "half-of-the-reference"), "five of ten words"
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 0
    finally:
        server.kill()
    again = finish([shop.fork(command, {})], expect=1, timeout=60)
    assert again.stderr == "error: small.json: exists; start this in another folder\n"


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 12])
def test_tables_fit_a_terminal(count: int) -> None:
    labels = tuple(
        f"runs/8xa100m40/checkpoints/20251206Z014912-iteration-{number}/a \x1b[31mred name" for number in range(count)
    )
    scores = np.random.default_rng(0).integers(0, 101, size=(100, 2, count)).astype(float)
    spent = Tokens(2000, 10**9, 10**7, 3)
    judgment = Judgment(labels, scores, (), spent, Tokens())
    settings = JudgeSettings("a-judge-with-a-long-name-20260101", "http://judge.example/v1", repeats=2)
    report = JudgeReport(judgment, settings, (1.25, 10))
    lines = list(report.lines())
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    joined = "".join("".join(lines).split())
    assert all(f"iteration-{number}/a" in joined for number in range(count))
    rows = [line for line in lines if " : " in line]
    assert len(rows) == (count * (count - 1) // 2 if count <= 8 else count - 1)
    assert "$1,350.0000" in "".join(lines)
    assert "(3 of the answers came without a count)" in " ".join(" ".join(lines).split())
    assert len(report.as_json()["pairs"]) == count * (count - 1) // 2
