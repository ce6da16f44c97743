"""Stages about whole optimizer steps, by the project's own trainer, its data included."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.gpu.workbench import Workbench, device, device_name, synchronize, use_attention
from harness.common.units import GIB
from harness.runs.throughput import peak_flops

if TYPE_CHECKING:
    from ddp_train import Trainer

WARM_STEPS = 3
BLOCKS = 3  # of steps, each timed as a whole: their spread tells how sure the median is
BLOCK_SECONDS = 2.0
PROFILED_STEPS = 3
# Kinds of kernels by words in their names; the first that fits counts.
KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated"),
    "optimizer": ("adam", "multi_tensor"),
    "triton": ("triton",),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}


@dataclass(frozen=True)
class StepOptions:
    """One variant of a step; `settings` are keys of train.json."""

    microbatch: int = 64
    drop_rate: float = 0.1
    attention: str = "default"
    settings: tuple[tuple[str, Any], ...] = ()
    profile: bool = False

    @property
    def label(self) -> str:
        """Settings that are not the usual ones."""
        changed = [f"{key}={value}" for key, value in self.settings]
        if self.attention != "default":
            changed.append(f"attention={self.attention}")
        return " ".join(changed)


def build(bench: Workbench, options: StepOptions) -> Trainer:
    """The trainer of a run directory made for it."""
    microbatch = min(options.microbatch, 4) if bench.tiny else options.microbatch
    train = {"microbatch_size": microbatch, "clipping_max_norm": 1.0, **dict(options.settings)}
    bench.add_run(f"step-{os.getpid()}", {"drop_rate": options.drop_rate}, train)
    trainer = bench.build_trainer(f"step-{os.getpid()}")
    use_attention(options.attention)
    return trainer


def run_steps(trainer: Trainer, steps: int) -> torch.Tensor:
    """Run `steps` steps, over the first 8 batches of the data again and again; the last losses, on the device."""
    for index in range(steps):
        result = trainer.optimizer_step.run(trainer.loader.microbatches(index % 8, 0), 0.1)
    return result.losses_A


def measure_step(bench: Workbench, options: StepOptions) -> None:
    """Tokens per second with their spread, MFU, memory, and the time to the end of the first step."""
    began = time.perf_counter()
    trainer = build(bench, options)
    run_steps(trainer, 1)
    synchronize()
    first = time.perf_counter() - began
    run_steps(trainer, WARM_STEPS)
    synchronize()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    tokens = trainer.prepared.layout.global_tokens
    rates, shares, steps = [], [], 1
    for _ in range(1 + BLOCKS):  # the first tells how many steps a block has
        began = time.perf_counter()
        losses = run_steps(trainer, steps)
        queued = time.perf_counter() - began
        synchronize()
        seconds = time.perf_counter() - began
        rates.append(steps * tokens / seconds)
        shares.append(queued / seconds)
        steps = 2 if bench.tiny else max(3, round(BLOCK_SECONDS * rates[0] / tokens))
    rate, flops = statistics.median(rates[1:]), trainer.prepared.experiment.model.flops_per_token
    peak = peak_flops(device_name())
    bench.results.add(
        "step",
        microbatch=trainer.prepared.layout.microbatch_size,
        drop_rate=options.drop_rate,
        settings=options.label,
        tokens_per_s=rate,
        slowest=min(rates[1:]),
        fastest=max(rates[1:]),
        mfu=rate * flops / peak if peak else None,
        cpu_share=statistics.median(shares[1:]),
        first_step_s=first,
        loss=losses.mean().item(),
        **memory_gib(),
    )
    if options.profile:
        find_syncs(bench, trainer)
        profile(bench, trainer)


def memory_gib() -> dict[str, float]:
    """The most that was allocated, and held, on the device since the last reset."""
    if not torch.cuda.is_available():
        return {}
    peaks = {"allocated_gib": torch.cuda.max_memory_allocated(), "reserved_gib": torch.cuda.max_memory_reserved()}
    return {name: size / GIB for name, size in peaks.items()}


def find_syncs(bench: Workbench, trainer: Trainer) -> None:
    """Record the first place where a step waits for the device, if there is one."""
    found = where = None
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_steps(trainer, 1)
        except RuntimeError as error:
            found, where = str(error)[:200], traceback.format_exc()[-800:]
        torch.cuda.set_sync_debug_mode("default")
    bench.results.add("syncs", found=found, where=where)


def profile(bench: Workbench, trainer: Trainer) -> None:
    """Milliseconds of a step by kind of kernel; the whole table goes to profile.txt beside the results."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        run_steps(trainer, PROFILED_STEPS)
        synchronize()
    sums: dict[str, float] = {}
    for event in seen.key_averages():
        spent = getattr(event, "self_device_time_total", 0)
        if spent and str(event.device_type).endswith("CUDA"):
            name = event.key.lower()
            kind = next((kind for kind, words in KERNELS.items() if any(word in name for word in words)), "other")
            sums[kind] = sums.get(kind, 0.0) + spent / 1000 / PROFILED_STEPS
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=order, row_limit=60, max_name_column_width=90)
    bench.results.path.with_name("profile.txt").write_text(table)
    bench.results.add("kernels", ms_per_step={kind: round(ms, 2) for kind, ms in sorted(sums.items())})


def measure_groups(bench: Workbench) -> None:
    """The project's process groups with one rank (nccl on a GPU, gloo beside it), and DistributedDataParallel over its
    step: whether it trains, and the memory that the driver and NCCL take outside of torch's allocator."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from harness.distributed import rendezvous
    from harness.distributed.environment import read_ranking

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    there, free = torch.device("cuda", 0) if torch.cuda.is_available() else device(), 0
    if there.type == "cuda":
        torch.cuda.set_device(there)
        free = torch.cuda.mem_get_info()[0]
    groups = rendezvous.join(read_ranking(), there, 300.0)
    values: list[Any] = [None]
    dist.all_gather_object(values, {"rank": 0}, group=groups.control)
    trainer = build(bench, StepOptions(microbatch=8, settings=(("gradient_accumulation_steps", 2),)))
    step = trainer.optimizer_step
    step.model = DistributedDataParallel(
        step.model, device_ids=[there] if there.type == "cuda" else None, gradient_as_bucket_view=True
    )
    began = time.perf_counter()
    losses = run_steps(trainer, 3).tolist()
    seconds, backend, beyond = time.perf_counter() - began, dist.get_backend(), None
    if there.type == "cuda":
        beyond = (free - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()) / GIB
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    bench.results.add("groups", backend=backend, losses=losses, seconds=seconds, gib_beyond_the_allocator=beyond)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
