"""The model: GPT-2's architecture and its initialisation; harness/model/config.py has its configuration and costs.

Shapes in names: B sequences, T tokens each, C = emb_dim, H heads D wide, Q and K = the widths of all queries and of all
keys, V vocabulary. Layers that are a subject of their own are in harness/model/: norms, rotary, feed_forward,
embeddings, output_head.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.common.errors import UserError
from harness.common.memory import free_memory
from harness.common.units import GIB
from harness.model.attention import causal_attention
from harness.model.config import ModelConfig as ModelConfig
from harness.model.config import load_model_config as load_model_config
from harness.model.cross_entropy import linear_cross_entropy
from harness.model.embeddings import bigram_buckets, shifted, skip_mix, skip_source, value_mix, value_tables
from harness.model.experts import MixtureOfExperts, Routed, Routing, TrainingTerms
from harness.model.feed_forward import FeedForward
from harness.model.inference import KeyValueCache, LayerCache
from harness.model.norms import RMSNorm, build_norm
from harness.model.output_head import OutputHead
from harness.model.rotary import Rotation, rotated, rotation
from harness.model.weights import checkpoint_views, from_checkpoint_names, load_into, load_weights, qkv_sizes

INIT_STD = 0.02
WEIGHT_BYTES = 4  # fp32, made on the CPU first


class BlockInputs(NamedTuple):
    """Inputs of a block other than the residual stream, as far as the configuration has them."""

    rotation: Rotation | None = None  # of queries and keys, by their positions
    embedding_BxTxC: Tensor | None = None  # what the first block began with
    values_BxTxK: Tensor | None = None  # the tokens' value embeddings


NO_INPUTS = BlockInputs()


class CausalSelfAttention(nn.Module):
    """Multi-head attention; query, key and value are one matrix product in memory and three tensors on disk. Several
    queries share a key and a value where there are fewer heads of those (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.drop_rate = config.drop_rates.attention_weights
        self.qkv_sizes = qkv_sizes(config)
        self.qkv = nn.Linear(config.emb_dim, sum(self.qkv_sizes), bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.query_width, config.emb_dim, bias=config.linear_bias)
        gain = bool(config.norm_gain)
        self.q_norm = RMSNorm(config.head_width, gain=gain) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_width, gain=gain) if config.qk_norm else None
        self.value_mix = value_mix(config, layer)

    def forward(self, x_BxTxC: Tensor, inputs: BlockInputs = NO_INPUTS, cache: LayerCache | None = None) -> Tensor:
        q_BxTxQ, k_BxTxK, v_BxTxK = self.qkv(x_BxTxC).split(self.qkv_sizes, dim=-1)
        if self.value_mix is not None:
            v_BxTxK = self.value_mix(v_BxTxK, inputs.values_BxTxK)
        q, k, v = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # BxHxTxD
            for part in (q_BxTxQ, k_BxTxK, v_BxTxK)
        )
        if self.q_norm is not None and self.k_norm is not None:  # before they are turned, as in Qwen 3
            q, k = self.q_norm(q), self.k_norm(k)
        if inputs.rotation is not None:
            q, k = (rotated(each, inputs.rotation).to(v.dtype) for each in (q, k))
        if cache is None:
            drop_rate = self.drop_rate if self.training else 0.0
            mixed_BxHxTxD = causal_attention(q, k, v, drop_rate)
        else:
            k, v, visible_Bx1xTxS = cache.extend(k, v)
            shared = k.shape[1] != q.shape[1]
            mixed_BxHxTxD = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_Bx1xTxS, enable_gqa=shared)
        return self.out_proj(mixed_BxHxTxD.transpose(1, 2).flatten(-2))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream through dropout. With experts it tells of
    their routing, too."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.skip = skip_mix(config)
        self.norm1 = build_norm(config)
        self.att = CausalSelfAttention(config, layer)
        self.norm2 = build_norm(config)
        self.ff = FeedForward(config) if config.moe is None else MixtureOfExperts(config)
        self.drop = nn.Dropout(config.drop_rates.attention_output)
        self.mlp_drop = nn.Dropout(config.drop_rates.mlp_output)

    def forward(
        self, x_BxTxC: Tensor, inputs: BlockInputs = NO_INPUTS, cache: LayerCache | None = None
    ) -> Tensor | Routed:
        if self.skip is not None:
            x_BxTxC = self.skip(x_BxTxC, inputs.embedding_BxTxC)
        x_BxTxC = x_BxTxC + self.drop(self.att(self.norm1(x_BxTxC), inputs, cache))
        added = self.ff(self.norm2(x_BxTxC))
        if isinstance(added, Routed):
            return Routed(x_BxTxC + self.mlp_drop(added.output_BxTxC), added.routing)
        return x_BxTxC + self.mlp_drop(added)


