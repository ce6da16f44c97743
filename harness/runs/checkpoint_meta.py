"""A checkpoint's meta.json, written and read through one class.

The file may come from an earlier version of this program, from another program, or from an attacker. "The notebook" is
Giles Thomas's lab notebook (harness/runs/upstream.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError
from harness.common.json_files import RecordedCount, finite, parse_config, read_json_object
from harness.data.loader import BatchSchedule
from harness.data.order import WindowOrder
from harness.model.tensor_names import META
from harness.runs.budget import Budget
from harness.runs.directory import step_of
from harness.runs.throughput import Measured, cost_by_phase, same_kernels

OPTIMIZER = "optimizer.pt"  # file in the same folder; a checkpoint of the notebook's program may lack it

# Keys in the meta.json of every checkpoint of this program. The notebook's program writes none of them, only
# train_loss, val_loss, global_step and is_best.
OWN_KEYS = {"sha256", "model", "train", "tokens_seen"}

RecordedAmount = Annotated[float, Field(ge=0, lt=1e12)]  # of seconds or dollars
Loss = Annotated[float, Field(allow_inf_nan=False)]
DIVERGED_BY = 0.5  # nats


class Progress(BaseModel):
    """The progress of a run at a global step, as checkpoints record it."""

    model_config = ConfigDict(strict=True)

    global_step: int = -1  # the last completed step; -1 before the first
    tokens_seen: RecordedCount = 0
    reported_loss: Loss | None = None  # mean loss of the last report
    # As reported_loss. Before a planned checkpoint, `close_loss_period` replaces it with the mean over the microbatches
    # reported since the previous planned checkpoint.
    train_loss: Loss | None = None
    val_loss: Loss | None = None  # of the last validation
    best_loss: Loss | None = None  # lowest loss of a validation right before a planned checkpoint; null without any
    best_step: RecordedCount | None = None  # global step of best_loss; without validation, of the last checkpoint
    skipped_steps: RecordedCount = 0  # steps without an update, because a gradient was not finite
    loss_sum: Loss | None = 0.0  # sum over the microbatches since the last `close_loss_period`; null if not finite
    loss_count: RecordedCount = 0  # number of these microbatches
    foreign_tokens: RecordedCount = 0  # part of tokens_seen that another program trained on; has no recorded seconds
    # Where the measurement of the speed began: at the start of training, or where it last resumed with another batch,
    # with other kernels, on another machine, or from a checkpoint of an earlier version or of another program.
    measured_from_step: Annotated[int, Field(ge=-1, lt=2**62)] = -1
    measured_from_tokens: RecordedCount = 0
    measured_from_seconds: RecordedAmount = 0.0  # seconds of training
    # See `TrainState.follow_level`.
    level_reports: RecordedCount = 0
    loss_level: Loss | None = None
    lowest_loss_level: Loss | None = None
    lowest_val_loss: Loss | None = None
    above_level_since: RecordedCount | None = None  # global step; null while the level is near its lowest
    has_diverged: bool = False


class TrainState(Progress):
    """The progress of a run that is being trained. It is the same on every rank. Losses may be infinite or NaN."""

    loss_sum: float = 0.0

    def values(self) -> dict[str, Any]:
        """Return the fields for meta.json, by name. Numbers that are not finite become None."""
        return {key: finite(value) for key, value in self}

    def measure_from_here(self, training_seconds: float) -> None:
        """Restart the measurement of the training speed at the last completed step. `training_seconds` is how long the
        run has trained so far."""
        self.measured_from_step, self.measured_from_tokens = self.global_step, self.tokens_seen
        self.measured_from_seconds = training_seconds

    def measured(self, training_seconds: float) -> Measured:
        """Return the steps, tokens and seconds of training since the measurement of the speed began. `training_seconds`
        is how long the run has trained in all."""
        return Measured(
            global_steps=self.global_step - self.measured_from_step,
            tokens=self.tokens_seen - self.measured_from_tokens,
            seconds=training_seconds - self.measured_from_seconds,
        )

    def add_report(self, loss: float, microbatches: int, skipped_steps: int) -> None:
        """Add the results of the steps since the previous report: the mean loss over `microbatches` microbatches of all
        ranks, and the number of skipped steps."""
        self.reported_loss = self.train_loss = loss
        self.loss_sum += loss * microbatches
        self.loss_count += microbatches
        self.skipped_steps += skipped_steps

    def follow_level(self, *, patience: int, interval: int) -> None:
        """Update `has_diverged` and the level of the loss. Call this right after each `add_report`. `patience` is a
        number of reports, `interval` the largest number of global steps between two reports.

        - Level: an exponential moving average of the loss over about `patience` / 2 reports.
        - Diverged: the level has been more than DIVERGED_BY above its lowest value for `patience` * `interval` global
          steps.
        - Never diverged while the last validation loss is at most DIVERGED_BY / 2 above the lowest one.

        Without validation, a long stretch of much harder text, or reports of only a few hundred tokens, can give a
        false alarm.
        """
        self.has_diverged = False  # also if an earlier process ended because of skipped steps
        validated = [each for each in (self.val_loss, self.lowest_val_loss, self.best_loss) if each is not None]
        self.lowest_val_loss = min(filter(math.isfinite, validated), default=None)
        loss, window = self.train_loss, max(1, patience // 2)
        if self.lowest_loss_level is not None:
            highest = self.lowest_loss_level + 2 * DIVERGED_BY  # so that a spike is soon forgotten
            loss = min(loss, highest) if loss is not None and math.isfinite(loss) else highest
        if loss is None or not math.isfinite(loss):
            return
        self.level_reports += 1
        level = loss if self.loss_level is None else self.loss_level
        self.loss_level = level = level + (loss - level) / min(self.level_reports, window)
        if self.level_reports < window:
            return
        lowest = level if self.lowest_loss_level is None else min(level, self.lowest_loss_level)
        self.lowest_loss_level, since = lowest, self.above_level_since
        if level <= lowest + DIVERGED_BY:
            self.above_level_since = None
            return
        self.above_level_since = since = self.global_step if since is None else since
        is_near_lowest = (
            self.val_loss is not None
            and self.lowest_val_loss is not None
            and self.val_loss <= self.lowest_val_loss + DIVERGED_BY / 2
        )
        self.has_diverged = self.global_step - since >= patience * interval and not is_near_lowest

    def close_loss_period(self) -> None:
        """Set `train_loss` to the mean over microbatches reported since the last call, if any. Call this before each
        checkpoint that train.json asks for."""
        if self.loss_count:
            self.train_loss = self.loss_sum / self.loss_count
        self.loss_sum, self.loss_count = 0.0, 0

    def record_if_best(self, loss: float | None) -> None:
        """Record this loss and the last completed step as the best if the loss is the lowest so far. Does nothing for
        None or a loss that is not finite."""
        if loss is not None and loss < (math.inf if self.best_loss is None else self.best_loss):
            self.best_loss, self.best_step = loss, self.global_step

    @property
    def is_best(self) -> bool:
        """True if the last completed step is `best_step`. Without validation, this is true in every checkpoint."""
        return self.best_step == self.global_step


@dataclass(frozen=True)
class Provenance:
    """The origin of a checkpoint, as JSON values: model.json, the number of parameters, train.json, and what
    `TrainingData.record` returns for the dataset."""

    model: dict[str, Any]
    parameters: int
    train: dict[str, Any]
    dataset: dict[str, Any]


class ValidationText(NamedTuple):
    """The part of a validation split on which a run measures its validation loss."""

    sha256: str  # fingerprint of the validation split (see `TrainingData.record`)
    start_token: int
    sequences: int
    context_length: int


def validation_text(
    model: Mapping[str, Any], train: Mapping[str, Any], dataset: Mapping[str, Any]
) -> ValidationText | None:
    """Return the part of the validation split on which a run measures its validation loss. Return None if the part is
    not recorded or the run does not validate. The arguments are values of a meta.json or summary.json, named like their
    keys.

    Validation losses of two runs are comparable if the returned parts are equal and not None.
    """
    split = dataset.get("validation")
    digest = split.get("sha256") if isinstance(split, dict) else None
    batches, microbatch = train.get("validation_batches"), train.get("microbatch_size")
    start, context = train.get("start_val_token", 0), model.get("context_length")
    sequences = train.get("validation_sequences")
    if isinstance(batches, int) and isinstance(microbatch, int):
        sequences = batches * microbatch
    if not isinstance(digest, str) or not isinstance(sequences, int):
        return None
    if not isinstance(start, int) or not isinstance(context, int):
        return None
    return ValidationText(digest, start, sequences, context)


def tokens_by_source(
    model: Mapping[str, Any], train: Mapping[str, Any], dataset: Mapping[str, Any], tokens_seen: int
) -> dict[str, tuple[int, int]]:
    """Return (tokens read, tokens of one pass) of each dataset, by its name, after the run's first `tokens_seen`
    tokens. The dict is empty if the numbers are not recorded. The other arguments are those of `validation_text`."""
    try:
        sources = dataset.get("sources") or {dataset["name"]: {"weight": 1.0, **dataset}}
        order = WindowOrder(
            [source["train"]["tokens"] for source in sources.values()],
            model["context_length"],
            first_token=train["start_train_token"],
            weights=[source["weight"] for source in sources.values()],
        )
        seen = order.read(tokens_seen // order.context_length)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):  # an old or edited record
        return {}
    length = order.context_length
    return {
        name: (int(own) * length, windows * length)
        for name, own, windows in zip(sources, seen, order.windows, strict=True)
        if windows > 0
    }


def epochs_of(
    model: Mapping[str, Any], train: Mapping[str, Any], dataset: Mapping[str, Any], tokens_seen: int
) -> dict[str, float]:
    """Return the number of passes over each dataset, by its name. The dict is empty if the numbers are not recorded,
    and for a single dataset if `train` sets no `epochs`. The arguments are those of `tokens_by_source`."""
    if train.get("epochs") is None and "sources" not in dataset:
        return {}
    found = tokens_by_source(model, train, dataset, tokens_seen)
    return {name: round(seen / once, 4) for name, (seen, once) in found.items()}


class ProgramAndSettings(BaseModel):
    """The program that trained a run, and the settings that it resolved, as meta.json and summary.json record them."""

    model_config = ConfigDict(strict=True)

    # The one that training used, never "auto"
    precision: Annotated[str, Field(pattern="^(bf16|fp16|fp32)$")] | None = None
    attention: str | None = None  # train.json's kernel, or FA3 or FA4; not written if torch chose or on a CPU
    versions: dict[str, str] = {}  # of the libraries, by name
    commit: str | None = None  # Git commit of this program's sources; null if unknown
    # Resolved from train.json: a budget that is not given in tokens, and the keys that its scaling rules changed.
    budget: Budget | None = None
    scaled: dict[str, float] | None = None
    active_parameters: RecordedCount | None = None  # only for a mixture of experts: the parameters that each token uses
    moe_router_loss_scale: Annotated[float, Field(ge=0)] | None = None  # as used, even if train.json does not give it
    changed: list[str] = []  # changes that affect the result, made when the run was resumed; not written if empty


class CheckpointMeta(ProgramAndSettings, Progress):
    """The contents of a meta.json. Only `global_step` is required, because earlier versions and the notebook's program
    wrote fewer keys. Unknown keys are kept."""

    model_config = ConfigDict(extra="allow")

    global_step: RecordedCount
    # Why the checkpoint was saved, and which work was still to be done
    is_best: bool = False
    last_step: RecordedCount | None = None  # of the whole run, by the budget at that time; None in earlier versions
    planned: bool = False  # True: saved at an interval of train.json or after the last step; False: at an early stop
    # At most one of these two is true; `interrupted_evaluation` says which.
    validation_due: bool = False  # the run was stopped before this step's validation was done
    benchmarks_due: bool = False
    # Where and how the checkpoint was trained
    seconds: dict[str, RecordedAmount] = {}  # by phase (see metrics.PHASES)
    # By phase. Each second counts at the price that was set then or, if none was set yet, at the first price. Empty if
    # no price was ever set.
    dollars: dict[str, RecordedAmount] = {}
    metrics_bytes: RecordedCount = 0  # size of metrics.jsonl when the checkpoint was saved
    world_size: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    microbatch_size: RecordedCount | None = None
    accumulation_steps: RecordedCount | None = None
    device: str | None = None
    tokenizer: str | None = None  # "gpt2", or the name of a file in the same folder
    torch: str | None = None
    # The fields of Provenance. `model` and `dataset` may hold any value here, because the code that resumes from the
    # checkpoint compares them with the run's own and reports the difference.
    model: Any = None
    parameters: RecordedCount | None = None
    train: dict[str, Any] = {}
    dataset: Any = None
    sha256: dict[str, str] = {}  # by file name: SHA-256 of the other files, and of this file's own values

    def state(self) -> TrainState:
        """Return the run's state at the time when the checkpoint was saved."""
        values = {key: getattr(self, key) for key in Progress.model_fields}
        state = TrainState(**values | {"loss_sum": math.nan if self.loss_sum is None else self.loss_sum})
        if "measured_from_step" not in self.model_fields_set:
            # Another program may have trained some of the tokens, and another machine may have spent some of the
            # seconds. Earlier versions did not record this.
            state.measure_from_here(self.seconds.get("training", 0.0))
        return state

    @property
    def costs(self) -> dict[str, float]:
        """Dollars by phase; empty if no price was ever set."""
        # Checkpoints of earlier versions record no dollars. The price is not validated, like the rest of `train`.
        price = self.train.get("price_per_hour")
        is_price = isinstance(price, int | float) and price > 0
        return self.dollars or cost_by_phase(self.seconds, price if is_price else None) or {}

    @property
    def interrupted_evaluation(self) -> str | None:
        """The evaluation that was interrupted after the last completed step: "validation", "benchmarks" or None. A
        resumed run must repeat that evaluation and do the work that follows it."""
        return "validation" if self.validation_due else "benchmarks" if self.benchmarks_due else None

    @property
    def is_from_notebook(self) -> bool:
        """True if the notebook's program wrote the checkpoint: meta.json has none of OWN_KEYS."""
        return not OWN_KEYS & self.model_fields_set

    def was_as_fast(self, world_size: int, device: str, train: Mapping[str, Any]) -> bool:
        """Return True if the checkpoint was trained on `world_size` devices named `device`. Its train.json must also
        agree with `train` in all keys that affect the speed. A value that the checkpoint does not record counts as
        equal."""
        is_same_machine = self.world_size in (None, world_size) and self.device in (None, device)
        return is_same_machine and same_kernels(self.train, train, same_batch=True)


