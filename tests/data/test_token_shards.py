"""Files of tokens as other programs write them, through the real command: every one goes in, or is told what it is."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.common.errors import UserError
from harness.data.preparation.token_input import check_vocabulary, find_shards, open_shard
from harness.data.tokenizers.bpe import train_bpe
from harness.data.tokenizers.load import load_tokenizer
from tests.support.isolation import on_path
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


# As the programs write them ----------------------------------------------------------------------------------------


def write_shard(
    path: Path, tokens: list[int], magic: int = 20240520, version: int = 1, said: int | None = None
) -> None:
    """Write a shard as llm.c's and modded-nanogpt's write_datafile do."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if said is None else said
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(np.array(tokens, dtype=np.uint32 if magic == 20240801 else np.uint16).tobytes())


def write_nanogpt(path: Path, tokens: list[int]) -> None:
    """Write a file as data/openwebtext/prepare.py does; the other ones' tofile writes the same."""
    path.parent.mkdir(exist_ok=True)
    array = np.memmap(path, dtype=np.uint16, mode="w+", shape=(len(tokens),))
    array[:] = tokens
    array.flush()


def write_build_nanogpt(path: Path, tokens: list[int], dtype: Any = np.uint16) -> None:
    """Write a file as build-nanogpt's fineweb.py does: a part of a larger array, without the file's suffix."""
    path.parent.mkdir(exist_ok=True)
    whole = np.empty((len(tokens) + 5,), dtype=dtype)
    whole[: len(tokens)] = tokens
    np.save(path.with_suffix(""), whole[: len(tokens)])


def stream(tokenizer: Path, documents: list[str], *, first: bool) -> list[int]:
    """Documents with end-of-text (0) before each, or after it."""
    known = load_tokenizer(tokenizer)
    tokens = [[0, *known.encode(text)] if first else [*known.encode(text), 0] for text in documents]
    return [token for document in tokens for token in document]


def test_nanogpts_folder_keeps_its_splits(preparer: Preparer, tokenizer: Path) -> None:
    train, held_out = (stream(tokenizer, part, first=False) for part in (DOCUMENTS[:90], DOCUMENTS[90:100]))
    folder = preparer.path / "openwebtext"
    write_nanogpt(folder / "train.bin", train)
    write_nanogpt(folder / "val.bin", held_out)
    (folder / "prepare.py").write_text("# its program")
    target = preparer.path / "datasets" / "me" / "owt"
    process = preparer.start(folder, target, "--from-bin", "--tokenizer", tokenizer)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert error.splitlines() == [
        f"no header, read as uint16 tokens of {tokenizer} (--token-dtype, --tokenizer): train.bin, val.bin"
    ]
    assert {name: tokens.tolist() for name, tokens in splits_of(target).items()} == {
        "train": train,
        "validation": held_out,
    }
    assert "validation: " in out
    assert "10 documents" in out
    assert "a vocabulary of 300 tokens" in out
    preparer.run("--verify", target)


def test_a_folder_of_token_files_alone(preparer: Preparer) -> None:
    """A user who gives tokens for text is pointed to --from-bin."""
    write_nanogpt(preparer.path / "owt" / "train.BIN", [1, 2])
    line = preparer.run("owt", "out", "--train-tokenizer", "300", status=2)
    assert "no input files here" in line
    assert "what there is: train.BIN; files of tokens go in with --from-bin" in line


def test_names_in_capitals_mean_the_same(tmp_path: Path) -> None:
    for name in ("TRAIN.BIN", "Val.Bin"):
        write_nanogpt(tmp_path / name, [7, 300] * 9)
    assert find_shards([str(tmp_path)], None).keys() == {"train", "validation"}
    np.save(tmp_path / "train.npy", np.array([7, 0], np.uint16))
    (tmp_path / "train.npy").rename(tmp_path / "TRAIN.NPY")
    with pytest.raises(UserError, match=r"\.bin and \.npy files, perhaps of the same tokens"):
        find_shards([str(tmp_path)], None)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64, ">u2"])
def test_build_nanogpts_arrays(preparer: Preparer, tokenizer: Path, dtype: Any) -> None:
    train, held_out = (stream(tokenizer, part, first=True) for part in (DOCUMENTS[:90], DOCUMENTS[90:100]))
    folder = preparer.path / "edu_fineweb10B"
    write_build_nanogpt(folder / "edufineweb_val_000000.npy", held_out, dtype)
    write_build_nanogpt(folder / "edufineweb_train_000001.npy", train[:500], dtype)
    write_build_nanogpt(folder / "edufineweb_train_000002.npy", train[500:], dtype)
    target = preparer.path / "datasets" / "me" / "edu"
    out = preparer.run(folder, target, "--from-bin", "--tokenizer", tokenizer)
    assert splits_of(target)["train"].tolist() == train
    assert splits_of(target)["train"].dtype == np.uint16
    assert splits_of(target)["validation"].tolist() == held_out
    length = sum(len(text.encode()) for text in DOCUMENTS[90:100])
    assert f"validation: {len(held_out):,} tokens, 10 documents, {length:,} bytes of text" in out


