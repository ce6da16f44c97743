"""Stages of the benchmark bench/on_gpu.py that run ddp_train.py."""

from __future__ import annotations

import itertools
import json
import re
import signal
import statistics
import sys

import click

from bench.gpu.workbench import STEPS, Row, Workbench, require
from harness.common.files import sha256
from harness.runs.metrics import CheckpointEvent, TrainEvent, read_metrics


def keys(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> Row:
    """Return the keys and values of options KEY=JSON."""
    return {key: json.loads(text) for key, _, text in (each.partition("=") for each in given)}


def measure_step(bench: Workbench, *options: str) -> None:
    """Record speed, MFU and memory of a short training run."""
    step.main(options, "step", obj=bench)


@click.command
@click.option("--fast", is_flag=True, help="The shipped run with Muon and other options of docs/levers.md.")
@click.option("--ddp", is_flag=True, help="In DistributedDataParallel and with NCCL, in a world of one rank.")
@click.option("--microbatch", type=int, help="Microbatch size, in place of the shipped run's. A rehearsal ignores it.")
@click.option("--model", multiple=True, callback=keys, metavar="KEY=JSON", help="Set a key of model.json.")
@click.option("--set", "train", multiple=True, callback=keys, metavar="KEY=JSON", help="Set a key of train.json.")
@click.pass_obj
def step(bench: Workbench, *, fast: bool, ddp: bool, microbatch: int | None, model: Row, train: Row) -> None:
    given = {} if microbatch is None or bench.tiny else {"microbatch_size": microbatch}
    bench.add_run("step", model, {**given, **train}, fast=fast)
    ended, summary = bench.train("step", ddp=ddp)[0], bench.runs / "step" / "summary.json"
    left = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    wanted = ("microbatch_size", "tokens_per_second", "mfu", "peak_memory_gib", "final_train_loss")
    bench.add("step", **{key: left.get(key) for key in wanted}, **ended)
    require(ended["status"] == 0, "training failed")


def measure_search(bench: Workbench) -> None:
    """Record the search for the largest microbatch (-f), and two runs that check it.

    The run with the size found must train. The run with a size larger by a tenth plus 8 must fail.
    """
    bench.add_run("find", {}, {"train_steps": 1})
    ended, output = bench.train("find", "-f", ddp=True)
    said = [line for line in output.splitlines() if line.startswith(("Max micro", "Memory:")) or "compiled" in line]
    bench.add("search", said=said, **ended)
    found = re.search(r"^Max microbatch size was (\d+)", output, re.M)
    answer = int(found[1]) if found else sys.exit("-f found no size")
    for name, size in (("answer", answer), ("a-tenth-more", answer + answer // 10 + 8)):
        bench.add_run(name, {}, {"microbatch_size": size, "train_steps": 1 if bench.tiny else 10})
        ended = bench.train(name, ddp=True)[0]
        bench.add("trained", what=name, size=size, **ended)
        require((ended["status"] == 0) == (name == "answer"), "the answer is not the largest size that trains")


def measure_continue(bench: Workbench) -> None:
    """Record whether a killed run and a stopped run, when continued, end like an uninterrupted run.

    The weights must be equal bit for bit. The runs have dropout, Muon, sharded state and accumulation.
    """
    steps = 20 if bench.tiny else 60
    train: Row = {"microbatch_size": 4, "gradient_accumulation_steps": 2, "train_steps": steps, "deterministic": True}
    train |= {"report_interval": 1, "checkpoint_interval": steps // 5, "validation_interval": steps // 2}
    train |= {"validation_sequences": 16, "start_val_token": 0}
    model = {"n_layers": 2, "value_embeddings": 1, "bigram_embedding": 1024, "drop_rate": 0.1}
    middle, whole = f"global step {steps // 2 + 2}/", ""  # three checkpoints are due before; two are complete
    for name, number in (("whole", None), ("killed", signal.SIGKILL), ("stopped", signal.SIGTERM)):
        bench.add_run(name, model, train, fast=True)
        ends = [bench.train(name, ddp=True, signal_at=(middle, number) if number else None)]
        ends += [bench.train(name, ddp=True)] if number else []
        path = bench.runs / name / "checkpoints" / "latest" / "model.safetensors"
        digest = sha256(path) if path.exists() else ""
        whole = digest if name == "whole" else whole
        continued = [line for line in ends[-1][1].splitlines() if "continuing from" in line]
        values = {"statuses": [end["status"] for end, _ in ends], "continued": continued, "same_bits": digest == whole}
        bench.add("continue", what=name, seconds=sum(end["seconds"] for end, _ in ends), **values)
        succeeded = ends[-1][0]["status"] == 0 and digest == whole and bool(continued) == bool(number)
        require(succeeded, f"{name}: not continued to the weights of an uninterrupted run")


def measure_saving(bench: Workbench) -> None:
    """Record how long checkpoints that are written in the background delay training.

    For each checkpoint but the last: the seconds by which the next step is longer than the median step, and the median.
    """
    interval = STEPS[bench.tiny] - 4  # far apart, because a checkpoint waits until the one before is written
    train = {"train_steps": 2 * STEPS[bench.tiny], "checkpoint_interval": interval, "report_interval": 1}
    bench.add_run("saving", {}, train, fast=True)
    ended = bench.train("saving", ddp=True)[0]
    bench.add("saving", **ended)
    require(ended["status"] == 0, "training failed")
    events = read_metrics(bench.runs / "saving" / "metrics.jsonl")
    ends = {each.global_step: each.seconds for each in events if isinstance(each, TrainEvent) and each.seconds}
    steps = {step: ends[step] - ends[before] for before, step in itertools.pairwise(ends)}
    saved = [each.global_step for each in events if isinstance(each, CheckpointEvent)]
    usual = statistics.median(steps.values())
    for step in saved:
        if step + 1 in steps:
            bench.add("checkpoint", after_step=step, delay_s=steps[step + 1] - usual, step_s=usual)
