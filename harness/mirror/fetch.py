"""Checkpoints in a mirror: finding the whole ones, and fetching the newest one.

A checkpoint in a mirror is whole if its meta.json is valid and no file listed in it is missing. The hashes of these
files are verified only by a fetch. A run goes back if it is restarted, or resumed from a checkpoint before its latest.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from tqdm import tqdm

from harness.common.errors import RunError, UserError
from harness.common.files import SAFE_NAME, atomic_file, move, rename_whole, sha256
from harness.common.messages import tell
from harness.mirror.store import PIECE, Mirror, reason_of
from harness.model.tensor_names import META, WEIGHTS
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta, verify_meta
from harness.runs.checkpoints import BEST, LATEST, choose_start, list_checkpoints, point, verify_checkpoint
from harness.runs.directory import CHECKPOINT_NAME, RunDirectory, recency, step_of

ASIDE = "meta-aside.json"  # new name of a checkpoint's meta.json after the run has gone back to an earlier step
RESULTS_ASIDE = "results-aside"  # folder for measurements of checkpoints after the step that the run went back to
FETCHING_PREFIX = ".fetching-"
FETCHING_TRIES = 6  # with back-off: pauses of 1, 2, 4, ... seconds between them
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def names_in(files: dict[str, int]) -> list[str]:
    """Return the names of all checkpoint folders among a mirror's `files`, whole or not, the newest first."""
    parts = [path.split("/") for path in files]
    names = {part[1] for part in parts if len(part) == 3 and part[0] == "checkpoints" and step_of(part[1]) >= 0}
    return sorted(names, key=recency, reverse=True)


def names_with_meta(files: dict[str, int]) -> list[str]:
    """Return the names of the checkpoints among a mirror's `files` that have a meta.json, the newest first. The others
    are incomplete or set aside."""
    return [name for name in names_in(files) if f"checkpoints/{name}/{META}" in files]


