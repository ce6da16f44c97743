"""Loading of libraries: the environment variables that they read then, and imports in as little time as possible."""

from __future__ import annotations

import gc
import importlib
import os

SETTINGS = {
    # Otherwise a lost store prints pages of C++ frames, though the ranks report it in one line.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # OpenMP's threads burn a core by default while they wait for the next piece of work; beside any other process on
    # that core a step then takes twice as long (docs/LOG.md).
    "OMP_WAIT_POLICY": "passive",
    # On the CPU, tensors from 2 MiB on lie in pages of that size where the system has them: a step takes its
    # activations and gradients anew, and a tenth of its time goes into handing out pages of 4 KiB (docs/LOG.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}
MOST_COMPILERS = 32  # what torch's compiler takes for itself at most, on each rank


def configure_libraries() -> None:
    """Set what the user has not set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compilers_per_rank()))


def usable_cores() -> int:
    """Number of cores that this process may run on; where the system does not say, of all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compilers_per_rank() -> int:
    """Processes that compile kernels on each rank: this machine's cores, shared out among its ranks."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    cores = usable_cores()
    return max(1, min(MOST_COMPILERS, cores // int(ranks) if ranks.isdigit() and int(ranks) else cores))


def load(*modules: str) -> None:
    """Import large libraries by their names, with garbage collection paused: torch's import makes a million objects,
    none of them garbage, and so takes a sixth less processor time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
