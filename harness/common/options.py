"""Types and checks of commands and their options, apart from the commands themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from harness.common.errors import UserError, one_line_errors


class Command(click.Command):
    """A command that ends with one line also where click itself fails before the command begins: --help, and other
    options that print and end, into a full disk. Its body needs `one_line_errors` still: of a Ctrl-C there click would
    make "Aborted!"."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with one_line_errors():
            return super().main(*args, **kwargs)


class Group(Command, click.Group):
    """A `Command` that has subcommands."""


class FiniteNumber(click.FloatRange):
    """A float in a range that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


RUNS_DIR = click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
MODEL = click.argument("model", nargs=-1, required=True, metavar="RUN[:CHECKPOINT] | MODEL_JSON WEIGHTS")
POSITIVE = FiniteNumber(min=0, min_open=True, max=1e12)


# Of TrainOptions, by name.
BELONG_WITH = {
    "find": ("memory_limit_gib", "write"),
    "plan": ("assume_world_size", "assume_tps", "assume_tps_with_validation", "assume_device"),
}
NOT_TOGETHER = (
    ("plan", "find"),
    ("assume_tps", "assume_tps_with_validation"),
    ("assume_device", "assume_tps"),
    ("assume_device", "assume_tps_with_validation"),
    ("restart", "find"),
)


@dataclass(frozen=True)
class TrainOptions:
    """The options of ddp_train.py, by their names."""

    processes: int | None = None
    find: bool = False
    memory_limit_gib: float | None = None
    write: bool = False
    plan: bool = False
    assume_tps: float | None = None
    assume_tps_with_validation: float | None = None
    assume_world_size: int | None = None
    assume_device: str | None = None
    restart: bool = False
    runs_dir: Path = Path("runs")

    def check(self, checkpoint: str | None) -> None:
        """Raises UserError for options that mean nothing together, or with a CHECKPOINT."""
        for needed, options in BELONG_WITH.items():
            for name in options:
                if getattr(self, name) and not getattr(self, needed):
                    raise UserError(f"{_as_typed(name)} belongs with {_as_typed(needed)}")
        for one, other in NOT_TOGETHER:
            if getattr(self, one) and getattr(self, other):
                raise UserError(f"{_as_typed(one)} and {_as_typed(other)}: give one of them")
        if checkpoint is not None and (self.restart or self.find):
            raise UserError("a CHECKPOINT to continue from goes with neither --restart nor -f")


def _as_typed(name: str) -> str:
    return "-f" if name == "find" else f"--{name.replace('_', '-')}"
