"""Files of tokens as other programs write them: each is imported, or refused with the reason."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.common.errors import UserError
from harness.data.preparation.token_input import find_shards, import_shards
from harness.data.tokenizers import load_tokenizer, train_bpe
from tests.support.preparing import Preparer, content_of, plugin, splits_of, texts

DOCUMENTS = texts(300)


@pytest.fixture
def preparer(tmp_path: Path) -> Preparer:
    return Preparer(tmp_path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File of a tokenizer of 300 tokens; end-of-text is 0."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(DOCUMENTS), 300, path)
    return path


def shard(tokens: list[int], magic: int = 20240520, version: int = 1, said: int | None = None) -> bytes:
    """A shard as llm.c's and modded-nanogpt's write_datafile make it."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if said is None else said
    return header.tobytes() + np.array(tokens, dtype=np.uint32 if magic == 20240801 else np.uint16).tobytes()


def write_build_nanogpt(path: Path, tokens: list[int], dtype: Any = np.uint16) -> None:
    """Write a file as build-nanogpt's fineweb.py does: the array is a part of a larger one, and the name given to numpy
    has no suffix."""
    path.parent.mkdir(exist_ok=True)
    whole = np.empty((len(tokens) + 5,), dtype=dtype)
    whole[: len(tokens)] = tokens
    np.save(path.with_suffix(""), whole[: len(tokens)])


def stream(tokenizer: Path, documents: list[str], *, first: bool) -> list[int]:
    """Return the tokens of the documents, with end-of-text (0) before each document if `first`, else after it."""
    known = load_tokenizer(tokenizer)
    tokens = [[0, *known.encode(text)] if first else [*known.encode(text), 0] for text in documents]
    return [token for document in tokens for token in document]


def test_nanogpts_folder_keeps_its_splits(preparer: Preparer, tokenizer: Path) -> None:
    train, held_out = (stream(tokenizer, part, first=False) for part in (DOCUMENTS[:90], DOCUMENTS[90:100]))
    folder = preparer.path / "openwebtext"
    folder.mkdir()
    # As data/shakespeare/prepare.py writes files; the memmap of data/openwebtext/prepare.py writes the same.
    np.array(train, np.uint16).tofile(folder / "TRAIN.BIN")  # names in capitals mean the same
    np.array(held_out, np.uint16).tofile(folder / "val.bin")
    (folder / "prepare.py").write_text("# its program")
    target = preparer.path / "datasets" / "me" / "owt"
    done = preparer.result(folder, target, "--from-bin", "--tokenizer", tokenizer)
    assert done.status == 0, done
    assert done.stderr.splitlines() == [
        f"TRAIN.BIN, val.bin: no header, so read as uint16 tokens of {tokenizer}; --token-dtype and --tokenizer "
        "change that"
    ]
    assert {name: tokens.tolist() for name, tokens in splits_of(target).items()} == {
        "train": train,
        "validation": held_out,
    }
    assert re.search("^validation: .* 10 documents", done.stdout, re.MULTILINE)
    assert "a vocabulary of 300 tokens" in done.stdout
    assert (target / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    preparer.run("--verify", target)
    line = preparer.run(folder, "out", "--train-tokenizer", "300", status=2)  # without --from-bin
    assert "found: TRAIN.BIN, prepare.py, val.bin; import files of tokens with --from-bin" in line


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, ">u2"])
def test_build_nanogpts_arrays(tmp_path: Path, tokenizer: Path, dtype: Any) -> None:
    train, held_out = (stream(tokenizer, part, first=True) for part in (DOCUMENTS[:90], DOCUMENTS[90:100]))
    write_build_nanogpt(tmp_path / "in" / "edufineweb_val_000000.npy", held_out, dtype)
    write_build_nanogpt(tmp_path / "in" / "edufineweb_train_000001.npy", train[:500], dtype)
    write_build_nanogpt(tmp_path / "in" / "edufineweb_train_000002.npy", train[500:], dtype)
    shards = find_shards([str(tmp_path / "in")], None)
    made = {split: import_shards(split, own, load_tokenizer(tokenizer), tmp_path) for split, own in shards.items()}
    assert splits_of(tmp_path)["train"].tolist() == train
    assert splits_of(tmp_path)["train"].dtype == np.uint16
    assert splits_of(tmp_path)["validation"].tolist() == held_out
    assert made["validation"].documents == 10
    assert made["validation"].bytes == sum(len(text.encode()) for text in DOCUMENTS[90:100])


