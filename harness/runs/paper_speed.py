"""Tokens per second on a GPU that nobody has measured yet, by arithmetic: how much of what a token needs, over how fast
the device does it. Without torch. docs/performance.md has the tables that come of it, and what was measured since.

A token of training needs matrix products, attention, memory traffic between them, random numbers for dropout, and its
share of what is done once for each microbatch and step. Times add up: on one stream nothing overlaps but the exchange
of gradients. What part of a data sheet's peak a program reaches is assumed, and so is wrong by some: see UNCERTAINTY.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.model.costs import block_weights
from harness.runs.paper_optimizer import OptimizerWork

UNCERTAINTY = 0.15  # of a speed on paper, either way: a judgement, until more was measured
LARGEST_MACHINE = 8  # GPUs that NVLink joins; a network between machines is another arithmetic

# Bytes that kernels between the matrix products read and write: per token, layer and unit of width, and outside of the
# layers. Inductor's own counts for GPT-2 small in bf16 with an fp32 residual stream: 107 kB a layer, 150 kB besides.
LAYER_BYTES = 139
# What of them is the feed-forward layer's, per unit of its own width (in GPT-2 four times the model's); with SwiGLU
# there are two such tensors and their product. Besides, by what a fused kernel has to read and write in bf16: queries
# and keys that are turned or normalised, a value embedding looked up and mixed in, a skip from the embedding and, once,
# a bigram's embedding looked up and its gradient added; nobody has counted those.
MLP_BYTES = {"gelu": 10, "relu2": 10, "swiglu": 16}
HEAD_BYTES = 8  # per unit of queries and keys
VALUE_BYTES = 18  # per unit of values
SKIP_BYTES = 16  # per unit of width
BIGRAM_BYTES = 16  # per unit of width
OTHER_BYTES = 195
DROPOUT_BYTES = 4  # of LAYER_BYTES: two masks of a byte, written and read
LOGIT_BYTES = 4  # a logit read and its gradient written, both bf16, in one kernel
# Per parameter, for a microbatch: the weight's bf16 copy (6), and a bf16 gradient that is written, read and added in
# fp32 (12). Embeddings have no copy, but a gradient of fp32 (16), which makes no difference.
MICROBATCH_BYTES = 18
GRADIENT_BYTES = 4
MEMORY_SHARE = 0.8  # of the data sheet's bandwidth that a fused kernel reaches
REST = 0.04  # of all: reports, data, gaps between kernels
# The CPU's part, which bounds small models: about 560 kernels a compiled microbatch of 12 layers, and 6 ms to launch
# them. The time of one is that of Python and of the CPU as much as of the GPU, and may well be half or twice as long:
# where it decides, there is no speed on paper (`too_small`).
LAUNCHES_PER_LAYER = 45
OTHER_LAUNCHES = 20
LAUNCH_SECONDS = 11e-6
CUDNN_DROPOUT_STEPS = 16  # cuDNN's attention has dropout in sixteenths; any other rate goes to FlashAttention


@dataclass(frozen=True)
class Chip:
    """What one generation of GPUs does of the work of training; FLOP/s unless said otherwise."""

    matrix_peak: float  # data sheet: dense products of 16-bit numbers, sums in fp32
    matrix_share: float  # of it that products of GPT-2's shapes reach
    flash: float  # FlashAttention-2 with dropout, causal, heads of 64, forward and backward together
    cudnn: float  # torch's choice where the dropout suits it
    random_numbers: float  # Philox's, per second
    exchange: float  # bytes/s of an all-reduce over NVLink ("bus bandwidth" of NCCL's tests)
    processors: int  # data sheet: streaming multiprocessors


@dataclass(frozen=True)
class PaperDevice:
    """A GPU whose speed can be told on paper."""

    name: str
    chip: Chip
    bandwidth: float  # bytes/s, data sheet
    other_words: str  # that drivers or users have in its name besides

    def is_called(self, name: str) -> bool:
        """Whether a driver or a user means it: all words of its name are there, and none that make it another."""
        words, own = _words(name), _words(self.name)
        return own <= words <= own | _words(self.other_words)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


# Peaks and bandwidths: NVIDIA's data sheets of A100, H100 and H200 (SXM) and HGX B200. Attention: Dao,
# "FlashAttention-2" (arXiv:2307.08691), and for cuDNN 1.7 to 2.3 times that on Hopper in training
# (https://github.com/huggingface/transformers/pull/48163). Shares, random numbers, exchange, and all of Blackwell's
# but its data sheet are assumed.
AMPERE = Chip(312e12, 0.70, flash=115e12, cudnn=115e12, random_numbers=1.6e11, exchange=235e9, processors=108)
HOPPER = Chip(989e12, 0.60, flash=190e12, cudnn=360e12, random_numbers=2.4e11, exchange=400e9, processors=132)
BLACKWELL = Chip(2.25e15, 0.55, flash=200e12, cudnn=700e12, random_numbers=2.9e11, exchange=800e9, processors=148)
DEVICES = (
    PaperDevice("A100 40GB", AMPERE, 1.555e12, "nvidia sxm4 sxm"),
    PaperDevice("A100 80GB", AMPERE, 2.039e12, "nvidia sxm4 sxm"),
    PaperDevice("H100", HOPPER, 3.35e12, "nvidia 80gb hbm3 sxm5 sxm"),
    PaperDevice("H200", HOPPER, 4.8e12, "nvidia 141gb hbm3e sxm5 sxm"),
    PaperDevice("B200", BLACKWELL, 8.0e12, "nvidia 180gb 192gb hbm3e sxm"),
)
# Values of train.json whose price nobody knows yet.
UNKNOWN_PRICE: dict[str, Any] = {
    "precision": "fp32",
    "compile": False,
    "activation_checkpointing": True,
    "deterministic": True,
    "exact_dropout": True,
    "residual_precision": "bf16",
    "coordinate_descent_tuning": True,
}
NO_KEYS: Mapping[str, Any] = MappingProxyType({})


def find_device(name: str) -> PaperDevice | None:
    """The device of that name: as its driver has it ("NVIDIA A100-SXM4-40GB"), or as people write it ("a100-40gb")."""
    plain = re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())
    return next((device for device in DEVICES if device.is_called(plain)), None)


def why_not(train: Mapping[str, Any], world_size: int, model: ModelConfig | None = None) -> str | None:
    """What of train.json, the number of ranks or the model the arithmetic does not cover; None if it covers all."""
    if model is not None and model.moe is not None:
        return '"moe" in model.json is not covered'
    for key, value in UNKNOWN_PRICE.items():
        if key in train and train[key] == value:
            return f'"{key}": {json.dumps(value)} is not covered'
    if world_size > LARGEST_MACHINE:
        return f"{world_size} ranks are more than one machine of {LARGEST_MACHINE} GPUs"
    return None


def launches(model: ModelConfig) -> int:
    """Kernels of a compiled microbatch, forward and backward."""
    return LAUNCHES_PER_LAYER * model.n_layers + OTHER_LAUNCHES


def too_small(
    model: ModelConfig, device: PaperDevice, layout: BatchLayout, train: Mapping[str, Any] = NO_KEYS
) -> str | None:
    """Why such a microbatch has no speed on paper: the device's work on it, by all terms of `paper_speed` but the wait
    for the CPU, takes less time than the CPU needs to launch the kernels, so that UNCERTAINTY holds for neither. None
    if it takes longer."""
    if not paper_speed(model, device, layout, train).terms["waiting for the CPU"]:
        return None
    kernels, of_what = launches(model), "a microbatch"
    if of_muon := OptimizerWork.of(model, train, layout.world_size).launches:
        kernels, of_what = launches(model) * layout.accumulation_steps + of_muon, "a step"
    return (
        f"launching the kernels of {of_what} (about {kernels:,}, {1e3 * kernels * LAUNCH_SECONDS:,.1f} ms) takes "
        "longer than their work; only a measurement tells the speed"
    )


@dataclass(frozen=True)
class Work:
    """What one token of training needs, forward and backward; `numbers` of dropout are drawn once."""

    layer_flops: float
    head_flops: float
    attention_flops: float
    layer_bytes: float
    logit_bytes: float
    numbers: float
    parameters: int
    embedding_parameters: int  # whose gradients are there only when the backward pass has ended

    @classmethod
    def of(cls, model: ModelConfig) -> Work:
        """Matrix products: 6 FLOPs for each weight that multiplies (PaLM, arXiv:2204.02311, appendix B). Attention:
        the causal half of 2 products forward (2·T·C a token and layer) and, the scores being computed again, 5
        backward (Dao, arXiv:2307.08691, section 3): 7·T·C."""
        width, layers, rates = model.emb_dim, model.n_layers, model.drop_rates
        residual_dropouts = [rates.attention_output > 0, rates.mlp_output > 0]
        return cls(
            layer_flops=6 * block_weights(model) * layers,
            head_flops=6 * width * model.vocab_size,
            attention_flops=7 * model.context_length * model.query_width * layers,
            layer_bytes=layers * (_layer_bytes(model) + width * DROPOUT_BYTES / 2 * sum(residual_dropouts))
            + width * (OTHER_BYTES + (BIGRAM_BYTES if model.bigram_embedding else 0)),
            logit_bytes=LOGIT_BYTES * model.vocab_size,
            numbers=width * (layers * sum(residual_dropouts) + (rates.embedding > 0)),
            parameters=model.parameters,
            embedding_parameters=_embedding_parameters(model),
        )

    @property
    def matrix_flops(self) -> float:
        """All of a token's floating-point operations in products."""
        return self.layer_flops + self.head_flops + self.attention_flops

    @property
    def bytes(self) -> float:
        """A token's memory traffic between products, but for what is done once for a microbatch or step."""
        return self.layer_bytes + self.logit_bytes


