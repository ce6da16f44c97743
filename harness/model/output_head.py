"""The output head: logits of the next token."""

from __future__ import annotations

from torch import Tensor, nn

from harness.model.config import ModelConfig


class OutputHead(nn.Linear):
    """A linear layer without bias; with `logit_softcap` c its outputs are c·tanh(x / c) (Gemma 2, arXiv:2408.00118,
    section 2). Whoever multiplies by its weight alone has to apply `softcap` to the products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.emb_dim, config.vocab_size, bias=False)
        self.softcap = config.logit_softcap

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()
