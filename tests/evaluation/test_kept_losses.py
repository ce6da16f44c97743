"""Results of test_loss.py in a run: where they are kept, what replaces them, and when they are moved aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.common.errors import RunError
from harness.common.files import move
from harness.evaluation.loss import HeldOutText, window_losses
from harness.runs import directory
from harness.runs.directory import RunDirectory
from harness.runs.trained_model import TrainedModel
from tests.support.launch import DATASET, Workshop
from tests.support.measuring import checkpoint_of_step, files_of, losses_in, measure


def test_measuring_the_same_again_with_any_batch_size_replaces_the_result(shop: Workshop) -> None:
    for options in (["--batches", 4], ["--batches", 4], ["--batches", 8, "--batch-size", 3]):
        assert measure(shop, "r", *options).status == 0
    assert len(losses_in(shop.runs / "r")) == 1
    measure(shop, "r", "--batches", 4, "--split", "validation")
    assert len(losses_in(shop.runs / "r")) == 2


def test_every_way_to_the_weights_leads_to_the_same_file(shop: Workshop, tmp_path: Path) -> None:
    """All paths to the same weights lead to the same result file. The paths are the link best, the checkpoint's own
    name, links to the run and to the checkpoint, and a checkpoints folder that is a link to another disk."""
    run = shop.runs / "r"
    own = (run / "checkpoints" / "best").resolve().name
    (tmp_path / "mine").symlink_to(run)
    (tmp_path / "favorite").symlink_to(run / "checkpoints" / "best")
    (run / "checkpoints").rename(tmp_path / "larger-disk")
    (run / "checkpoints").symlink_to(tmp_path / "larger-disk")
    for weights in (files_of(run), files_of(run, own), files_of(tmp_path / "mine")):
        assert measure(shop, *weights, "--batches", 1).stderr == ""
        found = TrainedModel.read(Path(weights[1]))
        assert found.run is not None
        assert (found.run.path, found.dataset) == (run.resolve(), DATASET)
    (run / "checkpoints").unlink()
    (tmp_path / "larger-disk").rename(run / "checkpoints")
    measure(shop, files_of(run)[0], tmp_path / "favorite" / "model.safetensors", "--batches", 1)
    assert len(list((run / "results").iterdir())) == 2
    assert losses_in(run)[0].weights.checkpoint == own


def test_weights_elsewhere_leave_nothing(shop: Workshop, tmp_path: Path) -> None:
    run = shop.runs / "r"
    copy = shutil.copytree(run / "checkpoints" / "best", tmp_path / "copy")
    aside = shutil.copytree(run / "checkpoints", run / "aside" / "old" / "checkpoints", symlinks=True)
    for weights in (copy, aside / "best"):
        assert measure(shop, files_of(run)[0], weights / "model.safetensors", "--batches", 1).status == 0
    assert not list(tmp_path.rglob("results"))


def test_another_shape_of_the_same_weights_leaves_nothing(shop: Workshop, tmp_path: Path) -> None:
    """The weights of the run with another number of heads are another model. The run's own model.json is not."""
    run = shop.runs / "r"
    model_json, weights = files_of(run)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(Path(model_json).read_text()) | {"n_heads": 1}))
    assert measure(shop, other, weights, "--batches", 1).status == 0
    assert not (run / "results").exists()
    assert measure(shop, model_json, weights, "--batches", 1).status == 0
    assert len(losses_in(run)) == 1


def test_a_checkpoint_that_is_deleted_meanwhile_costs_no_other_result(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training deletes it (keep_checkpoints) while another model is measured."""
    other = shutil.copytree(shop.runs / "r", shop.runs / "s", symlinks=True)
    measure_text = HeldOutText.measure

    def measure_and_delete(text: HeldOutText, *arguments: Any) -> Any:
        shutil.rmtree((other / "checkpoints" / "best").resolve(), ignore_errors=True)
        return measure_text(text, *arguments)

    monkeypatch.setattr(HeldOutText, "measure", measure_and_delete)
    done = measure(shop, "r", "s")
    assert "Loss on the test split" in done.stdout
    assert "runs/s/checkpoints" in done.error_lines[0]
    assert done.status == 2


def test_a_checkpoint_that_is_deleted_while_it_is_measured_has_its_result(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(shop.runs / "r", shop.runs / "t", symlinks=True)
    shutil.rmtree(run / "results", ignore_errors=True)

    def measure_and_delete(*arguments: Any) -> Any:
        losses = window_losses(*arguments)
        shutil.rmtree((run / "checkpoints" / "best").resolve())
        return losses

    monkeypatch.setattr("harness.evaluation.loss.window_losses", measure_and_delete)
    done = measure(shop, "t")
    assert (done.status, done.stderr) == (0, "")
    assert list((run / "results").glob("*.json"))


def test_what_stands_in_a_results_place(shop: Workshop, tmp_path: Path) -> None:
    """A link in the place of a result's file is replaced and not followed. A file in the place of the results folder
    gives a warning, and the result is not kept."""
    run = shop.runs / "r"
    measure(shop, "r", "--batches", 1)
    outside = tmp_path / "outside"
    outside.write_text("mine")
    for path in list((run / "results").iterdir()):
        path.unlink()
        path.symlink_to(outside)
    assert measure(shop, "r", "--batches", 1).stderr == ""
    assert outside.read_text() == "mine"
    assert len(losses_in(run)) == 1
    shutil.rmtree(run / "results")
    (run / "results").write_text("in the way")
    done = measure(shop, "r", "--batches", 1)
    assert done.status == 0
    assert done.stdout.startswith("Loss on the test split: ")
    [line] = done.stderr.splitlines()
    assert line.startswith(f"warning: the result is not written to the run's results: {run / 'results'}/test-loss-")


def test_results_go_aside_with_their_weights(shop: Workshop) -> None:
    """If training resumes from an earlier checkpoint, results of later ones are moved to aside/. If it restarts, all
    results are moved there."""
    run = shop.runs / "r"
    earlier, last = checkpoint_of_step(run, 10), (run / "checkpoints" / "latest").resolve().name
    for checkpoint in (earlier, last):
        measure(shop, *files_of(run, checkpoint), "--batches", 1)
    assert shop.attempt(earlier).status == 0
    assert [each.weights.checkpoint for each in losses_in(run)] == [earlier]
    [first] = (run / "aside").iterdir()
    assert len(list((first / "results").iterdir())) == 2
    assert (first / "checkpoints" / last).is_dir()
    before = {path.name: path.read_bytes() for path in (run / "results").iterdir()}
    assert shop.attempt("--restart").status == 0
    [aside] = [path for path in (run / "aside").iterdir() if path != first]
    assert {path.name: path.read_bytes() for path in (aside / "results").iterdir()} == before
    assert not (run / "results").exists()


def test_moving_aside_that_ends_early_leaves_no_results_without_their_weights(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If setting results aside ends before any of its moves, no results are left without their weights. The next
    attempt moves the rest."""
    measure(shop, "r", "--batches", 1)
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
