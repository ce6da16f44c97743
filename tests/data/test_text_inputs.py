"""Every way text can lie on disk, read through the real command, and every way it can be wrong."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.common.errors import RunError, UserError
from harness.data.preparation.encode import LONGEST_PIECE, batches
from harness.data.preparation.text_input import Piece, TextFile, TextFormat, read_documents
from tests.support.preparing import IN_ORDER, SMALL, Preparer, content_of, documents_of, texts, write_json_lines

DOCUMENTS = texts(40)


@pytest.fixture
def preparer(tmp_path: Path) -> Preparer:
    return Preparer(tmp_path)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def write_parquet(path: Path, documents: Sequence[str | None], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": list(range(len(documents))), column: documents}), path, row_group_size=7)
    return path


def json_lines(documents: Sequence[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in documents).encode()


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.parquet": lambda path: write_parquet(path, DOCUMENTS),
    "a.jsonl": lambda path: path.write_bytes(json_lines(DOCUMENTS)),
    "a.ndjson": lambda path: path.write_bytes(json_lines(DOCUMENTS).replace(b"\n", b"\r\n\n")),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(json_lines(DOCUMENTS))),
    "two members.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(json_lines(DOCUMENTS[:9])) + gzip.compress(json_lines(DOCUMENTS[9:]))
    ),
    "a.jsonl.zst": lambda path: path.write_bytes(zstd(json_lines(DOCUMENTS))),
    "two frames.jsonl.zst": lambda path: path.write_bytes(
        zstd(json_lines(DOCUMENTS[:9])) + zstd(json_lines(DOCUMENTS[9:]))
    ),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_documents_come_out_as_they_went_in(preparer: Preparer, name: str) -> None:
    (preparer.path / "texts").mkdir()
    WRITERS[name](preparer.path / "texts" / name)
    folder = preparer.prepare("texts", "out", *IN_ORDER, "--validation-fraction", "0.25")
    assert documents_of(folder, "train") + documents_of(folder, "validation") == DOCUMENTS
    assert len(documents_of(folder, "validation")) == 10


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
def test_each_text_file_is_a_document(preparer: Preparer, suffix: str) -> None:
    packers: dict[str, Callable[[bytes], bytes]] = {".txt": bytes, ".txt.gz": gzip.compress, ".txt.zst": zstd}
    pack = packers[suffix]
    for number, text in enumerate(DOCUMENTS):
        path = preparer.path / "texts" / f"{number // 10}" / f"{number % 10}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pack(text.encode()))
    (preparer.path / "texts" / ".hidden.txt").write_text("not this")
    folder = preparer.prepare("texts", "out", *IN_ORDER, "--validation-fraction", "0.25")
    assert documents_of(folder, "train") + documents_of(folder, "validation") == DOCUMENTS


def test_a_separator_cuts_text_files_into_documents(preparer: Preparer) -> None:
    (preparer.path / "all.txt").write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    options = ["--document-separator", r"\n<|endoftext|>\n", *IN_ORDER, "--validation-fraction", "0.25"]
    folder = preparer.prepare("all.txt", "out", *options)
    assert documents_of(folder, "train") + documents_of(folder, "validation") == DOCUMENTS


def test_a_glob_takes_any_file_as_text(preparer: Preparer) -> None:
    for number, text in enumerate(DOCUMENTS):
        path = preparer.path / "src" / f"{number:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (preparer.path / "src" / "notes.md").write_text("no")
    folder = preparer.prepare("src/*.py", "out", *IN_ORDER, "--validation-fraction", "0.25")
    assert documents_of(folder, "train") + documents_of(folder, "validation") == DOCUMENTS


def test_a_glob_that_the_shell_expands_is_as_good(preparer: Preparer) -> None:
    for number, text in enumerate(DOCUMENTS):
        path = preparer.path / "src" / f"{number:02}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    one, *others = sorted((preparer.path / "src").glob("*.py"))
    (preparer.path / "src" / "notes.txt").write_text("a file of a folder that is named besides")
    target = preparer.path / "datasets" / "me" / "out"
    options = [*SMALL, *IN_ORDER, "--validation-fraction", "0.25"]
    preparer.run(*(path.relative_to(preparer.path) for path in (*others, one)), "src", target, *options)
    made = documents_of(target, "train") + documents_of(target, "validation")
    assert made == [*DOCUMENTS, "a file of a folder that is named besides"]
    assert json.loads((target / "meta.json").read_text())["source"]["files"] == len(DOCUMENTS) + 1
    line = preparer.run("src/00.py", "nowhere", "out", *SMALL, status=2)
    assert '"nowhere": no input files here' in line


def read(path: Path, form: TextFormat | None = None) -> list[str]:
    """The documents of one file, joined from their pieces."""
    documents = [""]
    for piece in read_documents(TextFile(0, path.name, path, path.stat().st_size, ""), form or TextFormat()):
        documents[-1] += piece.text
        if piece.ends:
            documents.append("")
    assert documents.pop() == ""
    return documents


@pytest.mark.parametrize("separator", ["\n\n", "aba", "|"])
@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_a_separator_may_lie_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str, block: int
) -> None:
    monkeypatch.setattr("harness.data.preparation.text_input.READ_BYTES", block)
    text = "né\n\n\nab|aba|ab日\n\n|abab\n"
    path = tmp_path / "a.txt"
    path.write_text("\ufeff" + text, newline="")
    assert read(path, TextFormat(separator=separator)) == text.split(separator)
    assert read(path) == [text]


def test_a_separator_at_the_end_makes_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one||two|")
    assert read(path, TextFormat(separator="|")) == ["one", "", "two"]


TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_every_text_type_of_parquet(tmp_path: Path, kind: pa.DataType) -> None:
    column = pa.array(["a", None, "日"], kind)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    assert read(path) == ["a", "", "日"]


def test_files_of_a_folder_that_are_not_read_are_named(preparer: Preparer) -> None:
    write_json_lines(preparer.path / "texts" / "a.jsonl", DOCUMENTS)
    (preparer.path / "texts" / "data.json").write_text("[]")
    (preparer.path / "elsewhere").mkdir()
    (preparer.path / "texts" / "more").symlink_to(preparer.path / "elsewhere")
    process = preparer.start("texts", "out", *SMALL, "--validation-fraction", "0.25")
    _, error = process.communicate()
    assert error == "not read, as no text by their names, or links to folders: data.json, more\n"


def test_a_column_of_structures_before_the_text(tmp_path: Path) -> None:
    """Parquet counts its leaves as columns."""
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"meta": [{"a": 1, "b": {"text": 2}}] * 3, "text": ["x", "", "日"]}), path, row_group_size=2
    )
    assert read(path) == ["x", "", "日"]


# What is wrong ---------------------------------------------------------------------------------------------------


def test_a_missing_column_lists_those_there_are(preparer: Preparer) -> None:
    write_parquet(preparer.path / "a.parquet", DOCUMENTS, column="content")
    line = preparer.run("a.parquet", "out", *SMALL, status=2)
    assert "a.parquet: no column" in line
    assert "there is id, content" in line
    write_json_lines(preparer.path / "a.jsonl", DOCUMENTS, key="txt")
    line = preparer.run("a.jsonl", "out", *SMALL, status=2)
    assert "a.jsonl: line 1" in line
    assert "--text-column txt" in line


def test_two_columns_of_one_name(preparer: Preparer) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    pq.write_table(table, preparer.path / "a.parquet")
    assert 'two columns "text"' in preparer.run("a.parquet", "out", *SMALL, status=2)


def test_a_column_of_numbers_is_named(preparer: Preparer) -> None:
    write_parquet(preparer.path / "a.parquet", DOCUMENTS)
    assert 'column "id" holds int64' in preparer.run("a.parquet", "out", "--text-column", "id", *SMALL, status=2)
    (preparer.path / "a.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    line = preparer.run("a.jsonl", "out", *SMALL, status=1)
    assert 'line 2: key "text" holds 5' in line


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_named_with_how_far_it_got(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    many = texts(4000)
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd}
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"text": many}), path, row_group_size=500, write_page_checksum=True)
    else:
        path.write_bytes(pack[path.suffix](json_lines(many)))
    content = bytearray(path.read_bytes())
    if damage == "cut":
        del content[len(content) * 2 // 3 :]
    else:
        content[len(content) * 2 // 3 :][:64] = b"\xff" * 64
        content = content[: len(content) * 2 // 3] + b"\xff" * 64 + content[len(content) * 2 // 3 + 64 :]
    path.write_bytes(content)
    with pytest.raises((RunError, UserError), match=rf"{name}: (damaged|line|not valid)"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"not parquet at all, but long enough to have a footer PAR1"])
def test_a_file_that_is_no_parquet(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"a.parquet: damaged parquet file after 0 documents"):
        read(path)


def test_invalid_utf8_is_an_error_or_replaced(tmp_path: Path) -> None:
    raw = b"caf\xe9 ol\xc3\xa9"
    for name, content in {
        "a.txt": raw,
        "a.jsonl": b'{"text": "' + raw + b'"}\n',
    }.items():
        (tmp_path / name).write_bytes(content)
    binary = pa.array([raw]).view(pa.string())
    pq.write_table(pa.table({"text": binary}), tmp_path / "a.parquet")
    places = {"a.txt": "at byte 3", "a.jsonl": "at byte 13 of the line", "a.parquet": "after 0 documents"}
    for name, place in places.items():
        with pytest.raises(RunError, match=rf"{name}: (line 1: )?not valid UTF-8 {place}; convert it"):
            read(tmp_path / name)
        form = TextFormat(errors="replace")
        assert read(tmp_path / name, form) == [raw.decode(errors="replace")]


@pytest.mark.parametrize("block", [1, 2, 3, 64])
def test_the_place_of_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Wherever the blocks that it is read in end, and where the file ends within a character."""
    monkeypatch.setattr("harness.data.preparation.text_input.READ_BYTES", block)
    for content, place in ((b"\xc3\xa9 ol\xe9!", 5), ("日本".encode()[:-1], 3)):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(RunError, match=rf"a.txt: not valid UTF-8 at byte {place}; "):
            read(tmp_path / "a.txt")


