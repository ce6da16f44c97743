"""Preparations that are killed, stopped or fail: the same command continues them, and the dataset has the same bytes
as without the interruption. Their memory does not grow with the input."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from harness.common.processes import start_time
from tests.support.file_operations import small_disk
from tests.support.isolation import ROOT
from tests.support.launch import wait_until
from tests.support.preparing import (
    DOCUMENTS,
    IN_ORDER,
    SMALL,
    WORDS,
    Preparer,
    content_of,
    documents_of,
    held_documents,
    plugin,
    splits_of,
    texts,
    with_texts,
    write_json_lines,
)

MIB = 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc, to see processes")


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return with_texts(tmp_path_factory.mktemp("preparing"))


# Interruption ----------------------------------------------------------------------------------------------------


KILLS = 6
# The command commits after each batch of a few documents and shuffles in several buckets, so that every phase occurs.
# It kills itself just before its file operation number {last}; `done` counts the operations. With 0 it runs to its end.
HURRIED_TO_ITS_END = """
import atexit, os, sys
import harness.data.preparation.encode as encode, harness.data.preparation.command as command
import harness.data.preparation.splits as splits, harness.data.preparation.stream as stream
splits.POOL_DOCUMENTS = 30
encode.BATCH_CHARACTERS, command.COMMIT_TOKENS, stream.BUCKET_BYTES = 2000, 500, 4000
done = 0
def watch(event, arguments):
    global done
    writes = event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        done += 1
        if done == {last}:
            os.kill(os.getpid(), 9)
sys.addaudithook(watch)
atexit.register(lambda: print("operations:", done, file=sys.stderr))
"""


@pytest.mark.slow
@pytest.mark.parametrize("limit", [[], ["--max-tokens", 9000], ["--exclude", "me/bench:train"]], ids=str)
def test_killed_at_any_time_and_run_again_the_bytes_are_the_same(
    preparer: Preparer, tmp_path: Path, limit: list[object]
) -> None:
    small = Preparer(tmp_path)
    for number in range(3):
        write_json_lines(tmp_path / "texts" / f"{number}.jsonl", [*DOCUMENTS[number * 250 :][:250], ""])
    arguments = [
        "texts",
        "datasets/me/x",
        "--tokenizer",
        preparer.path / "tokenizer.json",
        "--shuffle-seed",
        "5",
        *limit,
    ]
    if "--exclude" in limit:
        write_json_lines(tmp_path / "bench.jsonl", DOCUMENTS[300:400])
        small.prepare("bench.jsonl", "bench", "--tokenizer", preparer.path / "tokenizer.json")
    target = tmp_path / "datasets" / "me" / "x"
    straight = small.result(*arguments, prelude=HURRIED_TO_ITS_END.format(last=0))
    assert straight.status == 0, straight.stderr
    operations = int(straight.stderr.rpartition("operations: ")[2])
    assert limit or operations > 100, "every phase has file operations"
    content = content_of(target)
    shutil.rmtree(target)
    partial, dice = target.parent / ".x.partial", random.Random(0)
    for kill in range(KILLS):
        last = dice.randrange(1, 2 * operations // KILLS)
        done = small.result(*arguments, prelude=HURRIED_TO_ITS_END.format(last=last))
        assert done.status in (0, -signal.SIGKILL), done.stderr
        assert kill > 0 or done.status == -signal.SIGKILL
        if target.exists():
            break
    else:
        small.run(*arguments, prelude=HURRIED_TO_ITS_END.format(last=0))
    assert content_of(target) == content
    if partial.exists():  # killed when the dataset was in its place already
        small.run(*arguments, status=2)
    assert not partial.exists()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Wait until the command has two tokenizing processes, and return their ids."""
    found: list[int] = []
    while len(found) < 2:
        assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.mark.slow
@needs_proc
def test_a_worker_that_dies_is_one_line_and_the_work_goes_on(preparer: Preparer, tmp_path: Path) -> None:
    mine = Preparer(tmp_path)
    arguments = [preparer.path / "texts", "datasets/me/x", *SMALL]
    process = mine.start(*arguments, "--workers", 2)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a tokenizing process ended unexpectedly" in error
    assert len(error.splitlines()) == 1
    mine.run(*arguments)
    plain = mine.prepare(preparer.path / "texts", "plain")
    assert content_of(tmp_path / "datasets" / "me" / "x") == content_of(plain)


# Kills the first tokenizing process while the second is being started.
DEAD_AT_THE_START = """
import os, time
from multiprocessing import util
spawn, workers = util.spawnv_passfds, []
def spawn_slowly(path, args, kept):
    pid = spawn(path, args, kept)
    if any(b"spawn_main" in os.fsencode(each) for each in args):
        workers.append(pid)
    if len(workers) == 2:
        os.kill(workers[0], 9)
        time.sleep(0.5)
    return pid
util.spawnv_passfds = spawn_slowly
"""


