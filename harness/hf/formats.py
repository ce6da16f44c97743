"""Weights and configuration of a model in the formats of transformers, which need not be installed, and in the lab
notebook's format.

Native classes of transformers are GPT-2 (GPT2Config, GPT2LMHeadModel), Llama (LlamaConfig, LlamaForCausalLM) and Qwen 3
(Qwen3Config, Qwen3ForCausalLM); harness/model/export_formats.py decides which of them computes a model. Any other model
is exported with its own code. The files for transformers do not contain a tied head.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gpt
from gpt import EPSILON, INIT_STD, GPTModel
from harness.common.files import replace_text
from harness.model import inference
from harness.model.config import ModelConfig
from harness.model.tensor_names import EMBEDDING, HEAD

PEER_HEAD = "lm_head.weight"


def common_config(shape: ModelConfig, eot_token: int, dtype: str) -> dict[str, Any]:
    """Return the keys of config.json that are the same for all classes of transformers."""
    return {
        "vocab_size": shape.vocab_size,
        "use_cache": True,
        "tie_word_embeddings": shape.tie_weights,
        "bos_token_id": eot_token,
        "eos_token_id": eot_token,
        "dtype": dtype,
    }


# GPT-2. The weights of its Conv1D layers are (in, out), ours are (out, in). Its c_attn fuses query, key and value as
# our qkv does. All its linear layers have biases.

GPT2_PREFIX = "transformer."
GPT2_OUTER = {
    "wte.weight": EMBEDDING,
    "wpe.weight": "pos_emb.weight",
    "ln_f.weight": "final_norm.scale",
    "ln_f.bias": "final_norm.shift",
}
GPT2_NORMS = {"weight": "scale", "bias": "shift"}
GPT2_PRODUCTS = {
    "attn.c_attn": "att.qkv",
    "attn.c_proj": "att.out_proj",
    "mlp.c_fc": "ff.layers.0",
    "mlp.c_proj": "ff.layers.2",
}


def gpt2_config(shape: ModelConfig) -> dict[str, Any]:
    """Return the keys of GPT-2's config.json besides those of `common_config`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": shape.context_length,
        "n_embd": shape.emb_dim,
        "n_layer": shape.n_layers,
        "n_head": shape.n_heads,
        "n_inner": None if shape.mlp_width == 4 * shape.emb_dim else shape.mlp_width,
        "activation_function": {"gelu": "gelu_new", "relu2": "relu2"}[shape.mlp],
        "layer_norm_epsilon": EPSILON,
        "resid_pdrop": shape.drop_rates.attention_output,  # in GPT-2 also for the output of the feed-forward layer
        "embd_pdrop": shape.drop_rates.embedding,
        "attn_pdrop": shape.drop_rates.attention_weights,
        "initializer_range": INIT_STD,
        "scale_attn_weights": True,
    }


def gpt2_names(shape: ModelConfig) -> dict[str, str]:
    """Return a dict from the name of each tensor of a GPT-2 to our name of the tensor. Our model may lack some of the
    biases."""
    names = {GPT2_PREFIX + name: own for name, own in GPT2_OUTER.items()}
    if not shape.tie_weights:
        names[PEER_HEAD] = HEAD
    for layer in range(shape.n_layers):
        block, there = f"trf_blocks.{layer}", f"{GPT2_PREFIX}h.{layer}"
        for part, own_part in GPT2_NORMS.items():
            names |= {f"{there}.ln_{number}.{part}": f"{block}.norm{number}.{own_part}" for number in (1, 2)}
        for name, own in GPT2_PRODUCTS.items():
            names |= {f"{there}.{name}.{part}": f"{block}.{own}.{part}" for part in ("weight", "bias")}
    return names


def is_transposed(gpt2_name: str) -> bool:
    """Return True for a weight of a Conv1D layer, which is the transpose of ours."""
    return gpt2_name.removesuffix(".weight").endswith(tuple(GPT2_PRODUCTS))


def gpt2_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return the model's tensors under GPT-2's names, some of them as views. Biases that the model lacks are zeros."""
    state, theirs = model.state_dict(), {}
    for name, own in gpt2_names(model.config).items():
        if own not in state:
            theirs[name] = torch.zeros(len(state[own.removesuffix("bias") + "weight"]))
        else:
            theirs[name] = state[own].T if is_transposed(name) else state[own]
    return theirs


# Llama and Qwen 3. Only Qwen 3 normalizes the queries and keys of each head.

LLAMA_LINEAR = {
    "att.W_query": "self_attn.q_proj",
    "att.W_key": "self_attn.k_proj",
    "att.W_value": "self_attn.v_proj",
    "att.out_proj": "self_attn.o_proj",
    "ff.gate": "mlp.gate_proj",
    "ff.layers.0": "mlp.up_proj",
    "ff.layers.2": "mlp.down_proj",
}
LLAMA_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
QWEN3_NORMS = {"att.q_norm": "self_attn.q_norm", "att.k_norm": "self_attn.k_norm"}


def llama_config(shape: ModelConfig) -> dict[str, Any]:
    """Return the keys of Llama's or Qwen 3's config.json besides those of `common_config`. Its `attention_bias` adds
    biases to all four projections; `llama_tensors` fills in zeros for those that our model lacks."""
    config = {
        "architectures": ["Qwen3ForCausalLM" if shape.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "max_position_embeddings": shape.context_length,
        "hidden_size": shape.emb_dim,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads or shape.n_heads,
        "head_dim": shape.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": EPSILON,
        "rope_theta": shape.rope_base,  # transformers before version 5
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
        "attention_bias": shape.linear_bias,
        "attention_dropout": shape.drop_rates.attention_weights,
        "initializer_range": INIT_STD,
    }
    return config | ({"use_sliding_window": False} if shape.qk_norm else {"mlp_bias": shape.linear_bias})


def llama_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return the model's tensors under the names of Llama and Qwen 3. Gains that the model lacks are ones, and biases
    that it lacks are zeros."""
    ours, shape = model.to_checkpoint_names(), model.config
    ones = torch.ones(shape.emb_dim)
    theirs = {"model.embed_tokens.weight": ours[EMBEDDING], "model.norm.weight": ours.get("final_norm.scale", ones)}
    if not shape.tie_weights:
        theirs[PEER_HEAD] = ours[HEAD]
    for layer in range(shape.n_layers):
        block, there = f"trf_blocks.{layer}", f"model.layers.{layer}"
        for own, name in LLAMA_LINEAR.items():
            weight = theirs[f"{there}.{name}.weight"] = ours[f"{block}.{own}.weight"]
            if shape.linear_bias:
                theirs[f"{there}.{name}.bias"] = ours.get(f"{block}.{own}.bias", torch.zeros(len(weight)))
        for own, name in LLAMA_NORMS.items():
            theirs[f"{there}.{name}.weight"] = ours.get(f"{block}.{own}.scale", ones)
        for own, name in QWEN3_NORMS.items() if shape.qk_norm else ():
            theirs[f"{there}.{name}.weight"] = ours.get(f"{block}.{own}.scale", torch.ones(shape.head_width))
    return theirs


