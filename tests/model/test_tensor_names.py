"""Names and shapes of tensors known without torch are the model's; a file's header tells what loading does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gpt import GPTModel, ModelConfig
from harness.common.errors import UserError
from harness.model.tensor_names import check_weights_file
from harness.model.weights import load_weights
from tests.support.launch import MODEL

SHAPES: list[dict[str, Any]] = [{}, {"qkv_bias": False}, {"tie_weights": True}, {"n_layers": 3, "vocab_size": 7}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_names_and_shapes_are_a_models(shape: dict[str, Any]) -> None:
    config = ModelConfig(**MODEL | shape)
    saved = GPTModel(config).to_checkpoint_names()
    assert list(config.tensor_shapes().items()) == [(name, tuple(tensor.shape)) for name, tensor in saved.items()]


def told(path: Path, config: ModelConfig) -> tuple[str, str]:
    """The refusals of the header alone, and of loading; empty where there is none."""
    said = []
    for check in (
        lambda: check_weights_file(path, config),
        lambda: GPTModel(config).load_checkpoint_tensors(load_weights(path), path),
    ):
        try:
            check()
            said.append("")
        except UserError as error:
            said.append(str(error))
    return said[0], said[1]


def test_a_header_is_refused_as_loading_refuses_the_file(tmp_path: Path) -> None:
    config, path = ModelConfig(**MODEL), tmp_path / "w.safetensors"
    weights = GPTModel(config).to_checkpoint_names()
    one, whole = "final_norm.scale", {name: tensor.clone() for name, tensor in weights.items()}
    cases = {
        "": whole,
        "is missing": {name: tensor for name, tensor in whole.items() if name != one},
        "in the file, [16] in model.json": whole | {one: torch.zeros(17)},
        "is int64; weights are fp32": whole | {one: torch.zeros(16, dtype=torch.int64)},
        "is uint8; weights are fp32": whole | {one: torch.zeros(16, dtype=torch.uint8)},
        "is bool; weights are fp32": whole | {one: torch.zeros(16, dtype=torch.bool)},
        "is float8_e5m2; weights are fp32": whole | {one: torch.zeros(16).to(torch.float8_e5m2)},
        "tensor more is not in model.json's shape": whole | {"more": torch.zeros(1)},
    }
    for words, tensors in cases.items():
        save_file(tensors, path)
        by_header, by_loading = told(path, config)
        assert by_header == by_loading
        assert words in by_header if words else not by_header
    for accepted in (
        {f"module._orig_mod.{name}": tensor for name, tensor in whole.items()},
        whole | {"trf_blocks.0.att.mask": torch.zeros(16, 16)},
        {name: tensor.bfloat16() for name, tensor in whole.items()},
        {name: tensor.double() for name, tensor in whole.items()},
    ):
        save_file(accepted, path)
        assert told(path, config) == ("", "")


def test_a_tied_model_takes_either_half(tmp_path: Path) -> None:
    config, path = ModelConfig(**MODEL | {"tie_weights": True}), tmp_path / "w.safetensors"
    weights = GPTModel(config).to_checkpoint_names()
    for half in ("tok_emb.weight", "out_head.weight"):
        save_file({name: tensor.clone() for name, tensor in weights.items() if name != half}, path)
        assert told(path, config) == ("", "")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    config, path = ModelConfig(**MODEL), tmp_path / "w.safetensors"
    assert told(path, config) == (f"{path}: no such file",) * 2
    for content in (b"", b"x" * 100, b"\x05\0\0\0\0\0\0\0{}"):
        path.write_bytes(content)
        by_header, by_loading = told(path, config)
        assert by_header == by_loading
        assert "not a readable safetensors file" in by_header
    save_file(GPTModel(config).to_checkpoint_names(), path)
    path.write_bytes(path.read_bytes()[:-1])
    by_header, by_loading = told(path, config)
    assert by_header == by_loading
    assert "not a readable safetensors file" in by_header
    path.unlink()
    path.mkdir()
    by_header, by_loading = told(path, config)
    assert by_header == by_loading != ""
