"""The model: GPT-2's architecture, its initialisation, and what it costs.

Shapes in names: B sequences, T tokens each, C = emb_dim, H heads of D = C / H, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.config import Count, parse_config, read_json_object
from harness.errors import UserError
from harness.kv_cache import KeyValueCache, LayerCache
from harness.loss import linear_cross_entropy
from harness.memory import GIB, free_memory
from harness.public_tensors import accept, copy_into, public_views
from harness.weights import load_weights

HEAD_DIM_OF_DEPTH = 64
INIT_STD = 0.02
# Far beyond what was ever trained, and still quickly refused for want of memory or disk: without a limit a typing error
# makes layers for hours.
LARGEST_PARAMETERS = 10**13
LARGEST_LAYERS = 10_000
WEIGHT_BYTES = 4  # fp32, made on the CPU first
# What later keys of the table may already say without changing anything.
AVAILABLE = {"position": "learned", "norm": "layernorm", "mlp": "gelu", "qk_norm": False}


class ModelConfig(BaseModel):
    """The shape of a model: the contents of `runs/<name>/model.json`."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", title="model.json")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = {
        "depth": {"type": "integer", "minimum": 1, "description": "In place of n_layers, n_heads and emb_dim."}
    }

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
        """`{"depth": d}` stands for d layers and d heads of 64 (nanochat's one-knob parameterisation)."""
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


class LayerNorm(nn.Module):
    """Layer normalisation with the parameter names of this model family: scale and shift."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        return F.layer_norm(x_BxTxC, self.scale.shape, self.scale, self.shift, eps=1e-5)


class CausalSelfAttention(nn.Module):
    """Multi-head attention; query, key and value are one matrix product in memory and three tensors on disk."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.drop_rate = config.drop_rate
        self.qkv = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x_BxTxC: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # BxHxTxD
            for part in self.qkv(x_BxTxC).chunk(3, dim=-1)
        )
        if cache is None:
            drop_rate = self.drop_rate if self.training else 0.0
            mixed_BxHxTxD = F.scaled_dot_product_attention(q, k, v, dropout_p=drop_rate, is_causal=True)
        else:
            k, v, visible_Bx1xTxS = cache.extend(k, v)
            mixed_BxHxTxD = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_Bx1xTxS)
        return self.out_proj(mixed_BxHxTxD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linear layers around GPT-2's tanh-approximated GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(config.emb_dim, 4 * config.emb_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config.emb_dim, config.emb_dim),
        )

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        return self.layers(x_BxTxC)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream through dropout."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.emb_dim)
        self.att = CausalSelfAttention(config)
        self.norm2 = LayerNorm(config.emb_dim)
        self.ff = FeedForward(config)
        self.drop = nn.Dropout(config.drop_rate)

    def forward(self, x_BxTxC: Tensor, cache: LayerCache | None = None) -> Tensor:
        x_BxTxC = x_BxTxC + self.drop(self.att(self.norm1(x_BxTxC), cache))
        return x_BxTxC + self.drop(self.ff(self.norm2(x_BxTxC)))


def _check_memory(config: ModelConfig) -> None:
    """Before the first layer is made: systems promise more memory than they have, and end the process that uses it."""
    needed = config.parameters * WEIGHT_BYTES
    if torch.get_default_device().type == "cpu" and needed > free_memory():
        raise UserError(
            f"model.json: {config.parameters:,} parameters take {needed / GIB:,.2f} GiB of memory, and "
            f"{free_memory() / GIB:,.2f} GiB are free; make the model smaller"
        )


class GPTModel(nn.Module):
    """GPT-2: token and position embeddings, `n_layers` blocks, a final norm and a linear head."""

    def __init__(self, config: ModelConfig, *, recompute_blocks: bool = False) -> None:
        """Weights are drawn from torch's global generator, so that equal seeds give equal models on every rank.

        With `recompute_blocks` the backward pass runs each block again instead of keeping its activations. Raises
        UserError if this machine cannot hold even the weights.
        """
        _check_memory(config)
        super().__init__()
        self.config = config
        self.recompute_blocks = recompute_blocks
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.drop = nn.Dropout(config.drop_rate)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.final_norm = LayerNorm(config.emb_dim)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.out_head.weight = self.tok_emb.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's initialisation (Radford et al. 2019, section 2.3): N(0, 0.02), zero biases, and the projections into
        the residual stream scaled down by the square root of their number."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("att.out_proj.weight", "ff.layers.2.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BxT: Tensor, targets_BxT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or, given targets, the mean cross-entropy as a scalar."""
        features_BxTxC = self.features(tokens_BxT)
        if targets_BxT is None:
            return self.out_head(features_BxTxC)
        return linear_cross_entropy(features_BxTxC.flatten(0, 1), self.out_head.weight, targets_BxT.flatten())

    def features(self, tokens_BxT: Tensor) -> Tensor:
        """What the head sees: (B, T, C), after the final norm."""
        positions_T = torch.arange(tokens_BxT.shape[1], device=tokens_BxT.device)
        x_BxTxC = self.drop(self.tok_emb(tokens_BxT) + self.pos_emb(positions_T))
        for block in self.trf_blocks:
            if self.recompute_blocks and torch.is_grad_enabled():
                x_BxTxC = checkpoint(block, x_BxTxC, use_reentrant=False)
            else:
                x_BxTxC = block(x_BxTxC)
        return self.final_norm(x_BxTxC)

    def further_features(self, tokens_BxT: Tensor, lengths: list[int], cache: KeyValueCache) -> Tensor:
        """`features` of tokens that follow those in the cache, which holds them, too, afterwards. No dropout: for
        evaluation mode. Row b has `lengths[b]` tokens, padded on the right; what is returned for padding is of no use.
        """
        positions_BxT = cache.take(tokens_BxT, lengths)
        x_BxTxC = self.tok_emb(tokens_BxT) + self.pos_emb(positions_BxT.clamp(max=self.config.context_length - 1))
        for block, layer in zip(self.trf_blocks, cache.layers, strict=True):
            x_BxTxC = block(x_BxTxC, layer)
        return self.final_norm(x_BxTxC)

    def public_tensors(self) -> dict[str, Tensor]:
        """The weights under the names of this model family's published checkpoints: CPU, contiguous, unshared."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in public_views(self.state_dict()).items()}

    def load_public_tensors(self, tensors: dict[str, Tensor], source: Path) -> None:
        """Set the weights from tensors under their public names.

        Raises UserError, naming `source`, the tensors and both shapes, when they are another model's; the weights are
        then untouched.
        """
        state = self.state_dict()
        copy_into(state, accept(tensors, state, tied=self.config.tie_weights, source=source))


def load_model(model_json: Path, weights: Path, device: torch.device) -> GPTModel:
    """A model in evaluation mode with the weights of a safetensors file. Raises UserError if the two do not match."""
    model = GPTModel(load_model_config(model_json))
    model.load_public_tensors(load_weights(weights), weights)
    return model.to(device).eval()
