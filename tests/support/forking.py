"""Forks of a process that has already imported torch, in place of Python processes that start cold.

A forked process runs a root script from its first line to its own exit, in its own session, folder and environment,
like a process that was started cold. tests/support/warm.py makes the first forks. A process that has called
`fork_pythons` also forks the Python processes that it starts. They remain its children, with the pipes, sessions and
signals that it gives them.
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
    """Run a program and end the process as the interpreter does, but without destroying every object, which takes
    longer than most of the commands here."""
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
    """Script that a Python command runs: a file, torchrun's module, or the source after -c (with `name` "-c")."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, command: Any) -> Script | None:
        """Return the script of a command, or None if the command does not run a script with this Python."""
        words = [] if isinstance(command, str | bytes) else [*map(os.fspath, command)]
        if words[:1] != [sys.executable]:
            return None
        words = words[2:] if words[1:2] == ["-u"] else words[1:]
        if words[:2] == ["-m", "torch.distributed.run"]:
            return cls(words[1], tuple(words[2:]))
        is_script = bool(words) and (words[0].endswith(".py") or words[0] == "-c")
        return cls(words[0], tuple(words[1:])) if is_script else None

    def run(self) -> None:
        """Run the script in this process as __main__, with the sys.argv and sys.path that Python would give it."""
        is_file = self.name.endswith(".py")
        if self.name == "-c":
            source, *sys.argv[1:] = self.arguments
            sys.path.insert(0, os.getcwd())
            exec(source, {"__name__": "__main__"})
            return
        sys.argv = [self.name, *self.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)) if is_file else os.getcwd())
        if is_file:
            runpy.run_path(self.name, run_name="__main__")
        else:
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)


def fork_pythons() -> None:
    """Make this process run scripts in forks of itself, instead of starting a new Python process for each. Its forks do
    the same."""
    start = subprocess.Popen.__init__

    @wraps(start)
    def start_forked(self: Any, args: Sequence[str], *positional: Any, **options: Any) -> None:
        script = Script.of(args)
        if script is not None:
            first, environment = options.get("preexec_fn"), options.get("env")
            kept = options.get("pass_fds", ())
            # subprocess calls this in the child, after it has set up session, folder and streams. It never returns, so
            # nothing is executed after it.
            options["preexec_fn"] = lambda: _become(script, first, environment, kept)
            for stream in filter(None, (sys.stdout, sys.stderr)):
                stream.flush()
        start(self, args, *positional, **options)

    subprocess.Popen.__init__ = start_forked  # type: ignore[method-assign, assignment]


def _become(
    script: Script, first: Callable[[], object] | None, environment: Mapping[str, str] | None, kept: Sequence[int]
) -> NoReturn:
    """Drop everything of the parent that another program would not inherit, and run the script."""
    gc.freeze()  # the parent's objects are not collected here
    if first is not None:
        first()
    # One of the descriptors that are closed is a pipe. Its closing tells the parent that the program runs.
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
