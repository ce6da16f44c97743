"""The lab notebook's program, as far as its checkpoints show it: the book's GPT, trained by torch's AdamW.

Written independently of gpt.py: separate projections, a mask as a buffer, norms and attention spelt out.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from gpt import ModelConfig


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.scale * centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5) + self.shift


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


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.att = Attention(config)
        self.ff = FeedForward(config.emb_dim)
        self.norm1 = Norm(config.emb_dim)
        self.norm2 = Norm(config.emb_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class NotebookModel(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.trf_blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layers)])
        self.final_norm = Norm(config.emb_dim)
        self.out_head = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        if config.tie_weights:
            self.out_head.weight = self.tok_emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1]))
        return self.out_head(self.final_norm(self.trf_blocks(x)))


class NotebookRun:
    """Trains on microbatches of `size` sequences from the start of `tokens`, one a step."""

    def __init__(self, config: ModelConfig, tokens: Tensor, size: int) -> None:
        torch.manual_seed(3)
        self.model, self.tokens = NotebookModel(config), tokens.long()
        self.rows, self.length = size, config.context_length
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0004, weight_decay=0.1)
        self.step = -1

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            start = self.step * self.rows * self.length
            window = self.tokens[start : start + self.rows * self.length + 1]
            inputs, targets = (part.view(self.rows, self.length) for part in (window[:-1], window[1:]))
            loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def save(self, folder: Path) -> Path:
        """A checkpoint with the notebook's names; tied weights as safetensors' save_model leaves them."""
        folder.mkdir(parents=True)
        if self.model.out_head.weight is self.model.tok_emb.weight:
            save_model(self.model, str(folder / "model.safetensors"))
        else:
            save_file(self.model.state_dict(), folder / "model.safetensors")
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "scaler.pt")
        meta = {"train_loss": 3.2, "val_loss": 3.4, "global_step": self.step, "is_best": True}
        (folder / "meta.json").write_text(json.dumps(meta))
        return folder
