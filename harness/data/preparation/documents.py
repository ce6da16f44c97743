"""The documents in text files, read in bounded memory.

A document may be longer than memory is large: it comes in pieces.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from harness.common.errors import RunError, UserError
from harness.common.messages import abbreviated, nearest, quoted
from harness.data.preparation.binary_content import HEAD_BYTES, identify
from harness.data.preparation.invalid_text import (
    CONVERT,
    REPLACEMENT,
    InvalidText,
    Utf8Decoder,
    is_mostly_valid,
    replacements,
)
from harness.data.preparation.text_files import COMPRESSIONS, TextFile

READ_BYTES = 2**20
MOST_ROWS = 64  # of a parquet file at a time


class Piece(NamedTuple):
    """A document, or a part of one, and whether the document ends with it."""

    text: str
    ends: bool
    file: int  # its number
    position: int  # bytes of the file that have been read by then


@dataclass(frozen=True)
class TextFormat:
    """How documents lie in the files."""

    text_column: str = "text"  # the column of a parquet file, the key of a JSON line
    separator: str | None = None  # what stands between the documents of a text file; None: each file is one document
    tolerated: float = 0.0  # share of a file's bytes that U+FFFD may replace; 0: what is not UTF-8 is an error


def read_documents(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    """The documents of a file, in order. Raises UserError for what is no text, for too much that is not UTF-8 and for a
    column that is not there, RunError for a file that is damaged, with how far it could be read."""
    read: dict[str, Callable[[TextFile, TextFormat, InvalidText], Iterator[Piece]]] = {
        "parquet": _read_parquet,
        "JSON lines": _read_json_lines,
        "text": _read_text,
    }
    documents = 0
    try:
        _check_content(file)
        is_plain = file.kind != "parquet" and file.path.suffix.lower() not in COMPRESSIONS
        invalid = InvalidText(file.path, form.tolerated, file.size if is_plain else None)
        for piece in read[file.kind](file, form, invalid):
            yield piece
            documents += piece.ends
        invalid.finish()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno and not isinstance(error, gzip.BadGzipFile):
            raise RunError(f"{file.path}: {error.strerror}") from None
        reason = " ".join(str(error).split())[:160]
        raise RunError(
            f"{file.path}: {_what_failed(file, error)} after {documents:,} documents ({reason}); {_remedy(file, error)}"
        ) from None


def _check_content(file: TextFile) -> None:
    """Raises UserError for what is no text by its first bytes, whatever its name is."""
    with file.path.open("rb") as raw:
        head = raw.read(HEAD_BYTES)
    expected = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}.get(file.path.suffix.lower())
    if expected and not head.startswith(expected):
        found = identify(head, file.size)
    elif file.kind == "parquet":
        found = None
    else:
        with _opened(file.path) as (stream, _):
            found = identify(stream.read(HEAD_BYTES), file.size)
    if found:
        wanted = "UTF-8 text" if found.is_text else "text"
        raise UserError(f"{file.path}: holds {found.what}, not {wanted}; {found.remedy}")


def _what_failed(file: TextFile, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "not valid UTF-8"
    return f"damaged {file.path.suffix.lstrip('.')} file"


def _remedy(file: TextFile, error: Exception) -> str:
    if not isinstance(error, UnicodeDecodeError):
        return "mend or remove it, and the same command goes on from there"
    if file.kind == "text" and not is_mostly_valid(error.object):
        return f"{CONVERT}, and the same command goes on from there"
    return "--replace-invalid reads it as U+FFFD, and goes on from there"


# Parquet -----------------------------------------------------------------------------------------------------------


def _read_parquet(file: TextFile, form: TextFormat, invalid: InvalidText) -> Iterator[Piece]:
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
                    for text in _texts(batch.column(0), invalid):
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


def _texts(column: Any, invalid: InvalidText) -> list[str]:
    """The texts of a column; a null is an empty text."""
    try:
        texts = [text or "" for text in column.to_pylist()]
        if invalid.tolerated:
            invalid.count(0, sum(len(text if text.isascii() else text.encode()) for text in texts))
    except UnicodeDecodeError:
        if not invalid.tolerated:
            raise
        raw = [text or b"" for text in column.cast("large_binary").to_pylist()]
        texts = [text.decode(errors="replace") for text in raw]
        invalid.count(sum(map(replacements, raw)), sum(map(len, raw)))
    return texts


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


def _read_json_lines(file: TextFile, form: TextFormat, invalid: InvalidText) -> Iterator[Piece]:
    with _opened(file.path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if line.strip():
                where = f"{file.path}: line {number:,}"
                yield Piece(_text_of_line(where, form, line, invalid), True, file.number, raw.tell())


def _text_of_line(where: str, form: TextFormat, line: bytes, invalid: InvalidText) -> str:
    try:
        text = _plain_text_of(line, form)
        invalid.count(0, len(line))
        return text
    except (ValueError, LookupError, TypeError):
        pass  # something is unusual, and the way below tells what
    try:
        value = json.loads(line.decode("utf-8-sig", errors=invalid.errors))
    except UnicodeDecodeError:
        raise
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
    invalid.count(replacements(line) if invalid.tolerated else 0, len(line))
    return _well_formed(text or "", where, invalid)


def _plain_text_of(line: bytes, form: TextFormat) -> str:
    """The text of a line without any fault; else one of the errors that wrong values make. Faster than json, and in a
    third of the memory: a line of 100 MB with one emoji in it would twice become a string of four bytes a character."""
    import pydantic_core

    text = pydantic_core.from_json(line, cache_strings="none")[form.text_column]
    if not isinstance(text, str):
        raise TypeError
    return text


def _well_formed(text: str, where: str, invalid: InvalidText) -> str:
    """JSON can name half of a surrogate pair, which has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if not invalid.tolerated:
            raise RunError(
                f"{where}: holds half of a surrogate pair, which is no text; --replace-invalid reads it as U+FFFD"
            ) from None
        mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        invalid.count(mended.count(REPLACEMENT) - text.count(REPLACEMENT), 0)
        return mended
    return text


# Plain text --------------------------------------------------------------------------------------------------------


def _read_text(file: TextFile, form: TextFormat, invalid: InvalidText) -> Iterator[Piece]:
    """Blocks of the file; a document ends at each separator and at the file's end."""
    decoder = Utf8Decoder(invalid)
    separator, rest, is_open, at_start = form.separator, "", False, True
    with _opened(file.path) as (stream, raw):
        while block := stream.read(READ_BYTES):
            rest += decoder.decode(block)
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
        rest += decoder.decode(b"", final=True)
        if rest or is_open or not separator:
            yield Piece(rest, True, file.number, file.size)


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
