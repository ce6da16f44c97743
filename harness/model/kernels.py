"""Choice of the kernels that compute a model and its attention. With "deterministic": true in train.json, only kernels
that compute the same bits every time are chosen."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.common.errors import UserError
from harness.model.config import ModelConfig

# cuBLAS computes the same bits every time if this variable has one of these values (NVIDIA's cuBLAS documentation,
# "Results reproducibility"). cuBLAS reads the variable when the process first uses CUDA.
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"  # part of torch's error message

# cuDNN's attention may round a drop rate to multiples of 1/16; cuDNN 9.19 did not (docs/LOG.md).
CUDNN_DROPOUT_STEPS = 16
# Values of train.json's `attention`, with torch's names of the kernels and its functions that test whether a kernel can
# compute a call on this GPU
ATTENTION = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention),
    "flash": (SDPBackend.FLASH_ATTENTION, torch.backends.cuda.can_use_flash_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention),
}
# FlashAttention from packages other than torch, in order of preference, with the major compute capabilities of the GPUs
# that each is made for
NEWER_FLASH = {"FA3": (9,), "FA4": (9, 10)}
ATTENTION_FAILED = re.compile(r".*(No available kernel|cuDNN Frontend error|FlashAttention|\bFA[34]\b).*")
NOT_COMPILED = "the model is not compiled, trains more slowly and takes more memory (-f finds what still fits)"
OTHER_ATTENTION = 'choose another kernel with "attention": "cudnn", "flash" or "efficient"'
_chosen_attention = ExitStack()  # its `close` undoes this process's choice of a kernel


def should_compile(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return True if the model is to be compiled. `setting` is train.json's `compile`. "auto" means yes on a GPU if no
    tool is missing. Raises UserError if `setting` is true and a tool is missing."""
    wanted = setting is True or (setting == "auto" and device.type == "cuda")
    missing = missing_tool(device) if wanted else None
    if missing and setting is True:
        raise UserError(f'train.json: "compile": true needs {missing}; install it, or set compile to false')
    return wanted and missing is None


def not_compiled(setting: bool | Literal["auto"], device: torch.device) -> str | None:
    """Return a note for the user if `setting` is "auto" and the model is not compiled on a GPU because a tool is
    missing, else None."""
    missing = missing_tool(device) if setting == "auto" and device.type == "cuda" else None
    return f"{NOT_COMPILED}: compiling needs {missing}" if missing else None


def is_compiled(model: nn.Module) -> bool:
    """Return True if calls of the model run compiled code. The first call compiles the model."""
    # Private: torch has no public function that tells whether nn.Module.compile() was called, or undoes it.
    return model._compiled_call_impl is not None


def run_eagerly(model: nn.Module) -> None:
    """Undo `model.compile()`, and discard what torch.compile has compiled in this process."""
    model._compiled_call_impl = None  # private: see is_compiled
    torch.compiler.reset()


def missing_tool(device: torch.device) -> str | None:
    """Return the name of a missing tool that torch.compile needs for `device`, with the way to install it, or None if
    nothing is missing."""
    # Without these tools, torch.compile itself fails, but only minutes later.
    language, variable, names = (
        ("C", "CC", ("gcc", "clang")) if device.type == "cuda" else ("C++", "CXX", ("g++", "clang++"))
    )
    if variable not in os.environ and not any(map(shutil.which, names)):
        return f"a {language} compiler (apt install build-essential)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        version = sysconfig.get_python_version()
        return f"Python.h (apt install python{version}-dev, or a Python that `uv python install` brings)"
    return None


