"""A checkpoint's meta.json: written and read through one class.

The file may come from an earlier version, another program, or an attacker.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError
from harness.common.json_files import finite, parse_config, read_json_object
from harness.data.loader import BatchLayout, BatchSchedule
from harness.model.tensor_names import META
from harness.runs.budget import Budget
from harness.runs.directory import CHECKPOINT_NAME
from harness.runs.throughput import Conditions, Measured

OPTIMIZER = "optimizer.pt"  # the file beside it; the notebook's may have none

# What every checkpoint of ours says of itself. The lab notebook's have train_loss, val_loss, global_step and is_best.
OWN_KEYS = {"sha256", "model", "train", "tokens_seen"}

Count = Annotated[int, Field(ge=0, lt=2**62)]
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
WorldSize = Annotated[int, Field(ge=1, lt=2**31)]
Loss = Annotated[float, Field(allow_inf_nan=False)]
PrecisionName = Annotated[str, Field(pattern="^(bf16|fp16|fp32)$")]


@dataclass
class TrainState:
    """The progress of a run: the same on every rank, and in every checkpoint's meta.json."""

    global_step: int = -1  # the last one done
    tokens_seen: int = 0
    train_loss: float | None = None  # at the last report; after a checkpoint, the mean since the one before
    val_loss: float | None = None  # at the last validation
    best_loss: float | None = None
    best_step: int | None = None
    skipped_steps: int = 0
    loss_sum: float = 0.0  # over the microbatches reported since the last checkpoint
    loss_count: int = 0
    foreign_tokens: int = 0  # of those seen, what another program trained: no seconds of ours belong to them
    # Where the speed's measurement began: at the start, or when training went on with another batch or machine.
    measured_from_step: int = -1
    measured_from_tokens: int = 0
    measured_from_seconds: float = 0.0  # of training

    def values(self) -> dict[str, Any]:
        """Return the fields under their names in meta.json; null for what is not finite."""
        return {key: finite(value) for key, value in asdict(self).items()}

    @property
    def trained_tokens(self) -> int:
        """The tokens that the recorded seconds of training belong to."""
        return max(0, self.tokens_seen - self.foreign_tokens)

    def measure_from_here(self, training_seconds: float) -> None:
        """Measure the speed from here on only, after `training_seconds` of training in all."""
        self.measured_from_step, self.measured_from_tokens = self.global_step, self.tokens_seen
        self.measured_from_seconds = training_seconds

    def measured(self, training_seconds: float) -> Measured:
        """The training that the speed is measured over, after so many seconds of it in all."""
        return Measured(
            global_steps=self.global_step - self.measured_from_step,
            tokens=self.tokens_seen - self.measured_from_tokens,
            seconds=training_seconds - self.measured_from_seconds,
        )

    def add_report(self, loss: float, microbatches: int, skipped_steps: int) -> None:
        """Count what has been reported: the mean loss over so many microbatches of all ranks."""
        self.train_loss = loss
        self.loss_sum += loss * microbatches
        self.loss_count += microbatches
        self.skipped_steps += skipped_steps

    def begin_checkpoint(self) -> None:
        """The training loss becomes the mean since the checkpoint before."""
        self.train_loss = self.loss_sum / self.loss_count if self.loss_count else None
        self.loss_sum, self.loss_count = 0.0, 0

    def record_if_best(self, loss: float | None) -> None:
        """Remember this loss and its step if it is the lowest so far."""
        if loss is not None and loss < (math.inf if self.best_loss is None else self.best_loss):
            self.best_loss, self.best_step = loss, self.global_step

    @property
    def is_best(self) -> bool:
        """True if the best checkpoint is that of the last step done."""
        return self.best_step == self.global_step

    def forget_best(self) -> None:
        """Losses from here on are measured on other text, and cannot be compared with those before."""
        self.best_loss = self.best_step = self.val_loss = None


