"""Tests use neither results in the checkout nor GPUs, however their processes are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.conftest import pytest_runtest_teardown
from tests.support import guard, isolation
from tests.support.isolation import REQUIRED, ROOT, SHIPPED_RUNS, on_path
from tests.support.launch import Workshop, finish

# The tests only try to open this file. It exists only if somebody has trained in the checkout.
RESULTS = ROOT / "runs" / "quickstart" / "metrics.jsonl"
LOOK = f"from contextlib import suppress\nwith suppress(OSError):\n    open({str(RESULTS)!r}).close()\n"


def look() -> None:
    with suppress(OSError):
        RESULTS.open().close()


def test_a_test_that_looks_at_results_fails() -> None:
    teardown = pytest_runtest_teardown()
    next(teardown)
    look()
    with pytest.raises(pytest.fail.Exception, match=r"test_a_test_that_looks.*: open .*/runs/quickstart/metrics.jsonl"):
        next(teardown)


def start_cold(shop: Workshop) -> None:
    finish([shop.spawn([sys.executable, "-c", LOOK], {})], expect=0, timeout=60)


def start_forked(shop: Workshop) -> None:
    (shop.path / "look.py").write_text(LOOK)
    finish([shop.fork([str(shop.path / "look.py")], {})], expect=0, timeout=60)


def start_by_a_shell(shop: Workshop) -> None:
    subprocess.run(["bash", "-c", '"$0" -c "$1"', sys.executable, LOOK], check=True, timeout=60)


@pytest.mark.parametrize("start", [start_cold, start_forked, start_by_a_shell])
def test_a_process_that_looks_at_results_is_seen(start: Callable[[Workshop], None], tmp_path: Path) -> None:
    assert isolation.trespasses() == []
    start(Workshop(tmp_path))
    (line,) = isolation.trespasses()
    assert "test_a_process_that_looks_at_results_is_seen" in line
    assert str(RESULTS) in line


REACHES = [
    "open('runs/r/metrics.jsonl')",
    "open(b'runs/r/metrics.jsonl')",
    "os.open('runs/r/.lock', os.O_CREAT)",
    "open('elsewhere/../runs/r/model.json')",
    "os.listdir('runs')",
    "list(os.scandir('datasets'))",
    "os.chdir('runs/r')",
    "os.mkdir('datasets')",
    "os.rename('x', 'runs/r/x')",
    "os.rename('runs/r/x', 'x')",
    "os.symlink('x', 'runs/r/x')",
    "os.remove('runs/r/x')",
]
FREE = ["open('x', 'w')", "os.listdir()", "os.makedirs('runs-of-others')", "open(0)", "os.symlink('runs', 'y')"]
FREE += ["import shutil; os.makedirs('x2/runs/datasets'); os.mkdir('x2/datasets'); shutil.rmtree('x2')"]


def seen(folder: Path, actions: list[str]) -> list[str]:
    """Return the lines that a process reports if it performs these actions and `folder` is guarded in place of the
    checkout."""
    forbidden = (f"{folder}/runs/", f"{folder}/datasets/")
    program = "import os\nfrom tests.support import guard\n"
    program += f"guard.watch({forbidden!r}, 'report', {REQUIRED!r})\n"
    program += "".join(f"try: {action}\nexcept OSError: pass\n" for action in actions)
    environment = os.environ | on_path(ROOT)
    subprocess.run([sys.executable, "-c", program], cwd=folder, env=environment, check=True, timeout=60)
    return (folder / "report").read_text().splitlines()


def test_each_way_to_reach_into_a_folder_is_seen_and_nothing_else(tmp_path: Path) -> None:
    next_one = "open('report', 'a').write('next\\n')"
    lines = seen(tmp_path, [*FREE, *(step for action in REACHES for step in (next_one, action))])
    assert lines[::2] == ["next"] * len(REACHES), lines
    assert all(str(tmp_path) in line for line in lines[1::2]), lines


@pytest.mark.parametrize("name", REQUIRED)
def test_a_program_that_is_started_with_devices_or_unwatched_is_seen(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != name}
    subprocess.run(["true"], env=environment, check=True)
    (line,) = isolation.trespasses()
    assert f"['true'] is started without {name}" in line
    subprocess.run(["true"], env=environment | {name: REQUIRED[name]}, check=True)
    assert isolation.trespasses() == []


def test_no_device_is_in_sight(tmp_path: Path) -> None:
    assert torch.cuda.device_count() == 0
    script = tmp_path / "count.py"
    script.write_text("import os, torch; print(torch.cuda.device_count(), repr(os.environ['CUDA_VISIBLE_DEVICES']))")
    assert finish([Workshop(tmp_path).fork([str(script)], {})], expect=0, timeout=60).stdout == "0 ''\n"


def test_shipped_runs_are_as_nobody_has_trained_them() -> None:
    names = {path.name for path in SHIPPED_RUNS.rglob("*") if path.is_file()}
    assert names == {"model.json", "train.json", "reported.json"}
    assert (SHIPPED_RUNS / "quickstart").is_dir()


def test_caches_and_settings_are_the_tests_own() -> None:
    assert Path.home() == isolation.FOLDER / "home"
    assert not isolation.FOLDER.is_relative_to(ROOT)
    assert guard.__file__ == guard.ORIGIN
    users = {"HF_TOKEN": "hf_x", "XDG_CACHE_HOME": "/nowhere", "RANK": "3", "OMP_NUM_THREADS": "7"}
    program = f"import os, tests.support.isolation\nprint([os.environ.get(name) for name in {list(users)!r}])"
    environment = os.environ | users | on_path(ROOT)
    printed = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True, timeout=60)
    assert printed == "[None, None, None, '1']\n"
    assert [line for line in isolation.trespasses() if "/tests/support/isolation.py:" not in line] == [], (
        "only isolation.py itself reads the runs, to copy them"
    )
