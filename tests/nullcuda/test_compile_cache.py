"""A second start of a compiled run on the null device, without torch's own cache of what the first has compiled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.nullcuda.device import run, why_not
from tests.support.launch import Workshop

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=why_not() or ""), pytest.mark.slow]

MODEL = {"n_layers": 1, "drop_rate": 0.0, "qkv_bias": False}
TRAIN = {"compile": True, "deterministic": True, "precision": "bf16", "attention": "flash", "validation_batches": 1}
# Runs tests/nullcuda/command.py, and then prints how many kernels and graphs were compiled.
COUNTING = """
import json, triton
from torch._dynamo.utils import counters
from tests.nullcuda.command import main
compiled = []
triton.knobs.compilation.listener = lambda *_, cache_hit, **__: None if cache_hit else compiled.append(1)
try:
    main()
finally:
    misses = [counters["inductor"]["fxgraph_cache_miss"], counters["aot_autograd"]["autograd_cache_miss"]]
    print(json.dumps({"kernels": len(compiled), "misses": misses, "graphs": counters["stats"]["unique_graphs"]}))
"""


def train(shop: Workshop, caches: Path) -> tuple[dict[str, Any], str]:
    """Run ddp_train.py, with torch's own caches in the folder `caches`. Returns what was counted and the output."""
    command = ["-c", COUNTING, "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    variables: dict[str, Any] = {"DDP_PRETRAIN_CACHE_SECRET": "of the tests"}
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), "TRITON_CACHE_DIR": str(caches / "triton")}
    done = run(*command, **variables)
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


@pytest.mark.timeout(600)  # it compiles for half a minute of processor time
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """The second start has the code of training and of validation from the run's folder, with "deterministic", too. The
    third one has lost that folder, and takes them from torch's own cache. The fourth one is on another machine, and has
    them from the run's mirror, as the third has left them."""
    shop, elsewhere = Workshop(tmp_path / "here"), Workshop(tmp_path / "elsewhere")
    settings = TRAIN | {"mirror": (tmp_path / "store").as_uri()}
    for each in (shop, elsewhere):
        each.add_dataset()
    folder = shop.add_run("r", model=MODEL, **settings, min_train_tokens=64)
    first, _ = train(shop, tmp_path / "first")
    assert first["kernels"] > 0
    assert first["misses"][0] > 0
    shop.add_run("r", model=MODEL, **settings, min_train_tokens=256)
    second, stdout = train(shop, tmp_path / "second")
    assert "continuing from" in stdout
    assert "  attention: flash\n" in stdout
    assert second == {"kernels": 0, "misses": [0, 0], "graphs": first["graphs"]}
    files = {path.name for path in (folder / "compile-cache").iterdir()}
    assert len(files) == 2, "for training and for validation; the second start has added none"
    assert json.loads((folder / "summary.json").read_text())["attention"] == "flash"
    shutil.rmtree(folder / "compile-cache")
    shop.add_run("r", model=MODEL, **settings, min_train_tokens=512)
    third, _ = train(shop, tmp_path / "second")
    assert third == second
    assert {path.name for path in (folder / "compile-cache").iterdir()} == files
    elsewhere.add_run("r", model=MODEL, **settings, min_train_tokens=1024)
    fourth, stdout = train(elsewhere, tmp_path / "fourth")
    assert "was fetched from the mirror" in stdout
    assert fourth == second
