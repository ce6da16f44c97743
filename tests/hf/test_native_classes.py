"""Models with levers, exported as transformers' native classes or with gpt.py's code, or refused with the lever
named."""

from __future__ import annotations

import atexit
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpt import GPTModel
from harness.common.errors import UserError
from harness.common.json_files import read_json_object
from harness.data.tokenizers import load_tokenizer
from harness.evaluation.generation import GREEDY, sample_tokens
from harness.hf.formats import peer_config, peer_tensors
from harness.model.export_formats import check_for_notebook, missing_for_export, native_class
from tests.hf.test_convert_hf import LLAMA, assert_same_logits, convert, refused, write_checkpoint
from tests.model.test_levers import ALL
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.forking import run_to_the_end
from tests.support.in_process import InProcess
from tests.support.isolation import ROOT, SHIPPED_RUNS

QWEN: dict[str, Any] = {**LLAMA, "qk_norm": True, "linear_bias": False}


def peer_of(model: GPTModel) -> Any:
    """Return a model of the native class with the weights of `model`."""
    import transformers

    kind = str(native_class(model.config))
    settings = peer_config(kind, model.config)
    automatic: Any = transformers.AutoConfig
    config = automatic.for_model(settings.pop("model_type"), **settings, attn_implementation="eager")
    build: Any = transformers.AutoModelForCausalLM
    peer = build.from_config(config).eval()
    assert type(peer).__name__ == settings["architectures"][0]
    missing, surplus = peer.load_state_dict(peer_tensors(kind, model), strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.config.tie_weights else set())
    assert not surplus
    return peer


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (LLAMA, "llama"),
        ({**LLAMA, "linear_bias": False, "n_kv_heads": 2, "tie_weights": True, "rope_base": 777.0}, "llama"),
        ({**LLAMA, "qkv_bias": True, "head_dim": 18, "mlp_dim": 40, "n_kv_heads": 1}, "llama"),
        ({**LLAMA, "norm_gain": False, "linear_bias": False}, "llama"),
        (QWEN, "qwen3"),
        ({**QWEN, "norm_gain": False, "n_kv_heads": 2, "head_dim": 16, "tie_weights": True}, "qwen3"),
        ({"mlp": "relu2", "mlp_dim": 56}, "gpt2"),
        ({"linear_bias": False, "initialisation": "zero_residual"}, "gpt2"),
    ],
    ids=str,
)
def test_native_classes_give_the_same_logits_and_gradients(changes: dict[str, Any], kind: str) -> None:
    model = random_model(shape(**changes)).eval()
    peer = peer_of(model)
    assert peer.config.model_type == kind
    tokens, targets = random_tokens(model.config), random_tokens(model.config, seed=4)
    theirs = peer(tokens).logits
    assert theirs.abs().max() > 1, "logits near zero would agree by themselves"
    assert (model(tokens) - theirs).abs().max() < 2e-5
    model(tokens, targets).backward()
    F.cross_entropy(theirs.flatten(0, 1), targets.flatten()).backward()
    embedding = peer.get_input_embeddings().weight
    torch.testing.assert_close(model.tok_emb.weight.grad, embedding.grad, rtol=1e-3, atol=1e-6)


EXPERTS = {"num_experts": 4, "num_active_experts": 2}
NEITHER = {"logit_softcap": 15.0, "value_embeddings": 1, "embedding_skip": True, "bigram_embedding": 50, "moe": EXPERTS}
NOT_GPT2: dict[str, Any] = {"norm": "rmsnorm", "mlp": "swiglu", "qk_norm": True, "n_kv_heads": 2, "head_dim": 10}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        *(({key: value}, key) for key, value in {**NOT_GPT2, **NEITHER}.items()),
        *(({**LLAMA, key: value}, key) for key, value in {"mlp": "relu2", **NEITHER}.items()),
        ({"position": "rope"}, "norm"),
        ({**LLAMA, "qk_norm": True}, "linear_bias"),
        ({"emb_dim": 50, "head_dim": 12}, "emb_dim"),
    ],
    ids=str,
)
def test_what_no_native_class_computes_is_told_by_the_keys_name(changes: dict[str, Any], key: str) -> None:
    assert native_class(shape(**changes)) is None
    lacking = missing_for_export(shape(**changes))
    assert all(lacking[name] for name in ("gpt2", "llama", "qwen3"))
    assert any(each.startswith(f'"{key}": ') for needed in lacking.values() for each in needed)


