"""Loading of libraries: the environment variables that they read when they are imported, and faster imports."""

from __future__ import annotations

import gc
import importlib
import os

from harness.common.errors import launcher_number

SETTINGS = {
    # By default, torch prints pages of C++ stack frames when it loses the connection to its key-value store. The ranks
    # report this loss themselves in one line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Idle OpenMP threads sleep. By default they spin while they wait for work, and a step takes twice as long if
    # another process runs on the same core.
    "OMP_WAIT_POLICY": "passive",
    # On the CPU, torch allocates tensors of 2 MiB and more in pages of 2 MiB, if the system supports them. Each step
    # allocates its activations and gradients anew. With pages of 4 KiB, this allocation takes a tenth of the step's
    # time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Let Triton fuse a product and a sum into one operation, as it does by default. Triton 3.9 warns on each rank if
    # the variable is missing, because version 3.10 changes the default, and with it the exact results of compiled runs.
    "TRITON_DEFAULT_FP_FUSION": "1",
}
MOST_COMPILERS = 32  # most processes that compile kernels for a rank; torch's own default has the same maximum


def configure_libraries() -> None:
    """Set TORCHINDUCTOR_COMPILE_THREADS and the environment variables in SETTINGS. Values that the user has set are
    kept. Must be called before torch is imported."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # an equal share of the cores, because all ranks of the machine compile at the same time
    share = usable_cores() // max(1, launcher_number("LOCAL_WORLD_SIZE", 1))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, min(MOST_COMPILERS, share))))


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(name: str) -> None:
    """Import a large library by its name, with garbage collection paused."""
    was_enabled = gc.isenabled()
    gc.disable()  # importing torch then takes a sixth less processor time
    try:
        importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
