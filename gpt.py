"""The model: GPT-2's architecture and its initialisation; harness/model/config.py has its configuration and costs.

Shapes in names: B sequences, T tokens each, C = emb_dim, H heads of D = C / H, V vocabulary.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.common.errors import UserError
from harness.common.memory import free_memory
from harness.common.units import GIB
from harness.model.attention import causal_attention
from harness.model.config import ModelConfig as ModelConfig
from harness.model.config import load_model_config as load_model_config
from harness.model.cross_entropy import linear_cross_entropy
from harness.model.inference import KeyValueCache, LayerCache
from harness.model.weights import checkpoint_views, from_checkpoint_names, load_into, load_weights, qkv_sizes

INIT_STD = 0.02
WEIGHT_BYTES = 4  # fp32, made on the CPU first


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
        self.qkv_sizes = qkv_sizes(config)
        self.qkv = nn.Linear(config.emb_dim, sum(self.qkv_sizes), bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x_BxTxC: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)  # BxHxTxD
            for part in self.qkv(x_BxTxC).split(self.qkv_sizes, dim=-1)
        )
        if cache is None:
            drop_rate = self.drop_rate if self.training else 0.0
            mixed_BxHxTxD = causal_attention(q, k, v, drop_rate)
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

    def __init__(
        self, config: ModelConfig, *, recompute_blocks: bool = False, residual_dtype: torch.dtype | None = None
    ) -> None:
        """Weights are drawn from torch's global generator, so that equal seeds give equal models on every rank.

        With `recompute_blocks` the backward pass runs each block again instead of keeping its activations. Under
        autocast, `residual_dtype` is that of the residual stream (None: the weights'). Raises UserError if this machine
        cannot hold even the weights.
        """
        _check_memory(config)
        super().__init__()
        self.config = config
        self.recompute_blocks = recompute_blocks
        self.residual_dtype = residual_dtype
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
        if self.residual_dtype is not None and torch.is_autocast_enabled(x_BxTxC.device.type):
            x_BxTxC = x_BxTxC.to(self.residual_dtype)
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

    def to_checkpoint_names(self) -> dict[str, Tensor]:
        """The weights under the names of this model family's published checkpoints: CPU, contiguous, unshared."""
        views = checkpoint_views(self.state_dict(), self.config)
        return {name: tensor.to("cpu", copy=True) for name, tensor in views.items()}

    def load_checkpoint_tensors(self, tensors: dict[str, Tensor], source: Path) -> None:
        """Set the weights from tensors under their public names.

        Raises UserError, naming `source`, the tensors and both shapes, when they are another model's; the weights are
        then untouched.
        """
        state = self.state_dict()
        load_into(state, from_checkpoint_names(tensors, state, self.config, source), self.config)


def load_model(model_json: Path, weights: Path, device: torch.device) -> GPTModel:
    """A model in evaluation mode with the weights of a safetensors file. Raises UserError if the two do not match."""
    model = GPTModel(load_model_config(model_json))
    model.load_checkpoint_tensors(load_weights(weights), weights)
    return model.to(device).eval()
