"""Numbers that training measures and prints: losses between reports, validation on one rank and on all, speed,
dollars and samples."""

from __future__ import annotations

import json
import math
import os
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from gpt import GPTModel, ModelConfig
from harness.common.errors import RunStopped
from harness.data.dataset import TokenFile
from harness.data.loader import BatchLayout, Microbatch, TokenLoader
from harness.data.order import WindowOrder
from harness.distributed.signals import SharedWork, StopRequest
from harness.distributed.watchdog import Place
from harness.distributed.world import World
from harness.evaluation.generation import Sampling, choose, sample_tokens
from harness.evaluation.loss import bits_per_byte, mean, microbatch_losses
from harness.model.precision import Precision
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import RunDirectory
from harness.runs.metrics import MetricsFile, TrainEvent, read_metrics
from harness.runs.summary import RunSummary, describe_summary, read_summary
from harness.runs.throughput import cost, mfu, peak_flops, unknown_peak
from harness.runs.train_config import TrainConfig
from harness.training.clock import Clock
from harness.training.evaluations import Evaluations
from harness.training.loss_meter import LossMeter
from harness.training.step import OptimizerStep, StepResult
from tests.support import file_operations
from tests.support.configs import SEED_TRAIN
from tests.support.in_process import InProcess
from tests.support.launch import Workshop

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU)
CONFIG = ModelConfig(vocab_size=50, context_length=8, emb_dim=16, n_heads=2, n_layers=1, drop_rate=0.2, qkv_bias=False)
TRAIN = TrainConfig(**SEED_TRAIN, learning_rate=0.01)


def result(*losses: float, norm: float = 1.0, skipped: float = 0.0) -> StepResult:
    return StepResult(torch.tensor(losses, dtype=torch.float64), torch.tensor(norm), torch.tensor(skipped))


