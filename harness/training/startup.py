"""Everything that can refuse a run, before anything is built."""

from __future__ import annotations

import socket
from pathlib import Path

from harness.common.errors import UserError
from harness.common.memory import peak_bytes
from harness.common.units import GIB
from harness.data.dataset import Dataset
from harness.data.fetch import ensure_dataset
from harness.distributed.world import World
from harness.runs.experiment import Experiment, first_difference
from harness.runs.summary import Machine


def fetch_dataset(world: World, datasets_dir: Path, name: str, splits: list[str]) -> Dataset:
    """The dataset with the wanted splits, on every rank; each node's first process brings it if it is not there."""
    world.on_each_node(lambda: ensure_dataset(datasets_dir, name, splits))
    return Dataset.open(datasets_dir, name)


def check_same_everywhere(experiment: Experiment, world: World, dataset: Dataset) -> None:
    """Raises UserError, on every rank, if a rank's machine has other files than rank 0's. Collective."""
    machines = world.gather((socket.gethostname(), experiment.provenance(dataset)))
    (first_host, expected), *others = machines
    files = (("model", experiment.run.model_json), ("train", experiment.run.train_json), ("dataset", "dataset"))
    for rank, (host, provenance) in enumerate(others, start=1):
        for part, file in files:
            difference = first_difference(expected[part], provenance[part])
            if difference:
                raise UserError(
                    f"{file}: not the same on {first_host} (rank 0) and {host} (rank {rank}): {difference}; "
                    "give both the same"
                )


def measure_machine(world: World) -> Machine:
    """Collective: the peak of memory is the largest of any rank."""
    return Machine(world.device_name, world.size, max(world.gather(peak_bytes(world.device))) / GIB)
