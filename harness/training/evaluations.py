"""Evaluations during training, shared out among the ranks: validation loss and benchmarks."""

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
    """Text that the model has generated; or the reason why it could not, which does not end a run."""

    text: str
    failure: str = ""


class Evaluations:
    """Measurements of the model after a step. Every method is called on every rank, and returns the same there."""

    def __init__(self, prepared: PreparedRun, world: World, step: OptimizerStep, stop: StopSignal) -> None:
        """Collective. Raises UserError if train.json's benchmarks cannot be had."""
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
        """Mean loss over train.json's validation slice, on rank 0 alone or shared out.

        Raises RunStopped, on every rank, if any was asked to stop meanwhile: torchrun kills after 30 seconds.
        """
        count, start_token = self.config.validation_batches, self.config.start_val_token
        assert count is not None
        assert start_token is not None
        loader = TokenLoader(self.dataset.split("validation"), start_token, self.layout)
        work = SharedWork(self.world, self.config.validation_ranks == "all", self.stop, Place(step, "validation"))
        return mean(losses_over_ranks(self.model, loader, count, self.precision, work))

    def benchmark_scores(self, step: int) -> list[Score]:
        """The scores of train.json's benchmarks. If they cannot be had, that is a warning, and there are none.

        Raises RunStopped, on every rank, if any was asked to stop meanwhile.
        """
        assert self.run_benchmarks is not None, "loaded before the first step"
        try:
            return self.run_benchmarks.scores(SharedWork(self.world, True, self.stop, Place(step, "benchmarks")))
        except EvaluationFailed as error:
            if self.world.is_main:
                warnings.warn(f"global step {step}: no benchmarks: {error}", stacklevel=2)
            return []

    def sample(self) -> Sample:
        """Text with which the current model continues train.json's `sample_prompt`. Collective."""
        prompt = self.config.sample_prompt
        assert prompt is not None

        def sample() -> Sample:
            tokenizer, sampling = load_tokenizer(self.dataset.tokenizer), Sampling(seed=self.config.random_seed)
            try:
                return Sample(continue_text(self.model, tokenizer, prompt, SAMPLE_TOKENS, sampling))
            except RunError as error:  # whether the run goes on is for others to decide
                return Sample("", str(error))

        return self.world.on_rank0(sample)


def losses_over_ranks(
    model: nn.Module, loader: TokenLoader, count: int, precision: Precision, work: SharedWork
) -> list[float]:
    """The losses of the loader's first `count` microbatches, in their order, so that their sum is the same however they
    are shared out. The same on every rank. Raises RunStopped, on every rank, if any was asked to stop meanwhile."""
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


class EvaluationFailed(Exception):  # noqa: N818 - the run goes on
    """Benchmarks could not be evaluated, on any rank; raised on all of them."""


@dataclass(frozen=True)
class Failure:
    """A rank's reason for having no results, sent to the others in their place."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(text[:REASON_CHARACTERS])


class SharedBatches:
    """Scorer's `each_batch` for all ranks: each takes every world-size-th batch, and gets the results of all."""

    def __init__(self, work: SharedWork) -> None:
        self.shared = work

    def __call__(self, evaluate: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
        """Raises RunStopped or EvaluationFailed, on every rank, if a rank was asked to stop, or failed."""
        rank, size = self.shared.world.rank, self.shared.world.size
        mine = range(rank, len(batches), size)
        found: list[Any] | Failure | None = None
        try:
            with self.shared.guarded(mine):
                found = [evaluate(batches[index]) for index in self.shared.until_stopped(mine)]
        except Interrupted:
            pass
        except Exception as error:  # the others wait for what this rank has to say
            found = Failure.of(error)
        shares = self.exchange(found)
        return [shares[index % size][index // size] for index in range(len(batches))]

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value. A Failure among them ends the evaluation on all ranks, so that none waits for another
        in an exchange that does not come; None is of one that was interrupted."""
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
    examples: int  # of each task

    @classmethod
    def load(cls, world: World, config: TrainConfig, step: OptimizerStep, tokenizer: Tokenizer) -> RunBenchmarks:
        """Load train.json's `benchmark_tasks`; each node's first process brings the data. Collective.

        Raises UserError as evaluation/benchmarks/run.py does, and for a tokenizer with tokens that the model has not.
        """
        assert config.benchmark_tasks is not None
        model = step.bare_model
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f'train.json: key "benchmark_tasks": the tokenizer of {config.dataset} has {tokenizer.vocab_size:,} '
                f"tokens, and model.json {model.config.vocab_size:,}: their texts could not be read; remove the key"
            )
        scorer = Scorer(model, step.precision, tokenizer.vocab_size, config.microbatch_size)
        found: list[Benchmarks] = []
        tasks = config.benchmark_tasks
        prepare(tasks)
        world.on_each_node(lambda: found.append(load(tasks)))
        return cls(found[0] if found else load(tasks), scorer, tokenizer, config.benchmark_examples)

    def scores(self, work: SharedWork) -> list[Score]:
        """The scores of what train.json names, the same on every rank.

        Collective. Raises, on every rank, RunStopped if any was asked to stop meanwhile, and EvaluationFailed if the
        scores cannot be had.
        """
        sharing = SharedBatches(work)
        try:
            results = run(self.benchmarks, self.scorer.sharing(sharing), self.tokenizer, limit=self.examples)
        except (EvaluationFailed, RunError):  # known to all ranks, or another rank is gone
            raise
        except Exception as error:
            sharing.exchange(Failure.of(error))
            raise
        sharing.exchange("done")
        return list(_main_scores(results, self.benchmarks.asked))


def _main_scores(results: dict[str, Any], names: list[str]) -> Iterator[Score]:
    """The score of each group that has one of its own, else those of its tasks."""
    for name in names:
        own = scores(results, name)
        yield from own or _main_scores(results, results["group_subtasks"].get(name, []))
