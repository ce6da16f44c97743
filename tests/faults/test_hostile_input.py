"""Hostile input.

Whatever a file or a name contains, it is accepted as valid, or refused with one line that names the file and the key,
and nothing on disk is harmed. Most cases call the functions that load files and names. Some run the real command, on
one rank, inside the test process.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gpt import GPTModel, ModelConfig, load_model_config
from harness.data.dataset import Dataset, DatasetMeta, TokenFile, check_token_ids, dataset_folder
from harness.model.weights import load_weights
from harness.planning.experiment import Experiment
from harness.planning.plan import describe_plan, make_plan
from harness.planning.planned_speed import PlannedSpeed
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig, load_train_config
from tests.support.hostile import (
    VALUES,
    WITHOUT_KEY,
    Bench,
    explore,
    is_one_line,
    line_of,
    mutations,
    plausible,
    raw_safetensors,
    refusal,
    same_as,
    set_text,
    tree,
    vouch_for,
    write,
)
from tests.support.in_process import InProcess
from tests.support.launch import DATASET, MODEL, TRAIN, Workshop, metrics

UPSTREAM = ["minibatch_size", "use_amp", "schedule_learning_rate"]
PLAUSIBLE_TRAIN = plausible(
    TrainConfig,
    {
        "dataset": [DATASET, "local/none", "builtin/none", "../x", "a/b/c", "", "letters", "local/" + "x" * 300, "é/ü"],
        "sample_prompt": ["x", "", "\n", "x" * 100_000],
        "betas": [[0.9, 0.99], [0, 0], [1, 1], [0.9], [0.9, 0.99, 0.999], "0.9", {"0": 0.9}, [0.9999999999999999] * 2],
    },
)
# Sizes of models that are either small enough to be made here, or too large for any machine.
SIZES = [-1, 0, 1, 2, 3, 16, 10**15, 2**63 - 1, 2**63, 10**30, 10**400]
PLAUSIBLE_MODEL = plausible(
    ModelConfig,
    {
        "drop_rate": [0, 0.0, 0.1, 0.999, 1, 1.0, -0.1, 1e300, None, {"embedding": 0.1}, {"embedding": 2}, {"x": 0}],
        "moe": [None, 8, {}, {"num_experts": 4}, *({"num_experts": size, "num_active_experts": 2} for size in SIZES)],
    },
    SIZES,
)
MODEL_TEXTS = mutations(MODEL, PLAUSIBLE_MODEL, ["depth"])


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A run that would train for a few steps, and its dataset."""
    made = InProcess(tmp_path)
    made.add_dataset(tokens=400)
    made.add_run(min_train_tokens=64)
    return made


@pytest.fixture
def bench(finished_shop: Workshop, tmp_path: Path) -> Bench:
    return Bench.copy_of(finished_shop, tmp_path / "copy")


# train.json and model.json


@pytest.mark.slow
@pytest.mark.fault(
    "arbitrary content in train.json",
    "2,000 files: refused with the wrong key named, or valid; then planned, or refused by --plan",
)
def test_train_json(shop: Workshop, exhaustive: bool) -> None:
    path, model = shop.runs / "r" / "train.json", load_model_config(shop.runs / "r" / "model.json")

    def check(text: str) -> bool:
        set_text(path, text)
        if refusal(lambda: load_train_config(path), path):
            return True
        config = load_train_config(path)
        assert TrainConfig.model_validate(config.model_dump(mode="json", exclude_unset=True)) == config
        experiment = Experiment(RunDirectory(path.parent), config, model, shop.datasets)

        def plan(world_size: int) -> None:  # as --plan does
            made = make_plan(experiment, world_size, None)
            assert "tokens" in describe_plan(made, PlannedSpeed(1000.0, "assumed"))
            made.check_disk()

        for world_size in (1, 8):
            line_of(partial(plan, world_size))
        return False

    texts = mutations(TRAIN, PLAUSIBLE_TRAIN, UPSTREAM)
    assert 0.3 < explore(check, texts, 2000 if exhaustive else 200) < 0.99, "neither all valid nor all refused"


