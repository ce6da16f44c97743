"""The programs that bench/compare_steps.py races, one process a rank: ddp_train.py itself, and its peers' loops.

    python -m bench.contestants NAME CASE

CASE is a Case as JSON; RANK, WORLD_SIZE and MASTER_PORT say which rank of how many it is. For each line on standard
input a contestant takes one step and answers with the seconds that it took, as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
LEARNING_RATE = 4e-4
OWN = "ddp-pretrain"


@dataclass(frozen=True)
class Case:
    """One model and batch, and where ddp_train.py finds its run: RUN and DATASETS_DIR."""

    layers: int
    emb_dim: int
    heads: int
    context: int
    vocabulary: int
    microbatch: int  # sequences of a rank's step
    run: str = ""
    datasets: str = ""

    @property
    def title(self) -> str:
        tokens = f"{self.microbatch} × {self.context} tokens"
        return f"{self.layers} × {self.emb_dim}, vocabulary {self.vocabulary:,}, {tokens}"

    def model_config(self, *, tied: bool) -> ModelConfig:
        """The model of all contestants, with biases everywhere, since transformers' model always has them."""
        return ModelConfig(
            vocab_size=self.vocabulary,
            context_length=self.context,
            emb_dim=self.emb_dim,
            n_heads=self.heads,
            n_layers=self.layers,
            drop_rate=0.0,
            qkv_bias=True,
            tie_weights=tied,
        )


class Turns:
    """Take steps on request, and answer with their seconds by the clock and of all this process's threads."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # other output is no answer
        self._begun: tuple[float, float] | None = None

    def next(self) -> None:
        """End the turn, if there is one, and wait for the next."""
        now = time.perf_counter(), time.process_time()
        if self._begun is not None:
            wall, processor = (end - begin for end, begin in zip(now, self._begun, strict=True))
            print(json.dumps({"wall": wall, "processor": processor}), file=self._answers, flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self._begun = time.perf_counter(), time.process_time()


def ours(case: Case, turns: Turns) -> None:
    """Run ddp_train.py as a user does; a turn is all that its loop does from one step's beginning to the next one's."""
    from harness.training.step import OptimizerStep

    run_step: Callable[..., Any] = OptimizerStep.run

    def run_in_turn(*arguments: Any) -> Any:
        turns.next()
        return run_step(*arguments)

    OptimizerStep.run = run_in_turn  # type: ignore[assignment, method-assign]
    run = Path(case.run)
    sys.argv = ["ddp_train.py", run.name, case.datasets, "--runs-dir", str(run.parent)]
    runpy.run_path(str(ROOT / "ddp_train.py"), run_name="__main__")


def peer(name: str, case: Case, turns: Turns) -> None:
    """Train as the peers' programs do: autocast if asked for, clipping to norm 1.0, AdamW, DDP where there are ranks.
    "upstream" has torch's plain AdamW and reads the loss at each step; the others have the fused one."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.manual_seed(42)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    program, _, precision = name.partition(" ")
    model, loss = peers_model(program, case)
    trained: nn.Module = loss
    if os.environ.get("WORLD_SIZE", "1") != "1":
        dist.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(loss)
    parameters = list(model.parameters())
    is_upstream = program == "upstream"
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, fused=None if is_upstream else True)
    for inputs_BxT, targets_BxT in _batches(case):
        turns.next()
        with torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext():
            value = trained(inputs_BxT, targets_BxT)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if is_upstream:
            value.item()


def peers_model(program: str, case: Case) -> tuple[Any, Any]:
    """A peer's model, and the module that returns its mean loss of (inputs, targets)."""
    import torch.nn.functional as F
    from torch import Tensor, nn

    from bench.hf_weights import peer_of
    from bench.references import NanoGPT, NotebookModel
    from gpt import GPTModel

    config = case.model_config(tied=program != "upstream")
    model: nn.Module
    if program == "transformers":
        model = peer_of(GPTModel(config))
    else:
        model = (NotebookModel if program == "upstream" else NanoGPT)(config)

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            if program == "transformers":
                # `labels` alone would be shifted inside, and the last position of each sequence would predict nothing.
                return self.model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss
            return F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())

    return model, Loss()


def _batches(case: Case) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets (each microbatch × context) without end."""
    import torch

    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    while True:
        tokens = torch.randint(case.vocabulary, (case.microbatch, case.context + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def main() -> None:
    name, case, turns = sys.argv[1], Case(**json.loads(sys.argv[2])), Turns()
    if name.startswith(OWN):
        ours(case, turns)
    else:
        peer(name, case, turns)


if __name__ == "__main__":
    main()
