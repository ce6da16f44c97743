"""`gpu_names` reads the names of a machine's GPUs from files like those of the NVIDIA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.common import program
from harness.common.program import gpu_names

INFORMATION = """Model: \t\t {name}
IRQ:   \t\t 0
GPU UUID: \t GPU-????????-????-????-????-????????????
Bus Type: \t PCIe
"""


@pytest.fixture(autouse=True)
def no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DRIVER_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def add_gpu(folder: Path, bus: str, text: str) -> None:
    (folder / bus).mkdir()
    (folder / bus / "information").write_text(text)


def test_none() -> None:
    assert gpu_names() == []


def test_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_gpu(tmp_path, "0000:07:00.0", INFORMATION.format(name="NVIDIA H100 80GB HBM3"))
    add_gpu(tmp_path, "0000:0f:00.0", INFORMATION.format(name="NVIDIA H200"))
    assert gpu_names() == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpu_names() == []


def test_files_that_say_something_else(tmp_path: Path) -> None:
    add_gpu(tmp_path, "0", "")
    add_gpu(tmp_path, "1", "GPU is lost\n")
    (tmp_path / "2" / "information").mkdir(parents=True)
    assert gpu_names() == []
