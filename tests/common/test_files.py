"""Files and folders are either complete under their final name or not there at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.common.files import atomic_file, atomic_folder, draft_folder, rename_whole, replace_text
from tests.support.isolation import ROOT

# Writes a file into the draft of a folder and then sleeps, so that the folder is never completed.
WRITER = """
import sys, time
from pathlib import Path
from harness.common.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as draft:
    (draft / "part").write_text("half")
    time.sleep(600)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start_writer(final: Path) -> subprocess.Popen[bytes]:
    """Start WRITER for the folder `final`, and return its process once it has written into its draft."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(final)], cwd=ROOT)
    while not (final.with_name(f".{final.name}.partial-{process.pid}") / "part").exists():
        assert process.poll() is None
        time.sleep(0.005)
    return process


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "made" / "for" / "it"
    with atomic_folder(final) as draft:
        (draft / "below").mkdir()
        (draft / "below" / "file").write_text("text")
        assert draft.parent == final.parent
        assert not final.exists()
    assert (final / "below" / "file").read_text() == "text"
    assert names(final.parent) == ["it"]


def test_an_empty_folder_gives_way(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with atomic_folder(tmp_path / "x") as draft:
        (draft / "file").touch()
    assert names(tmp_path / "x") == ["file"]


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_an_existing_folder_file_or_link_is_not_replaced(tmp_path: Path, there: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    final = tmp_path / "x"
    if there == "folder":
        (tmp_path / "theirs").rename(final)
    elif there == "file":
        final.write_text("theirs")
    else:
        final.symlink_to("theirs")
    before = names(tmp_path)
    with pytest.raises(OSError, match="x"), atomic_folder(final) as draft:
        (draft / "file").write_text("ours")
    assert names(tmp_path) == before
    assert (final if there == "file" else final / "file").read_text() == "theirs"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_body_that_fails_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fill_folder() -> None:
        with atomic_folder(tmp_path / "x") as draft:
            (draft / "file").touch()
            raise error

    def write_file() -> None:
        with atomic_file(tmp_path / "y") as draft:
            draft.touch()
            raise error

    for failing in (fill_folder, write_file):
        with pytest.raises(error):
            failing()
        assert names(tmp_path) == []


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    final = tmp_path / "a[1]"  # glob would read this name as a pattern
    process = start_writer(final)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert names(tmp_path) == [f".a[1].partial-{process.pid}"]
    with atomic_folder(final) as draft:
        (draft / "file").touch()
    assert names(tmp_path) == ["a[1]"]


def test_the_draft_of_a_writer_that_lives_is_left_to_it(tmp_path: Path) -> None:
    final = tmp_path / "x"
    process = start_writer(final)
    try:
        with atomic_folder(final) as draft:
            (draft / "file").touch()
        assert names(tmp_path) == [f".x.partial-{process.pid}", "x"]
    finally:
        process.kill()
        process.wait()


def test_a_link_in_the_place_of_a_draft_leads_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    for name in ("x.partial-", "y."):
        (tmp_path / f".{name}{os.getpid()}").symlink_to("theirs" if name == "x.partial-" else "theirs/file")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "x"):
        pass
    replace_text(tmp_path / "y", "ours")
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"
    assert (tmp_path / "y").read_text() == "ours"
    assert not (tmp_path / "y").is_symlink()


def test_a_name_may_be_chosen_when_all_is_written(tmp_path: Path) -> None:
    with draft_folder(tmp_path / ".draft") as draft:
        (draft / "7").touch()
        final = rename_whole(draft, lambda: tmp_path / f"has-{names(draft)[0]}")
    assert final == tmp_path / "has-7"
    assert names(tmp_path) == ["has-7"]


def test_text_is_replaced_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    replace_text(tmp_path / "link", "naïve\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == "naïve\n".encode()
    assert names(tmp_path) == ["link", "real"]


def test_a_file_that_cannot_take_its_name_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path / "x") as draft:
        draft.write_text("ours")
    assert names(tmp_path) == ["x"]
