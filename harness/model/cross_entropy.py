"""Mean next-token cross-entropy and its gradients, with the logits of only one chunk of rows in memory (Wijmans et al.,
"Cut Your Losses in Large-Vocabulary Language Models", arXiv:2411.09009).

Tensor names end in the shape: N rows (tokens), R rows in a chunk, C features, V the size of the vocabulary, W = V plus
padding.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.common.files import sha256

# At GPT-2's vocabulary, the logits of a sequence of 1,024 tokens are 206 MB in fp32. torch's cross-entropy keeps
# several copies of them, which would limit the size of a microbatch.
#
# Largest number of logits in a chunk: enough for efficient matrix products, and small in memory compared to everything
# else.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}
# Largest number of rows in an fp16 chunk. The chunk's part of the weight's gradient is a matrix product, which must
# stay below fp16's limit of 65,504. Each row adds at most 1 times a feature to the product. Loss scaling cannot help,
# since the scale is applied after this product.
FP16_ROWS = 2**14
# Tile size of the hardware's matrix units. If possible, chunks have a multiple of TILE rows. On a GPU and in compiled
# code, the head's weight is padded to such a multiple.
TILE = 128
INPUTS = 7  # of the custom operation
# Name of the custom operation, with a hash of this file. torch's cache of compiled code knows an operation by its name
# alone, so that after a change of `_backward` it would return code with the old one (pytorch issue 144344).
OPERATION = f"linear_cross_entropy_{sha256(Path(__file__))[:16]}"
# Number of logits on which `eager_kernel` works at once. On a CPU it is per thread, and small enough for the caches; on
# a GPU it is large enough to keep the device busy.
SLICE_LOGITS = {"cpu": 2**20, "cuda": 2**25}


def linear_cross_entropy(
    features_NxC: Tensor, weight_VxC: Tensor, targets_N: Tensor, *, softcap: float | None = None
) -> Tensor:
    """Return the mean cross-entropy, in nats, of softmax(features @ weight.T) against integer targets. Every target
    must be from 0 to V - 1. With a `softcap` c, each product x becomes c·tanh(x / c) before the softmax.

    The result is an fp32 scalar. Under autocast, matrix products run in the autocast precision. With fp64 features, all
    is in fp64. Backward can run only once.
    """
    needs_grad = torch.is_grad_enabled() and (features_NxC.requires_grad or weight_VxC.requires_grad)
    # Determined here, because the implementation of a custom operation does not see the autocast state.
    state = _matmul_dtype(features_NxC), needs_grad, torch.compiler.is_compiling()
    return _loss_and_gradients(features_NxC, weight_VxC, targets_N, *state, softcap or 0.0)[0]


def token_cross_entropies(
    features_NxC: Tensor, weight_VxC: Tensor, targets_N: Tensor, *, softcap: float | None = None
) -> Tensor:
    """Return the cross-entropies (N) whose mean `linear_cross_entropy` returns. The result has no gradient, and the
    function is not meant to be compiled."""
    dtype = _matmul_dtype(features_NxC)
    return _row_losses(features_NxC, weight_VxC, targets_N, dtype, False, False, softcap or 0.0)[0]


def _matmul_dtype(features: Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `features` run. fp64 stays fp64 under autocast."""
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return features.dtype


