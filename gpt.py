"""The model: GPT-2 (Radford et al. 2019) with the options of model.json, for training and for generation.

Do not rename parameters: their names, except `qkv`, are in published files. Names of most tensors end in the shape, as
in x_BxTxC:
- B sequences, T tokens, C = emb_dim
- H heads, each of width D
- Q = H·D, the width of all queries
- K the width of all keys, equal to that of all values
- F the width of a feed-forward layer
- V the size of the vocabulary
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.model.config import ModelConfig as ModelConfig
from harness.model.config import load_model_config as load_model_config
from harness.model.cross_entropy import linear_cross_entropy
from harness.model.inference import NO_TOKEN, KeyValueCache
from harness.model.weights import check_memory, checkpoint_views, from_checkpoint_names, load_weights

INIT_STD = 0.02
EPSILON = 1e-5  # for LayerNorm and RMSNorm
# On the CPU, bf16 attention over fewer tokens than this is computed in fp32, because the backward kernel is slower in
# bf16, even if the conversions to fp32 and back are counted (docs/LOG.md).
CPU_BF16_CONTEXT = 256
TOKEN_FACTOR, PREVIOUS_FACTOR = 36_313, 27_191  # for hashing two tokens: large odd numbers, as in modded-nanogpt
GROUPED_ALIGNMENT = 8  # grouped matrix products need rows of a multiple of 16 bytes, which is 8 numbers of 16 bits

Rotation = tuple[Tensor, Tensor]  # cosines and sines of each position's angles, each (T, D/2) or (B, T, D/2)
Routing = tuple[Tensor, Tensor]  # of a block's experts: balancing loss, and number of tokens per expert (int64)


# Norms


class LayerNorm(nn.Module):
    """Layer normalization (Ba et al., arXiv:1607.06450)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        return F.layer_norm(x_BxTxC, self.scale.shape, self.scale, self.shift, eps=EPSILON)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε), times a learned gain if `gain` is true (Zhang & Sennrich, arXiv:1910.07467). The result
    has x's dtype."""

    def __init__(self, dim: int, *, gain: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim)) if gain else None

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        normal = rms_normalized(x_BxTxC)
        return (normal if self.scale is None else normal * self.scale).to(x_BxTxC.dtype)


def rms_normalized(x_BxTxC: Tensor) -> Tensor:
    """Divide x by sqrt(mean(x²) + ε), with the mean over the last dimension. The result is fp32, or fp64 if x is."""
    x = x_BxTxC if x_BxTxC.dtype == torch.float64 else x_BxTxC.float()
    # Not F.rms_norm, whose fused kernel needs a weight of the input's dtype.
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)


def build_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """Return the norm that model.json's `norm` and `norm_gain` select."""
    if config.norm == "layernorm":
        return LayerNorm(config.emb_dim)
    return RMSNorm(config.emb_dim, gain=bool(config.norm_gain))


# Rotary position embeddings (RoPE; Su et al., arXiv:2104.09864). Dimension i of a head is paired with dimension
# i + D/2, as in transformers' Llama, so that weights can be copied from one model to the other without reordering.


def rotation(positions: Tensor, head_width: int, base: float, is_fp64: bool) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of RoPE's angles p·base^(-2i/D), for position p and pair i of a head of width D.

    `positions` are (T,) or (B, T). The results are (T, D/2) or (B, T, D/2), in fp64 or fp32.
    """
    dtype = torch.float64 if is_fp64 else torch.float32
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=dtype) / head_width
    angles = positions.to(dtype)[..., None] * base**-exponents
    return angles.cos(), angles.sin()


# For compiled code, which would otherwise compute powers, cosines and sines again for each head, sequence and layer: a
# quarter of a step on a GPU (docs/LOG.md). Eager code does not use it, because its first call would load the compiler.
compiled_rotation = torch.library.custom_op("ddp_pretrain::rotation", rotation, mutates_args=())


@compiled_rotation.register_fake
def _rotation_shapes(positions: Tensor, head_width: int, base: float, is_fp64: bool) -> tuple[Tensor, Tensor]:
    """Return uninitialized tensors like the results of `rotation`, for torch.compile."""
    shape, dtype = (*positions.shape, head_width // 2), torch.float64 if is_fp64 else torch.float32
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def rotated(x_BxTxHxD: Tensor, by: Rotation) -> Tensor:
    """Rotate queries or keys by the angles of their positions. The result is at least fp32."""
    cos, sin = (each.unsqueeze(-2) for each in by)  # equal for all heads
    first, second = x_BxTxHxD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


# The block


class Mix(nn.Module):
    """Weighted sum scale[0]·a + scale[1]·b with a learned `scale`, in the dtype of a."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([first, second]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.scale[0] * a + self.scale[1] * b).to(a.dtype)


