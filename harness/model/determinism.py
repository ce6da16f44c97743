"""Computing the same bits every time, on CUDA too: what "deterministic": true in train.json sets."""

from __future__ import annotations

import os

import torch

from harness.common.errors import UserError

# cuBLAS computes the same bits every time if its workspace has one of these forms (NVIDIA's cuBLAS documentation,
# "Results reproducibility"); it reads the variable when the process first uses CUDA.
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
NO_DETERMINISTIC_FORM = "does not have a deterministic implementation"
CUBLAS_NOT_SET = "not deterministic because it uses CuBLAS"  # torch's, of a variable that came too late


def compute_deterministically() -> None:
    """Have this process compute every operation in a fixed order from now on, eager and compiled, and raise
    RuntimeError (see `explain_nondeterminism`) at one that cannot. To be called before the first use of CUDA.

    Raises UserError if the environment gives cuBLAS a workspace with which it cannot.
    """
    workspace = os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACES[0])
    if workspace not in CUBLAS_WORKSPACES:
        raise UserError(
            f'{CUBLAS_VARIABLE}={workspace}: with "deterministic": true in train.json it must be '
            f"{' or '.join(CUBLAS_WORKSPACES)}; unset it"
        )
    # Attention's backward, the embedding's, scatter and index_add; and compiled code falls back to these.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # a kernel per tensor
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward adds up in any order
    _fix_compiled_kernels()


def _fix_compiled_kernels() -> None:
    """Keep Inductor from choosing by timing between kernels that add up in another order: another start of the same
    run could choose another one. The names are guarded, since they are no public interface of torch."""
    import torch._inductor.config as inductor

    settings = {
        "deterministic": True,
        "shape_padding": False,  # pads matrix products where that measured faster
        "max_autotune": False,
        "max_autotune_gemm": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
    }
    for name, value in settings.items():
        if hasattr(inductor, name):
            setattr(inductor, name, value)


def explain_nondeterminism(error: BaseException) -> str | None:
    """A line for the error of an operation that has no deterministic form; None for another error."""
    text = str(error)
    if NO_DETERMINISTIC_FORM in text:
        operation = text[: text.index(NO_DETERMINISTIC_FORM)].split("\n")[-1].strip()
        reason = f"{operation} has no deterministic form on this device"
    elif CUBLAS_NOT_SET in text:
        reason = f"{CUBLAS_VARIABLE}={CUBLAS_WORKSPACES[0]} has to be set before CUDA starts"
    else:
        return None
    return f'train.json: key "deterministic": {reason}; use false, or leave out what needs it'
