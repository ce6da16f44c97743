"""The runs that a SWEEP.json makes, their names, and the errors for invalid requests."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from harness.common.errors import RunError
from harness.common.files import SAFE_NAME, draft_prefix
from harness.comparison.arms import find_arms
from harness.comparison.records import RunRecord
from harness.model.config import load_model_config
from harness.runs.train_config import load_train_config
from harness.sweeps.derived_runs import MODEL_KEYS, TRAIN_KEYS, derive, load_base, write_runs
from harness.sweeps.file import LONGEST_LABEL, SweepRuns, labels, load_sweep
from tests.support.configs import refusal
from tests.support.isolation import ROOT, SHIPPED_RUNS
from tests.support.launch import Result, Workshop
from tests.support.sweeping import add_summary, command, load, make, sweep_command


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base", learning_rate=0.0015, random_seed=7)
    return made


def derive_run(shop: Workshop, base: str, name: str, *values: str) -> Result:
    """Run derive_run.py with these values of --set, and return its result, whatever its exit status."""
    chosen = [word for value in values for word in ("--set", value)]
    return command(shop, "derive_run.py", base, name, *chosen, "--datasets-dir", str(shop.datasets))


def settings(sweep: SweepRuns, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(run.settings[key] for key in keys) for run in sweep.runs]


# The runs that a file makes


@pytest.mark.parametrize(
    ("keys", "found", "named"),
    [
        (  # every combination, in the order of the file
            {"vary": {"learning_rate": [0.0015, 0.003], "random_seed": [1, 2]}},
            {
                ("learning_rate", "random_seed", "emb_dim"): [
                    (0.0015, 1, 16),
                    (0.0015, 2, 16),
                    (0.003, 1, 16),
                    (0.003, 2, 16),
                ]
            },
            ["s-lr0.0015-seed1", "s-lr0.0015-seed2", "s-lr0.003-seed1", "s-lr0.003-seed2"],
        ),
        (  # keys of both files change together
            {
                "set": {"drop_rate": 0.0, "weight_decay": 0.5},
                "together": [{"emb_dim": 32, "min_train_tokens": 6400}, {"emb_dim": 64, "n_layers": 4}],
            },
            {
                ("emb_dim", "n_layers", "min_train_tokens"): [(32, 2, 6400), (64, 4, 1280)],
                ("drop_rate", "weight_decay"): [(0.0, 0.5)] * 2,
            },
            ["s-emb32-tokens6400", "s-emb64-layers4"],
        ),
        (  # the base itself
            {"together": [{}, {"precision": "fp32"}]},
            {("precision",): [("auto",), ("fp32",)]},
            ["s-base", "s-precision_fp32"],
        ),
        (  # null removes a key, and another spelling of a key replaces it
            {"set": {"learning_rate": None}, "vary": {"global_batch_size": [8, 16]}},
            {("learning_rate", "gradient_accumulation_steps", "global_batch_size"): [(0.0004, 1, 8), (0.0004, 1, 16)]},
            ["s-batch8", "s-batch16"],
        ),
        ({"vary": {"depth": [3]}}, {("n_layers", "emb_dim", "n_heads"): [(3, 192, 3)]}, ["s-depth3"]),
        (  # entries may have names, and their values override "set"
            {
                "set": {"eps": 1e-7},
                "together": [{"name": "plain"}, {"name": "own", "eps": 1e-6}, {"learning_rate": 0.25}],
                "vary": {"random_seed": [1]},
            },
            {("eps", "learning_rate"): [(1e-7, 0.0015), (1e-6, 0.0015), (1e-7, 0.25)]},
            ["s-plain-seed1", "s-own-seed1", "s-lr0.25-seed1"],
        ),
        (  # "$schema", which is for editors, is ignored
            {"$schema": "sweep.schema.json", "vary": {"betas": [[0.9, 0.95]]}},
            {("betas",): [([0.9, 0.95],)]},
            ["s-betas_0.9_0.95"],
        ),
        *(  # a budget replaces the base's budget
            ({"vary": {key: values}}, {(key, "min_train_tokens"): [(each, None) for each in values]}, named)
            for key, values, named in (
                ("train_steps", [10, 20], ["s-steps10", "s-steps20"]),
                ("tokens_per_parameter", [5, 20.0], ["s-tokens_per_parameter5", "s-tokens_per_parameter20.0"]),
                ("target_flops", [1e15, 1e16], ["s-flops1000000000000000.0", "s-flops1e+16"]),
            )
        ),
        (
            {"vary": {"batch_ramp": [[[0, 8], [1000, 16]], [[0, 4]]]}},
            {("gradient_accumulation_steps",): [(1,), (1,)]},
            ["s-ramp_0_8_1000_16", "s-ramp_0_4"],
        ),
    ],
)
def test_what_a_file_makes(shop: Workshop, keys: dict[str, Any], found: dict[Any, Any], named: list[str]) -> None:
    sweep = load(shop, **keys)
    assert [run.name for run in sweep.runs] == named
    for names, values in found.items():
        assert settings(sweep, *names) == values
    assert "name" not in {key for run in sweep.runs for key in (*run.train, *run.model)}


def test_a_base_in_the_notebooks_spelling(shop: Workshop) -> None:
    shop.add_run("base", microbatch_size=None, minibatch_size=2, use_amp=False)
    sweep = load(shop, vary={"microbatch_size": [2, 4]})
    assert settings(sweep, "microbatch_size", "precision") == [(2, "fp32"), (4, "fp32")]


VALUES = st.one_of(st.integers(), st.floats(allow_nan=False), st.text(max_size=80), st.none(), st.booleans())
POINTS = st.dictionaries(st.sampled_from(TRAIN_KEYS), VALUES, max_size=6)


@hypothesis.settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.lists(POINTS, max_size=8, unique_by=lambda point: json.dumps(point, sort_keys=True)))
def test_labels_are_safe_short_and_all_different(points: list[dict[str, Any]]) -> None:
    found = labels(points)
    assert len(set(found)) == len(points)
    assert all(len(label) <= LONGEST_LABEL and SAFE_NAME.fullmatch(f"s-{label}") for label in found)


def test_no_key_is_in_both_files() -> None:
    """No key belongs to both model.json and train.json. So a sweep need not say to which file a key belongs."""
    assert not set(MODEL_KEYS) & set(TRAIN_KEYS)


def test_the_documented_files_are_sweeps_of_the_shipped_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    files = re.findall(r"^    \{\n.*?^    \}$", text, re.MULTILINE | re.DOTALL)
    counts = []
    for file in files:
        (tmp_path / "lr.json").write_text(file)
        counts.append(len(load_sweep(tmp_path / "lr.json", SHIPPED_RUNS).runs))
    assert counts == [6, 4]


# Refusals


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"vary": {"learning_rat": [1.0]}}, 'in "vary": key "learning_rat": unknown; did you mean "learning_rate"?'),
        ({"set": {"on_end": ["x"]}, "vary": {"random_seed": [1]}}, 'in "set": key "on_end": would run after each run'),
        ({"vary": {"notify": ["https://x/secret"]}}, 'in "vary": key "notify": its URL would be in the names of runs'),
        ({"set": {"n_layer": 3}, "vary": {"random_seed": [1]}}, 'in "set": key "n_layer": unknown; did you mean "n_l'),
        ({"together": [{"lr": 1.0}]}, 'in "together": key "lr": unknown; did you mean "learning_rate"'),
        (
            {"vary": {"use_amp": [True]}},
            'key "use_amp": is the lab notebook\'s name for "precision"; set that key instead',
        ),
        ({"varry": {}, "vary": {"random_seed": [1]}}, 'key "varry": unknown; did you mean "vary"?'),
        ({"search": {}, "trials": 3}, 'key "search": unknown'),
        ({"learning_rate": [1.0]}, 'key "learning_rate": belongs in "set" (one value for all runs) or in "vary"'),
        ({"vary": {"random_seed": 1}}, 'key "vary.random_seed": input should be a valid list, not 1'),
        ({"vary": {"random_seed": []}}, 'key "vary.random_seed": list should have at least 1 item'),
        ({"vary": {}}, 'keys "vary" and "together": give at least one of them; derive_run.py makes a single run'),
        ({"set": {"eps": 1e-7}, "vary": {"eps": [1e-8]}}, 'key "eps": given in two of "set", "vary" and "together"'),
        ({"together": [{"eps": 1.0}, {"eps": 2.0}], "vary": {"eps": [1e-8]}}, 'key "eps": given in two of'),
        ({"set": {"eps": 1e-7}, "together": [{"eps": 1.0}, {"eps": 2.0}]}, 'key "eps": given in two of'),
        ({"together": [{"name": "a/b"}]}, 'in "together": key "name": "a/b" must be a plain name of ASCII letters'),
        ({"together": [{"name": 3}]}, 'in "together": key "name": 3 must be a plain name of ASCII letters'),
        ({"together": [{"name": "a"}, {"name": "a", "eps": 1e-7}]}, 'key "name": "a" is given twice'),
        ({"vary": {"random_seed": [1, 2, 1]}}, "-d3bf8138, which would be the same run; remove one value or entry"),
        (
            {"vary": {"learning_rate": [2, 1, 1.0], "random_seed": [1, 2]}},
            "makes s-lr1-seed1 and s-lr1.0-seed1, which would be the same run; remove one value or entry",
        ),
        ({"vary": {"random_seed": [None, 42]}}, "makes s-seed_null and s-seed42, which would be the same run"),
        ({"vary": {"learning_rate": [0.1, -1]}}, 's-lr-1/train.json: key "learning_rate": input should be greater'),
        ({"vary": {"n_heads": [2, 3]}}, 's-heads3/model.json: key "emb_dim": 16 is not a multiple of n_heads (3)'),
        ({"vary": {"dataset": ["a/b", "a"]}}, 'dataset "a": must be owner/name'),
        ({"base": "bas", "vary": {"random_seed": [1]}}, "no such run; did you mean base?"),
        (
            {"name": "../x", "vary": {"random_seed": [1]}},
            "key \"name\" (by default the file's name): sweep '../x': must be a",
        ),
        ({"name": "x" * 201, "vary": {"random_seed": [1]}}, "longer than 200 characters"),
        ({"name": "x" * 195, "vary": {"random_seed": [1]}}, "makes run 'xxxxxxxxxxxxxxxxxxxx'…: longer than 200"),
        ({"vary": {key: [*range(1000)] for key in ("random_seed", "eps")}}, "make 1,000,000 runs; a sweep can"),
        ({"set": {"mirror": "s3://me:secret@b"}, "vary": {"eps": [1]}}, 'mirror "s3://b": must have no credentials'),
        ({"set": {"train_steps": 1, "target_flops": 1e15}, "vary": {"eps": [1]}}, "give only one of them"),
    ],
)
def test_bad_sweeps_get_one_line(shop: Workshop, keys: dict[str, Any], said: str) -> None:
    assert said in refusal(load, shop, begins=f"{shop.path / 's.json'}: ", **keys)


def test_a_ceiling_is_finite(shop: Workshop) -> None:
    (shop.path / "s.json").write_text('{"base": "base", "vary": {"random_seed": [1]}, "max_hours": 1e400}')
    sweep_command(shop, "make").refuses('s.json: key "max_hours": input should be a finite number')


# On the disk


def test_made_folders_are_ordinary_runs_that_name_their_parent(shop: Workshop) -> None:
    """The settings in a made folder are those of the sweep, and derived.json names the parent and the keys that differ
    from it. Making the runs of a sweep that has grown makes only the missing runs, and changes no file of the
    others."""
    sweep = load(shop, set={"weight_decay": 0.0}, vary={"emb_dim": [32], "random_seed": [7, 8]})
    done = sweep_command(shop, "make")
    assert done.stdout.splitlines()[:2] == [f"2 runs made in {shop.runs}", "  s-emb32-seed7"]
    for run in sweep.runs:
        assert load_model_config(run.directory.model_json) == run.model_config
        assert load_train_config(run.directory.train_json) == run.train_config
    derived = json.loads((shop.runs / "s-emb32-seed7" / "derived.json").read_text())
    assert derived == {
        "parent": "base",
        "sweep": "s",
        "differs": {"emb_dim": {"base": 16, "here": 32}, "weight_decay": {"base": 0.1, "here": 0.0}},
    }
    before = {path: path.stat().st_mtime_ns for path in shop.runs.rglob("*.json")}
    grown = load(shop, set={"weight_decay": 0.0}, vary={"emb_dim": [32], "random_seed": [7, 8, 9]})
    made = sweep_command(shop, "make").stdout
    assert made == f"1 run made in {shop.runs}, 2 were there already\n  s-emb32-seed9\n"
    assert grown.missing() == []
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        # 20 steps of 64 tokens
        ({"vary": {"warmup_steps": [20, 21]}}, 's-warmup21: train.json: key "warmup_steps": 21 steps of warm-up are'),
        ({"set": {"warmup_steps": 2, "train_steps": 1}, "vary": {"random_seed": [1]}}, "longer than the run of 1 glob"),
        ({"vary": {"global_batch_size": [3]}}, "3 sequences are not a multiple of 2"),
        ({"vary": {"target_flops": [1.0]}}, "gives less than one global batch"),
        ({"set": {"tie_weights": True}, "vary": {"head_learning_rate": [0.1]}}, "the head is the token embedding"),
    ],
)
def test_what_no_training_can_start_is_not_made(shop: Workshop, keys: dict[str, Any], said: str) -> None:
    path = load(shop, **keys).path
    for arguments in (["make"], ["run", str(shop.datasets)]):
        line = sweep_command(shop, *arguments).refuses(said)
        assert line.startswith(f"error: {path}: makes s-")
    assert [each.name for each in shop.runs.iterdir()] == ["base"]


def test_where_tokens_are_not_known_nothing_is_refused(shop: Workshop) -> None:
    sweep = load(shop, set={"warmup_steps": 10**6, "min_train_tokens": -1}, vary={"random_seed": [1, 2]})
    assert len(sweep.missing()) == 2


@pytest.mark.parametrize(
    ("put", "said"),
    [
        (lambda place: place.write_text("mine"), "is not a run (a folder with train.json and model.json)"),
        (lambda place: place.symlink_to("nowhere"), "is not a run"),
        (lambda place: (place / "checkpoints").mkdir(parents=True), "is not a run"),
        (
            lambda place: shutil.copytree(place.parent / "base", place),
            "there is another run of this name (random_seed: 7 -> 2, learning_rate: 0.0015 -> 0.5)",
        ),
    ],
    ids=["file", "link", "other", "run"],
)
def test_what_is_not_the_sweeps_run_is_refused(shop: Workshop, put: Callable[[Path], Any], said: str) -> None:
    put(shop.runs / "s-seed2")
    sweep = load(shop, set={"learning_rate": 0.5}, vary={"random_seed": [1, 2]})
    message = refusal(sweep.missing, begins=f"{shop.runs / 's-seed2'}: {said}")
    assert message.endswith('move what is there away, or give the sweep another "name"')
    assert not (shop.runs / "s-seed1").exists(), "all runs are made, or none"


def test_what_affects_no_result_may_be_changed_in_a_runs_folder(shop: Workshop) -> None:
    """As messages ask for: a ceiling is raised, and a run that diverged is to go on."""
    sweep = make(shop, set={"max_hours": 1.0, "price_per_hour": 36.0}, vary={"random_seed": [1, 2]})
    path = shop.runs / "s-seed1" / "train.json"
    train = json.loads(path.read_text())
    path.write_text(json.dumps(train | {"max_hours": 9.0, "price_per_hour": 72.0, "stop_if_diverged": False}))
    assert sweep.missing() == []
    said = "note: stop_if_diverged, price_per_hour, max_hours: training uses the values in train.json of s-seed1, which"
    assert " ".join(sweep_command(shop, "make").stdout.split()).endswith(f"{said} differ from the sweep's")
    add_summary(sweep.runs[0])
    assert sweep_command(shop, "make").stdout == f"0 runs made in {shop.runs}, 2 were there already\n"
    path.write_text(json.dumps(train | {"learning_rate": 0.5}))
    refusal(sweep.missing, begins=f"{shop.runs / 's-seed1'}: there is another run of this name (learning_rate: 0.5")


def test_a_sweep_goes_on_if_its_base_now_counts_the_same_validation_in_sequences(shop: Workshop) -> None:
    keys: dict[str, Any] = {"set": {"microbatch_size": 2}, "vary": {"random_seed": [1]}}
    given, base = {"validation_interval": 1, "start_val_token": 0}, shop.runs / "base" / "train.json"
    train = {key: value for key, value in json.loads(base.read_text()).items() if not key.startswith("validation_")}
    base.write_text(json.dumps({**train, **given, "validation_batches": 3}))
    make(shop, **keys)
    base.write_text(json.dumps({**train, **given, "validation_sequences": 6}))
    assert load(shop, **keys).missing() == []
    for size, said in (("sequences", "sequences: null -> 7"), ("batches", "batches: 3 -> 7")):
        base.write_text(json.dumps({**train, **given, f"validation_{size}": 7}))
        begins = f"{shop.runs / 's-seed1'}: there is another run of this name (validation_{said}"
        refusal(load(shop, **keys).missing, begins=begins)


def test_a_failure_half_way_leaves_nothing(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    real, renamed = Path.rename, iter([False, False, True])

    def rename(self: Path, target: Path) -> Path:
        if next(renamed):
            raise OSError(28, "No space left on device", str(target))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(RunError, match="s-seed3: the runs cannot be written: No space left on device"):
        make(shop, vary={"random_seed": [1, 2, 3]})
    assert [path.name for path in shop.runs.iterdir()] == ["base"]


def test_what_a_killed_make_left_is_removed_by_the_next(shop: Workshop) -> None:
    """Making runs removes the unfinished folder of a process that was killed while it made runs. That process had this
    one's pid, as happens in containers, or another pid."""
    for pid in (os.getpid(), 2**22 + 1):  # the latter is above Linux's largest pid
        (shop.runs / f"{draft_prefix(Path('s-seed2'))}{pid}").mkdir()
    make(shop, vary={"random_seed": [1, 2]})
    assert sorted(path.name for path in shop.runs.iterdir()) == ["base", "s-seed1", "s-seed2"]


