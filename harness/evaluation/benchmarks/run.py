"""Running benchmarks on a model: the tasks' requests through lm-eval, and what comes of them.

lm_eval is an extra, and takes seconds to import: only functions do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from harness.common.errors import RunError, UserError
from harness.common.memory import is_out_of_memory
from harness.data.tokenizers.tokenizer import Tokenizer
from harness.evaluation.benchmarks.tasks import REASON_CHARACTERS, Benchmarks, load_benchmarks
from harness.evaluation.likelihood import Scorer

# lm-eval's own, so that its numbers are ours: Python's, NumPy's and torch's generators, and the choice of examples.
PYTHON_SEED, OTHER_SEED = 0, 1234
# Standard errors without a formula come from so many resamples: known to 1 / sqrt(2 x 1000), 2 percent.
BOOTSTRAP_ITERATIONS = 1000


@dataclass(frozen=True)
class Score:
    """One metric of a task or group; `metric` is lm-eval's name, with that of an answer filter, if there is one."""

    task: str
    metric: str
    value: float
    stderr: float | None
    examples: int


def load(specs: Sequence[str], num_fewshot: int | None = None) -> Benchmarks:
    """`load_benchmarks`, with `num_fewshot` solved examples before each question instead of the tasks' own number.

    As lm-eval has it, a task that insists on none keeps none. Raises UserError as `load_benchmarks` does.
    """
    with seeded_apart():
        benchmarks = load_benchmarks(specs)
    for task in benchmarks.tasks.values():
        own = task.get_config("num_fewshot")
        if num_fewshot is not None and own != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        elif own is None:
            task.set_config(key="num_fewshot", value=0)
    return benchmarks


def run(benchmarks: Benchmarks, scorer: Scorer, tokenizer: Tokenizer, *, limit: int | None = None) -> dict[str, Any]:
    """lm-eval's table of results for the first `limit` documents of each task (None: for all).

    The process's random states are afterwards what they were. Raises UserError if a task needs what this program does
    not do.
    """
    from lm_eval.evaluator import evaluate

    from harness.evaluation.benchmarks.lm_eval_model import ModelUnderTest

    for task in benchmarks.tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
    with quiet_lm_eval(), seeded_apart():
        results: dict[str, Any] = evaluate(
            lm=ModelUnderTest(scorer, tokenizer),
            task_dict=benchmarks.to_load(),
            limit=limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            log_samples=False,
        )
    return results


@contextmanager
def explained_failures(batch_size: int) -> Iterator[None]:
    """Turn whatever tasks and lm-eval raise while they run into one line: a RunError."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:  # a task's functions can raise anything, and lm-eval asserts
        if is_out_of_memory(error):
            raise RunError(f"out of memory with {batch_size} texts per batch; lower --batch-size") from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RunError(f"lm-eval could not go on: {reason[:REASON_CHARACTERS]}") from None


def scores(results: dict[str, Any], name: str) -> list[Score]:
    """The metrics of a task or group, in lm-eval's order; none for a group that only holds tasks together."""
    row = results["results"].get(name, {})
    examples = row.get("sample_len") or sum(row.get("sample_count", {}).values())
    found = []
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float, np.number)):
            continue
        stderr = row.get(f"{metric}_stderr,{kind}")
        known = float(stderr) if isinstance(stderr, (int, float, np.number)) else None
        count = row["sample_count"].get(key, examples) if "sample_count" in row else examples
        found.append(Score(name, metric if kind == "none" else key, float(value), known, int(count)))
    return found


@contextmanager
def seeded_apart() -> Iterator[None]:
    """Inside, the global random states are those that lm-eval starts with; afterwards, what they were before."""
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.default_generator.manual_seed(OTHER_SEED)  # the CPU's alone: lm-eval draws nothing on devices
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(own)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Inside, lm-eval draws no bars of its own, and resamples in this process without announcing it."""
    import lm_eval.api.metrics as metrics
    import lm_eval.api.task as task

    bar, bootstrap = task.tqdm, metrics.bootstrap_stderr
    task.tqdm, metrics.bootstrap_stderr = partial(bar, disable=True), _bootstrap_stderr
    try:
        yield
    finally:
        task.tqdm, metrics.bootstrap_stderr = bar, bootstrap


def _bootstrap_stderr(statistic: Any, values: Sequence[Any], iters: int) -> float:
    """lm-eval's function of this name, with the same draws, in one process: its pool would copy this one, which holds
    the model and threads."""
    import lm_eval.api.metrics as metrics

    resample = metrics._bootstrap_internal(statistic, min(1000, iters))
    drawn = [each for seed in range(iters // min(1000, iters)) for each in resample((seed, values))]
    return float(metrics.sample_stddev(drawn))
