"""Benchmarks by lm-eval: load tasks, score a model on them, and write the results to a file.

lm_eval is an optional extra and takes seconds to import: import it only inside functions.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic_core import to_json

from harness.common.errors import RunError, UserError, os_errors_as
from harness.common.files import replace_text
from harness.common.messages import REASON_CHARACTERS, nearest
from harness.data.tokenizers import Tokenizer
from harness.evaluation.likelihood import Scorer

TASK_FILE_SUFFIXES = {".yaml", ".yml"}
# lm-eval's default seeds, so that scores equal those of lm-eval itself. The second seed is for NumPy, torch and the
# choice of solved examples.
PYTHON_SEED, OTHER_SEED = 0, 1234
# Number of bootstrap resamples for standard errors that have no formula. The relative error of such a standard error is
# then 1 / sqrt(2 x 1000), or 2 percent.
BOOTSTRAP_ITERATIONS = 1000
# Keys of lm-eval's results that --output writes
KEPT = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


@dataclass(frozen=True)
class Benchmarks:
    """Benchmarks that are ready to run: lm-eval's Task objects (with their data) and Group objects, by their names."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    asked: list[str]  # names of the top-level tasks and groups, in the order asked for


@dataclass(frozen=True)
class Score:
    """One metric of a task or group. `metric` is lm-eval's name, followed by the name of an answer filter if there is
    one."""

    task: str
    metric: str
    value: float
    stderr: float | None
    examples: int


def check_installed() -> None:
    """Raise UserError if the extra with lm-eval is not installed."""
    missing = [name for name in ("lm_eval", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"benchmarks need {' and '.join(missing)}: install the extra that has them, "
            "as in uv run --extra benchmarks evaluate_benchmarks.py ..."
        )


def prepare(specs: Sequence[str]) -> None:
    """Check the names of tasks, and import lm-eval, which takes seconds. Nothing is downloaded. Raises UserError for an
    unknown name or a missing task file, or if lm-eval is not installed."""
    check_installed()
    for spec in specs:
        _names_of(spec)
    import lm_eval.evaluator  # noqa: F401


def load(specs: Sequence[str], num_fewshot: int | None = None) -> Benchmarks:
    """Load tasks, and download their data if it is not on this machine. `specs` are names (of tasks, groups or tags),
    wildcards, or paths of task files (.yaml, .yml).

    `num_fewshot` is the number of solved examples before each question (None: each task's own). A task's explicit 0 is
    kept, as in lm-eval. Functions that a task file names by `!function` are run. Random states are restored.

    Raises UserError if a task cannot be loaded or used. lm-eval must be installed (`check_installed`).
    """
    found = Benchmarks({}, {}, [])
    with lm_eval_seeds():
        for name in [name for spec in specs for name in _names_of(spec)]:
            is_file = Path(name).suffix in TASK_FILE_SUFFIXES  # for a task file, lm-eval's index of tasks is not needed
            try:
                loaded = task_manager(with_index=not is_file).load([name])
            except Exception as error:  # from lm_eval, datasets, huggingface_hub, jinja2, yaml or the task's functions
                raise UserError(f'task "{name}": {_diagnosis(error)}') from None
            # A group that changes a group in it, as `openllm` does, gives all tasks of that group one name.
            in_groups = [task for group in loaded["groups"].values() for task in group.get_all_tasks()]
            for task in in_groups or loaded["tasks"].values():
                key = task.task_name
                if getattr(task, "UNSAFE_CODE", False):  # lm-eval itself refuses such tasks only later, in its evaluate
                    fault = "its scoring runs programs that a model wrote, which is not allowed here; leave it out"
                    raise UserError(f'task "{key}": {fault}')
                if getattr(task, "MULTIMODAL", False):
                    raise UserError(f'task "{key}": asks about pictures or sound, not text; leave it out')
                if _settings(found.tasks.setdefault(key, task)) != _settings(task):
                    advice = "leave out one (or its group), or give it another name"
                    raise UserError(f'two different tasks are called "{key}"; {advice}')
            found.groups.update(loaded["groups"])
            inner = {child for children in loaded["group_map"].values() for child in children}
            roots = [*loaded["groups"]] or [*loaded["tasks"]]
            found.asked.extend(root for root in roots if root not in inner and root not in found.asked)
    for task in found.tasks.values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return found


def _settings(task: Any) -> bytes:
    """Return a task's configuration as JSON. Functions are written as their names, because lm-eval copies some
    functions each time that it loads a task."""
    return to_json(vars(task.config) | {"task_alias": None}, fallback=lambda value: getattr(value, "__name__", None))


def known_names(pattern: str) -> list[str]:
    """Return the names of lm-eval's tasks, groups and tags that match a pattern (`arc*`). Raises UserError if no name
    matches."""
    manager = task_manager(with_index=True)
    if found := manager.match_tasks([pattern]):
        return list(found)
    near = nearest(pattern, manager.all_tasks)
    hint = f"did you mean {near}?" if near else "evaluate_benchmarks.py --list '*' shows all."
    raise UserError(f'"{pattern}": no task, group or tag of lm-eval has this name; {hint} (A task file ends in .yaml.)')


def _names_of(spec: str) -> list[str]:
    """Return the names that one item of --tasks stands for. A wildcard stands for groups and tags only if it matches no
    task."""
    if Path(spec).suffix in TASK_FILE_SUFFIXES:
        if not Path(spec).is_file():
            raise UserError(f"{spec}: no such task file")
        return [spec]
    names, tasks = known_names(spec), task_manager(with_index=True).all_subtasks
    return [name for name in names if name in tasks] or names


@cache
def task_manager(*, with_index: bool) -> Any:
    """Return lm-eval's TaskManager, after a call of `quieten`. With `with_index`, the manager knows the names of
    lm-eval's own tasks. Their index takes seconds to make."""
    # Keep the library `evaluate` from downloading and running metrics, which are programs. The library reads this
    # variable when it is imported.
    os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
    quieten()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_index)


