"""Time a training step of ddp_train.py and of other programs on the CPU: the same models, in turns, on one machine.

    uv run bench/compare_steps.py --threads 2 --json steps.json

Each program runs in its own processes and takes one step at a time, so that other work on the machine slows all
programs alike. For this project, ddp_train.py itself runs, with its whole training loop. The output head is tied to the
token embedding in both models or in neither. Results are medians of all steps but the first three. Each row has two
ratios, of processor time and of elapsed time: the other program's time divided by ours. The exit status is 1 if the
ratio of processor time is below --at-least in any row.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import click
import numpy as np

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu.workbench import ROOT, write_dataset, write_run
from harness.common.libraries import SETTINGS
from harness.model.config import ModelConfig, load_model_config
from harness.runs.train_config import load_train_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEARNING_RATE = 4e-4
OWN = "ddp-pretrain"


class Case(NamedTuple):
    """Model and batch of a comparison."""

    layers: int
    emb_dim: int
    heads: int
    context: int
    vocabulary: int
    microbatch: int  # sequences per step and rank


SHAPES = (
    Case(2, 128, 4, 128, 4096, 8),  # the model of quickstart-gpt2
    Case(4, 256, 4, 256, 8192, 8),
    Case(4, 256, 4, 256, 50257, 8),
    Case(12, 768, 12, 512, 8192, 1),
    Case(12, 768, 12, 512, 50257, 1),
)
PEERS = ("nanogpt", "upstream", "transformers")
PRECISIONS = (("fp32", ""), ("auto", ""), ("auto", " bf16"))  # our precision, suffix of the other program's name
WARM_UP = 3
STEPS = 3000  # length of our run; its process is killed when the comparison ends
CONTESTANT = "from bench.compare_steps import contend; contend()"
MEASURED = ("processor", "wall")  # seconds of all processors, and elapsed seconds
HEADER = f"{'ours':6}{'peer':20}{'processor ms':>20}{'ratio':>7}{'clock ms':>20}{'ratio':>7}"
Row = dict[str, Any]


class Player:
    """One of the compared programs: its processes, one for each rank, and the measured seconds of all steps so far."""

    def __init__(self, name: str, run: Path, *, ranks: int, threads: int) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        # Idle OpenMP threads must sleep instead of spinning, or they would take processor time from the other programs.
        # Only our command sets the other variables in SETTINGS, so their effect counts as its advantage.
        shared = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": SETTINGS["OMP_WAIT_POLICY"]}
        shared["CUDA_VISIBLE_DEVICES"] = ""  # else our command alone would train on a GPU
        if ranks > 1:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
            shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, open as long as the processes run
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", CONTESTANT, name, str(run)],
                cwd=ROOT,
                env={**os.environ, **shared, **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
            )
            for place in places
        ]

    def step(self) -> None:
        """Take one step on all ranks, and record the seconds of the slowest rank ("wall") and the sum of the ranks'
        processor seconds ("processor")."""
        for process in self.processes:
            with suppress(BrokenPipeError):  # it has ended, as its missing answer will show
                print("step", file=process.stdin, flush=True)
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.errors.seek(0)
                raise click.ClickException(f"{self.name} ended: {self.errors.read()[-2000:]}")
            answers.append(json.loads(line))
        self.steps.append(
            {"wall": max(each["wall"] for each in answers), "processor": sum(each["processor"] for each in answers)}
        )

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def make_run(folder: Path, case: Case, *, tied: bool, precision: str, ranks: int) -> Path:
    """Write a dataset of random tokens and a run directory for ddp_train.py into `folder`. Return the run directory."""
    run = folder / "runs" / "bench"
    sizes = zip(("n_layers", "emb_dim", "n_heads", "context_length", "vocab_size"), case, strict=False)
    # Biases of queries, keys and values, because transformers' model always has them.
    model = {**dict(sizes), "drop_rate": 0.0, "qkv_bias": True, "tie_weights": tied}
    train = {
        "dataset": "bench/random",
        "microbatch_size": case.microbatch,
        "train_steps": STEPS,
        "start_train_token": 0,
        "checkpoint_interval": STEPS,
        "learning_rate": LEARNING_RATE,
        "clipping_max_norm": 1.0,
        "precision": precision,
    }
    write_run(run, model, train)
    count = STEPS * ranks * case.microbatch * case.context + 1
    tokens = np.random.default_rng(0).integers(case.vocabulary, size=count)
    write_dataset(folder / "datasets" / "bench" / "random", {"train": tokens})
    return run


def title(case: Case) -> str:
    tokens = f"{case.microbatch} × {case.context} tokens"
    return f"{case.layers} × {case.emb_dim}, vocabulary {case.vocabulary:,}, {tokens}"


def compare(
    case: Case, precision: str, peer: str, *, ranks: int, threads: int, seconds: float, steps: int
) -> dict[str, Any]:
    """Return a row of the table that compares our command in `precision` with the program `peer`. Both take steps in
    turns until `seconds` have passed since their start. Each takes at least WARM_UP + `steps`, at most STEPS - 1."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run = make_run(folder, case, tied=not peer.startswith("upstream"), precision=precision, ranks=ranks)
        players = []
        for name in (OWN, peer):
            players.append(Player(name, run, ranks=ranks, threads=threads))
            stack.callback(players[-1].end)
        begun, rounds = time.monotonic(), 0
        while rounds < WARM_UP + steps or (time.monotonic() < begun + seconds and rounds < STEPS - 1):
            for player in players if rounds % 2 == 0 else reversed(players):
                player.step()
            rounds += 1
    row: Row = {"shape": title(case), "ranks": ranks, "threads": threads, "ours": precision, "peer": peer}
    row["steps"] = rounds - WARM_UP
    for clock in MEASURED:
        ours, theirs = (statistics.median(step[clock] for step in player.steps[WARM_UP:]) for player in players)
        row |= {f"{clock}_ms": [1e3 * ours, 1e3 * theirs], f"{clock}_ratio": theirs / ours}
    return row


