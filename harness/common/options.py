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
        if self.plan and self.find:
            raise UserError("--plan and -f: give one of them")
        belongs: dict[str, dict[str, object]] = {
            "-f": {"memory_limit_gib": self.memory_limit_gib, "write": self.write},
            "--plan": {"assume_world_size": self.assume_world_size},
        }
        for needed, is_given in (("-f", self.find), ("--plan", self.plan)):
            for option, value in belongs[needed].items():
                if value and not is_given:
                    raise UserError(f"--{option.replace('_', '-')} belongs with {needed}")
        for option in () if self.plan else ("assume_tps", "assume_tps_with_validation", "assume_device"):
            if getattr(self, option):
                raise UserError(f"--{option.replace('_', '-')} belongs with --plan")
        if self.assume_tps and self.assume_tps_with_validation:
            raise UserError("--assume-tps and --assume-tps-with-validation: give one of them")
        if self.assume_device and (self.assume_tps or self.assume_tps_with_validation):
            raise UserError("--assume-device and --assume-tps: give one of them")
        if self.restart and self.find:
            raise UserError("--restart and -f: give one of them")
        if checkpoint is not None and (self.restart or self.find):
            raise UserError("a CHECKPOINT to continue from goes with neither --restart nor -f")
