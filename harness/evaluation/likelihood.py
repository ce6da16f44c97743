"""Log-likelihoods that a model gives to continuations of contexts.

Shapes in names: B rows of T tokens, C = emb_dim, V = vocabulary size, N = positions whose next token is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from gpt import GPTModel
from harness.model.inference import evaluating
from harness.model.precision import Precision

Tokens = tuple[int, ...]
# A function that is called with (work, batches). It calls work(batch) for each batch, in this process or shared among
# several processes, and returns the results in the order of the batches.
EachBatch = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]

LOGITS_AT_ONCE = 2**26  # 256 MiB in fp32; all logits of a batch of long texts would take gigabytes


class Likelihood(NamedTuple):
    """Log-likelihood of a continuation."""

    total: float  # natural logarithm of the continuation's probability
    is_greedy: bool  # True if each of its tokens is the likeliest one at its position


class Window(NamedTuple):
    """Tokens that the model sees at once, and the tokens that it must predict at the last `len(targets)` positions."""

    inputs: Tokens
    targets: Tokens


def windows(context: Sequence[int], continuation: Sequence[int], context_length: int) -> Iterator[Window]:
    """Yield windows that together predict each token of `continuation` once. `context` must have at least one token.
    Context that does not fit is cut from the left. A continuation longer than the context length is split like
    lm-eval's rolling windows."""
    tokens = (*context, *continuation)
    for start in range(len(context), len(tokens), context_length):
        end = min(start + context_length, len(tokens))
        yield Window(tokens[max(0, end - 1 - context_length) : end - 1], tokens[start:end])


def one_by_one(work: Callable[[Any], Any], batches: Sequence[Any]) -> list[Any]:
    """Return the results of `work` for all batches, computed in this process, with a progress bar on a terminal."""
    return [work(batch) for batch in tqdm(batches, unit="batch", leave=False, disable=None)]


@dataclass(frozen=True)
class Scorer:
    """Scorer that computes log-likelihoods with a model."""

    model: GPTModel
    precision: Precision
    # Number of the tokenizer's tokens. Token ids from this number on, which a padded output head has, take part in the
    # softmax, but never count as the likeliest token.
    vocab_size: int
    batch_size: int  # rows
    each_batch: EachBatch = one_by_one

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
        """Return the likelihood of each pair (context, continuation) of token ids. Each context must have at least one
        token. Collective if `each_batch` is. The batches do not depend on the number of ranks."""
        own = [list(windows(*pair, self.model.config.context_length)) for pair in pairs]
        wanted: dict[Tokens, dict[Tokens, None]] = {}
        for window in (window for each in own for window in each):
            wanted.setdefault(window.inputs, {})[window.targets] = None
        # The longest inputs come first, so that a batch that does not fit in memory fails at once.
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
        """Return the likelihoods of all windows in `batch`, row by row. A row has windows with the same inputs."""
        device = next(self.model.parameters()).device
        lengths = [len(row[0].inputs) for row in batch]
        padded = [[*row[0].inputs, *[0] * (max(lengths) - len(row[0].inputs))] for row in batch]
        # Row, column and target of every position whose next token is scored, in the order of the windows.
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
        """Return each target's log-probability (fp64), and True for each target that is the likeliest token. Both have
        shape (N,) and are on the CPU."""
        values, greedy = [], []
        size = max(1, LOGITS_AT_ONCE // self.model.config.vocab_size)
        for some_NxC, wanted in zip(features_NxC.split(size), targets_N.split(size), strict=True):
            logprobs_NxV = torch.log_softmax(self.model.out_head(some_NxC).float(), dim=-1)
            values.append(logprobs_NxV.gather(1, wanted[:, None])[:, 0])
            greedy.append(logprobs_NxV[:, : self.vocab_size].argmax(dim=-1) == wanted)
        return torch.cat(values).double().cpu(), torch.cat(greedy).cpu()
