"""test_loss.py: the loss against plain torch, bits per byte against a count by hand, and tables."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from convert_hf import find_files
from gpt import GPTModel, ModelConfig, load_model
from harness.common.device import device_name
from harness.common.errors import UserError
from harness.common.files import sha256
from harness.data.dataset import TokenFile
from harness.data.tokenizers import load_tokenizer, train_bpe
from harness.evaluation import loss
from harness.evaluation.loss import HeldOutText
from harness.hf.export import export_tokenizer
from harness.model.config import load_model_config
from harness.runs.directory import RunDirectory
from harness.runs.results import MEASURED_BATCH, MeasuredWeights, read_window_losses
from harness.runs.trained_model import TrainedModel, find_model
from tests.support.launch import DATASET, MODEL, Result, Workshop
from tests.support.measuring import checkpoint_of_step, files_of, losses_in, measure

CPU = torch.device("cpu")
WINDOW = 16  # MODEL's context length


def unwrapped(result: Result) -> str:
    return " ".join(result.stdout.split())


# One model -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_each_sequence_by_itself(shop: Workshop) -> None:
    """The printed loss is the mean over all whole batches of 6 sequences from the start token on. The loss of each
    sequence of 16 tokens equals torch's cross-entropy."""
    run = shop.runs / "r"
    best, weights = run / "checkpoints" / "best", Path(files_of(run)[1])
    model = load_model(load_model_config(run / "model.json"), weights, CPU)
    meta = json.loads((best / "meta.json").read_text())
    measured = MeasuredWeights(
        checkpoint=best.resolve().name,
        sha256=sha256(weights),
        global_step=meta["global_step"],
        tokens_seen=meta["tokens_seen"],
        is_best=True,
        is_latest=best.resolve() == (run / "checkpoints" / "latest").resolve(),
    )
    for split, start, batches in (("test", 0, 5), ("test", 7, 5), ("validation", 300, 2), ("validation", 403, 1)):
        tokens = torch.from_numpy(
            load_file(shop.datasets / DATASET / f"{split}.safetensors")["tokens"].astype(np.int64)
        )
        end = start + batches * 6 * WINDOW
        inputs, targets = tokens[start:end].view(-1, WINDOW), tokens[start + 1 : end + 1].view(-1, WINDOW)
        with torch.no_grad():
            losses = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none").mean(dim=1)
        done = measure(shop, *files_of(run), "--split", split, "--start-token", start)
        assert (done.status, done.stderr) == (0, "")
        size = f"{batches} batch{'es' * (batches > 1)} of {MEASURED_BATCH} x 16"
        place = f"{DATASET}, {split} split, tokens {start} to {end} of 500 ({size}), in fp32"
        shown, _, trained_on = unwrapped(done).partition(" Of this split, also in the training data: ")
        assert shown == f"Loss on the {split} split: {losses.mean():.3f} Measured on {place}"
        assert trained_on == "0 of 1 document, 0.0% of the 13-grams"
        [result] = [each for each in losses_in(run) if (each.text.split, each.text.start_token) == (split, start)]
        windows = read_window_losses(RunDirectory(run), result)
        np.testing.assert_allclose(windows, losses, rtol=1e-5)
        assert result.loss == pytest.approx(float(windows.astype(np.float64).mean()), rel=1e-12)
        assert result.weights == measured
        fingerprint = TokenFile(shop.datasets / DATASET / f"{split}.safetensors").fingerprint()
        assert (result.text.dataset, result.text.tokenizer, result.text.sha256) == (DATASET, "gpt2", fingerprint)
        assert (result.text.windows, result.text.context_length) == (6 * batches, WINDOW)
        assert (result.device, result.precision, result.torch) == (device_name(CPU), "fp32", torch.__version__)


