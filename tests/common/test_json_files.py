"""Strict JSON: all files are refused for the same errors, with one line that names the file and the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.common.json_files import read_json_object
from harness.model.config import load_model_config
from harness.runs.train_config import load_train_config
from tests.support.configs import refusal

Load = Callable[[Path], object]


@pytest.fixture(
    params=[read_json_object, load_train_config, load_model_config], ids=["any", "train.json", "model.json"]
)
def load(request: pytest.FixtureRequest) -> Load:
    return request.param


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", 1),
        ("{", 1),
        ('{\n  "a": 1,\n}', 3),
        ('{\n  "a": 1\n  "b": 2\n}', 3),
        ("{\n\n  // comment\n}", 3),
        ("{'a': 1}", 1),
        ('{"a": 1} {"b": 2}', 1),
    ],
)
def test_text_that_does_not_parse(load: Load, tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    message = refusal(load, path)
    if text.endswith(",\n}"):  # Python 3.13 reports the line of a trailing comma, older versions that of the brace
        assert re.match(rf"{re.escape(str(path))}:[23]: ", message)
    else:
        assert message.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("key", ["a", "two\\nlines"])
def test_a_repeated_key(load: Load, tmp_path: Path, key: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{{"{key}": 1, "{key}": 1}}')
    message = refusal(load, path)
    assert "twice" in message
    assert f'"{key}"' in message


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have(load: Load, tmp_path: Path, constant: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{{"learning_rate": {constant}}}')
    assert constant in refusal(load, path)


@pytest.mark.parametrize("text", ["[]", "[1]", "1", '"text"', "null", "true"])
def test_not_an_object(load: Load, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert "object" in refusal(load, path)


def test_not_utf8(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes('{"dataset": "é"}'.encode("latin-1"))
    assert "UTF-8" in refusal(load, path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{" + '"a":{' * 100_000, '{"a": ' + "1" * 5000 + "}"])
def test_text_that_exhausts_the_parser(load: Load, tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    refusal(load, path)


def test_a_missing_file(load: Load, tmp_path: Path) -> None:
    assert "no such file" in refusal(load, tmp_path / "x.json")


def test_a_folder_in_place_of_the_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "x.json").mkdir()
    refusal(load, tmp_path / "x.json")


def test_what_is_read_is_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": [1, 2.5, null, true, "é"], "b": {"a": -1}}', encoding="utf-8")
    assert read_json_object(tmp_path / "x.json") == {"a": [1, 2.5, None, True, "é"], "b": {"a": -1}}


def test_half_a_character_in_a_key(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(r'{"\ud800": 1}')
    assert "surrogate" in refusal(read_json_object, tmp_path / "x.json")
