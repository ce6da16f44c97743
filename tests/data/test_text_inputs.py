"""Text files of every kind that can be read, and of every kind that is refused, some through the real command."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.common.errors import RunError, UserError
from harness.data.preparation.encode import LONGEST_PIECE, batches
from harness.data.preparation.text_input import Piece, TextFile, TextFormat, find_text, read_documents
from tests.support.preparing import (
    IN_ORDER,
    SMALL,
    Preparer,
    content_of,
    documents_of,
    held_documents,
    parquet,
    texts,
    write_json_lines,
)

DOCUMENTS = texts(40)


@pytest.fixture
def preparer(tmp_path: Path) -> Preparer:
    return Preparer(tmp_path)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def json_lines(documents: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents).encode()


FIRST, REST = json_lines(DOCUMENTS[:9]), json_lines(DOCUMENTS[9:])
CONTENTS = {
    "a.parquet": parquet(DOCUMENTS),
    "a.jsonl": FIRST + REST,
    "a.ndjson": (FIRST + REST).replace(b"\n", b"\r\n\n"),
    "two members.jsonl.gz": gzip.compress(FIRST) + gzip.compress(REST),
    "two frames.jsonl.zst": zstd(FIRST) + zstd(REST),
}


PACKERS: dict[str, Callable[[bytes], bytes]] = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zstd}


def joined(pieces: Iterable[Piece]) -> list[str]:
    """Return the documents that the pieces form."""
    documents = [""]
    for piece in pieces:
        documents[-1] += piece.text
        if piece.ends:
            documents.append("")
    assert documents.pop() == ""
    return documents


def read(path: Path, form: TextFormat | None = None) -> list[str]:
    """The documents of one file."""
    return joined(read_documents(TextFile(0, path.name, path, path.stat().st_size, ""), form or TextFormat()))


def found(*patterns: object) -> list[str]:
    """Return the documents of all files named by folders, files and globs."""
    return joined(find_text([str(pattern) for pattern in patterns]).read(TextFormat()))


@pytest.mark.parametrize("name", CONTENTS)
def test_the_documents_come_out_as_they_went_in(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name])
    assert read(tmp_path / name) == DOCUMENTS


def test_a_folder_of_all_kinds(preparer: Preparer) -> None:
    """Files at any depth are read in the order of their names; the command names the files that it does not read."""
    folder = preparer.path / "texts"
    (folder / "more").mkdir(parents=True)
    for number, text in enumerate(DOCUMENTS[:10]):
        suffix = list(PACKERS)[number % 3]
        (folder / f"{number}{suffix}").write_bytes(PACKERS[suffix](text.encode()))
    (folder / "more" / "a.parquet").write_bytes(parquet(DOCUMENTS[10:20]))
    write_json_lines(folder / "more" / "b.jsonl", DOCUMENTS[20:])
    (folder / ".hidden.txt").write_text("not this")
    (folder / "data.json").write_text("[]")
    (preparer.path / "elsewhere").mkdir()
    (folder / "link").symlink_to(preparer.path / "elsewhere")
    (folder / ".lock").symlink_to(preparer.path / "nothing")  # as editors make
    done = preparer.result("texts", "out", *SMALL, *IN_ORDER, "--validation-fraction", "0.25")
    assert (
        done.stderr == "not read: data.json, link "
        "(perhaps not text, or a link to a folder or to nothing; to read some, give a glob)\n"
    )
    assert documents_of(preparer.path / "out", "train") == DOCUMENTS[:30]
    assert documents_of(preparer.path / "out", "validation") == DOCUMENTS[30:]


def test_a_file_that_another_input_names_is_not_called_unread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, same = tmp_path / "folder", tmp_path / "same"
    folder.mkdir()
    same.symlink_to(folder)
    for name in ("a.txt", "b.md", "c.csv"):
        (folder / name).write_text("Dear reader")
    found = find_text([str(folder), str(same), str(folder / "*.md")])
    assert [Path(file.name).name for file in found.files] == ["a.txt", "b.md"]
    assert capsys.readouterr().err.startswith("not read: c.csv (")


def test_a_folder_is_described_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("Dear reader")
    monkeypatch.chdir(tmp_path / "letters")
    assert [find_text([each]).origin["input"] for each in (".", "../letters", "*.txt")] == [
        "letters",
        "letters",
        "*.txt",
    ]


def test_a_separator_cuts_text_files_into_documents(preparer: Preparer) -> None:
    (preparer.path / "all.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    options = ["--document-separator", r"\n<|endoftext|>\n", *IN_ORDER, "--validation-fraction", "0.25"]
    folder = preparer.prepare("all.txt", "out", *options)
    assert held_documents(folder) == DOCUMENTS


def test_the_separator_that_was_given_is_not_proposed(preparer: Preparer) -> None:
    for number in range(3):
        (preparer.path / f"{number}.txt").write_text(DOCUMENTS[number])
    out = preparer.run("[012].txt", "out", *SMALL, "--document-separator", "@@", "--validation-fraction", "0.3")
    assert "the loss depends on it alone\n" in out


def test_a_glob_takes_any_file_as_text(preparer: Preparer) -> None:
    """The paths that a shell expands the glob to are read as text, too."""
    source = preparer.path / "src"
    source.mkdir()
    for number, text in enumerate(DOCUMENTS):
        (source / f"{number:02}.py").write_text(text, newline="")
    (source / "notes.txt").write_text("a file of a folder that is named besides")
    assert found(source / "*.py") == DOCUMENTS
    one, *others = sorted(source.glob("*.py"))
    assert found(*others, one, source) == [*DOCUMENTS, "a file of a folder that is named besides"]
    (preparer.path / "way").symlink_to(source)
    others = [source / ".." / "src" / one.name, preparer.path / "way" / "*.py"]
    assert found(source / "*.py", *others, os.path.relpath(source / "*.py")) == DOCUMENTS, "each file once"
    with pytest.raises(UserError, match='"nowhere": names no input files'):
        found(one, "nowhere")


@pytest.mark.parametrize("separator", ["\n\n", "aba", "|"])
@pytest.mark.parametrize("block", [1, 2, 7])
def test_a_separator_may_lie_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, block: int
) -> None:
    monkeypatch.setattr("harness.data.preparation.text_input.READ_BYTES", block)
    text = "né\n\n\nab|aba|ab日\n\n|abab\n"
    path = tmp_path / "a.txt"
    path.write_text("\ufeff" + text, newline="")
    assert read(path, TextFormat(separator=separator)) == text.split(separator)
    assert read(path) == [text]
    path.write_text(f"one{separator}{separator}two{separator}", newline="")
    assert read(path, TextFormat(separator=separator)) == ["one", "", "two"], "no document follows the last separator"


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
TABLES = {str(kind): pa.table({"text": pa.array(["a", None, "日"], kind)}) for kind in TEXT_TYPES}
# Parquet counts each leaf of a structure as a column, which must not shift the text's column.
TABLES["struct"] = pa.table({"meta": [{"a": 1, "b": {"text": 2}}] * 3, "text": ["a", "", "日"]})


@pytest.mark.parametrize("kind", TABLES)
def test_every_text_type_of_parquet(tmp_path: Path, kind: str) -> None:
    pq.write_table(TABLES[kind], tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == ["a", "", "日"]


# What is wrong ---------------------------------------------------------------------------------------------------


TWICE = pa.Table.from_arrays([pa.array(["a"])] * 2, ["text"] * 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"id": [1], "content": ["a"]}, 'no column "text"; found: id, content; give --text-column NAME'),
        ({"id": [1], "txt": ["a"]}, 'no column "text"; found: id, txt; give --text-column txt'),
        ({"text": [1]}, 'column "text" holds int64, not text'),
        ({"text": [["a"]]}, 'column "text" holds list<'),
        (TWICE, 'two columns "text"'),
        (b"", "damaged parquet file after 0 documents"),
        (b"not parquet at all, but long enough to have a footer PAR1", "damaged parquet file after 0 documents"),
    ],
)
def test_a_parquet_file_without_text(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "a.parquet"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        pq.write_table(pa.table(content) if isinstance(content, dict) else content, path)
    with pytest.raises((RunError, UserError), match=f"a.parquet: {message}"):
        read(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_named_with_how_far_it_got(tmp_path: Path, name: str, damage: str) -> None:
    many = texts(4000)
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": many}), tmp_path / name, row_group_size=500, write_page_checksum=True)
    else:
        (tmp_path / name).write_bytes((gzip.compress if name.endswith(".gz") else zstd)(json_lines(many)))
    content = (tmp_path / name).read_bytes()
    at = len(content) * 2 // 3
    rest = b"" if damage == "cut" else b"\xff" * 64 + content[at + 64 :]
    (tmp_path / name).write_bytes(content[:at] + rest)
    with pytest.raises((RunError, UserError), match=rf"{name}: (damaged|line|not valid)"):
        read(tmp_path / name)


RAW = b"caf\xe9 ol\xc3\xa9"
INVALID = pa.table({"text": pa.array([RAW]).view(pa.string())})


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.txt", RAW, "not valid UTF-8 at byte 3; convert the file"),
        ("a.jsonl", b'{"text": "' + RAW + b'"}\n', "line 1: not valid UTF-8 at byte 13 of the line; convert the file"),
        ("a.parquet", INVALID, "not valid UTF-8 after 0 documents; convert the file"),
        ("b.jsonl", b'{"text": "caf\\ud83d ol\xc3\xa9"}\n', "line 1: holds half of a surrogate pair"),
    ],
)
def test_invalid_text_is_an_error_or_replaced(tmp_path: Path, name: str, content: Any, place: str) -> None:
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(RunError, match=rf"{name}: {place}"):
        read(tmp_path / name)
    assert read(tmp_path / name, TextFormat(errors="replace")) == ["caf\ufffd olé"]


@pytest.mark.parametrize("block", [1, 2, 64])
def test_the_place_of_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """The error names the first byte that is not valid, whatever the size of the blocks that are read. It also does so
    if the file ends in the middle of a character."""
    monkeypatch.setattr("harness.data.preparation.text_input.READ_BYTES", block)
    for content, place in ((b"\xc3\xa9 ol\xe9!", 5), ("日本".encode()[:-1], 3)):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(RunError, match=rf"a.txt: not valid UTF-8 at byte {place}; "):
            read(tmp_path / "a.txt")


def test_what_is_not_utf8_can_be_replaced_later(preparer: Preparer) -> None:
    """A command that failed at text that is not UTF-8 can be continued with --replace-invalid. The dataset is the same
    as with this option from the beginning. Work done with the option does not continue without it."""
    write_json_lines(preparer.path / "texts" / "0.jsonl", texts(1000))  # enough for unfinished work to be kept
    tokenizer = preparer.prepare(preparer.path / "texts" / "0.jsonl", "for-its-tokenizer") / "tokenizer.json"
    (preparer.path / "texts" / "1.txt").write_bytes(b"\xe9t\xe9")
    arguments = ["texts", "out", "--tokenizer", tokenizer]
    line = preparer.run(*arguments, "--restart", status=1)
    assert "1.txt: not valid UTF-8 at byte 0" in line
    assert "run the same command again (without --restart" in line
    (preparer.path / "texts" / "2.jsonl").write_text("broken\n")
    assert "2.jsonl: line 1: not JSON" in preparer.run(*arguments, "--replace-invalid", status=1)
    assert "other options (replace_invalid: any, not False)" in preparer.run(*arguments, status=2)
    (preparer.path / "texts" / "2.jsonl").unlink()
    preparer.run(*arguments, "--replace-invalid")
    preparer.run("texts", "straight", "--tokenizer", tokenizer, "--replace-invalid")
    assert content_of(preparer.path / "out") == content_of(preparer.path / "straight")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *[(line, "line 2: not") for line in ("[1]", "5", "{", '"text"', "{}" * 2, "[" * 100_000)],
        ('{"text": a}', r"line 2: not JSON \(Expecting value: column 10\); correct"),
        ('{"txt": "a"}', 'line 2: no column "text"; found: txt; give --text-column txt, or correct the line'),
        *[(f'{{"text": {value}}}', f'line 2: key "text" holds {value}, not text') for value in ("5", "0", "false")],
    ],
)
def test_a_line_that_is_no_document(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises((RunError, UserError), match=message):
        read(path)
    path.write_text(f"[\n{line}\n]")
    with pytest.raises(RunError, match="this is a JSON array; write one object a line"):
        read(path)


def test_a_byte_order_mark_alone_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + b"\n")
    assert not read(tmp_path / "a.jsonl")


# Pieces and batches ----------------------------------------------------------------------------------------------


def test_a_long_text_is_cut_before_a_space() -> None:
    text = ("word, " * 300_000) + "x" * (3 * LONGEST_PIECE)
    [*parts] = [piece for batch in batches([Piece(text, True, 0, 0)]) for piece in batch.pieces]
    assert "".join(piece.text for piece in parts) == text
    assert max(len(piece.text) for piece in parts) <= LONGEST_PIECE
    assert [piece.ends for piece in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[1].text.startswith(" word")
