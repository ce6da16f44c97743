"""Projected time and cost of a run on other machines: the notebook's figures, closed forms, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import UserError
from harness.common.json_files import read_json_object
from harness.comparison.inconclusive import Inconclusive
from harness.comparison.machines import (
    NoProjection,
    Projection,
    layout_on,
    project,
    speed_on,
    speeds_for,
)
from harness.comparison.machines_table import elsewhere, machines_table
from harness.comparison.workloads import KnownSpeed, Workload, read_speeds, read_workload
from harness.data.loader import BatchLayout
from harness.model.config import ModelConfig, load_model_config
from harness.planning.estimated_speed import UNCERTAINTY, estimated_speed, find_device
from harness.planning.machines import PRICES, Machine, read_machines
from harness.runs.directory import RunDirectory
from harness.runs.results import write_result
from tests.runs.test_reported import COSTS
from tests.runs.test_search_results import SEARCH
from tests.runs.test_shipped_runs import MACHINES
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Workshop

SHIPPED = [RunDirectory(SHIPPED_RUNS / name) for name in [*MACHINES, "original"]]
KNOWN = [speed for run in SHIPPED for speed in read_speeds(run)]
BY_NAME = {each.machine: each for each in read_machines()}
OWN = {
    "8xa100m40": "8x A100 40 GiB",
    "8xh100m80": "8x H100 80 GiB",
    "8xa100m80": "8x A100 80 GiB",
    "8xb200m160": "8x B200 160 GiB",
}


def work_of(name: str) -> Workload:
    found = read_workload(RunDirectory(SHIPPED_RUNS / name))
    assert isinstance(found, Workload)
    return found


def projections(work: Workload, known: list[KnownSpeed]) -> dict[str, Projection]:
    found = project(work, read_machines(), known)
    return {each.machine.machine: each for each in found if isinstance(each, Projection)}


def on_paper(name: str, layout: BatchLayout, model: ModelConfig) -> float:
    device = find_device(name)
    assert device is not None
    return estimated_speed(model, device, layout)


@pytest.mark.parametrize("name", MACHINES)
def test_each_of_the_notebooks_runs_on_its_own_machine(name: str) -> None:
    """The projection is the notebook's bill without validation, to the cent."""
    own = projections(work_of(name), KNOWN)[OWN[name]]
    speed = own.speed
    assert (speed.low, speed.high, speed.basis, speed.note) == (speed.value, speed.value, "reported", "")
    assert round(own.hours(speed.value) * 3600) == COSTS[name][-1]
    assert round(own.dollars(speed.value), 2) == COSTS[name][-2]


def test_the_speed_by_scale_of_a_machine_that_the_notebook_tried() -> None:
    """Two H100: about 142,000 tokens/s with a microbatch of 28, it says; nothing else is known of two."""
    work = replace(work_of("8xa100m80"), layout=BatchLayout(2, 1, 28, 1024))
    found = projections(work, KNOWN)["2x H100 80 GiB"]
    assert found.layout == work.layout
    assert found.speed.basis == "scaled"
    assert found.speed.value == pytest.approx(142_000, rel=0.05)
    assert found.speed.low < 142_000 < found.speed.high
    eight = next(each for each in KNOWN if each.run == "8xh100m80")
    share = eight.tokens_per_second / on_paper("H100", eight.layout, work.model)
    assert found.speed.value == pytest.approx(share * on_paper("H100", found.layout, work.model))
    assert found.speed.note == f"{share:.0%} of the estimated speed, as reported of 8xh100m80"


def test_another_batch_gives_a_range() -> None:
    """The range reaches from the speed as reported to its value scaled by arithmetic to another microbatch."""
    work = work_of("8xa100m40")
    found = projections(work, KNOWN)["8x H100 80 GiB"]
    reported = next(each for each in KNOWN if each.run == "8xh100m80")
    layouts = (BatchLayout(8, 1, 13, 1024), BatchLayout(8, 1, 27, 1024))
    here, there = (on_paper("H100", layout, work.model) for layout in layouts)
    assert found.layout == layouts[0]
    assert found.speed.high == reported.tokens_per_second
    assert found.speed.low == found.speed.value == pytest.approx(reported.tokens_per_second * here / there)
    assert found.speed.note == "of 8xh100m80, with microbatches of 27, here 13"


