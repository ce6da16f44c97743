"""Links and paths that lead out of a folder, code in pickles, secrets in the environment, and the ranks' sockets.

Whatever paths a checkpoint, an unfinished download or a list of files from somebody else contains, nothing outside is
written or deleted. No code in a checkpoint runs. Secrets are written nowhere, and ranks listen on this machine alone.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import harness.data.preparation.builtin
from harness.common.files import draft_prefix
from harness.runs import checkpoints
from tests.support.fake_hub import CORPUS, FakeHub, corpus
from tests.support.file_operations import small_disk
from tests.support.hostile import Bench, is_one_line, tree, vouch_for
from tests.support.in_process import InProcess
from tests.support.launch import PATIENCE_SECONDS, Workshop, finish, metrics, wait_until
from tests.support.torchrun import Torchrun


@pytest.fixture
def bench(finished_shop: Workshop, tmp_path: Path) -> Bench:
    return Bench.copy_of(finished_shop, tmp_path / "copy")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Folder of somebody else, with files, a folder, and files that look like a checkpoint and a dataset."""
    folder = tmp_path / "outside"
    for name in ("file", "folder/file", "20200101Z000000-iteration-0/meta.json", "train.safetensors", "meta.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"somebody's {name}")
    return folder


# Code in checkpoints


class Payload:
    """Object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.fault("code pickled into a checkpoint, in three forms", "never executed; refused with the file's name")
def test_code_in_checkpoints(bench: Bench, tmp_path: Path, exhaustive: bool) -> None:
    """Code in a checkpoint is not executed, although the checkpoint's hashes are right. Its sender can write hashes,
    too."""
    mark = tmp_path / "executed"
    payloads = [
        Payload(os.system, f"touch {mark}"),
        Payload(builtins.exec, f"open({str(mark)!r}, 'w')"),
        Payload(builtins.eval, f"__import__('pathlib').Path({str(mark)!r}).touch()"),
        Payload(Path.touch, mark),
        Payload(subprocess.check_call, ["touch", str(mark)]),
    ]
    forms = ("torch", "torch, old", "pickle")
    cases = list(itertools.product(("optimizer.pt", "scaler.pt", "train_state.pt"), payloads, forms))
    for name, payload, form in cases if exhaustive else cases[::7]:  # these have every file and every form
        latest = bench.reset()
        content = {"state": payload}
        with (latest / name).open("wb") as file:
            if form == "pickle":
                pickle.dump(content, file)
            else:
                torch.save(content, file, _use_new_zipfile_serialization=form == "torch")
        with contextlib.suppress(Exception):  # the payload is ours, and must run here to show that it is one
            torch.load(latest / name, weights_only=False)
        assert mark.exists(), "the code would run if pickles were trusted"
        mark.unlink()
        vouch_for(latest, name)
        bench.refuses(words=[name])
        assert not mark.exists()
    for payload in payloads if exhaustive else payloads[::4]:  # in the place of the weights
        latest = bench.reset()
        (latest / "model.safetensors").write_bytes(pickle.dumps(payload))
        vouch_for(latest, "model.safetensors")
        arguments = [str(bench.shop.runs / "r" / "model.json"), str(latest / "model.safetensors")]
        for result in (bench.shop.attempt(), bench.shop.command("test_smoke.py", *arguments)):
            assert is_one_line(result, "model.safetensors", "not a readable safetensors file")
        assert not mark.exists()


# Links


LEADING_OUT: dict[str, list[str]] = {  # the path that becomes a link, and the run and checkpoint of the command
    "runs/linked": ["linked"],
    "runs/r/checkpoints/20200101Z000000-iteration-3": ["r", "20200101Z000000-iteration-3"],
    "runs/r/checkpoints/latest": ["r"],
    "runs/r/checkpoints/best": ["r", "best"],
    "runs/r/checkpoints/latest/optimizer.pt": ["r"],
    "runs/r/checkpoints/latest/meta.json": ["r"],
    "datasets/local/letters": ["r"],
}


@pytest.mark.parametrize(("place", "asked"), LEADING_OUT.items(), ids=LEADING_OUT)
@pytest.mark.fault("links that lead out of their folder", "refused, also if they lead to a valid copy; nothing changed")
def test_names_stay_in_their_folders(bench: Bench, outside: Path, place: str, asked: list[str]) -> None:
    """A link that leads out of its folder is refused, even if it leads to a valid copy of the file or folder in its
    place. In the place of a run or checkpoint that does not exist, the copy is one of another run or checkpoint."""
    latest = bench.reset()
    link = (bench.shop.path / place).parent.resolve() / Path(place).name
    like = link if os.path.lexists(link) else latest if "iteration" in place else bench.shop.runs / "r"
    stranger = outside / link.name
    shutil.copytree(like, stranger, symlinks=True) if like.is_dir() else shutil.copy(like, stranger)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    else:
        link.unlink(missing_ok=True)
    link.symlink_to(stranger)
    bench.refuses(*asked[1:], run=asked[0], words=[link.name, "leads out of"], also=outside)


@pytest.mark.fault("a link to a folder above, given as CHECKPOINT", "refused; nothing changed")
@pytest.mark.fault("a link in the lock's place", "refused; the file it leads to is as it was")
def test_links_with_other_names(bench: Bench, outside: Path) -> None:
    folder = bench.reset().parent
    for name, target in (("higher", "../.."), ("above", ".."), ("here", ".")):
        (folder / name).symlink_to(target)
        bench.refuses(name, words=[f"checkpoints/{name}", "leads out of"])
    lock = bench.shop.runs / "r" / ".lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(outside / "file")
    bench.refuses(words=[".lock"], also=outside, status=1)


@pytest.mark.fault("links among files that are deleted", "the links are deleted; the folder outside is as it was")
@pytest.mark.fault("a link in the place of a temporary file", "the link is replaced; the file it leads to is as it was")
def test_nothing_outside_is_changed(bench: Bench, outside: Path, tmp_path: Path) -> None:
    """Leftovers of saves and old checkpoints are deleted, but not what the links in them lead to. A link in the place
    of a temporary file is replaced, not followed. Temporary files have names that are easy to guess, because they
    contain the process's pid."""
    folder, shop, pid = bench.reset().parent, bench.shop, os.getpid()
    for name in (".saving-1", ".saving-latest-1", ".saving-pruned-x", "20200101Z000000-iteration-1"):
        (folder / name).symlink_to(outside)
    (folder / ".saving-2").mkdir()
    (folder / ".saving-2" / "inner").symlink_to(outside / "folder")
    old = checkpoints.list_checkpoints(folder)[0][1]
    (old / "notes").symlink_to(outside)
    (shop.runs / "r" / "aside").symlink_to(tmp_path / "larger-disk")
    (tmp_path / "larger-disk").mkdir()
    shutil.rmtree(shop.datasets / ".scans")
    drafts = [folder / f".saving-{what}{pid}" for what in ("", "latest-", "best-")]
    drafts += [shop.datasets / ".scans" / f".local--letters--{name}.json.{pid}" for name in ("train", "validation")]
    for draft in (shop.runs / "r" / f".summary.json.{pid}", *drafts):
        draft.parent.mkdir(exist_ok=True)
        draft.symlink_to(outside / "file")
    before = tree(outside)
    shop.add_run(precision="fp16", min_train_tokens=1280, keep_checkpoints=1)
    assert shop.attempt().status == 0
    assert not list(folder.glob(".saving-*"))
    assert not old.exists()
    (folder / f".saving-{pid}").mkdir()  # left by an earlier process that had the same pid
    (folder / f".saving-{pid}" / "model.safetensors").write_bytes(b"half")
    assert shop.attempt("--restart").status == 0
    assert tree(outside) == before
    assert (shop.runs / "r" / "summary.json").is_file()
    assert not list(folder.glob(".saving-*"))


@pytest.mark.fault("folders on another disk, by links", "training, continuing and restarting work; the links stay")
@pytest.mark.parametrize("is_mounted", [False, True])
def test_links_of_the_users_own(tmp_path: Path, is_mounted: bool, exhaustive: bool) -> None:
    """Training works if a whole folder, such as datasets/ or a run's checkpoints/, is a link to a larger disk, because
    such a link is the user's own. Links in somebody else's files must not lead out of their folder. Neither must names
    that are typed or read from a file."""
    places = ["runs/r/checkpoints", "datasets", "runs", "runs/r/aside"]
    for number, place in enumerate(places if exhaustive else places[:2]):
        shop, disk = InProcess(tmp_path / f"shop{number}"), tmp_path / f"disk{number}"
        shop.add_dataset()
        shop.add_run()
        with small_disk(disk, "size=16m") if is_mounted else contextlib.nullcontext():
            (disk / "moved").mkdir(parents=True)
            if (shop.path / place).exists():
                shutil.copytree(shop.path / place, disk / "moved", dirs_exist_ok=True)
                shutil.rmtree(shop.path / place)
            (shop.path / place).symlink_to(disk / "moved")
            for arguments, tokens in (([], 128), ([], 192), (["--restart"], 192)):
                run = shop.add_run(min_train_tokens=tokens, validation_interval=2)
                result = shop.attempt(*arguments)
                assert (result.status, result.stderr) == (0, ""), result
            assert metrics(run)[-1]["tokens_seen"] == 192
            assert (run / "checkpoints" / "latest" / "model.safetensors").is_file()
            assert (shop.path / place).is_symlink(), place
            assert any((disk / "moved").iterdir()), place


# Datasets


@pytest.fixture
def customer(hub: FakeHub, tmp_path: Path) -> Workshop:
    """A run whose dataset has to be downloaded."""
    shop = Workshop(tmp_path / "shop", hub.environment(tmp_path / "hf"))
    shop.add_run(dataset=CORPUS, min_train_tokens=64)
    return shop


@pytest.mark.fault("links in an unfinished download", "removed or refused; nothing outside is written or deleted")
def test_links_in_partial_downloads(customer: Workshop, hub: FakeHub, outside: Path) -> None:
    hub.add_dataset(CORPUS, corpus() | {"folder/more.json": b"{}"})
    before = tree(outside)
    partial = customer.datasets / "someone" / ".corpus.partial"
    partial.mkdir(parents=True)
    for name, target in (
        ("train.safetensors", "train.safetensors"),  # a file of the dataset, with other content
        ("meta.json", "meta.json"),
        ("old.json", "file"),
        ("folder", "folder"),  # the download would write into this folder
        (".cache", "folder"),
        ("x.incomplete", "file"),
    ):
        (partial / name).symlink_to(outside / target)
    result = customer.attempt()
    assert result.status == 0, result
    assert "Downloading" in result.stdout
    assert tree(outside) == before
    assert not [path for path in (customer.datasets / CORPUS).rglob("*") if path.is_symlink()]
    shutil.rmtree(customer.datasets)
    partial.parent.mkdir(parents=True)
    partial.symlink_to(outside)
    assert is_one_line(customer.attempt("--restart"), ".corpus.partial", "is a link")
    assert tree(outside) == before


@pytest.mark.fault("a hub that lists files outside the dataset's folder", "refused before anything is downloaded")
def test_paths_from_the_hub(customer: Workshop, hub: FakeHub, outside: Path, exhaustive: bool) -> None:
    """Paths that lead out of the dataset's folder are refused. An endpoint other than the Hub itself could list such a
    path to have a file written there. With a wrong hash it could have an existing file deleted."""
    before = tree(outside)
    above = "../../../../outside/file"
    paths = [above, str(outside / "file"), f"a/../{above}", "./train.json", "a//b.json"]
    for path in paths if exhaustive else paths[:2]:
        hub.datasets.clear()
        dataset = hub.add_dataset(CORPUS, corpus() | {path: b"theirs"})
        dataset.files[path].corrupt = True
        assert is_one_line(customer.attempt(), CORPUS, "leads out of the dataset's folder"), path
        assert tree(outside) == before, path
        assert not any(file.downloads for file in dataset.files.values()), path
        assert not (customer.datasets / CORPUS).exists()


@pytest.mark.fault("links in an unfinished build", "the dataset is built; nothing outside is deleted")
def test_links_in_builds(tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links in leftovers of builds of builtin/python-stdlib are not followed when the leftovers are deleted. The pids
    in the leftovers' names belong to no process."""
    before = tree(outside)
    folder = tmp_path / "datasets" / "builtin" / "python-stdlib"
    folder.parent.mkdir(parents=True)
    numbers = ["4194305", "9" * 30, "²", "-1"]
    for number in numbers:
        leftover = folder.with_name(draft_prefix(folder) + number)
        leftover.mkdir()
        (leftover / "folder").symlink_to(outside / "folder")
    folder.with_name(f"{draft_prefix(folder)}4194306").symlink_to(outside)
    texts = {f"{number}.py": f"print({number})\n" * 9 for number in range(40)}
    monkeypatch.setattr(harness.data.preparation.builtin, "standard_library", lambda: texts)
    harness.data.preparation.builtin.build_python_stdlib(folder, vocab_size=257)
    assert (folder / "train.safetensors").is_file()
    assert tree(outside) == before


# What must stay here

SECRETS = {"HF_TOKEN": "hf_sentinelToken0123456789", "OPENAI_API_KEY": "sk-sentinelKey9876543210"}


@pytest.mark.fault("HF_TOKEN and OPENAI_API_KEY in the environment", "written to no output and to no file")
def test_secrets_stay_in_the_environment(bench: Bench, tmp_path: Path) -> None:
    """No file and no line of output has the Hub's token or the API key, even when the Hub is asked with its token."""
    shop = bench.shop
    forked = Workshop(shop.path, dict(SECRETS))
    weights = shop.runs / "r" / "checkpoints" / "latest" / "model.safetensors"
    evaluated = [str(shop.runs / "r" / "model.json"), str(weights), "--dataset", "local/letters"]
    results = [forked.attempt("--plan"), forked.attempt(), forked.attempt("nowhere")]
    results += [forked.command("test_loss.py", str(shop.datasets), *evaluated)]
    with FakeHub() as hub:
        forked.environment |= hub.environment(tmp_path / "hf") | SECRETS
        hub.add_dataset("someone/private", {"meta.json": b"{}"})
        for name in ("private", "missing"):
            shop.add_run(name, dataset=f"someone/{name}")
            results += [forked.attempt(run=name)]
    assert [each.status for each in results] == [0, 0, 2, 0, 2, 2], results
    said = [each.stdout + each.stderr for each in results]
    files = [path for path in shop.path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for secret in SECRETS.values():
        assert not [text for text in said if secret in text]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.fault("a hostile network", "the ranks of a single machine listen on its loopback interface alone")
def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    """Ranks listen on the loopback interface alone. Under the real torchrun the store is torch's own, and with
    --processes rank 0 keeps it."""
    import psutil  # type: ignore[import-untyped]

    shop = Workshop(tmp_path)
    shop.add_dataset()
    for by_processes in (False, True):
        run = shop.add_run(f"processes-{by_processes}")
        mark, go = tmp_path / f"{run.name}.mark", tmp_path / f"{run.name}.go"
        job = Torchrun(shop, run, are_forked=True, by_processes=by_processes)
        process = job.start(f"before(STEP, note({str(mark)!r}, until({str(go)!r})), rank=0, step=1)")
        try:
            wait_until(mark.exists, process)
            ranks = psutil.Process(process.pid).children()
            assert len(ranks) == 2
            sockets = [each for rank in ranks for each in rank.net_connections("inet")]
            heard = [each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN]
        finally:
            process.terminate()
            go.touch()
            stopped = finish([process], expect=None, timeout=PATIENCE_SECONDS)
        assert heard, stopped
        assert all(each.removeprefix("::ffff:").startswith("127.") or each == "::1" for each in heard), heard
