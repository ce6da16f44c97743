"""Benchmarks during training: the scores do not depend on the number of ranks, and the run is otherwise the same as
without benchmarks."""

from __future__ import annotations

import json
import random
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.numpy import save_file

from gpt import GPTModel, ModelConfig, load_model, load_model_config
from harness.common.errors import RunError, RunStopped
from harness.data.tokenizers import load_tokenizer, train_bpe
from harness.distributed.signals import SharedWork, StopRequest
from harness.distributed.watchdog import Place, Watchdog
from harness.distributed.world import World
from harness.evaluation.benchmarks.run import Benchmarks
from harness.evaluation.likelihood import Scorer
from harness.model.precision import Precision
from harness.runs.metrics import read_metrics
from harness.training import evaluations
from harness.training.evaluations import evaluate_batches
from tests.support.benchmark_files import sentence, write_task
from tests.support.in_process import InProcess
from tests.support.launch import meta_of, metrics, summary_of
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS

pytestmark = pytest.mark.slow

VOCAB_SIZE = 300
SHAPE: dict[str, Any] = {"vocab_size": VOCAB_SIZE + 4, "context_length": 24}
TASKS = ("choice", "last_word", "generate")
EXAMPLES = 5
FP32 = Precision("fp32", "cpu")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    """Workshop with a dataset that has its own tokenizer, and with three benchmark tasks."""
    folder = tmp_path_factory.mktemp("benchmarks")
    shop = InProcess(folder, {"HF_HOME": str(folder / "hf")})
    place = shop.datasets / "local" / "text"
    place.mkdir(parents=True)
    draw = random.Random(0)
    lines = [sentence(draw, 60) for _ in range(120)]
    train_bpe(iter(lines), VOCAB_SIZE, place / "tokenizer.json")
    tokenizer = load_tokenizer(place / "tokenizer.json")
    tokens = np.concatenate([tokenizer.encode_to_numpy(line) for line in lines]).astype(np.uint16)
    for split in ("train", "validation"):
        save_file({"tokens": tokens}, place / f"{split}.safetensors")
    meta = {"description": "text", "token_dtype": "uint16", "files": [], "tokenizer": "tokenizer.json"}
    (place / "meta.json").write_text(json.dumps(meta))
    for kind in TASKS:
        write_task(folder, kind, count=8)
    return shop


def add_run(shop: InProcess, name: str, **train: Any) -> Path:
    keys: dict[str, Any] = {"dataset": "local/text", "min_train_tokens": 1900, "validation_interval": 4}
    # In bf16 scores depend on which texts share a batch.
    return shop.add_run(name, model=SHAPE, **keys, learning_rate=0.01, precision="fp32", **train)


def with_benchmarks(shop: InProcess) -> dict[str, Any]:
    paths = [str(shop.path / f"{kind}.yaml") for kind in TASKS]
    return {"benchmark_interval": 4, "benchmark_tasks": paths, "benchmark_examples": EXAMPLES}


# Sends SIGTERM to rank 1 alone in the middle of a step's benchmarks, between two kinds of lm-eval requests.
SIGNAL = """
from tests.support.faults import *
told = in_turn(tell(SIGTERM), pause(0.1))
before("harness.training.evaluations:evaluate_batches", told, rank=1, step={step}, call=2)
"""


@pytest.fixture(scope="module")
def benchmarked(shop: InProcess, exhaustive: bool) -> Path:
    """Finished run that was stopped in the benchmarks after the last step, and with --exhaustive also in those after
    step 4."""
    run = add_run(shop, "benchmarked", **with_benchmarks(shop))
    for step, before in [(4, 1), (9, 3)] if exhaustive else [(9, 3)]:
        stopped = shop.train(run.name, prelude=SIGNAL.format(step=step), expect=128 + signal.SIGTERM)
        assert f"stopped by SIGTERM after global step {step}; to continue" in stopped.stderr
        assert len(metrics(run, "benchmark")) == 5 * before
        meta = meta_of(run)
        assert (meta["benchmarks_due"], meta["validation_due"], meta["planned"]) == (True, False, False)
    replace(shop, draws=True).train(run.name)
    return run


