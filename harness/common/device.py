"""Choose and check the device that a process computes on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from harness.common.errors import UserError
from harness.common.messages import GIB
from harness.common.processes import started_by_torchrun

DEVICE_FILES = Path("/dev")
# A GPU with less free memory than this has no room for CUDA itself and the communication buffers.
LEAST_CUDA_BYTES = 2**30
OTHER_TORCH = "`uv pip install --reinstall torch --torch-backend=auto`, then always set UV_NO_SYNC=1"
ON_THE_CPU = "put CUDA_VISIBLE_DEVICES= (empty) before the command to train on the CPU"


def only_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is none. For commands that run as a single process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the GPU's name from its driver, or for the CPU the processor's architecture ("x86_64 CPU")."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def choose_device(local_rank: int, local_size: int) -> torch.device:
    """Return CUDA device `local_rank`, or the CPU if torch finds no GPU. Makes the CUDA device torch's current device.

    `local_size` is the number of ranks on this machine. Raises UserError if the visible GPUs are too few for the ranks,
    or if this rank's GPU fails or is nearly full. Unless CUDA_VISIBLE_DEVICES is empty or -1, also raises UserError if
    a CUDA build of torch cannot use this machine's GPUs.
    """
    if not torch.cuda.is_available():
        found = sorted(DEVICE_FILES.glob("nvidia[0-9]*"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        # nobody wants to pay for GPUs and train on the CPU
        if found and visible not in ("", "-1") and torch.version.cuda is not None:
            try:
                torch.cuda.init()
                reason = "none is visible"
            except (RuntimeError, AssertionError) as error:
                reason = str(error).splitlines()[0].strip().rstrip(".")
            raise UserError(
                f"{found[0]}: this machine has GPUs, but torch {torch.__version__} cannot use them: {reason}; "
                f"update the driver, or install a torch build for it ({OTHER_TORCH}), or "
                + (f"correct CUDA_VISIBLE_DEVICES={visible}, or " if visible else "")
                + ON_THE_CPU
            )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_size > count:
        devices = "1 visible GPU" if count == 1 else f"{count} visible GPUs"
        raise UserError(
            f"{local_size} processes on a machine with {devices}; use {processes_option(count)}, or {ON_THE_CPU}"
        )
    try:
        torch.cuda.set_device(local_rank)
        free, total = torch.cuda.mem_get_info()  # the first call that needs the device itself
        problem = f"{free / GIB:.1f} of {total / GIB:.1f} GiB are free" if free < LEAST_CUDA_BYTES else None
    except RuntimeError as error:
        problem = str(error).splitlines()[0].rstrip(".")
    if problem:
        raise UserError(
            f"cuda:{local_rank}: {problem}; another process may hold this GPU: end it (`nvidia-smi` shows it), or "
            "leave this GPU out of CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", local_rank)


def idle_gpus(device: torch.device, local_size: int) -> str | None:
    """Return a remark if this process sees more GPUs than this machine has ranks (`local_size`), otherwise None."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    idle = count - local_size
    are = "is" if idle == 1 else "are"
    remark = f"{idle} of {count} visible GPUs {are} idle; {processes_option(count)} uses all of them"
    return remark if idle > 0 else None


def processes_option(count: int) -> str:
    """Return the option that starts `count` processes: --nproc_per_node under torchrun, otherwise --processes."""
    return f"--nproc_per_node={count}" if started_by_torchrun() else f"--processes {count}"
