"""Benchmarks: scores equal those of lm-eval's own `hf` model on the exported weights, and failures print one line."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.common.files import sha256
from harness.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe
from harness.evaluation.benchmarks import run as benchmarks
from harness.evaluation.likelihood import Scorer, windows
from harness.hf.export import export_model
from harness.model.precision import Precision
from harness.runs.directory import RunDirectory
from harness.runs.results import BenchmarkResult, read_results
from harness.runs.trained_model import TrainedModel
from tests.support.benchmark_files import KINDS, sentence, write_task
from tests.support.configs import refusal
from tests.support.in_process import call
from tests.support.launch import Result, Workshop, finish

CONTEXT = 32
VOCAB_SIZE = 300
FP32 = Precision("fp32", "cpu")


@dataclass(frozen=True)
class Subject:
    """A briefly trained model, its tokenizer, and the folder with the files of both."""

    folder: Path
    model: GPTModel
    tokenizer: Tokenizer

    def scorer(self, batch_size: int = 8) -> Scorer:
        return Scorer(self.model, FP32, self.tokenizer.vocab_size, batch_size)

    def under_test(self, batch_size: int = 8) -> Any:
        from harness.evaluation.benchmarks.lm_eval_model import ModelUnderTest

        return ModelUnderTest(self.scorer(batch_size), self.tokenizer)

    @property
    def arguments(self) -> list[str]:
        """Arguments of a command that takes a model."""
        return [str(self.folder / "model.json"), str(self.folder / "model.safetensors")]

    @cached_property
    def peer(self) -> Any:
        from lm_eval.models.huggingface import HFLM

        export_model(self.model, TrainedModel.read(self.folder), self.folder / "exported", "fp32")
        # With its cache, HFLM uses logits of other positions if two windows have equal tokens but unequal targets.
        options: dict[str, Any] = {"device": "cpu", "batch_size": 8, "dtype": "float32", "logits_cache": False}
        return HFLM(pretrained=str(self.folder / "exported"), **options)


@pytest.fixture(scope="module", autouse=True)
def data_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the data of the tests' tasks out of the user's own cache."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    draw = random.Random(0)
    lines = [sentence(draw, 50) for _ in range(400)]
    train_bpe(iter(lines), VOCAB_SIZE, folder / "tokenizer.json")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE + 12,
        "context_length": CONTEXT,
        "emb_dim": 32,
        "n_heads": 4,
        "n_layers": 2,
    }
    model = GPTModel(ModelConfig(**shape, drop_rate=0.1, qkv_bias=True))
    learn(model, [tokenizer.encode(line) for line in lines])
    (folder / "model.json").write_text(model.config.model_dump_json())
    (folder / "meta.json").write_text('{"tokenizer": "tokenizer.json"}')
    save_file(model.to_checkpoint_names(), folder / "model.safetensors")
    return Subject(folder, model.eval(), tokenizer)


def learn(model: nn.Module, texts: list[list[int]], steps: int = 60) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.tensor([text[: CONTEXT + 1] for text in texts[step * 8 % 400 :][:8]])
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("a", at, 1))
        for at, each in enumerate(arguments)
    ]


# Equal to lm-eval's own model


@pytest.mark.slow
@pytest.mark.parametrize("fewshot", [None, 2])
def test_scores_are_those_of_lm_evals_own_model(subject: Subject, tmp_path: Path, fewshot: int | None) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    paths = [str(write_task(tmp_path, kind)) for kind in KINDS]
    loaded = benchmarks.load(paths, fewshot)
    ours = benchmarks.run(loaded, subject.scorer(batch_size=5), subject.tokenizer, limit=20)
    with benchmarks.quiet_lm_eval():
        theirs: Any = lm_eval.simple_evaluate(
            model=subject.peer,
            tasks=list(paths),
            num_fewshot=fewshot,
            limit=20,
            bootstrap_iters=benchmarks.BOOTSTRAP_ITERATIONS,
            task_manager=TaskManager(include_defaults=False),
        )
    assert loaded.asked == list(KINDS)
    seen = set()
    for name in loaded.asked:
        for our, their in zip(benchmarks.scores(ours, name), benchmarks.scores(theirs, name), strict=True):
            exact = our.metric in {"acc", "acc_norm", "exact_match"}
            assert our.value == (their.value if exact else pytest.approx(their.value, rel=1e-5)), our
            assert (our.stderr or 0) == (their.stderr if exact else pytest.approx(their.stderr or 0, rel=1e-4)), our
            assert (our.task, our.metric, our.examples) == (their.task, their.metric, 20)
            seen.add((name, our.metric))
            if fewshot is None and name in {"choice", "last_word", "generate"} and our.metric != "perplexity":
                assert 0 < our.value < 1, f"{our}: the score must depend on the model"
    assert len(seen) == 8
    assert ours["n-shot"] == theirs["n-shot"]
    assert ours["versions"] == theirs["versions"]


def test_log_likelihoods_are_those_of_lm_evals_own_model(subject: Subject) -> None:
    draw = random.Random(1)
    pairs = [(sentence(draw, draw.randint(1, 60)), " " + sentence(draw, draw.randint(1, 9))) for _ in range(40)]
    pairs += [("", "the river"), ("", END_OF_TEXT[:5]), ("the river  ", "carries"), ("the river", " carries")]
    pairs += [(pairs[0][0], " the"), (pairs[0][0], " a"), ("the river", " carries")]  # equal inputs, and equal pairs
    requests = instances("loglikelihood", pairs)
    ours, theirs = subject.under_test().loglikelihood(requests), subject.peer.loglikelihood(requests)
    assert [total for total, _ in ours] == pytest.approx([total for total, _ in theirs], rel=1e-5)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert len({greedy for _, greedy in ours}) == 2
    assert subject.under_test().loglikelihood(instances("loglikelihood", [("the", "")])) == [(0.0, True)]
    texts = instances("loglikelihood_rolling", [(sentence(draw, words),) for words in (1, 5, 40, 200)] + [("",)])
    found = subject.under_test().loglikelihood_rolling(texts)
    assert found == pytest.approx(subject.peer.loglikelihood_rolling(texts), rel=1e-5)
    assert found[-1] == 0


def test_an_answer_that_merges_with_its_context_is_not_certain(subject: Subject) -> None:
    """Context and answer may have no more tokens together than the context alone."""
    context, answer = "the ri", "ver"
    assert len(subject.tokenizer.encode(context + answer)) <= len(subject.tokenizer.encode(context))
    [(total, _)] = subject.under_test().loglikelihood(instances("loglikelihood", [(context, answer)]))
    pair = (subject.tokenizer.encode(context), subject.tokenizer.encode(answer))
    assert total == pytest.approx(subject.scorer().score([pair])[0].total)
    assert total < 0


def test_generated_texts_are_those_of_lm_evals_own_model(subject: Subject) -> None:
    draw = random.Random(2)
    ways = [
        {"until": ["\n", " the"], "max_gen_toks": 12},
        {"until": "zzz", "max_gen_toks": 20, "do_sample": False},
        {"until": [], "max_new_tokens": 3, "temperature": 0.0},
    ]
    requests = instances("generate_until", [(sentence(draw, 1 + at), ways[at % 3]) for at in range(30)])
    ours = subject.under_test().generate_until(requests)
    assert ours == subject.peer.generate_until(requests)
    assert all(ours[1::3])
    assert not any(" the" in text for text in ours[::3])
    # lm-eval's own model fails with an assertion if a text as long as the context is asked for.
    long = instances("generate_until", [(sentence(draw, 40), {"until": [], "max_gen_toks": CONTEXT + 8})])
    [text] = subject.under_test().generate_until(long)
    assert len(subject.tokenizer.encode(text)) > CONTEXT // 2


def test_windows_predict_every_token_once_and_fit() -> None:
    for length, before, count in itertools.product([1, 2, 3, 7], range(1, 10), range(10)):
        tokens = list(range(before + count))
        found = list(windows(tokens[:before], tokens[before:], length))
        assert [target for _, targets in found for target in targets] == tokens[before:]
        for inputs, targets in found:
            assert len(targets) <= len(inputs) <= length
            assert inputs[-1] + 1 == targets[-1], "the last place predicts the last target"
            assert inputs[0] == 0 or len(inputs) == length, "as much context as fits"


def test_padding_of_the_vocabulary_is_never_chosen(subject: Subject) -> None:
    padded = GPTModel(subject.model.config).eval()
    padded.load_state_dict(subject.model.state_dict())
    prompt = subject.tokenizer.encode("the river")
    with torch.no_grad():
        logits = padded(torch.tensor([prompt]))[0, -1, :VOCAB_SIZE]
        likeliest = int(logits.argmax())
        assert logits[likeliest] > 0
        padded.out_head.weight[VOCAB_SIZE:] = 100 * padded.out_head.weight[likeliest]
        assert int(padded(torch.tensor([prompt]))[0, -1].argmax()) >= VOCAB_SIZE
    tempted = Subject(subject.folder, padded, subject.tokenizer)
    requests = instances("generate_until", [("the river", {"until": [], "max_gen_toks": 1})])
    assert tempted.under_test().generate_until(requests) == [subject.tokenizer.decode([likeliest])]
    assert tempted.scorer().score([(prompt, [likeliest])])[0].is_greedy


def test_sampling_is_repeatable_and_each_repeat_draws_its_own(subject: Subject) -> None:
    way: dict[str, Any] = {"until": [], "max_gen_toks": 10, "do_sample": True, "temperature": 1.5}
    requests = instances("generate_until", [("the", way)] * 6)
    found = subject.under_test(batch_size=2).generate_until(requests)
    assert found == subject.under_test(batch_size=2).generate_until(requests)
    assert len(set(found)) > 2
    unset = {key: value for key, value in way.items() if key != "temperature"}  # then 1, as in transformers
    drawn = [instances("generate_until", [("the", each)] * 2) for each in (unset, unset | {"temperature": 1.0})]
    assert len({tuple(subject.under_test().generate_until(each)) for each in drawn}) == 1


@pytest.mark.parametrize("option", [{"top_p": 0.9, "do_sample": True}, {"num_beams": 6}, {"repetition_penalty": 3.0}])
def test_an_option_that_changes_the_text_is_refused(subject: Subject, option: dict[str, Any]) -> None:
    way = {"until": [], "max_gen_toks": 10}
    with pytest.raises(UserError, match=f'task "a": generation_kwargs: {next(iter(option))}: not supported'):
        subject.under_test().generate_until(instances("generate_until", [("the", way | option)]))
    neutral = [("the", way | more) for more in ({}, {"num_beams": 1, "repetition_penalty": None, "top_p": 0.9})]
    first, second = subject.under_test().generate_until(instances("generate_until", neutral))
    assert first == second


def test_nothing_of_the_process_changes(subject: Subject, tmp_path: Path) -> None:
    import numpy as np

    def state() -> tuple[Any, ...]:
        numpys = np.random.get_state(legacy=False)["state"]["key"].tolist()
        return torch.get_rng_state().tolist(), numpys, random.getstate()

    subject.model.train()
    before, loaded = state(), benchmarks.load([str(write_task(tmp_path, "choice", count=3))], 2)
    benchmarks.run(loaded, subject.scorer(), subject.tokenizer)
    assert state() == before
    assert subject.model.training
    subject.model.eval()


# The command


def evaluate(subject: Subject, folder: Path, *options: object) -> Result:
    return call("evaluate_benchmarks", *subject.arguments, *options, folder=folder)


def test_the_command_prints_a_table_and_writes_files(subject: Subject, tmp_path: Path) -> None:
    """The command prints a table and writes the file that --output names. Scores of a run's checkpoint are also kept in
    the run's folder."""
    run = tmp_path / "runs" / "r"
    checkpoint = shutil.copytree(subject.folder, run / "checkpoints" / "20260101Z000000-iteration-9")
    (run / "checkpoints" / "best").symlink_to(checkpoint.name)
    (checkpoint / "model.json").rename(run / "model.json")
    tasks = [str(write_task(tmp_path, "choice", name="one")), str(write_task(tmp_path, "last_word", name="two"))]
    options = ["--tasks", tasks[0], "--tasks", f"{tasks[1]},", "--limit", "6", "--output", "out.json"]
    done = call("evaluate_benchmarks", "r", *options, folder=tmp_path)
    assert (done.status, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["task", "one", "", "two", ""]
    assert [line[33:].split()[0] for line in lines] == ["metric", "acc", "acc_norm", "perplexity", "acc"]
    assert [line.split()[-1] for line in lines] == ["examples", *["6"] * 4]
    assert all(len(line) <= 80 for line in lines)
    printed = [float(line[33:].split()[1]) for line in lines[1:]]

    written: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert written["results"]["one"]["acc,none"] == pytest.approx(printed[0], abs=1e-4)
    assert written["n-samples"]["two"] == {"original": 24, "effective": 6}
    assert written["model"]["config"]["context_length"] == CONTEXT
    assert written["model"]["sha256"] == sha256(checkpoint / "model.safetensors")
    assert written["settings"]["limit"] == 6
    assert written["configs"]["one"]["output_type"] == "multiple_choice"

    [result] = read_results(RunDirectory(run)).of(BenchmarkResult)
    assert (result.tasks, result.limit, result.num_fewshot, result.precision) == (tasks, 6, None, "fp32")
    assert result.weights.sha256 == written["model"]["sha256"]
    kept = [(score.task, score.metric, score.examples, score.higher_is_better) for score in result.scores]
    assert kept[:2] == [("one", "acc", 6, True), ("one", "acc_norm", 6, True)]
    assert kept[2:] == [("two", "perplexity", 6, False), ("two", "acc", 6, True)]
    assert [score.value for score in result.scores] == pytest.approx(printed, rel=1e-4, abs=1e-4)


def test_what_fails_inside_is_one_line(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task with too few examples for its few-shot prompts fails with one line. So does a lack of memory."""
    options = ["--tasks", write_task(tmp_path, "choice"), "--limit", 2]
    done = evaluate(subject, tmp_path, *options, "--num-fewshot", 99)
    assert done.stdout == ""
    assert done.refuses(status=1).startswith("error: lm-eval failed: ValueError")
    monkeypatch.setattr(benchmarks, "run", lambda *_, **__: torch.empty(2**60))
    done = evaluate(subject, tmp_path, *options)
    assert done.stderr == "error: out of memory at --batch-size 16; lower it or free memory\n"


def test_two_tasks_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    one, other = write_task(tmp_path, "choice"), write_task(tmp_path / "more", "rolling", name="choice")
    with pytest.raises(UserError, match='two different tasks are called "choice"'):
        benchmarks.load([str(one), str(other)])
    assert benchmarks.load([str(one), str(one)]).asked == ["choice"]
    # lm-eval copies a function made by partial for each loading.
    (tmp_path / "helper.py").write_text("import functools\nsame = functools.partial(lambda docs, **_: docs, key=1)\n")
    one.write_text(one.read_text().replace("{", '{"process_docs": !function helper.same,', 1))
    assert benchmarks.load([str(one), str(one)]).asked == ["choice"]


def test_a_task_that_a_group_changes_is_not_the_same_task(named: list[str]) -> None:
    """A group may set its tasks' keys, such as the number of examples before a question. A name that is also asked for
    by itself then has two meanings. A task whose group changes nothing, or only the name that lm-eval's own tables
    show, is the same one."""
    assert benchmarks.load([*named, "both"]).asked == [*named, "both"]
    for specs in (["one", "few"], ["few", "one"]):
        with pytest.raises(UserError, match='two different tasks are called "one"; leave out one'):
            benchmarks.load(specs)


def test_a_group_that_changes_a_group_in_it_is_refused(named: list[str]) -> None:
    """lm-eval gives all tasks of the inner group that group's name, and would score only the last. Of its own groups,
    `openllm` is such a one."""
    assert benchmarks.load(["all"]).asked == ["all"]
    with pytest.raises(UserError, match='two different tasks are called "all"'):
        benchmarks.load(["changed"])


def test_what_is_typed_wrong_is_one_line(subject: Subject, tmp_path: Path) -> None:
    for options, words in (
        (["--tasks", "x", "--output", "."], "is a directory"),
        (["--tasks", "x", "--output", "gone/out.json"], "no file can be written"),
        (["--tasks", ","], "at least one name"),
        (["--tasks", "x.yaml"], "no such task file"),
        (["--tasks", "x", "--limit", "0"], "--limit"),
    ):
        done = evaluate(subject, tmp_path, *options)
        assert (done.status, done.stdout) == (2, "")
        assert words in done.stderr.splitlines()[-1]


def test_the_tokenizer_of_another_model_is_refused(subject: Subject, tmp_path: Path) -> None:
    small = GPTModel(subject.model.config.model_copy(update={"vocab_size": 256}))
    folder = shutil.copytree(subject.folder, tmp_path / "small", ignore=shutil.ignore_patterns("exported"))
    (folder / "model.json").write_text(small.config.model_dump_json())
    save_file(small.to_checkpoint_names(), folder / "model.safetensors")
    done = evaluate(Subject(folder, small, subject.tokenizer), tmp_path, "--tasks", "x")
    done.refuses("its tokenizer has 300 tokens, ")


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of two tasks. In the index of lm-eval's names, these tasks form the group `both`, and the group `outer`
    contains `both`. The group `few` contains the first task with one example before each question, and `changed` sets
    this for `all`, whose groups `left` and `right` contain a task each."""
    from lm_eval.tasks import TaskManager

    names = ["one", "a_task_with_a_rather_long_name_of_its_own"]
    for name in names:
        write_task(tmp_path, "choice", count=4, name=name)
    scored = {"aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}
    few = [{"task": "one", "num_fewshot": 1}]
    both = ["one", {"task": names[1], "task_alias": "two"}]
    groups: dict[str, list[Any]] = {"both": both, "outer": ["both"], "few": few}
    groups |= {"left": [names[0]], "right": [names[1]], "all": ["left", "right"]}
    groups |= {"changed": [{"task": "all", "num_fewshot": 1}]}
    for group, members in groups.items():
        more = scored if group == "both" else {}
        (tmp_path / f"{group}.yaml").write_text(json.dumps({"group": group, "task": members, **more}))
    index = TaskManager(include_path=str(tmp_path), include_defaults=False)
    benchmarks.quieten()  # as the real task_manager does, so that this test also passes alone
    monkeypatch.setattr(benchmarks, "task_manager", lambda **_: index)
    return names


def test_a_named_group_is_shown_above_its_tasks(subject: Subject, tmp_path: Path, named: list[str]) -> None:
    done = evaluate(subject, tmp_path, "--tasks", "outer")
    lines = done.stdout.splitlines()
    assert (done.status, done.stderr) == (0, "")
    assert all(len(line) <= 80 for line in lines)
    shown = [line[:12].rstrip() for line in lines]
    assert shown == ["task", "outer", "  both", "    one", "", "    a_task_w", ""]
    both, one, other = (float(lines[row].split()[-4]) for row in (2, 3, 5))
    assert both == pytest.approx((one + other) / 2, abs=1e-4)
    assert [lines[row].split()[-1] for row in (2, 3, 5)] == ["8", "4", "4"]
    wild = evaluate(subject, tmp_path, "--tasks", "*o*").stdout.splitlines()
    assert [line[:5].strip() for line in wild if line[0] != " "] == ["task", *sorted(["one", "a_tas"])]
    assert benchmarks.load(["bo*"]).asked == ["both"], "a wildcard that matches no task, but a group"


def test_unknown_names_are_refused_with_the_nearest(named: list[str]) -> None:
    assert benchmarks.known_names("*o*") == sorted([*named, "both", "outer"])
    for name, hint in (("oen", "did you mean one?"), ("qqq", "--list")):
        with pytest.raises(UserError, match=f'"{name}": no task, group or tag of lm-eval.*{re.escape(hint)}'):
            benchmarks.load([name])


REFUSED = [
    ("unsafe", {"unsafe_code": True}, ["runs programs"]),
    ("hub metric", {"metric_list": [{"metric": "code_eval", "hf_evaluate": True}]}, ["metric", "are programs"]),
    ("unknown metric", {"metric_list": [{"metric": "wer"}]}, ["metric", "are programs"]),
    ("no data", {"dataset_kwargs": {"data_files": "gone.jsonl"}}, ["cannot be loaded", "gone.jsonl"]),
    ("data elsewhere", {"dataset_path": "nobody/nothing", "dataset_kwargs": {}}, ["nobody/nothing", "HF_HUB_OFFLINE"]),
    ("a script", {"dataset_path": "data", "dataset_kwargs": {}}, ["data.py", "leave out this task"]),
    ("a key that is none", {"doc_to_txt": "x"}, ["cannot be loaded", "doc_to_txt"]),
    ("a template that fails", {"doc_to_text": "{{nothing.here}}"}, ["cannot be loaded", "undefined"]),
    ("pictures", {"doc_to_image": "question"}, ["pictures"]),
    ("a group", {"group": "choice", "task": ["x"]}, ["file of a group"]),
]


@pytest.mark.parametrize(("changes", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_tasks_that_cannot_be_run_are_one_line(
    tmp_path: Path, changes: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "data.py").touch()
    path = write_task(tmp_path, "choice", **changes)
    message = refusal(benchmarks.load, [str(path)], begins="")
    assert len(message) < 400
    for word in ["choice", *words]:
        assert word in message


@pytest.mark.slow
def test_lm_evals_own_names_are_known() -> None:
    """Names of lm-eval's own tasks are found, also by a pattern, and a misspelt one gets a suggestion. The test is
    slow, because lm-eval's index of all its tasks takes seconds to build."""
    for name in ("arc_easy", "arc_challenge", "hellaswag", "mmlu", "piqa", "winogrande", "openbookqa"):
        assert benchmarks.known_names(name) == [name]
    assert "lambada_openai" in benchmarks.known_names("lambada*")
    with pytest.raises(UserError, match=r'"helaswag": no task, group or tag of lm-eval.*did you mean hellaswag'):
        benchmarks.load(["helaswag"])


def test_without_the_extra_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    call("evaluate_benchmarks", "--list", "*", folder=tmp_path).refuses("uv run --extra benchmarks")


def test_the_libraries_keep_their_retries_to_themselves(tmp_path: Path) -> None:
    """The libraries log no warnings, for example about their retries. The test needs its own process because libraries
    set their log levels when they are first imported."""
    (tmp_path / "script.py").write_text(
        "import logging\n"
        "from harness.evaluation.benchmarks.run import quieten\n"
        "quieten()\n"
        "import datasets, huggingface_hub.utils._http\n"
        "for name in ('huggingface_hub.utils._http', 'datasets.load', 'lm_eval.tasks'):\n"
        "    print(logging.getLogger(name).isEnabledFor(logging.WARNING))\n"
    )
    done = finish([Workshop(tmp_path).fork([str(tmp_path / "script.py")], {})], expect=0, timeout=120)
    assert done.stdout.split() == ["False"] * 3, done.stderr
