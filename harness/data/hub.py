"""Dataset repositories on the Hugging Face Hub: download and verify a repository, or upload a dataset folder with a
card."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import huggingface_hub
from filelock import FileLock, Timeout
from huggingface_hub.hf_api import RepoSibling

from harness.common.errors import UserError, signals_to
from harness.common.files import rename_whole
from harness.common.hub import CARD, HubWork, hide_bars_from_files, list_files, upload
from harness.common.messages import GIB, tell
from harness.data.dataset import Dataset, SplitMeta
from harness.data.preparation.hub_source import download
from harness.data.preparation.splits import SPLITS
from harness.data.preparation.work import is_dataset_file

AGAIN = "running the same command again resumes the download of the missing files"


def download_work(name: str, folder: Path) -> HubWork:
    """Return the HubWork for a download of dataset `name` to `folder`, which is DATASETS_DIR/<name>."""
    by_hand = f"put the dataset's files into {folder}"
    return HubWork(name, "dataset", folder, 'the "dataset" key in train.json', by_hand, AGAIN)


def download_dataset(name: str, folder: Path, splits: Sequence[str]) -> None:
    """Download the dataset repository `name` (owner/name) to `folder`, and verify its files. `folder` never holds an
    incomplete dataset.

    - After an interruption, the next call resumes.
    - Processes of one machine wait for each other if the file system has locks.
    - In the main thread, SIGINT and SIGTERM end the process immediately.

    Raises UserError if the dataset lacks one of `splits`, or cannot be downloaded or written.
    """
    work = download_work(name, folder)
    partial = _partial_folder(folder)

    def leave(number: int, _frame: object) -> NoReturn:
        tell(f'\nstopped: dataset "{name}": {AGAIN}')
        os._exit(128 + number)  # at once, because huggingface_hub would finish its current files, perhaps gigabytes

    try:
        with signals_to(leave, (signal.SIGINT, signal.SIGTERM)), _alone_in(partial):
            if not (folder.is_dir() and any(folder.iterdir())):  # else another process has downloaded it meanwhile
                _fetch(work, partial, splits)
    except OSError as error:
        raise work.failed(*work.explain_local(error)) from None


def list_dataset_files(work: HubWork, splits: Sequence[str]) -> tuple[str, list[RepoSibling]]:
    """Return the repository's commit and its files. Raises UserError if the files cannot be listed, if they include no
    split or lack one of `splits`, or if a download would delete unfinished work of prepare_datasets.py."""
    revision, files = list_files(work)
    there = {file.rfilename for file in files} & {f"{each}.safetensors" for each in SPLITS}
    wanted = splits or ([] if there else ["train"])
    missing = [name for each in wanted if (name := f"{each}.safetensors") not in there]
    if missing:
        remedy = "if it has text, make a dataset of it with prepare_datasets.py; otherwise use another split or dataset"
        raise work.failed(f"has no {' and no '.join(missing)} on the Hugging Face Hub", remedy)
    partial = _partial_folder(work.folder)
    if (partial / ".lock").exists():
        remedy = "finish it with the prepare_datasets.py command that began it, or move this folder away"
        raise UserError(f"{partial}: unfinished work of prepare_datasets.py, which a download would delete; {remedy}")
    return revision, files


def _partial_folder(folder: Path) -> Path:
    """Return the path of the folder in which the dataset `folder` is kept until it is complete."""
    return folder.parent / f".{folder.name}.partial"


def _fetch(work: HubWork, partial: Path, splits: Sequence[str]) -> None:
    """Delete the files in `partial` that this download cannot use, download the files that `partial` lacks, verify all
    files, and rename `partial` to `work.folder`."""
    hide_bars_from_files()
    revision, files = list_dataset_files(work, splits)
    wanted = {partial / file.rfilename: file.size or 0 for file in files}
    # huggingface_hub writes each file under a new temporary name until it is complete, and never reuses a temporary
    # file. Links are deleted, too: no download makes them, and writing or deleting through a link would change other
    # folders.
    for path in [path for path in partial.rglob("*") if path.is_symlink() or not path.is_dir()]:
        is_other_version = path not in wanted and not path.is_relative_to(partial / ".cache")
        if path.is_symlink() or path.suffix == ".incomplete" or is_other_version:
            path.unlink()
    needed = sum(size for path, size in wanted.items() if not path.is_file() or path.stat().st_size != size)
    free = shutil.disk_usage(partial).free
    if needed > free:
        problem = f"{needed / GIB:.2f} GiB to download, but only {free / GIB:.2f} GiB free for {work.folder}"
        raise work.failed(problem, "free some space, or use a datasets directory on a larger disk")
    # Small files first. All files are of one commit, so that a push during the download does not mix versions.
    for file in sorted(files, key=lambda file: file.size or 0):
        download(work, file, revision, partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    rename_whole(partial, lambda: work.folder)


@contextmanager
def _alone_in(partial: Path) -> Iterator[None]:
    """Create and lock `partial`, the folder of an unfinished download, for the `with` body. If the file system has no
    locks, only create the folder."""
    if partial.is_symlink():
        raise UserError(f"{partial}: is a link, and files behind it would be deleted; remove the link")
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(partial.with_suffix(".lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        tell(f"another process is downloading to {partial}; waiting for it")
        lock.acquire()
    except OSError:
        pass  # some network file systems have no locks; there the user must start one download at a time
    partial.mkdir(exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            partial.rmdir()  # only if the folder is empty; otherwise the next call resumes from its files
        Path(lock.lock_file).unlink(missing_ok=True)  # deleted while it is locked; a waiting process creates a new file
        lock.release()


# To the Hub ----------------------------------------------------------------------------------------------------------


def push_command(folder: Path, name: str, *, public: bool) -> str:
    """Return the command that uploads the dataset in `folder` to the repository `name`."""
    visibility = " --public" if public else ""
    return f"uv run prepare_datasets.py --verify {shlex.quote(str(folder))} --push-to-hub {name}{visibility}"


def upload_dataset(dataset: Dataset, name: str, *, public: bool) -> str:
    """Upload the dataset's files and a card to the dataset repository `name`, in one commit. Return the repository's
    address.

    `public` is the visibility of a new repository. An existing repository keeps its visibility. In the repository,
    README.md is replaced, and dataset files that `dataset` lacks are deleted. Raises UserError if a token file cannot
    be read or the upload fails.
    """
    again = f"{push_command(dataset.folder, name, public=public)} sends what is missing"
    work = HubWork(
        name, "dataset", dataset.folder, "--push-to-hub", "upload the folder by hand", again, verb="write to"
    )
    splits = [split for split in SPLITS if dataset.has_split(split)]
    tokenizer = [dataset.tokenizer] if isinstance(dataset.tokenizer, Path) else []
    paths = [dataset.folder / "meta.json", *map(dataset.split_path, splits), *tokenizer]
    files: dict[str, Path | bytes] = {path.name: path for path in paths if path.exists()}
    files[CARD] = card(dataset, name).encode()
    # A file of an earlier upload would mislead: the documents of a test split may now be in the train split.
    return upload(work, files, f"{dataset.name}: {', '.join(splits)}", public=public, is_replaced=is_dataset_file)


CARD_TEXT = """---
{front_matter}
---

