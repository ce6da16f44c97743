"""The hidden folder beside a dataset's place, in which the dataset grows until it is whole."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import check_name, replace_text, sync
from harness.common.lock import RunLock
from harness.common.messages import abbreviated
from harness.data.preparation.journal import Journal
from harness.data.preparation.options import Recorded
from harness.data.preparation.splits import SPLITS

DATASET_FILES = {"meta.json", "README.md", *(f"{split}.safetensors" for split in SPLITS)}
TOKENIZER_SUFFIXES = ("tokenizer.json", ".tiktoken.json")


def without_dots(target: Path) -> Path:
    """The target without "..", so that its last two parts are owner/name."""
    return Path(os.path.realpath(target)) if ".." in target.parts else target


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises UserError if something is in the way of a new dataset folder, or if train.json could not name it."""
    # One part alone will get its owner when it is put where training looks for it.
    for part in target.parts if len(target.parts) == 1 else target.absolute().parts[-2:]:
        check_name(part, f"{target}: the dataset's owner/name, its last two folders:")
    *_, above, owner, name = ("", *target.absolute().parts)
    if len(target.parts) > 1 and owner == "datasets" != above:  # that is DATASETS_DIR
        wanted = target.parent / "me" / name
        raise UserError(f"{target}: has no owner, but training looks for DATASETS_DIR/owner/name; give {wanted}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target}: is a file or a link; name a folder that does not exist")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"{target}: exists; name another folder, or replace it with --overwrite")
        if others := _not_of_a_dataset(target):
            raise UserError(
                f"{target}: holds {abbreviated(others)}, which is no part of a dataset and would be deleted; "
                "move it away"
            )


def _not_of_a_dataset(folder: Path) -> list[str]:
    """Names in a folder other than those that this tool and the Hub put into a dataset."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() or not is_dataset_file(path.name))


def is_dataset_file(name: str) -> bool:
    """True if this tool or the Hub puts a file of that name into a dataset."""
    return name in DATASET_FILES or name.endswith(TOKENIZER_SUFFIXES)


@dataclass(frozen=True)
class WorkFolder:
    """The hidden folder beside the target where the dataset grows; one process at a time."""

    target: Path
    made: list[Path] = field(default_factory=list, compare=False)  # by `open`, around it; the innermost first

    @property
    def path(self) -> Path:
        return self.target.parent / f".{self.target.name}.partial"

    @property
    def dataset(self) -> Path:
        return self.path / "dataset"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def journal(self) -> Path:
        return self.path / "journal.json"

    @property
    def known_files(self) -> Path:
        return self.path / "files.json"

    @property
    def replaced(self) -> Path:
        """Path of an older dataset of that name while the new one takes its place."""
        return self.target.parent / f".{self.target.name}.replaced"

    def open(self) -> None:
        """Make it, or take what an interrupted process left. Raises UserError if another process works in it, or if it
        is not ours."""
        if self.path.is_symlink():
            raise UserError(f"{self.path}: is a link, but what is left over in it would be deleted; remove the link")
        try:
            self.made[:] = [folder for folder in self.path.parents if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot make this folder: {error.strerror}") from None
        if not self.lock.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path}: is needed for unfinished work, but holds something else; move it away")
        RunLock.take(self.lock, "made")
        self._settle()

    def _settle(self) -> None:
        """Finish what a kill in `put_in_place` left half done."""
        if self.journal.exists() and self.replaced.exists() and not self.target.exists():
            self.replaced.rename(self.target)  # until the new one is put there again
        elif self.journal.exists() and not self.dataset.exists():
            self._delete_replaced()
            self.clear()
        self.dataset.mkdir(exist_ok=True)

    def _delete_replaced(self) -> None:
        if self.replaced.exists() and not _not_of_a_dataset(self.replaced):
            shutil.rmtree(self.replaced)

    def clear(self) -> None:
        """Delete what is in it but for the lock, the journal first: without the journal there is nothing to resume."""
        self._empty()
        self.dataset.mkdir()

    def _empty(self) -> None:
        self.journal.unlink(missing_ok=True)
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self.lock:
                entry.unlink()

    def _remove(self) -> None:
        """Delete the folder, the lock last: by it a later process knows what a kill leaves behind."""
        self._empty()
        self.lock.unlink()
        self.path.rmdir()

    def resume_or_begin(self, begun_with: dict[str, Recorded], files: list[list[str]]) -> Journal:
        """The journal of the work that was interrupted here, or of new work with these options on these files.

        Raises UserError if that work had other options, and has come further than its beginning.
        """
        journal = Journal.load(self.journal)
        if journal is None or not (journal.has_begun or self._same_beginning(journal, begun_with, files)):
            self.clear()
            journal = Journal(begun_with)
        journal.take_options(begun_with, self.path)
        if journal.phase == "reading":
            if self.known_files.exists():
                journal.check_files(files, journal.read_known(self.known_files) or [], self.path)
            replace_text(self.known_files, json.dumps(files) + "\n")
        journal.save(self.journal)
        return journal

    def _same_beginning(self, journal: Journal, begun_with: dict[str, Recorded], files: list[list[str]]) -> bool:
        return journal.options == begun_with and journal.read_known(self.known_files) in (None, files)

    def leave(self) -> None:
        """Remove the folder if there is nothing in it that would be missed, and those around it that were made for
        it."""
        journal = Journal.load(self.journal)
        if journal is None or not journal.has_begun:
            with suppress(OSError):
                self._remove()
                for folder in self.made:
                    folder.rmdir()  # only if it is empty

    def put_in_place(self) -> None:
        """Give the dataset its name; an older one of that name is deleted when the new one has it."""
        for path in [*self.dataset.iterdir(), self.dataset]:
            sync(path)
        if self.target.exists() and any(self.target.iterdir()):
            self._delete_replaced()
            self.target.rename(self.replaced)
        self.dataset.rename(self.target)
        sync(self.target.parent)
        self._delete_replaced()
        self._remove()