def causal_attention(q_BxHxTxD: Tensor, k_BxHxTxD: Tensor, v_BxHxTxD: Tensor, drop_rate: float) -> Tensor:
    """Return softmax attention of each token to itself and the tokens before it: (B, H, T, D).

    `drop_rate` must be 0 outside of training. Keys and values may have fewer heads than queries (grouped-query
    attention; Ainslie et al., arXiv:2305.13245).
    """
    dtype, tokens = q_BxHxTxD.dtype, q_BxHxTxD.shape[-2]
    how: dict[str, Any] = {"is_causal": True, "enable_gqa": k_BxHxTxD.shape[1] != q_BxHxTxD.shape[1]}
    if q_BxHxTxD.device.type != "cpu" or dtype != torch.bfloat16 or tokens >= CPU_BF16_CONTEXT:
        return F.scaled_dot_product_attention(q_BxHxTxD, k_BxHxTxD, v_BxHxTxD, dropout_p=drop_rate, **how)
    with torch.autocast("cpu", enabled=False):
        q, k, v = q_BxHxTxD.float(), k_BxHxTxD.float(), v_BxHxTxD.float()
        return F.scaled_dot_product_attention(q, k, v, dropout_p=drop_rate, **how).to(dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head attention. One matrix computes queries, keys and values; checkpoint files hold it as three tensors."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_width = config.head_width
        self.drop_rate = config.drop_rates.attention_weights
        self.qkv_sizes = (config.query_width, config.kv_width, config.kv_width)
        self.qkv = nn.Linear(config.emb_dim, sum(self.qkv_sizes), bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.query_width, config.emb_dim, bias=config.linear_bias)
        gain = bool(config.norm_gain)
        self.q_norm = RMSNorm(config.head_width, gain=gain) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_width, gain=gain) if config.qk_norm else None
        has_values = config.value_embedding_of(layer) is not None
        self.value_mix = Mix(0.5, 0.5) if has_values else None  # adapted from the value residuals of arXiv:2410.17897

    def forward(
        self, x_BxTxC: Tensor, rotation: Rotation | None, values_BxTxK: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        """Return the output, (B, T, C). Pass None as `rotation` if the model has no RoPE, as `values_BxTxK` if the
        layer has no value embeddings, and as `cache` if `x_BxTxC` holds whole sequences."""
        q_BxTxQ, k_BxTxK, v_BxTxK = self.qkv(x_BxTxC).split(self.qkv_sizes, dim=-1)
        if self.value_mix is not None:
            v_BxTxK = self.value_mix(v_BxTxK, values_BxTxK)
        q_BxTxHxD, k_BxTxHxD, v_BxTxHxD = (
            each.unflatten(-1, (-1, self.head_width)) for each in (q_BxTxQ, k_BxTxK, v_BxTxK)
        )
        if self.q_norm is not None and self.k_norm is not None:  # before the rotation, as in Qwen 3
            q_BxTxHxD, k_BxTxHxD = self.q_norm(q_BxTxHxD), self.k_norm(k_BxTxHxD)
        if rotation is not None:
            q_BxTxHxD = rotated(q_BxTxHxD, rotation).to(v_BxTxHxD.dtype)
            k_BxTxHxD = rotated(k_BxTxHxD, rotation).to(v_BxTxHxD.dtype)
        # Transposed only now, because a compiled model that rotated them in the order (B, H, T, D) would read and write
        # them twice, and copy the output of attention (docs/LOG.md).
        q_BxHxTxD, k_BxHxTxD, v_BxHxTxD = (each.transpose(1, 2) for each in (q_BxTxHxD, k_BxTxHxD, v_BxTxHxD))
        if cache is None:
            drop_rate = self.drop_rate if self.training else 0.0
            mixed_BxHxTxD = causal_attention(q_BxHxTxD, k_BxHxTxD, v_BxHxTxD, drop_rate)
        else:
            k, v, visible = cache.extend(self.layer, k_BxHxTxD, v_BxHxTxD)
            shared = k.shape[1] != q_BxHxTxD.shape[1]
            mixed_BxHxTxD = F.scaled_dot_product_attention(q_BxHxTxD, k, v, attn_mask=visible, enable_gqa=shared)
        return self.out_proj(mixed_BxHxTxD.transpose(1, 2).flatten(-2))


class SquaredReLU(nn.Module):
    """max(x, 0)² (So et al., Primer, arXiv:2109.08668)."""

    def forward(self, x_BxTxF: Tensor) -> Tensor:
        return x_BxTxF.relu().square()


class FeedForward(nn.Module):
    """Two linear layers around an activation, and in SwiGLU (Shazeer, arXiv:2002.05202) a third one, the gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        dim, hidden, bias = config.emb_dim, config.mlp_width, config.linear_bias
        activations = {"gelu": nn.GELU(approximate="tanh"), "relu2": SquaredReLU(), "swiglu": nn.SiLU()}
        self.layers = nn.Sequential(
            nn.Linear(dim, hidden, bias=bias), activations[config.mlp], nn.Linear(hidden, dim, bias=bias)
        )
        self.gate = nn.Linear(dim, hidden, bias=bias) if config.mlp == "swiglu" else None

    def forward(self, x_BxTxC: Tensor) -> Tensor:
        if self.gate is None:
            return self.layers(x_BxTxC)
        first, activation, second = self.layers
        return second(activation(self.gate(x_BxTxC)) * first(x_BxTxC))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream through dropout.

    With `embedding_skip`, the input is first mixed with that of the first block, `embedding_BxTxC`. `forward` also
    returns the experts' Routing, or None without experts.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.skip = Mix(1.0, 0.0) if config.embedding_skip else None
        self.norm1 = build_norm(config)
        self.att = CausalSelfAttention(config, layer)
        self.norm2 = build_norm(config)
        self.ff = FeedForward(config) if config.moe is None else MixtureOfExperts(config)
        self.drop = nn.Dropout(config.drop_rates.attention_output)
        self.mlp_drop = nn.Dropout(config.drop_rates.mlp_output)

    def forward(
        self,
        x_BxTxC: Tensor,
        rotation: Rotation | None,
        embedding_BxTxC: Tensor | None,
        values_BxTxK: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Tensor, Routing | None]:
        if self.skip is not None:
            x_BxTxC = self.skip(x_BxTxC, embedding_BxTxC)
        x_BxTxC = x_BxTxC + self.drop(self.att(self.norm1(x_BxTxC), rotation, values_BxTxK, cache))
        normal_BxTxC, routing = self.norm2(x_BxTxC), None
        if isinstance(self.ff, MixtureOfExperts):
            added_BxTxC, routing = self.ff(normal_BxTxC)
        else:
            added_BxTxC = self.ff(normal_BxTxC)
        # The routing is not stored in an attribute: torch.compile would lose the attribute where blocks are recomputed.
        return x_BxTxC + self.mlp_drop(added_BxTxC), routing


# A mixture of experts in place of the feed-forward layer. Shapes in names: N = B·T tokens, E experts, A active experts
# per token, R = N·A rows for the experts: each token has one row for each of its A experts.


class MixtureOfExperts(nn.Module):
    """Mixture of experts: a router chooses A of E feed-forward layers for each token (Mixtral, arXiv:2401.04088,
    section 2.1).

    The result is the weighted sum of the chosen layers' outputs. No token is dropped.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.active = config.moe.num_active_experts
        self.router = nn.Linear(config.emb_dim, config.moe.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.moe.num_experts))

    def forward(self, x_BxTxC: Tensor) -> tuple[Tensor, Routing]:
        x_NxC = x_BxTxC.flatten(0, 1)
        weights_NxA, experts_NxA, routing = self._route(x_NxC)
        # Sort the rows by expert. The sort is stable, so that the same tokens always give the same sums.
        order_R = experts_NxA.flatten().argsort(stable=True)
        inverse_R = order_R.argsort()
        x_RxC = Permuted.apply(x_NxC.unsqueeze(1).expand(-1, self.active, -1).flatten(0, 1), order_R, inverse_R)
        compute = grouped_experts if computes_in_groups(x_RxC) else experts_one_by_one
        y_RxC = compute(self.experts, x_RxC, routing[1])
        y_NxAxC = Permuted.apply(y_RxC, inverse_R, order_R).unflatten(0, (-1, self.active))
        output_NxC = (y_NxAxC * weights_NxA.unsqueeze(-1)).sum(1).to(y_RxC.dtype)
        return output_NxC.view_as(x_BxTxC), routing

    def _route(self, x_NxC: Tensor) -> tuple[Tensor, Tensor, Routing]:
        """Return the weights and the indices of each token's A experts, both (N, A), and the Routing."""
        # At least fp32, because small differences decide which experts are chosen.
        dtype = torch.float64 if x_NxC.dtype == torch.float64 else torch.float32
        with torch.autocast(x_NxC.device.type, enabled=False):
            probabilities_NxE = F.linear(x_NxC.to(dtype), self.router.weight.to(dtype)).softmax(-1)
            chosen_NxA, experts_NxA = probabilities_NxE.topk(self.active)
            weights_NxA = chosen_NxA / chosen_NxA.sum(-1, keepdim=True)
            numbers_E = torch.arange(probabilities_NxE.shape[1], device=x_NxC.device)
            tokens_E = (experts_NxA.flatten().unsqueeze(1) == numbers_E).sum(0)
            return weights_NxA, experts_NxA, (balancing_loss(probabilities_NxE, tokens_E), tokens_E)


