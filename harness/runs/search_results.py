"""Results of `-f`, in `results/` of the run's folder: the microbatches that fitted, and the memory of each, so that
memory over the microbatch can be drawn for one's own machines.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.common.errors import RunError, UserError
from harness.common.files import atomic_file
from harness.common.json_files import RecordedCount, read_json_object
from harness.runs.directory import RunDirectory
from harness.runs.results import NAME_CHARACTERS, SEARCH_PREFIX, Number, Recorded

# What decides the memory that a search finds, and so which searches take each other's place.
SAME = {"device", "world_size", "asked_gib", "accumulation_steps", "model", "train"}


class TriedMicrobatch(Recorded):
    """A microbatch that fitted, and the peak of the memory of one device with it, on rank 0."""

    microbatch_size: RecordedCount
    gib: Number


class MicrobatchSearch(Recorded):
    """One search for the largest microbatch."""

    kind: str = "microbatch_search"
    date: str  # ISO 8601, UTC
    device: str
    torch: str
    world_size: RecordedCount
    asked_gib: Number | None = None  # --memory-limit-gib
    limit_gib: Number  # of one device; on the CPU, of one process
    usable_gib: Number  # of it, what the peaks may come to
    largest: RecordedCount  # the answer: sequences in the largest microbatch that fits
    smallest_failed: RecordedCount | None = None
    is_all_data: bool = False  # the data set has no more: larger ones may fit
    tried: list[TriedMicrobatch]  # in the order of the search
    accumulation_steps: RecordedCount
    compiled: bool
    model: dict[str, Any]  # model.json, defaults filled in
    train: dict[str, Any]  # of train.json what memory depends on

    def name(self) -> str:
        """Name of the search's file, without suffix: the same for searches that ask the same."""
        asked = json.dumps(self.model_dump(mode="json", include=SAME), sort_keys=True)
        return SEARCH_PREFIX + hashlib.sha256(asked.encode()).hexdigest()[:NAME_CHARACTERS]


@dataclass(frozen=True)
class Searches:
    """Searches in a run's `results/`; `problems` has a line for each file that cannot be read."""

    found: list[MicrobatchSearch] = field(default_factory=list)  # by the names of their files
    problems: list[str] = field(default_factory=list)


def write_search(run: RunDirectory, search: MicrobatchSearch) -> Path:
    """Write it into the run's `results/`, in place of an earlier search that asked the same. Raises RunError."""
    path = run.results / f"{search.name()}.json"
    text = json.dumps(search.model_dump(mode="json"), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        run.results.mkdir(exist_ok=True)
        with atomic_file(path) as draft:
            draft.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{path}: cannot keep what was found: {error.strerror}") from None
    return path


def read_searches(run: RunDirectory) -> Searches:
    """All searches of a run."""
    searches = Searches()
    for path in sorted(run.results.glob(f"{SEARCH_PREFIX}*.json")):
        try:
            searches.found.append(MicrobatchSearch.model_validate(read_json_object(path)))
        except ValidationError:
            searches.problems.append(f"{path}: not a search of this version; use -f again, or move the file away")
        except UserError as error:
            searches.problems.append(str(error))
    return searches
