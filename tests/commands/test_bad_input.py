"""Bad input is refused with one line that names the file, the key and the remedy, and nothing on disk is harmed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.common.json_files import read_json
from tests.support.hostile import Bench, tree
from tests.support.in_process import InProcess
from tests.support.launch import DATASET, Result, Workshop


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A run that is ready to be trained, and its dataset."""
    made = InProcess(tmp_path)
    made.add_dataset()
    made.add_run()
    return made


@pytest.fixture
def trained(finished_shop: Workshop, tmp_path: Path) -> Workshop:
    """A copy of the finished run that tests may damage."""
    made = Bench.copy_of(finished_shop, tmp_path / "copy").shop
    edit(made, min_train_tokens=768)
    return made


def unharmed(shop: Workshop, before: dict[str, str]) -> None:
    """Assert that the old files are unchanged, and that all new files, if there are any, are records of scans beside
    the datasets."""
    after = tree(shop.path)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after.keys() - before.keys() if not name.startswith("datasets/.scans")]


def refused(shop: Workshop, *words: str, run: str = "r", modes: Sequence[Sequence[str]] = ([],)) -> None:
    """Assert that training is refused with each of `modes` as its arguments, by one line with these words, and that
    nothing is harmed."""
    before = tree(shop.path)
    for arguments in modes:
        shop.attempt(*arguments, run=run).refuses(*words)
    unharmed(shop, before)


def edit(shop: Workshop, file: str = "train.json", **values: Any) -> None:
    """Change keys of a run's file. A key whose value is None is removed."""
    path = shop.runs / "r" / file
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}, indent=4))


@pytest.mark.parametrize("name", ["../r", "", "a\nb", ".hidden", "é"], ids=repr)
def test_invalid_names(trained: Workshop, name: str) -> None:
    """Invalid names are refused. tests/faults/test_hostile_input.py tries names of all kinds."""
    refused(trained, "run ", "plain name", run=name)
    refused(trained, "checkpoint", modes=([name], ["../checkpoints/best"]))
    assert "newest whole" not in trained.attempt("../checkpoints/best").stderr
    edit(trained, dataset=name)
    refused(trained, "dataset")


@pytest.mark.parametrize("name", ["local/leters", "letters"])
def test_a_misspelt_dataset_has_a_neighbor(shop: Workshop, name: str) -> None:
    edit(shop, dataset=name)
    refused(shop, 'did you mean "local/letters"?')
    planned = shop.attempt("--plan")
    assert 'did you mean "local/letters"?' in " ".join((planned.stdout + planned.stderr).split())


def test_runs_of_an_unquoted_pattern(shop: Workshop) -> None:
    """`ddp_train.py runs/* datasets` is refused, whether the pattern matches two runs, three, or none."""
    second = str(shop.add_run("second"))
    for runs in (["r", second], ["lr-*"], ["r", second, second]):
        shop.command("ddp_train.py", *runs, str(shop.datasets)).refuses("give one RUN, then DATASETS_DIR")


@pytest.mark.parametrize("command", ["mirror.py", "sweep_runs.py", "convert_hf.py"])
def test_a_group_of_commands_without_one_of_them(shop: Workshop, command: str) -> None:
    shop.command(command).refuses("error: Missing command (see ")


