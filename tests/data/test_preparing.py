"""Dataset folders made from text by the real command: their contents depend on nothing but the text and the options."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from harness.data.dataset import Dataset
from harness.data.tokenizers import load_tokenizer
from tests.support.in_process import InProcess
from tests.support.isolation import SHIPPED_RUNS
from tests.support.preparing import (
    DOCUMENTS,
    IN_ORDER,
    SMALL,
    Preparer,
    content_of,
    documents_of,
    held_documents,
    plugin,
    splits_of,
    texts,
    tokenizer_of,
    with_texts,
    write_json_lines,
)


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    return with_texts(tmp_path_factory.mktemp("preparing"))


def in_bytes(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


def test_further_special_tokens(preparer: Preparer, tmp_path: Path) -> None:
    """They have the ids after end-of-text, and their names inside a text are ordinary text."""
    mine = Preparer(tmp_path)
    write_json_lines(tmp_path / "a.jsonl", documents := [*DOCUMENTS[:300], "said <|user|> to <|bot|>"])
    given = ["--train-tokenizer", "300", "--special-token", "<|user|>", "--special-token", "<|bot|>"]
    made = mine.prepare("a.jsonl", "a", *given)
    tokenizer = tokenizer_of(made)
    assert sorted(held_documents(made)) == sorted(documents)
    assert (tokenizer.vocab_size, tokenizer.token_byte_lengths()[:3].tolist()) == (300, [0, 0, 0])
    assert [tokenizer.decode([token]) for token in (1, 2)] == ["<|user|>", "<|bot|>"]
    assert all(((tokens < 1) | (tokens > 2)).all() for tokens in splits_of(made).values())
    for arguments, words in (
        (["--special-token", "<|user|>"], "--special-token belongs with --train-tokenizer"),
        ([*given, "--special-token", "<|bot|>"], "give each name once"),
        (["--train-tokenizer", "258", *given[2:]], "must be at least 259"),
    ):
        assert words in mine.run("a.jsonl", "datasets/me/b", *arguments, status=2)


@pytest.mark.parametrize("name", ["###", "User", "a", "é"])
def test_a_special_token_that_text_would_be_encoded_as_is_refused(tmp_path: Path, name: str) -> None:
    """The tokenizer learns the text's common words, and always has each byte, as a is one and é stands for one."""
    mine = Preparer(tmp_path)
    write_json_lines(tmp_path / "a.jsonl", ["###\nUser asks for 日本 and waits\n" * 50] * 5)
    given = ["a.jsonl", "datasets/me/a", "--train-tokenizer", "275", "--special-token"]
    line = mine.run(*given, name, status=2)
    assert f"--special-token {name}: is also an ordinary token" in line
    mine.run(*given, f"<|{name}|>")
    mine.run("--verify", "datasets/me/a")


@pytest.mark.parametrize("option", ["--max-documents", "--max-tokens"])
@pytest.mark.parametrize("share", [0.02, 0.4, 2.0])
def test_the_beginning_of_a_text(
    preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, share: float
) -> None:
    """A limit makes the dataset of the text that ends there, to the byte. The first document after which --max-tokens
    is reached is the last one."""
    mine, given = Preparer(tmp_path), ["--tokenizer", preparer.path / "tokenizer.json"]
    write_json_lines(tmp_path / "all.jsonl", some := [*DOCUMENTS[:200], "", *DOCUMENTS[200:400]])
    tokenizer = load_tokenizer(preparer.path / "tokenizer.json")
    ends = np.cumsum([len(tokenizer.encode(text)) + 1 for text in some if text])
    count = min(400, max(1, int(share * 400)))
    short = [text for text in some if text][:count]
    write_json_lines(tmp_path / "short.jsonl", short)
    expected = mine.prepare("short.jsonl", "short", *given)
    encode = "harness.data.preparation.encode"
    monkeypatch.setattr(f"{encode}.LONGEST_PIECE", 40)
    monkeypatch.setattr(f"{encode}.CUT_SEARCH", 20)
    for characters in (300, 2**20):  # in a batch
        monkeypatch.setattr(f"{encode}.BATCH_CHARACTERS", characters)
        limit = int(share * 400)
        if option == "--max-tokens":
            limit = int(ends[count - 1]) - (characters % 3) if share < 1 else 10**9
        limited = mine.prepare("all.jsonl", f"limited{characters}", *given, option, limit)
        for split, tokens in splits_of(expected).items():
            assert (splits_of(limited)[split] == tokens).all()
        counts, own = (json.loads((folder / "meta.json").read_text()) for folder in (expected, limited))
        assert own["splits"] == counts["splits"]
        assert own["source"][option[2:].replace("-", "_")] == limit


