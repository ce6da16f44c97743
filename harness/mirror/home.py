"""The commands of mirror.py: list the runs in a mirror, fetch one, follow one that trains elsewhere, or send one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.common.errors import UserError
from harness.common.files import atomic_file
from harness.common.lock import is_held
from harness.common.messages import abbreviated, tell
from harness.mirror.fetch import (
    bring,
    fetch_results,
    names_with_meta,
    newest_in_mirror,
    refuse_if_set_aside,
    retried,
    tokens_of_summary,
    without_left,
)
from harness.mirror.owner import LEASE_SECONDS, OWNER, REFRESH_SECONDS, Lease, LeaseLost, owner_of
from harness.mirror.start import check_same_experiment, refuse_own_folder
from harness.mirror.store import Mirror, open_mirror
from harness.mirror.upload import Uploads
from harness.planning.experiment import Experiment
from harness.runs.checkpoint_meta import read_meta
from harness.runs.checkpoints import list_checkpoints
from harness.runs.directory import RunDirectory, recency
from harness.runs.metrics import TrainEvent, ValidationEvent, parse_event, rough_duration

POLL_SECONDS = 10.0


def describe_runs(url: str) -> list[str]:
    """Return a line for each run at `url`, or one line if there is none. Raises UserError or RunError if the mirror
    cannot be read."""
    mirror = open_mirror(url, "", writes=False)
    lines = []
    for name in retried(mirror, mirror.runs):
        run = Mirror(url, name)
        files = retried(run, run.files)
        found = retried(run, newest_in_mirror, run, files)
        if not found and "train.json" not in files:
            continue  # no run
        line = f"{name}: {found[0] if found else 'no whole checkpoint'}, {sum(files.values()) / 1e9:,.2f} GB"
        host, silent = retried(run, owner_of, run) if OWNER in files else (None, 0.0)
        if host is not None:
            line += f", trained on {host}, last heard from {rough_duration(max(0.0, silent))} ago"
        lines.append(line)
    return lines or [f"no runs in {mirror.url}, or no such place"]


def fetch_run(url: str, name: str, runs_dir: Path, *, with_weights: bool) -> Path:
    """Fetch a run into `runs_dir` and return its folder. `mirror.py fetch --help` says which files here are replaced.

    With `with_weights`, checkpoints are fetched, too, and this process keeps the run's lock. Raises UserError if there
    is no such run, if access is refused, or if the run here forbids the fetch (another experiment, for example).
    Raises RunError if the mirror cannot be read or a file cannot be moved. Also raises the errors of `bring`.
    """
    mirror = open_mirror(url, name, writes=False)
    run = RunDirectory(runs_dir / name)
    all_there = _files_of(mirror)
    files = without_left(run, all_there)
    refuse_own_folder(url, run)
    if run.model_json.exists() and run.train_json.exists():
        check_same_experiment(Experiment.load(run, Path("datasets")), mirror)
    refuse_if_set_aside(run, mirror, files)
    run.path.mkdir(parents=True, exist_ok=True)
    is_trained_here = is_held(run.lock_file)
    newest = next(iter(names_with_meta(files)), "")
    is_further = any(recency(path.name) > recency(newest) for _, path in list_checkpoints(run.checkpoints))
    brought = None
    if with_weights:
        run.lock()
        brought = bring(run, mirror, lambda meta: None)
    fetch_results(run, mirror, files)
    # If the run here went back behind the mirror's newest checkpoint, summary, chart and metrics there are not its own.
    went_back = next(iter(names_with_meta(all_there)), "") != newest
    is_kept = is_further or is_trained_here or went_back
    if not is_kept and run.summary.name not in files and run.summary.exists() and not list_checkpoints(run.checkpoints):
        run.set_summary_and_chart_aside(run.new_aside())  # without a checkpoint here, it was once fetched
    may_replace = not brought and _may_replace_summary(run, mirror, with_weights=with_weights)
    summarized = [run.summary, run.chart] if may_replace else []
    replaced = [] if is_kept else [*summarized, run.metrics]
    for path in [*(each for each in (run.model_json, run.train_json) if not each.exists()), *replaced]:
        content = retried(mirror, mirror.read, path.name) if path.name in files else None
        if content is not None and (path != run.metrics or _may_replace_metrics(run, content)):
            with atomic_file(path) as draft:
                draft.write_bytes(content)
    # A machine that was silent for longer than its lease is lost, and does not train the run any more.
    _, silent = retried(mirror, owner_of, mirror)
    owner = retried(mirror, mirror.read, OWNER) if silent <= LEASE_SECONDS else None
    if not is_trained_here and (owner or run.lock_file.exists()):
        run.lock_file.write_bytes(owner or b"")  # names the owner, so that the run counts as trained elsewhere
    return run.path


def _may_replace_summary(run: RunDirectory, mirror: Mirror, *, with_weights: bool) -> bool:
    """Return True if the mirror's summary and chart may replace the run's. They may not in these cases:

    - The mirror's summary is damaged.
    - A checkpoint is here, and the mirror's summary has fewer tokens than the summary here.
    - `with_weights` is true, and the mirror's summary has more tokens than the newest checkpoint here.
    """
    there = tokens_of_summary(retried(mirror, mirror.read, run.summary.name))
    if there == math.inf or not (checkpoints := list_checkpoints(run.checkpoints)):
        return there < math.inf
    here = tokens_of_summary(run.summary.read_bytes() if run.summary.exists() else None)
    most = read_meta(checkpoints[-1][1]).tokens_seen if with_weights else math.inf
    return (0 if here == math.inf else here) <= there <= most


def _may_replace_metrics(run: RunDirectory, content: bytes) -> bool:
    """Return True if the mirror's metrics, `content`, may replace those here. If there is a checkpoint here, `content`
    must begin with the lines here up to the newest checkpoint, and must have lines that are not here."""
    here, checkpoints = run.metrics.read_bytes() if run.metrics.exists() else b"", list_checkpoints(run.checkpoints)
    if not checkpoints:
        return True
    if here.startswith(content):
        return False
    if not content.startswith(here[: read_meta(checkpoints[-1][1]).metrics_bytes]):
        tell(f"note: {run.metrics}: kept, because the mirror's metrics do not begin with its lines")
        return False
    return True


def _files_of(mirror: Mirror) -> dict[str, int]:
    """Return the files of a run in a mirror, with their sizes in bytes. Raises UserError if there is no such run."""
    files: dict[str, int] = retried(mirror, mirror.files)
    if "train.json" not in files:
        raise UserError(f"mirror {mirror.name}: no such run; `uv run mirror.py list {mirror.url}` lists the runs there")
    return files


def follow_run(url: str, name: str) -> Iterator[str]:
    """Yield a line for each finite training and validation loss of a run in a mirror, and wait for further losses.

    If the run goes back to an earlier step, a line says so, and all losses are yielded again. Ends, with a line, when
    no machine trains the run any more, or when its machine has been silent for LEASE_SECONDS. Raises UserError or
    RunError if there is no such run or the mirror cannot be read.
    """
    mirror = open_mirror(url, name, writes=False)
    _files_of(mirror)
    printed, seen, changed = b"", None, time.monotonic()
    while True:
        owner, silent = retried(mirror, owner_of, mirror)
        if (owner_json := retried(mirror, mirror.read, OWNER)) != seen:
            seen, changed = owner_json, time.monotonic()
        content = retried(mirror, mirror.read, "metrics.jsonl") or b""
        if not content.startswith(printed):  # the run went back, or continues after a kill
            printed = b""
            yield "the run has gone back to an earlier step:"
        lines = content[len(printed) : content.rfind(b"\n") + 1]
        printed += lines
        for line in lines.splitlines():
            event = parse_event(line)
            if isinstance(event, TrainEvent | ValidationEvent) and event.loss is not None:
                kind = "loss" if isinstance(event, TrainEvent) else "validation loss"
                speed = getattr(event, "tokens_per_second", None)
                tps = f"  tps {speed:,.0f}" if speed else ""
                yield f"global step {event.global_step}  {kind} {event.loss:.3f}{tps}"
        if owner is None:
            yield "no machine trains this run now"
            return
        # The two machines' clocks may differ, so an owner whose owner.json changes is alive.
        unchanged = time.monotonic() - changed
        if unchanged > LEASE_SECONDS or (silent > LEASE_SECONDS and unchanged > 2 * REFRESH_SECONDS):
            yield f"{owner} has been silent for {rough_duration(max(silent, unchanged))}"
            return
        time.sleep(POLL_SECONDS)


def push_run(run: RunDirectory, url: str, *, take_over: bool) -> str:
    """Send a run's newest and best checkpoint and its small files to a mirror. Return the run's URL there. This process
    keeps the run's lock.

    `take_over` takes the run from another machine that trains it. Raises UserError if the mirror refuses access, or if
    the run must not be sent there (it is being trained, for example). Also raises UserError if a checkpoint to send
    cannot be verified, after all else is sent. Raises RunError if the mirror cannot be read or written.
    """
    refuse_own_folder(url, run)
    run.lock()  # until this process ends; a run that is being trained here sends its files itself
    mirror = open_mirror(url, run.path.name)
    check_same_experiment(Experiment.load(run, Path("datasets")), mirror)
    lease = Lease(mirror, run)
    lease.take(wait=False, take_over=take_over)
    try:
        here = list_checkpoints(run.checkpoints)
        files = without_left(run, retried(mirror, mirror.files))
        refuse_if_set_aside(run, mirror, files)
        found = retried(mirror, newest_in_mirror, mirror, files)
        if found and recency(found[0]) > recency(here[-1][1].name if here else ""):
            raise UserError(
                f"mirror {mirror.name}: has {found[0]}, which is newer than all checkpoints in {run.path}: "
                "`uv run mirror.py fetch` brings it; to send the older state, use another URL"
            )
        uploads = Uploads(run, mirror, lease, keep=None, start_step=here[-1][0] if here else -1)
        uploads.verify()
        retried(mirror, uploads.push)
        if uploads.damaged:
            said = f"{run.path}: {abbreviated(sorted(uploads.damaged))}: cannot be verified here, and was not sent"
            remedy = "`uv run mirror.py fetch` replaces a damaged `latest` that the mirror has whole; move others away"
            raise UserError(f"{said}; {remedy}")
    except LeaseLost as owner:
        raise UserError(f"mirror {mirror.name}: {owner} has taken the run meanwhile: stop it there first") from None
    finally:
        with suppress(Exception):  # the lease then expires
            lease.release()
    return mirror.name