@click.command(help=__doc__)
@click.option(
    "--shape",
    "numbers",
    multiple=True,
    type=click.IntRange(1, len(SHAPES)),
    help="Number, from 1, of a shape in this program's list SHAPES; can be repeated.  [default: all]",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    type=click.Choice(PEERS),
    help="Program to compare with (upstream: Giles Thomas's lab notebook); can be repeated.  [default: all]",
)
@click.option("--ranks", default=1, show_default=True, type=click.IntRange(1), help="Number of processes (DDP).")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Threads of each process.")
@click.option(
    "--seconds",
    default=15.0,
    show_default=True,
    type=click.FloatRange(0),
    help=f"Minimum time for each row, with the start of both programs. A row ends early after {STEPS - 1:,} steps.",
)
@click.option(
    "--steps",
    default=5,
    show_default=True,
    type=click.IntRange(1, STEPS - WARM_UP - 1),
    help="Minimum measured steps of each program.",
)
@click.option("--at-least", default=1.0, show_default=True, help="Exit 1 if a peer's processor time / ours is less.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write the rows into FILE.")
def main(numbers: tuple[int, ...], peers: tuple[str, ...], at_least: float, file: Path | None, **effort: Any) -> None:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    click.echo(f"torch {torch.__version__}, {capability}, ranks {effort['ranks']}, threads {effort['threads']} each")
    rows: list[Row] = []
    for case in [SHAPES[number - 1] for number in numbers] or SHAPES:
        click.echo(f"\n{title(case)}\n{HEADER}")
        for peer in peers or PEERS:
            for own, suffix in PRECISIONS:
                row = compare(case, own, peer + suffix, **effort)
                rows.append(row)
                line = f"{row['ours']:6}{row['peer']:20}"
                for clock in MEASURED:
                    times = " / ".join(f"{each:,.0f}" for each in row[f"{clock}_ms"])
                    line += f"{times:>20}{row[f'{clock}_ratio']:>7.2f}"
                click.echo(line)
    if file:
        file.write_text(json.dumps(rows, indent=1) + "\n")
    slower = [row for row in rows if row["processor_ratio"] < at_least]
    for row in slower:
        where = f"{row['shape']}, {row['ours']}"
        ratio = f"its processor time divided by ours is {row['processor_ratio']:.2f}, below {at_least:g}"
        click.echo(f"behind {row['peer']}: {where}: {ratio}", err=True)
    sys.exit(1 if slower else 0)


