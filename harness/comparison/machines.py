"""Projections of a run's time and cost onto other machines: their prices, and speeds that are measured, else reported,
else estimated.

One kind of speed for all machines of a projection: a speed that somebody reported of another program, beside one that
this program measured, would compare programs and not machines. A machine that has no such speed gets one by scale: its
estimated speed (harness/planning/estimated_speed.py), times the part of their estimates that the others reached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from harness.comparison.inconclusive import Inconclusive
from harness.comparison.workloads import KnownSpeed, Workload
from harness.data.loader import BatchLayout
from harness.planning.estimated_speed import UNCERTAINTY, estimated_speed, find_device, too_small, why_not
from harness.planning.machines import Machine
from harness.runs.throughput import same_kernels

NAMES = 3  # of runs, in a note
Basis = Literal["measured", "reported", "scaled", "estimated"]


@dataclass(frozen=True)
class Speed:
    """Tokens per second of training alone on a machine, the range that it is within, and what it rests on."""

    value: float
    low: float
    high: float
    basis: Basis
    note: str = ""


@dataclass(frozen=True)
class Projection:
    """Training time and cost of a run on a machine, in seconds and dollars of training alone."""

    machine: Machine
    layout: BatchLayout
    speed: Speed
    tokens: int
    remark: str = ""

    def hours(self, tokens_per_second: float) -> float:
        """Hours of training for all tokens at that speed."""
        return self.tokens / tokens_per_second / 3600

    def dollars(self, tokens_per_second: float) -> float:
        """Dollars for those hours."""
        return self.hours(tokens_per_second) * self.machine.price_per_hour


@dataclass(frozen=True)
class NoProjection:
    """A machine without a projection, and why."""

    machine: Machine
    why: Inconclusive


def project(
    work: Workload, machines: Sequence[Machine], known: Iterable[KnownSpeed]
) -> list[Projection | NoProjection]:
    """Project the time and cost of a run's tokens onto each machine, with the run's own global batch, the cheapest
    first; by the `known` speeds of training its model, of this and of other runs."""
    usable = speeds_for(work, known)
    found = [_project_one(work, machine, usable) for machine in machines]
    told = [each for each in found if isinstance(each, Projection)]
    told.sort(key=lambda each: each.dollars(each.speed.value))
    return [*told, *(each for each in found if isinstance(each, NoProjection))]


def speeds_for(work: Workload, known: Iterable[KnownSpeed]) -> list[KnownSpeed]:
    """Speeds of the run's model, all of one kind: those measured with its kernels; if there are none, reported ones."""
    fitting = [each for each in known if each.model == work.model]
    measured = [each for each in fitting if each.is_measured and same_kernels(each.train, work.train)]
    return measured or [each for each in fitting if not each.is_measured]


def _project_one(work: Workload, machine: Machine, known: list[KnownSpeed]) -> Projection | NoProjection:
    layout = layout_on(work, machine, known)
    if isinstance(layout, Inconclusive):
        return NoProjection(machine, layout)
    speed = speed_on(work, machine, layout, known)
    if isinstance(speed, Inconclusive):
        return NoProjection(machine, speed)
    return Projection(machine, layout, speed, work.tokens, _memory_remark(work, machine, layout, known))


