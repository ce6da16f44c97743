"""Report of forbidden actions, written by the test process that performs them.

Each Python process of the tests runs this file when it starts, because tests/support/isolation.py puts a copy, named
sitecustomize.py, into a folder on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing takes longer than everything else here
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# Audit events (PEP 578) that have paths among their arguments, and the indexes of these arguments.
PATHS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("open", "os.listdir", "os.scandir", "os.chdir", "os.mkdir", "os.remove", "os.rmdir"), (0,)),
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    **dict.fromkeys(("os.rename", "os.link"), (0, 1)),
    "os.symlink": (1,),
}
# Those whose last argument is dir_fd
AT_FOLDER = PATHS.keys() - {"open", "os.listdir", "os.scandir", "os.chdir", "os.truncate"}
# Audit events that start a program, and the indexes of its command line and its environment among their arguments.
STARTS = {"subprocess.Popen": (1, 3), "os.posix_spawn": (1, 2), "os.exec": (1, 2)}
GPUS, NULL_DEVICE = "CUDA_VISIBLE_DEVICES", "libnullcudart.so"  # a process with the null device cannot reach a GPU
LIBRARIES_OWN = ["/sbin/ldconfig", "-p"]  # started by ctypes.util.find_library, in an empty environment


def watch(forbidden: tuple[str, ...], report: str, required: Mapping[str, str]) -> None:
    """Report forbidden actions of this process, and of processes forked from it, as lines of the file `report`.

    It is forbidden to use a path in one of the `forbidden` folders (each ends in a slash), and to start a program
    without the `required` variables.
    """

    def trespassed(what: str) -> None:
        test, place = os.environ.get("PYTEST_CURRENT_TEST", ""), _place()
        if test or place:  # otherwise it is pytest itself, between two tests
            with open(report, "a", errors="backslashreplace") as file:
                file.write(f"{test or 'while collecting'}: {what}{place}\n")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PATHS:
            for index in PATHS[event]:
                path = _absolute(arguments[index])
                if f"{path}/".startswith(forbidden) and not _is_elsewhere(event, arguments, arguments[index]):
                    trespassed(f"{event} {path!r}")
        elif event in STARTS:
            command, environment = (arguments[index] for index in STARTS[event])
            given = _texts(os.environ if environment is None else environment)
            missing = [name for name, value in required.items() if value not in given.get(name, "-").split(os.pathsep)]
            if NULL_DEVICE in given.get("LD_PRELOAD", "") and GPUS in missing:
                missing.remove(GPUS)
            if missing and command != LIBRARIES_OWN:
                trespassed(f"{command!r} is started without {' and '.join(missing)}")

    sys.addaudithook(hook)


def _absolute(path: Any) -> str:
    """Return the absolute form of a system call's path, or an empty string for a file descriptor or if the working
    folder is gone."""
    if isinstance(path, int):
        return ""
    try:
        return os.path.abspath(os.fsdecode("." if path is None else path))
    except FileNotFoundError:  # the working folder is gone
        return ""


def _is_elsewhere(event: str, arguments: tuple[Any, ...], path: Any) -> bool:
    """Return True if a path is relative to an open folder, as those of shutil.rmtree are, and not to the working
    folder."""
    if event == "open":  # the event names no folder, but rmtree gives no mode and creates nothing
        at_folder = arguments[1] is None and not arguments[2] & os.O_CREAT
    else:
        at_folder = event in AT_FOLDER and arguments[-1] != -1
    return at_folder and not os.path.isabs(path)


def _texts(environment: Mapping[Any, Any]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}


def _place() -> str:
    """Return ", at FILE:LINE" of the innermost caller in this repository, or an empty string."""
    root = os.path.dirname(os.path.dirname(ORIGIN))
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(f"{root}/") and "/.venv/" not in file and file != ORIGIN:
            return f", at {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


ORIGIN = __file__  # each copy sets this to the path of the original
