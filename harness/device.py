"""The device of a command that is one process."""

from __future__ import annotations

import torch


def only_device() -> torch.device:
    """CUDA's first device where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
