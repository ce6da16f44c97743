"""Mirrors on stores of other machines: a bucket of the Hub, an S3 server and an SSH server, each on the loopback
interface. The clients are the real ones; the SSH server is of another implementation than its client."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest

from harness.common.errors import RunError
from harness.mirror import store
from harness.mirror.fetch import newest_in_mirror
from harness.mirror.store import Mirror
from tests.mirror.test_two_machines import SETTINGS, STEPS, STOP, add_machine
from tests.support import s3_server
from tests.support.bucket_hub import BUCKET, TOKEN, bucket_hub
from tests.support.http_server import http_server
from tests.support.isolation import ROOT
from tests.support.launch import Workshop
from tests.support.same_end import assert_same_end


def machine_at(folder: Path, url: str, environment: dict[str, str], **settings: object) -> Workshop:
    shop = Workshop(folder, environment=environment)
    shop.add_dataset()
    shop.add_run("r", **SETTINGS | {"mirror": url, "keep_checkpoints": 1} | settings)
    return shop


def moves(folder: Path, url: str, environment: dict[str, str], secret: str) -> Workshop:
    """Stop a run on one machine and continue it on another, and assert that it ends like one that has never moved, with
    `secret` in none of its files. Return the second machine."""
    first = machine_at(folder / "first", url, environment, **STOP)
    second = machine_at(folder / "second", url, environment)
    began, trained = first.train(ranks=1), second.train(ranks=1)
    said = (began.stderr + trained.stderr).splitlines()
    said = [line for line in said if not line.startswith("waiting for the mirror: ")]  # training says this of itself
    assert not said, "clients write nothing into the output of training"
    assert "was fetched from the mirror" in trained.stdout
    straight, run = add_machine(folder, "straight", mirror=None), second.runs / "r"
    straight.train_here()
    assert_same_end(straight.runs / "r", run)
    newest = (run / "checkpoints" / "latest").resolve().name
    assert second.script("mirror.py", "list", url).stdout.startswith(f"r: {newest}")
    assert not [path for path in run.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    return second


@pytest.mark.slow
def test_a_bucket_of_the_hub(tmp_path: Path) -> None:
    with bucket_hub(tmp_path / "hub") as environment:
        second = moves(tmp_path, f"hf://buckets/{BUCKET}/gpt", environment, TOKEN)
        second.environment = {**environment, "HF_TOKEN": "hf_another"}
        second.attempt().refuses("HF_TOKEN or `hf auth login`")


@pytest.mark.timeout(60)
def test_a_hub_that_never_answers_is_given_up(tmp_path: Path) -> None:
    script = tmp_path / "read.py"  # a process of its own, since huggingface_hub reads its environment when imported
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport harness.mirror.store as s\n"
        "s.NETWORK_SECONDS, s.OPENING_TRIES = 0.2, 1\n"
        f"s.open_mirror('hf://buckets/{BUCKET}/gpt', 'r', writes=False)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and no more
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        variables = {"HF_ENDPOINT": address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        command, environment = [sys.executable, str(script)], {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=40)
    assert "RunError" in done.stderr
    assert "cannot be read (ReadTimeout" in done.stderr


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server.s3_server() as variables:
        yield variables


@pytest.mark.slow
def test_an_s3_server(tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{s3_server.BUCKET}/runs"
    second = moves(tmp_path, url, s3, s3_server.SECRET)
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    mirror = Mirror(url, "r")
    files = mirror.files()
    found = newest_in_mirror(mirror, files)
    assert found is not None
    assert found[0] == (second.runs / "r" / "checkpoints" / "latest").resolve().name
    assert found[1].global_step == STEPS - 1
    assert "owner.json" not in files
    assert len([name for name in files if name.endswith("meta.json")]) <= 3


@pytest.mark.slow  # botocore tries again and again
@pytest.mark.timeout(120)
def test_an_s3_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setattr(store, "NETWORK_SECONDS", 0.2)
    monkeypatch.setattr(store, "OPENING_TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and no more
        variables = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}", "AWS_ACCESS_KEY_ID": "key"}
        variables |= {"AWS_SECRET_ACCESS_KEY": s3_server.SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RunError, match="cannot be written to"):
            store.open_mirror("s3://bucket/runs", "r")


def test_an_expired_token_is_named_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    answer = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    with http_server(lambda *_: (400, answer)) as address:
        variables = {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_DEFAULT_REGION": "us-east-1"}
        for name, value in (variables | {"AWS_SECRET_ACCESS_KEY": s3_server.SECRET}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PermissionError, match="token has expired"):
            store.Mirror("s3://bucket/runs", "r").read("owner.json")  # the first that each upload asks for


def test_a_bucket_that_is_not_there_or_not_ours_is_one_line(tmp_path: Path, s3: dict[str, str]) -> None:
    shop = machine_at(tmp_path, "s3://nowhere/runs", s3)
    shop.attempt().refuses("s3://nowhere/runs/r: cannot be written", "AWS_ACCESS_KEY_ID")
    shop.environment = {**s3, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}  # no server
    shop.attempt().refuses(status=1)
    shop.environment = {name: value for name, value in s3.items() if "KEY" not in name}
    shop.attempt().refuses("redential")
    assert not (shop.runs / "r" / "metrics.jsonl").exists()


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[str]:
    """Yield the URL of a server that knows one user's key. It keeps its files in "store", and "home" is the home
    folder of the user."""
    keys, store = tmp_path / "home" / ".ssh", tmp_path / "store"
    keys.mkdir(parents=True, mode=0o700)
    store.mkdir()
    user, host = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    user.write_private_key(str(keys / "id_ed25519"))
    user.write_public_key(str(keys / "authorized"))
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def listen() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_host_keys=[host],
            authorized_client_keys=str(keys / "authorized"),
            sftp_factory=lambda connection: asyncssh.SFTPServer(connection, chroot=str(store).encode()),
        )

    acceptor = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    address = f"127.0.0.1:{acceptor.get_port()}"
    (keys / "known_hosts").write_text(f"[{address.replace(':', ']:')} {host.export_public_key().decode()}")
    yield f"sftp://me@{address}/runs"
    loop.call_soon_threadsafe(acceptor.close)
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.slow
def test_an_ssh_server(tmp_path: Path, ssh_server: str) -> None:
    key = (tmp_path / "home" / ".ssh" / "id_ed25519").read_text().splitlines()[2]
    second = moves(tmp_path, ssh_server, {"HOME": str(tmp_path / "home")}, key)
    sent = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path.name for path in sent if path.name.endswith(".partial") or path.name == "owner.json"] == []

    (tmp_path / "home" / ".ssh" / "known_hosts").write_text("")
    second.attempt().refuses("is not in ~/.ssh/known_hosts; connect once by ssh")
