"""What a checkpoint's meta.json may hold: it may come from an earlier version, another program, or an enemy."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from harness.common.errors import UserError
from harness.common.json_files import parse_config, read_json_object
from harness.runs.directory import CHECKPOINT_NAME
from harness.runs.throughput import Measured

Count = Annotated[int, Field(ge=0, lt=2**62)]
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Ranks = Annotated[int, Field(ge=1, lt=2**31)]
Loss = Annotated[float, Field(allow_inf_nan=False)]


class Manifest(BaseModel):
    """The keys that continuing reads; only the step must be there. What belongs together (model, dataset, train.json)
    is compared with the run's own by whoever continues it."""

    model_config = ConfigDict(strict=True, extra="allow")

    global_step: Count
    tokens_seen: Count = 0
    seconds: dict[str, Seconds] = {}
    sha256: dict[str, str] = {}
    train: dict[str, Any] = {}
    train_loss: Loss | None = None
    val_loss: Loss | None = None
    best_loss: Loss | None = None
    best_step: Count | None = None
    skipped_steps: Count = 0
    loss_sum: Loss | None = 0.0
    loss_count: Count = 0
    is_best: bool = False
    planned: bool = False
    validation_due: bool = False
    benchmarks_due: bool = False
    metrics_bytes: Count = 0
    foreign_tokens: Count = 0
    measured_from_step: Annotated[int, Field(ge=-1, lt=2**62)] = -1
    measured_from_tokens: Count = 0
    measured_from_seconds: Seconds = 0.0
    device: str | None = None
    world_size: Ranks | None = None
    microbatch_size: Count | None = None
    accumulation_steps: Count | None = None


def read_manifest(path: Path) -> dict[str, Any]:
    """The object in the meta.json at `path`. Raises UserError naming the key that cannot be a checkpoint's."""
    meta = read_json_object(path)
    try:
        parsed = parse_config(Manifest, meta, path)
    except UserError as error:
        fault = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path}: not the meta.json of a checkpoint of this program: {fault}") from None
    name = CHECKPOINT_NAME.fullmatch(path.parent.resolve().name)
    if name and int(name.group(1)) != parsed.global_step:
        raise UserError(f'{path}: key "global_step": {parsed.global_step}, but the folder is called {name.group()}')
    return meta


@dataclass
class TrainState:
    """What a run has come to so far: the same on every rank, and in every checkpoint's meta.json."""

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

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> TrainState:
        values = {key: meta[key] for key in asdict(cls()) if key in meta}
        if values.get("loss_sum", 0.0) is None:  # JSON's way to say that it was not finite
            values["loss_sum"] = math.nan
        state = cls(**values)
        if "measured_from_step" not in meta:
            # An earlier version's: some of its tokens may be another program's, and its seconds another machine's.
            state.measure_from_here(meta.get("seconds", {}).get("training", 0.0))
        return state

    @property
    def trained_tokens(self) -> int:
        """The tokens that the recorded seconds of training belong to."""
        return max(0, self.tokens_seen - self.foreign_tokens)

    def measure_from_here(self, training_seconds: float) -> None:
        """What was trained up to now, in so many seconds, says nothing of the speed from here on."""
        self.measured_from_step, self.measured_from_tokens = self.global_step, self.tokens_seen
        self.measured_from_seconds = training_seconds

    def measured(self, training_seconds: float) -> Measured:
        """The training that the speed is measured over, after so many seconds of it in all."""
        return Measured(
            self.global_step - self.measured_from_step,
            self.tokens_seen - self.measured_from_tokens,
            training_seconds - self.measured_from_seconds,
        )

    def forget_best(self) -> None:
        """Losses from here on are measured on other text, and cannot be compared with those before."""
        self.best_loss = self.best_step = self.val_loss = None
