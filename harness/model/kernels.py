"""Choice of the kernels that compute a model: compiled ones where available, and for attention those whose dropout rate
is exact."""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from harness.common.errors import UserError

CUDNN_DROPOUT_STEPS = 16  # cuDNN's attention drops multiples of 1/16


def choose_kernels(
    model: nn.Module,
    drop_rate: float,
    device: torch.device,
    *,
    compiled: bool | Literal["auto"],
) -> None:
    """Have a model, which is on `device` already, computed as train.json's `compile` says. Raises UserError if it
    cannot be."""
    avoid_rounded_dropout(drop_rate, device)
    if should_compile(compiled, device):
        model.compile()  # in place: the module and its parameters keep their names


def should_compile(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """True if the model is to be compiled: as train.json says; "auto" compiles on CUDA, where the tools for it are
    there.

    Raises UserError if train.json demands it and they are not.
    """
    wanted = setting is True or (setting == "auto" and device.type == "cuda")
    missing = missing_tool(device) if wanted else None
    if missing and setting is True:
        raise UserError(f'train.json: "compile": true needs {missing}; install it, or let compile be false')
    return wanted and missing is None


def not_compiled(setting: bool | Literal["auto"], device: torch.device) -> str | None:
    """A remark if the model would be compiled but for something that this machine lacks."""
    missing = missing_tool(device) if setting == "auto" and device.type == "cuda" else None
    return f"the model is not compiled, and trains more slowly: that needs {missing}" if missing else None


def is_compiled(model: nn.Module) -> bool:
    """True if calls of the model run compiled code, or will after the first."""
    # Private: nn.Module.compile() has no public counterpart that tells, or undoes, what it did.
    return model._compiled_call_impl is not None


def run_eagerly(model: nn.Module) -> None:
    """Undo the compiling of `choose_kernels`."""
    model._compiled_call_impl = None  # private: see is_compiled
    torch.compiler.reset()


def missing_tool(device: torch.device) -> str | None:
    """A tool that torch.compile needs and would miss only minutes later, and how to install it; None if all are
    there."""
    language, variable, names = (
        ("C", "CC", ("gcc", "clang")) if device.type == "cuda" else ("C++", "CXX", ("g++", "clang++"))
    )
    if variable not in os.environ and not any(map(shutil.which, names)):
        return f"a {language} compiler (apt install build-essential)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = sysconfig.get_python_version()
        return f"Python.h (apt install python{version}-dev, or a Python that `uv python install` brings)"
    return None


def avoid_rounded_dropout(drop_rate: float, device: torch.device) -> None:
    """Keep attention from cuDNN's kernel where that would round `drop_rate` to sixteenths: before 2.12, torch prefers
    it on Hopper and Blackwell without looking at the rate (https://github.com/pytorch/pytorch/pull/174245)."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if device.type == "cuda" and version < (2, 12) and not (drop_rate * CUDNN_DROPOUT_STEPS).is_integer():
        torch.backends.cuda.enable_cudnn_sdp(False)


def rounded_dropout(drop_rate: float, device: torch.device) -> str | None:
    """A remark if attention in half precision drops a slightly different share than `drop_rate`.

    FlashAttention 2 keeps a weight if a random byte is at most floor(255 * (1 - drop_rate)), so that the share is a
    multiple of 1/256 (set_params_fprop in flash_api.cpp, https://github.com/Dao-AILab/flash-attention).
    """
    share = 1 - (math.floor(255 * (1 - drop_rate)) + 1) / 256
    if device.type != "cuda" or math.isclose(share, drop_rate, abs_tol=1e-9):
        return None
    steps = min(max(1, round(drop_rate * CUDNN_DROPOUT_STEPS)), CUDNN_DROPOUT_STEPS - 1)
    return (
        f"FlashAttention drops a share of {share:.4f} where drop_rate is {drop_rate:g}; drop_rate "
        f"{steps / CUDNN_DROPOUT_STEPS:g} would be exact, and leave torch the choice among faster kernels"
    )


def tune_by_coordinate_descent() -> None:
    """Have the compiler try more variants of each kernel: those it finds by changing one parameter at a time."""
    # Private: the public options= of Module.compile() would not reach the loss's kernel, which is compiled apart.
    import torch._inductor.config

    torch._inductor.config.coordinate_descent_tuning = True
