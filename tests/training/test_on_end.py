"""The command `on_end` runs once however training ends, and `notify` gets messages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_server import http_server
from tests.support.in_process import module_shop
from tests.support.launch import Workshop, finish, metrics, wait_until
from tests.support.straight import FAULTS
from tests.support.torchrun import Torchrun

# Writes the state and the run's name into a file of the run's folder, and the other variable to standard output.
NOTE = 'D="$DDP_PRETRAIN_DIRECTORY"; echo "$DDP_PRETRAIN_STATE $DDP_PRETRAIN_RUN" >> "$D/ended"; echo "in $D"'
ON_END = ["sh", "-c", NOTE]
SHORT: dict[str, Any] = {"min_train_tokens": 640, "on_end": ON_END}


shop = module_shop(tokens=20_000)


def endings(run: Path) -> list[str]:
    path = run / "ended"
    return path.read_text().splitlines() if path.exists() else []


def awaited_endings(run: Path) -> list[str]:
    """Return the endings once there are any. The command may run after the ranks have ended."""
    wait_until(lambda: endings(run))
    return endings(run)


def endings_under_torchrun(shop: Workshop, run: Path, prelude: str, *options: str, status: int) -> list[str]:
    finish([Torchrun(shop, run, are_forked=True).start(prelude, *options)], expect=status, timeout=240)
    return awaited_endings(run)


def test_its_command_can_be_stopped(shop: Workshop) -> None:
    """SIGTERM and SIGINT, which a shell or `timeout` sends, end the command as in a terminal."""
    script = "for each in TERM INT; do sh -c 'kill -'$each' $$; echo alive'; done; echo end"
    shop.add_run("stoppable", min_train_tokens=64, on_end=["sh", "-c", script])
    said = shop.train("stoppable", ranks=1).stdout
    assert "end" in said.splitlines()
    assert "alive" not in said


@pytest.mark.fault("finished, stopped or failed, with `on_end`", "the command runs once, with the run's state")
@pytest.mark.parametrize(
    ("name", "prelude", "status"),
    [
        ("finished", "", 0),
        ("stopped", "before(STEP, tell(SIGTERM), rank=1, step=2)", 143),
        ("failed", "before(STEP, fail, step=2)", 1),
    ],
)
def test_it_runs_before_the_process_ends(shop: Workshop, name: str, prelude: str, status: int) -> None:
    run = shop.add_run(name, **SHORT)
    done = shop.train(name, prelude=FAULTS + prelude, expect=status)
    assert endings(run) == [f"{name} {name}"]
    assert f"in {run.resolve()}\n" in done.stdout
    recorded = [path for path in run.rglob("*.json") if path.name != "train.json" and "on_end" in path.read_text()]
    assert recorded == [], "it may hold a secret"
    if name == "finished":
        shop.train(name)
        assert endings(run) == ["finished finished"] * 2, "a machine on which nothing is left to do costs as much"


@pytest.mark.fault("a rank is killed, with `on_end`", "the command runs once, with the state `failed`")
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_it_runs_if_a_rank_is_killed(shop: Workshop, rank: int) -> None:
    run = shop.add_run(f"killed{rank}", **SHORT)
    shop.train(run.name, prelude=f"{FAULTS}before(STEP, kill, rank={rank}, step=2)", expect=None)
    assert awaited_endings(run) == [f"failed {run.name}"]


@pytest.mark.slow
def test_it_runs_if_the_launcher_is_killed(shop: Workshop) -> None:
    """The ranks notice that their launcher is gone, and save. The command runs after that."""
    run = shop.add_run("orphaned", **SHORT | {"min_train_tokens": 10**4, "start_train_token": 0})
    job = Torchrun(shop, run, by_processes=True)
    process = job.start("before(STEP, pause(0.3))")
    wait_until(lambda: (run / "metrics.jsonl").exists(), process)
    process.kill()
    assert awaited_endings(run) == ["failed orphaned"]
    assert job.seconds_to_the_end(60) < 60
    assert (run / "checkpoints" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "status", "state"), [(0, 1, "failed"), (1, 0, "finished")])
def test_torchrun_may_start_the_ranks_again(shop: Workshop, restarts: int, status: int, state: str) -> None:
    """It runs once, when torchrun has ended, and has the state of the last start."""
    run = shop.add_run(f"torchrun{restarts}", **SHORT)
    died = f"before(STEP, in_life(1, {str(run / 'lives')!r}, kill), rank=0, step=2)"
    ended = endings_under_torchrun(shop, run, died, f"--max-restarts={restarts}", status=status)
    assert ended == [f"{state} {run.name}"]


@pytest.mark.slow
def test_torchrun_starts_a_run_again_that_a_ceiling_has_stopped(shop: Workshop) -> None:
    run = shop.add_run("ceiling", **SHORT | {"max_hours": 1.0})
    late = "before(STEP, two_hours_later, step=2)"
    assert endings_under_torchrun(shop, run, late, "--max-restarts=1", status=1) == ["stopped ceiling"]


@pytest.mark.slow
def test_a_rank_that_torchrun_stops_because_another_failed_has_failed(shop: Workshop) -> None:
    """Rank 0 sees the signal and the end of rank 1 only after a long step."""
    run = shop.add_run("busy", **SHORT)
    prelude = "before(STEP, fail, rank=1, step=2); before(STEP, pause(3), rank=0, step=2)"
    assert endings_under_torchrun(shop, run, prelude, status=1) == ["failed busy"]


@pytest.mark.slow
def test_it_runs_without_the_launchers_variables(shop: Workshop) -> None:
    """A command of this program in it would take itself for a rank of the job that has ended."""
    run = shop.add_run("clean", **SHORT | {"on_end": ["sh", "-c", 'env > "$DDP_PRETRAIN_DIRECTORY/ended"']})
    names = {line.partition("=")[0] for line in endings_under_torchrun(shop, run, "", status=0)}
    assert "DDP_PRETRAIN_STATE" in names
    assert not names & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    assert not [name for name in names if name.startswith("TORCHELASTIC_")]


HANGS = 'before("harness.mirror.store:Mirror.send", pause(1000))'  # until the process is killed


def mirrored_run(shop: Workshop, mirror: Path, name: str) -> Path:
    """Add a run whose command lists the checkpoints that are in the mirror."""
    script = f'cd "$DDP_PRETRAIN_DIRECTORY"; ls "{mirror / name}/checkpoints"/*/meta.json > seen; mv seen ended'
    settings = {"min_train_tokens": 1280, "checkpoint_interval": 2, "mirror": mirror.as_uri()}
    return shop.add_run(name, **settings, on_end=["sh", "-c", script])


def sent_and_kept(run: Path) -> tuple[set[str], set[str]]:
    """Return the names of the checkpoints that the command listed, and of those that are the run's latest and best."""
    kept = {(run / "checkpoints" / link).resolve().name for link in ("latest", "best")}
    return {Path(line).parent.name for line in endings(run)}, kept


