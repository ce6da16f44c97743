"""The device and kernels that a process uses, on simulated machines with any number of GPUs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt import GPTModel
from harness.common import device
from harness.common.errors import RunError, UserError
from harness.model import kernels
from harness.model.config import ModelConfig
from harness.model.precision import Precision
from harness.training import startup
from tests.support.in_process import InProcess
from tests.support.isolation import ROOT

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Simulate a machine without GPUs, and return the monkeypatch with which a test can add some."""
    monkeypatch.setattr(device, "DEVICE_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_gpus(monkeypatch, 0)
    return monkeypatch


def set_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *index: (79 * 2**30, 80 * 2**30))


def test_each_rank_has_a_gpu_of_its_own(machine: pytest.MonkeyPatch) -> None:
    """More ranks than GPUs are refused. A run that leaves GPUs idle prints a remark, because the user pays for all."""
    for gpus in (1, 2, 8):
        set_gpus(machine, gpus)
        found = [device.choose_device(rank, gpus) for rank in range(gpus)]
        assert found == [torch.device("cuda", rank) for rank in range(gpus)]
        assert device.idle_gpus(found[0], gpus) is None
    remark = device.idle_gpus(device.choose_device(0, 1), 1)
    assert remark == "7 of 8 visible GPUs are idle; --processes 8 uses all of them"
    assert device.idle_gpus(CPU, 1) is None
    set_gpus(machine, 1)
    with pytest.raises(UserError, match=r"2 processes on a machine with 1 visible GPU; use --processes 1, or "):
        device.choose_device(1, 2)


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If the driver is too old for this torch, training is refused and does not use the CPU instead. Training uses the
    CPU if the user hides the GPUs or has a torch built for CPUs."""
    (tmp_path / "nvidia0").touch()
    machine.setattr(torch.version, "cuda", "13.2")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12080).\nPlease update.")

    machine.setattr(torch.cuda, "init", init)
    with pytest.raises(
        UserError, match=r"nvidia0: this machine has GPUs, but torch .*: The NVIDIA driver.*--torch-backend=auto"
    ):
        device.choose_device(0, 8)
    machine.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device.choose_device(0, 8) == CPU
    machine.delenv("CUDA_VISIBLE_DEVICES")
    machine.setattr(torch.version, "cuda", None)  # a torch for CPUs, chosen by the user
    assert device.choose_device(0, 8) == CPU


def test_the_commands_that_documents_show_fit_their_machines(machine: pytest.MonkeyPatch) -> None:
    """The first command in README works with any number of GPUs. Those for the runs on eight GPUs start eight
    processes."""
    pages = [ROOT / "README.md", ROOT / "docs" / "configuration.md", ROOT / "docs" / "continuing.md"]
    text = "\n".join(page.read_text() for page in pages)
    pattern = r"^    (.*torchrun .*ddp_train\.py \w+ datasets|.*ddp_train\.py .*--processes \d+)"
    first, *others = re.findall(pattern, text, re.MULTILINE)
    words = shlex.split(first.rpartition("&& ")[2])
    processes = int(words[words.index("--processes") + 1])
    assert "quickstart" in words
    for gpus in (0, 1, 2, 8):
        set_gpus(machine, 0 if "CUDA_VISIBLE_DEVICES=" in words[: words.index("ddp_train.py")] else gpus)
        for rank in range(processes):
            device.choose_device(rank, processes)
    others = [command for command in others if "8xa100m40" in command]
    assert len(others) >= 6
    for command in others:
        assert re.search(r"--(nproc_per_node=|processes )8", command)
        assert "CUDA_VISIBLE_DEVICES" not in command


# Precision


def test_auto_is_fp16_where_the_gpu_would_emulate_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert Precision.resolve("auto", CUDA).name == "fp16"
    with pytest.raises(UserError, match=r'^--precision: Tesla T4 does not compute bf16; use "auto"'):
        Precision.resolve("bf16", CUDA, place="--precision")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: True)
    assert Precision.resolve("auto", CUDA) == Precision.resolve("bf16", CUDA) == Precision("bf16", "cuda")
    assert Precision.resolve("bf16", CPU).name == "bf16"


def test_tf32_is_allowed_only_for_fp32_on_cuda() -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for name, kind in (("bf16", "cuda"), ("fp16", "cuda"), ("fp32", "cpu"), ("bf16", "cpu")):
            Precision(name, kind).allow_tf32()
            assert torch.get_float32_matmul_precision() == "highest"
        Precision("fp32", "cuda").allow_tf32()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# Kernels


def test_compile_auto_steps_down_where_a_compiler_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_compiler(monkeypatch)
    assert not kernels.should_compile("auto", CUDA)
    remark = kernels.not_compiled("auto", CUDA)
    assert remark is not None
    assert "needs a C compiler (apt install build-essential)" in remark
    with pytest.raises(UserError, match=r'train.json: "compile": true needs a C compiler'):
        kernels.should_compile(True, CUDA)
    assert not kernels.should_compile("auto", CPU)
    assert kernels.not_compiled("auto", CPU) is kernels.not_compiled(False, CUDA) is None
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert "Python.h" in str(kernels.missing_tool(CUDA))
    (tmp_path / "Python.h").touch()
    assert kernels.missing_tool(CUDA) is None
    assert kernels.should_compile("auto", CUDA)
    assert kernels.not_compiled("auto", CUDA) is None


@pytest.mark.parametrize(
    ("version", "drop_rate", "allowed"),
    [("2.11.0", 0.1, False), ("2.11.0", 0.125, True), ("2.11.0", 0.0, True), ("2.15.0+cu132", 0.1, True)],
)
def test_kernels_that_round_the_dropout_rate_are_not_used(
    monkeypatch: pytest.MonkeyPatch, version: str, drop_rate: float, allowed: bool
) -> None:
    """cuDNN's attention rounds some dropout rates. It is disabled on CUDA if this version of torch would use it with
    such a rate."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch, "__version__", version)
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        kernels.avoid_rounded_dropout(drop_rate, CPU)
        assert torch.backends.cuda.cudnn_sdp_enabled()
        kernels.avoid_rounded_dropout(drop_rate, CUDA)
        assert torch.backends.cuda.cudnn_sdp_enabled() == allowed
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(
    ("capability", "precision", "waits"),
    [
        ((8, 0), "bf16", True),
        ((9, 0), "bf16", False),
        ((9, 0), "fp32", True),
        ((10, 0), "bf16", False),
        ((12, 0), "bf16", True),
    ],
)
def test_experts_that_wait_are_remarked_upon(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, waits: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert (kernels.waiting_experts(CUDA, precision) is not None) == waits
    assert kernels.waiting_experts(CPU, precision) is None


def test_a_residual_stream_in_bf16_halves_what_blocks_pass_on() -> None:
    config = ModelConfig(
        vocab_size=64, context_length=16, emb_dim=32, n_heads=2, n_layers=2, drop_rate=0.0, qkv_bias=False
    )
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = GPTModel(config, residual_dtype=dtype)
        passed: list[torch.dtype] = []
        for block in model.trf_blocks:
            block.register_forward_hook(lambda _, __, out, passed=passed: passed.append(out[0].dtype))
        tokens = torch.arange(32).view(2, 16)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, tokens)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        model(tokens)
        assert passed == [dtype or torch.float32] * 2 + [torch.float32] * 2, "the stream is in bf16 only under autocast"
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], abs=0.01)
    assert found[0] != found[1]
    assert Precision("bf16", "cuda").residual_dtype("bf16") == torch.bfloat16
    assert Precision("fp16", "cuda").residual_dtype("fp32") is None
    with pytest.raises(UserError, match=r'"residual_precision": "bf16" needs matrix products in bf16, .* run in fp32'):
        Precision("fp32", "cpu").residual_dtype("bf16")


