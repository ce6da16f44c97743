"""Stages that measure single kernels: peak rates of the GPU, attention with dropout, and output head with loss."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.workbench import Workbench
from harness.model.cross_entropy import linear_cross_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = {
    "default": [*SDPBackend.__members__.values()][1:],  # all but the first one, ERROR
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}


def milliseconds(work: Callable[[], object], bench: Workbench, repeat: int = 20) -> float:
    """Return the median time of `repeat` calls of `work` (two in a rehearsal) in milliseconds. Three calls before them,
    in which kernels are compiled and chosen, are not counted."""

    def timed() -> float:
        began = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    times = [timed() for _ in range(3 + (2 if bench.tiny else repeat))]
    return statistics.median(times[3:])


def measure_machine(bench: Workbench) -> None:
    """Record the machine and the versions of software that affect the results."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,power.limit", "--format=csv,noheader"]
    has_driver = shutil.which(query[0]) is not None
    bench.add(
        "machine",
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        nvidia_smi=subprocess.run(query, capture_output=True, text=True).stdout.strip() if has_driver else None,
        python=sys.version.split()[0],
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        compiler=shutil.which("gcc") or shutil.which("clang"),
        date=time.strftime("%Y-%m-%d"),
    )


def measure_ceilings(bench: Workbench) -> None:
    """Record the memory bandwidth and the speed of each matrix product of the model, which are upper limits for a
    training step. The output head is measured with the real vocabulary size, and with the size padded to a multiple of
    128 ("whole tiles")."""
    source = torch.empty(2**16 if bench.tiny else 2**28, device=DEVICE)
    copy = torch.empty_like(source)
    bench.add("copy", tb_per_s=8e-9 * source.numel() / milliseconds(lambda: copy.copy_(source), bench))
    width, rows, vocab = bench.shape["emb_dim"], 64 if bench.tiny else 65536, bench.shape["vocab_size"]
    padded, slice_rows = -(-vocab // 128) * 128, min(rows, 8192)
    for name, count, inner, outer in (
        *(("qkv", rows, width, 3 * width), ("out", rows, width, width)),
        *(("fc1", rows, width, 4 * width), ("fc2", rows, 4 * width, width)),
        *(("head", slice_rows, width, vocab), ("head, whole tiles", slice_rows, width, padded)),
    ):
        shapes = (count, inner), (outer, inner), (count, outer)
        a, w, g = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in shapes)
        products: dict[str, tuple[Tensor, Tensor]] = {"forward": (a, w.T), "features": (g, w), "weight": (g.T, a)}
        rates = {
            f"{key}_tflops": 2 * count * inner * outer / milliseconds(partial(torch.matmul, *pair), bench) / 1e9
            for key, pair in products.items()
        }
        bench.add("gemm", product=name, **rates)


def measure_attention(bench: Workbench) -> None:
    """Record, for each kernel and dropout rate, the milliseconds of forward and backward together, and the share of
    attention weights that the kernel actually drops, or the reason why torch refuses the kernel."""
    how: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
    heads, length = bench.shape["n_heads"], bench.shape["context_length"]
    batch, dim = (2 if bench.tiny else 64), bench.shape["emb_dim"] // heads
    qkv = torch.randn(batch, length, 3 * heads * dim, requires_grad=True, **how)
    gradient = torch.randn(batch, heads, length, dim, **how)
    flops = 3.5 * 2 * batch * heads * length * length * dim
    for backend, rate in product(BACKENDS, (0.0, 0.1, 0.125)):

        def both(rate: float = rate) -> None:
            q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True).backward(gradient)

        try:
            with sdpa_kernel(BACKENDS[backend]):
                ms, dropped = milliseconds(both, bench), share_dropped(rate, heads=8 if bench.tiny else 512)
            found: dict[str, Any] = {"dropped": dropped, "ms": ms, "tflops": flops / ms / 1e9}
        except RuntimeError as error:
            found = {"refused": str(error).splitlines()[0][:150]}
        bench.add("attention", backend=backend, drop_rate=rate, **found)
        qkv.grad = None


def share_dropped(rate: float, heads: int = 512, size: int = 64) -> float:
    """Return the share of attention weights that dropout actually drops. It is counted on 2 million weights, so its
    standard deviation is 0.0002. All weights are equal and the values are an identity matrix, so the output is zero
    where a weight was dropped."""
    zeros = torch.zeros(1, heads, size, size, device=DEVICE, dtype=torch.bfloat16)
    identity = torch.eye(size, device=DEVICE, dtype=torch.bfloat16).expand(1, heads, size, size).contiguous()
    return (F.scaled_dot_product_attention(zeros, zeros, identity, dropout_p=rate) == 0).float().mean().item()


def plain_loss(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the loss as computed by torch functions, which store all logits."""
    return F.cross_entropy(F.linear(features, weight).float(), targets)


def measure_loss(bench: Workbench) -> None:
    """Record time, speed and memory of the output head and the loss alone, forward and backward under bf16 autocast.
    Our function and torch's are measured, each compiled and not compiled."""
    vocab, width, on_gpu = bench.shape["vocab_size"], bench.shape["emb_dim"], DEVICE.type == "cuda"
    losses: dict[str, Callable[..., Tensor]] = {"ours": linear_cross_entropy, "torch": plain_loss}
    sizes, ways = ((64,), (False,)) if bench.tiny else ((13312, 65536), (False, True))
    for rows, (name, loss), compiled in product(sizes, losses.items(), ways):
        if loss is plain_loss and rows * vocab > 2**30:  # too many logits for most GPUs
            continue
        features = torch.randn(rows, width, device=DEVICE, requires_grad=True)
        weight = (torch.randn(vocab, width, device=DEVICE) * 0.02).requires_grad_()
        targets = torch.randint(vocab, (rows,), device=DEVICE)
        torch._dynamo.reset()
        call = torch.compile(loss) if compiled else loss

        def both(call: Callable[..., Tensor] = call, inputs: tuple[Tensor, ...] = (features, weight, targets)) -> None:
            with torch.autocast(DEVICE.type, torch.bfloat16):
                value = call(*inputs)
            inputs[0].grad = inputs[1].grad = None
            value.backward()

        began = time.perf_counter()
        both()
        values = {"first_call_s": time.perf_counter() - began}
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        ms = milliseconds(both, bench, repeat=10)
        values |= {"ms": ms, "us_per_token": 1000 * ms / rows, "tflops": 6 * rows * weight.numel() / ms / 1e9}
        if on_gpu:
            values["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        bench.add("loss", kind=name, rows=rows, compiled=compiled, **values)
