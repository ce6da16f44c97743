"""Hostile input.

Whatever a file or a name contains, it is accepted as valid, or refused with one line that names the file and the key,
and nothing on disk is harmed. Most cases call the functions that load files and names. Some run the real command, on
one rank, inside the test process.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gpt import GPTModel, ModelConfig, load_model_config
from harness.data.dataset import Dataset, TokenFile, check_token_ids, dataset_folder
from harness.model.weights import load_weights
from harness.planning.experiment import Experiment
from harness.planning.plan import describe_plan, make_plan
from harness.planning.planned_speed import PlannedSpeed
from harness.runs import checkpoints
from harness.runs.checkpoint_meta import read_meta
from harness.runs.directory import RunDirectory
from harness.runs.train_config import TrainConfig, load_train_config
from tests.support.hostile import (
    VALUES,
    Bench,
    explore,
    is_one_line,
    line_of,
    mutations,
    raw_safetensors,
    refusal,
    same_as,
    set_text,
    tree,
    vouch_for,
    write,
)
from tests.support.in_process import InProcess
from tests.support.launch import DATASET, MODEL, TRAIN, Workshop

WORLD_SIZES = (1, 8)
# Values of a key's own type, from sensible to absurd.
COUNTS = [1, 2, 3, 4, 7, 16, 20, 64, 1000, 2**31, 2**53 + 1, 2**63 - 1, 0, -1, 2**63, 10**400]
RATES = [0, 1, 0.0, 1e-320, 1e-8, 0.5, 0.999, 1.0, 1.5, 100, 1e9, 1e300, -0.1]
CHOICES: dict[str, list[Any]] = {
    "lr_schedule": ["constant", "cosine", "wsd", "linear"],
    "precision": ["auto", "bf16", "fp16", "fp32", "fp8"],
    "residual_precision": ["fp32", "bf16", "fp16"],
    "validation_ranks": ["rank0", "all", "rank1"],
    "optimizer": ["adamw", "muon", "sgd"],
    "muon_update_scale": ["original", "match_rms_adamw", "spectral"],
    "dataset": [DATASET, "local/none", "builtin/none", "../x", "a/b/c", "", "letters", "local/" + "x" * 300, "é/ü"],
    "sample_prompt": ["x", "", "\n", "x" * 100_000],
    "betas": [[0.9, 0.99], [0, 0], [1, 1], [0.9], [0.9, 0.99, 0.999], "0.9", {"0": 0.9}, [0.9999999999999999] * 2],
}


def plausible_train() -> dict[str, list[Any]]:
    """Return values of the right type for each key of train.json, from its JSON Schema."""
    found: dict[str, list[Any]] = {}
    for key, field in TrainConfig.model_json_schema()["properties"].items():
        types = {each.get("type") for each in [field, *field.get("anyOf", [])]}
        numbers: list[Any] = COUNTS if "integer" in types else RATES if "number" in types else []
        switches = [True, False] if "boolean" in types else []
        nothing = [None] if "null" in types else []
        found[key] = CHOICES.get(key) or [*numbers, *switches, *nothing]
    return found


PLAUSIBLE_TRAIN = plausible_train()
UPSTREAM = ["minibatch_size", "use_amp", "schedule_learning_rate"]
TRAIN_TEXTS = mutations(TRAIN, PLAUSIBLE_TRAIN, UPSTREAM)
# Sizes of models that are either small enough to be made here, or too large for any machine.
SIZES = [-1, 0, 1, 2, 3, 16, 10**15, 2**63 - 1, 2**63, 10**30, 10**400]
PLAUSIBLE_MODEL: dict[str, list[Any]] = {
    **dict.fromkeys(("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers", "n_kv_heads", "depth"), SIZES),
    "drop_rate": [0, 0.0, 0.1, 0.999, 1, 1.0, -0.1, 1e300, None, {"embedding": 0.1}, {"embedding": 2}, {"x": 0}],
    **{key: [True, False, None, 1] for key in ("qkv_bias", "tie_weights", "qk_norm", "linear_bias", "embedding_skip")},
    **{key: [*SIZES, None] for key in ("head_dim", "mlp_dim", "value_embeddings", "bigram_embedding")},
    **{key: [0, 1, 15.0, 10000.0, -1.0, 1e300, None] for key in ("rope_base", "logit_softcap")},
    "initialisation": ["gpt2", "zero_residual", ""],
    "norm_gain": [True, False, None, 1],
    "position": ["learned", "rope", ""],
    "norm": ["layernorm", "rmsnorm", None],
    "mlp": ["gelu", "relu2", "swiglu", 5],
    "moe": [None, 8, {}, {"num_experts": 4}, *({"num_experts": size, "num_active_experts": 2} for size in SIZES)],
}
UNUSUAL = ["position", "norm", "mlp", "depth", "drop_rate", "value_embeddings", "moe"]
MODEL_TEXTS = mutations(MODEL, PLAUSIBLE_MODEL, UNUSUAL)


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
@pytest.mark.fault("train.json is anything", "2,000 files: refused with the key named, or valid and planned")
def test_train_json(shop: Workshop, exhaustive: bool) -> None:
    path, refused, model = shop.runs / "r" / "train.json", 0, load_model_config(shop.runs / "r" / "model.json")

    def check(text: str) -> None:
        nonlocal refused
        set_text(path, text)
        if refusal(lambda: load_train_config(path), path):
            refused += 1
            return
        config = load_train_config(path)
        again = config.model_dump(mode="json", exclude_unset=True)
        assert TrainConfig.model_validate(again) == config
        for world_size in WORLD_SIZES:
            check_plan(Experiment(RunDirectory(path.parent), config, model, shop.datasets), world_size)

    tried = explore(check, TRAIN_TEXTS, 2000 if exhaustive else 250)
    assert 0.3 < refused / tried < 0.99, "the cases are neither all valid nor all refused"


def check_plan(experiment: Experiment, world_size: int) -> None:
    """Check that a run can be planned as --plan does, or is refused with one line."""

    def plan() -> None:
        made = make_plan(experiment, world_size, None)
        assert "tokens" in describe_plan(made, PlannedSpeed(1000.0, "assumed"))
        made.check_disk(experiment.run.path)

    line_of(plan)


@pytest.mark.fault("model.json is anything", "2,000 files: refused with the key named, or valid")
def test_model_json(shop: Workshop, exhaustive: bool) -> None:
    path, refused = shop.runs / "r" / "model.json", 0

    def check(text: str) -> None:
        nonlocal refused
        set_text(path, text)
        if refusal(lambda: load_model_config(path), path):
            refused += 1
            return
        config = load_model_config(path)
        assert ModelConfig.model_validate(config.model_dump()) == config
        if config.parameters < 10**6:
            assert sum(each.numel() for each in GPTModel(config).parameters()) == config.parameters

    tried = explore(check, MODEL_TEXTS, 2000 if exhaustive else 250)
    assert 0.3 < refused / tried < 0.99


# Some are refused when the file is read, the others when their weights would be made. Neither takes long.
IMPOSSIBLE_MODELS: list[dict[str, Any]] = [
    {"vocab_size": 10**15},
    {"vocab_size": 10**11},
    {"vocab_size": 2**62, "emb_dim": 2**62, "n_heads": 1},
    {"context_length": 10**15},
    {"emb_dim": 10**6},
    {"emb_dim": 10**15},
    {"n_layers": 10**9},
    {"n_layers": 10_000, "emb_dim": 8192},
    {"n_layers": 10**400},
    {"emb_dim": 2**40, "n_heads": 2**40},
]


@pytest.mark.slow
@pytest.mark.fault("a model that fits no machine", "refused by every command, or planned; no hang")
def test_impossible_models(bench: Bench, exhaustive: bool) -> None:
    path, weights = bench.shop.path / "model.json", bench.shop.runs / "r" / "checkpoints" / "best" / "model.safetensors"
    before = tree(bench.shop.path)
    for number, sizes in enumerate(IMPOSSIBLE_MODELS):
        few = [["smoke"], ["-f"]] if number % 4 == 0 else [["smoke"], ["--restart"]]
        for mode in [["-f"], ["--restart"], ["--plan"], ["smoke"]] if exhaustive else few:
            if mode == ["smoke"]:
                path.write_text(json.dumps(MODEL | sizes))
                assert is_one_line(bench.shop.command("test_smoke.py", str(path), str(weights)), "model.json")
                path.unlink()
                continue
            model = bench.shop.add_run("big", model=sizes) / "model.json"
            result = bench.shop.attempt(*mode, run="big")
            # --plan may plan a model that a disk could hold.
            assert is_one_line(result) or mode == ["--plan"], result.stdout
            shutil.rmtree(model.parent)
    same_as(before, bench.shop.path)


@pytest.mark.slow
@pytest.mark.fault("train.json and model.json are anything, real command", "refused, planned or trained")
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


DTYPES = {"U16": 2, "U32": 4, "I16": 2, "U8": 1, "BF16": 2, "F32": 4, "I64": 8, "C64": 8, "F8_E4M3": 1, "X": 1}


RARELY = st.integers(1, 8).map(lambda number: number == 8)
SHAPES: st.SearchStrategy[list[int]] = st.sampled_from([[8], [5], [1], [0]])
ODD_NUMBERS = st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64 - 1, 2**64, 1.5, "2", None])
LENGTHS = st.sampled_from([-1, 0, 1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 9])


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    """Draw the bytes of a safetensors file that is valid, nearly valid, or anything."""
    tensors, at = [], 0
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3, 0]))):
        dtype = draw(st.sampled_from([*["U16"] * 10, *DTYPES]))
        shape = draw(
            st.sampled_from([[8], [5], [0]])
            | st.sampled_from([[1], [7]])
            | st.lists(st.sampled_from([0, 1, 2, 4, 8]), max_size=3)
        )
        size = math.prod(shape) * DTYPES[dtype]
        entry: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        if draw(RARELY):
            entry["data_offsets"] = draw(st.lists(ODD_NUMBERS | st.integers(0, 64), max_size=3))
        if draw(RARELY):
            entry["shape"] = draw(st.lists(ODD_NUMBERS, max_size=2))
        tensors.append((draw(st.sampled_from(["tokens", "tokens", "tok_emb.weight"])), json.dumps(entry)))
        at += size
    if draw(RARELY):
        tensors.append((draw(st.sampled_from(["__metadata__", "tokens", "é", ""])), json.dumps(draw(VALUES))))
    header = draw(st.binary(max_size=40)) if draw(RARELY) else write(tensors)
    data = draw(st.binary(max_size=64)) if draw(RARELY) else bytes(at)
    return raw_safetensors(header, data, draw(LENGTHS) if draw(RARELY) else None)


@pytest.mark.slow
@pytest.mark.fault(
    "safetensors files are anything", "2,000 files: refused or valid as tokens; none taken for the model's weights"
)
def test_safetensors(tmp_path: Path, exhaustive: bool) -> None:
    path, refused = tmp_path / "train.safetensors", 0
    model = GPTModel(ModelConfig(**MODEL))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def check(content: bytes) -> None:
        nonlocal refused
        path.write_bytes(content)
        if line := line_of(lambda: TokenFile(path)):
            refused += 1
            assert str(path) in line
        else:
            file = TokenFile(path)
            tokens = file.read(0, 100)
            assert len(tokens) == min(100, len(file))
            assert file.largest_token() == (int(tokens.max()) if len(tokens) else -1)
            assert file.fingerprint()
        line = line_of(lambda: model.load_checkpoint_tensors(load_weights(path), path))
        assert line is not None
        assert f"{path}: not " in line  # "not this model" or "not a readable safetensors file"

    tried = explore(check, safetensors_files(), 2000 if exhaustive else 300)
    assert 0.3 < refused / tried < 0.99
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "weights untouched"


def token_header(count: int, kind: str = "U16", **changes: Any) -> str:
    entry = {"dtype": kind, "shape": [count], "data_offsets": [0, count * DTYPES[kind]], **changes}
    return write([("tokens", json.dumps(entry))])


LETTERS = np.arange(400, dtype=np.uint16).__mod__(64).tobytes()
TOKEN_FILES: dict[str, bytes] = {
    "length beyond the file": raw_safetensors(token_header(400), LETTERS, length=10**6),
    "length 2**63": raw_safetensors(token_header(400), LETTERS, length=2**63),
    "length -1": raw_safetensors(token_header(400), LETTERS, length=-1),
    "length 0": raw_safetensors(token_header(400), LETTERS, length=0),
    "offsets beyond": raw_safetensors(token_header(400, data_offsets=[0, 10**12]), LETTERS),
    "offsets reversed": raw_safetensors(token_header(400, data_offsets=[800, 0]), LETTERS),
    "offsets negative": raw_safetensors(token_header(400, data_offsets=[-800, 0]), LETTERS),
    "shape 2**63": raw_safetensors(token_header(400, shape=[2**63]), LETTERS),
    "shape that overflows": raw_safetensors(token_header(400, shape=[2**32, 2**32]), LETTERS),
    "bytes left over": raw_safetensors(token_header(300), LETTERS),
    "not UTF-8": raw_safetensors(b"\xff\xfe{}", LETTERS),
    "nested": raw_safetensors('{"tokens":' * 5000, LETTERS),
    "a number beyond the vocabulary": raw_safetensors(token_header(400), b"\xff" * 800),
}


@pytest.mark.fault("a hostile token file, real command", "refused with the split named; nothing changed")
def test_token_files(shop: Workshop, exhaustive: bool) -> None:
    before = tree(shop.path)
    for split in ("train", "validation"):
        path = shop.datasets / DATASET / f"{split}.safetensors"
        good = path.read_bytes()
        for name, content in list(TOKEN_FILES.items())[:: 1 if exhaustive else 3]:
            path.write_bytes(content)
            result = shop.attempt()
            assert is_one_line(result, split), name
            assert result.status == 2, name
            path.write_bytes(good)
    same_as(before, shop.path)


PLAUSIBLE_META: dict[str, list[Any]] = {
    "description": ["", "x"],
    "token_dtype": ["uint16", "float", ""],
    "files": [["train.safetensors"], {"train": "train.safetensors"}, ["../../../x.json"], ["/etc/hostname.json"],
              ["x" * 5000 + ".json"], ["a\0b.json"], [], {}, [5]],
    "tokenizer": ["gpt2", "gone.json", "../x.json", "/etc/passwd", "", ".", "meta.json", "a\0b", "x" * 5000],
    "vocab_size": COUNTS,
    "eot_token": COUNTS,
    "splits": [{}, {"test": {"tokens": 10, "bytes": 40}}, {"test": {"tokens": 0, "bytes": 0}}, {"test": []},
               {"test": {"tokens": 10**400}}, {"test": {"tokens": 1, "bytes": 10**400}}, {"test": {"tokens": -1}}],
}  # fmt: skip


@pytest.mark.fault("a dataset's meta.json is anything", "2,000 files: refused with the key named, or valid")
def test_dataset_meta(shop: Workshop, exhaustive: bool) -> None:
    folder = shop.datasets / DATASET
    valid = {"description": "letters", "token_dtype": "uint16", "files": ["train.safetensors"], "tokenizer": "gpt2"}

    def check(text: str) -> None:
        set_text(folder / "meta.json", text)
        if line := line_of(lambda: Dataset.open(shop.datasets, DATASET)):
            assert str(folder) in line
            return
        dataset = Dataset.open(shop.datasets, DATASET)
        dataset.bytes_per_token("test")
        tokenizer = dataset.tokenizer
        assert tokenizer == "gpt2" or Path(tokenizer).parent == folder

    explore(check, mutations(valid, PLAUSIBLE_META), 2000 if exhaustive else 200)


@pytest.mark.fault("the memory of a token scan is anything", "the file is scanned again")
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


def other_weights(good: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return contents of weights files that do not fit the model, by what is wrong with them."""
    name, matrix = "tok_emb.weight", good["tok_emb.weight"]
    query = "trf_blocks.0.att.W_query.weight"
    return {
        "missing": {key: value for key, value in good.items() if key != name},
        "surplus": {**good, "extra.weight": torch.zeros(2)},
        "another shape": {**good, name: torch.zeros(matrix.shape[0], matrix.shape[1] + 1)},
        "transposed": {**good, name: matrix.T.contiguous()},
        "a dimension more": {**good, name: matrix[None].contiguous()},
        "a scalar": {**good, name: torch.tensor(1.0)},
        "empty": {**good, name: torch.zeros(0)},
        "integers": {**good, name: matrix.long()},
        "bools": {**good, query: good[query].bool()},
        "complex": {**good, query: good[query].to(torch.complex64)},
        "fp8": {**good, query: good[query].to(torch.float8_e4m3fn)},
        "prefixed, some of them": {f"module.{key}" if "att" in key else key: value for key, value in good.items()},
        "nothing": {},
    }


