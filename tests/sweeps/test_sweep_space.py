"""Valid and invalid "search" entries of a SWEEP.json, and the answers to the invalid ones. Without Optuna."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.common.errors import UserError
from harness.sweeps.file import sweep_schema
from harness.sweeps.space import Choices, Domain, Range, contains, count_points, parse_domain
from harness.sweeps.trials import describe_search, load_search
from tests.support.isolation import ROOT
from tests.support.launch import Workshop
from tests.support.sweeping import sweep_command

RATES = {"min": 0.001, "max": 0.1, "log": True}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop(tmp_path)
    made.add_run("base")
    return made


def write(shop: Workshop, **keys: Any) -> Path:
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", "trials": 3} | keys))
    return path


def refusal(shop: Workshop, **keys: Any) -> str:
    path = write(shop, **keys)
    with pytest.raises(UserError) as caught:
        load_search(path, shop.runs)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.splitlines() == [message]
    return message


# What is refused


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"learning_rat": RATES}, 'in "search": key "learning_rat": unknown; did you mean "learning_rate"?'),
        ({"learning_rate": {"min": 0.1, "max": 0.01}}, 'key "learning_rate": key "min": 0.1 is not below "max" (0.01)'),
        ({"learning_rate": {"min": 1, "max": 1}}, 'one value for all trials belongs in "set"'),
        ({"learning_rate": {"min": 0, "max": 1, "log": True}}, 'key "min": 0 has no logarithm; give one above 0'),
        ({"learning_rate": {"min": -1, "max": 1}}, 'key "learning_rate": input should be greater than 0, not -1.0'),
        ({"learning_rate": {"min": 1e-3, "maxx": 1}}, 'key "learning_rate": key "maxx": unknown; did you mean "max"?'),
        ({"learning_rate": {"min": 1e-3}}, 'key "learning_rate": key "max": missing'),
        ({"learning_rate": {"min": "a", "max": 1}}, 'key "min": must be a number, not "a"'),
        ({"learning_rate": {"min": True, "max": 2}}, 'key "min": must be a number, not true'),
        ({"learning_rate": {**RATES, "step": 0.1}}, 'keys "log" and "step": leave one of them out'),
        ({"learning_rate": 0.1}, 'must be a list of values, or {"min": ..., "max": ...}, not 0.1'),
        ({"learning_rate": []}, "give at least two values"),
        ({"learning_rate": [0.1, 0.1, 0.2]}, "has a value twice; remove one"),
        ({"learning_rate": [0.1, 0.2, "high"]}, 'input should be a valid number, not "high"'),
        ({"n_layers": {"min": 1, "max": 2.5}}, 'key "n_layers": key "max": must be a whole number, not 2.5'),
        ({"emb_dim": {"min": 16, "max": 60, "step": 16}}, 'key "step": 16 does not divide the range from 16 to 60'),
        ({"lr_schedule": {"min": 1, "max": 2}}, 'key "lr_schedule": is not a number; give a list of its values'),
        ({"random_seed": [1, 2, 3]}, "cannot be searched: the lowest loss would be the luckiest seed's"),
        ({"microbatch_size": [1, 2, 4]}, 'so that trials would not compare; search "global_batch_size"'),
        ({"n_layers": {"min": 1, "max": 2}}, 'key "trials": 3, but "search" has 2 points'),
        ({}, 'key "search": name at least one key'),
        ([1], 'key "search": input should be a valid dictionary, not [1]'),
    ],
)
def test_bad_ranges_get_one_line(shop: Workshop, search: Any, said: str) -> None:
    assert said in refusal(shop, search=search)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"trials": 0}, 'key "trials": input should be greater than or equal to 1, not 0'),
        ({"trials": 1001}, 'key "trials": input should be less than or equal to 1000'),
        ({"trial": 3}, 'key "trial": unknown; did you mean "trials"?'),
        ({"vary": {"learning_rate": [0.1]}}, 'keys "search" and "vary": leave one of them out'),
        ({"together": [{"eps": 0.1}]}, 'keys "search" and "together": leave one of them out'),
        ({"set": {"learning_rate": 0.1}}, 'key "learning_rate": given in "set" and in "search"; keep one'),
        ({"objective": "train_loss"}, "key \"objective\": input should be 'final_validation_loss' or 'best_valid"),
        ({"pruning": {"after_trial": 3}}, 'in "pruning": key "after_trial": unknown; did you mean "after_trials"?'),
        ({"pruning": False}, 'key "pruning": must be an object, such as {"after_trials": 5}, not false'),
        ({"set": {"validation_interval": None}}, 'key "validation_interval": the runs would have no validation loss'),
    ],
)
def test_bad_searches_get_one_line(shop: Workshop, keys: dict[str, Any], said: str) -> None:
    assert said in refusal(shop, search={"learning_rate": RATES}, **keys)


def test_a_searchs_keys_alone_make_no_sweep(shop: Workshop) -> None:
    assert 'key "search": name at least one key' in refusal(shop, vary={"eps": [0.1]})
    path = shop.path / "s.json"
    path.write_text(json.dumps({"base": "base", "search": {"learning_rate": RATES}}))
    with pytest.raises(UserError, match='key "trials": missing; give the number of runs'):
        load_search(path, shop.runs)
    path.write_text(json.dumps({"base": "base", "vary": {"eps": [0.1]}}))
    with pytest.raises(UserError, match='key "search": missing; without it, `sweep_runs'):
        load_search(path, shop.runs)


@pytest.mark.parametrize("verb", ["make", "plan", "run"])
def test_commands_for_sweeps_name_the_one_for_searches(shop: Workshop, verb: str) -> None:
    path = write(shop, search={"learning_rate": RATES})
    done = sweep_command(shop, verb, *([] if verb == "make" else [str(shop.datasets)]))
    assert done.status == 2
    said = f"makes its runs one by one as it trains them: `sweep_runs.py search {path} DATASETS_DIR`"
    assert done.stderr == f'error: {path}: key "search": {said}\n'


def test_without_optuna_the_remedy_is_named(shop: Workshop) -> None:
    """The status needs no Optuna."""
    path = write(shop, search={"learning_rate": RATES})
    words = ["search", str(path), str(shop.datasets), "--runs-dir", str(shop.runs)]
    program = (
        "import runpy, sys\n"
        "sys.modules['optuna'] = None\n"
        f"sys.argv = ['sweep_runs.py', *{words!r}]\n"
        f"runpy.run_path({str(ROOT / 'sweep_runs.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: the optuna package is missing: uv run --extra sweep sweep_runs.py search ...\n"
    assert [folder.name for folder in shop.runs.iterdir() if folder.is_dir()] == ["base"]
    nothing = describe_search(load_search(path, shop.runs))
    assert nothing == f"Search s in {shop.runs}, 0 of 3 trials made: nothing is made yet"


# What a range is

NUMBERS = st.floats(min_value=1e-9, max_value=1e9, allow_subnormal=False)


@given(NUMBERS, NUMBERS, st.floats(min_value=0, max_value=1), st.booleans())
def test_values_are_rounded_within_the_range_to_a_thousandth_of_it(
    low: float, high: float, share: float, log: bool
) -> None:
    assume(high > low * 1.001)
    domain = Range(min=low, max=high, log=log)
    value = min(max(low * (high / low) ** share if log else low + (high - low) * share, low), high)
    rounded = domain.rounded(value)
    assert domain.contains(rounded)
    assert domain.rounded(rounded) == rounded
    scale = value * (high / low - 1) if log else high - low
    assert abs(rounded - value) <= 0.001 * scale


@given(st.integers(-50, 50), st.integers(1, 40), st.sampled_from([0.1, 0.25, 3, 0.007]), st.data())
def test_values_with_a_step_are_those_of_the_range(start: int, steps: int, step: float, data: st.DataObject) -> None:
    low, high = round(start * step, 6), round((start + steps) * step, 6)
    domain = Range(min=low, max=high, step=step)
    values = [round((start + count) * step, 6) for count in range(steps + 1)]
    assert domain.count == len(values)
    chosen = data.draw(st.sampled_from(values))
    assert domain.rounded(chosen + 1e-13) == chosen
    assert domain.contains(chosen)
    assert not domain.contains(chosen + 0.4 * step)


def test_domains_count_their_points() -> None:
    layers = parse_domain("n_layers", {"min": 1, "max": 4})
    wide = parse_domain("emb_dim", {"min": 64, "max": 256, "step": 64})
    batch = parse_domain("global_batch_size", {"min": 8, "max": 64, "log": True})
    rate = parse_domain("learning_rate", {"min": 0.1, "max": 0.2})
    schedule = parse_domain("lr_schedule", ["cosine", "wsd"])
    assert [each.count for each in (layers, wide, batch, rate, schedule)] == [4, 4, 57, None, 2]
    assert count_points({"a": layers, "b": schedule}) == 8
    assert count_points({"a": layers, "b": rate}) is None


def test_what_a_point_must_be() -> None:
    domains: dict[str, Domain] = {"n_layers": Range(min=1, max=4, step=1), "tie": Choices((True, 1, 1.0, [0.9, 0.95]))}
    assert contains(domains, {"n_layers": 2, "tie": [0.9, 0.95]})
    assert not contains(domains, {"n_layers": 5, "tie": 1})
    assert not contains(domains, {"n_layers": True, "tie": 1})
    assert not contains(domains, {"n_layers": 2, "tie": False})
    assert not contains(domains, {"n_layers": 2})


def test_the_schema_knows_what_can_be_searched() -> None:
    schema = json.loads(json.dumps(sweep_schema(), allow_nan=False))
    assert {"search", "trials", "objective", "pruning", "sampler_seed"} <= schema["properties"].keys()
    search = schema["properties"]["search"]["properties"]
    assert "random_seed" not in search
    ranges, values = search["learning_rate"]["anyOf"]
    assert ranges["properties"].keys() == {"min", "max", "log", "step"} == Range.model_fields.keys()
    assert (values["type"], values["minItems"], values["items"]["type"]) == ("array", 2, "number")
    assert "$ref" not in json.dumps(schema)