def test_time_of_a_device_that_is_behind_is_time_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that needs 200 ms for a step, and has two steps in its queue, is waited for before a sample."""
    step, steps = 0.2, 10
    queue = [0.0]  # when the device will have done all steps
    run, sample = OptimizerStep.run, Evaluations.sample

    def wait(*given: object, ahead: int = 0) -> None:
        time.sleep(max(0.0, queue[0] - step * ahead - time.perf_counter()))

    def enqueue(*given: Any) -> StepResult:
        queue[0] = max(queue[0], time.perf_counter()) + step
        wait(ahead=2)
        return run(*given)

    def sample_at_last(*given: Any) -> Any:
        wait()
        return sample(*given)

    monkeypatch.setattr(OptimizerStep, "run", enqueue)
    monkeypatch.setattr(LossMeter, "synchronize", wait)
    monkeypatch.setattr(Evaluations, "sample", sample_at_last)
    shop = InProcess(tmp_path)
    shop.add_dataset()
    folder = shop.add_run(
        sample_prompt="def", sample_interval=3, report_interval=50, validation_interval=50, min_train_tokens=64 * steps
    )
    shop.train_here()
    seconds = read_summary(folder / "summary.json").seconds
    # The device also computes in the moments between steps, which are not counted as training.
    assert seconds["training"] >= 0.8 * step * steps


def test_a_window_reports_means_extremes_and_rows_of_skipped_steps() -> None:
    window = LossMeter(CPU)
    for step in (result(4.0, 3.0, norm=2.0), result(5.0, 1.0, norm=9.0), result(2.0, 3.0, skipped=1.0)):
        window.add(step)
    report = window.reduce(ALONE)
    assert (report.loss, report.loss_min, report.loss_max) == (3.0, 1.0, 5.0)
    assert (report.microbatches, report.gradient_norm) == (6, 9.0)
    assert (report.skipped_steps, report.skipped_in_a_row) == (1, 1)
    # Skipped steps in a row are counted across a report.
    for _ in range(2):
        window.add(result(1.0, skipped=1.0))
    assert window.reduce(ALONE).skipped_in_a_row == 3


def test_a_window_with_nan_reports_nan_and_valid_json(tmp_path: Path) -> None:
    window = LossMeter(CPU)
    window.add(result(1.0))
    window.add(result(math.nan, norm=math.inf, skipped=1.0))
    report = window.reduce(ALONE)
    assert math.isnan(report.loss)
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(TrainEvent(global_step=3, loss=report.loss, gradient_norm=report.gradient_norm, skipped_steps=1))
    values = {"event": "train", "global_step": 3, "loss": None, "gradient_norm": None, "skipped_steps": 1}
    assert json.loads(metrics.path.read_text()) == values


def test_later_lines_are_on_the_disk_elsewhere_before_the_metrics_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.append(TrainEvent(global_step=1))
    kept = metrics.size()
    metrics.append(TrainEvent(global_step=2))
    whole = metrics.path.read_bytes()
    aside = RunDirectory(tmp_path).new_aside()
    flushed: list[Path] = []  # before metrics.jsonl was cut
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        if metrics.path.read_bytes() == whole:
            flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    metrics.rewind_to(CheckpointMeta(global_step=1, metrics_bytes=kept), lambda: aside)
    assert metrics.path.read_bytes() + (aside / "metrics.jsonl").read_bytes() == whole
    assert metrics.size() == kept
    assert {aside / "metrics.jsonl", aside, aside.parent, tmp_path} <= {*flushed}


def test_a_line_that_is_missing_after_its_checkpoint_has_the_time_and_cost_that_the_checkpoint_records(
    tmp_path: Path,
) -> None:
    metrics, phases = MetricsFile(tmp_path / "metrics.jsonl"), {"setup": 1.0, "training": 2.00049}
    meta = CheckpointMeta(global_step=1, planned=True, seconds=phases, dollars={"setup": 0.5, "training": 0.25})
    metrics.rewind_to(meta, lambda: tmp_path)
    (line,) = read_metrics(metrics.path)
    assert (line.seconds, line.dollars) == (3.0, 0.75)


@pytest.mark.parametrize("in_background", [False, True])
def test_no_line_waits_for_the_disk_but_a_checkpoint_comes_after_its_lines(shop: Workshop, in_background: bool) -> None:
    """For a line of metrics.jsonl the training thread only opens the file and writes. A checkpoint is renamed to its
    final name after metrics.jsonl is synced."""
    shop.add_run(async_checkpoint=in_background)
    save = "background save" if in_background else "save"
    files = {call: shop.path / call for call in ("metrics", save)}
    shop.train(
        "r", ranks=1, prelude="".join(file_operations.prelude(call, 0, "log", path) for call, path in files.items())
    )
    line = files["metrics"].read_text().splitlines()
    assert [name.split()[0] for name in line] == ["open", "write"]
    operations = files[save].read_text().splitlines()
    published = next(number for number, name in enumerate(operations) if name.startswith("os.rename .saving-"))
    assert "fsync metrics.jsonl" in operations[:published]


def test_validation_is_the_mean_without_dropout_and_leaves_the_mode_and_random_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPTModel(CONFIG).train()
    path = tmp_path / "validation.safetensors"
    tokens = np.random.default_rng(0).integers(0, 50, 200).astype(np.uint16)
    save_file({"tokens": tokens}, path)
    reader = TokenLoader(TokenFile(path), WindowOrder([200], 8, first_token=3), BatchLayout(1, 1, 2, 8))
    precision, before = Precision("fp32", "cpu"), torch.get_rng_state()

    def on_ranks(*, shared: bool, signal: int = 0) -> list[float]:
        stop = StopRequest()
        stop.signal = signal
        work = SharedWork(ALONE, shared, stop, Place(0, "validation"))
        return work.share(4, lambda indexes: microbatch_losses(model, map(reader.microbatch, indexes), precision))

    losses = on_ranks(shared=False)
    loss = mean(losses)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())
    window = torch.from_numpy(tokens[3 : 3 + 4 * 16 + 1].astype(np.int64))
    logits = model.eval()(window[:-1].view(8, 8))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[1:])
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert on_ranks(shared=True) == losses
    with pytest.raises(RunStopped) as stopped:
        on_ranks(shared=True, signal=15)
    assert (stopped.value.reason, stopped.value.interrupted_evaluation) == (15, "validation")


def test_accumulation_in_half_precision_scales_and_unscales() -> None:
    """The gradient norm that is reported and used for clipping does not contain fp16's gradient scale."""
    norms = {}
    for name in ("fp32", "fp16"):
        torch.manual_seed(0)
        model = GPTModel(CONFIG.model_copy(update={"drop_rate": 0.0}))
        step = OptimizerStep(model, TRAIN.model_copy(update={"precision": name}))
        tokens = np.arange(17, dtype=np.uint16)
        norms[name] = step.run([Microbatch.consecutive(tokens, 8)], 1.0).gradient_norm.item()
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01)