# Processes of the compared programs, one for each rank. A process takes one step for each line on its standard input --


def take_turns(answers: TextIO) -> Iterator[None]:
    """Yield once for each line on standard input, to let the caller take a step.

    Writes the elapsed and the processor seconds of each step to `answers`. Ends the process at the end of the input.
    """
    while sys.stdin.readline():
        wall, processor = time.perf_counter(), time.process_time()
        yield
        took = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
        print(json.dumps(took), file=answers, flush=True)
    os._exit(0)


def run_ours(run: Path, turns: Iterator[None]) -> None:
    """Run ddp_train.py as a user does, but wait for the next turn at the beginning of each optimizer step. A turn lasts
    until the beginning of the next step."""
    from harness.training.step import OptimizerStep

    run_step: Callable[..., Any] = OptimizerStep.run

    def run_in_turn(*arguments: Any) -> Any:
        next(turns)
        return run_step(*arguments)

    OptimizerStep.run = run_in_turn  # type: ignore[assignment, method-assign]
    sys.argv = ["ddp_train.py", run.name, str(run.parents[1] / "datasets"), "--runs-dir", str(run.parent)]
    runpy.run_path(str(ROOT / "ddp_train.py"), run_name="__main__")


def run_peer(name: str, run: Path, turns: Iterator[None]) -> None:
    """Train the model of another program on random tokens, in bf16 autocast if `name` ends in bf16, with DDP if there
    is more than one rank."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(42)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    wrap = None
    if os.environ.get("WORLD_SIZE", "1") != "1":
        torch.distributed.init_process_group("gloo")
        wrap = DistributedDataParallel
    program, _, precision = name.partition(" ")
    model, microbatch = load_model_config(run / "model.json"), load_train_config(run / "train.json").microbatch_size
    step = peers_step(program, model, torch.device("cpu"), wrap, low_precision=precision == "bf16")
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for _ in turns:
        step(torch.randint(model.vocab_size, (microbatch, model.context_length + 1), generator=generator))


def peers_step(
    program: str, model: ModelConfig, device: torch.device, wrap: Callable[[Any], Any] | None, *, low_precision: bool
) -> Callable[[Tensor], None]:
    """Return a function that runs a training step of another program on tokens (B, T + 1).

    `wrap`, if given, compiles the model or wraps it in DDP. `low_precision` means bf16 autocast.
    """
    import torch

    loss, is_upstream = peers_loss(program, model).to(device), program == "upstream"
    parameters, call = list(loss.parameters()), wrap(loss) if wrap else loss
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, fused=None if is_upstream else True)

    def step(tokens: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low_precision):
            value = call(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if is_upstream:
            value.item()

    return step


def peers_loss(program: str, config: ModelConfig) -> Any:
    """Return a module that computes the mean loss of another program's model from (inputs, targets)."""
    import torch.nn.functional as F
    from torch import nn

    from bench.references import NotebookModel, nano_gpt, transformers_peer
    from gpt import GPTModel

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module
            if program == "transformers":
                self.model = transformers_peer(GPTModel(config))
            else:
                self.model = (NotebookModel if program == "upstream" else nano_gpt)(config)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            if program == "transformers":
                # If only `labels` were given, the model would shift them, and the last position of a sequence would
                # have no loss.
                return self.model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
            return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    return Loss()


def contend() -> None:
    """Run one rank of the program named in sys.argv[1] on the run directory in sys.argv[2], and write the times of its
    steps to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not be read as an answer
    name, run, turns = sys.argv[1], Path(sys.argv[2]), take_turns(answers)
    if name == OWN:
        run_ours(run, turns)
    else:
        run_peer(name, run, turns)


if __name__ == "__main__":
    main()
