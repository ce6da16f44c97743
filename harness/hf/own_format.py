"""A model as a folder that transformers loads by the code in it: for those that no native class computes.

Beside the weights and the configuration lie gpt.py, the cache that it generates with, and a class of transformers
around them (harness/hf/modeling_ddp_pretrain.py). None imports anything of this project from outside the folder.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

from torch import Tensor

import gpt
from harness.common.files import replace_text
from harness.model import inference
from harness.model.config import ModelConfig

MODEL_TYPE = "ddp_pretrain"
WRAPPER = Path(__file__).with_name("modeling_ddp_pretrain.py")
CLASSES = {"AutoConfig": "DdpPretrainConfig", "AutoModelForCausalLM": "DdpPretrainForCausalLM"}
# Definitions of gpt.py for training and for our own files: the folder has neither the loss nor those.
LEFT_OUT = {"GPTModel": {"forward", "to_checkpoint_names", "load_checkpoint_tensors"}, "": {"load_model"}}
DERIVED = ("head_width", "query_width", "kv_width", "mlp_width")


def to_config(shape: ModelConfig, eot_token: int, dtype: str) -> dict[str, Any]:
    """config.json for a model of this shape. Sizes stand in it twice: for gpt.py, and under the names that programs
    built on transformers look for."""
    settings = shape.model_dump(mode="json") | {name: getattr(shape, name) for name in DERIVED}
    settings["drop_rates"] = shape.drop_rates.model_dump()
    settings["value_embedding_of_layers"] = [shape.value_embedding_of(layer) for layer in range(shape.n_layers)]
    return {
        "architectures": [CLASSES["AutoModelForCausalLM"]],
        "auto_map": {automatic: f"{WRAPPER.stem}.{own}" for automatic, own in CLASSES.items()},
        "model_type": MODEL_TYPE,
        "shape": settings,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "hidden_size": shape.emb_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "use_cache": True,
        "tie_word_embeddings": shape.tie_weights,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "dtype": dtype,
    }


def to_tensors(state: dict[str, Tensor], shape: ModelConfig) -> dict[str, Tensor]:
    """The model's own state under the wrapper's names. A tied head is left out."""
    names = [name for name in state if not (shape.tie_weights and name == "out_head.weight")]
    return {f"model.{name}": state[name].detach().to("cpu", copy=True) for name in names}


def write_code(folder: Path) -> None:
    """Write the three files of code into an exported folder."""
    for path, source in (
        (Path("gpt.py"), _without_training(inspect.getsource(gpt))),
        (Path("inference.py"), inspect.getsource(inference)),
        (WRAPPER, WRAPPER.read_text()),
    ):
        relative = source.replace("from harness.model.inference", "from .inference").replace("from gpt ", "from .gpt ")
        replace_text(folder / path.name, relative)


def _without_training(source: str) -> str:
    """gpt.py without LEFT_OUT and without the imports that only these need."""
    tree = ast.parse(source)
    bodies = {"": tree.body} | {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    unwanted: set[int] = set()
    for owner, names in LEFT_OUT.items():
        for node in bodies[owner]:
            left_out = isinstance(node, ast.FunctionDef) and node.name in names
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("harness."):
                left_out = node.module != inference.__name__
            if left_out:
                unwanted |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = source.splitlines(keepends=True)
    return "".join(line for number, line in enumerate(lines, 1) if number not in unwanted)
