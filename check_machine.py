"""Check a rented machine before the meter matters: rates of each device, of the exchange between them, of disk and
network, and the speed of a run's training step.

uv run check_machine.py RUN --processes 8
"""

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
    """Measure this machine on all ranks at once, in less than a minute: matrix products and copies of each device, the
    all-reduce of gradients, the disk under RUNS_DIR, and a download from the Hub. The exit status is 1 if a rank's
    products or copies are more than 10 % slower than the median, in three measurements in a row.

    With RUN, also train a new model of that run for some steps (compiling it takes minutes, and need not be repeated by
    training), and keep the speed for `ddp_train.py RUN DATASETS_DIR --plan`.

    \b
        uv run check_machine.py 8xa100m40 --processes 8
        uv run torchrun --nproc_per_node=8 check_machine.py 8xa100m40
    """
    exit_when_launcher_dies()
    from harness.common.files import check_writable
    from harness.common.messages import paragraph
    from harness.distributed.environment import ranks_to_start, read_ranking, run_ranks, unblock_stopping_signals
    from harness.planning.experiment import Experiment
    from harness.runs.directory import RunDirectory

    unblock_stopping_signals()
    here = read_ranking()
    to_start = ranks_to_start(processes)
    experiment = None if run is None else Experiment.load(RunDirectory.find(runs_dir, run), Path("datasets"))
    folder = runs_dir if experiment is None else experiment.run.path
    if experiment is not None:
        experiment.layout(to_start or here.world_size)  # raises UserError
        if experiment.run.checkpoints.is_dir():  # it may be a link to another disk
            folder = experiment.run.checkpoints
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; --runs-dir names the folder of your runs")
    check_writable(folder)
    if to_start:
        run_ranks(to_start, lambda pid: None)
    configure_libraries()
    from harness.common.program import program_versions
    from harness.distributed.world import World, say
    from harness.training import machine_check
    from harness.training.startup import remark_on_machine

    world = World.join()

    def show(text: str) -> None:
        say(world, "\n".join(paragraph(text)))

    if experiment is not None:
        remark_on_machine(experiment, world)
    rates, slow = machine_check.measure_devices(world)
    driver = program_versions().get("nvidia_driver")
    say(world, "\n".join(machine_check.table(rates)))
    if driver:
        say(world, f"driver {driver}")
    if world.size > 1:
        sizes = machine_check.exchanged_sizes(experiment)
        found = zip(sizes, machine_check.bus_bandwidths(world, sizes), strict=True)
        texts = ", ".join(f"{size / 2**20:.3g} MiB {rate / 1e9:.3g} GB/s" for size, rate in found)
        show(f"all-reduce of {world.size} ranks (bus bandwidth): {texts}")
    show(world.on_rank0(lambda: machine_check.describe_disk(folder)))
    show(world.on_rank0(machine_check.describe_download))
    if experiment is not None:
        measured = machine_check.measure_training(experiment, world)
        over = f"{measured.global_steps:,} steps in {measured.seconds:,.1f} s"
        show(f"training {experiment.run.path.name}: {measured.tokens_per_second:,.0f} tokens/s ({over})")
    if slow:
        raise world.collective_error(f"{'; '.join(slow)}: end what else runs there, or rent another machine")
    world.leave()


if __name__ == "__main__":
    main()
