"""`model.json` as a class: the shape of a model, its tensors, parameters and FLOPs. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from harness.common.json_files import Count, RunFile, parse_config, read_json_object

HEAD_DIM_OF_DEPTH = 64  # as in GPT-2: depth 12 is the shape of GPT-2 small (12 layers, 12 heads, width 768)
DEPTH = "Replaces n_layers, n_heads and emb_dim: depth d means d layers, d heads and a width of 64 d."
# Far larger than any model that was ever trained, yet small enough that a lack of memory or disk space is noticed
# quickly. Without a limit, a typing error would make the program build layers for hours.
LARGEST_PARAMETERS = 10**13
WEIGHT_BYTES = 4  # of a weight in fp32
LARGEST_LAYERS = 10_000
ROPE_BASE = 10_000.0  # Su et al., arXiv:2104.09864
LARGEST_EXPERTS = 1024
EMBEDDING, HEAD = "tok_emb.weight", "out_head.weight"

Shapes = dict[str, tuple[int, ...]]  # of tensors, by name


class DropRates(BaseModel):
    """Dropout at each of the four places where GPT-2 has it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    embedding: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the sum of the embeddings."""
    attention_weights: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the attention weights after the softmax."""
    attention_output: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on what attention adds to the residual stream."""
    mlp_output: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on what the feed-forward layer adds to the residual stream."""


DropRate = Annotated[
    Annotated[float, Field(ge=0, lt=1), Tag("float")] | Annotated[DropRates, Tag("dict")],
    Discriminator(lambda value: "dict" if isinstance(value, dict | DropRates) else "float"),
]


