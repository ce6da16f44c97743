"""`train.json` as a class, and strict loading of both JSON files of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from harness.common.errors import UserError
from harness.common.json_files import Count, RunFile, parse_config, read_json_object
from harness.runs.notebook_keys import NOTEBOOK_KEYS, translate_upstream

LARGEST_PRICE = 1e9


class TrainConfig(RunFile):
    """How one experiment is trained: the contents of `runs/<name>/train.json`."""

    model_config = ConfigDict(title="train.json")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = NOTEBOOK_KEYS
    replaceable_keys: ClassVar[set[str]] = {"microbatch_size"}

    dataset: str = Field(min_length=1, description="owner/name on the Hugging Face Hub, or builtin/name.")
    microbatch_size: Count = Field(ge=1, description="Sequences per device and forward pass.")
    min_train_tokens: Count = Field(
        description="Train on the smallest whole number of global batches with at least this many tokens; "
        "-1: on every whole global batch there is."
    )
    start_train_token: Count = Field(ge=0, description="Where in the train split the slice begins.")
    validation_interval: Count | None = Field(
        default=None, ge=1, description="Global steps between validations; absent: no validation."
    )
    validation_batches: Count | None = Field(default=None, ge=1, description="Microbatches per validation.")
    start_val_token: Count | None = Field(default=None, ge=0, description="Where in the validation split it begins.")

    initial_weights: str | None = Field(
        default=None,
        min_length=1,
        description="Start from this safetensors file (in the run's folder, or a path).",
    )
    random_seed: Count = Field(default=42, ge=0, description="Weights alike on all ranks, dropout not.")
    gradient_accumulation_steps: Count = Field(default=1, ge=1, description="Microbatches per rank and optimizer step.")
    global_batch_size: Count | None = Field(
        default=None, ge=1, description="Sequences per optimizer step over all ranks, instead of accumulation steps."
    )
    learning_rate: float = Field(default=0.0004, gt=0, allow_inf_nan=False, description="Peak learning rate.")
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False, description="Decoupled weight decay.")
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False, description="AdamW's averaging factors.")
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False, description="AdamW's denominator term.")
    decay_all_parameters: bool = Field(default=True, description="false: weight decay on matrices only.")
    lr_schedule: Literal["constant", "cosine", "wsd"] = Field(default="constant", description="Shape after warm-up.")
    warmup_steps: Count | None = Field(default=None, ge=0, description="Global steps of linear warm-up.")
    warmup_period_percent: float | None = Field(
        default=None, ge=0, le=100, description="Warm-up as a percentage of all global steps, rounded down."
    )
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1, description="Final over peak learning rate.")
    decay_period_percent: float | None = Field(
        default=None, gt=0, le=100, description="wsd: the last part of the run, in which the learning rate falls."
    )
    clipping_max_norm: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Gradient clipping by global norm; null: none."
    )
    z_loss: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Coefficient of the squared log-normaliser in the loss."
    )
    optimizer: Literal["adamw", "muon"] = Field(default="adamw", description="muon: matrices by Muon, rest by AdamW.")
    muon_learning_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Muon's own peak.")
    shard_optimizer: bool = Field(default=False, description="ZeRO-1: optimizer state split over the ranks.")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto", description="auto: bf16 where the device has matrix units for it, else fp16 on CUDA, else fp32."
    )
    residual_precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="bf16: the sum that blocks add to in bf16, too; with bf16 matrix products only."
    )
    exact_dropout: bool = Field(
        default=False, description="true: no attention kernel that rounds drop_rate, not even to 1/256."
    )
    coordinate_descent_tuning: bool = Field(
        default=False, description="torch.compile tries more variants of each kernel; slower to start."
    )
    compile: bool | Literal["auto"] = Field(default="auto", description="torch.compile; auto: on CUDA only.")
    deterministic: bool = Field(
        default=False,
        description="The same bits every time, with CUDA or compile too; slower.",
    )
    bucket_mb: Count | None = Field(
        default=None, ge=1, description="MiB of gradients that ranks exchange at once; null: torch's 25."
    )
    activation_checkpointing: bool = Field(default=False, description="Recompute each block in the backward pass.")
    checkpoint_interval: Count | None = Field(default=None, ge=1, description="null: as validation_interval.")
    keep_checkpoints: Count | None = Field(
        default=None, ge=1, description="Keep the newest N besides best and latest; null: all."
    )
    async_checkpoint: bool = Field(
        default=False, description="Write checkpoints while training goes on: it pauses only to copy the weights."
    )
    weights_check_interval: Count | None = Field(
        default=None,
        ge=1,
        description="Global steps between comparisons of all ranks' weights; null: before each checkpoint.",
    )
    validation_ranks: Literal["rank0", "all"] = Field(default="rank0", description="Who validates.")
    report_interval: Count = Field(default=10, ge=1, description="Global steps between reports.")
    max_skipped_steps: Count = Field(default=10, ge=1, description="Non-finite steps in a row that end the run.")
    price_per_hour: float | None = Field(
        default=None, ge=0, le=LARGEST_PRICE, allow_inf_nan=False, description="US dollars for the whole machine."
    )
    benchmark_interval: Count | None = Field(default=None, ge=1, description="Global steps between benchmarks.")
    benchmark_tasks: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, description="lm-eval's names of tasks and groups, or paths of task files (.yaml)."
    )
    benchmark_examples: Count = Field(default=200, ge=1, description="Of each benchmark task, the first so many.")
    sample_interval: Count | None = Field(default=None, ge=1, description="Global steps between printed samples.")
    sample_prompt: str | None = Field(default=None, min_length=1, description="What a printed sample continues.")

    @model_validator(mode="after")
    def _possible(self) -> TrainConfig:
        _refuse_unavailable(self)
        _check_train_combinations(self)
        return self

    @property
    def validates(self) -> bool:
        return self.validation_interval is not None

    @property
    def checkpoint_every(self) -> int:
        """Global steps between checkpoints: `checkpoint_interval`, or else at each validation."""
        every = self.checkpoint_interval or self.validation_interval
        assert every is not None, "checked when the file was loaded"
        return every

    def accumulation_steps(self, world_size: int) -> int:
        """Microbatches that each of `world_size` ranks runs per optimizer step.

        Raises UserError where `global_batch_size` is not a whole number of microbatches on every rank.
        """
        if self.global_batch_size is None:
            return self.gradient_accumulation_steps
        per_pass = self.microbatch_size * world_size
        steps, rest = divmod(self.global_batch_size, per_pass)
        if rest or not steps:
            raise UserError(
                f'train.json: key "global_batch_size": {self.global_batch_size} sequences are not a multiple of '
                f"{self.microbatch_size} (microbatch_size) x {world_size} (ranks) = {per_pass}; change one of them"
            )
        return steps


def _refuse_unavailable(config: TrainConfig) -> None:
    if config.optimizer != "adamw":
        raise ValueError(f'key "optimizer": "{config.optimizer}" is not available yet; use "adamw"')
    if config.muon_learning_rate is not None:
        raise ValueError('key "muon_learning_rate": the muon optimizer is not available yet; remove the key')
    if config.shard_optimizer:
        raise ValueError('key "shard_optimizer": true is not available yet; use false')


def _check_train_combinations(config: TrainConfig) -> None:
    given = config.model_fields_set
    if config.min_train_tokens < 1 and config.min_train_tokens != -1:
        raise ValueError('key "min_train_tokens": must be at least 1, or -1 for all there is')
    if config.global_batch_size is not None and "gradient_accumulation_steps" in given:
        raise ValueError('keys "gradient_accumulation_steps" and "global_batch_size": give one of them, not both')
    if config.warmup_steps is not None and config.warmup_period_percent is not None:
        raise ValueError('keys "warmup_steps" and "warmup_period_percent": give one of them, not both')
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError('key "betas": both must be at least 0 and below 1')
    if (config.decay_period_percent is not None) != (config.lr_schedule == "wsd"):
        raise ValueError('key "decay_period_percent": belongs with "lr_schedule": "wsd", and only there')
    if (config.warmup_period_percent or 0) + (config.decay_period_percent or 0) > 100:
        raise ValueError('keys "warmup_period_percent" and "decay_period_percent": together above 100')
    if config.residual_precision == "bf16" and config.precision in ("fp16", "fp32"):
        raise ValueError(f'key "residual_precision": "bf16" needs "precision": "bf16", not "{config.precision}"')
    if config.coordinate_descent_tuning and config.compile is False:
        raise ValueError('key "coordinate_descent_tuning": true tunes compiled kernels; it needs "compile": true')
    if config.coordinate_descent_tuning and config.deterministic:
        raise ValueError(
            'keys "coordinate_descent_tuning" and "deterministic": kernels that are chosen by timing differ from '
            "start to start; give one of them"
        )
    if (config.sample_interval is None) != (config.sample_prompt is None):
        raise ValueError('keys "sample_interval" and "sample_prompt": give both or neither')
    if (config.benchmark_interval is None) != (config.benchmark_tasks is None):
        raise ValueError('keys "benchmark_interval" and "benchmark_tasks": give both or neither')
    _check_validation_keys(config)


def _check_validation_keys(config: TrainConfig) -> None:
    # The notebook's later runs have `start_val_token` alone: they trained without validation.
    wanted = {"validation_interval": config.validation_interval, "validation_batches": config.validation_batches}
    missing = [key for key, value in wanted.items() if value is None]
    if len(missing) == 1:
        raise ValueError(f'key "{missing[0]}": missing; validation needs it (remove both keys for none)')
    if not missing and config.start_val_token is None:
        raise ValueError('key "start_val_token": missing; validation needs it (0 is the split\'s beginning)')
    if missing and config.checkpoint_interval is None:
        raise ValueError(
            'key "validation_interval": missing; give validation_interval, validation_batches and start_val_token, '
            "or checkpoint_interval to train without validation"
        )


def load_train_config(path: Path) -> TrainConfig:
    """Read and check a train.json. Raises UserError naming the file, the key and the remedy."""
    raw = read_json_object(path)
    try:
        translated = translate_upstream(raw)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    try:
        return parse_config(TrainConfig, translated, path)
    except UserError as error:
        if "minibatch_size" in raw:  # speak of the key that is in the file
            raise UserError(str(error).replace('"microbatch_size"', '"minibatch_size"')) from None
        raise