def quieten() -> None:
    """Turn off lm-eval's logs, the warnings of `datasets` and `huggingface_hub`, and progress bars of `datasets`."""
    # Import the libraries before changing their log levels, because they set the levels when they are imported.
    import datasets
    import huggingface_hub.utils.logging

    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    datasets.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def _diagnosis(error: Exception) -> str:
    """Return the text for users about an error that was raised while a task was loaded."""
    reason = " ".join(str(error).split())[:REASON_CHARACTERS]
    if error.args == (None,) or "module script" in reason:  # neither lm-eval nor evaluate has the metric
        return (
            "has a metric that is not lm-eval's own; metrics from the Hub are programs, which this command does not "
            "run; leave out this task"
        )
    if isinstance(error, TypeError):  # lm-eval raises TypeError for the file of a group
        reason += "; if this is the file of a group, give the files of its tasks instead"
    remedy = "check its files or, if its data is on the Hugging Face Hub, the network, HF_HUB_OFFLINE and HF_TOKEN"
    if isinstance(error, ImportError):
        remedy = "uv run --with PACKAGE ... adds a package"
    elif "scripts are no longer supported" in reason:
        remedy = "its data is loaded by a program, which this command does not run; leave out this task"
    return f"cannot be loaded: {type(error).__name__}: {reason}; {remedy}"


def run(benchmarks: Benchmarks, scorer: Scorer, tokenizer: Tokenizer, *, limit: int | None = None) -> dict[str, Any]:
    """Score a model on the first `limit` examples of each task (None: all). Return the results of lm-eval's `evaluate`.
    Collective if the scorer's `each_batch` is.

    Random states are restored. Raises UserError if a task needs an unsupported generation option. Raises RunError if a
    logit is not finite in generation. Errors of lm-eval and of tasks, of any class, are not caught.
    """
    from lm_eval.evaluator import evaluate

    from harness.evaluation.benchmarks.lm_eval_model import ModelUnderTest

    for task in benchmarks.tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
    with quiet_lm_eval(), lm_eval_seeds():
        results: dict[str, Any] = evaluate(
            lm=ModelUnderTest(scorer, tokenizer),
            task_dict={"tasks": benchmarks.tasks, "groups": benchmarks.groups},
            limit=limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            log_samples=False,
        )
    return results