class ExpertCounts(BaseModel):
    """Experts that replace a block's feed-forward layer. Each token goes through at least 2 of them: a single one would
    always have the weight 1, and the router would learn nothing from the cross-entropy."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    num_experts: int = Field(ge=2, le=LARGEST_EXPERTS)
    """Feed-forward layers in each block."""
    num_active_experts: int = Field(ge=2, le=LARGEST_EXPERTS)
    """Experts that each token goes through."""
    log_moe_balance_file: str | None = Field(default=None, exclude=True)
    """Log of the experts' load in Giles Thomas's trainer; no effect here: metrics.jsonl has the load."""

    @model_validator(mode="after")
    def _enough_experts(self) -> ExpertCounts:
        if self.num_active_experts > self.num_experts:
            raise ValueError(
                f'key "moe.num_active_experts": {self.num_active_experts} of {self.num_experts} experts; lower it to '
                f"{self.num_experts} at most, or raise num_experts"
            )
        return self


class ModelConfig(RunFile):
    """The shape of a model: the contents of `runs/<name>/model.json`."""

    model_config = ConfigDict(title="model.json")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = {"depth": {"type": "integer", "minimum": 1, "description": DEPTH}}
    replaceable_keys: ClassVar[set[str]] = {"emb_dim", "n_heads", "n_layers", "drop_rate", "qkv_bias"}  # by "depth"
    null_for_none: ClassVar[set[str]] = {"logit_softcap", "value_embeddings", "bigram_embedding", "moe"}

    vocab_size: Count = Field(ge=2)
    """Token ids are 0 .. vocab_size - 1."""
    context_length: Count = Field(ge=1)
    """Tokens the model sees at once."""
    emb_dim: Count = Field(ge=1)
    """Width of the residual stream."""
    n_heads: Count = Field(ge=1)
    """Attention heads; emb_dim must be a multiple of n_heads, unless head_dim is given."""
    n_layers: int = Field(ge=1, le=LARGEST_LAYERS)
    """Transformer blocks."""
    drop_rate: DropRate
    """Dropout on embeddings, attention weights and the outputs of attention and feed-forward layer: one rate, or an
    object with one for each."""
    qkv_bias: bool
    """Biases on the query, key and value projections."""
    tie_weights: bool = False
    """Output head shares the token embedding."""
    position: Literal["learned", "rope"] = "learned"
    """Position encoding."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization."""
    mlp: Literal["gelu", "relu2", "swiglu"] = "gelu"
    """Feed-forward activation."""
    qk_norm: bool = False
    """RMS-normalize the queries and keys of each head."""
    n_kv_heads: Count | None = Field(default=None, ge=1)
    """Key-value heads; null: n_heads."""
    rope_base: float | None = Field(
        default=None, gt=1, allow_inf_nan=False, description=f"Base of rope's wavelengths; null: {ROPE_BASE:,.0f}."
    )
    norm_gain: bool | None = None
    """Learned gains in RMS norms; null: true."""
    linear_bias: bool = True
    """Biases on a block's linear layers, except query, key, value and router."""
    head_dim: Count | None = Field(default=None, ge=1)
    """Width of a head; null: emb_dim / n_heads."""
    mlp_dim: Count | None = Field(default=None, ge=1)
    """Width of the feed-forward layer; null: 4 emb_dim, with swiglu 8 ceil(emb_dim / 3)."""
    # Far below this range, half precision cannot hold the capped logits; far above, fp32 cannot hold the cap. Gemma 2's
    # cap is 30.
    logit_softcap: float | None = Field(default=None, ge=0.01, le=10_000)
    """Cap c: logits become c tanh(logits / c); null: no cap."""
    initialisation: Literal["gpt2", "zero_residual"] = "gpt2"
    """zero_residual: projections into the residual stream begin at zero."""
    value_embeddings: Count | None = Field(default=None, ge=1)
    """Number N of embedding tables that are mixed into the values of the first N and the last N blocks; null: none."""
    embedding_skip: bool = False
    """A learned skip from the embedding to each block."""
    bigram_embedding: Count | None = Field(default=None, ge=2)
    """Rows of an embedding table that is indexed by a hash of the last two tokens; null: no such table."""
    moe: ExpertCounts | None = None
    """A mixture of experts in place of each feed-forward layer; null: none."""

    @model_validator(mode="before")
    @classmethod
    def _spell_out(cls, raw: Any) -> Any:
        """Replace `depth` by the keys that it sets. Fill in `rope_base` and `norm_gain` if the model uses them."""
        if not isinstance(raw, dict):
            return raw
        filled = dict(raw)
        if "depth" in raw:
            depth = filled.pop("depth")
            if not isinstance(depth, int) or isinstance(depth, bool) or not 1 <= depth <= LARGEST_LAYERS:
                raise ValueError(f'key "depth": must be a whole number from 1 to {LARGEST_LAYERS:,}')
            shape = {"n_layers": depth, "n_heads": depth, "emb_dim": depth * HEAD_DIM_OF_DEPTH}
            if given := [key for key in shape if key in raw]:
                raise ValueError(
                    f'keys "depth" and "{given[0]}": "depth" already sets {given[0]}; remove one of the two'
                )
            filled = {"drop_rate": 0.0, "qkv_bias": False, **shape, **filled}
        # Written out, so that they are recorded with the model
        if filled.get("rope_base") is None and filled.get("position") == "rope":
            filled["rope_base"] = ROPE_BASE
        if filled.get("norm_gain") is None and (filled.get("norm") == "rmsnorm" or filled.get("qk_norm") is True):
            filled["norm_gain"] = True
        return filled

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        for fault in _faults(self):
            raise ValueError(fault)
        return self

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the optional keys of model.json with their default values."""
        return {key: field.default for key, field in cls.model_fields.items() if not field.is_required()}

    @property
    def drop_rates(self) -> DropRates:
        """Dropout rate at each place, whether model.json gives four rates or one."""
        if isinstance(self.drop_rate, DropRates):
            return self.drop_rate
        return DropRates(**dict.fromkeys(DropRates.model_fields, self.drop_rate))

    @property
    def head_width(self) -> int:
        """Width of one head of queries, keys or values."""
        return self.head_dim or self.emb_dim // self.n_heads

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads, and of the output of all heads."""
        return self.n_heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Width of the keys of all key-value heads together. Their values are as wide."""
        return (self.n_kv_heads or self.n_heads) * self.head_width

    @property
    def mlp_width(self) -> int:
        """Width of the feed-forward layer: `mlp_dim`, or by default 4·`emb_dim`, with SwiGLU 8·⌈`emb_dim` / 3⌉."""
        if self.mlp_dim is not None:
            return self.mlp_dim
        # SwiGLU's three matrices have about as many weights as others' two (Shazeer, arXiv:2002.05202).
        return 8 * -(-self.emb_dim // 3) if self.mlp == "swiglu" else 4 * self.emb_dim

    def value_embedding_of(self, layer: int) -> int | None:
        """Return the index of the value embedding table that block `layer` uses, or None. Of N tables, the first N
        blocks use one each, in order, and so do the last N blocks."""
        tables = self.value_embeddings or 0
        from_the_last = layer - (self.n_layers - tables)
        return layer if layer < tables else from_the_last if from_the_last >= 0 else None

    def tensor_shapes(self) -> Shapes:
        """Return the shape of every tensor by its name in checkpoints, in the model's order. A tied head is listed,
        too."""
        shapes = self._embedding_shapes()
        for layer in range(self.n_layers):
            shapes |= {f"trf_blocks.{layer}.{name}": shape for name, shape in self._block_shapes(layer).items()}
        return shapes | self._norm_shapes("final_norm") | {HEAD: (self.vocab_size, self.emb_dim)}

    def _embedding_shapes(self) -> Shapes:
        shapes: Shapes = {EMBEDDING: (self.vocab_size, self.emb_dim)}
        if self.position == "learned":
            shapes["pos_emb.weight"] = (self.context_length, self.emb_dim)
        if self.bigram_embedding is not None:
            shapes["bigram_emb.weight"] = (self.bigram_embedding, self.emb_dim)
        for table in range(self.value_embeddings or 0):
            shapes[f"value_embs.{table}.weight"] = (self.vocab_size, self.kv_width)
        return shapes

    def _block_shapes(self, layer: int, experts: int | None = None) -> Shapes:
        """Return the shapes of a block's tensors, by names without the block's prefix. `experts` is the number of
        experts to include (None: all)."""
        rows = {"W_query": self.query_width, "W_key": self.kv_width, "W_value": self.kv_width}
        block: Shapes = {"skip.scale": (2,)} if self.embedding_skip else {}
        block |= self._norm_shapes("norm1")
        block |= {f"att.{part}.weight": (count, self.emb_dim) for part, count in rows.items()}
        block |= {f"att.{part}.bias": (count,) for part, count in rows.items() if self.qkv_bias}
        block |= self._linear_shapes("att.out_proj", self.emb_dim, self.query_width)
        if self.qk_norm and self.norm_gain:
            block |= {f"att.{part}_norm.scale": (self.head_width,) for part in "qk"}
        if self.value_embedding_of(layer) is not None:
            block["att.value_mix.scale"] = (2,)
        block |= self._norm_shapes("norm2")
        layers = ["ff"]
        if self.moe is not None:
            block["ff.router.weight"] = (self.moe.num_experts, self.emb_dim)
            layers = [f"ff.experts.{number}" for number in range(experts or self.moe.num_experts)]
        for name in layers:
            block |= self._linear_shapes(f"{name}.layers.0", self.mlp_width, self.emb_dim)
            block |= self._linear_shapes(f"{name}.layers.2", self.emb_dim, self.mlp_width)
            block |= self._linear_shapes(f"{name}.gate", self.mlp_width, self.emb_dim) if self.mlp == "swiglu" else {}
        return block

    def _norm_shapes(self, name: str) -> Shapes:
        parts = ("scale", "shift") if self.norm == "layernorm" else ("scale",) if self.norm_gain else ()
        return {f"{name}.{part}": (self.emb_dim,) for part in parts}

    def _linear_shapes(self, name: str, out: int, into: int) -> Shapes:
        return {f"{name}.weight": (out, into), **({f"{name}.bias": (out,)} if self.linear_bias else {})}

    @property
    def parameters(self) -> int:
        """Number of trainable parameters. A tied head and token embedding count once."""
        return self._count_parameters(self._block_shapes(0))

    @property
    def active_parameters(self) -> int:
        """Number of trainable parameters without the experts that a token does not go through. Embeddings are counted
        in full."""
        return self._count_parameters(self._active_shapes())

    def _active_shapes(self) -> Shapes:
        """Return the shapes of the first block's tensors, without inactive experts."""
        return self._block_shapes(0, self.moe.num_active_experts if self.moe else None)

    def _count_parameters(self, block: Shapes) -> int:
        """Count parameters. `block` has the shapes to count in each layer; `att.value_mix` counts only where used."""
        outside = _numbers(self._embedding_shapes() | self._norm_shapes("final_norm"))
        head = 0 if self.tie_weights else self.vocab_size * self.emb_dim
        block.pop("att.value_mix.scale", None)  # the only tensor that some blocks lack
        mixes = sum(self.value_embedding_of(layer) is not None for layer in range(self.n_layers))
        return outside + head + self.n_layers * _numbers(block) + 2 * mixes

    @property
    def block_weights(self) -> int:
        """Number of weights in a block's matrix products for one token. With experts, this counts the router and the
        active experts."""
        return _numbers({name: shape for name, shape in self._active_shapes().items() if len(shape) == 2})

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the matrix products for one token of training, forward and backward.

        The sum of two terms (PaLM, arXiv:2204.02311, appendix B):

        - 6 for each weight of a matrix product, including the head's. Inactive experts and embeddings do not count.
        - 12·L·Q·T for attention, with L layers, context length T and query width Q. The causal mask is ignored.
        """
        multiplying = self.n_layers * self.block_weights + self.vocab_size * self.emb_dim
        return 6 * multiplying + 12 * self.n_layers * self.query_width * self.context_length


def _numbers(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _faults(config: ModelConfig) -> Iterator[str]:
    """Yield an error message with a remedy for each impossible combination of keys."""
    width, heads, kv_heads = config.emb_dim, config.n_heads, config.n_kv_heads
    if config.head_dim is None and width % heads:
        yield f'key "emb_dim": {width} is not a multiple of n_heads ({heads}); change one of them, or give head_dim'
    if kv_heads is not None and heads % kv_heads:
        yield f'key "n_kv_heads": {kv_heads} does not divide n_heads ({heads}); use a divisor of it'
    if config.position == "rope" and config.head_width % 2:
        odd = f'key "position": "rope" rotates pairs of dimensions, and a head has {config.head_width}, an odd number'
        yield f"{odd}; make head_dim even, or change emb_dim or n_heads"
    if config.qkv_bias and not config.linear_bias:
        without = 'keys "qkv_bias" and "linear_bias": with "linear_bias": false no linear layer has biases'
        yield f"{without}; set qkv_bias to false, too"
    if config.rope_base is not None and config.position != "rope":
        yield 'key "rope_base": belongs with "position": "rope"; remove it, or change position'
    if config.norm_gain is not None and config.norm != "rmsnorm" and not config.qk_norm:
        yield 'key "norm_gain": belongs with "norm": "rmsnorm" or "qk_norm": true; remove it, or change one of them'
    tables, layers = config.value_embeddings, config.n_layers
    if tables is not None and tables != layers and 2 * tables > layers:
        needed = f"{tables} tables need {tables} blocks, or at least {2 * tables}, and n_layers is {layers}"
        yield f'key "value_embeddings": {needed}; change one of them'
    if config.parameters > LARGEST_PARAMETERS:
        keys = 'keys "vocab_size", "context_length", "emb_dim", "n_layers", "mlp_dim", "head_dim", "value_embeddings"'
        number = f"a model of {config.parameters:,} parameters; the limit is {LARGEST_PARAMETERS:,}; lower one of them"
        yield f'{keys} and "bigram_embedding": {number}'


def load_model_config(path: Path) -> ModelConfig:
    """Read and check a model.json. Raises UserError if it cannot be read or is not valid."""
    return parse_config(ModelConfig, read_json_object(path), path)
