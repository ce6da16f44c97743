"""gpt.py against the truth: Hugging Face's GPT-2, torch's FLOP counter, and the public tensor names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.hf_weights import peer_of
from gpt import GPTModel, ModelConfig, TransformerBlock, load_model_config
from harness.common.errors import UserError

SOURCE = Path("other/model.safetensors")


def shape(**changes: Any) -> ModelConfig:
    small = {
        "vocab_size": 97,
        "context_length": 24,
        "emb_dim": 48,
        "n_heads": 4,
        "n_layers": 3,
        "drop_rate": 0.0,
        "qkv_bias": False,
    }
    return ModelConfig.model_validate({**small, **changes})


def random_model(config: ModelConfig, *, recompute_blocks: bool = False) -> GPTModel:
    """A model in which no tensor is at its initial 0 or 1, so that no wrong mapping stays unseen."""
    torch.manual_seed(7)
    model = GPTModel(config, recompute_blocks=recompute_blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def block_of(model: GPTModel, layer: int) -> TransformerBlock:
    block = model.trf_blocks[layer]
    assert isinstance(block, TransformerBlock)
    return block


def random_tokens(config: ModelConfig, batch: int = 2, seed: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, config.context_length), generator=generator)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_logits_are_those_of_hugging_faces_gpt2(attention: str, tied: bool, qkv_bias: bool) -> None:
    config = shape(tie_weights=tied, qkv_bias=qkv_bias)
    model = random_model(config).eval()
    peer = peer_of(model, attention).eval()
    tokens = random_tokens(config)
    with torch.no_grad():
        ours, theirs = model(tokens), peer(tokens).logits
    assert ours.dtype == torch.float32
    assert ours.shape == (2, config.context_length, config.vocab_size)
    assert theirs.abs().max() > 1, "logits near zero would agree by themselves"
    assert (ours - theirs).abs().max() < 1e-5


def test_loss_and_gradients_are_those_of_hugging_faces_gpt2() -> None:
    config = shape(qkv_bias=True)
    model = random_model(config)
    peer = peer_of(model)
    tokens, targets = random_tokens(config), random_tokens(config, seed=4)
    loss = model(tokens, targets)
    theirs = F.cross_entropy(peer(tokens).logits.flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    loss.backward()
    theirs.backward()
    grads = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for layer in range(config.n_layers):
        qkv_gradient = grads[f"transformer.h.{layer}.attn.c_attn.weight"]
        assert qkv_gradient is not None
        actual = block_of(model, layer).att.qkv.weight.grad
        torch.testing.assert_close(actual, qkv_gradient.T, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model.tok_emb.weight.grad, grads["transformer.wte.weight"], rtol=1e-3, atol=1e-6)


def test_shorter_sequences_than_the_context_are_allowed() -> None:
    model = random_model(shape()).eval()
    tokens = random_tokens(model.config)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens[:, :5]), model(tokens)[:, :5], rtol=1e-4, atol=1e-5)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model = random_model(shape())
    tokens, targets = random_tokens(model.config), random_tokens(model.config, seed=4)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_layers": 12, "emb_dim": 64},
        {"emb_dim": 256, "vocab_size": 4096, "n_layers": 6},
        {"emb_dim": 768, "n_heads": 12, "n_layers": 2, "vocab_size": 50257, "context_length": 16},
    ],
)
def test_a_fresh_model_knows_nothing(changes: dict[str, int], tied: bool) -> None:
    config = shape(tie_weights=tied, **changes)
    torch.manual_seed(0)
    model = GPTModel(config).eval()
    batch = 2048 // config.context_length if config.vocab_size < 10_000 else 16
    with torch.no_grad():
        loss = model(random_tokens(config, batch), random_tokens(config, batch, seed=5)).item()
    assert loss == pytest.approx(math.log(config.vocab_size), rel=0.02)


def test_initial_spread_of_the_weights() -> None:
    torch.manual_seed(0)
    model = GPTModel(shape(emb_dim=192, n_layers=2, vocab_size=512, qkv_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith(("att.out_proj.weight", "ff.layers.2.weight")):
            assert parameter.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05), name
        elif parameter.dim() == 2:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.05), name
        else:
            assert torch.all(parameter == (1 if name.endswith("scale") else 0)), name


def test_equal_seeds_give_equal_weights() -> None:
    def build(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return GPTModel(shape()).to_checkpoint_names()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tok_emb.weight"], other["tok_emb.weight"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_weights": True},
        {"qkv_bias": True},
        {"tie_weights": True, "qkv_bias": True, "n_layers": 1},
        {"vocab_size": 1000, "emb_dim": 96, "n_heads": 3, "n_layers": 5, "context_length": 7},
    ],
)
def test_parameters_is_the_real_count(changes: dict[str, Any]) -> None:
    config = shape(**changes)
    with torch.device("meta"):
        model = GPTModel(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 163_009_536), ({"tie_weights": True, "qkv_bias": True}, 124_439_808)],
    ids=["the lab notebook's", "OpenAI's"],
)
def test_parameters_of_gpt2_small(changes: dict[str, Any], count: int) -> None:
    config = shape(vocab_size=50257, context_length=1024, emb_dim=768, n_heads=12, n_layers=12, **changes)
    with torch.device("meta"):
        model = GPTModel(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(("device", "with_targets"), [("cpu", False), ("cpu", True), ("meta", False)])
@pytest.mark.parametrize("changes", [{}, {"tie_weights": True, "qkv_bias": True, "n_layers": 1, "vocab_size": 1000}])
def test_flops_per_token_is_three_counted_forwards(changes: dict[str, Any], device: str, with_targets: bool) -> None:
    """The counter takes 2 for each multiplication and addition of the matrix products, and both products of uncausal
    attention: 4·T²·C a layer. Norms, GELU and softmax count nothing in either."""
    config = shape(**changes)
    with torch.device(device):
        model = GPTModel(config)
    tokens = random_tokens(config, batch=1).to(device)
    # The loss is one operation: of its products, a forward pass has that of the head.
    head = {
        torch.ops.ddp_pretrain.linear_cross_entropy: lambda features, weight, *_, **__: 2 * features[0] * weight.numel()
    }
    # Plain products: torch 2.11's counter knows nothing of the CPU's fused attention.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=head) as counter:
        model(tokens, tokens) if with_targets else model(tokens)
    assert 3 * counter.get_total_flops() == config.flops_per_token * config.context_length


def public_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The published format, written out independently of the model."""
    c = config.emb_dim
    shapes: dict[str, tuple[int, ...]] = {
        "tok_emb.weight": (config.vocab_size, c),
        "pos_emb.weight": (config.context_length, c),
        "final_norm.scale": (c,),
        "final_norm.shift": (c,),
        "out_head.weight": (config.vocab_size, c),
    }
    for block in (f"trf_blocks.{layer}" for layer in range(config.n_layers)):
        for part in ("W_query", "W_key", "W_value"):
            shapes[f"{block}.att.{part}.weight"] = (c, c)
            if config.qkv_bias:
                shapes[f"{block}.att.{part}.bias"] = (c,)
        shapes |= {f"{block}.att.out_proj.weight": (c, c), f"{block}.att.out_proj.bias": (c,)}
        shapes |= {f"{block}.ff.layers.0.weight": (4 * c, c), f"{block}.ff.layers.0.bias": (4 * c,)}
        shapes |= {f"{block}.ff.layers.2.weight": (c, 4 * c), f"{block}.ff.layers.2.bias": (c,)}
        shapes |= {f"{block}.norm{n}.{name}": (c,) for n in (1, 2) for name in ("scale", "shift")}
    return shapes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_public_names_and_shapes(tied: bool, qkv_bias: bool) -> None:
    config = shape(tie_weights=tied, qkv_bias=qkv_bias)
    tensors = GPTModel(config).to_checkpoint_names()
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == public_shapes(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_weights_survive_the_round_trip_bit_for_bit(tied: bool, qkv_bias: bool) -> None:
    config = shape(tie_weights=tied, qkv_bias=qkv_bias)
    model = random_model(config)
    tensors = model.to_checkpoint_names()
    torch.manual_seed(99)
    other = GPTModel(config)
    other.load_checkpoint_tensors(tensors, SOURCE)
    again = other.to_checkpoint_names()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    tokens = random_tokens(config)
    assert torch.equal(model.eval()(tokens), other.eval()(tokens))
    assert (other.out_head.weight is other.tok_emb.weight) == tied


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


def test_checkpoint_tensors_do_not_depend_on_how_query_key_and_value_are_held() -> None:
    """Attention recomputed from the public tensors alone, as an unfused model would."""
    config = shape(n_layers=1, qkv_bias=True)
    model = random_model(config)
    attention, tensors = block_of(model, 0).att, model.to_checkpoint_names()
    x_BxTxC = torch.randn(2, config.context_length, config.emb_dim)

    def project(part: str, x: Tensor) -> Tensor:
        prefix = f"trf_blocks.0.att.{part}"
        return F.linear(x, tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"])

    q, k, v = (
        project(part, x_BxTxC).view(2, config.context_length, config.n_heads, -1).transpose(1, 2)
        for part in ("W_query", "W_key", "W_value")
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(config.emb_dim // config.n_heads)
    hidden = torch.ones(config.context_length, config.context_length, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    expected = project("out_proj", mixed.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(attention(x_BxTxC), expected, rtol=1e-4, atol=1e-5)


def test_files_with_attention_masks_load() -> None:
    model = random_model(shape())
    tensors = model.to_checkpoint_names()
    size = model.config.context_length
    masks = {f"trf_blocks.{layer}.att.mask": torch.ones(size, size).triu(1) for layer in range(model.config.n_layers)}
    other = GPTModel(model.config)
    other.load_checkpoint_tensors({**tensors, **masks}, SOURCE)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in other.to_checkpoint_names().items())


@pytest.mark.parametrize("left_out", ["out_head.weight", "tok_emb.weight"])
def test_a_tied_model_loads_files_with_either_half_of_the_pair(left_out: str) -> None:
    """safetensors' save_model keeps one name of a shared tensor: the first in the alphabet."""
    model = random_model(shape(tie_weights=True))
    tensors = model.to_checkpoint_names()
    del tensors[left_out]
    other = GPTModel(model.config)
    other.load_checkpoint_tensors(tensors, SOURCE)
    assert torch.equal(other.out_head.weight, model.out_head.weight)


def test_half_precision_files_load_into_fp32() -> None:
    model = random_model(shape())
    tensors = {name: tensor.bfloat16() for name, tensor in model.to_checkpoint_names().items()}
    other = GPTModel(model.config)
    other.load_checkpoint_tensors(tensors, SOURCE)
    assert all(torch.equal(tensor, tensors[name].float()) for name, tensor in other.to_checkpoint_names().items())


Damage = Callable[[dict[str, Tensor]], object]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("trf_blocks.1.att.W_key.weight", lambda tensors: tensors.pop("trf_blocks.1.att.W_key.weight")),
        ("trf_blocks.3.norm1.scale", lambda tensors: tensors.update({"trf_blocks.3.norm1.scale": torch.ones(48)})),
        (
            "trf_blocks.0.att.W_query.bias",
            lambda tensors: tensors.update({"trf_blocks.0.att.W_query.bias": torch.ones(48)}),
        ),
        ("_orig_mod.tok_emb.weight", lambda tensors: tensors.update({"_orig_mod.tok_emb.weight": torch.ones(97, 48)})),
        ("pos_emb.weight", lambda tensors: tensors.update({"pos_emb.weight": torch.ones(25, 48)})),
        ("final_norm.shift", lambda tensors: tensors.update({"final_norm.shift": torch.ones(1)})),
    ],
)
def test_another_models_tensors_are_refused_by_name(name: str, damage: Damage, tied: bool) -> None:
    model = random_model(shape(tie_weights=tied))
    tensors = {key: tensor + 1 for key, tensor in model.to_checkpoint_names().items()}
    damage(tensors)
    assert_refused(model, tensors, name)


def test_an_untied_file_is_refused_by_a_tied_model() -> None:
    model = random_model(shape(tie_weights=True))
    assert_refused(model, random_model(shape()).to_checkpoint_names(), "out_head")


@pytest.mark.parametrize("name", ["out_head.weight", "tok_emb.weight"])
def test_an_untied_model_needs_head_and_embedding(name: str) -> None:
    model = random_model(shape())
    tensors = model.to_checkpoint_names()
    del tensors[name]
    assert_refused(model, tensors, name)


def test_a_tied_model_needs_one_of_head_and_embedding() -> None:
    model = random_model(shape(tie_weights=True))
    tensors = model.to_checkpoint_names()
    del tensors["out_head.weight"], tensors["tok_emb.weight"]
    assert_refused(model, tensors, "tok_emb.weight")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_files_of_wrapped_models_load(prefix: str) -> None:
    model = random_model(shape())
    tensors = model.to_checkpoint_names()
    masks = {f"trf_blocks.{layer}.att.mask": torch.ones(24, 24) for layer in range(model.config.n_layers)}
    other = GPTModel(model.config)
    other.load_checkpoint_tensors({prefix + name: tensor for name, tensor in {**tensors, **masks}.items()}, SOURCE)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in other.to_checkpoint_names().items())


def test_a_refusal_names_what_differs_and_counts_the_rest() -> None:
    model = random_model(shape())
    tensors = random_model(shape(emb_dim=64)).to_checkpoint_names()
    with pytest.raises(UserError) as caught:
        model.load_checkpoint_tensors(tensors, SOURCE)
    message = str(caught.value)
    assert "tensor tok_emb.weight is [97, 64] in the file, [97, 48] in model.json; tensor pos_emb.weight is" in message
    assert f"and {len(tensors) - 3} more" in message


def assert_refused(model: GPTModel, tensors: dict[str, Tensor], name: str) -> None:
    before = model.to_checkpoint_names()
    with pytest.raises(UserError) as caught:
        model.load_checkpoint_tensors(tensors, SOURCE)
    message = str(caught.value)
    assert name in message
    assert str(SOURCE) in message
    assert "\n" not in message
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.to_checkpoint_names().items())


def test_depth_form_of_model_json(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"depth": 12, "vocab_size": 50257, "context_length": 1024}')
    config = load_model_config(path)
    assert (config.n_layers, config.n_heads, config.emb_dim) == (12, 12, 768)
    assert config.parameters == 163_009_536


@pytest.mark.parametrize("depth", [1, 3, 20])
def test_depth_gives_heads_of_64(depth: int) -> None:
    config = ModelConfig.model_validate({"depth": depth, "vocab_size": 10, "context_length": 4, "tie_weights": True})
    assert config.n_layers == depth
    assert config.emb_dim == 64 * depth
    assert config.emb_dim // config.n_heads == 64
    assert config.tie_weights


@pytest.mark.parametrize("drop_rate", [0.0, 0.2])
def test_recomputing_blocks_changes_no_gradient(drop_rate: float) -> None:
    config = shape(drop_rate=drop_rate)
    tokens, targets = random_tokens(config), random_tokens(config, seed=4)

    def gradients(recompute: bool) -> dict[str, Tensor]:
        model = random_model(config, recompute_blocks=recompute).double()
        torch.manual_seed(11)  # dropout masks
        model(tokens, targets).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    plain, recomputed = gradients(False), gradients(True)
    assert len(plain) == len(list(GPTModel(config).parameters()))
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-12, atol=1e-15, msg=name)


