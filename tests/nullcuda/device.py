"""Building of the null device, the environment of a process that uses it, and its numbers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCES = ("driver.c", "libraries.c", "runtime.cpp")
LIBRARY = "libnullcudart.so"


def why_not() -> str | None:
    """Return the reason why the device cannot be built here, or None if it can."""
    if not shutil.which("cc") or not shutil.which("c++"):
        return "needs a C and a C++ compiler (cc, c++)"
    if _headers() is None:
        return "needs a CUDA build of torch: its dependency triton has the headers"
    return None


def _headers() -> Path | None:
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    folder = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    return folder if (folder / "cuda_runtime_api.h").is_file() else None


@cache
def build() -> Path:
    """Return the folder of the built device, which is built again only if its sources change."""
    header = (_headers() or HERE) / "cuda_runtime_api.h"
    key = sha256(b"".join(path.read_bytes() for path in (header, *(HERE / name for name in SOURCES)))).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"nullcuda-{os.getuid()}-{key}"
    if (folder / LIBRARY).exists() and folder.stat().st_uid == os.getuid():
        return folder
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    common = ["-w", "-O1", "-fPIC"]
    driver, objects = draft / "libcuda.so.1", [draft / "libraries.o", draft / "runtime.o"]
    subprocess.run(["cc", *common, "-shared", "-Wl,-soname,libcuda.so.1", "-o", driver, HERE / "driver.c"], check=True)
    (draft / "libcuda.so").symlink_to(driver.name)
    subprocess.run(["cc", *common, "-c", "-o", objects[0], HERE / "libraries.c"], check=True)
    subprocess.run(["c++", *common, f"-I{_headers()}", "-c", "-o", objects[1], HERE / "runtime.cpp"], check=True)
    subprocess.run(["c++", "-shared", "-o", draft / LIBRARY, *objects], check=True)
    try:
        draft.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(draft)
    return folder


def environment(*, gib: float = 79.1, sm: int = 90, **more: str) -> dict[str, str]:
    """Return the environment of a process with one null device of `gib` GiB and compute capability `sm` / 10.

    Compiled kernels are kept beside the device, so that a second process need not compile them.
    """
    folder = build()
    return {
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        "LD_PRELOAD": str(folder / LIBRARY),
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "CUDA_MODULE_LOADING": "LAZY",
        "NULLCUDA_GIB": str(gib),
        "NULLCUDA_SM": str(sm),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "DISABLE_LLVM_OPT": "1",  # LLVM need not make Triton's kernels fast, because none of them runs
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        **more,
    }


def run(*arguments: str, expect: int = 0, timeout: float = 280, **device: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in the repository's folder, on a null device (`environment`), and expect this
    exit status."""
    how: dict[str, Any] = {"cwd": HERE.parents[1], "env": environment(**device), "timeout": timeout}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **how)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@dataclass(frozen=True)
class Numbers:
    """Counts since the last `reset`."""

    launches: int
    allocations: int
    to_host: int  # copies from the device
    to_device: int
    waits: int
    event_waits: int

    @classmethod
    def now(cls) -> Numbers:
        counts = (ctypes.c_long * len(fields(cls)))()
        _library().null_numbers(counts)
        return cls(*counts)


def reset() -> None:
    """Set all counts to zero."""
    _library().null_reset()


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0])