@dataclass(frozen=True)
class Provenance:
    """The origin of a checkpoint, as JSON has it: model.json, train.json and the dataset's name and fingerprint."""

    model: dict[str, Any]
    parameters: int
    train: dict[str, Any]
    dataset: dict[str, Any]


class ValidationText(NamedTuple):
    """The text that a run's validation losses are over."""

    sha256: str  # of the validation split
    start_token: int
    sequences: int
    context_length: int


def validation_text(
    model: Mapping[str, Any], train: Mapping[str, Any], dataset: Mapping[str, Any]
) -> ValidationText | None:
    """Return the text of a run's validation losses, by its recorded configurations; None where it is not recorded.

    Losses compare where this is equal: neither the data set's name nor the size of a microbatch is part of it.
    """
    split = dataset.get("validation")
    digest = split.get("sha256") if isinstance(split, dict) else None
    batches, microbatch = train.get("validation_batches"), train.get("microbatch_size")
    start, context = train.get("start_val_token", 0), model.get("context_length")
    if not isinstance(digest, str) or not isinstance(batches, int) or not isinstance(microbatch, int):
        return None
    if not isinstance(start, int) or not isinstance(context, int):
        return None
    return ValidationText(digest, start, batches * microbatch, context)


class CheckpointMeta(BaseModel):
    """A meta.json. Only the step must be there, and unknown keys are kept: earlier versions wrote fewer, and the
    notebook others. What belongs together is compared with the run's own by whoever continues it.

    The order of the fields is that of the keys in the file.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    # A TrainState's
    global_step: Count
    tokens_seen: Count = 0
    train_loss: Loss | None = None
    val_loss: Loss | None = None
    best_loss: Loss | None = None
    best_step: Count | None = None
    skipped_steps: Count = 0
    loss_sum: Loss | None = 0.0  # null where it is not finite
    loss_count: Count = 0
    foreign_tokens: Count = 0
    measured_from_step: Annotated[int, Field(ge=-1, lt=2**62)] = -1
    measured_from_tokens: Count = 0
    measured_from_seconds: Seconds = 0.0
    # The occasion
    is_best: bool = False
    planned: bool = False  # by train.json, rather than asked for by a signal
    validation_due: bool = False  # a signal came before the step's validation was done
    benchmarks_due: bool = False
    # Where and how it was trained
    seconds: dict[str, Seconds] = {}  # by phase
    metrics_bytes: Count = 0  # size of metrics.jsonl
    world_size: WorldSize | None = None
    microbatch_size: Count | None = None
    accumulation_steps: Count | None = None
    device: str | None = None
    precision: PrecisionName | None = None  # in which it was trained; earlier versions do not say
    tokenizer: str | None = None  # "gpt2", or the name of a file beside this one
    torch: str | None = None
    versions: dict[str, str] = {}  # of the libraries, by name
    commit: str | None = None  # of this program's sources; null where that is not known
    # What train.json came to: a budget that is not in tokens, and keys that its scaling rules changed.
    budget: Budget | None = None
    scaled: dict[str, float] | None = None
    active_parameters: Count | None = None  # of a mixture of experts: those that a token goes through
    moe_router_loss_scale: Annotated[float, Field(ge=0)] | None = None  # as used, also where train.json leaves it out
    # A Provenance's. Whoever continues compares model and dataset with the run's own, and says what differs: any value.
    model: Any = None
    parameters: Count | None = None
    train: dict[str, Any] = {}
    dataset: Any = None
    sha256: dict[str, str] = {}  # of the files beside this one, and of this one's own values

    def state(self) -> TrainState:
        """The run's state when the checkpoint was saved."""
        state = TrainState(**{field.name: getattr(self, field.name) for field in fields(TrainState)})
        if self.loss_sum is None:
            state.loss_sum = math.nan
        if "measured_from_step" not in self.model_fields_set:
            # An earlier version's: some of its tokens may be another program's, and its seconds another machine's.
            state.measure_from_here(self.seconds.get("training", 0.0))
        return state

    @property
    def due(self) -> str | None:
        """The work after the step that a signal interrupted; it and what follows it are still due. None for none."""
        return "validation" if self.validation_due else "benchmarks" if self.benchmarks_due else None

    @property
    def is_from_notebook(self) -> bool:
        """True if the checkpoint is the lab notebook's, rather than a damaged one of this program."""
        return not OWN_KEYS & self.model_fields_set

    @property
    def conditions(self) -> Conditions:
        return Conditions(self.world_size, self.device, self.train)


