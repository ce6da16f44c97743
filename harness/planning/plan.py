"""The plan of a run: its work, disk space, time and cost, computed without training, and its description as text."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from harness.common.errors import UserError
from harness.common.messages import GIB, counted, distinct_sizes, duration, paragraph
from harness.common.options import TrainOptions
from harness.common.program import gpu_names
from harness.data.dataset import did_you_mean, is_present
from harness.data.loader import BatchLayout, BatchSchedule
from harness.data.order import WindowOrder
from harness.data.training_data import TrainingData
from harness.model.config import WEIGHT_BYTES, ModelConfig
from harness.model.export_formats import describe_formats
from harness.model.tensor_names import check_weights_file
from harness.planning.estimated_speed import find_device
from harness.planning.experiment import Experiment, Position, check_continuable, check_fixed_keys, find_unfinished_work
from harness.planning.machines import hourly_price, machine_of_run
from harness.planning.memory import optimizer_state_bytes, step_bytes
from harness.planning.planned_speed import PlannedSpeed, plan_speed
from harness.planning.rates import UNSCALED, ScaledSettings, scale_settings
from harness.runs.budget import COUNTABLE, Budget
from harness.runs.checkpoint_meta import CheckpointMeta, upgrade_notebook_meta
from harness.runs.checkpoints import list_checkpoints, open_start
from harness.runs.throughput import cost, cost_by_phase
from harness.runs.train_config import TrainConfig

PADDED_VOCABULARY = 1.5  # times the dataset's vocabulary; padding for faster matrix products is smaller than that
OTHER_BYTES = 2**20  # the rest of a checkpoint: random states, tokenizer, meta.json


class InMirror(NamedTuple):
    """State of a run's mirror (harness/mirror/), as far as a plan needs it."""

    name: str  # the URL of the run's folder in the mirror
    checkpoint: str | None  # the mirror's checkpoint that the run would continue from; None if it would use none
    meta: CheckpointMeta | None  # that checkpoint's meta.json; None if `checkpoint` is None
    bytes_per_second: float | None  # speed of the run's last upload from this machine; None if unknown


