"""Downloading a dataset: the real code in a process of its own against a Hub that misbehaves.

A process, because huggingface_hub reads HF_ENDPOINT and its like when it is imported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.fake_hub import FakeDataset, FakeHub

ROOT = Path(__file__).resolve().parents[2]
NAME = "someone/corpus"
TOKEN = "hf_averysecrettokenindeed"
MIB = 2**20
CHUNK = 10 * MIB  # what huggingface_hub holds back before it writes

# Retries without the waiting in between.
IMPATIENT = "import time; time.sleep = lambda seconds: None"
DRIVER = """
import sys
from pathlib import Path
from harness.common.errors import one_line_errors
from harness.data.hub import download_dataset
with one_line_errors():
    download_dataset(sys.argv[1], Path(sys.argv[2]))
"""


@dataclass
class Downloader:
    """Runs downloads of NAME from `hub` into a folder under `home`."""

    hub: FakeHub
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.home / "datasets" / NAME

    @property
    def partial(self) -> Path:
        return self.folder.parent / ".corpus.partial"

    def start(self, prelude: str = "") -> subprocess.Popen[str]:
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("HF_") and not key.lower().endswith("_proxy")
        }
        return subprocess.Popen(
            [sys.executable, "-c", prelude + DRIVER, NAME, str(self.folder)],
            cwd=ROOT,
            env={**inherited, **self.hub.environment(self.home / "hf"), **self.environment},
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, process: subprocess.Popen[str], status: int = 0) -> str:
        """Wait for the process, check its exit status, and return its standard error."""
        _, text = process.communicate(timeout=60)
        assert process.returncode == status, text
        return text

    def succeed(self, prelude: str = IMPATIENT) -> str:
        return self.finish(self.start(prelude))

    def fail(self, prelude: str = IMPATIENT) -> str:
        """Expect a UserError, and return its line."""
        text = self.finish(self.start(prelude), status=2)
        assert "Traceback" not in text
        line = text.splitlines()[-1]
        assert line.startswith(f'error: dataset "{NAME}": ')
        assert not self.folder.exists()
        return line

    def assert_whole(self, dataset: FakeDataset) -> None:
        """Exactly the repository's files are in the folder, and nothing is beside it."""
        found = {
            str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }
        assert found == {path: file.content for path, file in dataset.files.items() if path != ".gitattributes"}
        assert [path.name for path in self.folder.parent.iterdir()] == [self.folder.name]


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        yield hub


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


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def hold_train_file(dataset: FakeDataset) -> None:
    """Let the first download of the train file hang before its body."""
    dataset.files["train.safetensors"].delay_seconds = 60
    dataset.files["train.safetensors"].faulty_downloads = 1


def wait_until_only_train_file_is_missing(downloader: Downloader) -> None:
    small = [downloader.partial / ".cache/huggingface/download" / f"{path}.metadata" for path in SMALL_FILES]
    wait_until(lambda: all(path.exists() for path in small) and downloader.hub.seen("GET", "train.safetensors"))


SMALL_FILES = ["meta.json", "tokenizer/vocab.json"]


# Whole ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exists", [False, True], ids=["absent", "empty"])
def test_download_is_identical_and_of_one_commit(downloader: Downloader, dataset: FakeDataset, exists: bool) -> None:
    if exists:
        downloader.folder.mkdir(parents=True)
    text = downloader.succeed()
    assert text == ""  # no bars, where nobody watches
    downloader.assert_whole(dataset)
    assert all(dataset.commit in request.path for request in downloader.hub.seen("HEAD", "/resolve/"))
    assert not any("/main" in request.path for request in downloader.hub.requests)  # a push would mix versions
    assert not downloader.hub.seen("GET", ".gitattributes")


def test_file_modes_follow_the_umask(downloader: Downloader, dataset: FakeDataset) -> None:
    downloader.succeed("import os; os.umask(0o027)\n")
    assert (downloader.folder / "train.safetensors").stat().st_mode & 0o777 == 0o640
    assert downloader.folder.stat().st_mode & 0o777 == 0o750


def test_token_goes_to_the_hub_and_not_to_the_storage(downloader: Downloader, dataset: FakeDataset) -> None:
    downloader.environment["HF_TOKEN"] = TOKEN
    downloader.succeed()
    hub_requests = downloader.hub.seen("HEAD", "/resolve/") + downloader.hub.seen("GET", "/api/datasets/")
    assert hub_requests
    assert {request.authorization for request in hub_requests} == {f"Bearer {TOKEN}"}
    storage_requests = downloader.hub.seen("GET", "train.safetensors")
    assert [request.authorization for request in storage_requests] == [None]


