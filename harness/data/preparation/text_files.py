"""Text files below folders and globs: their names, paths and kinds."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import version_of
from harness.common.messages import abbreviated, quoted

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