@pytest.mark.parametrize("command", [["ddp_train.py", "--runs-dir"], ["sweep_runs.py", "run", "--runs-dir"]])
def test_the_help_that_an_option_without_its_value_names(
    shop: Workshop, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", command)
    shop.command(*command).refuses(f"error: Option '--runs-dir' requires an argument (see {command[0]} --help)")


@pytest.mark.parametrize("name", ["latest", "best", "20260101Z000000-iteration-5"])
def test_a_checkpoint_where_there_are_none(shop: Workshop, name: str) -> None:
    refused(shop, f"checkpoints/{name}", "there are: none", modes=[[name]])


ELSEWHERE = "plain name", "{shop}/runs (--runs-dir)"
RUNS: dict[str, tuple[str, ...]] = {
    "8xa100m41": ("runs/8xa100m41", "no such run", "did you mean 8xa100m40?"),
    "zzz": ("no such run", "there are: 8xa100m40, out, quickstart, r"),
    "file": ("runs/file", "not a folder"),
    "runs/quikstart": ("runs/quikstart: no such run", "did you mean quickstart?"),
    "other/runs/quickstart": ELSEWHERE,
    "runs/../other/runs/quickstart": ELSEWHERE,
    "nowhere/quickstart": ELSEWHERE,
    "runs/quickstart/train.json": ELSEWHERE,
    "runs/..": ("plain name",),
    "{shop}/runs": ("plain name",),
    "runs/out": ("leads out of", "--runs-dir"),
}


@pytest.mark.parametrize(("run", "words"), RUNS.items(), ids=RUNS)
def test_a_run_that_is_not_there(shop: Workshop, run: str, words: tuple[str, ...]) -> None:
    (shop.runs / "file").write_text("not a folder")
    shop.add_run("8xa100m40")
    shop.add_run("quickstart")
    (shop.runs / "out").symlink_to(Workshop(shop.path / "other").add_run("quickstart"))
    refused(shop, *(word.format(shop=shop.path) for word in words), run=run.format(shop=shop.path))


def test_where_runs_were_looked_for(shop: Workshop) -> None:
    """A command in a folder without runs/, or with an empty one, names the folder that it looked into."""
    (shop.path / "empty" / "runs").mkdir(parents=True)
    for folder, words in (("empty", "there are none in"), ("datasets", "there is no folder")):
        elsewhere = InProcess(shop.path / folder)
        asked = elsewhere.command("ddp_train.py", "r", "datasets")
        asked.refuses("runs/r: no such run", f"{words} {elsewhere.runs}", "--runs-dir")
    shop.command("ddp_train.py", "r", "datasets", "--runs-dir", "nowhere").refuses("nowhere/r", "no such run")


def test_a_run_may_be_given_by_its_path(shop: Workshop) -> None:
    """A run may be given by its path as a shell completes it: from the folder that contains runs/, from runs/ itself,
    from another folder, or absolute."""
    (shop.path / "sub").mkdir()
    for cwd, runs_dir, name in (
        (".", "runs", "r/"),
        (".", "runs", "runs/r"),
        (".", "runs", "./runs/r//"),
        (".", "runs", f"{shop.runs}/r/"),
        ("runs", ".", "./r/"),
        ("sub", "../runs", "../runs/r"),
    ):
        inside = InProcess(shop.path / cwd)
        result = inside.command("ddp_train.py", name, str(shop.datasets), "--runs-dir", runs_dir, "--plan")
        assert result.status == 0, result.stderr
        assert result.stdout.startswith("Plan for r:"), name


@pytest.mark.parametrize("file", ["train.json", "model.json"])
def test_run_files_that_cannot_be_read(shop: Workshop, file: str) -> None:
    path = shop.runs / "r" / file
    whole = path.read_bytes()
    for text, place in (
        ('{\n  "a": 1,\n}', f"{file}:3: not valid JSON"),
        ("", f"{file}:1: "),
        ("[]", "one JSON object"),
    ):
        path.write_text(text)
        refused(shop, file, place)
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    assert shop.attempt("--plan").status == 0, "a byte order mark, as editors on Windows write it"
    path.unlink()
    refused(shop, f"r/{file}", "no such file")
    path.mkdir()
    refused(shop, f"r/{file}", "directory")


# One error of each kind. tests/runs/test_config.py has all of them.
KEYS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("train.json", {"microbatch_size": None}, ['key "microbatch_size": missing']),
    ("train.json", {"lerning_rate": 0.1}, ['key "lerning_rate": unknown', 'did you mean "learning_rate"?']),
    ("train.json", {"optimizer": "muon", "precision": "fp16"}, ['"optimizer"', '"precision"', '"muon"', 'use "bf16"']),
    ("model.json", {"vocab_sise": 64}, ['key "vocab_sise": unknown', 'did you mean "vocab_size"?']),
    ("model.json", {"position": "rope", "head_dim": 3}, ['key "position"', "make head_dim even"]),
]


@pytest.mark.parametrize(("file", "values", "words"), KEYS, ids=[f"{file[:5]}-{next(iter(v))}" for file, v, _ in KEYS])
def test_keys(shop: Workshop, file: str, values: dict[str, Any], words: list[str]) -> None:
    edit(shop, file, **values)
    refused(shop, f"r/{file}", *words, modes=([], ["--plan"], ["-f"], ["--restart"]))