def balancing_loss(probabilities_NxE: Tensor, tokens_E: Tensor) -> Tensor:
    """Return E·Σ f·P, a sum over the E experts (Switch Transformers, arXiv:2101.03961, equations 4 to 6).

    f is the share of the tokens that an expert processes, and P the expert's mean probability. If all experts have the
    same f and the same P, the loss is the number of experts per token (in the paper, 1).
    """
    tokens, experts = probabilities_NxE.shape
    return experts * (tokens_E.to(probabilities_NxE.dtype) / tokens * probabilities_NxE.mean(0)).sum()


class Permuted(torch.autograd.Function):
    """Permutation of rows by `order_R`, whose inverse is `inverse_R`."""

    @staticmethod
    def forward(ctx: Any, rows_RxC: Tensor, order_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return rows_RxC.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, gradient_RxC: Tensor) -> tuple[Tensor, None, None]:
        (inverse_R,) = ctx.saved_tensors
        # Faster than the backward of index_select, and the same bits each time.
        return gradient_RxC.index_select(0, inverse_R), None, None


def computes_in_groups(x_RxC: Tensor) -> bool:
    """Return True to compute the experts with `grouped_experts`, False with `experts_one_by_one`."""
    # To read each expert's number of rows, `experts_one_by_one` waits for the GPU, or breaks the graph when compiling.
    # On the CPU, and in generation (few tokens, no gradients), it is as fast as `grouped_experts`. torch has no grouped
    # product in fp64.
    suits = torch.compiler.is_compiling() or (x_RxC.is_cuda and torch.is_grad_enabled())
    return suits and x_RxC.dtype != torch.float64