# A single run


def test_a_changed_key_keeps_its_place_in_the_file(shop: Workshop) -> None:
    base = load_base(shop.runs, "base")
    changes = {"min_train_tokens": 128, "validation_batches": 2, "emb_dim": 32}
    derived = derive(base, "new", changes)
    assert ([*derived.model], [*derived.train]) == ([*base.model], [*base.train])


def test_derive_run(shop: Workshop) -> None:
    asked = ["learning_rate=0.003", "dataset=local/other", "tie_weights=true", "betas=[0.9, 0.98]"]
    done = derive_run(shop, "base", "new", *asked)
    assert done.status == 0, done.stderr
    assert "learning_rate: 0.0015 -> 0.003" in done.stdout
    assert "-> [0.9, 0.98]" in done.stdout
    train = load_train_config(shop.runs / "new" / "train.json")
    assert (train.learning_rate, train.dataset, train.random_seed) == (0.003, "local/other", 7)
    assert train.betas == (0.9, 0.98)
    assert load_model_config(shop.runs / "new" / "model.json").tie_weights is True
    derived = json.loads((shop.runs / "new" / "derived.json").read_text())
    assert (derived["parent"], derived["sweep"]) == ("base", None)
    line = derive_run(shop, "base", "new", *asked).refuses()
    assert line == f"error: {shop.runs / 'new'}: exists already; choose another name, or move it away"