def test_a_lack_of_memory_is_one_line(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.load_model", lambda *_: torch.empty(2**60))
    done = measure(shop, "r")
    assert done.refuses(status=1).startswith("error: out of memory (")
    assert "lower --batch-size or --samples if the command has it or, on a GPU, put CUDA" in done.stderr


@pytest.mark.parametrize("is_path", [False, True])
def test_a_model_stays_the_same_when_best_moves(shop: Workshop, is_path: bool) -> None:
    """Training may point `best` to another checkpoint while the one that was named is measured."""
    best = shop.runs / "r" / "checkpoints" / "best"
    before = best.resolve()
    model = find_model([str(best) if is_path else "r"], shop.runs)
    best.unlink()
    best.symlink_to(checkpoint_of_step(shop.runs / "r", 0))
    assert model.weights.parent.resolve() == before != best.resolve()


@pytest.mark.parametrize("checkpoint", ["", ":best"])
def test_a_folder_above_a_run_may_have_a_colon_in_its_name(shop: Workshop, tmp_path: Path, checkpoint: str) -> None:
    runs = tmp_path / "2026-11-28T10:00" / "runs"
    shutil.copytree(shop.runs / "r", runs / "r", symlinks=True)
    place = f"{runs / 'r'}{checkpoint}"
    assert find_model([place], runs).label == find_files(place, None, runs).label == f"r{checkpoint}"


def test_a_best_checkpoint_of_step_0_is_named_in_a_warning(shop: Workshop) -> None:
    best = shop.runs / "r" / "checkpoints" / "best"
    best.unlink()
    best.symlink_to(checkpoint_of_step(shop.runs / "r", 0))
    result = measure(shop, "r")
    assert result.status == 0
    assert result.stderr.startswith("warning: r: its best checkpoint is that of step 0")
    assert measure(shop, "r:latest").stderr == ""


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary")
def test_an_imported_gpt2_is_measured_on_the_notebooks_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer of an imported model is a file."""
    export_tokenizer("gpt2", tmp_path, 1024)
    (tmp_path / "meta.json").write_text('{"tokenizer": "tokenizer.json"}')
    (tmp_path / "model.json").write_text(json.dumps(MODEL | {"vocab_size": 50257, "context_length": 1024}))
    save_file({}, tmp_path / "model.safetensors")
    asked: list[str] = []
    monkeypatch.setattr(loss, "ensure_dataset", lambda folder, name, splits: asked.append(name))
    with pytest.raises(UserError):
        HeldOutText.choose(TrainedModel.read(tmp_path), tmp_path)
    assert asked == [loss.NOTEBOOK_DATASET]


def test_a_split_that_is_shorter_than_a_batch_is_measured(shop: Workshop) -> None:
    add_text(shop, "short", "gpt2", [5] * (4 * WINDOW + 1), 99, 64)
    assert f"1 batch of 4 x {WINDOW}" in unwrapped(measure(shop, "r", "--dataset", "me/short"))
    measure(shop, "r", "--dataset", "me/short", "--batches", 1).refuses("too short")


def test_results_stay_with_imported_models_but_not_with_other_weights(shop: Workshop, tmp_path: Path) -> None:
    add_text(shop, "short", "gpt2", [5] * (4 * WINDOW + 1), 99, 64)
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(shop.runs / "fresh" / name, saved)
    assert "Loss" in measure(shop, str(saved), "--dataset", "me/short").stdout
    assert {path.name for path in saved.iterdir()} == {"model.json", "model.safetensors"}
    (saved / "meta.json").write_text('{"imported_from": null}')
    measure(shop, str(saved), "--dataset", "me/short")
    assert list((saved / "results").iterdir())
    shutil.rmtree(saved / "results")
    (saved / "train.json").write_text("{}")  # beside it are the weights that a run starts from
    assert measure(shop, saved / "model.safetensors", "--dataset", "me/short").status == 0
    assert not (saved / "results").exists()


# Bits per byte -------------------------------------------------------------------------------------------------------


def add_text(
    shop: Workshop, name: str, tokenizer: str, tokens: list[int], text_bytes: int, vocab_size: int, **model_json: int
) -> None:
    """Write a dataset of these tokens, and an untrained model for its vocabulary in the run `fresh`."""
    folder = shop.datasets / "me" / name
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        save_file({"tokens": np.array(tokens, np.uint16)}, folder / f"{split}.safetensors")
    counts = {"validation": {"tokens": len(tokens), "bytes": text_bytes}}
    (folder / "meta.json").write_text(json.dumps({"tokenizer": tokenizer, "splits": counts}))
    run = shop.add_run("fresh", model={"vocab_size": vocab_size, **model_json})
    torch.manual_seed(5)
    model = GPTModel(ModelConfig(**json.loads((run / "model.json").read_text())))
    save_tensors(dict(model.to_checkpoint_names()), run / "model.safetensors")


def measured_bits(shop: Workshop, name: str, *options: object) -> tuple[float, float, str]:
    """Return the loss, the bits per byte, and the text that is printed after them."""
    folder = shop.runs / "fresh"
    done = measure(shop, folder / "model.json", folder / "model.safetensors", "--dataset", f"me/{name}", *options)
    found = re.match(r"Loss on the \w+ split: (\S+) Bits per byte: (\S+) (.*)", unwrapped(done))
    assert found, done
    return float(found[1]), float(found[2]), found[3]


@pytest.mark.parametrize(
    "known",
    [
        "trained",
        pytest.param(
            "gpt2", marks=pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary")
        ),
    ],
)
def test_bits_per_byte_of_a_slice_count_its_own_bytes(
    shop: Workshop, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits per byte of a slice are computed from its own bytes, not from the mean of the whole split. The text begins
    with long words and ends with short ones, so that the two differ.

    End-of-text tokens count as no bytes.
    """
    draw = random.Random(0)
    words = [["antidisestablishmentarianism", "日本"], ["a", "horse"]]
    texts = [" ".join(draw.choices(words[part >= 20], k=40)) for part in range(60)]
    folder = shop.datasets / "me" / known
    folder.mkdir(parents=True)
    if known == "trained":
        train_bpe(iter(texts), 280, folder / "tokenizer.json")
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    else:
        monkeypatch.setitem(shop.environment, "TIKTOKEN_CACHE_DIR", os.environ["TIKTOKEN_CACHE_DIR"])
        tokenizer = load_tokenizer("gpt2")
    tokens = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eot_token]]
    size = sum(len(text.encode()) for text in texts)
    name = "tokenizer.json" if known == "trained" else known
    add_text(shop, known, name, tokens, size, tokenizer.vocab_size)
    for start in (0, len(tokens) - 200):
        loss, bits, said = measured_bits(shop, known, "--start-token", start, "--batches", 2)
        own = int(tokenizer.token_byte_lengths()[tokens[start + 1 : start + 193]].sum())
        assert bits == pytest.approx(loss * 192 / own / math.log(2), rel=1e-3)
        assert abs(192 / own * size / len(tokens) - 1) > 0.05, "the whole split's mean would be another number"
        assert said.startswith("Measured on")


