"""Stages of the benchmark bench/on_gpu.py that run without ddp_train.py: kernels, NCCL, and training steps."""

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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but not by its type stubs
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.compare_steps import peers_step
from bench.gpu.workbench import Workbench
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model import cross_entropy
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.training.startup import choose_precision
from harness.training.step import build_training_step
from harness.training.zero1 import StatePartition

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
STEPS_AT_ONCE = 10  # without waiting for the device in between, as in training
BACKENDS = {
    "default": [*SDPBackend.__members__.values()][1:],  # all but the first one, ERROR
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
}


def milliseconds(work: Callable[[], object], bench: Workbench, repeat: int = 20) -> float:
    """Return the median time of `repeat` calls of `work` (two in a rehearsal) in milliseconds, after three calls in
    which kernels are compiled and chosen."""

    def timed() -> float:
        began = time.perf_counter()
        work()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began)

    times = [timed() for _ in range(3 + (2 if bench.tiny else repeat))]
    return statistics.median(times[3:])


def measure_machine(bench: Workbench) -> None:
    """Record the machine, the versions of software that affect the results, and the times of all-reduces."""
    query = "nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader"
    bench.add(
        "machine",
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        nvidia_smi=subprocess.getoutput(query),
        python=sys.version.split()[0],
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        compiler=shutil.which("gcc") or shutil.which("clang"),
        date=time.strftime("%Y-%m-%d"),
    )
    measure_exchange(bench)


def measure_exchange(bench: Workbench) -> None:
    """Record the milliseconds of an all-reduce of three sizes by NCCL, or gloo on a CPU, in a world of one rank, and
    the GiB of device memory that NCCL takes."""

    def free_gib() -> float:
        return torch.cuda.mem_get_info()[0] / 2**30 if DEVICE.type == "cuda" else 0.0

    sizes = [torch.ones(count // 4, device=DEVICE) for count in (4, 25 * 2**20, (1 if bench.tiny else 256) * 2**20)]
    before, device = free_gib(), DEVICE if DEVICE.type == "cuda" else None
    dist.init_process_group("nccl" if device else "gloo", store=HashStore(), rank=0, world_size=1, device_id=device)
    for numbers in sizes:
        ms = milliseconds(partial(dist.all_reduce, numbers), bench)
        bench.add("all-reduce", bytes=numbers.nbytes, ms=ms, taken_gib=before - free_gib())
    dist.destroy_process_group()


def measure_attention(bench: Workbench) -> None:
    """Record the milliseconds of attention, forward and backward together, for each kernel and dropout rate.

    Also record the share of attention weights that are really dropped. If torch refuses a kernel, record only why.
    """
    model, train = bench.shipped()
    heads, length, batch = model["n_heads"], model["context_length"], train["microbatch_size"]
    dim = model["emb_dim"] // heads
    qkv = torch.randn(batch, length, 3 * heads * dim, requires_grad=True, device=DEVICE, dtype=torch.bfloat16)
    gradient = torch.randn(batch, heads, length, dim, device=DEVICE, dtype=torch.bfloat16)
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


def share_dropped(rate: float, heads: int) -> float:
    """Return the share of attention weights that dropout actually drops."""
    # All weights are equal, and the values are an identity matrix: the output is zero where a weight was dropped.
    zeros = torch.zeros(1, heads, 64, 64, device=DEVICE, dtype=torch.bfloat16)
    identity = torch.eye(64, device=DEVICE, dtype=torch.bfloat16).expand_as(zeros).contiguous()
    return (F.scaled_dot_product_attention(zeros, zeros, identity, dropout_p=rate) == 0).float().mean().item()


def measure_loss(bench: Workbench) -> None:
    """Record the time of output head and loss, forward and backward together, for several numbers of logits in a chunk.
    The code is compiled, except in a rehearsal."""
    model, train = bench.shipped()
    vocab, width = model["vocab_size"], model["emb_dim"]
    rows, exponents = train["microbatch_size"] * model["context_length"], (12, 14) if bench.tiny else (27, 28, 29, 30)
    features = torch.randn(rows, width, device=DEVICE, requires_grad=True)
    weight = (torch.randn(vocab, width, device=DEVICE) * 0.02).requires_grad_()
    targets = torch.randint(vocab, (rows,), device=DEVICE)
    for exponent in exponents:
        cross_entropy.CHUNK_LOGITS[DEVICE.type] = 2**exponent
        call = cross_entropy.linear_cross_entropy if bench.tiny else torch.compile(cross_entropy.linear_cross_entropy)

        def both(call: Callable[..., Tensor] = call) -> None:
            features.grad = weight.grad = None
            with torch.autocast(DEVICE.type, torch.bfloat16):
                value = call(features, weight, targets)
            value.backward()

        ms = milliseconds(both, bench, repeat=10)
        bench.add("loss", chunk=f"2^{exponent}", rows=rows, ms=ms, us_per_token=1000 * ms / rows)


def measure_nanogpt(bench: Workbench) -> None:
    """Record, in turns, the time of a training step of nanoGPT and of this program, with models of the same shape.
    Both are compiled, except in a rehearsal."""
    torch.backends.cuda.matmul.allow_tf32 = True  # as nanoGPT does; no product here is in fp32
    keys, changes = {"drop_rate": 0.0, "tie_weights": True, "qkv_bias": True}, {"clipping_max_norm": 1.0}
    bench.add_run("nanogpt", keys, {**changes, "compile": not bench.tiny})
    experiment = Experiment.load(RunDirectory.find(bench.runs, "nanogpt"), bench.work)
    model, microbatch = experiment.model, experiment.config.microbatch_size
    tokens = torch.randint(model.vocab_size, (microbatch, model.context_length + 1))
    peer = peers_step("nanogpt", model, DEVICE, None if bench.tiny else torch.compile, low_precision=True)
    steps: dict[str, Callable[[], object]] = {"nanoGPT": partial(peer, tokens.to(DEVICE))}
    precision = choose_precision(experiment.config, DEVICE, None)
    config = experiment.config.model_copy(update={"precision": precision})
    own = build_training_step(experiment, config, World(0, 0, 1, 1, DEVICE), partition=StatePartition(0, 1))
    steps["ours"] = partial(own.run, [Microbatch(tokens.numpy())], rate_factor=1.0)
    for _ in range(2 if bench.tiny else 4):
        for name, step in steps.items():

            def several(step: Callable[[], object] = step) -> None:
                for _ in range(STEPS_AT_ONCE):
                    step()

            ms = milliseconds(several, bench, repeat=2) / STEPS_AT_ONCE
            bench.add("nanogpt", program=name, ms=ms, tokens_per_second=1000 * tokens[:, 1:].numel() / ms)
