"""The search for the largest microbatch: the algorithm against brute force, and -f for real on the CPU.

The memory limits are chosen from what the program takes on this machine before it has a model: threads' stacks and
libraries make that a matter of the machine.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.common.statistics import fit_line
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.results import MicrobatchSearch, read_results
from harness.runs.train_config import load_train_config
from harness.training.microbatch_probe import largest_that_fits
from tests.support.isolation import on_path
from tests.support.launch import ROOT, Result, Workshop, finish, free_port

# Little arithmetic, much memory: with dropout the CPU keeps the T x T attention weights of every head.
HUNGRY: dict[str, Any] = {"context_length": 1024, "emb_dim": 16, "n_heads": 4, "n_layers": 1, "drop_rate": 0.1}
GIB = 2**30
ROOM, MORE_ROOM = 0.3, 0.4  # GiB beyond what the program takes: for a few sequences


@given(st.integers(0, 5000), st.integers(0, 3000))
def test_the_search_agrees_with_brute_force(threshold: int, ceiling: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= threshold

    found = largest_that_fits(fits, ceiling)
    assert found == max((n for n in range(1, ceiling + 1) if n <= threshold), default=0)
    assert len(asked) == len(set(asked)), "each size is tried once"
    assert all(1 <= n <= ceiling for n in asked)
    assert len(asked) <= 2 * math.log2(found + 1) + 2, "doubling, then bisecting"
    # Never far beyond what fits: a size that is far too large may take the whole machine along.
    assert all(n <= max(1, 2 * found) for n in asked)
    assert asked == [] or asked[0] == 1


@given(st.integers(0, 5000), st.integers(0, 3000), st.lists(st.none() | st.integers(0, 6000), max_size=30))
def test_guesses_change_nothing_but_the_way(threshold: int, ceiling: int, guesses: list[int | None]) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= threshold

    found = largest_that_fits(fits, ceiling, lambda: guesses.pop(0) if guesses else None)
    assert found == min(threshold, ceiling)
    assert len(asked) == len(set(asked)) <= 2.5 * math.log2(found + 1) + 4
    assert all(1 <= n <= min(ceiling, max(1, 2 * found)) for n in asked)


@given(
    answer=st.integers(1, 1000),
    slope=st.floats(0.003, 1.0),
    fixed=st.floats(0.0, 6.0),
    power=st.floats(0.9, 1.1),
    gaps=st.floats(0.0, 0.5),
    hidden=st.integers(0, 30),
)
def test_guesses_by_a_line_that_is_none_cost_little(
    answer: int, slope: float, fixed: float, power: float, gaps: float, hidden: int
) -> None:
    """Memory that bends, has gaps between its blocks, or begins to grow beyond what the program took before."""
    peaks: list[tuple[float, float]] = []
    asked: list[int] = []

    def memory(size: int) -> float:
        return fixed + slope * (max(0, size - hidden) ** power + gaps * math.sin(size))

    def fits(size: int) -> bool:
        asked.append(size)
        if size <= answer:
            peaks.append((size, memory(size)))
        return size <= answer

    def guess() -> int | None:
        line = fit_line(peaks)
        return int((memory(answer) - line[1]) / line[0]) if line and line[0] > 1e-6 else None

    assert largest_that_fits(fits, 10**6, guess) == answer
    assert len(asked) <= 2 * math.log2(answer + 1) + 5, "three more than without guesses"


@pytest.mark.parametrize("answer", [129, 175, 236, 253])
def test_a_guess_that_is_refuted_costs_nothing(answer: int) -> None:
    """The peaks of sizes up to 128 give room for 260, but 256 does not fit."""
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= answer

    assert largest_that_fits(fits, 10_000, lambda: 260) == answer
    assert asked[:9] == [2**n for n in range(9)]
    assert len(asked[9:]) == 7, "halvings alone"


def test_a_right_guess_ends_the_search_soon() -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= 37

    assert largest_that_fits(fits, 10_000, lambda: 37 if len(asked) > 1 else None) == 37
    assert asked == [1, 2, 4, 8, 16, 32, 37, 38]


@given(
    st.floats(-1e9, 1e9), st.floats(-1e12, 1e12), st.lists(st.integers(1, 4096), min_size=2, max_size=20, unique=True)
)
def test_the_fit_is_exact_on_a_line(slope: float, intercept: float, sizes: list[int]) -> None:
    line = fit_line([(float(x), slope * x + intercept) for x in sizes])
    assert line is not None
    scale = abs(slope) * max(sizes) + abs(intercept) + 1
    assert line[0] == pytest.approx(slope, abs=1e-9 * scale)
    assert line[1] == pytest.approx(intercept, abs=1e-9 * scale * max(sizes))


def test_the_fit_of_scattered_points_and_of_too_few() -> None:
    assert fit_line([(1, 1), (2, 3), (3, 2)]) == pytest.approx((0.5, 1.0))
    assert fit_line([(6, 24), (13, 40), (27, 80), (64, 160)]) == pytest.approx(
        (2.346, 11.48), abs=0.01
    )  # the lab notebook's
    assert fit_line([]) is None
    assert fit_line([(4, 1)]) is None
    assert fit_line([(4, 1), (4, 2)]) is None


@pytest.fixture(scope="module")
def base_gib(workshop: Workshop) -> float:
    """Writable memory of the command before it builds a model, which a limit has to leave room for, as it says."""
    command = cold_command(workshop, "r", "-f", "--memory-limit-gib", "0.1")
    result = finish([workshop.spawn(command, {})], expect=1, timeout=60)
    assert len(result.error_lines) == 1
    found = re.search(r"error: the program alone takes (\d\.\d\d) GiB, and the limit is 0\.10 GiB; ", result.stderr)
    assert found, result.stderr
    return float(found[1])


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("search"), {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=200_000)
    shop.add_run(model=HUNGRY, gradient_accumulation_steps=None, price_per_hour=4.0)
    return shop


def search(shop: Workshop, *arguments: str, limit: float | None, ranks: int = 1, prelude: str = "") -> Result:
    options = [] if limit is None else ["--memory-limit-gib", f"{limit:.3f}"]
    return shop.train("r", "-f", *options, *arguments, ranks=ranks, expect=None, prelude=prelude)


def answer(result: Result) -> int:
    """N of a search that went well; what was printed must be consistent with it."""
    assert result.status == 0, result.stdout + result.stderr
    assert result.error_lines == []
    found = re.findall(r"^Max microbatch size was (\d+)$", result.stdout, re.MULTILINE)
    assert len(found) == 1, result.stdout
    tried = probes(result)
    number = int(found[0])
    assert tried[number] == "fits"
    assert all((size <= number) == (verdict == "fits") for size, verdict in tried.items())
    if "limited by the data" not in result.stdout:
        assert tried[number + 1] == "out of memory", "the next size was tried, and did not fit"
    return number


def probes(result: Result) -> dict[int, str]:
    found = re.findall(r"^microbatch (\d+): (fits|out of memory)$", result.stdout, re.MULTILINE)
    assert len(found) == len({size for size, _ in found}), "each size is tried, and printed, once"
    return {int(size): verdict for size, verdict in found}


def fitted_line(result: Result) -> tuple[float, float]:
    match = re.search(r"^Memory: ([\d.]+) GiB per sequence \+ ([\d.]+) GiB fixed", result.stdout, re.MULTILINE)
    assert match, result.stdout
    return float(match[1]), float(match[2])


@pytest.fixture(scope="module")
def first(workshop: Workshop, base_gib: float) -> tuple[int, Result]:
    result = search(workshop, limit=base_gib + ROOM)
    return answer(result), result


def test_the_answer_fits_and_the_next_does_not(first: tuple[int, Result], base_gib: float) -> None:
    number, result = first
    assert number >= 2
    per_sequence, fixed = fitted_line(result)
    weights = 4 * 1024 * 1024 * 4 / GIB  # of all heads' attention, of which some are kept, and some in the making
    assert weights < per_sequence < 8 * weights
    assert fixed < base_gib + 0.2
    # The line is a prediction that someone will use: it must not promise more than a sequence beyond the answer.
    assert fixed + per_sequence * number <= base_gib + ROOM


def test_the_line_explains_the_limit(first: tuple[int, Result], base_gib: float) -> None:
    """N + 1 sequences do not fit, or hardly, by the printed line: otherwise it misleads about other cards."""
    number, result = first
    per_sequence, fixed = fitted_line(result)
    assert fixed + per_sequence * (number + 2) > base_gib + ROOM


@pytest.mark.slow
def test_a_larger_limit_gives_a_larger_answer(first: tuple[int, Result], workshop: Workshop, base_gib: float) -> None:
    assert answer(search(workshop, limit=base_gib + MORE_ROOM)) > first[0]


@pytest.mark.slow
def test_it_fits_again_and_the_data_are_a_ceiling(first: tuple[int, Result], base_gib: float, tmp_path: Path) -> None:
    """N is found again, and nothing fails, with just enough data for N sequences and room for more (the run also
    samples). --write writes it."""
    number, _ = first
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=number * 1024 + 1)
    run = shop.add_run(model=HUNGRY, gradient_accumulation_steps=None)
    # The sample prompt comes first, and looks like the key.
    odd = (
        '{\n  "dataset":"local/letters", "sample_prompt": "\\"microbatch_size\\": 7 \\u00e9 é", "sample_interval": 7,\n'
    )
    odd += '\n\t"microbatch_size"  :   7 ,"min_train_tokens" : -1,"start_train_token":0,"checkpoint_interval": 7}'
    (run / "train.json").write_text(odd, encoding="utf-8")
    model = (run / "model.json").read_bytes()
    result = search(shop, "--write", limit=base_gib + MORE_ROOM)
    assert answer(result) == number
    assert "limited by the data" in result.stdout
    assert "out of memory" not in result.stdout
    written = (run / "train.json").read_text(encoding="utf-8")
    assert written == odd.replace('"microbatch_size"  :   7 ', f'"microbatch_size"  :   {number} ')
    assert load_train_config(run / "train.json").microbatch_size == number
    assert (run / "model.json").read_bytes() == model
    assert {path.name for path in run.iterdir()} == {"model.json", "train.json", "results"}
    assert f"microbatch_size is now {number}" in result.stdout


def test_write_with_a_global_batch_size(tmp_path: Path) -> None:
    """No limit, but few data after the slice's start: 10 sequences for 2 ranks are 5 each; a global batch of 12
    sequences allows 3 of them."""
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=100 + 16 * 10 + 1)
    run = shop.add_run(start_train_token=100, gradient_accumulation_steps=None, global_batch_size=12, microbatch_size=1)
    before = (run / "train.json").read_text()
    result = search(shop, "--write", limit=None, ranks=2)
    assert answer(result) == 5
    assert (run / "train.json").read_text() == before.replace('"microbatch_size": 1', '"microbatch_size": 3')
    assert load_train_config(run / "train.json").accumulation_steps(2) == 2


def test_a_search_comes_to_an_end(workshop: Workshop) -> None:
    """No probe is begun that would end after the time for the search: what has fitted by then is the answer."""
    hurried = "import harness.training.microbatch_probe\nharness.training.microbatch_probe.SEARCH_SECONDS = 0.0\n"
    result = workshop.train("r", "-f", ranks=2, prelude=hurried)
    assert probes(result) == {1: "fits"}
    assert "Max microbatch size was 1\nMore may fit; the search has ended, since trying 2 would take" in result.stdout


# Prints the sequences of each forward pass of rank 0 and the bytes of gradients that it meets, and is out of memory
# where 6 sequences meet any. Not of the tiny model that a search begins with.
GRADIENTS = """
import os
import gpt
plain = gpt.GPTModel.forward
def forward(self, inputs, *others):
    held = sum(each.grad.nbytes for each in self.parameters() if each.grad is not None)
    if self.config.emb_dim == 16 and os.environ.get("RANK", "0") == "0":
        print(f"pass {len(inputs)} {held}", flush=True)
        if held and len(inputs) >= 6:
            raise MemoryError
    return plain(self, inputs, *others)
