"""Progress of a preparation, on disk: with it a killed one continues with the same bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.common.errors import UserError
from harness.common.files import replace_text
from harness.data.preparation.options import Recorded
from harness.data.preparation.token_stream import StreamSize

Phase = Literal["reading", "read", "held out", "shuffled", "shared out"]


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

    options: dict[str, Recorded]  # what the work was begun with
    phase: Phase = "reading"
    here: Mark = field(default_factory=Mark)
    file_start: Mark = field(default_factory=Mark)  # the last one that was at the beginning of a file
    splits: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Journal | None:
        """The journal in a file; None if there is no file yet. Raises UserError if the file is damaged."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for key in ("here", "file_start"):
                sizes = {part: StreamSize(**values[key].get(part, {})) for part in ("size", "pool")}
                values[key] = Mark(**{**values[key], **sizes})
            return cls(**values)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, LookupError, RecursionError):
            raise UserError(f"{path}: damaged; begin again with --restart") from None

    def save(self, path: Path) -> None:
        """Write the journal; it is on the disk when this returns."""
        replace_text(path, json.dumps(asdict(self)) + "\n")

    @property
    def has_begun(self) -> bool:
        """True if there is any work to lose."""
        return bool(self.here.total.tokens)

    def move_to(self, mark: Mark) -> None:
        self.here = mark
        if not mark.documents:
            self.file_start = mark

    def take_options(self, options: dict[str, Recorded], folder: Path) -> None:
        """Raise UserError if the unfinished work was begun with other options, naming those.

        replace_invalid can be added later, too: so far all text was UTF-8.
        """
        keys = [key for key in {**self.options, **options} if self.options.get(key) != options.get(key)]
        if options.get("replace_invalid"):
            keys = [key for key in keys if key != "replace_invalid"]
        self.options = options if not keys else self.options
        if keys:
            changes = ", ".join(f"{key}: {self.options.get(key)}, not {options.get(key)}" for key in keys)
            raise UserError(
                f"{folder}: unfinished work with other options ({changes}); give the same again, or begin again with "
                "--restart"
            )

    @staticmethod
    def read_known(path: Path) -> list[list[str]] | None:
        """The names and versions of the files that work was begun with. Raises UserError if the list is damaged."""
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            raise UserError(f"{path}: damaged; begin again with --restart") from None

    def check_files(self, now: list[list[str]], known: list[list[str]], folder: Path) -> None:
        """Go back to a file's beginning if it has changed. Raises UserError if one that was read to its end has."""
        changed = next((at for at in range(self.here.file) if now[at : at + 1] != known[at : at + 1]), None)
        if changed is None and now[self.here.file : self.here.file + 1] != known[self.here.file : self.here.file + 1]:
            self.here = self.file_start
        elif changed is not None:
            raise UserError(
                f"{known[changed][0]}: has been read, and has since changed or gone, or another file comes before it "
                f"now: what is in {folder} cannot be continued; begin again with --restart"
            )
