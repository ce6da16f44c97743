"""Downloading a dataset: the real code, against a Hub that misbehaves.

Downloads that are killed or stopped are processes of their own; the others run in the test's process.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from harness.common.errors import UserError
from harness.data.fetch import check_obtainable, ensure_dataset
from harness.data.preparation.work import WorkFolder
from tests.support.fake_hub import FakeDataset, FakeHub, hub_here
from tests.support.launch import finish, wait_until
from tests.support.warm import WarmProcess, warm_server

NAME = "someone/corpus"
TOKEN = "hf_averysecrettokenindeed"
MIB = 2**20
CHUNK = 10 * MIB  # huggingface_hub writes a file in chunks of this size
DRIVER = """
import sys
from pathlib import Path
from harness.common.errors import one_line_errors
from harness.data.fetch import ensure_dataset
with one_line_errors():
    ensure_dataset(Path(sys.argv[2]), sys.argv[1], ["train"])
"""


@dataclass
class Downloader:
    """Downloads of NAME from `hub` into a datasets folder under `home`."""

    hub: FakeHub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.datasets = self.home / "datasets"
        self.folder = self.datasets / NAME
        self.partial = self.folder.parent / ".corpus.partial"

    def start(self, prelude: str = "") -> WarmProcess:
        self.home.mkdir(exist_ok=True)
        driver = self.home / "driver.py"
        driver.write_text(DRIVER)
        environment = {**os.environ, **self.hub.environment(self.home / "hf"), **self.environment}
        return warm_server().spawn([str(driver), NAME, str(self.datasets)], self.home, environment, prelude)

    def here(self, name: str) -> tuple[str, UserError | None]:
        """Download in the test's own process, without pauses before retries. Return what was printed on standard error,
        and the error."""
        environment = {**self.hub.environment(self.home / "hf"), **self.environment}
        errors = io.StringIO()
        with hub_here(environment), mock.patch("time.sleep"), redirect_stderr(errors):
            try:
                ensure_dataset(self.datasets, name, ["train"])
            except UserError as error:
                return errors.getvalue(), error
        return errors.getvalue(), None

    def succeed(self, name: str = NAME) -> str:
        text, error = self.here(name)
        assert error is None
        return text

    def fail(self, name: str = NAME) -> str:
        """Expect a UserError, and return its line."""
        line = str(self.here(name)[1])
        assert re.fullmatch(rf'dataset "{name}": .*', line)
        assert not self.folder.exists()
        return line

    def assert_whole(self, dataset: FakeDataset) -> None:
        """Check that the folder has exactly the repository's files and that nothing else was left beside the folder."""
        found = {
            str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }
        assert found == {path: file.content for path, file in dataset.files.items() if path != ".gitattributes"}
        assert [path.name for path in self.folder.parent.iterdir()] == [self.folder.name]

    def start_and_hold(self, dataset: FakeDataset) -> WarmProcess:
        """Start a download whose train file hangs before its body, and wait until all other files have arrived."""
        dataset.files["train.safetensors"].delay_seconds = 60
        dataset.files["train.safetensors"].faulty_downloads = 1
        process = self.start()
        small = [self.partial / ".cache/huggingface/download" / f"{path}.metadata" for path in SMALL_FILES]
        wait_until(lambda: all(path.exists() for path in small) and self.hub.seen("GET", "train.safetensors"))
        assert not self.folder.exists()
        return process


SMALL_FILES = ["meta.json", "tokenizer/vocab.json"]


@pytest.fixture
def dataset(hub: FakeHub) -> FakeDataset:
    contents = {
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "meta.json": b'{"description": "a few tokens"}',
        "train.safetensors": os.urandom(300_000),
        "tokenizer/vocab.json": b"{}",
    }
    return hub.add_dataset(NAME, contents)


@pytest.fixture
def downloader(hub: FakeHub, tmp_path: Path) -> Downloader:
    return Downloader(hub, tmp_path)


# Whole ---------------------------------------------------------------------------------------------------------------


def test_download_is_identical_and_of_one_commit(downloader: Downloader, dataset: FakeDataset) -> None:
    """A download has exactly the repository's files, all of one commit. An empty folder is no obstacle, and files have
    the umask's permissions. The storage to which the Hub redirects never receives the token."""
    downloader.folder.mkdir(parents=True)
    downloader.environment["HF_TOKEN"] = TOKEN
    text = finish([downloader.start("import os; os.umask(0o027)")], expect=0, timeout=60).stderr
    assert text == ""  # no progress bars without a terminal
    downloader.assert_whole(dataset)
    assert (downloader.folder / "train.safetensors").stat().st_mode & 0o777 == 0o640
    assert downloader.folder.stat().st_mode & 0o777 == 0o750
    hub = downloader.hub
    assert all(dataset.commit in request.path for request in hub.seen("HEAD", "/resolve/"))
    assert not any("/main" in request.path for request in hub.requests)  # "main" could move meanwhile
    assert not hub.seen("GET", ".gitattributes")
    to_the_hub = hub.seen("HEAD", "/resolve/") + hub.seen("GET", "/api/datasets/")
    assert {request.authorization for request in to_the_hub} == {f"Bearer {TOKEN}"}
    assert [request.authorization for request in hub.seen("GET", "train.safetensors")] == [None]


