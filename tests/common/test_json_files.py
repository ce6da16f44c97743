"""Strict JSON: the same errors are refused in every JSON file, with one line that names the file and the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.common.json_files import read_json_object
from harness.model.config import load_model_config
from harness.runs.train_config import load_train_config
from tests.support.configs import refusal

# What a file holds, and a part of its refusal after the file's path.
REFUSED: list[tuple[bytes, str]] = [
    (b"", ":1: not valid JSON: "),
    (b"{", ":1: "),
    (b'{\n  "a": 1\n  "b": 2\n}', ":3: "),
    (b'{\n  "a": 1\n,}', ":3: "),
    (b"{\n\n  // comment\n}", ":3: "),
    (b"{'a': 1}", ":1: "),
    (b'{"a": 1} {"b": 2}', ":1: "),
    (b'{"a": 1, "a": 1}', ': key "a": given twice'),
    (b'{"two\\nlines": 1, "two\\nlines": 1}', r': key "two\nlines": given twice'),
    *((f'{{"learning_rate": {name}}}'.encode(), f": {name} is") for name in ("NaN", "Infinity", "-Infinity")),
    *((text, ": must hold one JSON object") for text in (b"[]", b"[1]", b"1", b'"text"', b"null", b"true")),
    ('{"dataset": "é"}'.encode("latin-1"), ": not UTF-8 text (byte 13)"),
    (b"[" * 100_000, ": nested too deeply"),
    (b'{"a":' * 100_000, ": nested too deeply"),
    (b'{"a": ' + b"1" * 5000 + b"}", ": a whole number of 5,000 digits is too large"),
    (rb'{"\ud800": 1}', "surrogate"),
]


@pytest.mark.parametrize(
    "load", [read_json_object, load_train_config, load_model_config], ids=["any", "train.json", "model.json"]
)
def test_what_is_refused(load: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    assert ": no such file" in refusal(load, path)
    for content, words in REFUSED:
        path.write_bytes(content)
        message = refusal(load, path)
        assert message.startswith(f"{path}:"), content[:50]
        assert words in message, content[:50]
    path.unlink()
    path.mkdir()
    assert ": Is a directory" in refusal(load, path)


def test_what_is_read_is_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1, 2.5, null, true, "é"], "b": {"a": -1}}', encoding="utf-8")
    assert read_json_object(tmp_path / "x.json") == {"a": [1, 2.5, None, True, "é"], "b": {"a": -1}}