def test_a_worker_that_dies_at_the_start_leaves_nothing_to_wait_for(preparer: Preparer, tmp_path: Path) -> None:
    arguments = [preparer.path / "texts", "out", "--workers", 2, *SMALL]
    line = Preparer(tmp_path).run(*arguments, status=1, prelude=DEAD_AT_THE_START)
    assert "a tokenizing process ended unexpectedly" in line


def test_what_a_worker_stumbles_over_is_one_line_and_the_work_goes_on(tmp_path: Path) -> None:
    """If tokenizing fails, the command prints one line, and completes once the text is changed. Here the encoding's
    pattern tries all ways to match a long word of a's, and tiktoken's regex library gives up after a million."""
    mine = Preparer(tmp_path, plugin(tmp_path, [], pattern=r"(?:a(?=a|$)|aa)+b|\W|\w+"))
    write_json_lines(tmp_path / "texts" / "0.jsonl", DOCUMENTS[:100])
    write_json_lines(tmp_path / "texts" / "1.jsonl", ["a" * 60])
    arguments = ["texts", "out", "--tokenizer", "small", *IN_ORDER]
    line = mine.run(*arguments, "--workers", 2, status=1)
    assert "tokenizing failed: ValueError: Regex error while tokenizing" in line
    assert "run the same command again" in line
    write_json_lines(tmp_path / "texts" / "1.jsonl", ["a" * 6])
    mine.run(*arguments)
    assert held_documents(tmp_path / "out") == [*DOCUMENTS[:100], "a" * 6]


ALSO = [pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, *ALSO])
def test_no_worker_stays_behind(preparer: Preparer, tmp_path: Path, number: signal.Signals) -> None:
    """No tokenizing process outlives a command that gets a signal. A terminal sends its signals, for example that of
    Ctrl-C, to the whole process group, and still only one line is printed."""
    mine, arguments = Preparer(tmp_path), [preparer.path / "texts", "out", *SMALL]
    process = mine.start(*arguments, "--workers", 2, start_new_session=True)
    workers = workers_of(process)
    if number in {signal.SIGINT, signal.SIGHUP}:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=120)  # returns when no process has standard error open
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert error == f"stopped by {number.name}; to continue, run the same command again\n"
    assert not [pid for pid in workers if start_time(pid)]
    mine.run(*arguments)


INTERRUPTED = """
import multiprocessing, os, sys
sys.path.insert(0, sys.argv[1])
from harness.common.errors import RunError
from harness.data.preparation.encode import encoder_processes

if __name__ == "__main__":
    try:
        with encoder_processes(2) as pool:
            # Each result is larger than a pipe, so that both processes are always writing.
            results = [pool.submit(bytes, 2**22) for _ in range(100)]
            results[0].result()
            if sys.argv[2] == "interrupt":
                raise KeyboardInterrupt
            os.kill(multiprocessing.active_children()[0].pid, 9)
            [result.result() for result in results]
    except (KeyboardInterrupt, RunError) as error:
        print(type(error).__name__)
"""


SLOWLY_STARTED = """
import multiprocessing.context as context, os, sys, time
sys.path.insert(0, sys.argv[1])
from harness.data.preparation.encode import encoder_processes

start = context.SpawnProcess.start
context.SpawnProcess.start = lambda self: (time.sleep(1), start(self))
if __name__ == "__main__":
    with encoder_processes(3) as pool:
        print(len([pool.submit(os.getpid).result() for _ in range(6)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "how", "printed"),
    [(INTERRUPTED, "interrupt", "KeyboardInterrupt"), (INTERRUPTED, "kill", "RunError"), (SLOWLY_STARTED, "", "6")],
    ids=["interrupt", "kill", "slow start"],
)
def test_processes_that_end_or_start_at_a_bad_time(tmp_path: Path, script: str, how: str, printed: str) -> None:
    """Half a result, of a process that has ended while it wrote, is not waited for. Processes may start so slowly that
    the first ones are idle before the last one starts."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py"), str(ROOT), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == (f"{printed}\n", "")


@pytest.fixture
def begun(preparer: Preparer, tmp_path: Path) -> Preparer:
    """Preparer for a folder of two texts: the name of the first is not valid UTF-8, and the second is broken."""
    write_json_lines(tmp_path / "texts" / "a\udce9.jsonl", DOCUMENTS[:1000])
    (tmp_path / "texts" / "b.jsonl").write_text("broken\n")
    shutil.copy(preparer.path / "tokenizer.json", tmp_path)
    return Preparer(tmp_path)


BEGIN = ["texts", "out", "--tokenizer", "tokenizer.json"]


