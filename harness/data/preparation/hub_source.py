"""Download and verify files of a dataset on the Hugging Face Hub, and read its text files as a source of documents."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.hf_api import RepoSibling

from harness.common.errors import UserError, explained
from harness.common.hub import HubWork, find_fault, list_files
from harness.common.messages import abbreviated, tell
from harness.data.preparation.text_input import (
    Piece,
    TextFile,
    TextFormat,
    TextSource,
    is_surely_text,
    read_documents,
    text_suffix,
)


@dataclass(frozen=True)
class HubText(TextSource):
    """Text files of a Hub dataset at one commit. Each file is downloaded when it is about to be read."""

    work: HubWork
    commit: str
    described: list[RepoSibling]  # the Hub's descriptions of `files`, in the same order
    downloads: Path | None  # folder from which files are deleted after reading; None: huggingface_hub's cache

    def read_file(self, file: TextFile, form: TextFormat) -> Iterator[Piece]:
        """Download the file, and yield its documents. Then delete the file from `downloads`."""
        path = download(self.work, self.described[file.number], self.commit, self.downloads)
        try:
            yield from read_documents(replace(file, path=path), form)
        finally:
            if self.downloads is not None:
                path.unlink(missing_ok=True)

    def sampled(self) -> list[TextFile]:
        """Return the files to train a tokenizer on: only the first, because each must be downloaded before the
        preparation begins."""
        return self.files[:1]


def download(work: HubWork, file: RepoSibling, commit: str, folder: Path | None) -> Path:
    """Download a file of a dataset at one commit to `folder`, check its hash, and return its path. If `folder` is None,
    the file is in huggingface_hub's cache. Raises UserError if the download fails or the hash is wrong."""
    place: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    for is_last in (False, True):  # force the second download; else a damaged copy in the cache would be used
        get = partial(huggingface_hub.hf_hub_download, work.name, file.rfilename, force_download=is_last, **place)
        path = Path(work.call(get))
        fault = find_fault(path, file)
        if fault is None:
            return path
        if not is_last:
            tell(f"{file.rfilename}: {fault}; downloading it again")
    path.unlink(missing_ok=True)
    problem = f"{file.rfilename} differs from the Hub's description even after a second download: {fault}"
    raise work.failed(problem, f"try again later; or {work.by_hand}")


def find_on_hub(name: str, include: Sequence[str], revision: str | None, downloads: Path | None) -> HubText:
    """Return the text files of a dataset on the Hub at one commit, sorted by name.

    - `include`: patterns of file names. Without patterns, the files are those for which `is_surely_text` is true.
    - `revision`: branch, tag or commit; None: the newest commit.
    - `downloads`: described at `HubText`.

    Raises UserError if the dataset cannot be reached, or if there are no such files.
    """
    folder = downloads or Path(constants.HF_HUB_CACHE)
    work = HubWork(name, "dataset", folder, "INPUT", "download its files, and give their folder as INPUT")
    with explained(f"{name}: no such file or folder; tried as a dataset on the Hub: "):
        commit, there = list_files(work, revision)
    wanted = []
    for file in sorted(there, key=lambda file: file.rfilename):
        is_included = any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in include)
        if (is_included and text_suffix(file.rfilename)) or (not include and is_surely_text(file.rfilename)):
            wanted.append(file)
    if not wanted:
        by = f" that match --include {' '.join(include)}" if include else ""
        seen = abbreviated([file.rfilename for file in there])
        text = f"no parquet, JSON lines or text files{by}; it has {seen}; name the files to read with --include"
        raise UserError(f'dataset "{name}": {text}')
    files = []
    for number, file in enumerate(wanted):
        version = (file.lfs.sha256 if file.lfs else file.blob_id) or ""
        files.append(TextFile(number, file.rfilename, Path(file.rfilename), file.size or 0, version))
    origin: dict[str, object] = {"hub": name, "commit": commit, "files": len(files)}
    return HubText(name, files, origin, work, commit, wanted, downloads)
