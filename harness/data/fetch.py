"""Make sure that a dataset is on this machine: use the existing folder, build the dataset, or download it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.common.errors import UserError
from harness.data.dataset import Dataset, dataset_folder, did_you_mean, is_present


def ensure_dataset(datasets_dir: Path, name: str, splits: list[str]) -> None:
    """Make sure that DATASETS_DIR/<name> holds the splits: build or download the dataset if the folder is missing or
    empty. A folder that holds the splits is left unchanged, without a network call. Raises UserError if the folder is
    incomplete or the dataset cannot be obtained."""
    folder = dataset_folder(datasets_dir, name)
    if not is_present(datasets_dir, name, splits):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder.parent}: cannot make this folder: {error.strerror}") from None
        try:
            if name.startswith("builtin/"):
                build = _builder(name)
                print(f"Building {name} in {folder} ...", flush=True)
                build(folder)
            else:
                from harness.data.hub import download_dataset

                print(f"Downloading {name} to {folder} ...", flush=True)
                download_dataset(name, folder)
        except UserError as error:  # the Hub's own message does not say that the name may be mistyped
            raise UserError(f"{error}{did_you_mean(datasets_dir, name)}") from None
        finally:
            with suppress(OSError):
                folder.parent.rmdir()  # removes the owner's folder only if it is empty, as no dataset was written to it
    if not is_present(datasets_dir, name, splits):
        raise UserError(
            f"{folder}: lacks {' and '.join(splits)} after the dataset was fetched; run the same command again"
        )
    Dataset.open(datasets_dir, name)


def check_obtainable(datasets_dir: Path, name: str, splits: list[str], *, ask_hub: bool) -> None:
    """Raise UserError if a dataset is not on this machine and `ensure_dataset` could not obtain it. With `ask_hub`,
    ask the Hub for the dataset's list of files; otherwise make no network call. Downloads nothing."""
    if is_present(datasets_dir, name, splits):
        return
    if name.startswith("builtin/"):
        _builder(name)
    elif ask_hub:
        from harness.common.hub import list_files
        from harness.data.hub import reading

        try:
            list_files(reading(name, dataset_folder(datasets_dir, name)))
        except UserError as error:
            raise UserError(f"{error}{did_you_mean(datasets_dir, name)}") from None


def _builder(name: str) -> Callable[[Path], None]:
    """Return the function that builds a builtin dataset. Raises UserError if no builtin dataset has that name."""
    from harness.data.preparation.builtin import BUILTIN_DATASETS

    if name not in BUILTIN_DATASETS:
        raise UserError(f'train.json: key "dataset": there is no {name}; choose from {", ".join(BUILTIN_DATASETS)}')
    return BUILTIN_DATASETS[name]
