"""The embedded dataset holds all source text of Python's library exactly once; its folder is complete or absent."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import stat
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from harness.common.errors import UserError
from harness.common.files import umask
from harness.data.preparation import builtin
from harness.data.preparation.builtin import BUILTIN_DATASETS, DEFAULT_VOCAB_SIZE, build_python_stdlib
from harness.data.tokenizers.load import load_tokenizer
from harness.data.tokenizers.tokenizer import Tokenizer
from tests.support.preparing import content_of
from tests.support.warm import ROOT, WarmProcess, warm_server

SPLITS = ("train", "validation", "test")
FILES = {"meta.json", "tokenizer.json", *(f"{split}.safetensors" for split in SPLITS)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets") / "builtin" / "python-stdlib"
    BUILTIN_DATASETS["builtin/python-stdlib"](folder)
    return folder


@pytest.fixture(scope="module")
def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="module")
def documents(folder: Path, tokenizer: Tokenizer) -> dict[str, list[str]]:
    """The text between end-of-text tokens, for each split."""
    result = {}
    for split in SPLITS:
        tokens = load_file(folder / f"{split}.safetensors")["tokens"]
        assert tokens[-1] == tokenizer.eot_token
        ends = np.flatnonzero(tokens == tokenizer.eot_token)
        result[split] = [tokenizer.decode(piece[piece != 0].tolist()) for piece in np.split(tokens, ends)[:-1]]
    return result


@cache
def library_sources() -> dict[bytes, Path]:
    """Return the path of each source file of the library, keyed by the file's content."""
    paths = Path(sysconfig.get_path("stdlib")).rglob("*.py")
    return {path.read_bytes(): path for path in paths if "site-packages" not in path.parts}


@pytest.mark.slow
def test_the_folder_holds_what_meta_says(folder: Path, meta: dict[str, Any]) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert set(meta["files"]) == FILES - {"meta.json"}
    assert (meta["token_dtype"], meta["tokenizer"], meta["eot_token"]) == ("uint16", "tokenizer.json", 0)
    assert meta["vocab_size"] == DEFAULT_VOCAB_SIZE
    assert meta["source"]["python"] == sys.version.split()[0]
    assert not [path for path in folder.parent.iterdir() if path != folder]


