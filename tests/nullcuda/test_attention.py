"""The attention kernels of a training step, a validation and a sample on the null device, for train.json's
`attention`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.nullcuda.device import run, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

CUDNN, FLASH, EFFICIENT = "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"
PREFERRED = {80: FLASH, 90: CUDNN, 100: CUDNN}  # by torch, without dropout
DROPOUT, WHEEL = {"drop_rate": 0.1}, {"wheel": True}
# A case, and the kernels of a training step and of validation, in which nothing is dropped. None: as torch prefers.
CASES: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({"attention": "auto"}, None, None),
    ({"attention": "auto", **DROPOUT}, FLASH, None),
    ({"attention": "cudnn"}, CUDNN, CUDNN),
    ({"attention": "cudnn", "drop_rate": 0.125}, CUDNN, CUDNN),
    ({"attention": "flash"}, FLASH, FLASH),
    ({"attention": "flash", **DROPOUT, "precision": "fp16"}, FLASH, FLASH),
    ({"attention": "efficient"}, EFFICIENT, EFFICIENT),
    ({"attention": "efficient", **DROPOUT, "precision": "fp32"}, EFFICIENT, EFFICIENT),
    # FlashAttention 3 is taken by "auto" alone, and not with dropout or in fp32.
    ({"attention": "flash", **WHEEL}, FLASH, FLASH),
    ({"attention": "auto", **WHEEL, **DROPOUT}, FLASH, None),
    ({"attention": "auto", **WHEEL, "precision": "fp32"}, EFFICIENT, EFFICIENT),
]
REFUSED: list[dict[str, Any]] = [
    {"attention": "cudnn", **DROPOUT},  # cuDNN would round the rate
    {"attention": "flash", "precision": "fp32"},
]


def found(cases: list[dict[str, Any]], sm: int) -> list[dict[str, Any]]:
    """Return what tests/nullcuda/attention.py finds for each case."""
    done = run("-m", "tests.nullcuda.attention", json.dumps(cases), sm=sm)
    return [json.loads(line) for line in done.stdout.splitlines()]


def expected(case: dict[str, Any], training: str | None, validation: str | None, sm: int) -> dict[str, Any]:
    setting = case["attention"]
    return {
        "train": [training or PREFERRED[sm]],
        "validation": [validation or PREFERRED[sm]],
        "sample": [EFFICIENT],  # it has a mask and is in fp32
        "newer": [],
        "recorded": None if setting == "auto" else setting,
        "tag": "" if setting == "auto" else f"attention={setting}",
    }


@pytest.mark.slow
@pytest.mark.parametrize("sm", PREFERRED)
def test_the_key_chooses_the_kernel_of_every_call(sm: int) -> None:
    """The kernel is the same in the forward pass, the recomputation and the validation. Samples take another one, so
    that they never fail. Without the key, all is as torch chooses, unless FlashAttention 3 is installed on a Hopper
    GPU. A kernel that cannot train the model is refused."""
    auto = {"attention": "auto"}
    *others, rounding, in_fp32, newer, after = found(
        [*(each for each, _, _ in CASES), *REFUSED, auto | WHEEL, auto], sm
    )
    assert others == [expected(*case, sm) for case in CASES]
    line = 'train.json: key "attention": "cudnn" has no kernel for heads of width 64, in torch.bfloat16'
    assert rounding["refused"] == f'{line} and with a drop rate of 0.1 on this GPU; use "auto" or another value'
    assert in_fp32["refused"].startswith('train.json: key "attention": "flash"')
    usual = expected(auto, None, None, sm)
    fa3 = {**usual, "train": [FLASH], "validation": [FLASH], "newer": ["forward", "backward"]}
    fa3 |= {"recorded": "FA3", "tag": "attention=FA3"}
    assert newer == (fa3 if sm == 90 else usual)
    assert after == usual
