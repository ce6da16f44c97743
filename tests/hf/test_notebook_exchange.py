"""Import of the notebook author's published models, and export to files that the notebook's own scripts load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model, save_file

from bench.references import NotebookModel
from gpt import ModelConfig
from harness.common.errors import UserError
from harness.common.json_files import parse_config
from harness.data.tokenizers import train_bpe
from harness.hf.import_model import notebook_shape
from tests.hf.test_convert_hf import (
    TEXT,
    assert_same_logits,
    convert,
    hub_variables,
    imported,
    not_imported,
    refused,
    write_checkpoint,
)
from tests.model.test_model import random_tokens, shape
from tests.support.fake_hub import FakeDataset, FakeFile, FakeHub
from tests.support.in_process import InProcess
from tests.support.notebook_model import notebook_model

EXPERTS = {"num_experts": 3, "num_active_experts": 2}
VARIANTS: list[dict[str, Any]] = [{}, {"qkv_bias": True}, {"tie_weights": True}, {"moe": EXPERTS}]
CODE = "modeling_gpjtgpt2.py"
PAIR = ("model.tok_emb.weight", "model.out_head.weight")


def published(folder: Path, **changes: Any) -> NotebookModel:
    """Write a folder like the repositories of the notebook's author, with code that must not run, and return its
    model."""
    cfg = shape(vocab_size=300, drop_rate=0.1, **changes).model_dump(exclude_unset=True)
    torch.manual_seed(4)
    from tests.support.published_model import PublishedConfig, PublishedModel  # loads transformers

    wrapper = PublishedModel(PublishedConfig(cfg))
    with torch.no_grad():
        for parameter in wrapper.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    wrapper.config.auto_map = {"AutoModelForCausalLM": "modeling_gpjtgpt2.GPJTGPT2ModelForCausalLM"}
    wrapper.save_pretrained(folder)
    train_bpe(iter([TEXT]), 290, folder / "tokenizer.json")
    (folder / CODE).write_text(f"open({str(folder.parent / 'ran')!r}, 'w')\nraise SystemExit('was run')\n")
    return wrapper.model.eval()


def loss_on_letters(model: NotebookModel, shop: InProcess) -> str:
    tokens = load_file(shop.datasets / "local" / "letters" / "test.safetensors")["tokens"].long()
    length = model.pos_emb.num_embeddings
    rows = (len(tokens) - 1) // (2 * length) * 2
    inputs, targets = tokens[: rows * length].view(rows, length), tokens[1 : rows * length + 1].view(rows, length)
    with torch.no_grad():
        return f"{F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()):.3f}"


# Import -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_published_model_becomes_a_run(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = published(tmp_path / "hf", **changes)
    assert "model.trf_blocks.0.att.mask" in load_file(tmp_path / "hf" / "model.safetensors")
    ours = imported(tmp_path)
    assert ours.config == shape(vocab_size=300, drop_rate=0.1, **changes)
    assert load_file(tmp_path / "runs" / "r" / "model.safetensors").keys() == ours.to_checkpoint_names().keys()
    assert_same_logits(ours, theirs)
    assert not (tmp_path / "ran").exists()
    if "moe" in changes:  # the commands can use the run, too
        # without GPT-2's vocabulary, with which the model's tokenizer would be compared
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
        shop = InProcess(tmp_path)
        shop.add_dataset()
        assert shop.script("test_smoke.py", "r", "--prompt", "def f(").stdout.startswith("def f(")
        options = ["--dataset", "local/letters", "--batch-size", "2"]
        measured = shop.script("test_loss.py", str(shop.datasets), "runs/r", *options)
        assert loss_on_letters(theirs, shop) in measured.stdout


@pytest.mark.parametrize("kept", [["model.tok_emb.weight"], ["model.out_head.weight"], list(PAIR)], ids=str)
def test_a_tied_pair_may_be_in_the_file_once_or_twice(tmp_path: Path, kept: list[str]) -> None:
    theirs = published(tmp_path / "hf", tie_weights=True)
    weights = tmp_path / "hf" / "model.safetensors"
    rest = {name: tensor for name, tensor in load_file(weights).items() if name not in PAIR}
    save_file(rest | {name: theirs.tok_emb.weight.detach().clone() for name in kept}, weights)
    assert_same_logits(imported(tmp_path), theirs)


def test_a_published_model_from_the_hub_brings_no_code(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    with FakeHub() as hub:
        content = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
        hub.models["gpjt/tiny"] = FakeDataset({name: FakeFile(data) for name, data in content.items()})
        environment = hub_variables(hub, tmp_path / "home")
        convert(tmp_path, "import", "gpjt/tiny", "r", "--runs-dir", str(tmp_path), environment=environment)
        assert json.loads((tmp_path / "r" / "meta.json").read_text())["imported_from"] == "gpjt/tiny"
        asked = {request.path.rsplit("/", 1)[-1] for request in hub.requests}
    assert {"config.json", "model.safetensors"} <= asked
    assert CODE not in asked


CFG = shape().model_dump(exclude_unset=True)
LORE = {"rank": 128, "input_embeddings": False, "output_head": False, "smart_initialize": True}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"cfg": None}, "cfg"),
        ({"cfg": 3}, "cfg"),
        ({"cfg": CFG | {"lore": LORE | {"output_head": True}}}, "cfg.lore"),
        ({"cfg": CFG | {"lore": LORE | {"input_embeddings": True}}}, "cfg.lore"),
        ({"cfg": CFG | {"rope": True}}, "cfg.rope"),
        ({"cfg": {key: value for key, value in CFG.items() if key != "qkv_bias"}}, "qkv_bias"),
        ({"cfg": CFG | {"n_layers": "12"}}, "n_layers"),
        ({"cfg": CFG | {"n_heads": 0}}, "n_heads"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ],
)
def test_other_models_of_the_author_are_refused_by_the_key(changes: dict[str, Any], key: str) -> None:
    config = {"model_type": "gpjtgpt2", "cfg": CFG, "tie_word_embeddings": False, **changes}
    off = notebook_shape({"model_type": "gpjtgpt2", "cfg": CFG | {"lore": LORE}}, Path("config.json"))
    assert off == CFG, "an experiment that was turned off is the plain model"
    with pytest.raises(UserError, match=f'hf/config.json: key "{key}"'):
        parse_config(ModelConfig, notebook_shape(config, Path("hf/config.json")), Path("hf/config.json"))


def test_damaged_folders_leave_nothing(tmp_path: Path) -> None:
    published(tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    whole, tensors = weights.read_bytes(), load_file(weights)
    experts = {name.replace("ff.layers", "ff.experts.0.layers"): tensor for name, tensor in tensors.items()}
    for changed, says in (
        (experts, "not the model's weights: tensor trf_blocks.0.ff.layers.0.weight [192, 48] is missing"),
        (tensors | {"model.tok_emb.weight": torch.ones(97, 48)}, "tensor tok_emb.weight is [97, 48] in the file"),
        (tensors | {"score.weight": torch.ones(2, 48)}, "is missing"),
        (tensors | {"model.final_norm.scale": torch.ones(48, dtype=torch.int8)}, "int8"),
    ):
        save_file(changed, weights)
        not_imported(tmp_path, says=says)
    weights.write_bytes(whole[: len(whole) // 2])
    not_imported(tmp_path, says="not a readable safetensors file")
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["cfg"]["drop_rate"] = 2
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    not_imported(tmp_path, says='config.json: key "drop_rate"')


# Export -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_the_notebooks_scripts_load_what_is_exported(tmp_path: Path, changes: dict[str, Any]) -> None:
    """An export loads in both ways of the scripts: load_state_dict(load_file(...)) and safetensors' load_model."""
    config = shape(vocab_size=300, **changes)
    ours = write_checkpoint(tmp_path / "c", config)
    result = convert(tmp_path, "export", "c", "out", "--format", "notebook")
    assert ("written out" in result.stderr) == config.tie_weights
    told = json.loads((tmp_path / "out" / "model.json").read_text())
    keys = ["vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias"]
    assert told == {key: getattr(config, key) for key in keys} | ({"moe": EXPERTS} if config.moe else {})
    file = tmp_path / "out" / "model.safetensors"
    tokens, targets = random_tokens(config), random_tokens(config, seed=4)
    for load in (lambda model: model.load_state_dict(load_file(file), strict=True), lambda m: load_model(m, file)):
        theirs = notebook_model(ModelConfig(**told))
        load(theirs)
        with torch.no_grad():
            loss, expected = (F.cross_entropy(m(tokens).flatten(0, 1), targets.flatten()) for m in (theirs, ours))
            assert (theirs(tokens) - ours(tokens)).abs().max() < 1e-5
        assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
    written = load_file(file)
    for name, tensor in notebook_model(config).state_dict().items():
        assert (written[name].shape, written[name].dtype) == (tensor.shape, tensor.dtype)
        assert not name.endswith("mask") or torch.equal(written[name], tensor)
    notebook_model(config).load_state_dict(written, strict=True)  # also with a model.json that ties the weights


