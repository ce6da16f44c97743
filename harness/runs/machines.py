"""Machines for rent: the dated list of prices in machines.json."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from harness.common.errors import UserError
from harness.common.json_files import parse_config, read_json_object

PRICES = Path(__file__).with_name("machines.json")
# GiB of a device over the number in its name: a card sold as 40 GB has 40 GiB or a little less, one sold as 141 GB has
# 141e9 bytes.
LEAST_OF_NAME, MOST_OF_NAME = 0.9, 1.02

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Machine(BaseModel):
    """A machine for rent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    machine: str = Field(min_length=1)
    device: str  # of its GPUs, by the driver's name or as people write it
    gpus: int = Field(ge=1)
    memory_gib: Positive  # of one GPU
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # US dollars, of the whole machine
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")  # when the price was seen
    source: str = Field(min_length=1)

    @field_validator("date", mode="after")
    @classmethod
    def _is_a_day(cls, date: str) -> str:
        try:
            datetime.date.fromisoformat(date)
        except ValueError as error:
            raise ValueError(f'key "date": {error}, not "{date}"') from None
        return date

    @model_validator(mode="after")
    def _has_its_memory(self) -> Machine:
        """Else the speeds of the whole card would be taken for those of one that cannot hold the model. A slice of a
        card (MIG) has the card's name, and less."""
        named = re.search(r"(\d+)\s*gb\b", self.device.lower())
        if named is None or "mig" in self.device.lower():
            return self
        size = int(named[1])
        if not LEAST_OF_NAME * size <= self.memory_gib <= MOST_OF_NAME * size:
            raise ValueError(f'key "memory_gib": {self.memory_gib:g}, but "device" is "{self.device}"; correct one')
        return self


class PriceList(BaseModel):
    """A machines.json."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", title="machines.json")

    machines: list[dict[str, Any]] = Field(min_length=1)  # each a Machine


def read_machines(path: Path = PRICES) -> list[Machine]:
    """The machines of a price list. Raises UserError naming the machine and the key that is wrong."""
    raw = parse_config(PriceList, read_json_object(path), path).machines
    machines = [parse_config(Machine, each, Path(f"{path}, machine {n}")) for n, each in enumerate(raw, 1)]
    names = [each.machine for each in machines]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f'{path}: key "machine": "{repeated[0]}" is there twice; give each its own name')
    return machines
