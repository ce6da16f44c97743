"""What commands and their options may be, apart from what they do."""

from __future__ import annotations

import math
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
    """The same of a command that has commands."""


class FiniteNumber(click.FloatRange):
    """A float in a range that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


POSITIVE = FiniteNumber(min=0, min_open=True, max=1e12)


def check_options(checkpoint: str | None, options: dict[str, Any]) -> None:
    """Raises UserError for options that mean nothing together."""
    if options["plan"] and options["find"]:
        raise UserError("--plan and -f: give one of them")
    assumed = ("assume_tps", "assume_tps_with_validation", "assume_world_size")
    belongs = {"memory_limit_gib": "find", "write": "find", **dict.fromkeys(assumed, "plan")}
    for option, needed in belongs.items():
        if options[option] and not options[needed]:
            raise UserError(f"--{option.replace('_', '-')} belongs with {'-f' if needed == 'find' else '--plan'}")
    if options["assume_tps"] and options["assume_tps_with_validation"]:
        raise UserError("--assume-tps and --assume-tps-with-validation: give one of them")
    if options["restart"] and options["find"]:
        raise UserError("--restart and -f: give one of them")
    if checkpoint is not None and (options["restart"] or options["find"]):
        raise UserError("a CHECKPOINT to continue from goes with neither --restart nor -f")