# Splits ----------------------------------------------------------------------------------------------------------


def test_a_hundredth_of_the_text_is_validation(preparer: Preparer) -> None:
    """The validation split has whole documents from all over the text; meta.json counts documents, tokens and bytes."""
    plain = preparer.prepare("texts", "plain")
    train, validation = (documents_of(plain, split) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(DOCUMENTS)
    assert in_bytes(validation) == pytest.approx(0.01 * in_bytes(DOCUMENTS), abs=max(map(len, DOCUMENTS)) / 2)
    places = [DOCUMENTS.index(text) for text in validation]
    assert min(places) < 1000
    assert max(places) > 2000
    assert places != sorted(places)
    meta, tokens = json.loads((plain / "meta.json").read_text()), splits_of(plain)["train"]
    assert (meta["vocab_size"], meta["token_dtype"], meta["source"]["empty_documents"]) == (300, "uint16", 8)
    counts = meta["splits"]["train"]
    assert (counts["documents"], counts["tokens"], counts["bytes"]) == (len(train), len(tokens), in_bytes(train))
    tokenizer = tokenizer_of(plain)
    assert tokenizer.token_byte_lengths()[tokens].sum() == counts["bytes"]
    assert tokenizer.eot_token not in tokenizer.encode(DOCUMENTS[1500])
    assert Dataset.at(plain).bytes_per_token("train") == counts["bytes"] / counts["tokens"]


def test_one_long_document_is_not_all_of_validation(tmp_path: Path) -> None:
    """A long document is in the train split and does not become the validation split. It is the last file and a quarter
    of the text. It is the validation split only if documents keep their order."""
    preparer = Preparer(tmp_path)
    (tmp_path / "texts").mkdir()
    long = "\n".join(texts(45))
    for number, text in enumerate([*DOCUMENTS[:131], long]):
        (tmp_path / "texts" / f"{number:03}.txt").write_text(text, newline="")
    target = tmp_path / "datasets" / "me" / "folder"
    out = preparer.run("texts", target, *SMALL)
    train, validation = (documents_of(target, split) for split in ("train", "validation"))
    assert long in train
    assert sorted(train + validation) == sorted([*DOCUMENTS[:131], long])
    assert in_bytes(validation) / in_bytes(train + validation) == pytest.approx(0.01, abs=0.005)
    assert re.search(r"^one document has \d\d% of the train split's tokens", out, re.MULTILINE)
    [remark] = [line for line in out.splitlines() if line.startswith("validation is ")]
    assert remark.startswith(f"validation is {len(validation)} document")
    assert "(1.00% asked for)" in remark
    again = preparer.prepare("texts", "again", "--train-tokenizer", "280")
    assert documents_of(again, "validation") == validation, "whatever the tokenizer"
    in_order = preparer.run("texts", "in-order", *SMALL, *IN_ORDER)
    assert float(re.findall(r"^validation is 1 document with ([\d.]+)% of the text", in_order, re.MULTILINE)[0]) > 20
    half = preparer.run("texts", "half", *SMALL, *IN_ORDER, "--validation-fraction", "0.5")
    assert "validation is" not in half, "it is half of the documents, though more than half of the text"


@pytest.mark.slow
def test_of_many_documents_few_are_set_aside_for_the_splits(
    preparer: Preparer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All documents that are not set aside are written directly to the train split in their order. The splits still get
    the shares asked for, and the size of batches changes nothing."""
    monkeypatch.setattr("harness.data.preparation.splits.POOL_DOCUMENTS", 64)
    options = ["--validation-fraction", "0.02", "--test-fraction", "0.01"]
    folder = preparer.prepare("texts", "many", *options)
    monkeypatch.setattr("harness.data.preparation.encode.BATCH_CHARACTERS", 2000)
    assert content_of(preparer.prepare("texts", "hurried", *options)) == content_of(folder)
    documents = {name: documents_of(folder, name) for name in ("train", "validation", "test")}
    assert sorted(itertools.chain(*documents.values())) == sorted(DOCUMENTS)
    number = {text: place for place, text in enumerate(DOCUMENTS)}
    places = [number[text] for text in documents["train"]]
    assert places[:2000] == sorted(places[:2000])
    assert places != sorted(places)
    shares = {name: in_bytes(each) / in_bytes(DOCUMENTS) for name, each in documents.items()}
    assert shares == pytest.approx({"train": 0.97, "validation": 0.02, "test": 0.01}, abs=0.0005)
    meta = json.loads((folder / "meta.json").read_text())["splits"]
    assert {name: (each["documents"], each["bytes"]) for name, each in meta.items()} == {
        name: (len(each), in_bytes(each)) for name, each in documents.items()
    }


def test_in_the_given_order_the_last_documents_are_held_out(preparer: Preparer) -> None:
    folder = preparer.prepare("texts", "three", *IN_ORDER, "--validation-fraction", "0.1", "--test-fraction", "0.05")
    assert "split_order" not in json.loads((folder / "meta.json").read_text())["source"], "as in earlier versions"
    assert documents_of(folder, "train") == DOCUMENTS[:2550]
    assert documents_of(folder, "test") == DOCUMENTS[2550:2700]
    assert documents_of(folder, "validation") == DOCUMENTS[2700:]


@pytest.mark.slow
def test_a_shuffle_is_a_permutation_decided_by_its_seed(preparer: Preparer) -> None:
    """Equal seeds give equal bytes, whatever the number of workers. Another seed gives another order, and no order is
    correlated with that of the input."""
    first, other = (preparer.prepare("texts", f"s{seed}", "--shuffle-seed", seed) for seed in (1, 2))
    again = preparer.prepare("texts", "s1-again", "--shuffle-seed", 1, "--workers", 2)
    assert content_of(again) == content_of(first)
    assert held_documents(first) != held_documents(other)
    places = {text: place for place, text in enumerate(DOCUMENTS)}
    for folder in (first, other):
        ranks = np.array([places[text] for text in held_documents(folder)])
        assert sorted(ranks) == list(range(3000))
        # Spearman's correlation with the old order has a standard deviation of 1/sqrt(n - 1).
        assert abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) < 4 / np.sqrt(len(ranks))


def test_one_book_is_cut_at_a_line(preparer: Preparer) -> None:
    book = "\n".join(texts(2000))
    (preparer.path / "book.txt").write_text(book, newline="")
    folder = preparer.prepare("book.txt", "book", "--test-fraction", "0.02")
    tokenizer, splits = tokenizer_of(folder), splits_of(folder)
    parts = [tokenizer.decode(splits[name].tolist()) for name in ("train", "test", "validation")]
    assert "".join(parts) == book + "<|endoftext|>"
    assert parts[0].endswith("\n")
    assert parts[1].endswith("\n")
    total = sum(map(len, splits.values()))
    assert [len(splits[name]) / total for name in ("test", "validation")] == pytest.approx([0.02, 0.01], rel=0.1)
    preparer.run("--verify", folder)


def test_the_end_of_one_book_is_the_same_whatever_the_tokenizer(tmp_path: Path) -> None:
    """Its last tokens have other numbers of bytes than the rest. In the given order, shares are of the tokens, as in
    earlier versions."""
    mine, ends = Preparer(tmp_path), []
    book = "".join(f"{text}\n" for text in [*texts(300, longest=20), *["日本の本"] * 800])
    (tmp_path / "book.txt").write_text(book, newline="")
    for size in (257, 300, 400):
        given = ["--train-tokenizer", size, "--test-fraction", 0.02]
        folder = mine.prepare("book.txt", f"book{size}", *given)
        test = tokenizer_of(folder).decode(splits_of(folder)["test"].tolist())
        ends.append([test, *documents_of(folder, "validation")])
        splits = splits_of(mine.prepare("book.txt", f"given{size}", *given, *IN_ORDER))
        wanted = sum(map(len, splits.values())) * np.array([0.02, 0.01])
        assert [len(splits[name]) for name in ("test", "validation")] == pytest.approx(wanted, abs=14)
    assert ends[0] == ends[1] == ends[2]
    shares = [len(text.encode()) / len(book.encode()) for text in ends[0]]
    assert shares == pytest.approx([0.02, 0.01], abs=13 / len(book.encode()))


@pytest.mark.parametrize(
    ("text", "validation"),
    [
        ("wxyz\n" * 220, "wxyz\n" * 2),  # the boundary is a line's beginning
        ("wxyz\n" * 196 + "abcdefghijklmno\n\n\n", "jklmno\n\n\n"),  # no text follows the next line's beginning
        ("x" * 990 + "\n" * 10, "\n" * 9),  # there is no text to keep
        ("word " * 200 + "\n", "rd word \n"),  # no other line begins
    ],
)
def test_a_split_keeps_a_line_that_begins_at_the_boundary_and_its_text(
    tmp_path: Path, text: str, validation: str
) -> None:
    (tmp_path / "lines.txt").write_text(text)
    folder = Preparer(tmp_path).prepare("lines.txt", "lines", "--train-tokenizer", "257")
    made = tokenizer_of(folder).decode(splits_of(folder)["validation"].tolist())
    assert made == f"{validation}<|endoftext|>"


# Tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_trained_on_what_is_not_held_out(preparer: Preparer) -> None:
    """Each document repeats one character of two bytes; characters of held-out documents get no token of their own."""
    write_json_lines(preparer.path / "odd.jsonl", [chr(0x410 + number) * 300 for number in range(20)])
    folder = preparer.prepare("odd.jsonl", "odd", "--validation-fraction", "0.5")
    tokenizer = tokenizer_of(folder)
    for split, tokens in (("train", 1), ("validation", 2)):
        documents = documents_of(folder, split)
        assert len(documents) == 10
        assert {len(tokenizer.encode(text[0])) for text in documents} == {tokens}


def test_another_encoding_of_tiktoken(tmp_path: Path) -> None:
    """The encoding is added by a plugin of tiktoken; its ids have a gap before end-of-text, as those of cl100k."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [" quick", " brown"], eot=70_000))
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS[:300])
    folder = preparer.prepare("a.jsonl", "small", "--tokenizer", "small")
    assert splits_of(folder)["train"].dtype == np.uint32
    assert sorted(held_documents(folder)) == sorted(DOCUMENTS[:300])  # decoded without the plugin
    assert json.loads((folder / "meta.json").read_text())["vocab_size"] == 70_001
    preparer.run("--verify", folder)


def test_gpt2_without_a_cache_and_without_a_network(preparer: Preparer, tmp_path: Path) -> None:
    offline = Preparer(preparer.path, {"TIKTOKEN_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"})
    line = offline.run("texts", "datasets/me/none", status=2)
    assert f"TIKTOKEN_CACHE_DIR={tmp_path}" in line
    assert line.endswith("; or give --train-tokenizer 4096, which needs no network")


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
def test_gpt2_is_what_tiktoken_says(preparer: Preparer) -> None:
    import tiktoken

    folder = preparer.prepare("texts", "gpt2", "--tokenizer", "gpt2", *IN_ORDER)
    encoding = tiktoken.get_encoding("gpt2")
    expected = [token for text in DOCUMENTS[:-30] for token in [*encoding.encode_ordinary(text), 50256]]
    assert splits_of(folder)["train"].tolist() == expected
    long = " ".join(texts(60_000))
    (preparer.path / "long.txt").write_text(long, newline="")
    splits = splits_of(preparer.prepare("long.txt", "long", "--tokenizer", "gpt2"))
    assert [*splits["train"], *splits["validation"]] == [*encoding.encode_ordinary(long), 50256]


# Output and errors -----------------------------------------------------------------------------------------------


def test_progress_in_a_log_is_lines(preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.data.preparation.command.SECONDS_BETWEEN_LINES", 0)
    out = Preparer(tmp_path).run(preparer.path / "texts", "out", *SMALL)
    assert re.search(r"^ *\d+% .*, 3.00k documents, .*k tokens, .* tokens/s$", out, re.MULTILINE), out
    (tmp_path / "few.txt").write_text("one\n\ntwo\n\nthree\n\nfour\n")
    out = Preparer(tmp_path).run(
        "few.txt", "few", "--train-tokenizer", "257", "--validation-fraction", "0.3", "--document-separator", r"\n\n"
    )
    assert ", 4 documents, " in out


MOVE = "mkdir -p datasets/me && mv x datasets/me/x"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("datasets/me/x", ["--set dataset=me/x", "uv run ddp_train.py mine datasets"]),
        ("me/x", ["--set dataset=me/x --datasets-dir .", "uv run ddp_train.py mine ."]),
        ("x", [MOVE, "--set dataset=me/x", "uv run ddp_train.py mine datasets"]),
        ("../../x", ["--set dataset=there/x --datasets-dir {above}", "uv run ddp_train.py mine {above}"]),
    ],
)
def test_the_commands_printed_at_the_end_train(
    tmp_path: Path, preparer: Preparer, target: str, steps: list[str]
) -> None:
    """The printed commands make a run that fits the dataset, although it has far fewer tokens than the quickstart's and
    another vocabulary."""
    here = tmp_path / "there" / "a folder" / "here"
    shutil.copytree(SHIPPED_RUNS / "quickstart", here / "runs" / "quickstart")
    out = Preparer(here).run(preparer.path / "texts", target, "--tokenizer", preparer.path / "tokenizer.json")
    printed = [line.strip() for line in out.partition("Next:\n")[2].splitlines()]
    steps = [step.format(above=shlex.quote(str(tmp_path))) for step in steps]
    steps[-2] = f"uv run derive_run.py quickstart mine {steps[-2]}"
    assert printed == steps
    for step in printed:
        words = shlex.split(step)
        if words[:2] == ["uv", "run"]:
            done = InProcess(here).command(words[2], *words[3:], *(["--plan"] if "ddp_train" in step else []))
            assert done.status == 0, done
        else:
            subprocess.run(step, shell=True, cwd=here, check=True)
    model, train = (json.loads((here / "runs" / "mine" / f"{name}.json").read_text()) for name in ("model", "train"))
    assert (model["vocab_size"], train["min_train_tokens"], train["microbatch_size"]) == (300, -1, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "datasets/you/x"], '"nowhere": names no input files'),
        (["nowhere", "datasets/there/x"], '"nowhere": names no input files'),
        (["texts", "datasets/x"], "datasets/x: has no owner, but training looks for DATASETS_DIR/owner/name; give "),
        (["texts", "out", "--tokenizer", "gpt5"], "gpt5: neither a file (tokenizer.json) nor an encoding of tiktoken"),
        (["texts"], "give INPUT and OUTPUT_DIR"),
        (["texts", "out", "--include", "*"], "--include needs a Hub dataset as the only INPUT"),
        (["texts", "out", "--tokenizer", "gpt2", "--train-tokenizer", "300"], "give at most one of them"),
        (["texts", "out", "--validation-fraction", "0.5", "--test-fraction", "0.5"], "leave nothing for training"),
        (["texts", "out", "--push-to-hub", "mine"], "--push-to-hub mine: give owner/name"),
        (["texts", "out\udce9"], "not valid UTF-8"),
        (["texts", "out", "--tokenizer", "texts/0.jsonl"], "texts/0.jsonl: not a readable tokenizer file"),
        (["--verify", "texts/0.jsonl"], "texts/0.jsonl: is a file, not a folder"),
        (["texts", "out", "--public"], "--public belongs with --push-to-hub"),
        (["--verify", "nowhere"], "nowhere: no such folder"),
        (["--verify", "a", "--describe", "b"], "give INPUT and OUTPUT_DIR, or --verify DIR"),
        (["texts", "out", "--verify", "a"], "give INPUT and OUTPUT_DIR, or --verify DIR"),
        (["--describe", "texts", "--workers", "2"], "--workers: cannot be combined with --describe"),
        (["texts", "out", "--from-bin", "--shuffle-seed", "1"], "--shuffle-seed: cannot be combined with --from-bin"),
        (["texts", "out", "--token-dtype", "uint32"], "--token-dtype belongs with --from-bin"),
        (["texts", "texts/0.jsonl"], "is a file or a link"),
        (["texts", "texts/0.jsonl/out"], "cannot make this folder: Not a directory"),
        (["empty.jsonl", "out", "--tokenizer", "tokenizer.json"], "empty.jsonl: no documents with text"),
        (["nulls.jsonl", "out", "--tokenizer", "tokenizer.json"], "no documents with text (2 are empty)"),
        (["nulls.jsonl", "out", "--train-tokenizer", "300"], "nulls.jsonl: no documents with text to train a"),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(preparer: Preparer, arguments: list[str], message: str) -> None:
    """A wrong command changes no file or folder. The folder of a dataset's owner contains the dataset's folder. The
    owner's folder is not left behind if it did not exist before, and not deleted if it was empty before."""
    (preparer.path / "datasets" / "there").mkdir(parents=True, exist_ok=True)
    for name, content in {"empty": "", "nulls": '{"text": ""}\n{"text": null}\n'}.items():
        (preparer.path / f"{name}.jsonl").write_text(content)
    before = sorted(preparer.path.rglob("*"))
    assert message in preparer.run(*arguments, status=2)
    assert sorted(preparer.path.rglob("*")) == before


