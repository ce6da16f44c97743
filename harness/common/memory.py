"""Memory of the device: limits for the microbatch search, peak usage, recognition of out-of-memory errors, and the C
library's handling of freed memory on a CPU."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.common.errors import RunError, UserError
from harness.common.messages import GIB

# Writable memory that a microbatch search on the CPU keeps free. Threads and libraries cannot work with less. It also
# covers what a long run on several ranks needs beyond the few training steps that the search measures: growing heaps
# and communication buffers.
HEADROOM_BYTES = 2**26
LARGEST_LIMIT = 2**62
# GPU memory that a microbatch search keeps free, for kernels that are loaded later and for fragmentation.
CUDA_RESERVE_BYTES = 3 * 2**28
# More GPU memory than CUDA itself takes in a process, so whatever exceeds it belongs to other processes.
OWN_CUDA_BYTES = 2**31
# Message of cuDNN's attention if it finds no execution plan, because memory is short or the operation is not supported.
NO_CUDNN_PLAN = "No valid execution plans"
# If this much of a GPU's memory is free, memory is not the reason for that message.
PLAN_BYTES = CUDA_RESERVE_BYTES // 2
# remedy if memory of the host, not of a GPU, ran out
MORE_MEMORY = "give the process more memory or, on a CPU, lower microbatch_size (-f finds the largest that fits)"
# remedy of a command (a training beside it may fill the GPU), except where training has its own
FREE_MEMORY = (
    "end what else uses this memory, lower --batch-size or --samples if the command has it or, on a GPU, put "
    "CUDA_VISIBLE_DEVICES= (empty) before the command to use the CPU"
)
CGROUPS = Path("/sys/fs/cgroup")  # this process's container; only cgroup v2 has the files that are read here
OWN_CGROUP = Path("/proc/self/cgroup")
# Messages of libraries and the system for a failed allocation. torch's own allocator has an exception class for it.
OUT_OF_MEMORY = re.compile(
    "|".join(
        (
            "(can't|Cannot) allocate memory",
            "out of memory",  # also printed by CUDA, Triton and NCCL
            "bad_alloc",
            "can't start new thread",  # a thread's stack is writable memory, too
            "failed to map segment",  # of a library that is imported late
            "CU(BLAS|DNN)_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
            NO_CUDNN_PLAN,
            r"Cuda failure 2\b",  # cudaErrorMemoryAllocation, as NCCL reports it
            # oneDNN's bf16 kernels on a CPU. With the word "descriptor" it means that the kernel is not supported.
            "could not (create|execute) a primitive(?! descriptor)",
        )
    )
)


@dataclass(frozen=True)
class MemoryLimit:
    """Limit on one rank's memory during a microbatch search."""

    gib: float  # limit on the whole GPU's memory; on a CPU, on the process's writable memory
    usable_bytes: float  # the part of the limit that `peak_of_limited_memory` may reach
    note: str  # what a microbatch cannot use of the limit, to follow the words "limit 40.00 GiB, of which"
    asked_gib: float | None = None  # the user's limit; None for all available memory
    remedy: str = ""  # if not even one sequence fits


def limit_memory(device: torch.device, limit_gib: float | None, local_size: int) -> MemoryLimit:
    """Return the memory limit of a microbatch search. On a GPU, allocations beyond the limit fail from now on.

    On a CPU, the child process that tries a microbatch size must call `limit_cpu_memory`. If `limit_gib` is None, all
    available memory may be used; on a CPU, `local_size` ranks share the free memory. Raises UserError on a CPU if the
    system is not Linux.
    """
    if device.type == "cuda":
        total = float(torch.cuda.mem_get_info(device)[1])
        limit = total if limit_gib is None else min(limit_gib * GIB, total)
        used, reserve, how = _outside_allocator(device), CUDA_RESERVE_BYTES, "taken outside torch"
        usable = max(0.0, limit - used - reserve)
        torch.cuda.set_per_process_memory_fraction(usable / total, device)
    elif sys.platform == "linux":
        used, reserve, how = _status_bytes("VmData"), HEADROOM_BYTES, "the program's own"
        limit = limit_gib * GIB if limit_gib is not None else used + free_memory() / local_size
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = min(limit, LARGEST_LIMIT if hard == resource.RLIM_INFINITY else hard)
        usable = max(0.0, limit - reserve)
    else:
        raise UserError(
            "-f on a CPU needs Linux: other systems cannot limit a process's memory; set microbatch_size in train.json"
        )
    note = f"{used / GIB:.2f} GiB are {how} and {reserve / GIB:.2f} GiB left as a reserve"
    more = "free memory" if device.type == "cuda" else "free memory, or raise `ulimit -d`"
    if limit_gib is not None and limit >= limit_gib * GIB:  # the system's own limit is no smaller
        more = "raise --memory-limit-gib"
    remedy = more if used + reserve >= limit else f"use a smaller model or context, or {more}"
    return MemoryLimit(limit / GIB, usable, note, limit_gib, remedy)