def test_scores_are_in_the_metrics_and_the_summary(shop: InProcess, benchmarked: Path) -> None:
    # Imported here, because every process that runs tests imports this file.
    from harness.runs.chart import benchmark_lines

    events = metrics(benchmarked)
    found = [event for event in events if event["event"] == "benchmark"]
    assert [event["global_step"] for event in found] == [step for step in (0, 4, 8, 9) for _ in range(5)]
    names = [("choice", "acc"), ("choice", "acc_norm"), ("last_word", "perplexity"), ("last_word", "acc")]
    assert [(event["task"], event["metric"]) for event in found[:5]] == [*names, ("generate", "exact_match")]
    for event in found:
        assert event["examples"] == EXAMPLES
        assert event["tokens_seen"] == (event["global_step"] + 1) * 192
        assert event.keys() == {"event", "global_step", "tokens_seen", "seconds", "task", "metric", "value", "stderr", "examples"}  # fmt: skip  # noqa: E501
    order = [event["event"] for event in events if event["global_step"] == 4]
    assert order == ["train", "validation", *["benchmark"] * 5, "checkpoint"]
    assert summary_of(benchmarked)["seconds"]["benchmarks"] > 0
    lines = benchmark_lines(read_metrics(benchmarked / "metrics.jsonl"))
    assert list(lines) == ["choice, acc_norm", "last_word, acc", "generate, exact_match"]
    assert [step for step, _ in lines["choice, acc_norm"]] == [0, 4, 8, 9]


