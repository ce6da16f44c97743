"""Stages that run ddp_train.py as a user does, and look at what it says and leaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gpu.workbench import MissingKeyError, Workbench

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 12
COMMAND_SECONDS = 280
# nccl refuses two ranks on one GPU; gloo does not. Speed means nothing then, the rest is what eight GPUs do.
TWO_ON_ONE_GPU = """
import torch, torch.distributed as dist
import harness.distributed.world as world
world.choose_device = lambda *_: torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
start = dist.init_process_group
dist.init_process_group = lambda backend, **given: start("gloo", **{**given, "device_id": None})
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended; `lines` are what it said, errors included."""

    status: int
    seconds: float
    lines: list[str]

    def show(self) -> Ended:
        print("\n".join(f"    {line[:200]}" for line in self.lines[-SHOWN_LINES:]), flush=True)
        return self


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def train(bench: Workbench, name: str, *options: str) -> Ended:
    """`ddp_train.py NAME` with one process, to its end."""
    command = [sys.executable, str(ROOT / "ddp_train.py"), name, str(bench.make_data())]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, "--runs-dir", str(bench.runs), *options],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        env=environment(),
    )
    return Ended(done.returncode, time.perf_counter() - began, (done.stdout + done.stderr).splitlines()).show()


def weights_hash(bench: Workbench, name: str) -> str | None:
    """SHA-256 of the latest checkpoint's weights; None if there is no checkpoint."""
    path = bench.runs / name / "checkpoints" / "latest" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def summary(bench: Workbench, name: str) -> dict[str, Any]:
    """summary.json, or nothing."""
    path = bench.runs / name / "summary.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content


def measure_stop_and_continue(bench: Workbench) -> None:
    """Record if a run stopped by SIGTERM and resumed ends with the same weights, to the bit, as a run without a stop.
    Two ranks; deterministic, where this version has that key."""
    # Long enough for the signal to come in the middle.
    microbatch, steps = (1, 150) if bench.tiny else (4, 60)
    tokens = steps * 2 * 2 * microbatch * bench.shape["context_length"]
    train_json: dict[str, Any] = {"microbatch_size": microbatch, "gradient_accumulation_steps": 2}
    train_json |= {"min_train_tokens": tokens, "clipping_max_norm": 1.0, "report_interval": 1}
    train_json |= {"validation_interval": steps // 3, "validation_batches": 4, "start_val_token": 0}
    train_json |= {"async_checkpoint": True, "validation_ranks": "all"}
    deterministic = {"deterministic": True}
    for name in ("whole", "stopped"):
        try:
            bench.add_run(name, {"n_layers": 2}, train_json | deterministic)
        except MissingKeyError:
            deterministic = {}
            bench.add_run(name, {"n_layers": 2}, train_json)
    ends = [
        two_ranks(bench, "whole"),
        two_ranks(bench, "stopped", stop_at="global step 5/"),
        two_ranks(bench, "stopped"),
    ]
    hashes = {weights_hash(bench, name) for name in ("whole", "stopped")}
    bench.results.add(
        "stop and continue",
        deterministic=bool(deterministic),
        statuses=[end.status for end in ends],
        seconds=[round(end.seconds, 1) for end in ends],
        stopped=ends[1].status != 0,
        same_bits=len(hashes) == 1 and None not in hashes,
    )


def two_ranks(bench: Workbench, name: str, stop_at: str | None = None) -> Ended:
    """Run ddp_train.py with two ranks, on the one GPU if there is one; stop it by SIGTERM at the first line that begins
    with `stop_at`."""
    shim = bench.work / "two_on_one_gpu.py"
    # Not by runpy, which makes the name of what it runs the one of the command that --processes starts again.
    shim.write_text(
        TWO_ON_ONE_GPU + f"exec(compile(open({str(ROOT / 'ddp_train.py')!r}).read(), 'ddp_train.py', 'exec'))\n"
    )
    command = [sys.executable, str(shim), name, str(bench.make_data()), "--runs-dir", str(bench.runs)]
    command += ["--processes", "2"]
    began, lines = time.perf_counter(), []
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if stop_at and line.startswith(stop_at):
                process.send_signal(signal.SIGTERM)
                stop_at = None
    return Ended(process.returncode, time.perf_counter() - began, lines).show()


def measure_search(bench: Workbench) -> None:
    """Record -f on the whole device, then training with its answer, and with a tenth and 8 more, which must fail."""
    base = {"clipping_max_norm": 1.0}
    bench.add_run("find", {}, base | {"microbatch_size": 2})
    end = train(bench, "find", "-f")
    found = re.search(r"^Max microbatch size was (\d+)", "\n".join(end.lines), re.M)
    said = [line for line in end.lines if line.startswith(("Max micro", "Memory:")) or "compiled" in line]
    limit_hit = any("recompile_limit" in line for line in end.lines)
    bench.results.add("search", status=end.status, seconds=end.seconds, said=said, recompile_limit_hit=limit_hit)
    if not found:
        return
    answer, length = int(found[1]), bench.shape["context_length"]
    steps = 1 if bench.tiny else 10
    for name, size in (("answer", answer), ("a tenth more", answer + answer // 10 + 8)):
        run = f"find-{name.replace(' ', '-')}"
        bench.add_run(run, {}, base | {"microbatch_size": size, "min_train_tokens": steps * size * length})
        end = train(bench, run)
        error = next((line[:300] for line in end.lines if line.startswith("error:")), None)
        bench.results.add("trained", size=size, what=name, status=end.status, seconds=end.seconds, error=error)


def measure_saving(bench: Workbench) -> None:
    """Record a run on one GPU with validation and checkpoints, saved in front and in the background."""
    size, length = (4, 32) if bench.tiny else (64, 1024)
    steps, interval = (12, 4) if bench.tiny else (120, 40)
    for in_background in (False, True):
        name = "saving-behind" if in_background else "saving-in-front"
        train_json: dict[str, Any] = {
            "microbatch_size": size,
            "min_train_tokens": steps * size * length,
            "start_val_token": 0,
        }
        train_json |= {"validation_interval": interval, "validation_batches": 4, "async_checkpoint": in_background}
        bench.add_run(name, {}, train_json)
        end, left = train(bench, name), summary(bench, name)
        bench.results.add(
            "saving",
            in_background=in_background,
            status=end.status,
            wall_s=end.seconds,
            tokens_per_s=left.get("tokens_per_second"),
            seconds=left.get("seconds"),
        )


def measure_repeat(bench: Workbench, deterministic: bool) -> None:
    """Run the same training twice: record if the weights are the same to the bit, and both speeds."""
    size, length, steps = (4, 32, 6) if bench.tiny else (32, 1024, 60)
    train_json: dict[str, Any] = {
        "microbatch_size": size,
        "min_train_tokens": steps * size * length,
        "clipping_max_norm": 1.0,
    }
    if deterministic:
        train_json["deterministic"] = True
    hashes, speeds, statuses = set(), [], []
    for turn in (1, 2):
        name = f"repeat-{'deterministic' if deterministic else 'usual'}-{turn}"
        bench.add_run(name, {}, train_json)
        statuses.append(train(bench, name).status)
        hashes.add(weights_hash(bench, name))
        speeds.append(summary(bench, name).get("tokens_per_second"))
    same = len(hashes) == 1 and None not in hashes
    bench.results.add("repeat", deterministic=deterministic, statuses=statuses, same_bits=same, tokens_per_s=speeds)
