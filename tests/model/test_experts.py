"""A mixture of experts equals a loop over tokens and experts in fp64, and transformers' Mixtral."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gpt
from gpt import (
    FeedForward,
    GPTModel,
    MixtureOfExperts,
    experts_one_by_one,
    grouped_experts,
)
from tests.model.test_model import random_model, random_tokens, shape

MOE = {"num_experts": 5, "num_active_experts": 2}
KINDS: list[dict[str, Any]] = [
    {"mlp": mlp, "linear_bias": bias} for mlp in ("gelu", "relu2", "swiglu") for bias in (True, False)
]


def mixture(seed: int = 0, **changes: Any) -> MixtureOfExperts:
    """Return a MixtureOfExperts whose router prefers some experts."""
    torch.manual_seed(seed)
    made = MixtureOfExperts(shape(**{"moe": MOE, **changes}))
    with torch.no_grad():
        made.router.weight.normal_(std=0.3)
    return made


def some_input(dtype: torch.dtype = torch.float32, width: int = 48) -> Tensor:
    return torch.randn(2, 12, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def training(model: GPTModel, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Run the model as in training. Return both terms of the loss, of shape (2,), and the number of tokens of each
    expert of each block."""
    terms = model(tokens, targets)
    assert terms.shape == (2,)
    assert model.expert_tokens is not None
    return terms, model.expert_tokens


