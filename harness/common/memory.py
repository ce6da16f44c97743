"""Memory of the device: limits for the microbatch search, the peak in use, recognising out-of-memory errors, and memory
that has been freed on a CPU, which the C library keeps or gives back."""

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
from harness.common.units import GIB

# Kept free by a search, and below it threads and libraries cannot work. For what a long training on several ranks may
# take beyond a probe: growing heaps, buffers of exchanges. (One process of four steps took within 2 MiB of its probe.)
HEADROOM_BYTES = 2**26
LARGEST_LIMIT = 2**62
# Kept free on a GPU by a search: kernels that are loaded later, and blocks that do not fit into one another's gaps.
CUDA_RESERVE_BYTES = 3 * 2**28
# A process that has begun to use a GPU, and has connected to the others, holds about this much of it.
OWN_CUDA_BYTES = 2**31
# With less than this free, CUDA itself and the exchange's buffers find no room.
LEAST_CUDA_BYTES = 2**30
# oneDNN's kernels for bf16 on a CPU say no more when they get no memory; one that is not supported has no descriptor.
ONEDNN_FAILURE = re.compile(r"could not (create|execute) a primitive(?! descriptor)")
# How libraries and the system say that an allocation failed; torch's own allocator has an exception class for it.
OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",  # CUDA, Triton and NCCL, too
    "bad_alloc",
    "can't start new thread",  # whose stack is writable memory, too
    "failed to map segment",  # a library that is imported late
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    "No valid execution plans",  # cuDNN's attention, none of whose plans gets its workspace
)
OUT_OF_MEMORY_NUMBER = re.compile(r"Cuda failure 2\b")  # cudaErrorMemoryAllocation, as NCCL tells it


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on one rank's memory, for a search."""

    gib: float  # of the whole device; on the CPU, of a process's writable memory
    usable_bytes: float  # of it, what `peak_under_limit` may come to
    note: str  # on the difference, to be read after "limit 40.00 GiB, of which"
    asked_gib: float | None = None  # by the user; None: all there is


def limit_memory(device: torch.device, limit_gib: float | None, local_size: int) -> MemoryLimit:
    """Set the limit on a GPU: allocations beyond it fail from now on. On a CPU return the one that `limit_cpu_memory`
    sets in a process of its own.

    CUDA: the caching allocator's fraction of the device, which is what a device of `limit_gib` would have left beside
    what is taken now outside the allocator (CUDA itself, exchange buffers, other processes) and CUDA_RESERVE_BYTES.
    CPU: all of a process's writable memory but HEADROOM_BYTES. Without a `limit_gib`: the whole device, or on the CPU
    this process's share of the memory that is free now. Raises UserError on a CPU under another system than Linux.
    """
    if device.type == "cuda":
        return _limit_cuda_memory(device, limit_gib)
    if sys.platform != "linux":
        raise UserError("-f on a CPU needs Linux: no other system limits a process's writable memory (RLIMIT_DATA)")
    used = _status_bytes("VmData")
    limit = limit_gib * GIB if limit_gib is not None else used + free_memory() / local_size
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = min(limit, LARGEST_LIMIT if hard == resource.RLIM_INFINITY else hard)
    note = f"{used / GIB:.2f} GiB are the program's own and {HEADROOM_BYTES / GIB:.2f} GiB left as a reserve"
    return MemoryLimit(limit / GIB, max(0.0, limit - HEADROOM_BYTES), note, limit_gib)


def limit_cpu_memory(limit: MemoryLimit) -> None:
    """Make allocations of writable memory beyond the limit fail in this process from now on (RLIMIT_DATA)."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit.usable_bytes), hard))
    give_back_under_a_limit()


def _limit_cuda_memory(device: torch.device, limit_gib: float | None) -> MemoryLimit:
    _, total = torch.cuda.mem_get_info(device)
    limit = total if limit_gib is None else min(limit_gib * GIB, total)
    outside = outside_allocator_bytes(device)
    usable = max(0.0, limit - outside - CUDA_RESERVE_BYTES)
    torch.cuda.set_per_process_memory_fraction(usable / total, device)
    note = f"{outside / GIB:.2f} GiB are taken outside torch and {CUDA_RESERVE_BYTES / GIB:.2f} GiB left as a reserve"
    return MemoryLimit(limit / GIB, usable, note, limit_gib)


def outside_allocator_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device in use outside torch's allocator, by this process and by others."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - torch.cuda.memory_reserved(device))


def refuse_full_device(device: torch.device) -> None:
    """Raises UserError if a CUDA device has no room even to begin with."""
    if device.type != "cuda":
        return
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        free, total = 0, torch.cuda.get_device_properties(device).total_memory
    if free < LEAST_CUDA_BYTES:
        raise UserError(
            f"GPU {device.index}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free; another process holds the rest: "
            "end it (`nvidia-smi` shows it), or leave this GPU out of CUDA_VISIBLE_DEVICES"
        )


def taken_by_others(device: torch.device) -> str | None:
    """A remark if, before this process has put anything on its CUDA device, much of it is taken; else None."""
    if device.type != "cuda":
        return None
    outside, (_, total) = outside_allocator_bytes(device), torch.cuda.mem_get_info(device)
    if outside <= OWN_CUDA_BYTES:
        return None
    return (
        f"another process holds about {outside / GIB:.1f} of the {total / GIB:.1f} GiB of GPU {device.index}; "
        "`nvidia-smi` shows which"
    )


def free_memory() -> int:
    """Bytes this machine, or the container around us, can still give out."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except FileNotFoundError:  # macOS says how much there is, and not what of it is free
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    try:
        maximum = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        current = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if maximum == "max" else min(available, int(maximum) - current)


