"""Time prepare_datasets.py against Hugging Face datasets and the method of Giles Thomas's lab notebook.

    uv run --with datasets bench/prepare_vs_peers.py my-parquet --rounds 5

In turns, all programs tokenize the same parquet files (column `text`) with GPT-2's vocabulary into a safetensors file.
The time that a program takes to start is included.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click
import psutil  # type: ignore[import-untyped]
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]

# The notebook's method: batches of 1,000 records, tokens as lists, one tensor per batch, then all tensors concatenated.
NOTEBOOK = """
import sys, glob, tiktoken, torch, pyarrow.parquet as pq
from safetensors.torch import save_file
folder, target = sys.argv[1:]
encoding = tiktoken.get_encoding("gpt2")
results = []
for path in sorted(glob.glob(folder + "/*.parquet")):
    for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
        tokens = []
        for each in encoding.encode_batch(batch.column(0).to_pylist(), disallowed_special=()):
            tokens.extend(each)
            tokens.append(encoding.eot_token)
        results.append(torch.tensor(tokens, dtype=torch.uint16))
save_file({"tokens": torch.cat(results)}, target)
"""

# A common method: datasets.map over batches of texts on all cores, then one file.
DATASETS_MAP = """
import sys, os, glob, datasets, tiktoken, numpy as np
from safetensors.numpy import save_file
folder, target = sys.argv[1:]
datasets.disable_progress_bars()
def encode(batch):
    encoding = tiktoken.get_encoding("gpt2")
    ids = [[*tokens, encoding.eot_token] for tokens in encoding.encode_ordinary_batch(batch["text"], num_threads=1)]
    return {"ids": ids, "length": [len(each) for each in ids]}
files = sorted(glob.glob(folder + "/*.parquet"))
data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=target + ".cache")
data = data.map(encode, batched=True, remove_columns=data.column_names, num_proc=len(os.sched_getaffinity(0)))
tokens = np.empty(sum(data["length"]), np.uint16)
at = 0
for batch in data.select_columns("ids").with_format("numpy").iter(1000):
    for ids in batch["ids"]:
        tokens[at : at + len(ids)] = ids
        at += len(ids)
save_file({"tokens": tokens}, target)
"""


def watch_memory(process: subprocess.Popen[bytes]) -> float:
    """Wait for a process to end. Return the peak memory of the process and its descendants together, in MiB.

    A page that n processes share counts as 1/n page in each (proportional set size, Pss).
    """
    peak, parent = 0.0, psutil.Process(process.pid)
    while process.poll() is None:
        with suppress(psutil.Error):  # one of them has ended
            family = [parent, *parent.children(recursive=True)]
            peak = max(peak, sum(each.memory_full_info().pss for each in family) / 2**20)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.25)  # more frequent reading would take time from the measured program
    return peak


@click.command()
@click.argument("text", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Runs of each program.")
def main(text: Path, rounds: int) -> None:
    """Tokenize the parquet files in the folder TEXT with each program. Print each program's tokens/s, its time divided
    by ours, and its peak memory."""
    names = ["ours", "notebook", *(["datasets.map"] if importlib.util.find_spec("datasets") else [])]
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for _ in range(rounds):
            for name in names:
                seconds, peak, tokens = run(name, text, work)
                measured[name].append((seconds, peak))
    print(f"{tokens:,} tokens, {len(os.sched_getaffinity(0))} cores, medians of {rounds} rounds\n")
    print(f"{'':14} {'tokens/s':>12} {'their time / ours':>18} {'peak MiB':>9}")
    medians = {name: [statistics.median(each) for each in zip(*rows, strict=True)] for name, rows in measured.items()}
    ours = medians["ours"][0]
    for name, (seconds, peak) in medians.items():
        print(f"{name:14} {tokens / seconds:>12,.0f} {seconds / ours:>18.2f} {peak:>9,.0f}")


def run(name: str, text: Path, work: Path) -> tuple[float, float, int]:
    """Let the program `name` tokenize the text once. Return the seconds, the peak memory in MiB, and the number of
    tokens written."""
    for left in ("out", "tokens.cache"):
        shutil.rmtree(work / left, ignore_errors=True)
    target = work / "tokens"
    if name == "ours":
        target = work / "out" / "train.safetensors"
        command = [str(ROOT / "prepare_datasets.py"), str(text), str(work / "out"), "--validation-fraction", "0"]
    else:
        command = ["-c", {"notebook": NOTEBOOK, "datasets.map": DATASETS_MAP}[name], str(text), str(target)]
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    peak = watch_memory(process)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{name} failed")
    with safe_open(target, "numpy") as file:
        return seconds, peak, file.get_slice("tokens").get_shape()[0]


if __name__ == "__main__":
    main()
