"""Measurements around the training step: processes, data, saves, start and help. Each gives rows, and prints them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from harness.common.units import GIB

ROOT = Path(__file__).resolve().parents[1]
Row = dict[str, Any]
RANKS = 8
SPARSE_GIB = 20
LOADED_GIB = 1
MODEL = {
    "vocab_size": 4096,
    "context_length": 128,
    "emb_dim": 128,
    "n_heads": 4,
    "n_layers": 2,
    "drop_rate": 0.0,
    "qkv_bias": False,
}
LARGER = {**MODEL, "emb_dim": 512, "n_heads": 8, "n_layers": 6}  # 23 million parameters
TRAIN = {"dataset": "builtin/python-stdlib", "microbatch_size": 8, "start_train_token": 0, "clipping_max_norm": 1.0}
# An open that reads as training does, and load_file of as much.
OPEN = "from pathlib import Path; import sys; from harness.data.dataset import TokenFile; TokenFile(Path(sys.argv[1]))"
LOAD = "import sys; from safetensors.torch import load_file; load_file(sys.argv[1])['tokens'].sum()"


def measure(part: str, *, quick: bool) -> list[Row]:
    """The rows of one part, printed; a part that fails is a row that says why."""
    try:
        rows = PARTS[part](quick)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        rows = [{"what": part, "not_run": str(error).splitlines()[0] if str(error) else type(error).__name__}]
    for row in rows:
        shown = f"not run: {row['not_run']}" if "not_run" in row else row["result"]
        click.echo(f"{row['what']}: {shown}")
    return rows


def _train(folder: Path, name: str, model: Row, *, ranks: int = 1, **settings: Any) -> tuple[Row, float]:
    """Train a run of its own; its summary, and the seconds from the command to the first step's line."""
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "model.json").write_text(json.dumps(model))
    (run / "train.json").write_text(json.dumps({**TRAIN, **settings}))
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    # The cores are shared out, as a user would have it who wants all of them used.
    threads = str(max(1, len(os.sched_getaffinity(0)) // ranks))
    start, first = time.monotonic(), float("nan")
    command = [sys.executable, *launcher, "ddp_train.py", name, str(folder / "datasets")]
    with subprocess.Popen(
        [*command, "--runs-dir", str(folder / "runs")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if "global step 0/" in line:
                first = time.monotonic() - start
        errors = process.stderr.read()
    if process.returncode:
        raise ValueError(f"{name}: {errors.strip().splitlines()[-1] if errors.strip() else process.returncode}")
    return json.loads((run / "summary.json").read_text()), first


def _training(quick: bool) -> list[Row]:
    """One process and two with the same model and microbatch; the seconds to the first step."""
    tokens = 40_000 if quick else 400_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train(folder, "once", MODEL, min_train_tokens=1024, checkpoint_interval=1000)  # makes the data set
        speeds: dict[int, list[float]] = {1: [], 2: []}
        firsts: list[float] = []
        for turn in range(1 if quick else 3):
            for ranks in (1, 2):
                settings = {"min_train_tokens": tokens, "checkpoint_interval": 10_000}
                summary, first = _train(folder, f"{ranks}-{turn}", MODEL, ranks=ranks, **settings)
                speeds[ranks].append(summary["tokens_per_second"])
                if ranks == 1:
                    firsts.append(first)
    one, two = (statistics.median(speeds[ranks]) for ranks in (1, 2))
    start = statistics.median(firsts)
    return [
        {
            "what": "1 → 2 processes, 2 × 128",
            "result": f"{one:,.0f} → {two:,.0f} tokens/s, × {two / one:.2f}",
            "tokens_per_second": [one, two],
        },
        {"what": "process start to first step, data set there", "result": f"{start:.1f} s", "seconds": start},
    ]


def _saving(quick: bool) -> list[Row]:
    """Seconds of a save that training waits for, with the writer in front and behind."""
    steps = 4 if quick else 10
    waits: dict[bool, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for behind in (False, True):
            settings = {"min_train_tokens": 1024 * 3 * steps, "checkpoint_interval": 3, "keep_checkpoints": 1}
            summary, _ = _train(Path(name), f"save-{behind}", LARGER, **settings, async_checkpoint=behind)
            waits[behind] = summary["seconds"]["checkpointing"] / (steps + 1)
    what = "seconds of training per save, 23 M parameters, in front and behind"
    return [{"what": what, "result": f"{waits[False]:.2f} and {waits[True]:.2f} s", "seconds": list(waits.values())}]


def sparse_tokens(path: Path, size: int) -> None:
    """A token file of `size` bytes of zeros, which takes no room on the disk."""
    header = json.dumps({"tokens": {"dtype": "U16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def _peaks(code: str, path: Path, count: int) -> tuple[float, float]:
    """Seconds until so many processes have done it, and their peak memory in GiB, all together."""
    tail = "; print(next(l for l in open('/proc/self/status') if 'VmHWM' in l).split()[1])"
    start = time.monotonic()
    command = [sys.executable, "-c", code + tail, str(path)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    peaks = [int(process.communicate()[0]) * 1024 for process in processes]
    return time.monotonic() - start, sum(peaks) / GIB


def _opening(quick: bool) -> list[Row]:
    """A large data set on eight ranks, against reading it as safetensors' load_file does."""
    with tempfile.TemporaryDirectory() as name:
        large, small = Path(name) / "large.safetensors", Path(name) / "small.safetensors"
        sparse_tokens(large, SPARSE_GIB * GIB)
        sparse_tokens(small, (LOADED_GIB if not quick else 1) * GIB // (8 if quick else 1))
        seconds, peak = _peaks(OPEN, large, RANKS)
        of_file = small.stat().st_size / GIB
        loading, loaded = _peaks(LOAD, small, 1)
    opened = {"result": f"{seconds:.1f} s, {peak:.2f} GiB in all", "seconds": seconds, "gib": peak}
    return [
        {"what": f"opening {SPARSE_GIB} GiB (sparse) on {RANKS} ranks, with Python's start", **opened},
        {
            "what": f"load_file of {of_file:.2f} GiB in one process",
            "result": f"{loading:.1f} s, {loaded:.2f} GiB",
            "seconds": loading,
        },
        {
            "what": f"load_file of {SPARSE_GIB} GiB on {RANKS} ranks",
            "not_run": f"it would take {SPARSE_GIB * RANKS} GiB of memory, and {SPARSE_GIB} GiB in each rank",
        },
    ]


def _help(quick: bool) -> list[Row]:
    """What `--help` takes."""
    taken = []
    for _ in range(3 if quick else 7):
        start = time.monotonic()
        subprocess.run([sys.executable, "ddp_train.py", "--help"], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        taken.append(time.monotonic() - start)
    median = float(np.median(taken))
    return [{"what": "--help", "result": f"{median:.2f} s", "seconds": median}]


PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "training": _training,
    "saving": _saving,
    "opening": _opening,
    "help": _help,
}
