"""Cost of a model of a given shape: its parameters, and the arithmetic of training it. Without torch."""

from __future__ import annotations

from typing import Literal, Protocol


class Experts(Protocol):
    """The fields of harness/model/config.py's ExpertCounts that are counted here."""

    @property
    def num_experts(self) -> int: ...
    @property
    def num_active_experts(self) -> int: ...


class Shape(Protocol):
    """The fields of harness/model/config.py's ModelConfig that are counted here."""

    vocab_size: int
    context_length: int
    emb_dim: int
    n_layers: int
    qkv_bias: bool
    tie_weights: bool
    linear_bias: bool
    qk_norm: bool
    embedding_skip: bool
    position: Literal["learned", "rope"]
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "relu2", "swiglu"]
    norm_gain: bool | None
    value_embeddings: int | None
    bigram_embedding: int | None

    @property
    def moe(self) -> Experts | None: ...
    @property
    def head_width(self) -> int: ...
    @property
    def query_width(self) -> int: ...
    @property
    def kv_width(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...


def mlp_matrices(shape: Shape) -> int:
    """Number of matrices in the feed-forward layer: SwiGLU's gate is a third."""
    return 3 if shape.mlp == "swiglu" else 2


def block_weights(shape: Shape) -> int:
    """Weights of a block's matrix products that a token goes through: of experts the active ones, and the router."""
    attention = 2 * shape.query_width + 2 * shape.kv_width
    layers, router = (shape.moe.num_active_experts, shape.moe.num_experts) if shape.moe else (1, 0)
    return shape.emb_dim * (attention + layers * mlp_matrices(shape) * shape.mlp_width + router)


def count_active_parameters(shape: Shape) -> int:
    """Number of trainable parameters that a token goes through; embeddings count whole, a tied head once."""
    width = shape.emb_dim
    embeddings = shape.vocab_size + (shape.context_length if shape.position == "learned" else 0)
    head = 0 if shape.tie_weights else shape.vocab_size
    bigrams = shape.bigram_embedding or 0
    blocks = shape.n_layers * (block_weights(shape) + _block_vectors(shape))
    return (embeddings + head + bigrams) * width + blocks + _norm(shape) + _value_embeddings(shape)


def count_parameters(shape: Shape) -> int:
    """Number of trainable parameters, all experts included; a tied head counts once."""
    idle = shape.moe.num_experts - shape.moe.num_active_experts if shape.moe else 0
    expert = mlp_matrices(shape) * shape.mlp_width * shape.emb_dim + _mlp_biases(shape)
    return count_active_parameters(shape) + shape.n_layers * idle * expert


def training_flops_per_token(shape: Shape) -> int:
    """Floating-point operations of the matrix products for one token of training, forward and backward.

    6 for each weight that multiplies (embeddings are look-ups, the head is not; of experts the active ones) and
    12·L·Q·T for the attention scores and sums of queries Q wide, uncausal as is customary (PaLM, arXiv:2204.02311,
    appendix B).
    """
    multiplying = shape.n_layers * block_weights(shape) + shape.vocab_size * shape.emb_dim
    return 6 * multiplying + 12 * shape.n_layers * shape.query_width * shape.context_length


def _norm(shape: Shape) -> int:
    """A norm's parameters: LayerNorm has scale and shift, RMSNorm a gain or nothing."""
    if shape.norm == "layernorm":
        return 2 * shape.emb_dim
    return shape.emb_dim if shape.norm_gain else 0


def _block_vectors(shape: Shape) -> int:
    """A block's norms, biases (of experts the active ones') and factors of the skip."""
    vectors = 2 * _norm(shape)
    if shape.qk_norm and shape.norm_gain:
        vectors += 2 * shape.head_width
    if shape.qkv_bias:
        vectors += shape.query_width + 2 * shape.kv_width
    if shape.linear_bias:
        vectors += shape.emb_dim  # of attention's projection
    vectors += (shape.moe.num_active_experts if shape.moe else 1) * _mlp_biases(shape)
    return vectors + (2 if shape.embedding_skip else 0)


def _mlp_biases(shape: Shape) -> int:
    """Number of biases in one feed-forward layer, or expert."""
    return shape.emb_dim + (mlp_matrices(shape) - 1) * shape.mlp_width if shape.linear_bias else 0


def _value_embeddings(shape: Shape) -> int:
    """The tables, and two factors in each block that has one."""
    tables = shape.value_embeddings or 0
    return tables * shape.vocab_size * shape.kv_width + 2 * min(2 * tables, shape.n_layers)
