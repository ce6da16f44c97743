"""The plan of a sweep: sums that can be calculated by hand, and the output when a number is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.common import program
from harness.common.errors import UserError
from harness.sweeps.derived_runs import write_runs
from harness.sweeps.plan import Planner, SweepPlan, describe_sweep_plan, plan_sweep
from harness.sweeps.run import device_groups
from tests.support.launch import Workshop
from tests.support.sweeping import add_summary, load, make, states, sweep_command

# A run has 20 steps of 64 tokens (2 sequences x 2 accumulation steps x 16), and validations after steps 0, 5, 10, 15
# and 19. Each validation has 3 microbatches of 32 tokens, and a token takes a third of the work of one in training.
TRAINING, VALIDATION = 1280, 5 * 3 * 32 / 3


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", price_per_hour=36.0)
    return made


def plan(shop: Workshop, tps: float | None = None, groups: int = 1, **keys: Any) -> SweepPlan:
    planner = Planner(shop.datasets, groups=groups, processes=1, assume_tps=tps)
    return plan_sweep(load(shop, **keys), planner)


def test_hours_dollars_and_disk_are_those_of_the_runs_plans(shop: Workshop) -> None:
    found = plan(shop, 10.0, vary={"min_train_tokens": [1280, 2560]})
    longer = 2560 + 9 * 3 * 32 / 3  # after steps 0, 5, ..., 35 and 39
    seconds = [(TRAINING + VALIDATION) / 10, longer / 10]
    assert [each.seconds for each in found.left] == pytest.approx(seconds)
    assert [each.dollars for each in found.left] == pytest.approx([each / 100 for each in seconds])
    checkpoints = [each.plan.checkpoint_bytes() for each in found.left]
    assert found.disk_bytes == 5 * checkpoints[0] + 9 * checkpoints[1]
    said = describe_sweep_plan(found, shop.runs)
    assert f"time: {sum(seconds):,.0f} s" in said
    assert f"cost: ${sum(seconds) / 100:,.2f}" in said
    small = plan(shop, 2880.0, vary={"random_seed": [1]})
    assert "cost: $0.0050" in describe_sweep_plan(small, shop.runs), "0.5 s do not cost $0.00"


def test_groups_share_the_clock_and_the_price(shop: Workshop) -> None:
    """Three equal runs on two groups take as long as two runs one after the other. Each run is shown with half of the
    machine's price."""
    found = plan(shop, 10.0, groups=2, vary={"random_seed": [1, 2, 3]})
    one = (TRAINING + VALIDATION) / 10
    assert found.seconds() == pytest.approx(2 * one)
    said = describe_sweep_plan(found, shop.runs)
    assert said.count(f" ${one / 100 / 2:.2f} ") == 3
    assert f"cost: ${2 * one / 100:.2f}" in said, "the machine costs as much while one group is idle"


def test_only_the_summary_of_this_training_finishes_a_run(shop: Workshop) -> None:
    """A run counts as finished if its summary has the settings of this training. Keys that an earlier version did not
    write may be missing. If a value differs, the run is not finished."""
    sweep = make(shop, vary={"random_seed": [1]})
    (run,) = sweep.runs
    model = run.model_config.model_dump(mode="json")
    earlier = {key: model[key] for key in model if key not in ("logit_softcap", "linear_bias")}
    shorter = {**run.settings, "min_train_tokens": 640}
    for changed, state in (
        ({"model": earlier}, "finished"),
        ({"train": shorter}, "stopped"),
        ({"model": {"emb_dim": 32}}, "stopped"),
        ({"model": {"emb_dim": "wide"}}, "damaged"),
    ):
        add_summary(run, **changed)
        assert states(sweep) == {"seed1": state}


