"""Texts for messages: advice for misspelled keys, quoted values, abbreviated lists, amounts of money."""

from __future__ import annotations

import pytest

from harness.common.messages import (
    SHOWN_CHARACTERS,
    abbreviated,
    amount_text,
    as_unicode,
    counted,
    document_count,
    is_hub_name,
    is_unicode,
    nearest,
    quoted,
)
from harness.model.config import ModelConfig
from harness.runs.train_config import TrainConfig


@pytest.mark.slow
def test_slips_of_the_finger_get_advice() -> None:
    """Advice corrects a key of at least three letters with a doubled letter, two neighboring letters swapped, or no
    underscores. With at least four letters one letter may also be missing, and with at least five one may be wrong."""
    for kind in (TrainConfig, ModelConfig):
        keys = [key for key in kind.model_fields if len(key) > 2]
        for key in keys:
            slips = {key.replace("_", "")}
            for at in range(len(key)):
                slips |= {key[:at] + key[at] + key[at:], key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :]}
                slips |= {key[:at] + key[at + 1 :]} if len(key) > 3 else set()
                slips |= {key[:at] + "~" + key[at + 1 :]} if len(key) > 4 else set()
            assert {slip: nearest(slip, keys) for slip in slips} == dict.fromkeys(slips, key)


def test_nothing_is_near_to_a_name_of_its_own() -> None:
    assert nearest("epochs", ["eps", "betas"]) is None
    assert nearest("Learning_Rate", ["weight_decay", "learning_rate"]) == "learning_rate"
    keys = [*TrainConfig.model_fields, *ModelConfig.model_fields]
    for name in ("mlp_ratio", "tie_embeddings", "d_head", "noise_seed", "embedding_lr", "model", "eval_steps_total"):
        assert nearest(name, keys) is None, name
    assert nearest("x" * (SHOWN_CHARACTERS + 1), ["x" * SHOWN_CHARACTERS]) is None


def test_values_are_quoted_as_json_has_them_and_fit_a_line() -> None:
    assert quoted({"a": [None, True, "two\nlines"]}) == r'{"a": [null, true, "two\nlines"]}'
    assert quoted("x" * 100) == '"' + "x" * (SHOWN_CHARACTERS - 1) + "..."
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(deep) == "something deeply nested"


def test_texts_of_lists_numbers_and_names() -> None:
    shown = [abbreviated(names) for names in ([], ["a", "b"], list("abcde"), ["a"] * 1005)]
    assert shown == ["", "a, b", "a, b, c, d, e", "a, a, a, a, a and 1,000 more"]
    assert [counted(count, "byte") for count in (0, 1, 1234)] == ["0 bytes", "1 byte", "1,234 bytes"]
    assert [document_count(count) for count in (0, 1, 1234)] == [
        "a part of a document",
        "1 document",
        "1,234 documents",
    ]
    names = ("a/b", "a-1/b.c_d", "a", "a/b/c", "a/ b")
    assert [is_hub_name(name) for name in names] == [True, True, False, False, False]
    assert is_unicode("naïve")
    assert not is_unicode("\udce9")
    assert as_unicode("caf\udce9") == "caf?"


@pytest.mark.parametrize(
    ("dollars", "text"),
    [
        (0.0, "0.00"),
        (39.864, "39.86"),
        (1234.5, "1,234.50"),
        (0.1, "0.10"),
        (0.0996, "0.100"),
        (0.05, "0.050"),
        (0.0057, "0.0057"),
        (0.00494, "0.0049"),
        (-0.00494, "-0.0049"),
        (1e-12, "0.00"),
    ],
)
def test_amounts_are_to_the_cent_and_small_ones_to_two_digits(dollars: float, text: str) -> None:
    assert amount_text(dollars) == text
