"""Estimated training speed on a GPU, in tokens per second, by a roofline model (Williams et al. 2009) whose terms are
summed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.runs.optimizer_state import is_muons, newton_schulz_flops
from harness.runs.throughput import KERNEL_KEYS
from harness.runs.train_config import TrainConfig

UNCERTAINTY = 0.2  # assumed relative error of an estimated speed, up or down (docs/performance.md: 5 % on two GPUs)
LARGEST_MACHINE = 8  # number of GPUs joined by NVLink; a network between machines is not covered

# Bytes that the kernels between the matrix products read and write, by Inductor's own counts for GPT-2 small in bf16
# with an fp32 residual stream: LAYER_BYTES per token, layer and unit of width; OTHER_BYTES per token and unit of width,
# outside of the layers; LOGIT_BYTES per logit, which is read, and whose gradient is written.
LAYER_BYTES = 139
OTHER_BYTES = 195
LOGIT_BYTES = 4
# Bytes read and written per parameter. In each microbatch, MICROBATCH_BYTES: for the bf16 copy of the weight, and for
# its gradient, which is written and added in fp32. In each step, NORM_BYTES: for the norm and the zeroing of the
# gradients; and ADAMW_BYTES or MUON_BYTES: for the optimizer, in torch's own kernels.
MICROBATCH_BYTES = 18
NORM_BYTES, ADAMW_BYTES, MUON_BYTES = 8, 28, 86
MEMORY_SHARE = 0.8  # part of the data sheet's memory bandwidth that a fused kernel reaches
REST = 0.07  # share added to the time of a step, for random numbers, reports, data, gaps between kernels
# The CPU launches kernels one by one. A launch takes LAUNCH_SECONDS, which depends on Python and the CPU and may well
# be half or twice as long. Where launches take longer than the kernels' work, no speed is estimated.
LAUNCHES_PER_LAYER, OTHER_LAUNCHES = 45, 20  # in a compiled microbatch
MUON_LAUNCHES = 39  # for each matrix and step; fewer where several matrices are updated together
LAUNCH_SECONDS = 11e-6


@dataclass(frozen=True)
class GpuSpec:
    """A GPU whose speed can be estimated. Speeds are in FLOP/s or bytes/s."""

    name: str
    matrix_peak: float  # data sheet: dense 16-bit matrix products with fp32 accumulation
    matrix_share: float  # part of matrix_peak that matrix products of GPT-2's shapes reach
    attention: float  # FLOP/s of FlashAttention-2, causal, heads of width 64, forward and backward together
    bandwidth: float  # memory bandwidth, from the data sheet
    exchange: float  # bytes/s of an all-reduce over NVLink ("bus bandwidth" of NCCL's tests)
    other_words: str  # other words that may be in the name, as drivers report it or people write it


# Peaks and bandwidths: NVIDIA's data sheets of A100, H100 and H200 (SXM) and HGX B200. Attention: Dao,
# arXiv:2307.08691. Shares, exchange, and Blackwell's attention are assumed.
DEVICES = (
    GpuSpec("A100 40GB", 312e12, 0.70, 115e12, 1.555e12, 235e9, "nvidia sxm4 sxm"),
    GpuSpec("A100 80GB", 312e12, 0.70, 115e12, 2.039e12, 235e9, "nvidia sxm4 sxm"),
    GpuSpec("H100", 989e12, 0.60, 190e12, 3.35e12, 400e9, "nvidia 80gb hbm3 sxm5 sxm"),
    GpuSpec("H200", 989e12, 0.60, 190e12, 4.8e12, 400e9, "nvidia 141gb hbm3e sxm5 sxm"),
    GpuSpec("B200", 2.25e15, 0.55, 200e12, 8.0e12, 800e9, "nvidia 180gb 192gb hbm3e sxm"),
)
# Keys of train.json that affect speed, with the values that the estimate covers besides the defaults.
COVERED: dict[str, tuple[Any, ...]] = {
    "optimizer": ("muon",),
    "shard_optimizer": (True,),
    "precision": ("bf16", "fp16"),
    "compile": (True,),
}


def find_device(name: str) -> GpuSpec | None:
    """Return the entry of DEVICES with this name, or None if there is none. The name may be as the driver reports it
    ("NVIDIA A100-SXM4-40GB") or as people write it ("a100-40gb")."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"[a-z0-9]+", re.sub(r"(\d)\s+gb\b", r"\1gb", text.lower())))

    # The name must have all words of the device's own name, and no other words than `other_words`.
    known = ((device, words(device.name), words(device.other_words)) for device in DEVICES)
    return next((device for device, own, other in known if own <= words(name) <= own | other), None)


