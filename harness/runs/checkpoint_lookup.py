"""Lookup of a run's checkpoints, and choice of the one to continue from. Without torch."""

from __future__ import annotations

from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import check_name
from harness.common.messages import nearest
from harness.runs.checkpoint_meta import CheckpointMeta
from harness.runs.directory import CHECKPOINT_NAME

LATEST, BEST = "latest", "best"
FOREIGN = "not written by this program; to train on from it, give its name as CHECKPOINT"


def find_checkpoint(folder: Path, name: str) -> Path:
    """The checkpoint `name` (a folder's name, `latest` or `best`) in `folder`.

    Raises UserError if there is none, or if the name leads out of the folder.
    """
    path = folder / check_name(name, "checkpoint")
    if not path.is_dir():
        links = [link for link in (BEST, LATEST) if (folder / link).is_dir()]
        known = [*links, *(known.name for _, known in list_checkpoints(folder))]
        meant = nearest(name, known)
        hint = f"did you mean {meant}?" if meant else f"there are: {', '.join(known[-4:]) or 'none'}"
        raise UserError(f"{path}: no such checkpoint; {hint}")
    target = path.resolve()
    if target.parent != folder.resolve():
        raise UserError(f"{path}: leads out of {folder}; a checkpoint must lie inside it")
    return folder / target.name


def choose_start(folder: Path, name: str | None) -> Path | None:
    """The checkpoint to continue from: the one asked for, else `latest`, else None. Raises UserError like
    `find_checkpoint`."""
    if (name is None or name == LATEST) and not (folder / LATEST).is_symlink():
        # Something that follows links has copied the folder, or the link is lost: the newest is what it pointed to.
        known = list_checkpoints(folder)
        return known[-1][1] if known else None if name is None else find_checkpoint(folder, name)
    return find_checkpoint(folder, LATEST if name is None else name)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(global step, path) of every checkpoint, by step, then by age."""
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    found = [(CHECKPOINT_NAME.fullmatch(path.name), path) for path in paths]
    return sorted((int(match.group(1)), path) for match, path in found if match)


def refuse_unnamed(start: Path, meta: CheckpointMeta, name: str | None) -> None:
    """Raises UserError for a notebook's checkpoint that was not asked for by its name."""
    if name is None and meta.is_from_notebook:
        raise UserError(f"{start}: {FOREIGN}, or use --restart")