# Whole commands on simulated machines print one line and write no metrics.


def no_compiler(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", "/nonexistent")
    patch.delenv("CC", raising=False)
    patch.delenv("CXX", raising=False)


def filled(patch: pytest.MonkeyPatch) -> None:
    set_gpus(patch, 1)
    patch.setattr(torch.cuda, "mem_get_info", lambda *index: (2**29, 80 * 2**30))


def busy(patch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU that another process uses in nvidia-smi's exclusive mode."""

    def refuse(index: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...")

    set_gpus(patch, 1)
    patch.setattr(torch.cuda, "set_device", refuse)


def old_gpu(patch: pytest.MonkeyPatch) -> None:
    set_gpus(patch, 1)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    patch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: False)


def other_workspace(patch: pytest.MonkeyPatch) -> None:
    patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")


HELD = "another process may hold this GPU: end it (`nvidia-smi` shows it)"
MACHINES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any], str]] = {
    "a GPU of another process": (
        *(busy, {}),
        f"cuda:0: CUDA error: CUDA-capable device(s) is/are busy or unavailable; {HELD}, or leave this GPU out of ",
    ),
    "a GPU without room to begin with": (filled, {}, f"cuda:0: 0.5 of 80.0 GiB are free; {HELD}"),
    "no bf16": (
        old_gpu,
        {"precision": "bf16"},
        'train.json: key "precision": Tesla T4 does not compute bf16; use "auto" or "fp16"',
    ),
    "no compiler": (no_compiler, {"compile": True}, 'train.json: "compile": true needs a C++ compiler'),
    "cuBLAS's workspace": (
        other_workspace,
        {"deterministic": True},
        'CUBLAS_WORKSPACE_CONFIG=:0:0: with "deterministic": true in train.json it must be :4096:8 or :16:8; unset it',
    ),
}


@pytest.mark.parametrize(("change", "settings", "start"), MACHINES.values(), ids=MACHINES)
def test_a_machine_that_cannot_is_refused_in_one_line(
    machine: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[pytest.MonkeyPatch], None],
    settings: dict[str, Any],
    start: str,
) -> None:
    shop = InProcess(tmp_path / "shop")
    shop.add_dataset()
    run = shop.add_run(**settings)
    change(machine)
    assert shop.attempt().refuses().startswith(f"error: {start}")
    assert not (run / "metrics.jsonl").exists()


def test_each_note_on_the_machine_is_printed_once(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each note is printed once on a machine with an unknown kind of GPU, on which experts are slow, another process on
    that GPU, and no compiler. The test ends before the first operation on the GPU, because the GPU is simulated."""

    def end(*arguments: object) -> None:
        raise RunError("enough")

    shop = InProcess(tmp_path / "shop")
    shop.add_dataset()
    shop.add_run(model={"moe": {"num_experts": 4, "num_active_experts": 2}})
    set_gpus(machine, 2)
    no_compiler(machine)
    machine.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X999")
    machine.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    machine.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: True)
    machine.setattr(torch.cuda, "mem_get_info", lambda *index: (2**30, 80 * 2**30))
    machine.setattr(startup, "fetch_data", end)
    result = shop.attempt()
    assert result.status == 1, result
    notes = [line.removeprefix("note: ") for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert [" ".join(note.split()[:4]) for note in notes] == [
        "1 of 2 visible",
        "the model is not",
        "experts run slowly on",
        "MFU unknown: this program",
        "another process holds about",
    ]
    assert notes[-1].startswith("another process holds about 79.0 of the 80.0 GiB of cuda:0")