def begin_peak(device: torch.device) -> None:
    """Begin an attempt whose peak `peak_under_limit` will return."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_under_limit(device: torch.device) -> int:
    """Return the most bytes that a limit counted: on CUDA the allocator's reserve since `begin_peak`, on the CPU this
    process's writable memory since it began, of which the system keeps no peak: of all memory, which has the same
    constant rest, it does."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return _status_bytes("VmPeak") - (_status_bytes("VmSize") - _status_bytes("VmData"))


def peak_bytes(device: torch.device) -> int:
    """The most memory in use since the process began: the allocator's reserve on CUDA, resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if sys.platform == "darwin" else _status_bytes("VmHWM")


def release_memory(device: torch.device) -> None:
    """Hand back what is no longer referenced, so that the next attempt starts from a clean device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """True if an exception means that memory ran out, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    kinds = (RuntimeError, OSError, ImportError, RunError)
    return isinstance(error, kinds) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """True if the text has the words of a library or the system whose allocation failed."""
    return any(words in text for words in OUT_OF_MEMORY_TEXTS) or any(
        pattern.search(text) for pattern in (OUT_OF_MEMORY_NUMBER, ONEDNN_FAILURE)
    )


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# Memory that torch has freed on a CPU ---------------------------------------------------------------------------------
#
# The C library keeps it for the next block, or gives it back to the system. A training step frees its activations and
# gradients and takes as much again. Given back, every page of it comes anew from the system, which sets it to zero
# first: a tenth of a step's processor time and more (docs/LOG.md).

# mallopt(3) and mallopt's header; values are C ints.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
NEVER = -1
DEFAULT_MAPPINGS = 65536
OWN_MAPPING_BYTES = 2**17  # glibc's own, until it raises it by what it has seen freed
# Kept free at the heap's end for smaller ones. oneDNN ends the process with a segmentation fault where it gets none of
# its own, which happens when larger blocks have just taken the last page (docs/LOG.md).
CUSHION_BYTES = 2**22
CUSHION_BLOCK = 2**15
AMPLE = 2


def give_back_under_a_limit() -> None:
    """Under a limit on this process's writable memory (`ulimit -d`) give freed blocks back at once, as a search for
    what fits does, so that what it has found fits."""
    if _is_limited():
        give_back_at_once()


def keep_if_ample(free_bytes: int) -> None:
    """Keep freed blocks from now on, if `free_bytes` are AMPLE times the most memory that this process has had: gaps
    between blocks make it take up to half as much again, and an optimizer's state may be still to come."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if not _is_limited() and free_bytes >= AMPLE * peak:
        _mallopt(M_MMAP_MAX, 0)  # no block has a mapping of its own, which would go back when it is freed
        _mallopt(M_TRIM_THRESHOLD, NEVER)


def give_back_at_once() -> None:
    """Give every large block its own mapping, which goes back to the system as soon as it is freed. For small ones the
    heap keeps CUSHION_BYTES, which it takes now."""
    _mallopt(M_MMAP_MAX, DEFAULT_MAPPINGS)
    _mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
    _mallopt(M_TRIM_THRESHOLD, OWN_MAPPING_BYTES)
    _mallopt(M_TOP_PAD, CUSHION_BYTES)
    blocks = [bytearray(CUSHION_BLOCK) for _ in range(CUSHION_BYTES // CUSHION_BLOCK)]
    del blocks


def _is_limited() -> bool:
    return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(parameter, value)