def test_all_that_is_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    """The refusal names every key that has to change for the notebook's format. --plan names those that have to change
    for the nearest native class."""
    levers: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "qk_norm": True, "mlp": "relu2"}
    config = shape(vocab_size=300, **levers, value_embeddings=1, linear_bias=False)
    write_checkpoint(tmp_path / "c", config)
    needed = (
        "--format notebook cannot write this model; use --format transformers, or train a model whose "
        'model.json has "position": "learned", "norm": "layernorm", "qk_norm": false, "value_embeddings": null, '
        '"mlp": "gelu", "linear_bias": true'
    )
    assert refused(tmp_path, "export", "c", "out", "--format", "notebook", says=needed).endswith(needed)
    shop = InProcess(tmp_path)
    shop.add_dataset()
    by_code = "transformers with trust_remote_code; the nearest native class, "
    moe = {"num_experts": 2, "num_active_experts": 2}
    for name, model, says in (
        ("r", config.model_dump(mode="json"), f'{by_code}qwen3, needs "mlp": "swiglu", "value_embeddings": null'),
        ("plain", {}, "gpt2, notebook"),
        ("experts", {"moe": moe}, f'notebook, {by_code}gpt2, needs "moe": null'),
    ):
        shop.add_run(name, model=model)
        assert f" export {says}" in " ".join(shop.attempt("--plan", run=name).stdout.split())


def test_widths_that_heads_do_not_divide() -> None:
    """transformers refuses a Llama whose `emb_dim` is not a multiple of the number of heads, so such a model cannot be
    exported as one, and not in the notebook's format either. A Qwen 3 of that width has the logits of our model."""
    import transformers
    from huggingface_hub.errors import StrictDataclassClassValidationError

    odd: dict[str, Any] = {"emb_dim": 50, "head_dim": 12}
    with pytest.raises(StrictDataclassClassValidationError, match="not a multiple of the number of attention heads"):
        transformers.LlamaConfig(hidden_size=50, num_attention_heads=4, head_dim=12)
    for name, config in (("llama", shape(**LLAMA, **odd)), ("notebook", shape(**odd))):
        assert missing_for_export(config)[name] == ['"emb_dim": a multiple of 4']
    model = random_model(shape(**QWEN, **odd)).eval()
    assert_same_logits(model, peer_of(model))


@pytest.mark.parametrize(
    "changes", [{"linear_bias": False}, {"mlp": "relu2"}, {"mlp_dim": 8}, {"drop_rate": {}}], ids=str
)
def test_what_the_notebook_has_not_is_refused_though_gpt2_has_it(changes: dict[str, Any]) -> None:
    config = shape(**changes)
    assert native_class(config) == "gpt2"
    with pytest.raises(UserError, match=f'^r/model.json: .*use --format transformers, .*"{next(iter(changes))}": '):
        check_for_notebook(config, Path("r/model.json"))


# Models without a native class are exported with the code of gpt.py