@pytest.mark.fault("arbitrary content in model.json", "2,000 files: refused with the wrong key named, or valid")
def test_model_json(shop: Workshop, exhaustive: bool) -> None:
    path = shop.runs / "r" / "model.json"

    def check(text: str) -> bool:
        set_text(path, text)
        if refusal(lambda: load_model_config(path), path):
            return True
        config = load_model_config(path)
        assert ModelConfig.model_validate(config.model_dump()) == config
        if config.parameters < 10**6:
            assert sum(each.numel() for each in GPTModel(config).parameters()) == config.parameters
        return False

    assert 0.3 < explore(check, MODEL_TEXTS, 2000 if exhaustive else 200) < 0.99


# Some are refused when the file is read, the others when their weights would be made. Neither takes long.
IMPOSSIBLE_MODELS: list[dict[str, Any]] = [
    {"vocab_size": 10**15},
    {"vocab_size": 2**62, "emb_dim": 2**62, "n_heads": 1},
    {"context_length": 10**15},
    {"emb_dim": 10**6},
    {"n_layers": 10**9},
    {"n_layers": 10_000, "emb_dim": 8192},
    {"emb_dim": 2**40, "n_heads": 2**40},
]


@pytest.mark.slow
@pytest.mark.fault(
    "a model too large for any machine", "refused, or planned by --plan; neither ddp_train.py nor test_smoke.py hangs"
)
def test_impossible_models(bench: Bench, exhaustive: bool) -> None:
    path, weights = bench.shop.path / "model.json", bench.shop.runs / "r" / "checkpoints" / "best" / "model.safetensors"
    before = tree(bench.shop.path)
    for number, sizes in enumerate(IMPOSSIBLE_MODELS):
        path.write_text(json.dumps(MODEL | sizes))
        assert is_one_line(bench.shop.command("test_smoke.py", str(path), str(weights)), "model.json")
        for mode in ("-f", "--restart", "--plan") if exhaustive else (("--restart", "-f")[number % 4 == 0],):
            model = bench.shop.add_run("big", model=sizes)
            result = bench.shop.attempt(mode, run="big")
            # --plan may plan a model that a disk could hold.
            assert is_one_line(result) or mode == "--plan", result.stdout
            shutil.rmtree(model)
    path.unlink()
    same_as(before, bench.shop.path)


@pytest.mark.slow
@pytest.mark.fault(
    "arbitrary content in train.json and model.json, given to the real command", "refused, planned or trained"
)
def test_commands_on_run_files(shop: Workshop, exhaustive: bool) -> None:
    run = shop.runs / "r"
    # torch.compile takes half a minute on a CPU, and is not tested here.
    slow: dict[str, list[Any]] = {"compile": [False, "auto"], "sample_prompt": [None], "sample_interval": [None]}
    texts = mutations(TRAIN | {"min_train_tokens": 64}, {**PLAUSIBLE_TRAIN, **slow})
    train_texts = texts.filter(lambda text: '"compile": true' not in text and '"sample_prompt": "' not in text)
    case = st.tuples(st.just("train.json"), train_texts) | st.tuples(st.just("model.json"), MODEL_TEXTS)

    def check(case: tuple[tuple[str, str], list[str]]) -> None:
        (file, text), options = case
        shop.add_run(min_train_tokens=64)
        set_text(run / file, text)
        before = tree(shop.path)
        result = shop.attempt(*options)
        is_one_line(result)
        if result.status == 2:
            same_as(before, shop.path)
        for made in run.glob("*"):
            if made.name not in {"train.json", "model.json"}:
                shutil.rmtree(made) if made.is_dir() else made.unlink()

    modes = st.sampled_from([[], ["--plan"], ["--restart"]])
    explore(check, st.tuples(case, modes), 120 if exhaustive else 16)


# Datasets


