"""Rules for imports: which packages may import which, and which modules may use certain libraries.

The tests read the sources. Imports in functions count, too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.isolation import ROOT

ROOT_MODULES = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
HARNESS_MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "harness").rglob("*.py"))
}
PACKAGES = {name for name, path in HARNESS_MODULES.items() if path.stem == "__init__"}
SOURCES = {**ROOT_MODULES, **HARNESS_MODULES}
BENCHMARKS = sorted((ROOT / "bench").rglob("*.py"))
COMMANDS = [
    name for name in ROOT_MODULES if re.search(r"^@click\.(command|group)", ROOT_MODULES[name].read_text(), re.M)
]

# The packages that each package may import besides itself. A folder of a package has its own line if it has its own
# rules. An allowed package includes its folders, but within one package each folder must be listed.
# docs/architecture.md says what each of them is for.
ROOMS = {
    "harness.common": [],
    "harness.distributed": ["harness.common"],
    "harness.data.tokenizers": ["harness.common"],
    "harness.data.preparation": ["harness.common", "harness.data.tokenizers"],
    "harness.data": ["harness.common", "harness.data.preparation", "harness.data.tokenizers"],
    "harness.model": ["harness.common"],
    "harness.runs": ["harness.common", "harness.data", "harness.model"],
    "harness.evaluation": ["harness.common", "harness.data", "harness.model", "harness.runs", "gpt"],
    "harness.evaluation.benchmarks": ["harness.common", "harness.data", "harness.model", "harness.evaluation"],
    "harness.evaluation.instruct": ["harness.common", "harness.data", "harness.model", "harness.evaluation", "gpt"],
    "harness.evaluation.judge": ["harness.common", "harness.runs", "harness.evaluation.instruct"],
    "harness.hf": ["harness.common", "harness.data", "harness.model", "harness.runs", "harness.evaluation", "gpt"],
    "harness.planning": ["harness.common", "harness.data", "harness.model", "harness.runs"],
    "harness.mirror": ["harness.common", "harness.data", "harness.model", "harness.runs", "harness.planning"],
    "harness.comparison": ["harness.common", "harness.data", "harness.model", "harness.runs", "harness.planning"],
    "harness.sweeps": [
        *("harness.common", "harness.data", "harness.model", "harness.runs", "harness.planning"),
        *("harness.mirror", "harness.comparison"),
    ],
    "harness.scaling": ["harness.common", "harness.runs"],
    "harness.training": [
        *("harness.common", "harness.distributed", "harness.data", "harness.model", "harness.runs"),
        *("harness.planning", "harness.mirror", "harness.evaluation", "gpt"),
    ],
    "compare_runs": ["harness.common", "harness.runs", "harness.planning", "harness.comparison"],
    "gpt": ["harness.common", "harness.model"],
    "checkpointing": [
        *("harness.common", "harness.distributed", "harness.data", "harness.model", "harness.runs"),
        *("harness.planning", "harness.training", "gpt"),
    ],
}
# The only modules that may use torch's collectives and the DDP wrapper.
PLACES = {
    ("torch.distributed",): {
        "harness.distributed.world",
        "harness.distributed.rendezvous",
        "harness.training.zero1",
    },
    ("torch.nn.parallel", "torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed"): {
        "harness.training.step"
    },
}
# Modules that --plan, --schema and the refusal of a wrong command need. They must not load torch.
BEFORE_TORCH = [
    "harness.distributed.environment",
    "harness.planning.experiment",
    "harness.model.config",
    "harness.runs.checkpoints",
    "harness.planning.plan",
    "harness.runs.checkpoint_meta",
    "harness.runs.summary",
    "harness.runs.metrics",
    "harness.model.tensor_names",
    "harness.data.fetch",
    "harness.comparison.records",
    "harness.comparison.table",
    "harness.comparison.against_baseline",
    "harness.comparison.charts",
    "harness.sweeps.run",
    "harness.mirror.start",
]
HELP_SECONDS = 0.5  # of processor time, because wall-clock time depends on the machine's other work
SLOW = {"torch", "matplotlib", "transformers", "openai", "lm_eval", "pyarrow", "huggingface_hub", "fsspec"}


@cache
def tree_of(source: str) -> ast.Module:
    return ast.parse(SOURCES[source].read_text(), str(SOURCES[source]))


def imported(node: ast.AST) -> list[str]:
    """Return the dotted names that an import statement loads: for `from a import b`, a and a.b, which may be a
    module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide the direction"
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def all_imports(tree: ast.AST) -> list[str]:
    """Return the names of every import in a source, including imports in functions."""
    return [name for node in ast.walk(tree) for name in imported(node)]