OWN: dict[str, dict[str, Any]] = {
    "all": ALL,
    "experts": {"moe": EXPERTS, "mlp": "swiglu", "tie_weights": True},
    "the quickstart's": {
        **read_json_object(SHIPPED_RUNS / "quickstart" / "model.json"),
        "vocab_size": 300,
        "context_length": 24,
        "bigram_embedding": 50,
        "drop_rate": {"embedding": 0.1},
    },
}
# Runs as on another machine: this project is not in the path, and none of its modules is loaded.
PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = torch.load("tokens.pt")
for name in names:
    model, report = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, attn_implementation="sdpa")
    assert "harness" not in sys.modules and "gpt" not in sys.modules
    out = {"logits": model.eval()(tokens).logits, "loss": model(tokens, labels=tokens).loss}
    def generated(tokens, **options):
        return model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, **options)
    out["generated"] = generated(tokens[:, :9])
    out["without cache"] = generated(tokens[:, :9], use_cache=False)
    left = torch.cat((torch.zeros(1, 4, dtype=torch.int64), tokens[1:, 4:9]), 1)
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    out["padded"] = generated(torch.cat((tokens[:1, :9], left)), attention_mask=mask)
    out["beams"] = generated(tokens[:1, :9], num_beams=3)
    for use_cache in (True, False):
        try:
            model.generate(tokens[:, :9], max_new_tokens=99, eos_token_id=None, pad_token_id=0, use_cache=use_cache)
            raise AssertionError("more tokens than the context length")
        except ValueError as error:
            assert "context length" in str(error)
    # Else Trainer expects `forward` to divide the loss by `num_items_in_batch`, which it ignores.
    assert not model.accepts_loss_kwargs
    out["beams without cache"] = generated(tokens[:1, :9], num_beams=3, use_cache=False)
    found = {key: each.detach() for key, each in out.items()}
    found["tokenizer"] = AutoTokenizer.from_pretrained(name).encode("def f(x)")
    torch.save(found, name + ".pt")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GPTModel, dict[str, Any]]]:
    """Models without a native class (OWN), each with the results that another process computed from the exported
    folder. That process does not have this project in its path."""
    path = tmp_path_factory.mktemp("elsewhere")
    models = {name: write_checkpoint(path / "c" / name, shape(**{"vocab_size": 300, **OWN[name]})) for name in OWN}
    for name, model in models.items():
        said = convert(path, "export", f"c/{name}", name).stdout
        assert "with code of its own (trust_remote_code=True)" in said
        code = [file.read_text() for file in (path / name).glob("*.py")]
        assert not [text for text in code if re.search(r"^\s*(from|import) +harness", text, re.M)]
        torch.save(random_tokens(model.config), path / "tokens.pt")
    child = os.fork()  # a cold process would import torch and transformers again
    if not child:
        atexit._clear()  # the fork must not run the exit functions of the test process
        sys.path = [each for each in sys.path if Path(each).resolve() != ROOT]
        for name in [name for name in sys.modules if name.partition(".")[0] in ("gpt", "harness", "bench", "tests")]:
            del sys.modules[name]
        os.chdir(path)
        run_to_the_end(partial(exec, PROGRAM, {"names": [f"./{name}" for name in OWN]}))
    assert os.waitpid(child, 0)[1] == 0
    found = {name: torch.load(path / f"{name}.pt") for name in models}
    for name in models:
        assert load_tokenizer(path / "c" / name / "tokenizer.json").encode("def f(x)") == found[name]["tokenizer"]
    return {name: (model, found[name]) for name, model in models.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_any_model_goes_out_with_its_code(elsewhere: dict[str, tuple[GPTModel, dict[str, Any]]], name: str) -> None:
    """An exported model has the logits and the loss of our model, and generates the same tokens. Generation is compared
    with and without a cache, and with padded prompts."""
    model, found = elsewhere[name]
    tokens = random_tokens(model.config)
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-5)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(found["loss"], loss, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["without cache"], found["generated"])
    assert torch.equal(found["beams without cache"], found["beams"])

    def continued(prompt: list[int]) -> list[int]:
        tokens = sample_tokens(model, prompt, GREEDY)
        return [*prompt, *(next(tokens) for _ in range(8))]

    assert found["generated"].tolist() == [continued(row[:9]) for row in tokens.tolist()]
    assert found["padded"][1, 4:].tolist() == continued(tokens[1, 4:9].tolist())
