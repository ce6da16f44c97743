"""Results of measurements of checkpoints, kept in their run by the real commands."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file

from gpt import load_model
from harness.common.errors import RunError
from harness.common.files import move, sha256
from harness.data.dataset import TokenFile
from harness.model.config import load_model_config
from harness.runs import directory
from harness.runs.directory import RunDirectory
from harness.runs.results import BenchmarkResult, LossResult, MeasuredWeights, read_results, read_window_losses
from tests.support.benchmark_files import write_task
from tests.support.launch import DATASET, Result, Workshop
from tests.support.preparing import Preparer, write_json_lines

WINDOW = 16  # MODEL's context length


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("results"))
    shop.add_dataset()
    shop.add_run(validation_interval=10)
    shop.train(ranks=1)
    return shop


@pytest.fixture
def shop(trained: Workshop, tmp_path: Path) -> Workshop:
    """A copy of a finished run of its own."""
    shutil.copytree(trained.path, tmp_path / "shop", symlinks=True)
    return Workshop(tmp_path / "shop", dict(trained.environment))


def files_of(run: Path, checkpoint: str = "best") -> list[str]:
    return [str(run / "model.json"), str(run / "checkpoints" / checkpoint / "model.safetensors")]


def measure(shop: Workshop, *arguments: str) -> Result:
    return shop.command("test_loss.py", str(shop.datasets), *arguments)


def losses_in(run: Path) -> list[LossResult]:
    results = read_results(RunDirectory(run))
    assert results.problems == []
    return results.of(LossResult)


def plain_losses(shop: Workshop, run: Path, start: int, windows: int) -> list[float]:
    """Each sequence by itself, by torch's own cross-entropy over all logits."""
    model = load_model(load_model_config(Path(files_of(run)[0])), Path(files_of(run)[1]), torch.device("cpu"))
    tokens = load_file(shop.datasets / DATASET / "test.safetensors")["tokens"].astype(np.int64)
    found = []
    for window in range(windows):
        part = torch.from_numpy(tokens[start + window * WINDOW :][: WINDOW + 1])
        with torch.no_grad():
            found.append(F.cross_entropy(model(part[None, :-1])[0], part[1:]).item())
    return found


def test_the_loss_of_each_window_is_that_of_its_sequence(shop: Workshop) -> None:
    run = shop.runs / "r"
    done = measure(shop, *files_of(run), "--start-token", "7")
    assert (done.status, done.stderr) == (0, "")
    [result] = losses_in(run)
    expected = plain_losses(shop, run, 7, 30)
    windows = read_window_losses(RunDirectory(run), result)
    np.testing.assert_allclose(windows, expected, rtol=1e-5)
    assert result.loss == pytest.approx(float(windows.astype(np.float64).mean()), rel=1e-12)
    assert done.stdout.startswith(f"Loss on the test split: {np.mean(expected):.3f}\n")


def test_the_result_says_what_was_measured(shop: Workshop) -> None:
    run = shop.runs / "r"
    measure(shop, *files_of(run), "--batches", "2")
    [result] = losses_in(run)
    meta = json.loads((run / "checkpoints" / "best" / "meta.json").read_text())
    assert result.weights == MeasuredWeights(
        checkpoint=(run / "checkpoints" / "best").resolve().name,
        sha256=sha256(Path(files_of(run)[1])),
        global_step=meta["global_step"],
        tokens_seen=meta["tokens_seen"],
        is_best=True,
        is_latest=os.path.realpath(run / "checkpoints" / "best") == os.path.realpath(run / "checkpoints" / "latest"),
    )
    text = result.text
    fingerprint = TokenFile(shop.datasets / DATASET / "test.safetensors").fingerprint()
    assert (text.dataset, text.split, text.tokenizer, text.sha256) == (DATASET, "test", "gpt2", fingerprint)
    assert (text.start_token, text.windows, text.context_length) == (0, 12, WINDOW)
    assert result.device == meta["device"]
    assert (result.precision, result.torch) == ("fp32", torch.__version__)


