"""Loading of libraries: the environment variables that they read when they are imported, and faster imports."""

from __future__ import annotations

import gc
import importlib
import os

SETTINGS = {
    # By default torch prints pages of C++ frames if the store is lost. The ranks report that themselves in one line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Idle OpenMP threads sleep. By default they spin while they wait for work, and a step takes twice as long if
    # another process runs on the same core (docs/LOG.md).
    "OMP_WAIT_POLICY": "passive",
    # On the CPU, torch allocates tensors of 2 MiB and more in pages of 2 MiB, if the system supports them. Each step
    # allocates its activations and gradients anew, and with 4 KiB pages that takes a tenth of its time (docs/LOG.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}
MOST_COMPILERS = 32  # on each rank; the maximum of torch's own default


def configure_libraries() -> None:
    """Set the environment variables of SETTINGS and TORCHINDUCTOR_COMPILE_THREADS, unless the user has set them.

    The processes that compile kernels share the usable cores with the other ranks of this machine.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = usable_cores() // max(1, int(ranks) if ranks.isdigit() else 1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(MOST_COMPILERS, share))))


def usable_cores() -> int:
    """Return the number of cores that this process may run on, or of all cores if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(*modules: str) -> None:
    """Import large libraries by their names with garbage collection paused. Importing torch creates a million objects,
    none of them garbage, and takes a sixth less processor time without collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