def test_what_is_not_utf8_can_be_replaced_later(preparer: Preparer) -> None:
    """The bytes are those of a preparation that had the option from the beginning; without it no work continues."""
    write_json_lines(preparer.path / "texts" / "0.jsonl", texts(1000))  # enough to be kept
    tokenizer = preparer.prepare(preparer.path / "texts" / "0.jsonl", "for-its-tokenizer") / "tokenizer.json"
    (preparer.path / "texts" / "1.txt").write_bytes(b"\xe9t\xe9")
    arguments = ["texts", "out", "--tokenizer", tokenizer, "--workers", 1]
    assert "1.txt: not valid UTF-8 at byte 0" in preparer.run(*arguments, status=1)
    (preparer.path / "texts" / "2.jsonl").write_text("broken\n")
    assert "2.jsonl: line 1: not JSON" in preparer.run(*arguments, "--replace-invalid", status=1)
    assert "other options (replace_invalid: any, not False)" in preparer.run(*arguments, status=2)
    (preparer.path / "texts" / "2.jsonl").unlink()
    preparer.run(*arguments, "--replace-invalid")
    preparer.run("texts", "straight", "--tokenizer", tokenizer, "--replace-invalid")
    assert content_of(preparer.path / "out") == content_of(preparer.path / "straight")


