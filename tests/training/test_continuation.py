"""A run that was stopped and resumed with the real command equals a run that never stopped, to the bit."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.comparison.records import RunRecord
from harness.data.tokenizers import train_bpe
from harness.runs.checkpoints import list_checkpoints
from harness.runs.directory import RunDirectory
from harness.runs.results import write_search
from harness.training import evaluations
from harness.training.evaluations import Evaluations
from tests.runs.test_results import SEARCH
from tests.support.in_process import InProcess, module_shop
from tests.support.launch import Workshop, finish, meta_of, metrics, summary_of
from tests.support.same_end import assert_same_end
from tests.support.straight import FAULTS
from tests.support.torchrun import Torchrun

# Dropout of 0.1 and two accumulation steps are the defaults of tests/support/launch.py.
COMMON: dict[str, Any] = {
    "min_train_tokens": 2560,  # 20 global steps on two ranks
    "learning_rate": 0.01,
    "lr_schedule": "cosine",
    "warmup_steps": 4,
    "clipping_max_norm": 0.5,
}
SHORT = COMMON | {"min_train_tokens": 256}
ASIDE = {"checkpoints", "metrics.jsonl", "summary.json", "training-run-chart.png"}
MUON = {"optimizer": "muon", "muon_momentum_warmup_steps": 6, "vector_learning_rate": 0.003}
# After the last step each rank prints in how many buckets DDP exchanges its gradients, and the size of the largest.
COUNTED = f"""{FAULTS}
def count(original, step, *arguments):
    result = original(step, *arguments)
    if Now.step == 19:
        sizes = step.model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        print(f"rank {{own_rank()}}: {{len(sizes)}} buckets of {{max(map(int, sizes))}} bytes")
    return result
around(STEP, count)
"""


shop = module_shop(tokens=40_000)


@pytest.fixture(scope="module")
def finished(shop: InProcess) -> Path:
    """Finished run of four steps on one rank."""
    run = shop.add_run("finished", **SHORT)
    shop.train_here("finished")
    (run / "training-run-chart.png").write_text("a chart")
    return run


def test_each_second_costs_the_price_of_its_time(shop: InProcess) -> None:
    """A run that continues on a cheaper machine has cost what its earlier steps cost on the dearer one, and more."""
    run = shop.add_run("moved", **SHORT, price_per_hour=3600.0)
    shop.train_here("moved")
    earlier = meta_of(run)
    assert earlier["dollars"] == pytest.approx(earlier["seconds"], abs=0.01), "a dollar a second"
    shop.add_run("moved", **SHORT | {"min_train_tokens": 512}, price_per_hour=36.0)
    shop.train_here("moved")
    summary = summary_of(run)
    for phase, seconds in summary["seconds"].items():
        before = earlier["seconds"].get(phase, sum(earlier["seconds"].values()))
        assert summary["dollars"][phase] == pytest.approx(before + (seconds - before) / 100, abs=0.002)
    assert metrics(run)[-1]["dollars"] == pytest.approx(summary["dollars"]["total"], abs=0.1)
    (run / "summary.json").unlink()
    record = RunRecord.read(RunDirectory(run))
    assert record.dollars["total"] == pytest.approx(summary["dollars"]["total"], abs=0.1)


REPLACING = """
import shutil
from tests.support.faults import BETWEEN_STEPS, before

def replace():
    shutil.rmtree({data!r})
    shutil.copytree({other!r}, {data!r})

