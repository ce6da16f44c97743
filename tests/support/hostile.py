"""Hostile files and names, written by hand and drawn by hypothesis, for the fault tests of bad input."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from pydantic import BaseModel

from harness.common.errors import UserError, printable
from harness.common.files import sha256
from tests.support.in_process import InProcess
from tests.support.launch import Result, Workshop

Check = Callable[[Any], object]

# A message must be short enough to be read, whatever a file contains.
LONGEST_LINE = 1500


def explore(check: Check, cases: SearchStrategy[Any], count: int) -> float:
    """Call `check` with `count` cases, which are the same every time. Return the share for which it returned a true
    value."""
    found: list[bool] = []

    @settings(
        max_examples=count, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases)
    def attempt(case: Any) -> None:
        found.append(False)
        found[-1] = bool(check(case))

    attempt()
    return sum(found) / len(found)


# Texts of JSON files ------------------------------------------------------------------------------------------------

SCALARS: SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1e-320, 1e308, -1e308, 0.1, 0.9999999999999999]),
    st.text(st.characters(), max_size=8),  # surrogates and control characters included
)
VALUES: SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
# Texts that no program writes for a JSON value, except to do harm.
STRANGE_TEXTS = st.sampled_from(
    [
        *("NaN", "-Infinity", "1e999", "-1e999", "1e-999", "-0", "01", "+1", "0x10", "1_000", "tru", "None", "'x'"),
        *("9" * 3999, "9" * 5000, "[" * 100_000, "[" * 985 + "]" * 985, '{"a":' * 985 + "1" + "}" * 985),
        *('"\\ud800"', '"\\u0000"', '"\t"', '"' + "x" * 100_000 + '"', "", "1,", "{}{}", "// 1"),
    ]
)


def write(pairs: Sequence[tuple[str, str]]) -> str:
    """Return the text of a JSON object, from pairs of a key and the text of its value. Keys may repeat."""
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in pairs) + "}"


def value_texts(usual: SearchStrategy[Any]) -> SearchStrategy[str]:
    """Return a strategy for texts of JSON values: three in four are drawn by `usual`, the others are strange."""
    strange = VALUES.map(json.dumps) | STRANGE_TEXTS
    return st.integers(1, 8).flatmap(lambda number: strange if number > 6 else usual.map(json.dumps))


# Values of a key's own type, from sensible to absurd.
COUNTS = [1, 2, 3, 4, 7, 16, 20, 64, 1000, 2**31, 2**53 + 1, 2**63 - 1, 0, -1, 2**63, 10**400]
RATES = [0, 1, 0.0, 1e-320, 1e-8, 0.5, 0.999, 1.0, 1.5, 100, 1e9, 1e300, -0.1, -1.0, 10000.0]


def plausible(
    described: type[BaseModel], own: dict[str, list[Any]], counts: Sequence[int] = COUNTS
) -> dict[str, list[Any]]:
    """Return values to try for the keys of a JSON object: for a key in `own` its values, for any other key values of
    its types in the JSON Schema and the text "other". Keys with no values are left out."""
    found = dict(own)
    for key, field in described.model_json_schema()["properties"].items():
        kinds = [field, *field.get("anyOf", [])]
        types = {each.get("type") for each in kinds}
        values: list[Any] = [*counts] if "integer" in types else [*RATES] if "number" in types else []
        values += [True, False] * ("boolean" in types) + [None] * ("null" in types)
        values += [choice for each in kinds for choice in each.get("enum", [])]
        if values and key not in own:
            found[key] = [*values, "other"]
    return found


def mutations(
    valid: dict[str, Any], plausible: dict[str, list[Any]], others: Sequence[str] = ()
) -> SearchStrategy[str]:
    """Return a strategy for texts of hostile JSON files.

    Most are `valid` with a few keys set to other values (often of the right type, from `plausible`), misspelt,
    repeated, removed or made up. The others are any JSON.
    """
    keys = sorted({*valid, *plausible, *others})

    @st.composite
    def mutate(draw: st.DrawFn) -> str:
        pairs = [(key, json.dumps(value)) for key, value in valid.items()]
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 2, 3, 4]))):
            key = draw(st.sampled_from(keys))
            usual: SearchStrategy[Any] = st.sampled_from(plausible[key]) if key in plausible else SCALARS
            operation = draw(st.sampled_from(["set"] * 12 + ["remove", "misspell", "repeat", "add"]))
            if operation in {"set", "remove"}:
                pairs = [pair for pair in pairs if pair[0] != key]
            if operation == "misspell":
                at = draw(st.integers(0, len(key) - 1))
                key = key[:at] + draw(st.text(max_size=2)) + key[at + 1 :]
            if operation == "add":
                key = draw(st.text(max_size=100))
            if operation != "remove":
                pairs.append((key, draw(value_texts(usual))))
        return write(pairs)

    return st.one_of(mutate(), mutate(), mutate(), mutate(), mutate(), value_texts(VALUES))


def set_text(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


# Verdicts -----------------------------------------------------------------------------------------------------------

# Parts of messages about a whole file, which name no key.
WITHOUT_KEY = (
    *("not valid JSON", "not UTF-8", "one JSON object", "nested too deeply", "is not a JSON number", "is too large"),
    "no such file",
)


def line_of(call: Callable[[], object]) -> str | None:
    """Return the line with which `call` refuses its input, or None if it accepts the input. Fails for any error except
    UserError, and for a line that is too long to be read."""
    try:
        call()
    except UserError as error:
        line = printable(str(error))  # as the commands print it
    else:
        return None
    assert len(line) < LONGEST_LINE
    return line


def refusal(load: Callable[[], object], path: Path) -> str | None:
    """Return `line_of(load)` for the JSON file at `path`. The line must name the file and, if one key is wrong, the
    key."""
    line = line_of(load)
    if line is not None:
        assert str(path) in line
        assert 'key "' in line or 'keys "' in line or any(text in line for text in WITHOUT_KEY), line
    return line


def is_one_line(result: Result, *words: str) -> bool:
    """Return True if a command refused its input, or False if it succeeded and printed nothing to standard error.

    A refusal must be one line that contains every one of `words`. Its exit status is 2, or 1 once work has begun.
    Everything else fails the test.
    """
    if result.status == 0:
        assert not result.stderr.strip(), result
        return False
    assert result.status in {1, 2}, result
    line = result.refuses(*words, status=result.status)
    assert line.isprintable(), line
    assert "by another process" not in line, line
    return True


def tree(folder: Path) -> dict[str, str]:
    """Return the mode and the content of every file, folder and link below a folder, except lock files."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.name != ".lock"):
        mode = oct(path.lstat().st_mode)
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"{mode} -> {path.readlink()}"
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path.relative_to(folder))] = f"{mode} {content}"
    return found


