"""Loss of a model on text: its mean over microbatches, which training's validation asks for, and over each sequence of
them, which shows differences between finished models; held_out.py chooses the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from harness.data.loader import Microbatch
from harness.model.cross_entropy import token_cross_entropies
from harness.model.inference import LanguageModel, evaluating
from harness.model.precision import Precision


def microbatch_losses(model: nn.Module, microbatches: Iterable[Microbatch], precision: Precision) -> list[float]:
    """The loss of each microbatch, in order, with dropout off; the model's mode is put back afterwards."""
    device = next(model.parameters()).device
    with evaluating(model), precision.autocast():
        losses = [model(*microbatch.to(device)).double() for microbatch in microbatches]
    return torch.stack(losses).tolist() if losses else []


def window_losses(model: LanguageModel, microbatches: Iterable[Microbatch], precision: Precision) -> np.ndarray:
    """The mean loss of each sequence, in order: fp32 of shape [sequences], nats per token. Otherwise as
    `microbatch_losses`, whose numbers are the means of these."""
    device, losses = next(model.parameters()).device, []
    with evaluating(model), precision.autocast():
        for microbatch in microbatches:
            tokens_BxT, targets_BxT = microbatch.to(device)
            features_NxC = model.features(tokens_BxT).flatten(0, 1)
            head, targets_N = model.out_head, targets_BxT.flatten()
            losses_N = token_cross_entropies(features_NxC, head.weight, targets_N, softcap=head.softcap)
            losses.append(losses_N.view_as(targets_BxT).double().mean(dim=1))
    whole: np.ndarray = torch.cat(losses).float().cpu().numpy() if losses else np.empty(0, np.float32)
    return whole


def mean(losses: Sequence[float]) -> float:
    """The mean of the losses; NaN if one of them is no finite number."""
    return math.fsum(losses) / len(losses) if all(map(math.isfinite, losses)) else math.nan


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Cross-entropy in nats per token as bits per byte of text: comparable between tokenizers."""
    return loss / math.log(2) / bytes_per_token
