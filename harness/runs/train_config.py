"""`train.json` as a class, and strict loading of the file."""

from __future__ import annotations

import itertools
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from harness.common.errors import UserError
from harness.common.json_files import Count, RunFile, parse_config, read_json_object
from harness.model.tensor_names import WEIGHTS
from harness.runs.upstream import NOTEBOOK_KEYS, translate_upstream

LARGEST_PRICE = 1e9
Text = Annotated[str, Field(min_length=1)]
Positive = Annotated[Count, Field(ge=1)]
Index = Annotated[Count, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# A peak learning rate. AdamW changes each weight by about the learning rate in a step, and weights are far below 1, so
# a higher rate must be a mistake. The highest rates in use are those of embeddings, 0.3 in nanochat and 0.6 in
# modded-nanogpt.
Rate = Annotated[float, Field(gt=0, le=10.0)]
# Keys that say how much is trained. A train.json has exactly one of them.
BUDGETS = ("min_train_tokens", "train_steps", "tokens_per_parameter", "target_flops")
# Keys that determine the same setting, so that a train.json may give only one of them.
ALTERNATIVES = (
    BUDGETS,
    ("global_batch_size", "gradient_accumulation_steps", "batch_ramp"),
    ("validation_sequences", "validation_batches"),
    ("warmup_steps", "warmup_period_percent"),
)
DEFAULT_MIN_LR_RATIO = 0.1


class BatchScale(BaseModel):
    """Value of the key `scale_with_batch`: tokens per global batch, and perhaps per run, with which learning rates and
    weight decay were tuned. The formulas are in harness/planning/rates.py."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    reference_tokens: Positive
    """Tokens of the global batch that learning rates and weight decay were tuned with."""
    reference_train_tokens: Positive | None = None
    """Tokens of the run that weight_decay was tuned with; null: weight decay is not scaled to this run's length."""


class DepthScale(BaseModel):
    """Value of the key `scale_with_depth`: the number of layers that weight decay was tuned with.
    harness/planning/rates.py has the formula that scales weight decay to this model's number of layers."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    reference_layers: Positive
    """n_layers of the model that weight_decay was tuned with."""


MUON_FIRST_MOMENTUM = 0.85  # Muon's momentum at the start of its warm-up


class Source(BaseModel):
    """Entry of the key `dataset` if its value is a list."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Text
    """owner/name on the Hugging Face Hub, or builtin/name."""
    weight: float = Field(gt=0, le=1e9)
    """Share of the tokens, relative to the weights of the others."""


class Affects(Enum):
    """Effect of a key of train.json, given in the annotation of the key's field. `keys_affecting` returns the keys that
    have a given effect. A key without such an annotation can change the result of training."""

    BATCH = "the number of tokens of a step"
    SPEED = "the time of a step, and perhaps its result"
    # The key changes neither the weights of any step nor the choice of the best checkpoint (the exception: `epochs`).
    # checkpoint_interval is not such a key, because `best` is chosen among the checkpoints.
    NOTHING = "no result"


class TrainConfig(RunFile):
    """Settings of one experiment's training: the contents of `runs/<name>/train.json`."""

    model_config = ConfigDict(title="train.json")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = NOTEBOOK_KEYS
    replaceable_keys: ClassVar[set[str]] = {"microbatch_size"}

    dataset: Annotated[
        # The tags appear in the locations of pydantic's errors.
        Annotated[Text, Tag("str")] | Annotated[list[Source], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "str"),
    ]
    """owner/name on the Hugging Face Hub, or builtin/name; or several with their weights, as in [{"name": "me/books",
    "weight": 0.7}, {"name": "me/code", "weight": 0.3}]."""
    microbatch_size: Annotated[Positive, Affects.BATCH]
    """Sequences per device and forward pass."""
    min_train_tokens: Count | None = None
    """Train on the smallest whole number of global batches with at least this many tokens; -1: on as many whole global
    batches as the train split has (in all of its epochs)."""
    train_steps: Positive | None = None
    """A budget in place of min_train_tokens: global steps."""
    tokens_per_parameter: float | None = Field(default=None, gt=0, le=1e9)
    """A budget in place of min_train_tokens: at least this many tokens for each parameter (with experts, for each
    active one)."""
    target_flops: float | None = Field(default=None, gt=0, le=1e40)
    """A budget in place of min_train_tokens: at most this many floating-point operations."""
    start_train_token: Index
    """Number of tokens at the beginning of the train split (of a mixture: of each) that are not trained on."""
    shuffle: bool = False
    """Read the windows of the train split (context_length tokens each) in random order, given by data_seed; false: from
    front to back."""
    # Affects the result only with min_train_tokens -1, because it then decides the length of the run.
    epochs: Annotated[Annotated[float, Field(gt=0, le=1e6)] | Literal["repeat"] | None, Affects.NOTHING] = None
    """Largest number of passes over the train split that the budget may take; "repeat": any number; null: one."""
    validation_interval: Positive | None = None
    """Global steps between validations; absent: no validation."""
    validation_sequences: Positive | None = None
    """Sequences per validation; the same text for any microbatch_size."""
    validation_batches: Positive | None = None
    """Microbatches per validation, in place of validation_sequences."""
    start_val_token: Index | None = None
    """Position in the validation split (of a mixture: in each) of the first token to validate on."""

    initial_weights: Text | None = None
    """Start from the weights in this safetensors file: an absolute path, or one relative to the run's folder."""
    random_seed: Index = 42
    """Seed of the initial weights (equal on all ranks), of dropout (different on each rank) and, with shuffle, of the
    order of the windows."""
    init_seed: Index | None = None
    """Seed of the initial weights; null: random_seed."""
    data_seed: Index | None = None
    """Seed of the order of the windows, with shuffle; null: random_seed."""
    dropout_seed: Index | None = None
    """Seed of dropout; null: random_seed."""
    gradient_accumulation_steps: Annotated[Positive, Affects.BATCH] = 1
    """Microbatches per rank and optimizer step."""
    global_batch_size: Annotated[Positive | None, Affects.BATCH] = None
    """Sequences per optimizer step over all ranks; replaces gradient_accumulation_steps."""
    batch_ramp: Annotated[list[Annotated[tuple[Count, Count], Field(strict=False)]] | None, Affects.BATCH] = Field(
        default=None, min_length=1
    )
    """A global batch that grows: with [[0, 8], [1000000, 16]] it has 8 sequences over all ranks for 1,000,000 tokens,
    then 16."""
    learning_rate: Rate = 0.0004
    """Peak learning rate."""
    weight_decay: Finite = Field(default=0.1, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """AdamW's averaging factors."""
    eps: Finite = Field(default=1e-8, ge=1e-37)  # a smaller number is 0, or nearly, in fp32
    """AdamW's denominator term."""
    decay_all_parameters: bool = True
    """false: weight decay on matrices only."""
    scale_with_batch: BatchScale | None = None
    """Scale learning rates and weight decay, which were tuned with another global batch, to this run's global batch. If
    reference_train_tokens is given, also scale weight decay to this run's length. null: not scaled."""
    scale_with_depth: DepthScale | None = None
    """Scale weight decay to this model's number of layers, from the number that it was tuned with; null: not scaled."""
    lr_schedule: Literal["constant", "cosine", "wsd", "linear"] = "constant"
    """The learning rate after warm-up; wsd: constant, then falling linearly (decay_period_percent)."""
    warmup_steps: Index | None = None
    """Global steps of linear warm-up."""
    warmup_period_percent: float | None = Field(default=None, ge=0, le=100)
    """Warm-up as a percentage of all global steps, rounded down."""
    min_lr_ratio: float = Field(default=DEFAULT_MIN_LR_RATIO, ge=0, le=1)
    """Final learning rate divided by the peak. If lr_schedule is "linear", the default is 0."""
    decay_period_percent: float | None = Field(default=None, gt=0, le=100)
    """wsd: the part of the run, at its end, in which the learning rate falls; a percentage of all global steps."""
    clipping_max_norm: Finite | None = Field(default=None, gt=0)
    """Gradient clipping by global norm; null: none."""
    moe_router_loss_scale: Finite | None = Field(default=None, ge=0)
    """Coefficient of the loss that balances experts; null: 0.01 / num_active_experts."""
    optimizer: Annotated[Literal["adamw", "muon"], Affects.SPEED] = "adamw"
    """muon: Muon updates the blocks' matrices, and AdamW all else."""
    embedding_learning_rate: Rate | None = None
    """AdamW's peak learning rate for embeddings; null: learning_rate."""
    head_learning_rate: Rate | None = None
    """AdamW's peak learning rate for the output head; null: learning_rate."""
    vector_learning_rate: Rate | None = None
    """AdamW's peak learning rate for biases, norms, and the factors of value embeddings and skips; null:
    learning_rate."""
    muon_learning_rate: Rate | None = None
    """Muon's peak learning rate; null: learning_rate."""
    muon_update_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of Muon's learning rate for a matrix of A rows and B columns. match_rms_adamw: 0.2 sqrt(max(A, B)), which
    makes updates as large as AdamW's, so that a rate tuned for AdamW fits. original: sqrt(max(1, A / B))."""
    muon_weight_decay: Finite | None = Field(default=None, ge=0)
    """Muon's decoupled weight decay; null: weight_decay."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Muon's averaging factor (Nesterov)."""
    muon_momentum_warmup_steps: Positive | None = None
    """Steps in which Muon's momentum rises from 0.85; null: none."""
    shard_optimizer: Annotated[bool, Affects.SPEED] = False
    """ZeRO-1: optimizer state split over the ranks."""
    precision: Annotated[Literal["auto", "bf16", "fp16", "fp32"], Affects.SPEED] = "auto"
    """auto: bf16 where the device is fast in it, else fp16 on CUDA, else fp32."""
    residual_precision: Annotated[Literal["fp32", "bf16"], Affects.SPEED] = "fp32"
    """bf16: the residual stream (the sum that each block adds to) is in bf16, too; only with bf16 matrix products."""
    compile: Annotated[bool | Literal["auto"], Affects.SPEED] = "auto"
    """torch.compile; auto: on CUDA only."""
    attention: Annotated[Literal["auto", "cudnn", "flash", "efficient"], Affects.SPEED] = "auto"
    """The attention kernel on CUDA; auto: FlashAttention 3 or 4 if it is installed and can compute this model's
    attention (without dropout, not in fp32), else torch chooses."""
    deterministic: Annotated[bool, Affects.SPEED] = False
    """Bitwise equal results every time, also with CUDA or compile; slower."""
    bucket_mb: Annotated[Positive | None, Affects.SPEED] = 100
    """MiB of gradients that ranks exchange at once; null: torch's 25."""
    activation_checkpointing: Annotated[bool, Affects.SPEED] = False
    """Recompute each block in the backward pass."""
    checkpoint_interval: Positive | None = None
    """Global steps between checkpoints; null: as validation_interval."""
    keep_checkpoints: Annotated[Positive | None, Affects.NOTHING] = None
    """Keep the newest N besides best, latest and the one resumed from; null: all."""
    async_checkpoint: Annotated[bool, Affects.NOTHING] = False
    """Write checkpoints in a background thread. Training pauses at most until the previous one is written and weights
    and optimizer state are copied."""
    mirror: Annotated[Text | None, Affects.NOTHING] = Field(default=None, repr=False)
    """URL (hf://buckets/OWNER/NAME, s3://, gs://, sftp:// or file://): checkpoints and results are copied to URL/RUN in
    the background, and a new machine continues from there."""
    weights_check_interval: Annotated[Positive | None, Affects.NOTHING] = None
    """Global steps between comparisons of all ranks' weights; null: only before each checkpoint."""
    validation_ranks: Annotated[Literal["rank0", "all"], Affects.NOTHING] = "rank0"
    """The ranks that validate."""
    report_interval: Annotated[Positive, Affects.NOTHING] = 10
    """Global steps between reports."""
    max_skipped_steps: Annotated[Positive, Affects.NOTHING] = 10
    """At a report, the run ends as diverged if the gradients of this many steps in a row were not finite."""
    stop_if_diverged: Annotated[bool, Affects.NOTHING] = True
    """End a run whose training loss has long been far above its own lowest level."""
    price_per_hour: Annotated[float | None, Affects.NOTHING] = Field(default=None, ge=0, le=LARGEST_PRICE)
    """US dollars per hour for the whole machine, or for all machines together."""
    max_hours: Annotated[float | None, Affects.NOTHING] = Field(default=None, gt=0, le=1e6)
    """The run stops, with a checkpoint, once it has taken this many hours."""
    max_dollars: Annotated[float | None, Affects.NOTHING] = Field(default=None, gt=0, le=LARGEST_PRICE)
    """The run stops, with a checkpoint, once it has cost this many dollars at price_per_hour."""
    # Excluded from all files that record train.json, because both can hold secrets.
    on_end: Annotated[list[Text] | None, Affects.NOTHING] = Field(default=None, min_length=1, exclude=True, repr=False)
    """Command, as a list of words, that runs after training has ended or failed."""
    notify: Annotated[str | None, Affects.NOTHING] = Field(default=None, exclude=True, repr=False)
    """URL to which the start, the end or the failure of training is reported, as JSON."""
    benchmark_interval: Annotated[Positive | None, Affects.NOTHING] = None
    """Global steps between benchmarks."""
    benchmark_tasks: Annotated[list[Text] | None, Affects.NOTHING] = Field(default=None, min_length=1)
    """lm-eval's names of tasks and groups, or paths of task files (.yaml)."""
    benchmark_examples: Annotated[Positive, Affects.NOTHING] = 200
    """Number of examples per benchmark task, from its first example on."""
    sample_interval: Annotated[Positive | None, Affects.NOTHING] = None
    """Global steps between printed samples."""
    sample_prompt: Annotated[Text | None, Affects.NOTHING] = None
    """The text that printed samples continue."""

    @model_validator(mode="before")
    @classmethod
    def _linear_to_zero(cls, raw: Any) -> Any:
        """Return `raw`, with `min_lr_ratio` set to 0 if the schedule is linear and this key is missing."""
        if isinstance(raw, dict) and raw.get("lr_schedule") == "linear" and "min_lr_ratio" not in raw:
            return {**raw, "min_lr_ratio": 0.0}
        return raw

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        """Raise ValueError if keys contradict each other or are missing, or if a value is not possible."""
        for keys in ALTERNATIVES:
            given = [f'"{key}"' for key in keys if key in self.model_fields_set and getattr(self, key) is not None]
            if len(given) > 1:
                raise ValueError(f"keys {' and '.join(given)}: give only one of them")
        _check_budget(self)
        _check_batch(self)
        _check_schedule(self)
        _check_optimizer_and_precision(self)
        _check_intervals(self)
        if any("\0" in word for word in self.on_end or []):
            raise ValueError('key "on_end": has a NUL character, which no program can be given; remove it')
        if isinstance(self.dataset, list) and len(self.dataset_weights) < len(self.dataset):
            raise ValueError('key "dataset": names a dataset twice; add up its weights')
        if self.data_seed is not None and not self.shuffle:
            raise ValueError('key "data_seed": belongs with "shuffle": true; remove the seed, or shuffle')
        if self.max_dollars is not None and not self.price_per_hour:
            raise ValueError('key "max_dollars": needs "price_per_hour" above 0; give it, or use "max_hours"')
        if self.notify is not None and not self.notify.startswith(("http://", "https://")):
            raise ValueError('key "notify": must begin with http:// or https://')  # does not show the value, a secret
        return self

    @property
    def dataset_weights(self) -> dict[str, float]:
        """The weights of the datasets, by their names. A dataset given as a name alone has the weight 1."""
        if isinstance(self.dataset, str):
            return {self.dataset: 1.0}
        return {source.name: source.weight for source in self.dataset}

    @property
    def data_name(self) -> str:
        """The names of the datasets, joined by " + " in one text."""
        return " + ".join(self.dataset_weights)

    def seed_of(self, use: Literal["init", "data", "dropout"]) -> int:
        """Return the seed of the initial weights ("init"), of the order of the windows ("data") or of dropout."""
        own: int | None = getattr(self, f"{use}_seed")
        return self.random_seed if own is None else own

    @property
    def validates(self) -> bool:
        """True if the run measures its validation loss."""
        return self.validation_interval is not None

    @property
    def sequences_per_validation(self) -> int | None:
        """Number of sequences on which the validation loss is measured; None: the run does not validate."""
        if self.validation_batches is None:
            return self.validation_sequences
        return self.validation_batches * self.microbatch_size

    @property
    def checkpoint_every(self) -> int:
        """Global steps between checkpoints."""
        every = self.checkpoint_interval or self.validation_interval
        assert every is not None, "checked when the file was loaded"
        return every

    def ceilings(self, seconds: float, dollars: float) -> dict[str, float]:
        """Return the seconds left until the run reaches `max_hours` and `max_dollars`, in a dict with these keys.
        `seconds` and `dollars` are those of the run so far. Past a limit, the seconds left are negative. Keys that
        train.json does not set are left out."""
        left = {}
        if self.max_hours is not None:
            left["max_hours"] = 3600 * self.max_hours - seconds
        if self.max_dollars is not None and self.price_per_hour:
            left["max_dollars"] = 3600 * (self.max_dollars - dollars) / self.price_per_hour
        return left

    @property
    def budget_key(self) -> str:
        """The key of train.json that says how much is trained, one of BUDGETS."""
        return next(key for key in BUDGETS if getattr(self, key) is not None)

    @property
    def global_batches(self) -> list[int]:
        """Sizes of the global batches, in sequences over all ranks; several for a ramp. The list is empty if train.json
        gives neither `global_batch_size` nor `batch_ramp`."""
        if self.batch_ramp:
            return [size for _, size in self.batch_ramp]
        return [] if self.global_batch_size is None else [self.global_batch_size]

    def accumulation_steps(self, world_size: int, sequences: int | None = None) -> int:
        """Return the number of microbatches of each rank per optimizer step. `sequences` is the size of the global
        batch over all ranks; None: train.json's, or the last one of a ramp. Raises UserError if the batch is not a
        whole number of microbatches on every rank."""
        if sequences is None:
            if not self.global_batches:
                return self.gradient_accumulation_steps
            sequences = self.global_batches[-1]
        per_pass = self.microbatch_size * world_size
        steps, rest = divmod(sequences, per_pass)
        if rest or not steps:
            raise UserError(
                f'train.json: key "{"batch_ramp" if self.batch_ramp else "global_batch_size"}": {sequences} sequences '
                f"are not a multiple of {self.microbatch_size} (microbatch_size) x {world_size} (ranks) = {per_pass}; "
                "change one of them"
            )
        return steps


def _check_optimizer_and_precision(config: TrainConfig) -> None:
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError('key "betas": both must be at least 0 and below 1')
    for key in TrainConfig.model_fields if config.optimizer != "muon" else ():
        if key.startswith("muon_") and getattr(config, key) != TrainConfig.model_fields[key].default:
            raise ValueError(f'key "{key}": belongs with "optimizer": "muon"; remove it, or use that optimizer')
    if config.optimizer == "muon" and config.precision == "fp16":
        raise ValueError('keys "optimizer" and "precision": "muon" does not run in "fp16"; use "bf16" or "fp32"')
    if config.muon_momentum_warmup_steps is not None and config.muon_momentum < MUON_FIRST_MOMENTUM:
        raise ValueError(
            f'key "muon_momentum_warmup_steps": momentum rises from {MUON_FIRST_MOMENTUM}, and "muon_momentum" is '
            f"{config.muon_momentum:g}; raise muon_momentum, or remove the warm-up"
        )
    if config.residual_precision == "bf16" and config.precision in ("fp16", "fp32"):
        raise ValueError(f'key "residual_precision": "bf16" needs "precision": "bf16", not "{config.precision}"')
    if config.attention == "cudnn" and config.deterministic:
        raise ValueError(
            'keys "attention" and "deterministic": the backward pass of "cudnn" adds up in varying order; use "flash" '
            'or "efficient"'
        )


def _check_schedule(config: TrainConfig) -> None:
    if config.lr_schedule == "wsd" and config.decay_period_percent is None:
        raise ValueError(
            'key "decay_period_percent": missing; "lr_schedule": "wsd" needs it; give a percentage, e.g. 20'
        )
    if config.lr_schedule != "wsd" and config.decay_period_percent is not None:
        raise ValueError('key "decay_period_percent": belongs with "lr_schedule": "wsd"; remove it')
    if config.lr_schedule == "constant" and config.min_lr_ratio != DEFAULT_MIN_LR_RATIO:
        raise ValueError('key "min_lr_ratio": belongs with "lr_schedule": "cosine", "wsd" or "linear"; remove it')
    if (config.warmup_period_percent or 0) + (config.decay_period_percent or 0) > 100:
        raise ValueError(
            'keys "warmup_period_percent" and "decay_period_percent": together above 100; lower one of them'
        )


def _check_budget(config: TrainConfig) -> None:
    if all(getattr(config, key) is None for key in BUDGETS):
        others = ", ".join(f'"{key}"' for key in BUDGETS[1:])
        raise ValueError(f'key "min_train_tokens": missing; give it, or one of {others}')
    tokens = config.min_train_tokens
    if tokens is not None and tokens < 1 and tokens != -1:
        raise ValueError('key "min_train_tokens": must be at least 1, or -1 for the whole split')
    if tokens == -1 and config.epochs == "repeat":
        raise ValueError('key "epochs": "repeat" with "min_train_tokens": -1 has no end; give a number of epochs')


def _check_batch(config: TrainConfig) -> None:
    ramp = config.batch_ramp
    if ramp is None:
        return
    if ramp[0][0] != 0:
        raise ValueError('key "batch_ramp": must begin at token 0, as in [[0, 8], [1000000, 16]]')
    grows = all(before < after for pair in itertools.pairwise(ramp) for before, after in zip(*pair, strict=True))
    if ramp[0][1] < 1 or not grows:
        raise ValueError(
            'key "batch_ramp": sequences must be at least 1, and tokens and sequences must grow from entry to entry, '
            "as in [[0, 8], [1000000, 16]]"
        )


def _check_intervals(config: TrainConfig) -> None:
    for one, other in (("sample_interval", "sample_prompt"), ("benchmark_interval", "benchmark_tasks")):
        if (getattr(config, one) is None) != (getattr(config, other) is None):
            raise ValueError(f'keys "{one}" and "{other}": give both or neither')
    sizes = [key for key in ("validation_sequences", "validation_batches") if getattr(config, key) is not None]
    # `start_val_token` alone is accepted, because later runs of the notebook have it. They were trained without
    # validation.
    if config.validates != bool(sizes):
        missing, given = ("validation_interval", sizes[0]) if sizes else ("validation_sequences", "validation_interval")
        raise ValueError(f'key "{missing}": missing; validation needs it; give it, or remove {given}')
    if sizes and config.start_val_token is None:
        raise ValueError('key "start_val_token": missing; validation needs it (0 is the split\'s beginning)')
    if not sizes and config.checkpoint_interval is None:
        raise ValueError(
            'key "validation_interval": missing; give validation_interval, validation_sequences and start_val_token, '
            "or checkpoint_interval to train without validation"
        )


def keys_affecting(kind: Affects) -> tuple[str, ...]:
    """Return the keys of train.json with this effect, in the order of the fields."""
    return tuple(key for key, field in TrainConfig.model_fields.items() if kind in field.metadata)


def load_train_config(path: Path, *, has_experts: bool = False) -> TrainConfig:
    """Read and check a train.json. Keys of the lab notebook's program (see runs/upstream.py) are replaced by ours.
    `has_experts` says if model.json has experts. Raises UserError if the file is missing or wrong."""
    if not path.exists() and (path.parent / WEIGHTS).exists():  # written by `convert_hf.py import`
        raise UserError(
            f"{path}: no such file; to train an imported model further, name its {WEIGHTS} by the key "
            '"initial_weights" in a run with the same model.json'
        )
    raw = read_json_object(path)
    try:
        return parse_config(TrainConfig, translate_upstream(raw, has_experts=has_experts), path)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    except UserError as error:
        if "minibatch_size" in raw:  # name the key that is in the file
            raise UserError(str(error).replace('"microbatch_size"', '"minibatch_size"')) from None
        raise