def test_a_mended_file_goes_on_after_the_others(begun: Preparer) -> None:
    """A command that failed at a broken file completes once the file is mended. Other options are refused, unless the
    work begins again."""
    assert "b.jsonl: line 1: not JSON" in begun.run(*BEGIN, status=1)
    line = begun.run(*BEGIN, "--shuffle-seed", "1", status=2)
    assert "unfinished work with other options (shuffle_seed: None, not 1)" in line
    shutil.copytree(begun.path / ".out.partial", begun.path / ".again.partial")
    write_json_lines(begun.path / "texts" / "b.jsonl", DOCUMENTS[1000:1100])
    begun.run(*BEGIN)
    assert sorted(held_documents(begun.path / "out")) == sorted(DOCUMENTS[:1100])
    (begun.path / ".again.partial" / "journal.json").write_text("[]")
    again = ["texts", "again", *BEGIN[2:], "--shuffle-seed", "1"]
    assert "journal.json: damaged; begin again with --restart" in begun.run(*again, status=2)
    begun.run(*again, "--restart")
    assert sorted(held_documents(begun.path / "again")) == sorted(DOCUMENTS[:1100])


# Written by version 0.1.0 for the input and the options of the test below.
JOURNAL_OF_AN_EARLIER_VERSION = (
    r'{"options": {"input": "texts", "text_column": "text", "document_separator": "\\n\\n", "replace_invalid": "any", '
    r'"include": [], "tokenizer": "tokenizer.json", "train_tokenizer": null, "validation_fraction": 0.01, '
    r'"test_fraction": 0.1, "shuffle_seed": 5, "tokenizer_file_sha256": '
    r'"2833200f72a5a47b76ae324a2a706462aca7392739ecbde59065bafe9f9f1369"}, "phase": "reading", "here": {"file": 1, '
    r'"documents": 0, "empty": 0, "size": {"documents": 1000, "tokens": 94456}}, "file_start": {"file": 1, '
    r'"documents": 0, "empty": 0, "size": {"documents": 1000, "tokens": 94456}}, "splits": []}'
)


def test_interrupted_work_of_an_earlier_version_goes_on(begun: Preparer) -> None:
    """The work continues in the given order of documents, the only order of that version."""
    options = ["--shuffle-seed", 5, "--test-fraction", 0.1, "--document-separator", r"\n\n", "--replace-invalid"]
    begun.run(*BEGIN, *IN_ORDER, *options, status=1)
    for leftover in (begun.path / ".out.partial").glob("pool.*"):
        leftover.unlink()
    (begun.path / ".out.partial" / "journal.json").write_text(JOURNAL_OF_AN_EARLIER_VERSION)
    write_json_lines(begun.path / "texts" / "b.jsonl", DOCUMENTS[1000:1100])
    begun.run(*BEGIN, *IN_ORDER, *options)
    documents = [text for split in splits_of(begun.path / "out") for text in documents_of(begun.path / "out", split)]
    assert sorted(documents) == sorted(DOCUMENTS[:1100])


def test_two_at_once_on_one_target(preparer: Preparer, tmp_path: Path) -> None:
    mine = Preparer(tmp_path)
    first = mine.fork(preparer.path / "texts", "out", *SMALL)
    lock = tmp_path / ".out.partial" / ".lock"
    wait_until(lambda: lock.exists() and lock.read_text(), first)
    first.send_signal(signal.SIGSTOP)
    line = mine.run(preparer.path / "texts", "out", *SMALL, status=2)
    os.kill(first.pid, signal.SIGCONT)
    assert "is being made by another process (" in line
    assert f"pid {first.pid}" in line
    assert first.wait(timeout=60) == 0


def test_what_has_changed_before_any_work_was_kept_is_taken_anew(tmp_path: Path) -> None:
    """A command that was killed before it encoded anything reads the text again and trains its tokenizer again."""
    mine = Preparer(tmp_path)
    write_json_lines(tmp_path / "a.jsonl", ["aaa " * 99, *DOCUMENTS[:99]])
    killed = "import os, harness.data.preparation.command as command\n"
    killed += "command.encoder_processes = lambda *_: os.kill(os.getpid(), 9)"
    assert mine.result("a.jsonl", "x", *SMALL, prelude=killed).status == -signal.SIGKILL
    assert (tmp_path / ".x.partial" / "dataset" / "tokenizer.json").exists()
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS[:200])
    for target in ("x", "y"):
        mine.run("a.jsonl", target, *SMALL)
    assert content_of(tmp_path / "x") == content_of(tmp_path / "y")


