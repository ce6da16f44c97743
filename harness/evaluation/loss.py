"""The mean loss of a model over microbatches, and over a slice of held-out tokens."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    pass


def microbatch_losses(model: nn.Module, microbatches: Iterable[Microbatch], precision: Precision) -> list[float]:
    """The loss of each microbatch, in order, with dropout off; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    with evaluating(model), precision.autocast():
        losses = [model(*microbatch.to(device)).double() for microbatch in microbatches]
    return torch.stack(losses).tolist() if losses else []


def mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


# The lab notebook's test slice: FineWeb's validation split beyond what any of its runs validated on.
NOTEBOOK_DATASET = "gpjt/fineweb-gpt2-tokens"
NOTEBOOK_START_TOKEN = 50_000_000
NOTEBOOK_BATCHES = 3200
DEFAULTS = {"dataset": None, "split": None, "start_token": None, "batches": None, "batch_size": 6, "precision": "auto"}


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
    model: nn.Module, weights: Path, datasets_dir: Path, options: Mapping[str, Any] = DEFAULTS
) -> TestLoss:
    """The mean loss of `model`, whose weights are from the file `weights`, on a dataset in DATASETS_DIR, which is
    brought there if need be.

    `options` are test_loss.py's: dataset (None: what the checkpoint was trained on), split, start_token, batches,
    batch_size, precision. Raises UserError if there is no such dataset or slice.
    """
    name = str(options["dataset"] or dataset_of(weights) or NOTEBOOK_DATASET)
    ensure_dataset(datasets_dir, name, [str(options["split"])] if options["split"] else [])
    dataset = Dataset.open(datasets_dir, name)
    slice_ = TestSlice.choose(dataset, options)
    device = next(model.parameters()).device
    loss = slice_loss(model, dataset, slice_, Precision.resolve(str(options["precision"]), device))
    context_length: int = model.config.context_length  # type: ignore[assignment,union-attr]
    exact = slice_bytes_per_token(dataset, slice_, context_length)
    bytes_per_token = exact or dataset.bytes_per_token(slice_.split)
    bits = bits_per_byte(loss, bytes_per_token) if bytes_per_token else None
    place = f"{name}, {describe_slice(dataset, slice_, context_length)}"
    return TestLoss(name, slice_.split, loss, bits, is_exact=exact is not None, place=place)


@dataclass(frozen=True)
class TestSlice:
    """The part of a dataset that a finished model is tested on: `batches`, or as many as there are of `at_most`."""

    __test__ = False  # a slice for tests, not a test for pytest

    split: str
    start_token: int
    batches: int | None
    batch_size: int
    at_most: int | None = None  # None: of all

    @classmethod
    def choose(cls, dataset: Dataset, options: Mapping[str, Any]) -> TestSlice:
        """What `options` (split, start_token, batches, batch_size) ask for.

        By default all of the test split, where there is one; else the notebook's slice of validation, or all of a
        validation split that ends before that. From a start token of its own there are as many batches, or fewer.
        """
        split = options["split"] or ("test" if dataset.has_split("test") else "validation")
        start = NOTEBOOK_START_TOKEN if split == "validation" and _is_long(dataset.split(split)) else 0
        if options["start_token"] is not None:
            start = options["start_token"]
        most = NOTEBOOK_BATCHES if split == "validation" and _is_long(dataset.split(split)) else None
        return cls(split, start, options["batches"], options["batch_size"], most)


def _is_long(tokens: TokenFile) -> bool:
    """Whether the notebook's slice begins in this split."""
    return len(tokens) > NOTEBOOK_START_TOKEN


def describe_slice(dataset: Dataset, slice_: TestSlice, context_length: int) -> str:
    """The split, and the tokens of it that a model with this context predicts from."""
    loader, count = _reader(dataset, slice_, context_length)
    end = slice_.start_token + count * loader.shape.microbatch_tokens
    batches = f"{count:,} batch{'es' if count > 1 else ''} of {slice_.batch_size} x {context_length:,}"
    return f"{slice_.split} split, tokens {slice_.start_token:,} to {end:,} of {len(loader.tokens):,} ({batches})"


def slice_loss(model: nn.Module, dataset: Dataset, slice_: TestSlice, precision: Precision) -> float:
    """Mean loss of `model` over a slice, with a progress bar. Raises UserError if the split is too short for it."""
    config: Any = model.config
    check_token_ids(dataset, slice_.split, config.vocab_size)
    loader, count = _reader(dataset, slice_, config.context_length)
    # tqdm by itself shows nothing on a terminal that does not tell its size.
    columns, lines = shutil.get_terminal_size()
    indexes = tqdm(range(count), unit="batch", ncols=columns, nrows=lines, disable=not sys.stderr.isatty())
    return mean(microbatch_losses(model, map(loader.microbatch, indexes), precision))


def slice_bytes_per_token(dataset: Dataset, slice_: TestSlice, context_length: int) -> float | None:
    """Mean UTF-8 bytes of text that a predicted token of the slice stands for, counted with the tokenizer.

    None if there is none for these tokens on this machine (GPT-2's vocabulary is not downloaded for it), or no text.
    """
    loader, count = _reader(dataset, slice_, context_length)
    on_disk = isinstance(dataset.tokenizer, Path)
    tokenizer = load_tokenizer(dataset.tokenizer) if on_disk else load_encoding_offline("gpt2")
    if tokenizer is None:
        return None
    lengths, total = tokenizer.token_byte_lengths(), 0
    for index in range(count):
        targets = loader.microbatch(index).tokens[1:]
        if int(targets.max()) >= len(lengths):  # some other tokenizer's, which meta.json does not name
            return None
        total += int(lengths[targets].sum())
    return total / (count * loader.shape.microbatch_tokens) or None


def _reader(dataset: Dataset, slice_: TestSlice, context_length: int) -> tuple[TokenLoader, int]:
    """The slice's microbatches, and how many they are. Raises UserError if the split is too short for it."""
    tokens = dataset.split(slice_.split)
    shape = BatchLayout(1, 1, slice_.batch_size, context_length)
    there = (len(tokens) - slice_.start_token - 1) // shape.microbatch_tokens
    count = min(there, slice_.at_most or there) if slice_.batches is None else slice_.batches
    if not 0 < count <= there:
        least = max(count, 1)
        wanted = slice_.start_token + least * shape.microbatch_tokens + 1
        raise UserError(
            f"{tokens.path}: too short: wanted {wanted:,} tokens ({least:,} batch{'es' if least > 1 else ''} of "
            f"{slice_.batch_size} sequences of {context_length:,} tokens from {slice_.start_token:,}), but there are "
            f"{len(tokens):,}; see --start-token, --batches, --batch-size"
        )
    return TokenLoader(tokens, slice_.start_token, shape), count


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Cross-entropy in nats per token as bits per byte of text: comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token
