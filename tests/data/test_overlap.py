"""prepare_datasets.py --exclude: documents of a held-out split are left out, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.data import ngrams
from harness.data.dataset import TokenFile
from harness.data.ngrams import find_overlap, ngram_hashes, sampled_below
from tests.support.preparing import (
    IN_ORDER,
    Preparer,
    documents_of,
    held_documents,
    splits_of,
    with_texts,
    write_json_lines,
)

DICE = np.random.default_rng(0)
LETTERS = np.array([*"abcdefghijklmnopqrstuvwxyz"])
WORDS = np.array(["".join(DICE.choice(LETTERS, 6)) for _ in range(3000)])


def prose(count: int) -> list[str]:
    """Return documents of 3 to 120 words. Those of a small vocabulary would have common windows by chance."""
    return [" ".join(DICE.choice(WORDS, DICE.integers(3, 120))) for _ in range(count)]


# One document of each has no words; it is not that of the other.
HELD_OUT, OWN = [*prose(60), "* * *", *prose(1)], [*prose(400), "!!! ??? ;;;"]
# Cuts documents to short pieces, and batches at less than a document's length.
CUT = """
import harness.data.preparation.encode as encode
encode.BATCH_CHARACTERS, encode.LONGEST_PIECE, encode.CUT_SEARCH = 300, 40, 20
"""


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    """Datasets "bench", whose test split holds HELD_OUT, and "other", the same with another tokenizer."""
    preparer = with_texts(tmp_path_factory.mktemp("overlap"))
    write_json_lines(preparer.path / "bench.jsonl", HELD_OUT)
    split = [*IN_ORDER, "--test-fraction", 0.98, "--validation-fraction", 0.01]
    preparer.prepare("bench.jsonl", "bench", "--tokenizer", preparer.path / "tokenizer.json", *split)
    preparer.prepare("bench.jsonl", "other", "--train-tokenizer", 400, *split)
    return preparer


def planted() -> list[str]:
    """Return copies of held-out documents, of which the words or most of the windows are the same."""
    whole = [text for text in HELD_OUT[2:40] if len(text.split()) > 30]
    spaced = [re.sub(r" ", "  ", text).upper() for text in HELD_OUT[2:10]]
    punctuated = [f"«{text}»!" for text in HELD_OUT[10:20]]
    longer = [f"{text} and {OWN[at][:20]}" for at, text in enumerate(whole)]
    return [*HELD_OUT[2:40], *spaced, *punctuated, *longer]


def test_a_document_of_13_tokens_is_found_in_a_longer_one(tmp_path: Path) -> None:
    """Its only 13-gram is in the held-out text; the one with its end-of-text token is not compared."""
    mine, bytewise = Preparer(tmp_path), ["--train-tokenizer", 257, "--validation-fraction", 0]
    write_json_lines(tmp_path / "held.jsonl", ["zyx abcdefghijklm wvu"])
    write_json_lines(tmp_path / "all.jsonl", [*OWN[:9], "abcdefghijklm", "abcdefghijkl"])
    mine.prepare("held.jsonl", "held", *bytewise)
    out = mine.prepare("all.jsonl", "all", *bytewise, "--exclude", f"{tmp_path}/datasets/me/held:train")
    assert {*documents_of(out, "train")} == {*OWN[:9], "abcdefghijkl"}


def test_a_text_that_is_all_held_out_is_refused(tmp_path: Path) -> None:
    mine, options = Preparer(tmp_path), ["--train-tokenizer", 257, "--validation-fraction", 0]
    write_json_lines(tmp_path / "held.jsonl", HELD_OUT[:5])
    mine.prepare("held.jsonl", "held", *options)
    exclude = ["--exclude", f"{tmp_path}/datasets/me/held:train"]
    line = mine.run("held.jsonl", tmp_path / "datasets" / "me" / "out", *options, *exclude, status=2)
    assert "no documents with text (0 are empty, 5 are left out by --exclude)" in line


def parts() -> list[str]:
    """Return documents a third of which is held-out text. They stay."""
    long = [text for text in HELD_OUT[2:50] if len(text.split()) > 60]
    return [f"{text[: len(text) // 3]} {OWN[at]} {OWN[at + 1]}" for at, text in enumerate(long) if len(OWN[at]) > 200]


@pytest.mark.parametrize("prelude", ["", CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("dataset", ["bench", "other"])
def test_planted_documents_are_left_out_and_no_others(
    preparer: Preparer, tmp_path: Path, dataset: str, prelude: str
) -> None:
    """The dataset is that of the text without them, to the byte."""
    mine, dice = Preparer(tmp_path), np.random.default_rng(0)
    given = ["--tokenizer", preparer.path / "tokenizer.json"]
    kept = [*OWN, *parts()]
    bad = planted() if not prelude else HELD_OUT[2:40]
    assert len(parts()) > 5
    mixed = [(text, True) for text in kept] + [(text, False) for text in bad]
    order = [mixed[at] for at in dice.permutation(len(mixed))]
    write_json_lines(tmp_path / "all.jsonl", [text for text, _ in order])
    write_json_lines(tmp_path / "clean.jsonl", [text for text, is_kept in order if is_kept])
    name = f"{preparer.path}/datasets/me/{dataset}:test"
    out = mine.prepare("all.jsonl", "all", *given, "--exclude", name, prelude=prelude)
    clean = mine.prepare("clean.jsonl", "clean", *given)
    if prelude:  # a document of several batches is judged by its beginning, so that more may be left out, but not less
        assert not set(held_documents(out)) & set(bad)
        assert len(set(kept) - set(held_documents(out))) <= len(parts())
        return
    assert sorted(held_documents(out)) == sorted(held_documents(clean))
    for split, tokens in splits_of(clean).items():
        assert (splits_of(out)[split] == tokens).all()
    assert json.loads((out / "meta.json").read_text())["source"]["excluded_documents"] == len(bad)


def test_a_long_held_out_text_is_sampled(preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more windows than are kept, one in several is compared, of both texts."""
    monkeypatch.setattr(ngrams, "MOST_NGRAMS", 500)
    mine = Preparer(tmp_path)
    write_json_lines(tmp_path / "all.jsonl", [*OWN, *(f"{text} more" for text in HELD_OUT[2:40])])
    given = ["--tokenizer", preparer.path / "tokenizer.json", "--exclude", f"{preparer.path}/datasets/me/bench:test"]
    found = held_documents(mine.prepare("all.jsonl", "all", *given))
    assert set(OWN) <= set(found)
    assert len(found) - len(OWN) < 10, "short ones, of which no window is sampled"


