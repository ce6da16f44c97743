"""An experiment as the command line names it: a run directory and where its dataset is, loaded and checked."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.config import TrainConfig, load_train_config
from harness.continuation import Position, check_continuable, find_position, first_difference
from harness.errors import UserError
from harness.model_config import ModelConfig, load_model_config
from harness.run import RunDirectory
from harness.schedules import build_schedule
from harness.tokens import BatchShape, Dataset, dataset_folder

if TYPE_CHECKING:
    from harness.world import World

# Enough for every tokenizer in use, and nothing against what a search's limit is made of.
TINY_VOCABULARY = 2**18


@dataclass(frozen=True)
class Experiment:
    """`config` is what train.json says, `model` what model.json says."""

    run: RunDirectory
    config: TrainConfig
    model: ModelConfig
    datasets_dir: Path

    @classmethod
    def load(cls, run: RunDirectory, datasets_dir: Path) -> Experiment:
        """Read both files of the run. Raises UserError for anything wrong in them."""
        config = load_train_config(run.train_json)
        dataset_folder(datasets_dir, config.dataset)  # a name that cannot be one is noticed here
        return cls(run, config, load_model_config(run.model_json), datasets_dir)

    def tiny(self) -> Experiment:
        """The same with next to no model, to which nothing is compiled: it does all the same things in no time."""
        shape = {
            "vocab_size": min(self.model.vocab_size, TINY_VOCABULARY),
            "context_length": 2,
            "emb_dim": 2,
            "n_heads": 1,
            "n_kv_heads": None,
            "n_layers": 1,
        }
        config = self.config.model_copy(update={"compile": False})
        return replace(self, model=self.model.model_copy(update=shape), config=config)

    @property
    def splits(self) -> list[str]:
        """The splits that training reads."""
        return ["train", "validation"] if self.config.validates else ["train"]

    def shape(self, world_size: int) -> BatchShape:
        steps = self.config.accumulation_steps(world_size)
        return BatchShape(world_size, steps, self.config.microbatch_size, self.model.context_length)

    def position(self, shape: BatchShape, split_tokens: int, meta: dict[str, Any] | None) -> Position:
        """Where training goes on after the checkpoint that `meta` describes, or starts without one.

        Raises UserError if the split is too short, or the warm-up longer than the run.
        """
        done = {"steps_done": meta["global_step"] + 1, "tokens_seen": meta.get("tokens_seen", 0)} if meta else {}
        position = find_position(self.config, shape, split_tokens, **done)
        build_schedule(self.config, position.total_steps)
        return position

    def identity(self, dataset: Dataset) -> dict[str, Any]:
        """What a checkpoint of this experiment belongs to, as JSON has it."""
        return {
            "model": self.model.model_dump(mode="json"),
            "parameters": self.model.parameters,
            "train": self.config.model_dump(mode="json"),
            "dataset": {"name": self.config.dataset, **dataset.fingerprint()},
        }

    def check_same_everywhere(self, world: World, dataset: Dataset) -> None:
        """Raises UserError, on every rank, if a rank's machine has other files than rank 0's. Collective."""
        machines = world.gather((socket.gethostname(), self.identity(dataset)))
        (first_host, expected), *others = machines
        for rank, (host, identity) in enumerate(others, start=1):
            for part, file in (("model", self.run.model_json), ("train", self.run.train_json), ("dataset", "dataset")):
                difference = first_difference(expected[part], identity[part])
                if difference:
                    raise UserError(
                        f"{file}: not the same on {first_host} (rank 0) and {host} (rank {rank}): {difference}; "
                        "give both the same"
                    )

    def check_validation_slice(self, shape: BatchShape, dataset: Dataset) -> None:
        """Raises UserError if the validation split is too short for train.json's slice of it."""
        config = self.config
        if config.validation_batches is None or config.start_val_token is None:
            return
        wanted = config.start_val_token + config.validation_batches * shape.microbatch_tokens + 1
        there = len(dataset.split("validation"))
        if there < wanted:
            raise UserError(
                f"the validation split of {config.dataset} is too short: wanted {wanted:,} tokens (train.json: "
                f"start_val_token + validation_batches x microbatch), but there are {there:,}; lower one of them"
            )

    def check_checkpoint(self, meta: dict[str, Any], dataset: Dataset) -> None:
        """Raises UserError if the checkpoint that `meta` describes is another experiment's."""
        check_continuable(meta, self.run.checkpoints, self.identity(dataset))
