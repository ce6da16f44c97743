"""Figures that somebody else has published for a run, in `reported.json` of the run's folder. They are never shown in
place of measured figures."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from harness.common.json_files import parse_config, read_json_object
from harness.data.loader import BatchLayout
from harness.runs.directory import RunDirectory

# LOOKED_FOR has the names of the figures that this program uses. A file may have other figures. Figures in POSITIVE
# must be above 0.
POSITIVE = ("microbatch_size", "global_batch_size", "train_seconds", "tokens_seen", "tokens_per_second")
LOOKED_FOR = (
    *POSITIVE,
    "seconds_without_validation",
    *("final_train_loss", "final_validation_loss", "test_loss", "instruction_score"),
    *("price_per_hour", "train_dollars", "validation_dollars", "dollars_without_validation"),
)
# An unknown name counts as a misspelling of a known name if their similarity (difflib's ratio) is at least this. One
# wrong letter in a dozen gives about this ratio. Names that differ more, such as "test_loss_latest", are accepted as
# other figures.
ALIKE = 0.92
LARGEST = 1e18  # of a figure; larger ones make no sense, and products of several might overflow a float


class ReportedFigure(BaseModel):
    """A published number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    value: Annotated[float, Field(ge=0, le=LARGEST)]
    unit: str  # for people; the program knows the units of the figures that it uses
    place: str  # in the source


class Reported(BaseModel):
    """The contents of a reported.json."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", title="reported.json")

    source: str  # title and author
    address: str | None = None
    machine: str
    device: str
    gpus: int = Field(ge=1, le=2**31)
    memory_gib: float = Field(gt=0, le=LARGEST)  # of one device
    # `model` is the model that was trained, as in model.json. `train` has the keys of train.json that differ from the
    # run's own train.json, and those that affect the speed. Plans use the figures only if `model` is given.
    model: dict[str, Any] | None = None
    train: dict[str, Any] = {}
    figures: dict[str, ReportedFigure]

    @field_validator("figures", mode="after")
    @classmethod
    def _possible(cls, figures: dict[str, ReportedFigure]) -> dict[str, ReportedFigure]:
        for name, figure in figures.items():
            meant = [] if name in LOOKED_FOR else difflib.get_close_matches(name, LOOKED_FOR, n=1, cutoff=ALIKE)
            if meant:
                raise ValueError(f'key "figures.{name}": unknown; did you mean "{meant[0]}"?')
            if name in POSITIVE and not figure.value:
                raise ValueError(f'key "figures.{name}.value": must be above 0; leave out what is not reported')
        return figures

    def value(self, name: str) -> float | None:
        """Return the figure of this name, or None if it is not reported."""
        figure = self.figures.get(name)
        return None if figure is None else figure.value

    @property
    def whole_run_speed(self) -> float | None:
        """Reported tokens per second of a whole run, including its validation. None if unknown, or if the run's tokens
        or seconds are not reported."""
        is_whole = self.value("tokens_seen") is not None and self.value("train_seconds") is not None
        return self.value("tokens_per_second") or None if is_whole else None

    @property
    def training_speed(self) -> float | None:
        """Tokens per second of training alone, or None if unknown."""
        tokens, seconds = self.value("tokens_seen"), self.value("seconds_without_validation")
        if tokens and seconds:
            return tokens / seconds
        return None if self.whole_run_speed is not None else self.value("tokens_per_second") or None

    @property
    def layout(self) -> BatchLayout | None:
        """Batch layout, or None if `figures` and `model` do not determine it."""
        microbatch, sequences = self.value("microbatch_size"), self.value("global_batch_size")
        context = (self.model or {}).get("context_length")
        if not microbatch or not sequences or not isinstance(context, int) or microbatch % 1:
            return None
        steps, rest = divmod(sequences, microbatch * self.gpus)
        return None if rest or not steps else BatchLayout(self.gpus, int(steps), int(microbatch), context)


def read_reported(run: RunDirectory) -> Reported | None:
    """Read the reported.json of a run, or return None if there is none. Raises UserError if it is wrong."""
    if not run.reported.exists():
        return None
    return parse_config(Reported, read_json_object(run.reported), run.reported)
