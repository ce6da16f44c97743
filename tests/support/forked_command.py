"""The repository's commands in forks of the test process. They share its imports, because a cold Python takes seconds
to start."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import tempfile

from tests.support.forking import Script, run_to_the_end
from tests.support.isolation import ROOT

# Modules that are imported before the fork. Those of DRAWING are imported only for a command that draws.
MODULES = {
    "compare_runs.py": ("harness.comparison.page", "harness.comparison.machines"),
    "fit_scaling.py": ("harness.scaling.report", "harness.runs.budget", "scipy.optimize"),
    "sweep_runs.py": ("harness.sweeps.run",),
    "derive_run.py": ("harness.sweeps.derived_runs",),
}
DRAWING = {"compare_runs.py": "matplotlib.figure", "fit_scaling.py": "harness.scaling.charts"}


def run_forked(script: str, *arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run one of the repository's scripts in a fork, and expect this exit status, or any if `status` is None."""
    drawing = [DRAWING[script]] if {"--chart", "--html"}.intersection(arguments) else []
    for module in (*MODULES[script], *drawing):
        importlib.import_module(module)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if not child:
            try:
                atexit._clear()  # the fork must not run the exit functions of the test process
                os.chdir(ROOT)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                streams = [os.fdopen(descriptor, "w", encoding="utf-8", closefd=False) for descriptor in (1, 2)]
                sys.stdout, sys.stderr = streams
                run_to_the_end(Script(str(ROOT / script), arguments).run)
            finally:
                os._exit(70)  # the fork must never return and run tests
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    assert status in (None, ended), texts[1]
    return subprocess.CompletedProcess([script, *arguments], ended, *texts)
