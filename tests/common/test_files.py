"""Files and folders are either complete under their final name or not there at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from harness.common.files import atomic_file, atomic_folder, draft_prefix, replace_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "made" / "for" / "it"
    final.mkdir(parents=True)  # an empty folder gives way
    with atomic_folder(final) as draft:
        (draft / "below").mkdir()
        (draft / "below" / "file").write_text("text")
        assert draft.parent == final.parent
        assert names(final) == []
    assert (final / "below" / "file").read_text() == "text"
    assert names(final.parent) == ["it"]


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


def test_a_device_or_pipe_is_not_replaced(tmp_path: Path) -> None:
    """A device or pipe is refused as a target. As root, a rename would replace /dev/null by a file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"), atomic_file(tmp_path / "pipe") as draft:
        draft.touch()
    assert (tmp_path / "pipe").is_fifo()


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


def test_drafts_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    final = tmp_path / "a[1]"  # glob would read this name as a pattern
    for pid in (os.getpid(), 2**22 + 1):  # of an earlier process with this pid, and a pid that no process can have
        (tmp_path / f"{draft_prefix(final)}{pid}").mkdir()
    with atomic_folder(final) as draft:
        (draft / "file").touch()
    assert names(tmp_path) == ["a[1]"]


def test_a_link_in_the_place_of_a_draft_leads_nothing_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("theirs")
    (tmp_path / f"{draft_prefix(Path('x'))}{os.getpid()}").symlink_to("theirs")
    (tmp_path / f".y.{os.getpid()}").symlink_to("theirs/file")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "x"):
        pass
    replace_text(tmp_path / "y", "ours")
    assert (tmp_path / "theirs" / "file").read_text() == "theirs"
    assert (tmp_path / "y").read_text() == "ours"
    assert not (tmp_path / "y").is_symlink()


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


def test_permissions_that_cannot_be_set_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is replaced also where the file system refuses to change permissions."""

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)
    for text in ("old", "new"):
        replace_text(tmp_path / "file", text)
    assert (tmp_path / "file").read_text() == "new"


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text("{}")
    path.chmod(0o640)
    replace_text(path, "[]")
    assert path.stat().st_mode & 0o777 == 0o640
