"""Evaluations during training: validation loss and benchmarks, which the ranks can share, and samples of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.common.errors import PeerError, RunError, RunStopped, UserError
from harness.common.memory import is_out_of_memory
from harness.common.messages import REASON_CHARACTERS, tell
from harness.data.loader import TokenLoader
from harness.data.order import WindowOrder
from harness.data.tokenizers import Tokenizer, load_tokenizer
from harness.distributed.signals import SharedWork, StopRequest
from harness.distributed.watchdog import Place
from harness.distributed.world import World
from harness.evaluation.benchmarks.run import Benchmarks, Score, load, prepare, run, scores
from harness.evaluation.generation import Sampling, continue_text
from harness.evaluation.likelihood import Scorer
from harness.evaluation.loss import mean, microbatch_losses
from harness.training.startup import PreparedRun
from harness.training.step import OptimizerStep

SAMPLE_TOKENS = 50


class Evaluations:
    """Evaluates the model after a step. Every method is called on every rank and returns the same result on all
    ranks."""

    def __init__(self, prepared: PreparedRun, world: World, step: OptimizerStep, stop: StopRequest) -> None:
        """Open the validation splits and load the benchmarks, if train.json asks for them. Collective. Raises UserError
        if a benchmark or the tokenizer cannot be used."""
        self.world = world
        self.config = prepared.experiment.config
        self.tokenizer_file = prepared.data.tokenizer
        if self.config.validates:  # opened once, because the dataset's files may be replaced during training
            sequences, start = self.config.sequences_per_validation, self.config.start_val_token
            assert sequences is not None
            assert start is not None
            of_parts = prepared.experiment.validation_order(prepared.data).read(sequences)
            self.validation = {}  # data loader and number of sequences of each dataset, by its name
            for part, count in zip(prepared.data.parts, of_parts.tolist(), strict=True):
                split = part.split("validation")
                order = WindowOrder([len(split)], prepared.layout.context_length, first_token=start)
                self.validation[part.name] = TokenLoader(split, order, prepared.layout), count
        self.model = step.bare_model
        self.precision = step.precision
        self.stop = stop
        self.tokenizer: Tokenizer | None = None  # loaded when it is first needed
        if (tasks := self.config.benchmark_tasks) is None:
            return
        self.tokenizer, shape = load_tokenizer(self.tokenizer_file), self.model.config
        if self.tokenizer.vocab_size > shape.vocab_size:
            raise UserError(
                f'train.json: key "benchmark_tasks": the tokenizer of {self.config.data_name} has '
                f"{self.tokenizer.vocab_size:,} tokens, but vocab_size in model.json is {shape.vocab_size:,}: "
                "the model cannot read the texts; remove this key and benchmark_interval"
            )
        self.scorer = Scorer(self.model, self.precision, self.tokenizer.vocab_size, self.config.microbatch_size)
        found: list[Benchmarks] = []
        prepare(tasks)
        world.on_each_node(lambda: found.append(load(tasks)))  # the first process of each node downloads the data
        self.benchmarks = found[0] if found else load(tasks)

    def validation_loss(self, step: int) -> tuple[float, dict[str, float]]:
        """Return the mean loss (nats per token) over train.json's validation sequences after global step `step`, and a
        dict of the mean losses by dataset. For a single dataset, the dict is empty. Raises RunStopped on every rank if
        a reason to stop interrupts any rank."""
        losses = {
            name: self._loss(loader, count, Place(step, "validation"))
            for name, (loader, count) in self.validation.items()
            if count
        }
        if len(self.validation) == 1:
            return next(iter(losses.values())), {}
        counts = [self.validation[name][1] for name in losses]
        return float(np.average([*losses.values()], weights=counts)), losses

    def _loss(self, loader: TokenLoader, sequences: int, place: Place) -> float:
        """Return the mean loss over the first `sequences` windows of a loader."""
        # A request to stop interrupts the evaluation, because torchrun kills ranks 30 seconds after a signal.
        work = SharedWork(self.world, self.config.validation_ranks == "all", self.stop, place)
        size = self.config.microbatch_size

        def losses(indexes: Iterator[int]) -> list[float]:
            # The last microbatch may have fewer sequences. Copies fill it up; `microbatch_losses` does not count them.
            microbatches = (loader.microbatch(index, windows=sequences) for index in indexes)
            return microbatch_losses(self.model, microbatches, self.precision)

        means = work.share(math.ceil(sequences / size), losses)
        if rest := sequences % size:
            return (mean(means[:-1] or [0.0]) * (sequences - rest) + means[-1] * rest) / sequences
        return mean(means)

    def benchmark_scores(self, step: int) -> list[Score]:
        """Return the scores of train.json's benchmarks after global step `step`. If they cannot be computed, warn and
        return an empty list. Raises RunStopped on every rank if a reason to stop interrupts any rank."""
        work = SharedWork(self.world, True, self.stop, Place(step, "benchmarks"))
        assert self.tokenizer is not None
        try:
            return scores_over_ranks(
                self.benchmarks, self.scorer, self.tokenizer, limit=self.config.benchmark_examples, work=work
            )
        except EvaluationFailed as error:
            if self.world.is_main:
                tell(f"warning: global step {step}: benchmarks could not be evaluated: {error}")
            return []

    def sample(self) -> str | UserError | RunError:
        """Return train.json's `sample_prompt`, continued by the current model with up to SAMPLE_TOKENS tokens, or the
        error that prevented it."""
        prompt = self.config.sample_prompt
        assert prompt is not None

        def sample() -> str | UserError | RunError:
            try:
                if self.tokenizer is None:
                    self.tokenizer = load_tokenizer(self.tokenizer_file)
                sampling = Sampling(seed=self.config.random_seed)
                return continue_text(self.model, self.tokenizer, prompt, SAMPLE_TOKENS, sampling)
            except (UserError, RunError) as error:  # a failed sample must not end the run
                return error
            except (RuntimeError, MemoryError) as error:  # a long prompt can take more memory than training
                if not is_out_of_memory(error):
                    raise
                return RunError(" ".join(f"out of memory: {error}".split())[:REASON_CHARACTERS])

        return self.world.on_rank0(sample)


class EvaluationFailed(Exception):  # noqa: N818 - the run continues
    """Error that every rank raises if one rank could not evaluate the benchmarks."""


def evaluate_batches(work: SharedWork, evaluate: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
    """Return `evaluate(batch)` for each of a benchmark's batches, in order, on every rank. The ranks share the work.
    Collective. Raises RunStopped if a reason to stop interrupts any rank, EvaluationFailed if another rank fails."""
    return work.share(len(batches), lambda indexes: [evaluate(batches[index]) for index in indexes])


def scores_over_ranks(
    benchmarks: Benchmarks, scorer: Scorer, tokenizer: Tokenizer, *, limit: int, work: SharedWork
) -> list[Score]:
    """Return the scores of benchmarks on the first `limit` examples of each task, on every rank. Collective. Raises, on
    every rank, RunStopped if a reason to stop interrupts any rank, and EvaluationFailed if an evaluation fails."""
    try:
        results = run(benchmarks, replace(scorer, each_batch=partial(evaluate_batches, work)), tokenizer, limit=limit)
    except (EvaluationFailed, RunStopped, PeerError):  # these reach every rank without another call
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:REASON_CHARACTERS]
        # The other ranks may be in another call of `gather_results`. All raise this error.
        work.gather_results(EvaluationFailed(reason))
        raise
    work.gather_results("done")
    return list(_main_scores(results, benchmarks.asked))


def _main_scores(results: dict[str, Any], names: list[str]) -> Iterator[Score]:
    """Yield the scores of each named task or group. For a group without scores of its own, yield the scores of its
    members."""
    for name in names:
        own = scores(results, name)
        yield from own or _main_scores(results, results["group_subtasks"].get(name, []))