@contextmanager
def lm_eval_seeds() -> Iterator[None]:
    """Seed the global random generators of Python, NumPy and torch's CPU as lm-eval does, and restore their states on
    exit."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(PYTHON_SEED)
    np.random.seed(OTHER_SEED)
    torch.default_generator.manual_seed(OTHER_SEED)  # unlike torch.manual_seed, leaves other devices' seeds alone
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Turn off lm-eval's progress bars, and its process pool for the bootstrap."""
    import lm_eval.api.metrics as metrics
    import lm_eval.api.task as task

    # Every rank would print a bar, and the pool would fork this process with its device and threads. `evaluate` has no
    # options for this.
    bar, bootstrap = task.tqdm, metrics.bootstrap_stderr
    task.tqdm, metrics.bootstrap_stderr = partial(bar, disable=True), _bootstrap_stderr
    try:
        yield
    finally:
        task.tqdm, metrics.bootstrap_stderr = bar, bootstrap


def _bootstrap_stderr(statistic: Any, values: Sequence[Any], iters: int) -> float:
    """Return the standard error of a statistic of `values`, from `iters` bootstrap resamples. For up to 1,000
    resamples, lm-eval's `bootstrap_stderr` returns the same."""
    draw = random.Random(0)
    return float(np.std([statistic(draw.choices(values, k=len(values))) for _ in range(iters)], ddof=1))


def scores(results: dict[str, Any], name: str) -> list[Score]:
    """Return all scores of the task or group `name` in lm-eval's results. The list is empty for a group without scores
    of its own."""
    row = results["results"].get(name, {})
    counts = row.get("sample_count", {})
    examples = row.get("sample_len") or sum(counts.values())
    found = []
    for key, value in row.items():
        metric, comma, kind = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float, np.number)):
            stderr = row.get(f"{metric}_stderr,{kind}")
            known = float(stderr) if isinstance(stderr, (int, float, np.number)) else None
            named = metric if kind == "none" else key
            found.append(Score(name, named, float(value), known, int(counts.get(key, examples))))
    return found


def table(results: dict[str, Any], names: Sequence[str], depth: int = 0) -> Iterator[str]:
    """Yield the lines of a table of scores, 80 characters wide. `names` are tasks and groups. The tasks of a group
    follow the group, indented. Callers leave `depth` at 0."""

    def cut(text: str, width: int) -> str:
        return text if len(text) <= width else f"{text[: width - 1]}…"

    # lm_eval.utils.make_table is not used: with pytablewriter 0.38 its tables have no headings and fewer digits.
    layout = "{:<32} {:<18} {:>19} {:>8}"
    if depth == 0:
        yield layout.format("task", "metric", "value ± error", "examples")
    for name in names:
        shown = cut("  " * depth + name, 32)
        rows = scores(results, name)
        if not rows:
            yield shown
        for score in rows:
            known = score.stderr is not None and math.isfinite(score.stderr)
            value = _eight_characters(score.value) + (f" ± {_eight_characters(score.stderr or 0)}" if known else "")
            yield layout.format(shown, cut(score.metric, 18), value, f"{score.examples:,}")
            shown = ""
        yield from table(results, results.get("group_subtasks", {}).get(name, []), depth + 1)


def _eight_characters(value: float) -> str:
    """Format a number for a column that is eight characters wide."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.5g}" if abs(value) < 1e5 else f"{value:.3g}"


def write_results(path: Path, results: dict[str, Any], about: dict[str, Any]) -> None:
    """Write lm-eval's version, the keys KEPT of its results, and `about` (the model and the settings) to `path`, as a
    JSON object. Raises RunError if the file cannot be written."""
    from importlib.metadata import version

    whole = {"lm_eval": version("lm-eval"), **about, **{key: results[key] for key in KEPT if key in results}}

    def converted(value: Any) -> Any:  # a NumPy number, or a function in a task's configuration
        return value.item() if hasattr(value, "item") else str(value)

    text = to_json(whole, indent=2, inf_nan_mode="null", fallback=converted).decode()
    with os_errors_as(RunError, f"{path}: cannot write the results"):
        replace_text(path, text + "\n")
