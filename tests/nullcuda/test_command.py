"""The real ddp_train.py on the null device: -f, evaluations, saving, stopping, resuming, and running out of memory."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.data.tokenizers import train_bpe
from tests.nullcuda.device import environment, run, why_not
from tests.support.isolation import ROOT
from tests.support.launch import DATASET, Workshop, metrics

pytestmark = [pytest.mark.skipif(why_not() is not None, reason=why_not() or ""), pytest.mark.slow]

SETTINGS: dict[str, Any] = {"compile": False, "checkpoint_interval": 5, "async_checkpoint": True, "precision": "bf16"}


def start(shop: Workshop, *options: str, gib: float = 8.0) -> subprocess.Popen[str]:
    """Start training the run "r" of the workshop on a null device of `gib` GiB."""
    command = [sys.executable, "-m", "tests.nullcuda.command", "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *options], env=environment(gib=gib), cwd=ROOT, **pipes)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset(tokens=80_000)
    return made


def test_a_run_is_stopped_and_resumed(shop: Workshop) -> None:
    """Checkpoints are copied to the host and written while training continues."""
    folder = shop.add_run("r", **SETTINGS, min_train_tokens=64_000, report_interval=1)
    process = start(shop)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("global step 7/"):
            process.send_signal(signal.SIGTERM)
            break
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    assert "Traceback" not in stderr
    steps = [event["global_step"] for event in metrics(folder) if event["event"] == "train"]
    assert steps[-1] >= 7
    for weights in (folder / "checkpoints").glob("*/model.safetensors"):
        assert not any(np.isnan(each).any() for each in load_file(weights).values()), "written before it was copied"
    shop.add_run("r", **SETTINGS, min_train_tokens=64 * (steps[-1] + 4), report_interval=1)
    stdout, stderr = start(shop).communicate(timeout=120)
    assert "continuing from" in stdout, stderr
    assert "Training complete" in stdout
    again = [event["global_step"] for event in metrics(folder) if event["event"] == "train"]
    assert again[: len(steps)] == steps
    assert again == [*range(again[-1] + 1)]


def test_out_of_memory_is_one_line(shop: Workshop) -> None:
    shop.add_run("r", model={"emb_dim": 2048, "n_layers": 4}, **SETTINGS)
    process = start(shop, gib=3.0)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert "memory" in line
    assert "Traceback" not in stderr


def test_the_benchmarks_only_rank_runs_on_a_machine_with_one_gpu(shop: Workshop) -> None:
    """It joins its process group by gloo here, because NCCL needs real hardware."""
    shop.add_run("r", **SETTINGS)
    code = (
        "import torch, torch.distributed as dist; torch.backends.cuda.enable_cudnn_sdp(False);"
        "real = dist.init_process_group;"
        "dist.init_process_group = lambda backend, **given: real('gloo', **{**given, 'device_id': None});"
        "from bench.gpu.only_rank import train_alone; train_alone()"
    )
    done = run("-c", code, "r", str(shop.datasets), "--runs-dir", str(shop.runs), "-f", gib=2, timeout=120)
    assert "Max microbatch size was" in done.stdout


def on_eight_ranks(shop: Workshop, *commands: str, gib: float, expect: int = 0) -> list[dict[str, Any]]:
    """Run ddp_train.py as rank 0 of eight with each of these commands in turn, on a device of `gib` GiB. Returns what
    tests/nullcuda/ranks.py prints of each. The last command ends with the status `expect`."""
    words = " then ".join(f"{each} {shop.datasets} --runs-dir {shop.runs}" for each in commands).split()
    done = run("-m", "tests.nullcuda.ranks", "8", *words, gib=gib, expect=expect, timeout=400)
    assert "Traceback" not in done.stderr
    assert "no sample" not in done.stdout
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"status"')]


def test_the_microbatch_that_f_finds_trains_on_one_gpu(tmp_path: Path) -> None:
    """In a model with a large vocabulary and few layers, the optimizer's state is large beside a layer's activations.
    Training runs out of memory in its second step if the first one puts the state among them."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=1_000_000)
    model = {"vocab_size": 50257, "emb_dim": 768, "n_heads": 12, "n_layers": 2, "context_length": 1024}
    settings = {**SETTINGS, "precision": "fp32", "min_train_tokens": 600_000, "gradient_accumulation_steps": 1}
    settings |= {"validation_interval": None, "validation_batches": None, "start_val_token": None}
    run = shop.add_run("r", model={**model, "tie_weights": True}, **settings)
    for options in (("-f", "--write"), ()):
        process = start(shop, *options, gib=24.0)
        stdout, stderr = process.communicate(timeout=240)
        assert process.returncode == 0, stdout + stderr
    assert json.loads((run / "train.json").read_text())["microbatch_size"] > 100