IMPOSSIBLE: list[tuple[str, dict[str, Any], list[str]]] = [
    ("short", {"min_train_tokens": 10_000}, ["wanted 10,049 tokens", "there are 4,000", "lower min_train_tokens"]),
    ("late", {"start_train_token": 3900}, ["wanted 1,281 tokens", "there are 100", "start_train_token"]),
    (
        "beyond",
        {"start_train_token": 9000},
        ["from token 9,000 on", "no sequence of 16 tokens", "lower start"],
    ),
    (
        "all of nothing",
        {"start_train_token": 3990, "min_train_tokens": -1},
        ["from token 3,990 on", "no sequence of 16", "lower start"],
    ),
    ("validation", {"validation_batches": 16}, ["validation split", "wanted 513 tokens", "there are 500"]),
    ("late validation", {"start_val_token": 404}, ["validation split", "wanted 501", "there are 500"]),
    ("warm-up", {"warmup_steps": 21}, ["warmup_steps", "21 steps", "20 global steps"]),
    ("batch", {"gradient_accumulation_steps": None, "global_batch_size": 5}, ['"global_batch_size"', "multiple"]),
    ("balance", {"moe_router_loss_scale": 0.01}, ['belongs with "moe" in model.json; remove it']),
]


@pytest.mark.parametrize(("values", "words"), [case[1:] for case in IMPOSSIBLE], ids=[case[0] for case in IMPOSSIBLE])
def test_runs_that_cannot_work(shop: Workshop, values: dict[str, Any], words: list[str]) -> None:
    edit(shop, **values)
    refused(shop, *words, modes=([], ["--plan"]))


def test_a_start_that_a_restart_moves_away(trained: Workshop) -> None:
    edit(trained, initial_weights="checkpoints/best/model.safetensors")
    words = 'r/train.json: key "initial_weights"', "copy the file elsewhere, and name the copy"
    refused(trained, *words, modes=[["--restart"]])
    refused(trained, 'made with "initial_weights": null', modes=[[]])


def test_tokens_beyond_the_vocabulary(shop: Workshop) -> None:
    edit(shop, "model.json", vocab_size=63)
    words = ["train.safetensors", "token id 63", "vocabulary of 63", '"vocab_size"', "at least 64"]
    refused(shop, *words, modes=([], [], ["--plan"]))  # found by a scan at first, then read from the scan's record


@pytest.mark.parametrize(
    ("about", "size"),
    [
        ({}, 64),  # the largest id of all splits counts, although 62 is enough for the train split
        ({"vocab_size": 100, "eot_token": 99}, 100),
        ({"eot_token": 70}, 71),
        ({"vocab_size": 8}, 64),  # a smaller number in meta.json does not count, because the files have larger ids
    ],
)
def test_the_vocabulary_that_is_named_is_enough(shop: Workshop, about: dict[str, int], size: int) -> None:
    folder = shop.datasets / DATASET
    save_file({"tokens": np.arange(4000, dtype=np.uint16) % 62}, folder / "train.safetensors")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | about))
    edit(shop, "model.json", vocab_size=10)
    refused(shop, "token id 61", "vocabulary of 10", f"to at least {size},")
    edit(shop, "model.json", vocab_size=size)
    assert shop.attempt("--plan").status == 0


Harm = Callable[[Path], object]


def tokens(**tensors: Any) -> Harm:
    return lambda folder: save_file(tensors, folder / "train.safetensors")


