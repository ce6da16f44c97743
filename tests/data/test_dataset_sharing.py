"""Datasets made from text on the Hub and uploaded to it, with a fake Hub on this machine; --verify and --describe."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from harness.common.errors import RunError, UserError
from harness.data.dataset import Dataset
from harness.data.report import describe, verify
from tests.data.test_hub_download import Downloader
from tests.support.fake_hub import FakeFile, FakeHub
from tests.support.in_process import InProcess
from tests.support.preparing import (
    IN_ORDER,
    SMALL,
    Preparer,
    content_of,
    held_documents,
    parquet,
    splits_of,
    texts,
    tokenizer_of,
    write_json_lines,
)

DOCUMENTS = texts(300)
TOKEN = "hf_averysecrettokenindeed"


@pytest.fixture
def preparer(hub: FakeHub, tmp_path: Path) -> Preparer:
    """Preparer with a text, and a token for the Hub."""
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    return Preparer(tmp_path, {**hub.environment(tmp_path / "hf"), "HF_TOKEN": TOKEN})


@pytest.fixture
def corpus(hub: FakeHub) -> None:
    files = {
        f"sample/10BT/{number}.parquet": parquet(DOCUMENTS[number * 100 : number * 100 + 100]) for number in range(3)
    }
    hub.add_dataset("someone/web", {**files, "sample/350BT/0.parquet": parquet(["no"]), "README.md": b"# web"})


# From the Hub ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("corpus")
def test_files_of_a_hub_dataset(preparer: Preparer, hub: FakeHub) -> None:
    folder = preparer.prepare("someone/web", "web", *IN_ORDER, "--include", "sample/10BT/*")
    assert held_documents(folder) == DOCUMENTS
    source = json.loads((folder / "meta.json").read_text())["source"]
    assert source["hub"] == "someone/web"
    assert source["commit"] == hub.datasets["someone/web"].commit
    assert not hub.seen("GET", "350BT")
    assert list(preparer.path.rglob("*.parquet")), "in huggingface_hub's cache"


@pytest.mark.usefixtures("corpus")
def test_with_delete_after_the_disk_holds_one_file_at_a_time(preparer: Preparer, hub: FakeHub) -> None:
    """Each file is deleted once it has been read. Here the second file arrives damaged and is downloaded again, and the
    Hub refuses the third one. By then, the first two have been read and deleted. The same command then completes the
    dataset."""
    files = hub.datasets["someone/web"].files
    files["sample/10BT/1.parquet"].corrupt, files["sample/10BT/1.parquet"].faulty_downloads = True, 1
    files["sample/10BT/2.parquet"].resolve_status = 403
    arguments = ["someone/web", "out", *IN_ORDER, "--include", "sample/10BT/*", "--delete-after", *SMALL]
    assert "refused" in preparer.run(*arguments, status=2)
    assert not list(preparer.path.rglob("*.parquet"))
    files["sample/10BT/2.parquet"].resolve_status = None
    preparer.run(*arguments)
    assert held_documents(preparer.path / "out") == DOCUMENTS


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["someone/nothing"], 'dataset "someone/nothing": not found on the Hugging Face Hub'),
        (
            ["someone/web", "--include", "sample/1T/*"],
            "text files that match --include sample/1T/*",
        ),
        (["someone/web", "--revision", "old"], "no such revision on the Hugging Face Hub"),
    ],
)
def test_what_the_hub_does_not_have(preparer: Preparer, arguments: list[str], message: str) -> None:
    line = preparer.run(arguments[0], "out", *arguments[1:], *SMALL, status=2)
    assert message in line
    if "not found" in message:  # perhaps a path was mistyped
        assert line.startswith(f"error: {arguments[0]}: no such file or folder; tried as a dataset on the Hub: ")
    assert TOKEN not in line


# To the Hub ------------------------------------------------------------------------------------------------------


def test_a_dataset_goes_to_the_hub_and_comes_back(preparer: Preparer, hub: FakeHub) -> None:
    folder = preparer.prepare("a.jsonl", "mine", *IN_ORDER, "--push-to-hub", "me/mine")
    (folder / "private-notes.txt").write_text("stays here")
    remote = hub.datasets["me/mine"]
    assert remote.private
    expected = {name: content for name, content in content_of(folder).items() if name != "private-notes.txt"}
    card = remote.files["README.md"].content.decode()
    assert {name: file.content for name, file in remote.files.items() if name != "README.md"} == expected
    assert "| train | 297 |" in card
    assert '"dataset": "me/mine"' in card
    Downloader(hub, preparer.path / "elsewhere").succeed(name="me/mine")
    preparer.run("--verify", preparer.path / "elsewhere" / "datasets" / "me" / "mine")
    puts = len(hub.seen("PUT", "uploads"))
    preparer.run("--verify", folder, "--push-to-hub", "me/mine")
    assert len(hub.seen("PUT", "uploads")) == puts  # the Hub has every file already


def test_what_the_new_dataset_does_not_have_leaves_the_hub(preparer: Preparer, hub: FakeHub) -> None:
    """A push deletes files of the old dataset that the new one lacks, here the test split, and no others."""
    push = [*IN_ORDER, "--push-to-hub", "me/mine", "--public"]
    preparer.prepare("a.jsonl", "mine", *push, "--test-fraction", "0.1")
    remote = hub.datasets["me/mine"]
    assert not remote.private
    assert "test.safetensors" in remote.files
    remote.files["notes.txt"] = FakeFile(b"somebody's")
    folder = preparer.prepare("a.jsonl", "mine", *push, "--overwrite")
    assert set(remote.files) == {"notes.txt", "README.md", *(path.name for path in folder.iterdir())}


def test_a_refused_upload_keeps_the_dataset_and_says_how_to_go_on(preparer: Preparer, hub: FakeHub) -> None:
    hub.upload_status = 403
    line = preparer.run("a.jsonl", "datasets/me/mine", *SMALL, "--push-to-hub", "me/mine", status=2)
    assert "access refused by the Hugging Face Hub" in line
    assert "a token that may write to it" in line
    assert TOKEN not in line
    hub.upload_status = None
    preparer.run("--verify", "datasets/me/mine", "--push-to-hub", "me/mine")
    assert "train.safetensors" in hub.datasets["me/mine"].files


def test_the_remedy_of_a_failed_upload_keeps_a_new_dataset_public(preparer: Preparer, hub: FakeHub) -> None:
    stops = "import huggingface_hub\ndef fail(*arguments, **options): raise ConnectionError\n"
    stops += "huggingface_hub.HfApi.create_repo = fail\n"
    push = ["--push-to-hub", "me/mine", "--public"]
    done = preparer.result("a.jsonl", "my sets/me/mine", *SMALL, *push, prelude=stops)
    assert done.status == 2, done
    again = done.stderr.partition("prepare_datasets.py ")[2].partition(" sends what is missing")[0]
    preparer.run(*shlex.split(again))
    assert not hub.datasets["me/mine"].private


def test_an_interrupted_upload_continues_by_the_command_that_is_printed(preparer: Preparer, hub: FakeHub) -> None:
    stops = "import huggingface_hub\ndef stop(*arguments, **options): raise KeyboardInterrupt\n"
    stops += "huggingface_hub.HfApi.create_commit = stop\n"
    done = preparer.result("a.jsonl", "datasets/me/mine", *SMALL, "--push-to-hub", "me/mine", prelude=stops)
    assert done.status == 130, done
    preparer.run(*shlex.split(done.stderr.rpartition("to continue, run: uv run prepare_datasets.py ")[2]))
    assert "train.safetensors" in hub.datasets["me/mine"].files


# Describing and verifying ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    preparer = Preparer(tmp_path_factory.mktemp("made"))
    write_json_lines(preparer.path / "a.jsonl", DOCUMENTS)
    return preparer.prepare("a.jsonl", "mine", *IN_ORDER)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "mine"))


def test_the_card_says_what_is_in_it(preparer: Preparer, folder: Path) -> None:
    shown = preparer.run("--describe", folder)
    tokens = splits_of(folder)["train"]
    assert f"train: {len(tokens):,} tokens (uint16)" in shown
    assert "297 documents" in shown
    assert DOCUMENTS[0][:30].split("\t")[0] in shown
    assert max(map(len, shown.splitlines())) <= 80
    lengths = np.diff(np.flatnonzero(tokens == 0), prepend=-1)
    assert f"the longest with {lengths.max():,} tokens" in shown


@pytest.mark.parametrize("look", ["--verify", "--describe"])
def test_a_folder_without_a_dataset_says_what_is_missing(preparer: Preparer, folder: Path, look: str) -> None:
    """The line names the missing file. No tokenizer is looked for, because without meta.json it would be GPT-2's, which
    would come from the network."""
    (folder / "tokenizer.json").unlink()
    (folder / "meta.json").unlink()
    remedy = "name another folder, or make or download the dataset"
    line = preparer.run(look, folder, status=2)
    assert line == f"error: {folder}: no dataset: meta.json is missing; {remedy}"
    (folder / "meta.json").write_text("{}")
    for split in folder.glob("*.safetensors"):
        split.unlink()
    line = preparer.run(look, folder, status=2)
    assert line == f"error: {folder}: no dataset: train.safetensors is missing; {remedy}"


def change_byte(path: Path, at: int, value: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] = value
    path.write_bytes(raw)


def test_what_is_wrong_is_all_named(preparer: Preparer, folder: Path) -> None:
    change_byte(folder / "validation.safetensors", -4, 1)
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"] |= {"test": {"tokens": 5}, "train": meta["splits"]["train"] | {"documents": 298}}
    (folder / "meta.json").write_text(json.dumps(meta | {"token_dtype": "uint32"}))
    line = preparer.run("--verify", folder, status=1)
    assert "validation.safetensors: its SHA-256 is not the one in meta.json" in line
    assert "train.safetensors: 297 documents, but meta.json says 298" in line
    assert 'holds uint16, but meta.json says "uint32"' in line
    assert "test.safetensors: missing" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 99}, "vocab_size is 99, but the tokenizer has 300"),
        ({"eot_token": 17}, "eot_token is 17, but the tokenizer has 0"),
        ({"tokenizer_sha256": "0"}, "tokenizer.json: its SHA-256 is not the one in meta.json"),
        ({"splits": {"train": {}}}, "validation.safetensors: is not in meta.json"),
    ],
)
def test_a_meta_json_that_does_not_fit(folder: Path, changes: dict, message: str) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    with pytest.raises(RunError, match=message):
        verify(Dataset.at(folder))
    for names in ([], ["train", "validation"]):
        (folder / "meta.json").write_text(json.dumps(meta | {"splits": {name: {} for name in names}}))
        assert all("but meta.json has no counts of them" in line for line in verify(Dataset.at(folder))[:-1])
    change_byte(folder / "train.safetensors", -3, 255)
    with pytest.raises(RunError, match=r"token id 65\d\d\d is not in the tokenizer's vocabulary of 300"):
        verify(Dataset.at(folder))
    with pytest.raises(UserError, match=r"train.safetensors: token id 65\d\d\d .* --verify"):
        list(describe(Dataset.at(folder)))


# Training --------------------------------------------------------------------------------------------------------


def test_training_and_its_tests_work_on_it_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, test_smoke.py and test_loss.py need no network if the dataset has a tokenizer of its own.
    HF_HUB_OFFLINE is set, and TIKTOKEN_CACHE_DIR has no vocabulary."""
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    shop = InProcess(tmp_path, {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"})
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    folder = Preparer(tmp_path).prepare("a.jsonl", "mine", "--validation-fraction", "0.1")
    run = shop.add_run(model={"vocab_size": 300}, dataset="me/mine")
    assert shop.attempt().status == 0
    weights = run / "checkpoints" / "best" / "model.safetensors"
    text = shop.script("test_smoke.py", str(run / "model.json"), str(weights), "--prompt", "the quick").stdout
    assert text.startswith("the quick")
    shown = shop.script("test_loss.py", str(shop.datasets), str(run / "model.json"), str(weights)).stdout
    loss, bits = (float(line.rpartition(" ")[2]) for line in shown.splitlines()[:2])
    tokens = splits_of(folder)["validation"]
    batches = (len(tokens) - 1) // (6 * 16)  # test_loss's batch of 6 sequences, the model's context of 16
    targets = tokens[1 : 1 + batches * 6 * 16]
    length = tokenizer_of(folder).token_byte_lengths()[targets].sum()
    assert bits == pytest.approx(loss / np.log(2) * len(targets) / length, abs=0.002)
