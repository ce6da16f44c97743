"""The summary of a finished run: the contents of summary.json, and the text that is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.common.errors import EXIT, RunError, os_errors_as
from harness.common.files import replace_text
from harness.common.json_files import check_recorded, parse_config, read_json_object
from harness.common.messages import amount_text
from harness.model.config import ModelConfig
from harness.runs.checkpoint_meta import CheckpointMeta, ProgramAndSettings, epochs_of
from harness.runs.directory import RunDirectory
from harness.runs.metrics import PHASES
from harness.runs.throughput import Measured, mfu, unknown_peak
from harness.runs.train_config import TrainConfig

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]


class Outcome(BaseModel):
    """The outcome of a run, and the machine and batch with which it ended."""

    run: str = ""
    seconds: dict[str, Amount] = {}  # by phase, and in total
    tokens_seen: Count | None = None
    epochs: dict[str, Amount] | None = None  # see `epochs_of`; not written if empty
    # Part of tokens_seen that this program trained on, in its seconds of training
    trained_tokens: Count | None = None
    # Speed of training over `measured`, the part of the run that this program trained with the batch and on the machine
    # named below. None if there is no such part.
    tokens_per_second: Amount | None = None
    # None in files of earlier versions. Their speed is all tokens divided by this program's seconds of training.
    measured: Measured | None = None
    global_steps: Count | None = None
    final_train_loss: Amount | None = None
    final_validation_loss: Amount | None = None
    best_loss: Amount | None = None
    best_step: Count | None = None
    skipped_steps: Count = 0
    has_diverged: bool = False
    flops_per_token: Count | None = None
    mfu: Amount | None = None
    peak_memory_gib: Amount | None = None
    dollars: dict[str, Amount] | None = None  # by phase, and in total
    device: str
    world_size: Positive
    microbatch_size: Positive | None = None
    accumulation_steps: Positive | None = None
    torch: str | None = None


class RunSummary(ProgramAndSettings, Outcome):
    """The contents of a summary.json. Unknown keys are kept. Keys with a default may be missing, because earlier
    versions wrote fewer keys."""

    model_config = ConfigDict(strict=True, extra="allow")

    # The fields of Provenance
    model: dict[str, Any] | None = None
    parameters: Count | None = None
    train: dict[str, Any] = {}
    dataset: dict[str, Any] | None = None

    @property
    def changes(self) -> list[str]:
        """Changes of settings, machine or program during the run, as texts."""
        seen, trained = self.tokens_seen or 0, self.trained_tokens
        foreign = 0 if trained is None else seen - trained
        return [*([f"another program trained on the first {foreign:,} tokens"] if foreign > 0 else []), *self.changed]

    def has_shape(self, config: ModelConfig) -> bool | None:
        """Return True if the run's model.json is equal to `config`, or False if it differs or is not valid. Return None
        if it is not recorded. Keys that an earlier version did not write count as their defaults."""
        if self.model is None:
            return None
        try:
            return ModelConfig.model_validate(self.model).model_dump() == config.model_dump()
        except ValidationError:
            return False


def read_summary(path: Path) -> RunSummary:
    """Read a summary.json. Raises UserError if it is missing or wrong."""
    summary = parse_config(RunSummary, read_json_object(path), path)
    check_recorded(TrainConfig, summary.train, path, "train")
    check_recorded(ModelConfig, summary.model or {}, path, "model")
    return summary


def summarize(
    run: str, meta: CheckpointMeta, model: ModelConfig, *, peak_memory_gib: float | None = None
) -> RunSummary:
    """Return the summary of the run named `run`, which ended in the state that `meta` records. `meta` must have
    `device` and `world_size`. `peak_memory_gib` is the largest peak of any device; None: not measured."""
    assert meta.device is not None
    assert meta.world_size is not None
    state = meta.state()
    # A run without benchmarks has no seconds of benchmarks in its summary.
    phases = dict.fromkeys(PHASES, 0.0) | meta.seconds
    seconds = {phase: took for phase, took in phases.items() if took or phase != "benchmarks"}
    seconds_in_all = {**seconds, "total": sum(seconds.values())}
    costs = meta.costs
    dollars = {phase: round(costs.get(phase, 0.0), 6) for phase in seconds} if costs else None
    measured = state.measured(seconds["training"])
    rate = measured.tokens_per_second
    epochs = epochs_of(meta.model or {}, meta.train, meta.dataset or {}, state.tokens_seen)
    used = None if rate is None else mfu(rate / meta.world_size, model.flops_per_token, meta.device)
    summary = RunSummary(
        run=run,
        seconds={phase: round(took, 3) for phase, took in seconds_in_all.items()},
        tokens_seen=state.tokens_seen,
        trained_tokens=max(0, state.tokens_seen - state.foreign_tokens),
        tokens_per_second=None if rate is None else round(rate, 1),
        measured=measured.model_copy(update={"seconds": round(measured.seconds, 3)}),
        global_steps=state.global_step + 1,
        # An earlier version's checkpoint has only the mean since the planned checkpoint before it.
        final_train_loss=state.train_loss if state.reported_loss is None else state.reported_loss,
        final_validation_loss=state.val_loss,
        best_loss=state.best_loss,
        best_step=state.best_step,
        skipped_steps=state.skipped_steps,
        has_diverged=state.has_diverged,
        flops_per_token=model.flops_per_token,
        mfu=None if used is None else round(used, 4),
        peak_memory_gib=None if peak_memory_gib is None else round(peak_memory_gib, 3),
        dollars=dollars and {**dollars, "total": round(sum(dollars.values()), 6)},
        device=meta.device,
        world_size=meta.world_size,
        microbatch_size=meta.microbatch_size,
        accumulation_steps=meta.accumulation_steps,
        torch=meta.torch,
        **meta.model_dump(include={*ProgramAndSettings.model_fields}, exclude_unset=True),
        model=meta.model or {},
        parameters=model.parameters,
        train=meta.train,
        dataset=meta.dataset or {},
    )
    return summary.model_copy(update={"epochs": epochs}) if epochs else summary


def write_summary(run: RunDirectory, summary: RunSummary) -> None:
    """Write a run's summary.json, and print the summary. Raises RunError if the file cannot be written."""
    text = json.dumps(summary.model_dump(exclude_unset=True), indent=2, allow_nan=False)
    remedy = f"; the last checkpoint is saved: fix the cause, and {EXIT.again} to write the summary"
    with os_errors_as(RunError, f"{run.summary}: cannot write the summary", remedy):
        replace_text(run.summary, text + "\n")
    print("\n" + describe_summary(summary), flush=True)


