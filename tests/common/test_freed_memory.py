"""Memory that torch frees on a CPU is kept for the next step if there is enough memory, and else returned to the
system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.isolation import ROOT
from tests.support.launch import Workshop

# In each fork, allocates and frees two blocks of 64 MiB many times. Prints the page faults of the last ten times, and
# the bytes by which resident memory has grown in the end. Under a limit, then allocates and frees many small blocks,
# and prints the bytes that are free at the heap's end (mallinfo2's `keepcost`).
PAGES = 2 * 2**26 // os.sysconf("SC_PAGE_SIZE")
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
    blocks = [torch.ones(2**24) for _ in range(2)]
def measure(way):
    if way == "limited":
        resource.setrlimit(resource.RLIMIT_DATA, (2**34, 2**34))
    give_back_under_a_limit()
    keep_if_ample(2**20 if way == "scarce" else 2**40)
    before = status("VmRSS")
    for _ in range(30 if way == "kept" else 1):  # the first few find gaps that are too small
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
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
    """Large blocks of freed memory are kept if there is room. Under a limit, at least 4 MiB stay free at the heap's end
    for small allocations, because oneDNN does not check whether its own succeed."""
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    found = {way: list(map(int, numbers)) for way, *numbers in map(str.split, done.stdout.splitlines())}
    faults, left, _ = found["kept"]
    assert faults < 10 * PAGES / 10
    assert left > 2**26
    for way in ("limited", "scarce"):
        faults, left, free = found[way]
        assert faults > 10 * PAGES / 2, "the system has to provide the pages again"
        assert left < 2**25
        assert way == "scarce" or 2**22 <= free < 2**23, "the rest of the 32 MiB is returned to the system"


FAULTS = """
import resource
from tests.support.faults import *
before(STEP, lambda: print("faults", resource.getrusage(resource.RUSAGE_SELF).ru_minflt, flush=True))
"""


@pytest.mark.slow
def test_a_run_keeps_what_its_steps_free(tmp_path: Path) -> None:
    """A step of the real command uses the memory that the previous step freed for its activations and gradients, here
    about 50 MiB, and needs few new pages from the system."""
    shop = Workshop(tmp_path, {"THP_MEM_ALLOC_ENABLE": "0"})
    shop.add_dataset(tokens=31 * 2**15)
    settings: dict[str, Any] = {"microbatch_size": 2**11, "gradient_accumulation_steps": 1, "train_steps": 30}
    settings |= dict.fromkeys(("min_train_tokens", "validation_interval", "validation_batches"))
    shop.add_run(model={"drop_rate": 0.0}, **settings, checkpoint_interval=50)
    printed = shop.train(ranks=1, prelude=FAULTS).stdout
    faults = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("faults ")]
    # In the first steps the heap grows now and then.
    assert (faults[29] - faults[11]) / 18 < 300, "a step needs too many new pages of 4 KiB"