def test_recomputed_blocks_run_twice_in_training_and_once_without_gradients() -> None:
    model = random_model(shape(), recompute_blocks=True)
    calls: list[int] = []
    model.trf_blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = random_tokens(model.config)
    model(tokens, tokens).backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(tokens)
    assert len(calls) == 3


@pytest.mark.parametrize("position", [1, 10, 23])
def test_no_token_sees_a_later_one(position: int) -> None:
    model = random_model(shape()).eval()
    tokens = random_tokens(model.config)
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
    assert ((after - before)[:, position:].abs().amax(dim=-1) > 1e-4).all(), "and every later one sees it"


def test_dropout_acts_in_training_only() -> None:
    model = random_model(shape(drop_rate=0.3))
    tokens = random_tokens(model.config)
    with torch.no_grad():
        assert not torch.equal(model.train()(tokens), model(tokens))
        assert torch.equal(model.eval()(tokens), model(tokens))
        without = random_model(shape())
        assert torch.equal(model(tokens), without.train()(tokens)), "eval mode is the model without dropout"


@pytest.mark.parametrize("place", ["embeddings", "attention weights", "residuals"])
def test_every_dropout_of_gpt2_acts(place: str) -> None:
    """One at a time: all but the one under test are switched off."""
    model = random_model(shape(drop_rate=0.3, n_layers=1)).train()
    block = block_of(model, 0)
    model.drop.p = 0.3 if place == "embeddings" else 0.0
    block.att.drop_rate = 0.3 if place == "attention weights" else 0.0
    block.drop.p = block.mlp_drop.p = 0.3 if place == "residuals" else 0.0
    tokens = random_tokens(model.config)
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