def read_remote_meta(mirror: Mirror, files: dict[str, int], name: str) -> CheckpointMeta | None:
    """Return the meta.json of a checkpoint in a mirror, or None if the checkpoint is not whole. Raises the errors of
    the store."""
    if f"checkpoints/{name}/{META}" not in files:
        return None
    content = mirror.read(f"checkpoints/{name}/{META}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.mkdir()
        (path / META).write_bytes(content or b"")
        try:
            meta = read_meta(path)
            verify_meta(path)
        except UserError:
            return None
    listed = [each for each in meta.sha256 if each != META]
    is_whole = WEIGHTS in listed and all(
        SAFE_NAME.fullmatch(each) and f"checkpoints/{name}/{each}" in files for each in listed
    )
    return meta if is_whole else None


def newest_in_mirror(mirror: Mirror, files: dict[str, int]) -> tuple[str, CheckpointMeta] | None:
    """Return name and meta.json of the newest whole checkpoint in a mirror, or None if there is none. Raises the errors
    of the store."""
    for name in names_in(files):
        if meta := read_remote_meta(mirror, files, name):
            return name, meta
    return None


def newer_in_mirror(mirror: Mirror, run: RunDirectory) -> tuple[str, CheckpointMeta] | None:
    """Return name and meta.json of the newest whole checkpoint in the mirror that the run has not abandoned by going
    back. Return None if none is newer than the latest one here. Raises RunError if the mirror cannot be read. Also
    raises the errors of `refuse_if_set_aside`."""
    files = without_left(run, retried(mirror, mirror.files))
    refuse_if_set_aside(run, mirror, files)
    found = retried(mirror, newest_in_mirror, mirror, files)
    return found if found and recency(found[0]) > recency(_local_name(run)) else None


def bring(run: RunDirectory, mirror: Mirror, check: Callable[[CheckpointMeta], None]) -> str | None:
    """Make the newest whole checkpoint in the mirror the latest one here, if it is newer. Return its name, or None if
    no checkpoint was taken. The caller must hold the run's lock.

    - In the mirror, checkpoints that are damaged, or that the run has abandoned by going back, do not count.
    - If the latest one here is damaged, its copy in the mirror can replace it. The damaged one is moved below `aside/`.
    - Results, metrics, summary, chart and the best checkpoint are fetched, too.
    - `check` is called with a checkpoint's meta.json before the checkpoint is fetched.

    Raises the errors of `check` and of `refuse_if_set_aside`. Raises UserError if no checkpoint is here and those in
    the mirror are damaged. Raises RunError if the mirror cannot be read or a file cannot be moved.
    """
    there, brought, is_damaged = retried(mirror, mirror.files), None, False
    files = without_left(run, there)
    refuse_if_set_aside(run, mirror, files)
    damaged = _damaged_start(run, files)
    for name in names_in(files):
        if recency(name) <= recency(_local_name(run)) and name != damaged:
            break
        meta = retried(mirror, read_remote_meta, mirror, files, name)
        if meta is not None:
            check(meta)
            if _bring_checkpoint(run, mirror, there, name, meta, damaged):
                brought = name
                break
            is_damaged = True
        elif f"checkpoints/{name}/{META}" in files:  # it was whole once
            is_damaged = True
            warn_of_damage(mirror, name, f"{META} cannot be read, or a file that it lists is missing")
    for path in run.checkpoints.glob(f"{FETCHING_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
    if is_damaged and brought is None and not _local_name(run):
        raise UserError(
            f"mirror {mirror.name}: no checkpoint there is whole; ddp_train.py --restart trains anew and leaves the "
            "damaged ones there; ddp_train.py --mirror none trains without a mirror; mirror.py fetch --without-weights "
            "brings the metrics"
        )
    return brought


def left_by_going_back(run: RunDirectory, files: dict[str, int]) -> Callable[[str], bool]:
    """Return a predicate on checkpoint names: True for a checkpoint in the mirror that the run has abandoned by going
    back on this machine, until the next upload sets it aside. Some of these were never here. `files` are all files of
    the mirror."""
    here = {path.name: step for step, path in list_checkpoints(run.checkpoints)}
    # The next upload renames the meta.json of abandoned checkpoints. Until then, this function finds them.
    moved = {path.name for path in run.aside.glob("*/checkpoints/*") if f"checkpoints/{path.name}/{META}" in files}
    last = max(moved - {*here}, default="")  # the newest, because names begin with the date
    stayed = max((step for name, step in here.items() if name <= last), default=-1)
    return lambda name: name not in here and name <= last and step_of(name) > stayed


def without_left(run: RunDirectory, files: dict[str, int]) -> dict[str, int]:
    """Return the mirror's `files` without meta.json and measurements of the checkpoints that the run has abandoned by
    going back. Until the next upload, these files are still in the mirror."""
    is_left = left_by_going_back(run, files)

    def is_gone(file: str) -> bool:
        checkpoint = CHECKPOINT_NAME.search(file)
        is_chosen_by = file.endswith(f"/{META}") or file.startswith(f"{run.results.name}/")
        return is_chosen_by and checkpoint is not None and is_left(checkpoint[0])

    return {file: size for file, size in files.items() if not is_gone(file)}


def _damaged_start(run: RunDirectory, files: dict[str, int]) -> str | None:
    """Return the name of the checkpoint from which the run would continue. Return None if this checkpoint is not
    damaged here, or if the mirror's `files` lack its meta.json. Prints a note about the damage."""
    start = choose_start(run.checkpoints, None)
    if start is None or f"checkpoints/{start.name}/{META}" not in files:
        return None
    with suppress(UserError):  # meta.json cannot be read
        if read_meta(start).is_from_notebook:  # it has no hashes
            return None
    try:
        verify_checkpoint(start)
    except (UserError, OSError) as error:
        tell(f"note: {error}; the mirror has a copy")
        return start.name
    return None


def refuse_if_set_aside(run: RunDirectory, mirror: Mirror, files: dict[str, int]) -> None:
    """Raise UserError if another machine has set aside the mirror's copy of the newest checkpoint here that was ever
    sent. That machine has restarted the run, or resumed it from an earlier checkpoint."""
    # Without this refusal, this machine would overwrite the other machine's work.
    for _, path in reversed(list_checkpoints(run.checkpoints)):
        if f"checkpoints/{path.name}/{META}" in files:
            return  # the run in the mirror is this one, whatever was set aside earlier
        if is_set_aside(files, path.name):
            raise UserError(
                f"mirror {mirror.name}: another machine has restarted this run, or continued it without {path}; move "
                f"{run.checkpoints} away to continue that machine's run here, or give another mirror"
            )


def is_set_aside(files: dict[str, int], name: str) -> bool:
    """Return True if a checkpoint in a mirror has been set aside, because the run went back to an earlier step."""
    return f"checkpoints/{name}/{ASIDE}" in files and f"checkpoints/{name}/{META}" not in files


def _bring_checkpoint(
    run: RunDirectory, mirror: Mirror, files: dict[str, int], name: str, meta: CheckpointMeta, damaged: str | None
) -> bool:
    """Do the work of `bring` for one checkpoint. Return False if the checkpoint is damaged in the mirror. `files` are
    all files of the mirror. `damaged` is the name of a checkpoint that is damaged here, or None."""
    best = name if meta.best_step == meta.global_step else None
    if best is None:
        best = next((each for each in names_with_meta(files) if step_of(each) == meta.best_step), None)

    def put_in_place(draft: Path, name: str) -> None:
        if name == damaged:
            (run.checkpoints / LATEST).unlink(missing_ok=True)  # so that the link never dangles
            move(run.checkpoints / name, run.new_aside() / name)
        rename_whole(draft, lambda: run.checkpoints / name)

    if name == damaged or not (run.checkpoints / name).exists():
        draft = fetch_checkpoint(run, mirror, files, name, meta)
        if draft is None:
            return False
        if best not in (None, name) and (best == damaged or not (run.checkpoints / best).exists()):
            best_meta = retried(mirror, read_remote_meta, mirror, files, best)
            drafted = best_meta and fetch_checkpoint(run, mirror, files, best, best_meta)
            if drafted:
                put_in_place(drafted, best)
        fetch_results(run, mirror, without_left(run, files))
        # If a damaged checkpoint is replaced, metrics and summary here are of the same training.
        if name != damaged or not run.metrics.exists() or run.metrics.stat().st_size < meta.metrics_bytes:
            fetch_metrics(run, mirror)
        if name != damaged or not run.summary.exists():
            fetch_summary_and_chart(run, mirror, files, meta)
        # Last of all files, so that after a kill the next process fetches what is missing.
        put_in_place(draft, name)
    if best is not None and (run.checkpoints / best).is_dir():
        point(run.checkpoints, BEST, run.checkpoints / best)
    point(run.checkpoints, LATEST, run.checkpoints / name)  # last: without it, the newest is used
    return True


def warn_of_damage(mirror: Mirror, name: str, reason: str) -> None:
    """Print a warning that a checkpoint in a mirror is not used."""
    tell(f"warning: mirror {mirror.name}: checkpoint {name} is damaged ({reason}) and is not used")


def _local_name(run: RunDirectory) -> str:
    start = choose_start(run.checkpoints, None)
    return "" if start is None else start.name


def fetch_checkpoint(
    run: RunDirectory, mirror: Mirror, files: dict[str, int], name: str, meta: CheckpointMeta
) -> Path | None:
    """Fetch a checkpoint into a hidden folder in `run.checkpoints`, and return this folder. Return None, with a
    warning, if a file does not have the hash in `meta`. An interrupted fetch is continued."""
    draft = run.checkpoints / f"{FETCHING_PREFIX}{name}"
    draft.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in meta.sha256 if each != META]
    total = sum(files[f"checkpoints/{name}/{each}"] for each in wanted)
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=f"fetching {name}", disable=None)
    if bar.disable and total:
        print(f"fetching {name} ({total:,} bytes) from {mirror.name}", flush=True)
    with bar:
        for each in wanted:
            path, final = draft / f"{each}.part", draft / each
            size = files[f"checkpoints/{name}/{each}"]
            for _ in range(2):
                if final.exists():
                    bar.update(size)
                else:
                    _download(mirror, f"checkpoints/{name}/{each}", path, size, bar)
                    path.rename(final)
                if sha256(final) == meta.sha256[each]:
                    break
                final.unlink()  # damaged on the way, perhaps
                bar.update(-size)
            else:
                warn_of_damage(mirror, name, f"the SHA-256 of {each} is not the one in {META}")
                shutil.rmtree(draft)
                return None
    (draft / META).write_bytes(retried(mirror, mirror.read, f"checkpoints/{name}/{META}") or b"")
    return draft