def test_llm_cs_wide_shards(tmp_path: Path) -> None:
    """Shards of a vocabulary that uint16 does not hold are kept as uint32."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [], eot=70_000))
    write_shard(tmp_path / "x_train_000000.bin", [70_000, 104, 105], magic=20240801, version=7)
    write_shard(tmp_path / "x_val_000000.bin", [70_000, 97], magic=20240801, version=7)
    target = tmp_path / "datasets" / "me" / "wide"
    preparer.run("x_*.bin", target, "--from-bin", "--tokenizer", "small")
    assert splits_of(target)["train"].tolist() == [70_000, 104, 105]
    assert splits_of(target)["validation"].dtype == np.uint32
    preparer.run("--verify", target)


def test_a_tokenizer_whose_end_of_text_has_llama_3s_name(preparer: Preparer, tokenizer: Path) -> None:
    renamed = preparer.path / "tokenizer.json"
    renamed.write_text(tokenizer.read_text().replace("<|endoftext|>", "<|end_of_text|>"))
    write_shard(preparer.path / "x_train_000000.bin", [0, 299, 5], magic=20240801, version=7)
    preparer.run("x_train_000000.bin", "out", "--from-bin", "--tokenizer", renamed)
    assert splits_of(preparer.path / "out")["train"].tolist() == [0, 299, 5]
    assert json.loads((preparer.path / "out" / "meta.json").read_text())["eot_token"] == 0


def test_token_shards_are_taken_as_they_are(preparer: Preparer, tokenizer: Path) -> None:
    shards = preparer.path / "fineweb10B"
    known = load_tokenizer(tokenizer)
    held_out = [0, *known.encode(DOCUMENTS[0])]
    write_shard(shards / "fineweb_val_000000.bin", held_out)
    write_shard(shards / "fineweb_train_000001.bin", [0, 5, 299, 0])
    write_shard(shards / "fineweb_train_000002.bin", [7, 8])
    folder = preparer.path / "datasets" / "me" / "bins"
    shown = preparer.run(shards, folder, "--from-bin", "--tokenizer", tokenizer)
    assert {name: tokens.tolist() for name, tokens in splits_of(folder).items()} == {
        "train": [0, 5, 299, 0, 7, 8],
        "validation": held_out,
    }
    length = len(DOCUMENTS[0].encode())
    assert f"validation: {len(held_out):,} tokens, 1 document, {length:,} bytes of text" in shown
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    preparer.run("--verify", folder)


def test_token_shards_are_gpt2s_if_nothing_else_is_said(preparer: Preparer) -> None:
    write_shard(preparer.path / "a_train_000001.bin", [1])
    nowhere = {"TIKTOKEN_CACHE_DIR": str(preparer.path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    line = Preparer(preparer.path, nowhere).run("a_train_000001.bin", "out", "--from-bin", status=2)
    assert "GPT-2's vocabulary is not in" in line
    assert not list(preparer.path.glob(".out*"))


def test_token_shards_of_a_vocabulary_that_does_not_fit_them(tmp_path: Path) -> None:
    preparer = Preparer(tmp_path, plugin(tmp_path, [], eot=70_000))
    write_shard(tmp_path / "a_train_000001.bin", [1])
    line = preparer.run("a_train_000001.bin", "out", "--from-bin", "--tokenizer", "small", status=2)
    assert "a_train_000001.bin: holds uint16 tokens, but the tokenizer has 70,001" in line


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ({"tokens": [1], "magic": 20240801}, "version 1 of the format; only version 7 (uint32 tokens)"),
        ({"tokens": [1], "version": 7}, "version 7 of the format"),
        ({"tokens": [1, 2, 3], "said": 4}, "damaged: the header tells of 4 tokens, but there are 3.0"),
        ({"tokens": []}, "train would have no tokens"),
        ({"tokens": [300]}, "token id 300 is beyond the tokenizer's 300"),
    ],
)
def test_a_wrong_shard_is_named(preparer: Preparer, tokenizer: Path, shard: dict, message: str) -> None:
    write_shard(preparer.path / "a_train_000001.bin", **shard)
    line = preparer.run("a_train_000001.bin", "out", "--from-bin", "--tokenizer", tokenizer, status=2)
    assert "a_train_000001.bin" in line
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train would have no tokens"),
        (bytes(3), "3 bytes are no whole number of uint16"),
        (np.array([20240520, 1], "<i4").tobytes(), "damaged: it ends within its header"),
    ],
)
def test_a_file_that_is_cut(preparer: Preparer, tokenizer: Path, content: bytes, message: str) -> None:
    (preparer.path / "a_train_000001.bin").write_bytes(content)
    line = preparer.run("a_train_000001.bin", "out", "--from-bin", "--tokenizer", tokenizer, status=2)
    assert line.startswith("error: a_train_000001.bin: ")
    assert message in line


def test_numbers_whose_width_the_user_tells(preparer: Preparer, tokenizer: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 500)
    tokens.astype(np.uint32).tofile(preparer.path / "train.bin")
    preparer.run("train.bin", "out", "--from-bin", "--token-dtype", "uint32", "--tokenizer", tokenizer)
    assert splits_of(preparer.path / "out")["train"].tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 4), np.uint16), "uint16 in 2 dimensions"),
        (np.zeros(9, np.float32), "float32 in 1 dimensions"),
        (np.array(["a", None], object), "no NumPy array of tokens, or damaged"),
    ],
    ids=["matrix", "floats", "objects"],
)
def test_arrays_that_are_no_tokens(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "train.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=message):
        open_shard(tmp_path / "train.npy", None)
    (tmp_path / "train.npy").write_bytes((tmp_path / "train.npy").read_bytes()[:-1])
    with pytest.raises(UserError, match=r"train.npy: "):
        open_shard(tmp_path / "train.npy", None)


def test_negative_numbers_are_no_tokens(preparer: Preparer, tokenizer: Path) -> None:
    write_build_nanogpt(preparer.path / "a_train_0.npy", [5, -1], np.int32)
    line = preparer.run("a_train_0.npy", "out", "--from-bin", "--tokenizer", tokenizer, status=2)
    assert "token id -1 is beyond the tokenizer's 300" in line


def test_tokens_of_characters_are_not_taken_for_gpt2s(tmp_path: Path) -> None:
    """nanoGPT's data/shakespeare_char: every number is a token of GPT-2, too."""
    for name in ("train", "val"):
        write_nanogpt(tmp_path / f"{name}.bin", np.random.default_rng(0).integers(0, 65, 500).tolist())
    shards = find_shards([str(tmp_path)], None)["train"]
    check_vocabulary(shards, None)
    (tmp_path / "meta.pkl").write_bytes(b"never opened")
    with pytest.raises(UserError, match=r"meta.pkl: nanoGPT notes there .* not GPT-2's; prepare their text instead"):
        check_vocabulary(shards, None)
    check_vocabulary(shards, "tokenizer.json")


