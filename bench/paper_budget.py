"""Print the tables of docs/performance.md that are arithmetic: the work of a token, floors, and what is expected.

uv run bench/paper_budget.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.runs.directory import RunDirectory
from harness.runs.experiment import Experiment
from harness.runs.paper_speed import UNCERTAINTY, PaperDevice, PaperSpeed, Work, find_device, paper_speed
from harness.runs.plan import make_plan

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = 1024
# Runs of eight GPUs, their device, and what the lab notebook measured: tokens/s of training and validation together,
# seconds, dollars.
NOTEBOOK = {
    "8xa100m40": ("A100 40GB", 234_480, 13_904, 39.86),
    "8xa100m80": ("A100 80GB", 282_707, 11_532, 45.87),
    "8xh100m80": ("H100", 490_249, 6_650, 44.19),
    "8xb200m160": ("B200", 778_107, 4_190, 46.46),
}
# One GPU of each kind, with the notebook's microbatch where it had one.
SINGLE = {"A100 40GB": 13, "A100 80GB": 28, "H100": 27, "H200": 64, "B200": 64}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, shared": {"shard_optimizer": True},
    "Muon": {"optimizer": "muon"},
    "Muon, shared": {"optimizer": "muon", "shard_optimizer": True},
}
OPTIMIZER_TERMS = ("optimizer, per step", "Newton and Schulz, per step", "exchange")
# The machine this is developed on, two cores with AMX, 2026-11-22: the fastest of 590 products of 512 x 768 x 768, and
# of 118 copies of 16 MiB, between other programs (load 6 to 9). FLOP/s, bytes/s.
CPU = {"fp32": (332e9, 20.2e9), "bf16": (2.4e12, 20.2e9)}


def device(name: str) -> PaperDevice:
    found = find_device(name)
    assert found is not None, name
    return found


def table(title: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (title, ["---"] * len(title), *rows)]


def work_table(model: ModelConfig) -> list[str]:
    """What a token needs."""
    work = Work.of(model)
    rows = [
        ["products of the 12 layers", f"{work.layer_flops / 1e6:.0f} MFLOP"],
        ["products of the head", f"{work.head_flops / 1e6:.0f} MFLOP"],
        ["attention, causal, scores computed twice", f"{work.attention_flops / 1e6:.0f} MFLOP"],
        ["memory traffic between the layers' products", f"{work.layer_bytes / 1e3:,.0f} kB"],
        ["memory traffic of the loss", f"{work.logit_bytes / 1e3:,.0f} kB"],
        ["random numbers for dropout", f"{work.numbers:,.0f}"],
    ]
    return table(["a token of training", "needs"], rows)


def floor_table(model: ModelConfig) -> list[str]:
    """What no program goes below."""
    work = Work.of(model)
    places = [
        (name, device(name).chip.matrix_peak, device(name).bandwidth, "16 bit", "data sheet, on paper")
        for name in SINGLE
    ]
    places += [("2 CPU cores", *rates, precision, "measured, on a busy machine") for precision, rates in CPU.items()]
    rows = []
    for name, peak, bandwidth, precision, source in places:
        wide = 2 if precision == "fp32" else 1  # activations of 4 bytes in place of 2
        arithmetic, memory = work.matrix_flops / peak, wide * work.bytes / bandwidth
        most = 1 / max(arithmetic, memory)
        rows.append(
            [
                name,
                precision,
                f"{1e6 * arithmetic:,.2f}",
                f"{1e6 * memory:,.2f}",
                f"{float(f'{most:.3g}'):,.0f}",
                source,
            ]
        )
    title = ["device", "products in", "µs arithmetic", "µs memory", "tokens/s at most", "by rates"]
    return table(title, rows)


def single(model: ModelConfig, name: str, drop_rate: float) -> PaperSpeed:
    """One GPU's speed."""
    changed = model.model_copy(update={"drop_rate": drop_rate})
    return paper_speed(changed, device(name), BatchLayout(1, 1, SINGLE[name], CONTEXT))


def term_table(model: ModelConfig) -> list[str]:
    """Microseconds a token on one GPU."""
    found = {name: single(model, name, 0.1) for name in SINGLE}
    terms = [term for term in found["H200"].terms if any(each.terms[term] > 0 for each in found.values())]
    rows = [[term, *(f"{1e6 * each.terms[term]:.2f}" for each in found.values()), "—"] for term in terms]
    rows.append(["sum", *(f"{1e6 * each.seconds:.2f}" for each in found.values()), "—"])
    rows.append(["tokens/s", *(f"{_thousands(each.tokens_per_second)}" for each in found.values()), "—"])
    without = [_thousands(single(model, name, 0.0).tokens_per_second) for name in SINGLE]
    rows.append(["tokens/s with drop_rate 0", *without, "—"])
    title = ["µs a token", *(f"{name}, {size}" for name, size in SINGLE.items()), "measured"]
    return table(title, rows)


def optimizer_table(model: ModelConfig) -> list[str]:
    """Microseconds a token of what differs between optimizers, on each of eight GPUs with the notebook's microbatch."""
    rows = []
    for name in ("A100 40GB", "H100"):
        for says, train in OPTIMIZERS.items():
            found = paper_speed(model, device(name), BatchLayout(8, 1, SINGLE[name], CONTEXT), train)
            terms = [found.terms.get(term, 0.0) for term in OPTIMIZER_TERMS]
            rows.append([f"8 x {name}", says, *(f"{1e6 * term:.2f}" for term in terms)])
            rows[-1].append(_thousands(found.tokens_per_second))
    title = ["machine", "train.json", *OPTIMIZER_TERMS, "tokens/s"]
    return table(title, rows)


def machine_table(runs: Path) -> list[str]:
    """The notebook's four machines, with its batches; validation shared out among the ranks."""
    rows = []
    for run, (name, speed, seconds, dollars) in NOTEBOOK.items():
        experiment = Experiment.load(RunDirectory.find(runs, run), ROOT / "datasets")
        plan = make_plan(experiment, 8, None)
        expected = paper_speed(experiment.model, device(name), plan.layout).tokens_per_second
        batches, price = experiment.config.validation_batches or 0, experiment.config.price_per_hour or 0.0
        validating = plan.validations() * batches * plan.layout.microbatch_tokens / 3  # a forward is a third of a step
        hours = (plan.tokens() + validating) / expected / 3600
        low, high = hours / (1 + UNCERTAINTY), hours / (1 - UNCERTAINTY)
        rows.append(
            [
                f"8 x {name}",
                f"{speed:,}",
                f"{seconds / 3600:.2f} h, ${dollars:.2f}",
                _thousands(expected),
                f"{low:.2f} to {high:.2f} h",
                f"${low * price:.2f} to ${high * price:.2f}",
            ]
        )
    title = ["machine", "tokens/s, notebook", "took (measured)", "tokens/s (on paper)", "would take", "would cost"]
    return table(title, rows)


def _thousands(number: float) -> str:
    return f"{round(number / 1000):,}k"


def tables(runs: Path) -> dict[str, list[str]]:
    """All tables of docs/performance.md that are arithmetic, as lines of Markdown; `runs` has the shipped ones."""
    model = load_model_config(runs / "8xh100m80" / "model.json")
    return {
        "work": work_table(model),
        "floors": floor_table(model),
        "terms": term_table(model),
        "optimizers": optimizer_table(model),
        "machines": machine_table(runs),
    }


if __name__ == "__main__":
    for name, lines in tables(ROOT / "runs").items():
        print(f"\n{name}\n", *lines, sep="\n")