def _download(mirror: Mirror, remote: str, path: Path, size: int, bar: tqdm) -> None:
    """Fetch the rest of a file of `size` bytes, of which `path` holds the beginning, and advance `bar`."""
    with path.open("ab") as file:
        if file.tell() > size:
            file.truncate(0)
        at = file.seek(0, 2)
        bar.update(at)
        while at < size:
            piece = retried(mirror, mirror.read, remote, at, min(size, at + PIECE))
            if not piece:
                raise RunError(f"mirror {mirror.name}: {remote}: ends after {at:,} of {size:,} bytes; try again")
            file.write(piece)
            file.flush()
            at += len(piece)
            bar.update(len(piece))


def fetch_metrics(run: RunDirectory, mirror: Mirror) -> None:
    """Replace metrics.jsonl with the mirror's. If the mirror's does not begin with the local one, the local one is
    first moved to a folder below `aside/`."""
    content = retried(mirror, mirror.read, run.metrics.name) or b""
    here = run.metrics.read_bytes() if run.metrics.exists() else b""
    if not content.startswith(here):
        move(run.metrics, run.new_aside() / run.metrics.name)
    with atomic_file(run.metrics) as draft:
        draft.write_bytes(content)


def fetch_summary_and_chart(run: RunDirectory, mirror: Mirror, files: dict[str, int], meta: CheckpointMeta) -> None:
    """Replace summary and chart with the mirror's. If the mirror's summary is damaged or has more training tokens than
    `meta`, nothing is fetched. A summary here that is not the fetched one is moved below `aside/`, with the chart."""
    wanted = [path for path in (run.summary, run.chart) if path.name in files]
    contents = {path: retried(mirror, mirror.read, path.name) or b"" for path in wanted}
    if tokens_of_summary(contents.get(run.summary)) > meta.tokens_seen:
        contents = {}
    if run.summary.is_file() and run.summary.read_bytes() != contents.get(run.summary):
        run.set_summary_and_chart_aside(run.new_aside())
    for path, content in contents.items():
        with atomic_file(path) as draft:
            draft.write_bytes(content)