def read_meta(path: Path) -> CheckpointMeta:
    """Read the meta.json of the checkpoint `path`. Raises UserError naming the key that cannot be a checkpoint's."""
    file = path / META
    raw = read_json_object(file)
    try:
        meta = parse_config(CheckpointMeta, raw, file)
    except UserError as error:
        fault = str(error).removeprefix(f"{file}: ")
        raise UserError(f"{file}: not the meta.json of a checkpoint of this program: {fault}") from None
    name = CHECKPOINT_NAME.fullmatch(path.resolve().name)
    if name and int(name.group(1)) != meta.global_step:
        raise UserError(f'{file}: key "global_step": {meta.global_step}, but the folder is called {name.group()}')
    return meta


def verify_meta(path: Path) -> None:
    """Raises UserError if the values in the meta.json of the checkpoint `path` are not those whose hash it holds, if it
    holds one: earlier versions wrote none."""
    values = read_json_object(path / META)  # as they stand there, unknown keys among them
    if values["sha256"].get(META, own := _own_sha256(values)) != own:
        raise UserError(f"{path / META}: damaged (its values do not have the SHA-256 that it holds)")


def write_meta(path: Path, meta: CheckpointMeta) -> None:
    """Write a checkpoint's meta.json, with a SHA-256 of its own values among those of the other files."""
    values = meta.model_dump(exclude_unset=True)
    values["sha256"] = {**meta.sha256, META: _own_sha256(values)}
    (path / META).write_text(json.dumps(values, indent=2) + "\n")


def _own_sha256(values: dict[str, Any]) -> str:
    """SHA-256 of the values, whatever the layout of the file, without the entry of this hash itself."""
    others = {name: value for name, value in values.get("sha256", {}).items() if name != META}
    return hashlib.sha256(json.dumps({**values, "sha256": others}, sort_keys=True).encode()).hexdigest()


def upgrade_notebook_meta(
    path: Path, meta: CheckpointMeta, provenance: Provenance | None, batches: BatchSchedule
) -> CheckpointMeta:
    """The meta.json of the notebook's checkpoint `path`, completed: it belongs to the run that it is put into
    (`provenance`, if that is known yet), and saw the tokens of that run's `batches` from its beginning, whose seconds
    are not recorded. The optimizer's state, if there is one, is AdamW's. One of ours stays as it is."""
    if not meta.is_from_notebook:
        return meta
    seen = batches.tokens_before(meta.global_step + 1)
    belongs = dict(vars(provenance)) if provenance else {}
    if belongs and (path / OPTIMIZER).exists():
        belongs["train"] = {**belongs["train"], "optimizer": "adamw"}
    unmeasured = {"seconds": {}, "measured_from_tokens": seen, "measured_from_seconds": 0.0}
    position = {"tokens_seen": seen, "foreign_tokens": seen, "measured_from_step": meta.global_step}
    return meta.model_copy(update={**belongs, **position, **unmeasured})


def recorded_layout(today: BatchLayout, meta: CheckpointMeta) -> BatchLayout:
    """Batch layout that a checkpoint's meta.json names; what that does not say is as it is today."""
    recorded = {each.name: getattr(meta, each.name, None) for each in fields(today)}
    return replace(today, **{name: found for name, found in recorded.items() if found})