def test_choices_are_the_softmax_of_the_top_k_and_follow_the_seed() -> None:
    logits, generator = torch.tensor([0.0, 3.0, 1.0, 2.9]), torch.Generator().manual_seed(0)
    assert choose(logits, Sampling(0, 3), generator) == 1
    assert {choose(logits, Sampling(1.0, 2), generator) for _ in range(200)} == {1, 3}
    drawn = [choose(torch.tensor([0.0, 1.0, 2.0]), Sampling(0.5, None), generator) for _ in range(4000)]
    frequencies = np.bincount(drawn, minlength=3) / 4000
    assert frequencies == pytest.approx(torch.softmax(torch.tensor([0.0, 2.0, 4.0]), 0).numpy(), abs=0.03)
    torch.manual_seed(0)
    model = GPTModel(CONFIG)
    streams = [sample_tokens(model, [5] * 20, Sampling(1.0, None, seed), vocab_size=40) for seed in (1, 1, 2)]
    texts = [list(islice(stream, 12)) for stream in streams]
    assert texts[0] == texts[1] != texts[2]
    assert max(texts[0] + texts[2]) < 40


def test_bits_per_byte_dollars_and_mfu() -> None:
    assert bits_per_byte(math.log(2) * 8, 4.0) == pytest.approx(2.0)  # 8 bits per token of 4 bytes
    # The notebook's first run took 13,904 seconds at 10.32 dollars an hour.
    assert cost(13_904, 10.32) == pytest.approx(39.86, abs=0.005)
    assert mfu(31_200, 10**9, "NVIDIA A100-SXM4-40GB") == pytest.approx(0.1)
    assert mfu(1, 1, "x86_64 CPU") is None


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("Tesla T4", 65e12),
        ("NVIDIA RTX A6000", 154.8e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA T400 4GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA X999", None),
        ("x86_64 CPU", None),
    ],
)
def test_a_peak_is_that_of_the_very_device(device: str, peak: float | None) -> None:
    """A device has a peak in FLOP/s only if its exact name is in the table; a similar name is not enough. A summary
    says that a GPU's peak is unknown. For a CPU it says nothing."""
    assert peak_flops(device) == peak
    seconds = {"training": 1.0, "total": 1.0}
    summary = RunSummary(
        device=device, world_size=1, seconds=seconds, tokens_seen=1, trained_tokens=1, peak_memory_gib=1
    )
    remark = f"MFU unknown: this program does not know the peak FLOP/s of {device}"
    is_unknown = peak is None and "CPU" not in device
    assert describe_summary(summary).count(f"\n{remark}") == is_unknown
    assert unknown_peak(device) == (remark if is_unknown else None)


def test_the_clock_counts_each_second_once() -> None:
    clock = Clock()
    clock.add({"training": 100.0}, {})
    with clock.phase("training"), clock.phase("validation"):
        pass
    seconds = clock.now()
    assert seconds["training"] == pytest.approx(100, abs=0.1)
    assert sum(seconds.values()) == pytest.approx(sum(clock.now().values()), abs=0.1)
    assert clock.spent().keys() == {"seconds"}, "there is no price"


@pytest.mark.parametrize("price", [None, 0.0, 36.0])
def test_earlier_seconds_keep_their_price(price: float | None) -> None:
    clock = Clock(price)
    clock.add({"training": 100.0}, {"training": 7.0})
    assert clock.spent()["dollars"]["training"] == pytest.approx(7.0)
