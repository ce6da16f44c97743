"""Levers, the options of model.json that change GPT-2's architecture: their formulas, initial weights, parameter
counts, checkpoints, cached generation and gradients."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from gpt import GPTModel, bigram_buckets
from harness.data.loader import Microbatch
from harness.evaluation.likelihood import Scorer
from harness.evaluation.loss import window_losses
from harness.model.cross_entropy import OPERATION
from harness.model.inference import NO_TOKEN, KeyValueCache
from harness.model.precision import Precision
from tests.model.test_linear_cross_entropy import compiled_kernels as compiled_kernels
from tests.model.test_model import block_of, random_model, random_tokens, shape

# Name -> keys of model.json, for each lever alone.
LEVERS: dict[str, dict[str, Any]] = {
    "no biases": {"linear_bias": False},
    "rope": {"position": "rope"},
    "rope with another base": {"position": "rope", "rope_base": 500.0},
    "rmsnorm": {"norm": "rmsnorm"},
    "rmsnorm without gain": {"norm": "rmsnorm", "norm_gain": False},
    "qk_norm": {"qk_norm": True},
    "qk_norm without gain": {"qk_norm": True, "norm_gain": False},
    "relu2": {"mlp": "relu2"},
    "swiglu": {"mlp": "swiglu"},
    "mlp_dim": {"mlp_dim": 56},
    "one key-value head": {"n_kv_heads": 1},
    "two key-value heads": {"n_kv_heads": 2, "qkv_bias": True},
    "head_dim": {"head_dim": 10},
    "softcap": {"logit_softcap": 2.5},
    "zero_residual": {"initialisation": "zero_residual"},
    "value embeddings": {"value_embeddings": 1},
    "value embeddings for each block": {"value_embeddings": 3, "n_kv_heads": 2},
    "embedding skip": {"embedding_skip": True},
    "bigrams": {"bigram_embedding": 50},
    "experts": {"moe": {"num_experts": 5, "num_active_experts": 2}},
    "gated experts without biases": {
        "moe": {"num_experts": 4, "num_active_experts": 3},
        "mlp": "swiglu",
        "linear_bias": False,
        "initialisation": "zero_residual",
    },
}
EXPERTS = {"num_experts": 5, "num_active_experts": 2}
LLAMA: dict[str, Any] = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "linear_bias": False}
ALL: dict[str, Any] = {
    **LLAMA,
    "qk_norm": True,
    "n_kv_heads": 2,
    "head_dim": 14,
    "mlp_dim": 72,
    "logit_softcap": 15.0,
    "value_embeddings": 1,
    "embedding_skip": True,
    "bigram_embedding": 50,
    "initialisation": "zero_residual",
}
CASES = {"GPT-2": {}, "GPT-2 tied": {"tie_weights": True, "qkv_bias": True}, **LEVERS, "all": ALL}
each_lever = pytest.mark.parametrize("changes", CASES.values(), ids=CASES.keys())


def loss_of(model: GPTModel, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the loss that training minimizes, as a scalar: the sum of cross-entropy and balancing loss."""
    return model(tokens, targets).sum()


# Formulas


def test_buckets_of_bigrams() -> None:
    tokens = torch.tensor([[3, 50_256, 3, 7], [7, 7, 0, 3]])
    buckets = bigram_buckets(tokens, F.pad(tokens, (1, -1), value=NO_TOKEN), 1001)
    rows = tokens.tolist()
    expected = [
        [1000 if at == 0 else ((36_313 * row[at]) ^ (27_191 * row[at - 1])) % 1000 for at in range(4)] for row in rows
    ]
    assert buckets.tolist() == expected
    assert bigram_buckets(torch.tensor([[2**31 - 1]]), torch.tensor([[2**31 - 2]]), 10).item() in range(9), (
        "the products need int64"
    )


