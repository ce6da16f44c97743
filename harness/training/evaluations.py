"""Evaluations during training: validation loss and benchmarks, divided among the ranks, and samples of text."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from harness.common.errors import RunError, UserError
from harness.data.loader import TokenLoader
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer
from harness.distributed.signals import Interrupted, SharedWork, StopSignal
from harness.distributed.watchdog import Place
from harness.distributed.world import World
from harness.evaluation.benchmarks.run import REASON_CHARACTERS, Benchmarks, Score, load, prepare, run, scores
from harness.evaluation.generation import Sampling, continue_text
from harness.evaluation.likelihood import Scorer
from harness.evaluation.loss import mean, microbatch_losses
from harness.model.precision import Precision
from harness.runs.train_config import TrainConfig
from harness.training.startup import PreparedRun
from harness.training.step import OptimizerStep

SAMPLE_TOKENS = 50


@dataclass(frozen=True)
class Sample:
    """Text that the model has generated, or in `failure` the reason why it could not. A failure does not end the
    run."""

    text: str
    failure: str = ""


class Evaluations:
    """Measurements of the model after a step. Every method is called on every rank and returns the same result on all
    ranks."""

    def __init__(self, prepared: PreparedRun, world: World, step: OptimizerStep, stop: StopSignal) -> None:
        """Load train.json's benchmarks, if it names any. Collective. Raises UserError if they cannot be loaded."""
        self.world = world
        self.config = prepared.experiment.config
        self.dataset = prepared.dataset
        self.layout = prepared.layout
        self.model = step.bare_model
        self.precision = step.precision
        self.stop = stop
        self.run_benchmarks: RunBenchmarks | None = None
        if self.config.benchmark_tasks is not None:
            self.run_benchmarks = RunBenchmarks.load(world, self.config, step, load_tokenizer(self.dataset.tokenizer))

    def validation_loss(self, step: int) -> float:
        """Return the mean loss over train.json's validation slice, computed by rank 0 alone or by all ranks
        (`validation_ranks`).

        Raises RunStopped on every rank if any rank was asked to stop meanwhile, because torchrun kills ranks 30 seconds
        after a signal.
        """
        count, start_token = self.config.validation_batches, self.config.start_val_token
        assert count is not None
        assert start_token is not None
        loader = TokenLoader(self.dataset.split("validation"), start_token, self.layout)
        work = SharedWork(self.world, self.config.validation_ranks == "all", self.stop, Place(step, "validation"))
        return mean(losses_over_ranks(self.model, loader, count, self.precision, work))

    def benchmark_scores(self, step: int) -> list[Score]:
        """Return the scores of train.json's benchmarks. If they cannot be computed, warn and return an empty list.

        Raises RunStopped on every rank if any rank was asked to stop meanwhile.
        """
        assert self.run_benchmarks is not None, "loaded before the first step"
        try:
            return self.run_benchmarks.scores(SharedWork(self.world, True, self.stop, Place(step, "benchmarks")))
        except EvaluationFailed as error:
            if self.world.is_main:
                warnings.warn(f"global step {step}: no benchmarks: {error}", stacklevel=2)
            return []

    def sample(self) -> Sample:
        """Return text with which the current model continues train.json's `sample_prompt`. Collective."""
        prompt = self.config.sample_prompt
        assert prompt is not None

        def sample() -> Sample:
            try:
                tokenizer, sampling = load_tokenizer(self.dataset.tokenizer), Sampling(seed=self.config.random_seed)
                return Sample(continue_text(self.model, tokenizer, prompt, SAMPLE_TOKENS, sampling))
            except (UserError, RunError) as error:  # a failed sample must not end the run
                return Sample("", str(error))

        return self.world.on_rank0(sample)