def _embedding_parameters(model: ModelConfig) -> int:
    """Of the embeddings of tokens and bigrams, and of the first block's values."""
    first_values = model.vocab_size * model.kv_width if model.value_embeddings else 0
    return (model.vocab_size + (model.bigram_embedding or 0)) * model.emb_dim + first_values


def _layer_bytes(model: ModelConfig) -> float:
    """A layer's traffic between products without dropout."""
    count = (LAYER_BYTES - DROPOUT_BYTES - 4 * MLP_BYTES["gelu"]) * model.emb_dim
    count += MLP_BYTES[model.mlp] * model.mlp_width
    if model.position == "rope" or model.qk_norm:
        count += HEAD_BYTES * (model.query_width + model.kv_width)
    if model.embedding_skip:
        count += SKIP_BYTES * model.emb_dim
    share = min(1.0, 2 * (model.value_embeddings or 0) / model.n_layers)  # of the layers that have a value embedding
    return count + share * VALUE_BYTES * model.kv_width


@dataclass(frozen=True)
class PaperSpeed:
    """What a token is expected to take on each GPU, by terms that add up."""

    terms: dict[str, float]  # seconds a token
    ranks: int

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.ranks / self.seconds


def paper_speed(
    model: ModelConfig, device: PaperDevice, layout: BatchLayout, train: Mapping[str, Any] = NO_KEYS
) -> PaperSpeed:
    """What a token of training takes on such GPUs: compiled, 16-bit, the ranks on one machine, with the optimizer that
    `train`, of train.json, has. `why_not` and `too_small` say where that is not to be believed."""
    work, chip = Work.of(model), device.chip
    optimizer = OptimizerWork.of(model, train, layout.world_size)
    products, memory = chip.matrix_peak * chip.matrix_share, device.bandwidth * MEMORY_SHARE
    tokens, steps = layout.microbatch_tokens, layout.accumulation_steps
    suits_cudnn = (model.drop_rates.attention_weights * CUDNN_DROPOUT_STEPS).is_integer()
    terms = {
        "layers' products": work.layer_flops / products,
        "head's products": work.head_flops / products,
        "attention": work.attention_flops / (chip.cudnn if suits_cudnn else chip.flash),
        "between products": work.layer_bytes / memory,
        "loss": work.logit_bytes / memory,
        "dropout": work.numbers / chip.random_numbers,
        "weights, per microbatch": work.parameters * MICROBATCH_BYTES / memory / tokens,
        "optimizer, per step": optimizer.bytes / memory / (tokens * steps),
    }
    if optimizer.muon_matrices:
        orthogonalising = optimizer.newton_schulz_seconds(products, chip.processors)
        terms["Newton and Schulz, per step"] = orthogonalising / (tokens * steps)
    terms["rest"] = REST * sum(terms.values())
    launching = LAUNCH_SECONDS * (launches(model) + optimizer.launches / steps) / tokens
    terms["waiting for the CPU"] = max(0.0, launching - sum(terms.values()))
    # All other gradients travel while the backward pass goes on.
    sent = 2 * (layout.world_size - 1) / layout.world_size * GRADIENT_BYTES * work.embedding_parameters
    terms["exchange"] = (sent / chip.exchange + optimizer.exchange_seconds(chip.exchange)) / (tokens * steps)
    return PaperSpeed(terms, layout.world_size)