@pytest.mark.parametrize(
    ("fraction", "split", "remedy"),
    [("0.01", "validation", "a larger --validation-fraction"), ("0.99", "train", "smaller fractions for other splits")],
)
@pytest.mark.parametrize("more", ["text", "share"])
def test_a_text_too_short_for_its_splits_is_one_line(
    preparer: Preparer, tmp_path: Path, fraction: str, split: str, remedy: str, more: str
) -> None:
    """The error line names two remedies, and each of them works."""
    mine = Preparer(tmp_path)
    arguments = ["texts", "out", "--tokenizer", preparer.path / "tokenizer.json", "--validation-fraction"]
    write_json_lines(tmp_path / "texts" / "a.jsonl", ["hello"])
    line = mine.run(*arguments, fraction, status=2)
    assert f"{split} would be empty: there are 5 tokens, 1 document; with --restart, give more" in line
    assert line.endswith(f" text, or {remedy}")
    if more == "text":
        write_json_lines(tmp_path / "texts" / "b.jsonl", DOCUMENTS[:200])
    mine.run(*arguments, "0.5" if more == "share" else fraction, "--restart")


# What is in the way ----------------------------------------------------------------------------------------------


def test_an_output_that_exists_is_kept_unless_overwritten(preparer: Preparer, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS[:100])
    mine = Preparer(tmp_path)
    target = mine.prepare("a.jsonl", "x")
    before = content_of(target)
    arguments = [preparer.path / "texts", target, *SMALL]
    assert "exists; name another folder, or replace it with --overwrite" in mine.run(*arguments, status=2)
    (tmp_path / "bad.jsonl").write_text("bad\n")
    mine.run("bad.jsonl", target, *SMALL, "--overwrite", status=1)
    assert content_of(target) == before
    mine.run(*arguments, "--overwrite", "--restart")
    assert len(documents_of(target, "train")) > 2900
    assert [path.name for path in target.parent.iterdir()] == ["x"]