@pytest.mark.fault("weights of another model, real commands", "refused with the tensor named; nothing changed")
def test_weights(bench: Bench, exhaustive: bool) -> None:
    latest = bench.reset()
    good = load_file(latest / "model.safetensors")
    path, model = bench.shop.path / "w.safetensors", bench.shop.runs / "r" / "model.json"
    commands = [("test_smoke.py", []), ("test_loss.py", [str(bench.shop.datasets), "--dataset", DATASET])]
    for index, (name, tensors) in enumerate(other_weights(good).items()):
        latest = bench.reset()
        save_file(tensors, path)
        for script, first in commands if exhaustive else commands[index % 2 : index % 2 + 1]:
            assert is_one_line(bench.shop.command(script, *first, str(model), str(path)), "not this model"), name
        if exhaustive or index % 3 == 0:
            save_file(tensors, latest / "model.safetensors")
            vouch_for(latest, "model.safetensors")
            before = tree(bench.shop.path)
            assert is_one_line(bench.shop.attempt(), latest.name, "not this model"), name
            same_as(before, bench.shop.path)


# Checkpoints


PLAUSIBLE_CHECKPOINT: dict[str, list[Any]] = {
    **dict.fromkeys(("global_step", "tokens_seen", "best_step", "skipped_steps", "loss_count"), COUNTS),
    **dict.fromkeys(("metrics_bytes", "foreign_tokens", "measured_from_step", "measured_from_tokens"), COUNTS),
    **dict.fromkeys(("world_size", "microbatch_size", "accumulation_steps"), COUNTS),
    "measured_from_seconds": RATES,
    **dict.fromkeys(("train_loss", "val_loss", "best_loss", "loss_sum"), RATES),
    "seconds": [{}, {"training": 1}, {"training": "1"}, {"training": None}, {"training": 1e308, "setup": 1e308}, []],
    "sha256": [{}, {"optimizer.pt": 5}, {"../x": ""}, {"x" * 500: ""}, []],
    "train": [{}, {"validation_interval": []}, []],
    **{key: [True, False, 0, "yes", None] for key in ("is_best", "planned", "validation_due", "benchmarks_due")},
}  # fmt: skip


