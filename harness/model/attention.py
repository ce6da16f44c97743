"""Causal attention over a whole sequence, by torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# On the CPU the backward kernel is slower in bf16 than in fp32, conversions counted, below so many tokens. Forward and
# backward in bf16 take 2.0 to 2.3 of fp32's time with 128 tokens, 0.9 to 1.0 with 256, and 0.6 to 0.8 with 1,024, on an
# Intel Xeon with AMX and on an AMD EPYC without (docs/LOG.md).
CPU_BF16_CONTEXT = 256


def causal_attention(q_BxHxTxD: Tensor, k_BxHxTxD: Tensor, v_BxHxTxD: Tensor, drop_rate: float) -> Tensor:
    """Softmax attention of each token to itself and those before it: (B, H, T, D), in the inputs' dtype. Of keys and
    values there may be fewer heads, which are then shared by as many queries each."""
    dtype, tokens = q_BxHxTxD.dtype, q_BxHxTxD.shape[-2]
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": k_BxHxTxD.shape[1] != q_BxHxTxD.shape[1]}
    if q_BxHxTxD.device.type != "cpu" or dtype != torch.bfloat16 or tokens >= CPU_BF16_CONTEXT:
        return F.scaled_dot_product_attention(q_BxHxTxD, k_BxHxTxD, v_BxHxTxD, dropout_p=drop_rate, **how)
    with torch.autocast("cpu", enabled=False):
        q, k, v = q_BxHxTxD.float(), k_BxHxTxD.float(), v_BxHxTxD.float()
        return F.scaled_dot_product_attention(q, k, v, dropout_p=drop_rate, **how).to(dtype)
