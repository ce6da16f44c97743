"""Stages about single kernels: what the card can do at all, attention with dropout, head and loss."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.workbench import Workbench, device, device_name, use_attention
from harness.model import cross_entropy

CHUNK_ROWS = (2688, 8192, 16384)
GATHERED_LOGITS = 2**27
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure_machine(bench: Workbench) -> None:
    """Record the machine and its software, as far as they change what can be measured."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    smi = subprocess.run(query, capture_output=True, text=True).stdout.strip() if shutil.which(query[0]) else None
    bench.results.add(
        "machine",
        device=device_name(),
        nvidia_smi=smi,
        python=sys.version.split()[0],
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        compiler=shutil.which("gcc") or shutil.which("clang"),
        python_h=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
        date=time.strftime("%Y-%m-%d"),
    )


def measure_ceilings(bench: Workbench) -> None:
    """Memory's rate, and the rates of this model's products: no step can be faster. The head with and without whole
    tiles, in chunks of several sizes."""
    there, kind = device(), torch.bfloat16
    source = torch.empty(2**16 if bench.tiny else 2**28, device=there)
    copy = torch.empty_like(source)
    bench.results.add("copy", tb_per_s=8e-9 * source.numel() / bench.milliseconds(lambda: copy.copy_(source)))
    width, tokens = bench.shape["emb_dim"], 64 if bench.tiny else 65536

    def rates(rows: int, inner: int, outer: int) -> dict[str, float]:
        a, w, g = (torch.randn(s, device=there, dtype=kind) for s in ((rows, inner), (outer, inner), (rows, outer)))
        passes = {"forward": lambda: a @ w.T, "features": lambda: g @ w, "weight": lambda: g.T @ a}
        flops = 2 * rows * inner * outer
        return {f"{name}_tflops": flops / bench.milliseconds(work) / 1e9 for name, work in passes.items()}

    for name, inner, outer in (("qkv", 1, 3), ("out", 1, 1), ("fc1", 1, 4), ("fc2", 4, 1)):
        bench.results.add("gemm", product=name, **rates(tokens, inner * width, outer * width))
    vocab = bench.shape["vocab_size"]
    padded = -(-vocab // 128) * 128
    heads = ((64, vocab),) if bench.tiny else ((2670, vocab), (2670, padded), *((rows, padded) for rows in CHUNK_ROWS))
    for rows, columns in heads:
        bench.results.add("head", rows=rows, vocab=columns, **rates(rows, width, columns))


def measure_attention(bench: Workbench) -> None:
    """Each kernel at each dropout: milliseconds forward and backward, and the share that it really drops."""
    there, kind = device(), torch.bfloat16
    heads, length = bench.shape["n_heads"], bench.shape["context_length"]
    batch, dim = (2 if bench.tiny else 64), bench.shape["emb_dim"] // heads
    qkv = torch.randn(batch, length, 3 * heads * dim, device=there, dtype=kind, requires_grad=True)
    gradient = torch.randn(batch, heads, length, dim, device=there, dtype=kind)
    flops = 3.5 * 2 * batch * heads * length * length * dim
    for backend, rate in product(("default", "flash", "cudnn", "efficient"), (0.0, 0.0625, 0.1, 0.125)):
        use_attention(backend)

        def both(rate: float = rate) -> None:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True).backward(gradient)

        try:
            ms, dropped = bench.milliseconds(both), share_dropped(rate, heads=8 if bench.tiny else 512)
        except RuntimeError as error:
            reason = str(error).splitlines()[0][:150]
            bench.results.add("attention", backend=backend, drop_rate=rate, refused=reason)
        else:
            speed = {"ms": ms, "tflops": flops / ms / 1e9}
            bench.results.add("attention", backend=backend, drop_rate=rate, dropped=dropped, **speed)
        qkv.grad = None


def share_dropped(rate: float, heads: int = 512, size: int = 64) -> float:
    """Share of the attention weights that is really dropped: all weights are equal and the values an identity, so that
    the output's zeros are the dropped ones. Measured on 2 million weights: its standard deviation is 0.0002."""
    zeros = torch.zeros(1, heads, size, size, device=device(), dtype=torch.bfloat16)
    identity = torch.eye(size, device=device(), dtype=torch.bfloat16).expand(1, heads, size, size).contiguous()
    return (F.scaled_dot_product_attention(zeros, zeros, identity, dropout_p=rate) == 0).float().mean().item()