def measured(run: str, device: str, layout: BatchLayout, speed: float) -> KnownSpeed:
    return KnownSpeed(run, True, device, layout, work_of("8xa100m40").model, {}, speed)


def test_what_was_measured_goes_before_what_is_reported() -> None:
    """On all machines: the others' speeds are scaled from it, and no other program's are among them."""
    work = work_of("8xa100m40")
    mine = measured("8xa100m40", "NVIDIA A100-SXM4-40GB", work.layout, 1_000_000.0)
    found = projections(work, [*KNOWN, mine])
    assert {name: each.speed.basis for name, each in found.items()} == {
        "8x A100 40 GiB": "measured",
        **dict.fromkeys(["8x A100 80 GiB", "8x H100 80 GiB", "8x B200 160 GiB", "2x H100 80 GiB"], "scaled"),
    }
    share = 1_000_000 / on_paper("A100 40GB", work.layout, work.model)
    other = found["8x H100 80 GiB"].speed
    assert other.value == pytest.approx(share * on_paper("H100", work.layout, work.model))
    assert (other.low, other.high) == pytest.approx((other.value * (1 - UNCERTAINTY), other.value * (1 + UNCERTAINTY)))
    fp32 = replace(mine, train={"precision": "fp32"})
    assert speeds_for(work, [fp32]) == [], "other kernels"
    assert speeds_for(work, [replace(mine, model=work.model.model_copy(update={"n_layers": 6}))]) == []
    assert speeds_for(work, [*KNOWN, fp32]) == [each for each in KNOWN if not each.is_measured]


def test_several_shares_of_the_speed_on_paper_give_the_range() -> None:
    work = work_of("8xa100m40")
    shares = (0.5, 0.6, 0.9)
    devices = ("A100 40GB", "A100 80GB", "B200")
    known = [
        measured(device, device, work.layout, share * on_paper(device, work.layout, work.model))
        for device, share in zip(devices, shares, strict=True)
    ]
    speed = speed_on(work, BY_NAME["8x H100 80 GiB"], work.layout, known)
    assert not isinstance(speed, Inconclusive)
    paper = on_paper("H100", work.layout, work.model)
    assert (speed.low, speed.value, speed.high) == pytest.approx(tuple(share * paper for share in shares))
    assert speed.note == "50% to 90% of the estimated speed, as measured of A100 40GB, A100 80GB, B200"


def test_nothing_known_is_on_paper() -> None:
    work = work_of("8xa100m40")
    for each in projections(work, []).values():
        paper = on_paper(each.machine.device, each.layout, work.model)
        assert each.speed.basis == "estimated"
        bounds = (each.speed.low, each.speed.value, each.speed.high)
        assert bounds == pytest.approx((paper * (1 - UNCERTAINTY), paper, paper * (1 + UNCERTAINTY)))


def test_the_batch_stays_the_runs() -> None:
    work = work_of("8xb200m160")
    assert work.sequences == 512
    a100, two = BY_NAME["8x A100 40 GiB"], BY_NAME["2x H100 80 GiB"]
    assert layout_on(work, BY_NAME["8x B200 160 GiB"], []) == work.layout
    # Smaller GPUs: as much as somebody trained with there, and a divisor of what each has to do.
    assert layout_on(work, a100, KNOWN) == BatchLayout(8, 8, 8, 1024)
    assert layout_on(work, two, KNOWN) == BatchLayout(2, 16, 16, 1024)
    assert layout_on(work, a100, []) == work.layout
    remarks = {each.remark for each in projections(work, []).values()}
    assert remarks == {"", "whether a microbatch of 64 fits is not known: -f there tells"}
    # By the run's own searches.
    line = (0.34, 3.0)
    assert layout_on(replace(work, memory=line), a100, KNOWN) == work.layout
    assert layout_on(replace(work, memory=(2.0, 3.0)), a100, []) == BatchLayout(8, 4, 16, 1024)
    none = layout_on(replace(work, memory=(2.0, 39.0)), a100, [])
    assert str(none) == "inconclusive, because not one sequence fits into 40 GiB, by its searches with -f"
    odd = layout_on(work_of("original"), a100, [])
    assert str(odd) == "inconclusive, because its global batch of 6 sequences cannot be divided by 8 GPUs"


def machine(**changes: Any) -> Machine:
    return BY_NAME["8x A100 40 GiB"].model_copy(update=changes)


