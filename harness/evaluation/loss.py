"""Losses of a model on text: of each microbatch, for validation during training, and of each sequence of a held-out
text, for test_loss.py and model cards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from gpt import GPTModel
from harness.common.device import device_name
from harness.common.errors import UserError, printable
from harness.common.files import sha256
from harness.common.json_files import finite
from harness.common.messages import abbreviated, counted, paragraph
from harness.common.statistics import Inconclusive
from harness.data.dataset import Dataset, TokenFile, check_token_ids
from harness.data.fetch import ensure_dataset
from harness.data.loader import BatchLayout, Microbatch, TokenLoader
from harness.data.ngrams import Overlap
from harness.data.order import WindowOrder
from harness.data.tokenizers import Tokenizer, load_gpt2_offline, load_tokenizer
from harness.evaluation.trained_on import GPT2_EOT_TOKEN, training_overlap
from harness.model.cross_entropy import token_cross_entropies
from harness.model.inference import evaluating
from harness.model.precision import Precision
from harness.runs.results import MEASURED_BATCH, LossResult, Text, now, write_loss
from harness.runs.trained_model import TrainedModel, model_in_run, warned_if_not_kept

# Test text of Giles Thomas's lab notebook, the project that this one grew from: the part of FineWeb's validation split
# that none of its runs validated on.
NOTEBOOK_DATASET = "gpjt/fineweb-gpt2-tokens"
NOTEBOOK_START_TOKEN = 50_000_000
NOTEBOOK_BATCHES = 3200
NAME_WIDTH = 32
BY_MEAN = (
    "from the mean bytes per token of the whole split, since the tokenizer's vocabulary is not on this machine, or "
    "lacks some of the tokens"
)


def microbatch_losses(model: GPTModel, microbatches: Iterable[Microbatch], precision: Precision) -> list[float]:
    """Return the loss of each microbatch: the mean cross-entropy, in nats per token, of its first `counted` windows
    (None: all), without dropout. The model's mode (training or evaluation) is restored afterwards."""
    device, losses = next(model.parameters()).device, []
    with evaluating(model), precision.autocast():
        for each in microbatches:
            if each.counted is None:
                losses.append(model(*each.to(device)).double())
            else:
                losses.append(_losses_of_windows(model, each)[: each.counted].mean())
    return torch.stack(losses).tolist() if losses else []


def window_losses(model: GPTModel, microbatches: Iterable[Microbatch], precision: Precision) -> np.ndarray:
    """Return the loss of each sequence (window) of one or more microbatches: the mean cross-entropy in nats per token,
    without dropout, as fp32 of shape [sequences]."""
    with evaluating(model), precision.autocast():
        losses = [_losses_of_windows(model, microbatch) for microbatch in microbatches]
    whole: np.ndarray = torch.cat(losses).float().cpu().numpy()
    return whole


def _losses_of_windows(model: GPTModel, microbatch: Microbatch) -> torch.Tensor:
    """Return the mean cross-entropy of each of B windows in nats per token: (B,) fp64."""
    tokens_BxT, targets_BxT = microbatch.to(next(model.parameters()).device)
    features_NxC = model.features(tokens_BxT).flatten(0, 1)
    head, targets_N = model.out_head, targets_BxT.flatten()
    losses_N = token_cross_entropies(features_NxC, head.weight, targets_N, softcap=head.softcap)
    return losses_N.view_as(targets_BxT).double().mean(dim=1)