def _check_memory(config: ModelConfig) -> None:
    """Before the first layer is made: systems promise more memory than they have, and end the process that uses it."""
    needed = config.parameters * WEIGHT_BYTES
    if torch.get_default_device().type == "cpu" and needed > free_memory():
        raise UserError(
            f"model.json: {config.parameters:,} parameters take {needed / GIB:,.2f} GiB of memory, and "
            f"{free_memory() / GIB:,.2f} GiB are free; make the model smaller"
        )


def _output_of(result: Tensor | Routed, routings: list[Routing]) -> Tensor:
    """A block's output; the routing of its experts, if it has any, is put into the list."""
    if isinstance(result, Routed):
        routings.append(result.routing)
        return result.output_BxTxC
    return result


class GPTModel(nn.Module):
    """GPT-2 (token and position embeddings, `n_layers` blocks, a final norm and a linear head), or what model.json
    makes of it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        recompute_blocks: bool = False,
        residual_dtype: torch.dtype | None = None,
        moe_router_loss_scale: float = 0.0,
    ) -> None:
        """Weights are drawn from torch's global generator, so that equal seeds give equal models on every rank.

        With `recompute_blocks` the backward pass runs each block again instead of keeping its activations. Under
        autocast, `residual_dtype` is that of the residual stream (None: the weights'). Where there are experts,
        `moe_router_loss_scale` is the coefficient of the term that balances them. Raises UserError if this machine
        cannot hold even the weights.
        """
        _check_memory(config)
        super().__init__()
        self.config = config
        self.recompute_blocks = recompute_blocks
        self.residual_dtype = residual_dtype
        self.moe_router_loss_scale = moe_router_loss_scale
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim) if config.position == "learned" else None
        self.bigram_emb = nn.Embedding(config.bigram_embedding, config.emb_dim) if config.bigram_embedding else None
        self.value_embs = value_tables(config)
        self.drop = nn.Dropout(config.drop_rates.embedding)
        self.trf_blocks = nn.ModuleList(TransformerBlock(config, layer) for layer in range(config.n_layers))
        self.final_norm = build_norm(config)
        self.out_head = OutputHead(config)
        if config.tie_weights:
            self.out_head.weight = self.tok_emb.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's initialisation (Radford et al. 2019, section 2.3): N(0, 0.02), zero biases, and the projections into
        the residual stream scaled down by the square root of their number, or zero. The embedding of bigrams, too,
        begins at zero."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            is_residual = name.endswith(("att.out_proj.weight", ".layers.2.weight"))
            is_zero = is_residual and self.config.initialisation == "zero_residual"
            if is_zero or name == "bigram_emb.weight" or name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=residual_std if is_residual else INIT_STD)

    def forward(self, tokens_BxT: Tensor, targets_BxT: Tensor | None = None) -> Tensor | TrainingTerms:
        """Logits (B, T, V), or, given targets, the mean cross-entropy as a scalar; in training with experts that, and
        a term that balances them, of which the sum is to be minimised, and their load."""
        features_BxTxC, routings = self._routed_features(tokens_BxT)
        if targets_BxT is None:
            return self.out_head(features_BxTxC)
        inputs = features_BxTxC.flatten(0, 1), self.out_head.weight, targets_BxT.flatten()
        loss = linear_cross_entropy(*inputs, softcap=self.out_head.softcap)
        return self._with_balance(loss, routings) if routings and self.training else loss

    def _with_balance(self, loss: Tensor, routings: list[Routing]) -> TrainingTerms:
        """The loss, and the blocks' balancing losses together as a second term."""
        balance = self.moe_router_loss_scale * torch.stack([routing.loss for routing in routings]).sum()
        tokens_LxE = torch.stack([routing.tokens_E for routing in routings])
        return TrainingTerms(torch.stack((loss, balance.to(loss.dtype))), tokens_LxE)

    def features(self, tokens_BxT: Tensor) -> Tensor:
        """Input of the head, (B, T, C), after the final norm."""
        return self._routed_features(tokens_BxT)[0]

    def _routed_features(self, tokens_BxT: Tensor) -> tuple[Tensor, list[Routing]]:
        """`features`, and how each block with experts came to them."""
        positions_T = torch.arange(tokens_BxT.shape[1], device=tokens_BxT.device)
        previous_BxT = None if self.bigram_emb is None else shifted(tokens_BxT)
        x_BxTxC = self.drop(self._embed(tokens_BxT, previous_BxT, positions_T))
        if self.residual_dtype is not None and torch.is_autocast_enabled(x_BxTxC.device.type):
            x_BxTxC = x_BxTxC.to(self.residual_dtype)
        routings: list[Routing] = []
        for block, inputs in zip(self.trf_blocks, self._block_inputs(x_BxTxC, tokens_BxT, positions_T), strict=True):
            if self.recompute_blocks and torch.is_grad_enabled():
                result = checkpoint(block, x_BxTxC, inputs, use_reentrant=False)
            else:
                result = block(x_BxTxC, inputs)
            x_BxTxC = _output_of(result, routings)
        return self.final_norm(x_BxTxC), routings

    def further_features(self, tokens_BxT: Tensor, lengths: list[int], cache: KeyValueCache) -> Tensor:
        """`features` of tokens that follow those in the cache, which holds them, too, afterwards. No dropout: for
        evaluation mode. Row b has `lengths[b]` tokens, padded on the right; what is returned for padding is of no use.
        """
        positions_BxT = cache.take(tokens_BxT, lengths).clamp(max=self.config.context_length - 1)
        x_BxTxC = self._embed(tokens_BxT, cache.previous, positions_BxT)
        given = self._block_inputs(x_BxTxC, tokens_BxT, positions_BxT)
        for block, inputs, layer in zip(self.trf_blocks, given, cache.layers, strict=True):
            x_BxTxC = _output_of(block(x_BxTxC, inputs, layer), [])
        return self.final_norm(x_BxTxC)

    def _embed(self, tokens_BxT: Tensor, previous_BxT: Tensor | None, positions: Tensor) -> Tensor:
        """The first block's input, before dropout; `previous_BxT` is each token's predecessor, for bigrams."""
        x_BxTxC = self.tok_emb(tokens_BxT)
        if self.pos_emb is not None:
            x_BxTxC = x_BxTxC + self.pos_emb(positions)
        if self.bigram_emb is not None and previous_BxT is not None:
            buckets_BxT = bigram_buckets(tokens_BxT, previous_BxT, self.bigram_emb.num_embeddings)
            x_BxTxC = x_BxTxC + self.bigram_emb(buckets_BxT)
        return skip_source(x_BxTxC) if self.config.embedding_skip else x_BxTxC

    def _block_inputs(self, x_BxTxC: Tensor, tokens_BxT: Tensor, positions: Tensor) -> list[BlockInputs]:
        """Inputs of each block other than the residual stream, which begins as `x_BxTxC`."""
        config, turn, values = self.config, None, []
        if config.position == "rope":
            assert config.rope_base is not None
            turn = rotation(positions, config.head_width, config.rope_base, self.tok_emb.weight.dtype)
        if self.value_embs is not None:
            values = [table(tokens_BxT) for table in self.value_embs]
        embedding = x_BxTxC if config.embedding_skip else None
        tables = (config.value_embedding_of(layer) for layer in range(config.n_layers))
        return [BlockInputs(turn, embedding, None if table is None else values[table]) for table in tables]

    def to_checkpoint_names(self) -> dict[str, Tensor]:
        """The weights under the names of this model family's published checkpoints: CPU, contiguous, unshared."""
        views = checkpoint_views(self.state_dict(), self.config)
        return {name: tensor.to("cpu", copy=True) for name, tensor in views.items()}

    def load_checkpoint_tensors(self, tensors: dict[str, Tensor], source: Path) -> None:
        """Set the weights from tensors under their public names.

        Raises UserError, naming `source`, the tensors and both shapes, when they are another model's; the weights are
        then untouched.
        """
        state = self.state_dict()
        load_into(state, from_checkpoint_names(tensors, state, self.config, source), self.config)


def load_model(config: ModelConfig, weights: Path, device: torch.device) -> GPTModel:
    """A model in evaluation mode with the weights of a safetensors file. Raises UserError if the two do not match."""
    model = GPTModel(config)
    model.load_checkpoint_tensors(load_weights(weights), weights)
    return model.to(device).eval()
