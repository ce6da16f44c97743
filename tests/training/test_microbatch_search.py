"""The search for the largest microbatch: the algorithm against brute force, and the real command with -f on the CPU.

The memory limits of these tests are added to `base_gib`: the reserve plus the memory that the program uses before it
builds a model. That memory is measured, because it depends on the machine's libraries and threads.
"""

from __future__ import annotations

import json
import math
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import linear_regression
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn import functional

import gpt
from harness.common.errors import UserError
from harness.common.memory import MemoryLimit, limit_memory
from harness.distributed.world import World
from harness.planning.experiment import Experiment
from harness.runs.directory import RunDirectory
from harness.runs.train_config import load_train_config
from harness.training import batch_size_finder
from harness.training.batch_size_finder import MicrobatchSearcher, largest_that_fits, largest_with_data
from tests.model.test_levers import ALL
from tests.support.in_process import InProcess
from tests.support.launch import PATIENCE_SECONDS, ROOT, Result, Workshop, finish, rank_variables

# This model needs little arithmetic and much memory: with dropout the CPU stores the T x T attention weights of each
# head.
HUNGRY: dict[str, Any] = {"context_length": 1024, "emb_dim": 16, "n_heads": 4, "n_layers": 1, "drop_rate": 0.1}
GIB = 2**30
ALONE = World(0, 0, 1, 1, torch.device("cpu"))
LEVERS = {**ALL, "qkv_bias": False, "n_heads": 4, "head_dim": 6, "n_layers": 2} | {
    "moe": {"num_experts": 4, "num_active_experts": 2}
}
ROOM = 0.3  # GiB above base_gib, enough for a few sequences
TWO_SEQUENCES = 0.1  # GiB


class Sizes:
    """Simulated device on which sizes up to `largest` fit. Records the sizes that a search tries and the memory of
    those that fit, and guesses the answer from a line through that memory."""

    def __init__(self, largest: int, memory: Callable[[int], float] = float, limit: float | None = None) -> None:
        self.asked: list[int] = []
        self.peaks: list[tuple[float, float]] = []
        self.largest, self.memory, self.limit = largest, memory, memory(largest) if limit is None else limit

    def fits(self, size: int) -> bool:
        self.asked.append(size)
        if size <= self.largest:
            self.peaks.append((size, self.memory(size)))
        return size <= self.largest

    def guess(self) -> int | None:
        if len(self.peaks) < 2:
            return None
        slope, intercept = linear_regression(*zip(*self.peaks, strict=True))
        return int((self.limit - intercept) / slope) if slope > 1e-6 else None


@given(st.integers(0, 5000), st.integers(0, 3000), st.lists(st.none() | st.integers(0, 6000), max_size=30))
def test_the_search_agrees_with_brute_force(threshold: int, ceiling: int, guesses: list[int | None]) -> None:
    """With or without guesses, the search finds the largest size that fits. Guesses change only the sizes that are
    tried."""
    sizes, has_guesses = Sizes(threshold), bool(guesses)
    found = largest_that_fits(sizes.fits, ceiling, lambda: guesses.pop(0) if guesses else None)
    assert found == min(threshold, ceiling)
    assert len(sizes.asked) == len(set(sizes.asked)), "each size is tried once"
    most = 2.5 * math.log2(found + 1) + 4 if has_guesses else 2 * math.log2(found + 1) + 2
    assert len(sizes.asked) <= most, "more sizes were tried than doubling and then bisecting needs"
    # No tried size is far above the answer, because a size that is far too large may use up the machine's memory.
    assert all(1 <= n <= min(ceiling, max(1, 2 * found)) for n in sizes.asked)


@given(
    answer=st.integers(1, 1000),
    slope=st.floats(0.003, 1.0),
    fixed=st.floats(0.0, 6.0),
    power=st.floats(0.9, 1.1),
    gaps=st.floats(0.0, 0.5),
    hidden=st.integers(0, 30),
)
def test_guesses_from_memory_that_is_not_linear_cost_little(
    answer: int, slope: float, fixed: float, power: float, gaps: float, hidden: int
) -> None:
    """Guesses by a straight line cost at most three tries more than a search without guesses, even where memory does
    not follow the line: where it bends, where the allocator leaves gaps, and where it first grows after some
    sequences."""
    sizes = Sizes(answer, lambda n: fixed + slope * (max(0, n - hidden) ** power + gaps * math.sin(n)))
    assert largest_that_fits(sizes.fits, 10**6, sizes.guess) == answer
    assert len(sizes.asked) <= 2 * math.log2(answer + 1) + 5, "three more than without guesses"


