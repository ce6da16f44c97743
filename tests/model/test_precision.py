"""Processors on which bf16 is fast, attention in bf16 on the CPU, and the precision of measurements."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gpt import CPU_BF16_CONTEXT, causal_attention
from harness.model import precision as module
from harness.model.precision import Precision, has_fast_bf16
from tests.support.isolation import ROOT
from tests.support.warm import warm_server


def test_a_finished_model_is_measured_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside training, "auto" is fp32 on a CPU, because the numbers of a finished model must not depend on the
    processor. tests/training/test_every_precision.py tests training."""
    monkeypatch.setattr(module, "has_fast_bf16", lambda: True)
    assert Precision.resolve("auto", torch.device("cpu")).name == "fp32"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/cpuinfo")
@pytest.mark.parametrize("limit", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}], ids=str)
def test_bf16_is_fast_where_onednn_may_use_instructions_for_it(limit: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("from harness.model.precision import has_fast_bf16; print(has_fast_bf16())")
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"} | limit
    stdout, stderr = warm_server().spawn([str(program)], ROOT, environment).communicate(timeout=200)
    has_them = "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    assert stdout == f"{has_them and not limit}\n", stderr


def test_bf16_is_not_fast_where_torch_does_not_know_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not has_fast_bf16()


@pytest.mark.parametrize("tokens", [CPU_BF16_CONTEXT // 2, CPU_BF16_CONTEXT])
def test_short_sequences_are_attended_in_fp32(tokens: int) -> None:
    torch.manual_seed(0)
    qkv = [torch.randn(2, 2, tokens, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    upstream = torch.randn(2, 2, tokens, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        result = causal_attention(qkv[0], qkv[1], qkv[2], 0.0)
    result.backward(upstream)
    exact = [each.detach().double().requires_grad_() for each in qkv]
    expected = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=True)
    expected.backward(upstream.double())
    assert result.dtype == torch.bfloat16
    errors = [(result - expected).abs().max().item()]
    errors += [(mine.grad - true.grad).abs().max().item() for mine, true in zip(qkv, exact, strict=True)]  # type: ignore[operator]
    assert max(errors) < 0.05
    q, k, v = (each.float() for each in qkv)
    in_fp32 = F.scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16()
    assert torch.equal(result, in_fp32) == (tokens < CPU_BF16_CONTEXT)
