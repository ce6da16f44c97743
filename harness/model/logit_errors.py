"""The elementwise part of the loss: from a chunk of logits to each row's loss and the gradient with respect to them.

Both formulations write the gradient over the logits, so that a chunk needs no second copy of them. With p the softmax
of a row's logits and y its one-hot target, the loss is log(sum(exp(logits))) - logits[target], and its gradient p - y.

Two options change that, both off unless a `Terms` says so. A soft-cap c makes the logits c·tanh(products / c) before
anything else; a gradient with respect to the products is then one with respect to them times 1 - tanh². The z-loss
(PaLM, arXiv:2204.02311, section 5) adds z·n², where n = log(sum(exp(logits))) is the row's normaliser; its gradient is
2·z·n·p, so that the whole one is (1 + 2·z·n)·p - y.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Logits worked on at once where each operation is a kernel of its own: on a CPU by each thread, what stays in the
# caches; on a GPU enough to keep it busy.
SLICE_LOGITS = {"cpu": 2**20, "cuda": 2**25}


class Terms(NamedTuple):
    """What there is besides the plain cross-entropy: `softcap` c, and the z-loss' coefficient; 0 for neither."""

    softcap: float = 0.0
    z_loss: float = 0.0


PLAIN = Terms()
Kernel = Callable[[Tensor, Tensor, Tensor, int, bool, Terms], None]


def chunk_kernel(rows: int, *, compiled: bool) -> Kernel:
    """The function(logits_RxW, targets_R, losses, vocab, wants_errors, terms) for chunks of `rows` rows.

    It writes each row's loss, in the precision of `losses`, and, if `wants_errors`, the gradient over the logits;
    otherwise it may leave anything in them. Columns from `vocab` on count as absent. With a z-loss `losses` is Rx2: the
    cross-entropy, and the z-loss beside it; without it has one dimension.
    """
    # A compiler takes a size of 1 for a constant: one row would need a program of its own.
    return _compiled_kernel if compiled and rows > 1 else eager_kernel


def eager_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses: Tensor, vocab: int, wants_errors: bool, terms: Terms = PLAIN
) -> None:
    """The kernel as separate operations, over a few rows at a time."""
    slice_logits = SLICE_LOGITS.get(logits_RxW.device.type, SLICE_LOGITS["cpu"])
    if logits_RxW.device.type == "cpu":
        slice_logits *= torch.get_num_threads()  # threads wait for one another after each operation on a slice
    at_once = max(1, slice_logits // logits_RxW.shape[1])
    parts = (tensor.split(at_once) for tensor in (logits_RxW, targets_R[:, None], losses.view(len(losses), -1)))
    for logits, wanted, written in zip(*parts, strict=True):
        work = logits[:, :vocab].to(losses.dtype)  # the logits themselves where they have that precision
        slope = _softcap(work, terms.softcap, wants_errors=wants_errors) if terms.softcap else None
        largest, chosen = work.amax(-1, keepdim=True), work.gather(1, wanted)
        total = work.sub_(largest).exp_().sum(-1, keepdim=True)
        normaliser = largest + total.log()
        torch.sub(normaliser, chosen, out=written[:, :1])
        if terms.z_loss:
            written[:, 1:] = terms.z_loss * normaliser.square()
        if wants_errors:
            _errors_of(work, total, normaliser, terms.z_loss)
            work.scatter_add_(1, wanted, -torch.ones_like(total))
            if slope is not None:
                work.mul_(slope)
            if work.data_ptr() != logits.data_ptr():
                logits[:, :vocab].copy_(work)
            logits[:, vocab:].zero_()


def _softcap(work: Tensor, cap: float, *, wants_errors: bool) -> Tensor | None:
    """Cap logits in place; the slope at each, if wanted."""
    work.div_(cap).tanh_()
    slope = 1 - work.square() if wants_errors else None
    work.mul_(cap)
    return slope


def _errors_of(exponentials: Tensor, total: Tensor, normaliser: Tensor, z_loss: float) -> None:
    """In place the gradient but for the targets' part: p, or (1 + 2·z·n)·p."""
    exponentials.div_(total)
    if z_loss:
        exponentials.mul_(1 + 2 * z_loss * normaliser)


def fused_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses: Tensor, vocab: int, wants_errors: bool, terms: Terms = PLAIN
) -> None:
    """The kernel as one reduction over whole rows, for a compiler: it becomes a single kernel that reads and writes the
    logits in their own precision.

    Columns are compared with the target instead of indexed by it: a gather or a scatter would be further kernels, and
    force the whole chunk to memory in fp32 between them.
    """
    cap, z_loss = terms
    columns_W = torch.arange(logits_RxW.shape[1], device=logits_RxW.device, dtype=torch.int32)
    products = logits_RxW.to(losses.dtype)
    capped = (products / cap).tanh() if cap else products
    logits = torch.where(columns_W < vocab, capped * cap if cap else capped, float("-inf"))
    is_target = columns_W == targets_R.unsqueeze(1).to(torch.int32)
    largest = logits.amax(-1, keepdim=True)
    normaliser = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
    cross_entropies_R = normaliser.squeeze(1) - torch.where(is_target, logits, 0.0).sum(-1)
    if z_loss:
        losses[:, 0].copy_(cross_entropies_R)
        losses[:, 1].copy_(z_loss * normaliser.squeeze(1).square())
    else:
        losses.copy_(cross_entropies_R)
    if wants_errors:
        shares = (logits - normaliser).exp()
        errors = (shares * (1 + 2 * z_loss * normaliser) if z_loss else shares) - is_target.to(logits.dtype)
        logits_RxW.copy_(errors * (1 - capped.square()) if cap else errors)


def _compiled_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses: Tensor, vocab: int, wants_errors: bool, terms: Terms
) -> None:
    for tensor in (logits_RxW, targets_R, losses):
        torch._dynamo.mark_dynamic(tensor, 0)
    # A program belongs to a state of autograd's dispatch, and callers differ in it: without this there would be two.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _compile()(logits_RxW, targets_R, losses, vocab, wants_errors, terms)


@cache
def _compile() -> Kernel:
    # Only rows vary, and they are marked so; that the width is a constant keeps accesses aligned and vectorised.
    return torch.compile(fused_kernel, dynamic=False, fullgraph=True)
