"""A mixture of experts in place of a block's feed-forward layer, and the loss that balances the experts' load.

Shapes in names: N tokens, E experts, K of them active for each token, R = N·K rows of tokens as experts see them,
C = emb_dim. Which experts a token goes through is the rule of Mixtral (Jiang et al., arXiv:2401.04088, section 2.1),
the loss that of Switch Transformers (Fedus et al., arXiv:2101.03961, section 2.2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.model.config import ModelConfig
from harness.model.feed_forward import FeedForward

ALIGNED = 8  # kernels of grouped products want rows of whole 16 bytes: as many numbers of 16 bits


class Routing(NamedTuple):
    """Routing in one block and microbatch: the number of tokens of each expert (int64), and the balancing loss, a
    scalar."""

    tokens_E: Tensor
    loss: Tensor


class Routed(NamedTuple):
    """The output of a mixture of experts, or of a block with one, and its routing."""

    output_BxTxC: Tensor
    routing: Routing


class TrainingTerms(NamedTuple):
    """The training output of a model with experts: terms whose sum is to be minimised, the cross-entropy first, and the
    number of tokens of each expert of each block (LxE)."""

    terms: Tensor
    expert_tokens: Tensor


class MixtureOfExperts(nn.Module):
    """Each token goes through the K experts to which the router gives the highest probabilities, and gets the sum of
    what they give, weighted by these probabilities over their sum. No token is left out, however many go to one expert.

    Router and weights are computed in fp32 at least, whatever the precision of training: which experts are chosen
    depends on small differences.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.active = config.moe.num_active_experts
        self.router = nn.Linear(config.emb_dim, config.moe.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.moe.num_experts))

    def forward(self, x_BxTxC: Tensor) -> Routed:
        x_NxC = x_BxTxC.flatten(0, 1)
        weights_NxK, experts_NxK, routing = self._route(x_NxC)
        # Rows in the order of their experts; a stable order, so that the same tokens give the same sums.
        order_R = experts_NxK.flatten().argsort(stable=True)
        inverse_R = order_R.argsort()
        x_RxC = Permuted.apply(x_NxC.unsqueeze(1).expand(-1, self.active, -1).flatten(0, 1), order_R, inverse_R)
        if _in_groups(x_RxC):
            y_RxC = grouped_experts(self.experts, x_RxC, routing.tokens_E)
        else:
            y_RxC = experts_one_by_one(self.experts, x_RxC, routing.tokens_E)
        y_NxKxC = Permuted.apply(y_RxC, inverse_R, order_R).unflatten(0, (-1, self.active))
        output_NxC = (y_NxKxC * weights_NxK.unsqueeze(-1)).sum(1).to(y_RxC.dtype)
        return Routed(output_NxC.view_as(x_BxTxC), routing)

    def _route(self, x_NxC: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """The weights and the numbers of each token's experts, and what is reported of them."""
        dtype = torch.float64 if x_NxC.dtype == torch.float64 else torch.float32
        with torch.autocast(x_NxC.device.type, enabled=False):
            logits_NxE = F.linear(x_NxC.to(dtype), self.router.weight.to(dtype))
            shares_NxE = logits_NxE.softmax(-1)
            chosen_NxK, experts_NxK = shares_NxE.topk(self.active)
            weights_NxK = chosen_NxK / chosen_NxK.sum(-1, keepdim=True)
            numbers_E = torch.arange(shares_NxE.shape[1], device=x_NxC.device)
            tokens_E = (experts_NxK.flatten().unsqueeze(1) == numbers_E).sum(0)
            return weights_NxK, experts_NxK, Routing(tokens_E, balancing_loss(shares_NxE, tokens_E))


def balancing_loss(shares_NxE: Tensor, tokens_E: Tensor) -> Tensor:
    """E·Σ f·P over the experts, with f the share of the tokens that go through an expert and P the mean of the
    probabilities that the router gives it (Switch Transformers, equations 4 to 6, where K is 1). The f add up to K:
    with load and probabilities spread evenly the loss is K. Only P has a gradient."""
    tokens, experts = shares_NxE.shape
    return experts * (tokens_E.to(shares_NxE.dtype) / tokens * shares_NxE.mean(0)).sum()


class Permuted(torch.autograd.Function):
    """Rows in another order. The gradient is looked up by the inverse, rather than added up row by row: quicker, and of
    the same bits each time."""

    @staticmethod
    def forward(ctx: Any, rows_RxC: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RxC.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, gradient_RxC: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        return gradient_RxC.index_select(0, inverse_R), None, None


def _in_groups(x_RxC: Tensor) -> bool:
    """True if the experts are computed together, so that the device need not be asked for each expert's number of rows:
    in each block that would wait for a GPU, and break the graph of compiled code. On the CPU one after the other is as
    fast, and also for the few tokens of a generation."""
    suits = x_RxC.is_cuda and torch.is_grad_enabled()
    return (torch.compiler.is_compiling() or suits) and x_RxC.dtype != torch.float64


def experts_one_by_one(experts: nn.ModuleList, x_RxC: Tensor, tokens_E: Tensor) -> Tensor:
    """Each expert's rows, which come one expert after the other, through the expert. In training also where it has
    none: its gradients are zeros then, as optimizers and exchanges between ranks expect them."""
    parts = zip(experts, x_RxC.split(tokens_E.tolist()), strict=True)
    return torch.cat([expert(rows) for expert, rows in parts if len(rows) or torch.is_grad_enabled()])


def grouped_experts(experts: nn.ModuleList, x_RxC: Tensor, tokens_E: Tensor) -> Tensor:
    """Compute `experts_one_by_one` by grouped matrix products, whose sizes stay on the device."""
    device = x_RxC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_RxC.dtype
    ends_E = tokens_E.cumsum(0).to(torch.int32)
    first_ends = torch.arange(len(x_RxC), device=x_RxC.device).unsqueeze(1) >= ends_E
    is_of_RxE = F.one_hot(first_ends.sum(1), len(experts)).to(dtype)

    def linear(layers: list[Any], rows: Tensor) -> Tensor:
        weight_ExOxI = torch.stack([layer.weight for layer in layers]).to(dtype)
        result = _grouped_product(rows.to(dtype), weight_ExOxI, ends_E)
        if layers[0].bias is None:
            return result
        # As a product: rows of a table, looked up, would add up their gradients one by one.
        return result + is_of_RxE @ torch.stack([layer.bias for layer in layers]).to(dtype)

    with torch.autocast(device, enabled=False):
        each: list[Any] = list(experts)
        hidden = linear([expert.layers[0] for expert in each], x_RxC)
        activation = each[0].layers[1]
        if each[0].gate is None:
            hidden = activation(hidden)
        else:
            hidden = activation(linear([expert.gate for expert in each], x_RxC)) * hidden
        return linear([expert.layers[2] for expert in each], hidden)


def _grouped_product(rows_RxI: Tensor, weight_ExOxI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to each end times the transposed matrix of that expert. Widths that kernels do not take are filled up
    with zeros for the product."""
    out, into = weight_ExOxI.shape[1:]
    missing_in, missing_out = -into % ALIGNED, -out % ALIGNED
    rows = F.pad(rows_RxI, (0, missing_in))
    weight = F.pad(weight_ExOxI, (0, missing_in, 0, missing_out))
    return F.grouped_mm(rows, weight.mT, offs=ends_E)[:, :out]
