"""Fine-tuning of a model on instructions, and its answers to other instructions.

Shapes: B rows (one instruction each), T tokens of the longest row, C = emb_dim, N = targets that are learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

import click
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from gpt import GPTModel
from harness.common.errors import RunError, UserError
from harness.common.json_files import finite
from harness.common.messages import counted, tell
from harness.data.tokenizers import Tokenizer
from harness.evaluation.generation import GREEDY, continue_prompts
from harness.evaluation.instruct.responses import Instruction, InstructionSplits, Response
from harness.model.cross_entropy import linear_cross_entropy
from harness.model.inference import evaluating
from harness.model.precision import Precision

IGNORED = -100  # a target that is left out of the loss; the same value as ignore_index of torch's cross-entropy
BATCH_SIZE, WEIGHT_DECAY = 8, 0.1  # as in Raschka's book (see responses.py)
ANSWERS_AT_ONCE = 16
# The default learning rate is this number divided by emb_dim: the book's 5e-5 at the width of GPT-2 small. Adam's best
# rate is inversely proportional to the width (Yang et al. 2022, arXiv:2203.03466, table 3), and at 5e-5 a narrow model
# would take hours to learn anything.
RATE_TIMES_WIDTH = 5e-5 * 768


@dataclass(frozen=True)
class Example:
    """Tokens of an instruction's prompt, its answer and an end-of-text token, cut to one token more than the context
    length."""

    tokens: list[int]
    answer_start: int  # index of the answer's first token; len(tokens) or more if the answer was cut off completely

    @property
    def has_answer(self) -> bool:
        return self.answer_start < len(self.tokens)


def encode(entry: Instruction, tokenizer: Tokenizer, context_length: int) -> Example:
    """Return the entry as tokens. Prompt and answer are encoded separately, so that the answer begins at a token
    boundary, as a generated answer does."""
    prompt = tokenizer.encode(entry.prompt)
    tokens = [*prompt, *tokenizer.encode(entry.output), tokenizer.eot_token]
    return Example(tokens[: context_length + 1], len(prompt))


class Batch(NamedTuple):
    """Inputs and targets, (B, T) int64 each, on the CPU. Targets that are padding, or are not to be learned, are
    IGNORED."""

    inputs: Tensor
    targets: Tensor


def batches(
    examples: Sequence[Example], size: int, padding: int, *, answers_only: bool, generator: torch.Generator | None
) -> Iterator[Batch]:
    """Yield batches of up to `size` examples, padded on the right with the token `padding`. `generator` shuffles the
    examples (None: no shuffling). With `answers_only`, targets in the prompts are IGNORED, and every example must have
    an answer."""
    count = len(examples)
    order = range(count) if generator is None else torch.randperm(count, generator=generator).tolist()
    for start in range(0, count, size):
        inputs, targets = [], []
        for index in order[start : start + size]:
            row = torch.tensor(examples[index].tokens)
            learnt = row[1:].clone()
            if answers_only:
                learnt[: examples[index].answer_start - 1] = IGNORED  # the prompt's last token predicts the answer
            inputs.append(row[:-1])
            targets.append(learnt)
        yield Batch(pad_sequence(inputs, True, padding), pad_sequence(targets, True, IGNORED))


@dataclass(frozen=True)
class FineTuneSettings:
    """Settings of a fine-tuning. With `answers_only`, the tokens of the prompts do not count in the loss."""

    learning_rate: float
    max_epochs: int = 100
    seed: int = 123
    answers_only: bool = False


@dataclass
class FineTuning:
    """Result of a fine-tuning. Losses are in nats per token, or None if not finite. Epoch 0 is the model before
    fine-tuning."""

    validation_losses: list[float | None]  # after each epoch, from epoch 0 on
    train_losses: list[float | None] = field(default_factory=list)  # mean of the batches' losses, from epoch 1 on
    kept_epoch: int = 0  # the epoch whose weights the model has at the end
    rose: bool = False  # True if training stopped because the validation loss rose or was not finite


def fine_tune(
    model: GPTModel, tokenizer: Tokenizer, splits: InstructionSplits, settings: FineTuneSettings
) -> FineTuning:
    """Train the model for up to `max_epochs` epochs, and print the losses.

    Training stops after an epoch in which the validation loss rose or was not finite. The model then gets back the
    weights from before that epoch. The settings' seed becomes torch's global seed.

    Entries whose prompts are longer than the context are left out. Raises UserError if none is left in the training or
    the validation part. Raises RunError if the loss is not finite before training.
    """
    context_length, padding = model.config.context_length, tokenizer.eot_token
    parts = [[encode(entry, tokenizer, context_length) for entry in part] for part in (splits.train, splits.validation)]
    train, validation = ([example for example in part if example.has_answer] for part in parts)
    if cut := sum(map(len, parts)) - len(train) - len(validation):
        click.echo(f"no room for an answer in {context_length:,} tokens: {counted(cut, 'instruction')} left out")
    if not train or not validation:
        raise UserError(
            "in the training or the validation part, no instruction leaves room for an answer in the model's context "
            "length; give a model with a longer context_length, or other --data"
        )
    device = next(model.parameters()).device
    precision = Precision.resolve("auto", device)
    torch.manual_seed(settings.seed)  # dropout
    shuffler = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(list(model.parameters()), lr=settings.learning_rate, weight_decay=WEIGHT_DECAY)
    only = settings.answers_only
    held_out = list(batches(validation, BATCH_SIZE, padding, answers_only=only, generator=None))
    before = mean_loss(model, held_out, precision)
    if not math.isfinite(before):
        raise RunError("the model's loss on instructions is not finite: its weights are broken; use another checkpoint")
    click.echo(f"before: validation loss {before:.3f}")
    result, reason = FineTuning([before]), f"--max-epochs {settings.max_epochs} reached"
    scaler = precision.scaler()
    kept = deepcopy(model.state_dict())
    for epoch in range(1, settings.max_epochs + 1):
        model.train()
        losses = []
        shuffled = list(batches(train, BATCH_SIZE, padding, answers_only=only, generator=shuffler))
        for batch in tqdm(shuffled, unit="batch", leave=False, disable=None):
            with precision.autocast():
                loss = batch_loss(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        train_loss, after = float(torch.stack(losses).double().mean()), mean_loss(model, held_out, precision)
        click.echo(f"epoch {epoch}: training loss {train_loss:.3f}, validation loss {after:.3f}")
        result.train_losses.append(finite(train_loss))
        result.validation_losses.append(finite(after))
        if not after <= before:
            result.rose = True
            reason = "the validation loss rose" if math.isfinite(after) else "the validation loss is not finite"
            model.load_state_dict(kept)
            break
        before, result.kept_epoch = after, epoch
        kept = deepcopy(model.state_dict())
    model.eval()
    click.echo(f"stopped: {reason}; kept: epoch {result.kept_epoch}")
    if not result.kept_epoch:
        tell("nothing was learned, and the weights are unchanged: try a lower --learning-rate")
    return result


def batch_loss(model: GPTModel, batch: Batch) -> Tensor:
    """Return the mean cross-entropy (nats) over the targets in a batch, except IGNORED ones. At least one target must
    not be IGNORED."""
    device = next(model.parameters()).device
    learnt_BxT = batch.targets != IGNORED
    features_NxC = model.features(batch.inputs.to(device))[learnt_BxT.to(device)]
    targets_N, head = batch.targets[learnt_BxT].to(device), model.out_head
    return linear_cross_entropy(features_NxC, head.weight, targets_N, softcap=head.softcap)


def mean_loss(model: GPTModel, held_out: Iterable[Batch], precision: Precision) -> float:
    """Return the mean cross-entropy (nats) over the batches' targets, except IGNORED ones, without dropout."""
    total, count = 0.0, 0
    with evaluating(model), precision.autocast():
        for batch in held_out:
            tokens = int((batch.targets != IGNORED).sum())
            total += float(batch_loss(model, batch)) * tokens
            count += tokens
    return total / count


def answer(model: GPTModel, tokenizer: Tokenizer, entries: Sequence[Instruction], longest: int) -> list[Response]:
    """Return an answer of at most `longest` tokens to each entry, without white space around it. Each token is the
    likeliest one. Raises RunError if a logit is not finite."""
    prompts = [tokenizer.encode(entry.prompt) for entry in entries]
    by_length = sorted(range(len(entries)), key=lambda index: len(prompts[index]))  # so that batches have less padding
    texts = [""] * len(entries)
    with tqdm(total=len(entries), unit="answer", leave=False, disable=None) as bar:
        for start in range(0, len(entries), ANSWERS_AT_ONCE):
            rows = by_length[start : start + ANSWERS_AT_ONCE]
            added = continue_prompts(model, tokenizer, [prompts[index] for index in rows], longest, GREEDY)
            for index, tokens in zip(rows, added, strict=True):
                texts[index] = tokenizer.decode(tokens).strip()
            bar.update(len(rows))
    return [Response(**entry.model_dump(), response=text) for entry, text in zip(entries, texts, strict=True)]
