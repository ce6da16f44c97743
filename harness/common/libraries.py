"""Settings that libraries read from the environment when they are loaded, and so before anything imports them."""

from __future__ import annotations

import os

SETTINGS = {
    # Else a store that is gone, which the ranks notice and tell of themselves, is told of in pages of C++ frames.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # OpenMP's threads burn a core by default while they wait for the next piece of work; beside any other process on
    # that core a step then takes twice as long (docs/LOG.md).
    "OMP_WAIT_POLICY": "passive",
    # On the CPU, tensors from 2 MiB on lie in pages of that size where the system has them: a step takes its
    # activations and gradients anew, and a tenth of its time goes into handing out pages of 4 KiB (docs/LOG.md).
    "THP_MEM_ALLOC_ENABLE": "1",
}


def configure_libraries() -> None:
    """Set what the user has not set."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