# Interrupted ---------------------------------------------------------------------------------------------------------


def test_killed_download_resumes_with_the_remaining_files(downloader: Downloader, dataset: FakeDataset) -> None:
    hold_train_file(dataset)
    process = downloader.start()
    wait_until_only_train_file_is_missing(downloader)
    assert not downloader.folder.exists()
    process.kill()
    downloader.finish(process, status=-signal.SIGKILL)
    assert list(downloader.partial.rglob("*.incomplete")), "the kill came too late to test anything"

    downloader.succeed()
    downloader.assert_whole(dataset)
    assert [len(downloader.hub.seen("GET", path)) for path in SMALL_FILES] == [1, 1]


def test_resuming_after_a_push_takes_the_new_version_alone(downloader: Downloader, dataset: FakeDataset) -> None:
    hold_train_file(dataset)
    process = downloader.start()
    wait_until_only_train_file_is_missing(downloader)
    process.kill()
    downloader.finish(process, status=-signal.SIGKILL)

    del dataset.files["tokenizer/vocab.json"]
    dataset.files["meta.json"].content = b'{"description": "a few tokens!"}'
    downloader.succeed()
    downloader.assert_whole(dataset)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_at_once(downloader: Downloader, dataset: FakeDataset, number: signal.Signals) -> None:
    hold_train_file(dataset)
    process = downloader.start()
    wait_until_only_train_file_is_missing(downloader)
    start = time.monotonic()
    process.send_signal(number)
    text = downloader.finish(process, status=128 + number)
    assert time.monotonic() - start < 5
    assert (
        text.strip()
        == f'stopped: dataset "{NAME}": running the same command again resumes with the files still missing'
    )
    assert not downloader.folder.exists()


def test_two_processes_take_turns(downloader: Downloader, dataset: FakeDataset) -> None:
    hold_train_file(dataset)
    first = downloader.start()
    wait_until_only_train_file_is_missing(downloader)
    second = downloader.start()
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    downloader.hub.release()
    downloader.finish(first)
    downloader.finish(second)
    downloader.assert_whole(dataset)
    assert len(downloader.hub.seen("GET", "train.safetensors")) == 1


# Unreliable ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_broken_connection_recovers(downloader: Downloader, dataset: FakeDataset, reset: bool) -> None:
    train = dataset.files["train.safetensors"]
    train.content = os.urandom(CHUNK + 2 * MIB)
    train.truncate_at, train.reset, train.faulty_downloads = CHUNK + MIB, reset, 1
    downloader.succeed()
    downloader.assert_whole(dataset)
    # A closed connection is continued by huggingface_hub itself; after a reset this project tries again.
    ranges = [request.range for request in downloader.hub.seen("GET", "train.safetensors")]
    assert ranges == [None, None if reset else f"bytes={CHUNK}-"]


def test_connection_that_always_breaks(downloader: Downloader, dataset: FakeDataset) -> None:
    dataset.files["train.safetensors"].truncate_at = 1000
    line = downloader.fail()
    assert "connection" in line
    assert "running the same command again resumes" in line
    assert (downloader.partial / "meta.json").read_bytes() == dataset.files["meta.json"].content


def test_passing_server_error_recovers(downloader: Downloader, dataset: FakeDataset) -> None:
    train = dataset.files["train.safetensors"]
    train.resolve_status, train.faulty_downloads = 503, 3
    downloader.succeed()
    downloader.assert_whole(dataset)


@pytest.mark.parametrize("path", ["train.safetensors", "meta.json"])
def test_corruption_once_recovers(downloader: Downloader, dataset: FakeDataset, path: str) -> None:
    dataset.files[path].corrupt, dataset.files[path].faulty_downloads = True, 1
    text = downloader.succeed()
    assert text.startswith(f"{path}: expected SHA-")
    downloader.assert_whole(dataset)
    assert len(downloader.hub.seen("GET", path)) == 2