# Any other model is exported with its code: gpt.py, inference.py with the key-value cache, and a class of transformers
# around the model. These files import nothing of this project from outside the folder.

OWN_TYPE = "ddp_pretrain"
WRAPPER = Path(__file__).with_name("modeling_ddp_pretrain.py")
CLASSES = {"AutoConfig": "DdpPretrainConfig", "AutoModelForCausalLM": "DdpPretrainForCausalLM"}
# Definitions of gpt.py, by class ("" for the module), that are not exported. They are for training or for our own
# files, and use modules that the folder does not have.
LEFT_OUT = {"GPTModel": {"forward", "to_checkpoint_names", "load_checkpoint_tensors"}, "": {"load_model"}}
DERIVED = ("head_width", "query_width", "kv_width", "mlp_width")


def own_config(shape: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json besides those of `common_config`, for a model that is exported with its own code.
    Sizes are there twice: in "shape" for gpt.py, and under the names that programs built on transformers look for."""
    settings = shape.model_dump(mode="json") | {name: getattr(shape, name) for name in DERIVED}
    settings["drop_rates"] = shape.drop_rates.model_dump()
    settings["value_embedding_of_layers"] = [shape.value_embedding_of(layer) for layer in range(shape.n_layers)]
    return {
        "architectures": [CLASSES["AutoModelForCausalLM"]],
        "auto_map": {automatic: f"{WRAPPER.stem}.{own}" for automatic, own in CLASSES.items()},
        "model_type": OWN_TYPE,
        "shape": settings,
        "max_position_embeddings": shape.context_length,
        "hidden_size": shape.emb_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
    }


def own_tensors(model: GPTModel) -> dict[str, Tensor]:
    """Return the model's state dict under the names of the wrapper's parameters, without a tied head."""
    state = model.state_dict()
    return {f"model.{name}": state[name] for name in state if not (model.config.tie_weights and name == HEAD)}


def write_code(folder: Path) -> None:
    """Write gpt.py (without what only training needs), inference.py and modeling_ddp_pretrain.py into an exported
    folder."""
    for path, source in (
        (Path("gpt.py"), _without_training(inspect.getsource(gpt))),
        (Path("inference.py"), inspect.getsource(inference)),
        (WRAPPER, WRAPPER.read_text()),
    ):
        relative = source.replace("from harness.model.inference", "from .inference").replace("from gpt ", "from .gpt ")
        replace_text(folder / path.name, relative)


def _without_training(source: str) -> str:
    """Return the source of gpt.py without the definitions in LEFT_OUT and without the imports that only they need."""
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


# The lab notebook's program. Its published models were saved inside a wrapper, hence the prefix of their tensor names.

NOTEBOOK_TYPE, NOTEBOOK_PREFIX = "gpjtgpt2", "model."
NOTEBOOK_KEYS = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias")


def notebook_model_json(shape: ModelConfig) -> dict[str, Any]:
    """Return the notebook's model.json for a model of this shape.

    It never has the key "tie_weights". For a tied model, the program's `load_state_dict` requires the head in the file,
    but safetensors' `load_model`, which later versions of the program use, refuses a file with both matrices. Without
    the key, both functions load the two matrices as those of an untied model, and so do the first versions of the
    program, which did not know the key.
    """
    # No "moe" at all without experts, because the program takes "moe": null for experts, too.
    experts = {"moe": shape.moe.model_dump(exclude_none=True)} if shape.moe else {}
    return {key: getattr(shape, key) for key in NOTEBOOK_KEYS} | experts


def notebook_masks(shape: ModelConfig) -> dict[str, Tensor]:
    """Return the buffers that the notebook's `load_state_dict` requires: for each block the causal mask, (T, T), with
    ones above the diagonal, as the book's MultiHeadAttention registers it."""
    mask = torch.triu(torch.ones(shape.context_length, shape.context_length), diagonal=1)
    return {f"trf_blocks.{layer}.att.mask": mask for layer in range(shape.n_layers)}
