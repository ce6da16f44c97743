"""convert_hf.py, checked against transformers itself and against a fake Hub on this machine."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from gpt import GPTModel, ModelConfig, load_model, load_model_config
from harness.common.errors import UserError
from harness.common.messages import amount_text, escape_controls
from harness.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from harness.hf.export import export_tokenizer
from harness.hf.import_model import gpt2_shape
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.fake_hub import FakeDataset, FakeFile, FakeHub, hub_here
from tests.support.in_process import InProcess
from tests.support.launch import ROOT, Result, Workshop

TEXT = "def f(x):\n    return x + 1  # naïve 日本 🐍\r\n\n\n" * 20
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"}


def write_checkpoint(folder: Path, config: ModelConfig, **meta: Any) -> GPTModel:
    """Write the files of a checkpoint that exporting reads, with a tokenizer of its own, and return the model."""
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(iter([TEXT]), 290, folder / "tokenizer.json")
    model = random_model(config)
    save_file(model.to_checkpoint_names(), folder / "model.safetensors")
    told = {"tokenizer": "tokenizer.json", "model": config.model_dump(mode="json"), **meta}
    (folder / "meta.json").write_text(json.dumps(told).replace("Infinity", "1e999"))  # as other programs may write it
    return model.eval()


def convert(path: Path, *arguments: str, expect: int | None = 0, environment: dict[str, str] | None = None) -> Result:
    with hub_here(environment) if environment else nullcontext():
        result = InProcess(path).command("convert_hf.py", *arguments, environment=environment)
    assert expect is None or result.status == expect, result.stderr
    return result


def refused(path: Path, *arguments: str, says: str) -> str:
    before = sorted(path.rglob("*"))
    line = convert(path, *arguments, expect=2).refuses(says)
    assert sorted(path.rglob("*")) == before, "nothing half-written"
    return line


def not_imported(path: Path, *, says: str, source: str = "hf") -> None:
    refused(path, "import", source, "r", "--runs-dir", "runs", says=says)


def small(**changes: Any) -> ModelConfig:
    return shape(vocab_size=300, **changes)  # ten more than the tokenizer has: a padded head


def imported(path: Path, source: str = "hf") -> GPTModel:
    """Import a folder as the run `runs/r`, and return the model of the run."""
    convert(path, "import", source, "r", "--runs-dir", "runs")
    run = path / "runs" / "r"
    return load_model(load_model_config(run / "model.json"), run / "model.safetensors", CPU)


def loaded(folder: Path) -> Any:
    """Return the model that transformers loads from a folder. The folder must have exactly the tensors of the model's
    class."""
    from transformers import AutoModelForCausalLM

    automatic: Any = AutoModelForCausalLM
    model, report = automatic.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def loaded_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_same_logits(ours: GPTModel, theirs: Any) -> None:
    with torch.no_grad():
        tokens = random_tokens(ours.config)
        expected = getattr(theirs(tokens), "logits", theirs(tokens))
        assert expected.abs().max() > 1
        assert (ours(tokens) - expected).abs().max() < 1e-5


# Export -------------------------------------------------------------------------------------------------------------


EXPORTS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("GPT2LMHeadModel", {}),
    "tied": ("GPT2LMHeadModel", {"tie_weights": True, "qkv_bias": True, "mlp": "relu2", "mlp_dim": 100}),
    "llama": ("LlamaForCausalLM", {**LLAMA, "tie_weights": True}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True, "linear_bias": False, "n_kv_heads": 2}),
}


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GPTModel]:
    """Folder with a checkpoint "c" and its export "out", and the model that both hold. Tests only read the files."""
    path = tmp_path_factory.mktemp("exported")
    model = write_checkpoint(path / "c", small(**EXPORTS[request.param][1]))
    convert(path, "export", "c", "out")
    return path, model


def test_transformers_loads_what_is_exported_as_the_same_model(
    exported: tuple[Path, GPTModel], request: pytest.FixtureRequest
) -> None:
    """transformers loads each export as its native class, with the same logits and the same tokenizer. It also
    generates the text that test_smoke.py prints; both use a key-value cache."""
    path, model = exported
    theirs, tokenizer = loaded(path / "out"), loaded_tokenizer(path / "out")
    assert type(theirs).__name__ == EXPORTS[request.node.callspec.params["exported"]][0]
    assert theirs.dtype == torch.float32
    assert_same_logits(model, theirs)
    own = load_tokenizer(path / "c" / "tokenizer.json")
    assert tokenizer.encode(TEXT) == own.encode(TEXT)
    assert tokenizer.decode(own.encode(TEXT)) == TEXT
    assert tokenizer.eos_token_id == own.eot_token == theirs.generation_config.eos_token_id
    assert tokenizer.model_max_length == model.config.context_length
    # Before version 5, transformers would otherwise give the model token_type_ids, too.
    settings = json.loads((path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]
    modes = {each.name: each.stat().st_mode & 0o777 for each in (path / "out").iterdir()}
    assert set(modes.values()) == {0o644}, modes
    assert sorted(each.name for each in path.iterdir()) == ["c", "out"]
    output = theirs.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    options = ["--prompt", "def f(", "--num-tokens", "12", "--temperature", "0"]
    printed = InProcess(path).script("test_smoke.py", "c", *options).stdout
    assert printed == escape_controls(tokenizer.decode(output[0], skip_special_tokens=True)) + "\n"


@pytest.mark.parametrize("exported", ["untied", "tied"], indirect=True)
def test_there_and_back_gives_the_same_files(exported: tuple[Path, GPTModel], tmp_path: Path) -> None:
    path, model = exported
    back, expected = imported(tmp_path, str(path / "out")), model.to_checkpoint_names()
    assert back.config == model.config
    found = load_file(tmp_path / "runs" / "r" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    tokenizers = [load_tokenizer(each / "tokenizer.json") for each in (tmp_path / "runs" / "r", path / "c")]
    assert tokenizers[0].encode(TEXT) == tokenizers[1].encode(TEXT)


def test_a_model_is_named_by_its_run(tmp_path: Path) -> None:
    """RUN means its best checkpoint, and RUN:CHECKPOINT another one."""
    checkpoints = tmp_path / "runs" / "r" / "checkpoints"
    for name, link in (("20260101Z000000-iteration-3", "best"), ("20260101Z000000-iteration-5", "latest")):
        model = write_checkpoint(checkpoints / name, small(tie_weights=link == "best"))
        (checkpoints / link).symlink_to(name)
    (tmp_path / "runs" / "r" / "model.json").write_text(model.config.model_dump_json())
    convert(tmp_path, "export", "r:latest", "out")
    other = tmp_path / "other.json"
    other.write_text(model.config.model_copy(update={"n_heads": 1}).model_dump_json())
    convert(tmp_path, "export", "r:latest", "one-head", "--model-json", "other.json")
    assert json.loads((tmp_path / "one-head" / "config.json").read_text())["n_head"] == 1
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert '"tie_weights": true' in convert(tmp_path, "publish", "r", "me/r", "--card").stdout


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_folders(tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    write_checkpoint(tmp_path / "c", small())
    convert(tmp_path, "export", "c", "out", "--dtype", dtype)
    assert loaded(tmp_path / "out").dtype == kind


def test_the_shape_is_found_beside_the_weights_in_the_meta_or_in_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "r" / "checkpoints" / "20260101Z000000-iteration-3"
    write_checkpoint(folder, small())
    meta = json.loads((folder / "meta.json").read_text())
    shape_text = json.dumps(meta.pop("model"))
    (folder / "meta.json").write_text(json.dumps(meta))
    refused(tmp_path, "export", str(folder), "out", says="--model-json")
    (tmp_path / "link").symlink_to(folder)
    for number, (place, given) in enumerate(
        (
            (tmp_path / "r" / "model.json", ["link"]),
            (folder / "model.json", [str(folder / "model.safetensors")]),
            (tmp_path / "m.json", [str(folder), "--model-json", "m.json"]),
        )
    ):
        place.write_text(shape_text)
        convert(tmp_path, "export", given[0], f"out{number}", *given[1:])
        assert (tmp_path / f"out{number}" / "config.json").is_file()
        place.unlink()


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", small())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    (tmp_path / "other.json").write_text(small(emb_dim=96).model_dump_json())
    write_checkpoint(tmp_path / "few", shape())  # 97 tokens, fewer than its tokenizer
    for arguments, says in (
        (("c", "full"), "exists"),
        (("./no", "out"), 'run "./no": must be a plain name, or the path of a run in '),
        ((str(tmp_path / "full"), "out"), "no model.safetensors"),
        (("c", "out", "--model-json", "other.json"), "[300, 96]"),
        (("few", "out"), "another model's"),
    ):
        refused(tmp_path, "export", *arguments, says=says)
    (tmp_path / "file").write_text("x")
    convert(tmp_path, "export", "c", "file/out", expect=1).refuses("cannot be written", status=1)


def test_a_full_disk_leaves_no_half_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "c", small())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut short, too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        result = convert(tmp_path, "export", "c", "out", expect=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.error_lines[0].startswith("error: out: cannot be written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|end_of_text|>"])
def test_transformers_finds_the_end_of_text_by_its_own_name(tmp_path: Path, name: str) -> None:
    """transformers uses the end-of-text token of our tokenizer, under its name and id. It adds no end-of-text token of
    its own to the vocabulary."""
    train_bpe(iter([TEXT]), 290, tmp_path / "tokenizer.json")
    content = (tmp_path / "tokenizer.json").read_text().replace("<|endoftext|>", name)
    (tmp_path / "tokenizer.json").write_text(content)
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "out").mkdir()
    export_tokenizer(tmp_path / "tokenizer.json", tmp_path / "out", 64)
    (tmp_path / "out" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    theirs = loaded_tokenizer(tmp_path / "out")
    assert (len(theirs), theirs.eos_token, theirs.eos_token_id) == (ours.vocab_size, name, ours.eot_token)
    assert theirs.bos_token_id == theirs.unk_token_id == ours.eot_token


def test_transformers_adds_no_token_that_training_did_not_add(tmp_path: Path) -> None:
    """The tokenizer.json has a post-processor that puts a token before each text, as Llama 3's does."""
    write_checkpoint(tmp_path / "c", small())
    content = json.loads((tmp_path / "c" / "tokenizer.json").read_text())
    template = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [0], "tokens": [END_OF_TEXT]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": tokens}
    (tmp_path / "c" / "tokenizer.json").write_text(json.dumps(content))
    convert(tmp_path, "export", "c", "out")
    ours = load_tokenizer(tmp_path / "c" / "tokenizer.json")
    assert loaded_tokenizer(tmp_path / "out").encode(TEXT) == ours.encode(TEXT)


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
def test_gpt2s_own_tokenizer_is_written_as_everyone_has_it(tmp_path: Path) -> None:
    export_tokenizer("gpt2", tmp_path, 1024)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    theirs = loaded_tokenizer(tmp_path)
    ours = load_tokenizer("gpt2")
    text = (ROOT / "README.md").read_text() + (ROOT / "gpt.py").read_text() + TEXT
    assert theirs.encode(text) == ours.encode(text)
    assert (len(theirs), theirs.eos_token_id) == (50257, 50256)


