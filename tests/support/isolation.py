"""Isolation of the tests from the checkout's results, from the user's caches and settings, and from GPUs.

Importing this module isolates the process that imports it (pytest, before it imports torch), and all processes that it
starts. They have a home folder and caches made for the tests, cannot use a GPU, and have none of the user's tokens.
Each process reports its own forbidden actions (tests/support/guard.py), and the test in which one happens fails. Only
Python's own system calls are seen, not a file that a library in another language opens.
"""

from __future__ import annotations

import os
import shutil
import signal
import site
import tempfile
from pathlib import Path

from tests.support import guard

ROOT = Path(__file__).resolve().parents[2]
PREFIX = "ddp-pretrain-tests-"
_temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
FOLDER = Path(_temporary.name)
SHIPPED_RUNS = FOLDER / "runs"  # copies of the repository's runs, without results of training
_GUARD, _REPORT = FOLDER / "guard", FOLDER / "trespasses"

# Variables that are removed: the user's tokens, addresses and folders, and variables of a launcher. TIKTOKEN_CACHE_DIR
# is kept on purpose.
FOREIGN = ("HF_", "HUGGING_FACE_", "OPENAI_", "COLLECTIVE_TIMEOUT", "TORCHELASTIC_", "MASTER_", "XDG_", "MPLCONFIGDIR")
LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"}
# Variables that every process of the tests must be started with. A test that sets PYTHONPATH itself uses `on_path`.
REQUIRED = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_GUARD)}


def on_path(*folders: Path) -> dict[str, str]:
    """Return the variable PYTHONPATH with which a process also finds modules in these folders."""
    return {"PYTHONPATH": os.pathsep.join([str(_GUARD), *map(str, folders)])}


def _is_guard(folder: str) -> bool:
    return Path(folder).name == _GUARD.name and Path(folder).parent.name.startswith(PREFIX)


def _isolate() -> None:
    user_site = site.getuserbase()  # packages may be there, and it depends on HOME, which is set below
    for name in [name for name in os.environ if name.startswith(FOREIGN) or name in LAUNCHERS]:
        del os.environ[name]
    # pytest's workers (xdist) inherit the guard of the process that started them. They use their own instead.
    inherited = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not _is_guard(each)]
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(FOLDER / "home"),
        "NO_PROXY": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",  # with small models, a second thread spins for longer than it computes
        "PYTHONUSERBASE": user_site,
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),
        **on_path(*(Path(folder) for folder in inherited if folder)),
    }
    (FOLDER / "home").mkdir()
    # A shell's background job, or one under nohup, ignores these signals, and its child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    # Without bytecode files, each test process would compile all of torch again, or all of a read-only checkout.
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) or not os.access(ROOT / "harness", os.W_OK):
        os.environ["PYTHONPYCACHEPREFIX"] = str(FOLDER / "bytecode")


def _copy_shipped_runs() -> None:
    """Copy only the files that the repository ships. Everything else in a run's folder is a result of training."""
    for file in [path for name in ("model", "train", "reported") for path in ROOT.glob(f"runs/*/{name}.json")]:
        (SHIPPED_RUNS / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, SHIPPED_RUNS / file.parent.name / file.name)


def _guard() -> None:
    forbidden = tuple(f"{ROOT / name}/" for name in ("runs", "datasets"))
    source = Path(guard.__file__).read_text()
    source += f"\n\nORIGIN = {guard.__file__!r}\nwatch({forbidden!r}, {str(_REPORT)!r}, {REQUIRED!r})\n"
    _GUARD.mkdir()
    (_GUARD / "sitecustomize.py").write_text(source)
    guard.watch(forbidden, str(_REPORT), REQUIRED)


def trespasses() -> list[str]:
    """Return the forbidden actions that processes of the tests have reported since the last call."""
    return _report.read().splitlines()


_REPORT.touch()
_report = _REPORT.open()
_isolate()
_copy_shipped_runs()
_guard()