def test_machines_of_which_nothing_is_known() -> None:
    work = work_of("8xa100m40")
    found = project(work, [machine(device="Abacus 9"), machine(gpus=13)], KNOWN)
    assert all(isinstance(each, NoProjection) for each in found)
    reasons = [str(each.why) for each in found if isinstance(each, NoProjection)]
    assert reasons == [
        "inconclusive, because no speed of Abacus 9 is known or estimated",
        "inconclusive, because no speed of 13 x A100 40GB is known, and none is estimated: 13 ranks are more than one "
        "machine of 8 GPUs",
    ]
    mine = measured("8xa100m40", "Abacus 9", work.layout, 5000.0)
    (known,) = project(work, [machine(device="Abacus 9")], [mine])
    assert isinstance(known, Projection)
    assert (known.speed.value, known.speed.basis) == (5000.0, "measured")


def test_a_model_so_small_that_the_cpu_decides() -> None:
    """A quickstart: of no machine, by arithmetic or by scale; but what was measured there is told."""
    work = work_of("quickstart-gpt2")
    found = project(work, read_machines(), [])
    reasons = {str(each.why) for each in found if isinstance(each, NoProjection)}
    assert len(found) == 5
    assert reasons == {
        "inconclusive, because no speed on such GPUs is known, and none is estimated: launching the kernels of a step "
        "(about 110, 1.2 ms) takes longer than their work; only a measurement tells the speed"
    }
    layout = BatchLayout(2, 1, 8, 128)
    mine = KnownSpeed("quickstart-gpt2", True, "NVIDIA H100 80GB HBM3", layout, work.model, work.train, 400_000.0)
    told = projections(work, [mine])
    assert list(told) == ["2x H100 80 GiB"], "not scaled to other machines"
    # Here a microbatch of 4, in as much time: from half of the speed to the whole of it.
    assert told["2x H100 80 GiB"].speed.low == pytest.approx(200_000, rel=0.01)
    assert told["2x H100 80 GiB"].speed.high == 400_000


def test_a_table_of_small_numbers_is_narrow_too() -> None:
    work = replace(work_of("8xa100m40"), tokens=36_864)
    machines = [machine(machine="2x NVIDIA H100 80 GiB, spot", gpus=2), machine(price_per_hour=123_456.0)]
    for known in ([], KNOWN):
        lines = list(machines_table(work, project(work, machines, known)))
        assert max(map(len, lines)) <= 80
        headings = " ".join(line.removeprefix("machine") for line in lines if line.startswith("machine"))
        assert headings.split() == ["$/h", "tokens/s", "hours", "dollars", "rests", "on"], "no column is lost"


def test_a_long_name_of_a_machine_is_cut() -> None:
    work = work_of("8xa100m40")
    name = "a machine with a very long name that somebody rents from somebody else"
    lines = list(machines_table(work, project(work, [machine(machine=name)], [])))
    assert max(map(len, lines)) <= 80


def test_the_cheapest_comes_first() -> None:
    work = work_of("8xa100m40")
    found = projections(work, [])
    dollars = [each.dollars(each.speed.value) for each in found.values()]
    assert dollars == sorted(dollars)


