"""Plan of a run: its work and cost, computed without doing any of it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Sequence

from harness.common.gpu_names import gpu_names
from harness.common.options import TrainOptions
from harness.common.units import GIB
from harness.data.dataset import Dataset, check_token_ids, is_present, neighbour_remark
from harness.model.config import ModelConfig
from harness.model.export_formats import describe_formats
from harness.model.tensor_names import check_weights_file
from harness.planning.experiment import Experiment
from harness.planning.machines import hourly_price, machine_of_run
from harness.planning.paper_speed import find_device
from harness.planning.plan_costs import Plan, planned_seconds
from harness.planning.planned_speed import PlannedSpeed, plan_speed
from harness.planning.rates import UNSCALED
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta
from harness.runs.checkpoints import choose_start, refuse_unnamed
from harness.runs.optimizer_state import optimizer_state_bytes
from harness.runs.train_config import TrainConfig
from harness.runs.upstream import upgrade_notebook_meta

COLUMNS = 79
PADDED_VOCABULARY = 1.5  # times the dataset's: beyond what anybody pads it to, for the speed of its products


def describe_plan(
    plan: Plan, model: ModelConfig, speed: PlannedSpeed, *, machine: str | None = None, notes: Sequence[str] = ()
) -> str:
    """The plan as text for a terminal: what it will take comes last, where it stays on the screen."""
    config, is_continued = plan.config, plan.position is not None and plan.position.first_step > 0
    lines = [*_wrap(f"Plan for {plan.name}: nothing is trained or downloaded", following=""), ""]
    for title, settings in (("model.json", model), ("train.json", config)):
        items = [f"{key}={json.dumps(value)}" for key, value in settings.model_dump(exclude_defaults=True).items()]
        lines += [*_wrap(f"{title}:  {'  '.join(items)}", following=" " * 4), ""]
    rows = [
        ("parameters", f"{plan.parameters:,}"),
        *_expert_rows(plan),
        ("export", describe_formats(model)),
        ("FLOPs per token", f"{plan.flops_per_token:,}"),
        *([("machine", machine)] if machine else []),
        ("global batch", _global_batch(plan)),
        *_share_rows(plan),
        *([("scaled", "\n".join(plan.scaled.explained))] if plan.scaled.explained else []),
        *([("budget", plan.budget.describe())] if plan.budget else []),
        *([] if is_continued else [("starts from", str(plan.initial_weights or "new weights"))]),
        *(_work_rows(plan, speed) if plan.position else [("global steps", _unknown(config))]),
        *(("note", note) for note in notes),
    ]
    return "\n".join(lines + _table(rows))


def _global_batch(plan: Plan) -> str:
    """Text on the factors of the global batch; of a ramp, on each size to come."""
    stages = plan.batches.stages
    said = []
    for stage in stages:
        layout = stage.layout
        seen = (plan.position.tokens_seen if plan.position else 0) + stage.tokens_before
        since = f"from {seen:,} tokens on: " if len(stages) > 1 else ""
        said.append(
            f"{since}{layout.world_size} ranks x {layout.microbatch_size} sequences x {layout.accumulation_steps} "
            "accumulation steps\n"
            f"= {layout.global_tokens // layout.context_length:,} sequences = {layout.global_tokens:,} tokens"
        )
    return "\n".join(said)


def _share_rows(plan: Plan) -> list[tuple[str, str]]:
    if not plan.config.shard_optimizer:
        return []
    whole, ranks = plan.optimizer_bytes / GIB, plan.layout.world_size
    return [("optimizer", f"{whole:.2f} GiB of state, about {whole / ranks:.2f} on each of {ranks} ranks")]


def _expert_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.active_parameters is None:
        return []
    return [
        ("active", f"{plan.active_parameters:,} parameters for each token"),
        ("balancing loss", f"x {plan.moe_router_loss_scale:g} (moe_router_loss_scale)"),
    ]


def _work_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    assert plan.position is not None
    position, config = plan.position, plan.config
    rows = [("global steps", f"{position.total_steps:,}"), ("tokens", f"{plan.tokens():,}")]
    if position.first_step:
        done = f"{position.first_step:,} steps, {position.tokens_seen:,} tokens"
        more = f"{position.total_steps - position.first_step:,} more"
        rows = [("done already", done), ("global steps", more), ("tokens", f"{plan.tokens():,} more")]
    each = f"{config.validation_batches} microbatches" if config.validates else "without validation"
    disk = f"{plan.disk_bytes() / GIB:.2f} GiB at most, {plan.checkpoint_bytes() / GIB:.2f} each"
    rows += [("validations", f"{plan.validations():,} ({each})"), *_benchmark_rows(plan, speed)]
    return [*rows, ("checkpoints", f"{plan.checkpoints():,} ({disk})"), *_time_rows(plan, speed)]


def _benchmark_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    tasks = plan.config.benchmark_tasks
    if tasks is None:
        return []
    each = f"{', '.join(tasks)}; {plan.config.benchmark_examples:,} examples each"
    said = f"{plan.benchmarks():,} ({each})"
    if speed.benchmark_seconds is None:
        said += "\nhow long they take is not known, and not counted"
    return [("benchmarks", said)]


def _time_rows(plan: Plan, speed: PlannedSpeed) -> list[tuple[str, str]]:
    """Rows of speed, time and cost. Validation is an estimate unless it is reported; saving checkpoints is not
    included."""
    if speed.tokens_per_second is None:
        return [("time and cost", f"unknown: {speed.source}")]
    parts = planned_seconds(plan, speed)
    training, validating = parts["training"], parts["validation"]
    over = "training and validation together" if speed.includes_validation else "training alone, without validation"
    said = f"{speed.tokens_per_second:,.0f} tokens/s of {over}\n({speed.source})"
    told = "estimated" if speed.training_share is None else "as reported"
    time = f"{_hours(training)} training + {_hours(validating)} validation ({told})"
    if speed.includes_validation and training:
        time += f"\n= {_hours(training + validating)}, at {plan.tokens() / training:,.0f} tokens/s of training"
    if "benchmarks" in parts:
        time += f"\n+ {_hours(parts['benchmarks'])} benchmarks, as this run's earlier ones"
    price, priced = hourly_price(plan.config.price_per_hour, speed.device, plan.layout.world_size)
    cost = f"unknown: {priced}" if price is None else f"{_cost(price, parts)} at {priced}"
    if speed.uncertainty:
        seconds = sum(parts.values())
        time += f"\nestimated: {_range(seconds, speed.uncertainty, _hours)} in all"
        if price is not None:
            cost += f"\nestimated: {_range(seconds * price / 3600, speed.uncertainty, '${:,.2f}'.format)}"
    return [("speed", said), ("time", time), ("cost", cost)]


def _range(quantity: float, uncertainty: float, write: Callable[[float], str]) -> str:
    """Range of a quantity that is inverse to an uncertain speed."""
    return f"{write(quantity / (1 + uncertainty))} to {write(quantity / (1 - uncertainty))}"


def _cost(price: float, seconds: dict[str, float]) -> str:
    cents = {part: round(spent * price / 36) for part, spent in seconds.items()}
    parts = " + ".join(f"${cost / 100:,.2f} {part}" for part, cost in cents.items())
    # The sum of what is printed, so that it adds up.
    return f"{parts} = ${sum(cents.values()) / 100:,.2f}"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 600 else f"{seconds:,.0f} s"


def _unknown(config: TrainConfig) -> str:
    return f"unknown until {config.dataset} is on this machine (min_train_tokens is -1)"


def describe_start(plan: Plan, speed: PlannedSpeed | None) -> list[str]:
    """Lines on train.json's budget, ramp and scaling rules, printed as training begins; empty without any of them.
    `speed`: for the time and cost of the budget."""
    lines = []
    if plan.budget is not None and plan.position is not None:
        left = f"{plan.position.total_steps - plan.position.first_step:,} global steps, {plan.tokens():,} tokens to go"
        lines += _wrap(f"  budget: {plan.budget.describe()}; {left}{_price(plan, speed)}", following=" " * 4)
    if plan.config.batch_ramp is not None:
        seen = plan.position.tokens_seen if plan.position else 0
        stages = [(seen + each.tokens_before, each.layout) for each in plan.batches.stages]
        sizes = [
            f"{layout.global_tokens // layout.context_length:,} sequences from {first:,}" for first, layout in stages
        ]
        lines += _wrap(f"  batch_ramp: {', '.join(sizes)} tokens on", following=" " * 4)
    for said in plan.scaled.explained:
        lines += _wrap(f"  scaled: {said}", following=" " * 4)
    return lines


def _price(plan: Plan, speed: PlannedSpeed | None) -> str:
    if speed is None or speed.tokens_per_second is None:
        return "" if speed is None else f"; time and cost unknown: {speed.source}"
    seconds = sum(planned_seconds(plan, speed).values())
    price, priced = hourly_price(plan.config.price_per_hour, speed.device, plan.layout.world_size)
    cost = "" if price is None else f", ${seconds * price / 3600:,.2f} at {priced}"
    return f", {_hours(seconds)}{cost} at {speed.tokens_per_second:,.0f} tokens/s ({speed.source})"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows) + 2
    lines = []
    for label, value in rows:
        for index, text in enumerate(value.split("\n")):
            lines += _wrap(f"{'' if index else label:<{width}}{text}", following=" " * width)
    return lines


def _wrap(text: str, following: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, subsequent_indent=following, break_on_hyphens=False, drop_whitespace=True)


def make_plan(experiment: Experiment, world_size: int, meta: CheckpointMeta | None) -> Plan:
    """The plan of what is left to do after the checkpoint that `meta` describes, or of the whole run.

    The dataset is consulted if it is on this machine. Raises UserError for what cannot work.
    """
    layout = experiment.layout(world_size)
    budget = experiment.budget(layout, meta)
    config, model = experiment.config, experiment.model
    position = None
    if is_present(experiment.datasets_dir, config.dataset, experiment.splits):
        dataset = Dataset.open(experiment.datasets_dir, config.dataset)
        if meta is not None:
            experiment.check_checkpoint(meta, dataset)
        experiment.check_validation_slice(layout, dataset)
        for split in experiment.splits:
            check_token_ids(dataset, split, model.vocab_size)
        position = experiment.position(layout, len(dataset.split("train")), meta, budget)
        remark = None if meta else _unused_vocabulary(model, dataset)
    else:
        remark = neighbour_remark(experiment.datasets_dir, config.dataset)
        if config.min_train_tokens != -1:
            position = experiment.position(layout, sys.maxsize, meta, budget)
    initial = experiment.initial_weights if meta is None else None
    scaled = experiment.scaled_settings(layout, position) if position else UNSCALED
    return Plan(
        experiment.run.path.name,
        config,
        model.parameters,
        model.flops_per_token,
        layout,
        position,
        optimizer_bytes=optimizer_state_bytes(config, model),
        initial_weights=initial,
        budget=budget,
        scaled=scaled,
        active_parameters=model.active_parameters if model.moe else None,
        moe_router_loss_scale=experiment.moe_router_loss_scale,
        dataset_remark=remark,
    )


def _unused_vocabulary(model: ModelConfig, dataset: Dataset) -> str | None:
    """A remark on a vocabulary far larger than the dataset's; None for one that is only padded."""
    needed = dataset.meta.vocab_size
    if needed is None or model.vocab_size <= PADDED_VOCABULARY * needed:
        return None
    unused = model.parameters - model.model_copy(update={"vocab_size": needed}).parameters
    return (
        f'"vocab_size" in model.json is {model.vocab_size:,}, but {dataset.name} has {needed:,} tokens: {unused:,} of '
        f"{model.parameters:,} parameters are never used; set it to {needed}"
    )