# {title}

{description}

| split | documents | tokens | bytes of text |
|---|---|---|---|
{rows}

Each split is a safetensors file with one 1-D tensor `tokens`. Tokenizer: {tokenizer}. End-of-text
tokens separate the documents.

To train on it with ddp-pretrain, put this into train.json:

    "dataset": {name}

Where it came from:

{source}
"""


def card(dataset: Dataset, name: str) -> str:
    """Return the README.md for the dataset in the repository `name`."""
    meta, rows = dataset.meta, []
    for split in SPLITS:
        if dataset.has_split(split):
            said = meta.splits.get(split, SplitMeta())
            documents, length = ("" if count is None else f"{count:,}" for count in (said.documents, said.bytes))
            rows.append(f"| {split} | {documents} | {len(dataset.split(split)):,} | {length} |")
    front_matter = huggingface_hub.DatasetCardData(pretty_name=dataset.name, tags=["tokens", "ddp-pretrain"])
    source = json.dumps((meta.model_extra or {}).get("source", {}), indent=2)
    return CARD_TEXT.format(
        front_matter=front_matter.to_yaml(),
        title=dataset.name,
        description=meta.description or "Tokens for pre-training a language model.",
        rows="\n".join(rows),
        tokenizer="GPT-2's (tiktoken)" if meta.tokenizer == "gpt2" else f"`{meta.tokenizer}`, in this repository",
        name=json.dumps(name),
        source="\n".join(f"    {line}" for line in source.splitlines()),
    )