def imports_at_load(tree: ast.AST) -> Iterator[str]:
    """Yield the names imported when a module is loaded, without imports in functions and under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if not for_types_only(node) and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imported(node)
            yield from imports_at_load(node)


def is_or_below(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def users_of(*modules: str) -> set[str]:
    """Return the sources that import one of `modules` or use it as an attribute (torch.distributed.barrier())."""
    users = {
        source
        for source in SOURCES
        if any(is_or_below(name, module) for name in all_imports(tree_of(source)) for module in modules)
    }
    return users | {source for source in SOURCES if attributes_of(source) & set(modules)}


@cache
def attributes_of(source: str) -> set[str]:
    """Return the dotted names that a source uses."""
    return {ast.unparse(node) for node in ast.walk(tree_of(source)) if isinstance(node, ast.Attribute)}


def loaded_with(module: str) -> set[str]:
    """Return the modules of harness that are loaded when `module` is loaded, including `module`."""
    found, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name in HARNESS_MODULES and name not in found:
            found.add(name)
            waiting += imports_at_load(tree_of(name))
    return found


def test_the_sources_are_seen() -> None:
    assert {"ddp_train", "gpt", "checkpointing"} <= ROOT_MODULES.keys()
    assert {"harness.distributed.world", "harness.runs.train_config"} <= HARNESS_MODULES.keys()
    assert {"ddp_train", "test_smoke", "test_loss"} <= set(COMMANDS)
    assert "checkpointing" in all_imports(tree_of("ddp_train")), "function-level imports are read"
    assert "checkpointing" not in set(imports_at_load(tree_of("ddp_train")))


def room_of(module: str) -> str | None:
    """Return the key of ROOMS that is the module or its closest parent, or None if there is none."""
    return max((room for room in ROOMS if is_or_below(module, room)), key=len, default=None)


def package_of(room: str) -> str:
    return ".".join(room.split(".")[:2])


def may_import(room: str, other: str | None) -> bool:
    """Return True if `room` may import from `other`. If ROOMS allows another package, its folders are allowed, too.
    Folders of the same package must be listed one by one."""
    if other is None or other in {room, *ROOMS[room]}:
        return other is not None
    return package_of(other) != package_of(room) and package_of(other) in ROOMS[room]


def modules_imported(module: str) -> set[str]:
    """Return the sources of this repository that a module imports, also in functions and for type checkers. Packages
    are left out."""
    return {name for name in all_imports(tree_of(module)) if name in SOURCES and name != module} - PACKAGES


@pytest.mark.parametrize("module", [module for module in SOURCES if room_of(module)])
def test_imports_go_in_the_directions_of_the_table(module: str) -> None:
    room = room_of(module)
    assert room is not None
    wrong = {name for name in modules_imported(module) if not may_import(room, room_of(name))}
    assert not wrong, f"{module}, in {room}"


def test_nothing_below_the_root_imports_commands_or_tests() -> None:
    """No module of harness imports a command, a test or a benchmark. gpt.py is not a command, and ROOMS says who may
    import it."""
    above = {*ROOT_MODULES, "tests", "bench"} - {"gpt"}
    for module in HARNESS_MODULES:
        assert not {name.split(".")[0] for name in all_imports(tree_of(module))} & above


def test_the_table_has_every_package_and_no_circle() -> None:
    assert PACKAGES - {"harness"} <= ROOMS.keys()
    for room, allowed in ROOMS.items():
        for other in allowed:
            assert room not in ROOMS[other], f"{room} and {other}"
            assert set(ROOMS[other]) <= {*ROOMS, room}


def test_packages_hold_one_paragraph_and_nothing_else() -> None:
    for package in PACKAGES:
        tree = tree_of(package)
        paragraph = ast.get_docstring(tree)
        assert len(tree.body) == 1, package
        assert paragraph, package
        assert "\n\n" not in paragraph, package


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_another(command: str) -> None:
    assert not set(all_imports(tree_of(command))) & (set(COMMANDS) - {command})


@pytest.mark.parametrize(("libraries", "places"), PLACES.items(), ids=[each[0] for each in PLACES])
def test_what_is_used_in_a_few_places_only(libraries: tuple[str, ...], places: set[str]) -> None:
    assert users_of(*libraries) == places


def test_matplotlib_is_imported_in_charts_only() -> None:
    users = users_of("matplotlib")
    assert "harness.runs.chart" in users, "the test must find imports of matplotlib"
    assert all(re.fullmatch(r"harness\.(runs\.chart|(comparison|scaling)\.\w*charts)", name) for name in users), users


@pytest.mark.parametrize("module", BEFORE_TORCH)
def test_modules_needed_before_torch_load_no_torch(module: str) -> None:
    loaders = {
        name
        for name in loaded_with(module)
        if any(is_or_below(each, library) for each in imports_at_load(tree_of(name)) for library in SLOW)
    }
    assert not loaders, f"{module} loads {sorted(loaders)} when it is imported"


def assert_no_circle(imports: dict[str, set[str]]) -> None:
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in finished:
            for other in sorted(imports.get(name, set())):
                visit(other, (*path, name))
            finished.add(name)

    for name in imports:
        visit(name, ())


def test_no_circle_of_modules_rooms_or_packages() -> None:
    """No imports form a circle, neither among modules nor among rooms or packages. Imports in functions and for type
    checkers count, too."""
    modules = {module: modules_imported(module) for module in SOURCES if module not in PACKAGES}
    assert sum(map(len, modules.values())) > 500, "the test must find the imports"
    assert_no_circle(modules)
    for place in (room_of, lambda module: package_of(room_of(module) or module)):
        places: dict[str, set[str]] = {}
        for module, others in modules.items():
            own = place(module) or module
            places.setdefault(own, set()).update({place(other) or other for other in others} - {own})
        assert_no_circle(places)


def test_torch_load_never_trusts_a_file() -> None:
    calls = 0
    for path in [*SOURCES.values(), *BENCHMARKS]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            where = f"{path.name}:{node.lineno}"
            assert options.get("weights_only", "True") == "True", where
            if ast.unparse(node.func) == "torch.load":
                calls += 1
                assert options.get("weights_only") == "True", where
                assert options.get("map_location") == "'cpu'", where
            assert ast.unparse(node.func) not in {"pickle.load", "pickle.loads"}, where
    assert calls, "the test must find calls of torch.load"


def test_root_names_shadow_no_library() -> None:
    taken = {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names, "datasets", "tokenizers"}
    assert not {*ROOT_MODULES, "harness"} & taken


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_useful_quick_and_without_torch(command: str) -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['{command}.py', '--help']\n"
        "try:\n"
        f"    runpy.run_path({str(ROOT_MODULES[command])!r}, run_name='__main__')\n"
        "finally:\n"
        f"    print('loaded:', *sorted({SLOW} & sys.modules.keys()), file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(3):  # the fastest of three runs counts
        start = seconds_of_children()
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        seconds.append(seconds_of_children() - start)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "loaded:\n"
        assert done.stdout.startswith("Usage: ")
        if seconds[-1] < HELP_SECONDS:
            break
    assert min(seconds) < HELP_SECONDS
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    documented = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    assert len(documented) >= 5


@pytest.mark.parametrize("command", COMMANDS)
def test_help_into_a_full_disk_is_one_line(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        asked = [sys.executable, str(ROOT_MODULES[command]), "--help"]
        done = subprocess.run(asked, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stderr == "error: standard output: No space left on device\n"
    assert done.returncode == 1


def test_help_to_a_reader_who_has_gone_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    asked = [sys.executable, str(ROOT_MODULES["ddp_train"]), "--help"]
    done = subprocess.run(asked, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert done.stderr == ""


def test_the_tests_do_not_lie_in_the_root() -> None:
    """pytest looks into tests/ only, because the `test_*.py` files in the root are commands."""
    assert 'testpaths = ["tests"]' in (ROOT / "pyproject.toml").read_text()
    assert not {path.stem for path in (ROOT / "tests").glob("*.py")} & ROOT_MODULES.keys()
    assert Path(__file__).parent.name == "tests"