@dataclass(frozen=True)
class Plan:
    """The remaining work of a run. If `position` is None, `steps` and all that is computed from it, such as `tokens`,
    must not be used."""

    experiment: Experiment
    layout: BatchLayout
    # The remaining global steps, and the token at which they start. None if they depend on the length of a dataset that
    # is not on this machine.
    position: Position | None
    is_continued: bool = False  # True if training resumes from a checkpoint
    budget: Budget | None = None  # train.json's budget converted to tokens; None if given in tokens
    scaled: ScaledSettings = UNSCALED
    dataset_remark: str | None = None
    order: WindowOrder | None = None  # None if a dataset is not here
    unfinished_work: set[str] = field(default_factory=set)  # see `find_unfinished_work`
    seconds_before: float = 0.0  # taken by the run's earlier processes, as the checkpoint records
    dollars_before: float = 0.0

    @property
    def config(self) -> TrainConfig:
        return self.experiment.config

    @property
    def batches(self) -> BatchSchedule:
        """Schedule of the global batches of the remaining steps; if `position` is None, of the whole run."""
        return self.experiment.batches(self.layout, self.position.tokens_seen if self.position else 0)

    @property
    def stages(self) -> list[tuple[int, BatchLayout]]:
        """Pairs (tokens, layout): once the run has seen `tokens` tokens, its steps have this `layout`.

        Only a batch ramp can have several pairs. The run may end before the last one.
        """
        seen = self.position.tokens_seen if self.position else 0
        return [(seen + stage.tokens_before, stage.layout) for stage in self.batches.stages]

    @property
    def steps(self) -> range:
        """The remaining global steps."""
        assert self.position is not None
        return range(self.position.first_step, self.position.total_steps)

    def tokens(self) -> int:
        """Return the number of tokens in the remaining steps."""
        return self.batches.tokens_before(len(self.steps))

    def times(self, work: str, interval: int | None) -> int:
        """Return how often `work` ("validation", "benchmarks" or "checkpoint") is still to be done: in the remaining
        steps at this `interval` (see `Position.is_due`), and once more if an earlier process left it undone."""
        steps = self.steps
        if interval is None:
            return 0
        unfinished = int(work in self.unfinished_work)
        if not steps:
            return unfinished
        # Computed without iterating over the steps, because there may be too many.
        return unfinished + steps[-1] // interval - (steps[0] - 1) // interval + (steps[-1] % interval != 0)

    def describe_passes(self) -> str | None:
        """Return a text on how often and in what order the whole run reads each train split.

        Returns None for a single split with neither `shuffle` nor `epochs`, or if a dataset is not on this machine.
        """
        config, order, length = self.config, self.order, self.layout.context_length
        is_plain = not config.shuffle and config.epochs is None and len(config.dataset_weights) == 1
        if order is None or self.position is None or is_plain:
            return None
        passes = order.passes((self.position.tokens_seen + self.tokens()) // length)
        texts = [
            f"{count:,.2f} passes over {windows * length:,} tokens{f' of {name}' if len(passes) > 1 else ''}"
            for count, windows, name in zip(passes, order.windows, config.dataset_weights, strict=True)
        ]
        how = "from front to back" if order.seed is None else f"in random order (seed {order.seed})"
        return f"{' and '.join(texts)}, {how}"

    def checkpoints(self) -> int:
        """Return the number of checkpoints still to be written."""
        return self.times("checkpoint", self.config.checkpoint_every)

    def checkpoint_bytes(self) -> int:
        """Return the size of one checkpoint on disk in bytes. A tied matrix counts twice, because it is stored under
        both names."""
        model = self.experiment.model
        weights = WEIGHT_BYTES * sum(math.prod(shape) for shape in model.tensor_shapes().values())
        return weights + optimizer_state_bytes(self.config, model) + OTHER_BYTES

    def added_checkpoints(self, *, at_end: bool = False) -> int:
        """Return the largest number of planned checkpoints that can be on the disk at once besides those there now.

        With `at_end`, count only those that remain after the run has finished without another stop.
        """
        assert self.position is not None
        steps = [at for at, _ in list_checkpoints(self.experiment.run.checkpoints)] if self.is_continued else []
        # Checkpoints that training moves to `aside/` are never pruned, so they make no room for new ones.
        there = sum(at < self.position.first_step for at in steps)
        if self.config.keep_checkpoints is None:
            return self.checkpoints()
        # Besides the newest `keep_checkpoints`, `prune` keeps `best`, `latest` and the one that a process continued
        # from (a new run may be stopped and continued, too); one more is being written. The first save comes before
        # anything is pruned.
        others = 2 + self.is_continued if at_end else 4
        return min(self.checkpoints(), max(1, self.config.keep_checkpoints + others - there))

    def disk_bytes(self) -> int:
        """Return the number of free bytes that the plan's checkpoints need."""
        return self.added_checkpoints() * self.checkpoint_bytes()

    def disk_shortage(self) -> str | None:
        """Return a message with a remedy if the disk is too small for the plan's checkpoints. Return None if it is
        large enough, or if their number is unknown."""
        run = self.experiment.run
        # `checkpoints` may be a link to another disk
        free = shutil.disk_usage(run.checkpoints if run.checkpoints.exists() else run.path).free
        if self.position is None or self.disk_bytes() <= free:
            return None
        count, added = self.checkpoints(), self.added_checkpoints()
        needed, available = distinct_sizes(self.disk_bytes(), free)
        room = f" (at most {added:,} more on the disk at a time)" if added < count else ""
        return (
            f"the run needs {needed} for {counted(count, 'checkpoint')}{room}, but {available} are free; free "
            "some space, keep fewer (train.json: keep_checkpoints, checkpoint_interval), or use another disk "
            "(--runs-dir)"
        )

    def check_disk(self) -> None:
        """Raise UserError if the disk is too small for the plan's checkpoints."""
        if shortage := self.disk_shortage():
            raise UserError(f"{self.experiment.run.path}: {shortage}")

    def seconds(self, speed: PlannedSpeed) -> dict[str, float]:
        """Return the seconds of "training" and of "validation", by these names. Benchmarks, start-up and the saving of
        checkpoints are not included. `speed.tokens_per_second` must not be None."""
        assert speed.tokens_per_second is not None
        # Count the microbatches of the rank that has the most of them, because the other ranks wait for it.
        microbatches = math.ceil((self.config.sequences_per_validation or 0) / self.layout.microbatch_size)
        if self.config.validation_ranks == "all":
            microbatches = math.ceil(microbatches / self.layout.world_size)
        validated = self.times("validation", self.config.validation_interval) * microbatches
        training = self.tokens() / speed.tokens_per_second
        # A forward pass is a third of the work of a training step on the same tokens.
        work = validated * self.layout.microbatch_tokens * self.layout.world_size / 3
        validating = work / speed.tokens_per_second
        if speed.includes_validation and training:
            share = training / (training + validating) if speed.training_share is None else speed.training_share
            training, validating = training * share, training * (1 - share)
        return {"training": training, "validation": validating}

    def price(self, speed: PlannedSpeed) -> tuple[float | None, str]:
        """Return the price of the plan's GPUs in dollars per hour and its source, or None and the reason."""
        return hourly_price(self.config.price_per_hour, speed.device, self.layout.world_size)


def make_plan(experiment: Experiment, world_size: int, meta: CheckpointMeta | None) -> Plan:
    """Return the plan of the work after the checkpoint that `meta` describes (None: of the whole run).

    Checkpoint and datasets are fully checked only if all datasets are on this machine. Raises UserError if a check
    fails, or if the batch, the budget or the schedule is impossible.
    """
    layout, config, model = experiment.layout(world_size), experiment.config, experiment.model
    budget = experiment.budget(layout, meta)
    position, order, folder = None, None, experiment.datasets_dir
    if experiment.has_data():
        data = experiment.open_data()
        if meta is not None:
            check_continuable(meta, experiment.run.checkpoints, experiment.provenance(data))
        experiment.check_validation_slice(data)
        data.check_token_ids(experiment.splits, model.vocab_size)
        split_tokens = data.lengths("train")
        position = experiment.position(layout, split_tokens, meta)
        order = experiment.window_order(split_tokens)
        remark = None if meta else _unused_vocabulary(model, data)
    else:
        # Checked now, because otherwise training would first download the dataset and then refuse the run. The
        # notebook's program records no train.json.
        if meta is not None and meta.train:
            check_fixed_keys(meta, experiment.run.checkpoints, config.model_dump(mode="json"))
        missing = next(name for name in config.dataset_weights if not is_present(folder, name, experiment.splits))
        hint = did_you_mean(folder, missing) or ", so the plan is not checked against its tokens"
        remark = f"{missing} is not in {folder}{hint}"
        if config.min_train_tokens != -1:
            position = experiment.position(layout, [COUNTABLE] * len(config.dataset_weights), meta)
    plan = Plan(experiment, layout, position, meta is not None, budget, dataset_remark=remark, order=order)
    if meta is not None:
        # Seconds without a recorded price cost today's price, as in training's Clock.
        costs = meta.costs or cost_by_phase(meta.seconds, config.price_per_hour) or {}
        plan = replace(plan, seconds_before=sum(meta.seconds.values()), dollars_before=sum(costs.values()))
    if position is None:
        return plan
    tokens = position.tokens_seen + plan.tokens()
    scaled = scale_settings(config, batch_tokens=layout.global_tokens, train_tokens=tokens, layers=model.n_layers)
    return replace(plan, scaled=scaled, unfinished_work=find_unfinished_work(config, position, meta))


def checked_plan(
    experiment: Experiment,
    checkpoint: str | None,
    ranks: int,
    *,
    restart: bool,
    mirrored: InMirror | None = None,
) -> Plan:
    """Return the plan of training on `ranks` ranks. Training starts from the first of these that applies:

    1. the mirror's checkpoint, if `mirrored` has one
    2. the beginning, if `restart` is true
    3. `checkpoint` (None: the latest one)
    4. the beginning, if the run has no checkpoint

    Raises UserError for most settings, data and checkpoints that training would refuse. Not checked, for example: free
    disk space, hashes, the device, max_hours and benchmark tasks.
    """
    meta = mirrored.meta if mirrored else None
    if meta is None and not restart:
        meta = planned_start(experiment, ranks, checkpoint)
    plan = make_plan(experiment, ranks, meta)
    if meta is None and experiment.initial_weights is not None:
        with experiment.initial_weights_errors():
            check_weights_file(experiment.initial_weights, experiment.model)
    return plan


def _unused_vocabulary(model: ModelConfig, data: TrainingData) -> str | None:
    """Return a note for the user if the model's vocabulary is far larger than the data's, and None otherwise."""
    needed = data.vocab_size
    if needed is None or model.vocab_size <= PADDED_VOCABULARY * needed:
        return None
    unused = model.parameters - model.model_copy(update={"vocab_size": needed}).parameters
    return (
        f'"vocab_size" in model.json is {model.vocab_size:,}, but the tokenizer of {data.parts[0].name} has {needed:,} '
        f"tokens: {unused:,} of {model.parameters:,} parameters are never used; set vocab_size to {needed}"
    )


def planned_start(experiment: Experiment, world_size: int, checkpoint: str | None) -> CheckpointMeta | None:
    """Return meta.json of `checkpoint` (None: the latest one), or None for a new run.

    For a checkpoint of the lab notebook's program (upstream.py), missing keys are filled in. Hashes are not
    verified. Raises UserError if the checkpoint or the data cannot be opened, or if the batch is impossible.
    """
    found = open_start(experiment.run, checkpoint, verify=False)
    if found is None:
        return None
    start, meta = found
    provenance = experiment.provenance(experiment.open_data()) if experiment.has_data() else None
    return upgrade_notebook_meta(start, meta, provenance, experiment.batches(experiment.layout(world_size)))


def describe_plan(
    plan: Plan,
    speed: PlannedSpeed,
    *,
    machine: str | None = None,
    memory_gib: float | None = None,
    mirrored: InMirror | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the plan as text for a terminal.

    `machine` describes the machine that the plan is for; None: this one. `memory_gib` is the memory of one GPU; None:
    unknown. The `notes` come last.
    """
    config, model = plan.config, plan.experiment.model
    lines = [*paragraph(f"Plan for {plan.experiment.run.path.name}: nothing is trained or downloaded", indent=0), ""]
    for title, settings in (("model.json", model), ("train.json", config)):
        items = [f"{key}={json.dumps(value)}" for key, value in settings.model_dump(exclude_defaults=True).items()]
        lines += [*paragraph(f"{title}:  {'  '.join(items)}", indent=4), ""]
    rows = [("parameters", f"{model.parameters:,}")]
    if model.moe is not None:
        balancing = f"x {plan.experiment.moe_router_loss_scale:g} (moe_router_loss_scale)"
        rows += [("active", f"{model.active_parameters:,} parameters for each token"), ("balancing loss", balancing)]
    rows += [("export", describe_formats(model)), ("FLOPs per token", f"{model.flops_per_token:,}")]
    if machine:
        rows.append(("machine", machine))
    batches = []  # the factors of the global batch, or of each global batch of a ramp that is still to come
    for seen, layout in plan.stages:
        since = f"from {seen:,} tokens on: " if len(plan.stages) > 1 else ""
        batches.append(
            f"{since}{counted(layout.world_size, 'rank')} x {counted(layout.microbatch_size, 'sequence')} x "
            f"{counted(layout.accumulation_steps, 'accumulation step')}\n"
            f"= {counted(layout.global_tokens // layout.context_length, 'sequence')} = {layout.global_tokens:,} tokens"
        )
    rows.append(("global batch", "\n".join(batches)))
    is_for_gpu = speed.device is not None or memory_gib is not None
    if is_for_gpu and (needed := step_bytes(model, config, plan.layout)) is not None:
        of = "" if memory_gib is None else f" of {memory_gib:g}"
        is_too_much = memory_gib is not None and needed > memory_gib * GIB
        remark = "too much: -f finds the microbatch_size that fits" if is_too_much else "-f measures it"
        rows.append(("memory", f"{needed / GIB:.1f}{of} GiB on each GPU (estimated; {remark})"))
    if config.shard_optimizer:
        whole, ranks = optimizer_state_bytes(config, model) / GIB, plan.layout.world_size
        shard = f"{whole:.2f} GiB of state, about {whole / ranks:.2f} on each of {ranks} ranks"
        rows.append(("optimizer", shard))
    if plan.scaled.explained:
        rows.append(("scaled", "\n".join(plan.scaled.explained)))
    if plan.budget:
        rows.append(("budget", plan.budget.describe()))
    if not plan.is_continued:
        rows.append(("starts from", str(plan.experiment.initial_weights or "new weights")))
    elif plan.position is None:
        rows.append(("starts from", "its checkpoint"))
    if mirrored:
        chosen = f"continue from {mirrored.checkpoint} there" if mirrored.meta else "use no checkpoint there"
        rows.append(("mirror", f"{mirrored.name}: would {chosen}"))
        if plan.position and plan.steps:
            rows.append(("a lost machine", describe_lost_machine(plan, speed, mirrored)))
    # Speed, time and cost come last, because the end of the text stays on the screen.
    if plan.position:
        rows += _work_rows(plan, speed)
    else:
        rows.append(("global steps", f"unknown until {config.data_name} is on this machine (min_train_tokens is -1)"))
    return "\n".join(lines + _table([*rows, *(("note", note) for note in notes)]))


def describe_lost_machine(plan: Plan, speed: PlannedSpeed, mirrored: InMirror) -> str:
    """Return, as text, how much training a loss of the machine can cost at most: all since the mirror's newest
    complete checkpoint. The plan must have steps."""
    size, rate = plan.checkpoint_bytes(), mirrored.bytes_per_second
    every = min(plan.config.checkpoint_every, len(plan.steps))
    upload = 0.0 if rate is None else size / rate
    sent = f"the upload of {size / GIB:.2f} GiB"
    sent += ", whose speed is not measured yet" if rate is None else f" at {rate / 1e6:,.1f} MB/s as last measured"
    if speed.tokens_per_second is None:
        return f"costs at most {every:,} steps and {sent}"
    steps = sum(plan.seconds(speed).values()) / len(plan.steps) * every
    # An upload that takes longer than the steps between two checkpoints delays the upload of the next checkpoint.
    seconds = steps + upload * (2 if upload > steps else 1)
    price, _ = plan.price(speed)
    dollars = "" if price is None else f", ${cost(seconds, price):,.2f}"
    parts = f" and {sent}" if rate is None else f": {every:,} steps and {sent}"
    return f"costs at most {duration(seconds)}{dollars}{parts}"


def _work_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    assert plan.position is not None
    position, config = plan.position, plan.config
    rows = [("global steps", f"{position.total_steps:,}"), ("tokens", f"{plan.tokens():,}")]
    if position.first_step:
        done = f"{position.first_step:,} steps, {position.tokens_seen:,} tokens"
        more = f"{position.total_steps - position.first_step:,} more"
        rows = [("done already", done), ("global steps", more), ("tokens", f"{plan.tokens():,} more")]
    if passes := plan.describe_passes():
        rows.append(("epochs", passes))
    each = f"{config.validation_batches} microbatches" if config.validation_batches else "without validation"
    each = f"{config.validation_sequences:,} sequences" if config.validation_sequences else each
    rows.append(("validations", f"{plan.times('validation', config.validation_interval):,} ({each})"))
    if config.benchmark_tasks is not None:
        each = f"{', '.join(config.benchmark_tasks)}; {config.benchmark_examples:,} examples each"
        unknown = "the time of benchmarks is unknown, and not included below"
        rows.append(("benchmarks", f"{plan.times('benchmarks', config.benchmark_interval):,} ({each})\n{unknown}"))
    disk = f"{plan.disk_bytes() / GIB:.2f} GiB at most, {plan.checkpoint_bytes() / GIB:.2f} each"
    rows.append(("checkpoints", f"{plan.checkpoints():,} ({disk})"))
    needed = None if speed.tokens_per_second is None else sum(plan.seconds(speed).values())
    price, _ = plan.price(speed)  # of the machine that the plan is for; max_dollars counts at price_per_hour
    at_price = config.model_copy(update={"price_per_hour": price or config.price_per_hour})
    true_ceilings = at_price.ceilings(plan.seconds_before, plan.dollars_before)
    is_over = not plan.steps and not plan.unfinished_work
    ceilings = {} if is_over else config.ceilings(plan.seconds_before, plan.dollars_before)
    for key, left in ceilings.items():
        reached = f"{key} is reached; raise it to continue training"
        said = f"{key} {getattr(config, key):g}: {duration(left)} left" if left > 0 else reached
        if left > 0 and true_ceilings[key] != left:
            said += f" at ${config.price_per_hour:g}/h, {duration(true_ceilings[key])} at ${price:g}/h"
            said += " (set price_per_hour to that)"
        early = needed is not None and 0 < left < needed
        rows.append(("ceiling", f"{said}{'; the run would stop there, before its end' if early else ''}"))
    return [*rows, *_time_rows(plan, speed)]


def _time_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    """Return the table rows for speed, time and cost, or one row with the reason if there is no speed."""
    if speed.tokens_per_second is None:
        return [("time and cost", f"unknown: {speed.source}")]
    parts = plan.seconds(speed)
    training, validating = parts["training"], parts["validation"]
    over = "training and validation together" if speed.includes_validation else "training alone, without validation"
    said = f"{speed.tokens_per_second:,.0f} tokens/s of {over}\n({speed.source})"
    basis = "estimated" if speed.training_share is None else "as reported"
    time = f"{duration(training)} training + {duration(validating)} validation ({basis})"
    if speed.includes_validation and training:
        time += f"\n= {duration(training + validating)}; training alone: {plan.tokens() / training:,.0f} tokens/s"
    price, priced = plan.price(speed)
    said_cost = f"unknown: {priced}"
    if price is not None:
        cents = {part: round(100 * cost(spent, price)) for part, spent in parts.items()}
        dollars = " + ".join(f"${each / 100:,.2f} {part}" for part, each in cents.items())
        # The total is the sum of the rounded amounts, so that the printed amounts add up to it.
        said_cost = f"{dollars} = ${sum(cents.values()) / 100:,.2f} at {priced}"
    if speed.uncertainty:
        low, high = (sum(parts.values()) / (1 + sign * speed.uncertainty) for sign in (1, -1))
        time += f"\nestimated: {duration(low)} to {duration(high)} in all"
        if price is not None:
            said_cost += f"\nestimated: ${cost(low, price):,.2f} to ${cost(high, price):,.2f}"
    return [("speed", said), ("time", time), ("cost", said_cost)]


def describe_start(plan: Plan) -> list[str]:
    """Return the lines that describe the plan at the start of training."""
    note = [f"note: {plan.dataset_remark}"] if plan.dataset_remark else []
    lines = [] if plan.budget is None else [f"budget: {plan.budget.describe()}"]
    if passes := plan.describe_passes():
        lines.append(f"epochs: {passes}")
    if plan.config.batch_ramp is not None:
        sizes = [
            f"{layout.global_tokens // layout.context_length:,} sequences from {seen:,}" for seen, layout in plan.stages
        ]
        lines.append(f"batch_ramp: {', '.join(sizes)} tokens on")
    lines += [f"scaled: {said}" for said in plan.scaled.explained]
    return note + [line for text in lines for line in paragraph(f"  {text}", indent=4)]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, value in rows:
        for index, text in enumerate(value.split("\n")):
            lines += paragraph(f"{'' if index else label:<{width}}{text}", indent=width)
    return lines


def print_plan(
    experiment: Experiment, checkpoint: str | None, ranks: int, options: TrainOptions, mirrored: InMirror | None = None
) -> None:
    """Print what training would do. `checkpoint`, `mirrored` and --restart determine the start, as in `checked_plan`.

    The plan is for `ranks` ranks on this machine. If no GPU is visible here, it is for the machine that
    `machine_of_run` returns, if any, with all GPUs if `ranks` is 1. --assume-device and --assume-world-size take
    precedence.
    """
    said, meant, memory, assumed = None, None, None, options.assume_world_size
    if not gpu_names() and (means := machine_of_run(experiment.run.path.name, experiment.config.price_per_hour)):
        (machine, named_by), assumed = means, assumed or (means[0].gpus if ranks == 1 else None)
        meant, kind = find_device(machine.device), options.assume_device or machine.device
        is_that = (kind, assumed or ranks) == (machine.device, machine.gpus)
        memory = machine.memory_gib if kind == machine.device else None
        said = machine.machine if is_that else f"{assumed or ranks} x {kind} in place of {machine.machine}"
        if not (options.assume_device or options.assume_world_size):
            said += f" (chosen by {named_by}; --assume-device and --assume-world-size replace it)"
    ranks = assumed or ranks
    plan = checked_plan(experiment, checkpoint, ranks, restart=options.restart, mirrored=mirrored)
    speed = plan_speed(experiment, plan.layout, options, meant=meant)
    # If another machine is assumed, the disk of this one does not matter.
    shortage = None if assumed or said else plan.disk_shortage()
    notes = [note for note in (plan.dataset_remark, shortage) if note]
    print(describe_plan(plan, speed, machine=said, memory_gib=memory, mirrored=mirrored, notes=notes), flush=True)
