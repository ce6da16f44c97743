"""Checkpoints: finding, saving, verifying, loading and pruning them. Finding a checkpoint does not import torch.

A checkpoint is a folder `<YYYYMMDDZHHMMSS>-iteration-<step>`. Until it is complete, it has a hidden name.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from harness.common.errors import EXIT, RunError, UserError
from harness.common.files import SAFE_NAME, check_name, check_writable, draft_folder, move, rename_whole, sha256, sync
from harness.common.messages import GIB, abbreviated, nearest
from harness.model.tensor_names import META, WEIGHTS
from harness.runs.checkpoint_meta import OPTIMIZER, CheckpointMeta, read_meta, verify_meta, write_meta
from harness.runs.directory import NAME_OF_SECOND, RunDirectory, step_of, unused_name

if TYPE_CHECKING:
    from torch import Tensor

LATEST, BEST = "latest", "best"
FOREIGN = "not written by this program; to continue from it, give its name as CHECKPOINT"
TEMPORARY_PREFIX = ".saving-"
SCALER, TRAIN_STATE = "scaler.pt", "train_state.pt"


class NoCheckpointError(UserError):
    """Error raised if a run has no checkpoint, or none with the given name."""


def find_checkpoint(folder: Path, name: str) -> Path:
    """Return the path of the checkpoint `name` in `folder`. `name` is a folder's name, `latest` or `best`. For a link,
    the path is that of its target. Raises NoCheckpointError if the checkpoint is missing, and UserError if `name` is
    invalid or leads out of `folder`."""
    path = folder / check_name(name, "checkpoint")
    if not path.is_dir():
        links = [link for link in (BEST, LATEST) if (folder / link).is_dir()]
        names = [known.name for _, known in list_checkpoints(folder)]
        meant = nearest(name, [*links, *names])
        hint = f"did you mean {meant}?" if meant else f"there are: {abbreviated([*links, *reversed(names)]) or 'none'}"
        raise NoCheckpointError(f"{path}: no such checkpoint; {hint}")
    target = path.resolve()
    if target.parent != folder.resolve():
        raise UserError(f"{path}: leads out of {folder}; a checkpoint must lie inside it")
    return folder / target.name


def choose_start(folder: Path, name: str | None) -> Path | None:
    """Return the checkpoint to resume from: `name`, or the target of the link `latest` if `name` is None. If the link
    is lost, it counts as pointing to the newest checkpoint.

    Return None if `name` is None and `folder` has neither checkpoints nor `latest`. Raises UserError as
    `find_checkpoint` does, or if `latest` is a folder and there are no other checkpoints.
    """
    latest = folder / LATEST
    if name not in (None, LATEST) or latest.is_symlink():
        return find_checkpoint(folder, LATEST if name is None else name)
    # The link is lost, or is a folder because the checkpoints were copied with links followed. It must have pointed to
    # the newest checkpoint.
    if known := list_checkpoints(folder):
        return known[-1][1]
    if latest.is_dir():
        raise UserError(
            f"{latest}: a folder, not a link to one; rename it to DATE-iteration-STEP, where STEP is the global_step "
            f"in its {META} (for example {time.strftime(NAME_OF_SECOND, time.gmtime())}-iteration-9)"
        )
    return None if name is None else find_checkpoint(folder, name)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (global step, path) of every checkpoint in `folder`, sorted by step, then by the date in its name. The
    list is empty if there is no such folder."""
    if not folder.is_dir():
        return []
    found = [(step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
    return sorted((step, path) for step, path in found if step >= 0)


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to continue as if it had not stopped."""

    weights: dict[str, Tensor]  # by their names in published checkpoints
    optimizer: dict[str, Any]  # states by parameter name; of an upstream checkpoint (upstream.py), AdamW's state dict
    scaler: dict[str, Any]  # empty without fp16
    train_state: dict[str, Any]  # of each rank: its random state, and the losses that it has not reported yet
    meta: CheckpointMeta
    tokenizer: tuple[str, bytes] | None = None  # name and contents of a file to write; None for GPT-2's tokenizer


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into `folder`, flush it to disk, and return its path. Point the link `latest` to it and, if
    `checkpoint.meta.is_best`, the link `best`, too. The caller must hold the run's lock, because incomplete checkpoints
    of other processes are removed.

    Raises RunError if the checkpoint cannot be written. Earlier checkpoints stay unchanged.
    """
    try:
        folder.mkdir(exist_ok=True)
        _remove_leftovers(folder)
        with draft_folder(folder / f"{TEMPORARY_PREFIX}{os.getpid()}") as draft:
            _write_files(draft, checkpoint)
            final = rename_whole(draft, partial(unused_name, folder, f"-iteration-{checkpoint.meta.global_step}"))
        point(folder, LATEST, final)
        if checkpoint.meta.is_best:
            point(folder, BEST, final)
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        raise RunError(f"{folder}: {_failure(error, folder, checkpoint.meta.global_step)}") from None
    return final


def _failure(error: BaseException, folder: Path, step: int) -> str:
    """Return the message, with a remedy, about a checkpoint that could not be written."""
    from harness.common.memory import MORE_MEMORY, is_out_of_memory, says_out_of_memory

    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    reason = next(iter(str(link or error).splitlines()), type(error).__name__)
    if is_out_of_memory(error) or says_out_of_memory(reason):
        failed, remedy = "out of memory while writing", f"{MORE_MEMORY},"
    else:
        # safetensors reports a full disk by an exception of its own instead of an OSError. So the free space is named
        # whatever the error is.
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / GIB
        failed, remedy, reason = "cannot write", "fix the cause", f"{reason} ({free:.2f} GiB free)"
    return (
        f"{failed} the checkpoint of step {step}: {reason}; older checkpoints are whole; {remedy} and {EXIT.again} "
        "to continue"
    )


def _write_files(draft: Path, checkpoint: Checkpoint) -> None:
    import torch

    from harness.model.weights import save_weights

    save_weights(checkpoint.weights, draft / WEIGHTS)
    parts = {OPTIMIZER: checkpoint.optimizer, TRAIN_STATE: checkpoint.train_state}
    if checkpoint.scaler:
        parts[SCALER] = checkpoint.scaler
    for name, part in parts.items():
        with (draft / name).open("wb") as file:
            torch.save(part, file)
    if checkpoint.tokenizer is not None:
        name, contents = checkpoint.tokenizer
        (draft / name).write_bytes(contents)
    names = sorted(path.name for path in draft.iterdir())
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(names, pool.map(lambda name: sha256(draft / name), names), strict=True))
    write_meta(draft, checkpoint.meta.model_copy(update={"sha256": hashes}))


def check_tokenizer(tokenizer: str | Path) -> None:
    """Raise UserError if a tokenizer's file has the name of one of a checkpoint's own files. Each checkpoint also holds
    a copy of the tokenizer's file."""
    if isinstance(tokenizer, Path) and tokenizer.name in (WEIGHTS, OPTIMIZER, SCALER, TRAIN_STATE, META):
        raise UserError(
            f"{tokenizer}: a tokenizer's file cannot have the name of a checkpoint's own file; rename it, and give its "
            f'new name as "tokenizer" in the {META} beside it'
        )


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def point(folder: Path, link: str, target: Path) -> None:
    """Make `folder/link` a relative symbolic link to the checkpoint `target` in the same folder, in one rename. Raises
    OSError if the link cannot be made."""
    draft = folder / f"{TEMPORARY_PREFIX}{link}-{os.getpid()}"
    draft.unlink(missing_ok=True)
    try:
        draft.symlink_to(target.name)
    except OSError as error:  # its message names only the target, without the folder
        raise OSError(error.errno, error.strerror, str(folder / link)) from None
    path = folder / link
    if path.is_dir() and not path.is_symlink():  # a copy in place of the link: `folder` was copied with links followed
        path.rename(folder / f"{link}-copy-{time.time_ns()}")
    draft.replace(path)
    sync(folder)


def open_start(run: RunDirectory, name: str | None, *, verify: bool = True) -> tuple[Path, CheckpointMeta] | None:
    """Return the path and the meta.json of the checkpoint that `choose_start` returns for `name`, or None if it returns
    None.

    With `verify`, the checkpoint's hashes are verified. The caller must then hold the run's lock, because
    incomplete checkpoints of other processes are removed.

    Raises UserError if the checkpoint is missing or found to be damaged, or if a finished run has no checkpoint. A
    checkpoint of the lab notebook's program (upstream.py) is not verified, and is refused if `name` is None.
    """
    folder = run.checkpoints
    if verify:
        _remove_leftovers(folder)
    try:
        start = choose_start(folder, name)
        meta = read_meta(start) if start else None
        if start and meta and verify and not meta.is_from_notebook:
            verify_checkpoint(start)
    except (UserError, OSError) as error:
        # If there is no checkpoint `name`, the error's message already says what a name is, or lists the checkpoints.
        if name is not None and not (SAFE_NAME.fullmatch(name) and os.path.lexists(folder / name)):
            raise
        whole = newest_whole(folder)
        offer = "no other checkpoint is known to be whole: fix the cause"
        if whole:
            offer = f"the newest whole checkpoint is {whole.name}: give that name as CHECKPOINT"
        reason = f"{error.filename or folder}: {error.strerror}" if isinstance(error, OSError) else error
        raise UserError(f"{reason}; {offer}, or use --restart") from None
    if start is None or meta is None:
        if run.summary.is_file():  # so that nobody pays for a second training by accident
            if folder.is_symlink():
                check_writable(folder)  # its disk may not be mounted
            remedy = "put one back, or train the run again with ddp_train.py --restart"
            raise UserError(f"{run.summary}: the run has finished, but it has no checkpoint; {remedy}")
        return None
    if name is None and meta.is_from_notebook:
        raise UserError(f"{start}: {FOREIGN}; to train from scratch instead, use --restart")
    return start, meta


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that `verify_checkpoint` accepts, or None if there is none."""
    with suppress(OSError):
        for _, path in reversed(list_checkpoints(folder)):
            with suppress(UserError, OSError):
                verify_checkpoint(path)
                return path
    return None


def verify_checkpoint(path: Path) -> None:
    """Verify the hashes of a checkpoint's files. Raises UserError, naming the first file that is missing or damaged,
    and OSError if a file cannot be read. A checkpoint of the lab notebook's program (upstream.py), which has no hashes,
    raises UserError, too."""
    meta, verified = read_meta(path), path.resolve()
    if meta.is_from_notebook:
        raise UserError(f"{path}: {FOREIGN}")
    for name in (WEIGHTS, OPTIMIZER, TRAIN_STATE, *([SCALER] if (path / SCALER).exists() else [])):
        if name not in meta.sha256:
            raise UserError(f"{path / META}: damaged: no SHA-256 of {name}")
    for name, expected in {META: "", **meta.sha256}.items():
        file = path / check_name(name, f"{path / META}: file")
        if not file.is_file():
            raise UserError(f"{file}: missing")
        if file.resolve().parent != verified:
            raise UserError(f"{file}: a link that leads out of the checkpoint; replace it with a copy of the file")
        if name == META:
            verify_meta(path)
        elif sha256(file) != expected:
            raise UserError(f"{file}: damaged (its SHA-256 is not the one in meta.json)")


def load_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint folder `path` into the CPU's memory, without verifying hashes. Raises UserError naming a file
    that cannot be read. States that a checkpoint of the lab notebook's program (upstream.py) lacks become empty dicts.
    The tokenizer is not read."""
    from harness.model.weights import load_weights

    meta = read_meta(path)
    foreign = meta.is_from_notebook
    return Checkpoint(
        weights=load_weights(path / WEIGHTS),
        optimizer={} if foreign and not (path / OPTIMIZER).exists() else _load_state(path / OPTIMIZER),
        scaler=_load_state(path / SCALER) if (path / SCALER).exists() else {},
        train_state={} if foreign else _load_state(path / TRAIN_STATE),
        meta=meta,
    )


def _load_state(path: Path) -> dict[str, Any]:
    import torch

    try:
        # Since a checkpoint may come from somebody else, load nothing but tensors and plain containers (weights_only).
        with warnings.catch_warnings(action="ignore"):  # torch's warning suggests trusting the file
            return torch.load(path, weights_only=True, map_location="cpu")
    except Exception:  # other files raise many types of errors, whose messages suggest trusting the file
        raise UserError(
            f"{path}: not a readable state file: nothing but tensors and plain values may be in it; give the name of "
            "another checkpoint, or --restart"
        ) from None


def rewind_to(folder: Path, start: Path, make_aside: Callable[[], Path]) -> None:
    """Make the checkpoint `start` the latest one, and move checkpoints of later steps out of `folder`. The link `best`
    then points to the best checkpoint that `start` records. If none is recorded, or that checkpoint is gone, the link
    is removed.

    `make_aside` returns a folder for old results. It is called only if a checkpoint is moved. Raises RunError or
    OSError if a checkpoint or link cannot be changed.
    """
    meta, known = read_meta(start), list_checkpoints(folder)
    later = [path for at, path in known if at > meta.global_step]
    # `best` may point to the wrong checkpoint: the process may have been killed between replacing the two links, or the
    # best checkpoint may be of a later step. The best step recorded in `start` is right.
    best = [path for at, path in known if at == meta.best_step]
    for link, path in ((LATEST, start), *((BEST, path) for path in best[-1:])):
        is_right = (folder / link).is_symlink() and os.path.realpath(folder / link) == os.path.realpath(path)
        if not is_right:
            point(folder, link, path)  # before anything is moved, so that the link never dangles
    if not best and (folder / BEST).is_symlink():
        (folder / BEST).unlink(missing_ok=True)  # the link's target was pruned, or is moved below
    if later:
        aside = make_aside() / "checkpoints"
        aside.mkdir()
        for path in later:
            move(path, aside / path.name)


def prune(folder: Path, keep: int, protected: set[str]) -> None:
    """Delete checkpoints, except `best`, `latest`, those whose folders' names are in `protected`, and the newest `keep`
    of the others. Raises no error if a checkpoint cannot be deleted."""
    safe = protected | {os.path.basename(os.path.realpath(folder / link)) for link in (LATEST, BEST)}
    candidates = [path for _, path in list_checkpoints(folder) if path.name not in safe]
    for path in candidates[: max(0, len(candidates) - keep)]:
        doomed = folder / f"{TEMPORARY_PREFIX}pruned-{path.name}"
        try:
            path.rename(doomed)  # before deleting, so that a half-deleted folder never has a checkpoint's name
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)
