"""Sources of text files: this machine, or a dataset on the Hugging Face Hub, whose files come one at a time."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import huggingface_hub
from huggingface_hub import constants

from harness.common.errors import UserError
from harness.common.hub import HubFile, HubWork, find_fault, list_files
from harness.common.messages import abbreviated, is_hub_name
from harness.data.preparation.splits import Recorded
from harness.data.preparation.text_input import (
    Piece,
    TextFile,
    TextFormat,
    find_text_files,
    is_surely_text,
    kind_of,
    read_documents,
)

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


def find_source(
    inputs: Sequence[str], *, include: Sequence[str], revision: str | None, delete_after: bool, work: Path
) -> TextSource:
    """The local files under these names, or else a dataset on the Hub. Raises UserError if there is neither."""
    hub_only = {"--include": include, "--revision": revision, "--delete-after": delete_after}
    if len(inputs) > 1 or Path(inputs[0]).exists() or not is_hub_name(inputs[0]):
        for option in (option for option, value in hub_only.items() if value):
            raise UserError(f"{option} belongs with a dataset on the Hub, but {inputs[0]} is local")
        return LocalText.find(inputs)
    downloads = work / "downloads" if delete_after else None
    return HubText.find(inputs[0], include, revision, downloads)


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


AGAIN = "running the same command again goes on where it stopped"


@dataclass(frozen=True)
class HubText:
    """A dataset's files at one commit. Each is downloaded when it is its turn."""

    name: str
    work: HubWork
    commit: str
    descriptions: list[HubFile]
    files: list[TextFile]
    downloads: Path | None  # where files are kept while they are read; None: in huggingface_hub's cache, for good

    @classmethod
    def find(cls, name: str, include: Sequence[str], revision: str | None, downloads: Path | None) -> HubText:
        """Raises UserError if the dataset cannot be reached, or has no such files."""
        folder = downloads or Path(constants.HF_HUB_CACHE)
        work = HubWork(name, "dataset", folder, "INPUT", "download its files, and give their folder as INPUT", AGAIN)
        try:
            commit, there = list_files(work, revision)
        except UserError as error:
            raise UserError(f"{name}: no such file or folder here; and as a dataset of the Hub: {error}") from None
        wanted = [file for file in there if _is_wanted(file.path, include)]
        wanted.sort(key=lambda file: file.path)
        if not wanted:
            seen = abbreviated([file.path for file in there])
            raise UserError(f'dataset "{name}": no parquet, JSON lines or text files {_by(include)}; it has {seen}')
        files = [
            TextFile(number, file.path, Path(file.path), file.size or 0, file.sha256 or file.git_sha1 or "")
            for number, file in enumerate(wanted)
        ]
        return cls(name, work, commit, wanted, files, downloads)

    @property
    def ignored(self) -> list[str]:
        """Nothing worth telling of: what else there is on the Hub is not the user's."""
        return []

    @property
    def origin(self) -> dict[str, Recorded]:
        """Origin of the text, for meta.json."""
        return {"hub": self.name, "commit": self.commit, "files": len(self.files)}

    def sampled(self, most: int) -> list[TextFile]:
        return self.files[:1]  # more would have to be downloaded before their turn

    @contextmanager
    def at_hand(self, file: TextFile) -> Iterator[TextFile]:
        """Download the file and compare it with the Hub's hash; delete it at the end if it is in `downloads`."""
        path = self._download(file, again=False)
        fault = find_fault(path, self.descriptions[file.number], lambda _: None)
        if fault:
            path = self._download(file, again=True)
            fault = find_fault(path, self.descriptions[file.number], lambda _: None)
        if fault:
            raise self.work.failed(f"{file.name} is not what the Hub describes: {fault}", f"try again later; {AGAIN}")
        try:
            yield replace(file, path=path)
        finally:
            if self.downloads is not None:
                path.unlink(missing_ok=True)

    def _download(self, file: TextFile, *, again: bool) -> Path:
        return Path(
            self.work.call(
                lambda: huggingface_hub.hf_hub_download(
                    self.name,
                    file.name,
                    repo_type="dataset",
                    revision=self.commit,
                    local_dir=self.downloads,
                    force_download=again,
                )
            )
        )


def _is_wanted(path: str, include: Sequence[str]) -> bool:
    if not include:
        return is_surely_text(path)
    return kind_of(path) is not None and any(fnmatch.fnmatchcase(path, pattern) for pattern in include)


def _by(include: Sequence[str]) -> str:
    return f"by --include {' '.join(include)}" if include else "at all"