DTYPES = ["U16", "U32", "I16", "U8", "BF16", "F32", "I64", "C64", "F8_E4M3", "X"]
SHAPES: list[Any] = [[8], [5], [0], [], [2, 4], [8, 1], [-1], [2**31], [2**63], [2**32, 2**32], [1.5], ["8"], [None]]
OFFSETS: list[Any] = [[0, 16], [0, 10], [0, 0], [16, 0], [-16, 0], [4, 20], [0, 2**63], [0, 2**64], [0], [0, 8, 16]]
ENTRIES = mutations(
    {"dtype": "U16", "shape": [8], "data_offsets": [0, 16]},
    {"dtype": DTYPES, "shape": SHAPES, "data_offsets": OFFSETS},
)
TENSORS = st.tuples(st.sampled_from(["tokens", "tokens", "tok_emb.weight", "__metadata__", "é"]), ENTRIES)
VALID_HEADER = '{"tokens": {"dtype": "U16", "shape": [8], "data_offsets": [0, 16]}}'
HEADERS = st.lists(TENSORS, min_size=1, max_size=2).map(write) | VALUES.map(json.dumps) | st.binary(max_size=40)
HEADERS |= st.just(VALID_HEADER)  # few of the others are valid
LENGTHS = st.sampled_from([*[None] * 9, -1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 9])
# Files that are valid, nearly valid, or anything
SAFETENSORS = st.builds(raw_safetensors, HEADERS, st.sampled_from([bytes(16)] * 7 + [bytes(15)]), LENGTHS)


@pytest.mark.slow
@pytest.mark.fault(
    "arbitrary content in safetensors files", "2,000 files: refused, or read as valid tokens; none is loaded as weights"
)
def test_safetensors(tmp_path: Path, exhaustive: bool) -> None:
    path, model = tmp_path / "train.safetensors", GPTModel(ModelConfig(**MODEL))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check(content: bytes) -> bool:
        path.write_bytes(content)
        refused = line_of(lambda: TokenFile(path))
        if refused:
            assert str(path) in refused
        else:
            file = TokenFile(path)
            tokens = file.read(0, 100)
            assert len(tokens) == min(100, len(file))
            assert file.largest_token() == (int(tokens.max()) if len(tokens) else -1)
            assert file.fingerprint()
        line = line_of(lambda: model.load_checkpoint_tensors(load_weights(path), path))
        assert line is not None
        assert f"{path}: not " in line  # "not the model's weights" or "not a readable safetensors file"
        return bool(refused)

    assert 0.3 < explore(check, SAFETENSORS, 2000 if exhaustive else 300) < 0.99
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "weights untouched"


def token_header(count: int, **changes: Any) -> str:
    entry = {"dtype": "U16", "shape": [count], "data_offsets": [0, 2 * count], **changes}
    return write([("tokens", json.dumps(entry))])


LETTERS = np.arange(400, dtype=np.uint16).__mod__(64).tobytes()
TOKEN_FILES = [
    *(raw_safetensors(token_header(400), LETTERS, length) for length in (10**6, 2**63, -1, 0)),
    *(raw_safetensors(token_header(400, data_offsets=[*at]), LETTERS) for at in ((0, 10**12), (800, 0), (-800, 0))),
    *(raw_safetensors(token_header(400, shape=shape), LETTERS) for shape in ([2**63], [2**32, 2**32])),
    raw_safetensors(token_header(300), LETTERS),  # bytes are left over
    raw_safetensors(b"\xff\xfe{}", LETTERS),  # no UTF-8
    raw_safetensors('{"tokens":' * 5000, LETTERS),
    raw_safetensors(token_header(400), b"\xff" * 800),  # numbers beyond the vocabulary
]


@pytest.mark.fault("a hostile token file, given to the real command", "refused with the split named; nothing changed")
def test_token_files(shop: Workshop, exhaustive: bool) -> None:
    before = tree(shop.path)
    for split in ("train", "validation"):
        path = shop.datasets / DATASET / f"{split}.safetensors"
        good = path.read_bytes()
        for content in TOKEN_FILES[:: 1 if exhaustive else 3]:
            path.write_bytes(content)
            result = shop.attempt()
            assert is_one_line(result, split), content
            assert result.status == 2, content
            path.write_bytes(good)
    same_as(before, shop.path)


