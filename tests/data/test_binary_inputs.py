"""What is no text is recognised by its first bytes, under any name; what is not UTF-8 is not replaced without limit."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from harness.common.errors import RunError, UserError
from harness.data.preparation.documents import READ_BYTES, TextFormat, read_documents
from harness.data.preparation.invalid_text import MOST_REPLACED
from harness.data.preparation.text_files import TextFile
from tests.data.test_token_shards import write_build_nanogpt, write_nanogpt, write_shard
from tests.support.preparing import SMALL, Preparer, content_of, documents_of, texts, write_json_lines

TEXT = "\n".join(texts(200))
ENGLISH = "The quick brown fox jumps over the lazy dog.\n" * 100
# GPT-2's tokens as text has them: a third of them among the first thousand.
RANDOM = np.random.default_rng(0)
TOKENS = np.where(RANDOM.random(5000) < 0.3, RANDOM.integers(0, 1000, 5000), RANDOM.integers(0, 50257, 5000))


def read(path: Path, tolerated: float = 0.0) -> str:
    file = TextFile(0, path.name, path, path.stat().st_size, "")
    return "".join(piece.text for piece in read_documents(file, TextFormat(tolerated=tolerated)))


def zip_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", TEXT)


def tar_archive(path: Path) -> None:
    (path.parent / "inside").write_text(TEXT)
    with tarfile.open(path, "w") as archive:
        archive.add(path.parent / "inside")


def database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("create table texts (text)")
    connection.close()


def saved_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, TOKENS.astype(np.uint16))


FROM_BIN = "--from-bin"
WRITERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "npy": (saved_array, "a NumPy array", FROM_BIN),
    "llm.c": (lambda path: write_shard(path, TOKENS.tolist()), "tokens (a shard of llm.c", FROM_BIN),
    "llm.c wide": (lambda path: write_shard(path, TOKENS.tolist(), 20240801, 7), "tokens (a shard of llm.c", FROM_BIN),
    "nanoGPT": (lambda path: write_nanogpt(path, TOKENS.tolist()), "binary data", FROM_BIN),
    "uint32": (lambda path: TOKENS.astype(np.uint32).tofile(path), "binary data", FROM_BIN),
    "characters": (lambda path: (TOKENS % 65).astype(np.uint16).tofile(path), "binary data", FROM_BIN),
    "safetensors": (lambda path: save_file({"tokens": TOKENS}, path), "tensors (safetensors)", "DATASETS_DIR"),
    "gzip": (lambda path: path.write_bytes(gzip.compress(TEXT.encode())), "what gzip has compressed", ".gz"),
    "zstd": (lambda path: path.write_bytes(pa.compress(TEXT.encode(), "zstd", asbytes=True)), "zstd", ".zst"),
    "xz": (lambda path: path.write_bytes(lzma.compress(TEXT.encode())), "what xz has compressed", "unpack"),
    "bzip2": (lambda path: path.write_bytes(bz2.compress(TEXT.encode())), "what bzip2 has compressed", "unpack"),
    "zip": (zip_archive, "a zip archive", "unpack"),
    "tar": (tar_archive, "a tar archive", "unpack"),
    "parquet": (lambda path: pq.write_table(pa.table({"text": [TEXT]}), path), "parquet", ".parquet"),
    "png": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(90)), "a PNG image", "leave it out"),
    "pdf": (lambda path: path.write_bytes(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"), "a PDF document", "pdftotext"),
    "elf": (lambda path: path.write_bytes(Path(sys.executable).read_bytes()[:50_000]), "a program (ELF)", "leave it"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "a pickle", "leave it out"),
    "old pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1}, 2)), "a pickle", "leave it out"),
    "sqlite": (database, "an SQLite database", "JSON lines"),
    "UTF-16": (lambda path: path.write_text(TEXT, "utf-16"), "text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    "UTF-32": (lambda path: path.write_text(TEXT, "utf-32"), "text in UTF-32", "iconv -f UTF-32 -t UTF-8"),
    "UTF-16LE": (lambda path: path.write_text(ENGLISH, "utf-16-le"), "text in UTF-16LE", "iconv -f UTF-16LE -t"),
    "UTF-16BE": (lambda path: path.write_text(ENGLISH, "utf-16-be"), "text in UTF-16BE", "iconv -f UTF-16BE -t"),
    "UTF-32BE": (lambda path: path.write_text(ENGLISH, "utf-32-be"), "text in UTF-32BE", "iconv -f UTF-32BE -t"),
    "Chinese UTF-16LE": (lambda path: path.write_text("日本 \n" * 99, "utf-16-le"), "binary data", "become UTF-8"),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_what_is_no_text_is_named(tmp_path: Path, kind: str, name: str) -> None:
    """Even if --replace-invalid is given twice."""
    write, what, remedy = WRITERS[kind]
    write(tmp_path / name)
    for tolerated in (0.0, 1.0):
        with pytest.raises(UserError) as raised:
            read(tmp_path / name, tolerated)
        line = str(raised.value)
        assert line.startswith(f"{tmp_path / name}: holds ")
        assert what in line
        assert remedy in line
        assert "--replace-invalid" not in line


@pytest.mark.parametrize("kind", ["npy", "nanoGPT", "parquet"])
def test_what_is_no_text_below_a_compression(tmp_path: Path, kind: str) -> None:
    write, what, _ = WRITERS[kind]
    write(tmp_path / "inside")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "inside").read_bytes()))
    with pytest.raises(UserError, match=rf"a.txt.gz: holds {what}"):
        read(tmp_path / "a.txt.gz")


@pytest.mark.parametrize("name", ["a.parquet", "a.txt.gz", "a.txt.zst"])
def test_another_format_under_a_name_of_these(tmp_path: Path, name: str) -> None:
    zip_archive(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}: holds a zip archive"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "MZ",
        "PAR1 is what parquet files begin with",
        "RIFF",
        "%PDF-1.7 is what PDF documents begin with\n",
        "naïve 日本 🐍",
        "\x00" + "a" * 99,
        "\x1b[1mhi\x1b[0m",
    ],
)
def test_text_that_looks_a_little_like_something_else(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == text


def test_a_character_across_the_end_of_the_first_bytes(tmp_path: Path) -> None:
    for shift in range(4):
        text = "x" * shift + "🐍" * 10_000 + "\x00"
        (tmp_path / "a.txt").write_text(text)
        assert read(tmp_path / "a.txt") == text


def test_the_command_leads_from_an_array_to_its_tokens(tmp_path: Path) -> None:
    """As a user goes who takes build-nanogpt's shards for text, and then for what they are."""
    preparer = Preparer(tmp_path)
    write_json_lines(tmp_path / "a.jsonl", texts(300))
    tokenizer = preparer.prepare("a.jsonl", "for-its-tokenizer") / "tokenizer.json"
    write_build_nanogpt(tmp_path / "edufineweb_train_000001.npy", (TOKENS % 300).tolist())
    for more in ([], ["--replace-invalid"], ["--replace-invalid", "--replace-invalid"]):
        line = preparer.run("*.npy", "out", *more, "--tokenizer", tokenizer, status=2)
        assert "edufineweb_train_000001.npy: holds a NumPy array, not text; if it is tokens, add --from-bin" in line
        assert not list(tmp_path.glob(".out*"))
    preparer.run("*.npy", "out", "--from-bin", "--tokenizer", tokenizer)