def experts_one_by_one(experts: nn.ModuleList, x_RxC: Tensor, tokens_E: Tensor) -> Tensor:
    """Return the outputs (R, C) of the experts for their rows of `x_RxC`, which must be sorted by expert.

    `tokens_E` has the number of rows of each expert.
    """
    # With gradients, also call experts without rows: optimizers and DDP expect gradients of zeros, not None.
    parts = zip(experts, x_RxC.split(tokens_E.tolist()), strict=True)
    return torch.cat([expert(rows) for expert, rows in parts if len(rows) or torch.is_grad_enabled()])


def grouped_experts(experts: nn.ModuleList, x_RxC: Tensor, tokens_E: Tensor) -> Tensor:
    """Compute the result of `experts_one_by_one` by grouped matrix products."""
    device = x_RxC.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_RxC.dtype
    ends_E = tokens_E.cumsum(0).to(torch.int32)
    # The index of a row's expert is the number of experts whose rows all come before that row.
    first_ends = torch.arange(len(x_RxC), device=x_RxC.device).unsqueeze(1) >= ends_E
    is_of_RxE = F.one_hot(first_ends.sum(1), len(experts)).to(dtype)

    def linear(layers: list[Any], rows_RxI: Tensor) -> Tensor:  # I and O: widths of a layer's input and output
        weight_ExOxI = torch.stack([layer.weight for layer in layers]).to(dtype)
        out, into = weight_ExOxI.shape[1:]  # padded with zeros to widths that the kernels accept
        missing_in, missing_out = -into % GROUPED_ALIGNMENT, -out % GROUPED_ALIGNMENT
        rows = F.pad(rows_RxI.to(dtype), (0, missing_in))
        weight = F.pad(weight_ExOxI, (0, missing_in, 0, missing_out))
        result = F.grouped_mm(rows, weight.mT, offs=ends_E)[:, :out]
        if layers[0].bias is None:
            return result
        # A product with one-hot rows, because the backward of a lookup would add up the rows' gradients one by one.
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


