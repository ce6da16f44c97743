"""Evaluation mode of a model, and the cache of attention's keys and values for generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FIRST_PLACES = 64  # a new cache has room for at least this number of positions
NO_TOKEN = -1  # stands for the predecessor of a sequence's first token


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and turn gradients off. On exit, restore both."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class KeyValueCache:
    """Keys and values of all attention layers, and the number of tokens in each row. Rows may have unequal lengths: new
    tokens can be padded on the right. No real token attends to padding."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, each (B, H, room, D)
        self.lengths: list[int] = []  # number of tokens in each row, without padding
        self.count = 0  # number of positions in use in `layers`, padding included
        self.previous: Tensor  # the token before each token of the last `take` (B, T), NO_TOKEN before the first
        self._last_Bx1: Tensor | None = None  # the last token of each row, NO_TOKEN for an empty row

    def take(self, tokens_BxT: Tensor, lengths: list[int] | None) -> Tensor:
        """Prepare the cache for new tokens, and return their positions (B, T). Row b has `lengths[b]` new tokens, then
        padding. If `lengths` is None, no row has padding. Must be called before the layers call `extend`."""
        if lengths is None:
            lengths = [tokens_BxT.shape[1]] * len(tokens_BxT)
        before = self.lengths or [0] * len(lengths)
        device, width = tokens_BxT.device, tokens_BxT.shape[1]
        self.count = max(before) + width
        self.places = torch.tensor(before, device=device)[:, None] + torch.arange(width, device=device)
        self.visible = (torch.arange(self.count, device=device) <= self.places[:, :, None])[:, None]
        self.lengths = [old + new for old, new in zip(before, lengths, strict=True)]
        last = self._last_Bx1 if self._last_Bx1 is not None else torch.full_like(tokens_BxT[:, :1], NO_TOKEN)
        joined = torch.cat((last, tokens_BxT), dim=1)
        self.previous = joined[:, :-1]
        self._last_Bx1 = joined.gather(1, torch.tensor(lengths, device=device)[:, None])
        return self.places

    def extend(self, layer: int, k_BxHxTxD: Tensor, v_BxHxTxD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store a layer's keys and values of the tokens of the last `take`.

        Returns the layer's keys and values of all S positions so far, each (B, H, S, D), and a mask. The mask,
        (B, 1, T, S), is true where a new token may attend.
        """
        held = self.layers.get(layer)
        room = held[0].shape[2] if held else 0
        if held is None or room < self.count:
            batch, heads, _, size = k_BxHxTxD.shape
            places = max(FIRST_PLACES, self.count, 2 * room)  # at least twice as many, so that copying is rare
            larger = k_BxHxTxD.new_zeros(2, batch, heads, places, size)
            if held is not None:
                larger[:, :, :, :room] = torch.stack(held)
            held = self.layers[layer] = larger[0], larger[1]
        index = self.places[:, None, :, None].expand_as(k_BxHxTxD)
        keys, values = (each.scatter_(2, index, new) for each, new in zip(held, (k_BxHxTxD, v_BxHxTxD), strict=True))
        return keys[:, :, : self.count], values[:, :, : self.count], self.visible

    def keep(self, rows: list[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        if self._last_Bx1 is None:
            return
        index = torch.tensor(rows, device=self._last_Bx1.device)
        self.lengths = [self.lengths[row] for row in rows]
        self._last_Bx1 = self._last_Bx1[index]
        self.layers = {layer: (keys[index], values[index]) for layer, (keys, values) in self.layers.items()}