def test_a_repository_without_the_split_is_refused_before_a_download(
    downloader: Downloader, dataset: FakeDataset
) -> None:
    """A repository of text has no train.safetensors. A plan says so, too."""
    dataset.files["train.parquet"] = dataset.files.pop("train.safetensors")
    said = f'dataset "{NAME}": has no train.safetensors on the Hugging Face Hub; if it has text, make a dataset of it'
    assert downloader.fail().startswith(said)
    assert not downloader.hub.seen("GET", "/resolve/")
    assert not downloader.partial.exists()
    with hub_here(downloader.hub.environment(downloader.home / "hf")):
        for splits in (["train"], []):
            with pytest.raises(UserError, match=re.escape(said)):
                check_obtainable(downloader.datasets, NAME, splits, ask_hub=True)


def test_the_work_of_a_preparation_is_not_deleted(downloader: Downloader, dataset: FakeDataset) -> None:
    """prepare_datasets.py makes, or has begun to make, a dataset whose name the Hub has, too."""
    work = WorkFolder(downloader.folder)
    work.open()
    (work.path / "text.tokens").write_bytes(b"hours of work")
    before = {path: path.read_bytes() for path in work.path.iterdir()}
    refused = f"{work.path}: unfinished work of prepare_datasets.py"
    assert str(downloader.here(NAME)[1]).startswith(refused)
    assert {path: path.read_bytes() for path in work.path.iterdir()} == before
    assert not downloader.folder.exists()
    with hub_here(downloader.hub.environment(downloader.home / "hf")), pytest.raises(UserError, match=refused):
        check_obtainable(downloader.datasets, NAME, ["train"], ask_hub=True)


