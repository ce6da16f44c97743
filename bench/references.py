"""Other implementations of the same model, for comparison with ours.

The models written here share no code with gpt.py. `NotebookModel` has the tensor names of Giles Thomas's lab notebook.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt import GPTModel, ModelConfig
from harness.hf.formats import peer_config, peer_tensors

if TYPE_CHECKING:
    import transformers


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return self.scale * centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + 1e-5) + self.shift


class Attention(nn.Module):
    mask: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.n_heads
        self.W_query = nn.Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.W_key = nn.Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.W_value = nn.Linear(config.emb_dim, config.emb_dim, bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.emb_dim, config.emb_dim)
        self.register_buffer("mask", torch.triu(torch.ones(config.context_length, config.context_length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        q, k, v = (
            project(x).view(batch, count, self.heads, -1).transpose(1, 2)
            for project in (self.W_query, self.W_key, self.W_value)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(width // self.heads)
        weights = scores.masked_fill(self.mask.bool()[:count, :count], -torch.inf).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(batch, count, width))


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class NanoAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_heads
        self.c_attn = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.c_proj = nn.Linear(config.emb_dim, config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().flatten(2))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.att = attention(config)
        self.ff = FeedForward(config.emb_dim)
        self.norm1 = norm(config.emb_dim)
        self.norm2 = norm(config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class NotebookModel(nn.Module):
    """GPT as in Giles Thomas's lab notebook, without dropout. It stores all logits. The default `attention` and
    `norm` consist of elementary operations, with separate projections for queries, keys and values."""

    def __init__(
        self, config: ModelConfig, attention: type[nn.Module] = Attention, norm: type[nn.Module] = Norm
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.trf_blocks = nn.Sequential(*[Block(config, attention, norm) for _ in range(config.n_layers)])
        self.final_norm = norm(config.emb_dim)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.out_head.weight = self.tok_emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


def nano_gpt(config: ModelConfig) -> NotebookModel:
    """Return a GPT as in nanoGPT (https://github.com/karpathy/nanoGPT): one projection for queries, keys and values,
    torch's norms and attention, a tied head, and all logits stored."""
    model = NotebookModel(config.model_copy(update={"tie_weights": False}), NanoAttention, nn.LayerNorm)
    model.tok_emb.weight = model.out_head.weight  # keep the head's weights, whose initial values are small
    return model


def transformers_peer(model: GPTModel, attention: str = "sdpa") -> transformers.GPT2LMHeadModel:
    """Return Hugging Face's GPT-2 on the CPU, in training mode, with the shape, dropout and weights of `model`.
    `attention` is transformers' attn_implementation."""
    import transformers

    settings = peer_config("gpt2", model.config) | {"attn_implementation": attention}
    del settings["model_type"], settings["architectures"]
    peer = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, bos_token_id=None, eos_token_id=None))
    tensors = peer_tensors("gpt2", model)
    peer.load_state_dict({"lm_head.weight": tensors["transformer.wte.weight"], **tensors})
    peer.loss_type = "ForCausalLM"
    peer.train()
    return peer