@given(st.integers(1, 900), st.floats(0.05, 2.0), st.floats(0.0, 6.0), st.floats(0.0, 0.05))
def test_sizes_are_few_where_each_is_compiled(answer: int, slope: float, fixed: float, bend: float) -> None:
    """At most nine sizes are compiled if memory follows a line except for small gaps. At 30 s for each compilation the
    search takes less than five minutes."""

    def memory(size: int) -> float:
        return fixed + slope * size + bend * math.sin(size)

    limit = fixed + slope * (answer + 0.5) + bend
    sizes = Sizes(max(n for n in range(answer, answer + 4) if memory(n) <= limit or n == answer), memory, limit)
    found = largest_that_fits(sizes.fits, 10**6, sizes.guess, growth=8, fineness=64)
    assert found in [size for size, _ in sizes.peaks]
    assert found >= answer * 63 / 64 - 1
    assert len(sizes.asked) <= 9


def test_a_right_guess_ends_the_search_and_a_refuted_one_costs_nothing() -> None:
    """The search ends when a right guess and the next size have been tried. A refuted guess costs no extra try: if 256
    does not fit, a guess of 260 is ignored, and the search bisects between 128 and 256."""
    sizes = Sizes(37)
    assert largest_that_fits(sizes.fits, 10_000, lambda: 37 if len(sizes.asked) > 1 else None) == 37
    assert sizes.asked == [1, 2, 4, 8, 16, 32, 37, 38]
    for answer in (129, 175, 236, 253):
        sizes = Sizes(answer)
        assert largest_that_fits(sizes.fits, 10_000, lambda: 260) == answer
        assert sizes.asked[:9] == [2**n for n in range(9)]
        assert len(sizes.asked[9:]) == 7, "after 256 failed, the search did not only bisect"


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("search"))
    shop.add_dataset(tokens=200_000)
    shop.add_run(model=HUNGRY, gradient_accumulation_steps=None, price_per_hour=4.0)
    return shop


def search(shop: Workshop, *arguments: str, limit: float | None, ranks: int = 1, prelude: str = "") -> Result:
    options = [] if limit is None else ["--memory-limit-gib", f"{limit:.3f}"]
    return shop.train("r", "-f", *options, *arguments, ranks=ranks, expect=None, prelude=prelude)


def answer(result: Result) -> int:
    """Return N of "Max microbatch size was N", after checking that the search succeeded and that all it printed agrees
    with N."""
    assert result.status == 0, result.stdout + result.stderr
    assert result.error_lines == []
    assert "leaked" not in result.stderr
    found = re.findall(r"^Max microbatch size was (\d+)$", result.stdout, re.MULTILINE)
    assert len(found) == 1, result.stdout
    tried = probes(result)
    number = int(found[0])
    assert tried[number] == "fits"
    assert all((size <= number) == (verdict == "fits") for size, verdict in tried.items())
    if "limited by the data" not in result.stdout:
        assert tried[number + 1] == "out of memory", "the next larger size was not tried, or fits"
    return number


VERDICTS = ("fits", "out of memory")


def probes(result: Result) -> dict[int, str]:
    found = re.findall(r"^microbatch (\d+): (fits|out of memory)$", result.stdout, re.MULTILINE)
    assert len(found) == len({size for size, _ in found}), "a size was tried more than once"
    return {int(size): verdict for size, verdict in found}


@pytest.fixture(scope="module")
def base_gib(workshop: Workshop) -> float:
    """Smallest useful limit in GiB: the reserve plus the memory that the program uses before it builds a model, as the
    error message gives it."""
    line = search(workshop, limit=0.1).refuses(status=1)
    found = re.search(r"fits in 0\.10 GiB, of which (\d\.\d\d) GiB are the program's own and 0\.06 ", line)
    assert found, line
    return float(found[1]) + 1 / 16