def test_the_fuzzed_keys_are_in_a_real_meta_json(bench: Bench) -> None:
    assert bench.meta().keys() >= PLAUSIBLE_CHECKPOINT.keys()


@pytest.mark.fault("a checkpoint's meta.json is anything", "2,000 files: refused with the key named, or valid")
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

    explore(check, mutations(bench.meta(), PLAUSIBLE_CHECKPOINT), 2000 if exhaustive else 200)


WRONG: list[Any] = [None, True, -1, 0, 1.5, 10**18, 10**400, 1e308, "x", "a\nb\x1b[31m", [], [1], {}, {"a": 1}]


def wrong_metas(meta: dict[str, Any]) -> list[dict[str, Any]]:
    """Return contents of meta.json with each wrong value for each key, also in nested objects, and without each of the
    keys."""
    found: list[dict[str, Any]] = [{**meta, key: value} for key in [*meta, "new"] for value in WRONG]
    found += [{other: value for other, value in meta.items() if other != key} for key in meta]
    inside: list[Any] = [None, -1, "x", []]
    for outer in ("seconds", "sha256", "dataset", "train", "model"):
        found += [{**meta, outer: {**meta[outer], key: value}} for key in meta[outer] for value in inside]
    return found


@pytest.mark.slow
@pytest.mark.fault(
    "a checkpoint's meta.json is wrong, continued", "refused, or continued to the end; no checkpoint lost"
)
def test_continuing_with_wrong_meta(bench: Bench, exhaustive: bool) -> None:
    """A run whose meta.json has a wrong value or lacks a key is refused by the real command, or resumed without a
    loss."""
    for meta in wrong_metas(bench.meta())[:: 7 if exhaustive else 23]:
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


