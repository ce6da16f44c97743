"""Effects of "deterministic": true, and what it refuses. The setting holds for a whole process, so it is tested in
separate processes."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_train import explained_failures
from harness.common.errors import UserError
from harness.distributed.signals import StopSignal
from harness.model import kernels
from tests.support.isolation import FOLDER, ROOT
from tests.support.launch import Workshop
from tests.support.warm import warm_server

# Prints the settings of the process and the code that Inductor generates for an embedding's backward pass on two
# threads: C++, or a call of one of torch's own kernels. The generated C++ is not compiled, no compile workers are
# started, and vector instructions are not checked, because all of these would take longer than the rest.
PROGRAM = """
import json, os, sys, torch
from harness.model.kernels import compute_deterministically
if sys.argv[1] == "deterministic":
    compute_deterministically()
assert not torch.cuda.is_initialized()
import torch._inductor.config as inductor
from torch._inductor.graph import GraphLowering
torch.set_num_threads(2)
names = ["shape_padding", "max_autotune", "coordinate_descent_tuning", "deterministic"]
found = {name: getattr(inductor, name, None) for name in names}
found["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
found["algorithms"] = torch.are_deterministic_algorithms_enabled()
found["fills"] = torch.utils.deterministic.fill_uninitialized_memory
found["cudnn"] = torch.backends.cuda.cudnn_sdp_enabled()
if sys.argv[2:]:
    def backward(gradient, tokens):
        return torch.ops.aten.embedding_dense_backward(gradient, tokens, 50, -1, False)
    arguments = torch.randn(64, 8), torch.randint(0, 50, (64,))
    codes = []
    def end_here(code):
        codes.append(code)
        raise RuntimeError("the code is there")
    GraphLowering.save_output_code = staticmethod(end_here)
    try:
        torch.compile(backward)(*arguments)
    except Exception as error:
        assert "the code is there" in str(error)
    (found["code"],) = codes
print(json.dumps(found))
"""


def settings(*arguments: str) -> dict[str, Any]:
    path = FOLDER / "settings.py"
    path.write_text(PROGRAM)
    quick = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = warm_server().spawn([str(path), *arguments], ROOT, os.environ | quick)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


@cache
def deterministic() -> dict[str, Any]:
    return settings("deterministic")


def test_every_choice_is_fixed() -> None:
    found = deterministic()
    assert found["algorithms"]
    assert found["cublas"] == ":4096:8"
    assert not found["fills"]
    assert not found["cudnn"]
    assert not found["shape_padding"]
    assert not found["max_autotune"]
    assert not found["coordinate_descent_tuning"]
    assert found["deterministic"] in (True, None)  # None if this version of torch does not have the setting


@pytest.mark.slow
def test_compiled_code_does_not_add_up_in_any_order() -> None:
    """With the setting, the embedding's backward pass, the only scatter operation of a GPT, is compiled to `index_put`.
    Without it, it is compiled to atomic additions, on two threads of a CPU as on CUDA."""
    assert "atomic_add" in settings("as it is", "compile")["code"]
    code = settings("deterministic", "compile")["code"]
    assert "atomic_add" not in code
    assert "index_put" in code


def test_another_workspace_of_cublas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(UserError, match=r'CUBLAS_WORKSPACE_CONFIG=:0:0: with "deterministic": true .* unset it'):
        kernels.compute_deterministically()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_form_is_one_line() -> None:
    """torch's error for an operation without a deterministic form becomes one line. `put_` has none on the CPU either,
    so it raises torch's real error here."""
    values, indices = torch.zeros(4), torch.tensor([0, 1])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UserError) as refused, explained_failures(1, StopSignal()):
            values.put_(indices, torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    line = str(refused.value)
    assert line.startswith('train.json: key "deterministic": put_ has no deterministic form on this device; use false')
    assert "\n" not in line
    cublas = RuntimeError(
        "... but this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2"
    )
    assert "CUBLAS_WORKSPACE_CONFIG" in str(kernels.explain_nondeterminism(cublas))
    assert kernels.explain_nondeterminism(RuntimeError("another error")) is None


def test_on_the_cpu_it_changes_no_bit(tmp_path: Path) -> None:
    """Training on two ranks ends in the same weights with and without the setting."""
    shop = Workshop(tmp_path)
    shop.add_dataset()
    ends = []
    for name, setting in (("usual", False), ("fixed", True)):
        run = shop.add_run(name, deterministic=setting, min_train_tokens=512, validation_interval=2)
        shop.train(name)
        ends.append((run / "checkpoints" / "latest" / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