@pytest.mark.timeout(900)  # four commands, each with gigabytes of memory
@pytest.mark.parametrize(("accumulation", "bigrams", "gib"), [(1, 131072, 10), (2, 4096, 8.4)])
def test_the_microbatch_that_f_finds_trains_on_eight_ranks(
    tmp_path: Path, accumulation: int, bigrams: int, gib: float
) -> None:
    """The answer of -f, whose gradients are in no buckets, holds for training by DistributedDataParallel with
    validation, samples and checkpoints, and when the run resumes. Training takes at most half a GiB more than
    the search allows for. A microbatch that is 5 % larger, and larger by what fits into the reserve, does not fit.
    After the first step no step waits or keeps more memory, and nothing waits between two steps without work in
    between.

    With these sizes, training runs out of memory if the warm-up leaves its blocks in torch's cache."""
    shop = Workshop(tmp_path)
    folder = shop.add_dataset(tokens=2_200_000 * accumulation)
    shutil.copyfile(folder / "train.safetensors", folder / "validation.safetensors")
    train_bpe(iter(["to train and to test"]), 260, folder / "tokenizer.json")
    (folder / "meta.json").write_text('{"token_dtype": "uint16", "tokenizer": "tokenizer.json"}')
    settings = {"dataset": DATASET, "compile": False, "validation_sequences": 300, "validation_interval": 2}
    settings |= {"sample_interval": 2, "sample_prompt": "to", "warmup_steps": 1}
    settings |= {"min_train_tokens": 1_300_000 * accumulation}
    settings |= {"checkpoint_interval": 100, "keep_checkpoints": 1, "gradient_accumulation_steps": accumulation}
    smaller = {"n_layers": 2, "value_embeddings": 1, "bigram_embedding": bigrams}

    def change(**train: Any) -> Path:
        run = shop.add_shipped_run("8xh100m80-fast", **settings | train)
        model = json.loads((run / "model.json").read_text()) | smaller
        (run / "model.json").write_text(json.dumps(model))
        return run

    run = change()
    search, trained = on_eight_ranks(shop, f"{run.name} -f --write", run.name, gib=gib)
    assert not search["status"]
    assert not trained["status"]
    later = trained["steps"][1:]
    assert len(later) > 2
    assert {(each["waits"], each["compiled"], each["allocated"]) for each in later} == {(0, 0, later[0]["allocated"])}
    assert {"train", "validation", "sample", "checkpoint"} <= {event["event"] for event in metrics(run)}
    (result,) = (run / "results").glob("microbatch-search-*.json")
    found = json.loads(result.read_text())
    peaks = {each["microbatch_size"]: each["gib"] for each in found["tried"]}
    change(microbatch_size=found["largest"], train_steps=len(trained["steps"]) + 2, min_train_tokens=None)
    (resumed,) = on_eight_ranks(shop, run.name, gib=gib)
    assert not resumed["status"]
    assert len(resumed["steps"]) == 2
    shutil.rmtree(run / "checkpoints")  # gigabytes
    for each in (trained, resumed):
        assert max(step["peak_reserved"] for step in each["steps"]) <= (found["usable_gib"] + 0.5) * 2**30
    idle = [step["waits_before"] for step in trained["steps"][2::2]]  # validation follows the even steps
    assert not any(idle), idle
    reserve = (found["limit_gib"] - found["usable_gib"]) * (found["largest"] - 1) / (peaks[found["largest"]] - peaks[1])
    change(microbatch_size=math.ceil(found["largest"] * 1.05 + reserve))
    on_eight_ranks(shop, f"{run.name} --restart", gib=gib, expect=1)  # out of memory