def test_half_a_surrogate_pair_in_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a \\ud83d b"}\n')
    with pytest.raises(RunError, match=r"line 1: holds half of a surrogate pair"):
        read(path)
    assert read(path, TextFormat(errors="replace")) == ["a \ufffd b"]


@pytest.mark.parametrize("line", ["[1]", "5", "{", '"text"', "{}" * 2, "[" * 100_000])
def test_a_line_that_is_no_object(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises((RunError, UserError), match=r"line 2: not"):
        read(path)


def test_a_json_array_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n {"text": "a"}\n]')
    with pytest.raises(RunError, match="this is a JSON array; write one object a line"):
        read(path)


# Pieces and batches ----------------------------------------------------------------------------------------------


def test_batches_keep_the_text_and_its_order() -> None:
    random_texts = [*texts(300, longest=4000), "", *texts(3)]
    pieces = [Piece(text, True, 0, 0) for text in random_texts]
    made = list(batches(pieces))
    assert len(made) > 1
    assert [piece.text for batch in made for piece in batch.pieces] == [text for text in random_texts if text]
    assert sum(batch.empty for batch in made) == 1
    assert made[-1].documents == len(random_texts)


def test_a_long_text_is_cut_before_a_space() -> None:
    text = ("word, " * 300_000) + "x" * (3 * LONGEST_PIECE)
    [*parts] = [piece for batch in batches([Piece(text, True, 0, 0)]) for piece in batch.pieces]
    assert "".join(piece.text for piece in parts) == text
    assert max(len(piece.text) for piece in parts) <= LONGEST_PIECE
    assert [piece.ends for piece in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[1].text.startswith(" word")
