"""Memory that torch frees on a CPU is kept for the next step if there is enough memory, and else returned to the
system."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.isolation import ROOT
from tests.support.launch import Workshop

# In each fork, allocates and frees blocks of 64 MiB several times. Prints the page faults of the last time, and the
# bytes by which resident memory has grown in the end. Under a limit, then allocates and frees many small blocks, and
# prints the bytes that are free at the heap's end (mallinfo2's `keepcost`).
PROGRAM = """
import ctypes, os, resource
import torch
from harness.common.memory import give_back_under_a_limit, keep_if_ample
class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
def step():
    blocks = [torch.ones(2**24) for _ in range(4)]
def measure(way):
    if way == "limited":
        resource.setrlimit(resource.RLIMIT_DATA, (2**34, 2**34))
    give_back_under_a_limit()
    keep_if_ample(2**20 if way == "scarce" else 2**40)
    before = status("VmRSS")
    for _ in range(6):  # the first few find gaps that are too small
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    left = status("VmRSS") - before
    for _ in range(3 * (way == "limited")):
        blocks = [bytearray(2**16) for _ in range(512)]
        del blocks
    print(way, faults, left, mallinfo().keepcost, flush=True)
torch.set_num_threads(1)
for way in ("kept", "limited", "scarce"):
    if not os.fork():
        measure(way)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_blocks_are_kept_where_there_is_room() -> None:
    """Large blocks are kept if there is room. Under a limit, at least 4 MiB stay free at the heap's end for small
    allocations, because oneDNN does not check whether its own succeed."""
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    found = {way: list(map(int, numbers)) for way, *numbers in map(str.split, done.stdout.splitlines())}
    faults, left, _ = found["kept"]
    assert faults < 1000
    assert left > 2**27
    for way in ("limited", "scarce"):
        faults, left, free = found[way]
        assert faults > 1000, "the system has to provide the pages again"
        assert left < 2**26
        assert way == "scarce" or 2**22 <= free < 2**23, "the rest of the 32 MiB is returned to the system"


WITHOUT_CHART = """
import ddp_train
from harness.training.chart_process import ChartProcess
ChartProcess.draw = lambda self: None
ddp_train.main()
"""


def test_a_run_keeps_what_its_steps_free(tmp_path: Path) -> None:
    """A step of the real command uses the memory that the previous step freed for its activations and gradients, here
    about 50 MiB, and needs few new pages from the system."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=65_000)
    model = {"context_length": 128, "emb_dim": 256, "drop_rate": 0.0}
    settings: dict[str, Any] = {"microbatch_size": 16, "gradient_accumulation_steps": 1, "report_interval": 1}
    settings |= {"train_steps": 30, "min_train_tokens": None, "checkpoint_interval": 50}
    settings |= {"validation_interval": None, "validation_batches": None}
    shop.add_run(model=model, **settings)
    command = [sys.executable, "-c", WITHOUT_CHART, "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    faults: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if step := re.match(r"global step (\d+)/", line):
                faults[int(step[1])] = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7])
    assert process.returncode == 0
    # In the first steps the heap grows now and then.
    assert (faults[29] - faults[11]) / 18 < 300, "a step needs too many new pages of 4 KiB"
