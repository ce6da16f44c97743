"""The elementwise part of the loss: from a chunk of logits to each row's loss and the gradient with respect to them.

Both formulations write the gradient over the logits, so that a chunk needs no second copy of them. With p the softmax
of a row's logits and y its one-hot target, the loss is log(sum(exp(logits))) - logits[target], and its gradient p - y.

A soft-cap c (0: none) makes the logits c·tanh(products / c) before anything else; the gradient with respect to the
products is then that with respect to the logits times 1 - tanh².
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Logits worked on at once where each operation is a kernel of its own: on a CPU by each thread, what stays in the
# caches; on a GPU enough to keep it busy.
SLICE_LOGITS = {"cpu": 2**20, "cuda": 2**25}


Kernel = Callable[[Tensor, Tensor, Tensor, int, bool, float], None]


def chunk_kernel(rows: int, *, compiled: bool) -> Kernel:
    """The function(logits_RxW, targets_R, losses_R, vocab, wants_errors, softcap) for chunks of `rows` rows.

    It writes each row's loss, in the precision of `losses_R`, and, if `wants_errors`, the gradient over the logits;
    otherwise it may leave anything in them. Columns from `vocab` on count as absent.
    """
    # A compiler takes a size of 1 for a constant: one row would need a program of its own.
    return _compiled_kernel if compiled and rows > 1 else eager_kernel


def eager_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float = 0.0
) -> None:
    """The kernel as separate operations, over a few rows at a time."""
    slice_logits = SLICE_LOGITS.get(logits_RxW.device.type, SLICE_LOGITS["cpu"])
    if logits_RxW.device.type == "cpu":
        slice_logits *= torch.get_num_threads()  # threads wait for one another after each operation on a slice
    at_once = max(1, slice_logits // logits_RxW.shape[1])
    parts = (tensor.split(at_once) for tensor in (logits_RxW, targets_R[:, None], losses_R[:, None]))
    for logits, wanted, written in zip(*parts, strict=True):
        work = logits[:, :vocab].to(losses_R.dtype)  # the logits themselves where they have that precision
        slope = _softcap(work, softcap, wants_errors=wants_errors) if softcap else None
        largest, chosen = work.amax(-1, keepdim=True), work.gather(1, wanted)
        total = work.sub_(largest).exp_().sum(-1, keepdim=True)
        torch.sub(largest + total.log(), chosen, out=written)
        if wants_errors:
            work.div_(total)
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


def fused_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float = 0.0
) -> None:
    """The kernel as one reduction over whole rows, for a compiler: it becomes a single kernel that reads and writes the
    logits in their own precision.

    Columns are compared with the target instead of indexed by it: a gather or a scatter would be further kernels, and
    force the whole chunk to memory in fp32 between them.
    """
    columns_W = torch.arange(logits_RxW.shape[1], device=logits_RxW.device, dtype=torch.int32)
    products = logits_RxW.to(losses_R.dtype)
    capped = (products / softcap).tanh() if softcap else products
    logits = torch.where(columns_W < vocab, capped * softcap if softcap else capped, float("-inf"))
    is_target = columns_W == targets_R.unsqueeze(1).to(torch.int32)
    largest = logits.amax(-1, keepdim=True)
    normaliser = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
    losses_R.copy_(normaliser.squeeze(1) - torch.where(is_target, logits, 0.0).sum(-1))
    if wants_errors:
        errors = (logits - normaliser).exp() - is_target.to(logits.dtype)
        logits_RxW.copy_(errors * (1 - capped.square()) if softcap else errors)


def _compiled_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float
) -> None:
    for tensor in (logits_RxW, targets_R, losses_R):
        torch._dynamo.mark_dynamic(tensor, 0)
    # A program belongs to a state of autograd's dispatch, and callers differ in it: without this there would be two.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _compile()(logits_RxW, targets_R, losses_R, vocab, wants_errors, softcap)


@cache
def _compile() -> Kernel:
    # Only rows vary, and they are marked so; that the width is a constant keeps accesses aligned and vectorised.
    return torch.compile(fused_kernel, dynamic=False, fullgraph=True)
