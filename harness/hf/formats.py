"""Weights and configuration of a model in the formats of transformers and of Giles Thomas's lab notebook, whose
training program this project grew from. The library transformers need not be installed."""

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
from harness.model.config import HEAD, ModelConfig
from harness.model.weights import checkpoint_views

OWN_TYPE = "ddp_pretrain"  # `model_type` of a model that is exported with its own code
WRAPPER = Path(__file__).with_name("modeling_ddp_pretrain.py")
CLASSES = {"AutoConfig": "DdpPretrainConfig", "AutoModelForCausalLM": "DdpPretrainForCausalLM"}
DERIVED = ("head_width", "query_width", "kv_width", "mlp_width")  # properties of ModelConfig that gpt.py reads

# Names in the files of the lab notebook's program. Its author's published models were saved inside a wrapper, hence the
# prefix of their tensor names.
NOTEBOOK_TYPE, NOTEBOOK_PREFIX = "gpjtgpt2", "model."
NOTEBOOK_KEYS = ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias")

# For each native class: our name of each module, by the module's name in that class. * is the number of the block.
# GPT-2's c_attn fuses query, key and value as our qkv does.
LLAMA_MODULES = {
    "model.embed_tokens": "tok_emb",
    "model.layers.*.input_layernorm": "trf_blocks.*.norm1",
    "model.layers.*.self_attn.q_proj": "trf_blocks.*.att.W_query",
    "model.layers.*.self_attn.k_proj": "trf_blocks.*.att.W_key",
    "model.layers.*.self_attn.v_proj": "trf_blocks.*.att.W_value",
    "model.layers.*.self_attn.o_proj": "trf_blocks.*.att.out_proj",
    "model.layers.*.post_attention_layernorm": "trf_blocks.*.norm2",
    "model.layers.*.mlp.gate_proj": "trf_blocks.*.ff.gate",
    "model.layers.*.mlp.up_proj": "trf_blocks.*.ff.layers.0",
    "model.layers.*.mlp.down_proj": "trf_blocks.*.ff.layers.2",
    "model.norm": "final_norm",
    "lm_head": "out_head",
}
MODULES = {
    "gpt2": {
        "transformer.wte": "tok_emb",
        "transformer.wpe": "pos_emb",
        "transformer.h.*.ln_1": "trf_blocks.*.norm1",
        "transformer.h.*.attn.c_attn": "trf_blocks.*.att.qkv",
        "transformer.h.*.attn.c_proj": "trf_blocks.*.att.out_proj",
        "transformer.h.*.ln_2": "trf_blocks.*.norm2",
        "transformer.h.*.mlp.c_fc": "trf_blocks.*.ff.layers.0",
        "transformer.h.*.mlp.c_proj": "trf_blocks.*.ff.layers.2",
        "transformer.ln_f": "final_norm",
        "lm_head": "out_head",
    },
    "llama": LLAMA_MODULES,
    "qwen3": {
        **LLAMA_MODULES,
        "model.layers.*.self_attn.q_norm": "trf_blocks.*.att.q_norm",
        "model.layers.*.self_attn.k_norm": "trf_blocks.*.att.k_norm",
    },
}
WITHOUT_BIAS = {"tok_emb", "pos_emb", "out_head"}  # in every class
# GPT-2's Conv1D layers, whose weights are (in, out), while ours are (out, in)
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")


def peer_names(kind: str, shape: ModelConfig) -> dict[str, str]:
    """Return a dict from the tensor names of transformers' class `kind` to our names. `kind` is "gpt2", "llama" or
    "qwen3". A tied head is left out. Our model may lack some of the biases and norm gains."""
    names = {}
    for module, own_module in MODULES[kind].items():
        if own_module == "out_head" and shape.tie_weights:
            continue
        is_norm = "norm" in own_module
        has_bias = own_module not in WITHOUT_BIAS and (kind == "gpt2" or (shape.linear_bias and not is_norm))
        for layer in range(shape.n_layers if "*" in module else 1):
            name, own = module.replace("*", str(layer)), own_module.replace("*", str(layer))
            names[f"{name}.weight"] = f"{own}.{'scale' if is_norm else 'weight'}"
            if has_bias:
                names[f"{name}.bias"] = f"{own}.{'shift' if is_norm else 'bias'}"
    return names