def describe_summary(summary: RunSummary) -> str:
    """Return the text of a summary for a terminal. The summary must have all keys that this version writes."""
    seconds, dollars, trained = summary.seconds, summary.dollars, summary.trained_tokens
    foreign = "" if trained == summary.tokens_seen else f"; this program trained on {trained:,} of them"
    speed = "not measured, because the run's records show no training with this batch on this machine"
    if summary.tokens_per_second is not None and (measured := summary.measured) is not None:
        speed = f"{summary.tokens_per_second:,.0f} tokens/second of training"
        if measured.tokens != summary.tokens_seen:
            speed += f" ({measured.tokens:,} tokens in {measured.seconds:,.1f} s with this batch on this machine)"
    lines = [
        f"Training complete in {seconds['total']:,.3f} seconds",
        "  " + ", ".join(f"{phase} {seconds[phase]:,.1f} s" for phase in seconds if phase != "total"),
        f"Tokens seen: {summary.tokens_seen:,}{foreign}",
        *(f"Epochs: {count:,.2f} of {name}" for name, count in (summary.epochs or {}).items()),
        f"Throughput: {speed}",
    ]
    if summary.mfu is not None:
        lines.append(f"MFU: {summary.mfu:.1%}")
    elif remark := unknown_peak(summary.device):
        lines.append(remark)
    if summary.peak_memory_gib is not None:
        lines.append(f"Peak memory: {summary.peak_memory_gib:.2f} GiB per device")
    if summary.skipped_steps:
        lines.append(f"Skipped steps (gradients not finite): {summary.skipped_steps:,}")
    final = summary.final_train_loss
    lines.append(f"Final train loss: {'not finite' if final is None else f'{final:.3f}'}")
    if summary.final_validation_loss is not None:
        lines.append(f"Final validation loss: {summary.final_validation_loss:.3f}")
    if summary.best_loss is not None:
        lines.append(f"Best loss: {summary.best_loss:.3f} at global step {summary.best_step}")
    if dollars is not None:
        phases = ", ".join(f"{phase} ${amount_text(cost)}" for phase, cost in dollars.items() if phase != "total")
        lines.append(f"Cost: ${amount_text(dollars['total'])} ({phases})")
    return "\n".join(lines)