def test_the_same_again_replaces_it_and_another_batch_size_is_the_same(shop: Workshop) -> None:
    run = shop.runs / "r"
    for options in (["--batches", "4"], ["--batches", "4"], ["--batches", "8", "--batch-size", "3"]):
        assert measure(shop, *files_of(run), *options).status == 0
    assert len(losses_in(run)) == 1
    measure(shop, *files_of(run), "--batches", "4", "--split", "validation")
    assert len(losses_in(run)) == 2


def test_every_way_to_the_weights_leads_to_the_same_file(shop: Workshop, tmp_path: Path) -> None:
    """Through best and the folder's own name, a link to the run, a link to a checkpoint, and a checkpoints folder on
    another disk."""
    run = shop.runs / "r"
    own = (run / "checkpoints" / "best").resolve().name
    (run / "checkpoints").rename(tmp_path / "larger-disk")
    (run / "checkpoints").symlink_to(tmp_path / "larger-disk")
    (tmp_path / "mine").symlink_to(run)
    names = set()
    for folder, checkpoint in ((run, "best"), (run, own), (tmp_path / "mine", "best")):
        assert measure(shop, *files_of(folder, checkpoint), "--batches", "1").stderr == ""
        names |= {path.name for path in (run / "results").iterdir()}
    (run / "checkpoints").unlink()
    (tmp_path / "larger-disk").rename(run / "checkpoints")
    (tmp_path / "favourite").symlink_to(run / "checkpoints" / "best")
    measure(shop, files_of(run)[0], str(tmp_path / "favourite" / "model.safetensors"), "--batches", "1")
    assert {path.name for path in (run / "results").iterdir()} == names
    assert len(names) == 2
    assert losses_in(run)[0].weights.checkpoint == own


def test_weights_elsewhere_leave_nothing(shop: Workshop, tmp_path: Path) -> None:
    run = shop.runs / "r"
    copy = shutil.copytree(run / "checkpoints" / "best", tmp_path / "copy")
    aside = shutil.copytree(run / "checkpoints", run / "aside" / "old" / "checkpoints", symlinks=True)
    for weights in (copy, aside / "best"):
        assert measure(shop, files_of(run)[0], str(weights / "model.safetensors"), "--batches", "1").status == 0
    assert not (run / "results").exists()
    assert not list(tmp_path.rglob("results"))


def test_what_cannot_be_written_is_a_warning(shop: Workshop) -> None:
    run = shop.runs / "r"
    (run / "results").write_text("in the way")
    done = measure(shop, *files_of(run), "--batches", "1")
    assert done.status == 0
    assert done.stdout.startswith("Loss on the test split: ")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"warning: not kept among the run's results: {run / 'results'}/test-loss-")


def test_a_link_in_a_results_place_is_replaced_and_not_followed(shop: Workshop, tmp_path: Path) -> None:
    run = shop.runs / "r"
    measure(shop, *files_of(run), "--batches", "1")
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for path in list((run / "results").iterdir()):
        path.unlink()
        path.symlink_to(outside)
    assert measure(shop, *files_of(run), "--batches", "1").stderr == ""
    assert outside.read_text() == "mine"
    assert len(losses_in(run)) == 1


def checkpoint_of_step(run: Path, step: int) -> str:
    [path] = (run / "checkpoints").glob(f"*-iteration-{step}")
    return path.name


def test_several_models_are_a_table_by_loss(shop: Workshop) -> None:
    run = shop.runs / "r"
    first = f"r:{checkpoint_of_step(run, 0)}"
    options = [first, "--runs-dir", str(shop.runs), "--run", "r"]
    done = measure(shop, *files_of(run, checkpoint_of_step(run, 10)), *options)
    assert (done.status, done.stderr) == (0, "")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert not done.stdout.endswith("\n\n"), "no empty line below a table with nothing behind it"
    table, _, place = done.stdout.partition("Measured on ")
    head, *rows = table.splitlines()
    assert head.split() == ["model", "loss", "bits/byte", "global", "batch", "parameters"]
    kept = {each.weights.checkpoint: each.loss for each in losses_in(run)}
    expected = sorted((loss or 0.0, checkpoint) for checkpoint, loss in kept.items())
    assert len(rows) == len(expected) == 3
    parameters = load_model_config(run / "model.json").parameters
    for row, (loss, checkpoint) in zip(rows, expected, strict=True):
        label, *numbers = row.split()
        assert numbers == [f"{loss:.3f}", "-", "4", f"{parameters:,}"]
        assert label == ("r" if checkpoint == (run / "checkpoints" / "best").resolve().name else f"r:{checkpoint}")
    assert rows[-1].split()[0] == first, "nothing is learnt at step 0"
    assert place.split() == f"{DATASET}, test split, tokens 0 to 480 of 500 (5 batches of 6 x 16), in fp32".split()


