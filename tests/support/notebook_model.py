"""The lab notebook's training program, as its checkpoints show it: the book's GPT, trained by torch's AdamW."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from bench.references import FeedForward, NotebookModel
from gpt import ModelConfig


class NotebookExperts(nn.Module):
    """Mixture of experts: the sum of the experts' outputs, weighted by a softmax over the router's largest logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.active = config.moe.num_active_experts
        self.router = nn.Linear(config.emb_dim, config.moe.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config.emb_dim) for _ in range(config.moe.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        least = logits.topk(self.active).values[..., -1:]
        weights = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
        return (torch.stack([expert(x) for expert in self.experts], -1) * weights.unsqueeze(-2)).sum(-1)


def notebook_model(config: ModelConfig) -> NotebookModel:
    """Return the notebook's model, with experts in each block if the configuration has them."""
    model = NotebookModel(config)
    for block in model.trf_blocks if config.moe else ():
        block.ff = NotebookExperts(config)
    return model


class NotebookRun:
    """Training by the notebook's program. Each step is one microbatch of `size` sequences, in order from the start of
    `tokens`."""

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
        """Write a checkpoint with the notebook's names into `folder`, and return the folder. Tied weights are written
        as safetensors' save_model does."""
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
