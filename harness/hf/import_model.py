"""Import of a model from a Hugging Face folder or repository as a new run. The model is a GPT-2, or one that Giles
Thomas, the author of the lab notebook, has published (github.com/gpjt)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from gpt import EPSILON, GPTModel, ModelConfig
from harness.common.errors import UserError, explained
from harness.common.files import replace_text
from harness.common.json_files import Count, parse_config, read_json_object
from harness.common.messages import quoted
from harness.data.tokenizers import END_OF_TEXT, load_tokenizer
from harness.hf.formats import NOTEBOOK_KEYS, NOTEBOOK_PREFIX, NOTEBOOK_TYPE, TRANSPOSED, peer_names, peer_tensors
from harness.model.config import HEAD
from harness.model.tensor_names import WEIGHTS, check_tensors
from harness.model.weights import PARTS, checkpoint_views, from_checkpoint_names, kinds_of, load_weights
from harness.runs.trained_model import new_folder, write_model_files

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
WANTED = [CONFIG, WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER, "vocab.json", "merges.txt"]
QKV_BIASES = tuple(f".att.{part}.bias" for part in PARTS)


def import_model(source: Path, name: str | None, run: Path) -> str:
    """Write the model in the folder `source` to the run directory `run`, which must be new or empty. Return a line for
    the user about the tokenizer. meta.json records `name`: the model's name on the Hub, or None for a local folder.

    Raises UserError or RunError if the import fails. No partial run directory remains then.
    """
    file = source / CONFIG
    raw = read_json_object(file)
    is_gpt2 = raw.get("model_type") == "gpt2"
    shape = gpt2_shape(raw, file) if is_gpt2 else notebook_shape(raw, file)
    config, offered = parse_config(ModelConfig, shape, file), _weights_of(source)
    if is_gpt2:
        offered = _from_gpt2(offered, config, source)
        biases = {part: offered[part] for part in offered if part.endswith(QKV_BIASES)}
        if not any(tensor.any() for tensor in biases.values()):  # the export of a model without biases adds zeros
            shape["qkv_bias"] = False
            offered = {part: tensor for part, tensor in offered.items() if part not in biases}
            config = parse_config(ModelConfig, shape, file)
    elif all(part.startswith(NOTEBOOK_PREFIX) for part in offered):
        offered = {part.removeprefix(NOTEBOOK_PREFIX): tensor for part, tensor in offered.items()}
    tensors = from_checkpoint_names(offered, config, source)
    tokenizer = load_tokenizer(source / TOKENIZER) if (source / TOKENIZER).exists() else None
    with new_folder(run) as draft:
        if tokenizer is not None:
            shutil.copyfile(source / TOKENIZER, draft / TOKENIZER)
        elif (source / "vocab.json").exists() and (source / "merges.txt").exists():
            _from_vocabulary(source, draft / TOKENIZER)
            tokenizer = load_tokenizer(draft / TOKENIZER)
        write_model_files(draft, shape, tensors, tokenizer=TOKENIZER if tokenizer else "gpt2", imported_from=name)
    if tokenizer is None:
        return "no tokenizer in the folder: GPT-2's will be used"
    return f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model's vocabulary {shape['vocab_size']:,}"


class Gpt2Config(BaseModel):
    """Keys of a GPT-2's config.json that affect its results, limited to the values that our models support."""

    model_config = ConfigDict(strict=True)

    vocab_size: Count = Field(ge=1)
    n_positions: Count = Field(ge=1)
    n_embd: Count = Field(ge=1)
    n_head: Count = Field(ge=1)
    n_layer: Count = Field(ge=1)
    n_inner: Count | None = Field(default=None, ge=1)
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "relu2"] = "gelu_new"
    layer_norm_epsilon: float = Field(default=EPSILON, ge=EPSILON, le=EPSILON)
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False  # True: fp32 and another order of sums, in "eager" attention
    add_cross_attention: Literal[False] = False
    resid_pdrop: float = Field(default=0.1, ge=0, lt=1)
    embd_pdrop: float = Field(default=0.1, ge=0, lt=1)
    attn_pdrop: float = Field(default=0.1, ge=0, lt=1)
    tie_word_embeddings: bool = True

    @model_validator(mode="after")
    def _widths(self) -> Gpt2Config:
        if self.n_embd % self.n_head:
            raise ValueError(f'key "n_embd": {self.n_embd} is not a multiple of n_head, {self.n_head}')
        return self