# Import -------------------------------------------------------------------------------------------------------------


def hugging_face_model(folder: Path, **changes: Any) -> Any:
    """Return a native GPT-2 of transformers with random weights everywhere, and save it in `folder`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 290, "n_positions": 24, "n_embd": 48, "n_layer": 3, "n_head": 4}
    torch.manual_seed(5)
    config = GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 0, **changes})
    model: Any = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    train_bpe(iter([TEXT]), 290, folder / "tokenizer.json")
    return model.eval()


@pytest.mark.parametrize(("tied", "sharded"), [(False, True), (True, False)])
def test_a_model_of_transformers_becomes_ours(tmp_path: Path, tied: bool, sharded: bool) -> None:
    rates = {"embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.3 if tied else 0.1}
    theirs = hugging_face_model(tmp_path / "hf", tie_word_embeddings=tied, **rates)
    if sharded:
        theirs.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
        assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
        (tmp_path / "hf" / "model.safetensors").unlink(missing_ok=True)
    ours = imported(tmp_path)
    assert (ours.config.tie_weights, ours.config.qkv_bias) == (tied, True)
    found = ours.config.drop_rates
    assert [found.embedding, found.attention_weights, found.attention_output] == [*rates.values()]
    assert found.mlp_output == rates["resid_pdrop"]
    assert_same_logits(ours, theirs)
    printed = InProcess(tmp_path).script("test_smoke.py", "r", "--prompt", "def f(", "--temperature", "0").stdout
    assert printed.startswith("def f(")
    not_imported(tmp_path, says="exists")
    further = InProcess(tmp_path).command("ddp_train.py", "r", "datasets")
    further.refuses("train.json: no such file; to train an imported model further", '"initial_weights"')
    card = convert(tmp_path, "publish", "r", "me/x", "--card").stdout
    assert "imported" not in card, "the card tells nothing of this machine"
    assert str(tmp_path) not in card
    (tmp_path / "runs" / "r" / "summary.json").write_text('{"device": "x"}')
    refused(tmp_path, "publish", "r", "me/x", "--card", says='summary.json: key "world_size"')


def test_an_older_folder_with_masks_no_prefix_and_two_tokenizer_files(tmp_path: Path) -> None:
    """A folder like that of OpenAI's GPT-2 on the Hub is imported. Its tensors include attention masks, their names
    have no prefix, and vocab.json and merges.txt stand in place of tokenizer.json."""
    theirs = hugging_face_model(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 24, 24) for layer in range(3)}
    save_file(bare, tmp_path / "hf" / "model.safetensors")
    content = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    vocabulary = {text: token for text, token in content["model"]["vocab"].items() if text != "<|endoftext|>"}
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps({**vocabulary, "<|endoftext|>": 0}))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in content["model"]["merges"]]
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    own = load_tokenizer(tmp_path / "hf" / "tokenizer.json")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert_same_logits(imported(tmp_path), theirs)
    assert load_tokenizer(tmp_path / "runs" / "r" / "tokenizer.json").encode(TEXT) == own.encode(TEXT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("activation_function", "relu"), ("layer_norm_epsilon", 1e-6), ("scale_attn_by_inverse_layer_idx", True)),
        *(("scale_attn_weights", False), ("n_inner", 0), ("n_embd", 50), ("n_embd", None), ("resid_pdrop", "x")),
        *(("attn_pdrop", 1.5), ("tie_word_embeddings", "yes"), *(("n_layer", each) for each in ("two", 2.0, -1, True))),
    ],
)
def test_other_architectures_are_refused_by_the_key(key: str, value: object) -> None:
    from transformers import GPT2Config

    gpt2 = GPT2Config(vocab_size=290, n_positions=24, n_embd=48, n_layer=3, n_head=4)
    config = {**gpt2.to_dict(), key: value}
    if value is None:
        del config[key]
    with pytest.raises(UserError, match=f'hf/config.json: key "{key}"'):
        gpt2_shape(config, Path("hf/config.json"))


def test_folders_that_are_no_gpt2_leave_nothing(tmp_path: Path) -> None:
    hugging_face_model(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    bad = {**tensors}
    del bad["transformer.h.1.ln_2.bias"]
    for changed, says in (
        (bad, "tensor transformer.h.1.ln_2.bias [48] is missing"),
        ({**tensors, "transformer.h.0.extra": torch.ones(1)}, "extra"),
        ({**tensors, "transformer.wpe.weight": torch.ones(30, 48)}, "[30, 48]"),
        ({**tensors, "transformer.h.0.attn.c_attn.weight": torch.ones(48, 100)}, "c_attn.weight is [48, 100]"),
    ):
        save_file(changed, tmp_path / "hf" / "model.safetensors")
        not_imported(tmp_path, says=says)
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(b"x")
    not_imported(tmp_path, says="no model.safetensors")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    not_imported(tmp_path, says="hf/tokenizer.json: not a readable tokenizer")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    not_imported(tmp_path, says='key "model_type": "llama"; only "gpt2" and "gpjtgpt2"')
    (tmp_path / "hf" / "config.json").unlink()
    not_imported(tmp_path, says="config.json: no such file")
    refused(tmp_path, "import", "../x", "../r", says="must be a plain name")


def test_a_source_that_is_no_folder_says_whether_it_could_be_a_name(tmp_path: Path) -> None:
    """If a missing folder could also be a model's name on the Hub, the error says both. A single file of a model
    and an incomplete model are recognized."""
    folder = tmp_path / "c"
    write_checkpoint(folder, small())
    (folder / "model.json").write_text(small().model_dump_json())
    for source, says in (
        *(
            (path, f'{path}: no such folder; tried as a model on the Hub: model "{path}": not a valid name on the Hugg')
            for path in ("./nothing", "../nothing", "~/nothing", "/nothing", "c/d/e")
        ),
        ("c/nothing", 'c/nothing: no such folder; tried as a model on the Hub: model "c/nothing": '),
        ("me/nothing", 'error: me/nothing: no such folder; tried as a model on the Hub: model "me/nothing": '),
        ("c/model.safetensors", "c/model.safetensors: not a folder"),
        ("c", "c/config.json: no such file"),
    ):
        not_imported(tmp_path, source=source, says=says)
    hugging_face_model(tmp_path / "hf")
    refused(tmp_path, "export", "hf", "out", says="convert_hf.py import hf RUN")
    (tmp_path / "hf" / "model.safetensors").unlink()
    (tmp_path / "hf" / "model.safetensors").symlink_to("blobs/nowhere")
    not_imported(tmp_path, says="hf: no model.safetensors: the model is incomplete")


# The Hub ------------------------------------------------------------------------------------------------------------


def hub_variables(hub: FakeHub, home: Path) -> dict[str, str]:
    return hub.environment(home) | {"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "0"}


def test_a_run_goes_to_the_hub_and_comes_back(tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers and this project's import load a published run with the same weights. The dataset of the run names
    no tokenizer, which means GPT-2's. GPT-2's tokenizer does not fit the run's model, whose vocabulary has 64 tokens.
    The test therefore replaces the best checkpoint by one with its own tokenizer. It can be measured on this dataset,
    because GPT-2's vocabulary, with which the two would be compared, is not there. Both commands run in processes of
    their own, because huggingface_hub reads the Hub's address when it is imported."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "none"))
    shop = InProcess(tmp_path)
    shop.add_dataset()
    run = shop.add_run("r", price_per_hour=36.0, on_end=["true", "SECRET"])
    assert shop.attempt().status == 0
    shop.add_run("r", price_per_hour=36.0, notify="http://127.0.0.1:9/SECRET", on_end=["true", "SECRET"])
    (run / "training-run-chart.png").write_bytes(b"a chart")
    best = Path((run / "checkpoints" / "best").resolve())
    wider = load_model_config(run / "model.json").model_copy(update={"vocab_size": 300})
    meta = json.loads((best / "meta.json").read_text())
    model = write_checkpoint(best, wider, **{key: meta[key] for key in meta.keys() - {"model", "tokenizer", "sha256"}})
    given = ["publish", str(best), "me/tiny", "--datasets-dir", str(shop.datasets), "--license", "mit"]
    own = Workshop(tmp_path)
    result = own.command("convert_hf.py", *given, environment=hub_variables(hub, tmp_path / "home"))
    assert result.stdout == f"Uploaded to {hub.url}/me/tiny\n"
    repository = hub.models["me/tiny"]
    assert repository.private
    wanted = {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training-run-chart.png"}
    wanted |= {f"training/{name}" for name in ("model.json", "train.json", "metrics.jsonl", "summary.json")}
    assert wanted <= repository.files.keys()
    assert not [name for name, file in repository.files.items() if b"SECRET" in file.content]
    check_card(card := repository.files["README.md"].content.decode(), run)
    measured = shop.script("test_loss.py", str(shop.datasets), str(best)).stdout.split()[5]
    assert f"| test | {measured} |" in card
    # As on another machine, transformers and this project's import load it.
    (tmp_path / "there").mkdir()
    for name, file in repository.files.items():
        if "/" not in name:
            (tmp_path / "there" / name).write_bytes(file.content)
    assert_same_logits(model, loaded(tmp_path / "there"))
    assert loaded_tokenizer(tmp_path / "there").encode("def f(x)")
    environment = hub_variables(hub, tmp_path / "other")
    result = own.command("convert_hf.py", "import", "me/tiny", "back", environment=environment)
    assert result.status == 0, result
    back = load_file(shop.runs / "back" / "model.safetensors")
    assert all(torch.equal(tensor, back[name]) for name, tensor in model.to_checkpoint_names().items())


def test_another_model_in_its_place_leaves_nothing_of_the_first(tmp_path: Path, hub: FakeHub) -> None:
    stale = {"training/metrics.jsonl", "training-run-chart.png", "pytorch_model.bin"}
    stale |= {"model-00001-of-00002.safetensors", "adapter_config.json", "vocab.json", "chat_template.jinja"}
    stale |= {"gpt.py", "inference.py", "modeling_ddp_pretrain.py"}
    kept = {"examples/one.safetensors", "notes.md"}
    hub.models["me/x"] = FakeDataset({name: FakeFile(b"old") for name in stale | kept})
    write_checkpoint(tmp_path / "c", small(tie_weights=True, n_layers=2))
    said = convert(tmp_path, "publish", "c", "me/x", environment=hub_variables(hub, tmp_path / "home")).stdout
    assert "--datasets-dir" not in said, "it could not measure a model whose dataset is not known"
    own = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert set(hub.models["me/x"].files) == own | {"tokenizer.json", "tokenizer_config.json"} | kept


def check_card(card: str, run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    _, front, body = card.split("---\n", 2)
    told = yaml.safe_load(front)
    assert told["library_name"] == "transformers"
    assert told["license"] == "mit"
    assert told["datasets"] == ["local/letters"]
    [result] = told["model-index"][0]["results"]
    loss = result["metrics"][0]["value"]
    assert f"| test | {loss:.3f} | `local/letters`, test split |" in body
    assert f"| ${amount_text(summary['dollars']['total'])} (setup ${amount_text(summary['dollars']['setup'])}, " in body
    rows = {row[1].strip(): row[3].strip() for line in body.splitlines() if len(row := line.split("|")) == 5}
    # Training saw all 1,280 tokens that it asked for, of 4,000; validation uses three batches of 2 x 16 tokens.
    assert rows["training"] == "`local/letters`, train split, the last steps of the training on tokens 0 to 1,280"
    assert rows["validation"] == "`local/letters`, validation split, tokens 0 to 96, at the last validation"
    assert f"{summary['tokens_per_second']:,.0f} tokens per second" in body
    assert 'from_pretrained("me/tiny")' in body
    assert "![Losses during training](training-run-chart.png)" in body
    assert '"learning_rate": 0.0004' in body


def card_of(path: Path, **meta: Any) -> str:
    """Return the card of a checkpoint that records `meta`."""
    write_checkpoint(path / "c", small(), **meta)
    return convert(path, "publish", "c", "me/x", "--card").stdout


def test_the_card_of_a_mixture_names_no_tokens_of_a_single_text(tmp_path: Path) -> None:
    train = {"start_train_token": 0, "start_val_token": 0, "validation_sequences": 6}
    mixture = {"name": "a/b + c/d"}
    card = card_of(tmp_path, train_loss=3.5, val_loss=3.6, dataset=mixture, train=train, tokens_seen=99)
    assert "train split, the last steps of the training on 99 tokens" in card
    assert "validation split, 6 sequences" in card


@pytest.mark.parametrize("weights", [None, "../gpt2/model.safetensors"])
def test_the_card_tells_where_training_began(tmp_path: Path, weights: str | None) -> None:
    train = {"initial_weights": weights}
    write_checkpoint(tmp_path / "c", small(), dataset={"name": "a/b"}, train=train, tokens_seen=9)
    card = " ".join(convert(tmp_path, "publish", str(tmp_path / "c"), "me/x", "--card").stdout.split())
    begins = "trained further, from other weights, on 9 tokens of `a/b`: it continues text. ##"
    anew = "parameters, pre-trained on 9 tokens of `a/b`: it continues text, and has not been taught"
    assert [words in card for words in (anew, begins)] == [weights is None, weights is not None]


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"imported_from": "me/instruct"}, "Its weights were imported from `me/instruct`. ##"),
        ({"imported_from": None}, "##"),  # from a folder
        ({}, "##"),  # unknown weights, such as another model's export for the notebook
    ],
    ids=str,
)
def test_the_card_of_a_model_trained_elsewhere_claims_nothing_about_its_training(
    tmp_path: Path, meta: dict[str, Any], says: str
) -> None:
    card = " ".join(card_of(tmp_path, **meta).split())
    assert re.search(rf"A GPT-2-class model of [\d,]+ parameters: it continues text. {re.escape(says)}", card)
    assert "| made with |" not in card


def test_a_checkpoint_that_records_little_has_a_card(tmp_path: Path) -> None:
    """A checkpoint of the notebook's program records little more than its losses. --card prints its card without a
    Hub."""
    card = card_of(tmp_path, train_loss=3.5, val_loss="x", global_step=7, is_best=True)
    front = yaml.safe_load(card.split("---\n", 2)[1])
    assert "license" not in front
    assert "model-index" not in front
    assert "| training | 3.500 | not recorded |" in card
    assert "validation" not in card
    assert "| global steps | 8 |" in card


@pytest.mark.parametrize(
    "meta",
    [
        {"dataset": {"name": 5}, "train": 3, "tokens_seen": "a", "global_step": "x"},
        {
            "dataset": {"name": "a/b"},
            "train": {"start_val_token": 1.5, "validation_batches": True},
            "train_loss": 1e999,
        },
        {"dataset": 3, "train": [], "tokens_seen": -1, "val_loss": 2},
    ],
    ids=["types", "numbers", "others"],
)
def test_a_card_survives_what_other_programs_write(tmp_path: Path, meta: dict[str, Any]) -> None:
    card = card_of(tmp_path, **meta)
    assert card.startswith("---\n")
    assert "| training |" not in card
    assert "| inf" not in card


def test_what_a_publishing_may_not_do(tmp_path: Path, hub: FakeHub) -> None:
    write_checkpoint(tmp_path / "c", small())
    refused(tmp_path, "publish", "c", "tiny", says="give owner/name")
    environment = hub_variables(hub, tmp_path / "home")
    hub.upload_status = 403
    for arguments, variables, says in (
        (("publish", "c", "me/x"), {}, 'model "me/x": access refused'),
        (("publish", "c", "me/x"), {"HF_HUB_OFFLINE": "1"}, "needs the network, but HF_HUB_OFFLINE is set"),
        (("import", "me/x", "r"), {"HF_HUB_CACHE": "/proc/nothing"}, "/proc"),
        (("import", "me/nothing", "r"), {}, 'model "me/nothing": not found'),
    ):
        result = convert(tmp_path, *arguments, expect=2, environment=environment | variables)
        assert "hf_secret" not in result.refuses(says)
    refused(tmp_path, "import", "me/nothing", "r", says="HF_HUB_OFFLINE")
    assert not (tmp_path / "runs").exists()
