"""Upload of a run's files to its mirror, in a thread. Training waits for the thread only in `Uploads.finish`.

Of the checkpoints, only the newest and the best are sent. A checkpoint's meta.json is sent last, after metrics.jsonl,
to which meta.json refers.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from harness.common.errors import UserError, signals_to
from harness.common.files import version_of
from harness.common.messages import GIB, abbreviated, counted
from harness.mirror.fetch import ASIDE, RESULTS_ASIDE, left_by_going_back, names_in, names_with_meta, read_remote_meta
from harness.mirror.owner import OWNER, REFRESH_SECONDS, Lease, LeaseLost, remember
from harness.mirror.store import Mirror, reason_of
from harness.model.tensor_names import META
from harness.runs.checkpoints import BEST, LATEST, list_checkpoints, verify_checkpoint
from harness.runs.directory import CACHE_SECRET, CHECKPOINT_NAME, RunDirectory, step_of
from harness.runs.metrics import rough_duration

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0  # between two tries; each pause is twice the one before
END_PATIENCE_SECONDS = 900.0  # the wait at the end of a run is given up if no byte was sent for this long
LEAST_SPEED = 2e6  # bytes per second; that wait is longer by the time that the file in flight takes at this speed


class Uploads:
    """Sender of a run's files to its mirror. Without a mirror (None), the methods that training calls do nothing.

    - `keep`: train.json's `keep_checkpoints`; None keeps all
    - `start_step`: global step of the checkpoint from which this process continues; -1 for a new run

    Any thread may call `send_now`. All other public methods are for the main thread. After `start`, `push` must not be
    called.
    """

    def __init__(
        self, run: RunDirectory, mirror: Mirror | None, lease: Lease | None = None, *, keep: int | None, start_step: int
    ) -> None:
        self.run, self._mirror, self.lease = run, mirror, lease
        self.keep, self.start_step = keep, start_step
        self.sending: str | None = None  # the checkpoint that is being sent, which must not be deleted
        self.lost = False  # another machine has taken the run
        self._whole: set[str] = set()  # checkpoints that are known to be whole in the mirror
        self.damaged: set[str] = set()  # checkpoints that cannot be verified here, so that the mirror's copies are kept
        self._versions: dict[str, str] = {}  # of the files that this process has sent
        self._sent_bytes = 0  # by this process, for the progress bar
        self._in_flight = 0  # size of the file that is being sent; not every library reports its progress
        self._is_first = True
        self._failing_since: float | None = None
        self._sent_since_failure = 0
        self._closing = False
        self._woken, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True, name="mirror-uploads")

    @property
    def mirror(self) -> Mirror:
        assert self._mirror is not None, "called only if there is a mirror"
        return self._mirror

    def start(self) -> None:
        """Begin to send. `latest`, `best` and metrics.jsonl must already be those of `start_step`."""
        if self._mirror is not None:
            self._thread.start()

    def send_now(self) -> None:
        """Wake the thread, so that it sends at once what has changed."""
        self._woken.set()

    def finish(self) -> None:
        """Wait until everything is in the mirror and the lease is released. Must be called after `start`. If the wait
        ends early, for example at a signal, a line names what is missing. Errors of the store are not raised."""
        if self._mirror is None:
            return
        self._closing = True
        self.send_now()
        bar: tqdm | None = None
        last, since = self._sent_bytes, time.monotonic()
        asked: list[int] = []  # signals that ask this process to stop
        with signals_to(lambda number, _: asked.append(number)):
            while not self._ended.wait(0.1) and not asked:
                if bar is None and time.monotonic() - since > 1.0:
                    bar = self._bar()
                if self._sent_bytes > last:
                    if bar is not None:
                        bar.update(self._sent_bytes - last)
                    last, since = self._sent_bytes, time.monotonic()
                if time.monotonic() - since > END_PATIENCE_SECONDS + self._in_flight / LEAST_SPEED:
                    break
        if bar is not None:
            bar.close()
        self.name_missing()

    def name_missing(self) -> None:
        """Print on standard error what is missing from the mirror, if the thread has not sent everything."""
        missing = [] if self._mirror is None else self.missing()
        if missing and not (self._ended.is_set() and not self.lost):
            command = f"mirror.py push {self.run.path.name} {shlex.quote(self.mirror.url)}"
            if (runs := self.run.path.parent) != Path("runs"):
                command += f" --runs-dir {shlex.quote(str(runs))}"
            later = " once the other machine has stopped, if that machine has sent nothing newer" if self.lost else ""
            self._say(f"not in the mirror: {abbreviated(missing, 3)}; `uv run {command}` sends the rest{later}")

    def missing(self) -> list[str]:
        """Return the names of the checkpoints (the newest, the best) and the small files that must still be sent."""
        changed = [name for name, path in self._small_files() if self._versions.get(name) != version_of(path.stat())]
        return [*(path.name for path in self._unsent()), *changed]

    def verify(self) -> None:
        """Verify the newest and the best checkpoint here. One that cannot be verified is added to `damaged`, with a
        warning, and is not sent by `push`."""
        for path in self._wanted():
            try:
                verify_checkpoint(path)
            except (UserError, OSError) as error:
                self._say(f"warning: {error}")
                self.damaged.add(path.name)

    def push(self) -> None:
        """Send what has changed. Delete unneeded checkpoints in the mirror: incomplete ones, and those beyond `keep`.
        The first call also sets aside the checkpoints there that the run has abandoned by going back. Raises LeaseLost
        if another machine has taken the run, and the errors of the store."""
        if self.lease is not None:
            self.lease.check()
        there = self.mirror.files()
        if self.lease is not None and OWNER not in there:
            self.lease.write()  # before train.json is: with train.json alone, the run counts as taken and released
        # In every call, because files in the mirror can be lost or replaced after they were sent.
        self._versions = {name: version for name, version in self._versions.items() if name in there}
        if self._is_first:
            self._set_aside(there)
            for path in (self.run.model_json, self.run.train_json):
                self._send_small(path.name, path)
            self._is_first = False
        self._whole = {path.name for path in self._wanted() if self._is_whole(path, there)}
        self._delete_incomplete(there)
        while todo := self._unsent():
            self._send_checkpoint(todo[0], there)  # then look again: a newer one may have been saved
        for name, path in self._small_files():
            self._send_small(name, path)
        self._prune(self.mirror.files())

    # In the thread ---------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._woken.clear()
            is_last = self._closing  # read before the pass: what was written before `finish` is in this pass
            try:
                self.push()
            except LeaseLost as lost:
                self.lost = True
                self._say(
                    f"warning: mirror {self.mirror.name}: {lost} has taken this run: nothing more is sent; training "
                    "continues here, and its checkpoints are only in the run's folder"
                )
                break
            except Exception as error:
                self._tell_failure(error, pause)
                self._woken.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                with suppress(Exception):
                    self.mirror.open()
                continue
            pause = FIRST_PAUSE_SECONDS
            self._tell_recovery()
            if is_last:
                with suppress(Exception):  # the lease then expires
                    if self.lease is not None:
                        self.lease.release()
                break
            self._woken.wait(REFRESH_SECONDS)
        self._ended.set()

    def _wanted(self) -> list[Path]:
        """Return the paths of the checkpoints that the mirror must have: the latest one, and the best one."""
        known = [path for _, path in list_checkpoints(self.run.checkpoints)]
        best = (self.run.checkpoints / BEST).resolve()
        latest = (self.run.checkpoints / LATEST).resolve()
        newest = [path for path in known if path.name == latest.name] or known[-1:]
        return list(dict.fromkeys([*newest, *(path for path in known if path.name == best.name)]))

    def _unsent(self) -> list[Path]:
        return [path for path in self._wanted() if path.name not in self._whole | self.damaged]

    def _is_whole(self, path: Path, there: dict[str, int]) -> bool:
        """Return True if `there`, the mirror's files, include a whole copy of the checkpoint `path`: files of the same
        sizes, and the same meta.json, which has their hashes."""
        remote = f"checkpoints/{path.name}"
        with suppress(FileNotFoundError):  # `keep_checkpoints` has deleted it meanwhile
            sizes = {f"{remote}/{file.name}": file.stat().st_size for file in files_of(path)}
            if sizes.items() <= there.items():
                return self.mirror.read(f"{remote}/{META}") == (path / META).read_bytes()
        return False

    def _send_checkpoint(self, path: Path, there: dict[str, int]) -> None:
        self.sending, began, sent = path.name, time.monotonic(), 0
        try:
            files = sorted(files_of(path))
            if read_remote_meta(self.mirror, there, path.name) is not None:
                try:
                    verify_checkpoint(path)
                except (UserError, OSError) as error:
                    if path.exists():  # else `keep_checkpoints` has deleted it meanwhile
                        self.damaged.add(path.name)
                        self._say(f"warning: {error}; the mirror's copy is left as it is")
                    return
            if f"checkpoints/{path.name}/{META}" in there:
                self.mirror.delete(f"checkpoints/{path.name}/{META}")  # not whole until the last file is sent
            for file in files:
                remote = f"checkpoints/{path.name}/{file.name}"
                status = file.stat()
                is_there = self._versions.get(remote) == version_of(status) and there.get(remote) == status.st_size
                if file.name != META and not is_there:
                    self._send(remote, file)
                    self._versions[remote] = version_of(status)
                    sent += status.st_size
            if self.lease is not None:
                self.lease.check()  # another machine may have taken the run during a long upload
            self._send_small(self.run.metrics.name, self.run.metrics)
            self._send(f"checkpoints/{path.name}/{META}", path / META)
        except FileNotFoundError:
            if path.exists():
                raise
            return  # `keep_checkpoints` has deleted it meanwhile
        finally:
            self.sending = None
        self._whole.add(path.name)
        self._sent_since_failure += 1
        if sent:  # for --plan
            with suppress(OSError):
                remember(self.run, bytes_per_second=sent / max(time.monotonic() - began, 1e-3))

    def _send(self, remote: str, file: Path) -> None:
        before, size = self._sent_bytes, file.stat().st_size

        def progress(sent: int) -> None:
            self._sent_bytes = before + sent

        self._in_flight = size
        try:
            self.mirror.send(remote, file, progress)
        finally:
            self._in_flight, self._sent_bytes = 0, before  # what a failed try has sent does not count
        self._sent_bytes = before + size

    def _send_small(self, name: str, path: Path) -> None:
        """Send a small file if it exists and has changed since it was sent. The file may grow during this call."""
        with suppress(FileNotFoundError):
            found = version_of(path.stat())
            if self._versions.get(name) != found:
                content = path.read_bytes()
                self.mirror.write(name, content)
                self._versions[name] = found

    def _small_files(self) -> Iterator[tuple[str, Path]]:
        """Yield the name in the mirror and the local path of each small file that exists."""
        run = self.run
        paths = (run.metrics, run.model_json, run.train_json, run.summary, run.chart)
        yield from ((path.name, path) for path in paths if path.is_file())
        # Without the secret, no other machine reads compiled code.
        folders = [run.results, *([run.compile_cache] if CACHE_SECRET in os.environ else [])]
        for folder in filter(Path.is_dir, folders):
            for path in sorted(folder.iterdir()):
                if path.is_file() and not path.name.startswith("."):
                    yield f"{folder.name}/{path.name}", path

    def _set_aside(self, there: dict[str, int]) -> None:
        """Rename the meta.json of stale checkpoints in the mirror, so that no machine continues from them. Move their
        measurements to RESULTS_ASIDE, and delete summary and chart. A measurement, summary or chart that is also on
        this machine stays. `there`, the mirror's files with their sizes, is updated.

        - A checkpoint that this machine has abandoned by going back is stale, unless a checkpoint of the same or a
          later step is both here and in the mirror.
        - Any other checkpoint is stale if its step is after `start_step`.
        """
        stale, is_left_here = set[str](), left_by_going_back(self.run, there)
        # Another machine may have continued from one that was left here, up to a checkpoint that was fetched since.
        here = list_checkpoints(self.run.checkpoints)
        shared = max((step for step, path in here if f"checkpoints/{path.name}/{META}" in there), default=-1)

        def is_left(name: str) -> bool:
            return step_of(name) > (shared if is_left_here(name) else self.start_step)

        left = [name for name in names_with_meta(there) if is_left(name)]
        if left:
            stale |= {file.name for file in (self.run.summary, self.run.chart) if not file.exists()}
        for path in there:
            folder, _, file = path.partition("/")
            checkpoint = CHECKPOINT_NAME.search(file) if folder == self.run.results.name else None
            if checkpoint is not None and is_left(checkpoint[0]) and not (self.run.path / path).exists():
                self.mirror.write(f"{RESULTS_ASIDE}/{file}", self.mirror.read(path) or b"")
                stale.add(path)
        for file in stale & there.keys():
            self.mirror.delete(file)
            del there[file]
        # Renamed after the deletions, because after a kill the next process learns from these files which deletions are
        # due. The newest is renamed last, because `left_by_going_back` needs it to find the others.
        for name in reversed(left):
            if content := self.mirror.read(f"checkpoints/{name}/{META}"):
                self.mirror.write(f"checkpoints/{name}/{ASIDE}", content)
            self.mirror.delete(f"checkpoints/{name}/{META}")
            there[f"checkpoints/{name}/{ASIDE}"] = there.pop(f"checkpoints/{name}/{META}")

    def _delete_incomplete(self, there: dict[str, int]) -> None:
        """Delete the mirror's incomplete checkpoints that are no longer wanted, such as a lost machine's, to make room.
        Checkpoints that were set aside stay."""
        wanted = {path.name for path in self._wanted()}
        for name in names_in(there):
            if name not in wanted and not {f"checkpoints/{name}/{file}" for file in (META, ASIDE)} & there.keys():
                with suppress(OSError):  # perhaps it cannot be deleted, and there is room enough
                    self.mirror.delete(f"checkpoints/{name}")

    def _prune(self, there: dict[str, int]) -> None:
        """Delete old checkpoints from the mirror. Those in `_wanted`, those set aside and the newest `keep` of all
        others stay. Nothing is deleted while one in `_wanted` must still be sent."""
        wanted = {path.name for path in self._wanted()}
        if self.keep is None or self._unsent():
            return
        for name in [name for name in names_with_meta(there) if name not in wanted][self.keep :]:
            self.mirror.delete(f"checkpoints/{name}/{META}", f"checkpoints/{name}")
            self._whole.discard(name)

    # Messages to the user --------------------------------------------------------------------------------------------

    def _tell_failure(self, error: Exception, pause: float) -> None:
        if self._failing_since is None:
            self._failing_since, self._sent_since_failure = time.monotonic(), 0
            self._say(
                f"warning: mirror {self.mirror.name}: {reason_of(error)}; sending is retried, at first within "
                f"{pause:g} s and later within {LONGEST_PAUSE_SECONDS:.0f} s; training is not affected"
            )

    def _tell_recovery(self) -> None:
        if self._failing_since is not None:
            took, count = rough_duration(time.monotonic() - self._failing_since), self._sent_since_failure
            self._failing_since = None
            self._say(f"mirror {self.mirror.name}: works again after {took}; {counted(count, 'checkpoint')} sent")

    def _say(self, text: str) -> None:
        with suppress(Exception):  # standard error may be closed
            tqdm.write(text, file=sys.stderr)  # does not break a progress bar

    def _bar(self) -> tqdm:
        """Return a progress bar for the bytes of the checkpoints still to be sent. If standard error is no terminal,
        the bar is not shown, and a line is printed instead."""
        files = {f"checkpoints/{path.name}/{file.name}": file for path in self._unsent() for file in files_of(path)}
        statuses = ((name, file.stat()) for name, file in files.items())
        left = sum(status.st_size for name, status in statuses if self._versions.get(name) != version_of(status))
        bar = tqdm(total=left, unit="B", unit_scale=True, desc="sending to the mirror (Ctrl-C stops it)", disable=None)
        if bar.disable:
            self._say(f"waiting for the mirror: {left / GIB:.2f} GiB to send to {self.mirror.name}; Ctrl-C stops it")
        return bar


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files of a checkpoint. A folder in it is the user's own, such as an export, and is not sent."""
    return [path for path in checkpoint.iterdir() if path.is_file()]
