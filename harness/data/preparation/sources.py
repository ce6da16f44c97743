"""Sources of text files: this machine, or the Hub, from where files come one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.common.errors import UserError
from harness.common.messages import abbreviated, is_hub_name
from harness.data.preparation.documents import Piece, TextFormat, read_documents
from harness.data.preparation.options import PreparationOptions, Recorded
from harness.data.preparation.text_files import TextFile, find_text_files

SMALL_BYTES = 2**26  # of files that are all learnt from, however many they are


class TextSource(Protocol):
    """Files in a fixed order."""

    @property
    def name(self) -> str:
        """The source's name as the user typed it."""
        ...

    @property
    def files(self) -> list[TextFile]: ...

    @property
    def ignored(self) -> list[str]:
        """Names of a folder's files that are not read, since they do not look like text."""
        ...

    @contextmanager
    def at_hand(self, file: TextFile) -> Iterator[TextFile]:
        """The file with a path where it can be read, as long as the context lasts."""
        ...

    @property
    def origin(self) -> dict[str, Recorded]:
        """Origin of the text, for meta.json."""
        ...

    def sampled(self, most: int) -> list[TextFile]:
        """Files to learn from: all that are small together, at most so many spread over all, or as few as is cheap."""
        ...


@dataclass(frozen=True)
class LocalText:
    """Files on this machine."""

    inputs: Sequence[str]
    files: list[TextFile]
    ignored: list[str]

    @classmethod
    def find(cls, inputs: Sequence[str]) -> LocalText:
        """Raises UserError if there are none."""
        return cls(inputs, *find_text_files(inputs))

    @property
    def name(self) -> str:
        return abbreviated(self.inputs)

    @contextmanager
    def at_hand(self, file: TextFile) -> Iterator[TextFile]:
        yield file

    @property
    def origin(self) -> dict[str, Recorded]:
        """Origin of the text, for meta.json."""
        return {"input": short_name(self.inputs), "files": len(self.files)}

    def sampled(self, most: int) -> list[TextFile]:
        is_small = sum(file.size for file in self.files) <= SMALL_BYTES
        return self.files if is_small else self.files[:: -(-len(self.files) // most)]


def short_name(inputs: Sequence[str]) -> str:
    """The names of files and folders without where they are."""
    return abbreviated([Path(each).name for each in inputs])


def find_source(inputs: Sequence[str], options: PreparationOptions, work: Path) -> TextSource:
    """The local files under these names, or else a dataset on the Hub. Raises UserError if there is neither."""
    hub_only = [key for key in ("include", "revision", "delete_after") if getattr(options, key)]
    if len(inputs) > 1 or Path(inputs[0]).exists() or not is_hub_name(inputs[0]):
        if hub_only:
            raise UserError(
                f"--{hub_only[0].replace('_', '-')} belongs with a dataset on the Hub, but {inputs[0]} is local"
            )
        return LocalText.find(inputs)
    from harness.data.preparation.hub_source import HubText

    downloads = work / "downloads" if options.delete_after else None
    return HubText.find(inputs[0], options.include, options.revision, downloads)


def read_source(source: TextSource, form: TextFormat, file: int = 0, documents: int = 0) -> Iterator[Piece]:
    """All documents from document number `documents` of file number `file` on; after each file, an empty piece with the
    next one's number. Raises what `read_documents` raises."""
    for each in source.files[file:]:
        pieces = read_file(source, form, each)
        yield from _without_first(pieces, documents if each.number == file else 0)
        yield Piece("", False, each.number + 1, 0)


def read_file(source: TextSource, form: TextFormat, file: TextFile) -> Iterator[Piece]:
    """The documents of one file. Raises what `read_documents` raises."""
    with source.at_hand(file) as at_hand:
        yield from read_documents(at_hand, form)


def _without_first(pieces: Iterator[Piece], documents: int) -> Iterator[Piece]:
    for _ in range(documents):
        while not next(pieces).ends:
            pass
    return pieces
