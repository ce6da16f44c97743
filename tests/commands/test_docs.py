"""README.md, CONTRIBUTING.md and docs/.

Links lead to files and headings that exist, the commands that are shown exist with their options, and tables say what
the code does.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic_core import PydanticUndefined

from harness.common.json_files import RunFile
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig
from tests.support.isolation import ROOT
from tests.test_architecture import COMMANDS, ROOMS

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CURRENT = [path for path in DOCUMENTS if path.name != "LOG.md"]  # LOG.md describes earlier versions of the code
README_LINES = 150
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Programs after `uv run` that are not scripts of this repository. torchrun is followed by one of its scripts.
TOOLS = {"pytest", "ruff", "mypy"}
PYTESTS_OPTIONS = {"-k": "keyword", "-m": "markexpr", "-n": "numprocesses"}


def lines_of(document: Path) -> Iterator[tuple[bool, str]]:
    """Yield each line, after a flag that is True in code blocks (in a fence, or indented after an empty line)."""
    is_fenced, is_shown, before = False, False, ""
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
            continue
        indented = line.startswith("    ")
        is_shown = is_fenced or (indented and (is_shown or not before.strip())) or (is_shown and not line)
        yield is_shown, line
        before = line


def prose_of(document: Path) -> str:
    return "\n".join(line for is_shown, line in lines_of(document) if not is_shown)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(document: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.*)$", prose_of(document), re.MULTILINE)}


# Links


def links_of(document: Path) -> list[str]:
    """Return the places in this repository that a page links to, by [text](place) or by [text][name] and [name]:
    place."""
    text = prose_of(document)
    places = dict(re.findall(r"^\[([\w-]+)\]: (\S+)$", text, re.MULTILINE))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + [places[name] for name in re.findall(r"\]\[([\w-]+)\]", text)]
    return [target for target in targets if not target.startswith(("https://", "http://", "mailto:"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for target in links_of(document):
        file, _, fragment = target.partition("#")
        path = (document.parent / file) if file else document
        assert path.exists(), target
        assert path.resolve().is_relative_to(ROOT.resolve()), target
        assert not fragment or fragment in anchors_of(path), target


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links_of(ROOT / "README.md")}
    assert {path.resolve() for path in DOCUMENTS} - {(ROOT / "README.md").resolve()} <= linked


@pytest.mark.parametrize("document", CURRENT, ids=lambda path: path.name)
def test_files_of_ours_that_are_named_exist(document: Path) -> None:
    text = prose_of(document)
    named = re.findall(r"`((?:[\w.\-]+/)*[\w\-]+\.py)(?::[\w.]+)?`", text)
    named += re.findall(r"`((?:harness|tests|bench|\.github)/[\w./\-]*)`", text)
    missing = [name for name in named if name != "__init__.py" and not (ROOT / name).exists()]
    assert not missing, missing


# Commands


def commands_of(document: Path) -> Iterator[list[str]]:
    """Yield the words of every command on a page that begins with `uv run`, `./`, `.ci/` or `python3 -m uv run`."""
    shown = "\n".join(line.strip() for is_shown, line in lines_of(document) if is_shown).replace("\\\n", " ")
    inline = re.findall(r"`(uv run [^`]*|\./[^`]*|\.ci/run)`", prose_of(document))
    for line in [*shown.splitlines(), *inline]:
        text = re.sub(r"^(\$ |nohup |[A-Z_]+=\S* )+", "", line.partition("&& ")[2] or line)
        text = re.sub(r"^([A-Z_]+=\S* )+", "", text)
        if text.startswith(("uv run ", "./", ".ci/", "python3 -m uv run ")):
            yield [word for word in shlex.split(text, comments=True) if word not in {"…", "&", "|"}]


EVERY_COMMAND = [(document, words) for document in CURRENT for words in commands_of(document)]


def program_of(words: list[str]) -> list[str]:
    """Return a command without uv and its options, and without torchrun and its options."""
    if words[0].startswith("."):
        return words
    words = words[words.index("run") + 1 :]
    while words[0].startswith("-"):
        option, value, *words = words
        assert option == "--extra", option
        assert value in PROJECT["project"]["optional-dependencies"], value
    if words[0] == "torchrun":
        words = words[next(place for place, word in enumerate(words) if word.endswith(".py")) :]
    return words


def click_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the click command of a root script and the command's arguments. If the script has subcommands, return the
    one that is named."""
    script, *arguments = words
    command = importlib.import_module(Path(script).stem).main
    while isinstance(command, click.Group):
        name, *arguments = arguments
        assert name in command.commands, f"{script} {name}"
        command = command.commands[name]
    return command, arguments


