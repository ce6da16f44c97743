"""Which kernels a model is computed with: compiled ones where they can be had, and for attention those that drop what
they are told to."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from harness.common.errors import UserError

# Before it, torch took cuDNN's attention also for a dropout that it rounds; since then torch itself does not.
ROUNDED_DROPOUT_UNTIL = (2, 12)
CUDNN_DROPOUT_STEPS = 16


def choose_kernels(
    model: nn.Module, drop_rate: float, device: torch.device, *, compiled: bool | Literal["auto"]
) -> None:
    """Have a model, which is on `device` already, computed as train.json's `compile` says. Raises UserError if it
    cannot be."""
    attend_with_exact_dropout(drop_rate, device)
    if should_compile(compiled, device):
        model.compile()  # in place: the module and its parameters keep their names


def should_compile(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether to compile the model: what train.json says; "auto" compiles on CUDA, where the tools for it are there.

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
    """Whether calls of the model run compiled code, or will after the first."""
    return model._compiled_call_impl is not None


def run_eagerly(model: nn.Module) -> None:
    """Take back `choose_kernels`' compiling."""
    model._compiled_call_impl = None
    torch._dynamo.reset()


def missing_tool(device: torch.device) -> str | None:
    """What torch.compile would look for in vain, minutes later, and how to get it; None if all is there."""
    language, variable, names = (
        ("C", "CC", ("gcc", "clang")) if device.type == "cuda" else ("C++", "CXX", ("g++", "clang++"))
    )
    if variable not in os.environ and not any(map(shutil.which, names)):
        return f"a {language} compiler (apt install build-essential)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = sysconfig.get_python_version()
        return f"Python.h (apt install python{version}-dev, or a Python that `uv python install` brings)"
    return None


def attend_with_exact_dropout(drop_rate: float, device: torch.device) -> None:
    """Keep attention from kernels that would drop another share than `drop_rate`.

    cuDNN's attention rounds the rate to a multiple of 1/16, and torch 2.11 prefers it on Hopper and Blackwell without
    looking at the rate (https://github.com/pytorch/pytorch/pull/174245 does). FlashAttention drops exactly.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if device.type == "cuda" and version < ROUNDED_DROPOUT_UNTIL and not (drop_rate * CUDNN_DROPOUT_STEPS).is_integer():
        torch.backends.cuda.enable_cudnn_sdp(False)
