"""Memory of the optimizer, and estimated memory of a training step on a GPU: the sum of the tensors that exist at the
step's peak.

docs/LOG.md compares the estimate with torch's allocator.
"""

from __future__ import annotations

import math

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.runs.optimizer_state import MOMENTS, is_muons
from harness.runs.train_config import TrainConfig

# Bytes per element. FP32: weights, gradients, optimizer state and, by default, the residual stream. BF16: all else.
FP32, BF16 = 4, 2
CHUNK_BYTES = 2**29  # of the loss's largest chunk of logits, in bf16 (CHUNK_LOGITS in harness/model/cross_entropy.py)


def optimizer_state_bytes(config: TrainConfig, model: ModelConfig) -> int:
    """Return the bytes of the optimizer's state tensors (MOMENTS) for a whole model: with `shard_optimizer`, those of
    all ranks together."""
    assert config.optimizer in MOMENTS
    by_muon = 0
    if config.optimizer == "muon":
        by_muon = sum(math.prod(shape) for name, shape in model.tensor_shapes().items() if is_muons(name, shape))
    by_adamw = model.parameters - by_muon
    return FP32 * (len(MOMENTS["muon"]) * by_muon + len(MOMENTS["adamw"]) * by_adamw)


def step_bytes(model: ModelConfig, config: TrainConfig, layout: BatchLayout) -> int | None:
    """Return the bytes that a compiled step in bf16 allocates on each GPU at its peak.

    Returns None if the estimate does not cover the model or the settings. `precision` "auto" counts as bf16, `compile`
    "auto" as compiled.
    """
    if model.moe is not None or config.precision not in ("auto", "bf16") or config.compile is False:
        return None
    ranks, tokens = layout.world_size, layout.microbatch_size * layout.context_length
    # The gradients of the last step stay in DDP's buckets, or those of earlier microbatches are being added up.
    are_kept = ranks > 1 or layout.accumulation_steps > 1
    state = optimizer_state_bytes(config, model) // (ranks if config.shard_optimizer else 1)
    fixed = FP32 * model.parameters * (2 if are_kept else 1) + state
    logits = BF16 * tokens * model.vocab_size
    head = model.vocab_size * model.emb_dim
    # one of the loss's equal chunks, the head's weight in bf16, and its gradient in fp32
    loss = logits // -(-logits // CHUNK_BYTES) + (BF16 + FP32) * head
    residual = (BF16 if config.residual_precision == "bf16" else FP32) * model.emb_dim
    # A compiled step in bf16 reaches its peak while the loss is computed. With activation checkpointing, the peak may
    # be in a block's backward pass instead. With a small microbatch, it may be in the optimizer's update, when all
    # gradients exist.
    outside, block = outside_bytes(model, residual), block_bytes(model, residual)
    at_update = 2 * FP32 * model.parameters + state
    if config.activation_checkpointing:
        outside += residual * model.n_layers  # each block's input
        # Each block is recomputed after the loss. Its backward pass has the residual stream and its gradient in fp32,
        # the block's weights in bf16 and their gradients, and the head's gradient if none are kept.
        stream = FP32 * model.emb_dim
        backward = tokens * (block_bytes(model, stream) + stream) + (BF16 + FP32) * model.block_weights
        backward += 0 if are_kept else FP32 * head
        return max(fixed + tokens * outside + max(loss, backward), at_update)
    fixed += 3 * model.n_layers * model.block_weights  # measured: 3 bytes for each weight, 2 of them for a copy in bf16
    mixed = 2 * BF16 * model.kv_width * min(2 * (model.value_embeddings or 0), model.n_layers)
    return max(fixed + tokens * (outside + mixed + block * model.n_layers) + loss, at_update)


def outside_bytes(model: ModelConfig, residual: int) -> int:
    """Return the bytes per token that are kept for the backward pass outside of the blocks.

    `residual` is the size of the residual stream in bytes per token.
    """
    # The embeddings that the blocks read (tokens, skip, bigrams, values), the last norm's input and output, and the
    # output's gradient, which the fused loss computes in the forward pass.
    streams = 2 + model.embedding_skip + (model.bigram_embedding is not None)
    return streams * residual + BF16 * (2 * model.emb_dim + model.kv_width * (model.value_embeddings or 0))


def block_bytes(model: ModelConfig, residual: int) -> int:
    """Return the bytes per token that a block's forward pass keeps for its backward pass. `residual` is the size of the
    residual stream in bytes per token."""
    width, queries, keys, rates = model.emb_dim, model.query_width, model.kv_width, model.drop_rates
    norms = 2 * (residual + BF16 * width)
    attention = BF16 * (queries + 2 * keys + queries)  # queries, keys, values, and the heads' output
    if model.qk_norm:
        attention += BF16 * (queries + keys)
    feed_forward = BF16 * model.mlp_width * (3 if model.mlp == "swiglu" else 2)
    masks = width * ((rates.attention_output > 0) + (rates.mlp_output > 0))  # a byte for each element
    return norms + attention + feed_forward + masks