def test_files_that_change_after_all_text_was_read_are_not_in_the_dataset(tmp_path: Path) -> None:
    """The command says so, and meta.json describes the text that was read."""
    mine = Preparer(tmp_path)
    for number in range(3):
        write_json_lines(tmp_path / "texts" / f"{number}.jsonl", DOCUMENTS[number * 100 :][:100])
    mine.run("texts", "straight", *SMALL)
    killed = "import os, harness.data.preparation.command as command\n"
    killed += "command.write_splits = lambda *_: os.kill(os.getpid(), 9)"
    assert mine.result("texts", "x", *SMALL, prelude=killed).status == -signal.SIGKILL
    write_json_lines(tmp_path / "texts" / "3.jsonl", DOCUMENTS[300:400])
    assert "--restart" in mine.result("texts", "x", *SMALL).stderr
    assert content_of(tmp_path / "x") == content_of(tmp_path / "straight")


# Kills the command while it moves the dataset into its place, before the n-th rename or deletion of a folder.
STOP_AT = """
import os, sys
left = [{stop}]
def watch(event, arguments):
    path = str(arguments[0]) if arguments else ""
    if event in ("os.rename", "shutil.rmtree", "os.rmdir") and path.startswith({folder!r}):
        if os.path.basename(path) in ("dataset", "x", ".x.partial", ".x.replaced"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), 9)
sys.addaudithook(watch)
"""


def test_killed_while_it_takes_its_place(preparer: Preparer, tmp_path: Path) -> None:
    """Killed at any step of replacing a dataset, the command keeps the old or the new one; the next run cleans up."""
    mine, tokenizer = Preparer(tmp_path), ["--tokenizer", preparer.path / "tokenizer.json"]
    for name, documents in (("old", DOCUMENTS[:100]), ("new", DOCUMENTS[100:200])):
        write_json_lines(tmp_path / f"{name}.jsonl", documents)
    old, new = (content_of(mine.prepare(f"{name}.jsonl", name, *tokenizer)) for name in ("old", "new"))
    (tmp_path / "place").mkdir()
    target = (tmp_path / "datasets" / "me" / "old").rename(tmp_path / "place" / "x")
    arguments = ["new.jsonl", target, *tokenizer, "--overwrite"]
    for stop in range(10):
        done = mine.result(*arguments, prelude=STOP_AT.format(stop=stop, folder=str(target.parent)))
        if done.status == 0:
            break
        mine.run("nowhere", target, "--restart", status=2)  # restores the dataset, old or new
        assert content_of(target) in (old, new)
        mine.run(*arguments)
        assert content_of(target) == new
        assert [path.name for path in target.parent.iterdir()] == ["x"]
    assert done.status == 0, done
    assert stop > 2


def test_a_full_disk_is_one_line_and_the_work_goes_on_with_room(preparer: Preparer, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=200k") as disk:
        arguments = [preparer.path / "texts", disk / "out", *SMALL]
        line = preparer.run(*arguments, status=1)
        assert "No space left" in line
        assert str(disk) in line
        assert not (disk / "out").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        preparer.run(*arguments)
        assert len(documents_of(disk / "out", "train")) > 2900


# Memory ----------------------------------------------------------------------------------------------------------


def peaks(preparer: Preparer, *arguments: object) -> tuple[int, int]:
    """Return the peak resident set, in MiB, of the command's process and the largest peak of its workers."""
    process = preparer.start(*arguments)
    own, workers = 0, 0
    while process.poll() is None:
        own = max(own, _high_water_mark(process.pid))
        with suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            workers = max([workers, *(_high_water_mark(int(pid)) for pid in children)])
        time.sleep(0.01)
    assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    return own, workers


def _high_water_mark(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
    return 0


@pytest.mark.slow
@needs_proc
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Memory peaks for a text, for eight times the text, and for one document of 25 MiB are far below half a GiB."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [f" {word}" for word in WORDS if word.isalpha()]))
    documents = texts(3000, longest=400)
    for copies in (1, 8):
        for number in range(copies):
            write_json_lines(tmp_path / f"{copies}" / f"{number}.jsonl", documents)
    options = ["--tokenizer", "small", "--workers", 2, "--shuffle-seed", 1]
    one, eight = (peaks(preparer, f"{copies}", f"out-{copies}", *options) for copies in (1, 8))
    assert (tmp_path / "out-8" / "train.safetensors").stat().st_size > 15 * MIB
    assert eight[0] < one[0] + 40
    write_json_lines(tmp_path / "huge.jsonl", [" ".join(documents * 8), "last"])
    assert (tmp_path / "huge.jsonl").stat().st_size > 25 * MIB
    one_document = peaks(preparer, "huge.jsonl", "out-huge", *options, "--validation-fraction", "0.5")
    print(f"peaks of the command and of a worker in MiB: 1x {one}, 8x {eight}, one huge document {one_document}")
    for own, worker in (one, eight, one_document):
        assert 50 < own < 400
        assert 25 < worker < 256
