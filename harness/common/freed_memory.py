"""Memory that torch has freed on a CPU: the C library keeps it for the next block, or gives it back to the system.

A training step frees its activations and gradients and takes as much again. Given back, every page of it comes anew
from the system, which sets it to zero first: a tenth of a step's processor time and more (docs/LOG.md).
"""

from __future__ import annotations

import ctypes
import resource

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
    if not _is_limited() and free_bytes >= AMPLE * _peak_resident_bytes():
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


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _mallopt(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(parameter, value)