@pytest.mark.fault("a checkpoint's states are another program's", "refused with the checkpoint named; nothing changed")
def test_states_of_something_else(bench: Bench, exhaustive: bool) -> None:
    """State files that are readable and have the right hashes, but hold something else, are refused."""
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
        before = tree(bench.shop.path)
        assert is_one_line(bench.shop.attempt(), latest.name), (name, content)
        same_as(before, bench.shop.path)


@pytest.mark.fault("metrics.jsonl is anything", "a foreign line moves to aside/, and the run continues to its end")
def test_metrics(bench: Bench, exhaustive: bool) -> None:
    """A run is resumed to its end if metrics.jsonl has another program's line where the checkpoint expects its own next
    line."""
    lines = ["5", "[]", "null", "{}", '"x"', '{"event": 5}', "[" * 5000, "\ufeff{}", "", "NaN", '{"event": "train"}']
    for line in lines if exhaustive else lines[::3]:
        latest = bench.reset()
        path = latest.parent.parent / "metrics.jsonl"
        at = bench.meta()["metrics_bytes"]
        path.write_bytes(path.read_bytes()[:at] + line.encode() + b"\n")
        before = tree(bench.shop.path)
        assert not is_one_line(bench.shop.attempt()), line
        nothing_lost(before, bench.shop)


