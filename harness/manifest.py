"""What a checkpoint's meta.json may hold: it may come from an earlier version, another program, or an enemy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from harness.config import parse_config, read_json_object
from harness.errors import UserError
from harness.run import CHECKPOINT_NAME

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