before(BETWEEN_STEPS, replace, call=4)
"""


def test_a_dataset_that_is_replaced_during_training(tmp_path: Path) -> None:
    """If another dataset takes the place of a run's during training, the process reads and records the one that it
    began with. The other one is refused when the run is continued."""
    shop = Workshop(tmp_path)
    folders = [shop.add_dataset(f"local/{name}", seed=seed) for seed, name in enumerate(("letters", "other"))]
    for size, folder in zip((270, 260), folders, strict=True):
        train_bpe(iter(["a text of some words"] * 9), size, folder / "tokenizer.json")
        meta = json.loads((folder / "meta.json").read_text())
        (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "tokenizer.json"}))
    tokenizer = (folders[0] / "tokenizer.json").read_bytes()
    settings: dict[str, Any] = {"model": {"vocab_size": 320}, "validation_interval": 3, "checkpoint_interval": 3}
    runs = [shop.add_run(name, **settings) for name in ("undisturbed", "disturbed")]
    shop.train("undisturbed", ranks=1)
    shop.train("disturbed", ranks=1, prelude=REPLACING.format(data=str(folders[0]), other=str(folders[1])))
    losses = [[line["loss"] for line in metrics(run, "validation")] for run in runs]
    assert losses[0] == losses[1]
    metas = [meta_of(run) for run in runs]
    assert metas[0]["dataset"] == metas[1]["dataset"]
    assert (runs[1] / "checkpoints" / "latest" / "tokenizer.json").read_bytes() == tokenizer
    shop.add_run("disturbed", **settings, min_train_tokens=2560)
    assert "dataset" in shop.train("disturbed", ranks=1, expect=2).stderr


def copy_of(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.with_name(name), symlinks=True))


def test_continued_from_a_named_checkpoint(shop: InProcess) -> None:
    """A run resumed from a named checkpoint moves everything later to aside/ and ends as it did the first time.
    Gradients are exchanged in several buckets. A tensor that makes a bucket larger than `bucket_mb` is the bucket's
    last."""
    run = shop.add_run("named", model={"emb_dim": 256}, **COMMON, bucket_mb=1)
    said = shop.train("named", prelude=COUNTED).stdout
    (run / "training-run-chart.png").write_text("a chart")
    counts = re.findall(r"rank \d: (\d+) buckets of (\d+) bytes", said)
    assert len(counts) == 2
    assert counts[0] == counts[1]
    assert int(counts[0][0]) > 4
    assert int(counts[0][1]) <= 2 * 2**20
    first = copy_of(run, "first")
    old, lines = list_checkpoints(run / "checkpoints"), metrics(run)
    assert [step for step, _ in old] == [0, 5, 10, 15, 19]
    assert f"continuing from {old[1][1].name}" in shop.train("named", old[1][1].name).stdout
    aside = list((run / "aside").rglob("*-iteration-*"))
    assert sorted(path.name for path in aside) == [path.name for _, path in old[2:]]
    (tail,) = (run / "aside").rglob("metrics.jsonl")
    kept = [json.loads(line) for line in tail.read_text().splitlines()]
    # Lines up to the named checkpoint's own stay in metrics.jsonl. The later lines, the summary and the chart are
    # moved.
    assert kept == [line for line in lines if line["global_step"] > 5]
    assert {path.name for path in tail.parent.iterdir()} == ASIDE
    assert_same_end(first, run)


@pytest.mark.slow
def test_back_to_the_end_before_the_budget_was_raised(shop: InProcess) -> None:
    """A run that was extended is again the one that had finished before: going back moves what is later aside, although
    no step is left to train."""
    run = shop.add_run("extended", **COMMON)
    shop.train_here("extended")
    once, end = copy_of(run, "once"), list_checkpoints(run / "checkpoints")[-1][1].name
    shop.add_run("extended", **COMMON | {"min_train_tokens": 3840})
    shop.train_here("extended")
    shop.add_run("extended", **COMMON)
    assert "is finished: 40 global steps" in shop.train_here("extended", end).stdout
    assert_same_end(once, run)
    assert summary_of(run)["final_validation_loss"] == summary_of(once)["final_validation_loss"]


def test_restart_moves_everything_aside(shop: InProcess, finished: Path) -> None:
    run = copy_of(finished, "again")
    files = [path for path in run.iterdir() if path.is_file() and path.suffix != ".json" and path.name != ".lock"]
    before = {path.name: path.read_bytes() for path in files}
    shop.train_here("again", "--restart")
    (aside,) = (run / "aside").iterdir()
    assert {path.name for path in aside.iterdir()} == ASIDE
    assert all((aside / name).read_bytes() == content for name, content in before.items())
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [0, 3]


def test_a_changed_model_dataset_or_optimizer_is_refused(shop: InProcess, finished: Path) -> None:
    """Training refuses to resume with another model, optimizer, dataset or initial weights, which are read only at the
    start, and changes no file. A new run may start from the weights."""
    run = copy_of(finished, "changed")
    shop.add_run("changed", model={"emb_dim": 32}, **SHORT)
    shop.attempt(run="changed").refuses("made with another model: emb_dim: 16 -> 32")
    shop.add_run("changed", **SHORT | {"min_train_tokens": 1024}, **MUON)
    other = 'made with "optimizer": "adamw", but train.json has "muon"; restore the old value, use --restart'
    for arguments in ([], ["--plan"]):
        shop.attempt(*arguments, run="changed").refuses(other)
    shop.add_run("changed", **SHORT, initial_weights="other.safetensors")
    shop.attempt(run="changed").refuses('made with "initial_weights": null, but train.json has "other.safetensors"')
    shop.add_run("changed", **SHORT)
    second = InProcess(shop.path / "elsewhere")
    second.add_dataset(tokens=40_000, seed=1)
    (second.runs).symlink_to(shop.runs)
    second.attempt(run="changed").refuses("made with another dataset")
    assert [step for step, _ in list_checkpoints(run / "checkpoints")] == [0, 3]
    initial = str(run / "checkpoints" / "latest" / "model.safetensors")
    shop.add_run("new", **SHORT, **MUON, initial_weights=initial)
    assert "starting from" in shop.train_here("new").stdout


def test_the_best_checkpoint_stays_best_in_other_microbatches(shop: InProcess) -> None:
    """Validation losses of different microbatch sizes are compared if they are over the same tokens, so a higher loss
    with another microbatch size does not become the best."""
    slices = ({"microbatch_size": 2, "validation_batches": 4}, {"microbatch_size": 1, "validation_batches": 8})
    for tokens, rate, keys in zip((512, 1024), (0.01, 1.0), slices, strict=True):
        run = shop.add_run("sliced", min_train_tokens=tokens, learning_rate=rate, **keys)
        shop.train_here("sliced")
    best = {
        step: json.loads((path / "meta.json").read_text())["best_loss"]
        for step, path in list_checkpoints(run / "checkpoints")
    }
    later = [event for event in metrics(run, "validation") if event["tokens_seen"] > 512]
    assert all(event["loss"] > best[max(best)] for event in later), "the high learning rate did not raise the loss"


def test_changes_of_settings_are_recorded(shop: InProcess) -> None:
    """A summary lists the settings that changed when the run was resumed, also if the summary is written again."""
    changed = []
    for tokens, rate in ((256, 0.01), (384, 0.02), (512, 0.02), (640, 0.03)):
        run = shop.add_run("varied", min_train_tokens=tokens, learning_rate=rate)
        printed = shop.train_here("varied").stdout
        changed.append(summary_of(run).get("changed"))
    first, second = "learning_rate: 0.01 -> 0.02 after global step 3", "learning_rate: 0.02 -> 0.03 after global step 7"
    assert changed == [None, [first], [first], [first, second]]
    assert "  train.json has changed since: learning_rate: 0.02 -> 0.03\n" in printed
    (run / "summary.json").unlink()
    shop.train_here("varied")
    assert summary_of(run)["changed"] == [first, second]
    said = " ".join(shop.script("compare_runs.py", "varied", "--runs-dir", "runs").stdout.split())
    how = "changed during training, so it is not a replicate of a run without these changes"
    assert f"varied: {how}: {first}; {second}" in said


def test_a_summary_from_before_the_budget_was_raised_is_replaced(shop: InProcess) -> None:
    """A finished run whose summary is still that of an earlier, shorter training gets a new summary. Such an old
    summary is left by a process that is killed between its last checkpoint and its summary."""
    run = shop.add_run("longer", min_train_tokens=256)
    shop.train_here("longer")
    earlier = (run / "summary.json").read_text()
    shop.add_run("longer", min_train_tokens=384)
    shop.train_here("longer")
    longer = summary_of(run)
    (run / "summary.json").write_text(earlier)
    assert "longer is finished" in shop.train_here("longer").stdout
    restored = summary_of(run)
    for key in ("tokens_seen", "global_steps", "final_train_loss", "train"):
        assert restored[key] == longer[key] != json.loads(earlier)[key]
    assert restored["precision"] == longer["precision"]


def test_a_finished_run_without_checkpoints_is_not_trained_again_by_accident(shop: InProcess) -> None:
    """A run that has finished, and whose checkpoints somebody has deleted or moved, is refused until --restart is
    given, because training it again costs as much as before. Its results are then moved aside."""
    run = shop.add_run("emptied", **SHORT)
    shop.train_here("emptied")
    summary = (run / "summary.json").read_bytes()
    shutil.rmtree(run / "checkpoints")
    for options in ([], ["--plan"]):
        refused = shop.attempt(*options, run="emptied")
        refused.refuses("summary.json: the run has finished, but it has no checkpoint")
        (run / "checkpoints").symlink_to("disk")  # which is not mounted: no reason to train again
        shop.attempt(*options, run="emptied").refuses("a link to disk, which does not exist; mount its disk")
        (run / "checkpoints").unlink()
    assert (run / "summary.json").read_bytes() == summary
    assert "Training complete" in shop.train_here("emptied", "--restart").stdout
    [aside] = (run / "aside").iterdir()
    assert (aside / "summary.json").read_bytes() == summary


def test_a_search_alone_is_not_moved_aside(shop: InProcess) -> None:
    """The result of a search (-f) stays in place when a run first begins, because it measures the device. When a
    trained run begins again, this result is moved aside with the results of the earlier training."""
    run = shop.add_run("searched")
    found = write_search(RunDirectory(run), SEARCH)
    assert "Earlier results" not in shop.train_here("searched").stdout
    assert found.exists()
    assert "Earlier results" in shop.train_here("searched", "--restart").stdout
    assert not found.exists()


def test_a_sample_that_cannot_be_made_does_not_end_the_run(shop: InProcess) -> None:
    """Training continues if a sample cannot be made. By its meta.json, the dataset's tokens are GPT-2's, but this model
    has a vocabulary of 64."""
    shop.add_run("sampled", sample_prompt="def", sample_interval=2)
    result = shop.train_here("sampled")
    assert "no sample: " in result.stdout + result.stderr


def test_a_sample_without_memory_does_not_end_the_run(shop: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a long prompt it can take more memory than training."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(evaluations, "load_tokenizer", lambda _: None)
    monkeypatch.setattr(evaluations, "continue_text", fail)
    shop.add_run("large", sample_prompt="def", sample_interval=2)
    result = shop.train_here("large")
    assert "no sample: out of memory: CUDA out of memory. Tried" in result.stdout
    assert "Training complete" in result.stdout


@pytest.mark.slow
def test_a_budget_in_another_unit_changes_no_result(shop: InProcess) -> None:
    """A budget that comes to the same steps leaves the schedule as it was, so the run is still a replicate."""
    shop.add_run("unit", **COMMON)
    shop.train("unit", ranks=1, prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=5)", expect=143)
    run = shop.add_run("unit", **COMMON | {"min_train_tokens": None, "train_steps": 40})
    shop.train_here("unit")
    assert "changed" not in summary_of(run)


def test_a_run_that_a_lower_budget_ends_is_validated_there(shop: InProcess) -> None:
    """It is not taken for a run that had the lower budget, and so another schedule, from the start."""
    shop.add_run("shorter", **COMMON, validation_interval=50)
    shop.train("shorter", ranks=1, prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=5)", expect=143)
    run = shop.add_run("shorter", **SHORT, validation_interval=50)
    shop.train_here("shorter")
    summary = summary_of(run)
    last = metrics(run, "validation")[-1]
    assert last["global_step"] == summary["global_steps"] - 1 > 3
    assert summary["final_validation_loss"] == pytest.approx(last["loss"])
    assert summary["train"]["min_train_tokens"] == 256
    assert summary["changed"] == [f"min_train_tokens: 2560 -> 256 after global step {last['global_step']}"]
    assert "is finished" in shop.train_here("shorter").stdout


def test_samples_take_no_time_of_the_setup(shop: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(_: Evaluations) -> str:
        time.sleep(0.4)
        return "text"

    monkeypatch.setattr(Evaluations, "sample", sample)
    run = shop.add_run("timed", **SHORT, sample_prompt="def", sample_interval=1)
    shop.train_here("timed")
    assert summary_of(run)["seconds"]["validation"] >= 4 * 0.4


@pytest.mark.slow
@pytest.mark.fault(
    "killed while it goes back to an earlier checkpoint", "the same command goes back; the run is no longer finished"
)
@pytest.mark.parametrize("place", ["directory:RunDirectory.set_summary_and_chart_aside", "checkpoints:rewind_to"])
def test_killed_while_it_goes_back(shop: InProcess, place: str) -> None:
    run = shop.add_run(f"killed-in-{place.partition(':')[0]}", min_train_tokens=1280)
    shop.train(run.name)
    name = min(path.name for path in (run / "checkpoints").glob("*-iteration-*"))
    shop.train(run.name, name, prelude=f"{FAULTS}before('harness.runs.{place}', kill)", expect=-9)
    again = shop.train(run.name, name, prelude=f"{FAULTS}before(STEP, tell(SIGTERM), rank=1, step=7)", expect=143)
    assert f"continuing from {name}" in again.stdout
    assert not (run / "summary.json").exists()
    assert RunRecord.read(RunDirectory(run)).state.word == "stopped"


@pytest.mark.slow
def test_torchrun_starts_one_rank_again_whose_checkpoint_is_gone(shop: InProcess, tmp_path: Path) -> None:
    """The run has gone back to a checkpoint that `keep_checkpoints` deletes after the first restart."""
    run = shop.add_run("kept-one", min_train_tokens=64 * 24, keep_checkpoints=1, checkpoint_interval=2)
    shop.train("kept-one", ranks=1, prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=5)", expect=143)
    name = min(path.name for path in (run / "checkpoints").glob("*-iteration-*"))
    died = "".join(
        f"before(STEP, in_life({life}, {str(tmp_path / 'lives')!r}, kill), step={step})\n"
        for life, step in ((1, 12), (2, 17))
    )
    job = Torchrun(shop, run, are_forked=True)
    finish([job.start(died, "--nproc_per_node=1", "--max-restarts=3", arguments=[name])], expect=0, timeout=240)
    assert (run / "summary.json").exists()
    assert len((tmp_path / "lives").read_text().splitlines()) == 2


def test_a_schedulers_error_file_is_not_torchruns(shop: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command continues a run that was stopped."""
    monkeypatch.setitem(shop.environment, "TORCHELASTIC_ERROR_FILE", "/error.json")
    shop.add_run("scheduled", **SHORT)
    shop.train("scheduled", ranks=1, prelude=f"{FAULTS}before(STEP, tell(SIGTERM), step=1)", expect=143)
    assert "continuing from" in shop.train("scheduled", ranks=1).stdout
