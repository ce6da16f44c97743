"""The hidden folder beside a dataset's place, in which the dataset grows until it is whole, and the journal of its
progress, with which a killed preparation continues with the same bytes.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from harness.common.errors import UserError
from harness.common.files import check_name, rename_whole, replace_text
from harness.common.lock import RunLock
from harness.common.messages import abbreviated
from harness.data.preparation.splits import SPLITS, Split
from harness.data.preparation.stream import StreamSize

DATASET_FILES = {"meta.json", "README.md", *(f"{split}.safetensors" for split in SPLITS)}
TOKENIZER_SUFFIXES = ("tokenizer.json", ".tiktoken.json")

Phase = Literal["reading", "read", "held out", "shuffled", "shared out"]


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


def is_dataset_file(name: str) -> bool:
    """True if this tool or the Hub puts a file of that name into a dataset."""
    return name in DATASET_FILES or name.endswith(TOKENIZER_SUFFIXES)


def _not_of_a_dataset(folder: Path) -> list[str]:
    """Names in a folder other than those that this tool and the Hub put into a dataset."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() or not is_dataset_file(path.name))


@dataclass(frozen=True)
class Mark:
    """A place in the input, at the end of a document, and how long the streams are there."""

    file: int = 0  # the number of the file that is read next
    documents: int = 0  # of it that have been read, those without text too
    empty: int = 0  # documents without text so far, in all files
    size: StreamSize = field(default_factory=StreamSize)
    pool: StreamSize = field(default_factory=StreamSize)  # of the documents that splits are drawn from

    @property
    def total(self) -> StreamSize:
        return self.size + self.pool


@dataclass
class Journal:
    """The state after the last whole step; everything later is cut off when work is resumed."""

    options: dict[str, Any]  # what the work was begun with
    phase: Phase = "reading"
    here: Mark = field(default_factory=Mark)
    file_start: Mark = field(default_factory=Mark)  # the last one that was at the beginning of a file
    splits: list[Split] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the journal; it is on the disk when this returns."""
        replace_text(path, json.dumps(asdict(self)) + "\n")

    @property
    def has_begun(self) -> bool:
        """True if there is any work to lose."""
        return bool(self.here.total.tokens)

    def take_options(self, options: dict[str, Any], folder: Path) -> None:
        """Raise UserError if the unfinished work was begun with other options, naming those.

        replace_invalid can be added later, too: so far all text was UTF-8.
        """
        keys = [key for key in {**self.options, **options} if self.options.get(key) != options.get(key)]
        if options.get("replace_invalid"):
            keys = [key for key in keys if key != "replace_invalid"]
        if keys:
            changes = ", ".join(f"{key}: {self.options.get(key)}, not {options.get(key)}" for key in keys)
            raise UserError(
                f"{folder}: unfinished work with other options ({changes}); give the same again, or begin again with "
                "--restart"
            )
        self.options = options

    def check_files(self, now: list[list[str]], known: list[list[str]], folder: Path) -> None:
        """Go back to a file's beginning if it has changed. Raises UserError if one that was read to its end has."""
        at = self.here.file
        changed = next((each for each in range(at) if now[each : each + 1] != known[each : each + 1]), None)
        if changed is not None:
            raise UserError(
                f"{known[changed][0]}: has been read, and has since changed or gone, or another file comes before it "
                f"now: what is in {folder} cannot be continued; begin again with --restart"
            )
        if now[at : at + 1] != known[at : at + 1]:
            self.here = self.file_start


def _read(kind: Any, path: Path) -> Any:
    """The contents of a JSON file as this type; None if there is none. Raises UserError if it is damaged."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        raise UserError(f"{path}: damaged; begin again with --restart") from None


class WorkFolder:
    """The hidden folder beside the target where the dataset grows; one process at a time."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self.dataset = self.path / "dataset"
        self.lock = self.path / ".lock"
        self.journal = self.path / "journal.json"
        self.known_files = self.path / "files.json"
        # Path of an older dataset of that name while the new one takes its place.
        self.replaced = target.parent / f".{target.name}.replaced"
        self._made: list[Path] = []  # by `open`, around it; the innermost first

    def open(self) -> None:
        """Make it, or take what an interrupted process left. Raises UserError if another process works in it, or if it
        is not ours."""
        if self.path.is_symlink():
            raise UserError(f"{self.path}: is a link, but what is left over in it would be deleted; remove the link")
        try:
            self._made = [folder for folder in self.path.parents if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.path}: cannot make this folder: {error.strerror}") from None
        if not self.lock.exists() and any(self.path.iterdir()):
            raise UserError(f"{self.path}: is needed for unfinished work, but holds something else; move it away")
        RunLock.take(self.lock, "made")
        # Finish what a kill in `put_in_place` left half done.
        if self.journal.exists() and self.replaced.exists() and not self.target.exists():
            self.replaced.rename(self.target)  # until the new one is put there again
        elif self.journal.exists() and not self.dataset.exists():
            self._delete_replaced()
            self._clear()

    def _delete_replaced(self) -> None:
        if self.replaced.exists() and not _not_of_a_dataset(self.replaced):
            shutil.rmtree(self.replaced)

    def _clear(self) -> None:
        """Delete what is in it but for the lock, the journal first: without the journal there is nothing to resume."""
        self.journal.unlink(missing_ok=True)
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self.lock:
                entry.unlink()

    def _remove(self) -> None:
        """Delete the folder, the lock last: by it a later process knows what a kill leaves behind."""
        self._clear()
        self.lock.unlink()
        self.path.rmdir()

    def resume_or_begin(self, begun_with: dict[str, Any], files: list[list[str]], *, restart: bool) -> Journal:
        """The journal of the work that was interrupted here, or of new work with these options on these `files`, their
        names and versions. With `restart` it is new work in any case.

        Raises UserError if that work had other options, and has come further than its beginning, or if what it has
        read has changed.
        """
        if restart:
            self._clear()
        journal, known = _read(Journal, self.journal), _read(list[list[str]], self.known_files)
        is_same = journal is not None and journal.options == begun_with and known in (None, files)
        if journal is None or not (journal.has_begun or is_same):
            self._clear()
            journal, known = Journal(begun_with), None
        journal.take_options(begun_with, self.path)
        if journal.phase == "reading":
            if known is not None:
                journal.check_files(files, known, self.path)
            replace_text(self.known_files, json.dumps(files) + "\n")
        self.dataset.mkdir(exist_ok=True)
        journal.save(self.journal)
        return journal

    def leave(self) -> None:
        """Remove the folder if there is nothing in it that would be missed, and those around it that were made for
        it."""
        journal = _read(Journal, self.journal)
        if journal is None or not journal.has_begun:
            with suppress(OSError):
                self._remove()
                for folder in self._made:
                    folder.rmdir()  # only if it is empty

    def put_in_place(self) -> None:
        """Give the dataset its name; an older one of that name is deleted when the new one has it."""

        def make_room() -> Path:
            if self.target.exists() and any(self.target.iterdir()):
                self._delete_replaced()
                self.target.rename(self.replaced)
            return self.target

        rename_whole(self.dataset, make_room)
        self._delete_replaced()
        self._remove()
