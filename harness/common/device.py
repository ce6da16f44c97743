"""Choice and check of the device that a process computes on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from harness.common.errors import UserError
from harness.common.processes import started_by_torchrun

DEVICE_FILES = Path("/dev")
ON_THE_CPU = "CUDA_VISIBLE_DEVICES= (empty) in front of the command trains on the CPU"


def only_device() -> torch.device:
    """CUDA's first device where there is one, else the CPU: for a command that is one process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """The device's name from its driver, or for the CPU the processor's architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def choose_device(local_rank: int, local_size: int) -> torch.device:
    """The device of one of this machine's `local_size` ranks, which becomes torch's current one: a CUDA device each,
    or the CPU for all on a machine that has none.

    Raises UserError if there are fewer CUDA devices than ranks, if this rank's one is another process's alone, or if
    there are some that torch cannot use: a run on the CPU at the price of the GPUs is never what was meant.
    """
    if not torch.cuda.is_available():
        refuse_idle_hardware()
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_size > count:
        devices = "1 GPU" if count == 1 else f"{count} GPUs"
        raise UserError(
            f"{local_size} processes on a machine with {devices}; use {processes_option(count)}, or {ON_THE_CPU}"
        )
    try:
        torch.cuda.set_device(local_rank)
        torch.cuda.mem_get_info()  # the first call that needs the device itself
    except RuntimeError as error:
        raise UserError(
            f"cuda:{local_rank}: {str(error).splitlines()[0].rstrip('.')}; another process may hold this GPU: "
            "nvidia-smi shows which"
        ) from None
    return torch.device("cuda", local_rank)


def refuse_idle_hardware() -> None:
    """Raises UserError, with CUDA's reason, if this machine has NVIDIA devices that this torch can use none of."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    found = sorted(DEVICE_FILES.glob("nvidia[0-9]*"))
    if not found or is_hidden or torch.version.cuda is None:
        return
    try:
        torch.cuda.init()
        reason = "none is visible"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].strip()
    raise UserError(
        f"{found[0]}: this machine has GPUs, but torch {torch.__version__} cannot use them: {reason.rstrip('.')}; "
        f"update the driver, or {ON_THE_CPU}"
    )


def idle_gpus(device: torch.device, local_size: int) -> str | None:
    """A remark for a user who has rented more GPUs than there are processes; None if none is idle."""
    idle = torch.cuda.device_count() - local_size if device.type == "cuda" else 0
    if idle <= 0:
        return None
    return (
        f"{idle} of this machine's {idle + local_size} GPUs {'is' if idle == 1 else 'are'} idle; "
        f"{processes_option(idle + local_size)} uses all of them"
    )


def processes_option(count: int) -> str:
    """The option of the command that was typed by which a run has so many processes."""
    return f"--nproc_per_node={count}" if started_by_torchrun() else f"--processes {count}"
