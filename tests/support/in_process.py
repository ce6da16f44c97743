"""The repository's commands, run inside the test process, for tests that are not about processes. There a command takes
a tenth of the time that it takes in a fork."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch

from harness.common.errors import EXIT, STOPPING_SIGNALS, Exit
from harness.training.chart_process import ChartProcess
from tests.support.launch import ROOT, Result, Workshop


class Ended(BaseException):
    """Raised in place of ending the process when the command calls os._exit."""

    def __init__(self, status: int) -> None:
        self.status = status


def call(name: str, *arguments: object, folder: Path, environment: dict[str, str] | None = None) -> Result:
    """Run one of the repository's commands in `folder`, and return its result, whatever its exit status."""
    with ExitStack() as stack:
        output, errors = (stack.enter_context(TemporaryFile("w+", errors="replace")) for _ in range(2))
        stack.enter_context(_as_before())
        stack.enter_context(mock.patch.dict(os.environ, environment or {}))  # also undoes what the command sets
        if environment and "HF_HUB_OFFLINE" in environment:  # the library reads the variable only when it is imported
            is_offline = environment["HF_HUB_OFFLINE"] == "1"
            stack.enter_context(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline))
        stack.enter_context(mock.patch("tiktoken.registry.ENCODINGS", {}))  # vocabularies of earlier commands
        stack.enter_context(mock.patch.object(ChartProcess, "draw"))
        stack.enter_context(mock.patch("os.fsync"))
        stack.enter_context(mock.patch("os._exit", _end))
        with redirect_stdout(output), redirect_stderr(errors), chdir(folder):
            status = _status_of(name, [str(each) for each in arguments])
        output.seek(0)
        errors.seek(0)
        return Result(status, output.read(), errors.read())


def run_here(name: str, *arguments: object, status: int | None = 0) -> Result:
    """Run one of the repository's commands, and expect this exit status, or any if `status` is None. A warning that a
    user would see, such as matplotlib's of a character without a glyph, is an error."""
    with warnings.catch_warnings():
        for seen in (RuntimeWarning, UserWarning, FutureWarning):
            warnings.simplefilter("error", seen)
        done = call(name, *arguments, folder=ROOT)
    assert status in (None, done.status), done
    return done


class InProcess(Workshop):
    """Workshop whose commands run in the test process, one after the other, without charts and without fsync.

    Jobs of several ranks (`train`, `start`) are still processes of their own.
    """

    def command(self, name: str, *arguments: str, environment: dict[str, str] | None = None) -> Result:
        """Run one of the repository's commands, and return its result, whatever its exit status."""
        variables = {"HF_HUB_OFFLINE": "1", **self.environment, **(environment or {})}
        return call(name, *arguments, folder=self.path, environment=variables)

    def train_here(self, run: str = "r", *arguments: str, expect: int = 0) -> Result:
        """Run ddp_train.py on one rank to its end."""
        result = self.attempt(*arguments, run=run)
        assert result.status == expect, result
        return result


def module_shop(tokens: int) -> Callable[..., InProcess]:
    """Return a fixture: a workshop with a dataset of `tokens` tokens, for all tests of a file."""

    @pytest.fixture(scope="module")
    def shop(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
        made = InProcess(tmp_path_factory.mktemp("shop"))
        made.add_dataset(tokens=tokens)
        return made

    return shop


OWN_PID, EXIT_PROCESS = os.getpid(), os._exit


def _end(status: int) -> NoReturn:
    if os.getpid() != OWN_PID:  # a process that the command has forked
        EXIT_PROCESS(status)
    raise Ended(status)


def _status_of(name: str, arguments: list[str]) -> int:
    main: Any = importlib.import_module(name.removesuffix(".py")).main
    try:
        main.main(arguments, prog_name=name)
    except Ended as end:
        return end.status
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.stdout.flush()  # training may have replaced both streams
        sys.stderr.flush()
    return 0


@contextmanager
def _as_before() -> Iterator[None]:
    """Undo the changes that a command makes to this process: locks, signal handlers, torch's settings, the state of
    EXIT. In a process of its own they would end with the process."""
    handlers, numbers = {each: signal.getsignal(each) for each in STOPPING_SIGNALS}, torch.get_rng_state()
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    descriptors = _open_descriptors()
    try:
        with torch._inductor.config.patch():
            yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        torch.set_rng_state(numbers)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        vars(EXIT).update(vars(Exit()))
        for descriptor, path in _open_descriptors().items() - descriptors.items():
            if path.endswith(".lock"):  # of a run or of a sweep
                os.close(descriptor)


def _open_descriptors() -> dict[int, str]:
    """Return the path of each file that this process has open, without the descriptor that lists them."""
    found = {}
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found[int(each)] = os.readlink(f"/proc/self/fd/{each}")
    return found
