"""Memory that torch frees on a CPU is kept for the next step if there is enough memory, and else returned to the
system."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.isolation import ROOT
from tests.support.launch import Workshop

# Allocates and frees blocks of 64 MiB several times. Prints the page faults of the last time, and the bytes by which
# resident memory has grown in the end.
PROGRAM = """
import json, resource, sys
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_DATA, (2**34, 2**34))
from harness.common.memory import give_back_under_a_limit, keep_if_ample
give_back_under_a_limit()
import torch
keep_if_ample(2**30 if sys.argv[1] == "scarce" else 2**40)
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
def step():
    blocks = [torch.ones(2**24) for _ in range(4)]
before = status("VmRSS")
for _ in range(6):  # the first few find gaps that are too small
    step()
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, status("VmRSS") - before]))
"""


@pytest.mark.parametrize("way", ["kept", "limited", "scarce"])
def test_blocks_are_kept_where_there_is_room(way: str) -> None:
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    faults, left = json.loads(done.stdout)
    if way == "kept":
        assert faults < 1000
        assert left > 2**27
    else:
        assert faults > 1000, "the system has to provide the pages again"
        assert left < 2**26


def test_a_run_keeps_what_its_steps_free(tmp_path: Path) -> None:
    """A step of the real command uses the memory that the previous step freed for its activations and gradients, here
    about 50 MiB, and needs few new pages from the system."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=50_000)
    model = {"context_length": 128, "emb_dim": 256, "drop_rate": 0.0}
    settings: dict[str, Any] = {"microbatch_size": 16, "gradient_accumulation_steps": 1, "report_interval": 1}
    settings |= {"train_steps": 20, "min_train_tokens": None, "checkpoint_interval": 50}
    settings |= {"validation_interval": None, "validation_batches": None}
    shop.add_run(model=model, **settings)
    command = [sys.executable, "ddp_train.py", "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
    faults: dict[int, int] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if step := re.match(r"global step (\d+)/", line):
                faults[int(step[1])] = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[7])
    assert process.returncode == 0
    assert (faults[19] - faults[5]) / 14 < 300, "a step needs too many new pages of 4 KiB"


# Prints the bytes that are free at the heap's end (mallinfo2's `keepcost`) after many blocks were allocated and freed.
CUSHION = """
import ctypes
from harness.common.memory import give_back_at_once
class MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = MallInfo
give_back_at_once()
for _ in range(3):
    blocks = [bytearray(2**16) for _ in range(512)]
    del blocks
print(mallinfo().keepcost)
"""


def test_small_blocks_find_room_where_large_ones_have_gone_back() -> None:
    """At least 4 MiB stay free at the heap's end for small allocations, because oneDNN does not check whether its own
    succeed."""
    done = subprocess.run([sys.executable, "-c", CUSHION], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 2**22 <= int(done.stdout) < 2**23, "the rest of the 32 MiB is returned to the system"
