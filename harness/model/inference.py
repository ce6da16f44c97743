"""Evaluation mode of a model, and the cache of attention's keys and values for generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FIRST_PLACES = 64  # positions for which a new cache has room
NO_TOKEN = -1  # stands for the predecessor of a sequence's first token


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode and turn gradients off. On exit, restore the model's previous mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class LayerCache:
    """Keys and values of one attention layer, (B, H, S, D) each, with room for S positions."""

    def __init__(self, owner: KeyValueCache) -> None:
        self._owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k_BxHxTxD: Tensor, v_BxHxTxD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Store the keys and values of the tokens that were last given to `KeyValueCache.take`.

        Returns the keys and values of all positions so far, S of them, and a mask (B, 1, T, S) that is true where a
        token may attend to a position.
        """
        places_BxT, count = self._owner.places, self._owner.count
        self.keys = _with_room(self.keys, k_BxHxTxD, count)
        self.values = _with_room(self.values, v_BxHxTxD, count)
        index = places_BxT[:, None, :, None].expand_as(k_BxHxTxD)
        self.keys.scatter_(2, index, k_BxHxTxD)
        self.values.scatter_(2, index, v_BxHxTxD)
        return self.keys[:, :, :count], self.values[:, :, :count], self._owner.visible


class KeyValueCache:
    """Caches of all layers, and the number of tokens in each row.

    Rows may have unequal lengths, because the tokens of a call can be padded on the right. Keys and values of padding
    are stored, too, but no token attends to their positions until the row's next tokens have overwritten them.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache(self) for _ in range(layers)]
        self.lengths: list[int] = []  # number of tokens in each row
        self.count = 0  # positions in use, padding included
        self.previous: Tensor  # the predecessor of each token of the last `take` (B, T)
        self._last_Bx1: Tensor | None = None  # the last token of each row, NO_TOKEN for an empty row

    def take(self, tokens_BxT: Tensor, lengths: list[int] | None) -> Tensor:
        """Prepare for new tokens, `lengths[b]` in row b and the rest padding (None: no padding). To be called before
        the layers' `extend`. Returns the tokens' positions (B, T)."""
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

    def keep(self, rows: list[int]) -> None:
        """Keep only the rows with these indices, in this order."""
        if not self.lengths:
            return
        self.lengths = [self.lengths[row] for row in rows]
        assert self._last_Bx1 is not None
        self._last_Bx1 = self._last_Bx1[torch.tensor(rows, device=self._last_Bx1.device)]
        for layer in self.layers:
            assert layer.keys is not None
            assert layer.values is not None
            index = torch.tensor(rows, device=layer.keys.device)
            layer.keys, layer.values = layer.keys[index], layer.values[index]


def _with_room(held: Tensor | None, new_BxHxTxD: Tensor, count: int) -> Tensor:
    """Return `held`, or a larger copy if it has fewer than `count` positions. The copy has at least twice as many
    positions, so that copying is rare."""
    if held is not None and held.shape[2] >= count:
        return held
    batch, heads, _, size = new_BxHxTxD.shape
    places = max(FIRST_PLACES, count, 0 if held is None else 2 * held.shape[2])
    larger = new_BxHxTxD.new_zeros(batch, heads, places, size)
    if held is not None:
        larger[:, :, : held.shape[2]] = held
    return larger
