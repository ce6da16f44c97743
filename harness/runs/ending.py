"""The keys `on_end` and `notify` of train.json.

- `on_end`: a command that runs after training and the last upload to the mirror have ended.
- `notify`: a URL that gets messages about the start and the end of training.

A separate process, the watcher, runs the command and sends the messages, even if training is killed. On standard input
it gets its job and, at the end, training's exit status. If the watcher's parent is killed, no status comes.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.common.errors import (
    CEILING,
    DIVERGED,
    EXIT,
    STATUSES,
    STOPPING_SIGNALS,
    UserError,
    tell_soon,
)
from harness.common.lock import is_held, last_owner, release
from harness.common.messages import quoted
from harness.common.processes import has_ended, launcher_name, started_by_torchrun
from harness.common.program import ROOT
from harness.runs.directory import RunDirectory

if TYPE_CHECKING:
    from harness.runs.train_config import TrainConfig

WATCHER = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from harness.runs import ending; ending.main()"
# Environment variables that launchers of ranks set
OF_LAUNCHER = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_(ADDR|PORT)$|TORCHELASTIC_|DDP_TRAIN_")
POLL_SECONDS = 0.5
NOTIFY_SECONDS = 5.0
LONGEST_SECONDS = 600.0  # for the command `on_end`
UPLOAD_SECONDS = 3600.0  # for the last upload to the mirror, including retries
RETRY_SECONDS = 15.0  # between retries of that upload
STATES = {0: "finished", STATUSES[CEILING]: "stopped", STATUSES[DIVERGED]: "diverged"}
STATES |= {128 + each: "stopped" for each in STOPPING_SIGNALS}


def check_on_end(run: RunDirectory, config: TrainConfig) -> None:
    """Raise UserError if the program of train.json's `on_end` cannot be executed on this machine."""
    if config.on_end and shutil.which(config.on_end[0]) is None:
        raise UserError(
            f'{run.train_json}: key "on_end": there is no program {quoted(config.on_end[0])} here; give its path, or '
            "make the file executable"
        )


def watch_end(run: RunDirectory, config: TrainConfig, rank0: int, mirror: str | None) -> None:
    """Start the watcher if train.json has the key `on_end` or `notify`.

    - `rank0`: the pid of rank 0, which is this process or its child. If rank 0 does not take the run's lock, the
      watcher does nothing.
    - `mirror`: the URL of the mirror, or None.

    Sets `EXIT.before_end` to a function that gives the watcher this process's exit status and waits for the watcher's
    end. If torchrun started this process, the function does not wait: the watcher waits for torchrun's end.
    """
    if config.on_end is None and config.notify is None:
        return
    launcher = launcher_name() if started_by_torchrun() else ""
    job: dict[str, Any] = {"run": str(run.path.absolute()), "rank0": rank0, "launcher": launcher, "mirror": mirror}
    job |= {"on_end": config.on_end, "notify": config.notify}  # piped, because all users can see command lines
    # With the launcher's variables, a command of this program would run as a rank of this job.
    environment = {name: value for name, value in os.environ.items() if not OF_LAUNCHER.match(name)}
    command = [sys.executable, "-c", WATCHER]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert watcher.stdin is not None
    pipe = watcher.stdin
    pipe.write(json.dumps(job).encode() + b"\n")
    pipe.flush()

    def end(status: int) -> None:
        release(run.lock_file)  # so that the last upload can take the lock
        with suppress(OSError):  # the watcher was killed
            pipe.write(str(status).encode())
            pipe.close()
        for number in STOPPING_SIGNALS:  # Ctrl-C ends the wait, not the command
            signal.signal(number, signal.SIG_DFL)
        if not launcher:
            watcher.wait()

    EXIT.before_end = end


