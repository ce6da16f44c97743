"""Mean next-token cross-entropy straight from features, without ever holding all the logits.

At GPT-2's vocabulary the logits of one 1,024-token sequence are 206 MB in fp32, and cross-entropy keeps several copies
of them: they, not the transformer, decide which microbatch fits. Here the head and the loss run over a chunk of rows
at a time, and the gradients are formed while the chunk is still in cache (the idea of Wijmans et al., "Cut Your Losses
in Large-Vocabulary Language Models", arXiv:2411.09009). docs/LOG.md has the timings against torch's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Logits held at once: large enough to keep the matrix products efficient, small beside the rest of the memory.
CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}


def linear_cross_entropy(features_NxC: Tensor, weight_VxC: Tensor, targets_N: Tensor) -> Tensor:
    """Mean over N rows of the cross-entropy of softmax(features @ weight.T) against integer targets, as an fp32 scalar
    (fp64 for fp64 input).

    Equals F.cross_entropy(F.linear(features, weight).float(), targets) to rounding; under autocast the matrix products
    run in the autocast precision and everything else in fp32. First derivatives only.
    """
    needs_grad = torch.is_grad_enabled() and (features_NxC.requires_grad or weight_VxC.requires_grad)
    loss: Tensor = _LinearCrossEntropy.apply(features_NxC, weight_VxC, targets_N, needs_grad)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """With p = softmax(logits) and y the one-hot targets, d loss / d logits = (p - y) / N, so that one pass over the
    logits gives the loss and both gradients. The 1/N waits until after the matrix products: in fp16 it would underflow.
    """

    @staticmethod
    def forward(ctx: Any, features_NxC: Tensor, weight_VxC: Tensor, targets_N: Tensor, needs_grad: bool) -> Tensor:
        rows = features_NxC.shape[0]
        exact = torch.float64 if features_NxC.dtype == torch.float64 else torch.float32
        kernel_dtype = _matmul_dtype(features_NxC)
        features_NxC, weight = features_NxC.to(kernel_dtype), weight_VxC.to(kernel_dtype)
        total = torch.zeros((), dtype=exact, device=features_NxC.device)
        if needs_grad:
            grad_features = torch.empty_like(features_NxC)
            grad_weight = torch.zeros_like(weight_VxC)
        step = max(1, CHUNK_LOGITS.get(features_NxC.device.type, CHUNK_LOGITS["cpu"]) // weight.shape[0])
        with torch.autocast(features_NxC.device.type, enabled=False):
            for start in range(0, rows, step):
                chunk, wanted = features_NxC[start : start + step], targets_N[start : start + step, None]
                logits = chunk @ weight.T
                logits = logits if logits.dtype == exact else logits.to(exact)
                normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
                total += (normaliser - logits.gather(1, wanted)).sum()
                if needs_grad:
                    # logits becomes p - y in place.
                    logits.sub_(normaliser).exp_().scatter_add_(1, wanted, -torch.ones_like(normaliser))
                    error = logits.to(kernel_dtype)
                    torch.matmul(error, weight, out=grad_features[start : start + step])
                    if grad_weight.dtype == kernel_dtype:
                        grad_weight.addmm_(error.T, chunk)
                    else:
                        grad_weight += error.T @ chunk
                    del error
                del logits  # before the next chunk's are computed
        if needs_grad:
            ctx.save_for_backward(grad_features, grad_weight)
        ctx.rows = rows
        return total / rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_features, grad_weight = ctx.saved_tensors
        scale = grad_loss / ctx.rows
        # Nothing else reads the saved gradients, and a second copy of the weight's would cost as much as the head.
        # The features' gradient leaves half precision before it is scaled down.
        return grad_features.to(scale.dtype) * scale, grad_weight.mul_(scale), None, None


def _matmul_dtype(features: Tensor) -> torch.dtype:
    device = features.device.type
    if torch.is_autocast_enabled(device) and features.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return features.dtype
