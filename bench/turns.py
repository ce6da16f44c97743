"""Contestants in processes of their own, as their users have them, which take their steps in turns.

python -m bench.turns NAME CASE      a contestant: a line of JSON for each line "step SEED" or "peak" it is given
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from harness.common.libraries import SETTINGS
from harness.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
OWN = "ddp-pretrain"


@dataclass(frozen=True)
class Shape:
    """What is trained: a shape of GPT-2, and sequences of a step."""

    layers: int
    emb_dim: int
    heads: int
    context: int
    vocabulary: int
    microbatch: int
    device: str = "cpu"
    compile: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatch * self.context

    @property
    def title(self) -> str:
        tokens = f"{self.microbatch} × {self.context} tokens"
        return f"{self.layers} × {self.emb_dim}, vocabulary {self.vocabulary:,}, {tokens}"

    def model_config(self) -> ModelConfig:
        """For all contestants: with biases everywhere, since transformers' model always has them."""
        return ModelConfig(
            vocab_size=self.vocabulary,
            context_length=self.context,
            emb_dim=self.emb_dim,
            n_heads=self.heads,
            n_layers=self.layers,
            drop_rate=0.0,
            qkv_bias=True,
        )


@dataclass(frozen=True)
class Turn:
    """What a step took: seconds by the clock, and of all processors together."""

    wall: float
    processor: float


class Player:
    """A contestant's process."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.turns: list[Turn] = []
        # Nobody's idle threads burn the others' time; the rest of our command's settings is ours alone.
        settings = SETTINGS if name.startswith(OWN) else {"OMP_WAIT_POLICY": SETTINGS["OMP_WAIT_POLICY"]}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.turns", name, json.dumps(asdict(shape))],
            cwd=ROOT,
            env={**settings, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.first: dict[str, Any] = {}

    def begin(self) -> str | None:
        """Wait until it is ready; why it cannot take part, if it cannot."""
        self.first = self._answer()
        return self.first.get("cannot")

    def step(self, seed: int, *, counts: bool) -> None:
        turn = Turn(**self._ask(f"step {seed}"))
        if counts:
            self.turns.append(turn)

    def peak_bytes(self) -> int:
        """The most memory that it had at once beyond that of the program without a model."""
        return self._ask("peak")["bytes"]

    def _ask(self, question: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"cannot": f"it ended with status {self.process.wait()}"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()


def race(players: list[Player], *, seconds: float, at_least: int, warm_up: int = 2) -> None:
    """Steps in turns, each player first in its turn, on the same tokens, until the time is over."""
    begun, number = time.monotonic(), 0
    while number < warm_up + at_least or time.monotonic() < begun + seconds:
        first = number % len(players)
        for player in players[first:] + players[:first]:
            player.step(number, counts=number >= warm_up)
        number += 1


def main() -> None:
    """A contestant's life."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=out, flush=True)

    import numpy as np
    import torch

    from bench.contestants import BUILDERS, NotToBeHadError, case_of

    case = case_of(Shape(**json.loads(sys.argv[2])))
    before = memory(case.device)
    try:
        contestant = BUILDERS[sys.argv[1]](case)
    except NotToBeHadError as error:
        answer(cannot=str(error))
        return
    answer(title=contestant.title, parameters=sum(each.numel() for each in contestant.model.parameters()))
    for line in sys.stdin:
        if line.startswith("peak"):
            answer(bytes=memory(case.device) - before)
            continue
        batch = case.batch(np.random.default_rng(int(line.split()[1])))
        start, processor = time.perf_counter(), time.process_time()
        contestant.step(batch)
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
        answer(wall=time.perf_counter() - start, processor=time.process_time() - processor)


def memory(device: Any) -> int:
    """The most that this process has had so far, in bytes."""
    from harness.common.memory import peak_bytes

    return peak_bytes(device)


if __name__ == "__main__":
    main()
