"""Likelihoods of continuations of contexts by a model: many at a time, at any length.

Shapes: B rows of T tokens, C = emb_dim, V vocabulary, N places whose next token is asked for.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from gpt import GPTModel
from harness.model.inference import evaluating
from harness.model.precision import Precision

Tokens = tuple[int, ...]
# Calls a function with each batch, here or shared out among processes; the results are in the batches' order.
EachBatch = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

LOGITS_AT_ONCE = 2**26  # 256 MiB of fp32: a batch of long texts would need gigabytes


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest there."""

    total: float
    is_greedy: bool


class Window(NamedTuple):
    """The tokens that the model sees at once, and those that its last places predict."""

    inputs: Tokens
    targets: Tokens


def windows(context: Sequence[int], continuation: Sequence[int], context_length: int) -> Iterator[Window]:
    """The windows in which each token of `continuation` is predicted once; `context` has at least one token.

    It is one window, the context cut from the left to what still fits, unless the continuation is longer than the
    context length; then each window's last place sees `context_length` tokens, as lm-eval's rolling windows do.
    """
    tokens = (*context, *continuation)
    for start in range(len(context), len(tokens), context_length):
        end = min(start + context_length, len(tokens))
        yield Window(tokens[max(0, end - 1 - context_length) : end - 1], tokens[start:end])


def one_by_one(work: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
    """Do the work in this process, with a progress bar on a terminal."""
    return [work(batch) for batch in tqdm(batches, unit="batch", leave=False, disable=not sys.stderr.isatty())]


@dataclass(frozen=True)
class Scorer:
    """Log-likelihoods by one model. Ids from `vocab_size` on, the tokenizer's, belong to a padded head: they count as
    possible, but never as the likeliest."""

    model: GPTModel
    precision: Precision
    vocab_size: int
    batch_size: int
    each_batch: EachBatch = one_by_one

    def sharing(self, each_batch: EachBatch) -> Scorer:
        """This scorer with another way to go through its batches."""
        return replace(self, each_batch=each_batch)

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """The likelihood of each (context, continuation); of an empty continuation it is certain.

        Which windows make a batch is decided before batches are shared out, so that the numbers are the same to the
        last bit however many ranks compute them. Windows with equal inputs (choices of one token) are computed once.
        """
        own = [list(windows(*pair, self.model.config.context_length)) for pair in pairs]
        wanted: dict[Tokens, dict[Tokens, None]] = {}
        for window in (window for each in own for window in each):
            wanted.setdefault(window.inputs, {})[window.targets] = None
        # The longest first: what does not fit the memory fails at once.
        inputs = sorted(wanted, key=lambda tokens: (-len(tokens), tokens))
        questions = [[Window(each, targets) for targets in wanted[each]] for each in inputs]
        batches = [questions[at : at + self.batch_size] for at in range(0, len(questions), self.batch_size)]
        found: dict[Window, Likelihood] = {}
        for batch, scored in zip(batches, self.each_batch(self._score_batch, batches), strict=True):
            found |= zip((window for row in batch for window in row), scored, strict=True)
        answers = [[found[window] for window in each] for each in own]
        return [
            Likelihood(math.fsum(part.total for part in each), all(part.is_greedy for part in each)) for each in answers
        ]

    def _score_batch(self, batch: list[list[Window]]) -> list[Likelihood]:
        """The likelihoods of the windows; those of a row have the same inputs."""
        device = next(self.model.parameters()).device
        lengths = [len(row[0].inputs) for row in batch]
        padded = [[*row[0].inputs, *[0] * (max(lengths) - len(row[0].inputs))] for row in batch]
        # Row, column and next token of every place that is asked about, in the windows' order.
        places = [
            (number, len(window.inputs) - len(window.targets) + offset, target)
            for number, row in enumerate(batch)
            for window in row
            for offset, target in enumerate(window.targets)
        ]
        rows, columns, targets = zip(*places, strict=True)
        targets_N = torch.tensor(targets, device=device)
        with evaluating(self.model), self.precision.autocast():
            features_BxTxC = self.model.features(torch.tensor(padded, device=device))
            values_N, greedy_N = self._log_probabilities(features_BxTxC[list(rows), list(columns)], targets_N)
        sizes = [len(window.targets) for row in batch for window in row]
        parts = zip(values_N.split(sizes), greedy_N.split(sizes), strict=True)
        return [Likelihood(float(values.sum()), bool(greedy.all())) for values, greedy in parts]

    def _log_probabilities(self, features_NxC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's log-probability, fp64, and whether it is the likeliest; on the CPU."""
        values, greedy = [], []
        size = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for some_NxC, wanted in zip(features_NxC.split(size), targets_N.split(size), strict=True):
            logits_NxV = torch.log_softmax(self.model.out_head(some_NxC).float(), dim=-1)
            values.append(logits_NxV.gather(1, wanted[:, None])[:, 0])
            greedy.append(logits_NxV[:, : self.vocab_size].argmax(dim=-1) == wanted)
        return torch.cat(values).double().cpu(), torch.cat(greedy).cpu()