def cut(folder: Path) -> None:
    content = (folder / "train.safetensors").read_bytes()
    (folder / "train.safetensors").write_bytes(content[: len(content) // 2])


def make_a_folder(folder: Path) -> None:
    (folder / "train.safetensors").unlink()
    (folder / "train.safetensors").mkdir()


def lose_meta(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "meta.json").unlink()  # the tokens would be taken for GPT-2's


DATASETS: list[tuple[str, Harm, list[str]]] = [
    ("cut off", cut, ["train.safetensors", "not a readable token file", "make or download"]),
    ("garbage", lambda folder: (folder / "train.safetensors").write_bytes(b"x" * 999), ["train.safetensors"]),
    ("empty", lambda folder: (folder / "train.safetensors").write_bytes(b""), ["train.safetensors"]),
    ("another tensor", tokens(ids=np.zeros(4000, np.uint16)), ["train.safetensors", "tokens"]),
    ("int64", tokens(tokens=np.zeros(4000, np.int64)), ["train.safetensors", "1-D", "I64"]),
    ("float", tokens(tokens=np.zeros(4000, np.float32)), ["train.safetensors", "F32"]),
    ("2-D", tokens(tokens=np.zeros((40, 100), np.uint16)), ["train.safetensors", "1-D", "[40, 100]"]),
    ("no tokens", tokens(tokens=np.zeros(0, np.uint16)), ["train split", "there is no sequence of 16 tokens"]),
    ("no train", lambda folder: (folder / "train.safetensors").unlink(), ["incomplete", "train.safetensors"]),
    ("no validation", lambda folder: (folder / "validation.safetensors").unlink(), ["incomplete", "validation.safe"]),
    ("folder", make_a_folder,
     ["train.safetensors"]),
    ("meta", lambda folder: (folder / "meta.json").write_text("{\n"), ["meta.json:2"]),
    ("meta's files", lambda folder: (folder / "meta.json").write_text('{"files": ["more.safetensors"]}'),
     ["incomplete", "more.safetensors"]),
    ("tokenizer", lambda folder: (folder / "meta.json").write_text('{"tokenizer": "../../x.json"}'),
     ["meta.json", "tokenizer", "plain name"]),
    ("no tokenizer", lambda folder: (folder / "meta.json").write_text('{"tokenizer": "gone.json"}'),
     ["gone.json"]),
    ("no meta", lose_meta, ["no meta.json", "tokenizer.json"]),
]  # fmt: skip


@pytest.mark.parametrize(("harm", "words"), [case[1:] for case in DATASETS], ids=[case[0] for case in DATASETS])
def test_invalid_datasets(shop: Workshop, harm: Harm, words: list[str]) -> None:
    harm(shop.datasets / DATASET)
    refused(shop, *words)


@pytest.mark.parametrize("place", ["datasets", "datasets/local", "datasets/local/letters"])
def test_a_file_in_the_place_of_a_folder(shop: Workshop, place: str) -> None:
    shutil.rmtree(shop.path / place)
    (shop.path / place).write_text("mine")
    refused(shop, place, "is a file", "move it", modes=([], ["--plan"], ["-f"]))


@pytest.mark.parametrize("file", ["train.json", "model.json", "reported.json", "weights", "metrics.jsonl"])
def test_a_pipe_in_the_place_of_a_file(shop: Workshop, file: str) -> None:
    """No command waits for a pipe in a run's folder. A shell's <(command) is read."""
    path = shop.runs / "r" / file
    edit(shop, initial_weights="weights" if file == "weights" else None)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    modes = [[]] if file == "metrics.jsonl" else [["--plan"]] if file == "reported.json" else [[], ["--plan"]]
    for arguments in modes:
        shop.attempt(*arguments).refuses(str(path), "not a regular file")
    for place in ("/dev/fd", "/proc/self/fd"):  # bash's, zsh's
        reader, writer = os.pipe()
        os.write(writer, b"{}")
        os.close(writer)
        assert read_json(Path(place, str(reader))) == {}
        os.close(reader)


@pytest.mark.parametrize("harm", ["file", "dangling", "folder", "forbidden"])
def test_results_that_cannot_be_written(shop: Workshop, harm: str) -> None:
    """Training is refused before the first step if its results could not be written at its end."""
    run = shop.runs / "r"
    path = run / ("summary.json" if harm == "folder" else "checkpoints")
    if harm == "file":
        path.write_text("mine")
    elif harm == "dangling":
        path.symlink_to(run / "gone")
    else:
        path.mkdir(mode=0o555)
    if harm == "forbidden" and os.access(path, os.W_OK):
        pytest.skip("root may write everywhere")
    refused(shop, str(path), "which does not exist" if harm == "dangling" else "", modes=([], ["--restart"]))


def test_a_timeout_that_is_no_number_of_seconds(shop: Workshop) -> None:
    for text in ("abc", "-1", "inf", "nan"):
        environment = {"COLLECTIVE_TIMEOUT_SECONDS": text}
        shop.attempt(environment=environment).refuses("COLLECTIVE_TIMEOUT_SECONDS", text)
    Workshop(shop.path, environment).train(expect=2).refuses("COLLECTIVE_TIMEOUT_SECONDS", text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("builtin/nothing", ['dataset "builtin/nothing"', "builtin/python-stdlib"]),
        ("nobody/nothing", ["nobody/nothing", "HF_HUB_OFFLINE"]),
    ],
)
def test_a_dataset_that_cannot_be_had(shop: Workshop, name: str, words: list[str]) -> None:
    edit(shop, dataset=name)
    refused(shop, *words)


def test_a_checkpoint_of_something_else(trained: Workshop) -> None:
    edit(trained, "model.json", n_layers=3)
    refused(trained, "another model", "n_layers: 2 -> 3", "--restart", modes=([], ["best"]))
    edit(trained, "model.json", n_layers=2)
    edit(trained, start_train_token=64)
    refused(trained, '"start_train_token": 0', "64", "--restart")
    edit(trained, start_train_token=0)
    shutil.rmtree(trained.datasets)
    trained.add_dataset(seed=1)
    refused(trained, "another dataset", "train", "sha256", "--restart")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plan", "-f"], ["--plan", "-f"]),
        (["--write"], ["--write", "-f"]),
        (["--memory-limit-gib", "2"], ["--memory-limit-gib", "-f"]),
        (["--assume-tps", "5"], ["--assume-tps", "--plan"]),
        (["--assume-tps-with-validation", "5"], ["--assume-tps-with-validation", "--plan"]),
        (["--plan", "--assume-tps", "5", "--assume-tps-with-validation", "5"], ["--assume-tps and", "one of them"]),
        (["-f", "--assume-world-size", "8"], ["--assume-world-size", "--plan"]),
        (["latest", "--restart"], ["CHECKPOINT", "--restart"]),
        (["latest", "-f"], ["CHECKPOINT", "-f"]),
        (["--restart", "-f"], ["--restart", "-f"]),
        (["--wait", "-f"], ["--wait and -f: give at most one"]),
        (["--take-over", "-f"], ["--take-over and -f: give at most one"]),
        (["-f", "--memory-limit-gib", "nan"], ["--memory-limit-gib"]),
        (["-f", "--memory-limit-gib", "inf"], ["--memory-limit-gib"]),
        (["-f", "--memory-limit-gib", "1e300"], ["--memory-limit-gib"]),
        (["--plan", "--assume-tps", "nan"], ["--assume-tps"]),
        (["--plan", "--assume-tps", "inf"], ["--assume-tps"]),
        (["--plan", "--assume-tps", "1e-300"], ["--assume-tps"]),
        (
            ["--plan", "--assume-device", "H100", "--assume-tps", "9"],
            ["--assume-device and --assume-tps: give at most one"],
        ),
        (["--assume-device", "H100"], ["--assume-device belongs with --plan"]),
        (["--plan", "--assume-device", "A100"], ['unknown device "A100"; known: A100 40GB, A100 80GB']),
    ],
    ids=" ".join,
)
def test_options_that_mean_nothing(trained: Workshop, arguments: list[str], words: list[str]) -> None:
    refused(trained, *words, modes=[arguments])