PLAUSIBLE_META = plausible(
    DatasetMeta,
    {
        "token_dtype": ["uint16", "float", ""],
        "files": [["train.safetensors"], {"train": "train.safetensors"}, ["../../../x.json"], ["/etc/hostname.json"],
                  ["x" * 5000 + ".json"], ["a\0b.json"], [], {}, [5]],
        "tokenizer": ["gpt2", "gone.json", "../x.json", "/etc/passwd", "", ".", "meta.json", "a\0b", "x" * 5000],
        "splits": [{}, {"test": {"tokens": 10, "bytes": 40}}, {"test": {"tokens": 0, "bytes": 0}}, {"test": []},
                   {"test": {"tokens": 10**400}}, {"test": {"tokens": 1, "bytes": 10**400}}],
    },
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.fault(
    "arbitrary content in a dataset's meta.json", "2,000 files: refused with the wrong key or file named, or valid"
)
def test_dataset_meta(shop: Workshop, exhaustive: bool) -> None:
    folder = shop.datasets / DATASET
    valid = {"description": "letters", "token_dtype": "uint16", "files": ["train.safetensors"], "tokenizer": "gpt2"}

    def check(text: str) -> None:
        set_text(folder / "meta.json", text)
        if line := line_of(lambda: Dataset.open(shop.datasets, DATASET)):
            assert str(folder) in line
            assert any(words in line for words in ('key "', "tokenizer '", "which meta.json lists", *WITHOUT_KEY)), line
            return
        dataset = Dataset.open(shop.datasets, DATASET)
        dataset.bytes_per_token("test")
        tokenizer = dataset.tokenizer
        assert tokenizer == "gpt2" or Path(tokenizer).parent == folder

    explore(check, mutations(valid, PLAUSIBLE_META), 2000 if exhaustive else 150)


@pytest.mark.slow
@pytest.mark.fault(
    "arbitrary content in the record of a token file's largest token", "it is used, or the file is scanned again"
)
def test_scan_memory(shop: Workshop, exhaustive: bool) -> None:
    dataset = Dataset.open(shop.datasets, DATASET)
    check_token_ids(dataset, "train", 64)
    memory = next((shop.datasets / ".scans").iterdir())
    right = json.loads(memory.read_text())

    def check(text: str) -> None:
        set_text(memory, text)
        # The memory is used, or the file is scanned again. A largest token in the memory that is too large is used,
        # too, because a scan could have found it.
        line = line_of(lambda: check_token_ids(dataset, "train", 64))
        assert line is None or "beyond the model's vocabulary" in line

    values = [right["file"], [0, 0], 5, None]
    texts = mutations(right, {"file": values, "largest_token": [63, 1.5, "63", 1e308, None, [], 2**70]})
    explore(check, texts, 500 if exhaustive else 100)
    memory.write_text(json.dumps(right))
    check_token_ids(dataset, "train", 64)


# Weights


@pytest.mark.slow
@pytest.mark.fault(
    "weights of another model, given to the real commands", "refused with the tensor named; nothing changed"
)
def test_weights(bench: Bench, exhaustive: bool) -> None:
    good = load_file(bench.reset() / "model.safetensors")
    name, query = "tok_emb.weight", "trf_blocks.0.att.W_query.weight"
    matrix = good[name]
    others = [
        (name, {key: value for key, value in good.items() if key != name}),
        ("extra.weight", {**good, "extra.weight": torch.zeros(2)}),
        (query, {f"module.{key}" if "att" in key else key: value for key, value in good.items()}),
        (name, {}),
        *((name, {**good, name: tensor}) for tensor in (matrix.T.contiguous(), matrix[None].contiguous())),
        *((name, {**good, name: tensor}) for tensor in (torch.tensor(1.0), torch.zeros(0), matrix.long())),
        *((query, {**good, query: good[query].to(kind)}) for kind in (torch.bool, torch.complex64)),
        (query, {**good, query: good[query].to(torch.float8_e4m3fn)}),
    ]
    path, model = bench.shop.path / "w.safetensors", bench.shop.runs / "r" / "model.json"
    commands = [("test_smoke.py", []), ("test_loss.py", [str(bench.shop.datasets), "--dataset", DATASET])]
    for index, (wrong, tensors) in enumerate(others):
        latest, words = bench.reset(), ("not the model's weights", f"tensor {wrong} ")
        save_file(tensors, path)
        for script, first in commands if exhaustive else commands[index % 2 : index % 2 + 1]:
            assert is_one_line(bench.shop.command(script, *first, str(model), str(path)), *words)
        if exhaustive or index % 3 == 0:
            save_file(tensors, latest / "model.safetensors")
            vouch_for(latest, "model.safetensors")
            bench.refuses(words=[latest.name, *words])


# Checkpoints


PLAUSIBLE_CHECKPOINT = plausible(
    CheckpointMeta,
    {
        "seconds": [
            {},
            {"training": 1},
            {"training": "1"},
            {"training": None},
            {"training": 1e308, "setup": 1e308},
            [],
        ],
        "sha256": [{}, {"optimizer.pt": 5}, {"../x": ""}, {"x" * 500: ""}, []],
        "train": [{}, {"validation_interval": []}, []],
    },
)


@pytest.mark.fault(
    "arbitrary content in a checkpoint's meta.json", "2,000 files: refused with the wrong key named, or valid"
)
def test_checkpoint_meta(bench: Bench, exhaustive: bool) -> None:
    latest = bench.reset()

    def check(text: str) -> None:
        set_text(latest / "meta.json", text)
        if refusal(lambda: read_meta(latest), latest / "meta.json"):
            return
        meta = read_meta(latest)
        assert latest.name.endswith(f"-iteration-{meta.global_step}")
        state = meta.state()
        assert state.tokens_seen >= 0
        assert state.best_loss is None or state.best_loss < math.inf
        assert sum(meta.seconds.values()) < math.inf

    explore(check, mutations(bench.meta(), PLAUSIBLE_CHECKPOINT), 2000 if exhaustive else 150)


WRONG: list[Any] = [None, True, -1, 0, 1.5, 10**18, 10**400, 1e308, "x", "a\nb\x1b[31m", [], [1], {}, {"a": 1}]


@pytest.mark.slow
@pytest.mark.fault(
    "resuming with a wrong value in a checkpoint's meta.json", "refused, or resumed; no checkpoint is lost"
)
def test_continuing_with_wrong_meta(bench: Bench, exhaustive: bool) -> None:
    """A run whose meta.json has a wrong value or lacks a key is refused by the real command, or is resumed without
    losing a checkpoint."""
    right = bench.meta()
    metas: list[dict[str, Any]] = [{**right, key: value} for key in [*right, "new"] for value in WRONG]
    metas += [{other: value for other, value in right.items() if other != key} for key in right]
    inside: list[Any] = [None, -1, "x", []]
    for outer in ("seconds", "sha256", "dataset", "train", "model"):
        metas += [{**right, outer: {**right[outer], key: value}} for key in right[outer] for value in inside]
    for meta in metas[:: 7 if exhaustive else 23]:
        latest = bench.reset()
        (latest / "meta.json").write_text(json.dumps(meta))
        before = tree(bench.shop.path)
        if is_one_line(bench.shop.attempt()):
            same_as(before, bench.shop.path)
        else:
            nothing_lost(before, bench.shop)


def nothing_lost(before: dict[str, str], shop: Workshop) -> None:
    """Assert that every file of weights in `before` still exists, and that `latest` and `best` lead to checkpoints."""
    whole = {text for name, text in before.items() if name.endswith("model.safetensors")}
    assert whole <= set(tree(shop.path).values())
    for link in ("latest", "best"):
        assert (shop.runs / "r" / "checkpoints" / link).is_dir()


@pytest.mark.slow
@pytest.mark.fault("a checkpoint with states of another program", "refused with the checkpoint named; nothing changed")
def test_states_of_something_else(bench: Bench, exhaustive: bool) -> None:
    """State files that are readable and have the right hashes, but do not hold the states of this run's training, are
    refused."""
    latest = bench.reset()
    optimizer = torch.load(latest / "optimizer.pt", weights_only=True)
    states = torch.load(latest / "train_state.pt", weights_only=True)
    first = next(iter(optimizer))
    cases: list[tuple[str, Any]] = [
        ("optimizer.pt", [1, 2]),
        ("optimizer.pt", {"x": 1}),
        ("optimizer.pt", {**optimizer, first: {}}),
        ("optimizer.pt", {**optimizer, first: torch.zeros(3)}),
        ("optimizer.pt", {**optimizer, first: {**optimizer[first], "exp_avg": torch.zeros(3)}}),
        ("optimizer.pt", {key: value for key, value in optimizer.items() if key != first}),
        ("train_state.pt", {}),
        ("train_state.pt", torch.zeros(3)),
        ("train_state.pt", {"ranks": []}),
        ("train_state.pt", {"ranks": [{}]}),
        ("train_state.pt", {"ranks": [{**states["ranks"][0], "random": {"cpu": torch.zeros(3)}}]}),
        ("train_state.pt", {"ranks": [{**states["ranks"][0], "window": ["x"]}]}),
        ("train_state.pt", {"ranks": [{**states["ranks"][0], "window": [1.0]}]}),
        ("scaler.pt", [1, 2]),
        ("scaler.pt", {"scale": "x"}),
    ]
    for name, content in cases if exhaustive else cases[::2]:
        latest = bench.reset()
        torch.save(content, latest / name)
        vouch_for(latest, name)
        bench.refuses(words=[latest.name])


@pytest.mark.fault("a foreign line in metrics.jsonl", "the line moves to aside/, and the run continues to its end")
def test_metrics(bench: Bench, exhaustive: bool) -> None:
    """A run is resumed to its end even if another program's line is in metrics.jsonl, at the place where the checkpoint
    expects the run's own next line."""
    lines = ["5", "[]", "null", "{}", '"x"', '{"event": 5}', "[" * 5000, "\ufeff{}", "", "NaN", '{"event": "train"}']
    for line in lines if exhaustive else lines[::3]:
        latest = bench.reset()
        path = latest.parent.parent / "metrics.jsonl"
        at = bench.meta()["metrics_bytes"]
        path.write_bytes(path.read_bytes()[:at] + line.encode() + b"\n")
        before = tree(bench.shop.path)
        assert not is_one_line(bench.shop.attempt()), line
        nothing_lost(before, bench.shop)
        (moved,) = (path.parent / "aside").rglob("metrics.jsonl")
        assert moved.read_bytes() == line.encode() + b"\n"


@pytest.mark.fault(
    "metrics.jsonl truncated, edited or deleted",
    "a warning; what is left stays valid, and the run continues to its end",
)
def test_metrics_that_are_missing(bench: Bench, exhaustive: bool) -> None:
    """A run whose metrics.jsonl is shorter than its checkpoint records, or has other lines there, is resumed to its
    end. Every line stays valid, each step is recorded once, and no byte is lost."""
    bench.reset()
    path = bench.shop.runs / "r" / "metrics.jsonl"
    whole, size, step = path.read_bytes(), bench.meta()["metrics_bytes"], bench.meta()["global_step"]
    first = whole.index(b"\n") + 1
    contents: list[bytes | None] = [None, b"", whole[: size - 1], whole[: size - 40], whole[:first], whole[first:]]
    contents += [whole[:first] + b'{"x": 1}\n' + whole[first:], b"x" * size, whole[: size - 40] + b"y" * 90]
    contents.append(whole.replace(b'"global_step": %d' % step, b'"global_step": %d' % (step + 1))[: size - 1])
    for content in contents if exhaustive else contents[::2]:
        bench.reset()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        result = bench.shop.attempt()
        assert result.status == 0, result
        (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert f"{path}: lines from before the checkpoint of step {step} are missing" in warning
        steps = [line["global_step"] for line in metrics(path.parent) if line.get("event") == "train"]
        assert steps == sorted(set(steps)), content
        done = [line["global_step"] for line in metrics(path.parent) if line.get("event") == "checkpoint"]
        assert done.count(step) == 1, content
        moved = b"".join(file.read_bytes() for file in (path.parent / "aside").rglob("metrics.jsonl"))
        there = content or b""
        assert there.endswith(moved)
        assert path.read_bytes().startswith(there[: len(there) - len(moved)])


# Names

ALPHABET = st.characters() | st.sampled_from("./\\-_ab019 \n\r\t\0\x1b~*")
NAMES = st.text(ALPHABET, max_size=20) | st.sampled_from(
    [
        *("..", ".", "", "../r", "/etc", "r/", "./r", "r/../r", "r\n", "-r", "--", "\ud800", "con", "r ", "R", "ｒ"),
        "x" * 90,
    ]
)


@pytest.mark.slow
@pytest.mark.fault("arbitrary names", "2,000 names: each is refused, or leads to a folder in the right parent folder")
def test_names(bench: Bench, exhaustive: bool) -> None:
    """A name of a run, a dataset or a checkpoint leads to a folder in the right parent folder, or is refused with one
    line."""
    runs, datasets, folder = bench.shop.runs, bench.shop.datasets, bench.shop.runs / "r" / "checkpoints"
    before = tree(bench.shop.path)

    def check(name: str) -> None:
        finders: list[tuple[Callable[[], Path], Path]] = [
            (lambda: RunDirectory.find(runs, name).path, runs),
            (lambda: checkpoints.find_checkpoint(folder, name), folder),
            (lambda: dataset_folder(datasets, f"local/{name}"), datasets / "local"),
            (lambda: dataset_folder(datasets, f"{name}/x").parent, datasets),
        ]
        for find, parent in finders:
            if not line_of(find):
                assert find().resolve().parent == parent.resolve()

    explore(check, NAMES, 2000 if exhaustive else 300)
    same_as(before, bench.shop.path)


@pytest.mark.fault("arbitrary names, given to the real command", "refused; nothing changed")
@pytest.mark.fault("names longer than a file system allows", "refused")
def test_commands_on_names(bench: Bench, exhaustive: bool) -> None:
    bench.reset()
    train = bench.shop.runs / "r" / "train.json"

    def check(case: tuple[str, str]) -> None:
        name, place = case
        if place == "dataset":
            set_text(train, json.dumps(TRAIN | {"dataset": name}))
        arguments = [name] if place == "checkpoint" else []
        bench.refuses(*arguments, run=name if place == "run" else "r", words=[place] if place != "checkpoint" else [])
        shutil.copy(bench.origin / "runs" / "r" / "train.json", train)

    # An argument cannot contain NUL, and is an option if it begins with a dash. "r" is a run that exists, also with a
    # slash after it.
    names = NAMES.filter(
        lambda name: "\0" not in name and not name.startswith("-") and name.rstrip("/") not in {"r", "R"}
    )
    places = ["run", "dataset", "checkpoint"]
    for case in itertools.product(("x" * 201, "x" * 256, "x" * 5000), places):
        check(case)
    explore(check, st.tuples(names, st.sampled_from(places)), 60 if exhaustive else 15)


@pytest.mark.fault("control characters in what a message quotes", "escaped, as in \\n and \\x1b, on one line")
def test_control_characters(bench: Bench) -> None:
    """Control characters from a file are escaped in messages, so that they cannot begin a line or send an escape
    sequence to the terminal."""
    latest, evil, escaped = bench.reset(), "a\nb\x1b[31m\r\u2028", r"a\nb\x1b[31m"
    model, weights = bench.shop.runs / "r" / "model.json", bench.shop.path / "w.safetensors"
    good = load_file(latest / "model.safetensors")
    save_file({**good, evil: torch.zeros(2)}, weights)
    assert is_one_line(bench.shop.command("test_smoke.py", str(model), str(weights)), "w.safetensors", escaped)
    weights.write_bytes(raw_safetensors(token_header(4, dtype=evil), struct.pack("<4H", 1, 2, 3, 4)))
    assert is_one_line(bench.shop.command("test_smoke.py", str(model), str(weights)), "w.safetensors")
    odd = bench.shop.path / evil
    assert is_one_line(bench.shop.command("test_smoke.py", str(odd), str(weights)), "no such file", escaped)
    (latest / "meta.json").write_text(json.dumps({**bench.meta(), "dataset": evil}))
    assert is_one_line(bench.shop.attempt(), "another dataset", r"a\nb\u001b[31m")