def limit_cpu_memory(limit: MemoryLimit) -> None:
    """Let this process have no more writable memory than `limit.usable_bytes` from now on (RLIMIT_DATA). Raises
    MemoryError if it has more already."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    usable = max(int(limit.usable_bytes), resource.getpagesize())  # Linux treats a limit of 0 as no limit
    if usable < _status_bytes("VmData"):
        raise MemoryError
    resource.setrlimit(resource.RLIMIT_DATA, (usable, hard))
    give_back_under_a_limit()


def _outside_allocator(device: torch.device) -> int:
    """Return the bytes of a CUDA device that are used outside this process's torch allocator."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def taken_by_others(device: torch.device) -> str | None:
    """Return a remark if other processes hold much of a CUDA device's memory, otherwise None. Must be called before
    this process has put anything on the device and before NCCL allocates its buffers there."""
    if device.type != "cuda":
        return None
    outside, (_, total) = _outside_allocator(device), torch.cuda.mem_get_info(device)
    held = f"{outside / GIB:.1f} of the {total / GIB:.1f} GiB of {device}"
    return f"another process holds about {held}; `nvidia-smi` shows which" if outside > OWN_CUDA_BYTES else None


def free_memory() -> int:
    """Return the bytes of memory that are free on this machine (on macOS: all of its memory). Returns fewer if
    cgroup v2 leaves fewer to this process's container or batch job."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # macOS reports its total memory, but not how much is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    own = re.search("^0::/(.*)", OWN_CGROUP.read_text() if OWN_CGROUP.exists() else "", re.MULTILINE)
    group = Path(own[1] if own else "")
    # A batch job's limit is often on a group that contains the process's own.
    return min(available, *(_free_in_cgroup(CGROUPS / each) for each in (group, *group.parents)))


def _free_in_cgroup(group: Path) -> int:
    """Return the bytes of memory that a control group may still take: LARGEST_LIMIT if no limit is known."""
    try:
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # memory.max can be "max"
        return LARGEST_LIMIT
    # memory.current counts cached files, too, although the kernel drops them if memory gets short.
    return left + sum(int(statistics.get(each, 0)) for each in ("active_file", "inactive_file"))


def peak_of_limited_memory(device: torch.device) -> int:
    """Return the peak, in bytes, of the memory that a MemoryLimit limits.

    - CUDA: memory reserved by the allocator since its statistics were reset
    - CPU: writable memory of this process since its start (estimated)
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    # Linux records the peak of a process's virtual memory (VmPeak) but not of its writable memory. These two kinds of
    # memory are assumed to differ always by the same amount.
    return _status_bytes("VmPeak") - (_status_bytes("VmSize") - _status_bytes("VmData"))


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes since the process began: memory reserved by the allocator on CUDA, resident
    memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sys.platform == "darwin" else _status_bytes("VmHWM")


def release_memory(device: torch.device) -> None:
    """Free all memory that is no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception means that memory ran out, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if NO_CUDNN_PLAN in str(error) and torch.cuda.is_initialized() and torch.cuda.mem_get_info()[0] >= PLAN_BYTES:
        return False
    return isinstance(error, (RuntimeError, OSError, ImportError, RunError)) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Return True if the text contains a message that can mean a failed allocation."""
    return OUT_OF_MEMORY.search(text) is not None


def _status_bytes(field: str) -> int:
    """Return, in bytes, the value of a field that /proc/self/status gives in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# Memory that torch has freed on a CPU ---------------------------------------------------------------------------------
#
# The C library either keeps freed memory for the next allocation or returns it to the system. A training step frees its
# activations and gradients, and the next step allocates as much again. If the memory was returned, the system supplies
# every page anew and sets it to zero first, which takes a tenth of a step's processor time or more (docs/LOG.md).

# Parameters of mallopt(3), from its header; their values are C ints.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
NEVER = -1
DEFAULT_MAPPINGS = 65536
OWN_MAPPING_BYTES = 2**17  # glibc's default; unless it is set, glibc raises it to the size of freed blocks
# Memory kept free at the end of the heap for small blocks. oneDNN crashes with a segmentation fault if it cannot
# allocate a small block, which happens when larger blocks have just taken the last page.
CUSHION_BYTES = 2**22
CUSHION_BLOCK = 2**15
# Gaps between kept blocks can raise memory use by half, and the optimizer's state may still have to be allocated.
AMPLE = 2


def give_back_under_a_limit() -> None:
    """Make the C library return large freed blocks to the system at once, if RLIMIT_DATA limits this process.

    Both the microbatch search and training must call this function.
    """
    if resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        return
    # The search and training need the same settings, or the size that the search found may not fit.
    _mallopt(M_MMAP_MAX, DEFAULT_MAPPINGS)
    _mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
    _mallopt(M_TRIM_THRESHOLD, OWN_MAPPING_BYTES)
    _mallopt(M_TOP_PAD, CUSHION_BYTES)
    blocks = [bytearray(CUSHION_BLOCK) for _ in range(CUSHION_BYTES // CUSHION_BLOCK)]
    del blocks


def keep_if_ample(free_bytes: int) -> None:
    """Make the C library keep freed blocks from now on, if `free_bytes` is at least AMPLE times this process's peak
    memory.

    `free_bytes` is the free memory that this process may use. Does nothing if RLIMIT_DATA sets a limit.
    """
    is_limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    if not is_limited and free_bytes >= AMPLE * peak_bytes(torch.device("cpu")):
        _mallopt(M_MMAP_MAX, 0)  # no block gets its own mapping, which would be unmapped when it is freed
        _mallopt(M_TRIM_THRESHOLD, NEVER)


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has mallopt
    if mallopt is not None:
        mallopt(parameter, value)
