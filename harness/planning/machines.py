"""Machines for rent: the dated list of prices in machines.json, and the machine that a run is planned for."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from harness.common.json_files import parse_config, read_json_object
from harness.planning.estimated_speed import GpuSpec, find_device

PRICES = Path(__file__).with_name("machines.json")


class Machine(BaseModel):
    """A machine for rent."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    machine: str
    device: str  # name of its GPUs, as the driver reports it or as people write it
    gpus: int = Field(ge=1)
    memory_gib: float  # of one GPU
    price_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # US dollars, of the whole machine
    date: Annotated[datetime.date, Field(strict=False)]  # when the price was seen; text like 2026-01-31 in the file
    source: str


class PriceList(BaseModel):
    """The contents of a machines.json."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", title="machines.json")

    machines: list[Machine] = Field(min_length=1)


def read_machines(path: Path = PRICES) -> list[Machine]:
    """Return the machines of a price list. Raises UserError if the file cannot be read or is wrong."""
    return parse_config(PriceList, read_json_object(path), path).machines


def machine_of_run(name: str, price: float | None, prices: Path = PRICES) -> tuple[Machine, str] | None:
    """Return the machine that a run is meant for, and the reason. Return None if there is no such machine.

    The machine is the first of these that the price list `prices` has:

    1. the machine that the run is named after, as in 8xa100m40-fast; reason: "the run's name"
    2. a machine that costs `price`, the run's price_per_hour; reason: "price_per_hour"

    Raises UserError if the price list is wrong.
    """
    machines = read_machines(prices)
    for each in machines:
        named = f"{each.gpus}x{each.device.split()[0]}m{each.memory_gib:g}".lower()
        if name == named or name.startswith(f"{named}-"):
            return each, "the run's name"
    return next(((each, "price_per_hour") for each in machines if each.price_per_hour == price), None)


def hourly_price(given: float | None, device: GpuSpec | None, gpus: int) -> tuple[float | None, str]:
    """Return the dollars per hour of `gpus` GPUs of the kind `device`, and the source as text. If they are not known,
    return None and the reason.

    `given` is train.json's price_per_hour. The price is the first of these that exists:

    1. `given`, if it is not the price of a listed machine
    2. the price of a listed machine with `gpus` GPUs of the kind `device`
    3. `given` times the number of machines needed, if the first listed machine with this price has GPUs of that kind,
       or if `device` is None (unknown)
    """
    machines = read_machines()
    priced = next((each for each in machines if each.price_per_hour == given), None)
    if given is not None and priced is None:
        return given, f"${given}/h, from train.json"
    alike = [each for each in machines if device is not None and find_device(each.device) == device]
    for each in alike:
        if each.gpus == gpus:
            return each.price_per_hour, f"${each.price_per_hour}/h, the price of {each.machine} on {each.date}"
    if priced is None:
        return None, "no price_per_hour in train.json"
    if device is None or priced in alike:  # the GPUs of that machine, but perhaps another number of them
        count = math.ceil(gpus / priced.gpus)
        price, name = count * priced.price_per_hour, f"{count} x {priced.machine}" if count > 1 else priced.machine
        return price, f"${price:g}/h, the price of {name} on {priced.date}"
    return None, (
        f"train.json's ${given}/h is the price of {priced.machine}, not of {gpus} x {device.name}; "
        "set price_per_hour to the price of these GPUs"
    )
