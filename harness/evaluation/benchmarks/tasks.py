"""Benchmarks by name: lm-eval's tasks, groups and tags, or a task file of the user's own.

lm_eval is an extra, and takes seconds to import: only functions do.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.common.errors import UserError
from harness.common.messages import nearest

RUNS_CODE = "runs programs that a model wrote or the Hub offers, which this command does not"
TASK_FILE_SUFFIXES = {".yaml", ".yml"}
REASON_CHARACTERS = 160
# What the libraries' errors are called where data is not to be had; some are each library's own class.
OFFLINE_ERRORS = {"OfflineModeIsEnabled", "ConnectionError", "LocalEntryNotFoundError"}
NETWORK_ERRORS = OFFLINE_ERRORS | {
    "ConnectError",
    "ConnectTimeout",
    "DatasetNotFoundError",
    "GatedRepoError",
    "HfHubHTTPError",
    "ReadTimeout",
    "RepositoryNotFoundError",
    "SSLError",
    "TimeoutError",
}


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks asked for, ready to be run: lm-eval's Task and Group objects by their names."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    asked: list[str]  # names of tasks and groups at the top, in the order asked for

    def to_load(self) -> dict[str, Any]:
        """The dict that lm_eval's `evaluate` takes."""
        return {"tasks": self.tasks, "groups": self.groups}


def check_installed() -> None:
    """Raises UserError if the extra with lm-eval is not installed."""
    missing = [name for name in ("lm_eval", "datasets") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"benchmarks need {' and '.join(missing)}, which an extra brings: put it behind uv run, "
            "as in uv run --extra benchmarks evaluate_benchmarks.py ..."
        )


def known_names(patterns: Sequence[str]) -> list[str]:
    """The names of lm-eval's tasks, groups and tags that match one of the patterns (`arc*`).

    Raises UserError if none does.
    """
    names = sorted(_index())
    found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        raise UserError(_no_such_task(patterns[0], names))
    return found


def prepare(specs: Sequence[str]) -> None:
    """Do what takes seconds before the first task is loaded, and needs no data: ranks can do it at the same time.

    Raises UserError as `load_benchmarks` does for names that are not known.
    """
    check_installed()
    for spec in specs:
        _names_of(spec)
    import lm_eval.evaluator  # noqa: F401


def load_benchmarks(specs: Sequence[str]) -> Benchmarks:
    """Find, check and load tasks by names, wildcards or paths of task files, with the data they need.

    A task file's `!function` is the user's own code beside it, and runs. Raises UserError, on one line, for a name that
    is not known, for a task that would run other people's code, and for data that cannot be had.
    """
    check_installed()
    found = Benchmarks({}, {}, [])
    for spec in specs:
        for name in _names_of(spec):
            loaded = _load(name)
            roots = [*loaded.get("groups", {})] or [*loaded["tasks"]]
            inner = {child for children in loaded.get("group_map", {}).values() for child in children}
            for key, task in loaded["tasks"].items():
                _check_same(key, found.tasks.setdefault(key, task), task)
            found.groups.update(loaded.get("groups", {}))
            found.asked.extend(root for root in roots if root not in inner and root not in found.asked)
    for name, task in found.tasks.items():
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f'task "{name}": asks about pictures or sound; these models read text')
    return found


def _check_same(name: str, one: Any, other: Any) -> None:
    """Raises UserError for two tasks of one name, of which only one would be seen."""
    if one is not other and one.dump_config().get("metadata") != other.dump_config().get("metadata"):
        raise UserError(f'two different tasks are called "{name}"; give one of them another name')


def _names_of(spec: str) -> list[str]:
    """The names that a word on the command line stands for; a wildcard stands for several."""
    if _is_task_file(spec):
        config = _read_task_file(spec)
        return [_register_group(spec, config)] if "group" in config else [spec]
    if any(letter in spec for letter in "*?["):
        # What a group or tag of the list stands for is in it already.
        return [name for name in known_names([spec]) if _index()[name].kind.name in {"TASK", "PY_TASK"}]
    if spec not in _index():
        raise UserError(_no_such_task(spec, list(_index())))
    return [spec]


def _is_task_file(spec: str) -> bool:
    path = Path(spec)
    if path.suffix not in TASK_FILE_SUFFIXES:
        return False
    if not path.is_file():
        raise UserError(f"{spec}: no such task file")
    return True


