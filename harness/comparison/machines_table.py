"""A projection onto other machines as text, 80 columns wide."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from harness.common.errors import UserError, printable
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.machines import NoProjection, Projection, project
from harness.comparison.runs_table import number_text
from harness.comparison.table_text import Block, block_lines, cut_names
from harness.comparison.workloads import KnownSpeed, Workload, read_speeds, read_workload
from harness.planning.machines import PRICES, read_machines
from harness.planning.planned_speed import three_digits
from harness.runs.directory import RunDirectory

COLUMNS = 79  # of prose
HEADINGS = ("machine", "$/h", "tokens/s", "hours", "dollars", "rests on")
TEXTS = ("machine", "rests on")  # of them; the others are numbers
MOST_DIGITS = 8  # after the point
SMALL = 0.1  # below it two digits that are not 0, else two after the point


def elsewhere(run: RunDirectory, others: Sequence[RunDirectory], prices: Path = PRICES) -> Iterator[str]:
    """The table of one run, by the speeds that its folder and those of `others` tell.

    Raises UserError for wrong files of the run, or a wrong list of prices; those of others are passed over.
    """
    machines, work = read_machines(prices), read_workload(run)
    if isinstance(work, Inconclusive):
        yield from _wrapped(f"{run.path.name} elsewhere: {work}")
        return
    known = read_speeds(run)
    for other in others:
        if other.path.name != run.path.name:
            known += _speeds_or_none(other)
    yield from machines_table(work, project(work, machines, known))


def _speeds_or_none(run: RunDirectory) -> list[KnownSpeed]:
    with suppress(UserError):
        return read_speeds(run)
    return []


def machines_table(work: Workload, projections: Sequence[Projection | NoProjection]) -> Iterator[str]:
    """Yield lines of a table of the run's time and cost on each machine, with the basis of the numbers."""
    told = [each for each in projections if isinstance(each, Projection)]
    yield from _wrapped(
        f"{work.run} elsewhere: {work.tokens:,} tokens in global batches of {work.sequences:,} sequences. Training "
        "alone: validation, checkpoints and set-up come on top."
    )
    if told:
        yield ""
        yield from _columns([_row(each) for each in told])
        yield ""
    reasons: dict[str, list[str]] = {}
    for each in projections:
        if isinstance(each, NoProjection):
            reasons.setdefault(str(each.why), []).append(each.machine.machine)
    for reason, names in reasons.items():
        yield from _wrapped(f"{', '.join(names)}: {reason}")
    yield from _notes(told)


def _row(each: Projection) -> tuple[str, ...]:
    speed = each.speed
    return (
        each.machine.machine,
        number_text(each.machine.price_per_hour, ",.2f"),
        number_text(speed.value if speed.low == speed.high else three_digits(speed.value), ",.0f"),
        _range(each, each.hours),
        _range(each, each.dollars),
        speed.basis,
    )


def _range(each: Projection, quantity: Callable[[float], float]) -> str:
    """A quantity that is inverse to the speed, as the range between the ends of the speed."""
    low, high = (_figure(quantity(speed)) for speed in (each.speed.high, each.speed.low))
    return low if low == high else f"{low} to {high}"


def _figure(number: float) -> str:
    digits = 2 if number >= SMALL or not number else 1 - math.floor(math.log10(number))
    return f"{number:.1e}" if digits > MOST_DIGITS else number_text(number, f",.{digits}f")


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Numbers to the right, text to the left; what does not fit into 80 columns follows below."""
    names, *others = zip(*rows, strict=True)
    blocks = [_column(heading, cells) for heading, cells in zip(HEADINGS[1:], others, strict=True)]
    yield from block_lines(_column(HEADINGS[0], cut_names(names)), blocks)


def _column(heading: str, cells: Sequence[str]) -> Block:
    width = max(map(len, [heading, *cells]))
    heading, *texts = [each.ljust(width) if heading in TEXTS else each.rjust(width) for each in (heading, *cells)]
    return Block(width, [heading], texts)


def _notes(told: Sequence[Projection]) -> Iterator[str]:
    for each in told:
        notes = [each.speed.note and f"{each.speed.basis}, {each.speed.note}", each.remark]
        if any(notes):
            yield from _wrapped(f"{each.machine.machine}: {'; '.join(note for note in notes if note)}")
    if any(each.speed.basis == "reported" for each in told):
        yield from _wrapped("Reported speeds are another program's, and were not measured here.")
    if any(each.speed.basis == "estimated" for each in told):
        yield from _wrapped("Estimated: by arithmetic, which nobody has measured; docs/performance.md has it.")
    prices: dict[tuple[str, str], list[str]] = {}
    for each in told:
        prices.setdefault((each.machine.date, each.machine.source), []).append(each.machine.machine)
    for (date, source), names in prices.items():
        which = "" if len(prices) == 1 else f" of {', '.join(names)}"
        yield from _wrapped(f"Prices{which} of {date}: {source}; prices change: --prices FILE takes others.")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(printable(text), COLUMNS, subsequent_indent="  ")
