"""Time one optimizer step of our GPT-2 against transformers' GPT2LMHeadModel: same shape, weights, batch and precision.

    uv run bench/step_vs_transformers.py

A step is forward, backward, clipping to norm 1.0 and fused AdamW, without dropout. Both models run in one process, in
turns, so that what else the machine does slows both alike; the ratio of the medians is the result.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.hf_weights import peer_of
from gpt import GPTModel, ModelConfig

WARM_UP_STEPS = 2
# What an option defaults to: on a CPU one to two minutes on two cores, on a GPU the lab notebook's model.
DEFAULTS = {
    "cpu": {"layers": 4, "context_length": 512, "microbatch": 1, "steps": 10, "precision": "fp32"},
    "cuda": {"layers": 12, "context_length": 1024, "microbatch": 8, "steps": 30, "precision": "bf16"},
}

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """What both contestants share."""

    shape: ModelConfig
    microbatch: int
    steps: int
    precision: str
    compile: bool
    device: torch.device

    def autocast(self) -> Any:
        """bf16 matrix products around fp32 weights, or nothing."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Contestant:
    """A model with its optimizer and the seconds each of its steps took."""

    def __init__(self, name: str, model: nn.Module, loss: Loss, settings: Settings) -> None:
        self.name = name
        self.model = model
        self.loss = torch.compile(loss) if settings.compile else loss
        self.settings = settings
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, fused=True)
        self.seconds: list[float] = []

    def timed_step(self, tokens_BxT: Tensor, targets_BxT: Tensor) -> None:
        synchronize(self.settings.device)
        start = time.perf_counter()
        with self.settings.autocast():
            loss = self.loss(tokens_BxT, targets_BxT)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        synchronize(self.settings.device)
        self.seconds.append(time.perf_counter() - start)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(settings: Settings) -> list[Contestant]:
    """Both models with equal weights; each loss is the mean over all B x T targets."""
    torch.manual_seed(42)
    ours = GPTModel(settings.shape)
    theirs = peer_of(ours)
    for model in (ours, theirs):
        nn.Module.to(model, settings.device)

    def their_loss(tokens_BxT: Tensor, targets_BxT: Tensor) -> Tensor:
        # `labels` alone would be shifted inside, and the last position of each sequence would predict nothing.
        return theirs(tokens_BxT, labels=targets_BxT, shift_labels=targets_BxT, use_cache=False).loss

    return [
        Contestant("ddp-pretrain", ours, ours, settings),
        Contestant("transformers", theirs, their_loss, settings),
    ]


def random_batch(settings: Settings) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, both (B, T)."""
    size = (settings.microbatch, settings.shape.context_length + 1)
    batch = torch.randint(settings.shape.vocab_size, size, device=settings.device)
    return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


@torch.no_grad()
def check_equal_work(contestants: list[Contestant], batch: tuple[Tensor, Tensor]) -> None:
    """Same parameters and, in fp32, the same loss: otherwise the times would not be comparable."""
    counts = [sum(parameter.numel() for parameter in one.model.parameters()) for one in contestants]
    assert counts[0] == counts[1], f"different numbers of parameters: {counts}"
    losses = [one.loss(*batch).item() for one in contestants]
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[1], f"different losses for the same weights: {losses}"
    print(f"same weights, same loss: {losses[0]:.6f} and {losses[1]:.6f}; {counts[0]:,} parameters each")


def race(contestants: list[Contestant], settings: Settings) -> None:
    """Take turns, each first every other time, on a fresh batch each turn."""
    for turn in range(WARM_UP_STEPS + settings.steps):
        batch = random_batch(settings)
        for one in contestants if turn % 2 else contestants[::-1]:
            one.timed_step(*batch)
    for one in contestants:
        del one.seconds[:WARM_UP_STEPS]


def report(contestants: list[Contestant], settings: Settings) -> None:
    tokens = settings.microbatch * settings.shape.context_length
    print(f"{'':14}{'median ms':>11}{'fastest ms':>12}{'tokens/s':>11}")
    for one in contestants:
        median = statistics.median(one.seconds)
        print(f"{one.name:14}{1000 * median:>11.1f}{1000 * min(one.seconds):>12.1f}{tokens / median:>11,.0f}")
    ours, theirs = (statistics.median(one.seconds) for one in contestants)
    print(f"transformers' time / ours: {theirs / ours:.2f}")


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(1), help="Default: 4 on a CPU, 12 on a GPU.")
@click.option("--emb-dim", type=click.IntRange(1), default=768, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=12, show_default=True)
@click.option("--context-length", type=click.IntRange(1), help="Default: 512 on a CPU, 1024 on a GPU.")
@click.option("--vocab-size", type=click.IntRange(2), default=50257, show_default=True)
@click.option("--microbatch", type=click.IntRange(1), help="Sequences per step. Default: 1 on a CPU, 8 on a GPU.")
@click.option("--steps", type=click.IntRange(1), help="Timed steps of each model. Default: 10 on a CPU, 30 on a GPU.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), help="Default: fp32 on a CPU, bf16 on a GPU.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads. Default: torch's choice.")
@click.option("--compile", is_flag=True, help="torch.compile for both models.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1, ...")
def main(**options: Any) -> None:
    device = choose_device(options["device"])
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    given = {key: value for key, value in options.items() if value is not None}
    chosen = {**DEFAULTS[device.type], **given}
    shape = ModelConfig(
        vocab_size=chosen["vocab_size"],
        context_length=chosen["context_length"],
        emb_dim=chosen["emb_dim"],
        n_heads=chosen["heads"],
        n_layers=chosen["layers"],
        drop_rate=0.0,
        qkv_bias=True,  # transformers' model always has them
    )
    settings = Settings(shape, chosen["microbatch"], chosen["steps"], chosen["precision"], chosen["compile"], device)
    print(
        f"torch {torch.__version__}, {device}, {torch.get_num_threads()} CPU threads, {settings.precision}, "
        f"{'compiled' if settings.compile else 'eager'}, microbatch {settings.microbatch}"
    )
    print(shape)
    contestants = build(settings)
    check_equal_work(contestants, random_batch(settings))
    race(contestants, settings)
    report(contestants, settings)


if __name__ == "__main__":
    main()
