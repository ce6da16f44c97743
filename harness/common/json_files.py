"""Strict reading of JSON files: no repeated keys, no NaN, no unknown keys if the pydantic class forbids them. Errors
name the file and, if known, the place in it."""

from __future__ import annotations

import ast
import inspect
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from harness.common.errors import UserError
from harness.common.files import read_text
from harness.common.messages import is_unicode, nearest, quoted
from harness.common.other_names import advice

Config = TypeVar("Config", bound=BaseModel)
SHOWN_FAULTS = 8  # the most faults of a file that an error lists
LARGEST_DIGITS = 4000  # Python itself refuses to convert numbers of more than 4300 digits

# A number of tokens, steps or sequences. Numbers of 2**63 and more make no sense, and their products could exceed what
# a float can hold and what Python prints.
Count = Annotated[int, Field(lt=2**63)]
# A number in a file that this program writes. The sum of two such numbers is still a valid Count.
RecordedCount = Annotated[int, Field(ge=0, lt=2**62)]

SCHEMA_KEY = "$schema"
UNION_BRANCHES = ("list", "str", "bool", "int", "float", "dict", "constrained-float", "constrained-int")


class RunFile(BaseModel):
    """Base class of a run's two files, model.json and train.json."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    other_keys: ClassVar[dict[str, dict[str, Any]]] = {}  # JSON Schemas of further keys that the loader accepts
    replaceable_keys: ClassVar[set[str]] = set()  # required fields that can be left out if one of `other_keys` is given
    null_for_none: ClassVar[set[str]] = set()  # fields that are switched off by null, where a user might write 0

    @model_validator(mode="before")
    @classmethod
    def _without_schema(cls, raw: Any) -> Any:
        """Return the object without the key "$schema", which only tells editors where the file's schema is."""
        if not isinstance(raw, dict) or SCHEMA_KEY not in raw:
            return raw
        if not isinstance(raw[SCHEMA_KEY], str):
            raise ValueError(f'key "{SCHEMA_KEY}": must be a JSON Schema\'s path or URL, not {quoted(raw[SCHEMA_KEY])}')
        return {key: value for key, value in raw.items() if key != SCHEMA_KEY}


def parse_config(kind: type[Config], raw: dict[str, Any], path: Path) -> Config:
    """Validate `raw`, the object in the file `path`, and return it as an instance of `kind`. Raises UserError with the
    faults in one line."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        # A misspelled key comes before the keys that are missing, perhaps because of it.
        found = sorted(error.errors(), key=lambda fault: fault["type"] == "missing")
    raise _refusal(found, kind, path)


def check_recorded(kind: type[BaseModel], raw: dict[str, Any], path: Path, place: str) -> None:
    """Raise UserError if `raw` has a value that `kind` does not allow for its key.

    The file `path` records `raw` under the key `place`. These are accepted:

    - missing keys and unknown keys
    - null for a key of `raw`
    - unknown values of a Literal
    - values that only `kind`'s own validators refuse
    """
    known = {key: raw[key] for key in kind.model_fields if raw.get(key) is not None}
    try:
        kind.model_validate(known)
    except ValidationError as error:
        faults = error.errors()
        # Another version may have written `raw`.
        choices = {fault["loc"][0] for fault in faults if fault["type"] == "literal_error"}
        accepted = ("missing", "extra_forbidden", "value_error")  # value_error: of our own validators
        wrong = [fault for fault in faults if fault["type"] not in accepted and fault["loc"][0] not in choices]
        if wrong:
            raise _refusal([{**fault, "loc": (place, *fault["loc"])} for fault in wrong], kind, path) from None


def _refusal(found: Sequence[Any], kind: type[BaseModel], path: Path) -> UserError:
    """Return the error that lists `found`, pydantic's faults of the file `path`."""
    faults = list(dict.fromkeys(_describe(fault, kind) for fault in found[:SHOWN_FAULTS]))
    if len(found) > SHOWN_FAULTS:
        faults.append(f"and {len(found) - SHOWN_FAULTS:,} more")
    return UserError(f"{path}: " + "; ".join(faults))