def test_two_kinds_of_token_files_in_one_folder(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "a_train_0.bin", [1])
    write_build_nanogpt(tmp_path / "a_train_0.npy", [1])
    with pytest.raises(UserError, match=r"\.bin and \.npy files, perhaps of the same tokens"):
        find_shards([str(tmp_path)], None)
    assert list(find_shards([str(tmp_path / "*.npy")], None)) == ["train"]


# Kills the command before it gives a split of shards its name.
KILL_BEFORE = """
import os, sys
if any("prepare_datasets" in each for each in sys.orig_argv):
    def watch(event, arguments):
        if event == "os.rename" and str(arguments[0]).endswith("{draft}"):
            os.kill(os.getpid(), 9)
    sys.addaudithook(watch)
"""


def test_shards_that_change_after_an_interruption_are_taken_anew(tmp_path: Path, tokenizer: Path) -> None:
    """One is replaced, and the test split, which was whole by then, is no more."""
    for name in ("a_test_1", "a_train_1", "a_train_2"):
        write_shard(tmp_path / "shards" / f"{name}.bin", [1, 2, 0])
    (tmp_path / "sitecustomize.py").write_text(KILL_BEFORE.format(draft="train.draft"))
    arguments = ["--from-bin", "--tokenizer", tokenizer]
    process = Preparer(tmp_path, on_path(tmp_path)).start("shards", "x", *arguments)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / ".x.partial" / "dataset" / "test.safetensors").exists()
    (tmp_path / "shards" / "a_test_1.bin").unlink()
    write_shard(tmp_path / "shards" / "a_train_2.bin", [3, 4, 5, 0])
    for target in ("x", "y"):
        Preparer(tmp_path).run("shards", target, *arguments)
    assert splits_of(tmp_path / "x")["train"].tolist() == [1, 2, 0, 3, 4, 5, 0]
    assert content_of(tmp_path / "x") == content_of(tmp_path / "y")


def test_a_shard_whose_name_is_no_text(preparer: Preparer, tokenizer: Path) -> None:
    """meta.json could not name it."""
    write_shard(preparer.path / "shards" / "a_train_\udce9.bin", [1])
    line = preparer.run("shards", "out", "--from-bin", "--tokenizer", tokenizer, status=2)
    assert "a_train_\\udce9.bin: the name is not valid UTF-8; rename it" in line
    assert not list(preparer.path.glob(".out*"))
