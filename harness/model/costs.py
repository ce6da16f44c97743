"""What a model of a given shape costs: its parameters, and the arithmetic of training it. Without torch."""

from __future__ import annotations

from typing import Literal, Protocol


class Shape(Protocol):
    """Of harness/model/config.py's ModelConfig, what is counted here."""

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
    def head_width(self) -> int: ...
    @property
    def query_width(self) -> int: ...
    @property
    def kv_width(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...


def mlp_matrices(shape: Shape) -> int:
    """How many matrices the feed-forward layer has: SwiGLU's gate is a third."""
    return 3 if shape.mlp == "swiglu" else 2


def block_weights(shape: Shape) -> int:
    """Weights of a block's matrix products."""
    attention = 2 * shape.query_width + 2 * shape.kv_width
    return shape.emb_dim * (attention + mlp_matrices(shape) * shape.mlp_width)


def count_parameters(shape: Shape) -> int:
    """Number of trainable parameters; a tied head counts once."""
    width = shape.emb_dim
    embeddings = shape.vocab_size + (shape.context_length if shape.position == "learned" else 0)
    head = 0 if shape.tie_weights else shape.vocab_size
    bigrams = shape.bigram_embedding or 0
    blocks = shape.n_layers * (block_weights(shape) + _block_vectors(shape))
    return (embeddings + head + bigrams) * width + blocks + _norm(shape) + _value_embeddings(shape)


def training_flops_per_token(shape: Shape) -> int:
    """Floating-point operations of the matrix products for one token of training, forward and backward.

    6 for each weight that multiplies (embeddings are look-ups, the head is not) and 12·L·Q·T for the attention
    scores and sums of queries Q wide, uncausal as is customary (PaLM, arXiv:2204.02311, appendix B).
    """
    multiplying = shape.n_layers * block_weights(shape) + shape.vocab_size * shape.emb_dim
    return 6 * multiplying + 12 * shape.n_layers * shape.query_width * shape.context_length


def _norm(shape: Shape) -> int:
    """A norm's parameters: LayerNorm has scale and shift, RMSNorm a gain or nothing."""
    if shape.norm == "layernorm":
        return 2 * shape.emb_dim
    return shape.emb_dim if shape.norm_gain else 0


def _block_vectors(shape: Shape) -> int:
    """A block's norms, biases and factors of the skip."""
    vectors = 2 * _norm(shape)
    if shape.qk_norm and shape.norm_gain:
        vectors += 2 * shape.head_width
    if shape.qkv_bias:
        vectors += shape.query_width + 2 * shape.kv_width
    if shape.linear_bias:
        vectors += 2 * shape.emb_dim + (mlp_matrices(shape) - 1) * shape.mlp_width
    return vectors + (2 if shape.embedding_skip else 0)


def _value_embeddings(shape: Shape) -> int:
    """The tables, and two factors in each block that has one."""
    tables = shape.value_embeddings or 0
    return tables * shape.vocab_size * shape.kv_width + 2 * min(2 * tables, shape.n_layers)
