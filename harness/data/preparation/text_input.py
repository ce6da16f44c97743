"""Text files and the documents in them, read in bounded memory.

A document may be longer than memory is large: it comes in pieces.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from harness.common.errors import RunError, UserError
from harness.common.files import version_of
from harness.common.messages import abbreviated, nearest, quoted

COMPRESSIONS = (".gz", ".zst")
TOKEN_SUFFIXES = (".bin", ".npy")
KINDS = {".parquet": "parquet", ".jsonl": "JSON lines", ".ndjson": "JSON lines", ".txt": "text", ".text": "text"}


@dataclass(frozen=True)
class TextFile:
    """One input file: what it is called in messages and in the journal, and where its bytes are."""

    number: int
    name: str
    path: Path
    size: int
    version: str  # another one: another content

    @property
    def kind(self) -> str:
        return kind_of(self.path.name) or "text"


def kind_of(name: str) -> str | None:
    """ "parquet", "JSON lines" or "text" by a file's name; None where it does not tell."""
    suffix = _suffix_of(name)
    return "JSON lines" if suffix == ".json" else KINDS.get(suffix)


def is_surely_text(name: str) -> bool:
    """True if a file is read without being named: a .json file may be JSON lines, or anything else."""
    return _suffix_of(name) in KINDS


