"""Files and answers of others, and data that must stay here"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.common.files import sha256
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, write_meta
from tests.commands.test_bad_input import refused
from tests.support.fake_hub import FakeHub
from tests.support.file_operations import WITHOUT_CHARTS
from tests.support.hostile import tree
from tests.support.launch import PATIENCE_SECONDS, ROOT, Result, Workshop, finish

SECRETS = {"HF_TOKEN": "hf_sentinelToken0123456789", "OPENAI_API_KEY": "sk-sentinelKey9876543210"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A run in fp16, so that there is a scaler's file too, that has steps left."""
    shop = Workshop(tmp_path_factory.mktemp("security"))
    shop.add_dataset(tokens=20_000)
    settings: dict[str, Any] = {"precision": "fp16", "min_train_tokens": 1280}
    shop.add_run(**settings)
    shop.train(prelude=WITHOUT_CHARTS)
    shop.add_run(**settings | {"min_train_tokens": 2560})
    return shop


@pytest.fixture
def shop(trained: Workshop, tmp_path: Path) -> Workshop:
    return Workshop(Path(shutil.copytree(trained.path, tmp_path / "shop", symlinks=True)))


class Payload:
    """A pickle that runs code when it is loaded by pickle's own rules."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what


@pytest.mark.fault("a state file that runs code", "refused with the file's name; nothing was executed")
def test_pickles_never_execute(shop: Workshop, tmp_path: Path) -> None:
    """A hostile checkpoint has right hashes: its sender can write a meta.json, too."""
    mark, folder = tmp_path / "executed", shop.runs / "r" / "checkpoints"
    latest = folder / "latest"
    payloads = {
        "os.system": Payload(os.system, f"touch {mark}"),
        "exec": Payload(exec, f"open({str(mark)!r}, 'w')"),
        "Path.touch": Payload(Path.touch, mark),
    }
    cases = [(file, name) for file in ("optimizer.pt", "train_state.pt", "scaler.pt") for name in payloads]
    for file, name in cases:
        whole = (latest / file).read_bytes(), (latest / "meta.json").read_bytes()
        torch.save({"ranks": payloads[name], "state": {}}, latest / file)
        meta = json.loads(whole[1])
        meta["sha256"][file] = sha256(latest / file)
        write_meta(latest.resolve(), CheckpointMeta(**meta))
        checkpoints.verify_checkpoint(latest.resolve())
        result = shop.train(expect=None, prelude=WITHOUT_CHARTS)
        refused(result, file, "not a readable state file")
        assert not mark.exists(), (file, name)
        (latest / file).write_bytes(whole[0])
        (latest / "meta.json").write_bytes(whole[1])
    torch.save(payloads["Path.touch"], tmp_path / "proof")
    torch.load(tmp_path / "proof", weights_only=False)
    assert mark.exists(), "the payload is real"


def outside(tmp_path: Path) -> Path:
    """Somebody's files, that nothing here has made."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "thesis.txt").write_text("the only copy")
    (folder / "meta.json").write_text("{}")
    return folder


@pytest.mark.fault("names and links that lead out", "refused; nothing there was read or changed")
def test_names_stay_in_their_folders(shop: Workshop, tmp_path: Path) -> None:
    run, elsewhere = shop.runs / "r", outside(tmp_path)
    folder = run / "checkpoints"
    _, inside = checkpoints.list_checkpoints(folder)[0]
    stranger = Path(shutil.copytree(inside, tmp_path / inside.name))
    cases: list[tuple[Path, Path, tuple[str, ...]]] = [
        (shop.runs / "linked", Path(shutil.copytree(run, tmp_path / "another", symlinks=True)), ("linked",)),
        (folder / "20200101Z000000-iteration-3", stranger, ("r", "20200101Z000000-iteration-3")),
        (folder / "latest", stranger, ("r",)),
        (folder / "best", stranger, ("r", "best")),
        (inside / "optimizer.pt", stranger / "optimizer.pt", ("r", inside.name)),
        (shop.datasets / "local" / "letters", tmp_path / "letters", ("r",)),
    ]
    shutil.copytree(shop.datasets / "local" / "letters", tmp_path / "letters")
    before = tree(tmp_path / "another"), tree(stranger), tree(elsewhere), tree(tmp_path / "letters")
    for link, target, arguments in cases:
        with replaced_by_link(link, target, tmp_path / "put-by"):
            refused(shop.train(*arguments, expect=None, prelude=WITHOUT_CHARTS), link.name, "leads out of")
    assert (tree(tmp_path / "another"), tree(stranger), tree(elsewhere), tree(tmp_path / "letters")) == before
    assert "continuing from" in shop.train(prelude=WITHOUT_CHARTS).stdout


@contextmanager
def replaced_by_link(link: Path, target: Path, spare: Path) -> Iterator[None]:
    """`link` leads to `target` for a while; what was there before comes back."""
    there = os.path.lexists(link)
    if there:
        link.rename(spare)
    link.symlink_to(target)
    try:
        yield
    finally:
        link.unlink()
        if there:
            spare.rename(link)


