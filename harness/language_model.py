"""What the harness asks of a model that it evaluates or samples from; gpt.GPTModel is one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harness.kv_cache import KeyValueCache


class LanguageModel(Protocol):
    """A model of token sequences. Its methods are called rather than the module itself where sequences have many
    lengths: a compiled module would compile for each."""

    config: Any  # has vocab_size, context_length and n_layers
    out_head: nn.Linear

    def features(self, tokens_BxT: Tensor) -> Tensor: ...
    def further_features(self, tokens_BxT: Tensor, lengths: list[int], cache: KeyValueCache) -> Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...

    training: bool

    def train(self, mode: bool = True) -> Any: ...
    def eval(self) -> Any: ...


@contextmanager
def evaluating(model: LanguageModel | nn.Module) -> Iterator[None]:
    """Without dropout and gradients; the model's mode is put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
