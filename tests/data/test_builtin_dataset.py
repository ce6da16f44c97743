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
from pathlib import Path

import numpy as np
import pytest

from harness.common.errors import UserError
from harness.common.files import draft_prefix
from harness.data.fetch import ensure_dataset
from harness.data.preparation import builtin
from harness.data.preparation.builtin import DEFAULT_VOCAB_SIZE, build_python_stdlib
from harness.data.tokenizers import load_tokenizer
from tests.support.preparing import content_of, documents_of, splits_of
from tests.support.warm import ROOT, WarmProcess, umask, warm_server

NAME = "builtin/python-stdlib"
SPLITS = ("train", "validation", "test")
FILES = {"meta.json", "tokenizer.json", *(f"{split}.safetensors" for split in SPLITS)}


@pytest.mark.slow
def test_the_whole_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The counts and hashes in meta.json are those of the files. Each document is a file of the library, in exactly one
    split. A complete folder is left alone."""
    ensure_dataset(tmp_path, NAME, [*SPLITS])
    folder = tmp_path / NAME
    assert {path.name for path in folder.iterdir()} == FILES
    assert not [path for path in folder.parent.iterdir() if path != folder]
    meta, tokenizer = json.loads((folder / "meta.json").read_text()), load_tokenizer(folder / "tokenizer.json")
    assert set(meta["files"]) == FILES - {"meta.json"}
    assert (meta["token_dtype"], meta["tokenizer"], meta["eot_token"]) == ("uint16", "tokenizer.json", 0)
    assert meta["vocab_size"] == DEFAULT_VOCAB_SIZE
    assert meta["source"]["python"] == sys.version.split()[0]
    documents, sizes = {}, {}
    for split in SPLITS:
        tokens = splits_of(folder)[split]
        assert tokens.dtype == np.uint16
        assert tokens.max() < DEFAULT_VOCAB_SIZE
        documents[split] = documents_of(folder, split)
        sizes[split] = sum(len(text.encode()) for text in documents[split])
        path = folder / f"{split}.safetensors"
        assert meta["splits"][split] == {
            "documents": len(documents[split]),
            "tokens": len(tokens),
            "bytes": sizes[split],
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        assert tokenizer.token_byte_lengths()[tokens].sum() == sizes[split]
    library = Path(sysconfig.get_path("stdlib"))
    places = {path.read_bytes(): path for path in library.rglob("*.py") if "site-packages" not in path.parts}
    everything = [text for split in SPLITS for text in documents[split]]
    assert len(set(everything)) == len(everything) > 300
    assert {text.encode() for text in everything} <= places.keys()
    for name in ("argparse.py", "asyncio/tasks.py", "json/decoder.py", "typing.py", "xml/dom/minidom.py"):
        assert (library / name).read_bytes().decode() in everything
    for name in ("encodings/cp037.py", "pydoc_data/topics.py"):
        assert (library / name).read_bytes().decode() not in everything
    shares = {split: size / sum(sizes.values()) for split, size in sizes.items()}
    assert shares == pytest.approx({"train": 0.9, "validation": 0.05, "test": 0.05}, abs=0.01)
    folders = {places[text.encode()].parent for text in documents["train"][:60]}
    assert len(folders) > 10, "the beginning of a split is a sample of the whole library"
    assert "Building" in capsys.readouterr().out
    ensure_dataset(tmp_path, NAME, [*SPLITS])
    assert not capsys.readouterr().out


def test_a_split_that_the_dataset_was_made_without(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "meta.json").write_text('{"splits": {"train": {}}}')
    with pytest.raises(UserError, match="incomplete: train"):
        ensure_dataset(tmp_path, NAME, ["train"])
    with pytest.raises(UserError, match="has no test split; name a dataset with one"):
        ensure_dataset(tmp_path, NAME, ["test"])


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace Python's library with a small one; return its folder. It also has every kind of file that the dataset
    leaves out."""
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
    documents = builtin.standard_library()
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
    leftover = again.with_name(f"{draft_prefix(again)}{killed.pid}")
    assert [path.name for path in again.parent.iterdir()] == [leftover.name]
    alive = again.with_name(f"{draft_prefix(again)}{os.getpid()}")  # belongs to a process that is alive
    elsewhere = again.with_name(f".{again.name}.partial-00000000-{killed.pid}")  # belongs to another host
    for other in (alive, elsewhere):
        other.mkdir()
    assert build("whole").wait(timeout=60) == 0
    assert {path.name for path in again.parent.iterdir()} == {again.name, alive.name, elsewhere.name}
    assert content_of(again) == content_of(folder)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o666 & ~umask()}
    before = (folder / "meta.json").stat().st_mtime_ns
    build_python_stdlib(folder, 260)
    assert (folder / "meta.json").stat().st_mtime_ns == before, "what another process has made meanwhile is kept"
    assert os.listdir(folder.parent) == [folder.name]


def test_a_new_file_moves_few_others_between_splits(small_library: Path) -> None:
    before = builtin.split_documents(builtin.standard_library())
    write(small_library / "json" / "new.py", "x = 1\n")
    after = builtin.split_documents(builtin.standard_library())
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


def test_a_python_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"python311\.zip: this Python has no readable source files"):
        build_python_stdlib(tmp_path / "python-stdlib")