@pytest.fixture(scope="module")
def first(workshop: Workshop, base_gib: float) -> tuple[int, Result]:
    result = search(workshop, limit=base_gib + ROOM)
    return answer(result), result


@pytest.mark.slow
def test_the_answer_fits_and_the_next_does_not(first: tuple[int, Result], workshop: Workshop, base_gib: float) -> None:
    """Users predict memory from the formula that the command prints. For the limit of this search, it predicts the
    answer or one sequence more. Without --write the search leaves train.json unchanged and writes a result, from which
    the formula can be computed again."""
    number, result = first
    assert number >= 2
    match = re.search(r"^Memory: ([\d.]+) GiB per sequence \+ ([\d.]+) GiB fixed", result.stdout, re.MULTILINE)
    assert match, result.stdout
    per_sequence, fixed = float(match[1]), float(match[2])
    # Attention weights of all four heads. A forward pass keeps several tensors of this size and computes others.
    weights = 4 * 1024 * 1024 * 4 / GIB
    assert weights < per_sequence < 8 * weights
    assert fixed < base_gib + 0.2
    limit = pytest.approx(base_gib + ROOM, abs=0.001)
    assert fixed + per_sequence * number <= base_gib + ROOM
    assert fixed + per_sequence * (number + 2) > base_gib + ROOM, "the line predicts two sequences more than fit"

    run = RunDirectory(workshop.runs / "r")
    assert json.loads(run.train_json.read_text())["microbatch_size"] == 2
    assert {path.name for path in run.path.iterdir()} == {"model.json", "train.json", "results"}
    results = [json.loads(path.read_text()) for path in run.results.glob("microbatch-search-*.json")]
    kept = next(each for each in results if each["asked_gib"] == limit)
    sizes = {verdict: {size for size, found in probes(result).items() if found == verdict} for verdict in VERDICTS}
    said = {key: kept[key] for key in ("largest", "world_size", "compiled", "is_all_data")}
    assert said == {"largest": number, "world_size": 1, "compiled": False, "is_all_data": False}
    assert kept["smallest_failed"] == min(sizes["out of memory"])
    assert kept["limit_gib"] == limit
    assert kept["usable_gib"] == pytest.approx(kept["limit_gib"] - 1 / 16)
    assert {each["microbatch_size"] for each in kept["tried"]} == sizes["fits"]
    line = linear_regression(*zip(*((each["microbatch_size"], each["gib"]) for each in kept["tried"]), strict=True))
    assert tuple(line) == pytest.approx((per_sequence, fixed), abs=0.0006)


@pytest.mark.parametrize(
    ("ranks", "batches", "found", "written"),
    [
        pytest.param(2, '"batch_ramp": [[0, 8], [100, 12]]', 4, 2, marks=pytest.mark.slow),
        (1, '"global_batch_size": 4', 4, 4),
    ],
)
def test_write_changes_one_number_and_nothing_else(
    tmp_path: Path, ranks: int, batches: str, found: int, written: int
) -> None:
    """--write replaces only the number after the key "microbatch_size", although a sample prompt before it contains the
    same text.

    On 2 ranks, global batches of 8 and of 12 sequences give each rank 4 and 6 sequences. So 2 is written, which divides
    both, and not the 4 that was found.
    """
    shop = InProcess(tmp_path)
    shop.add_dataset(tokens=100 + 16 * 12 * ranks + 1)
    run = shop.add_run()
    odd = (
        '{\n  "dataset":"local/letters", "sample_prompt": "\\"microbatch_size\\": 7 \\u00e9 é", "sample_interval": 7,\n'
    )
    odd += '\n\t"microbatch_size"  :   1 ,"min_train_tokens" : -1,"start_train_token":100,"checkpoint_interval": 7,\n'
    odd = (odd + batches + "}").replace("\n", "\r\n")
    (run / "train.json").write_text(odd, encoding="utf-8", newline="")
    model = (run / "model.json").read_bytes()
    result = shop.attempt("-f", "--write") if ranks == 1 else search(shop, "--write", limit=None, ranks=ranks)
    assert answer(result) == found
    assert "limited by the data" in result.stdout
    assert f"microbatch_size is now {written}" in result.stdout
    text = (run / "train.json").read_bytes().decode()
    assert text == odd.replace('"microbatch_size"  :   1 ', f'"microbatch_size"  :   {written} ')
    config = load_train_config(run / "train.json")
    for size in config.global_batches:
        assert config.accumulation_steps(ranks, size) * ranks * written == size
    assert (run / "model.json").read_bytes() == model
    assert {path.name for path in run.iterdir()} == {"model.json", "train.json", "results"}


