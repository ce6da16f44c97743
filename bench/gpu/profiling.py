"""Profile of a few steps of ddp_train.py, taken in the command's own process."""

from __future__ import annotations

import itertools
import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from harness.training.step import OptimizerStep

FIRST, STEPS = 8, 3  # profiled steps, after those that compile; the one that follows is looked through for waits
# Kinds of kernels by words in their names; the first that fits counts.
KERNELS = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated"),
    "optimizer": ("adam", "multi_tensor"),
    "triton": ("triton",),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
    "copies": ("memcpy", "memset"),
}


def profile_steps(target: str) -> None:
    """Have this process profile its training, and write TARGET.json (milliseconds of a step by kind of kernel, and the
    places where a step waits for the device) and TARGET.txt (the profiler's table)."""
    run_step, numbers, profiler = OptimizerStep.run, itertools.count(), torch.profiler.profile()

    def run(*arguments: Any) -> Any:
        number = next(numbers)
        if number == FIRST:
            profiler.start()
        elif number == FIRST + STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiler.stop()
            waits, result = _with_waits(lambda: run_step(*arguments))
            _write(profiler, Path(target), waits)
            return result
        return run_step(*arguments)

    OptimizerStep.run = run  # type: ignore[assignment, method-assign]


def _with_waits(step: Any) -> tuple[list[str], Any]:
    """Return the places at which torch warns of a wait for the device, and the result of the step."""
    if not torch.cuda.is_available():
        return [], step()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = step()
    torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}: {each.message}"[:300] for each in found], result


def _write(profiler: Any, target: Path, waits: list[str]) -> None:
    sums: dict[str, float] = defaultdict(float)
    averages = profiler.key_averages()
    for event in averages:
        if str(event.device_type).endswith("CUDA"):
            name = event.key.lower()
            kind = next((kind for kind, words in KERNELS.items() if any(word in name for word in words)), "other")
            sums[kind] += event.self_device_time_total / 1000 / STEPS
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    target.with_suffix(".txt").write_text(averages.table(sort_by=order, row_limit=60, max_name_column_width=90))
    target.with_suffix(".json").write_text(json.dumps({"ms_per_step": dict(sums), "waits": waits}))
