"""`model.json` as a class: the shape of a model, and what it costs. Without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from harness.common.json_files import Count, RunFile, parse_config, read_json_object

HEAD_DIM_OF_DEPTH = 64
DEPTH = "In place of n_layers, n_heads and emb_dim: so many layers, and as many heads of 64."
# Far beyond what was ever trained, and still quickly refused for want of memory or disk: without a limit a typing error
# makes layers for hours.
LARGEST_PARAMETERS = 10**13
LARGEST_LAYERS = 10_000
# What later keys of the table may already say without changing anything.
AVAILABLE = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False}


class ModelConfig(RunFile):
    """The shape of a model: the contents of `runs/<name>/model.json`."""

    model_config = ConfigDict(title="model.json")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = {"depth": {"type": "integer", "minimum": 1, "description": DEPTH}}
    replaceable_keys: ClassVar[set[str]] = {"emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias"}  # by depth

    vocab_size: Count = Field(ge=2, description="Token ids are 0 .. vocab_size - 1.")
    context_length: Count = Field(ge=1, description="Tokens the model sees at once.")
    emb_dim: Count = Field(ge=1, description="Width of the residual stream.")
    n_heads: Count = Field(ge=1, description="Attention heads; emb_dim is a multiple.")
    n_layers: int = Field(ge=1, le=LARGEST_LAYERS, description="Transformer blocks.")
    drop_rate: float = Field(ge=0, lt=1, description="Dropout on embeddings, attention weights and residuals.")
    qkv_bias: bool = Field(description="Biases on the query, key and value projections.")
    tie_weights: bool = Field(default=False, description="Output head shares the token embedding.")
    position: Literal["learned", "rope"] = Field(default="learned", description="Position encoding.")
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="Normalisation.")
    mlp: Literal["gelu", "relu2", "swiglu"] = Field(default="gelu", description="Feed-forward activation.")
    qk_norm: bool = Field(default=False, description="Normalise queries and keys.")
    n_kv_heads: Count | None = Field(default=None, ge=1, description="Key-value heads; null: n_heads.")

    @model_validator(mode="before")
    @classmethod
    def _expand_depth(cls, raw: Any) -> Any:
        """`{"depth": d}` stands for d layers of width 64·d, with d heads of 64.

        One knob, and 64 of width for each layer, are nanochat's rule; its heads are 128 wide. Heads of 64 are GPT-2's
        (Radford et al. 2019), so that depth 12 is the shape of GPT-2 small: 12 layers and heads, width 768.
        """
        if not isinstance(raw, dict) or "depth" not in raw:
            return raw
        depth = raw["depth"]
        if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= LARGEST_LAYERS:
            raise ValueError(f'key "depth": must be a whole number from 1 to {LARGEST_LAYERS:,}')
        shape = {"n_layers": depth, "n_heads": depth, "emb_dim": depth * HEAD_DIM_OF_DEPTH}
        for key in shape:
            if key in raw:
                raise ValueError(f'keys "depth" and "{key}": depth already decides it; remove one')
        rest = {key: value for key, value in raw.items() if key != "depth"}
        return {"drop_rate": 0.0, "qkv_bias": False, **shape, **rest}

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        for key, available in AVAILABLE.items():
            value = getattr(self, key)
            if value != available:
                raise ValueError(f'key "{key}": {json.dumps(value)} is not available yet; use {json.dumps(available)}')
        if self.n_kv_heads not in (None, self.n_heads):
            raise ValueError(f'key "n_kv_heads": {self.n_kv_heads} is not available yet; use n_heads or remove it')
        if self.emb_dim % self.n_heads:
            below = self.emb_dim // self.n_heads * self.n_heads
            nearest = [str(multiple) for multiple in (below, below + self.n_heads) if multiple]
            raise ValueError(
                f'key "emb_dim": {self.emb_dim} is not a multiple of n_heads ({self.n_heads}); '
                f"the nearest: {' and '.join(nearest)}"
            )
        if self.parameters > LARGEST_PARAMETERS:
            raise ValueError(
                f'keys "vocab_size", "context_length", "emb_dim" and "n_layers": a model of {self.parameters:,} '
                f"parameters; there can be {LARGEST_PARAMETERS:,}"
            )
        return self

    @property
    def parameters(self) -> int:
        """Number of trainable parameters; a tied head counts once."""
        block_vectors = 4 * self.emb_dim + 6 * self.emb_dim  # two norms; biases of out_proj and both ff layers
        if self.qkv_bias:
            block_vectors += 3 * self.emb_dim
        embeddings = (self.vocab_size + self.context_length) * self.emb_dim
        head = 0 if self.tie_weights else self.vocab_size * self.emb_dim
        return self.n_layers * (12 * self.emb_dim**2 + block_vectors) + 2 * self.emb_dim + embeddings + head

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the matrix products for one token of training, forward and backward.

        6 for each weight that multiplies (embeddings are look-ups, the head is not) and 12·L·C·T for the attention
        scores and sums, uncausal as is customary (PaLM, arXiv:2204.02311, appendix B).
        """
        multiplying = self.n_layers * 12 * self.emb_dim**2 + self.vocab_size * self.emb_dim
        return 6 * multiplying + 12 * self.n_layers * self.emb_dim * self.context_length


def load_model_config(path: Path) -> ModelConfig:
    """Read and check a model.json. Raises UserError naming the file, the key and the remedy."""
    return parse_config(ModelConfig, read_json_object(path), path)
