"""Work folder and journal of a preparation. After a kill, a preparation from text resumes from the journal, and writes
the same bytes as an uninterrupted one. An import of token shards begins anew."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from harness.common.errors import UserError, os_errors_as
from harness.common.files import check_name, rename_whole, replace_text
from harness.common.lock import RunLock
from harness.common.messages import abbreviated, tell
from harness.data.preparation.splits import SPLITS, Split
from harness.data.preparation.stream import StreamSize

DATASET_FILES = {"meta.json", "README.md", "tokenizer.json", *(f"{split}.safetensors" for split in SPLITS)}

Phase = Literal["reading", "read", "held out", "shuffled", "shared out"]
Kind = TypeVar("Kind")


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raise UserError if `target` cannot be the path of a new dataset, or if its owner or name is not valid. A folder
    with files is refused if `overwrite` is false, or if it has files or folders that are not part of a dataset."""
    # A target of one part, without an owner, is accepted: the user moves it to DATASETS_DIR/owner/name later.
    for part in target.parts if len(target.parts) == 1 else target.absolute().parts[-2:]:
        check_name(part, f"{target}: invalid name of a dataset (owner/name, the last two folders):")
    *_, above, owner, name = ("", *target.absolute().parts)
    if len(target.parts) > 1 and owner == "datasets" != above:  # `owner` is DATASETS_DIR
        wanted = target.parent / "me" / name
        raise UserError(f"{target}: has no owner, but training looks for DATASETS_DIR/owner/name; give {wanted}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise UserError(f"{target}: is a file or a link; name a folder that does not exist")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"{target}: exists; name another folder, or replace it with --overwrite")
        if others := _not_of_a_dataset(target):
            raise UserError(
                f"{target}: holds files or folders that are not part of a dataset and would be deleted "
                f"({abbreviated(others)}); move them away"
            )


def is_dataset_file(name: str) -> bool:
    """Return True if a dataset of this tool, here or on the Hub, can have a file called `name`."""
    return name in DATASET_FILES or name.endswith(".tiktoken.json")


def _not_of_a_dataset(folder: Path) -> list[str]:
    """Return the names of the files and folders in `folder` that are not part of a dataset."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir() or not is_dataset_file(path.name))


@dataclass(frozen=True)
class Mark:
    """Position in the input at the end of a document, and the sizes that the two output streams of tokens have at this
    position."""

    file: int = 0  # number of the file that is read next
    documents: int = 0  # documents of `file` that have been read, including those without text
    empty: int = 0  # documents without text so far, in all files
    left_out: int = 0  # documents so far that occur in a held-out split
    size: StreamSize = field(default_factory=StreamSize)  # of the stream with the documents that are not in the pool
    # of the pool: documents that may be held out; earlier versions saved none
    pool: StreamSize = field(default_factory=StreamSize)

    @property
    def total(self) -> StreamSize:
        return self.size + self.pool


@dataclass
class Journal:
    """State of the work, as saved in journal.json. When the work is resumed, everything that was written after the last
    save is cut off or written again."""

    options: dict[str, Any]  # the options with which the work was begun
    origin: dict[str, Any] = field(default_factory=dict)  # of the text, for meta.json; earlier versions did not save it
    phase: Phase = "reading"  # "reading" is under way; the other phases name the step that is done
    here: Mark = field(default_factory=Mark)
    file_start: Mark = field(default_factory=Mark)  # the last mark at the beginning of a file
    splits: list[Split] = field(default_factory=list)  # empty until they are chosen


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """Return the contents of a JSON file as an instance of `kind`, or None if the file does not exist. Raises UserError
    if the file is damaged."""
    try:
        # json, because pydantic's parser refuses a name that is not valid UTF-8
        return TypeAdapter(kind).validate_python(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: damaged; begin again with --restart") from None


class WorkFolder:
    """Hidden folder in which one process at a time makes a dataset. It is beside `target`, the dataset's final path."""

    def __init__(self, target: Path) -> None:
        """Set the paths."""
        self.target = target
        self.path = target.parent / f".{target.name}.partial"
        self.dataset = self.path / "dataset"
        self.lock = self.path / ".lock"
        self.journal = Journal({})  # set by `resume_or_begin`
        self.journal_path = self.path / "journal.json"
        # An older dataset is moved to this path while the new dataset is renamed to `target`.
        self.replaced = target.parent / f".{target.name}.replaced"
        self._made: list[Path] = []  # parent folders that `open` created; the innermost first

    def open(self) -> None:
        """Create the folder, or reuse the folder of an interrupted process, and lock it until this process ends. Undo
        or complete a `put_in_place` that was interrupted. Raises UserError if the folder cannot be created, if another
        process works in it, or if it was not made by this tool. Raises RunError if its lock file cannot be written."""
        if self.path.is_symlink():
            raise UserError(f"{self.path}: is a link, and files behind it would be deleted; remove the link")
        with os_errors_as(UserError, f"{self.path}: cannot make this folder"):
            self._made = [folder for folder in self.path.parents if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.lock.exists() and any(self.path.iterdir()):
            raise UserError(
                f"{self.path}: reserved for unfinished work, but holds files of something else; move it away"
            )
        RunLock.take(self.lock, "made")
        # Repair the state that a kill during `put_in_place` can leave.
        if self.journal_path.exists() and self.replaced.exists() and not self.target.exists():
            self.replaced.rename(self.target)  # put the older dataset back until the new one replaces it
        elif self.journal_path.exists() and not self.dataset.exists():
            self._delete_replaced()
            self._clear()

    def _delete_replaced(self) -> None:
        if self.replaced.exists() and not _not_of_a_dataset(self.replaced):
            shutil.rmtree(self.replaced)

    def _clear(self) -> None:
        """Delete the folder's contents except the lock."""
        self.journal_path.unlink(missing_ok=True)  # first, so that no later process resumes from a part of the contents
        for entry in self.path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self.lock:
                entry.unlink()

    def _remove(self) -> None:
        """Delete the folder."""
        self._clear()
        self.lock.unlink()  # last, because it shows a later process that this tool made the folder
        self.path.rmdir()

    def save(self, phase: Phase) -> None:
        """Write the journal with `phase`, the phase that the work has reached."""
        self.journal.phase = phase
        replace_text(self.journal_path, json.dumps(asdict(self.journal)) + "\n")

    def resume_or_begin(self, options: dict[str, Any], files: list[list[str]], *, restart: bool) -> Journal:
        """Return the journal of the interrupted work in this folder, or a new one. The journal is saved, and
        `self.dataset` is created.

        `options` are the options that determine the splits and the tokenizer. `files` are the [name, version] of each
        input file. The journal is new in three cases:

        - `restart` is true.
        - There is no interrupted work.
        - Options or files have changed, and the old journal records no tokens. For token shards, it never records
          any.

        If the old journal records tokens, changed options raise UserError, but replace_invalid may be added. Changed
        files matter only in the phase "reading". If a file was already read to the end, its change raises UserError. If
        the file was being read, `Journal.here` goes back to `Journal.file_start`.
        """
        if restart:
            self._clear()
        known_files = self.path / "files.json"
        journal, known = _read(self.journal_path, Journal), _read(known_files, list) or files
        is_same = journal is not None and journal.options == options and known == files
        if journal is None or not (journal.here.total.tokens or is_same):
            self._clear()
            journal, known = Journal(options), files
        before = journal.options
        # replace_invalid may be added, because all text that was read without it was valid UTF-8.
        changes = ", ".join(
            f"{key}: {before.get(key)}, not {options.get(key)}"
            for key in {**before, **options}
            if before.get(key) != options.get(key) and not (key == "replace_invalid" and options.get(key))
        )
        if changes:
            raise UserError(
                f"{self.path}: unfinished work with other options ({changes}); give the same options, or begin again "
                "with --restart"
            )
        journal.options = options
        if journal.phase == "reading":
            at = journal.here.file
            changed = [each for each in range(at + 1) if files[each : each + 1] != known[each : each + 1]]
            if changed and changed[0] < at:
                raise UserError(
                    f"{known[changed[0]][0]}: was read already, but has since changed, was removed, or now has a new "
                    f"file before it; the work in {self.path} cannot be resumed; begin again with --restart"
                )
            if changed:
                journal.here = journal.file_start
            replace_text(known_files, json.dumps(files) + "\n")
        elif known != files:
            tell(
                f"note: the text was read before the work in {self.path} was interrupted; later changes of the input "
                "files are not in the dataset; --restart reads the files again"
            )
        self.dataset.mkdir(exist_ok=True)
        self.journal = journal
        self.save(journal.phase)
        return journal

    def leave(self) -> None:
        """Delete the work folder and then the empty parent folders that `open` created, unless the journal records
        tokens."""
        journal = _read(self.journal_path, Journal)
        if journal is None or not journal.here.total.tokens:
            with suppress(OSError):
                self._remove()
                for folder in self._made:
                    folder.rmdir()  # only if it is empty

    def put_in_place(self) -> None:
        """Rename the finished dataset to `target`, and delete the work folder. An older dataset at `target` is moved
        away before the rename, and deleted after it."""

        def make_room() -> Path:
            if self.target.exists() and any(self.target.iterdir()):
                self._delete_replaced()
                self.target.rename(self.replaced)
            return self.target

        rename_whole(self.dataset, make_room)
        self._delete_replaced()
        self._remove()