def test_logits_are_capped_everywhere_they_are_made() -> None:
    """The cap holds in the logits, in losses of whole microbatches and of each sequence, and in likelihoods."""
    model, cap = random_model(shape(logit_softcap=0.5)).eval(), 0.5
    tokens, targets = random_tokens(model.config), random_tokens(model.config, seed=4)
    with torch.no_grad():
        raw = F.linear(model.features(tokens), model.out_head.weight)
        expected = cap * torch.tanh(raw / cap)
        assert raw.abs().max() > 2 * cap, "the cap does not change these logits"
        torch.testing.assert_close(model(tokens), expected)
        losses = F.cross_entropy(expected.transpose(1, 2), targets, reduction="none")
        torch.testing.assert_close(model(tokens, targets), losses.mean())
    row = tokens[0].tolist()
    precision = Precision("fp32", "cpu")
    [found] = Scorer(model, precision, 97, 4).score([(row[:10], row[10:])])
    assert found.total == pytest.approx(expected[0].log_softmax(-1)[range(9, 23), row[10:]].sum().item(), rel=1e-5)
    window = Microbatch.consecutive(torch.cat((tokens[0], targets[0, -1:])).numpy().astype("uint16"), 24)
    [mean] = window_losses(model, [window], precision)
    wanted = F.cross_entropy(expected[0], torch.cat((tokens[0, 1:], targets[0, -1:])))
    assert mean == pytest.approx(wanted.item(), rel=1e-5)


def reference(model: GPTModel, tokens: Tensor) -> Tensor:
    """Return the logits of a model with rope, rmsnorm without gain, relu2, no biases, value embeddings, embedding skip
    and bigram embedding, computed from its checkpoint tensors in fp64.

    The formulas are those of modded-nanogpt's train_gpt.py. Each block is x = λ0·x + λ1·x0; x += attention(norm(x)),
    with values λ0·v + λ1·embedding; x += mlp(norm(x)).
    """
    config, w = model.config, {name: tensor.double() for name, tensor in model.to_checkpoint_names().items()}
    heads, length = config.n_heads, tokens.shape[1]

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-5)

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(length).double()[:, None] * 10_000 ** (-torch.arange(half).double() / half)
        x1, x2 = x[..., :half], x[..., half:]
        return torch.cat((x1 * angles.cos() - x2 * angles.sin(), x1 * angles.sin() + x2 * angles.cos()), -1)

    before = F.pad(tokens, (1, 0))[:, :-1]
    hashed = torch.bitwise_xor(36_313 * tokens, 27_191 * before) % (config.bigram_embedding - 1)  # type: ignore[operator]
    hashed[:, 0] = config.bigram_embedding - 1  # type: ignore[operator]
    x = x0 = norm(w["tok_emb.weight"][tokens] + w["bigram_emb.weight"][hashed])
    for layer, table in zip(range(config.n_layers), (0, None, 0), strict=True):
        block = {
            name.removeprefix(f"trf_blocks.{layer}."): w[name] for name in w if name.startswith(f"trf_blocks.{layer}.")
        }
        x = block["skip.scale"][0] * x + block["skip.scale"][1] * x0
        q, k, v = (norm(x) @ block[f"att.W_{part}.weight"].T for part in ("query", "key", "value"))
        if table is not None:
            mix = block["att.value_mix.scale"]
            v = mix[0] * v + mix[1] * w[f"value_embs.{table}.weight"][tokens]
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        q, k = turn(norm(q)), turn(norm(k))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        x = x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2) @ block["att.out_proj.weight"].T
        hidden = (norm(x) @ block["ff.layers.0.weight"].T).relu().square()
        x = x + hidden @ block["ff.layers.2.weight"].T
    return norm(x) @ w["out_head.weight"].T


def test_embeddings_of_values_skip_and_bigrams_are_modded_nanogpts() -> None:
    levers = {"position": "rope", "norm": "rmsnorm", "norm_gain": False, "qk_norm": True, "mlp": "relu2"}
    extras = {"value_embeddings": 1, "embedding_skip": True, "bigram_embedding": 50, "linear_bias": False}
    model = random_model(shape(**levers, **extras)).double().eval()
    tokens = random_tokens(model.config)
    with torch.no_grad():
        expected = reference(model, tokens)
        torch.testing.assert_close(model(tokens), expected, rtol=1e-9, atol=1e-11)
        for name in ("bigram_emb.weight", "value_embs.0.weight", "trf_blocks.1.skip.scale"):
            changed = copy.deepcopy(model)
            changed.get_parameter(name).zero_()
            assert (changed(tokens) - expected).abs().max() > 1e-3, f"{name} does not affect the logits"