@pytest.mark.parametrize("path", ["train.safetensors", "meta.json"])
def test_lasting_corruption_is_refused(downloader: Downloader, dataset: FakeDataset, path: str) -> None:
    file = dataset.files[path]
    file.corrupt = True
    line = downloader.fail()
    kind = "SHA-256" if file.lfs else "SHA-1"
    assert f"{path} is not what the Hub describes" in line
    assert f"expected {kind} {file.etag}, found " in line
    assert len(downloader.hub.seen("GET", path)) == 2
    assert not (downloader.partial / path).exists()
    file.corrupt = False
    downloader.succeed()
    downloader.assert_whole(dataset)


# Refused -------------------------------------------------------------------------------------------------------------


def test_unknown_dataset(downloader: Downloader) -> None:
    line = downloader.fail()
    assert "not found on the Hugging Face Hub, or private (status 404)" in line
    assert 'check the "dataset" key in train.json' in line
    assert str(downloader.folder) in line
    assert not list(downloader.folder.parent.iterdir())


def test_a_mistyped_dataset_leaves_nothing(hub: FakeHub, tmp_path: Path) -> None:
    """The owner's folder is not left either; another dataset of that owner stays."""
    datasets = tmp_path / "datasets"
    program = (
        "import sys\nfrom pathlib import Path\nfrom harness.common.errors import one_line_errors\n"
        "from harness.data.fetch import ensure_dataset\nwith one_line_errors():\n"
        "    ensure_dataset(Path(sys.argv[1]), 'someone/corpse', ['train'])\n"
    )
    environment = {**os.environ, **hub.environment(tmp_path / "hf")}
    for kept in ([], ["someone", "someone/other"]):
        for name in kept:
            (datasets / name).mkdir(parents=True)
        done = subprocess.run(
            [sys.executable, "-c", program, str(datasets)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "not found on the Hugging Face Hub" in done.stderr
        assert [str(path.relative_to(datasets)) for path in sorted(datasets.rglob("*"))] == kept


NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}
HUB = "the Hugging Face Hub"


@pytest.mark.parametrize(
    ("changes", "environment", "messages"),
    [
        ({"status": 401}, {}, [f"not found on {HUB}, or private (status 401)"]),
        ({"status": 401, "named_errors": False}, {}, [f"access refused by {HUB} (status 401)"]),
        ({"status": 403}, {}, [f"gated on {HUB} (status 403)"]),
        ({"status": 403, "named_errors": False}, {}, [f"access refused by {HUB} (status 403)"]),
        ({"status": 429, "named_errors": False}, {}, [f"{HUB} answered with status 429"]),
        ({"status": 500, "named_errors": False}, {}, [f"{HUB} answered with status 500", "again resumes"]),
        ({"gated": True}, {}, [f"gated on {HUB} (status 401)", "set HF_TOKEN"]),
        ({"gated": True}, {"HF_TOKEN": TOKEN}, [f"gated on {HUB} (status 403)", "set HF_TOKEN"]),
        ({}, NOWHERE, [f"the connection to {HUB} failed (ConnectError: ", "check the network and HF_ENDPOINT"]),
        ({}, {"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE is set", "put the dataset's files into"]),
        ({}, {"HF_TOKEN": f"{TOKEN}\vtail"}, ["Illegal header value", "***"]),  # which no header can hold
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


def test_file_that_the_hub_cannot_give(downloader: Downloader, dataset: FakeDataset) -> None:
    dataset.files["train.safetensors"].resolve_status = 500
    line = downloader.fail()
    assert "the Hugging Face Hub answered with status 500" in line
    assert "running the same command again resumes" in line


# Disk ----------------------------------------------------------------------------------------------------------------


def test_too_little_space_is_said_beforehand(downloader: Downloader, dataset: FakeDataset) -> None:
    little = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10, 10, 1000)\n"
    line = downloader.fail(little)
    assert "0.00 GiB to download, but only 0.00 GiB free" in line
    assert not downloader.hub.seen("HEAD", "/resolve/")


def test_disk_that_fills_up(downloader: Downloader, dataset: FakeDataset) -> None:
    full = (
        "import errno, os, huggingface_hub.file_download as library\n"
        "def http_get(*args, **kwargs):\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "library.http_get = http_get\n"
    )
    line = downloader.fail(full)
    assert "no space left" in line
    assert "running the same command again resumes" in line


def test_folder_that_cannot_be_made(downloader: Downloader, dataset: FakeDataset) -> None:
    downloader.folder.parent.parent.mkdir(parents=True)
    downloader.folder.parent.write_text("a file where a directory should be")
    text = downloader.finish(downloader.start(), status=2)
    assert text.startswith(f'error: dataset "{NAME}": {downloader.folder.parent}')