@pytest.mark.slow
def test_write_chooses_a_size_with_which_a_run_continues(tmp_path: Path) -> None:
    """After four steps of 5 sequences, 40 of 60 are left. A new run could have a microbatch of 60."""
    shop = InProcess(tmp_path)
    shop.add_dataset(tokens=60 * 16 + 1)
    keys: dict[str, Any] = {"microbatch_size": 5, "gradient_accumulation_steps": 1}
    keys |= {"validation_batches": None, "validation_sequences": 5}
    shop.add_run(**keys, min_train_tokens=20 * 16)
    shop.train_here()
    shop.add_run(**keys, min_train_tokens=60 * 16)
    result = shop.attempt("-f", "--write")
    assert answer(result) == 60
    assert "microbatch_size is now 40" in result.stdout
    shop.train_here()


def test_write_refuses_a_key_that_it_cannot_find(tmp_path: Path) -> None:
    shop = InProcess(tmp_path)
    shop.add_dataset(tokens=117)
    path = shop.add_run(min_train_tokens=-1) / "train.json"
    path.write_text(path.read_text().replace("microbatch_size", "microb\\u0061tch_size"))
    before = path.read_bytes()
    said = 'train.json: not changed, because "microbatch_size" is written with escapes'
    shop.attempt("-f", "--write").refuses(said)
    assert path.read_bytes() == before


# For each forward pass on rank 0, writes the bytes of gradients then allocated.
GRADIENTS = """
from tests.support.faults import *
def forward(original, model, *inputs):
    held = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    if own_rank() == 0:
        with open({path!r}, "a") as file:
            file.write(f"{{held}}\\n")
    return original(model, *inputs)
around(FORWARD, forward)
"""
HURRIED = "import harness.training.batch_size_finder as finder\nfinder.SEARCH_SECONDS = 0.0\n"


def test_a_late_search_ends_and_on_two_ranks_meets_the_gradients_that_training_meets(tmp_path: Path) -> None:
    """After SEARCH_SECONDS no further size is tried, and the answer is the largest size that has fitted. On two ranks
    the search allocates as many bytes of gradients as training. In training they are views of DDP's buckets, which are
    allocated during each forward pass."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=16 * 2 * 2 + 1)
    settings: dict[str, Any] = {"gradient_accumulation_steps": 1, "microbatch_size": 1, "min_train_tokens": -1}
    shop.add_run(**settings, optimizer="muon", shard_optimizer=True)
    paths = [tmp_path / "searched", tmp_path / "trained"]
    found = shop.train("r", "-f", prelude=HURRIED + GRADIENTS.format(path=str(paths[0])))
    assert probes(found) == {1: "fits"}
    assert "Max microbatch size was 1\nA larger microbatch may fit; the search ended after 0 s\n" in found.stdout
    shop.train("r", prelude=GRADIENTS.format(path=str(paths[1])))
    most = [max(map(int, path.read_text().split())) for path in paths]
    assert most[0] == most[1] > 0


@pytest.mark.parametrize(("ranks", "given"), [(2, 0.1), (1, 0.05)])
def test_a_limit_too_small_for_anything(workshop: Workshop, ranks: int, given: float) -> None:
    """A limit below the memory that the program itself uses is refused with one line. So is a limit below the
    reserve."""
    result = search(workshop, limit=given, ranks=ranks)
    assert "Max microbatch size" not in result.stdout
    words = rf"error: not even a microbatch of 1 fits in {given:.2f} GiB, of which .* left as a reserve; "
    assert re.fullmatch(rf"{words}raise --memory-limit-gib", result.refuses(status=1)), "a smaller model would not fit"


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (0.1, "raise --memory-limit-gib"),
        (100.0, "use a smaller model or context, or raise --memory-limit-gib"),
        (None, "use a smaller model or context, or free memory, or raise `ulimit -d`"),
    ],
)
def test_the_remedy_if_nothing_fits(given: float | None, remedy: str) -> None:
    assert limit_memory(torch.device("cpu"), given, 1).remedy == remedy


def test_memory_that_the_program_has_already_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit below the program's own memory is refused even if the system's limit stops nothing, as when steps find
    room in memory that was freed before."""
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    shop = InProcess(tmp_path)
    shop.add_dataset(tokens=400)
    shop.add_run()
    assert "not even a microbatch of 1 fits in 0.01 GiB" in shop.attempt("-f", "--memory-limit-gib", "0.01").stderr