def test_how_much_of_the_text_was_trained_on(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by reading the train split, remembered, and kept with the loss; without the train split that the
    model was trained on, it is not known."""
    folder = shop.datasets / DATASET
    train = load_file(folder / "train.safetensors")["tokens"]
    middle = load_file(folder / "test.safetensors")["tokens"][:100]
    save_file({"tokens": np.concatenate([middle, train[700:800], middle])}, folder / "test.safetensors")
    ngrams = {tuple(train[at : at + 13]) for at in range(len(train) - 12)}
    tested = load_file(folder / "test.safetensors")["tokens"]
    copied = sum(tuple(tested[at : at + 13]) in ngrams for at in range(len(tested) - 12))
    words = f"Of this split, also in the training data: 0 of 1 document, {copied / 288:.1%} of the 13-grams"
    assert copied == 88
    for _ in range(2):
        assert words in unwrapped(measure(shop, "r"))
        monkeypatch.setattr("harness.evaluation.trained_on.find_overlap", None)  # read once, then remembered
    [result] = losses_in(shop.runs / "r")
    assert result.trained_on is not None
    assert (result.trained_on.ngrams, result.trained_on.copied_ngrams) == (288, 88)

    unknown = "Of this split, also in the training data: not known, because"
    further = shop.add_run("further", initial_weights="../r/checkpoints/best/model.safetensors")
    shop.train(further.name, ranks=1)
    assert f"{unknown} the model began with initial_weights" in unwrapped(measure(shop, "further"))
    shutil.rmtree(further)
    save_file({"tokens": train[::-1].copy()}, folder / "train.safetensors")
    reversed_split = unwrapped(measure(shop, "r"))
    assert unknown in reversed_split
    assert "not the train split that the model was trained on" in reversed_split
    folder.rename(shop.datasets / "local" / "renamed")
    assert re.search(f"{unknown} .*: no such folder", unwrapped(measure(shop, "r", "--dataset", "local/renamed")))
    assert {result.trained_on for result in losses_in(shop.runs / "r")} == {None}


def test_whether_documents_without_13_tokens_were_trained_on_is_not_known(shop: Workshop) -> None:
    add_text(shop, "names", "gpt2", [5] * 12, 12, 64, context_length=8)
    (shop.runs / "fresh" / "meta.json").write_text('{"dataset": {"name": "me/names"}}')
    files = [shop.runs / "fresh" / name for name in ("model.json", "model.safetensors")]
    said = unwrapped(measure(shop, *files))
    assert "in the training data: not known, because the split's documents have no 13-grams to compare" in said


def test_a_dataset_of_another_tokenizer_is_refused(shop: Workshop) -> None:
    """A dataset is refused if its tokenizer is not the model's, because the same ids stand for other text. This holds
    even if both vocabularies have the same size. A tokenizer file with other formatting is the same tokenizer."""
    for name, text in (("own", "the cat sat on the mat " * 99), ("other", "0123456789 " * 99)):
        folder = shop.datasets / "me" / name
        folder.mkdir(parents=True)
        train_bpe(iter([text]), 260, folder / "tokenizer.json")
        add_text(shop, name, "tokenizer.json", [5] * 999, 999, 260)
    beside = shop.runs / "fresh" / "tokenizer.json"
    beside.write_text(json.dumps(json.loads((shop.datasets / "me" / "own" / "tokenizer.json").read_text()), indent=4))
    (shop.runs / "fresh" / "meta.json").write_text(json.dumps({"global_step": 0, "tokenizer": "tokenizer.json"}))
    measured_bits(shop, "own")
    weights = (shop.runs / "fresh" / "model.json", shop.runs / "fresh" / "model.safetensors")
    measure(shop, *weights, "--dataset", "me/other").refuses("me/other: not made with the tokenizer of")
    measure(shop, *weights).refuses("--dataset")


def test_without_the_vocabulary_the_mean_is_called_approximate(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    shop.environment |= {"TIKTOKEN_CACHE_DIR": str(shop.path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    add_text(shop, "text", "gpt2", list(range(1000)), 4_500, 50257)
    loss, bits, said = measured_bits(shop, "text")
    assert bits == pytest.approx(loss / math.log(2) / 4.5, abs=0.001)
    assert said.startswith("(approximate: from the mean bytes per token of the whole split")
    assert not (shop.path / "none").exists(), "nothing was downloaded for it"


# Several models ------------------------------------------------------------------------------------------------------


def labels(result: Result) -> list[str]:
    """Return the first word of each row of the first table."""
    return [line.split()[0] for line in result.stdout.split("Measured on")[0].splitlines()[1:]]


def test_several_models_are_a_table_by_loss(shop: Workshop) -> None:
    run = shop.runs / "r"
    first = f"r:{checkpoint_of_step(run, 0)}"
    done = measure(shop, *files_of(run, checkpoint_of_step(run, 10)), first, "--run", "r")
    assert (done.status, done.stderr) == (0, "")
    assert not done.stdout.endswith("\n\n"), "no empty line at the end"
    table, _, place = done.stdout.partition("Measured on ")
    place, *trained_on = place.split("Of this split, also in the training data: ")
    assert len(trained_on) == 1, "all of them were trained on the same data"
    head, *rows = table.splitlines()
    assert head.split() == ["model", "loss", "bits/byte", "global", "batch", "parameters"]
    best = (run / "checkpoints" / "best").resolve().name
    kept = sorted((each.loss or 0.0, each.weights.checkpoint) for each in losses_in(run))
    parameters = f"{load_model_config(run / 'model.json').parameters:,}"
    assert [row.split() for row in rows] == [
        ["r" if name == best else f"r:{name}", f"{loss:.3f}", "-", "4", parameters] for loss, name in kept
    ]
    assert labels(done)[-1] == first, "nothing is learnt at step 0"
    assert place.split() == f"{DATASET}, test split, tokens 0 to 480 of 500 (5 batches of 6 x 16), in fp32".split()
    alone = measure(shop, "--run", "r")
    assert measure(shop, "--run", "r", "--run", "r").stdout == alone.stdout, "one model, and so no table"
    assert labels(measure(shop, "--run", "r", "--run", "r", "--run", "r:best", *files_of(run))) == ["r:best", "r"]
    assert len(losses_in(run)) == 3, "the same weights give the same result"


def test_the_notebooks_start_needs_a_batch_behind_it(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without options, a validation split that ends soon after the notebook's first token is measured from its own."""
    for start, first in ((404, "tokens 0 to 480 of 500"), (400, "tokens 400 to 496 of 500")):
        monkeypatch.setattr("harness.evaluation.loss.NOTEBOOK_START_TOKEN", start)
        assert first in unwrapped(measure(shop, "r", "--split", "validation"))


def test_models_of_many_names(shop: Workshop, tmp_path: Path) -> None:
    """A pattern names all runs that match, and a long name is on a line above its numbers. Models of the same name are
    shown by their paths."""
    long = "lr-of-a-run-with-a-name-of-its-own"
    for name in ("lr-1", long, "other"):
        shutil.copytree(shop.runs / "r", shop.runs / name, symlinks=True)
    lines = measure(shop, "--run", "lr-*", "--batches", 1).stdout.splitlines()
    assert sorted(line.split()[0] for line in lines[1:4] if line[0] == "l") == ["lr-1", long]
    assert len(lines[lines.index(long) + 1].split()) == 4
    assert sorted(labels(measure(shop, "--run", "lr-1*:best", "--run", "lr-1"))) == ["lr-1", "lr-1:best"]
    elsewhere = shutil.copytree(shop.runs, tmp_path / "others", symlinks=True)
    said = "".join(measure(shop, *files_of(shop.runs / "r"), *files_of(elsewhere / "r")).stdout.split())
    assert all(str(Path(files_of(runs / "r")[1]).resolve()) in said for runs in (shop.runs, elsewhere))


def test_runs_of_a_pattern_without_the_checkpoint_are_left_out_and_named(shop: Workshop) -> None:
    for name in ("lr-1", "lr-3"):
        shutil.copytree(shop.runs / "r", shop.runs / name, symlinks=True)
    for name in ("lr-2", "lr-4"):
        shop.add_run(name)
    (shop.runs / "lr-3" / "checkpoints" / "best").unlink()
    for words, measured, left_out in (
        (["lr-*"], ["lr-1", "lr-3"], "best or latest checkpoint: lr-2, lr-4"),
        (["lr-*:best", "r"], ["lr-1:best", "r"], "best checkpoint: lr-2, lr-3, lr-4"),
    ):
        done = measure(shop, *words, "--batches", 1)
        assert (done.status, done.stderr) == (0, f"left out, because they have no {left_out}\n")
        assert sorted(labels(done)) == measured
    for words in (["lr-[24]"], ["lr-[24]:best"], ["lr-*", "lr-2"]):
        assert measure(shop, *words).status == 2
    weights = shop.runs / "lr-1" / "checkpoints" / "latest" / "model.safetensors"
    for both in ((weights, "r"), ("r", weights), ("r:best", weights), ("lr-1*", weights)):
        assert len(labels(measure(shop, *both, "--batches", 1))) == 2, "a run and a file of weights, in any order"


def test_models_that_read_other_text_get_tables_of_their_own(shop: Workshop) -> None:
    shop.add_dataset("local/other", seed=5)
    other = shutil.copytree(shop.runs / "r", shop.runs / "other", symlinks=True)
    for meta in (other / "checkpoints").glob("*/meta.json"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"dataset": {"name": "local/other"}, "sha256": {}}))
    done = measure(shop, "r", "other")
    assert done.stdout.count("Measured on") == 2
    assert done.stdout.count("\n\nmodel ") == 1
    assert "\n\nLosses are comparable only within a table" in done.stdout
    assert unwrapped(done).endswith("--dataset measures all models on one dataset.")
    together = measure(shop, "r", "other", "--dataset", DATASET)
    assert together.stdout.count("Measured on") == 1
    assert "within a table" not in together.stdout