# Initialisation


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 512, "qkv_bias": True},
        {**ALL, "n_layers": 4, "value_embeddings": 2},
        *({"moe": EXPERTS, "initialisation": kind} for kind in ("gpt2", "zero_residual")),
    ],
    ids=str,
)
def test_what_a_fresh_model_begins_with(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPTModel(shape(**{"emb_dim": 192, "n_layers": 2, **changes}))
    residual = 0.0 if "zero" in model.config.initialisation else 0.02 / math.sqrt(2 * model.config.n_layers)
    for name, parameter in model.named_parameters():
        if name.endswith("value_mix.scale"):
            assert parameter.tolist() == [0.5, 0.5]
        elif name.endswith("skip.scale"):
            assert parameter.tolist() == [1, 0]
        elif parameter.dim() == 2:
            into_residual = name.endswith(("att.out_proj.weight", "layers.2.weight"))
            std = residual if into_residual else 0.0 if name == "bigram_emb.weight" else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.1 if "router" in name else 0.05), name
        else:
            assert torch.all(parameter == (1 if name.endswith("scale") else 0)), name


def test_every_parameter_learns() -> None:
    model = random_model(shape(**ALL))
    model(random_tokens(model.config), random_tokens(model.config, seed=4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


# Counts


@each_lever
def test_counts_are_the_real_ones(changes: dict[str, Any]) -> None:
    for tied in (False, True):
        config = shape(**changes | {"tie_weights": tied})
        model = GPTModel(config)
        assert config.parameters == sum(parameter.numel() for parameter in model.parameters())
    head = {
        getattr(torch.ops.ddp_pretrain, OPERATION): lambda features, weight, *_, **__: 2 * features[0] * weight.numel()
    }
    tokens = random_tokens(config, batch=1)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=head) as counter:
        model(tokens, tokens)
    assert 3 * counter.get_total_flops() == config.flops_per_token * config.context_length


# Checkpoints


@each_lever
def test_checkpoints_hold_the_public_tensors_and_bring_them_back(changes: dict[str, Any]) -> None:
    model = random_model(shape(**changes)).eval()
    tensors = model.to_checkpoint_names()
    assert list(model.config.tensor_shapes().items()) == [(name, tuple(each.shape)) for name, each in tensors.items()]
    other = GPTModel(model.config).eval()
    other.load_checkpoint_tensors(tensors, Path("model.safetensors"))
    assert all(torch.equal(each, tensors[name]) for name, each in other.to_checkpoint_names().items())
    assert (other.out_head.weight is other.tok_emb.weight) == model.config.tie_weights
    tokens = random_tokens(model.config)
    with torch.no_grad():
        assert torch.equal(model(tokens), other(tokens))


# Generation with a cache


@each_lever
def test_reading_on_from_a_cache_gives_the_same_logits(changes: dict[str, Any]) -> None:
    """A model that reads its input in pieces, with a key-value cache, computes the same logits as in one pass over the
    whole input. Each call gives each row one to seven tokens, not always the same number for all rows. One row is
    removed after two calls."""
    model = random_model(shape(**changes)).double().eval()
    tokens, cache = random_tokens(model.config, batch=3), KeyValueCache()
    with torch.no_grad():
        whole = model(tokens)
        done, rows = [0, 0, 0], [0, 1, 2]
        for lengths in ([5, 7, 1], [1, 1, 1], [3, 1], [1, 1], [4, 6]):
            if len(lengths) < len(rows):
                cache.keep([0, 2])
                rows, done = [0, 2], [done[0], done[2]]
            given = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
            for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                given[at, :length] = tokens[row, done[at] : done[at] + length]
            logits = model.out_head(model.features(given, lengths, cache))
            for at, (row, length) in enumerate(zip(rows, lengths, strict=True)):
                expected = whole[row, done[at] : done[at] + length]
                torch.testing.assert_close(logits[at, :length], expected, rtol=1e-9, atol=1e-11)
                done[at] += length
    heads = model.config.n_kv_heads or model.config.n_heads
    assert {tensor.shape[1] for pair in cache.layers.values() for tensor in pair} == {heads}, (
        "more than attention needs"
    )


# How it is trained


@each_lever
def test_recomputed_blocks_give_the_same_gradients(changes: dict[str, Any]) -> None:
    config = shape(**changes, drop_rate=0.2)
    tokens, targets = random_tokens(config), random_tokens(config, seed=4)

    def gradients(recompute: bool) -> dict[str, Tensor | None]:
        model = random_model(config, recompute_blocks=recompute)
        model.moe_router_loss_scale = 0.1
        torch.manual_seed(11)  # dropout masks
        loss_of(model, tokens, targets).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        *((changes, torch.bfloat16) for changes in CASES.values()),
        *((CASES[name], torch.float16) for name in ("all", "experts", "rmsnorm")),
    ],
    ids=str,
)
def test_half_precision_is_near_fp32(changes: dict[str, Any], dtype: torch.dtype) -> None:
    """The loss with matrix products in half precision is within 2 % of fp32's. With bf16 the residual stream is in
    bf16, too."""
    model = random_model(shape(**changes))
    model.residual_dtype = torch.bfloat16 if dtype == torch.bfloat16 else None
    tokens, targets = random_tokens(model.config), random_tokens(model.config, seed=4)
    exact = loss_of(model, tokens, targets)
    with torch.autocast("cpu", dtype):
        seen: list[torch.dtype] = []
        model.final_norm.register_forward_pre_hook(lambda _, given: seen.append(given[0].dtype))
        half = loss_of(model, tokens, targets)
    assert seen == [torch.bfloat16 if dtype == torch.bfloat16 else torch.float32]
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(exact.item(), rel=0.02)
    half.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def trace(model: GPTModel) -> list[torch.fx.GraphModule]:
    """Set up `model` to be compiled at its next forward pass, and return the list to which that pass adds the graphs.
    The graphs run as they were traced. This is quick, because no machine code is generated."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, examples)

    model.compile(backend=backend, dynamic=False)
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {**ALL, "n_layers": 2, "vocab_size": 1009, "context_length": 70},
        {"moe": EXPERTS, "mlp": "swiglu", "emb_dim": 44, "linear_bias": False, "n_layers": 1, "tie_weights": True},
    ],
    ids=["all, with several chunks of logits", "experts, tied"],
)
def test_a_compiled_model_is_one_graph_with_the_same_gradients(changes: dict[str, Any], compiled_kernels: None) -> None:
    """A compiled model is one graph with one loss, and has the gradients of the uncompiled model. The chunks of logits
    are unequal. The widths of experts are no multiple of eight, so that they are padded, and blocks with experts are
    recomputed in the backward pass. A different load of the experts does not compile the model again."""
    model = random_model(shape(**changes), recompute_blocks="moe" in changes)
    model.moe_router_loss_scale = 0.1
    plain = copy.deepcopy(model)
    graphs = trace(model)
    for seed in (3, 5):
        tokens, targets = random_tokens(model.config, 5, seed=seed), random_tokens(model.config, 5, seed=4)
        ours, theirs = (each(tokens, targets) for each in (model, plain))
        for terms in (ours, theirs):
            terms.sum().backward()
        torch.testing.assert_close(ours, theirs)
        if "moe" in changes:
            assert torch.equal(model.expert_tokens, plain.expert_tokens)  # type: ignore[arg-type]
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    (graph,) = graphs
    assert len([node for node in graph.graph.nodes if "linear_cross_entropy" in str(node.target)]) == 1


@pytest.mark.parametrize("place", ["embedding", "attention_weights", "attention_output", "mlp_output"])
def test_each_place_of_dropout_acts_alone(place: str) -> None:
    model = random_model(shape(drop_rate={place: 0.3}, n_layers=1)).train()
    block = block_of(model, 0)
    rates = {"embedding": model.drop.p, "attention_weights": block.att.drop_rate}
    rates |= {"attention_output": block.drop.p, "mlp_output": block.mlp_drop.p}
    assert {name: rate for name, rate in rates.items() if rate} == {place: 0.3}
    tokens = random_tokens(model.config)
    with torch.no_grad():
        assert not torch.equal(model(tokens), model(tokens))
        without = random_model(shape(n_layers=1)).train()
        assert torch.equal(model.eval()(tokens), without(tokens)), "dropout acts in evaluation mode"


def test_one_rate_everywhere_is_the_four_places_bit_for_bit() -> None:
    tokens, losses = random_tokens(shape()), []
    for rate in (0.2, dict.fromkeys(("embedding", "attention_weights", "attention_output", "mlp_output"), 0.2)):
        model = random_model(shape(drop_rate=rate))
        torch.manual_seed(5)
        losses.append(model(tokens, tokens).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("changes", [{}, ALL], ids=["GPT-2", "all"])
def test_no_token_sees_a_later_one(changes: dict[str, Any]) -> None:
    model = random_model(shape(**changes)).eval()
    tokens = random_tokens(model.config)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % model.config.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :10], before[:, :10], rtol=0, atol=1e-6)
    assert ((after - before)[:, 10:].abs().amax(dim=-1) > 1e-5).all(), "a later token does not see the changed one"