def test_limits_just_above_the_program_get_an_answer(base_gib: float, tmp_path: Path, exhaustive: bool) -> None:
    """For each limit near the program's own memory the command prints the largest microbatch or fails with one line."""
    shop = Workshop(tmp_path)
    shop.add_dataset(tokens=500)
    shop.add_run(model={"emb_dim": 512, "n_heads": 8}, gradient_accumulation_steps=None)
    for step in range(-3, 25) if exhaustive else (0, 2, 8):
        result = search(shop, limit=base_gib + step / 100, prelude="import torch\ntorch.set_num_threads(2)\n")
        if result.status == 0:
            answer(result)
        else:
            result.refuses("not even a microbatch of 1 fits in ", status=1)


def cold(shop: Workshop, *arguments: str, ranks: int = 1, limits: Sequence[str] = (), expect: int | None = 0) -> Result:
    """Run ddp_train.py in new processes, which import each module when it is first needed, as a user's do. A fork has
    already imported all modules."""
    command = [*limits, sys.executable, str(ROOT / "ddp_train.py"), arguments[0], str(shop.datasets)]
    command += [*arguments[1:], "--runs-dir", str(shop.runs)]
    return finish(
        [shop.spawn(command, place) for place in rank_variables(ranks)], expect=expect, timeout=PATIENCE_SECONDS
    )


UNVALIDATED = {"validation_interval": None, "validation_batches": None, "checkpoint_interval": 9}


@pytest.mark.parametrize(
    ("tokens", "changes", "words"),
    [
        (
            4000,
            {"min_train_tokens": None, "train_steps": 20, "lr_schedule": "cosine", **UNVALIDATED},
            ["the train split of local/letters is too short"],
        ),
        pytest.param(
            *(4000, {"min_train_tokens": 800, "warmup_steps": 6, "lr_schedule": "cosine", **UNVALIDATED}, ["warm-up"]),
            marks=pytest.mark.slow,
        ),
        (
            400,
            {"min_train_tokens": -1, "gradient_accumulation_steps": None},
            [
                "the validation split of local/letters is too",
                "lower start_val_token or validation_batches in train.json",
            ],
        ),
    ],
    ids=["tokens", "warm-up", "validation"],
)
def test_what_is_written_trains(tmp_path: Path, tokens: int, changes: dict[str, Any], words: list[str]) -> None:
    """--write writes a smaller microbatch than the one found if training would refuse that one, and prints why, and the
    factor by which the global batch changes. With the microbatch found, the same steps need more tokens than the
    dataset has, or the same tokens give fewer steps than the warm-up takes, or the validation split is too short."""
    shop = InProcess(tmp_path)
    shop.add_dataset(tokens=tokens)
    run = shop.add_run(**changes)
    result = shop.attempt("-f", "--write")
    [note] = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    assert note.startswith(f"note: training would refuse a microbatch of {answer(result)}: ")
    assert all(word in note for word in words), note
    written = json.loads((run / "train.json").read_text())["microbatch_size"]
    assert written < answer(result)
    changed = f"microbatch_size is now {written}, and the global batch is {written / 2:.4g} times as large"
    assert changed in result.stdout
    assert shop.attempt().status == 0


# Lowers the limit of rank 1 itself, as `ulimit -d` does.
BOUND = """
import os, resource
if os.environ["RANK"] == "1":
    resource.setrlimit(resource.RLIMIT_DATA, ({bytes}, {bytes}))
"""


