"""Facts about the program and the machine that compute a result: versions, the commit of the sources, and the GPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The libraries that affect a run's numbers, and those that read and write its files.
LIBRARIES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "tiktoken", "pydantic")
GIT_SECONDS = 10.0
DRIVER_FILES = Path("/proc/driver/nvidia/gpus")


@cache
def program_versions() -> dict[str, str]:
    """Return the versions of Python, the installed LIBRARIES, NVIDIA's driver and CUDA's runtime, by name."""
    import torch

    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = str(torch.__version__)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    driver = Path("/sys/module/nvidia/version")
    with suppress(OSError):
        versions["nvidia_driver"] = driver.read_text().strip()
    return versions


@cache
def program_commit(root: Path = ROOT) -> str | None:
    """Return the commit of the checkout that this program runs from, with "-dirty" appended if tracked files have
    changed since, or None if the commit is unknown."""
    if not (root / ".git").exists():  # git would search the parent folders and find another project's commit
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(
            command,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_SECONDS,
        )
        return result.stdout.strip() or None
    return None


def gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs without loading torch, or an empty list if CUDA_VISIBLE_DEVICES is
    "" or "-1", which hides all of them."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    names = []
    for path in sorted(DRIVER_FILES.glob("*/information")):
        with suppress(OSError):
            names += re.findall(
                r"^Model:[ \t]*(.*\S)", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
            )
    return names
