"""Text files on this machine, and their documents. A document of a plain text file is read in pieces, and may be larger
than memory. A document of a parquet or JSON lines file is read as a whole."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

import pydantic_core

from harness.common.errors import EXIT, RunError, UserError, printable
from harness.common.files import version_of
from harness.common.messages import abbreviated, is_unicode, nearest, quoted, tell

COMPRESSIONS = (".gz", ".zst")
TOKEN_SUFFIXES = (".bin", ".npy")
SMALL_BYTES = 2**26  # a tokenizer is trained on all files if they have at most this many bytes together
SAMPLED_FILES = 16  # otherwise on at most this many
READ_BYTES = 2**20
MOST_ROWS = 64  # largest number of rows to read from a parquet file at a time


@dataclass(frozen=True)
class TextFile:
    """Input file, listed in files.json by its `name`. For a file on the Hub, `path` is the file's name on the Hub until
    it is downloaded."""

    number: int  # place in the list of all input files
    name: str
    path: Path
    size: int  # bytes on the disk, before decompression
    version: str  # changes if the file's contents change


class Piece(NamedTuple):
    """Document, part of a document, or mark of the end of a file (no text, and `ends` False)."""

    text: str
    ends: bool  # True if the document ends with this piece
    file: int  # number of the file
    position: int  # about how many bytes of the file on the disk have been read at the piece's end


@dataclass(frozen=True)
class TextFormat:
    """Format of the documents in the input files."""

    text_column: str = "text"  # name of a parquet file's column, or of a JSON line's key
    separator: str | None = None  # string between the documents of a text file; None: each file is one document
    errors: Literal["strict", "replace"] = "strict"  # invalid UTF-8 is an error, or is read as U+FFFD


def text_suffix(name: str) -> str | None:
    """Return the suffix of a file's name in lower case, or None if READERS has no reader for the suffix. A last suffix
    .gz or .zst is ignored."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in READERS else None


def is_surely_text(name: str) -> bool:
    """Return True if a file's name shows that READERS can read the file. False for .json, whose contents need not be
    lines of JSON."""
    return text_suffix(name) not in {None, ".json"}