def _explain_unknown(key: str, kind: type[BaseModel]) -> str:
    """Return the error text for an unknown key."""
    for other in RunFile.__subclasses__():
        if other is not kind and (key in other.model_fields or key in other.other_keys):
            return f"belongs in {other.model_config.get('title')}"
    if known := advice(key, kind.model_config.get("title") or ""):
        return known
    others: dict[str, dict[str, Any]] = getattr(kind, "other_keys", {})
    current = [name for name, schema in others.items() if not schema.get("deprecated")]
    near = nearest(key, [*kind.model_fields, *current])
    return "unknown" + (f'; did you mean "{near}"?' if near else "")


def _describe(fault: Any, kind: type[BaseModel]) -> str:
    """Return the text of one of pydantic's faults, without the value if that is secret."""
    # Pydantic's location of a fault also contains the types that it tried for a union. These are not keys of the file.
    parts = [str(part) for part in fault["loc"]]
    key = quoted(".".join(part for part in parts if part not in UNION_BRANCHES and "[" not in part))
    if fault["type"] == "extra_forbidden":
        is_nested = len(parts) > 1
        return f"key {key}: {'unknown; remove it' if is_nested else _explain_unknown(parts[0], kind)}"
    if fault["type"] == "missing":
        return f"key {key}: missing"
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    message = fault["msg"][0].lower() + fault["msg"][1:].split(" after validation")[0]
    if fault["type"] == "model_type":  # pydantic's message would name our class
        message = "must be an object, { ... }"
    none = "; null switches it off" if key.strip('"') in getattr(kind, "null_for_none", set()) else ""
    field = kind.model_fields.get(parts[0]) if parts else None
    value = f", not {quoted(fault['input'])}" if field is None or field.repr else ""  # repr=False marks secrets
    return f"key {key}: {message}{value}{none}"


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, read by `read_json`. Raises UserError also if the file holds another value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object, {{ ... }}, not {quoted(value)}")
    return value


def read_json(path: Path) -> Any:
    """Return the value in a JSON file, read by `read_text` and parsed by `strict_json`. Raises UserError if the file
    cannot be read or parsed."""
    text = read_text(path)
    try:
        return strict_json(text)
    except json.JSONDecodeError as error:
        fault = f":{error.lineno}: not valid JSON: {error.msg} (column {error.colno})"
    except RecursionError:
        fault = ": nested too deeply"
    except ValueError as error:
        fault = f": {error}"
    raise UserError(f"{path}{fault}")


def strict_json(text: str) -> Any:
    """Return the value in a JSON text. A float that is too large, such as 1e999, becomes infinite.

    Raises ValueError for wrong JSON, repeated keys, NaN, Infinity, invalid Unicode in a key, and integers of more than
    LARGEST_DIGITS digits. Raises RecursionError for text that is nested too deeply.
    """

    def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if not is_unicode(key):
                raise ValueError(f"key {quoted(key)}: half of a surrogate pair is not a character")
        if len(set(keys)) < len(keys):
            raise ValueError(f"key {quoted(max(keys, key=keys.count))}: given twice")
        return dict(pairs)

    def whole_number(digits: str) -> int:
        if len(digits) > LARGEST_DIGITS:
            raise ValueError(f"a whole number of {len(digits):,} digits is too large")
        return int(digits)

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    return json.loads(text, object_pairs_hook=as_object, parse_constant=refuse_constant, parse_int=whole_number)


def finite(value: Any) -> Any:
    """Return `value`, or None if it is an infinite or NaN float, which JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class DescribedJsonSchema(GenerateJsonSchema):
    """Describe each property by the docstring below its field."""

    # pydantic's `use_attribute_docstrings` would do this whenever the module is imported, and take a tenth of a second
    # in every command.

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        described = super().model_schema(schema)
        (definition,) = ast.parse(inspect.getsource(schema["cls"])).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    described["properties"][name]["description"] = " ".join(words.split())
        return described


def json_schema(kind: type[RunFile]) -> dict[str, Any]:
    """Return the JSON Schema of a config class for editors."""
    schema = kind.model_json_schema(schema_generator=DescribedJsonSchema)
    place = {"type": "string", "description": "Where an editor finds this schema; no effect on the run."}
    schema["properties"] |= {**kind.other_keys, SCHEMA_KEY: place}
    # The loader checks that each replaceable field, or a key that replaces it, is given.
    schema["required"] = [key for key in schema["required"] if key not in kind.replaceable_keys]
    return schema
