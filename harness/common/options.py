"""Command classes and option types that the commands share, and the options of ddp_train.py with their checks."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from harness.common.errors import RunError, UserError, one_line_errors


class Command(click.Command):
    """Click command that prints errors in one line, as `one_line_errors` does. click's own `main` prints four lines for
    a wrong argument."""

    def main(self, *args: Any, **_: Any) -> Any:
        with one_line_errors():
            try:
                words = list(args[0] if args else sys.argv[1:])
                with self.make_context(Path(sys.argv[0]).name, words) as context:
                    self.invoke(context)
            except click.exceptions.Exit as end:  # after --help
                sys.exit(end.exit_code)
            except click.UsageError as error:
                program = error.ctx.command_path if error.ctx else Path(sys.argv[0]).name  # an option without its value
                raise UserError(f"{error.format_message().rstrip('.')} (see {program} --help)") from None
            except (RuntimeError, MemoryError, ImportError) as error:
                # A rank prints the traceback. harness.common.memory takes seconds to import, unless torch is loaded.
                if "torch" in sys.modules and "LOCAL_RANK" not in os.environ:
                    from harness.common.memory import FREE_MEMORY, is_out_of_memory

                    if is_out_of_memory(error):
                        reason = [*str(error).splitlines(), type(error).__name__][0]
                        raise RunError(f"out of memory ({reason}); {FREE_MEMORY}") from None
                raise
        sys.exit()


class Group(Command, click.Group):
    """A `Command` that has subcommands. A call without one prints a one-line error."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings | {"no_args_is_help": False})


class FiniteNumber(click.FloatRange):
    """Type of an option: a finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


RUNS_DIR = click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
MODEL = click.argument("model", nargs=-1, required=True, metavar="RUN[:CHECKPOINT] | MODEL_JSON WEIGHTS")
POSITIVE = FiniteNumber(min=0, min_open=True, max=1e12)
SPEED = FiniteNumber(min=1e-3, max=1e12)  # tokens per second; at a lower speed, the times would mean nothing

NOTEBOOK_JUDGE = "gpt-5.1"  # the default judge
JUDGE_PROMPT = click.Choice(["together", "book", "notebook"])
JUDGE_PROMPT_HELP = (
    "together: for each question, one prompt about all models' answers. book, notebook: one prompt for each answer, in "
    "the words of Sebastian Raschka's book or of Giles Thomas's lab notebook."
)


# Options of ddp_train.py, by the names of their fields in TrainOptions. Each key is an option; its value lists the
# options that mean nothing without it.
BELONG_WITH = {
    "find": ("memory_limit_gib", "write"),
    "plan": ("assume_world_size", "assume_tps", "assume_tps_with_validation", "assume_device"),
}
# Pairs of options of which only one can be given.
NOT_TOGETHER = (
    ("plan", "find"),
    ("assume_tps", "assume_tps_with_validation"),
    ("assume_device", "assume_tps"),
    ("assume_device", "assume_tps_with_validation"),
    ("restart", "find"),
    ("mirror", "find"),
    ("wait", "find"),
    ("take_over", "find"),
    ("wait", "take_over"),
)


@dataclass(frozen=True)
class TrainOptions:
    """Values of ddp_train.py's options, by the options' names."""

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
    mirror: str | None = None
    wait: bool = False
    take_over: bool = False
    runs_dir: Path = Path("runs")

    def check(self, checkpoint: str | None) -> None:
        """Raise UserError if two options, or an option and the CHECKPOINT, exclude each other, or if an option lacks
        another that it needs."""
        for needed, options in BELONG_WITH.items():
            for name in options:
                if getattr(self, name) and not getattr(self, needed):
                    raise UserError(f"{_as_typed(name)} belongs with {_as_typed(needed)}")
        for one, other in NOT_TOGETHER:
            if getattr(self, one) and getattr(self, other):
                raise UserError(f"{_as_typed(one)} and {_as_typed(other)}: give at most one of them")
        if checkpoint is not None and (self.restart or self.find):
            raise UserError("CHECKPOINT cannot be given with --restart or -f; remove CHECKPOINT or the option")


def _as_typed(name: str) -> str:
    return "-f" if name == "find" else f"--{name.replace('_', '-')}"