def layout_on(work: Workload, machine: Machine, known: Sequence[KnownSpeed]) -> BatchLayout | Inconclusive:
    """Lay out the same global batch on that many GPUs, in microbatches no larger than the run's own and, as far as
    known, than what fits: by its searches with -f, or, on smaller GPUs than its own, by what others trained there."""
    sequences = work.sequences
    each, rest = divmod(sequences, machine.gpus)
    if rest or not each:
        return Inconclusive(f"its global batch of {sequences:,} sequences cannot be divided by {machine.gpus} GPUs")
    most = min(work.layout.microbatch_size, each)
    if work.memory is not None:
        per_sequence, fixed = work.memory
        if per_sequence + fixed > machine.memory_gib:
            return Inconclusive(f"not one sequence fits into {machine.memory_gib:g} GiB, by its searches with -f")
        if per_sequence > 0:
            most = min(most, math.floor((machine.memory_gib - fixed) / per_sequence * (1 + 1e-12)))
    elif is_smaller(work, machine):
        most = min(most, largest_trained(machine, known) or most)
    size = next(n for n in range(most, 0, -1) if each % n == 0)
    return BatchLayout(machine.gpus, each // size, size, work.layout.context_length)


def is_smaller(work: Workload, machine: Machine) -> bool:
    """True if the machine's GPUs have less memory than the run may need with its own microbatch."""
    return work.needed_gib is not None and machine.memory_gib < work.needed_gib


def largest_trained(machine: Machine, known: Sequence[KnownSpeed]) -> int | None:
    """Sequences in the largest microbatch with which somebody trained on such a GPU."""
    sizes = [each.layout.microbatch_size for each in known if is_same_device(each.device, machine.device)]
    return max(sizes, default=None)


def _memory_remark(work: Workload, machine: Machine, layout: BatchLayout, known: Sequence[KnownSpeed]) -> str:
    unknown = work.memory is None and is_smaller(work, machine) and largest_trained(machine, known) is None
    if not unknown:
        return ""
    return f"whether a microbatch of {layout.microbatch_size} fits is not known: -f there tells"


def speed_on(
    work: Workload, machine: Machine, layout: BatchLayout, known: Sequence[KnownSpeed]
) -> Speed | Inconclusive:
    """Speed of the run on the machine: as known of such a machine, else by scale, else estimated."""
    here = [each for each in known if is_same_device(each.device, machine.device)]
    same = [each for each in here if each.layout.world_size == machine.gpus]
    own = [each for each in same if each.run == work.run and each.layout == layout]
    if own or same:
        return _as_known(work, machine, layout, own or same)
    paper = _paper(work, machine.device, layout)
    if isinstance(paper, Inconclusive):
        return paper
    return _by_scale(work, here or known, paper) or _around(paper, "estimated")


def is_same_device(one: str, other: str) -> bool:
    """True if two names mean the same GPU."""
    found = find_device(one)
    return one == other if found is None else found == find_device(other)


def _as_known(work: Workload, machine: Machine, layout: BatchLayout, known: Sequence[KnownSpeed]) -> Speed:
    """The speeds of such machines, each as it is, and, where the batch was another, what arithmetic makes of that."""
    adapted = [each.tokens_per_second * _gain(work, machine.device, each.layout, layout) for each in known]
    all_of_them = [*adapted, *(each.tokens_per_second for each in known)]
    runs = {each.run for each in known}
    note = "" if runs == {work.run} else f"of {_names(runs)}"
    sizes = sorted({each.layout.microbatch_size for each in known if each.layout != layout})
    if sizes:
        note += f"{note and ', '}with microbatches of {', '.join(map(str, sizes))}, here {layout.microbatch_size}"
    return Speed(statistics.median(adapted), min(all_of_them), max(all_of_them), _kind(known), note)


def _gain(work: Workload, device: str, there: BatchLayout, here: BatchLayout) -> float:
    """Speedup of layout `there` over `here` by arithmetic; 1 where that does not cover it. This holds also for models
    too small for an estimated speed: where kernel launches dominate, a microbatch of any size takes as long."""
    before, after = (_arithmetic(work, device, layout) for layout in (there, here))
    return after / before if isinstance(before, float) and isinstance(after, float) else 1.0


def _by_scale(work: Workload, known: Sequence[KnownSpeed], paper: float) -> Speed | None:
    """The estimated speed, times the part of their estimates that others reached; None if none is known of both."""
    shares = []
    for each in known:
        there = _paper(work, each.device, each.layout)
        if isinstance(there, float):
            shares.append((each.tokens_per_second / there, each.run))
    if not shares:
        return None
    low, high = (bound(share for share, _ in shares) for bound in (min, max))
    value = paper * statistics.median(share for share, _ in shares)
    part = f"{low:.0%}" if len(shares) == 1 else f"{low:.0%} to {high:.0%}"
    note = f"{part} of the estimated speed, as {_kind(known)} of {_names({run for _, run in shares})}"
    if len(shares) == 1:
        return replace(_around(value, "scaled"), note=note)
    return Speed(value, paper * low, paper * high, "scaled", note)


def _names(runs: set[str]) -> str:
    """At most NAMES of the names, then the number of the others: a comparison may have a hundred runs."""
    shown = sorted(runs)[:NAMES]
    return ", ".join(shown) + (f" and {len(runs) - NAMES} more" if len(runs) > NAMES else "")


def _kind(known: Sequence[KnownSpeed]) -> Basis:
    return "measured" if known[0].is_measured else "reported"


def _around(value: float, basis: Basis) -> Speed:
    return Speed(value, value * (1 - UNCERTAINTY), value * (1 + UNCERTAINTY), basis)


def _paper(work: Workload, name: str, layout: BatchLayout) -> float | Inconclusive:
    """Tokens per second by arithmetic, where that is to be believed."""
    device = find_device(name)
    reason = None if device is None else too_small(work.model, device, layout, work.train)
    speed = _arithmetic(work, name, layout)
    if reason is not None and not isinstance(speed, Inconclusive):
        return Inconclusive(f"no speed on such GPUs is known, and none is estimated: {reason}")
    return speed


def _arithmetic(work: Workload, name: str, layout: BatchLayout) -> float | Inconclusive:
    """Tokens per second by arithmetic, launching the kernels counted."""
    device = find_device(name)
    if device is None:
        return Inconclusive(f"no speed of {name} is known or estimated")
    reason = why_not(work.train, layout.world_size, work.model)
    if reason is not None:
        return Inconclusive(f"no speed of {layout.world_size} x {name} is known, and none is estimated: {reason}")
    return estimated_speed(work.model, device, layout, work.train)
