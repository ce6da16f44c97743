"""Forks of a process that has imported torch already, in place of Pythons that start cold.

A forked process runs a root script from its first line to its own exit, in a session, a folder and an environment of
its own, like one that was started cold. `warm` has the first of them; one that has called `fork_pythons` forks those
that it starts itself. They remain its children, with the pipes, sessions and signals that it gives them.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NoReturn


def run_to_the_end(program: Callable[[], object]) -> NoReturn:
    """End as the interpreter does after this program, but for taking every object apart, which takes longer than most
    of the commands here."""
    status = 0
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(status)


@dataclass(frozen=True)
class Script:
    """Script that a Python is told to run: a file, or torchrun's module."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Any) -> Script | None:
        """None for a command that is no such Python."""
        words = [] if isinstance(command, str | bytes) else [*map(os.fspath, command)]
        if words[:1] != [sys.executable]:
            return None
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
        if words[:2] == ["-m", "torch.distributed.run"]:
            return cls(words[1], tuple(words[2:]))
        is_file = bool(words) and words[0].endswith(".py")
        return cls(words[0], tuple(words[1:])) if is_file else None

    def run(self) -> None:
        """Run the script in this process, as Python does."""
        is_file = self.name.endswith(".py")
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)) if is_file else os.getcwd())
        if is_file:
            runpy.run_path(self.name, run_name="__main__")
        else:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def fork_pythons() -> None:
    """Make all scripts that this process starts with its own Python forks of it, and theirs forks of them."""
    start = subprocess.Popen.__init__

    @wraps(start)
    def start_forked(self: Any, args: Sequence[str], *positional: Any, **options: Any) -> None:
        script = Script.of(args)
        if script is not None:
            first, environment = options.get("preexec_fn"), options.get("env")
            kept = options.get("pass_fds", ())
            # Called in the child, once it has its session, folder and streams; it never gets to what would follow.
            options["preexec_fn"] = lambda: _become(script, first, environment, kept)
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        start(self, args, *positional, **options)

    subprocess.Popen.__init__ = start_forked  # type: ignore[method-assign, assignment]


def _become(
    script: Script, first: Callable[[], object] | None, environment: Mapping[str, str] | None, kept: Sequence[int]
) -> NoReturn:
    """Keep nothing of the parent that another program would not, and run the script."""
    gc.freeze()  # nothing of the parent's is taken apart here
    if first is not None:
        first()
    # The parent waits for the end of one of these, by which it learns that the program runs.
    edges = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for low, high in pairwise(edges):
        os.closerange(low + 1, high)
    atexit._clear()
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run_to_the_end(script.run)