# Interrupted ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pushed", [False, True], ids=["same", "pushed"])
def test_killed_download_resumes_with_the_remaining_files(
    downloader: Downloader, dataset: FakeDataset, is_pushed: bool
) -> None:
    """A killed download is resumed without a second download of complete files. If the repository has changed
    meanwhile, the folder has only files of the new version."""
    process = downloader.start_and_hold(dataset)
    process.kill()
    finish([process], expect=-signal.SIGKILL, timeout=60)
    assert list(downloader.partial.rglob("*.incomplete")), "the kill came too late to test anything"
    if is_pushed:
        del dataset.files["tokenizer/vocab.json"]
        dataset.files["meta.json"].content = b'{"description": "a few tokens!"}'
    downloader.succeed()
    downloader.assert_whole(dataset)
    assert [len(downloader.hub.seen("GET", path)) for path in SMALL_FILES] == ([2, 1] if is_pushed else [1, 1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_at_once(downloader: Downloader, dataset: FakeDataset, number: signal.Signals) -> None:
    process = downloader.start_and_hold(dataset)
    start = time.monotonic()
    process.send_signal(number)
    text = finish([process], expect=128 + number, timeout=60).stderr
    assert time.monotonic() - start < 5
    again = "running the same command again resumes the download of the missing files"
    assert text.strip() == f'stopped: dataset "{NAME}": {again}'
    assert not downloader.folder.exists()


def test_two_processes_take_turns(downloader: Downloader, dataset: FakeDataset) -> None:
    first = downloader.start_and_hold(dataset)
    second = downloader.start()
    wait_until(lambda: "waiting" in second.read(".err"))
    downloader.hub.released.set()
    for process in (first, second):
        finish([process], expect=0, timeout=60)
    downloader.assert_whole(dataset)
    assert len(downloader.hub.seen("GET", "train.safetensors")) == 1


# Unreliable ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "ranges"),
    [
        ({"truncate_at": CHUNK + MIB}, [None, f"bytes={CHUNK}-"]),  # huggingface_hub itself resumes
        ({"truncate_at": CHUNK + MIB, "reset": True}, [None, None]),  # this project downloads the file again
        ({"resolve_status": 503, "faulty_downloads": 3}, [None]),
    ],
    ids=["closed", "reset", "status"],
)
def test_a_passing_failure_is_overcome(downloader: Downloader, dataset: FakeDataset, fault: dict, ranges: list) -> None:
    train = dataset.files["train.safetensors"]
    train.content = os.urandom(CHUNK + 2 * MIB)
    vars(train).update({"faulty_downloads": 1} | fault)
    downloader.succeed()
    downloader.assert_whole(dataset)
    assert [request.range for request in downloader.hub.seen("GET", "train.safetensors")] == ranges


@pytest.mark.parametrize("path", ["train.safetensors", "meta.json"])
def test_corruption_once_recovers_and_lasting_corruption_is_refused(
    downloader: Downloader, dataset: FakeDataset, path: str
) -> None:
    file = dataset.files[path]
    file.corrupt = True
    line = downloader.fail()
    kind = "SHA-256" if file.lfs else "SHA-1"
    assert f"{path} differs from the Hub's description" in line
    assert f"expected {kind} {file.etag}, found " in line
    assert len(downloader.hub.seen("GET", path)) == 2
    assert not (downloader.partial / path).exists()
    file.faulty_downloads = file.downloads + 1
    text = downloader.succeed()
    assert text.splitlines()[-1].startswith(f"{path}: expected SHA-")
    downloader.assert_whole(dataset)
    assert len(downloader.hub.seen("GET", path)) == 4


# Refused -------------------------------------------------------------------------------------------------------------


def test_a_mistyped_dataset_leaves_nothing(downloader: Downloader) -> None:
    """If a dataset is not on the Hub, no folder is left behind. The folder of its owner remains only if it holds
    another dataset."""
    for kept in ([], ["someone", "someone/other"]):
        for name in kept:
            (downloader.datasets / name).mkdir(parents=True)
        line = downloader.fail(name="someone/corpse")
        assert "not found on the Hugging Face Hub, or private (status 404)" in line
        assert 'check the "dataset" key in train.json' in line
        assert str(downloader.datasets / "someone/corpse") in line
        assert [str(path.relative_to(downloader.datasets)) for path in sorted(downloader.datasets.rglob("*"))] == kept


NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
HUB = "the Hugging Face Hub"
AGAIN = "running the same command again resumes"


@pytest.mark.parametrize(
    ("changes", "environment", "messages"),
    [
        ({"status": 401}, {}, [f"not found on {HUB}, or private (status 401)"]),
        ({"status": 401, "named_errors": False}, {}, [f"access refused by {HUB} (status 401)"]),
        ({"status": 403}, {}, [f"gated on {HUB} (status 403)"]),
        ({"status": 403, "named_errors": False}, {}, [f"access refused by {HUB} (status 403)"]),
        ({"status": 429, "named_errors": False}, {}, [f"{HUB} answered with status 429"]),
        ({"status": 500, "named_errors": False}, {}, [f"{HUB} answered with status 500", AGAIN]),
        ({"gated": True}, {}, [f"gated on {HUB} (status 401)", "set HF_TOKEN"]),
        ({"gated": True}, {"HF_TOKEN": TOKEN}, [f"gated on {HUB} (status 403)", "set HF_TOKEN"]),
        ({}, NOWHERE, [f"the connection to {HUB} failed (ConnectError: ", "check the network and HF_ENDPOINT"]),
        ({}, {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE is set", "put the dataset's files into"]),
        ({}, {"HF_TOKEN": f"{TOKEN}\vtail"}, ["Illegal header value", "***"]),  # no header can hold this token
    ],
)
def test_hub_that_refuses(
    downloader: Downloader, dataset: FakeDataset, changes: dict, environment: dict, messages: list[str]
) -> None:
    for name, value in changes.items():
        setattr(dataset, name, value)
    downloader.environment |= environment
    line = downloader.fail()
    assert all(message in line for message in messages), line
    assert TOKEN not in line
    if "status" in changes:
        assert len(downloader.hub.seen("GET", "/api/datasets/")) == (2 if changes["status"] == 500 else 1)
    if "HF_HUB_OFFLINE" in environment:
        assert not downloader.hub.requests


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"resolve_status": 500}, f"{HUB} answered with status 500"), ({"truncate_at": 1000}, "connection")],
    ids=["status", "connection"],
)
def test_a_file_that_does_not_come(downloader: Downloader, dataset: FakeDataset, fault: dict, message: str) -> None:
    vars(dataset.files["train.safetensors"]).update(fault)
    line = downloader.fail()
    assert message in line
    assert AGAIN in line
    if "truncate_at" in fault:
        assert (downloader.partial / "meta.json").read_bytes() == dataset.files["meta.json"].content


@pytest.mark.usefixtures("dataset")
def test_a_disk_without_room(downloader: Downloader) -> None:
    """A disk that is too small is refused before the first file, and one that is full stops the download."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("shutil.disk_usage", return_value=SimpleNamespace(free=1000)):
        assert "0.00 GiB to download, but only 0.00 GiB free" in downloader.fail()
    assert not downloader.hub.seen("HEAD", "/resolve/")
    with mock.patch("huggingface_hub.file_download.http_get", side_effect=full):
        line = downloader.fail()
    assert "no space left" in line
    assert AGAIN in line
