"""Lookup of the run and checkpoint of a measured model, so that its measurements stay in that run's folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.common.errors import RunError, UserError
from harness.common.files import check_name, sha256
from harness.model.tensor_names import WEIGHTS
from harness.runs.checkpoint_lookup import BEST, LATEST
from harness.runs.checkpoint_meta import read_meta
from harness.runs.directory import RunDirectory
from harness.runs.results import MeasuredWeights


@dataclass(frozen=True)
class ModelInRun:
    """A run, and those of its weights that were measured."""

    run: RunDirectory
    weights: MeasuredWeights


def model_in_run(weights: Path) -> ModelInRun | None:
    """The checkpoint whose weights this file has; None if it lies in no run's `checkpoints/`.

    The path may lead through links: `best`, a link to the run's folder, or a `checkpoints` that is one. Raises OSError
    if the file cannot be read.
    """
    for path in (Path(os.path.abspath(weights)), Path(os.path.realpath(weights))):
        folder, checkpoints = Path(os.path.realpath(path.parent)), path.parent.parent
        run = RunDirectory(checkpoints.parent)
        is_there = run.checkpoints == checkpoints and folder.parent == Path(os.path.realpath(checkpoints))
        if is_there and path.name == WEIGHTS and run.model_json.is_file():
            return ModelInRun(run, _describe(folder, sha256(path)))
    return None


def find_model(run: RunDirectory, checkpoint: str, digest: str) -> ModelInRun | None:
    """The checkpoint of this name; None if the run has none with weights of this SHA-256 (any more). Raises UserError
    for a name that none has."""
    weights = run.checkpoints / check_name(checkpoint, "checkpoint") / WEIGHTS
    found = model_in_run(weights) if weights.is_file() else None
    return found if found is not None and found.weights.sha256 == digest else None


def _describe(folder: Path, digest: str) -> MeasuredWeights:
    """Return the record of a checkpoint's weights, from its folder and their SHA-256 `digest`."""
    facts: dict[str, int] = {}
    with suppress(UserError):  # without a meta.json, or with another program's, the hash has to do
        meta = read_meta(folder)
        facts = {key: getattr(meta, key) for key in ("global_step", "tokens_seen") if key in meta.model_fields_set}
    leads_here = {link: os.path.realpath(folder.parent / link) == str(folder) for link in (BEST, LATEST)}
    return MeasuredWeights(
        checkpoint=folder.name, sha256=digest, is_best=leads_here[BEST], is_latest=leads_here[LATEST], **facts
    )


@contextmanager
def warned_if_not_kept() -> Iterator[None]:
    """Turn an error inside into a warning on standard error: the result of minutes of work is printed by then."""
    try:
        yield
    except (UserError, RunError) as error:
        _warn(str(error))
    except OSError as error:
        _warn(f"{error.filename or 'a file'}: {error.strerror or error}")


def _warn(reason: str) -> None:
    print(f"warning: not kept among the run's results: {reason}", file=sys.stderr, flush=True)