gpt.GPTModel.forward = forward
"""


def passes(result: Result) -> list[tuple[int, int]]:
    """Sequences of each forward pass, and bytes of gradients that it met."""
    return [(int(size), int(held)) for size, held in re.findall(r"^pass (\d+) (\d+)$", result.stdout, re.MULTILINE)]


@pytest.mark.parametrize(("ranks", "accumulated"), [(1, 1), (1, 2), (2, 1)])
def test_a_probe_meets_the_gradients_that_training_meets(ranks: int, accumulated: int, tmp_path: Path) -> None:
    """On several ranks gradients are the buckets of their exchange, there in each forward pass."""
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=16 * 2 * ranks * accumulated + 1)
    shop.add_run(gradient_accumulation_steps=accumulated, microbatch_size=1, min_train_tokens=-1)
    searched, trained = (
        max(held for _, held in passes(shop.train("r", *options, ranks=ranks, prelude=GRADIENTS)))
        for options in (["-f"], [])
    )
    assert searched == trained
    assert bool(trained) == (ranks > 1 or accumulated > 1)


def test_a_size_that_failed_leaves_no_gradients(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=16 * 8 * 2 + 1)
    shop.add_run()
    result = search(shop, limit=None, prelude=GRADIENTS)
    assert answer(result) == 5
    firsts = [held for (before, _), (size, held) in itertools.pairwise([(0, 0), *passes(result)]) if size != before]
    assert len(firsts) >= 5
    assert not any(firsts), "the next size would have to fit beside them"


def test_without_write_only_what_was_measured_is_written(
    first: tuple[int, Result], workshop: Workshop, base_gib: float
) -> None:
    """The line that was printed can be drawn again from it."""
    number, result = first
    run = RunDirectory(workshop.runs / "r")
    assert json.loads(run.train_json.read_text())["microbatch_size"] == 2
    assert {path.name for path in run.path.iterdir()} == {"model.json", "train.json", "results"}
    results = read_results(run)
    assert results.problems == []
    kept = next(
        each for each in results.of(MicrobatchSearch) if each.asked_gib == pytest.approx(base_gib + ROOM, abs=0.001)
    )
    tried = probes(result)
    assert (kept.largest, kept.world_size, kept.compiled, kept.is_all_data) == (number, 1, False, False)
    assert kept.smallest_failed == min(size for size, verdict in tried.items() if verdict != "fits")
    assert kept.limit_gib == pytest.approx(base_gib + ROOM, abs=0.001)
    assert kept.usable_gib == pytest.approx(kept.limit_gib - 1 / 16)
    assert {each.microbatch_size for each in kept.tried} <= {
        size for size, verdict in tried.items() if verdict == "fits"
    }
    line = fit_line([(each.microbatch_size, each.gib) for each in kept.tried])
    assert line == pytest.approx(fitted_line(result), abs=0.0006)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_limit_too_small_for_anything(workshop: Workshop, base_gib: float, ranks: int) -> None:
    result = search(workshop, limit=base_gib - 0.1, ranks=ranks)
    assert result.status == 1
    assert "Traceback" not in result.stderr
    assert "Max microbatch size" not in result.stdout
    assert len(result.error_lines) == 1
    limit = rf"and the limit is {base_gib - 0.1:.2f} GiB; raise --memory-limit-gib"
    assert re.fullmatch(rf"error: the program alone takes [\d.]+ GiB, {limit}", result.error_lines[0])


@pytest.mark.slow
def test_limits_just_above_the_program_get_an_answer(base_gib: float, tmp_path: Path, exhaustive: bool) -> None:
    """N, or one line that says why not: no library ends the process or waits for memory, wherever the limit falls."""
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"})
    shop.add_dataset(tokens=500)
    shop.add_run(model={"emb_dim": 512, "n_heads": 8}, gradient_accumulation_steps=None)
    limits = [base_gib + step / 100 for step in (range(-3, 25) if exhaustive else (0, 2, 6))]
    for limit in limits:
        command = cold_command(shop, "r", "-f", "--memory-limit-gib", f"{limit:.2f}")
        result = finish([shop.spawn(command, {})], expect=None, timeout=60)
        if result.status == 0:
            answer(result)
            continue
        assert (result.status, len(result.stderr.splitlines())) == (1, 1), result.stderr
        assert re.match("error: (the program alone takes|not even a microbatch of 1 fits)", result.stderr)


def test_the_tiny_twin_of_a_run(tmp_path: Path) -> None:
    """It takes next to no memory, whatever the run's own sizes are."""
    shop = Workshop(tmp_path)
    large = {"vocab_size": 10**7, "emb_dim": 8192, "n_heads": 64, "n_layers": 20, "context_length": 4096}
    run = shop.add_run(model=large, compile=True)
    tiny = Experiment.load(RunDirectory(run), shop.datasets).tiny()
    assert tiny.model.parameters * 4 * 4 < 2**25
    assert tiny.config.compile is False