REFUSED: list[tuple[list[str], str]] = [
    (["r", "gone"], "no such run"),
    (["r", "r:gone"], "no such checkpoint"),
    (["r", "empty"], "no best or latest checkpoint"),
    (["--run", "r", "runs/r/model.json"], "a model is two files"),
    (["r", "runs/r/model.json", "gone.safetensors"], "gone.safetensors: no such file"),
    (["r", "runs/r/model.json", "other.safetensors"], "not the model's weights"),
    ([], "no model"),
    (
        ["r", "--start-token", "484"],
        "wanted 501 tokens (1 batch of 1 sequence of 16 tokens from token 484), but there are 500",
    ),
    (["r", "--dataset", ""], 'dataset ""'),
    (["--run", "rl-*"], "no run in runs matches"),
    (["r", "rl-**"], "no run in runs matches"),
    (["r", ":best"], "run '': must be a plain name"),  # of $RUN:best, if there is no variable RUN
    (["r", ".:best"], "run '.': must be a plain name"),
]


def test_what_cannot_be_measured_is_refused_before_the_first(shop: Workshop) -> None:
    shop.add_run("empty")
    save_file({"tok_emb.weight": np.zeros((64, 16), np.float32)}, shop.path / "other.safetensors")
    for arguments, words in REFUSED:
        done = measure(shop, *arguments)
        assert (done.status, done.stdout) == (2, "")
        [line] = done.stderr.splitlines()
        assert words in line.replace(f"{shop.runs}", "runs")
        assert not (shop.runs / "r" / "results").exists()


def test_a_flipped_bit_is_found_before_anything_is_measured(shop: Workshop, tmp_path: Path) -> None:
    copy = shutil.copytree(shop.runs / "r" / "checkpoints" / "best", tmp_path / "copy")
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = measure(shop, files_of(shop.runs / "r")[0], weights)
    assert (done.status, done.stdout) == (2, "")
    assert "model.safetensors: damaged" in done.stderr


def test_a_checkpoint_that_has_lost_its_hashes_is_measured_with_a_warning(shop: Workshop, tmp_path: Path) -> None:
    checkpoint = (shop.runs / "r" / "checkpoints" / "best").resolve()
    copy = shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    arguments = [files_of(shop.runs / "r")[0], copy / "model.safetensors", "--dataset", DATASET]
    whole = measure(shop, *arguments)
    (copy / "meta.json").unlink()
    done = measure(shop, *arguments)
    assert (whole.stderr, done.stdout.splitlines()[0]) == ("", whole.stdout.splitlines()[0])
    [line] = done.stderr.splitlines()
    assert line.startswith(f"warning: {copy / 'meta.json'}: missing")