def losses_over_ranks(
    model: nn.Module, loader: TokenLoader, count: int, precision: Precision, work: SharedWork
) -> list[float]:
    """Return the losses of the loader's first `count` microbatches, the same list on every rank. The list has the
    loader's order, so that its sum does not depend on how the ranks divided the work. Raises RunStopped on every rank
    if any rank was asked to stop meanwhile."""
    world = work.world
    mine = range(world.rank, count, world.size) if work.shared else range(count if world.is_main else 0)
    losses: list[float] | None = None
    with contextlib.suppress(Interrupted), work.guarded(mine):
        losses = microbatch_losses(model, map(loader.microbatch, work.until_stopped(mine)), precision)
    gathered = world.gather(losses)
    work.raise_if_interrupted(gathered)
    parts = [part for part in gathered if part is not None]
    if not work.shared:
        return parts[0]
    return [parts[index % world.size][index // world.size] for index in range(count)]


class EvaluationFailed(Exception):  # noqa: N818 - the run continues
    """Error that every rank raises if one of them could not evaluate the benchmarks."""


@dataclass(frozen=True)
class Failure:
    """Reason why a rank has no results. The rank sends it to the other ranks in place of the results."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(text[:REASON_CHARACTERS])


class SharedBatches:
    """`each_batch` of a Scorer for all ranks: each rank evaluates every world-size-th batch and receives the results of
    all."""

    def __init__(self, work: SharedWork) -> None:
        self.shared = work

    def __call__(self, evaluate: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """Return `evaluate(batch)` for each of `batches`, in order, on every rank. On every rank raises RunStopped if a
        rank was asked to stop, and EvaluationFailed if a rank failed."""
        rank, size = self.shared.world.rank, self.shared.world.size
        mine = range(rank, len(batches), size)
        found: list[Any] | Failure | None = None
        try:
            with self.shared.guarded(mine):
                found = [evaluate(batches[index]) for index in self.shared.until_stopped(mine)]
        except Interrupted:
            pass
        except Exception as error:  # sent to the other ranks, which wait for this rank's results
            found = Failure.of(error)
        shares = self.exchange(found)
        return [shares[index % size][index // size] for index in range(len(batches))]

    def exchange(self, value: Any) -> list[Any]:
        """Return every rank's value. Raises EvaluationFailed on every rank if one of the values is a Failure, so that
        no rank waits for another in a later exchange. Raises RunStopped if one is None, which an interrupted rank
        sends."""
        values = self.shared.world.gather(value)
        failures = [each for each in values if isinstance(each, Failure)]
        if failures:
            raise EvaluationFailed(failures[0].reason)
        self.shared.raise_if_interrupted(values)
        return values


@dataclass(frozen=True)
class RunBenchmarks:
    """The benchmarks of a run, loaded on this rank."""

    benchmarks: Benchmarks
    scorer: Scorer
    tokenizer: Tokenizer
    examples: int  # per task

    @classmethod
    def load(cls, world: World, config: TrainConfig, step: OptimizerStep, tokenizer: Tokenizer) -> RunBenchmarks:
        """Load train.json's `benchmark_tasks`; the first process of each node downloads the data. Collective.

        Raises UserError if evaluation/benchmarks/run.py does, or if the tokenizer has tokens that the model lacks.
        """
        assert config.benchmark_tasks is not None
        model = step.bare_model
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f'train.json: key "benchmark_tasks": the tokenizer of {config.dataset} has {tokenizer.vocab_size:,} '
                f"tokens, but model.json only {model.config.vocab_size:,}: the model cannot read the texts; "
                "remove the key"
            )
        scorer = Scorer(model, step.precision, tokenizer.vocab_size, config.microbatch_size)
        found: list[Benchmarks] = []
        tasks = config.benchmark_tasks
        prepare(tasks)
        world.on_each_node(lambda: found.append(load(tasks)))
        return cls(found[0] if found else load(tasks), scorer, tokenizer, config.benchmark_examples)

    def scores(self, work: SharedWork) -> list[Score]:
        """Return the scores of train.json's `benchmark_tasks`, the same on every rank.

        Collective. On every rank raises RunStopped if any rank was asked to stop meanwhile, and EvaluationFailed if the
        scores cannot be computed.
        """
        sharing = SharedBatches(work)
        try:
            results = run(self.benchmarks, self.scorer.sharing(sharing), self.tokenizer, limit=self.examples)
        except (EvaluationFailed, RunError):  # all ranks know this error already, or another rank is gone
            raise
        except Exception as error:
            sharing.exchange(Failure.of(error))
            raise
        sharing.exchange("done")
        return list(_main_scores(results, self.benchmarks.asked))


def _main_scores(results: dict[str, Any], names: list[str]) -> Iterator[Score]:
    """Yield the scores of each named task or group; for a group that has none of its own, yield those of its
    members."""
    for name in names:
        own = scores(results, name)
        yield from own or _main_scores(results, results["group_subtasks"].get(name, []))