@pytest.mark.slow
def test_two_ranks_agree_on_the_smaller_answer(workshop: Workshop, base_gib: float, first: tuple[int, Result]) -> None:
    """The printed answer is the smaller of the two ranks' answers. Here rank 1 runs out of memory first, because its
    own `ulimit -d` is below --memory-limit-gib. Rank 0 alone prints, and does not wait for rank 1 forever. The limit
    holds for each process separately."""
    bound = BOUND.format(bytes=int((base_gib + ROOM - TWO_SEQUENCES) * GIB))
    result = search(workshop, limit=base_gib + ROOM, ranks=2, prelude=bound)
    assert first[0] - 3 <= answer(result) <= first[0] - 1


@pytest.mark.slow
def test_the_answer_trains_under_the_same_limit(base_gib: float, tmp_path: Path) -> None:
    """Training with the found microbatch succeeds on two ranks that can each allocate no more than the limit, with
    validations, checkpoints and charts. Training with five sequences more runs out of memory."""
    shop = Workshop(tmp_path)
    folder = shop.add_dataset(tokens=400_000)
    shutil.copyfile(folder / "train.safetensors", folder / "validation.safetensors")  # enough for each microbatch
    settings: dict[str, Any] = {"gradient_accumulation_steps": None, "validation_interval": 1, "validation_batches": 1}
    shop.add_run(model=HUNGRY, **settings)
    limit = round(base_gib + ROOM, 3)
    result = cold(shop, "r", "-f", "--memory-limit-gib", str(limit), ranks=2)
    number = answer(result)
    assert "trying 1 ...\n" in result.stdout
    assert re.search(rf"limit {limit:.2f} GiB, of which [\d.]+ .* own and 0\.06 GiB left as a reserve\)", result.stdout)
    limits = ["prlimit", f"--data={int(limit * GIB)}"]
    settings |= {"model": HUNGRY, "min_train_tokens": None, "train_steps": 2}
    run = shop.add_run("fits", microbatch_size=number, **settings)
    cold(shop, "fits", ranks=2, limits=limits)
    assert (run / "summary.json").is_file()
    assert (run / "training-run-chart.png").is_file()
    assert len(list((run / "checkpoints").glob("*-iteration-*"))) == 2
    shop.add_run("more", microbatch_size=number + 5, **settings)  # two or three more could fit into the reserve
    failed = cold(shop, "more", limits=limits, expect=1)
    assert "error: out of memory with microbatch_size" in failed.stderr


# All sizes are tried in this process, as on a GPU. The device's memory is simulated.


class InThisProcess(MicrobatchSearcher):
    """Searcher that trains real steps in this process on a simulated device with memory for `holds` sequences."""

    holds = 5

    def _try_in_child(self, microbatch_size: int) -> int | None:
        if self._step is not None:
            assert all(each.grad is None for each in self._step.bare_model.parameters()), "gradients use memory"
        return None if self._try(microbatch_size) is None else 100 * microbatch_size

    def _train(self, microbatch_size: int) -> None:
        super()._train(microbatch_size)
        if microbatch_size > self.holds:
            raise MemoryError


def loaded(shop: Workshop, tokens: int = 20_000, **keys: Any) -> Experiment:
    shop.add_dataset(tokens=tokens)
    return Experiment.load(RunDirectory(shop.add_run(**keys)), shop.datasets)


def searcher(tmp_path: Path, **keys: Any) -> InThisProcess:
    shop = Workshop(tmp_path)
    experiment = loaded(shop, **keys)
    limit = MemoryLimit(1.0, 100 * InThisProcess.holds + 50, "")
    return InThisProcess(experiment, ALONE, experiment.open_data(), limit, None)


def test_passes_of_epochs_count(tmp_path: Path) -> None:
    """Training reads a text of three sequences again and again, and so does the search."""
    search = searcher(tmp_path, tokens=60, epochs="repeat", min_train_tokens=640)
    assert largest_with_data(search.experiment, ALONE, search.experiment.open_data()) > InThisProcess.holds
    assert search.find(1000) == InThisProcess.holds


@pytest.mark.parametrize(("keys", "there"), [({"start_train_token": 20}, 50), ({"epochs": 0.5}, 33)])
def test_a_text_too_short_for_a_batch_is_refused_with_the_tokens_that_training_may_read(
    keys: dict[str, Any], there: int, tmp_path: Path
) -> None:
    experiment = loaded(Workshop(tmp_path), tokens=70, gradient_accumulation_steps=4, **keys)
    with pytest.raises(UserError, match=f"wanted 65 tokens, but training may read {there}; "):
        largest_with_data(experiment, ALONE, experiment.open_data())