def test_the_same_weights_are_measured_once(shop: Workshop) -> None:
    run = shop.runs / "r"
    options = ["--runs-dir", str(shop.runs), "--run", "r"]
    alone = measure(shop, *options)
    assert measure(shop, *options, "--run", "r").stdout == alone.stdout, "named the same: one model, no table"
    (path,) = (run / "results").glob("*.json")
    before = path.stat().st_mtime_ns
    done = measure(shop, *options, "--run", "r", "--run", "r:best", *files_of(run))
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["r:best", "r"], "each name once"
    assert path.stat().st_mtime_ns > before
    assert len(losses_in(run)) == 1


def test_a_pattern_names_all_such_runs(shop: Workshop, tmp_path: Path) -> None:
    for name in ("lr-1", "lr-2", "other"):
        shutil.copytree(shop.runs / "r", tmp_path / name, symlinks=True)
    rows = measure(shop, "--runs-dir", str(tmp_path), "--run", "lr-*").stdout.splitlines()[1:3]
    assert sorted(row.split()[0] for row in rows) == ["lr-1", "lr-2"]
    rows = measure(shop, "--runs-dir", str(tmp_path), "--run", "lr-*:best", "--run", "lr-1").stdout.splitlines()[1:4]
    assert sorted(row.split()[0] for row in rows) == ["lr-1", "lr-1:best", "lr-2:best"]
    done = measure(shop, "--runs-dir", str(tmp_path), "--run", "rl-*")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr.strip().endswith(f"no run in {tmp_path} has such a name")


def test_models_that_would_be_called_alike_are_called_by_their_paths(shop: Workshop, tmp_path: Path) -> None:
    other = shutil.copytree(shop.runs, tmp_path / "others", symlinks=True) / "r"
    done = measure(shop, *files_of(shop.runs / "r"), *files_of(other))
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    said = "".join(done.stdout.split())
    for run in (shop.runs / "r", other):
        assert files_of(run)[1] in said