@pytest.mark.parametrize("script", ["test_smoke.py", "test_loss.py"])
def test_smoke_and_loss_with_files_that_do_not_match(trained: Workshop, script: str) -> None:
    run = trained.runs / "r"
    model, weights = run / "model.json", run / "checkpoints" / "latest" / "model.safetensors"
    other, broken, gone = trained.path / "other.json", trained.path / "broken.safetensors", trained.path / "gone"
    other.write_text(json.dumps(json.loads(model.read_text()) | {"emb_dim": 32}))
    broken.write_bytes(weights.read_bytes()[:-8])
    foreign = trained.path / "foreign.safetensors"
    save_file({"tok_emb.weight": np.zeros((64, 16), np.float32)}, foreign)
    before = tree(trained.path)
    for files, words in (
        ((gone, weights), ["gone", "no such file"]),
        ((model, gone), ["gone", "no such file"]),
        ((trained.path, weights), [str(trained.path)]),
        ((model, trained.path), [str(trained.path)]),
        ((other, weights), ["model.safetensors", "not the model's weights", "[64, 16]", "[64, 32]"]),
        ((model, broken), ["broken.safetensors", "not a readable safetensors file"]),
        ((model, foreign), ["foreign.safetensors", "not the model's weights", "is missing"]),
        ((model, model), ["model.json", "not a readable safetensors file"]),
        ((weights, model), ["model.safetensors"]),
    ):
        datasets = [str(trained.datasets)] if script == "test_loss.py" else []
        trained.command(script, *datasets, *map(str, files)).refuses(*words)
    unharmed(trained, before)