def gpt2_shape(raw: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the keys of model.json for `raw`, a GPT-2's config.json, which was read from the file `source`. Raises
    UserError if a required key is missing, if a key is invalid, or if our models cannot compute this GPT-2."""
    theirs = parse_config(Gpt2Config, raw, source)
    others: dict[str, Any] = {"mlp": "relu2"} if theirs.activation_function == "relu2" else {}
    if theirs.n_inner not in (None, 4 * theirs.n_embd):
        others["mlp_dim"] = theirs.n_inner
    rates = {"embedding": theirs.embd_pdrop, "attention_weights": theirs.attn_pdrop}
    rates |= {"attention_output": theirs.resid_pdrop, "mlp_output": theirs.resid_pdrop}
    return others | {
        "vocab_size": theirs.vocab_size,
        "context_length": theirs.n_positions,
        "emb_dim": theirs.n_embd,
        "n_heads": theirs.n_head,
        "n_layers": theirs.n_layer,
        "drop_rate": theirs.resid_pdrop if len({*rates.values()}) == 1 else rates,
        "qkv_bias": True,
        "tie_weights": theirs.tie_word_embeddings,
    }


def _from_gpt2(offered: dict[str, Tensor], config: ModelConfig, source: Path) -> dict[str, Tensor]:
    """Return a GPT-2's tensors under the names that our checkpoints use. `offered` has the tensors under transformers'
    names, with or without the prefix `transformer.`. Raises UserError if they do not fit `config`."""
    theirs = {}
    for name, tensor in offered.items():
        if not name.endswith((".attn.bias", ".attn.masked_bias")):
            theirs[name if name == "lm_head.weight" else f"transformer.{name.removeprefix('transformer.')}"] = tensor
    head = {HEAD: theirs.pop("lm_head.weight")} if config.tie_weights and "lm_head.weight" in theirs else {}
    with torch.device("meta"):  # only the shapes of the model's tensors are needed
        wanted = peer_tensors("gpt2", GPTModel(config))
    check_tensors(kinds_of(theirs), {name: tuple(tensor.shape) for name, tensor in wanted.items()}, source)
    ours = {
        own: (theirs[name].T if name.endswith(TRANSPOSED) else theirs[name]).contiguous()
        for name, own in peer_names("gpt2", config).items()
    }
    return checkpoint_views(ours, config) | head


def notebook_shape(raw: dict[str, Any], source: Path) -> dict[str, Any]:
    """Return the keys of model.json for `raw`, the config.json of a model that Giles Thomas published. The format is
    that of github.com/gpjt/ddp-base-model-from-scratch, hf_wrapper/. Errors name the file `source`. Raises UserError if
    `raw` has another format, contradictory keys on tied weights, or unsupported keys. Nothing else is checked."""
    if raw.get("model_type") != NOTEBOOK_TYPE:
        kind = quoted(raw.get("model_type"))
        raise UserError(f'{source}: key "model_type": {kind}; only "gpt2" and "{NOTEBOOK_TYPE}" can be imported')
    shape = raw.get("cfg")
    if not isinstance(shape, dict):
        raise UserError(f'{source}: key "cfg": {"missing" if shape is None else f"{quoted(shape)} is not an object"}')
    lore = shape.get("lore")  # settings of low-rank vocabulary matrices
    if isinstance(lore, dict) and not (lore.get("input_embeddings") or lore.get("output_head")):
        shape = {key: value for key, value in shape.items() if key != "lore"}
    others = sorted(shape.keys() - {*NOTEBOOK_KEYS, "tie_weights", "moe"})
    if others:
        raise UserError(f'{source}: key "cfg.{others[0]}": import does not support this key')
    if raw.get("tie_word_embeddings") is True and not shape.get("tie_weights"):
        raise UserError(f'{source}: key "tie_word_embeddings": true, but key "cfg.tie_weights" is not true')
    return shape


def _weights_of(source: Path) -> dict[str, Tensor]:
    """Return the tensors of model.safetensors or, without it, of all files that model.safetensors.index.json lists.
    Raises UserError if a file is missing or cannot be read."""
    if (source / WEIGHTS).is_file():
        return load_weights(source / WEIGHTS)
    if (source / INDEX).is_file():
        index = read_json_object(source / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise UserError(f'{source / INDEX}: key "weight_map": must be an object with the file name of each tensor')
        tensors: dict[str, Tensor] = {}
        for file in sorted(set(index.values())):
            if Path(file).name != file:
                raise UserError(f"{source / INDEX}: {file!r} is not the name of a file in this folder")
            tensors |= load_weights(source / file)
        return tensors
    raise UserError(
        f"{source}: no {WEIGHTS}: the model is incomplete, or its weights are in another format, such as "
        "pytorch_model.bin; convert these with transformers' save_pretrained (reading a .bin file can run code)"
    )


def _from_vocabulary(source: Path, path: Path) -> None:
    """Convert vocab.json and merges.txt, the format in which GPT-2's tokenizer was published, to a tokenizer.json at
    `path`. Raises UserError if the two files are not a tokenizer."""
    from tokenizers import AddedToken, ByteLevelBPETokenizer

    try:
        backend: Any = ByteLevelBPETokenizer.from_file(str(source / "vocab.json"), str(source / "merges.txt"))
    except Exception as error:  # the library raises nothing more precise
        raise UserError(
            f"{source}: vocab.json and merges.txt are not a tokenizer: {str(error)[:100]}; replace them, or add a "
            "tokenizer.json"
        ) from None
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    replace_text(path, backend.to_str(pretty=False) + "\n")


def fetch_model(name: str) -> Path:
    """Fetch the files that an import needs from the model repository `name`, and return their folder in
    huggingface_hub's cache. No code is fetched. Raises UserError if the model cannot be fetched."""
    if Path(name).exists():
        raise UserError(f"{name}: not a folder; give the folder that holds config.json and model.safetensors")
    import huggingface_hub

    from harness.common.hub import HubWork, hide_bars_from_files

    huggingface_hub.utils.logging.set_verbosity_error()
    hide_bars_from_files()
    by_hand = "give the path of a folder with the model's files"
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE) / "model"
    work = HubWork(name, "model", cache, "its name", by_hand)
    with explained(f"{name}: no such folder; tried as a model on the Hub: "):
        return Path(work.call(lambda: huggingface_hub.snapshot_download(name, allow_patterns=WANTED)))