def test_finished_runs_cost_nothing_and_give_their_speed(shop: Workshop) -> None:
    """Finished runs add neither time nor cost. Their measured speed is used for the other runs of the same shape. A run
    whose speed is not known is named, and not counted."""
    keys: dict[str, Any] = {"together": [{}, {"random_seed": 3}, {"emb_dim": 32}]}
    finished = load(shop, **keys).runs[0]
    write_runs([finished])
    add_summary(finished)
    found = plan(shop, **keys)
    assert [(each.run.name, each.seconds is None) for each in found.left] == [("s-seed3", False), ("s-emb32", True)]
    said = " ".join(describe_sweep_plan(found, shop.runs).split())
    seconds = (TRAINING + VALIDATION) / 96
    assert "1 finished already" in said
    assert "Speed of s-seed3: 96 tokens/s (measured over 30 steps" in said
    assert f"time: {seconds:,.0f} s, not counting s-emb32 (unknown)" in said
    assert f"cost: ${seconds / 100:,.2f}, not counting s-emb32 (unknown)" in said
    assert "Speed of s-emb32: unknown: no earlier run measured the speed of this model" in said


def test_what_is_unknown_has_its_remedy(shop: Workshop) -> None:
    said = describe_sweep_plan(plan(shop, vary={"random_seed": [1, 2]}), shop.runs)
    assert "or train one of these runs first, to measure the speed" in " ".join(said.split())
    shop.add_run("base")
    said = describe_sweep_plan(plan(shop, 10.0, vary={"random_seed": [1]}), shop.runs)
    assert "cost: unknown" in said
    assert "price: no price_per_hour in train.json" in said


def test_a_plan_that_no_disk_can_hold_is_remarked_on(shop: Workshop) -> None:
    """If no disk can hold the checkpoints of a sweep, `plan` prints a note and `run` refuses the sweep."""
    load(shop, set={"min_train_tokens": 10**13, "checkpoint_interval": 1}, vary={"random_seed": [1, 2]})
    planned = sweep_command(shop, "plan", str(shop.datasets))
    assert (planned.status, planned.stderr) == (0, "")
    assert "note: " in planned.stdout
    said = "for the checkpoints of 2 unfinished runs, but"
    assert said in " ".join(planned.stdout.split())
    sweep_command(shop, "run", str(shop.datasets)).refuses(said)
    assert [each.name for each in shop.runs.iterdir() if each.is_dir()] == ["base"]


def test_a_dataset_that_is_not_here_is_remarked_on(shop: Workshop) -> None:
    load(shop, set={"dataset": "local/elsewhere"}, vary={"random_seed": [1, 2]})
    planned = " ".join(sweep_command(shop, "plan", str(shop.datasets)).stdout.split())
    assert planned.count("note: ") == 1
    assert "local/elsewhere" in planned.partition("note: ")[2]


def test_runs_that_have_ended_need_less_disk(shop: Workshop) -> None:
    """A run that has ended keeps its best, its latest and `keep_checkpoints` other checkpoints. Only the runs that are
    being trained, one in each group, need two more. There is no remedy that is in force already."""
    few = {"keep_checkpoints": 1, "checkpoint_interval": 1}
    for groups in (1, 3):
        found = plan(shop, groups=groups, set=few, vary={"random_seed": [*range(10)]})
        assert found.disk_bytes == (10 * 3 + groups * 2) * found.left[0].plan.checkpoint_bytes()
    many = plan(shop, set=few | {"min_train_tokens": 10**13}, vary={"emb_dim": [2**14, 2**15]})
    assert str(many.disk_shortage(shop.runs)).endswith(" are free; use another disk (--runs-dir)")


def test_dollars_are_not_those_of_another_machine(shop: Workshop) -> None:
    """A plan gives dollars only on the machine whose price is in train.json. The model is wide, so that speeds can be
    estimated on both machines."""
    shop.add_run("base", model={"emb_dim": 4096, "n_layers": 1}, price_per_hour=23.92)
    sweep = load(shop, vary={"random_seed": [1]})
    for device, said in (("H200", "cost: unknown price: train.json's $23.92/h is the price of 8x H100"), ("H100", "$")):
        found = plan_sweep(sweep, Planner(shop.datasets, processes=8, assume_device=device))
        assert said in " ".join(describe_sweep_plan(found, shop.runs).split())