@pytest.mark.fault("killed before its last upload", "what was saved is sent to the mirror, then `on_end` runs")
@pytest.mark.parametrize("is_lost", [False, True])
def test_it_runs_after_the_last_upload(shop: Workshop, tmp_path: Path, is_lost: bool) -> None:
    """If `is_lost`, another machine has taken the run from the one whose process is killed."""
    run = mirrored_run(shop, tmp_path, f"cut{is_lost}")
    owner = json.dumps({"host": "elsewhere", "id": "other", "heard": time.time()})
    place = str(tmp_path / run.name / "owner.json")
    take = f"lambda: Path({place!r}).write_text({owner!r})" if is_lost else "lambda: None"
    prelude = f"{FAULTS}{HANGS}; before(STEP, in_turn({take}, kill), rank=0, step=5)"
    shop.train(run.name, prelude=prelude, expect=None)
    wait_until(lambda: (run / "ended").exists())
    sent, kept = sent_and_kept(run)
    assert sent == (set() if is_lost else kept)


def test_what_a_failed_run_has_not_sent_is_sent(shop: Workshop, tmp_path: Path) -> None:
    """Its process waits for the command, and no longer holds the run's lock."""
    run = mirrored_run(shop, tmp_path, "unsent")
    error = "from harness.common.errors import RunError\ndef stop(): raise RunError('no memory')\n"
    prelude = f"{FAULTS}{error}{HANGS}; before(STEP, stop, step=5)"
    done = shop.train("unsent", ranks=1, prelude=prelude, expect=1)
    assert "not everything was sent" not in done.stderr
    sent, kept = sent_and_kept(run)
    assert sent == kept


def test_its_output_needs_no_reader(shop: Workshop) -> None:
    """Such as `tee` in a terminal that was closed."""
    command = ["sh", "-c", 'echo to nobody; echo "$DDP_PRETRAIN_STATE" >> "$DDP_PRETRAIN_DIRECTORY/ended"']
    run = shop.add_run("nobody", **SHORT | {"on_end": command, "report_interval": 1})
    prelude = f"{FAULTS}reader, writer = os.pipe()\nos.dup2(writer, 1)\nos.dup2(writer, 2)\n"
    prelude += "before(STEP, lambda: os.close(reader), step=1, call=1)\n"
    shop.train("nobody", ranks=1, prelude=prelude, expect=None)
    assert endings(run) in (["stopped"], ["finished"])


