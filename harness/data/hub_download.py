"""A dataset repository on the Hugging Face Hub, downloaded and verified into a local folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import huggingface_hub
from huggingface_hub.utils.tqdm import disable_progress_bars
from tqdm import tqdm

from harness.common.errors import UserError
from harness.common.files import sync
from harness.common.hub import IGNORED_FILES, HubFile, HubWork, find_fault, list_files, size_of
from harness.common.units import GIB

AGAIN = "running the same command again resumes with the files still missing"


@dataclass(frozen=True)
class Download:
    """A download's paths: the dataset's name, its final folder, and the hidden sibling that collects the files."""

    name: str
    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder.parent / f".{self.folder.name}.partial"

    @property
    def work(self) -> HubWork:
        by_hand = f"put the dataset's files into {self.folder}"
        return HubWork(self.name, "dataset", self.folder, 'the "dataset" key in train.json', by_hand, AGAIN)

    def failed(self, problem: str, remedy: str) -> UserError:
        return self.work.failed(problem, remedy)


def download_dataset(name: str, folder: Path) -> None:
    """Download the dataset repository `name` (owner/name), verify it, and put it at `folder` in one rename.

    `folder` does not exist yet or is an empty directory. Until everything is verified the files lie in a hidden sibling
    folder, from which the next call resumes. HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and HF_TOKEN count, as everywhere
    with huggingface_hub. SIGINT and SIGTERM end the process at once while this runs. Raises UserError.
    """
    download = Download(name, folder)
    try:
        with _leaving_at_once(download), _alone_in(download.partial):
            if not _is_filled(folder):
                _fetch(download)
            else:  # another process was faster
                shutil.rmtree(download.partial, ignore_errors=True)
    except OSError as error:
        problem = f"{error.filename or download.partial}: {error.strerror or error}"
        raise download.failed(problem, download.work.diagnose_local(error).remedy) from None


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _fetch(download: Download) -> None:
    if not sys.stderr.isatty():
        disable_progress_bars()
    revision, files = list_files(download.work)
    _clear_leftovers(download.partial, files)
    _check_space(download, files)
    # Pinned to one commit, so that a push in between does not mix versions.
    download.work.call(
        lambda: huggingface_hub.snapshot_download(
            download.name,
            repo_type="dataset",
            revision=revision,
            local_dir=download.partial,
            ignore_patterns=IGNORED_FILES,
        ),
    )
    _verify(download, files, revision)
    shutil.rmtree(download.partial / ".cache")
    _flush(download.partial)
    os.rename(download.partial, download.folder)
    sync(download.folder.parent)


def _clear_leftovers(partial: Path, files: list[HubFile]) -> None:
    """Delete what an earlier, interrupted download left and this one cannot use.

    huggingface_hub writes every file under a name of its own until it is whole, and never comes back to it.
    """
    wanted = {partial / file.path for file in files}
    for path in [path for path in partial.rglob("*") if path.is_symlink()]:
        path.unlink()  # a download makes none, and what is written or deleted through one lies elsewhere
    for path in _files_in(partial):
        unfinished = path.suffix == ".incomplete"
        other_version = path not in wanted and not path.is_relative_to(partial / ".cache")
        if unfinished or other_version:
            path.unlink()


def _check_space(download: Download, files: list[HubFile]) -> None:
    needed = sum(file.size or 0 for file in files if size_of(download.partial / file.path) != file.size)
    free = shutil.disk_usage(download.partial).free
    if needed > free:
        problem = f"{needed / GIB:.2f} GiB to download, but only {free / GIB:.2f} GiB free for {download.folder}"
        raise download.failed(problem, "free some space, or use a datasets directory on a larger disk")


# Verification ------------------------------------------------------------------------------------------------------


def _verify(download: Download, files: list[HubFile], revision: str) -> None:
    """Compare every file with the Hub's size and hash, and download once more those that differ."""
    faults = _find_faults(download.partial, files)
    for file, fault in faults.items():
        print(f"{file.path}: {fault}; downloading it again", file=sys.stderr, flush=True)
        _fetch_again(download, file, revision)
    remaining = _find_faults(download.partial, faults)
    for file, fault in remaining.items():
        problem = f"{file.path} is not what the Hub describes, even downloaded twice: {fault}"
        remedy = f"try again later; or {download.work.by_hand}"
        raise download.failed(problem, remedy)


def _fetch_again(download: Download, file: HubFile, revision: str) -> None:
    def call() -> str:
        return huggingface_hub.hf_hub_download(
            download.name,
            file.path,
            repo_type="dataset",
            revision=revision,
            local_dir=download.partial,
            force_download=True,  # or a bad copy in HF_HOME's cache would be taken
        )

    download.work.call(call)


def _find_faults(partial: Path, files: Collection[HubFile]) -> dict[HubFile, str]:
    """Return what is wrong with which files, and delete those."""
    faults = {}
    total = sum(file.size or 0 for file in files)
    quiet = not files or not sys.stderr.isatty()
    with tqdm(desc="Verifying", total=total, unit="B", unit_scale=True, leave=False, disable=quiet) as bar:
        for file in files:
            if fault := find_fault(partial / file.path, file, bar.update):
                faults[file] = fault
                (partial / file.path).unlink(missing_ok=True)
    return faults


# Files and processes -----------------------------------------------------------------------------------------------


def _files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


def _flush(folder: Path) -> None:
    """Have everything on the disk before the rename says that the folder is whole."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


@contextmanager
def _alone_in(partial: Path) -> Iterator[None]:
    """Hold the partial folder: two processes of one machine that want the same dataset take turns.

    The lock is on the directory itself, moves with it when it is renamed, and ends with the process.
    """
    if partial.is_symlink():
        raise UserError(f"{partial}: is a link, but what is left over in it would be deleted; remove the link")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is downloading {partial}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            pass  # some network file systems lock no directories; there the caller has to see to it
        partial.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            partial.rmdir()  # only if it is empty: what has arrived is gone on with
        os.close(descriptor)


@contextmanager
def _leaving_at_once(download: Download) -> Iterator[None]:
    """Leave on SIGINT and SIGTERM without waiting: huggingface_hub would first finish the files under way (gigabytes).

    A kill at any instant is safe here, because nothing is under the final name before it is whole.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        print(f'\nstopped: dataset "{download.name}": {AGAIN}', file=sys.stderr, flush=True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python sets signal handlers in the main thread only
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