# Names

ALPHABET = st.characters() | st.sampled_from("./\\-_ab019 \n\r\t\0\x1b~*")
NAMES = st.text(ALPHABET, max_size=20) | st.sampled_from(
    [
        *("..", ".", "", "../r", "/etc", "r/", "./r", "r/../r", "r\n", "-r", "--", "\ud800", "con", "r ", "R", "ｒ"),
        "x" * 90,
    ]
)


@pytest.mark.fault("names are anything", "8,000 names: refused, or they stay in their folder")
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


@pytest.mark.fault("names are anything, real command", "refused; nothing changed")
def test_commands_on_names(bench: Bench, exhaustive: bool) -> None:
    bench.reset()
    before = tree(bench.shop.path)

    def check(case: tuple[str, str]) -> None:
        name, place = case
        if place == "dataset":
            set_text(bench.shop.runs / "r" / "train.json", json.dumps(TRAIN | {"dataset": name}))
        run, arguments = (name, []) if place == "run" else ("r", [name] if place == "checkpoint" else [])
        assert is_one_line(bench.shop.attempt(*arguments, run=run), place if place != "checkpoint" else "")
        shutil.copy(bench.origin / "runs" / "r" / "train.json", bench.shop.runs / "r" / "train.json")

    # An argument cannot contain NUL, and is an option if it begins with a dash. "r" is a run that exists, also with a
    # slash after it.
    names = NAMES.filter(
        lambda name: "\0" not in name and not name.startswith("-") and name.rstrip("/") not in {"r", "R"}
    )
    places = st.sampled_from(["run", "dataset", "checkpoint"])
    explore(check, st.tuples(names, places), 60 if exhaustive else 15)
    same_as(before, bench.shop.path)


