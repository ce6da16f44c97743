"""Bringing a dataset to this machine: used as it is, built, or downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.common.errors import UserError
from harness.data.dataset import Dataset, dataset_folder, is_present, neighbour


def ensure_dataset(datasets_dir: Path, name: str, splits: list[str]) -> None:
    """Make sure that DATASETS_DIR/<name> holds the splits. A folder that does is left alone, with no network call."""
    folder = dataset_folder(datasets_dir, name)
    if not is_present(datasets_dir, name, splits):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder.parent}: cannot make this folder: {error.strerror}") from None
        try:
            with _neighbour_named(datasets_dir, name):
                if name.startswith("builtin/"):
                    build = _builder(name)
                    print(f"Building {name} in {folder} ...", flush=True)
                    build(folder)
                else:
                    from harness.data.hub import download_dataset

                    print(f"Downloading {name} to {folder} ...", flush=True)
                    download_dataset(name, folder)
        finally:
            with suppress(OSError):
                folder.parent.rmdir()  # only if it is empty: nothing has come
    if not is_present(datasets_dir, name, splits):
        raise UserError(f"{folder}: the dataset came without {' and '.join(splits)}")
    Dataset.open(datasets_dir, name)


def check_obtainable(datasets_dir: Path, name: str, splits: list[str], *, ask_hub: bool) -> None:
    """Raise UserError, as `ensure_dataset` would, for a dataset that is not on this machine and cannot be had, as far
    as is known without a download: by the Hub's answer, with `ask_hub`, else without the network."""
    if is_present(datasets_dir, name, splits):
        return
    if name.startswith("builtin/"):
        _builder(name)
    elif ask_hub:
        from harness.common.hub import list_files
        from harness.data.hub import reading

        with _neighbour_named(datasets_dir, name):
            list_files(reading(name, dataset_folder(datasets_dir, name)))


@contextmanager
def _neighbour_named(datasets_dir: Path, name: str) -> Iterator[None]:
    """Have an error begin with the data set here that was probably meant, if there is one: the Hub's answer, or a
    network's that is not there, tells nothing of a slip of the finger."""
    try:
        yield
    except UserError as error:
        if near := neighbour(datasets_dir, name):
            raise UserError(f'not in {datasets_dir}; did you mean "{near}"? {error}') from None
        raise


def _builder(name: str) -> Callable[[Path], None]:
    """The function that makes a builtin dataset. Raises UserError if there is none of that name."""
    from harness.data.preparation.builtin import BUILTIN_DATASETS

    if name not in BUILTIN_DATASETS:
        raise UserError(f'train.json: key "dataset": no {name}; there is {", ".join(BUILTIN_DATASETS)}')
    return BUILTIN_DATASETS[name]