def test_llm_cs_wide_shards(tmp_path: Path) -> None:
    """Shards of a vocabulary too large for uint16 stay uint32; shards of uint16 are refused for such a vocabulary."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [], eot=70_000))
    (tmp_path / "x_train_000000.bin").write_bytes(shard([70_000, 104, 105], magic=20240801, version=7))
    (tmp_path / "x_val_000000.bin").write_bytes(shard([70_000, 97], magic=20240801, version=7))
    target = tmp_path / "datasets" / "me" / "wide"
    preparer.run("x_*.bin", target, "--from-bin", "--tokenizer", "small")
    assert splits_of(target)["train"].tolist() == [70_000, 104, 105]
    assert splits_of(target)["validation"].dtype == np.uint32
    preparer.run("--verify", target)
    (tmp_path / "a_train_000001.bin").write_bytes(shard([1]))
    line = preparer.run("a_train_000001.bin", "out", "--from-bin", "--tokenizer", "small", status=2)
    assert "a_train_000001.bin: holds uint16 tokens, but the tokenizer has 70,001" in line


def test_a_tokenizer_whose_end_of_text_has_llama_3s_name(preparer: Preparer, tokenizer: Path) -> None:
    """A tokenizer may name its end-of-text token <|end_of_text|>, as Llama 3's does. Shards of both widths become one
    split; --token-dtype gives the width of the shard that has no header."""
    renamed = preparer.path / "tokenizer.json"
    renamed.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|end_of_text|>"))
    (preparer.path / "x_train_000000.bin").write_bytes(shard([0, 299, 5], magic=20240801, version=7))
    (preparer.path / "x_train_000001.bin").write_bytes(shard([7, 8]))
    np.array([9, 10, 11], np.uint32).tofile(preparer.path / "x_train_000002.bin")
    preparer.run("x_train_*.bin", "out", "--from-bin", "--token-dtype", "uint32", "--tokenizer", renamed)
    assert splits_of(preparer.path / "out")["train"].tolist() == [0, 299, 5, 7, 8, 9, 10, 11]
    assert json.loads((preparer.path / "out" / "meta.json").read_text())["eot_token"] == 0


def test_token_shards_are_gpt2s_if_nothing_else_is_said(preparer: Preparer) -> None:
    (preparer.path / "a_train_000001.bin").write_bytes(shard([1]))
    nowhere = {"TIKTOKEN_CACHE_DIR": str(preparer.path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    line = Preparer(preparer.path, nowhere).run("a_train_000001.bin", "out", "--from-bin", status=2)
    assert "GPT-2's vocabulary is not in" in line
    assert not list(preparer.path.glob(".out*"))


# Wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train.bin",
            shard([1], 20240801),
            r"version 1; of files with magic 20240801, only version 7 \(uint32 tokens\)",
        ),
        ("train.bin", shard([1], version=7), "its header has version 7;"),
        (
            "train.bin",
            shard([1, 2, 3], said=4),
            r"the header states 4 tokens, but the file holds 3;",
        ),
        ("train.bin", shard([]), "the train shards have no tokens"),
        ("train.bin", b"", "the train shards have no tokens"),
        ("train.bin", shard([300]), "token id 300 is not in the tokenizer's vocabulary of 300"),
        ("train.bin", bytes(3), "3 bytes are not a whole number of uint16"),
        ("train.bin", np.arange(40, dtype="<u4").tobytes(), "its tokens look like uint32"),
        ("train.bin", shard([1])[:8], "damaged: it ends within its header"),
        ("train.npy", np.array([5, -1], np.int32), "token id -1 is not in the tokenizer's vocabulary of 300"),
        ("train.npy", np.zeros((3, 4), np.uint16), "uint16 in 2 dimensions"),
        ("train.npy", np.zeros(9, np.float32), "float32 in 1 dimensions"),
        ("train.npy", np.array(["a", None], object), "not a NumPy array of tokens, or damaged"),
        ("train.npy", b"\x93NUMPY", "not a NumPy array of tokens, or damaged"),
        ("train.npy", b"\x93NUMPY\x01\x00\x76\x00{(".ljust(128) + bytes(2), "not a NumPy array of tokens, or damaged"),
        ("tokens.bin", shard([1]), "the name contains no split"),
        ("val.bin", shard([1]), "no shard for training"),
        ("train_\udce9.bin", shard([1]), "the name is not valid UTF-8; rename it"),  # meta.json cannot hold it
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, tokenizer: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content, allow_pickle=True)  # arrays of objects, which the import must refuse
    with pytest.raises(UserError, match=message) as caught:
        import_shards("train", find_shards([str(path)], None)["train"], load_tokenizer(tokenizer), tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


# Kills the command before it renames the draft of the train split.
KILL = """
import os, sys
def watch(event, arguments):
    if event == "os.rename" and str(arguments[0]).endswith("train.draft"):
        os.kill(os.getpid(), 9)
sys.addaudithook(watch)
"""


def test_shards_that_change_after_an_interruption_are_taken_anew(tmp_path: Path, tokenizer: Path) -> None:
    """Shards that change after an interruption are imported again. One shard is replaced, and the shard of the test
    split, which had been imported completely, is deleted."""
    (tmp_path / "shards").mkdir()
    for name in ("a_test_1", "a_train_1", "a_train_2"):
        (tmp_path / "shards" / f"{name}.bin").write_bytes(shard([1, 2, 0]))
    arguments = ["--from-bin", "--tokenizer", tokenizer]
    assert Preparer(tmp_path).result("shards", "x", *arguments, prelude=KILL).status == -signal.SIGKILL
    assert (tmp_path / ".x.partial" / "dataset" / "test.safetensors").exists()
    (tmp_path / "shards" / "a_test_1.bin").unlink()
    (tmp_path / "shards" / "a_train_2.bin").write_bytes(shard([3, 4, 5, 0]))
    for target in ("x", "y"):
        Preparer(tmp_path).run("shards", target, *arguments)
    assert splits_of(tmp_path / "x")["train"].tolist() == [1, 2, 0, 3, 4, 5, 0]
    assert content_of(tmp_path / "x") == content_of(tmp_path / "y")
