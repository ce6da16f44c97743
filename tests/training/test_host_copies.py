"""HostCopies of tensors to be saved: equal bytes, in memory that is reused, copied from a GPU asynchronously."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.common.errors import RunError
from harness.common.memory import is_out_of_memory
from harness.training.saving import HostCopies
from tests.support.same_end import assert_equal

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def tree() -> dict[str, Any]:
    """Return tensors like a checkpoint's: views of a fused tensor, one tensor twice, scalars, several dtypes."""
    torch.manual_seed(0)
    fused = torch.randn(9, 5)
    return {
        "weights": {"query": fused[:3], "key": fused[3:6], "tied": fused, "again": fused, "half": fused.bfloat16()},
        "optimizer": {"a": {"step": torch.tensor(3.0), "exp_avg": fused.t()}, "b": {"count": torch.tensor([7])}},
    }


@pytest.mark.parametrize("keep", [True, False])
def test_copies_are_equal_and_share_nothing(keep: bool) -> None:
    """Copies equal the tensors in value, dtype and shape. Each has its own storage, so that later changes of a tensor
    do not change its copy."""
    given = tree()
    copied = HostCopies(CPU, keep=keep).copy(given)
    assert_equal(given, copied, "copied")
    for each in tree_leaves(copied):
        assert each.is_contiguous()
        assert each.untyped_storage().nbytes() == each.nbytes, "torch.save writes whole storages"
    assert len({each.untyped_storage().data_ptr() for each in tree_leaves(copied)}) == len(tree_leaves(given))
    # torch.save writes the same bytes for these copies as for copies made by Tensor.to.
    files = [io.BytesIO(), io.BytesIO()]
    plain = {name: each.detach().to("cpu", copy=True) for name, each in given["weights"].items()}
    for file, tensors in zip(files, (copied["weights"], plain), strict=True):
        torch.save(tensors, file)
    assert files[0].getvalue() == files[1].getvalue()
    expected = given["weights"]["tied"].clone()
    given["weights"]["tied"].zero_()
    assert torch.equal(copied["weights"]["tied"], expected)


def test_the_memory_is_reused_and_grows_when_more_is_needed() -> None:
    """Memory is allocated for the optimizer state when it first exists, and each later save reuses the same memory."""
    copies, given = HostCopies(CPU, keep=True), tree()
    copies.copy({"weights": given["weights"], "optimizer": {}})
    addresses = [[each.data_ptr() for each in tree_leaves(copies.copy(given))] for _ in range(3)]
    assert addresses[0] == addresses[1] == addresses[2]


class PretendedEvent:
    """Fake of torch.cuda.Event that appends its calls to `done`."""

    done: list[str]

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "without blocking=True the writer thread spins while it waits"

    def record(self) -> None:
        self.done.append("record")

    def synchronize(self) -> None:
        self.done.append("wait")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch's functions as if tensors were on a GPU, and return the list of their calls in order. Pinned memory
    is ordinary memory here."""
    done: list[str] = []
    empty, copy = torch.empty, Tensor.copy_

    def allocate(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        done.append("pinned" if pin_memory else "pageable")
        return empty(*size, **options)

    def copying(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        done.append("copy" if non_blocking else "copy and wait")
        return copy(self, source)

    PretendedEvent.done = done
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(Tensor, "copy_", copying)
    return done


def test_only_the_reader_waits_for_copies_from_a_gpu(card: list[str]) -> None:
    copies, given = HostCopies(CUDA, keep=True), tree()
    count = len(tree_leaves(given))
    for save in range(2):
        card.clear()
        copied = copies.copy(given)
        assert card == ["pinned"] * (save == 0) + ["copy"] * count
        copies.record()
        copies.wait()
        assert card[-2:] == ["record", "wait"]
        assert all(map(torch.equal, tree_leaves(copied), tree_leaves(given)))


def test_memory_that_cannot_be_pinned_is_reported_and_used_unpinned(
    card: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = torch.empty

    def refuse(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        return usual(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    copies, given = HostCopies(CUDA, keep=True), tree()
    for _ in range(2):
        copied = copies.copy(given)
        copies.record()
        copies.wait()
        assert all(map(torch.equal, tree_leaves(copied), tree_leaves(given)))
    assert card.count("pageable") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: 0.00 GiB of the host's memory cannot be pinned (CUDA error: out of memory)")


def test_memory_that_is_not_there_is_not_blamed_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int, **__: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(RunError, match="of host memory; give the process more memory") as failed:
        HostCopies(CPU, keep=False).copy(tree())
    assert is_out_of_memory(failed.value), "-f takes it for a microbatch that does not fit"
