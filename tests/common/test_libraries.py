"""Environment variables that the program sets for libraries before it loads them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from harness.common.libraries import configure_libraries, load
from tests.support.isolation import ROOT, SHIPPED_RUNS, on_path

# Replaces torch: prints the value of OMP_WAIT_POLICY when a command imports torch, and ends the command.
TORCH = """
import os, sys
print("threads that wait:", os.environ.get("OMP_WAIT_POLICY"), flush=True)
os._exit(0)
"""
COMMANDS = {
    "ddp_train": ["r", "datasets"],
    "test_smoke": ["model.json", "model.safetensors"],
    "test_loss": ["datasets", "model.json", "model.safetensors"],
    "test_ift": ["model.json", "model.safetensors", "--data", "instructions.json", "--responses-only"],
    "evaluate_benchmarks": ["model.json", "model.safetensors", "--tasks", "piqa"],
}


@pytest.mark.parametrize(("command", "given"), [*((command, None) for command in COMMANDS), ("ddp_train", "active")])
def test_threads_that_wait_leave_the_core_to_others(tmp_path: Path, command: str, given: str | None) -> None:
    """OMP_WAIT_POLICY is "passive" before torch, which loads OpenMP, is imported, unless the user has set it."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    for file in ("model.json", "train.json"):
        (run / file).write_bytes((SHIPPED_RUNS / "quickstart" / file).read_bytes())
    (tmp_path / "model.json").write_bytes((run / "model.json").read_bytes())
    (tmp_path / "model.safetensors").touch()
    entry = {"instruction": "Name a color.", "input": "", "output": "Blue."}
    (tmp_path / "instructions.json").write_text(json.dumps([entry] * 20))
    environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"} | on_path(tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / f"{command}.py"), *COMMANDS[command]],
        cwd=tmp_path,
        env=environment | ({"OMP_WAIT_POLICY": given} if given else {}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"threads that wait: {given or 'passive'}\n" in done.stdout, done.stderr


def test_garbage_collection_is_paused_while_a_library_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection is disabled during an import and enabled again afterwards, also if the import fails."""
    (tmp_path / "loadable.py").write_text("import gc\nwas_paused = not gc.isenabled()\n")
    (tmp_path / "unloadable.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load("loadable")
    assert sys.modules.pop("loadable").was_paused
    assert gc.isenabled()
    with pytest.raises(ImportError):
        load("unloadable")
    assert gc.isenabled()


def test_compilers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """TORCHINDUCTOR_COMPILE_THREADS divides the cores among the ranks of this machine. A value that the user has set is
    kept."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    cases = [(None, None, "12"), ("1", None, "12"), ("8", None, "1"), ("100", None, "1"), ("2", "3", "3")]
    for ranks, given, expected in [*cases, ("0", None, "12"), ("²", None, "12")]:
        values = {"LOCAL_WORLD_SIZE": ranks, "TORCHINDUCTOR_COMPILE_THREADS": given}
        environment = {name: value for name, value in values.items() if value is not None}
        with mock.patch.dict(os.environ, environment, clear=True):
            configure_libraries()
            assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == expected
