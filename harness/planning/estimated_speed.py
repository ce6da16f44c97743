"""Tokens per second on a GPU that nobody has measured yet: how much of what a step needs, over how fast the device does
it, a roofline (Williams et al. 2009) whose terms add up. Without torch. docs/performance.md has what comes of it.

What part of a data sheet's peak a program reaches is assumed, and so is wrong by some: see UNCERTAINTY.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.runs.optimizer_state import is_muons, newton_schulz_flops
from harness.runs.throughput import KERNEL_KEYS
from harness.runs.train_config import TrainConfig

UNCERTAINTY = 0.2  # of an estimated speed, either way: a judgement, until more was measured
LARGEST_MACHINE = 8  # GPUs that NVLink joins; a network between machines is another arithmetic

# Bytes that kernels between the matrix products read and write: per token, layer and unit of width, and outside of the
# layers, by Inductor's own counts for GPT-2 small in bf16 with an fp32 residual stream. A logit is read, and its
# gradient written.
LAYER_BYTES = 139
OTHER_BYTES = 195
LOGIT_BYTES = 4
# Per parameter: of a microbatch, the weight's bf16 copy and its gradient, written and added in fp32; of a step, the
# gradients' norm and their clearing, and AdamW or Muon in torch's own kernels.
MICROBATCH_BYTES = 18
NORM_BYTES, ADAMW_BYTES, MUON_BYTES = 8, 28, 86
MEMORY_SHARE = 0.8  # of the data sheet's bandwidth that a fused kernel reaches
REST = 0.07  # of all: random numbers, reports, data, gaps between kernels
# The CPU launches kernels one by one. The time of one is Python's and the CPU's, and may well be half or twice as long:
# where it decides, there is no estimated speed (`too_small`).
LAUNCHES_PER_LAYER, OTHER_LAUNCHES = 45, 20  # of a compiled microbatch
MUON_LAUNCHES = 45  # for each matrix and step
LAUNCH_SECONDS = 11e-6


@dataclass(frozen=True)
class GpuSpec:
    """A GPU whose speed can be estimated; FLOP/s and bytes/s."""

    name: str
    matrix_peak: float  # data sheet: dense products of 16-bit numbers, sums in fp32
    matrix_share: float  # of it that products of GPT-2's shapes reach
    attention: float  # FlashAttention-2, causal, heads of 64, forward and backward together
    bandwidth: float  # data sheet
    exchange: float  # of an all-reduce over NVLink ("bus bandwidth" of NCCL's tests)
    other_words: str  # that drivers or users have in its name besides

    def is_called(self, name: str) -> bool:
        """True if `name`, a driver's or a user's, means this device: it has all words of the device's own name, and no
        others than `other_words`."""
        words, own = _words(name), _words(self.name)
        return own <= words <= own | _words(self.other_words)


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


# Peaks and bandwidths: NVIDIA's data sheets of A100, H100 and H200 (SXM) and HGX B200. Attention: Dao,
# arXiv:2307.08691. Shares, exchange, and Blackwell's attention are assumed.
DEVICES = (
    GpuSpec("A100 40GB", 312e12, 0.70, 115e12, 1.555e12, 235e9, "nvidia sxm4 sxm"),
    GpuSpec("A100 80GB", 312e12, 0.70, 115e12, 2.039e12, 235e9, "nvidia sxm4 sxm"),
    GpuSpec("H100", 989e12, 0.60, 190e12, 3.35e12, 400e9, "nvidia 80gb hbm3 sxm5 sxm"),
    GpuSpec("H200", 989e12, 0.60, 190e12, 4.8e12, 400e9, "nvidia 141gb hbm3e sxm5 sxm"),
    GpuSpec("B200", 2.25e15, 0.55, 200e12, 8.0e12, 800e9, "nvidia 180gb 192gb hbm3e sxm"),
)
# Values of train.json's keys that affect speed whose price is known besides the default's.
PRICED: dict[str, tuple[Any, ...]] = {
    "optimizer": ("muon",),
    "shard_optimizer": (True,),
    "precision": ("bf16", "fp16"),
    "compile": (True,),
}
NO_KEYS: Mapping[str, Any] = MappingProxyType({})


def find_device(name: str) -> GpuSpec | None:
    """The device of that name: as its driver has it ("NVIDIA A100-SXM4-40GB"), or as people write it ("a100-40gb")."""
    plain = re.sub(r"(\d)\s+gb\b", r"\1gb", name.lower())
    return next((device for device in DEVICES if device.is_called(plain)), None)


def why_not(train: Mapping[str, Any], world_size: int, model: ModelConfig | None = None) -> str | None:
    """Reason why the estimate does not cover train.json, the number of ranks or the model; None if it covers all."""
    if model is not None and model.moe is not None:
        return '"moe" in model.json is not covered'
    for key in KERNEL_KEYS:
        priced = (TrainConfig.model_fields[key].default, *PRICED.get(key, ()))
        if key in train and key != "bucket_mb" and train[key] not in priced:
            return f'"{key}": {json.dumps(train[key])} is not covered'
    if world_size > LARGEST_MACHINE:
        return f"{world_size} ranks are more than one machine of {LARGEST_MACHINE} GPUs"
    return None


def too_small(
    model: ModelConfig, device: GpuSpec, layout: BatchLayout, train: Mapping[str, Any] = NO_KEYS
) -> str | None:
    """The reason why such a step has no estimate, or None: the device ends it before the CPU has launched its kernels,
    so that UNCERTAINTY does not hold."""
    seconds, kernels = _step(model, device, layout, train)
    if seconds >= kernels * LAUNCH_SECONDS:
        return None
    return (
        f"launching the kernels of a step (about {kernels:,}, {1e3 * kernels * LAUNCH_SECONDS:,.1f} ms) takes "
        "longer than their work; only a measurement tells the speed"
    )


def estimated_speed(
    model: ModelConfig, device: GpuSpec, layout: BatchLayout, train: Mapping[str, Any] = NO_KEYS
) -> float:
    """Tokens per second of training, all GPUs of one machine together: compiled, 16-bit, with the optimizer of `train`,
    which is train.json's content. `why_not` and `too_small` say where that is not to be believed."""
    seconds, kernels = _step(model, device, layout, train)
    return layout.global_tokens / max(seconds, kernels * LAUNCH_SECONDS)


