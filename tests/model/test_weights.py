"""Weights in checkpoints: which files a model loads and which it refuses. A check of the file's header alone refuses
the same files as loading, with the same messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt import GPTModel
from harness.common.errors import UserError
from harness.model.tensor_names import check_weights_file
from harness.model.weights import load_weights, save_weights
from tests.model.test_model import random_model, shape

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]
NORM, TWO = "final_norm.scale", ("module.", "_orig_mod.")


def without(*names: str) -> Change:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_one(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors | {name: tensor}


def wrapped(prefix: str) -> Change:
    mask = {"trf_blocks.0.att.mask": torch.ones(24, 24).triu(1)}
    return lambda tensors: {prefix + name: tensor for name, tensor in {**tensors, **mask}.items()}


def cast(dtype: torch.dtype) -> Change:
    return lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()}


def refusals(path: Path, model: GPTModel) -> set[str]:
    """Return the set of error messages from checking the file's header and from loading the file, with "" for a check
    that passes."""
    said = set()
    checks: tuple[Callable[[], object], ...] = (
        lambda: check_weights_file(path, model.config),
        lambda: model.load_checkpoint_tensors(load_weights(path), path),
    )
    for check in checks:
        try:
            check()
            said.add("")
        except UserError as error:
            said.add(str(error))
    return said


@pytest.mark.parametrize(
    ("tied", "change"),
    [
        pytest.param(False, without(), id="as it is"),
        pytest.param(True, without(), id="tied, with both"),
        pytest.param(True, without("out_head.weight"), id="tied, without the head"),
        pytest.param(True, without("tok_emb.weight"), id="tied, without the embedding"),
        pytest.param(False, wrapped(""), id="with masks"),
        *(pytest.param(False, wrapped(prefix), id=prefix) for prefix in (*TWO, "".join(TWO), "".join(TWO[::-1]))),
        pytest.param(False, cast(torch.bfloat16), id="bf16"),
        pytest.param(False, cast(torch.float64), id="fp64"),
    ],
)
def test_files_that_are_taken(tied: bool, change: Change, tmp_path: Path) -> None:
    model = random_model(shape(tie_weights=tied))
    tensors, path = model.to_checkpoint_names(), tmp_path / "w.safetensors"
    save_file(change(tensors), path)
    other = GPTModel(model.config)
    assert refusals(path, other) == {""}
    found = other.to_checkpoint_names()
    dtype = torch.bfloat16 if change(tensors)[next(iter(change(tensors)))].dtype == torch.bfloat16 else torch.float32
    assert all(torch.equal(found[name], tensor.to(dtype).float()) for name, tensor in tensors.items())
    assert (other.out_head.weight is other.tok_emb.weight) == tied


@pytest.mark.parametrize(
    ("tied", "change", "says"),
    [
        (False, without(NORM), f"tensor {NORM} [48] is missing"),
        (True, without("trf_blocks.1.att.W_key.weight"), "tensor trf_blocks.1.att.W_key.weight [48, 48] is missing"),
        (False, without("out_head.weight"), "tensor out_head.weight [97, 48] is missing"),
        (False, without("tok_emb.weight"), "tensor tok_emb.weight [97, 48] is missing"),
        (True, without("out_head.weight", "tok_emb.weight"), "tensor tok_emb.weight [97, 48] is missing"),
        (False, with_one(NORM, torch.zeros(17)), f"tensor {NORM} is [17] in the file, [48] in the model"),
        (True, with_one("pos_emb.weight", torch.ones(25, 48)), "is [25, 48] in the file, [24, 48] in the model"),
        *(
            (
                False,
                with_one(NORM, torch.zeros(48).to(dtype)),
                f"is {str(dtype)[6:]}; weights are fp64, fp32, fp16 or bf16",
            )
            for dtype in (torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)
        ),
        (False, with_one("more", torch.zeros(1)), "tensor more is not in the model"),
        (False, with_one("trf_blocks.3.norm1.scale", torch.ones(48)), "tensor trf_blocks.3.norm1.scale is not in"),
        (False, with_one("trf_blocks.0.att.W_query.bias", torch.ones(48)), "W_query.bias is not in the model"),
        (False, with_one("_orig_mod.tok_emb.weight", torch.ones(97, 48)), "_orig_mod.tok_emb.weight is not in"),
        (
            False,
            lambda _: random_model(shape(emb_dim=64)).to_checkpoint_names(),
            "[24, 48] in the model; tensor trf_blocks.0.norm1.scale is [64] in the file, [48] in the model and 41 more",
        ),
    ],
)
def test_another_models_files_are_refused_alike_by_header_and_by_loading(
    tied: bool, change: Change, says: str, tmp_path: Path
) -> None:
    model, path = random_model(shape(tie_weights=tied)), tmp_path / "w.safetensors"
    before = model.to_checkpoint_names()
    save_file(change({name: tensor + 1 for name, tensor in before.items()}), path)
    (message,) = refusals(path, model)
    assert message.startswith(f"{path}: not the model's weights: ")
    assert says in message
    assert "\n" not in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.to_checkpoint_names().items())


def test_an_untied_file_is_refused_by_a_tied_model() -> None:
    model = random_model(shape(tie_weights=True))
    with pytest.raises(UserError, match=r"^a/b: not the model's weights: .* out_head and tok_emb differ"):
        model.load_checkpoint_tensors(random_model(shape()).to_checkpoint_names(), Path("a/b"))


@pytest.mark.parametrize("damage", ["none", "empty", "text", "short header", "cut off", "folder"])
def test_a_file_that_is_none(damage: str, tmp_path: Path) -> None:
    model, path = random_model(shape()), tmp_path / "w.safetensors"
    if damage == "cut off":
        save_file(model.to_checkpoint_names(), path)
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "folder":
        path.mkdir()
    elif damage != "none":
        path.write_bytes({"empty": b"", "text": b"x" * 100, "short header": b"\x05\0\0\0\0\0\0\0{}"}[damage])
    (message,) = refusals(path, model)
    assert message.startswith(
        f"{path}: " + ("no such file" if damage in ("none", "folder") else "not a readable safetensors file")
    )


def test_checkpoint_tensors_share_no_memory() -> None:
    model = random_model(shape(tie_weights=True))
    tensors = model.to_checkpoint_names()
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(storages) == len(tensors)
    assert storages.isdisjoint(parameter.untyped_storage().data_ptr() for parameter in model.parameters())
    for tensor in tensors.values():
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        assert not tensor.requires_grad


def test_weights_are_saved_on_a_file_system_without_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no permissions here")

    monkeypatch.setattr(Path, "chmod", refuse)
    tensors = {"a": torch.arange(3.0)}
    save_weights(tensors, tmp_path / "w.safetensors")
    assert torch.equal(load_file(tmp_path / "w.safetensors")["a"], tensors["a"])
