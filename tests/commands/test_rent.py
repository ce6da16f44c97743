"""rent.sh and docs/renting.md: the real commands run. Only `uv` is replaced, by a script that starts this Python."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from email.message import Message
from pathlib import Path

import pytest

from tests.mirror.test_two_machines import SETTINGS
from tests.support.http_server import http_server
from tests.support.isolation import ROOT
from tests.support.launch import Workshop, finish, wait_until
from tests.support.same_end import assert_same_end


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_dataset(tokens=20_000)
    made.add_run("r", **SETTINGS | {"min_train_tokens": 64 * 200, "checkpoint_interval": 20, "validation_interval": 40})
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(
        f'#!/bin/sh\n[ "$1" = run ] || exit 0\nshift\n[ "$1" != python ] || shift\n'
        f'echo "$*" >> {tmp_path}/calls\nexec {sys.executable} "$@"\n'
    )
    uv.chmod(0o755)
    font = tmp_path / ".local/share/fonts/xkcd-script.ttf"
    font.parent.mkdir(parents=True)
    font.write_text("a font, so that none is downloaded")
    return made


def rent(shop: Workshop, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    variables |= {"HOME": str(shop.path), "RUNS_DIR": str(shop.runs), "PATH": f"{shop.path}/bin:{os.environ['PATH']}"}
    return subprocess.Popen(
        [str(ROOT / "rent.sh"), *arguments],
        env=os.environ | variables | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def rent_and_note_the_end(shop: Workshop, *arguments: str, is_mirrored: bool = True) -> subprocess.Popen[str]:
    """Start a rental without setup, check and plan. Its --on-end writes "end" into `calls`."""
    mirror = ["--mirror", f"file://{shop.path}/store"] if is_mirrored else []
    given = ["--skip", "setup,check,plan", "--on-end", f"echo end >> {shop.path}/calls", *mirror]
    return rent(shop, "r", *given, *arguments)


def refused(shop: Workshop, *arguments: str) -> str:
    result = finish([rent(shop, *arguments)], expect=2, timeout=60)
    assert result.stdout == ""
    return result.refuses()


def pretend(shop: Workshop, *lines: str, **commands: str) -> Path:
    """Replace uv by a script that notes the arguments of each `uv run` and then runs `lines`, and other commands by
    theirs. Return the file with the notes."""
    calls = shop.path / "calls"
    noted = ["#!/bin/sh", f'case "$1" in run) echo "$2 $3";; *) echo "$*";; esac >> {calls}', *lines]
    for name, script in {"uv": "\n".join(noted), **commands}.items():
        (shop.path / "bin" / name).write_text(f"{script}\n")
        (shop.path / "bin" / name).chmod(0o755)
    return calls


def test_wrong_input_is_one_line(shop: Workshop) -> None:
    assert "give one RUN" in refused(shop)
    assert "no such run" in refused(shop, "none")
    assert "--fot: no such option" in refused(shop, "r", "--fot")
    assert "--mirror: needs a value" in refused(shop, "r", "--mirror")
    assert "--skip fit: no such part" in refused(shop, "r", "--skip", "plan,fit")
    for number in ("x", "0", "2x"):
        assert f"--processes {number}: must be a whole number" in refused(shop, "r", "--processes", number)
    assert "--on-end: runs after training" in refused(shop, "r", "--skip", "setup,train", "--on-end", "true")
    assert "--publish m: give OWNER/NAME" in refused(shop, "r", "--publish", "m")
    assert not (shop.path / "calls").exists()


def test_recipes_that_end_a_rental(tmp_path: Path) -> None:
    """Their requests reach a server, with method, path, key and body as the providers document them. They are repeated
    until they succeed."""
    received: list[tuple[str, str, str | None, bytes]] = []
    tried: set[str] = set()

    def note(method: str, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        if path not in tried:
            tried.add(path)
            return 503, b""
        received.append((method, path, headers["Authorization"], body))
        return 200, b""

    guide = (ROOT / "docs" / "renting.md").read_text(encoding="utf-8")
    variables = {name: name.lower() for name in ("LAMBDA_API_KEY", "INSTANCE_ID", "RUNPOD_API_KEY", "RUNPOD_POD_ID")}
    variables |= {"CONTAINER_API_KEY": "container_api_key", "CONTAINER_ID": "7", "no_proxy": "*"}
    with http_server(note) as url:
        for recipe in re.findall(r"^```bash\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL):
            script = re.sub(r"https://[a-z.]+", url, recipe).replace("sleep 30", "sleep 0")
            subprocess.run(["sh", "-ec", script], env=os.environ | variables, check=True, timeout=60)
    assert received == [
        (
            "POST",
            "/api/v1/instance-operations/terminate",
            "Bearer lambda_api_key",
            b'{"instance_ids": ["instance_id"]}',
        ),
        ("DELETE", "/v1/pods/runpod_pod_id", "Bearer runpod_api_key", b""),
        ("DELETE", "/api/v0/instances/7/", "Bearer container_api_key", b""),
    ]


def test_a_mirror_that_cannot_be_read_changes_nothing(shop: Workshop) -> None:
    """It may have a run that has begun with another train.json."""
    before = (shop.runs / "r" / "train.json").read_bytes()
    (shop.path / "store").write_text("no folder")
    process = rent(shop, "r", "--fit", "--skip", "setup", "--mirror", f"file://{shop.path}/store/runs")
    assert finish([process], expect=2, timeout=60).refuses().startswith("error: mirror ")
    assert (shop.path / "calls").read_text().count("\n") == 1, "nothing but the mirror was asked"
    assert (shop.runs / "r" / "train.json").read_bytes() == before


@pytest.mark.parametrize("given", [[], ["--mirror", "none"]])
def test_the_mirror_is_that_of_train_json_unless_given(shop: Workshop, given: list[str]) -> None:
    settings, url = shop.runs / "r" / "train.json", f"file://{shop.path}/store"
    settings.write_text(settings.read_text().replace("{", f'{{"mirror" :\n"{url}",', 1))
    process = rent(shop, "r", str(shop.datasets), "--skip", "setup,check,train,test", *given)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    (plan,) = [line for line in (shop.path / "calls").read_text().splitlines() if "--plan" in line]
    assert ("--mirror none" if given else f"--mirror {url} --wait") in plan


@pytest.mark.parametrize(
    ("status", "parts"), [(2, ["test_loss.py", "mirror.py", "convert_hf.py"]), (130, ["test_loss.py"])]
)
def test_a_model_that_cannot_be_measured_is_published(shop: Workshop, status: int, parts: list[str]) -> None:
    """Its dataset may have no held-out split. Ctrl-C during the test ends the script instead."""
    calls = pretend(shop, f'if [ "$2" = test_loss.py ]; then exit {status}; fi')
    result = finish([rent_and_note_the_end(shop, "--publish", "me/m")], expect=status, timeout=60)
    scripts = [line.split()[0] for line in calls.read_text().splitlines()]
    assert scripts == ["mirror.py", "ddp_train.py", *parts, "end"]
    assert "== done" not in result.stdout


@pytest.mark.parametrize("part", ["ddp_train.py", "mirror.py"])
def test_what_is_not_in_the_mirror_is_sent_before_the_rental_ends(shop: Workshop, part: str) -> None:
    """Training fails, and then the first push; or only the push after the test."""
    first = f"if [ ! -e {shop.path}/failed ]; then touch {shop.path}/failed; exit 1; fi"
    sleep = f'#!/bin/sh\necho "sleep $1" >> {shop.path}/calls'
    fails = 'if [ "$2" = ddp_train.py ]; then exit 1; fi' if part == "ddp_train.py" else ""
    calls = pretend(shop, fails, f'if [ "$3" = push ]; then {first}; fi', sleep=sleep)
    finish([rent_and_note_the_end(shop, "--publish", "me/m")], expect=1, timeout=60)
    again = ["sleep 30", "mirror.py push"] if fails else ["convert_hf.py publish", "mirror.py push"]
    parts = ["ddp_train.py r", *([] if fails else ["test_loss.py datasets"]), "mirror.py push", *again]
    assert calls.read_text().splitlines() == ["mirror.py list", *parts, "end"]


def test_a_rental_does_not_end_while_another_process_trains_the_run(shop: Workshop) -> None:
    """The command is typed a second time while the first one trains. Training is refused."""
    flock = f'#!/bin/sh\nshift 2\ntouch {shop.path}/waiting\nexec {shutil.which("flock")} --wait 2 "$@"'
    calls = pretend(shop, 'if [ "$2" = ddp_train.py ]; then exit 2; fi', flock=flock)
    with (shop.runs / "r" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = rent_and_note_the_end(shop, is_mirrored=False)
        wait_until(lambda: (shop.path / "waiting").exists(), process)
        os.killpg(process.pid, signal.SIGINT)  # the user does not want to wait
        assert "another process trains r" in finish([process], expect=2, timeout=60).stderr
    assert "end" not in calls.read_text()
    finish([rent_and_note_the_end(shop, is_mirrored=False)], expect=2, timeout=60)
    assert calls.read_text().endswith("end\n")


@pytest.mark.parametrize("part", ["convert_hf.py", "test_loss.py"])
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_a_model_that_is_nowhere_else_stays(shop: Workshop, is_mirrored: bool, part: str) -> None:
    """Its upload fails, or the script ends before."""
    calls = pretend(shop, f'if [ "$2" = {part} ]; then exit 130; fi')
    process = rent_and_note_the_end(shop, "--publish", "me/m", is_mirrored=is_mirrored)
    finish([process], expect=130, timeout=60)
    assert (calls.read_text().splitlines()[-1] == "end") == is_mirrored


def test_without_a_reader_a_push_is_not_repeated(shop: Workshop) -> None:
    """Its terminal is closed: what it cannot print makes `mirror.py push` fail."""
    prints = 'if [ "$3" = push ]; then echo "r: complete" || exit 1; fi'
    calls = pretend(shop, 'if [ "$2" = ddp_train.py ]; then sleep 2; exit 1; fi', prints)
    process = rent_and_note_the_end(shop)
    wait_until(lambda: calls.exists() and "ddp_train.py" in calls.read_text(), process)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.wait(timeout=25)
    assert calls.read_text().splitlines()[-2:] == ["mirror.py push", "end"]


@pytest.mark.parametrize(
    ("variables", "packages"), [({}, ["sync --extra s3 --extra benchmarks"]), ({"UV_NO_SYNC": "1"}, [])]
)
def test_setup_installs_what_the_run_needs(shop: Workshop, variables: dict[str, str], packages: list[str]) -> None:
    """Unless UV_NO_SYNC keeps a torch that was installed by hand."""
    shop.add_run("r", benchmark_interval=10, benchmark_tasks=["hellaswag"])
    calls = pretend(shop)
    given = ["--mirror", "s3://bucket/runs", "--skip", "check,plan,train,test"]
    finish([rent(shop, "r", *given, **variables)], expect=0, timeout=60)
    assert [each for each in calls.read_text().splitlines() if each.startswith("sync")] == packages


def test_a_closed_terminal_ends_no_push(shop: Workshop) -> None:
    sent = f"sleep 2; echo pushed >> {shop.path}/calls"
    calls = pretend(shop, 'if [ "$2" = ddp_train.py ]; then exit 1; fi', f'if [ "$3" = push ]; then {sent}; fi')
    process = rent_and_note_the_end(shop)
    wait_until(lambda: calls.exists() and "push" in calls.read_text(), process)
    os.killpg(process.pid, signal.SIGHUP)
    finish([process], expect=1, timeout=60)
    assert calls.read_text().splitlines()[-2:] == ["pushed", "end"]


def test_a_signal_ends_a_push_and_the_rental(shop: Workshop) -> None:
    fails, hangs = 'if [ "$2" = ddp_train.py ]; then exit 1; fi', 'if [ "$3" = push ]; then exec sleep 100; fi'
    calls = pretend(shop, fails, hangs)
    process = rent_and_note_the_end(shop)
    wait_until(lambda: calls.exists() and "push" in calls.read_text(), process)
    time.sleep(0.5)  # until the script waits for it
    process.terminate()
    finish([process], expect=1, timeout=60)
    assert calls.read_text().splitlines()[-1] == "end"


def test_the_check_trains_with_the_microbatch_that_fits(shop: Workshop) -> None:
    (shop.path / "bin" / "uv").write_text(f'#!/bin/sh\necho "$*" >> {shop.path}/calls\n')
    finish([rent(shop, "r", "--fit", "--skip", "setup,train,test")], expect=0, timeout=60)
    fit, check, plan = (shop.path / "calls").read_text().splitlines()
    assert fit.startswith("run ddp_train.py r datasets -f --write")
    assert check.startswith("run check_machine.py r")
    assert "--plan" in plan


def test_a_run_without_a_checkpoint_in_the_mirror_has_not_begun(shop: Workshop) -> None:
    """Its settings were sent there. The train.json here is used, and the microbatch is searched for."""
    listed = 'case "$2 $3" in "mirror.py list") echo "r: no whole checkpoint, 0.00 GB";; esac'
    (shop.path / "bin" / "uv").write_text(f'#!/bin/sh\necho "$*" >> {shop.path}/calls\n{listed}\n')
    mirror = ("--mirror", f"file://{shop.path}/store")
    result = finish([rent(shop, "r", "--fit", "--skip", "setup,train,test", *mirror)], expect=0, timeout=60)
    assert result.stdout.count("== fit") == 1
    assert "fetch" not in (shop.path / "calls").read_text()


@pytest.mark.slow
def test_the_rental_ends_after_the_last_checkpoint(shop: Workshop) -> None:
    """The script alone gets the signal."""
    show = f"cd {shop.runs}/r/checkpoints && ls -d *-iteration-* latest/meta.json > {shop.path}/ended"
    process = rent(shop, "r", str(shop.datasets), "--skip", "setup,check,plan", "--on-end", show)
    wait_until(lambda: len(list(shop.runs.glob("r/checkpoints/2*"))) > 1, process)
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert "Loss on the test split" not in stdout
    newest = (shop.runs / "r" / "checkpoints" / "latest").resolve().name
    seen = (shop.path / "ended").read_text().split()
    assert newest in seen
    assert "latest/meta.json" in seen


@pytest.mark.slow
def test_the_same_command_on_a_new_machine(shop: Workshop) -> None:
    """The first machine is killed while it trains. On the second, train.json has another microbatch, as if -f had not
    been run there yet. The mirror stands in train.json."""
    store, ended = shop.path / "store", shop.path / "ended"
    command = ["r", str(shop.datasets), "--processes", "2", "--skip", "check"]
    command += ["--on-end", f"echo over >> {ended}"]
    train = json.loads((shop.runs / "r" / "train.json").read_text())
    shop.add_run("straight", **train)
    shop.add_run("r", **train, mirror=store.as_uri())
    first = rent(shop, *command)
    wait_until(lambda: list(store.glob("r/checkpoints/*/meta.json")), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not ended.exists()

    shutil.rmtree(shop.runs / "r")
    shop.add_run("r", **train | {"mirror": store.as_uri(), "microbatch_size": 1, "max_hours": 5.0})
    second = rent(shop, *command, "--fit")
    stdout, stderr = second.communicate(timeout=200)
    assert second.returncode == 0, stderr
    assert "was fetched from the mirror" in stdout
    assert "Loss on the test split" in stdout
    assert ended.read_text() == "over\n"
    calls = (shop.path / "calls").read_text()
    assert "-f --write" not in calls
    assert json.loads((shop.runs / "r" / "aside" / "train.json").read_text())["microbatch_size"] == 1
    now = json.loads((shop.runs / "r" / "train.json").read_text())
    assert now["max_hours"] == 5.0, "limits are those of the second machine's file"
    assert now["microbatch_size"] != 1
    assert [path.name for path in (store / "r" / "results").iterdir()]
    shop.train("straight")
    assert_same_end(shop.runs / "straight", shop.runs / "r")

    third = rent(shop, *command)
    stdout, _ = third.communicate(timeout=200)
    assert third.returncode == 0
    assert "is finished" in stdout
