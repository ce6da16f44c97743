"""Commands in the tests' own process: for their output, files and exit status, where the process is not the subject."""

from __future__ import annotations

import importlib
import os
from contextlib import chdir
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

from click.testing import CliRunner

from harness.common import errors
from harness.common.exit import Exit
from tests.support.launch import Result


def call(name: str, *arguments: object, folder: Path, environment: dict[str, str] | None = None) -> Result:
    """Run one of the root's commands in `folder`, whatever comes of it."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    command = importlib.import_module(name.removesuffix(".py")).main
    with (
        patch.dict(os.environ, environment or {}),  # which takes back what the command sets itself, too
        patch.object(os, "_exit", leave),
        patch.object(errors, "EXIT", Exit()),
        chdir(folder),
    ):
        done = CliRunner().invoke(command, [str(each) for each in arguments], catch_exceptions=False)
    return Result(done.exit_code, done.stdout, done.stderr)
