"""Figures that somebody else has published of a run: `reported.json` in its folder. They were not measured here, and
never stand where measured ones do."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from harness.common.json_files import parse_config, read_json_object
from harness.runs.directory import RunDirectory

Number = Annotated[float, Field(allow_inf_nan=False)]


class ReportedFigure(BaseModel):
    """A number, its unit, and where the source has it."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    value: Number
    unit: str
    place: str


class Reported(BaseModel):
    """A reported.json."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", title="reported.json")

    source: str  # title and author
    address: str | None = None
    machine: str
    device: str
    gpus: int = Field(ge=1)
    memory_gib: Number  # of one device
    figures: dict[str, ReportedFigure]

    def value(self, name: str) -> float | None:
        """The figure of this name; None if it is not reported."""
        figure = self.figures.get(name)
        return None if figure is None else figure.value


def read_reported(run: RunDirectory) -> Reported | None:
    """None if nothing is reported. Raises UserError naming the key that is wrong."""
    if not run.reported.exists():
        return None
    return parse_config(Reported, read_json_object(run.reported), run.reported)
