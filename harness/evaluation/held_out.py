"""The test loss of a finished model: which held-out text it is measured on, what comes of it, and the result that stays
in the run. test_loss.py and a model's card tell it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from harness.common.device import device_name
from harness.common.errors import UserError
from harness.common.files import sha256
from harness.common.json_files import finite
from harness.data.dataset import Dataset, TokenFile, check_token_ids
from harness.data.fetch import ensure_dataset
from harness.data.loader import BatchLayout, Microbatch, TokenLoader
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tiktoken_files import load_encoding_offline
from harness.evaluation.loss import bits_per_byte, mean, window_losses
from harness.model.config import ModelConfig
from harness.model.inference import LanguageModel
from harness.model.precision import Precision
from harness.runs.results import LossResult, Text, now, write_loss
from harness.runs.trained_model import dataset_of, model_in_run, warned_if_not_kept

# The lab notebook's test slice: FineWeb's validation split beyond what any of its runs validated on.
NOTEBOOK_DATASET = "gpjt/fineweb-gpt2-tokens"
NOTEBOOK_START_TOKEN = 50_000_000
NOTEBOOK_BATCHES = 3200


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
    """Result of a measurement, and the text that it was on."""

    __test__ = False  # not a test for pytest

    text: Text
    place: str  # the same in words
    precision: str
    device: str
    window_losses: np.ndarray = field(compare=False)  # fp32 of shape [windows]
    loss: float  # nats per token: the mean of those
    bits_per_byte: float | None
    is_exact: bool  # bits per byte: by the bytes of the very tokens predicted, not by the whole split's mean

    def keep(self, weights: Path) -> None:
        """Leave it in the run whose checkpoint the measured weights, in this file, are; if they are of none, nowhere.

        If it cannot be written, that is a warning: it has been told already.
        """
        with warned_if_not_kept():
            model = model_in_run(weights)
            if model is None:
                return
            bits = None if self.bits_per_byte is None else finite(self.bits_per_byte)
            result = LossResult(
                weights=model.weights,
                date=now(),
                device=self.device,
                torch=torch.__version__,
                text=self.text,
                precision=self.precision,
                loss=finite(self.loss),
                bits_per_byte=bits,
                bits_are_exact=self.is_exact,
            )
            write_loss(model.run, result, self.window_losses)


def measure_test_loss(
    model: LanguageModel, weights: Path, datasets_dir: Path, options: TestLossOptions = TestLossOptions()
) -> TestLoss:
    """The mean loss of `model`, whose weights are from the file `weights`, on a dataset in DATASETS_DIR, which is
    fetched if need be. Raises UserError if there is no such dataset or slice."""
    return HeldOutText.choose(model.config, weights, datasets_dir, options).measure(model, options.precision)


@dataclass(frozen=True)
class HeldOutText:
    """The text that a model is tested on: a slice of a dataset's split."""

    dataset: Dataset
    slice: TestSlice

    @classmethod
    def choose(cls, config: ModelConfig, weights: Path, datasets_dir: Path, options: TestLossOptions) -> HeldOutText:
        """The text that the options ask for, for a model of this shape whose weights are in this file; the dataset is
        fetched if need be. Raises UserError if there is no such dataset or slice, or if the model cannot read its
        tokens."""
        name = options.dataset or dataset_of(weights) or NOTEBOOK_DATASET
        ensure_dataset(datasets_dir, name, [options.split] if options.split else [])
        dataset = Dataset.open(datasets_dir, name)
        split = options.split or ("test" if dataset.has_split("test") else "validation")
        tokens = dataset.split(split)
        check_token_ids(dataset, split, config.vocab_size)
        return cls(dataset, TestSlice.choose(tokens, split, options, config.context_length))

    def measure(self, model: LanguageModel, precision_name: str) -> TestLoss:
        """The model's loss. Raises UserError for a precision that its device does not compute."""
        device = next(model.parameters()).device
        precision = Precision.resolve(precision_name, device)
        losses = window_losses(model, self.slice.microbatches(), precision)
        loss = mean(losses.tolist())
        exact = self.slice.bytes_per_token(self.dataset.tokenizer)
        bytes_per_token = exact or self.dataset.bytes_per_token(self.slice.split)
        return TestLoss(
            text=self.description(),
            place=str(self),
            precision=precision.name,
            device=device_name(device),
            window_losses=losses,
            loss=loss,
            bits_per_byte=bits_per_byte(loss, bytes_per_token) if bytes_per_token else None,
            is_exact=exact is not None,
        )

    def description(self) -> Text:
        """The text by its content, for a result."""
        tokenizer, loader = self.dataset.tokenizer, self.slice.loader
        return Text(
            dataset=self.dataset.name,
            sha256=loader.tokens.fingerprint(),
            tokenizer=sha256(tokenizer) if isinstance(tokenizer, Path) else tokenizer,
            split=self.slice.split,
            start_token=loader.start_token,
            windows=self.slice.batches * loader.layout.microbatch_size,
            context_length=loader.layout.context_length,
        )

    def __str__(self) -> str:
        return f"{self.dataset.name}, {self.slice}"


@dataclass(frozen=True)
class TestSlice:
    """The part of a split that a finished model is tested on: so many of a loader's microbatches, from the first on."""

    __test__ = False  # a slice for tests, not a test for pytest

    split: str
    loader: TokenLoader
    batches: int

    @classmethod
    def choose(cls, tokens: TokenFile, split: str, options: TestLossOptions, context_length: int) -> TestSlice:
        """The slice of a split that the options ask for. By default all of it, or the notebook's slice of a validation
        split that reaches so far; from a start token of its own there are as many batches, or fewer.

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
        """The slice's microbatches, with a progress bar on a terminal."""
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