def planned_start(experiment: Experiment, world_size: int, checkpoint: str | None) -> CheckpointMeta | None:
    """The meta.json of the checkpoint that training would continue from: the named one, or the latest; None if it would
    start. A notebook's is completed, and refused where training would refuse it. Raises UserError."""
    start = choose_start(experiment.run.checkpoints, checkpoint)
    if start is None:
        return None
    meta, config = read_meta(start), experiment.config
    refuse_unnamed(start, meta, checkpoint)
    here = is_present(experiment.datasets_dir, config.dataset, experiment.splits)
    provenance = experiment.provenance(Dataset.open(experiment.datasets_dir, config.dataset)) if here else None
    return upgrade_notebook_meta(start, meta, provenance, experiment.batches(experiment.layout(world_size)))


def print_plan(experiment: Experiment, checkpoint: str | None, ranks: int, options: TrainOptions) -> None:
    """Print what the command would do with `checkpoint` (None: with the latest) on so many ranks, if no other number is
    assumed. On a machine without GPUs, where only one was started, the machine that the run means is assumed.

    Raises UserError for what training would refuse, but for a disk too small, and the names of benchmarks.
    """
    means = None if gpu_names() else machine_of_run(experiment.run.path.name, experiment.config.price_per_hour)
    said, meant, assumed = None, None, options.assume_world_size
    if means is not None:
        (machine, named_by), assumed = means, assumed or (means[0].gpus if ranks == 1 else None)
        meant, kind = find_device(machine.device), options.assume_device or machine.device
        is_that = (kind, assumed or ranks) == (machine.device, machine.gpus)
        said = machine.machine if is_that else f"{assumed or ranks} x {kind} in place of {machine.machine}"
        said += f" (by {named_by}; --assume-device and --assume-world-size change it)"
    ranks = assumed or ranks
    meta = None if options.restart else planned_start(experiment, ranks, checkpoint)
    plan = make_plan(experiment, ranks, meta)
    if plan.initial_weights is not None:
        check_weights_file(plan.initial_weights, experiment.model)
    speed = plan_speed(experiment, plan.layout, options, meant=meant)
    # On an assumed machine it is not this disk that counts.
    shortage = None if assumed else plan.disk_shortage(experiment.run.path)
    notes = [note for note in (plan.dataset_remark, shortage) if note]
    print(describe_plan(plan, experiment.model, speed, machine=said, notes=notes), flush=True)