def test_models_that_read_other_text_get_tables_of_their_own(shop: Workshop) -> None:
    shop.add_dataset("local/other", seed=5)
    other = shutil.copytree(shop.runs / "r", shop.runs / "other", symlinks=True)
    for meta in (other / "checkpoints").glob("*/meta.json"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"dataset": {"name": "local/other"}, "sha256": {}}))
    runs = ["--runs-dir", str(shop.runs), "--run", "r", "--run", "other"]
    done = measure(shop, *runs)
    assert done.stdout.count("Measured on") == 2
    assert done.stdout.count("\n\nmodel ") == 1
    assert "\n\nLosses compare within a table" in done.stdout
    together = measure(shop, *runs, "--dataset", DATASET)
    assert together.stdout.count("Measured on") == 1
    assert "within a table" not in together.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "r", "--run", "gone"], "no such run"),
        (["--run", "r", "--run", "r:gone"], "no such checkpoint"),
        (["--run", "r", "--run", "empty"], "no best or latest checkpoint"),
        (["--run", "r", "runs/r/model.json"], "a model is two files"),
        (["--run", "r", "runs/r/model.json", "gone.safetensors"], "gone.safetensors: no such file"),
        (["--run", "r", "runs/r/model.json", "other.safetensors"], "not this model"),
        ([], "no model"),
    ],
)
def test_all_models_are_looked_at_before_the_first_is_measured(
    shop: Workshop, arguments: list[str], words: str
) -> None:
    shop.add_run("empty")
    save_file({"tok_emb.weight": np.zeros((64, 16), np.float32)}, shop.path / "other.safetensors")
    done = measure(shop, *arguments)
    assert (done.status, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert words in line
    assert not (shop.runs / "r" / "results").exists()


def test_restart_moves_results_aside_with_their_weights(shop: Workshop) -> None:
    run = shop.runs / "r"
    measure(shop, *files_of(run))
    before = {path.name: path.read_bytes() for path in (run / "results").iterdir()}
    shop.train("r", "--restart", ranks=1)
    [aside] = (run / "aside").iterdir()
    assert {path.name: path.read_bytes() for path in (aside / "results").iterdir()} == before
    assert not (run / "results").exists()


def test_moving_aside_that_ends_early_leaves_no_results_without_their_weights(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each thing that is moved; the next attempt moves the rest."""
    measure(shop, *files_of(shop.runs / "r"), "--batches", "1")
    things = {path.name for path in (shop.runs / "r").iterdir()} - {"model.json", "train.json", ".lock", "checkpoints"}
    checkpoints = {path.name for path in (shop.runs / "r" / "checkpoints").iterdir()}
    assert {"results", "metrics.jsonl", "summary.json"} <= things
    for number in range(len(things) + len(checkpoints)):
        run = RunDirectory(Path(shutil.copytree(shop.runs / "r", tmp_path / str(number), symlinks=True)))
        left = number

        def move_some(path: Path, target: Path) -> None:
            nonlocal left
            if not left:
                raise RunError("the process ends here")
            left -= 1
            move(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(directory, "move", move_some)
            with pytest.raises(RunError, match="ends here"):
                run.set_results_aside()
        if run.results.exists():
            assert {path.name for path in run.checkpoints.iterdir()} == checkpoints
        assert run.set_results_aside() is not None
        assert run.set_results_aside() is None, "nothing is left"


def test_a_long_name_stands_above_its_numbers(shop: Workshop) -> None:
    run = shop.add_run("a-run-with-a-name-of-its-own")
    shutil.copytree(shop.runs / "r" / "checkpoints", run / "checkpoints", symlinks=True)
    long = f"{run.name}:{checkpoint_of_step(run, 0)}"
    lines = measure(
        shop, "--runs-dir", str(shop.runs), "--run", "r", "--run", long, "--batches", "1"
    ).stdout.splitlines()
    assert lines[2] == long, "below the head and the better model"
    assert len(lines[3].split()) == 4
    assert all(len(line) <= 80 for line in lines)


def test_going_back_moves_results_of_later_checkpoints_aside(shop: Workshop) -> None:
    run = shop.runs / "r"
    earlier, last = checkpoint_of_step(run, 10), (run / "checkpoints" / "latest").resolve().name
    for checkpoint in (earlier, last):
        measure(shop, *files_of(run, checkpoint), "--batches", "1")
    shop.train("r", earlier, ranks=1)
    assert [each.weights.checkpoint for each in losses_in(run)] == [earlier]
    [aside] = (run / "aside").iterdir()
    assert len(list((aside / "results").iterdir())) == 2
    assert (aside / "checkpoints" / last).is_dir()


def test_benchmarks_of_a_checkpoint_stay_in_the_run(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, {"HF_HOME": str(tmp_path / "hf")})
    documents = [f"the river carries {number} boats to the sea and back" for number in range(200)]
    write_json_lines(tmp_path / "a.jsonl", documents)
    Preparer(tmp_path, {}).prepare("a.jsonl", "mine", "--validation-fraction", "0.2", "--train-tokenizer", "280")
    run = shop.add_run(model={"vocab_size": 280}, dataset="me/mine", min_train_tokens=128)
    shop.train(ranks=1)
    task = str(write_task(tmp_path, "choice", name="one"))
    options: list[Any] = ["--tasks", task, "--limit", "6"]
    done = shop.script("evaluate_benchmarks.py", "r", "--runs-dir", str(shop.runs), *options)
    assert done.stderr == ""
    [result] = read_results(RunDirectory(run)).of(BenchmarkResult)
    assert (result.tasks, result.limit, result.num_fewshot, result.precision) == ([task], 6, None, "fp32")
    assert result.weights.sha256 == sha256(Path(files_of(run)[1]))
    assert [(score.task, score.metric, score.examples) for score in result.scores] == [
        ("one", "acc", 6),
        ("one", "acc_norm", 6),
    ]
    assert all(score.higher_is_better for score in result.scores)
    printed = [float(line[33:].split()[1]) for line in done.stdout.splitlines()[1:]]
    assert [score.value for score in result.scores] == pytest.approx(printed, abs=1e-4)
