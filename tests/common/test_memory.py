"""Memory of a device: the errors of a full one, the memory that a limit leaves, and other processes that use it. CUDA's
functions are simulated, because the tests run without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.common import memory
from harness.common.errors import RunError
from harness.common.memory import PLAN_BYTES, free_memory, is_out_of_memory, limit_memory, taken_by_others

GIB = 2**30
CUDA = torch.device("cuda", 3)

FULL = [
    "could not create a primitive",
    "could not execute a primitive",
    "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8",
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 39.49 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.",
    "Triton Error [CUDA]: out of memory",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error\nLast error:\nCuda failure 2",
    "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
]
ANOTHER_TROUBLE = [
    "could not create a primitive descriptor for the matmul primitive.",
    "out of resource: shared memory, Required: 264192, Hardware limit: 232448. Reducing block sizes may help.",
    "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 264192 Hardware limit: 232448",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "Last error:\nCuda failure 209 'no kernel image is available for execution on the device'",
    "Last error:\nCuda failure 700 'an illegal memory access was encountered'",
]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((RuntimeError(text), True) for text in FULL),
        *((RuntimeError(text), False) for text in ANOTHER_TROUBLE),
        (torch.OutOfMemoryError("no words"), True),
        (MemoryError(), True),
        (RunError("out of memory while writing the checkpoint"), True),
    ],
    ids=str,
)
def test_errors_of_a_full_device_are_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_files_in_the_cache_of_a_container_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a limit of 64 MiB uses 60 MiB, 51 MiB of them for files that it has read."""
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    on_the_machine = free_memory()
    (tmp_path / "memory.max").write_text(f"{64 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{60 * 2**20}\n")
    files = {"anon": 9 * 2**20, "file": 51 * 2**20, "inactive_file": 50 * 2**20, "active_file": 2**20}
    (tmp_path / "memory.stat").write_text("".join(f"{key} {size}\n" for key, size in files.items()))
    assert free_memory() == 55 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() > on_the_machine / 2


def test_the_limit_of_a_batch_job_is_on_a_group_above_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUP", tmp_path / "own")
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/slurm/job_7/step_0/task_0\n")
    job = tmp_path / "slurm/job_7"
    task = job / "step_0/task_0"
    task.mkdir(parents=True)
    for group, limit in ((job, str(48 * 2**20)), (task, "max")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{40 * 2**20}\n")
        (group / "memory.stat").write_text("anon 41943040\n")
    assert free_memory() == 8 * 2**20


class PretendedGpu:
    """Simulated GPU with `total` GiB. torch's allocator holds `held` GiB, and `outside` GiB are in use elsewhere."""

    def __init__(self, patch: pytest.MonkeyPatch, total: float, held: float, outside: float) -> None:
        self.fraction = 1.0
        patch.setattr(
            torch.cuda, "mem_get_info", lambda device: (int((total - held - outside) * GIB), int(total * GIB))
        )
        patch.setattr(torch.cuda, "memory_reserved", lambda device: int(held * GIB))
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)

    def set_fraction(self, fraction: float, device: torch.device) -> None:
        assert isinstance(fraction, float)
        assert 0.0 <= fraction <= 1.0
        self.fraction = fraction


@pytest.mark.parametrize(("asked", "whole"), [(None, 80.0), (40.0, 40.0), (100.0, 80.0)])
def test_a_limit_leaves_out_what_torch_does_not_hold_and_a_reserve(
    asked: float | None, whole: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usable memory is the limit minus the 1.5 GiB that CUDA and NCCL use, and minus a reserve. The GPU has 80 GiB,
    and torch's allocator holds 2."""
    gpu = PretendedGpu(monkeypatch, total=80.0, held=2.0, outside=1.5)
    limit = limit_memory(CUDA, asked, local_size=8)
    assert limit.gib == pytest.approx(whole)
    assert limit.usable_bytes == pytest.approx((whole - 1.5 - 0.75) * GIB)
    assert gpu.fraction * 80 * GIB == pytest.approx(limit.usable_bytes)
    assert limit.note == "1.50 GiB are taken outside torch and 0.75 GiB left as a reserve"
    gpu = PretendedGpu(monkeypatch, total=80.0, held=0.0, outside=1.5)
    assert limit_memory(CUDA, 1.0, local_size=1).usable_bytes == 0.0
    assert gpu.fraction == 0.0


def test_another_process_on_the_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    PretendedGpu(monkeypatch, total=79.2, held=0.0, outside=35.25)
    remark = "another process holds about 35.2 of the 79.2 GiB of cuda:3; `nvidia-smi` shows which"
    assert taken_by_others(CUDA) == remark
    PretendedGpu(monkeypatch, total=79.2, held=0.5, outside=1.5)  # what every process takes
    assert taken_by_others(CUDA) is None
    assert taken_by_others(torch.device("cpu")) is None


@pytest.mark.parametrize(("free", "expected"), [(0, True), (PLAN_BYTES, False)])
def test_without_a_plan_of_cudnn_memory_is_full_only_if_little_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: bool
) -> None:
    """cuDNN's attention says the same if memory is short and if it cannot compute something at all."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**36))
    error = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.")
    assert is_out_of_memory(error) == expected
