"""A compiler that is there and does not work: on the CPU, with a model that is to be compiled as on CUDA by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import Workshop

SHORT = {"min_train_tokens": 256, "validation_interval": None, "validation_batches": None, "checkpoint_interval": 99}
# "auto" compiles, with a compiler that fails, and without what earlier processes have compiled. Of two ranks the first
# has no use for a C++ compiler, and so nothing to complain of.
BROKEN = """
import os, torch
import torch._inductor.config as inductor
from harness.model import kernels
from tests.support.faults import own_rank
kernels.should_compile = lambda setting, device: setting is not False
inductor.cpp.cxx = "false"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.abspath(f"cache-{os.getpid()}")
compile_module = torch.nn.Module.compile
if int(os.environ.get("WORLD_SIZE", "1")) > 1 and own_rank() == 0:
    torch.nn.Module.compile = lambda self: compile_module(self, backend="eager")
"""
NOTE = "note: the model is not compiled, and trains more slowly: compiling failed: "


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path)
    shop.add_dataset()
    return shop


def weights(run: Path) -> bytes:
    return (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()


def test_all_ranks_step_down_if_one_cannot_compile(shop: Workshop) -> None:
    """A rank that trained compiled code would exchange other buckets than one that does not."""
    run, eager = shop.add_run("r", **SHORT), shop.add_run("eager", **SHORT, compile=False)
    result = shop.train("r", prelude=BROKEN)
    assert result.stdout.count(NOTE) == 1, result.stdout
    assert "Traceback" not in result.stderr
    shop.train("eager")
    assert weights(run) == weights(eager)


def test_what_train_json_demands_is_refused_in_one_line(shop: Workshop) -> None:
    shop.add_run("r", **SHORT, compile=True)
    result = shop.train("r", ranks=1, prelude=BROKEN, expect=2)
    (line,) = result.error_lines
    assert line.startswith('error: train.json: key "compile": the model cannot be compiled here: ')
    assert line.endswith("mend that, or let compile be false")
    assert "Traceback" not in result.stderr