@pytest.mark.parametrize(("document", "words"), EVERY_COMMAND, ids=lambda value: getattr(value, "name", None))
def test_commands_and_their_options_exist(document: Path, words: list[str], pytestconfig: pytest.Config) -> None:
    program, *arguments = program_of(words)
    options = [word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)]
    if program == "pytest":
        names = [PYTESTS_OPTIONS.get(option, option.lstrip("-").replace("-", "_")) for option in options]
        assert all(hasattr(pytestconfig.option, name) for name in names), names
        assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/"))
        return
    if program in TOOLS:
        assert any(re.match(rf"{program}\b", each) for each in PROJECT["dependency-groups"]["dev"])
        return
    assert (ROOT / program).is_file(), program
    if program.startswith("."):
        assert os.access(ROOT / program, os.X_OK), program
    if Path(program).stem not in COMMANDS:
        text = (ROOT / program).read_text()
        assert all(re.search(rf"(?<![\w-]){option}(?![\w-])", text) for option in options), options
        return
    command, arguments = click_command([program, *arguments])
    values, rest, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
    assert not rest, rest
    for parameter in command.params:
        if isinstance(parameter.type, click.Choice) and values.get(str(parameter.name)) is not None:
            assert values[str(parameter.name)] in parameter.type.choices


def test_the_commands_are_seen() -> None:
    shown = [" ".join(words) for _, words in EVERY_COMMAND]
    assert any("ddp_train.py quickstart datasets --processes 2" in words for words in shown)
    assert any(words.startswith("uv run --extra judge judge_ift.py") for words in shown)
    assert any("convert_hf.py publish" in words for words in shown)
    assert {Path(program_of(words)[0]).stem for _, words in EVERY_COMMAND} >= set(COMMANDS)


# Tables


def rows_of(document: Path, first: str) -> list[list[str]]:
    """Return the cells of the tables whose first column has the heading `first`."""
    rows, is_wanted = [], False
    for line in document.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] if line.startswith("|") else []
        if cells and is_wanted and set(line) - set("|- "):
            rows.append(cells)
        is_wanted = bool(cells) and (is_wanted or cells[0] == first)
    return rows


def defaults_of(kind: type[RunFile]) -> dict[str, str]:
    """Return every key that a file may have, with the default that the table of keys must show."""
    found = dict.fromkeys(kind.other_keys, "none")
    for name, field in kind.model_fields.items():
        is_needed = field.default is PydanticUndefined
        found[name] = "needed" if is_needed else json.dumps(field.default)
    return found


def test_the_table_of_keys_is_the_schemas() -> None:
    rows = rows_of(ROOT / "docs" / "configuration.md", "key")
    written = {key.strip("`"): default.strip("`") for key, default, _ in rows}
    assert len(written) == len(rows), "a key has one row"
    expected = defaults_of(ModelConfig) | defaults_of(TrainConfig)
    assert written.keys() == expected.keys()
    for key, default in expected.items():
        same = written[key] == default or json.loads(written[key]) == json.loads(default)
        assert same, f"{key}: the table says {written[key]}, the default is {default}"


def test_the_examples_of_both_files_load() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    model, train = re.findall(r"^    \{.*?\}$", text, re.MULTILINE | re.DOTALL)
    ModelConfig.model_validate(json.loads(model))
    TrainConfig.model_validate(json.loads(train))
    (short,) = re.findall(r"`(\{.*?\})`", text)
    assert ModelConfig.model_validate(json.loads(short)).emb_dim == 768


def test_the_table_of_packages_is_what_is_allowed() -> None:
    rows = rows_of(ROOT / "docs" / "architecture.md", "package")
    written = {package.strip("`"): set(re.findall(r"`([^`]*)`", allowed)) for package, _, allowed in rows}

    def shown(room: str) -> str:
        return room.removeprefix("harness.").replace(".", "/")

    expected = {shown(room): set(map(shown, others)) for room, others in ROOMS.items() if room.startswith("harness.")}
    assert written == expected


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