def _suffix_of(name: str) -> str:
    """The last one but for a compression's, in small letters; "" if there is none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def find_text_files(patterns: Sequence[str]) -> tuple[list[TextFile], list[str]]:
    """The files that folders, files and globs stand for, in the order of their names; and the folders' other files.

    A folder is searched to its depth for files whose names tell what they are; files that are given, or that a glob
    names, are text unless their names tell otherwise. Raises UserError if one of the patterns stands for none.
    """
    found: dict[str, Path] = {}
    others = []
    for pattern in patterns:
        paths, ignored = _find(pattern)
        found |= paths if len(patterns) == 1 else {path.as_posix(): path for path in paths.values()}
        others += ignored
    return [_text_file(number, name, found[name]) for number, name in enumerate(sorted(found))], others


def _find(pattern: str) -> tuple[dict[str, Path], list[str]]:
    """The files by their names, which are relative to the folder if it is one."""
    place = Path(pattern)
    if place.is_dir():
        found = [path for path in place.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(place))]
        wanted = [path for path in found if is_surely_text(path.name)]
        found += [
            path for path in place.rglob("*") if path.is_symlink() and not path.is_file()
        ]  # they are not followed
        others = sorted(path.relative_to(place).as_posix() for path in set(found) - set(wanted))
        named = {path.relative_to(place).as_posix(): path for path in wanted}
    else:
        wanted = [place] if place.is_file() else [Path(each) for each in glob.glob(pattern, recursive=True)]
        named, others = {path.as_posix(): path for path in wanted if path.is_file()}, []
    if not named:
        kinds = "*.parquet, *.jsonl, *.txt, also with .gz or .zst"
        seen = f"; what there is: {abbreviated(others)}" if others else ""
        if any(Path(name).suffix.lower() in TOKEN_SUFFIXES for name in others):
            seen += "; files of tokens go in with --from-bin"
        raise UserError(f"{quoted(pattern)}: no input files here (a folder with {kinds}, or a glob in quotes){seen}")
    return named, others


def _text_file(number: int, name: str, path: Path) -> TextFile:
    status = path.stat()
    return TextFile(number, name, path, status.st_size, version_of(status))


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


READ_BYTES = 2**20
MOST_ROWS = 64  # of a parquet file at a time
NOT_TEXT = (
    "convert it to UTF-8 (iconv), leave it out, or read it as U+FFFD with --replace-invalid (tokens: --from-bin); the "
    "same command goes on from there"
)


class Piece(NamedTuple):
    """A document, or a part of one, and whether the document ends with it."""

    text: str
    ends: bool
    file: int  # its number
    position: int  # bytes of the file that have been read by then


@dataclass(frozen=True)
class TextFormat:
    """Format of the documents in the files."""

    text_column: str = "text"  # the column of a parquet file, the key of a JSON line
    separator: str | None = None  # what stands between the documents of a text file; None: each file is one document
    errors: Literal["strict", "replace"] = "strict"  # what is not UTF-8 is an error, or becomes U+FFFD


def read_documents(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    """The documents of a file, in order. Raises UserError for a column that is not there, RunError for a file that is
    damaged or not UTF-8, with how far it could be read."""
    read: dict[str, Callable[[TextFile, TextFormat], Iterator[Piece]]] = {
        "parquet": _read_parquet,
        "JSON lines": _read_json_lines,
        "text": _read_text,
    }
    documents = 0
    try:
        for piece in read[file.kind](file, form):
            yield piece
            documents += piece.ends
    except UnicodeDecodeError:
        raise RunError(f"{file.path}: not valid UTF-8 after {documents:,} documents; {NOT_TEXT}") from None
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, gzip.BadGzipFile):
            raise RunError(f"{file.path}: {error.strerror}") from None
        reason = " ".join(str(error).split())[:160]
        kind = file.path.suffix.lstrip(".")
        raise RunError(
            f"{file.path}: damaged {kind} file after {documents:,} documents ({reason}); mend or remove it, and the "
            "same command goes on from there"
        ) from None


# Parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without pre_buffer and with a buffer of its own, a row group is read page by page, not as a whole.
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BYTES) as table:
            _check_column(file, form, table.schema_arrow)
            rows, total = 0, max(1, table.metadata.num_rows)
            # Parquet numbers leaves: a column of structures before the text's counts as several.
            paths = [table.schema.column(at).path for at in range(len(table.schema))]
            for group, at_once in _row_groups(table, paths.index(form.text_column)):
                options = {"row_groups": [group], "columns": [form.text_column], "use_threads": False}
                for batch in table.iter_batches(at_once, **options):
                    for text in _texts(batch.column(0), form):
                        rows += 1
                        yield Piece(text, True, file.number, file.size * rows // total)
    except pyarrow.ArrowException as error:
        raise EOFError(str(error)) from None  # damaged, in one of many ways


def _row_groups(table: Any, column: int) -> Iterator[tuple[int, int]]:
    """Row groups, and as many rows to read at a time as are about READ_BYTES: of books fewer than of comments. Long
    documents among many short ones, or a dictionary of few long ones, do not show in a group's size: hence a limit."""
    for at in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(at)
        if group.num_rows:
            mean = group.column(column).total_uncompressed_size // group.num_rows
            yield at, max(1, min(MOST_ROWS, READ_BYTES // max(1, mean)))


def _texts(column: Any, form: TextFormat) -> list[str]:
    """The texts of a column; a null is an empty text."""
    try:
        return [text or "" for text in column.to_pylist()]
    except UnicodeDecodeError:
        return [(text or b"").decode(errors=form.errors) for text in column.cast("large_binary").to_pylist()]


def _check_column(file: TextFile, form: TextFormat, schema: Any) -> None:
    import pyarrow.types as types

    if schema.names.count(form.text_column) > 1:
        raise UserError(f"{file.path}: two columns {quoted(form.text_column)}; name another one, or rename one of them")
    if form.text_column not in schema.names:
        raise missing_column(f"{file.path}", form.text_column, schema.names)
    kind = schema.field(form.text_column).type
    if types.is_dictionary(kind):
        kind = kind.value_type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f"{file.path}: column {quoted(form.text_column)} holds {kind}, not text; name another one")


def missing_column(where: str, column: str, names: list[str]) -> UserError:
    """The error for a text column that is not there, with those that are."""
    likely = nearest(column, names)
    hint = f"--text-column {likely or 'NAME'}"
    return UserError(f"{where}: no column {quoted(column)}; there is {abbreviated(names, 20) or 'none'}: give {hint}")


# JSON lines --------------------------------------------------------------------------------------------------------


def _read_json_lines(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    with _opened(file.path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file.path}: line {number:,}"
                yield Piece(_text_of_line(where, form, line), True, file.number, raw.tell())


def _text_of_line(where: str, form: TextFormat, line: bytes) -> str:
    try:
        return _plain_text_of(line, form)
    except (ValueError, LookupError, TypeError):
        pass  # something is unusual, and the way below tells what
    try:
        value = json.loads(line.decode("utf-8-sig", errors=form.errors))
    except UnicodeDecodeError as error:
        raise RunError(f"{where}: not valid UTF-8 at byte {error.start:,} of the line; {NOT_TEXT}") from None
    except (ValueError, RecursionError) as error:
        is_array = where.endswith(" line 1") and line.lstrip().startswith(b"[")
        hint = "this is a JSON array; write one object a line" if is_array else "mend or remove it"
        raise RunError(f"{where}: not JSON ({str(error)[:80]}); {hint}") from None
    if not isinstance(value, dict):
        raise RunError(f"{where}: not an object but {quoted(value)[:60]}; write one object a line")
    if form.text_column not in value:
        raise missing_column(where, form.text_column, list(value))
    text = value[form.text_column]
    if text is not None and not isinstance(text, str):
        raise RunError(
            f"{where}: key {quoted(form.text_column)} holds {quoted(text)[:60]}, not text; mend or remove it"
        )
    return _well_formed(text or "", where, form)


def _plain_text_of(line: bytes, form: TextFormat) -> str:
    """The text of a line without any fault; else one of the errors that wrong values make. Faster than json, and in a
    third of the memory: a line of 100 MB with one emoji in it would twice become a string of four bytes a character."""
    import pydantic_core

    text = pydantic_core.from_json(line, cache_strings="none")[form.text_column]
    if not isinstance(text, str):
        raise TypeError
    return text


def _well_formed(text: str, where: str, form: TextFormat) -> str:
    """JSON can name half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if form.errors == "strict":
            raise RunError(
                f"{where}: holds half of a surrogate pair, which is no text; --replace-invalid reads it as U+FFFD"
            ) from None
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# Plain text --------------------------------------------------------------------------------------------------------


def _read_text(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    """Blocks of the file; a document ends at each separator and at the file's end."""
    separator, rest, is_open, at_start = form.separator, "", False, True
    with _opened(file.path) as (stream, raw):
        for block in _decoded(stream, file, form):
            rest += block
            if at_start and rest:
                rest, at_start = rest.removeprefix("\ufeff"), False  # a byte order mark is not text
            if separator:
                *documents, rest = rest.split(separator)
                for text in documents:
                    yield Piece(text, True, file.number, raw.tell())
                    is_open = False
            kept = len(separator) - 1 if separator else 0  # it may be the beginning of a separator
            if len(rest) > kept:
                yield Piece(rest[: len(rest) - kept], False, file.number, raw.tell())
                rest, is_open = rest[len(rest) - kept :], True
        if rest or is_open or not separator:
            yield Piece(rest, True, file.number, file.size)


def _decoded(stream: BinaryIO, file: TextFile, form: TextFormat) -> Iterator[str]:
    """Blocks of the stream's text. Raises RunError, with the place, for what is not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")(form.errors)
    at, is_last = 0, False
    while not is_last:
        block = stream.read(READ_BYTES)
        is_last = not block
        pending = len(decoder.getstate()[0])  # bytes of a character that the last block cut
        try:
            yield decoder.decode(block, is_last)
        except UnicodeDecodeError as error:
            place = at - pending + error.start
            raise RunError(f"{file.path}: not valid UTF-8 at byte {place:,}; {NOT_TEXT}") from None
        at += len(block)


# Bytes -------------------------------------------------------------------------------------------------------------


class _opened:  # noqa: N801, used like a function
    """The uncompressed bytes of a file, and the file itself, whose position tells how much has been read."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self._stream = _decompressed(self._raw, path.suffix.lower())

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        return self._stream, self._raw

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def _decompressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd"))
    return raw
