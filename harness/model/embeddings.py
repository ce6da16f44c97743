"""Additions to the token embedding that help small models: value embeddings, a skip from the embedding to each block,
and an embedding of the last two tokens. All three are those of the records of
https://github.com/KellerJordan/modded-nanogpt (train_gpt.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.model.config import ModelConfig
from harness.model.norms import rms_normalised

# As modded-nanogpt's: large, and odd.
TOKEN_FACTOR, PREVIOUS_FACTOR = 36_313, 27_191
NO_TOKEN = -1  # before a sequence's first


class Mix(nn.Module):
    """scale[0]·a + scale[1]·b with learned factors, in the dtype of a."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([first, second]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.scale[0] * a + self.scale[1] * b).to(a.dtype)


def value_mix(config: ModelConfig, layer: int) -> Mix | None:
    """Mix of the values in block `layer` with an embedding of their tokens, half and half to begin with; None without
    one. Inspired by the value residuals of Zhou et al. (arXiv:2410.17897)."""
    return None if config.value_embedding_of(layer) is None else Mix(0.5, 0.5)


def skip_mix(config: ModelConfig) -> Mix | None:
    """Each block's input is mixed with the first block's: not at all to begin with."""
    return Mix(1.0, 0.0) if config.embedding_skip else None


def value_tables(config: ModelConfig) -> nn.ModuleList | None:
    """An embedding as wide as the values for each of the first `value_embeddings` blocks, which the last so many blocks
    share in the same order."""
    if config.value_embeddings is None:
        return None
    return nn.ModuleList(nn.Embedding(config.vocab_size, config.kv_width) for _ in range(config.value_embeddings))


def skip_source(x_BxTxC: Tensor) -> Tensor:
    """The embedding, of root mean square 1, with which the first block begins and which the skips bring to each."""
    return rms_normalised(x_BxTxC).to(x_BxTxC.dtype)


def bigram_buckets(tokens_BxT: Tensor, previous_BxT: Tensor, buckets: int) -> Tensor:
    """The bucket of each token and the one before it: xor of their multiples, modulo all buckets but the last, which is
    for tokens without a predecessor (NO_TOKEN)."""
    mixed = torch.bitwise_xor(TOKEN_FACTOR * tokens_BxT.long(), PREVIOUS_FACTOR * previous_BxT.long()) % (buckets - 1)
    return torch.where(previous_BxT == NO_TOKEN, buckets - 1, mixed)


def shifted(tokens_BxT: Tensor) -> Tensor:
    """Each token's predecessor in its sequence."""
    return torch.cat((torch.full_like(tokens_BxT[:, :1], NO_TOKEN), tokens_BxT[:, :-1]), dim=1)