@pytest.mark.parametrize("place", ["photos", "photos/raw"])
def test_overwriting_deletes_no_file_that_is_not_of_a_dataset(tmp_path: Path, place: str) -> None:
    """--overwrite is refused if it would delete a file that is no part of a dataset. Here the file is the text that the
    dataset would be made from."""
    write_json_lines(tmp_path / place / "a.jsonl", DOCUMENTS[:100])
    before = (tmp_path / place / "a.jsonl").read_bytes()
    (tmp_path / "photos" / "my-tokenizer.json").write_text("{}")
    line = Preparer(tmp_path).run(place, "photos", *SMALL, "--overwrite", status=2)
    assert "not part of a dataset and would be deleted" in line
    assert "my-tokenizer.json" in line
    assert (tmp_path / place / "a.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("name", [".x.partial", ".x.replaced"])
def test_a_hidden_folder_of_somebody_else_is_kept(preparer: Preparer, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious.txt").write_text("mine")
    mine, arguments = Preparer(tmp_path), [preparer.path / "texts", tmp_path / "x", *SMALL]
    if name == ".x.partial":
        assert "holds files of something else; move it away" in mine.run(*arguments, status=2)
        mine.run("nowhere", tmp_path / "x", status=2)
    else:
        mine.run(*arguments)
    assert (tmp_path / name / "precious.txt").read_text() == "mine"