# The model


class OutputHead(nn.Linear):
    """Linear layer without bias. With `logit_softcap` c, each output x becomes c·tanh(x / c) (Gemma 2,
    arXiv:2408.00118, section 2). Code that multiplies by `weight` without calling this layer must apply `softcap` to
    the products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.emb_dim, config.vocab_size, bias=False)
        self.softcap = config.logit_softcap

    def forward(self, features: Tensor) -> Tensor:
        logits = super().forward(features)
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def bigram_buckets(tokens_BxT: Tensor, previous_BxT: Tensor, buckets: int) -> Tensor:
    """Return the bucket of each pair of a token and its predecessor: (B, T). The last bucket is for tokens without a
    predecessor (NO_TOKEN)."""
    mixed = torch.bitwise_xor(TOKEN_FACTOR * tokens_BxT.long(), PREVIOUS_FACTOR * previous_BxT.long()) % (buckets - 1)
    return torch.where(previous_BxT == NO_TOKEN, buckets - 1, mixed)


class GPTModel(nn.Module):
    """Token embeddings, learned position embeddings or RoPE, `n_layers` blocks, a final norm and a linear head.

    Value embeddings, `embedding_skip` and the embedding of bigrams follow the record runs of
    https://github.com/KellerJordan/modded-nanogpt (train_gpt.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute_blocks: bool = False,
        residual_dtype: torch.dtype | None = None,
        moe_router_loss_scale: float = 0.0,
    ) -> None:
        """Build the model, with weights drawn from torch's global generator.

        - `recompute_blocks`: the backward pass runs each block again instead of keeping its activations.
        - `residual_dtype`: dtype of the residual stream under autocast. None: the dtype of the weights.
        - `moe_router_loss_scale`: coefficient of the experts' balancing losses.
        """
        super().__init__()
        self.config = config
        self.recompute_blocks = recompute_blocks
        self.residual_dtype = residual_dtype
        self.moe_router_loss_scale = moe_router_loss_scale
        self.expert_tokens: Tensor | None = None  # (layers, experts): tokens per expert in the last training forward
        vocab, width = config.vocab_size, config.emb_dim
        self.tok_emb = nn.Embedding(vocab, width)
        self.pos_emb = nn.Embedding(config.context_length, width) if config.position == "learned" else None
        self.bigram_emb = nn.Embedding(config.bigram_embedding, width) if config.bigram_embedding else None
        tables = range(config.value_embeddings or 0)
        self.value_embs = nn.ModuleList(nn.Embedding(vocab, config.kv_width) for _ in tables)
        self.drop = nn.Dropout(config.drop_rates.embedding)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config, layer) for layer in range(config.n_layers))
        self.final_norm = build_norm(config)
        self.out_head = OutputHead(config)
        if config.tie_weights:
            self.out_head.weight = self.tok_emb.weight
        self.initialize()

    def initialize(self) -> None:
        """Initialize linear layers and embeddings as GPT-2 does (Radford et al. 2019, section 2.3).

        - biases and the embedding of bigrams: zero
        - projections into the residual stream: normal, with standard deviation 0.02 / √(2·n_layers); zero if
          `initialisation` is "zero_residual"
        - other weights: normal, with standard deviation 0.02
        """
        modules = list(self.modules())
        into_residual: set[nn.Module] = {each.out_proj for each in modules if isinstance(each, CausalSelfAttention)}
        into_residual |= {each.layers[2] for each in modules if isinstance(each, FeedForward)}
        is_zero = self.config.initialisation == "zero_residual"
        # Each block adds to the stream twice.
        residual_std = 0.0 if is_zero else INIT_STD / math.sqrt(2 * self.config.n_layers)
        for module in modules:
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue
            std = residual_std if module in into_residual else 0.0 if module is self.bigram_emb else INIT_STD
            if std == 0:
                nn.init.zeros_(module.weight)
            elif module.weight is not self.tok_emb.weight or module is self.tok_emb:  # a tied head is drawn once
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens_BxT: Tensor, targets_BxT: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V), or with targets (B, T) the mean cross-entropy in nats per token, a scalar.

        Every target must be from 0 to V - 1. With targets, a model with experts in training mode returns two terms,
        (2,), whose sum is to be minimized: the cross-entropy, and the balancing losses times `moe_router_loss_scale`.
        """
        routings: list[Routing] = []
        features_BxTxC = self.features(tokens_BxT, routings=routings)
        if targets_BxT is None:
            return self.out_head(features_BxTxC)
        inputs = features_BxTxC.flatten(0, 1), self.out_head.weight, targets_BxT.flatten()
        loss = linear_cross_entropy(*inputs, softcap=self.out_head.softcap)
        if not routings or not self.training:
            return loss
        losses, tokens = zip(*routings, strict=True)
        self.expert_tokens = torch.stack(tokens)
        balance = self.moe_router_loss_scale * torch.stack(losses).sum()
        return torch.stack((loss, balance.to(loss.dtype)))

    def features(
        self,
        tokens_BxT: Tensor,
        lengths: list[int] | None = None,
        cache: KeyValueCache | None = None,
        routings: list[Routing] | None = None,
    ) -> Tensor:
        """Return the input of the head, (B, T, C), after the final norm.

        - `lengths`: with a cache, row b has `lengths[b]` tokens, followed by padding, whose results are meaningless.
          None: no padding.
        - `cache`: the tokens continue the sequences in it, and are added to it. Needs evaluation mode.
        - `routings`: the Routing of each block with experts is appended to it.
        """
        config = self.config
        if cache is None:
            positions = torch.arange(tokens_BxT.shape[1], device=tokens_BxT.device)
        else:
            positions = cache.take(tokens_BxT, lengths).clamp(max=config.context_length - 1)

        x_BxTxC = self.tok_emb(tokens_BxT)
        if self.pos_emb is not None:
            x_BxTxC = x_BxTxC + self.pos_emb(positions)
        if self.bigram_emb is not None:
            previous_BxT = F.pad(tokens_BxT, (1, -1), value=NO_TOKEN) if cache is None else cache.previous
            buckets_BxT = bigram_buckets(tokens_BxT, previous_BxT, self.bigram_emb.num_embeddings)
            x_BxTxC = x_BxTxC + self.bigram_emb(buckets_BxT)
        if config.embedding_skip:
            x_BxTxC = rms_normalized(x_BxTxC).to(x_BxTxC.dtype)
        x_BxTxC = self.drop(x_BxTxC)
        if self.residual_dtype is not None and torch.is_autocast_enabled(x_BxTxC.device.type):
            x_BxTxC = x_BxTxC.to(self.residual_dtype)

        turn = None
        if config.position == "rope":
            assert config.rope_base is not None
            # torch.export gets no custom operation, because its programs are loaded without this file.
            is_compiled = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
            compute = compiled_rotation if is_compiled else rotation
            turn = compute(positions, config.head_width, config.rope_base, self.tok_emb.weight.dtype == torch.float64)
        embedding_BxTxC = x_BxTxC if config.embedding_skip else None
        values = [table(tokens_BxT) for table in self.value_embs]  # first and last blocks share tables
        for layer, block in enumerate(self.trf_blocks):
            table = config.value_embedding_of(layer)
            inputs = x_BxTxC, turn, embedding_BxTxC, None if table is None else values[table], cache
            if self.recompute_blocks and torch.is_grad_enabled():
                x_BxTxC, routing = checkpoint(block, *inputs, use_reentrant=False)
            else:
                x_BxTxC, routing = block(*inputs)
            if routings is not None and routing is not None:
                routings.append(routing)
        return self.final_norm(x_BxTxC)

    def to_checkpoint_names(self) -> dict[str, Tensor]:
        """Return the weights under their names in checkpoints, as contiguous CPU tensors that share no memory."""
        views = checkpoint_views(self.state_dict(), self.config)
        return {name: tensor.to("cpu", copy=True) for name, tensor in views.items()}

    def load_checkpoint_tensors(self, tensors: dict[str, Tensor], source: Path) -> None:
        """Copy tensors, by their names in published checkpoints, into the weights. Raises UserError, naming `source`,
        if they do not fit the model."""
        found = from_checkpoint_names(tensors, self.config, source)
        for name, own in checkpoint_views(self.state_dict(), self.config).items():
            own.copy_(found[name])


def load_model(config: ModelConfig, weights: Path, device: torch.device) -> GPTModel:
    """Return a model in evaluation mode on `device`, with the weights of a safetensors file. Raises UserError if the
    file cannot be read or does not fit `config`, or if host memory is too small for the weights."""
    check_memory(config)
    model = GPTModel(config)
    model.load_checkpoint_tensors(load_weights(weights), weights)
    return model.to(device).eval()
