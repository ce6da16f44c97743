"""Text files of a dataset on the Hugging Face Hub, as a source of documents."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants

from harness.common.errors import UserError
from harness.common.hub import HubFile, HubWork, find_fault, list_files
from harness.common.messages import abbreviated
from harness.data.preparation.options import Recorded
from harness.data.preparation.text_files import TextFile, is_surely_text, kind_of

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