def _step(model: ModelConfig, device: GpuSpec, layout: BatchLayout, train: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds of a step's work on one GPU, and how many kernels the CPU launches for it.

    Products: 6 FLOPs for each weight that multiplies (PaLM, arXiv:2204.02311, appendix B). Attention: the causal half
    of 2 products forward (2·T·Q a token and layer) and, the scores being computed again, 5 backward: 7·T·Q.
    """
    width, layers, parameters = model.emb_dim, model.n_layers, model.parameters
    steps, tokens = layout.accumulation_steps, layout.accumulation_steps * layout.microbatch_tokens
    sharers = layout.world_size if train.get("shard_optimizer") else 1
    with_muon = train.get("optimizer") == "muon"
    matrices = [each for name, each in model.tensor_shapes().items() if with_muon and is_muons(name, each)]

    flops: float = 6 * (layers * model.block_weights + width * model.vocab_size) * tokens
    flops += sum(newton_schulz_flops(*each) for each in matrices) / sharers
    attention = 7 * layers * model.context_length * model.query_width * tokens
    moved: float = tokens * (width * (layers * LAYER_BYTES + OTHER_BYTES) + LOGIT_BYTES * model.vocab_size)
    moved += (steps * MICROBATCH_BYTES + NORM_BYTES) * parameters
    moved += (ADAMW_BYTES * parameters + (MUON_BYTES - ADAMW_BYTES) * sum(map(math.prod, matrices))) / sharers
    # Gradients of embeddings come last, all others travel while the backward pass goes on; then weights, if shared out.
    head = 0 if model.tie_weights else width * model.vocab_size
    late = 2 * (layout.world_size - 1) / layout.world_size * (parameters - layers * model.block_weights - head)
    sent = 4 * (late + (parameters if sharers > 1 else 0))

    seconds = flops / (device.matrix_peak * device.matrix_share) + attention / device.attention
    seconds += moved / (device.bandwidth * MEMORY_SHARE) + sent / device.exchange
    kernels = steps * (LAUNCHES_PER_LAYER * layers + OTHER_LAUNCHES)
    return (1 + REST) * seconds, kernels + MUON_LAUNCHES * math.ceil(len(matrices) / sharers)