# The watching process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Watch the training command that the first line of standard input describes, send its `notify` messages, and run
    its `on_end`."""
    for number in STOPPING_SIGNALS:
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the command would inherit
    job = json.loads(sys.stdin.readline())
    run, is_begun = RunDirectory(Path(job["run"])), False
    lock = run.lock_file

    def is_of_this_command() -> bool:
        """Return True if rank 0 took the run's lock, and no later process did. A rank 0 that torchrun restarted counts
        as a later process: it has a watcher of its own."""
        owner = last_owner(lock)
        return owner is not None and owner.is_here() and owner.process.pid == job["rank0"]

    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], POLL_SECONDS)[0])
        if not is_begun and is_of_this_command():
            is_begun = True
            notify(job["notify"], run, "start", "training")
    status = sys.stdin.read()
    while not status and is_held(lock):  # the launcher was killed: rank 0 may still be saving
        time.sleep(POLL_SECONDS)
    # If `launcher_name` has no space, it lacks the launcher's start time, without which the end could not be detected.
    while " " in job["launcher"] and not has_ended(job["launcher"]):
        time.sleep(POLL_SECONDS)
    if not is_of_this_command():
        return
    state = STATES.get(int(status or 1), "failed")
    notify(job["notify"], run, "failure" if state in ("failed", "diverged") else "end", state)
    if not job["on_end"]:
        return
    if job["mirror"] and (fault := send_rest(run, job["mirror"])):
        warn(f"before on_end, not everything was sent to the mirror: {fault}; mirror.py push sends the rest")
    if fault := run_on_end(job["on_end"], run, state):
        warn(f"on_end {fault}; if it was meant to end the rental of this machine, end the rental by hand")


def warn(text: str) -> None:
    """Print a warning. Returns even if the output is blocked, because `on_end` must run all the same."""
    tell_soon(text, "warning")


def notify(url: str | None, run: RunDirectory, event: str, state: str) -> None:
    """Send an event to `url` as JSON, or do nothing if `url` is None. `event` is "start", "end" or "failure". `state`
    is "training", "finished", "stopped", "diverged" or "failed". If no answer confirms the event, print a warning
    without the URL, which is a secret."""
    if url is None:
        return
    from harness.runs.metrics import read_progress  # imported late: the watcher stays small while it waits

    progress = None
    with suppress(UserError, OSError):
        progress = read_progress(run.metrics)
    step = progress.last.global_step if progress else None
    message = f"{run.path.name}: {state}" + ("" if step is None else f", last report at global step {step:,}")
    values = {"run": run.path.name, "event": event, "state": state, "step": step, "message": message}
    faults: list[str] = ["no answer in time"]

    def post() -> None:
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(url, json.dumps(values).encode(), headers, method="POST")
            urllib.request.urlopen(request, timeout=NOTIFY_SECONDS).close()
            faults.clear()
        except Exception as error:
            faults[:] = [f"{type(error).__name__} {getattr(error, 'code', '')}".strip()]

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(NOTIFY_SECONDS)
    for fault in faults:
        warn(f'notify: the message "{event}" was not confirmed: {fault}; check the URL in train.json')


def send_rest(run: RunDirectory, url: str) -> str | None:
    """Send to the mirror at `url` all that training has left unsent. Return what went wrong, or None."""
    command = [sys.executable, str(ROOT / "mirror.py"), "push", run.path.name, url, "--runs-dir", str(run.path.parent)]
    deadline = time.monotonic() + UPLOAD_SECONDS
    fault = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            break
        if done.returncode == 0:
            return None
        fault = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1].removeprefix("error: ")
        if done.returncode == UserError.exit_status:  # another machine has the run, for example
            return fault
        time.sleep(max(0.0, min(RETRY_SECONDS, deadline - time.monotonic())))
    return f"{fault or 'the mirror is slow'}; given up after {UPLOAD_SECONDS / 60:.0f} minutes"


def run_on_end(command: list[str], run: RunDirectory, state: str) -> str | None:
    """Run the command, and return what went wrong, or None."""
    added = {"DDP_PRETRAIN_RUN": run.path.name, "DDP_PRETRAIN_STATE": state, "DDP_PRETRAIN_DIRECTORY": str(run.path)}
    try:
        done = subprocess.run(
            command,
            env=os.environ | added,
            stdin=subprocess.DEVNULL,
            timeout=LONGEST_SECONDS,
            check=False,
            restore_signals=False,  # SIGPIPE stays ignored, because the output may have no reader any more
        )
    except subprocess.TimeoutExpired:
        return f"was killed after {LONGEST_SECONDS:g} s"
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    return f"failed with exit status {done.returncode}" if done.returncode else None