def test_price_and_ceilings_are_those_of_the_runs_own_files(shop: Workshop) -> None:
    sweep = make(shop, vary={"random_seed": [1, 2]})
    path = sweep.runs[0].directory.train_json
    path.write_text(json.dumps(json.loads(path.read_text()) | {"price_per_hour": 360.0, "max_hours": 0.01}))
    found = plan_sweep(sweep, Planner(shop.datasets, assume_tps=10.0))
    seconds = (TRAINING + VALIDATION) / 10
    assert [each.seconds for each in found.left] == pytest.approx([36.0, seconds])
    assert [each.dollars for each in found.left] == pytest.approx([3.6, seconds / 100])
    said = "note: s-seed1: would end unfinished, because of max_hours or max_dollars in train.json"
    assert said in " ".join(describe_sweep_plan(found, shop.runs).split())


def test_what_cannot_be_trained_is_said(shop: Workshop) -> None:
    """A plan names the run that needs more data than the local dataset has. If this holds for all runs, the plan is
    refused."""
    shop.add_dataset()
    keys: dict[str, Any] = {"vary": {"min_train_tokens": [1280, 10**6]}}
    found = plan(shop, 10.0, **keys)
    assert len(found.left) == 1
    said = " ".join(describe_sweep_plan(found, shop.runs).split())
    assert "Cannot be trained: s-tokens1000000: the train split of local/letters is too short" in said
    with pytest.raises(UserError, match="s-tokens1000000-seed1: the train split of local/letters is too short"):
        plan(shop, vary={"min_train_tokens": [10**6], "random_seed": [1, 2]})
    with pytest.raises(UserError, match=r"s-seed1: .*nowhere"):
        plan(shop, set={"initial_weights": "nowhere/model.safetensors"}, vary={"random_seed": [1, 2]})


def test_the_command_prints_the_plan_before_anything_is_made(shop: Workshop) -> None:
    load(shop, name="a-rather-long-name-" * 3, vary={"random_seed": [1, 2], "learning_rate": [0.1, 0.2]})
    asked = ("plan", str(shop.datasets), "--assume-tps", "10")
    done = sweep_command(shop, *asked, "--processes", "2")
    assert done.status == 0, done.stderr
    assert "\na-rather-long-n...me--seed2-lr0.2  " in done.stdout
    assert "4 runs: nothing is trained" in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert [each.name for each in shop.runs.iterdir()] == ["base"]
    twice = sweep_command(shop, *asked, "--assume-device", "H100")
    assert (twice.status, twice.stderr) == (2, "error: --assume-device and --assume-tps: give at most one of them\n")


# Devices


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(4):
        (tmp_path / "gpus" / str(index)).mkdir(parents=True)
        (tmp_path / "gpus" / str(index) / "information").write_text("Model: \t NVIDIA H100\n")
    monkeypatch.setattr(program, "DRIVER_FILES", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_shared_out_among_the_groups(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(groups: int, processes: int | None = None) -> list[str]:
        planner = Planner(shop.datasets, groups=groups, processes=processes)
        shares = device_groups(groups, planner.processes)
        return [variables.get("CUDA_VISIBLE_DEVICES", "all") for _, variables in shares]

    assert shown(2) == ["0,1", "2,3"]
    assert shown(3, 1) == ["0", "1", "2"]
    assert Planner(shop.datasets).processes == 4
    assert shown(1, 2) == ["all"]
    with pytest.raises(UserError, match="--groups 3 with 2 processes each: needs 6 GPUs, and there are 4"):
        shown(3, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-8f")
    assert shown(2) == ["3", "GPU-8f"]


def test_without_gpus_groups_share_the_cores(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    assert [variables for _, variables in device_groups(2, 2)] == [{"OMP_NUM_THREADS": "4"}] * 2
    assert Planner(shop.datasets, groups=4).processes == 1
