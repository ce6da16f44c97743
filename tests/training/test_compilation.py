"""Training where torch.compile fails. The tests run on the CPU, where they make the setting "auto" compile as on
CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from gpt import GPTModel
from harness.common.errors import UserError
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model import kernels
from harness.training.step import OptimizerStep
from tests.support.configs import model_in, train_in
from tests.support.launch import Workshop, weights_of

SHORT: dict[str, Any] = {
    "min_train_tokens": 256,
    "validation_interval": None,
    "validation_batches": None,
    "checkpoint_interval": 99,
    "model": {"n_layers": 1},
}
# Lets "auto" compile on the CPU.
WANTED = """
import os, torch
from harness.training import step
from tests.support.faults import own_rank
step.should_compile = lambda setting, device: setting is not False
compile_module = torch.nn.Module.compile
"""
# Lets Inductor find no working C++ compiler and no code that an earlier process compiled.
BROKEN = f"""{WANTED}
import torch._inductor.config as inductor
inductor.cpp.cxx = "false"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath("cache")
"""
# Compiles with the backend "eager": TorchDynamo traces the model and splits it at DDP's buckets, but no machine code is
# generated, which would take minutes. The same holds for the loss kernel.
COMPILED = f"""{WANTED}
from harness.model import cross_entropy
kernel = torch.compile(cross_entropy.fused_kernel, dynamic=False, fullgraph=True, backend="eager")
cross_entropy._compile = lambda: kernel
backend = "eager"
torch.nn.Module.compile = lambda self: compile_module(self, backend=backend)
"""
BROKEN_ON_RANK_1 = f"""{COMPILED}
def broken(graph, inputs):
    raise RuntimeError("no such instruction")
if own_rank() == 1:
    backend = broken
"""
LACKING_ON_RANK_1 = f"{COMPILED}\nstep.should_compile = lambda setting, device: own_rank() == 0\n"
SLOWER = "note: the model is not compiled, trains more slowly and takes more memory"
NOTE = f"{SLOWER} (-f finds what still fits): compiling failed: "


FAILED = TorchDynamoException("backend='inductor' raised:\nCppCompileError: C++ compile error\n\nCommand:\ng++")


def warm_up(folder: Path, setting: bool | str, error: Exception) -> OptimizerStep:
    """Warm up the step of a model whose compiled code raises `error`. Uncompiled, the model trains."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    config = train_in(folder)(microbatch_size=1, compile=setting)
    model = GPTModel(model_in(folder)(vocab_size=8, context_length=4, emb_dim=8, n_heads=2, n_layers=1))
    model._compiled_call_impl = fail
    step = OptimizerStep(model, config)
    for _ in range(2):  # the second time the model is no longer compiled, so that nothing fails and nothing is printed
        step.warm_up(Microbatch.consecutive(np.zeros(5, dtype=np.uint16), 4), World(0, 0, 1, 1, torch.device("cpu")))
    return step


def test_auto_trains_uncompiled_where_compiling_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = warm_up(tmp_path, "auto", FAILED)
    assert capsys.readouterr().out == f"{NOTE}CppCompileError: C++ compile error\n"
    assert not kernels.is_compiled(step.bare_model)


@pytest.mark.parametrize(
    ("error", "setting", "raised", "text"),
    [
        (FAILED, True, UserError, r'^train.json: key "compile": the model cannot be compiled here: CppC'),
        # Errors that are not the compiler's are raised unchanged.
        (RuntimeError("shapes do not match"), True, RuntimeError, "^shapes do not match$"),
        (RuntimeError("CUDA out of memory"), "auto", RuntimeError, "^CUDA out of memory$"),
        (RuntimeError("put_ does not have a deterministic implementation, but"), "auto", RuntimeError, "^put_ does"),
    ],
)
def test_other_failures_of_compiling_end_the_run(
    tmp_path: Path, error: Exception, setting: bool | str, raised: type[Exception], text: str
) -> None:
    with pytest.raises(raised, match=text):
        warm_up(tmp_path, setting, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prelude", "reason"),
    [
        (BROKEN_ON_RANK_1, "RuntimeError: no such instruction"),
        (LACKING_ON_RANK_1, "a machine has no C compiler or no Python.h"),
    ],
    ids=["one cannot compile", "the machine of one lacks a tool"],
)
def test_all_ranks_step_down_together(shop: Workshop, prelude: str, reason: str) -> None:
    """If one rank cannot compile, no rank trains compiled code, because DDP's buckets differ between compiled and
    uncompiled models."""
    run, eager = shop.add_run("r", **SHORT), shop.add_run("eager", **SHORT, compile=False)
    result = shop.train("r", prelude=prelude)
    assert result.stdout.count(f"{NOTE}{reason}") == 1, result.stdout
    assert "Traceback" not in result.stderr
    shop.train("eager")
    assert weights_of(run) == weights_of(eager)


@pytest.mark.slow
def test_what_train_json_demands_is_refused_in_one_line(shop: Workshop) -> None:
    shop.add_run("r", **SHORT, compile=True)
    result = shop.train("r", ranks=1, prelude=BROKEN, expect=2)
    line = result.refuses()
    assert line.startswith('error: train.json: key "compile": the model cannot be compiled here: ')
    assert line.endswith("remove the cause, or set compile to false")


@pytest.mark.slow
def test_two_ranks_with_a_compiled_model_continue_to_the_same_bits(shop: Workshop) -> None:
    """Resumed from its first checkpoint, a run on two ranks with a compiled model ends with the same weights as before,
    to the bit. Each rank compiles in a pass that exchanges no gradients. DDP rebuilds its buckets only after the pass
    that follows."""
    run = shop.add_run(min_train_tokens=768, validation_interval=2, bucket_mb=1, model={"emb_dim": 256, "n_layers": 1})
    result = shop.train(prelude=COMPILED)
    assert "note:" not in result.stdout
    straight = weights_of(run)
    first = min(path.name for path in (run / "checkpoints").glob("*-iteration-*"))
    shop.train("r", first, prelude=COMPILED)
    assert weights_of(run) == straight