def test_what_a_run_folder_tells(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    run = RunDirectory(shop.add_run(min_train_tokens=1280))
    work = read_workload(run)
    assert isinstance(work, Workload)
    assert (work.layout, work.tokens, work.sequences) == (BatchLayout(1, 2, 2, 16), 1280, 4)
    assert read_speeds(run) == []
    model = load_model_config(run.model_json)
    summary = {"model": model.model_dump(mode="json"), "world_size": 2, "microbatch_size": 2, "accumulation_steps": 2}
    summary |= {"device": "NVIDIA H200", "tokens_per_second": 96.0, "tokens_seen": 640, "peak_memory_gib": 7.5}
    summary |= {"measured": {"global_steps": 30, "tokens": 1920, "seconds": 20.0}}
    run.summary.write_text(json.dumps(summary))
    layout = BatchLayout(2, 2, 2, 16)
    assert read_speeds(run) == [KnownSpeed("r", True, "NVIDIA H200", layout, model, {}, 96.0)]
    work = read_workload(run)
    assert isinstance(work, Workload)
    assert (work.layout, work.tokens, work.needed_gib, work.memory) == (layout, 1280, 7.5, None)
    write_result(run, SEARCH.model_copy(update={"model": model.model_dump(mode="json")}))
    work = read_workload(run)
    assert isinstance(work, Workload)
    assert work.memory is not None
    assert work.memory[0] * 13 + work.memory[1] == pytest.approx(36.25)
    # Too little to be believed; and a length that is known only after training.
    run.summary.write_text(json.dumps(summary | {"measured": {"global_steps": 3, "tokens": 192, "seconds": 2.0}}))
    assert read_speeds(run) == []
    shop.add_run(min_train_tokens=-1)
    work = read_workload(run)
    assert isinstance(work, Workload)
    assert work.tokens == 640
    run.summary.unlink()
    assert " ".join(line.strip() for line in elsewhere(run, [])) == (
        "r elsewhere: inconclusive, because its min_train_tokens is -1, all there is, and it has not trained yet"
    )


def test_the_table_of_the_notebooks_first_run() -> None:
    lines = list(elsewhere(RunDirectory(SHIPPED_RUNS / "8xa100m40"), SHIPPED))
    assert all(len(line) <= 79 for line in lines)
    assert lines[3:9] == [
        "machine            $/h  tokens/s         hours         dollars  rests on",
        "8x A100 40 GiB   10.32   262,840          3.45           35.56  reported",
        "2x H100 80 GiB    6.38   143,000  5.28 to 7.93  33.71 to 50.56  scaled",
        "8x H100 80 GiB   23.92   533,000  1.59 to 1.70  38.13 to 40.64  reported",
        "8x A100 80 GiB   14.32   312,000  2.76 to 2.90  39.57 to 41.58  reported",
        "8x B200 160 GiB  39.92   851,000  0.98 to 1.06  39.14 to 42.47  reported",
    ]
    text = " ".join(line.strip() for line in lines)
    assert "Training alone: validation, checkpoints and set-up come on top." in text
    assert "Reported speeds are another program's, and were not measured here." in text
    assert "Prices of 2025-12-05: Lambda" in text


def test_a_table_without_any_row() -> None:
    work = work_of("original")
    eights = [each for each in read_machines() if each.gpus == 8]
    lines = list(machines_table(work, project(work, eights, KNOWN)))
    assert len(lines) == 4, "one reason for all of them, and no prices"
    assert "inconclusive, because its global batch" in " ".join(line.strip() for line in lines)


def test_a_broken_neighbour_is_passed_over_and_a_broken_run_is_not(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    broken = RunDirectory(shop.add_run("broken"))
    broken.summary.write_text("{")
    run = RunDirectory(shop.add_run())
    assert any("inconclusive" in line or "estimated" in line for line in elsewhere(run, [run, broken]))
    with pytest.raises(UserError, match=r"summary.json:1: not valid JSON"):
        list(elsewhere(broken, []))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"price_per_hour": -1.0}, 'prices.json, machine 1: key "price_per_hour"'),
        ({"date": "yesterday"}, 'prices.json, machine 1: key "date"'),
        ({"date": "2026-13-01"}, 'prices.json, machine 1: key "date": month must be in 1..12, not "2026-13-01"'),
        ({"memory_gib": 4.0}, 'prices.json, machine 1: key "memory_gib": 4, but "device" is "[^"]*40GB'),
        ({"prise_per_hour": 1.0}, 'machine 1: key "prise_per_hour": unknown; did you mean "price_per_hour"'),
        ({"gpus": 0}, 'prices.json, machine 1: key "gpus"'),
    ],
    ids=str,
)
def test_a_wrong_list_of_prices_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    values = read_json_object(PRICES)
    values["machines"][0] |= change
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=words):
        read_machines(path)


def test_a_machine_that_is_there_twice(tmp_path: Path) -> None:
    values = read_json_object(PRICES)
    values["machines"].append(values["machines"][0])
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match='"8x A100 40 GiB" is there twice'):
        read_machines(path)


def test_the_shipped_prices_are_the_notebooks() -> None:
    prices = {each.machine: each.price_per_hour for each in read_machines()}
    assert {OWN[name]: MACHINES[name][1] for name in MACHINES}.items() <= prices.items()
    assert prices["2x H100 80 GiB"] == 6.38
    assert all(each.date == "2025-12-05" for each in read_machines()), "the day of its first cloud train"