def test_a_derived_run_fits_a_data_set_that_is_here(shop: Workshop) -> None:
    """A run derived for another dataset gets the vocabulary size, tokens and validation batches that fit the dataset.
    Values given with --set stay. The base has 1,280 tokens, a vocabulary of 64, and 3 validation batches."""
    folder = shop.add_dataset("local/small", tokens=400)
    folder.joinpath("meta.json").write_text(json.dumps({"vocab_size": 300}))
    save_file({"tokens": np.zeros(70, np.uint16)}, folder / "validation.safetensors")
    small = "dataset=local/small"
    derive_run(shop, "base", "new", small, "min_train_tokens=640").refuses("wanted 641 tokens, but there are 400")
    done = derive_run(shop, "base", "new", small, "learning_rate=0.003")
    assert done.stdout.splitlines()[1:] == [
        "  vocab_size: 64 -> 300",
        '  dataset: "local/letters" -> "local/small"',
        "  min_train_tokens: 1280 -> -1",
        "  validation_batches: 3 -> 2",
        "  learning_rate: 0.0015 -> 0.003",
    ]
    shop.add_run("warm", warmup_steps=20)
    warm = derive_run(shop, "warm", "short-warm", small).stdout
    assert warm.endswith("  warmup_steps: 20 -> 1\n"), "of 6"
    assert derive_run(shop, "warm", "own", small, "warmup_steps=5").stdout.endswith("  warmup_steps: 20 -> 5\n")
    large = derive_run(shop, "base", "large", small, "microbatch_size=5")
    large.refuses("the validation split of local/small is too short: wanted 81 tokens")
    assert "validation_batches: 3 -> 1" in derive_run(shop, "base", "four", small, "microbatch_size=4").stdout
    (folder / "validation.safetensors").unlink()
    assert derive_run(shop, "base", "without", small).status == 0
    train = load_train_config(shop.runs / "without" / "train.json")
    assert (train.validates, train.checkpoint_interval) == (False, 5)
    save_file({"tokens": np.zeros(16, np.uint16)}, folder / "validation.safetensors")
    short = "the validation split of local/small is too short: wanted 97 tokens"
    derive_run(shop, "base", "short", small).refuses(short, "or prepare the dataset with a larger --validation-f")


