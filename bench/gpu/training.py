"""Stages of the benchmark bench/on_gpu.py that run ddp_train.py as a user does, and read its output and files."""

from __future__ import annotations

import os
import re

from bench.gpu.workbench import Row, Workbench
from harness.common.files import sha256

# nccl refuses two ranks on one GPU, but gloo allows them. The speeds of such a run mean nothing, but everything else is
# as on several GPUs.
TWO_ON_ONE_GPU = """
import torch, torch.distributed as dist
import harness.distributed.world as world
world.choose_device = lambda *_: torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
start = dist.init_process_group
dist.init_process_group = lambda backend, **given: start("gloo", **{**given, "device_id": None})
"""


def measure_step(bench: Workbench, settings: Row, *, microbatch: int, drop_rate: float) -> None:
    """Record speed, MFU and memory of a short training run. `settings` are keys of its train.json."""
    if bench.tiny:
        microbatch = min(microbatch, 4)
    name = f"step-{os.getpid()}"
    train = {"microbatch_size": microbatch, "train_steps": 16 if bench.tiny else 120, **settings}
    bench.add_run(name, {"drop_rate": drop_rate}, train)
    ended, left = bench.train(name)[0], bench.summary(name)
    values = {key: left.get(key) for key in ("tokens_per_second", "mfu", "peak_memory_gib", "final_train_loss")}
    label = " ".join(f"{key}={value}" for key, value in settings.items())
    bench.add("step", microbatch=microbatch, drop_rate=drop_rate, settings=label, **ended, **values)


def measure_search(bench: Workbench) -> None:
    """Record three runs: the search for the largest microbatch that fits the device (-f), training with the size that
    it found, and training with a size larger by a tenth plus 8, which must fail."""
    bench.add_run("find", {}, {"microbatch_size": 2, "min_train_tokens": 1})
    ended, output = bench.train("find", "-f")
    said = [line for line in output.splitlines() if line.startswith(("Max micro", "Memory:")) or "compiled" in line]
    bench.add("search", said=said, **ended)
    found = re.search(r"^Max microbatch size was (\d+)", output, re.M)
    if not found:
        return
    answer = int(found[1])
    for name, size in (("answer", answer), ("a-tenth-more", answer + answer // 10 + 8)):
        tokens = (1 if bench.tiny else 10) * size * bench.shape["context_length"]
        bench.add_run(f"find-{name}", {}, {"microbatch_size": size, "min_train_tokens": tokens})
        bench.add("trained", size=size, what=name, **bench.train(f"find-{name}")[0])


def measure_stop_and_continue(bench: Workbench) -> None:
    """Stop a run of two ranks by SIGTERM, and resume it. Record whether it ends with the same weights, bit for bit, as
    an uninterrupted run."""
    # Enough steps for the signal to arrive before the last one.
    microbatch, steps = (1, 50) if bench.tiny else (4, 60)
    train: Row = {"microbatch_size": microbatch, "gradient_accumulation_steps": 2, "train_steps": steps}
    train |= {"report_interval": 1, "validation_interval": steps // 3, "validation_batches": 4, "start_val_token": 0}
    train |= {"async_checkpoint": True, "validation_ranks": "all", "deterministic": True}
    for name in ("whole", "stopped"):
        bench.add_run(name, {"n_layers": 2}, train)
    ends = [
        bench.train(name, "--processes", "2", prelude=TWO_ON_ONE_GPU, stop_at=stop_at)[0]
        for name, stop_at in (("whole", None), ("stopped", "global step 5/"), ("stopped", None))
    ]
    weights = [bench.runs / name / "checkpoints" / "latest" / "model.safetensors" for name in ("whole", "stopped")]
    bench.add(
        "stop and continue",
        statuses=[end["status"] for end in ends],
        seconds=[round(end["seconds"], 1) for end in ends],
        stopped=ends[1]["status"] != 0,
        same_bits=all(path.exists() for path in weights) and len({sha256(path) for path in weights}) == 1,
    )


def measure_saving(bench: Workbench) -> None:
    """Record two runs with validation and checkpoints. The first run saves checkpoints in the training loop, the second
    in the background."""
    steps, interval = (12, 4) if bench.tiny else (120, 40)
    for in_background in (False, True):
        name = "saving-behind" if in_background else "saving-in-front"
        train: Row = {"microbatch_size": 4 if bench.tiny else 64, "train_steps": steps, "start_val_token": 0}
        train |= {"validation_interval": interval, "validation_batches": 4, "async_checkpoint": in_background}
        bench.add_run(name, {}, train)
        ended, left = bench.train(name)[0], bench.summary(name)
        values = {key: left.get(key) for key in ("tokens_per_second", "seconds")}
        bench.add("saving", in_background=in_background, status=ended["status"], wall_s=ended["seconds"], **values)