def chunk_rows(rows: int, width: int, device_type: str, dtype: torch.dtype = torch.float32) -> int:
    """Return the number of rows per chunk for `rows` rows of `width` logits. Only the last chunk may have fewer."""
    logits = CHUNK_LOGITS.get(device_type, CHUNK_LOGITS["cpu"])
    if device_type == "cpu" and dtype.itemsize == 2:
        # With 2 bytes per logit, twice as many logits take as much memory as in fp32. Fewer, larger chunks save time,
        # because each chunk's part of the weight's gradient has to be converted and added to the fp32 sum.
        logits *= 2
    largest = max(1, logits // width)
    if dtype == torch.float16:
        largest = min(largest, FP16_ROWS)
    tile = TILE if largest >= TILE else 1
    chunks = max(1, -(-rows // (largest // tile * tile)))
    return max(1, -(-rows // (chunks * tile)) * tile)


# A custom operation, because torch.compile then sees a single operation, whatever the number of chunks
@torch.library.custom_op(f"ddp_pretrain::{OPERATION}", mutates_args=())
def _loss_and_gradients(
    features_NxC: Tensor,
    weight_VxC: Tensor,
    targets_N: Tensor,
    product_dtype: torch.dtype,
    needs_grad: bool,
    compiled: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy, and N times its gradients with respect to features and weight.

    The features' gradient is in `product_dtype`, and the weight's in the weight's dtype. Without `needs_grad`, the
    gradients have no rows. `softcap` is 0 for no cap.
    """
    # With p = softmax(logits) and y the one-hot targets, N * d loss / d logits = p - y (with a soft-cap, times its
    # slope), so that one pass over the logits gives the loss and both gradients. The division by N is left to
    # `_backward`, because p - y divided by N would underflow in fp16.
    inputs = features_NxC, weight_VxC, targets_N, product_dtype, needs_grad, compiled, softcap
    losses_N, grad_features, grad_weight = _row_losses(*inputs)
    return losses_N.mean(), grad_features, grad_weight


def _row_losses(
    features_NxC: Tensor,
    weight_VxC: Tensor,
    targets_N: Tensor,
    dtype: torch.dtype,
    needs_grad: bool,
    compiled: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `_loss_and_gradients`, with the losses of the rows (N) in place of their mean. Matrix
    products are in `dtype`."""
    (rows, dim), vocab = features_NxC.shape, weight_VxC.shape[0]
    with torch.no_grad(), torch.autocast(features_NxC.device.type, enabled=False):
        features = features_NxC.to(dtype)
        weight = _head(weight_VxC, dtype, whole_tiles=compiled or features.is_cuda)
        grad_features = torch.empty_like(features if needs_grad else features[:0])
        grad_weight = weight.new_empty((len(weight) if needs_grad else 0, dim), dtype=weight_VxC.dtype)
        losses_N = features.new_empty(rows, dtype=torch.promote_types(features_NxC.dtype, torch.float32))
        step = chunk_rows(rows, len(weight), features.device.type, dtype)
        logits_RxW = features.new_empty(min(step, rows), len(weight))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            logits = torch.mm(features[part], weight.T, out=logits_RxW[: part.stop - start])
            # torch.compile treats a size of 1 as a constant, so that a chunk of one row would be compiled separately.
            kernel = _compiled_kernel if compiled and len(logits) > 1 else eager_kernel
            kernel(logits, targets_N[part], losses_N[part], vocab, needs_grad, softcap)
            if needs_grad:
                torch.mm(logits, weight, out=grad_features[part])
                _add_product(grad_weight, logits, features[part], is_first=start == 0)
        return losses_N, grad_features, grad_weight[:vocab]


def _head(weight_VxC: Tensor, dtype: torch.dtype, *, whole_tiles: bool) -> Tensor:
    """Return the weight in `dtype`. With `whole_tiles`, it is padded with rows of zeros to a multiple of TILE."""
    vocab, dim = weight_VxC.shape
    # Without padding, most rows of logits of GPT-2's 50,257 tokens would begin at an address that is not aligned for
    # vector loads.
    missing = -vocab % TILE if whole_tiles else 0
    if not missing:
        return weight_VxC.to(dtype)
    padded = weight_VxC.new_empty((vocab + missing, dim), dtype=dtype)
    padded[:vocab].copy_(weight_VxC)
    padded[vocab:].zero_()
    return padded


def _add_product(total_WxC: Tensor, errors_RxW: Tensor, features_RxC: Tensor, *, is_first: bool) -> None:
    """Add errors.T @ features to `total_WxC`, or overwrite it with the product if `is_first`."""
    beta = 0 if is_first else 1
    if total_WxC.dtype == errors_RxW.dtype:
        torch.addmm(total_WxC, errors_RxW.T, features_RxC, beta=beta, out=total_WxC)
    elif total_WxC.is_cuda:
        torch.addmm(total_WxC, errors_RxW.T, features_RxC, total_WxC.dtype, beta=beta, out=total_WxC)
    # On a CPU, torch cannot add the product in the precision of `total_WxC`: the product is first rounded to that of
    # the factors.
    elif is_first:
        total_WxC.copy_(errors_RxW.T @ features_RxC)
    else:
        total_WxC += errors_RxW.T @ features_RxC


@_loss_and_gradients.register_fake
def _shapes(
    features_NxC: Tensor,
    weight_VxC: Tensor,
    targets_N: Tensor,
    product_dtype: torch.dtype,
    needs_grad: bool,
    compiled: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialized tensors like the results of `_loss_and_gradients`, for torch.compile."""
    loss = features_NxC.new_empty((), dtype=torch.promote_types(features_NxC.dtype, torch.float32))
    rows, vocab = (features_NxC.shape[0], weight_VxC.shape[0]) if needs_grad else (0, 0)
    dim = features_NxC.shape[1]
    return loss, features_NxC.new_empty((rows, dim), dtype=product_dtype), weight_VxC.new_empty((vocab, dim))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, grad_features, grad_weight = output
    ctx.mark_non_differentiable(grad_features, grad_weight)
    ctx.set_materialize_grads(False)  # or autograd would allocate zeros as large as the two gradients
    ctx.save_for_backward(grad_features, grad_weight)
    features_NxC = inputs[0]
    ctx.rows, ctx.features_dtype = features_NxC.shape[0], features_NxC.dtype


@once_differentiable
def _backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Return the gradients with respect to features and weight, and None for the other inputs."""
    if grad_loss is None:
        return (None,) * INPUTS
    grad_features, grad_weight = ctx.saved_tensors
    scale = grad_loss / ctx.rows
    # The saved gradient of the weight is scaled in place, because nothing else reads it, and a copy would take as much
    # memory as the head. The features' gradient is converted from half precision before it is scaled down.
    scaled = (grad_features.to(scale.dtype) * scale).to(ctx.features_dtype)
    return scaled, grad_weight.mul_(scale), *(None,) * (INPUTS - 2)


_loss_and_gradients.register_autograd(_backward, setup_context=_save)


# The elementwise part computes each row's loss, and the gradient with respect to the logits, from a chunk of logits.
#
# A kernel writes each row's loss to `losses_R`, in that tensor's precision. If `wants_errors`, it overwrites the logits
# with the gradient, so that a chunk needs no second tensor of that size; otherwise it may leave any values there.
# Columns from `vocab` on are padding and are ignored. With p the softmax of a row's logits and y its one-hot target,
# the loss is log(sum(exp(logits))) - logits[target], and its gradient is p - y.
#
# With a soft-cap c (0: none), the input holds products x from which the kernel first computes the logits c·tanh(x / c).
# The gradient with respect to x is the gradient with respect to the logits times 1 - tanh²(x / c).


def eager_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float = 0.0
) -> None:
    """Compute a chunk's losses and gradients by separate torch operations, on a few rows at a time."""
    slice_logits = SLICE_LOGITS.get(logits_RxW.device.type, SLICE_LOGITS["cpu"])
    if logits_RxW.device.type == "cpu":
        slice_logits *= torch.get_num_threads()  # all threads share a slice, and wait for each other after each op
    at_once = max(1, slice_logits // logits_RxW.shape[1])
    parts = (tensor.split(at_once) for tensor in (logits_RxW, targets_R[:, None], losses_R[:, None]))
    for logits, wanted, written in zip(*parts, strict=True):
        work = logits[:, :vocab].to(losses_R.dtype)  # a view, and no copy, if the logits have this dtype already
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
    """Replace each product x in `work` by the logit cap·tanh(x / cap), in place. Return the derivative of each logit
    with respect to x if `wants_errors`, else None."""
    work.div_(cap).tanh_()
    slope = 1 - work.square() if wants_errors else None
    work.mul_(cap)
    return slope


def fused_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float = 0.0
) -> None:
    """Do the same as `eager_kernel`, in a form of which torch.compile makes a single kernel."""
    columns_W = torch.arange(logits_RxW.shape[1], device=logits_RxW.device, dtype=torch.int32)
    products = logits_RxW.to(losses_R.dtype)
    capped = (products / softcap).tanh() if softcap else products
    logits = torch.where(columns_W < vocab, capped * softcap if softcap else capped, float("-inf"))
    # Columns are compared with the target instead of indexed by it, because a gather or a scatter would be a separate
    # kernel.
    is_target = columns_W == targets_R.unsqueeze(1).to(torch.int32)
    largest = logits.amax(-1, keepdim=True)
    normalizer = largest + (logits - largest).exp().sum(-1, keepdim=True).log()
    losses_R.copy_(normalizer.squeeze(1) - torch.where(is_target, logits, 0.0).sum(-1))
    if wants_errors:
        errors = (logits - normalizer).exp() - is_target.to(logits.dtype)
        logits_RxW.copy_(errors * (1 - capped.square()) if softcap else errors)


def _compiled_kernel(
    logits_RxW: Tensor, targets_R: Tensor, losses_R: Tensor, vocab: int, wants_errors: bool, softcap: float
) -> None:
    """Run the compiled `fused_kernel`. Calls with any number of rows above 1 share one compilation."""
    for tensor in (logits_RxW, targets_R, losses_R):  # mark_dynamic is documented, but only under this private name
        torch._dynamo.mark_dynamic(tensor, 0)
    # torch.compile compiles once for each state of autograd's dispatch keys, and callers differ in this state. Without
    # this context the kernel would be compiled twice. The context is private, but torch.no_grad() does not change the
    # state, and no public context sets it.
    with torch._C._AutoDispatchBelowADInplaceOrView():
        _compile()(logits_RxW, targets_R, losses_R, vocab, wants_errors, softcap)


@cache
def _compile() -> Any:
    # Only the number of rows varies, and it is marked as dynamic. A constant width keeps memory accesses aligned and
    # vectorized.
    return torch.compile(fused_kernel, dynamic=False, fullgraph=True)