@pytest.mark.slow
def test_a_hard_limit_of_the_system_below_the_option(tmp_path: Path, base_gib: float) -> None:
    """`ulimit -d` binds whatever the option says; the search then works within it."""
    shop = Workshop(tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    shop.add_dataset(tokens=16 * 2 + 1)
    shop.add_run(gradient_accumulation_steps=None)
    command = [
        sys.executable,
        str(ROOT / "ddp_train.py"),
        *"r",
        str(shop.datasets),
        "--runs-dir",
        str(shop.runs),
        "-f",
        "--memory-limit-gib",
        "64",
    ]
    hard = int((base_gib + 1) * GIB)
    result = finish([shop.spawn(["prlimit", f"--data={hard}:{hard}", *command], {})], expect=None, timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    assert answer(result) == 2


BALLAST = "import mmap, os\nif os.environ.get('RANK') == '1':\n    ballast = mmap.mmap(-1, {bytes}, mmap.MAP_PRIVATE)\n"


def search_on_two_ranks(shop: Workshop, limit: float) -> int:
    outputs = on_two_ranks(shop, "r", "-f", "--memory-limit-gib", f"{limit:.3f}")
    assert "microbatch" not in outputs[1][0], "rank 0 alone prints"
    return answer(Result(0, *outputs[0]))


def on_two_ranks(shop: Workshop, *arguments: str, limits: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Cold processes: the memory of forked ones is partly that of the process they were forked from."""
    command = cold_command(shop, *arguments, limits=limits)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [shop.spawn(command, shared | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs


def cold_command(shop: Workshop, name: str, *arguments: str, limits: Sequence[str] = ()) -> list[str]:
    command = [*limits, sys.executable, str(ROOT / "ddp_train.py"), name, str(shop.datasets)]
    return [*command, *arguments, "--runs-dir", str(shop.runs)]


def limits_of(gib: float) -> list[str]:
    return ["prlimit", f"--data={int(gib * GIB)}"]


def add_training(shop: Workshop, size: int, ranks: int = 1) -> Path:
    """A run like the one that was searched for, of four steps, with validation, checkpoints and charts between them."""
    settings = {"gradient_accumulation_steps": None, "validation_interval": 2, "validation_batches": 1}
    run = shop.add_run(f"{ranks}x{size}", model=HUNGRY, microbatch_size=size, **settings)
    train = json.loads((run / "train.json").read_text())
    (run / "train.json").write_text(json.dumps(train | {"min_train_tokens": size * 1024 * ranks * 4}))
    return run


def assert_trained(run: Path) -> None:
    assert (run / "summary.json").is_file()
    assert (run / "training-run-chart.png").is_file()
    assert len(list((run / "checkpoints").glob("*-iteration-*"))) == 3


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Workshop with tokens enough to validate on."""
    shop = Workshop(tmp_path_factory.mktemp("roomy"), {"CUDA_VISIBLE_DEVICES": ""})
    folder = shop.add_dataset(tokens=400_000)
    shutil.copyfile(folder / "train.safetensors", folder / "validation.safetensors")
    shop.add_run(model=HUNGRY, gradient_accumulation_steps=None, validation_batches=1)
    return shop


def test_what_validation_wants_is_said(tmp_path: Path) -> None:
    """A microbatch that fits may be too large for the validation split: training with it would be refused."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=400)
    shop.add_run(gradient_accumulation_steps=None)
    result = search(shop, limit=None)
    (note,) = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert note.startswith(f"note: with a microbatch of {answer(result)}, the validation split of local/letters is too")
    assert "start_val_token + validation_batches x microbatch" in note


@pytest.mark.slow
def test_the_answer_trains_under_the_same_limit(roomy: Workshop, base_gib: float) -> None:
    """The whole of training, in processes that the system gives no more memory; and not much more than it would."""
    limit = round(base_gib + MORE_ROOM, 3)
    command = cold_command(roomy, "r", "-f", "--memory-limit-gib", str(limit))
    result = finish([roomy.spawn(command, {})], expect=0, timeout=200)
    number = answer(result)
    assert "trying 1 ...\n" in result.stdout
    assert re.search(r"^trying \d+, about \d+ s \.\.\.$", result.stdout, re.MULTILINE)
    assert f"limit {limit:.2f} GiB, of which 0.06 GiB are left as a reserve)" in result.stdout
    run = add_training(roomy, number)
    finish([roomy.spawn(cold_command(roomy, run.name, limits=limits_of(limit)), {})], expect=0, timeout=200)
    assert_trained(run)
    # The reserve is one sequence of this model, or two.
    more = add_training(roomy, number + 3)
    failed = finish([roomy.spawn(cold_command(roomy, more.name, limits=limits_of(limit)), {})], expect=1, timeout=200)
    assert "error: out of memory with microbatch_size" in failed.stderr


@pytest.fixture(scope="module")
def alike(roomy: Workshop, base_gib: float) -> int:
    return search_on_two_ranks(roomy, round(base_gib + MORE_ROOM, 3))


@pytest.mark.slow
def test_two_ranks_agree_on_the_smaller_answer(roomy: Workshop, alike: int, base_gib: float, tmp_path: Path) -> None:
    """Rank 1's verdict counts if it runs out of memory first, and rank 0 does not wait for it forever."""
    (tmp_path / "sitecustomize.py").write_text(BALLAST.format(bytes=int(0.2 * GIB)))
    uneven = Workshop(roomy.path, roomy.environment | on_path(tmp_path))
    assert 1 <= search_on_two_ranks(uneven, base_gib + MORE_ROOM) < alike


@pytest.mark.slow
def test_the_answer_of_two_ranks_trains_under_the_same_limit(roomy: Workshop, alike: int, base_gib: float) -> None:
    """The limit is each process's."""
    run = add_training(roomy, alike, ranks=2)
    on_two_ranks(roomy, run.name, limits=limits_of(round(base_gib + MORE_ROOM, 3)))
    assert_trained(run)


@pytest.mark.slow
def test_a_probe_leaves_the_process_usable(base_gib: float, workshop: Workshop) -> None:
    """The verdict on a size does not depend on the sizes tried before it: small, far too large, small again."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import gpt; from harness.training.step import build_step\n"
        "from harness.planning.experiment import Experiment; from harness.runs.directory import RunDirectory\n"
        "from harness.distributed.world import World\n"
        "from harness.training.microbatch_probe import MicrobatchProbe; from harness.data.dataset import Dataset\n"
        "from harness.common.memory import *\n"
        "world = World.join(); runs, datasets = Path(sys.argv[2]), Path(sys.argv[3])\n"
        "e = Experiment.load(RunDirectory.find(runs, 'r'), datasets)\n"
        "tokens = Dataset.open(datasets, e.config.dataset).split('train')\n"
        "limit_memory(world.device, float(sys.argv[4]), 1)\n"
        "def build():\n"
        "    model = gpt.GPTModel(e.model)\n"
        "    return build_step(model, model, e.config)\n"
        "probe = MicrobatchProbe(build, world, tokens, 0, e.model.context_length)\n"
        "for n in (2, 150, 1, 40, 2, 190, 3, 1): probe.fits(n)\n"
    )
    command = [sys.executable, "-c", program, str(ROOT), str(workshop.runs), str(workshop.datasets)]
    done = subprocess.run(
        [*command, str(base_gib + ROOM)], capture_output=True, text=True, timeout=100, env=_environment(workshop)
    )
    lines = [line.split(": ")[1] for line in done.stdout.splitlines() if line.startswith("microbatch")]
    assert lines == ["fits", "out of memory", "fits", "out of memory", "fits", "out of memory", "fits", "fits"], (
        done.stderr
    )


def _environment(shop: Workshop) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **shop.environment}
