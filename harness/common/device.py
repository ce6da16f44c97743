"""Choose and check the device that a process computes on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from harness.common.errors import UserError
from harness.common.processes import started_by_torchrun

DEVICE_FILES = Path("/dev")
ON_THE_CPU = "put CUDA_VISIBLE_DEVICES= (empty) before the command to train on the CPU"


def only_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is none. For commands that run as a single process."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Return the GPU's name from its driver, or for the CPU the processor's architecture ("x86_64 CPU")."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def choose_device(local_rank: int, local_size: int) -> torch.device:
    """Return the device of the rank `local_rank` of this machine's `local_size` ranks: a CUDA device for each rank, or
    the CPU for all ranks if the machine has no GPU. The CUDA device becomes torch's current device.

    Raises UserError if there are fewer CUDA devices than ranks, if another process has sole use of this rank's device,
    or if the machine has GPUs that torch cannot use, because nobody wants to pay for GPUs and train on the CPU.
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
    """Raise UserError, with CUDA's reason, if this machine has NVIDIA GPUs and torch can use none of them.

    Does nothing if CUDA_VISIBLE_DEVICES hides the GPUs or torch is built without CUDA.
    """
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
    """Return a remark that this machine has more GPUs than processes, or None if no GPU is idle."""
    idle = torch.cuda.device_count() - local_size if device.type == "cuda" else 0
    if idle <= 0:
        return None
    return (
        f"{idle} of this machine's {idle + local_size} GPUs {'is' if idle == 1 else 'are'} idle; "
        f"{processes_option(idle + local_size)} uses all of them"
    )


def processes_option(count: int) -> str:
    """Return the option that starts `count` processes with the command that the user typed, torchrun or
    ddp_train.py."""
    return f"--nproc_per_node={count}" if started_by_torchrun() else f"--processes {count}"