def mean(losses: Sequence[float]) -> float:
    """Return the mean of one or more losses, or NaN if one of them is not finite."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert a cross-entropy from nats per token to bits per byte of text, which are comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token


@dataclass(frozen=True)
class TestLoss:
    """Loss of a model on held-out text."""

    __test__ = False  # not a test for pytest

    text: Text
    description: str  # `text` and `precision` in words
    precision: str
    loss: float  # nats per token
    bits_per_byte: float | None  # None: the number of bytes is not known
    is_exact: bool  # True: the predicted tokens' bytes were counted. False: they were estimated, or are not known
    trained_on: Overlap | Inconclusive  # how much of the split the model was trained on, or why this is not known


@dataclass(frozen=True)
class HeldOutText:
    """Held-out text for testing a model: the first `batches` microbatches that `loader` reads from a split of a
    dataset."""

    model: TrainedModel
    datasets_dir: Path
    dataset: Dataset
    split: str
    loader: TokenLoader
    batches: int

    @classmethod
    def choose(
        cls,
        model: TrainedModel,
        datasets_dir: Path,
        *,
        dataset: str | None = None,
        split: str | None = None,
        start_token: int | None = None,
        batches: int | None = None,
        batch_size: int = MEASURED_BATCH,
    ) -> HeldOutText:
        """Return the text for testing a model. A dataset that is missing in `datasets_dir` is downloaded or built.

        The text has whole batches of `batch_size` sequences. If `batches` is None, a split with fewer sequences gives
        one smaller batch. The defaults are:

        - `dataset`: NOTEBOOK_DATASET for a model with GPT-2's tokenizer. For other models, `dataset` must be given.
        - `split`: "test" if the dataset has it, else "validation".
        - `start_token`: NOTEBOOK_START_TOKEN in a validation split that has a batch from there on, else 0.
        - `batches`: all, but at most NOTEBOOK_BATCHES of a validation split with a batch from NOTEBOOK_START_TOKEN on.

        Raises UserError if the dataset or a tokenizer cannot be obtained or read, if the split is missing or too short,
        or if its tokens are known not to be the model's.
        """
        tokenizer, weights, length = model.tokenizer_file, model.weights, model.config.context_length
        if dataset is None and _is_gpt2s(tokenizer):
            dataset = NOTEBOOK_DATASET
        if dataset is None:
            raise UserError(
                f"{weights.parent}: the model's dataset is not known; in test_loss.py, give --dataset; in "
                "convert_hf.py publish, leave out --datasets-dir"
            )
        ensure_dataset(datasets_dir, dataset, [split] if split else [])
        opened = Dataset.open(datasets_dir, dataset)
        split = split or ("test" if opened.has_split("test") else "validation")
        tokens = opened.split(split)
        check_token_ids(opened, split, model.config.vocab_size)
        if "tokenizer" in model.meta and not _is_same_tokenizer(tokenizer, opened.tokenizer):
            raise UserError(
                f"{dataset}: not made with the tokenizer of {weights}, so its token ids stand for other tokens in this "
                "model; give a dataset made with the model's tokenizer"
            )
        if batches is None:  # a split with fewer sequences than a batch has one smaller batch
            there = max(0, len(tokens) - (start_token or 0) - 1) // length
            batch_size = min(batch_size, there) or 1
        layout = BatchLayout(1, 1, batch_size, length)
        is_from_notebook = split == "validation" and len(tokens) > NOTEBOOK_START_TOKEN + layout.microbatch_tokens
        start = (NOTEBOOK_START_TOKEN if is_from_notebook else 0) if start_token is None else start_token
        available = (len(tokens) - start - 1) // layout.microbatch_tokens
        if batches is None:
            batches = min(available, NOTEBOOK_BATCHES) if is_from_notebook else available
        if not 0 < batches <= available:
            least = max(batches, 1)
            wanted = start + least * layout.microbatch_tokens + 1
            raise UserError(
                f"{tokens.path}: too short: wanted {wanted:,} tokens ({_number_of_batches(least)} of "
                f"{counted(batch_size, 'sequence')} of {length:,} tokens from token {start:,}), but there are "
                f"{len(tokens):,}; in test_loss.py, lower --start-token, --batches or --batch-size, or give another "
                "--split or --dataset"
            )
        order = WindowOrder([len(tokens)], length, first_token=start)
        return cls(model, datasets_dir, opened, split, TokenLoader(tokens, order, layout), batches)

    def measure(self, model: GPTModel, precision_name: str) -> TestLoss:
        """Measure the loss of `model`, which must have the weights of `self.model`. The loss of a run's checkpoint is
        also written to the run's results.

        The first call may read the model's whole train splits. Raises UserError if the device does not support the
        precision, or if the split or its tokenizer cannot be read.
        """
        device, measured = next(model.parameters()).device, None
        with warned_if_not_kept():  # now, because training may delete the checkpoint meanwhile
            measured = model_in_run(self.model.weights, self.model.config)
        precision = Precision.resolve(precision_name, device)
        indexes = tqdm(range(self.batches), unit="batch", disable=None)
        losses = window_losses(model, map(self.loader.microbatch, indexes), precision)
        loss, counted = mean(losses.tolist()), self._counted_bytes_per_token()
        bytes_per_token = counted or self.dataset.bytes_per_token(self.split)
        bits = bits_per_byte(loss, bytes_per_token) if bytes_per_token else None
        tokenizer, tokens, layout = self.dataset.tokenizer, self.loader.tokens, self.loader.layout
        assert isinstance(tokens, TokenFile)
        start = self.loader.order.first_token
        end = start + self.batches * layout.microbatch_tokens
        size = f"{_number_of_batches(self.batches)} of {layout.microbatch_size} x {layout.context_length:,}"
        description = (
            f"{self.dataset.name}, {self.split} split, tokens {start:,} to {end:,} of {len(tokens):,} ({size}), "
            f"in {precision.name}"
        )
        text = Text(
            dataset=self.dataset.name,
            sha256=tokens.fingerprint(),
            tokenizer=sha256(tokenizer) if isinstance(tokenizer, Path) else tokenizer,
            split=self.split,
            start_token=start,
            windows=self.batches * layout.microbatch_size,
            context_length=layout.context_length,
        )
        trained_on = training_overlap(self.model, self.dataset, self.split, self.datasets_dir)
        if measured is not None:
            with warned_if_not_kept():
                result = LossResult(
                    weights=measured.weights,
                    date=now(),
                    device=device_name(device),
                    torch=torch.__version__,
                    text=text,
                    precision=precision.name,
                    loss=finite(loss),
                    bits_per_byte=finite(bits),
                    bits_are_exact=counted is not None,
                    trained_on=None if isinstance(trained_on, Inconclusive) else trained_on,
                )
                write_loss(measured.run, result, losses)
        return TestLoss(text, description, precision.name, loss, bits, counted is not None, trained_on)

    def _counted_bytes_per_token(self) -> float | None:
        """Return the mean number of UTF-8 bytes per predicted token, or None if it is 0 or cannot be counted."""
        tokenizer = _tokenizer_here(self.dataset.tokenizer)
        if tokenizer is None:
            return None
        lengths, total = tokenizer.token_byte_lengths(), 0
        for index in range(self.batches):
            targets = self.loader.microbatch(index).targets
            if int(targets.max()) >= len(lengths):  # not made with the tokenizer that the dataset records
                return None
            total += int(lengths[targets].sum())
        return total / (self.batches * self.loader.layout.microbatch_tokens) or None


def held_out_texts(
    model: TrainedModel, datasets_dir: Path, *, dataset: str | None = None, **options: Any
) -> list[HeldOutText]:
    """Return a HeldOutText for `dataset` or, if it is None, for each dataset that the model was trained on. If these
    are not known, the dataset is the default of `HeldOutText.choose`. The `options` and errors are those of `choose`.
    """
    names: list[str | None] = [dataset] if dataset is not None else [*model.datasets] or [None]
    return [HeldOutText.choose(model, datasets_dir, dataset=name, **options) for name in names]


def _is_same_tokenizer(first: str | Path, second: str | Path) -> bool:
    """Return True if both tokenizers ("gpt2", or a tokenizer's file) have the same tokens and end-of-text token. Also
    return True if one is GPT-2's and its vocabulary is not on this machine."""
    if first == second:
        return True
    one, other = _tokenizer_here(first), _tokenizer_here(second)
    return one is None or other is None or one.has_tokens_of(other)


def _is_gpt2s(tokenizer: str | Path) -> bool:
    """Return True if a tokenizer has GPT-2's tokens. If GPT-2's vocabulary is not on this machine, only the number of
    tokens and the end-of-text token are compared."""
    if not isinstance(tokenizer, Path):
        return tokenizer == "gpt2"
    loaded = load_tokenizer(tokenizer)
    is_as_large = (loaded.vocab_size, loaded.eot_token) == (GPT2_EOT_TOKEN + 1, GPT2_EOT_TOKEN)
    return is_as_large and _is_same_tokenizer(tokenizer, "gpt2")


def _tokenizer_here(name: str | Path) -> Tokenizer | None:
    """Return the tokenizer, or None if it is GPT-2's and its vocabulary is not on this machine."""
    return load_tokenizer(name) if isinstance(name, Path) else load_gpt2_offline()


def _number_of_batches(count: int) -> str:
    return f"{count:,} batch{'es' if count > 1 else ''}"


def loss_lines(measured: Sequence[tuple[TrainedModel, TestLoss]]) -> Iterator[str]:
    """Yield the lines of a report, of at most 80 columns. For several models, there is one table for each text and
    precision, with the lowest loss first."""
    if len({model.label for model, _ in measured}) == 1:
        for number, (_, test) in enumerate(measured):
            lines = [f"Loss on the {test.text.split} split: {test.loss:.3f}"]
            if test.bits_per_byte is not None:
                about = "" if test.is_exact else f" (approximate: {BY_MEAN})"
                lines.append(f"Bits per byte: {test.bits_per_byte:.3f}{about}")
            if number:
                yield ""
            for line in [*lines, f"Measured on {test.description}", _trained_on(test)]:
                yield from paragraph(line)
        return
    groups: dict[object, list[tuple[TrainedModel, TestLoss]]] = {}
    for model, test in measured:
        groups.setdefault((test.text.content, test.precision), []).append((model, test))
    for number, group in enumerate(groups.values()):
        if number:
            yield ""
        yield from _table(group)
    if len(groups) > 1:
        yield ""
        remark = (
            "Losses are comparable only within a table: the tables differ in the text, its tokenizer, the sequence "
            "length or the precision. Where only the tokenizer differs, compare the bits per byte. --dataset measures "
            "all models on one dataset."
        )
        yield from paragraph(remark, indent=0)


def _table(group: Sequence[tuple[TrainedModel, TestLoss]]) -> Iterator[str]:
    layout = f"{{:<{NAME_WIDTH}}} {{:>7}} {{:>10}} {{:>13}} {{:>14}}"
    yield layout.format("model", "loss", "bits/byte", "global batch", "parameters")
    for model, test in sorted(group, key=lambda each: (math.isnan(each[1].loss), each[1].loss)):
        label, bits = printable(model.label), test.bits_per_byte
        # Sequences per optimizer step in the training that produced these weights, or None if meta.json lacks it.
        parts: list[Any] = [model.meta.get(key) for key in ("world_size", "microbatch_size", "accumulation_steps")]
        batch = math.prod(parts) if all(type(part) is int and part > 0 for part in parts) else None
        if len(label) > NAME_WIDTH:  # the label is on lines of its own above the numbers
            yield from paragraph(label, indent=0)
        yield layout.format(
            label if len(label) <= NAME_WIDTH else "",
            f"{test.loss:.3f}",
            "-" if bits is None else f"{'' if test.is_exact else '~'}{bits:.3f}",
            "-" if batch is None else f"{batch:,}",
            f"{model.config.parameters:,}",
        )
    test = group[0][1]
    notes = [f"Measured on {test.description}"]
    labels: dict[str, list[str]] = {}
    for model, each in group:
        labels.setdefault(_trained_on(each), []).append(model.label)
    notes += [note if len(labels) == 1 else f"{abbreviated(names)}: {note}" for note, names in labels.items()]
    if any(test.bits_per_byte is not None and not test.is_exact for _, test in group):
        notes.append(f"~ {BY_MEAN}")
    for note in notes:
        yield from paragraph(note)


def _trained_on(test: TestLoss) -> str:
    found = test.trained_on
    how_much = f"not known, because {found.reason}" if isinstance(found, Inconclusive) else str(found)
    return f"Of this split, also in the training data: {how_much}"
