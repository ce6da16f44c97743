"""Tensors taken out of a tree, sent as bytes, and put back."""

from __future__ import annotations

from typing import Any

import torch

from harness.distributed.tensor_codec import TensorSlot, as_bytes, fill_slots, take_out_tensors

TREE: dict[Any, Any] = {
    "step": torch.tensor(3.0),
    "groups": [{"params": (0, 1), "lr": 0.1}, {"params": (), "lr": None}],
    "state": {0: {"mean": torch.arange(6).reshape(2, 3).T}, 1: {"mean": torch.ones(0, 4, dtype=torch.bfloat16)}},
    "mask": (torch.tensor([True, False]), "text", b"bytes"),
}


def test_what_is_left_has_a_slot_for_each_tensor_in_order() -> None:
    outline, tensors = take_out_tensors(TREE)
    assert outline == {
        "step": TensorSlot(0, (), torch.float32),
        "groups": TREE["groups"],
        "state": {
            0: {"mean": TensorSlot(1, (3, 2), torch.int64)},
            1: {"mean": TensorSlot(2, (0, 4), torch.bfloat16)},
        },
        "mask": (TensorSlot(3, (2,), torch.bool), "text", b"bytes"),
    }
    assert [tensor.shape for tensor in tensors] == [(), (3, 2), (0, 4), (2,)]


def test_bytes_are_enough_for_an_equal_tree() -> None:
    outline, tensors = take_out_tensors(TREE)
    sent = [bytes(as_bytes(tensor).tolist()) for tensor in tensors]

    def receive(slot: TensorSlot) -> torch.Tensor:
        tensor = slot.empty()
        as_bytes(tensor).copy_(torch.tensor(list(sent[slot.index]), dtype=torch.uint8))
        return tensor

    found = fill_slots(outline, receive)
    assert found["groups"] == TREE["groups"]
    assert found["mask"][1:] == TREE["mask"][1:]
    for index, slot_path in enumerate((found["step"], found["state"][0]["mean"], found["state"][1]["mean"])):
        torch.testing.assert_close(slot_path, tensors[index], rtol=0, atol=0)
    torch.testing.assert_close(found["mask"][0], TREE["mask"][0])


def test_a_tree_without_tensors_is_itself() -> None:
    assert take_out_tensors({"a": [1, (2, None)]}) == ({"a": [1, (2, None)]}, [])
