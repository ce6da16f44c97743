"""Measure training on one GPU, in three calls of less than ten minutes each.

    uv run bench/on_gpu.py first        # what the card can do; attention; the loss; the whole step
    uv run bench/on_gpu.py variants     # what each setting is worth, in whole steps
    uv run bench/on_gpu.py commands     # -f, stop and continue, saving, repeating: the command itself

Each stage is a process with a time limit of its own; one that fails does not end the call, and one for which no time is
left is said. All rows go into one JSON file (--out) and, after each call, into tables in a Markdown file beside it.
`uv run bench/on_gpu.py step --microbatch 13` runs one stage alone; --tiny rehearses on any machine, in no time.

On a machine that has torch (2.11 or later, Python 3.11 or later), but neither uv nor the internet nor pydantic, take
the missing wheels along:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_17_x86_64 \\
        -d wheels pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection

and there, in the repository:

    pip install --no-index --no-deps --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site python3 bench/on_gpu.py first --out results/on_gpu.json
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

# `python bench/...` puts bench/ on the path, not the repository root.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu.results import Results

LEAST_SECONDS = 15.0  # no stage is begun with less
STOPPING_SECONDS = 10.0
# Stage and options, and its limit in seconds: the most decisive first, since time may run out.
CALLS: dict[str, list[tuple[str, int]]] = {
    "first": [
        ("machine", 60),
        ("ceilings", 90),
        ("step --profile", 180),
        ("step --microbatch 32", 120),
        ("attention", 90),
        ("loss", 180),
    ],
    "variants": [
        ("step --drop-rate 0", 120),
        ("step --drop-rate 0.125", 120),
        ("step --microbatch 13", 120),
        ("step --set compile=false", 60),
        ('step --set precision="bf16" --set residual_precision="bf16"', 120),
        ("step --set coordinate_descent_tuning=true", 240),
        ('step --set precision="fp16"', 120),
        ("step --set activation_checkpointing=true", 120),
        ("step --attention flash", 120),
    ],
    "commands": [
        ("search", 280),
        ("stop-and-continue", 240),
        ("repeat --deterministic", 150),
        ("repeat", 150),
        ("saving", 200),
        ("groups", 120),
    ],
}


def measure(bench: Any, stage: str, options: dict[str, Any]) -> None:
    """One stage, in this process."""
    from bench.gpu import commands, kernels, steps

    plain = {
        "machine": kernels.measure_machine,
        "ceilings": kernels.measure_ceilings,
        "attention": kernels.measure_attention,
        "loss": kernels.measure_loss,
        "groups": steps.measure_groups,
        "search": commands.measure_search,
        "saving": commands.measure_saving,
        "stop-and-continue": commands.measure_stop_and_continue,
    }
    if stage == "step":
        settings = tuple((key, json.loads(value)) for key, _, value in (each.partition("=") for each in options["set"]))
        bench.work.mkdir(parents=True, exist_ok=True)
        chosen = {key: options[key] for key in ("microbatch", "drop_rate", "attention", "profile")}
        steps.measure_step(bench, steps.StepOptions(**chosen, settings=settings))
    elif stage == "repeat":
        commands.measure_repeat(bench, options["deterministic"])
    elif stage in plain:
        plain[stage](bench)
    else:
        raise click.BadParameter(
            f"no call or stage {stage!r}; there is {', '.join([*CALLS, *plain, 'step', 'repeat'])}"
        )


def run_call(name: str, results: Results, passed_on: list[str], seconds: float) -> None:
    """Run all stages of a call, each in a process of its own, as long as there is time; then write the tables."""
    deadline = time.monotonic() + seconds
    for stage, limit in CALLS[name]:
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            results.add("not run", what=stage, why="no time left in this call")
            continue
        began = time.monotonic()
        with subprocess.Popen([sys.executable, __file__, *stage.split(), *passed_on]) as process:
            try:
                status: int | str = process.wait(min(limit, left))
            except subprocess.TimeoutExpired:
                status = f"stopped after {min(limit, left):.0f} s"
                process.terminate()
                try:
                    process.wait(STOPPING_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        if status:
            results.add("failed", what=stage, status=status)
        print(f"    ({stage}: {time.monotonic() - began:.0f} s)", flush=True)
    print(f"\n{results.write_tables()}", flush=True)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    ") if __doc__ else None)
@click.argument("what")
@click.option("--out", type=click.Path(path_type=Path), default=Path("on_gpu.json"), show_default=True)
@click.option("--work", type=click.Path(path_type=Path), default=Path("/tmp/on_gpu"), show_default=True)
@click.option("--seconds", type=float, default=570.0, show_default=True, help="For a whole call.")
@click.option("--tiny", is_flag=True, help="Shapes that a CPU computes in no time.")
@click.option("--microbatch", type=int, default=64, show_default=True)
@click.option("--drop-rate", type=float, default=0.1, show_default=True)
@click.option("--attention", default="default", show_default=True, help="flash, cudnn or efficient: only that kernel.")
@click.option("--set", multiple=True, metavar="KEY=JSON", help="A key of train.json.")
@click.option("--profile", is_flag=True, help="Also look for waits, and sum up kernels by kind.")
@click.option("--deterministic", is_flag=True)
def main(what: str, out: Path, work: Path, seconds: float, tiny: bool, **options: Any) -> None:
    results = Results(out.resolve())
    if what in CALLS:
        passed_on = ["--out", str(out.resolve()), "--work", str(work.resolve()), *(["--tiny"] if tiny else [])]
        run_call(what, results, passed_on, seconds)
        return
    from bench.gpu.workbench import MissingKeyError, Workbench

    bench = Workbench(work.resolve(), results, tiny)
    bench.work.mkdir(parents=True, exist_ok=True)
    try:
        measure(bench, what, options)
    except MissingKeyError as error:
        results.add("not run", what=" ".join(sys.argv[1:2] + list(options["set"])), why=str(error))


if __name__ == "__main__":
    main()