@pytest.mark.fault("names longer than a file system's", "refused")
def test_long_names(bench: Bench) -> None:
    bench.reset()
    before = tree(bench.shop.path)
    for length in (201, 256, 5000):
        name = "x" * length
        for result in (bench.shop.attempt(run=name), bench.shop.attempt(name)):
            assert is_one_line(result)
            assert result.status == 2
            assert len(result.stderr) < 1000
    same_as(before, bench.shop.path)


@pytest.mark.fault(
    "control characters in what a message quotes", "written as \\n and \\x1b; the message stays one line"
)
def test_control_characters(bench: Bench) -> None:
    """Control characters from a file are escaped in messages, so that they cannot begin a line or send an escape
    sequence to the terminal."""
    latest, evil = bench.reset(), "a\nb\x1b[31m\r\u2028"
    model, weights = bench.shop.runs / "r" / "model.json", bench.shop.path / "w.safetensors"
    good = load_file(latest / "model.safetensors")
    save_file({**good, evil: torch.zeros(2)}, weights)
    assert is_one_line(bench.shop.command("test_smoke.py", str(model), str(weights)), "w.safetensors")
    weights.write_bytes(raw_safetensors(token_header(4, "U16", dtype=evil), struct.pack("<4H", 1, 2, 3, 4)))
    assert is_one_line(bench.shop.command("test_smoke.py", str(model), str(weights)), "w.safetensors")
    odd = bench.shop.path / evil
    assert is_one_line(bench.shop.command("test_smoke.py", str(odd), str(weights)), "no such file")
    (latest / "meta.json").write_text(json.dumps({**bench.meta(), "dataset": evil}))
    assert is_one_line(bench.shop.attempt(), "another dataset")
