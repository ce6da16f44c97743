"""Numeric precision of a run: what `precision` in train.json means on a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from harness.common.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def has_fast_bf16() -> bool:
    """True if the processor has bf16 instructions (AVX-512 BF16; AMX implies it) and oneDNN may use them."""
    has_bf16 = hasattr(torch.cpu, "get_capabilities") and torch.cpu.get_capabilities().get("avx512_bf16", False)
    if not (torch.backends.mkldnn.is_available() and has_bf16):
        return False
    # No public function says what ONEDNN_MAX_CPU_ISA leaves: below AVX-512, bf16 takes five times as long as fp32.
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@dataclass(frozen=True)
class Precision:
    """Weights are always fp32; `name` (bf16, fp16 or fp32) is what the matrix products run in."""

    name: str
    device_type: str

    @classmethod
    def resolve(cls, name: str, device: torch.device) -> Precision:
        """auto: bf16 where a GPU computes it natively, else fp16 on CUDA, else fp32 (CPUs: what a finished model is
        measured with does not depend on the processor).

        Raises UserError for bf16 on a CUDA device that would only emulate it.
        """
        if device.type == "cuda" and name in ("auto", "bf16"):
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            if name == "bf16" and not has_bf16:
                raise UserError(
                    f'train.json: key "precision": {torch.cuda.get_device_name(device)} does not compute bf16; use '
                    '"auto" or "fp16"'
                )
            name = "bf16" if has_bf16 else "fp16"
        elif name == "auto":
            name = "fp32"
        return cls(name, device.type)

    @classmethod
    def for_training(cls, name: str, device: torch.device) -> Precision:
        """Return what `resolve` does, but for "auto" bf16 also on CPUs that are fast in it: a step takes 0.5 to 0.9 of
        its time in fp32 there (docs/LOG.md)."""
        if name == "auto" and device.type == "cpu" and has_fast_bf16():
            name = "bf16"
        return cls.resolve(name, device)

    def residual_dtype(self, wanted: str) -> torch.dtype | None:
        """The dtype of the residual stream for train.json's `residual_precision`; None for the weights'.

        Raises UserError for bf16 where the matrix products run in another precision.
        """
        if wanted == "fp32":
            return None
        if self.name != "bf16":
            raise UserError(
                f'train.json: key "residual_precision": "bf16" needs matrix products in bf16, and here they run in '
                f'{self.name}; use "fp32", or "precision": "bf16"'
            )
        return torch.bfloat16

    def update_dtype(self) -> torch.dtype | None:
        """The dtype of an optimizer's own matrix products: bf16 where training is in bf16 and the device is fast in it;
        None for the weights'."""
        is_fast = self.device_type != "cpu" or has_fast_bf16()
        return torch.bfloat16 if self.name == "bf16" and is_fast else None

    def autocast(self) -> AbstractContextManager[object]:
        """The context a forward pass runs in."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self.device_type, DTYPES[self.name])

    def allow_tf32(self) -> None:
        """Let the tensor cores of CUDA devices take the matrix products of fp32: their factors are then rounded to
        TF32's 10 bits of mantissa, and added up in fp32. Several times as fast; of this process from now on."""
        if self.name == "fp32" and self.device_type == "cuda":
            torch.set_float32_matmul_precision("high")

    def scaler(self) -> torch.amp.GradScaler:
        """Keeps small fp16 gradients from vanishing; without effect in the other precisions."""
        return torch.amp.GradScaler(self.device_type, enabled=self.name == "fp16")
