"""Plans, schemas and refusals are printed before torch is loaded, which takes seconds."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import SPEAKER_PATIENCE_SECONDS
from tests.support.fake_hub import FakeHub
from tests.support.in_process import InProcess
from tests.support.launch import ROOT, Result, Workshop, finish, rank_variables

# Libraries that plans, schemas and refusals do not need. Only a dataset's name that the Hub has to refuse needs the
# Hub's library.
WITH_HUB = ("torch", "pyarrow", "matplotlib", "scipy", "transformers")
BARRED = (*WITH_HUB, "huggingface_hub")
WITHOUT_TORCH = """
import runpy, sys
for library in {barred!r}:
    sys.modules[library] = None  # importing it is an error
sys.argv = sys.argv[1:]
sys.path.insert(0, {root!r})
runpy.run_path({root!r} + "/" + sys.argv[0], run_name="__main__")
"""


def cold(shop: Workshop, *arguments: str, barred: Sequence[str] = BARRED) -> Result:
    """Run ddp_train.py in a process that can load neither torch nor the other libraries that take long."""
    source = WITHOUT_TORCH.format(root=str(ROOT), barred=tuple(barred))
    return finish([shop.spawn([sys.executable, "-c", source, "ddp_train.py", *arguments], {})], expect=None, timeout=60)


def quickly(shop: Workshop, *arguments: str, barred: Sequence[str] = BARRED) -> Result:
    result = cold(shop, *arguments, barred=barred)
    assert "Traceback" not in result.stderr, result.stderr
    return result


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = InProcess(tmp_path)
    made.add_dataset()
    made.add_run()
    return made


@pytest.fixture
def there(shop: Workshop) -> tuple[str, ...]:
    return str(shop.datasets), "--runs-dir", str(shop.runs)


NO_BUILTIN = 'dataset "builtin/python-stdlb": no builtin dataset has this name; choose from builtin/python-stdlib'
UNKNOWN = 'json: key "lerning_rate": unknown'
ODD = {"global_batch_size": 5, "gradient_accumulation_steps": None}


@pytest.mark.parametrize(
    ("words", "change", "arguments"),
    [
        ("no such run; did you mean r?", {}, "rr DATASETS"),
        ("there are: none", {}, "r DATASETS nope"),
        ("there are: none", {}, "r DATASETS nope --processes 2"),
        ("there are 4,000", {"min_train_tokens": 5000}, "r DATASETS"),
        ("there are 500", {"microbatch_size": 2**63 - 1}, "r DATASETS --plan"),
        ("5 sequences are not a multiple of 2", ODD, "r DATASETS --processes 2"),
        (NO_BUILTIN, {"dataset": "builtin/python-stdlb"}, "r DATASETS"),
        (NO_BUILTIN, {"dataset": "builtin/python-stdlb"}, "r DATASETS --plan"),
        (f"r/train.{UNKNOWN}", {"lerning_rate": 1}, "r DATASETS"),
        (f"r/model.{UNKNOWN}", {"model": {"lerning_rate": 1}}, "r DATASETS --processes 2"),
    ],
)
def test_what_is_refused(shop: Workshop, words: str, change: dict[str, Any], arguments: str) -> None:
    """With --processes, it is refused before any rank is started."""
    shop.add_run(**change)
    run, datasets, *options = arguments.replace("DATASETS", str(shop.datasets)).split()
    result = quickly(shop, run, datasets, *options, "--runs-dir", str(shop.runs))
    result.refuses(words)
    assert result.stdout == ""
    assert not (shop.datasets / "builtin").exists()


def test_a_dataset_that_the_hub_has_not(shop: Workshop, there: tuple[str, ...]) -> None:
    """A dataset that the Hub does not have is refused before torch is loaded. With --plan, the Hub is not asked."""
    shop.add_run(dataset="someone/corpse")
    with FakeHub() as hub:
        shop.environment.update(hub.environment(shop.path / "hf"), HF_HUB_OFFLINE="0")
        refused = quickly(shop, "r", *there, barred=WITH_HUB)
        refused.refuses('dataset "someone/corpse": not found on the Hugging Face Hub')
        asked = len(hub.requests)
        assert asked
        assert "global steps" in quickly(shop, "r", *there, "--plan").stdout
        assert len(hub.requests) == asked
    assert not (shop.datasets / "someone").exists()


def test_the_hub_is_asked_by_one_process_of_a_machine(shop: Workshop, there: tuple[str, ...]) -> None:
    """Only one process of a machine asks the Hub, so that a refusal is printed once. Other ranks do not ask, and
    continue to the import of torch."""
    shop.add_run(dataset="someone/corpse")
    with FakeHub() as hub:
        shop.environment.update(hub.environment(shop.path / "hf"), HF_HUB_OFFLINE="0")
        shop.environment.update(rank_variables(2)[1])
        result = cold(shop, "r", *there)
        assert "ModuleNotFoundError" in result.stderr, "the rank must have reached the import of torch"
        assert not hub.requests


@pytest.mark.parametrize("option", ["train", "model"])
def test_schema(shop: Workshop, option: str) -> None:
    assert json.loads(quickly(shop, "--schema", option).stdout)["title"] == f"{option}.json"


def test_plan_of_a_run_that_has_checkpoints(shop: Workshop, there: tuple[str, ...]) -> None:
    assert shop.attempt().status == 0
    train = shop.runs / "r" / "train.json"
    train.write_text(json.dumps(json.loads(train.read_text()) | {"min_train_tokens": 2560}))
    result = quickly(shop, "r", *there, "--plan")
    assert "done already" in result.stdout
    assert "20 steps, 1,280 tokens" in result.stdout


STRAY = [
    ({"WORLD_SIZE": "8"}, "WORLD_SIZE is set, but RANK is not"),
    ({"LOCAL_RANK": "1"}, "LOCAL_RANK is set, but RANK is not"),
    ({"RANK": "1", "LOCAL_RANK": "x", "WORLD_SIZE": "-1", "LOCAL_WORLD_SIZE": "2"}, 'LOCAL_RANK is "x"'),
]


@pytest.mark.parametrize(("variables", "words"), STRAY, ids=[" ".join(variables) for variables, _ in STRAY])
@pytest.mark.parametrize("arguments", [[], ["--plan"]], ids=["train", "plan"])
def test_leftovers_of_a_launcher(shop: Workshop, arguments: list[str], variables: dict[str, str], words: str) -> None:
    """Stray variables of a launcher are refused at once, with one line. A process with a stray LOCAL_RANK must not
    wait for a first process that does not exist."""
    began = time.monotonic()
    result = shop.attempt(*arguments, environment=variables)
    assert time.monotonic() - began < SPEAKER_PATIENCE_SECONDS
    assert result.refuses().startswith(f"error: environment: {words}")


@pytest.mark.parametrize("rank", [0, 1])
def test_leftovers_that_are_complete(shop: Workshop, rank: int) -> None:
    """A process with a complete set of stray variables looks like a rank that is early. It therefore says for which
    ranks it waits, and which variable to unset."""
    variables = rank_variables(2)[rank]
    command = [str(ROOT / "ddp_train.py"), "r", str(shop.datasets), "--runs-dir", str(shop.runs)]
    process = shop.fork(command, variables, "import harness.distributed.rendezvous as r\nr.WAITING_SECONDS = 0.2\n")
    deadline = time.monotonic() + 60
    while not (said := process.read(".err")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    assert said.startswith(f"rank {rank} of 2 waits for the other 1 at 127.0.0.1:{variables['MASTER_PORT']}; ")
    assert "unset RANK" in said


def test_other_commands_need_no_launcher(shop: Workshop) -> None:
    result = shop.command("test_loss.py", "--help", environment={"WORLD_SIZE": "x", "LOCAL_RANK": ""})
    assert result.status == 0
    shop.command("test_loss.py", "d", "m", "w", environment={"WORLD_SIZE": "x", "LOCAL_RANK": ""}).refuses()
