"""Conclusions from rows of results: a line for each question, from all rows of all calls.

Of several rows for one question the last counts. Questions without a measurement are listed, too.
"""

from __future__ import annotations

from typing import Any

from bench.gpu.results import Row
from harness.common.statistics import fit_line
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig
from harness.planning.estimated_speed import estimated_speed, find_device

# Tokens per second on an H200 with microbatches of 64.
GOALS = (
    (0.1, 400_000, "with dropout"),
    (0.1, 450_000, "with dropout and the loss in one kernel"),
    (0.0, 500_000, "without dropout"),
)
GOAL_GIB = 0.4  # a sequence
GOAL_SEARCH_SECONDS = 120
EXACT = 1 / 256  # a share of dropout that is off by more is another dropout than configured
WORTH_IT = 1.015
MICROBATCH = 64


def conclusions(rows: list[Row]) -> list[str]:
    """One line or more for each question, in the order in which they matter."""
    questions = (speed, memory, paper, waits, attention, loss, variants, search, continuing, repeating, saving)
    lines = [line for question in questions for line in question(rows)]
    failures = [
        f"{row['what']}: {row.get('status', row.get('why'))}" for row in rows if row["stage"] in ("failed", "not run")
    ]
    return lines + [f"NOT MEASURED: {failure}" for failure in failures]


def of_stage(among: list[Row], stage: str, /, **values: Any) -> list[Row]:
    """The rows of a stage that have these values."""
    return [row for row in among if row["stage"] == stage and all(row.get(key) == each for key, each in values.items())]


def usual_step(rows: list[Row], microbatch: int = MICROBATCH, drop_rate: float = 0.1, settings: str = "") -> Row | None:
    found = of_stage(rows, "step", microbatch=microbatch, drop_rate=drop_rate, settings=settings)
    return found[-1] if found else None


def speed(rows: list[Row]) -> list[str]:
    lines = []
    for drop_rate, goal, what in GOALS:
        row = usual_step(rows, drop_rate=drop_rate)
        if row is None:
            lines.append(f"speed, {what}: not measured (goal {goal:,} tokens/s)")
        else:
            met = "met" if row["tokens_per_s"] >= goal else f"MISSED by {1 - row['tokens_per_s'] / goal:.1%}"
            mfu = f", MFU {row['mfu']:.1%}" if row.get("mfu") else ""
            lines.append(f"speed, {what}: {row['tokens_per_s']:,.0f} tokens/s{mfu}; goal {goal:,}: {met}")
    return lines


def memory(rows: list[Row]) -> list[str]:
    """Memory a sequence and fixed memory, from a line fitted to the peaks of microbatches that differ in size alone."""
    points = {
        row["microbatch"]: row["allocated_gib"]
        for row in of_stage(rows, "step", drop_rate=0.1, settings="")
        if "allocated_gib" in row
    }
    line = fit_line([(float(size), peak) for size, peak in points.items()]) if len(points) > 1 else None
    if line is None:
        return [f"memory: not measured (goal {GOAL_GIB} GiB a sequence)"]
    met = "met" if line[0] <= GOAL_GIB else "MISSED"
    return [f"memory: {line[0]:.3f} GiB a sequence + {line[1]:.2f} GiB fixed; goal {GOAL_GIB}: {met}"]


def paper(rows: list[Row]) -> list[str]:
    """Measured against the arithmetic of --plan."""
    machine, row = of_stage(rows, "machine"), usual_step(rows)
    device = find_device(machine[-1]["device"]) if machine else None
    if device is None or row is None:
        return ["estimated: nothing to compare with"]
    shape = {"vocab_size": 50257, "context_length": 1024, "emb_dim": 768, "n_heads": 12, "n_layers": 12}
    model = ModelConfig.model_validate({**shape, "drop_rate": 0.1, "qkv_bias": False})
    expected = estimated_speed(model, device, BatchLayout(1, 1, MICROBATCH, 1024))
    return [
        f"estimated: {expected:,.0f} tokens/s on {device.name}; measured / paper: {row['tokens_per_s'] / expected:.2f}"
    ]


def waits(rows: list[Row]) -> list[str]:
    found = of_stage(rows, "syncs")
    if not found:
        return []
    return [f"waits for the device in a step: {found[-1]['found'] or 'none'}"]


def attention(rows: list[Row]) -> list[str]:
    """Kernels with the right share of dropout, fastest first, and those with a wrong share, for each dropout."""
    lines = []
    for rate in sorted({row["drop_rate"] for row in of_stage(rows, "attention")}):
        done = [
            row for row in of_stage(rows, "attention", drop_rate=rate) if "ms" in row and row["backend"] != "default"
        ]
        exact = sorted((row for row in done if abs(row["dropped"] - rate) <= EXACT), key=lambda row: row["ms"])
        wrong = [f"{row['backend']} drops {row['dropped']:.4f}" for row in done if row not in exact]
        ways = ", ".join(f"{row['backend']} {row['ms']:.2f} ms" for row in exact)
        lines.append(f"attention, dropout {rate}: {'; '.join([ways or 'no kernel', *wrong])}")
    return lines


