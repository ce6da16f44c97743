"""Checksums of weights, and the message about ranks whose weights differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkpointing import PIECE, describe_divergence, weight_checksums


def test_one_bit_changes_the_checksum_of_its_tensor_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, PIECE // 2), nn.LayerNorm(7))  # a tensor of more than one piece
    before = weight_checksums(model)
    assert before == weight_checksums(model)
    for index, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.view(-1).view(torch.int32)[-1] ^= 1
        after = weight_checksums(model)
        assert [at for at in range(4) if after[at] != before[at]] == [index]
        before = after


def test_the_sum_is_that_of_the_bit_patterns() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
    # In IEEE 754, 1.0 is 0x3F800000, and -2.0 is 0xC0000000, which is negative as a signed integer.
    assert weight_checksums(model) == [0x3F800000 + 0xC0000000 - 2**32]


def test_equal_weights_are_no_difference() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.fill_(float("nan"))  # compares by its bits
    assert describe_divergence([weight_checksums(model)] * 8, model) is None
    assert describe_divergence([[]], model) is None


@pytest.mark.parametrize(
    ("checksums", "words"),
    [
        ([[1, 2], [1, 3]], "rank 0 and rank 1 differ, first in bias; there is no majority to say which are right"),
        ([[1, 2], [1, 2], [0, 0]], "rank 2 differ from those of the other 2 ranks, first in weight"),
        ([[9, 2], [1, 2], [1, 2], [1, 2]], "rank 0 differ from those of the other 3 ranks, first in weight"),
        ([[1, 2], [1, 3], [1, 2], [1, 3]], "the weights of ranks 0, 2 and ranks 1, 3 differ, first in bias"),
        ([[1, 2], [1, 4], [1, 2], [1, 5], [1, 2]], "ranks 1, 3 differ from those of the other 3 ranks, first in bias"),
    ],
)
def test_who_differs(checksums: list[list[int]], words: str) -> None:
    assert words in str(describe_divergence(checksums, nn.Linear(2, 1)))