@pytest.mark.fault("links among what is deleted", "the links go; the folder outside is as it was")
def test_nothing_outside_is_deleted(shop: Workshop, tmp_path: Path) -> None:
    """Leftovers, old checkpoints and half-made datasets are deleted; not what they lead to."""
    elsewhere, run = outside(tmp_path), shop.runs / "r"
    folder = run / "checkpoints"
    for name in (".saving-1", ".saving-latest-1", ".saving-pruned-x"):
        (folder / name).symlink_to(elsewhere)
    (folder / ".saving-2").mkdir()
    (folder / ".saving-2" / "inner").symlink_to(elsewhere / "inner")
    (folder / "20200101Z000000-iteration-1").symlink_to(elsewhere)
    old = checkpoints.list_checkpoints(folder)[0][1]
    (old / "notes").symlink_to(elsewhere)
    (run / "aside").symlink_to(tmp_path / "larger-disk")
    (tmp_path / "larger-disk").mkdir()
    before = tree(elsewhere)
    shop.add_run(precision="fp16", min_train_tokens=2560, keep_checkpoints=1)
    shop.train(prelude=WITHOUT_CHARTS)
    shop.train("r", "--restart", prelude=WITHOUT_CHARTS)
    assert tree(elsewhere) == before
    assert not list(folder.glob(".saving-*"))
    assert not old.exists()


@pytest.mark.fault("tokens in the environment", "in no output and in no file")
def test_secrets_stay_in_the_environment(shop: Workshop, tmp_path: Path) -> None:
    """The Hub gets its token; no file and no line of output has it or the other."""
    shop.environment |= SECRETS
    results = [
        shop.train("r", "--plan"),
        shop.train(),
        shop.train("r", "nowhere", expect=2),
        shop.command("test_loss.py", str(shop.datasets), *files_of(shop.runs / "r"), "--dataset", "local/letters"),
    ]
    with FakeHub() as hub:
        shop.environment |= hub.environment(tmp_path / "hf") | SECRETS | {"HF_HUB_OFFLINE": "0"}
        hub.add_dataset("someone/private", {"meta.json": b"{}"})
        shop.add_run("download", dataset="someone/private")
        results += [shop.train("download", expect=2)]
        shop.add_run("missing", dataset="someone/missing")
        results += [shop.train("missing", expect=2)]
    said = [each.stdout + each.stderr for each in results]
    files = [path for path in shop.path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for secret in SECRETS.values():
        assert not [text for text in said if secret in text]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def files_of(run: Path) -> tuple[str, str]:
    return str(run / "model.json"), str(run / "checkpoints" / "latest" / "model.safetensors")


@pytest.mark.slow
@pytest.mark.fault(
    "a machine in a hostile network", "all sockets of ranks of one machine are bound to the loopback interface"
)
def test_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    """Under the real torchrun, whose own store is torch's, and with --processes, where rank 0 keeps it."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=400_000)
    heard: list[str] = []
    for name, start in (("torchrun", shop.start_torchrun), ("processes", shop.start_processes)):
        run = shop.add_run(name, min_train_tokens=390_000, validation_interval=10**6, report_interval=1)
        process = start(name)
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not (run / "metrics.jsonl").exists():
                assert time.monotonic() < deadline
                assert process.poll() is None, finish([process], expect=None, timeout=10)
                time.sleep(0.1)
            ranks = [
                pid for pid in children_of(process.pid) if b"ddp_train" in command_of(pid)
            ]  # a chart is a grandchild
            assert len(ranks) == 2
            found = [address for pid in ranks for address in listening(pid)]
        finally:
            process.send_signal(signal.SIGTERM)
            stopped: Result = finish([process], expect=None, timeout=60)
        assert found, stopped
        heard += found
    assert all(address.startswith("127.") or address == "::1" for address in heard), heard


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def listening(pid: int) -> list[str]:
    """The addresses at which a process listens, from the kernel's own tables (proc(5), /proc/net/tcp)."""
    sockets = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                addresses.append(readable(local.split(":")[0]))
    return addresses


def readable(address: str) -> str:
    """An address as /proc has it, words of four bytes in the machine's order, as people write it."""
    octets = b"".join(bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
    if len(octets) == 16 and octets[:12] == bytes(10) + b"\xff\xff":
        octets = octets[12:]
    if len(octets) == 4:
        return ".".join(map(str, octets))
    return "::1" if octets == bytes(15) + b"\x01" else octets.hex(":", 2)


def test_the_look_up_sees_what_is_open(tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):
        assert {"0.0.0.0", "127.0.0.1"} <= set(listening(os.getpid()))


def test_no_load_without_weights_only() -> None:
    """Every torch.load of the product says it."""
    for path in [*ROOT.glob("*.py"), *(ROOT / "harness").rglob("*.py")]:
        for line in path.read_text().splitlines():
            assert "torch.load(" not in line or "weights_only=True" in line, path
            assert "pickle." not in line or "pickle.py" in line, path