def read_meta(path: Path) -> CheckpointMeta:
    """Read the meta.json of the checkpoint folder `path`. Raises UserError if it is missing or wrong."""
    file = path / META
    meta = parse_config(CheckpointMeta, read_json_object(file), file)
    name = path.resolve().name
    if step_of(name) not in (-1, meta.global_step):
        raise UserError(f'{file}: key "global_step": {meta.global_step}, but the folder is called {name}')
    return meta


def verify_meta(path: Path) -> None:
    """Verify the values in a checkpoint's meta.json by the SHA-256 that the file records. Call `read_meta` first.
    Raises UserError if the file is damaged. A file of an earlier version, without this SHA-256, passes."""
    values = read_json_object(path / META)  # as they are in the file, including unknown keys
    if values.get("sha256", {}).get(META, own := _own_sha256(values)) != own:
        raise UserError(f"{path / META}: damaged (its values do not match the SHA-256 recorded in it)")


def write_meta(path: Path, meta: CheckpointMeta) -> None:
    """Write the fields of `meta` that have been set, and a hash of their values, into meta.json in the checkpoint
    folder `path`."""
    values = meta.model_dump(exclude_unset=True)
    values["sha256"] = {**meta.sha256, META: _own_sha256(values)}
    (path / META).write_text(json.dumps(values, indent=2) + "\n")


def _own_sha256(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a meta.json's values, without the entry for this hash itself."""
    others = {name: value for name, value in values.get("sha256", {}).items() if name != META}
    return hashlib.sha256(json.dumps({**values, "sha256": others}, sort_keys=True).encode()).hexdigest()


def upgrade_notebook_meta(
    path: Path, meta: CheckpointMeta, provenance: Provenance | None, batches: BatchSchedule
) -> CheckpointMeta:
    """Return `meta`, the meta.json of the checkpoint `path`, after adding keys that training needs and the notebook's
    program does not write. A meta.json of this program is returned unchanged.

    - `provenance`: the origin of the run that resumes from the checkpoint; None: not known yet.
    - `batches`: the schedule from the start of that run.
    """
    if not meta.is_from_notebook:
        return meta
    seen = batches.tokens_before(meta.global_step + 1)
    belongs = dict(vars(provenance)) if provenance else {}
    if belongs and (path / OPTIMIZER).exists():
        belongs["train"] = {**belongs["train"], "optimizer": "adamw"}
    counts = dict.fromkeys(("tokens_seen", "foreign_tokens", "measured_from_tokens"), seen)
    return meta.model_copy(update={**belongs, **counts, "measured_from_step": meta.global_step})
