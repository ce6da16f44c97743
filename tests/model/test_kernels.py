"""Kernels: the code that torch.compile makes of the loss for a GPU, and the effects of "deterministic": true, which
hold for a whole process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gpt
from harness.common.errors import UserError
from harness.distributed.signals import StopRequest
from harness.model import kernels
from harness.training.failures import explained_failures
from tests.support.isolation import FOLDER, ROOT
from tests.support.launch import Workshop, weights_of
from tests.support.warm import warm_server


def printed_by(program: str) -> Any:
    """Run a program in a new process, and return the JSON that it prints. A new process is needed because other tests
    change the compiler's settings. The compiler starts no workers and does not check vector instructions, both of which
    would take longer than the rest."""
    path = FOLDER / "program.py"
    path.write_text(program)
    quick = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = warm_server().spawn([str(path)], ROOT, os.environ | quick)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    return json.loads(stdout.splitlines()[-1])


VOCAB, WIDTH, ROWS = 50257, 50304, 2688
TRITON = f"""
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


@pytest.mark.slow
def test_on_a_gpu_a_chunk_of_the_loss_is_one_kernel() -> None:
    pytest.importorskip("triton")  # builds of torch for CPUs have none
    for case, wants_errors, source in printed_by(TRITON):
        found = re.findall(r"^def (triton_\w+)\(", source, re.MULTILINE)
        assert len(found) == 1, (case, wants_errors, found)
        assert "tl.atomic" not in source, "atomic additions may change the bits from run to run"
        assert not re.search(r"extern_kernels\.\w+\(", source), "another kernel is called, too"
        stores = re.findall(rf"tl\.store\(\w+ \+ \(r0_\d \+ {WIDTH}\*x0\)", source)
        assert len(stores) == (1 if wants_errors else 0), "the error must be written once, in place of the logits"


@pytest.mark.slow
def test_only_compiled_code_has_an_operation_for_ropes_cosines(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile would put the cosines and sines of all positions, and the powers in them, into the kernel of each
    layer's queries and keys. On an H200 this was 47 ms of a step of 169 ms. Without torch.compile, the operation would
    load torch's compiler, and what torch.export writes could not be loaded without gpt.py."""
    shape: dict[str, Any] = {"vocab_size": 8, "context_length": 8, "emb_dim": 8, "n_heads": 2, "n_layers": 2}
    config = gpt.ModelConfig(**shape, drop_rate=0.0, qkv_bias=False, position="rope", rope_base=100.0)
    model, tokens = gpt.GPTModel(config).eval(), torch.arange(8)[None]
    found: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(model, backend=compiler)(tokens)
    assert found.count("ddp_pretrain.rotation.default") == 1
    monkeypatch.setattr(gpt, "compiled_rotation", None)
    assert torch.equal(model(tokens), compiled)
    torch.export.export(model, (tokens,))


SETTINGS = """
import json, os, torch
from harness.model.kernels import compute_deterministically
compute_deterministically()
assert not torch.cuda.is_initialized()
import torch._inductor.config as inductor
names = ["shape_padding", "max_autotune", "coordinate_descent_tuning", "deterministic"]
found = {name: getattr(inductor, name, None) for name in names}
found["cublas"] = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
found["nccl"] = os.environ.get("NCCL_ALGO")
found["algorithms"] = torch.are_deterministic_algorithms_enabled()
found["fills"] = torch.utils.deterministic.fill_uninitialized_memory
found["cudnn"] = torch.backends.cuda.cudnn_sdp_enabled()
print(json.dumps(found))
"""


def test_every_choice_is_fixed() -> None:
    found = printed_by(SETTINGS)
    assert found.pop("deterministic") in (True, None)  # None if this version of torch does not have the setting
    off = dict.fromkeys(("fills", "cudnn", "shape_padding", "max_autotune", "coordinate_descent_tuning"), False)
    assert found == {"algorithms": True, "cublas": ":4096:8", "nccl": "Ring", **off}


def test_an_operation_without_a_deterministic_form_is_one_line() -> None:
    """torch's error for an operation without a deterministic form becomes one line. `put_` has none on the CPU either,
    so it raises torch's real error here."""
    values, indices = torch.zeros(4), torch.tensor([0, 1])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(UserError) as refused, explained_failures(1, StopRequest()):
            values.put_(indices, torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    line = str(refused.value)
    assert line.startswith('train.json: key "deterministic": put_ has no deterministic form on this device; use false')
    assert "\n" not in line


@pytest.mark.parametrize(
    "text",
    [
        "No available kernel. Aborting execution.",
        "backend='inductor' raised:\nRuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No execution plans",
        "FA3 SDPA backward unsupported: logsumexp dtype must be float32",
        "FlashAttention only supports Ampere GPUs or newer.",
    ],
)
def test_a_failed_attention_kernel_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as refused, explained_failures(1, StopRequest()):
        raise RuntimeError(text)
    line = str(refused.value)
    assert line.startswith('train.json: key "attention": the attention kernel failed (')
    assert line.endswith('"cudnn", "flash" or "efficient", or lower microbatch_size if memory may be short')
    assert "\n" not in line
    assert kernels.explain_failed_kernel(RuntimeError("CUDA out of memory")) is None


def test_on_the_cpu_kernels_that_are_chosen_for_gpus_change_no_bit(shop: Workshop) -> None:
    """Training on the CPU ends in the same weights with "deterministic": true and with an attention kernel, which is
    remarked upon."""
    ends = []
    for name, settings in (("usual", {}), ("fixed", {"deterministic": True}), ("flash", {"attention": "flash"})):
        run = shop.add_run(name, **settings, min_train_tokens=512, validation_interval=2)
        result = shop.train(name, ranks=1)
        remark = 'note: "attention": "flash" in train.json has no effect on a CPU'
        assert (remark in result.stdout) == (name == "flash")
        ends.append(weights_of(run))
    assert ends[0] == ends[1] == ends[2]
