"""The feed-forward layer of a block."""

from __future__ import annotations

from torch import Tensor, nn

from harness.model.config import ModelConfig


class SquaredReLU(nn.Module):
    """max(x, 0)² (So et al., Primer, arXiv:2109.08668)."""

    def forward(self, x_BxTxF: Tensor) -> Tensor:
        return x_BxTxF.relu().square()


def _activation(name: str) -> nn.Module:
    if name == "gelu":
        return nn.GELU(approximate="tanh")  # GPT-2's
    return SquaredReLU() if name == "relu2" else nn.SiLU()


class FeedForward(nn.Module):
    """Two linear layers around an activation; in SwiGLU (Shazeer, arXiv:2002.05202) that of a gate, which multiplies
    what the first layer gives."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, hidden, bias = config.emb_dim, config.mlp_width, config.linear_bias
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden, bias=bias), _activation(config.mlp), nn.Linear(hidden, dim, bias=bias)
        )
        self.gate = nn.Linear(dim, hidden, bias=bias) if config.mlp == "swiglu" else None

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        if self.gate is None:
            return self.layers(x_BxTxC)
        first, activation, second = self.layers
        return second(activation(self.gate(x_BxTxC)) * first(x_BxTxC))