def estimated_speed(model: ModelConfig, device: GpuSpec, layout: BatchLayout, train: Mapping[str, Any]) -> float | str:
    """Return the estimated tokens per second of all ranks together, or the reason why there is no estimate.

    The estimate is for compiled training in 16-bit precision on one machine. `train` is train.json's content. A missing
    key has its default.
    """
    if model.moe is not None:
        return 'the estimate does not cover "moe" in model.json'
    for key in KERNEL_KEYS:
        covered = (TrainConfig.model_fields[key].default, *COVERED.get(key, ()))
        if key in train and key != "bucket_mb" and train[key] not in covered:
            return f'the estimate does not cover "{key}": {json.dumps(train[key])}'
    if layout.world_size > LARGEST_MACHINE:
        return f"{layout.world_size} ranks do not fit on one machine of {LARGEST_MACHINE} GPUs"
    seconds, kernels = _step(model, device, layout, train)
    if seconds < kernels * LAUNCH_SECONDS:
        return (
            f"launching the kernels of a step (about {kernels:,}, {1e3 * kernels * LAUNCH_SECONDS:,.1f} ms) takes "
            "longer than running them; only a measurement gives the speed"
        )
    return layout.global_tokens / seconds


def _step(model: ModelConfig, device: GpuSpec, layout: BatchLayout, train: Mapping[str, Any]) -> tuple[float, int]:
    """Return the seconds of a step's work on one GPU, and the number of kernels that the CPU launches for it."""
    width, layers, parameters = model.emb_dim, model.n_layers, model.parameters
    steps, tokens = layout.accumulation_steps, layout.accumulation_steps * layout.microbatch_tokens
    sharers = layout.world_size if train.get("shard_optimizer") else 1
    with_muon = train.get("optimizer") == "muon"
    matrices = [each for name, each in model.tensor_shapes().items() if with_muon and is_muons(name, each)]

    # Matrix products take 6 FLOPs per token for each weight in them (PaLM, arXiv:2204.02311, appendix B).
    flops: float = 6 * (layers * model.block_weights + width * model.vocab_size) * tokens
    flops += sum(newton_schulz_flops(*each) for each in matrices) / sharers
    # Attention takes 7·T·Q FLOPs per token and layer, since only the causal half of each product is computed: 2
    # products forward take 2·T·Q, and 5 backward, where the scores are computed again, take 5·T·Q. T is the context
    # length, Q the width of all queries.
    attention = 7 * layers * model.context_length * model.query_width * tokens
    moved: float = tokens * (width * (layers * LAYER_BYTES + OTHER_BYTES) + LOGIT_BYTES * model.vocab_size)
    moved += (steps * MICROBATCH_BYTES + NORM_BYTES) * parameters
    moved += (ADAMW_BYTES * parameters + (MUON_BYTES - ADAMW_BYTES) * sum(map(math.prod, matrices))) / sharers
    # Gradients of the embeddings are computed last, so their exchange takes extra time. All others are exchanged
    # during the backward pass. A sharded optimizer also exchanges the updated weights.
    head = 0 if model.tie_weights else width * model.vocab_size
    late = 2 * (layout.world_size - 1) / layout.world_size * (parameters - layers * model.block_weights - head)
    sent = 4 * (late + (parameters if sharers > 1 else 0))

    # Each term is an amount of work divided by the device's speed at that work.
    seconds = flops / (device.matrix_peak * device.matrix_share) + attention / device.attention
    seconds += moved / (device.bandwidth * MEMORY_SHARE) + sent / device.exchange
    kernels = steps * (LAUNCHES_PER_LAYER * layers + OTHER_LAUNCHES)
    return (1 + REST) * seconds, kernels + MUON_LAUNCHES * math.ceil(len(matrices) / sharers)
