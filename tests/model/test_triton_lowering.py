"""The Triton source that Inductor generates for the loss kernel on a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.support.isolation import ROOT

pytest.importorskip("triton")  # builds of torch for CPUs have none

VOCAB, WIDTH, ROWS = 50257, 50304, 2688
# Runs in a new process, because other tests change the compiler's settings.
PROGRAM = f"""
import json, torch
from harness.model.cross_entropy import fused_kernel
from tests.support.pretended_gpu import lower_to_triton

def lowered(dtype, wants_errors, softcap):
    shapes = ((({ROWS}, {WIDTH}), dtype), (({ROWS},), torch.int64), (({ROWS},), torch.float32))
    inputs = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes]
    return lower_to_triton(lambda *tensors: fused_kernel(*tensors, {VOCAB}, wants_errors, softcap), *inputs)

cases = [(torch.bfloat16, True, 0.0), (torch.bfloat16, False, 0.0), (torch.float32, True, 0.0)]
cases += [(torch.float16, True, 15.0)]
print(json.dumps([[f"{{kind}} {{cap}}", wants, lowered(kind, wants, cap)] for kind, wants, cap in cases]))
"""


def test_a_chunk_of_the_loss_is_one_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT)
    for case, wants_errors, source in json.loads(done.stdout.splitlines()[-1]):
        kernels = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)
        assert len(kernels) == 1, (case, wants_errors, kernels)
        assert "tl.atomic" not in source, "atomic additions may change the bits from run to run"
        assert not re.search(r"extern_kernels\.\w+\(", source), "another kernel is called, too"
        stores = re.findall(rf"tl\.store\(\w+ \+ \(r0_\d \+ {WIDTH}\*x0\)", source)
        assert len(stores) == (1 if wants_errors else 0), "the error must be written once, in place of the logits"