def test_a_model_of_gpt2s_vocabulary_is_exported_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export does not read GPT-2's vocabulary, which might have to be downloaded. The notebook's scripts load the
    vocabulary themselves."""
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    write_checkpoint(tmp_path / "c", shape(vocab_size=300), tokenizer="gpt2")
    result = convert(tmp_path, "export", "c", "out", "--format", "notebook")
    assert result.stderr == ""
    assert json.loads((tmp_path / "out" / "meta.json").read_text())["tokenizer"] == "gpt2"


def test_our_commands_read_the_export_too(tmp_path: Path) -> None:
    ours = write_checkpoint(tmp_path / "c", shape(vocab_size=300))
    given = ("export", "c", "out", "--format", "notebook", "--dtype", "bf16")
    assert "not the model's own, tokenizer.json" in convert(tmp_path, *given).stderr, "its tokenizer is not GPT-2's"
    files = ["out/model.json", "out/model.safetensors"]
    assert InProcess(tmp_path).script("test_smoke.py", *files, "--prompt", "def f(").stdout.startswith("def f(")
    written = load_file(tmp_path / files[1])
    assert written["trf_blocks.0.att.mask"].dtype == torch.float32
    assert torch.equal(written["tok_emb.weight"], ours.tok_emb.weight.bfloat16())
    refused(tmp_path, *given, says="exists")