@pytest.mark.parametrize("one_in", [1, 3])
def test_how_much_of_a_split_is_in_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_in: int) -> None:
    """The counts are those of sets of 13-grams, whatever the sizes of the pieces in which the files are read."""
    dice = np.random.default_rng(1)

    def text(documents: int) -> list[np.ndarray]:
        return [dice.integers(1, 60_000, dice.integers(0, 90)).astype(np.uint16) for _ in range(documents)]

    own, other = text(80), text(300)
    for at, document in enumerate(own[:40]):
        other[3 * at] = np.concatenate([other[3 * at], document[: len(document) * at // 40], other[1]])
    files = []
    for name, documents in (("held_out", own), ("first", other[:100]), ("second", other[100:])):
        tokens = np.concatenate([each for document in documents for each in (document, np.zeros(1, np.uint16))])
        save_file({"tokens": tokens}, tmp_path / f"{name}.safetensors")
        files.append(TokenFile(tmp_path / f"{name}.safetensors"))

    def ngrams_of(document: np.ndarray) -> list[tuple[int, ...]]:
        whole = [tuple(document[at : at + 13].tolist()) for at in range(len(document) - 12)]
        is_chosen = ngram_hashes(document) < sampled_below(len(files[0]))
        return [ngram for ngram, chosen in zip(whole, is_chosen, strict=True) if chosen]

    monkeypatch.setattr(ngrams, "MOST_NGRAMS", len(files[0]) // one_in)
    there = {ngram for document in other for ngram in ngrams_of(document)}
    found = [(sum(ngram in there for ngram in each), len(each)) for each in map(ngrams_of, own) if each]
    copied = sum(2 * here > of for here, of in found)
    assert 5 < copied < 30
    for read_tokens in (2**20, 50):
        monkeypatch.setattr(ngrams, "READ_TOKENS", read_tokens)
        assert find_overlap(files[0], files[1:], 0).model_dump() == {
            "documents": len(found),
            "copied_documents": copied,
            "ngrams": sum(of for _, of in found),
            "copied_ngrams": sum(here for here, _ in found),
        }


@pytest.mark.parametrize("target", ["out", "datasets/me/out", "datasets/me/../out2/x"])
def test_the_datasets_are_beside_the_output(tmp_path: Path, target: str) -> None:
    """They are in datasets/ for an output of one name, which the printed command moves there."""
    mine, options = Preparer(tmp_path), ["--train-tokenizer", 257, "--validation-fraction", 0]
    write_json_lines(tmp_path / "held.jsonl", HELD_OUT[:5])
    write_json_lines(tmp_path / "all.jsonl", [*HELD_OUT[:5], *OWN[:5]])
    mine.prepare("held.jsonl", "held", *options)
    assert "5 documents left out" in mine.run("all.jsonl", target, *options, "--exclude", "me/held:train")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("me/bench", "must be DATASET:SPLIT"),
        ("me/bench:", "must be DATASET:SPLIT"),
        ("me/nothing:test", "datasets/me/nothing: no such folder"),
        ("me/bench:tset", "must be DATASET:SPLIT"),
        ("me/bench:../bench/test", "must be DATASET:SPLIT"),
    ],
)
def test_what_is_not_there_is_one_line(preparer: Preparer, name: str, words: str) -> None:
    assert words in preparer.run("texts", "datasets/me/out", "--train-tokenizer", "300", "--exclude", name, status=2)
    assert not (preparer.path / "datasets" / "me" / "out").exists()
