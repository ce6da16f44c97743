"""Settings that libraries read from the environment, made before they are loaded."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.common.libraries import configure_libraries, load
from tests.support.isolation import ROOT, SHIPPED_RUNS, on_path

# In place of torch: it tells what a command has set by the time it is loaded, and ends the command.
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


@pytest.mark.parametrize("given", [None, "active"])
@pytest.mark.parametrize("command", COMMANDS)
def test_threads_that_wait_leave_the_core_to_others(tmp_path: Path, command: str, given: str | None) -> None:
    """Unless the user has said otherwise; before torch, which brings OpenMP, is loaded."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    for file in ("model.json", "train.json"):
        (run / file).write_bytes((SHIPPED_RUNS / "quickstart" / file).read_bytes())
    (tmp_path / "model.json").write_bytes((run / "model.json").read_bytes())
    (tmp_path / "model.safetensors").touch()
    entry = {"instruction": "Name a colour.", "input": "", "output": "Blue."}
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


def test_nothing_is_looked_through_for_garbage_while_a_library_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor when it fails, which ends the pause as well; and what is there already is left alone."""
    (tmp_path / "much_garbage.py").write_text("seen = [[] for _ in range(100_000)]\n")
    (tmp_path / "unloadable.py").write_text("import gc\nassert gc.isenabled(), 'paused'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    collections: list[str] = []
    watch = lambda phase, _: collections.append(phase)  # noqa: E731
    gc.callbacks.append(watch)
    try:
        load("much_garbage")
        during = list(collections)
        assert gc.isenabled()
        frozen = gc.get_freeze_count()
        load("much_garbage")
        assert gc.get_freeze_count() == frozen
        with pytest.raises(AssertionError, match="paused"):
            load("unloadable")
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(watch)
        gc.unfreeze()
        sys.modules.pop("much_garbage", None)
    assert during == []


@pytest.mark.parametrize(
    ("ranks", "given", "expected"),
    [(None, None, "12"), ("1", None, "12"), ("8", None, "1"), ("100", None, "1"), ("2", "3", "3"), ("0", None, "12")],
)
def test_compilers_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: str | None, given: str | None, expected: str
) -> None:
    """Before torch is loaded, which reads it then; what the user has set stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    for name, value in (("LOCAL_WORLD_SIZE", ranks), ("TORCHINDUCTOR_COMPILE_THREADS", given)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    configure_libraries()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == expected
