"""Workload of a run and the speeds at which it was trained, as far as its folder says: for projections onto other
machines (harness/comparison/machines.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.common.errors import UserError
from harness.common.json_files import parse_config
from harness.common.statistics import fit_line
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.table_fits import search_points
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.runs.budget import batch_schedule, tokens_of_budget
from harness.runs.directory import RunDirectory
from harness.runs.reported import Reported, read_reported
from harness.runs.results import MicrobatchSearch, read_results
from harness.runs.summary import RunSummary, read_summary
from harness.runs.train_config import TrainConfig, load_train_config


@dataclass(frozen=True)
class Workload:
    """A run's training: which model, with which batch, on how many tokens in all."""

    run: str
    model: ModelConfig
    train: Mapping[str, Any]  # train.json, defaults filled in
    layout: BatchLayout  # where it took place, or was reported
    tokens: int
    needed_gib: float | None = None  # at most, of one device, with that microbatch; None: not known
    memory: tuple[float, float] | None = None  # GiB a sequence, and fixed ones, by the run's searches with -f

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.layout.global_tokens // self.layout.context_length


@dataclass(frozen=True)
class KnownSpeed:
    """Speed of training a run on a machine."""

    run: str
    is_measured: bool  # by this program; else somebody reported it
    device: str
    layout: BatchLayout
    model: ModelConfig
    train: Mapping[str, Any]
    tokens_per_second: float  # of training alone


def read_workload(run: RunDirectory) -> Workload | Inconclusive:
    """A run's work, trained or not. Raises UserError for files of the run that are wrong."""
    config, model = load_train_config(run.train_json), load_model_config(run.model_json)
    summary = read_summary(run.summary) if run.summary.exists() else None
    reported = read_reported(run)
    layout = _layout(config, model.context_length, summary, reported)
    try:
        tokens = _tokens(config, model, layout, summary)
    except UserError as error:  # a batch of more tokens than there can be
        return Inconclusive(f"its numbers are too large: {error}")
    if tokens is None:
        return Inconclusive(f"its {config.budget} is -1, all there is, and it has not trained yet")
    needed = summary.peak_memory_gib if summary else reported.memory_gib if reported else None
    train = config.model_dump(mode="json")
    return Workload(run.path.name, model, train, layout, tokens, needed, _memory(run, model))


def _layout(
    config: TrainConfig, context_length: int, summary: RunSummary | None, reported: Reported | None
) -> BatchLayout:
    """Layout as it was trained; else as it is reported, if train.json still has that microbatch; else on one device."""
    if summary is not None and summary.microbatch_size and summary.accumulation_steps:
        return BatchLayout(summary.world_size, summary.accumulation_steps, summary.microbatch_size, context_length)
    there = None if reported is None else reported.layout
    if there is not None and (there.microbatch_size, there.context_length) == (config.microbatch_size, context_length):
        return there
    return BatchLayout(1, config.accumulation_steps(1), config.microbatch_size, context_length)


def _tokens(config: TrainConfig, model: ModelConfig, layout: BatchLayout, summary: RunSummary | None) -> int | None:
    tokens = tokens_of_budget(config, model, batch_schedule(config, layout))
    if tokens is None and summary is not None:
        return summary.tokens_seen or None
    return tokens


def _memory(run: RunDirectory, model: ModelConfig) -> tuple[float, float] | None:
    """Memory of a sequence and fixed memory, GiB, by the search of this model that has the most peaks."""
    of_model = [each for each in read_results(run).of(MicrobatchSearch) if each.model == model.model_dump(mode="json")]
    search = max(of_model, key=lambda each: len(each.tried), default=None)
    return fit_line(search_points(search)) if search else None


def read_speeds(run: RunDirectory) -> list[KnownSpeed]:
    """Read the speeds in a run's folder: one that was measured long enough to be believed, and one that is reported.

    Raises UserError for files of the run that are wrong.
    """
    summary = read_summary(run.summary) if run.summary.exists() else None
    found = [_measured(run, summary) if summary else None, _reported(run, read_reported(run))]
    return [each for each in found if each is not None]


def _measured(run: RunDirectory, summary: RunSummary) -> KnownSpeed | None:
    speed, measured = summary.tokens_per_second, summary.measured
    if speed is None or speed <= 0 or measured is None or not measured.is_believable:
        return None
    if not summary.model or not summary.microbatch_size or not summary.accumulation_steps:
        return None
    try:
        model = parse_config(ModelConfig, summary.model, run.summary)
    except UserError:  # a later version's, with keys that this one does not know
        return None
    layout = BatchLayout(summary.world_size, summary.accumulation_steps, summary.microbatch_size, model.context_length)
    return KnownSpeed(run.path.name, True, summary.device, layout, model, summary.train, speed)


def _reported(run: RunDirectory, reported: Reported | None) -> KnownSpeed | None:
    if reported is None or reported.model is None or reported.layout is None or not reported.training_speed:
        return None
    model = parse_config(ModelConfig, reported.model, run.reported)
    speed = reported.training_speed
    return KnownSpeed(run.path.name, False, reported.device, reported.layout, model, reported.train, speed)
