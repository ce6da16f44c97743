"""Search space: a range or a list of values for each of some keys of model.json and train.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    JsonValue,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from harness.common.errors import UserError
from harness.common.json_files import json_schema, parse_config
from harness.common.messages import quoted
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig
from harness.sweeps.derived_runs import check_key

LARGEST_NUMBER = 1e18  # beyond it no key's value means anything
RESOLUTION_DIGITS = 3  # a range without a step is divided into some thousands of values: short numbers, short names

_OTHER_TEXT = "it says what the loss is measured on, so that trials would not compare"
# Keys that cannot be searched for the lowest validation loss, and why.
NOT_SEARCHED = {
    "random_seed": "the lowest loss would be the luckiest seed's; vary it in a sweep",
    "microbatch_size": f'{_OTHER_TEXT}; search "global_batch_size"',
    "minibatch_size": f'{_OTHER_TEXT}; search "global_batch_size"',
    **dict.fromkeys(("dataset", "vocab_size", "context_length", "validation_batches", "start_val_token"), _OTHER_TEXT),
    "validation_interval": 'it says when the loss is measured, not what it is; give one in "set"',
}


def _number(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST_NUMBER:
        raise ValueError(f'key "{info.field_name}": must be a number, not {quoted(value)}')
    return value


Part = TypeVar("Part", bound=BaseModel)
Number = Annotated[Any, AfterValidator(_number)]


class Range(BaseModel):
    """Numbers from `min` to `max`, both included: equally likely before anything is known, or their logarithms."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    min: Number
    max: Number
    log: bool = False
    step: Number = None  # None: 1 for whole numbers, any for others

    @model_validator(mode="after")
    def _possible(self) -> Range:
        if not self.min < self.max:
            one = '; one value for all trials belongs in "set"' if self.min == self.max else ""
            raise ValueError(f'key "min": {self.min} is not below "max" ({self.max}){one}')
        if self.log and not self.min > 0:
            raise ValueError(f'key "min": {self.min} has no logarithm; give one above 0, or leave "log" out')
        if self.step is None:
            return self
        if self.log:
            raise ValueError('keys "log" and "step": leave one of them out, or give a list of values')
        if not self.step > 0 or self._width % Decimal(str(self.step)):
            raise ValueError(f'key "step": {self.step} does not divide the range from {self.min} to {self.max}')
        return self

    @property
    def _width(self) -> Decimal:
        return Decimal(str(self.max)) - Decimal(str(self.min))

    def for_whole_numbers(self) -> Range:
        """Return the range with a step, 1 by default, unless it is logarithmic. Raises ValueError for numbers that are
        not whole."""
        for name in ("min", "max", "step"):
            if isinstance(getattr(self, name), float):
                raise ValueError(f'key "{name}": must be a whole number, not {getattr(self, name)}')
        return self if self.log else self.model_copy(update={"step": self.step or 1})

    def for_any_numbers(self) -> Range:
        return self.model_copy(update={"min": float(self.min), "max": float(self.max)})

    def ends(self) -> tuple[JsonValue, ...]:
        return self.min, self.max

    @property
    def count(self) -> int | None:
        """Number of values; None for a continuous range, which has too many to try them all."""
        if self.step is not None:
            return int(self._width / Decimal(str(self.step))) + 1
        return self.max - self.min + 1 if isinstance(self.min, int) and isinstance(self.max, int) else None

    def contains(self, value: JsonValue) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.min <= value <= self.max:
            return False
        return self.step is None or not (Decimal(str(value)) - Decimal(str(self.min))) % Decimal(str(self.step))

    def rounded(self, value: float) -> float:
        """`value` in few digits, still in the range: a number that can be read, written and put into a name."""
        if isinstance(value, int):
            return value
        if self.step is not None:
            low, step = Decimal(str(self.min)), Decimal(str(self.step))
            return float(low + round((Decimal(str(value)) - low) / step) * step)
        scale = value * math.log(self.max / self.min) if self.log else self.max - self.min
        places = RESOLUTION_DIGITS - math.floor(math.log10(scale))
        return float(min(max(round(value, places), self.min), self.max))


@dataclass(frozen=True)
class Choices:
    """Values without an order."""

    values: tuple[JsonValue, ...]

    def ends(self) -> tuple[JsonValue, ...]:
        return self.values

    @property
    def count(self) -> int:
        return len(self.values)

    def contains(self, value: JsonValue) -> bool:
        return json.dumps(value) in self.texts()

    def texts(self) -> list[str]:
        """The values as JSON: what 1, 1.0 and true, which are equal in Python, differ in."""
        return [json.dumps(value) for value in self.values]


Domain = Range | Choices
Point = dict[str, JsonValue]


def parse_domain(key: str, raw: Any) -> Domain:
    """A key's entry in "search". Raises ValueError, naming the key, for what no trial could have."""
    check_key(key)
    if key in NOT_SEARCHED:
        raise ValueError(f'key "{key}": cannot be searched: {NOT_SEARCHED[key]}')
    try:
        domain = parse_choices(raw) if isinstance(raw, list) else _parse_range(key, raw)
    except ValueError as error:
        raise ValueError(f'key "{key}": {error}') from None
    for value in domain.ends():
        _check_value(key, value)
    return domain


def parse_choices(raw: list[Any]) -> Choices:
    choices = Choices(tuple(raw))
    if len(raw) < 2:
        raise ValueError('give at least two values; one for all trials belongs in "set"')
    if len(set(choices.texts())) < len(raw):
        raise ValueError("has a value twice; remove one")
    return choices


def _parse_range(key: str, raw: Any) -> Range:
    if not isinstance(raw, dict):
        raise ValueError(f'must be a list of values, or {{"min": ..., "max": ...}}, not {quoted(raw)}')
    found, kinds = parse_part(Range, raw), _kinds(key)
    if not kinds & {"number", "integer"}:
        raise ValueError("is not a number; give a list of its values")
    return found.for_any_numbers() if "number" in kinds else found.for_whole_numbers()


def parse_part(kind: type[Part], raw: dict[str, Any]) -> Part:
    """Check an object inside a SWEEP.json as its file is. Raises ValueError."""
    place = Path("part")
    try:
        return parse_config(kind, raw, place)
    except UserError as error:
        raise ValueError(str(error).removeprefix(f"{place}: ")) from None


def _kinds(key: str) -> set[str]:
    """JSON Schema's names of what a key's values can be."""
    schema = known_keys()[key]
    return {str(each.get("type")) for each in (schema, *schema.get("anyOf", []))}


def known_keys() -> dict[str, Any]:
    """The JSON Schema of each key of model.json and train.json."""
    return {**json_schema(ModelConfig)["properties"], **json_schema(TrainConfig)["properties"]}


def _check_value(key: str, value: JsonValue) -> None:
    """Raise ValueError for a value that the key can never have; combinations are another matter."""
    field = {**ModelConfig.model_fields, **TrainConfig.model_fields}.get(key)
    if field is None or value is None:
        return
    try:
        kind: Any = Annotated[field.annotation, field]
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ValueError(f'key "{key}": {said[0].lower()}{said[1:]}, not {quoted(value)}') from None


def count_points(domains: Mapping[str, Domain]) -> int | None:
    """Number of points; None if a range is continuous, which has too many to try them all."""
    counts = [domain.count for domain in domains.values()]
    return None if None in counts else math.prod(count for count in counts if count is not None)


def contains(domains: Mapping[str, Domain], point: Point) -> bool:
    """True if the point is in the space."""
    return domains.keys() == point.keys() and all(domains[key].contains(value) for key, value in point.items())