def tokens_of_summary(content: bytes | None) -> float:
    """Return the number of training tokens in a summary.json: 0 if there is no such file, infinity if it is damaged."""
    with suppress(ValueError, AttributeError, TypeError):
        return float(json.loads(b"{}" if content is None else content).get("tokens_seen", 0))
    return math.inf


def fetch_results(run: RunDirectory, mirror: Mirror, files: dict[str, int]) -> None:
    """Fetch the files of results/ and compile-cache/ that are not here. `files` is the result of `without_left`.
    Measurements of checkpoints that were set aside are not fetched; if they are here, they are moved below `aside/`."""

    def is_old(file: str) -> bool:
        checkpoint = CHECKPOINT_NAME.search(file)  # a measurement's file name contains this
        is_moved = f"{RESULTS_ASIDE}/{file}" in files and f"results/{file}" not in files
        return is_moved or (checkpoint is not None and is_set_aside(files, checkpoint[0]))

    if old := [path for path in run.results.glob("*") if is_old(path.name)]:
        folder = run.new_aside() / run.results.name
        folder.mkdir()
        for path in old:
            move(path, folder / path.name)
    folders = {folder.name: folder for folder in (run.results, run.compile_cache)}
    for remote in files:
        name, _, file = remote.partition("/")
        is_wanted = name in folders and SAFE_NAME.fullmatch(file) and not is_old(file)
        if is_wanted and not (folders[name] / file).exists():
            content = retried(mirror, mirror.read, remote)
            folders[name].mkdir(exist_ok=True)
            with atomic_file(folders[name] / file) as draft:
                draft.write_bytes(content or b"")


def retried(
    mirror: Mirror, work: Callable[Arguments, Result], *given: Arguments.args, **named: Arguments.kwargs
) -> Result:
    """Return what `work` returns for the arguments `given` and `named`. After an error other than UserError and
    RunError, `work` is called again over a new connection, up to FETCHING_TRIES times in all with back-off. Raises
    RunError if all calls fail."""
    for attempt in range(FETCHING_TRIES):
        try:
            return work(*given, **named)
        except (UserError, RunError):
            raise
        except Exception as error:
            if attempt == FETCHING_TRIES - 1:
                raise RunError(
                    f"mirror {mirror.name}: cannot be read or written: {reason_of(error)}; the same command resumes, "
                    "and ddp_train.py --mirror none trains without it"
                ) from None
            if attempt == 0:
                tell(f"mirror {mirror.name}: {reason_of(error)}; retrying")
        time.sleep(2.0**attempt)
        mirror.open()
    raise AssertionError("the last attempt returns or raises")
