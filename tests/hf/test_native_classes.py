"""Models with levers as transformers' native classes, which compute the same; or a refusal by the lever's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.errors import StrictDataclassClassValidationError

from gpt import GPTModel
from harness.common.errors import UserError
from harness.data.tokenizers.load import load_tokenizer
from harness.hf import gpt2_format, llama_format
from harness.model.export_formats import choose_format, missing_for_export
from tests.hf.test_convert_hf import convert, refused, write_checkpoint
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.launch import Workshop

LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu"}
SOURCE = Path("r/model.json")
QWEN: dict[str, Any] = {**LLAMA, "qk_norm": True, "linear_bias": False}


def peer_of(model: GPTModel) -> Any:
    """The native class with the weights of `model`."""
    name = choose_format(model.config, SOURCE)
    native: Any = gpt2_format if name == "gpt2" else llama_format
    settings = native.to_config(model.config, 0, "float32")
    kind = settings.pop("model_type")
    automatic: Any = transformers.AutoConfig
    config = automatic.for_model(kind, **settings, attn_implementation="eager")
    build: Any = transformers.AutoModelForCausalLM
    peer = build.from_config(config).eval()
    assert type(peer).__name__ == settings["architectures"][0]
    missing, surplus = peer.load_state_dict(native.to_tensors(model.to_checkpoint_names(), model.config), strict=False)
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


def test_softcap_is_gemma_2s() -> None:
    """Gemma 2's head on our features: the rest of its blocks has no counterpart here."""
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "final_logit_softcapping": 2.5}
    gemma: Any = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).eval()
    model = random_model(shape(logit_softcap=2.5)).eval()
    tokens = random_tokens(model.config)
    with torch.no_grad():
        seen: list[torch.Tensor] = []
        gemma.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        theirs = gemma(tokens).logits
        model.out_head.weight.copy_(gemma.lm_head.weight)
        torch.testing.assert_close(model.out_head(seen[0]), theirs)


@pytest.mark.parametrize("changes", [{**LLAMA, "tie_weights": True}, QWEN], ids=["llama", "qwen3"])
def test_exported_folders_load_as_the_native_class(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = shape(vocab_size=300, **changes)
    model = write_checkpoint(tmp_path / "c", config)
    convert(tmp_path, "export", str(tmp_path / "c"), str(tmp_path / "out"))
    automatic: Any = transformers.AutoModelForCausalLM
    loaded, report = automatic.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokens = random_tokens(config)
    with torch.no_grad():
        assert (model(tokens) - loaded.eval()(tokens).logits).abs().max() < 1e-5


def test_transformers_samples_what_test_smoke_prints(tmp_path: Path) -> None:
    """Generation with the caches of both, here with rotary positions and shared heads."""
    config = shape(vocab_size=300, **QWEN, n_kv_heads=2)
    model = write_checkpoint(tmp_path / "c", config)
    (tmp_path / "model.json").write_text(config.model_dump_json())
    own = load_tokenizer(tmp_path / "c" / "tokenizer.json")
    peer = peer_of(model)
    output = peer.generate(
        torch.tensor([own.encode("def f(")]), max_new_tokens=12, do_sample=False, eos_token_id=own.eot_token
    )
    arguments = [str(tmp_path / "model.json"), str(tmp_path / "c" / "model.safetensors"), "--prompt", "def f("]
    printed = Workshop(tmp_path).script("test_smoke.py", *arguments, "--num-tokens", "12", "--temperature", "0").stdout
    assert printed == own.decode([token for token in output[0].tolist() if token != own.eot_token]) + "\n"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"position": "rope"}, "norm"),
        ({**LLAMA, "mlp": "relu2"}, "mlp"),
        ({**LLAMA, "qk_norm": True}, "linear_bias"),
        ({**LLAMA, "logit_softcap": 15.0}, "logit_softcap"),
        ({**LLAMA, "value_embeddings": 1}, "value_embeddings"),
        ({**LLAMA, "embedding_skip": True}, "embedding_skip"),
        ({**LLAMA, "bigram_embedding": 50}, "bigram_embedding"),
        ({"norm": "rmsnorm"}, "norm"),
        ({"mlp": "swiglu"}, "mlp"),
        ({"qk_norm": True}, "qk_norm"),
        ({"n_kv_heads": 2}, "n_kv_heads"),
        ({"head_dim": 10}, "head_dim"),
        ({"emb_dim": 50, "head_dim": 12}, "emb_dim"),
        ({"logit_softcap": 15.0}, "logit_softcap"),
        ({"value_embeddings": 1}, "value_embeddings"),
        ({"embedding_skip": True}, "embedding_skip"),
        ({"bigram_embedding": 50}, "bigram_embedding"),
        ({"moe": {"num_experts": 4, "num_active_experts": 2}}, "moe"),
        ({**LLAMA, "moe": {"num_experts": 4, "num_active_experts": 2}}, "moe"),
    ],
    ids=str,
)
def test_what_no_native_class_computes_is_refused_by_the_keys_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f'^r/model.json: --format transformers cannot write .*"{key}": '):
        choose_format(shape(**changes), SOURCE)