def use_attention(setting: str, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Choose the kernel that computes attention in this process, in place of an earlier choice. Has no effect on a CPU.
    `setting` is train.json's `attention`.

    "auto" means FlashAttention 3 or 4. If none is installed that can compute this model's attention, torch chooses.
    Calls that the chosen kernel cannot compute, such as those with a mask, take another one.

    Raises UserError if the kernel cannot be loaded, or cannot train a model of this shape in `dtype` on this GPU.
    """
    _chosen_attention.close()
    drop_rate = model.drop_rates.attention_weights
    avoid_rounded_dropout(drop_rate, device)
    if device.type != "cuda":
        return
    query = torch.empty(1, model.n_heads, model.context_length, model.head_width, dtype=dtype, device=device)
    key = query[:, : model.n_kv_heads].requires_grad_()
    call = SDPAParams(query.requires_grad_(), key, key, None, drop_rate, True, key.shape != query.shape)
    if setting == "auto":
        newer = _newer_flash(call, device)
        if newer is None:
            return
        _chosen_attention.callback(torch.nn.attention.restore_flash_attention_impl, False)
    backend, can_use = ATTENTION["flash" if setting == "auto" else setting]
    if not can_use(call):
        shared = ", shared by several query heads" if key.shape != query.shape else ""
        what = f"heads of width {model.head_width}{shared}, in {dtype} and with a drop rate of {drop_rate:g}"
        raise UserError(
            f'train.json: key "attention": "{setting}" has no kernel for {what} on this GPU; '
            'use "auto" or another value'
        )
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    _chosen_attention.enter_context(sdpa_kernel([backend, *others], set_priority=True))
    # Compiled code has the kernel in it, but the key of torch's compile cache does not name the kernel.
    tag = f"{torch.compiler.config.cache_key_tag} attention={attention_in_use(setting, device)}"
    _chosen_attention.enter_context(torch.compiler.config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]


def _newer_flash(call: SDPAParams, device: torch.device) -> str | None:
    """Activate the first of NEWER_FLASH that is installed and can compute `call` on this GPU, and return its name, or
    None if there is none. Raises UserError if it cannot be loaded."""
    attention = torch.nn.attention
    known: list[str] = getattr(
        attention, "list_flash_attention_impls", list
    )()  # earlier versions of torch know fewer or none
    major, _ = torch.cuda.get_device_capability(device)
    is_possible = call.dropout == 0 and torch.backends.cuda.can_use_flash_attention(call)
    for name in (name for name in NEWER_FLASH if is_possible and name in known and major in NEWER_FLASH[name]):
        try:
            attention.activate_flash_attention_impl(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:  # of a package for another version of torch or CUDA, for example
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f'train.json: key "attention": "auto" takes {name}, but its package cannot be loaded ({reason}); '
                f"uninstall the package, or {OTHER_ATTENTION}"
            ) from None
        return name
    return None


def attention_in_use(setting: str, device: torch.device) -> str | None:
    """Return the attention kernel that `use_attention` has chosen with this `setting`: "FA3", "FA4", or the setting
    itself. Returns None if torch chooses the kernel, and on a CPU."""
    if device.type != "cuda" or setting != "auto":
        return None if device.type != "cuda" else setting
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


def avoid_rounded_dropout(drop_rate: float, device: torch.device) -> None:
    """Disable cuDNN's attention kernel in this process if the kernel may round `drop_rate`."""
    # From 2.12 on, torch itself avoids the kernel for such rates (https://github.com/pytorch/pytorch/pull/174245).
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if device.type == "cuda" and version < (2, 12) and not (drop_rate * CUDNN_DROPOUT_STEPS).is_integer():
        torch.backends.cuda.enable_cudnn_sdp(False)


def waiting_experts(device: torch.device, precision: str) -> str | None:
    """Return a note for the user if experts run slowly on this GPU in `precision`, else None."""
    # Except in bf16 on Hopper and data center Blackwell, torch's grouped products read the number of rows of each
    # expert on the CPU, which waits for the GPU (pytorch issue 186620).
    if device.type != "cuda" or (precision == "bf16" and torch.cuda.get_device_capability(device)[0] in (9, 10)):
        return None
    return (
        f"experts run slowly on {torch.cuda.get_device_name(device)} in {precision}: their matrix products wait for "
        "the GPU six times per layer and microbatch (with swiglu nine times); in bf16 on H100, H200, B200 they do not"
    )


# "deterministic": true in train.json: the same bits every time, on CUDA too


def compute_deterministically() -> None:
    """Make all later operations of this process deterministic. Must be called before the first use of CUDA.

    An operation without a deterministic form then raises RuntimeError (see `explain_failed_kernel`). Raises UserError
    if CUBLAS_WORKSPACE_CONFIG is set to a value that forbids this.
    """
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise UserError(
            f'{CUBLAS_VARIABLE}={workspace}: with "deterministic": true in train.json it must be '
            f"{' or '.join(CUBLAS_WORKSPACES)}; unset it"
        )
    # NCCL chooses its algorithm, and thus the order in which it adds the ranks' values, by size, machine and version.
    os.environ.setdefault("NCCL_ALGO", "Ring")
    # Affects scatter, index_add, and the backward passes of attention and embeddings. Compiled code falls back to these
    # eager operations.
    torch.use_deterministic_algorithms(True)
    # Filling uninitialized memory is not needed, and would cost one kernel per tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds up in varying order
    # Keep Inductor from timing kernels that add up in different orders and choosing the fastest, since the next start
    # of the same run could choose another one. The settings are private, so a version of torch may lack some of them.
    import torch._inductor.config as inductor

    settings = {
        "deterministic": True,
        "shape_padding": False,  # True pads matrix products if a measurement says that this is faster
        "max_autotune": False,
        "max_autotune_gemm": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
    }
    for name, value in settings.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


def explain_failed_kernel(error: BaseException) -> str | None:
    """Return a one-line message if torch raised `error` because an operation is not deterministic or because an
    attention kernel failed, else None."""
    before, found, _ = str(error).partition(NO_DETERMINISTIC_FORM)
    if found:
        operation = before.split("\n")[-1].strip()
        return (
            f'train.json: key "deterministic": {operation} has no deterministic form on this device; use false, or '
            "change the setting that causes this"
        )
    if failed := ATTENTION_FAILED.search(str(error)):
        return (
            f'train.json: key "attention": the attention kernel failed ({failed.group().strip()}); {OTHER_ATTENTION}, '
            "or lower microbatch_size if memory may be short"
        )
    return None
