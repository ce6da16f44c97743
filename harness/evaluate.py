"""The mean loss of a model over microbatches, on one rank or shared out among all."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm import tqdm

from harness.errors import UserError
from harness.language_model import evaluating
from harness.precision import Precision
from harness.tokenizer import load_tokenizer
from harness.tokens import BatchShape, Dataset, MicrobatchReader, Window, check_vocabulary
from harness.watch import order

if TYPE_CHECKING:
    from harness.world import World


def microbatch_losses(model: nn.Module, windows: Iterable[Window], precision: Precision) -> list[float]:
    """The loss of each window, in order, with dropout off; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    with evaluating(model), precision.autocast():
        losses = [model(*window.on(device)).double() for window in windows]
    return torch.stack(losses).tolist() if losses else []


def validation_loss(
    model: nn.Module, reader: MicrobatchReader, count: int, precision: Precision, ranks: Ranks
) -> float | None:
    """Mean loss over the reader's first `count` microbatches, or None if a rank was asked to stop meanwhile.

    On rank 0 alone or shared out, all ranks return the same number: the losses are summed in the microbatches' order.
    """
    world = ranks.world
    mine = range(world.rank, count, world.size) if ranks.shared else range(count if world.is_main else 0)
    losses: list[float] | None = None
    with contextlib.suppress(StopAsked), ranks.at_work(mine):
        losses = microbatch_losses(model, map(reader.window, ranks.heeding(mine)), precision)
    gathered = world.gather(losses)
    shares = [share for share in gathered if share is not None]
    if len(shares) < world.size:
        return None
    if not ranks.shared:
        return mean(shares[0])
    return mean([shares[index % world.size][index // world.size] for index in range(count)])


class StopAsked(Exception):  # noqa: N818 - not an error
    """Ends an evaluation whose process was asked to stop."""


@dataclass(frozen=True)
class Ranks:
    """Who evaluates: rank 0 alone, or all, each every world-size-th microbatch; `stop` tells whether to leave off."""

    world: World
    shared: bool
    stop: Callable[[], bool]
    step: int  # the global step they are at

    def at_work(self, indexes: range) -> AbstractContextManager[object]:
        """The watch's attention, for a rank that has microbatches to evaluate and does not only wait."""
        place = order(self.step, "validation")
        if indexes:
            return self.world.watch.attended(f"the validation of global step {self.step}", place)
        self.world.watch.passed(place)
        return contextlib.nullcontext()

    def heeding(self, indexes: Iterable[int]) -> Iterator[int]:
        for index in indexes:
            if self.stop():
                raise StopAsked
            yield index
            self.world.watch.beat()


@dataclass(frozen=True)
class TestSlice:
    """The part of a dataset that a finished model is tested on; `batches` None: all there is."""

    __test__ = False  # a slice for tests, not a test for pytest

    split: str
    start_token: int
    batches: int | None
    batch_size: int

    @classmethod
    def choose(cls, dataset: Dataset, options: Mapping[str, Any], validation_default: tuple[int, int]) -> TestSlice:
        """What `options` (split, start_token, batches, batch_size) ask for.

        By default all of the test split, where there is one; else the slice of validation that starts at the first of
        `validation_default` and has as many batches as its second, or all of a validation split that ends before that.
        """
        split = options["split"] or ("test" if dataset.has_split("test") else "validation")
        start, batches = validation_default if split == "validation" else (0, None)
        if options["start_token"] is None and start >= len(dataset.split(split)):
            start, batches = 0, None
        if options["start_token"] is not None:
            start = options["start_token"]
        return cls(split, start, options["batches"] or batches, options["batch_size"])


def slice_loss(model: nn.Module, dataset: Dataset, slice_: TestSlice, precision: Precision) -> float:
    """Mean loss of `model` over a slice, with a progress bar. Raises UserError if the split is too short for it."""
    config: Any = model.config
    check_vocabulary(dataset, slice_.split, config.vocab_size)
    reader, count = _reader(dataset, slice_, config.context_length)
    indexes = tqdm(range(count), unit="batch", disable=not sys.stderr.isatty())
    return mean(microbatch_losses(model, map(reader.window, indexes), precision))


def slice_bytes_per_token(dataset: Dataset, slice_: TestSlice, context_length: int) -> float | None:
    """Mean UTF-8 bytes of text that a predicted token of the slice stands for; None where nothing tells it.

    Counted if the tokenizer is in the dataset's folder; for GPT-2's, which might have to be downloaded, the mean over
    the whole split, from meta.json.
    """
    if not isinstance(dataset.tokenizer, Path):
        return dataset.bytes_per_token(slice_.split)
    reader, count = _reader(dataset, slice_, context_length)
    lengths = load_tokenizer(dataset.tokenizer).token_byte_lengths()
    windows = (reader.window(index).tokens[1:] for index in range(count))
    return math.fsum(float(lengths[targets].sum()) for targets in windows) / (count * reader.shape.microbatch_tokens)


def _reader(dataset: Dataset, slice_: TestSlice, context_length: int) -> tuple[MicrobatchReader, int]:
    """The slice's microbatches, and how many they are. Raises UserError if the split is too short for it."""
    tokens = dataset.split(slice_.split)
    shape = BatchShape(1, 1, slice_.batch_size, context_length)
    there = (len(tokens) - slice_.start_token - 1) // shape.microbatch_tokens
    count = there if slice_.batches is None else slice_.batches
    if not 0 < count <= there:
        wanted = slice_.start_token + max(count, 1) * shape.microbatch_tokens + 1
        raise UserError(
            f"{tokens.path}: too short: wanted {wanted:,} tokens ({max(count, 1):,} batches of {slice_.batch_size} "
            f"from {slice_.start_token:,}), but there are {len(tokens):,}; see --start-token, --batches, --batch-size"
        )
    return MicrobatchReader(tokens, slice_.start_token, shape), count


def mean(losses: Sequence[float]) -> float:
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Cross-entropy in nats per token as bits per byte of text: comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token