def test_a_run_derived_for_a_long_dataset_keeps_its_budget_or_is_refused(shop: Workshop) -> None:
    """Only a train split that is too short changes the number of tokens."""
    shop.add_dataset("local/long", tokens=20_000)
    shop.add_run("warm", warmup_steps=20)
    long = "dataset=local/long"
    refused = derive_run(shop, "warm", "large", long, "gradient_accumulation_steps=16")
    refused.refuses('key "warmup_steps": 20 steps of warm-up are longer than the run')
    assert not (shop.runs / "large").exists()
    shop.add_run("endless", epochs="repeat", start_train_token=30_000)
    derive_run(shop, "endless", "behind", long).refuses("the train split of local/long is too short")


def test_a_microbatch_that_fits_a_small_dataset_divides_the_global_batch(shop: Workshop) -> None:
    folder = shop.add_dataset("local/little")
    save_file({"tokens": np.zeros(6 * 16 + 1, np.uint16)}, folder / "validation.safetensors")
    shop.add_run("odd", microbatch_size=7, gradient_accumulation_steps=None, global_batch_size=28)
    assert "microbatch_size: 7 -> 2\n" in derive_run(shop, "odd", "even", "dataset=local/little").stdout


def test_notes_of_derive_run(shop: Workshop) -> None:
    """A note names a dataset that is absent, and suggests the right name if it is misspelt."""
    shop.add_dataset("local/small")

    def note(name: str, *settings: str) -> str:
        done = derive_run(shop, "base", name, *settings)
        assert done.status == 0, done.stderr
        return "".join(line for line in done.stdout.splitlines() if line.startswith("note: "))

    absent = f'"local/x" is not in {shop.datasets}, so absent is not adapted to it; training will look for it'
    assert note("absent", "dataset=local/x") == f"note: {absent} on the Hugging Face Hub"
    assert note("builtin", "dataset=builtin/python-stdlib").endswith("is not adapted to it; training makes it")
    assert note("near", "dataset=local/smal").endswith('did you mean "local/small"?')
    assert note("there", "dataset=local/small") == note("other", "learning_rate=1") == ""
    unknown = derive_run(shop, "base", "unknown", "dataset=builtin/nope")
    unknown.refuses("no builtin dataset has this name; choose from builtin/python-stdlib")
    assert not (shop.runs / "unknown").exists()
    assert (
        derive_run(shop, "base", "same").stdout
        == f"{shop.runs / 'same'}: base without changes; --set KEY=VALUE changes a key\n"
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("learning_rat=1", 'key "learning_rat": unknown; did you mean "learning_rate"?'),
        ("learning_rate", '--set "learning_rate": must be KEY=VALUE'),
        ("learning_rate=high", 'new/train.json: key "learning_rate": input should be a valid number, not "high"'),
        ("learning_rate=NaN", 'key "learning_rate": input should be a valid number, not "NaN"'),
        ("warmup_steps=21", 'new: train.json: key "warmup_steps": 21 steps of warm-up are longer than the run of 20'),
        ("target_flops=1e40", 'new: train.json: key "target_flops": 1e+40 comes to '),
    ],
)
def test_derive_run_refuses(shop: Workshop, setting: str, said: str) -> None:
    derive_run(shop, "base", "new", setting).refuses(said)
    assert not (shop.runs / "new").exists()


def test_initial_weights_are_still_found(shop: Workshop) -> None:
    """A derived run names its base's file of weights by a path that is relative to its own folder."""
    weights = shop.add_run("base", initial_weights="weights.safetensors") / "weights.safetensors"
    weights.touch()
    run = derive(load_base(shop.runs, "base"), "new", {"random_seed": 1})
    write_runs([run])
    named = run.experiment(shop.datasets).initial_weights
    assert named is not None
    assert named.samefile(weights)
    assert run.differs.keys() == {"random_seed"}


def test_a_base_with_weights_of_its_own_is_a_replicate_of_its_derived_seeds(shop: Workshop) -> None:
    shop.add_run("base", model={"drop_rate": 0.1}, initial_weights="weights.safetensors")
    base = load_base(shop.runs, "base")
    derived = derive(base, "new", {"random_seed": 1})
    write_runs([derived])
    for run in (base, derived):
        add_summary(run, dataset={"name": "local/letters"}, torch="2.15.0")
    arms = find_arms([RunRecord.read(run.directory) for run in (base, derived)])
    assert arms.run_names == {"base": ("base", "new")}
