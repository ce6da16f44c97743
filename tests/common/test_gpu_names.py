"""`gpu_names` reads the names of a machine's GPUs from files like those of the NVIDIA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.common import program
from harness.common.program import gpu_names

INFORMATION = "Model: \t\t {name}\nIRQ:   \t\t 0\nGPU UUID: \t GPU-????????-????-????-????-????????????\n"


def test_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "DRIVER_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_names() == []
    texts = ["", "GPU is lost\n", "Model:\nIRQ: 0\n"]  # files that say something else
    texts += [INFORMATION.format(name=name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")]
    for bus, text in enumerate(texts):
        (tmp_path / str(bus)).mkdir()
        (tmp_path / str(bus) / "information").write_text(text)
    (tmp_path / "9" / "information").mkdir(parents=True)
    assert gpu_names() == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert gpu_names() == []