def peer_tensors(kind: str, model: GPTModel) -> dict[str, Tensor]:
    """Return the model's tensors under their names in transformers' class `kind`. OWN_TYPE stands for
    DdpPretrainForCausalLM. Some of the tensors are views. Missing biases are zeros, and missing norm gains are ones."""
    shape, ours = model.config, model.state_dict()
    if kind == OWN_TYPE:
        return {f"model.{name}": tensor for name, tensor in ours.items() if not (shape.tie_weights and name == HEAD)}
    ours |= checkpoint_views(ours, shape)
    theirs = {}
    for name, own in peer_names(kind, shape).items():
        if own in ours:
            theirs[name] = ours[own].T if name.endswith(TRANSPOSED) else ours[own]
        elif own.endswith(".bias"):
            theirs[name] = torch.zeros(len(ours[own.removesuffix("bias") + "weight"]))
        else:
            theirs[name] = torch.ones(shape.head_width if ".att." in own else shape.emb_dim)
    return theirs


def peer_config(kind: str, shape: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json for a model of transformers' type `kind`: "gpt2", "llama", "qwen3" or
    OWN_TYPE. The dtype and the ids of special tokens are left out."""
    rates = shape.drop_rates
    config: dict[str, Any] = {"model_type": kind}
    if kind == "gpt2":
        config |= {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": shape.context_length,
            "n_embd": shape.emb_dim,
            "n_layer": shape.n_layers,
            "n_head": shape.n_heads,
            "n_inner": None if shape.mlp_width == 4 * shape.emb_dim else shape.mlp_width,
            "activation_function": {"gelu": "gelu_new", "relu2": "relu2"}[shape.mlp],
            "layer_norm_epsilon": EPSILON,
            "resid_pdrop": rates.attention_output,  # GPT-2 also applies it to the output of the feed-forward layer
            "embd_pdrop": rates.embedding,
            "attn_pdrop": rates.attention_weights,
            "initializer_range": INIT_STD,
            "scale_attn_weights": True,
        }
    else:
        config |= {
            "max_position_embeddings": shape.context_length,
            "hidden_size": shape.emb_dim,
            "num_hidden_layers": shape.n_layers,
            "num_attention_heads": shape.n_heads,
        }
    if kind in ("llama", "qwen3"):
        config |= {
            "architectures": ["Qwen3ForCausalLM" if kind == "qwen3" else "LlamaForCausalLM"],
            "intermediate_size": shape.mlp_width,
            "num_key_value_heads": shape.n_kv_heads or shape.n_heads,
            "head_dim": shape.head_width,
            "hidden_act": "silu",
            "rms_norm_eps": EPSILON,
            "rope_theta": shape.rope_base,  # for transformers before version 5
            "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_base},
            "attention_bias": shape.linear_bias,
            "attention_dropout": rates.attention_weights,
            "initializer_range": INIT_STD,
            **({"use_sliding_window": False} if kind == "qwen3" else {"mlp_bias": shape.linear_bias}),
        }
    elif kind == OWN_TYPE:
        tables = [shape.value_embedding_of(layer) for layer in range(shape.n_layers)]
        config |= {
            "architectures": [CLASSES["AutoModelForCausalLM"]],
            "auto_map": {automatic: f"{WRAPPER.stem}.{own}" for automatic, own in CLASSES.items()},
            "shape": {
                **shape.model_dump(mode="json"),
                **{name: getattr(shape, name) for name in DERIVED},
                "drop_rates": rates.model_dump(),
                "value_embedding_of_layers": tables,
            },
        }
    return config | {"vocab_size": shape.vocab_size, "use_cache": True, "tie_word_embeddings": shape.tie_weights}


# Definitions of gpt.py that are not exported. They are for training or for our own files, and use modules that the
# exported folder does not have.
LEFT_OUT = {"load_model"}
LEFT_OUT_OF_MODEL = {"forward", "to_checkpoint_names", "load_checkpoint_tensors"}


def write_code(folder: Path) -> None:
    """Write the code of a model to an exported folder: gpt.py, inference.py and modeling_ddp_pretrain.py. These files
    import no module of this project from outside the folder."""
    source = inspect.getsource(gpt)
    unwanted: list[ast.stmt] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("harness."):
            unwanted += [node] if node.module != inference.__name__ else []
        elif isinstance(node, ast.FunctionDef) and node.name in LEFT_OUT:
            unwanted.append(node)
        elif isinstance(node, ast.ClassDef) and node.name == GPTModel.__name__:
            unwanted += [each for each in node.body if getattr(each, "name", None) in LEFT_OUT_OF_MODEL]
    lines = source.splitlines(keepends=True)
    for node in reversed(unwanted):
        del lines[node.lineno - 1 : node.end_lineno]
    files = {"gpt.py": "".join(lines), "inference.py": inspect.getsource(inference), WRAPPER.name: WRAPPER.read_text()}
    for name, text in files.items():
        relative = text.replace("from harness.model.inference", "from .inference").replace("from gpt ", "from .gpt ")
        replace_text(folder / name, relative)
