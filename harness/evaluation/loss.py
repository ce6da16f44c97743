"""How well a model predicts text: its mean loss over microbatches, which training's validation asks for, and over a
slice of held-out tokens, which is what test_loss.py and a model's card tell of a finished model, with bits per byte.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from harness.common.errors import UserError
from harness.data.dataset import Dataset, TokenFile, check_token_ids
from harness.data.fetch import ensure_dataset
from harness.data.loader import BatchLayout, Microbatch, TokenLoader
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tiktoken_files import load_encoding_offline
from harness.model.inference import evaluating
from harness.model.precision import Precision
from harness.runs.model_folder import dataset_of

# The lab notebook's test slice: FineWeb's validation split beyond what any of its runs validated on.
NOTEBOOK_DATASET = "gpjt/fineweb-gpt2-tokens"
NOTEBOOK_START_TOKEN = 50_000_000
NOTEBOOK_BATCHES = 3200


def microbatch_losses(model: nn.Module, microbatches: Iterable[Microbatch], precision: Precision) -> list[float]:
    """The loss of each microbatch, in order, with dropout off; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    with evaluating(model), precision.autocast():
        losses = [model(*microbatch.to(device)).double() for microbatch in microbatches]
    return torch.stack(losses).tolist() if losses else []


def mean(losses: Sequence[float]) -> float:
    """NaN if one of them is no finite number."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Cross-entropy in nats per token as bits per byte of text: comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token


@dataclass(frozen=True)
class TestLossOptions:
    """test_loss.py's options, by its names and with its defaults."""

    __test__ = False  # not a test for pytest

    dataset: str | None = None  # None: what the checkpoint was trained on
    split: str | None = None
    start_token: int | None = None
    batches: int | None = None
    batch_size: int = 6
    precision: str = "auto"


@dataclass(frozen=True)
class TestLoss:
    """What a measurement found, and on what."""

    __test__ = False  # not a test for pytest

    dataset: str
    split: str
    loss: float  # nats per token
    bits_per_byte: float | None
    is_exact: bool = True  # bits per byte: by the bytes of the very tokens predicted, not by the whole split's mean
    place: str = ""  # the slice, in words


def measure_test_loss(
    model: nn.Module, weights: Path, datasets_dir: Path, options: TestLossOptions = TestLossOptions()
) -> TestLoss:
    """The mean loss of `model`, whose weights are from the file `weights`, on a dataset in DATASETS_DIR, which is
    fetched if need be. Raises UserError if there is no such dataset or slice."""
    name = options.dataset or dataset_of(weights) or NOTEBOOK_DATASET
    ensure_dataset(datasets_dir, name, [options.split] if options.split else [])
    dataset = Dataset.open(datasets_dir, name)
    split = options.split or ("test" if dataset.has_split("test") else "validation")
    tokens = dataset.split(split)
    precision = Precision.resolve(options.precision, next(model.parameters()).device)
    config: Any = model.config
    check_token_ids(dataset, split, config.vocab_size)
    test_slice = TestSlice.choose(tokens, split, options, config.context_length)
    loss = mean(microbatch_losses(model, test_slice.microbatches(), precision))
    exact = test_slice.bytes_per_token(dataset.tokenizer)
    bytes_per_token = exact or dataset.bytes_per_token(split)
    bits = bits_per_byte(loss, bytes_per_token) if bytes_per_token else None
    return TestLoss(name, split, loss, bits, is_exact=exact is not None, place=f"{name}, {test_slice}")


@dataclass(frozen=True)
class TestSlice:
    """The part of a split that a finished model is tested on: so many of a loader's microbatches, from the first on."""

    __test__ = False  # a slice for tests, not a test for pytest

    split: str
    loader: TokenLoader
    batches: int

    @classmethod
    def choose(cls, tokens: TokenFile, split: str, options: TestLossOptions, context_length: int) -> TestSlice:
        """What the options ask for of a split. By default all of it, or the notebook's slice of a validation split that
        reaches so far; from a start token of its own there are as many batches, or fewer.

        Raises UserError if the split is too short for it.
        """
        is_from_notebook = split == "validation" and len(tokens) > NOTEBOOK_START_TOKEN
        start = NOTEBOOK_START_TOKEN if is_from_notebook else 0
        if options.start_token is not None:
            start = options.start_token
        layout = BatchLayout(1, 1, options.batch_size, context_length)
        there = (len(tokens) - start - 1) // layout.microbatch_tokens
        batches = options.batches
        if batches is None:
            batches = min(there, NOTEBOOK_BATCHES) if is_from_notebook else there
        if not 0 < batches <= there:
            least = max(batches, 1)
            wanted = start + least * layout.microbatch_tokens + 1
            raise UserError(
                f"{tokens.path}: too short: wanted {wanted:,} tokens ({_number_of_batches(least)} of "
                f"{options.batch_size} sequences of {context_length:,} tokens from {start:,}), but there are "
                f"{len(tokens):,}; see --start-token, --batches, --batch-size"
            )
        return cls(split, TokenLoader(tokens, start, layout), batches)

    def microbatches(self) -> Iterable[Microbatch]:
        """With a progress bar on a terminal."""
        # tqdm by itself shows nothing on a terminal that does not tell its size.
        columns, lines = shutil.get_terminal_size()
        indexes = range(self.batches)
        shown = tqdm(indexes, unit="batch", ncols=columns, nrows=lines, disable=not sys.stderr.isatty())
        return map(self.loader.microbatch, shown)

    def bytes_per_token(self, tokenizer_of_dataset: str | Path) -> float | None:
        """Mean UTF-8 bytes of text that a predicted token of the slice stands for, counted with the tokenizer.

        None if there is none for these tokens on this machine (GPT-2's vocabulary is not downloaded for it), or no
        text.
        """
        on_disk = isinstance(tokenizer_of_dataset, Path)
        tokenizer = load_tokenizer(tokenizer_of_dataset) if on_disk else load_encoding_offline("gpt2")
        if tokenizer is None:
            return None
        lengths, total = tokenizer.token_byte_lengths(), 0
        for index in range(self.batches):
            targets = self.loader.microbatch(index).tokens[1:]
            if int(targets.max()) >= len(lengths):  # some other tokenizer's, which meta.json does not name
                return None
            total += int(lengths[targets].sum())
        return total / (self.batches * self.loader.layout.microbatch_tokens) or None

    def __str__(self) -> str:
        """The split, and the tokens of it that the model predicts from."""
        layout, start = self.loader.layout, self.loader.start_token
        end = start + self.batches * layout.microbatch_tokens
        size = f"{_number_of_batches(self.batches)} of {layout.microbatch_size} x {layout.context_length:,}"
        return f"{self.split} split, tokens {start:,} to {end:,} of {len(self.loader.tokens):,} ({size})"


def _number_of_batches(count: int) -> str:
    return f"{count:,} batch{'es' if count > 1 else ''}"