def same_as(before: dict[str, str], folder: Path) -> None:
    """Assert that the old files are unchanged. New files are allowed."""
    after = tree(folder)
    assert {name: after.get(name) for name in before} == before


# safetensors files --------------------------------------------------------------------------------------------------


def raw_safetensors(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return the bytes of a safetensors file: the header's length (or `length` in its place), the header, the data."""
    encoded = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    stated = len(encoded) if length is None else length
    return (stated % 2**64).to_bytes(8, "little") + encoded + data


# Finished runs ------------------------------------------------------------------------------------------------------


def finished_run(path: Path) -> Workshop:
    """Return a workshop with a run that is finished. It was trained in fp16, so that its checkpoints have scaler.pt,
    too. The run's train.json now asks for more tokens."""
    made = InProcess(path)
    made.add_dataset()
    made.add_run(min_train_tokens=640, validation_interval=4, precision="fp16")
    made.train_here()
    made.add_run(min_train_tokens=768, validation_interval=4, precision="fp16")
    return made


@dataclass(frozen=True)
class Bench:
    """Copy of a finished run that is damaged and restored again and again. `origin` holds the undamaged run."""

    origin: Path
    shop: InProcess

    @classmethod
    def copy_of(cls, made: Workshop, path: Path) -> Bench:
        return cls(made.path, InProcess(Path(shutil.copytree(made.path, path, symlinks=True))))

    def reset(self) -> Path:
        """Restore the run, and return the folder of the latest checkpoint."""
        shutil.rmtree(self.shop.runs / "r")
        shutil.copytree(self.origin / "runs" / "r", self.shop.runs / "r", symlinks=True)
        return (self.shop.runs / "r" / "checkpoints" / "latest").resolve()

    def refuses(
        self, *arguments: str, words: Sequence[str] = (), run: str = "r", also: Path | None = None, status: int = 2
    ) -> None:
        """Assert that training is refused with one line that has these words, and changes neither the workshop's folder
        nor the folder `also`."""
        folders = [self.shop.path, *filter(None, [also])]
        before = [tree(folder) for folder in folders]
        result = self.shop.attempt(*arguments, run=run)
        assert is_one_line(result, *words), result
        assert result.status == status, result
        for old, folder in zip(before, folders, strict=True):
            same_as(old, folder)
        assert also is None or tree(also) == before[-1], "nothing is added there, either"

    def meta(self) -> dict[str, Any]:
        """Return the latest checkpoint's meta.json without its own hash, as earlier versions wrote it. Without the
        hash, changes are not detected."""
        meta = json.loads((self.origin / "runs" / "r" / "checkpoints" / "latest" / "meta.json").read_text())
        meta["sha256"].pop("meta.json", None)
        return meta


def vouch_for(checkpoint: Path, *names: str) -> None:
    """Write the hashes of the changed files into meta.json, as a person who changed them on purpose could. The hash of
    meta.json itself is removed."""
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["sha256"] |= {name: sha256(checkpoint / name) for name in names}
    meta["sha256"].pop("meta.json", None)  # meta.json's own hash, which earlier versions did not write
    (checkpoint / "meta.json").write_text(json.dumps(meta))