def test_a_folder_of_token_files_alone(tmp_path: Path) -> None:
    write_nanogpt(tmp_path / "owt" / "train.BIN", TOKENS.tolist())
    line = Preparer(tmp_path).run("owt", "out", *SMALL, status=2)
    assert "no input files here" in line
    assert "what there is: train.BIN; files of tokens go in with --from-bin" in line


# What is not UTF-8 -----------------------------------------------------------------------------------------------


def latin(size: int, invalid: int) -> bytes:
    """So many bytes, of which so many, spread over all, are é in Latin-1."""
    raw = bytearray((b"words and words " * (size // 16 + 1))[:size])
    for at in range(invalid):
        raw[at * size // max(1, invalid)] = 0xE9
    return bytes(raw)


def documents_file(path: Path, raw: bytes) -> Path:
    """The bytes as one document in a file of the kind that its name tells."""
    if path.name.endswith(".parquet"):
        pq.write_table(pa.table({"text": pa.array([raw]).view(pa.string())}), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(raw))
    else:
        path.write_bytes(raw)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
@pytest.mark.parametrize("size", [200, READ_BYTES + 700])
def test_a_hundredth_is_replaced_and_no_more(tmp_path: Path, name: str, size: int) -> None:
    most = int(MOST_REPLACED * size)
    raw = latin(size, most)
    assert read(documents_file(tmp_path / name, raw), MOST_REPLACED) == raw.decode(errors="replace")
    documents_file(tmp_path / name, latin(size, most + 1))
    with pytest.raises(UserError, match=rf"{name}: 1\.\d% of it is not UTF-8 .* more than the 1% of a file"):
        read(tmp_path / name, MOST_REPLACED)
    assert read(tmp_path / name, 1.0) == latin(size, most + 1).decode(errors="replace")


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_replacement_characters_of_the_file_itself_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Wherever the blocks that it is read in end."""
    monkeypatch.setattr("harness.data.preparation.documents.READ_BYTES", block)
    raw = ("\ufffd\ufffd日" * 20).encode() + latin(300, 3)
    (tmp_path / "a.txt").write_bytes(raw)
    assert read(tmp_path / "a.txt", MOST_REPLACED) == raw.decode(errors="replace")
    (tmp_path / "a.txt").write_bytes(raw + b"\xe9\xef\xbf")  # now 5 of 483
    with pytest.raises(UserError, match=r"1\.0% of it is not UTF-8 \(of the first 483 bytes\)"):
        read(tmp_path / "a.txt", MOST_REPLACED)


def test_a_large_file_is_refused_as_soon_as_it_is_certain(tmp_path: Path) -> None:
    """Not by its beginning: a bad first block in a good file is replaced."""
    bad, good = latin(READ_BYTES, READ_BYTES // 50), latin(READ_BYTES, 0)
    (tmp_path / "a.txt").write_bytes(bad + good * 2)
    assert read(tmp_path / "a.txt", MOST_REPLACED).count("\ufffd") == READ_BYTES // 50
    (tmp_path / "a.txt").write_bytes(bad * 3)
    with pytest.raises(UserError, match=rf"2.0% of it is not UTF-8 \(of the first {2 * READ_BYTES:,} bytes\)"):
        read(tmp_path / "a.txt", MOST_REPLACED)


def test_json_lines_are_judged_as_a_file(tmp_path: Path) -> None:
    good = b'{"text": "' + b"a" * 87 + b'"}\n'
    bad = b'{"text": "\xe9\xe9 \\ud83d"}\n'
    (tmp_path / "a.jsonl").write_bytes(good * 2 + bad)
    with pytest.raises(UserError, match="more than the 1% of a file that --replace-invalid replaces"):
        read(tmp_path / "a.jsonl", MOST_REPLACED)
    (tmp_path / "a.jsonl").write_bytes(bad + good * 2)
    with pytest.raises(UserError, match="more than the 1% of a file that --replace-invalid replaces"):
        read(tmp_path / "a.jsonl", MOST_REPLACED)
    (tmp_path / "a.jsonl").write_bytes(good * 2 + bad + good)  # 3 of 325 bytes
    assert read(tmp_path / "a.jsonl", MOST_REPLACED).count("\ufffd") == 3


def test_the_advice_is_one_that_helps(tmp_path: Path) -> None:
    """French in Latin-1 has to be converted: U+FFFD for all its accents is no text."""
    (tmp_path / "a.txt").write_bytes("Élève, où étiez-vous cet été ?\n".encode("latin-1") * 99)
    advice = r"iconv -f ITS-ENCODING -t UTF-8\).*, and the same command goes on from there$"
    with pytest.raises(RunError, match=rf"not valid UTF-8 .*{advice}") as raised:
        read(tmp_path / "a.txt")
    assert "--replace-invalid" not in str(raised.value)
    (tmp_path / "a.txt").write_bytes(latin(2000, 3))
    with pytest.raises(
        RunError, match=r"not valid UTF-8 .*--replace-invalid reads it as U\+FFFD, and goes on"
    ) as raised:
        read(tmp_path / "a.txt")
    assert "the same command" not in str(raised.value)


def test_text_in_another_encoding_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT, "utf-16")
    with pytest.raises(UserError, match=r"holds text in UTF-16, not UTF-8 text; convert it"):
        read(tmp_path / "a.txt")


def test_continued_work_refuses_and_makes_the_same(tmp_path: Path) -> None:
    """Refused, continued with the option once (refused again), then twice: the bytes of a run that had it twice from
    the beginning. Once is no continuation of twice."""
    preparer = Preparer(tmp_path)
    folder = tmp_path / "texts"
    write_json_lines(folder / "0.jsonl", texts(1000))  # enough to be kept
    tokenizer = preparer.prepare(folder / "0.jsonl", "for-its-tokenizer") / "tokenizer.json"
    (folder / "1.txt").write_bytes(latin(1000, 5))
    (folder / "2.txt").write_bytes(latin(1000, 50))
    arguments = ["texts", "out", "--tokenizer", tokenizer, "--workers", 1]
    once, twice = ["--replace-invalid"], ["--replace-invalid"] * 2
    assert "1.txt: not valid UTF-8" in preparer.run(*arguments, status=1)
    for _ in range(2):
        line = preparer.run(*arguments, *once, status=2)
        assert "2.txt: 5.0% of it is not UTF-8 (of the first 1,000 bytes), more than the 1%" in line
        assert "give --replace-invalid twice if it is meant" in line
    (folder / "3.jsonl").write_text("broken\n")
    assert "3.jsonl: line 1: not JSON" in preparer.run(*arguments, *twice, status=1)
    assert "other options (replace_invalid: any, not True)" in preparer.run(*arguments, *once, status=2)
    (folder / "3.jsonl").unlink()
    preparer.run(*arguments, *twice)
    preparer.run("texts", "straight", "--tokenizer", tokenizer, *twice)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "straight")
    made = documents_of(tmp_path / "out", "train") + documents_of(tmp_path / "out", "validation")
    assert sorted(text.count("\ufffd") for text in made)[-2:] == [5, 50]
