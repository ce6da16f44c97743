"""The names of this machine's GPUs, from the driver's files, without torch."""

from __future__ import annotations

import os
from pathlib import Path

DRIVER_FILES = Path("/proc/driver/nvidia/gpus")


def gpu_names() -> list[str]:
    """The names of this machine's NVIDIA GPUs; none if CUDA_VISIBLE_DEVICES hides them, or there is no driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return [name for path in sorted(DRIVER_FILES.glob("*/information")) if (name := _model(path))]


def _model(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return dict(line.partition(":")[::2] for line in lines).get("Model", "").strip()