def test_a_global_batch_that_the_ranks_cannot_divide(tmp_path: Path) -> None:
    """The microbatch of train.json, which the search replaces, is no part of the reason."""
    experiment = loaded(Workshop(tmp_path), global_batch_size=6, gradient_accumulation_steps=None, microbatch_size=3)
    with pytest.raises(
        UserError, match='"global_batch_size": 6 sequences are not a multiple of 4, the number of ranks'
    ):
        largest_with_data(experiment, World(0, 0, 4, 4, ALONE.device), experiment.open_data())


def test_a_folder_that_takes_nothing_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A result that cannot be written causes a warning of one line. Here a file is in the place of the results folder.
    A read-only folder would not do, because the tests may run as root, who could write into it."""
    search = searcher(tmp_path)
    results = search.experiment.run.results
    results.write_text("")
    search.peaks |= {1: 20_000, 2: 30_000}
    search.report(3, is_all_data=False)
    said = capsys.readouterr()
    assert said.out.startswith("Max microbatch size was 3\nMemory: 0.0000093 GiB per sequence +")
    assert said.err.startswith(f"warning: {results}/microbatch-search-")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_size_meets_the_gradients_that_training_meets_and_leaves_none(
    accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward passes of a tried size run with the same gradients in memory as in training: none with one microbatch in
    a step, those of the previous microbatches with two. Gradients of a size that failed are freed."""
    plain, met = gpt.GPTModel.forward, set[bool]()

    def forward(self: Any, inputs: torch.Tensor, *others: Any) -> Any:
        has_gradients = any(each.grad is not None for each in self.parameters())
        if len(inputs) > InThisProcess.holds and has_gradients:
            raise MemoryError
        met.add(has_gradients)
        return plain(self, inputs, *others)

    monkeypatch.setattr(gpt.GPTModel, "forward", forward)
    assert searcher(tmp_path, model=LEVERS, gradient_accumulation_steps=accumulated).find(1000) == InThisProcess.holds
    assert met == ({False} if accumulated == 1 else {False, True})


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Compile with the backend "eager", which generates no machine code, and yield torch's counters of compiled graphs.
    A loss computed in code that is not compiled fails the test."""

    def loss(
        features_NxC: torch.Tensor, weight_VxC: torch.Tensor, targets_N: torch.Tensor, *, softcap: None
    ) -> torch.Tensor:
        assert torch.compiler.is_compiling()
        return functional.cross_entropy(functional.linear(features_NxC, weight_VxC), targets_N)

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, backend="eager": compile_module(self, backend=backend))
    monkeypatch.setattr(gpt, "linear_cross_entropy", loss)
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_each_size_has_a_program_of_its_own(tmp_path: Path, programs: Any) -> None:
    assert searcher(tmp_path, model={"n_layers": 1}, compile=True).find(2) == 2
    assert programs["stats"]["unique_graphs"] == 2, "one graph for one sequence, and one for two"


@pytest.mark.slow
def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such instruction")

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend=broken))
    with pytest.raises(UserError, match=r'^train.json: key "compile": the model cannot be compiled here: .*instruc'):
        searcher(tmp_path, model={"n_layers": 1}, compile=True).find(1000)


def test_a_gpu_has_its_exchange_buffers_before_its_memory_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def reach(*_: Any) -> None:
        raise InterruptedError

    experiment = loaded(Workshop(tmp_path))
    monkeypatch.setattr(World, "exchange_once", lambda self, sizes: done.append(sizes))
    monkeypatch.setattr(batch_size_finder, "remark_on_machine", lambda *_: None)
    monkeypatch.setattr(batch_size_finder, "release_memory", lambda device: done.append("released"))
    monkeypatch.setattr(batch_size_finder, "limit_memory", reach)
    for device, wanted in (("cuda:3", [batch_size_finder.EXCHANGE_BYTES, "released"]), ("cpu", [])):
        done.clear()
        world = World(0, 0, 1, 1, torch.device(device))
        monkeypatch.setattr(World, "join", lambda world=world: world)
        with pytest.raises(InterruptedError):
            batch_size_finder.report_max_microbatch(experiment, None, write=False)
        assert done == wanted
