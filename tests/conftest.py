"""Options, hooks and fixtures of all tests.

The option --exhaustive decides at how many places fault tests inject their faults. tests/support/isolation.py keeps
tests away from files that are not theirs. A test that injects a fault is marked `@pytest.mark.fault("its name", "its
outcome")`, and the mark is a line of docs/RELIABILITY.md.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import isolation  # must come before every import of torch
from tests.support.jobs import set_pace
from tests.support.launch import PATIENCE_SECONDS, Workshop, finish
from tests.support.stopped_run import build_stopped_run
from tests.support.straight import build_straight_run

FILES_FOR_SEVERAL_PROCESSES = 4
# The slowest files, the slowest first. They start first, so that the other processes do not wait for one of them at the
# end.
LONGEST = (
    *("nullcuda/command", "nullcuda/compiled_steps", "nullcuda/steps", "nullcuda/compile_cache"),
    *("commands/check_machine", "nullcuda/attention", "training/golden_runs", "commands/quickstart", "faults/signals"),
    *("commands/rent", "faults/nodes", "faults/kills", "training/microbatch_search", "training/on_end", "faults/ranks"),
    *("faults/saving_in_background", "faults/launcher", "data/interrupted_preparing", "faults/mirror"),
    *("tests/architecture", "sweeps/sweep_run", "sweeps/real_sweeps", "training/mixtures", "faults/full_disks"),
    "evaluation/benchmarks",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="Inject faults at all places, not at a few.")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run a few files in one process, because each process has to load torch first."""
    files = {each.partition("::")[0] for each in config.args}
    is_few = len(files) < FILES_FOR_SEVERAL_PROCESSES and all(each.endswith(".py") for each in files)
    if is_few:
        config.option.numprocesses, config.option.dist = 0, "no"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name, outcome): injects a fault, and is a line of docs/RELIABILITY.md")
    config.addinivalue_line("markers", "slow: takes long; only with `-m slow`, or by its file")
    # How long the first example takes depends on the machine and its load.
    settings.register_profile("any_speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any_speed")
    is_all = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_all and not config.option.markexpr and not config.getoption("--exhaustive"):
        config.option.markexpr = "not slow"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail a test if the test, its fixtures or its processes did something that tests may not do."""
    yield
    if found := isolation.trespasses():
        pytest.fail("\n".join(["what tests may not touch (tests/support/isolation.py):", *found]), pytrace=False)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without a slow test under `-m slow`, so that they are not loaded."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if config.option.markexpr == "slow" and is_test and "mark.slow" not in collection_path.read_text(encoding="utf-8"):
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if config.getoption("--exhaustive") else ():
        item.add_marker(pytest.mark.timeout(1800))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(f"{item.path.parent.name}/{item.path.stem[5:]}", len(order)))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, because `ddp_train.py -f` collects after each batch size that
    it tries."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Undo `gc.freeze`, for libraries that clean up after themselves when the process ends."""
    gc.unfreeze()


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A folder for runs, with a small dataset."""
    made = Workshop(tmp_path)
    made.add_dataset()
    return made


@pytest.fixture
def hub() -> Iterator[Any]:
    """A Hub on the loopback interface, without datasets."""
    from tests.support.fake_hub import FakeHub

    with FakeHub() as running:
        yield running


@pytest.fixture(scope="session")
def exhaustive(request: pytest.FixtureRequest) -> bool:
    """True if faults are injected at all places. CI injects them at a few places."""
    return bool(request.config.getoption("--exhaustive"))


@pytest.fixture(scope="session")
def stopped_shop(tmp_path_factory: pytest.TempPathFactory, exhaustive: bool) -> Workshop:
    """An undisturbed run and a killed run, trained once for all test modules that start from them."""
    set_pace(exhaustive)
    return build_stopped_run(tmp_path_factory.mktemp("stopped"))


@pytest.fixture(scope="session")
def straight_shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """An undisturbed run of two ranks. Test modules compare the ends of their own runs with its end."""
    return build_straight_run(tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="session")
def straight(straight_shop: Workshop) -> Path:
    return straight_shop.runs / "straight"


@pytest.fixture(scope="session")
def finished_shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A run that has trained to its end. Its train.json asks for more tokens, so that the run can be resumed."""
    from tests.support.hostile import finished_run  # imports hypothesis

    return finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The quickstart run of README's first command, trained on the dataset that the command made. The run has only
    twenty steps, with half the microbatch size."""
    shop = Workshop(tmp_path_factory.mktemp("quickstart"))
    short = {"validation_interval": 10, "validation_sequences": 16, "warmup_steps": 5, "microbatch_size": 8}
    shop.add_shipped_run("quickstart", min_train_tokens=20 * 2 * 8 * 128, **short)
    done = finish([shop.start_processes("quickstart")], expect=0, timeout=PATIENCE_SECONDS)
    (shop.path / "printed").write_text(done.stdout)
    return shop