# Files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextSource:
    """Text files in a fixed order, on this machine. The subclass `HubText` downloads files."""

    name: str  # as the user typed it, abbreviated if it is many names
    files: list[TextFile]
    origin: Mapping[str, object]  # where the text came from, for meta.json

    def sampled(self) -> list[TextFile]:
        """Return the files to train a tokenizer on: all files if they have at most SMALL_BYTES together, otherwise at
        most SAMPLED_FILES files at equal distances in the list."""
        is_small = sum(file.size for file in self.files) <= SMALL_BYTES
        return self.files if is_small else self.files[:: -(-len(self.files) // SAMPLED_FILES)]

    def read_file(self, file: TextFile, form: TextFormat) -> Iterator[Piece]:
        """Yield the documents of one file, each as one or more pieces."""
        return read_documents(file, form)

    def read(self, form: TextFormat, file: int = 0, documents: int = 0) -> Iterator[Piece]:
        """Yield all documents, each as one or more pieces, from document number `documents` of file number `file` on.
        After each file, yield an empty piece with the next file's number."""
        for each in self.files[file:]:
            pieces = self.read_file(each, form)
            for _ in range(documents if each.number == file else 0):
                while not next(pieces).ends:
                    pass
            yield from pieces
            yield Piece("", False, each.number + 1, 0)


def short_name(inputs: Sequence[str]) -> str:
    """Return the inputs (files, folders and globs) without the folders in front, joined and abbreviated."""
    return abbreviated([Path(os.path.abspath(each)).name for each in inputs])  # "." has no name of its own


def find_text(patterns: Sequence[str]) -> TextSource:
    """Return the input files that `patterns` (folders, files and globs) name, sorted by name, each once.

    - A folder is searched recursively for files whose names show that they are text. Hidden files are left out.
    - A file that is given by name or matches a glob is always included.
    - If the only pattern is a folder, the files' names are relative to it.

    Raises UserError if there is no file to read for a pattern.
    """
    found: dict[str, Path] = {}
    ignored: dict[Path, str] = {}  # by the path without links to folders above it and without ".."
    resolved = cache(Path.resolve)
    for pattern in patterns:
        folder, others = Path(pattern), dict[Path, str]()
        if folder.is_dir():
            paths = []
            for path in sorted(folder.rglob("*")):
                relative = path.relative_to(folder)
                if any(part.startswith(".") for part in relative.parts):
                    continue
                if path.is_file() and is_surely_text(path.name):
                    paths.append(path)
                elif path.is_file() or path.is_symlink():  # rglob does not follow links to folders
                    others[resolved(path.parent) / path.name] = relative.as_posix()
        else:
            paths = matching_files(pattern)
        if not paths:
            kinds = "*.parquet files, or *.jsonl or *.txt files (also with .gz or .zst)"
            seen = f"; found: {abbreviated([*others.values()])}" if others else ""
            if any(Path(name).suffix.lower() in TOKEN_SUFFIXES for name in others.values()):
                seen += "; import files of tokens with --from-bin"
            where = f"{quoted(pattern)}: names no input files"
            raise UserError(f"{where}; give a folder with {kinds}, or a glob in quotes{seen}")
        is_root = len(patterns) == 1 and folder.is_dir()
        found |= {(path.relative_to(folder) if is_root else path).as_posix(): path for path in paths}
        ignored |= others
    once: dict[Path, tuple[str, Path]] = {}  # by such a path, too
    for name, path in sorted(found.items()):
        once.setdefault(resolved(path.parent) / path.name, (name, path))
    if unread := [name for path, name in ignored.items() if path not in once]:
        names = printable(abbreviated(unread))
        tell(f"not read: {names} (perhaps not text, or a link to a folder or to nothing; to read some, give a glob)")
    files = []
    for number, (name, path) in enumerate(once.values()):
        status = path.stat()
        files.append(TextFile(number, name, path, status.st_size, version_of(status)))
    return TextSource(abbreviated(patterns), files, {"input": short_name(patterns), "files": len(files)})


def matching_files(pattern: str) -> list[Path]:
    """Return the file named `pattern` or, if there is none, the files that match `pattern` as a glob."""
    paths = [Path(pattern)] if Path(pattern).is_file() else [Path(each) for each in glob.glob(pattern, recursive=True)]
    return [path for path in paths if path.is_file()]


# Documents ---------------------------------------------------------------------------------------------------------


def read_documents(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    """Yield the documents of a file, each as one or more pieces. A file with an unknown suffix is read as plain text.

    Raises UserError if `form.text_column` does not fit the file. Raises RunError if the file cannot be read, is
    damaged, or has a wrong JSON line or invalid Unicode that `form.errors` forbids.
    """
    documents = 0
    try:
        for piece in READERS[text_suffix(file.path.name) or ".txt"](file, form):
            yield piece
            documents += piece.ends
    except UnicodeDecodeError:
        raise _not_utf8(f"{file.path}: not valid UTF-8 after {documents:,} documents") from None
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno:
            raise RunError(f"{file.path}: {error.strerror}") from None
        reason = " ".join(str(error).split())[:160]
        kind = file.path.suffix.lstrip(".")
        raise RunError(
            f"{file.path}: damaged {kind} file after {documents:,} documents ({reason}); repair or remove it and "
            f"{EXIT.again}"
        ) from None


def _not_utf8(problem: str) -> RunError:
    """Return the error for a file that is not valid UTF-8. `problem` names the file and the place in it."""
    return RunError(
        f"{problem}; convert the file to UTF-8 (iconv) or leave it out, and {EXIT.again}; or add --replace-invalid to "
        "read invalid bytes as U+FFFD, or --from-bin if it is a file of tokens"
    )


def _read_parquet(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        # With pre_buffer off and a buffer_size, pyarrow reads a row group page by page instead of as a whole.
        with pyarrow.parquet.ParquetFile(file.path, pre_buffer=False, buffer_size=READ_BYTES) as table:
            schema, name, facts = table.schema_arrow, form.text_column, table.metadata
            if schema.names.count(name) > 1:
                raise UserError(
                    f"{file.path}: two columns {quoted(name)}; give another --text-column, or rename one of them"
                )
            if name not in schema.names:
                raise _missing_column(f"{file.path}", name, schema.names)
            kind = schema.field(name).type
            kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise UserError(
                    f"{file.path}: column {quoted(name)} holds {kind}, not text; give another --text-column"
                )
            rows, total = 0, max(1, facts.num_rows)
            # Parquet numbers the leaf columns, so a struct column before the text column counts as several columns.
            column = [table.schema.column(at).path for at in range(len(table.schema))].index(name)
            for group in range(facts.num_row_groups):
                # Read about READ_BYTES at a time, which are fewer rows if rows are books than if they are comments.
                # MOST_ROWS limits the number of rows, because the mean size of a group's rows does not show a few long
                # documents among many short ones, or a dictionary with a few long values.
                here = facts.row_group(group)
                mean = here.column(column).total_uncompressed_size // max(1, here.num_rows)
                at_once = max(1, min(MOST_ROWS, READ_BYTES // max(1, mean)))
                for batch in table.iter_batches(at_once, row_groups=[group], columns=[name], use_threads=False):
                    try:
                        texts = batch.column(0).to_pylist()
                    except UnicodeDecodeError:
                        raw = batch.column(0).cast("large_binary").to_pylist()
                        texts = [(text or b"").decode(errors=form.errors) for text in raw]
                    for text in texts:
                        rows += 1
                        yield Piece(text or "", True, file.number, file.size * rows // total)
    except pyarrow.ArrowException as error:
        raise EOFError(str(error)) from None  # pyarrow reports damage in many ways


def _missing_column(where: str, column: str, names: list[str]) -> UserError:
    """Return the error for a missing text column of the file or line `where`. `names` are the existing columns."""
    hint = f"--text-column {nearest(column, names) or 'NAME'}"
    return UserError(f"{where}: no column {quoted(column)}; found: {abbreviated(names, 20) or 'none'}; give {hint}")


def _read_json_lines(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    with _opened(file.path) as (stream, raw):
        for number, line in enumerate(stream, 1):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield Piece(_text_of_line(file.path, number, line, form), True, file.number, raw.tell())


def _text_of_line(path: Path, number: int, line: bytes, form: TextFormat) -> str:
    """Return the document in line `number` of a file of JSON lines. A null is an empty document."""
    try:
        # pydantic_core is faster than json and needs a third of the memory. From a line of 100 MB that contains one
        # emoji, json would make two strings of 4 bytes per character.
        text = pydantic_core.from_json(line, cache_strings="none")[form.text_column]
        if isinstance(text, str):
            return text
    except (ValueError, LookupError, TypeError):
        pass  # the line is unusual or wrong; the slower code below handles both
    where, key = f"{path}: line {number:,}", form.text_column
    try:
        value = json.loads(line.decode("utf-8-sig", errors=form.errors))
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}: not valid UTF-8 at byte {error.start:,} of the line") from None
    except (ValueError, RecursionError) as error:
        is_array = number == 1 and line.lstrip().startswith(b"[")
        hint = "this is a JSON array; write one object a line" if is_array else "correct or remove the line"
        # The error's own text would always say "line 1", because each line of the file is parsed alone.
        reason = str(error)[:80]
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}: column {error.pos + 1:,}"
        raise RunError(f"{where}: not JSON ({reason}); {hint}") from None
    if not isinstance(value, dict):
        raise RunError(f"{where}: not an object but {quoted(value)[:60]}; write one object a line")
    if key not in value:
        raise UserError(f"{_missing_column(where, key, list(value))}, or correct the line")
    text = "" if value[key] is None else value[key]
    if not isinstance(text, str):
        raise RunError(f"{where}: key {quoted(key)} holds {quoted(text)[:60]}, not text; correct or remove the line")
    if not is_unicode(text) and form.errors == "strict":
        problem = "holds half of a surrogate pair, which is no text"
        raise RunError(f"{where}: {problem}; --replace-invalid reads it as U+FFFD")
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # replaces lone surrogates by U+FFFD


def _read_text(file: TextFile, form: TextFormat) -> Iterator[Piece]:
    """Yield the text of a file in pieces. A document ends at each separator. Text after the last separator is a
    document, too. Without `form.separator`, every file is one document, even an empty file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(form.errors)  # drops a byte order mark, which is not text
    kept = len(form.separator) - 1 if form.separator else 0  # characters that may be the beginning of a separator
    rest, read, is_open, is_last = "", 0, False, False
    with _opened(file.path) as (stream, raw):
        while not is_last:
            block = stream.read(READ_BYTES)
            read, is_last = read + len(block), not block
            try:
                rest += decoder.decode(block, is_last)
            except UnicodeDecodeError as error:
                place = read - len(error.object) + error.start
                raise _not_utf8(f"{file.path}: not valid UTF-8 at byte {place:,}") from None
            *documents, rest = rest.split(form.separator) if form.separator else [rest]
            for text in documents:
                yield Piece(text, True, file.number, raw.tell())
                is_open = False
            if len(rest) > kept:
                yield Piece(rest[: len(rest) - kept], False, file.number, raw.tell())
                rest, is_open = rest[len(rest) - kept :], True
        if rest or is_open or not form.separator:
            yield Piece(rest, True, file.number, file.size)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield the decompressed byte stream of a file, and the open file on the disk, whose position shows how much of the
    file has been read."""
    with path.open("rb") as raw:
        if path.suffix.lower() == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw)), raw
        elif path.suffix.lower() == ".zst":
            import pyarrow

            yield io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")), raw
        else:
            yield raw, raw


# For each suffix, the reader of files with this suffix.
READERS: dict[str, Callable[[TextFile, TextFormat], Iterator[Piece]]] = {
    ".parquet": _read_parquet,
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), _read_json_lines),
    **dict.fromkeys((".txt", ".text"), _read_text),
}
