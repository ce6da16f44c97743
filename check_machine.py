"""Check a rented machine before a long training run."""

from __future__ import annotations

from pathlib import Path

import click

from harness.common.errors import UserError
from harness.common.libraries import configure_libraries
from harness.common.options import RUNS_DIR, Command
from harness.common.processes import exit_when_launcher_dies


@click.command(cls=Command)
@click.argument("run", required=False)
@click.option("--processes", type=click.IntRange(min=1), help="Start this many ranks; leave it out under torchrun.")
@RUNS_DIR
def main(run: str | None, processes: int | None, runs_dir: Path) -> None:
    """Measure this machine in less than a minute:

    \b
    - matrix products and memory copies on the devices of all ranks at once
    - the all-reduce of gradients, if there are several ranks
    - the disk that checkpoints go to
    - a download from the Hub

    \b
    The exit status is
    - 1 if, in three measurements in a row, a rank's products or copies are more
      than 10 % slower than the median of the ranks (copies from the host's
      memory: 40 %)
    - 1 if a measurement other than the download fails
    - 2 if a GPU is unusable, if the host's memory cannot hold RUN's weights, or
      if this machine cannot compute what RUN's train.json demands

    With RUN, also train a new model with that run's settings for some steps, and save the speed for `ddp_train.py RUN
    DATASETS_DIR --plan`. Compiling the model can take minutes; the run itself need not compile it again.

    \b
        uv run check_machine.py 8xa100m40 --processes 8
        uv run torchrun --nproc_per_node=8 check_machine.py 8xa100m40
    """
    exit_when_launcher_dies()
    from harness.common.files import check_writable
    from harness.distributed.environment import ranks_to_start, read_ranking, run_ranks, unblock_stopping_signals
    from harness.planning.experiment import Experiment
    from harness.runs.directory import RunDirectory

    unblock_stopping_signals()
    here = read_ranking()
    to_start = ranks_to_start(processes)
    experiment = None if run is None else Experiment.load(RunDirectory.find(runs_dir, run), Path("datasets"))
    folder = runs_dir
    if experiment is not None:
        experiment.layout(to_start or here.world_size)  # raises UserError
        experiment.run.check_outputs()
        # The folder of checkpoints may be a link to another disk.
        folder = experiment.run.checkpoints if experiment.run.checkpoints.is_dir() else experiment.run.path
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; --runs-dir names the folder of your runs")
    check_writable(folder)
    if to_start:
        run_ranks(to_start, lambda pid: None)
    configure_libraries()
    if experiment is not None and experiment.config.deterministic:
        from harness.model.kernels import compute_deterministically

        compute_deterministically()  # before anything uses CUDA
    from harness.training.machine_check import report_machine

    report_machine(experiment, folder)


if __name__ == "__main__":
    main()