def loss(rows: list[Row]) -> list[str]:
    """The fastest way for the most rows that were measured, and how much torch's own takes where it was measured."""
    found = of_stage(rows, "loss")
    lines = []
    for count in sorted({row["rows"] for row in found}):
        ways = sorted(of_stage(rows, "loss", rows=count), key=lambda row: row["ms"])
        said = (
            f"{row['kind']} (chunk {row['chunk']:,}{', compiled' if row['compiled'] else ''}) {row['ms']:.2f} ms"
            for row in ways
        )
        lines.append(f"head and loss, {count:,} rows: {', '.join(said)}")
    return lines


def variants(rows: list[Row]) -> list[str]:
    """Each setting against the usual step."""
    base, lines = usual_step(rows), []
    for row in of_stage(rows, "step", microbatch=MICROBATCH):
        if base is None or row is base or (not row["settings"] and row["drop_rate"] == base["drop_rate"]):
            continue
        ratio = row["tokens_per_s"] / base["tokens_per_s"]
        what = row["settings"] or f"dropout {row['drop_rate']}"
        more = f", {row['allocated_gib'] - base['allocated_gib']:+.1f} GiB" if "allocated_gib" in row else ""
        verdict = "worth having" if ratio >= WORTH_IT else "costs speed" if ratio < 1 / WORTH_IT else "no difference"
        lines.append(f"{what}: {ratio - 1:+.1%} tokens/s{more}: {verdict}")
    return lines


def search(rows: list[Row]) -> list[str]:
    """Verdict on -f: its answer trains, a tenth more is refused; and its seconds."""
    found = of_stage(rows, "search")
    if not found:
        return ["-f: not measured"]
    took = f"{found[-1]['seconds']:.0f} s" + ("" if found[-1]["seconds"] <= GOAL_SEARCH_SECONDS else ", TOO LONG")
    limit = "; RECOMPILED TOO OFTEN" if found[-1]["recompile_limit_hit"] else ""
    ends = {row["what"]: row for row in of_stage(rows, "trained")}
    said = [f"{what} ({row['size']}): {'trains' if row['status'] == 0 else 'is refused'}" for what, row in ends.items()]
    right = [ends[what]["status"] == 0 for what in ("answer", "a tenth more") if what in ends] == [True, False]
    return [f"-f: {'true' if right else 'NOT SHOWN TO BE TRUE'}: {'; '.join([*said, took])}{limit}"]


def continuing(rows: list[Row]) -> list[str]:
    found = of_stage(rows, "stop and continue")
    if not found:
        return ["stop and continue: not measured"]
    row = found[-1]
    if not row["stopped"]:
        return ["stop and continue: NOT STOPPED in time"]
    kind = "deterministic" if row["deterministic"] else "not deterministic"
    return [
        f"stop and continue, two ranks, {kind}: the weights are {'the same' if row['same_bits'] else 'NOT the same'}"
    ]


def repeating(rows: list[Row]) -> list[str]:
    """Verdict on two runs of the same training giving the same bits, and the cost of determinism in speed; the faster
    of two runs each."""
    lines, best = [], {}
    for row in of_stage(rows, "repeat"):
        kind = "deterministic" if row["deterministic"] else "usual"
        lines.append(f"the same run twice, {kind}: {'the same bits' if row['same_bits'] else 'other bits'}")
        speeds = [each for each in row["tokens_per_s"] if each]
        if speeds:
            best[kind] = max(speeds)
    if len(best) == 2:
        lines.append(f'"deterministic": true costs {1 - best["deterministic"] / best["usual"]:.1%} of the speed')
    return lines


def saving(rows: list[Row]) -> list[str]:
    """Cost of checkpoints in training time, saved in front and in the background."""
    lasted = {}
    for row in of_stage(rows, "saving"):
        if row["status"] == 0 and row["seconds"]:
            spent = row["seconds"]
            lasted[row["in_background"]] = (spent["training"] + spent["checkpointing"], spent["checkpointing"])
    if len(lasted) < 2:
        return ["saving in the background: not measured"]
    (front, pause_front), (behind, pause_behind) = lasted[False], lasted[True]
    verdict = "worth having" if front / behind >= WORTH_IT else "no difference"
    return [
        f"saving: {pause_front:.1f} s of pauses in front, {pause_behind:.1f} s in the background; training and saving "
        f"{front:.1f} and {behind:.1f} s: the background is {verdict}"
    ]
