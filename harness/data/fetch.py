"""Make sure that a dataset is on this machine: use the existing folder, build the dataset, or download it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from harness.common.errors import UserError, explained, os_errors_as
from harness.data.dataset import Dataset, dataset_folder, did_you_mean, is_present

BUILTIN = "builtin/python-stdlib"


def ensure_dataset(datasets_dir: Path, name: str, splits: list[str]) -> None:
    """Make sure that DATASETS_DIR/<name> holds the splits. If the folder is missing or empty, build or download the
    dataset.

    Several processes of one machine may call this at the same time. If they download, the file system must have locks.
    Raises UserError if the folder is incomplete, or if the dataset cannot be obtained.
    """
    folder = dataset_folder(datasets_dir, name)
    if not is_present(datasets_dir, name, splits):
        with os_errors_as(UserError, f"{folder.parent}: cannot make this folder"):
            folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            with explained(after=did_you_mean(datasets_dir, name)):  # the Hub's message names no similar dataset
                if name.startswith("builtin/"):
                    _check_builtin(name)
                    from harness.data.preparation.builtin import build_python_stdlib

                    print(f"Building {name} in {folder} ...", flush=True)
                    build_python_stdlib(folder)
                else:
                    from harness.data.hub import download_dataset

                    print(f"Downloading {name} to {folder} ...", flush=True)
                    download_dataset(name, folder, splits)
        finally:
            with suppress(OSError):
                folder.parent.rmdir()  # removes the owner's folder if it is empty, otherwise fails
        is_present(datasets_dir, name, splits)  # raises UserError if the fetched dataset lacks a split
    Dataset.open(datasets_dir, name)  # raises UserError if the folder is incomplete


def check_obtainable(datasets_dir: Path, name: str, splits: list[str], *, ask_hub: bool) -> None:
    """Raise UserError if the splits are neither on this machine nor obtainable by `ensure_dataset`. Downloads nothing.
    If `ask_hub` is false, no network call is made, and the Hub is assumed to have the dataset."""
    if is_present(datasets_dir, name, splits):
        return
    if name.startswith("builtin/"):
        _check_builtin(name)
    elif ask_hub:
        from harness.data.hub import download_work, list_dataset_files

        with explained(after=did_you_mean(datasets_dir, name)):
            list_dataset_files(download_work(name, dataset_folder(datasets_dir, name)), splits)


def _check_builtin(name: str) -> None:
    """Raise UserError if no builtin dataset has that name."""
    if name != BUILTIN:
        raise UserError(f'dataset "{name}": no builtin dataset has this name; choose from {BUILTIN}')