@pytest.mark.slow
@pytest.mark.parametrize("error_output", ["os.open('/dev/full', os.O_WRONLY)", "full_pipe()"])
def test_it_runs_if_standard_error_cannot_be_written(shop: Workshop, error_output: str) -> None:
    """The log is on a full disk, or the terminal is paused."""
    run = shop.add_run("unread", **SHORT, notify="http://127.0.0.1:9/")
    prelude = f"""import fcntl, os
def full_pipe():
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    os.write(writer, bytes(fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ)))
    return writer
os.dup2({error_output}, 2)
"""
    shop.train("unread", "--restart", ranks=1, prelude=prelude)
    assert endings(run)[-1:] == ["finished unread"]


@pytest.mark.slow
def test_a_command_that_fails_or_does_not_exist(shop: Workshop) -> None:
    run = shop.add_run("wrong", **SHORT | {"on_end": ["false"]})
    done = shop.train("wrong")
    assert "warning: on_end failed with exit status 1; if it was meant to end the rental" in done.stderr
    shop.add_run("wrong", **SHORT | {"on_end": ["/no/such program"], "min_train_tokens": 1280})
    searched = shop.train("wrong", "-f", "--memory-limit-gib", "0.01", expect=1)
    assert searched.error_lines[0].startswith("error: not even a microbatch of 1 fits"), "a search runs no command"
    before = len(metrics(run))
    done = shop.train("wrong", expect=2)
    named = f'error: {run}/train.json: key "on_end": there is no program "/no/such program" here; '
    assert done.error_lines[0] == f"{named}give its path, or make the file executable"
    assert len(metrics(run)) == before


def test_a_command_that_is_refused_ends_no_rental(shop: Workshop) -> None:
    """Another process trains the run, and its own command will run."""
    run = shop.add_run("twice", **SHORT)
    process = shop.start("twice", prelude=f"{FAULTS}before(STEP, until({str(run / 'go')!r}), step=2)")
    wait_until(lambda: (run / "metrics.jsonl").exists(), *process)
    refused = shop.train("twice", expect=2)
    assert "is being trained by another process" in refused.stderr
    assert endings(run) == []
    (run / "go").touch()
    finish(process, expect=0, timeout=240)
    assert endings(run) == ["finished twice"]


@pytest.fixture
def listener() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a server's URL, and the list of the messages that it has received."""
    received: list[dict[str, Any]] = []

    def answer(method: str, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        received.append(json.loads(body))
        return (200 if "refuses" not in path else 403), b""

    with http_server(answer) as url:
        yield url, received


def test_messages_of_a_run(shop: Workshop, listener: tuple[str, list[dict[str, Any]]]) -> None:
    url, received = listener
    run = shop.add_run("told", min_train_tokens=2560, notify=f"{url}/secret-token")
    outputs = shop.train("told", prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=4)", expect=143)
    outputs2 = shop.train("told", prelude=f"{FAULTS}before(STEP, fail, step=7)", expect=1)
    assert [(each["event"], each["state"]) for each in received[::2]] == [("start", "training")] * 2
    ends = [(each["event"], each["state"], each["step"]) for each in received[1::2]]
    assert ends == [("end", "stopped", 5), ("failure", "failed", 6)]
    assert received[-1]["message"] == "told: failed, last report at global step 6"
    texts = [
        path.read_text(errors="replace") for path in run.rglob("*") if path.is_file() and path.name != "train.json"
    ]
    shown = shop.attempt("--plan", run="told").stdout
    assert "secret-token" not in "".join([*texts, outputs.stdout, outputs.stderr, outputs2.stdout, shown])


@pytest.mark.slow
@pytest.mark.fault("a `notify` that refuses or is not there", "a warning without the URL; the run and `on_end` go on")
def test_a_url_that_refuses_or_does_not_answer_changes_nothing(
    shop: Workshop, listener: tuple[str, list[dict[str, Any]]]
) -> None:
    url, _ = listener
    shop.add_run("refused", min_train_tokens=640, notify=f"{url}/refuses-secret")
    done = shop.train("refused")
    assert done.stderr.count("was not confirmed: HTTPError 403") == 2
    assert "secret" not in done.stdout + done.stderr
    shop.add_run("refused", min_train_tokens=1280, notify="http://127.0.0.1:9/secret", on_end=ON_END)
    done = shop.train("refused")
    assert 'warning: notify: the message "end" was not confirmed: URLError' in done.stderr
    assert "secret" not in done.stdout + done.stderr
    assert endings(shop.runs / "refused") == ["finished refused"]