@pytest.mark.slow
def test_counts_and_hashes_are_those_of_the_files(
    folder: Path, meta: dict[str, Any], tokenizer: Tokenizer, documents: dict[str, list[str]]
) -> None:
    for split in SPLITS:
        path = folder / f"{split}.safetensors"
        tokens = load_file(path)["tokens"]
        assert tokens.dtype == np.uint16
        assert tokens.ndim == 1
        assert tokens.max() < DEFAULT_VOCAB_SIZE
        assert meta["splits"][split] == {
            "documents": len(documents[split]),
            "tokens": len(tokens),
            "bytes": sum(len(text.encode()) for text in documents[split]),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        assert tokenizer.token_byte_lengths()[tokens].sum() == meta["splits"][split]["bytes"]


@pytest.mark.slow
def test_every_document_is_a_file_of_the_library_and_in_one_split(documents: dict[str, list[str]]) -> None:
    library = Path(sysconfig.get_path("stdlib"))
    everything = [text for split in SPLITS for text in documents[split]]
    assert len(set(everything)) == len(everything) > 300
    assert {text.encode() for text in everything} <= library_sources().keys()
    for name in ("argparse.py", "asyncio/tasks.py", "json/decoder.py", "typing.py", "xml/dom/minidom.py"):
        assert (library / name).read_bytes().decode() in everything
    for name in ("encodings/cp037.py", "pydoc_data/topics.py"):
        assert (library / name).read_bytes().decode() not in everything
    sizes = {split: sum(len(text.encode()) for text in documents[split]) for split in SPLITS}
    shares = {split: size / sum(sizes.values()) for split, size in sizes.items()}
    assert shares == pytest.approx({"train": 0.9, "validation": 0.05, "test": 0.05}, abs=0.01)
    folders = {library_sources()[text.encode()].parent for text in documents["train"][:60]}
    assert len(folders) > 10, "the beginning of a split is a sample of the whole library"


@pytest.mark.slow
def test_a_whole_folder_is_left_alone(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    build_python_stdlib(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_incomplete_folder_is_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "python-stdlib"
    target.mkdir()
    (target / "meta.json").write_text("{}")
    with pytest.raises(UserError, match="python-stdlib: incomplete; move it away"):
        build_python_stdlib(target)
    assert (target / "meta.json").read_text() == "{}"


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace Python's library with a small one that also has every kind of file to leave out; return its folder."""
    library = tmp_path / "library"
    for at in range(40):
        write(library / "json" / f"part{at:02}.py", f"def function_{at}(value):\n    return value + {at}\n" * 9)
    for name in ("test", "site-packages", "idlelib", "encodings", "json/tests", "json/__pycache__", "notpython"):
        write(library / name / "module.py", "raise SystemExit('not the library')\n")
    write(library / "argparse.py", "x = '日本'\r\n")
    write(library / "sitecustomize.py", "secret = 1\n")
    write(library / "email" / "__init__.py", "")
    (library / "ast.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    return library


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def test_what_belongs_to_the_library(small_library: Path) -> None:
    documents = builtin.read_documents()
    assert list(documents) == ["argparse.py", *(f"json/part{at:02}.py" for at in range(40))]
    assert documents["argparse.py"] == "x = '日本'\r\n"


# The same build with the small library, in a process with another hash seed. With the argument "killed", the process
# kills itself when it has trained its tokenizer.
BUILD = """
import os, sys, sysconfig
from pathlib import Path
sysconfig.get_path = lambda name: sys.argv[2]
from harness.data.preparation import builtin
if sys.argv[3] == "killed":
    builtin.load_tokenizer = lambda path: os.kill(os.getpid(), 9)
builtin.build_python_stdlib(Path(sys.argv[1]), 260)
"""


def test_a_killed_build_leaves_nothing_half_written_and_the_next_gives_the_same_bytes(
    small_library: Path, tmp_path: Path
) -> None:
    folder, again = (tmp_path / name / "python-stdlib" for name in ("datasets", "others"))
    build_python_stdlib(folder, 260)
    (tmp_path / "build.py").write_text(BUILD)

    def build(end: str) -> WarmProcess:
        command = [str(tmp_path / "build.py"), str(again), str(small_library), end]
        return warm_server().spawn(command, ROOT, dict(os.environ))

    killed = build("killed")
    assert killed.wait(timeout=60) == -signal.SIGKILL
    leftover = again.with_name(f".{again.name}.partial-{killed.pid}")
    assert [path.name for path in again.parent.iterdir()] == [leftover.name]
    other = again.with_name(f".{again.name}.partial-{os.getpid()}")  # belongs to a process that is alive
    other.mkdir()
    assert build("whole").wait(timeout=60) == 0
    assert {path.name for path in again.parent.iterdir()} == {again.name, other.name}
    assert content_of(again) == content_of(folder)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask()}


def test_a_new_file_moves_few_others_between_splits(small_library: Path) -> None:
    before = builtin.split_documents(builtin.read_documents())
    write(small_library / "json" / "new.py", "x = 1\n")
    after = builtin.split_documents(builtin.read_documents())
    assert sum(len(set(before[split]) - set(after[split])) for split in SPLITS) <= 2
    assert all(before[split] for split in SPLITS)


def test_no_space_is_one_line_and_leaves_nothing(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    target = tmp_path / "datasets" / "python-stdlib"
    with pytest.raises(UserError, match=r"python-stdlib: cannot be written: No space left on device$"):
        build_python_stdlib(target, 260)
    assert not list(target.parent.iterdir())


def test_another_process_may_have_been_faster(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "datasets" / "python-stdlib"
    build_python_stdlib(target, 260)
    before = (target / "meta.json").stat().st_mtime_ns
    answers = iter([False, True])
    monkeypatch.setattr(builtin, "_is_whole", lambda folder: next(answers))
    monkeypatch.setattr(
        Path, "iterdir", lambda path: iter(()) if path == target else map(path.joinpath, os.listdir(path))
    )
    build_python_stdlib(target, 260)
    assert (target / "meta.json").stat().st_mtime_ns == before
    assert os.listdir(target.parent) == [target.name]


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"python311\.zip: this Python keeps no readable source files"):
        build_python_stdlib(tmp_path / "python-stdlib")
