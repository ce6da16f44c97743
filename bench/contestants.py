"""Who takes part in the comparison of training steps, each trained as its authors train it.

A step is forward, backward, clipping to norm 1.0, AdamW and giving up the gradients; dropout is off.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.references import NanoGPT, NotebookModel
from bench.turns import Shape
from gpt import GPTModel, ModelConfig
from harness.data.loader import Microbatch
from harness.distributed.world import World
from harness.model.kernels import choose_kernels
from harness.runs.train_config import TrainConfig
from harness.training.step import build_step

LEARNING_RATE = 4e-4
LITGPT_ROTARY = 0.25  # of each head's width, as in its Pythia models
LITGPT_INSTALL = (
    "uv pip install --no-deps --target DIR litgpt lightning lightning-utilities torchmetrics, and PYTHONPATH=DIR in "
    "front of the command (its own pins exclude this project's huggingface-hub)"
)

Loss = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Microbatch], None]


class NotToBeHadError(Exception):
    """A contestant cannot take part; the text says why."""


@dataclass(frozen=True)
class Case:
    """What all contestants of one comparison share."""

    shape: ModelConfig
    microbatch: int
    device: torch.device
    compile: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatch * self.shape.context_length

    def batch(self, generator: np.random.Generator) -> Microbatch:
        """Random tokens."""
        tokens = generator.integers(self.shape.vocab_size, size=self.tokens + 1, dtype=np.int64)
        return Microbatch(tokens.astype(np.uint16), self.shape.context_length)


@dataclass(frozen=True)
class Contestant:
    """A program's step, its model, and whether the head is the token embedding."""

    title: str
    model: nn.Module
    step: Step
    tied: bool


def ours(case: Case, precision: str, *, tied: bool) -> Contestant:
    """This project's own step, as ddp_train.py runs it in one process."""
    World.join()  # which arranges threads and memory
    torch.manual_seed(42)
    model = GPTModel(case.shape.model_copy(update={"tie_weights": tied})).to(case.device)
    choose_kernels(model, case.shape.drop_rates.attention_weights, case.device, compiled=case.compile)
    settings: dict[str, Any] = {
        "dataset": "builtin/none",
        "microbatch_size": case.microbatch,
        "min_train_tokens": -1,
        "start_train_token": 0,
        "checkpoint_interval": 1,
        "learning_rate": LEARNING_RATE,
        "clipping_max_norm": 1.0,
        "precision": precision,
        "compile": case.compile,
    }
    step = build_step(model, model, TrainConfig(**settings))
    step.warm_up(case.batch(np.random.default_rng(0)))

    def run(microbatch: Microbatch) -> None:
        step.run([microbatch], 1.0)

    title = f"ddp-pretrain, {'auto: ' if precision == 'auto' else ''}{step.precision.name}"
    return Contestant(title, model, run, tied)


def notebook(case: Case) -> Contestant:
    """The lab notebook's program: torch's plain AdamW, and the loss read at each step."""
    torch.manual_seed(42)
    model = NotebookModel(case.shape).to(case.device)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    run = _plain_step(case, model, loss, fused=False, reads_loss=True)
    return Contestant("the notebook's program", model, run, tied=False)


def transformers_gpt2(case: Case, *, bf16: bool = False) -> Contestant:
    """transformers' GPT-2 with torch's attention and fused AdamW, weights as ours."""
    from bench.hf_weights import peer_of

    torch.manual_seed(42)
    model = peer_of(GPTModel(case.shape.model_copy(update={"tie_weights": True})))
    nn.Module.to(model, case.device)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        # `labels` alone would be shifted inside, and the last position of each sequence would predict nothing.
        return model(inputs, labels=targets, shift_labels=targets, use_cache=False).loss

    run = _plain_step(case, model, loss, half=bf16)
    return Contestant("transformers, bf16 autocast" if bf16 else "transformers", model, run, tied=True)


def nanogpt(case: Case, *, bf16: bool = False) -> Contestant:
    """nanoGPT's formulation with fused AdamW."""
    torch.manual_seed(42)
    model = NanoGPT(case.shape).to(case.device)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    run = _plain_step(case, model, loss, half=bf16)
    return Contestant("nanoGPT, bf16 autocast" if bf16 else "nanoGPT", model, run, tied=True)


def litgpt(case: Case) -> Contestant:
    """litgpt's model of the same size (it has no learned positions: rotary ones, as in its Pythia models) with its loss
    and optimizer. Raises NotToBeHadError where it is not installed."""
    try:
        from litgpt.config import Config
        from litgpt.model import GPT
        from litgpt.utils import chunked_cross_entropy
    except ImportError as error:
        raise NotToBeHadError(f"{error}; {LITGPT_INSTALL}") from None
    shape = case.shape
    torch.manual_seed(42)
    model = GPT(
        Config(
            block_size=shape.context_length,
            n_layer=shape.n_layers,
            n_head=shape.n_heads,
            n_embd=shape.emb_dim,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.vocab_size,
            rotary_percentage=LITGPT_ROTARY,
            parallel_residual=False,
            bias=True,
            gelu_approximate="tanh",
        )
    ).to(case.device)

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return chunked_cross_entropy(model(inputs), targets)

    run = _plain_step(case, model, loss, fused=case.device.type == "cuda")  # as its pretrain command has it
    return Contestant("litgpt", model, run, tied=False)


def _plain_step(
    case: Case, model: nn.Module, loss: Loss, *, fused: bool = True, reads_loss: bool = False, half: bool = False
) -> Step:
    """A step as most programs write it. On a GPU the matrix products run in bf16, as ours; on a CPU if `half`."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.1, fused=fused or None)
    computed: Any = torch.compile(loss) if case.compile else loss
    is_half = half or case.device.type == "cuda"

    def autocast() -> AbstractContextManager[object]:
        return torch.autocast(case.device.type, torch.bfloat16) if is_half else nullcontext()

    def run(microbatch: Microbatch) -> None:
        inputs_BxT, targets_BxT = microbatch.to(case.device)
        with autocast():
            value = computed(inputs_BxT, targets_BxT)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if reads_loss:
            value.item()

    return run


BUILDERS: dict[str, Callable[[Case], Contestant]] = {
    "ddp-pretrain": lambda case: ours(case, "auto", tied=False),
    "ddp-pretrain fp32": lambda case: ours(case, "fp32", tied=False),
    "ddp-pretrain tied": lambda case: ours(case, "auto", tied=True),
    "ddp-pretrain tied fp32": lambda case: ours(case, "fp32", tied=True),
    "notebook": notebook,
    "transformers": transformers_gpt2,
    "transformers bf16": lambda case: transformers_gpt2(case, bf16=True),
    "litgpt": litgpt,
    "nanogpt": nanogpt,
    "nanogpt bf16": lambda case: nanogpt(case, bf16=True),
}


def case_of(shape: Shape) -> Case:
    """What all contestants build for a shape."""
    return Case(shape.model_config(), shape.microbatch, torch.device(shape.device), shape.compile)