def _no_such_task(name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    hint = f"did you mean {near}?" if near else "evaluate_benchmarks.py --list '*' shows all."
    return f'"{name}": no task, group or tag of lm-eval has this name; {hint} (A task file ends in .yaml.)'


@cache
def _manager(*, with_index: bool) -> Any:
    """lm-eval's TaskManager. Its index of all tasks is made from thousands of files in some seconds."""
    # Read when the library is imported: it would download metrics, which are programs, and run them.
    os.environ.setdefault("HF_EVALUATE_OFFLINE", "1")
    quieten()
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=with_index)


def _index() -> dict[str, Any]:
    return _manager(with_index=True).task_index


def quieten() -> None:
    """Keep what is of no use to a user here from the terminal: the libraries' logs, and bars for data of some
    kilobytes."""
    # Imported first: they set their own levels then.
    import datasets
    import huggingface_hub.utils.logging

    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    datasets.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()


def _load(name: str) -> Any:
    """lm-eval's {"tasks": …, "groups": …, "group_map": …} for a name of its index, or the file of one task."""
    # Such a file needs none of the others.
    manager = _manager(with_index=Path(name).suffix not in TASK_FILE_SUFFIXES)
    _refuse_foreign_code(name, _configs(name, manager.task_index))
    try:
        return manager.load([name])
    except Exception as error:  # of lm_eval, datasets, huggingface_hub, jinja2, yaml, and the task's own functions
        raise UserError(f'task "{name}": {_diagnosis(error)}') from None


def _register_group(path: str, config: dict[str, Any]) -> str:
    """Enter a group's file into the index, where lm-eval finds groups. The group's name."""
    from lm_eval.tasks._index import TaskIndex

    name, place = str(config["group"]), Path(path).resolve()
    if name in _index() and _index()[name].yaml_path != place:
        raise UserError(f'{path}: key "group": lm-eval has something called {name}; give the group another name')
    TaskIndex.process_cfg(config, place, _index())
    return name


def _read_task_file(path: str) -> dict[str, Any]:
    """Read a task file; its functions stay names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        return load_yaml(path, resolve_func=False)
    except Exception as error:
        raise UserError(f"{path}: not a task file: {_first_line(error)}") from None


def _configs(name: str, index: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The configurations of all tasks that a name stands for, before any of their code runs."""
    entry = index.get(name)
    if entry is None:
        config = _read_task_file(name) if Path(name).is_file() else {}
    else:
        config = entry.cfg or {}
        for member in sorted(entry.tags) if entry.kind.name == "TAG" else ():
            yield from _configs(member, index)
    yield config
    members = config.get("task")
    for member in members if isinstance(members, list) else ():
        if isinstance(member, dict):
            yield member
        inner = member if isinstance(member, str) else member.get("task", member.get("group"))
        if isinstance(inner, str) and inner in index and inner != name:
            yield from _configs(inner, index)


def _refuse_foreign_code(name: str, configs: Iterator[dict[str, Any]]) -> None:
    for config in configs:
        metrics = [metric for metric in config.get("metric_list") or () if isinstance(metric, dict)]
        foreign = not config.get("process_results") and any(map(_is_from_the_hub, metrics))
        if config.get("unsafe_code") or foreign:
            which = config.get("task") if isinstance(config.get("task"), str) else name
            raise UserError(f'task "{which}": {RUNS_CODE}; leave it out')


def _is_from_the_hub(metric: dict[str, Any]) -> bool:
    """True if the metric is a program of the Hub's: neither lm-eval's own, nor a function, which is a path here."""
    import lm_eval.api.metrics  # noqa: F401 - it fills the registry
    from lm_eval.api.registry import metric_registry

    name = str(metric.get("metric"))
    return bool(metric.get("hf_evaluate")) or ("/" not in name and name not in metric_registry)


def _diagnosis(error: Exception) -> str:
    """Explain the libraries' error to the user."""
    import huggingface_hub.constants as hub

    chain = list(_causes(error))
    names = {type(each).__name__ for each in chain}
    reason = _first_line(error)
    if "scripts are no longer supported" in reason or "trust_remote_code" in reason:
        return f"its data comes with a program to run, which this program does not do ({reason}); leave it out"
    if isinstance(error, ImportError):
        return f"needs a package that is not installed: {reason}; uv run --with PACKAGE ... adds it"
    if hub.HF_HUB_OFFLINE and (names & OFFLINE_ERRORS or "offline" in reason.lower()):
        return "its data is not on this machine, and HF_HUB_OFFLINE is set; unset it to download the data once"
    if names & NETWORK_ERRORS:
        return (
            f"its data is not on this machine and cannot be had from the Hugging Face Hub ({reason}); check the "
            "network, HF_ENDPOINT and HF_TOKEN, or copy HF_HOME from a machine that has it"
        )
    return f"cannot be loaded: {type(error).__name__}: {reason}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:REASON_CHARACTERS] or type(error).__name__