MODEL_COMMANDS: list[tuple[str, list[str], list[str]]] = [
    ("test_smoke.py", [], []),
    ("test_loss.py", ["datasets"], []),
    ("test_ift.py", [], ["--responses-only"]),
    ("evaluate_benchmarks.py", [], ["--tasks", "x"]),
    ("convert_hf.py", ["export"], ["out"]),
    ("convert_hf.py", ["publish"], ["me/x"]),
]


@pytest.mark.parametrize(
    ("script", "before", "after"), MODEL_COMMANDS, ids=[" ".join([row[0], *row[1]]) for row in MODEL_COMMANDS]
)
def test_a_misspelt_model_is_told_what_was_meant(
    trained: Workshop, script: str, before: list[str], after: list[str]
) -> None:
    """Every command that takes a model suggests the right name for a misspelt run or checkpoint."""
    harmless = tree(trained.path)
    for model, words in (
        ("rr", ["runs/rr: no such run", "did you mean r?"]),
        ("r:lates", ["checkpoints/lates: no such checkpoint", "did you mean latest?"]),
        ("r:../../x", ["plain name"]),
        ("runs/r/model.json", ["MODEL_JSON WEIGHTS"] if script != "convert_hf.py" else ["model.json"]),
    ):
        trained.command(script, *before, model, *after, "--runs-dir", str(trained.runs)).refuses(*words)
    unharmed(trained, harmless)


def test_smoke_with_a_tokenizer_of_no_kind(trained: Workshop) -> None:
    folder = (trained.runs / "r" / "checkpoints" / "latest").resolve()
    meta = json.loads((folder / "meta.json").read_text())
    arguments = [str(trained.runs / "r" / "model.json"), str(folder / "model.safetensors")]
    for tokenizer, words in (
        ("../../x", ["plain name"]),
        ("gone.json", ["gone.json"]),
        ("optimizer.pt", ["optimizer.pt"]),
    ):
        (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": tokenizer}))
        trained.command("test_smoke.py", *arguments).refuses(*words)


def test_loss_on_datasets_that_do_not_fit(trained: Workshop) -> None:
    run = trained.runs / "r"
    files = [str(run / "model.json"), str(run / "checkpoints" / "best" / "model.safetensors")]
    small = trained.add_dataset("local/small", tokens=10)
    for split in ("validation", "test"):
        save_file({"tokens": np.zeros(10, np.uint16)}, small / f"{split}.safetensors")
    trained.add_dataset("local/large", largest=99)
    untested = trained.add_dataset("local/untested")
    (untested / "test.safetensors").unlink()
    before = tree(trained.path)

    def ask(*options: str, datasets: Path = trained.datasets) -> Result:
        return trained.command("test_loss.py", str(datasets), *files, *options)

    ask("--dataset", "local/small").refuses("test.safetensors", "wanted 17 tokens", "there are 10", "--dataset")
    ask("--batches", "100").refuses("test.safetensors", "wanted 9,601 tokens", "there are 500", "--batches")
    ask("--start-token", "499").refuses("test.safetensors", "there are 500", "--start-token")
    ask("--dataset", "local/large").refuses("test.safetensors", "token id 99", "vocabulary of 64")
    beyond = ask("--dataset", "local/untested", "--start-token", "600")
    beyond.refuses("validation.safetensors", "wanted 617 tokens", "there are 500", "--start-token")
    ask("--dataset", "local/untested", "--split", "test").refuses("incomplete", "test.safetensors")
    for name in ("../x", "letters", "a/b/c", "local/..", "local/a\nb"):
        ask("--dataset", name).refuses("dataset")
    ask(datasets=run / "train.json").refuses("train.json", "is a file")
    unharmed(trained, before)


def test_two_ranks_say_it_once(trained: Workshop) -> None:
    """An error is printed once, whether both ranks find it, rank 0 alone, or the first process of each node."""
    before = tree(trained.path)
    trained.train("nope", expect=None).refuses("no such run")
    unharmed(trained, before)
    edit(trained, min_train_tokens=100_000)
    trained.train(expect=None).refuses("train split", "there are")
    edit(trained, min_train_tokens=768)
    unharmed(trained, before)
    path = trained.runs / "r" / "checkpoints" / "latest" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-20])
    before = tree(trained.path)
    trained.train(expect=None).refuses("optimizer.pt", "damaged")
    trained.train("r", "nope", expect=None).refuses("checkpoints/nope", "no such checkpoint")
    unharmed(trained, before)
