"""The mirror at the start of training: its URL, newer checkpoints in it, the lease on it, and fetching from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.common.errors import UserError
from harness.common.json_files import strict_json
from harness.common.options import TrainOptions
from harness.mirror.fetch import bring, newer_in_mirror, retried
from harness.mirror.owner import Lease, remembered
from harness.mirror.store import Mirror, open_mirror
from harness.model.config import ModelConfig
from harness.planning.experiment import FIXED_KEYS, Experiment, check_continuable, first_difference
from harness.planning.plan import InMirror
from harness.runs.checkpoint_meta import CheckpointMeta, Provenance
from harness.runs.checkpoints import list_checkpoints
from harness.runs.directory import RunDirectory


def mirror_url(experiment: Experiment, options: TrainOptions) -> str | None:
    """Return the URL of the run's mirror, from --mirror or train.json, or None if the run has no mirror. Raises
    UserError if the mirror is in the run's own folder, or if --take-over is given without a mirror."""
    url = experiment.config.mirror if options.mirror is None else options.mirror
    if url is None or url == "none":
        if options.take_over:
            raise UserError('--take-over belongs with a mirror; give --mirror URL, or the key "mirror" in train.json')
        return None
    refuse_own_folder(url, experiment.run)
    return url


def refuse_own_folder(url: str, run: RunDirectory) -> None:
    """Raise UserError if the run's copy in the mirror at `url` would be the run's own folder, or a folder in it."""
    folder = Path(url.removeprefix("file://")) / run.path.name
    if url.startswith("file://") and folder.resolve().is_relative_to(run.path.resolve()):
        raise UserError(
            f"mirror {url}: the copy would be in the run's own folder, which is lost with the machine; give another "
            "mirror"
        )


def look(experiment: Experiment, options: TrainOptions, checkpoint: str | None) -> InMirror | None:
    """Return the state of the run's mirror for a plan, or None if the run has no mirror. `checkpoint` is the command's
    CHECKPOINT, or None. Without --plan, a file is written to the mirror as a trial and deleted.

    Raises UserError if the run cannot use this mirror, and RunError if the mirror cannot be read or written.
    """
    url = mirror_url(experiment, options)
    if url is None:
        return None
    mirror = open_mirror(url, experiment.run.path.name, writes=not options.plan)
    check_same_experiment(experiment, mirror)
    found = None if options.restart or checkpoint else newer_in_mirror(mirror, experiment.run)
    if found and experiment.has_data():
        check_checkpoint(mirror, experiment, experiment.provenance(experiment.open_data()), found[1])
    rate = remembered(experiment.run).get("bytes_per_second")
    name, meta = found or (None, None)
    return InMirror(mirror.name, name, meta, rate)


def connect(
    experiment: Experiment, provenance: Provenance, options: TrainOptions, *, brings: bool
) -> tuple[Mirror, Lease] | None:
    """Open the run's mirror and take the lease on it. Return both, or None if the run has no mirror. With `brings`,
    also call `bring`. The caller must hold the run's lock.

    --wait and --take-over act as in `Lease.take`. Raises the errors of `bring`, UserError if the run cannot use this
    mirror or another machine has the lease, and RunError if the mirror cannot be read or written.
    """
    url = mirror_url(experiment, options)
    if url is None:
        return None
    run = experiment.run
    mirror = open_mirror(url, run.path.name)
    check_same_experiment(experiment, mirror)
    lease = Lease(mirror, run)
    lease.take(wait=options.wait, take_over=options.take_over)
    if brings and (name := bring(run, mirror, partial(check_checkpoint, mirror, experiment, provenance))):
        print(f"{run.path.name}: {name} was fetched from the mirror", flush=True)
    elif brings and not list_checkpoints(run.checkpoints):  # perhaps the URL has a slip, or its disk is not mounted
        print(f"{run.path.name}: mirror {mirror.name} has no checkpoint to continue from", flush=True)
    return mirror, lease


def check_checkpoint(mirror: Mirror, experiment: Experiment, provenance: Provenance, meta: CheckpointMeta) -> None:
    """Raise UserError if this experiment cannot continue from the mirror's checkpoint, which `meta` describes."""
    try:
        check_continuable(meta, experiment.run.checkpoints, provenance)
    except UserError as error:
        raise another_experiment(mirror, str(error).removeprefix(f"{experiment.run.checkpoints}: ")) from None


def check_same_experiment(experiment: Experiment, mirror: Mirror) -> None:
    """Raise UserError if the mirror's model.json has another model, or its train.json another value of one of
    FIXED_KEYS. A missing file is ignored. If one file is damaged, both are ignored. Raises RunError if the mirror
    cannot be read."""
    try:
        read = [retried(mirror, mirror.read, name) or b"null" for name in ("model.json", "train.json")]
        model, train = (strict_json(content.decode("utf-8-sig")) for content in read)
        then = model and ModelConfig.model_validate(model).model_dump(mode="json")
        given = train and {key: train.get(key, default) for key, default in FIXED_KEYS.items()}
    except (ValueError, AttributeError):
        return
    difference = then and first_difference(then, experiment.model.model_dump(mode="json"), "model.json: ")
    if given and not difference:
        own = experiment.config.model_dump(mode="json", include={*given})
        difference = first_difference(given, own, "train.json: ")
    if difference:
        raise another_experiment(mirror, f"{difference}; restore the old value")


def another_experiment(mirror: Mirror, difference: str) -> UserError:
    return UserError(
        f"mirror {mirror.name}: holds another experiment: {difference}; to keep both, give another mirror or rename "
        "the run"
    )