def test_two_ranks_get_what_one_process_gets(
    shop: InProcess, benchmarked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of the last checkpoint, computed here in one process, equal those of two ranks to the bit."""
    import datasets

    from harness.evaluation.benchmarks import run as benchmarks

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(shop.path / "hf" / "datasets"))
    weights = benchmarked / "checkpoints" / "latest" / "model.safetensors"
    model = load_model(load_model_config(benchmarked / "model.json"), weights, torch.device("cpu"))
    tokenizer = load_tokenizer(shop.datasets / "local" / "text" / "tokenizer.json")
    loaded = benchmarks.load(with_benchmarks(shop)["benchmark_tasks"])
    results = benchmarks.run(loaded, Scorer(model, FP32, VOCAB_SIZE, 2), tokenizer, limit=EXAMPLES)
    here = [asdict(score) for name in loaded.asked for score in benchmarks.scores(results, name)]
    there = metrics(benchmarked, "benchmark")[-len(here) :]
    assert [{key: event[key] for key in here[0]} for event in there] == here


def test_a_run_with_benchmarks_ends_as_one_without(shop: InProcess, benchmarked: Path) -> None:
    """A run with benchmarks that was stopped in the middle of them ends as a run without benchmarks."""
    run = add_run(shop, "without")
    replace(shop, draws=True).train("without")
    assert "benchmarks" not in summary_of(run)["seconds"]
    charts = [PIL.Image.open(folder / "training-run-chart.png") for folder in (benchmarked, run)]
    assert charts[0].height > charts[1].height, "the chart has a panel for benchmarks"
    same = Path(shutil.copytree(benchmarked, shop.runs / "same", symlinks=True))
    others = [event for event in metrics(same) if event["event"] != "benchmark"]
    (same / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in others))
    assert_same_end(same, run)


def test_a_failure_while_training_is_a_warning(
    shop: InProcess, benchmarked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(shop.path / "hf" / "datasets"))
    run = add_run(shop, "failing", **with_benchmarks(shop) | {"benchmark_tasks": [str(shop.path / "choice.yaml")]})
    score, calls = Scorer._score_batch, list[Any]()

    def failing(self: Scorer, batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == 2:
            raise OSError("no space")
        return score(self, batch)

    monkeypatch.setattr(Scorer, "_score_batch", failing)
    done = shop.train_here("failing")
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings == ["warning: global step 0: benchmarks could not be evaluated: OSError: no space"]
    found = [event["global_step"] for event in metrics(run, "benchmark")]
    assert found[0] == 4
    assert found[-1] == metrics(run)[-1]["global_step"]


def test_what_is_wrong_is_told_before_the_first_step(shop: InProcess) -> None:
    run = add_run(shop, "wrong", benchmark_interval=4, benchmark_tasks=[str(shop.path / "gone.yaml")])
    done = shop.train_here("wrong", expect=2)
    assert done.error_lines == [f"error: {shop.path}/gone.yaml: no such task file"]
    assert not (run / "metrics.jsonl").exists()


# Shared work, on ranks that are threads


def on_ranks(size: int, work: Callable[[SharedWork], Any], stopping: Sequence[int] = ()) -> list[Any]:
    """Return what `work` returns or raises on each of `size` ranks; those in `stopping` are asked to stop."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=30)

    class ThreadWorld(World):
        def gather(self, value: Any) -> list[Any]:
            values[self.rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

    def play(rank: int) -> Any:
        world = ThreadWorld(rank, rank, size, size, torch.device("cpu"), Watchdog())
        stop = StopRequest()
        stop.signal = signal.SIGTERM if rank in stopping else 0
        try:
            return work(SharedWork(world, True, stop, Place(0, "benchmarks")))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(play, range(size)))


@cache
def small_model() -> GPTModel:
    torch.manual_seed(0)
    config = ModelConfig(**SHAPE, emb_dim=16, n_heads=2, n_layers=1, drop_rate=0.1, qkv_bias=False)
    return GPTModel(config).eval()  # never set to training mode, because several threads use the model at once


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_scores_shared_among_ranks_equal_those_of_one(size: int) -> None:
    """Each rank returns the scores of one process, even with more ranks (nine) than batches."""
    draw = random.Random(size)
    pairs = [(draw.choices(range(VOCAB_SIZE), k=draw.randint(1, 40)), [draw.randrange(300)] * 3) for _ in range(20)]
    scorer = Scorer(small_model(), FP32, VOCAB_SIZE, 3)
    expected = scorer.score(pairs)
    found = on_ranks(size, lambda shared: replace(scorer, each_batch=partial(evaluate_batches, shared)).score(pairs))
    assert found == [expected] * size


def test_a_rank_that_fails_or_stops_ends_it_for_all(shop: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(batch: int) -> int:
        if batch == 4:
            raise error
        return batch

    tokenizer = load_tokenizer(shop.datasets / "local" / "text" / "tokenizer.json")
    scorer = Scorer(small_model(), FP32, VOCAB_SIZE, 2)
    monkeypatch.setattr(evaluations, "run", lambda benchmarks, scorer, *_, **__: scorer.each_batch(work, range(6)))

    def failing(shared: SharedWork) -> Any:
        return evaluations.scores_over_ranks(Benchmarks({}, {}, []), scorer, tokenizer, limit=3, work=shared)

    error: Exception = RunError("a logit is not finite")
    assert list(map(repr, on_ranks(3, failing))) == ["EvaluationFailed('RunError: a logit is not finite')"] * 3
    error = ValueError("a faulty\nbatch")
    assert list(map(repr, on_ranks(3, failing))) == ["EvaluationFailed('ValueError: a faulty batch')"] * 3
    found = on_ranks(3, lambda shared: evaluate_batches(shared, lambda batch: batch, range(6)), stopping=[2])
    assert [type(each) for each in found] == [RunStopped] * 3


def test_a_failure_outside_the_batches_reaches_ranks_inside_them(shop: InProcess) -> None:
    """If lm-eval fails on one rank while the others evaluate, all ranks raise EvaluationFailed with its message."""
    import lm_eval.evaluator  # noqa: F401 - imported before the ranks start, since they wait only 30 s for one another

    class Broken:
        def set_fewshot_seed(self, seed: int) -> None:
            raise OSError("no space")

    tokenizer = load_tokenizer(shop.datasets / "local" / "text" / "tokenizer.json")
    scorer = Scorer(small_model(), FP32, VOCAB_SIZE, 2)

    def work(shared: SharedWork) -> Any:
        if shared.world.rank == 1:
            return evaluations.scores_over_ranks(
                Benchmarks({"x": Broken()}, {}, []), scorer, tokenizer, limit=3, work=shared
            )
        return evaluate_batches(shared, lambda batch: batch, range(4))

    assert list(map(repr, on_ranks(2, work))) == ["EvaluationFailed('OSError: no space')"] * 2


def test_a_compiled_model_is_not_compiled_for_every_length() -> None:
    model, calls = GPTModel(small_model().config), list[Any]()
    model._compiled_call_impl = calls.append  # nn.Module.compile stores the compiled function in this attribute
    pairs = [([1] * length, [2, 3]) for length in range(1, 9)]
    assert len(Scorer(model, FP32, VOCAB_SIZE, 1).score(pairs)) == 8
    assert not calls
    model(torch.tensor([[1, 2]]))
    assert calls, "a call of the module runs the compiled function, so this test would see one"


def test_a_run_that_was_ended_by_skipped_steps_trains_past_the_next_benchmarks(shop: InProcess) -> None:
    tasks = {"benchmark_interval": 4, "benchmark_tasks": [str(shop.path / "choice.yaml")], "benchmark_examples": 2}
    settings = {"dataset": "local/text", "min_train_tokens": 192 * 12, "validation_interval": 100, "report_interval": 3}
    shop.add_run("skips", model=SHAPE, max_skipped_steps=3, precision="fp32", **settings, **tasks)
    infected = FAULTS + "in_gradients(lambda gradient: gradient + torch.nan, rank=1, steps=range(1, 7))\n"
    shop.train("skips", prelude=infected, expect=4)
    shop.train("skips")
