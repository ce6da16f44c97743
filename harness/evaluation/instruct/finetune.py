"""Instruction fine-tuning until the validation loss first rises; what is kept is the model from before that."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm

from harness.common.errors import RunError, UserError
from harness.evaluation.instruct.batches import IGNORED, Batch, Example, batches
from harness.model.cross_entropy import linear_cross_entropy
from harness.model.inference import LanguageModel, evaluating
from harness.model.precision import Precision


def usual_learning_rate(emb_dim: int) -> float:
    """The book's 5e-5 for a model as wide as GPT-2 small; Adam's best rate falls with the width (Yang et al. 2022,
    arXiv:2203.03466, table 3), and a narrow model would otherwise take hours to get anywhere."""
    return 5e-5 * 768 / emb_dim


@dataclass(frozen=True)
class FineTuneSettings:
    """`answers_only`: only the answers' tokens are learnt. Batch size and weight decay are the book's."""

    learning_rate: float
    batch_size: int = 8
    weight_decay: float = 0.1
    max_epochs: int = 100
    seed: int = 123
    answers_only: bool = False


@dataclass
class FineTuning:
    """Course of a fine-tuning: losses by epoch, of which number 0 is the model as it came."""

    validation_losses: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    kept_epoch: int = 0
    rose: bool = False  # false: max_epochs came first

    @property
    def reason(self) -> str:
        """Why it stopped."""
        if not self.rose:
            return f"--max-epochs {self.kept_epoch} reached"
        return "the validation loss rose" if math.isfinite(self.validation_losses[-1]) else "the loss is not a number"


def fine_tune(
    model: LanguageModel,
    parts: tuple[Sequence[Example], Sequence[Example]],
    padding: int,
    settings: FineTuneSettings,
    say: Callable[[str], None],
) -> FineTuning:
    """Train on the first of `parts` until the loss on the second rises from one epoch to the next, or is not a number;
    the model then has the weights of the epoch before, and is in evaluation mode.

    Deterministic by the settings' seed. `say` takes a line after each epoch. Raises UserError if there is nothing to
    learn from, RunError if the model's loss is not finite to begin with.
    """
    train, validation = ([example for example in part if example.has_answer] for part in parts)
    if not train or not validation:
        raise UserError("no answer of the training or validation part fits the model's context length")
    device = next(model.parameters()).device
    precision = Precision.resolve("auto", device)
    torch.manual_seed(settings.seed)  # dropout
    shuffler = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(
        list(model.parameters()), lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    common = {"answers_only": settings.answers_only}
    held_out = list(batches(validation, settings.batch_size, padding, generator=None, **common))
    result = FineTuning([mean_loss(model, held_out, precision)])
    if not math.isfinite(result.validation_losses[0]):
        raise RunError("the model's loss on instructions is not finite: its weights are broken")
    say(f"before: validation loss {result.validation_losses[0]:.3f}")
    scaler = precision.scaler()
    kept = _copy(model)
    for epoch in range(1, settings.max_epochs + 1):
        shuffled = list(batches(train, settings.batch_size, padding, generator=shuffler, **common))
        result.train_losses.append(_train_epoch(model, shuffled, (optimizer, scaler), precision))
        result.validation_losses.append(mean_loss(model, held_out, precision))
        before, after = result.validation_losses[-2:]
        say(f"epoch {epoch}: training loss {result.train_losses[-1]:.3f}, validation loss {after:.3f}")
        if not after <= before:
            result.rose = True
            _restore(model, kept)
            break
        result.kept_epoch, kept = epoch, _copy(model)
    model.eval()
    return result


def batch_loss(model: LanguageModel, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch's learnt tokens, of which there are some."""
    inputs_BxT, learnt_BxT, targets_N = batch.learnt(next(model.parameters()).device)
    features_NxC, head = model.features(inputs_BxT)[learnt_BxT], model.out_head
    return linear_cross_entropy(features_NxC, head.weight, targets_N, softcap=head.softcap)


def mean_loss(model: LanguageModel, held_out: Iterable[Batch], precision: Precision) -> float:
    """Mean cross-entropy over all learnt tokens of the batches, however they are batched."""
    total, count = 0.0, 0
    with evaluating(model), precision.autocast():
        for batch in held_out:
            tokens = int((batch.targets != IGNORED).sum())
            total += float(batch_loss(model, batch)) * tokens
            count += tokens
    return total / count


def _train_epoch(
    model: LanguageModel,
    shuffled: Sequence[Batch],
    tools: tuple[torch.optim.Optimizer, torch.amp.GradScaler],
    precision: Precision,
) -> float:
    """One pass; the mean of the batches' losses."""
    optimizer, scaler = tools
    model.train()
    losses = []
    for batch in tqdm(shuffled, unit="batch", leave=False, disable=not sys.stderr.isatty()):
        with precision.autocast():
            loss = batch_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return float(torch.stack(losses).double().mean())


def _copy(model: LanguageModel) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def _restore(model: LanguageModel, weights: list[Tensor]) -> None:
    for parameter, saved in zip(model.parameters(), weights, strict=True):
        parameter.copy_(saved)