def by_token_and_expert(tensors: dict[str, Tensor], x: Tensor, mlp: str, active: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, tokens of each expert and balancing loss, computed from the tensors by a loop over the tokens and
    the experts of each."""
    bias = {name: tensor for name, tensor in tensors.items() if name.endswith("bias")}

    def linear(name: str, x: Tensor) -> Tensor:
        return tensors[f"{name}.weight"] @ x + bias.get(f"{name}.bias", 0)

    def expert(number: int, x: Tensor) -> Tensor:
        inner = linear(f"experts.{number}.layers.0", x)
        if mlp == "swiglu":
            inner = F.silu(linear(f"experts.{number}.gate", x)) * inner
        else:
            inner = F.gelu(inner, approximate="tanh") if mlp == "gelu" else inner.clamp(min=0) ** 2
        return linear(f"experts.{number}.layers.2", inner)

    rows, experts = x.flatten(0, 1), len(tensors["router.weight"])
    counts, mean_shares, outputs = [0] * experts, torch.zeros(experts, dtype=x.dtype), []
    for row in rows:
        shares = torch.exp(tensors["router.weight"] @ row)
        shares = shares / shares.sum()
        mean_shares = mean_shares + shares / len(rows)
        chosen = sorted(range(experts), key=lambda number: -shares[number].item())[:active]
        whole = sum(shares[number] for number in chosen)
        outputs.append(sum((shares[number] / whole * expert(number, row) for number in chosen), torch.zeros_like(row)))
        for number in chosen:
            counts[number] += 1
    loss = experts * sum(count / len(rows) * mean_shares[number] for number, count in enumerate(counts))
    return torch.stack(outputs).view_as(x), torch.tensor(counts), torch.as_tensor(loss)


# The layer


@pytest.mark.parametrize(
    ("kind", "moe"),
    [*((kind, MOE) for kind in KINDS), (KINDS[0], {"num_experts": 3, "num_active_experts": 3})],
    ids=str,
)
def test_it_is_a_loop_over_tokens_and_experts_with_its_gradients(kind: dict[str, Any], moe: dict[str, int]) -> None:
    ours = mixture(moe=moe, **kind).double()
    tensors = {name: each.detach().clone().requires_grad_() for name, each in ours.named_parameters()}
    x, weight = some_input(torch.float64), some_input(torch.float64).cos()
    own_x, their_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, (balance, counts) = ours(own_x)
    expected, tokens, loss = by_token_and_expert(tensors, their_x, kind["mlp"], moe["num_active_experts"])
    assert counts.tolist() == tokens.tolist()
    assert counts.sum() == 24 * moe["num_active_experts"], "a token was dropped"
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(balance, loss, rtol=1e-12, atol=0)
    ((output * weight).sum() + balance).backward()
    ((expected * weight).sum() + loss).backward()
    torch.testing.assert_close(own_x.grad, their_x.grad, rtol=1e-10, atol=1e-13)
    for name, parameter in ours.named_parameters():
        theirs = tensors[name].grad
        wanted = torch.zeros_like(parameter) if theirs is None else theirs
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-10, atol=1e-13, msg=name)


def test_it_is_the_block_of_mixtral_and_its_loss() -> None:
    """The layer and its balancing loss equal transformers' Mixtral for one block. For several blocks transformers
    computes the loss over the tokens of all blocks together, which differs."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    ours = mixture(mlp="swiglu", linear_bias=False)
    names = {"hidden_size": 48, "intermediate_size": 128, "num_local_experts": 5, "num_experts_per_tok": 2}
    config = mixtral.MixtralConfig(**names, experts_implementation="eager")
    theirs = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        for number, expert in enumerate(ours.experts):
            assert isinstance(expert, FeedForward)
            assert expert.gate is not None
            gate_up = torch.cat((expert.gate.weight, expert.layers[0].get_parameter("weight")))
            theirs.experts.gate_up_proj[number].copy_(gate_up)
            theirs.experts.down_proj[number].copy_(expert.layers[2].get_parameter("weight"))
    x = some_input()
    output, (balance, _) = ours(x)
    torch.testing.assert_close(output, theirs(x), rtol=1e-4, atol=1e-6)
    logits = F.linear(x, ours.router.weight).flatten(0, 1)
    torch.testing.assert_close(balance, mixtral.load_balancing_loss_func((logits,), 5, 2))


@pytest.mark.parametrize(("kind", "width"), [*((kind, 44) for kind in KINDS), (KINDS[0], 48), (KINDS[-1], 48)], ids=str)
def test_grouped_products_are_those_one_by_one(kind: dict[str, Any], width: int) -> None:
    """Grouped products equal those of each expert by itself, also where an expert has no token and where widths that
    are not multiples of eight are padded."""
    ours = mixture(emb_dim=width, mlp_dim=60, **kind)
    other = copy.deepcopy(ours)
    rows = some_input(width=width).flatten(0, 1)
    tokens = torch.tensor([7, 0, 12, 1, 4])
    own, others = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    one, together = experts_one_by_one(ours.experts, own, tokens), grouped_experts(other.experts, others, tokens)
    torch.testing.assert_close(together, one, rtol=1e-5, atol=1e-6)
    for result in (one, together):
        (result * rows.cos()).sum().backward()
    torch.testing.assert_close(others.grad, own.grad, rtol=1e-5, atol=1e-6)
    for (name, left), right in zip(ours.experts.named_parameters(), other.experts.parameters(), strict=True):
        torch.testing.assert_close(right.grad, left.grad, rtol=1e-5, atol=1e-6, msg=name)
    with torch.autocast("cpu", torch.bfloat16):
        half = [how(ours.experts, rows, tokens) for how in (experts_one_by_one, grouped_experts)]
    assert {each.dtype for each in half} == {torch.bfloat16}
    torch.testing.assert_close(half[1], half[0], rtol=0.02, atol=0.01)


def test_without_gradients_an_expert_without_tokens_is_left_out() -> None:
    ours = mixture()
    called: list[int] = []
    for number, expert in enumerate(ours.experts):
        expert.register_forward_hook(lambda *_, number=number: called.append(number))
    tokens = torch.tensor([24, 0, 0, 0, 0])
    with torch.no_grad():
        experts_one_by_one(ours.experts, some_input().flatten(0, 1), tokens)
    assert called == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_router_decides_in_fp32_whatever_the_precision(dtype: torch.dtype) -> None:
    ours, x = mixture(), some_input()
    _, (loss, tokens) = ours(x)
    with torch.autocast("cpu", dtype):
        _, (half_loss, half_tokens) = ours(x)
        assert half_tokens.tolist() == tokens.tolist()
        assert half_loss.dtype == torch.float32
        assert torch.equal(half_loss, loss)
        assert ours(x.to(dtype))[0].dtype == dtype


def test_training_minimizes_both_and_measures_one() -> None:
    model = random_model(shape(moe=MOE))
    model.moe_router_loss_scale = 0.3
    tokens, targets = random_tokens(model.config), random_tokens(model.config, seed=4)
    losses: list[Tensor] = []
    for block in model.trf_blocks:
        block.register_forward_hook(lambda _, __, out: losses.append(out[1][0]))
    terms, load = training(model, tokens, targets)
    assert load.shape == (3, 5)
    assert load.sum(1).tolist() == [2 * tokens.numel()] * 3
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(terms, torch.stack((plain, 0.3 * torch.stack(losses[:3]).sum())))
    assert model.eval()(tokens, targets).item() == pytest.approx(plain.item(), rel=1e-6)


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    """An expert without tokens has gradients of zero, not None. With 60 experts and 48 choices of an expert, at least
    12 have no token."""
    model = random_model(shape(moe={"num_experts": 60, "num_active_experts": 2}, context_length=12))
    tokens = random_tokens(model.config)
    terms, load = training(model, tokens, tokens)
    terms.sum().backward()
    idle = (load[0] == 0).nonzero().flatten().tolist()
    assert len(idle) >= 12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if name.startswith(f"trf_blocks.0.ff.experts.{idle[0]}."):
            assert not parameter.grad.any(), name


def test_training_in_groups_does_not_read_the_loads_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped products, which GPUs use, give the same loss and loads in training as products of one expert after the
    other. They never call `experts_one_by_one`, because a GPU would have to copy the experts' loads to the CPU for
    it."""
    model = random_model(shape(moe=MOE))
    tokens = random_tokens(model.config)
    expected = training(model, tokens, tokens)
    monkeypatch.setattr(gpt, "computes_in_groups", lambda _: torch.is_grad_enabled())
    monkeypatch.setattr(gpt, "experts_one_by_one", lambda *_: pytest.fail("asks for sizes"))
    found = training(model, tokens, tokens)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
