"""What the loss becomes on a GPU, by the source that the compiler writes for one."""

from __future__ import annotations

import re

import pytest
import torch

from harness.model.logit_errors import fused_kernel
from tests.support.pretended_gpu import lower_to_triton

pytest.importorskip("triton")  # builds of torch for CPUs have none

VOCAB, WIDTH, ROWS = 50257, 50304, 2688


def lowered(dtype: torch.dtype, *, wants_errors: bool) -> str:
    def kernel(logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor) -> None:
        fused_kernel(logits, targets, losses, VOCAB, wants_errors)

    shapes = ((ROWS, WIDTH), dtype), ((ROWS,), torch.int64), ((ROWS,), torch.float32)
    return lower_to_triton(kernel, *(torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes))


@pytest.mark.parametrize("wants_errors", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_chunk_of_the_loss_is_one_kernel(dtype: torch.dtype, wants_errors: bool) -> None:
    source = lowered(dtype, wants_errors=wants_errors)
    kernels = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)
    assert len(kernels) == 1, kernels
    assert "tl.atomic" not in source, "the same bits every time"
    assert not re.search(r"extern_kernels\.\w+\(", source), "and nothing else"
    stores = re.findall(rf"tl\.store\(\w+ \+ \(r0_\d \+ {WIDTH}\*x0\)", source)
    assert len(stores) == (1 if wants_errors else 0), "the error is written once, over the logits"
