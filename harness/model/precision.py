"""Numeric precision of training or evaluation on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from harness.common.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_fast_bf16() -> bool:
    """Return True if this machine's CPU has bf16 instructions (AVX-512 BF16, which AMX implies) and oneDNN may use
    them."""
    has_bf16 = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("avx512_bf16", False)
    if not (torch.backends.mkldnn.is_available() and has_bf16):
        return False
    # ONEDNN_MAX_CPU_ISA can forbid instructions to oneDNN, and no public function tells which. If it forbids AVX-512,
    # matrix products in bf16 run at 10 to 21 GFLOP/s instead of 203; in fp32 they run at 88 (on an AMD EPYC).
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Precision:
    """Precision of the matrix products on a device: `name` is bf16, fp16 or fp32. Weights are always fp32."""

    name: str
    device_type: str

    @classmethod
    def resolve(cls, name: str, device: torch.device, *, place: str = 'train.json: key "precision"') -> Precision:
        """Return the precision that `name` (bf16, fp16, fp32 or auto) means on `device`. On a CUDA device, "auto" means
        bf16 if the device has it natively, else fp16. Elsewhere "auto" means fp32.

        Raises UserError for "bf16" on a CUDA device that would only emulate it. `place` is the key or option that gave
        `name`, for the message.
        """
        if device.type == "cuda" and name in ("auto", "bf16"):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            if name == "bf16" and not has_bf16:
                raise UserError(
                    f'{place}: {torch.cuda.get_device_name(device)} does not compute bf16; use "auto" or "fp16"'
                )
            name = "bf16" if has_bf16 else "fp16"
        elif name == "auto":
            name = "fp32"  # so that evaluations have the same precision on every CPU
        return cls(name, device.type)

    @classmethod
    def for_training(cls, name: str, device: torch.device) -> Precision:
        """Return the same as `resolve`, but bf16 for "auto" on a CPU with fast bf16."""
        # A step in bf16 then takes about 0.5 to 0.6 of its fp32 time (docs/LOG.md).
        if name == "auto" and device.type == "cpu" and has_fast_bf16():
            name = "bf16"
        return cls.resolve(name, device)

    def residual_dtype(self, wanted: str) -> torch.dtype | None:
        """Return the dtype of the residual stream, or None for the dtype of the weights. `wanted` is train.json's
        `residual_precision`. Raises UserError for "bf16" if the matrix products run in another precision."""
        if wanted == "fp32":
            return None
        if self.name != "bf16":
            raise UserError(
                f'train.json: key "residual_precision": "bf16" needs matrix products in bf16, and here they run in '
                f'{self.name}; use "fp32", or "precision": "bf16" if the device computes it'
            )
        return torch.bfloat16

    def update_dtype(self) -> torch.dtype | None:
        """Return the dtype of the matrix products in the optimizer Muon, or None for the dtype of the weights."""
        is_fast = self.device_type != "cpu" or has_fast_bf16()
        return torch.bfloat16 if self.name == "bf16" and is_fast else None

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager in which a forward pass runs."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device_type, DTYPES[self.name])

    def allow_tf32(self) -> None:
        """Let tensor cores compute fp32 matrix products as TF32, from now on in this process. Has no effect in bf16 or
        fp16, or on a CPU."""
        if self.name == "fp32" and self.device_type == "cuda":
            torch.set_float32_matmul_precision("high")

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler, which keeps small fp16 gradients from vanishing. It is disabled in other
        precisions."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")