def plain_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """torch's own formulation, with all the logits."""
    return F.cross_entropy(F.linear(features, weight).float(), targets)


class GatheredLoss(torch.autograd.Function):
    """Chunked loss by torch's own operations on logits in fp32, which leaves the kernels to the compiler: the targets'
    logits are gathered and their gradients scattered."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kind = torch.get_autocast_dtype(features.device.type)
        features, low, total = features.to(kind), weight.to(kind), features.new_zeros(())
        for_features, for_weight = torch.empty_like(features), torch.zeros_like(weight)
        step = max(1, GATHERED_LOGITS // len(weight))
        with torch.autocast(features.device.type, enabled=False):
            for start in range(0, len(features), step):
                chunk, wanted = features[start : start + step], targets[start : start + step, None]
                logits = (chunk @ low.T).float()
                normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
                total += (normaliser - logits.gather(1, wanted)).sum()
                logits.sub_(normaliser).exp_().scatter_add_(1, wanted, -torch.ones_like(normaliser))
                error = logits.to(kind)
                torch.matmul(error, low, out=for_features[start : start + step])
                for_weight += error.T @ chunk
        ctx.save_for_backward(for_features, for_weight)
        ctx.rows = len(features)
        return total / len(features)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for_features, for_weight = ctx.saved_tensors
        scale = gradients[0] / ctx.rows
        return for_features.float() * scale, for_weight * scale, None


def gathered_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return GatheredLoss.apply(features, weight, targets)


def measure_loss(bench: Workbench) -> None:
    """Head and loss alone: ours, compiled and not, in chunks of several sizes; gathered; and torch's."""
    vocab, width, there = bench.shape["vocab_size"], bench.shape["emb_dim"], device()
    usual, padded = cross_entropy.CHUNK_LOGITS[there.type], -(-vocab // 128) * 128
    for rows in (64,) if bench.tiny else (13312, 65536):
        features = torch.randn(rows, width, device=there, requires_grad=True)
        weight = (torch.randn(vocab, width, device=there) * 0.02).requires_grad_()
        targets = torch.randint(vocab, (rows,), device=there)
        ours, compile_too = cross_entropy.linear_cross_entropy, not bench.tiny
        contestants: list[tuple[str, Loss, int, bool]] = [("ours", ours, usual, False)]
        contestants += [("ours", ours, chunk * padded, compile_too) for chunk in CHUNK_ROWS]
        contestants += [("ours", ours, usual, compile_too)]
        contestants.append(("gathered", gathered_loss, GATHERED_LOGITS, compile_too))
        if rows * vocab < 2**30:
            contestants.append(("torch", plain_loss, 0, compile_too))
        for kind, loss, logits, compiled in contestants:
            torch._dynamo.reset()
            cross_entropy.CHUNK_LOGITS[there.type] = logits or usual
            call = torch.compile(loss) if compiled else loss
            values = time_loss(bench, call, (features, weight, targets))
            chunk = min(rows, logits // vocab) or rows
            bench.results.add("loss", kind=kind, rows=rows, chunk=chunk, compiled=compiled, **values)
    cross_entropy.CHUNK_LOGITS[there.type] = usual


def time_loss(bench: Workbench, loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Forward and backward under bf16 autocast: time, rate, and memory beyond what the inputs take."""
    features, weight, _ = inputs

    def both() -> None:
        with torch.autocast(features.device.type, torch.bfloat16):
            value = loss(*inputs)
        features.grad = weight.grad = None
        value.backward()

    began = time.perf_counter()
    both()
    first = time.perf_counter() - began
    before = 0
    if features.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    ms = bench.milliseconds(both, repeat=10)
    values = {"ms": ms, "us_per_token": 1000 * ms / len(features), "first_call_s": first}
    values["tflops"] = 6 * len(features) * weight.numel() / ms / 1e9
    if features.is_cuda:
        values["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return values