def test_all_that_is_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    """Every format is named, the nearest first; by the export of a model like the quickstart's, and by its plan."""
    levers: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "qk_norm": True, "mlp": "relu2"}
    config = shape(vocab_size=300, **levers, value_embeddings=1, linear_bias=False)
    write_checkpoint(tmp_path / "c", config)
    needed = (
        'let model.json have "value_embeddings": null and, for the nearest format first: qwen3: "mlp": "swiglu"; '
        'llama: "mlp": "swiglu", "qk_norm": false; gpt2: "position": "learned", "norm": "layernorm", "qk_norm": false; '
        'notebook: "position": "learned", "norm": "layernorm", "qk_norm": false, "mlp": "gelu", "linear_bias": true\n'
    )
    for asked in ("transformers", "notebook"):
        refused(tmp_path, "export", str(tmp_path / "c"), "out", "--format", asked, says=needed)
    shop = Workshop(tmp_path)
    shop.add_dataset()
    for name, model, says in (
        ("r", config.model_dump(mode="json"), 'to no format; the nearest, qwen3, needs "mlp": "swiglu",'),
        ("plain", {}, "gpt2, notebook"),
        ("experts", {"moe": {"num_experts": 2, "num_active_experts": 2}}, "notebook"),
    ):
        shop.add_run(name, model=model)
        assert f"\nexport           {says}" in shop.attempt("--plan", run=name).stdout


def test_widths_that_heads_do_not_divide() -> None:
    """transformers refuses such a Llama, and computes such a Qwen 3."""
    odd: dict[str, Any] = {"emb_dim": 50, "head_dim": 12}
    sizes: dict[str, Any] = {"hidden_size": 50, "num_attention_heads": 4, "head_dim": 12}
    with pytest.raises(StrictDataclassClassValidationError, match="not a multiple of the number of attention heads"):
        transformers.LlamaConfig(**sizes)
    for name, config in (("llama", shape(**LLAMA, **odd)), ("notebook", shape(emb_dim=50, head_dim=12))):
        assert missing_for_export(config)[name] == ['"emb_dim": a multiple of 4']
    model = random_model(shape(**QWEN, **odd)).eval()
    tokens = random_tokens(model.config)
    with torch.no_grad():
        assert (model(tokens) - peer_of(model)(tokens).logits).abs().max() < 2e-5


@pytest.mark.parametrize(
    "changes", [{"linear_bias": False}, {"mlp": "relu2"}, {"mlp_dim": 8}, {"drop_rate": {}}], ids=str
)
def test_what_the_notebook_has_not_is_refused_though_gpt2_has_it(changes: dict[str, Any]) -> None:
    config = shape(**changes)
    assert choose_format(config, SOURCE) == "gpt2"
    with pytest.raises(UserError, match=f'--format transformers can; .*first: notebook: "{next(iter(changes))}": '):
        choose_format(config, SOURCE, for_notebook=True)
