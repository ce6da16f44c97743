"""Evaluation of a model: its mode, and the cache of attention's keys and values by which it continues a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FIRST_PLACES = 64
NO_TOKEN = -1  # before a sequence's first


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and gradients; the model's mode is put back afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


class LayerCache:
    """One attention layer's keys and values, BxHxSxD each."""

    def __init__(self, owner: KeyValueCache) -> None:
        self._owner = owner
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extend(self, k_BxHxTxD: Tensor, v_BxHxTxD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put in the keys and values of the call's tokens. All there are now, and which of them each token may see
        (Bx1xTxS, true: visible)."""
        places_BxT, count = self._owner.places, self._owner.count
        self.keys = _with_room(self.keys, k_BxHxTxD, count)
        self.values = _with_room(self.values, v_BxHxTxD, count)
        index = places_BxT[:, None, :, None].expand_as(k_BxHxTxD)
        self.keys.scatter_(2, index, k_BxHxTxD)
        self.values.scatter_(2, index, v_BxHxTxD)
        return self.keys[:, :, :count], self.values[:, :, :count], self._owner.visible


class KeyValueCache:
    """The layers' caches, and how far each row has come.

    Rows may have unequal lengths: a call's tokens are padded on the right. What padding leaves behind lies at places
    that no token sees before the row's own next tokens have taken them.
    """

    def __init__(self, layers: int) -> None:
        self.layers = [LayerCache(self) for _ in range(layers)]
        self.lengths: list[int] = []  # tokens that each row holds
        self.count = 0  # places that the longest row needs
        self.previous: Tensor  # the predecessor of each of the call's tokens (BxT)
        self._last_Bx1: Tensor | None = None  # each row's last token, NO_TOKEN for an empty one

    def take(self, tokens_BxT: Tensor, lengths: list[int] | None) -> Tensor:
        """Announce a call's tokens, of which row b has `lengths[b]` (None: all). Returns their positions (BxT)."""
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
        """Go on with these rows alone."""
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
    """A tensor like `held` with at least `count` places; they double, so that growing costs little."""
    if held is not None and held.shape[2] >= count:
        return held
    batch, heads, _, size = new_BxHxTxD.shape
    places = max(FIRST_PLACES, count, 0 if held is None else 2 * held.shape[2])
    larger = new_BxHxTxD.new_zeros(batch, heads, places, size)
    if held is not None:
        larger[:, :, : held.shape[2]] = held
    return larger
