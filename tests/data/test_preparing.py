"""Dataset folders made from text by the real command: their contents depend on nothing but the text and the options."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from harness.data.dataset import Dataset
from harness.data.tokenizers.bpe import train_bpe
from tests.support.isolation import SHIPPED_RUNS
from tests.support.launch import Workshop
from tests.support.preparing import (
    IN_ORDER,
    SMALL,
    WORDS,
    Preparer,
    content_of,
    documents_of,
    held_documents,
    plugin,
    splits_of,
    texts,
    tokenizer_of,
    write_json_lines,
)

WORDY = texts(3000)
# In a document, the special token's name is ordinary text.
DOCUMENTS = [*WORDY[:1500], "a <|endoftext|> b", "<|endoftext|>", *WORDY[1502:]]
MIB = 2**20
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at processes in /proc")


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    """Preparer with the file of a small tokenizer and eight files of documents, each with one empty document."""
    preparer = Preparer(tmp_path_factory.mktemp("preparing"))
    for number in range(8):
        documents = DOCUMENTS[number * 375 : (number + 1) * 375]
        write_json_lines(preparer.path / "texts" / f"{number}.jsonl", [*documents, ""])
    train_bpe(iter(WORDY), 300, preparer.path / "tokenizer.json")
    return preparer


@pytest.fixture(scope="module")
def plain(preparer: Preparer) -> Path:
    return preparer.prepare("texts", "plain")


def in_bytes(documents: list[str]) -> int:
    return sum(len(text.encode()) for text in documents)


# Splits ----------------------------------------------------------------------------------------------------------


def test_a_hundredth_of_the_text_is_validation(plain: Path) -> None:
    """The validation split has whole documents from all over the text; meta.json counts documents, tokens and bytes."""
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
    """The last file, a quarter of the text, is in the train split unless documents keep their order."""
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
    assert re.search(r"^one document has \d\d% of train's tokens", out, re.MULTILINE)
    [remark] = [line for line in out.splitlines() if line.startswith("validation is ")]
    assert remark.startswith(f"validation is {len(validation)} document")
    assert "(1.00% asked for)" in remark
    again = preparer.prepare("texts", "again", "--train-tokenizer", "280")
    assert documents_of(again, "validation") == validation, "whatever the tokenizer"
    in_order = preparer.run("texts", "in-order", *SMALL, *IN_ORDER)
    assert float(re.findall(r"^validation is 1 document with ([\d.]+)% of the text", in_order, re.MULTILINE)[0]) > 20


def test_of_many_documents_few_are_set_aside_for_the_splits(preparer: Preparer) -> None:
    """All documents that are not set aside are written directly to the train split in their order. The splits still get
    the shares asked for, and the size of batches changes nothing."""
    many = "import harness.data.preparation.splits as splits; splits.POOL_DOCUMENTS = 64\n"
    hurried = many + "import harness.data.preparation.encode as encode; encode.BATCH_CHARACTERS = 2000"
    options = ["--validation-fraction", "0.02", "--test-fraction", "0.01"]
    folder = preparer.prepare("texts", "many", *options, prelude=many)
    assert content_of(preparer.prepare("texts", "hurried", *options, prelude=hurried)) == content_of(folder)
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
    options = ["--validation-fraction", "0.1", "--test-fraction", "0.05"]
    folder = preparer.prepare("texts", "three", *IN_ORDER, *options)
    assert "split_order" not in json.loads((folder / "meta.json").read_text())["source"], "as in earlier versions"
    assert documents_of(folder, "train") == DOCUMENTS[:2550]
    assert documents_of(folder, "test") == DOCUMENTS[2550:2700]
    assert documents_of(folder, "validation") == DOCUMENTS[2700:]


def test_a_shuffle_is_a_permutation_decided_by_its_seed(preparer: Preparer) -> None:
    first, other = (preparer.prepare("texts", f"s{seed}", "--shuffle-seed", seed) for seed in (1, 2))
    again = preparer.prepare("texts", "s1-again", "--shuffle-seed", 1, "--workers", 3)
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


def test_the_number_of_workers_changes_no_byte(preparer: Preparer, plain: Path) -> None:
    assert content_of(preparer.prepare("texts", "workers", "--workers", 5)) == content_of(plain)


# Tokenizers ------------------------------------------------------------------------------------------------------


def test_a_tokenizer_file_travels_with_the_dataset(preparer: Preparer, plain: Path) -> None:
    folder = preparer.prepare("texts", "taken", "--tokenizer", plain / "tokenizer.json")
    assert (folder / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    assert splits_of(folder)["train"].tolist() == splits_of(plain)["train"].tolist()


def test_a_tokenizer_is_trained_on_what_is_not_held_out(preparer: Preparer) -> None:
    """Each document repeats one character of two bytes; characters of held-out documents get no token of their own."""
    write_json_lines(preparer.path / "odd.jsonl", [chr(0x410 + number) * 300 for number in range(20)])
    folder = preparer.prepare("odd.jsonl", "odd", "--validation-fraction", "0.5")
    tokenizer = tokenizer_of(folder)
    for split, tokens in (("train", 1), ("validation", 2)):
        documents = documents_of(folder, split)
        assert len(documents) == 10
        assert {len(tokenizer.encode(text[0])) for text in documents} == {tokens}


@pytest.mark.parametrize(("eot", "dtype"), [(400, np.uint16), (70_000, np.uint32)])
def test_another_encoding_of_tiktoken(tmp_path: Path, eot: int, dtype: type) -> None:
    """The encoding is added by a plugin of tiktoken; its ids have a gap before end-of-text, as those of cl100k."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [" quick", " brown"], eot))
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS[:300])
    folder = preparer.prepare("a.jsonl", "small", "--tokenizer", "small", "--workers", 2)
    assert splits_of(folder)["train"].dtype == dtype
    assert sorted(held_documents(folder)) == sorted(DOCUMENTS[:300])  # decoded without the plugin
    assert json.loads((folder / "meta.json").read_text())["vocab_size"] == eot + 1
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


def test_progress_in_a_log_is_lines(preparer: Preparer, tmp_path: Path) -> None:
    often = "import harness.data.preparation.command as command; command.SECONDS_BETWEEN_LINES = 0"
    out = Preparer(tmp_path).run(preparer.path / "texts", "out", *SMALL, prelude=often)
    assert re.search(r"^ *\d+% .*, 3.00k documents, .*k tokens, .* tokens/s$", out, re.MULTILINE), out


MOVE = "mkdir -p datasets/me && mv x datasets/me/x"


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
            done = Workshop(here).command(words[2], *words[3:], *(["--plan"] if "ddp_train" in step else []))
            assert done.status == 0, done
        else:
            subprocess.run(step, shell=True, cwd=here, check=True)
    model, train = (json.loads((here / "runs" / "mine" / f"{name}.json").read_text()) for name in ("model", "train"))
    assert (model["vocab_size"], train["min_train_tokens"], train["microbatch_size"]) == (300, -1, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "datasets/you/x"], '"nowhere": no input files here'),
        (["nowhere", "datasets/there/x"], '"nowhere": no input files here'),
        (
            ["texts", "datasets/x"],
            "datasets/x: has no owner, but training looks for DATASETS_DIR/owner/name; give data",
        ),
        (["texts", "out", "--tokenizer", "gpt5"], "no such file, and no encoding of tiktoken; there is cl100k_base"),
        (["texts"], "give INPUT and OUTPUT_DIR"),
        (["texts", "out", "--include", "*"], "--include belongs with a dataset on the Hub"),
        (["texts", "out", "--tokenizer", "gpt2", "--train-tokenizer", "300"], "give one of them"),
        (["texts", "out", "--validation-fraction", "0.5", "--test-fraction", "0.5"], "leave nothing for training"),
        (["texts", "out", "--push-to-hub", "mine"], "--push-to-hub mine: give owner/name"),
        (["texts", "out\udce9"], "not valid UTF-8"),
        (["texts", "out", "--tokenizer", "texts/0.jsonl"], "texts/0.jsonl: not a readable tokenizer file"),
        (["--verify", "texts/0.jsonl"], "texts/0.jsonl: is a file, not a folder"),
        (["texts", "out", "--public"], "--public belongs with --push-to-hub"),
        (["--verify", "nowhere"], "nowhere: no such folder"),
        (["--verify", "a", "--describe", "b"], "give INPUT and OUTPUT_DIR, or --verify DIR"),
        (["texts", "out", "--verify", "a"], "give INPUT and OUTPUT_DIR, or --verify DIR"),
        (["--describe", "texts", "--workers", "2"], "--workers: not with --describe"),
        (["texts", "out", "--from-bin", "--shuffle-seed", "1"], "--shuffle-seed: not with --from-bin"),
        (["texts", "out", "--token-dtype", "uint32"], "--token-dtype belongs with --from-bin"),
        (["texts", "texts/0.jsonl"], "is a file or a link"),
        (["texts", "texts/0.jsonl/out"], "cannot make this folder: Not a directory"),
        (["empty.jsonl", "out", "--tokenizer", "tokenizer.json"], "empty.jsonl: no documents with text"),
        (["nulls.jsonl", "out", "--tokenizer", "tokenizer.json"], "no documents with text (2 are empty)"),
    ],
)
def test_a_wrong_command_is_one_line_and_leaves_nothing(preparer: Preparer, arguments: list[str], message: str) -> None:
    """An owner's folder is not left behind if there was none, and not deleted if it was there already and empty."""
    (preparer.path / "datasets" / "there").mkdir(parents=True, exist_ok=True)
    for name, content in {"empty": "", "nulls": '{"text": ""}\n{"text": null}\n'}.items():
        (preparer.path / f"{name}.jsonl").write_text(content)
    before = sorted(preparer.path.rglob("*"))
    assert message in preparer.run(*arguments, status=2)
    assert sorted(preparer.path.rglob("*")) == before


def test_a_text_too_short_for_its_splits_is_one_line(preparer: Preparer, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "one.jsonl", ["a"])
    tokenizer = preparer.path / "tokenizer.json"
    line = Preparer(tmp_path).run("one.jsonl", "out", "--tokenizer", tokenizer, status=2)
    assert "validation would be empty: there are 1 documents" in line


# Interruption ----------------------------------------------------------------------------------------------------


KILLS = 6
# The command commits after each batch of a few documents and shuffles in several buckets, so that every phase occurs.
# It kills itself just before its file operation number {last}; `done` counts the operations. With 0 it runs to its end.
HURRIED_TO_ITS_END = """
import atexit, os, sys
import harness.data.preparation.encode as encode, harness.data.preparation.pipeline as pipeline
import harness.data.preparation.splits as splits, harness.data.preparation.stream as stream
splits.POOL_DOCUMENTS = 30
encode.BATCH_CHARACTERS, pipeline.COMMIT_TOKENS, stream.BUCKET_BYTES = 2000, 500, 4000
done = 0
def watch(event, arguments):
    global done
    writes = event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
        done += 1
        if done == {last}:
            os.kill(os.getpid(), 9)
sys.addaudithook(watch)
atexit.register(lambda: print("operations:", done, file=sys.stderr))
"""


@pytest.mark.slow
def test_killed_at_any_time_and_run_again_the_bytes_are_the_same(preparer: Preparer, tmp_path: Path) -> None:
    small = Preparer(tmp_path)
    tokenizer = preparer.path / "tokenizer.json"
    arguments = [preparer.path / "texts", "datasets/me/x", "--tokenizer", tokenizer, "--shuffle-seed", "5"]
    target = tmp_path / "datasets" / "me" / "x"
    straight = small.result(*arguments, prelude=HURRIED_TO_ITS_END.format(last=0))
    assert straight.status == 0, straight.stderr
    operations = int(straight.stderr.rpartition("operations: ")[2])
    assert operations > 100, "every phase has file operations"
    content = content_of(target)
    shutil.rmtree(target)
    partial, dice = target.parent / ".x.partial", random.Random(0)
    for kill in range(KILLS):
        last = dice.randrange(1, 2 * operations // KILLS)
        done = small.result(*arguments, prelude=HURRIED_TO_ITS_END.format(last=last))
        assert done.status in (0, -signal.SIGKILL), done.stderr
        assert kill > 0 or done.status == -signal.SIGKILL
        if target.exists():
            break
    else:
        small.run(*arguments, prelude=HURRIED_TO_ITS_END.format(last=0))
    assert content_of(target) == content
    if partial.exists():  # killed when the dataset was in its place already
        small.run(*arguments, status=2)
    assert not partial.exists()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Wait until the command has two tokenizing processes, and return their ids."""
    found: list[int] = []
    while len(found) < 2:
        assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@needs_proc
def test_a_worker_that_dies_is_one_line_and_the_work_goes_on(preparer: Preparer, plain: Path, tmp_path: Path) -> None:
    mine = Preparer(tmp_path)
    arguments = [preparer.path / "texts", "datasets/me/x", "--workers", 2, *SMALL]
    process = mine.start(*arguments)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a tokenizing process has ended by itself" in error
    assert len(error.splitlines()) == 1
    mine.run(*arguments)
    assert content_of(tmp_path / "datasets" / "me" / "x") == content_of(plain)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_worker_stumbles_over_is_one_line_and_the_work_goes_on(tmp_path: Path, workers: int) -> None:
    """The encoding's pattern tries all ways to match a long word of a's, and the library gives up after a million."""
    mine = Preparer(tmp_path, plugin(tmp_path, [], pattern=r"(?:a(?=a|$)|aa)+b|\W|\w+"))
    write_json_lines(tmp_path / "texts" / "0.jsonl", DOCUMENTS[:100])
    write_json_lines(tmp_path / "texts" / "1.jsonl", ["a" * 60])
    arguments = ["texts", "out", "--tokenizer", "small", *IN_ORDER, "--workers", workers]
    line = mine.run(*arguments, status=1)
    assert "tokenizing failed: ValueError: Regex error while tokenizing" in line
    assert "run the same command again" in line
    write_json_lines(tmp_path / "texts" / "1.jsonl", ["a" * 6])
    mine.run(*arguments)
    assert held_documents(tmp_path / "out") == [*DOCUMENTS[:100], "a" * 6]


@needs_proc
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_worker_stays_behind(preparer: Preparer, tmp_path: Path, signal_number: signal.Signals) -> None:
    """SIGINT is sent to the whole process group, as by Ctrl-C, and one line is printed nevertheless."""
    process = Preparer(tmp_path).start(preparer.path / "texts", "out", *SMALL, "--workers", 2, start_new_session=True)
    workers = workers_of(process)
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)
    else:
        process.send_signal(signal_number)
    _, error = process.communicate(timeout=120)  # returns when no process has standard error open
    assert process.returncode in {-signal_number, 130}
    if signal_number == signal.SIGINT:
        assert error == "stopped by SIGINT; to continue, run the same command again\n"
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.fixture
def begun(preparer: Preparer, tmp_path: Path) -> Preparer:
    """Preparer for a folder of texts whose second file is broken."""
    write_json_lines(tmp_path / "texts" / "a.jsonl", DOCUMENTS[:1000])
    (tmp_path / "texts" / "b.jsonl").write_text("broken\n")
    shutil.copy(preparer.path / "tokenizer.json", tmp_path)
    return Preparer(tmp_path)


BEGIN = ["texts", "out", "--tokenizer", "tokenizer.json"]


def test_a_mended_file_goes_on_after_the_others(begun: Preparer) -> None:
    assert "b.jsonl: line 1: not JSON" in begun.run(*BEGIN, status=1)
    write_json_lines(begun.path / "texts" / "b.jsonl", DOCUMENTS[1000:1100])
    begun.run(*BEGIN)
    assert sorted(held_documents(begun.path / "out")) == sorted(DOCUMENTS[:1100])


def test_interrupted_work_with_other_options_is_refused(begun: Preparer) -> None:
    begun.run(*BEGIN, status=1)
    line = begun.run(*BEGIN, "--shuffle-seed", "1", status=2)
    assert "unfinished work with other options (shuffle_seed: None, not 1)" in line
    (begun.path / "texts" / "b.jsonl").unlink()
    begun.run(*BEGIN, "--shuffle-seed", "1", "--restart")
    assert len(documents_of(begun.path / "out", "train")) > 980


# Written by version 0.1.0 for the input and the options of the test below.
JOURNAL_OF_AN_EARLIER_VERSION = (
    r'{"options": {"input": "texts", "text_column": "text", "document_separator": "\\n\\n", "replace_invalid": "any", '
    r'"include": [], "tokenizer": "tokenizer.json", "train_tokenizer": null, "validation_fraction": 0.01, '
    r'"test_fraction": 0.1, "shuffle_seed": 5, "tokenizer_file_sha256": '
    r'"2833200f72a5a47b76ae324a2a706462aca7392739ecbde59065bafe9f9f1369"}, "phase": "reading", "here": {"file": 1, '
    r'"documents": 0, "empty": 0, "size": {"documents": 1000, "tokens": 94456}}, "file_start": {"file": 1, '
    r'"documents": 0, "empty": 0, "size": {"documents": 1000, "tokens": 94456}}, "splits": []}'
)


def test_interrupted_work_of_an_earlier_version_goes_on(begun: Preparer) -> None:
    """The work continues in the given order of documents, the only order of that version."""
    options = ["--shuffle-seed", 5, "--test-fraction", 0.1, "--document-separator", r"\n\n", "--replace-invalid"]
    begun.run(*BEGIN, *IN_ORDER, *options, status=1)
    for leftover in (begun.path / ".out.partial").glob("pool.*"):
        leftover.unlink()
    (begun.path / ".out.partial" / "journal.json").write_text(JOURNAL_OF_AN_EARLIER_VERSION)
    write_json_lines(begun.path / "texts" / "b.jsonl", DOCUMENTS[1000:1100])
    begun.run(*BEGIN, *IN_ORDER, *options)
    documents = [text for split in splits_of(begun.path / "out") for text in documents_of(begun.path / "out", split)]
    assert sorted(documents) == sorted(DOCUMENTS[:1100])


def test_two_at_once_on_one_target(preparer: Preparer, tmp_path: Path) -> None:
    mine = Preparer(tmp_path)
    first = mine.fork(preparer.path / "texts", "out", *SMALL)
    lock = tmp_path / ".out.partial" / ".lock"
    while not lock.exists() or not lock.read_text():
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    line = mine.run(preparer.path / "texts", "out", *SMALL, status=2)
    os.kill(first.pid, signal.SIGCONT)
    assert "is being made by another process (" in line
    assert f"pid {first.pid}" in line
    assert first.wait(timeout=60) == 0


def test_what_has_changed_before_any_work_was_kept_is_taken_anew(tmp_path: Path) -> None:
    """A command that was killed before it encoded anything reads the text again and trains its tokenizer again."""
    mine = Preparer(tmp_path)
    write_json_lines(tmp_path / "a.jsonl", ["aaa " * 99, *DOCUMENTS[:99]])
    killed = "import os, harness.data.preparation.command as command\n"
    killed += "command.encoder_processes = lambda *_: os.kill(os.getpid(), 9)"
    assert mine.result("a.jsonl", "x", *SMALL, prelude=killed).status == -signal.SIGKILL
    assert (tmp_path / ".x.partial" / "dataset" / "tokenizer.json").exists()
    write_json_lines(tmp_path / "a.jsonl", DOCUMENTS[:200])
    for target in ("x", "y"):
        mine.run("a.jsonl", target, *SMALL)
    assert content_of(tmp_path / "x") == content_of(tmp_path / "y")


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
    """The text that the dataset would be made from is not deleted."""
    write_json_lines(tmp_path / place / "a.jsonl", DOCUMENTS[:100])
    before = (tmp_path / place / "a.jsonl").read_bytes()
    line = Preparer(tmp_path).run(place, "photos", *SMALL, "--overwrite", status=2)
    assert "which is no part of a dataset and would be deleted; move it away" in line
    assert (tmp_path / place / "a.jsonl").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


@pytest.mark.parametrize("name", [".x.partial", ".x.replaced"])
def test_a_hidden_folder_of_somebody_else_is_kept(preparer: Preparer, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious.txt").write_text("mine")
    mine, arguments = Preparer(tmp_path), [preparer.path / "texts", tmp_path / "x", *SMALL]
    if name == ".x.partial":
        assert "holds something else; move it away" in mine.run(*arguments, status=2)
        mine.run("nowhere", tmp_path / "x", status=2)
    else:
        mine.run(*arguments)
    assert (tmp_path / name / "precious.txt").read_text() == "mine"


# Kills the command while it moves the dataset into its place, before the n-th rename or deletion of a folder.
STOP_AT = """
import os, sys
left = [{stop}]
def watch(event, arguments):
    path = str(arguments[0]) if arguments else ""
    if event in ("os.rename", "shutil.rmtree", "os.rmdir") and path.startswith({folder!r}):
        if os.path.basename(path) in ("dataset", "x", ".x.partial", ".x.replaced"):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), 9)
sys.addaudithook(watch)
"""


def test_killed_while_it_takes_its_place(preparer: Preparer, tmp_path: Path) -> None:
    """Killed at any step of replacing a dataset, the command keeps the old or the new one; the next run cleans up."""
    mine, tokenizer = Preparer(tmp_path), ["--tokenizer", preparer.path / "tokenizer.json"]
    for name, documents in (("old", DOCUMENTS[:100]), ("new", DOCUMENTS[100:200])):
        write_json_lines(tmp_path / f"{name}.jsonl", documents)
    old, new = (content_of(mine.prepare(f"{name}.jsonl", name, *tokenizer)) for name in ("old", "new"))
    (tmp_path / "place").mkdir()
    target = (tmp_path / "datasets" / "me" / "old").rename(tmp_path / "place" / "x")
    arguments = ["new.jsonl", target, *tokenizer, "--overwrite"]
    for stop in range(10):
        done = mine.result(*arguments, prelude=STOP_AT.format(stop=stop, folder=str(target.parent)))
        if done.status == 0:
            break
        mine.run("nowhere", target, "--restart", status=2)  # restores the dataset, old or new
        assert content_of(target) in (old, new)
        mine.run(*arguments)
        assert content_of(target) == new
        assert [path.name for path in target.parent.iterdir()] == ["x"]
    assert done.status == 0, done
    assert stop > 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_is_one_line_and_the_work_goes_on_with_room(preparer: Preparer, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)]
    if os.spawnvp(os.P_WAIT, mount[0], mount):
        pytest.skip("no mounts here")
    try:
        arguments = [preparer.path / "texts", disk / "out", *SMALL]
        line = preparer.run(*arguments, status=1)
        assert "No space left" in line
        assert str(disk) in line
        assert not (disk / "out").exists()
        os.spawnvp(os.P_WAIT, "mount", ["mount", "-o", "remount,size=20m", str(disk)])
        preparer.run(*arguments)
        assert len(documents_of(disk / "out", "train")) > 2900
    finally:
        os.spawnvp(os.P_WAIT, "umount", ["umount", str(disk)])


# Memory ----------------------------------------------------------------------------------------------------------


def peaks(preparer: Preparer, *arguments: object) -> tuple[int, int]:
    """Return the peak resident set, in MiB, of the command's process and the largest peak of its workers."""
    process = preparer.start(*arguments)
    own, workers = 0, 0
    while process.poll() is None:
        own = max(own, _high_water_mark(process.pid))
        with suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            workers = max([workers, *(_high_water_mark(int(pid)) for pid in children)])
        time.sleep(0.01)
    assert process.returncode == 0, process.stderr.read() if process.stderr else ""
    return own, workers


def _high_water_mark(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024
    return 0


@pytest.mark.slow
@needs_proc
def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Peaks for a text, for eight times the text, and for one document of 50 MiB are all far below 1 GiB."""
    preparer = Preparer(tmp_path, plugin(tmp_path, [f" {word}" for word in WORDS if word.isalpha()]))
    documents = texts(6000, longest=400)
    for copies in (1, 8):
        for number in range(copies):
            write_json_lines(tmp_path / f"{copies}" / f"{number}.jsonl", documents)
    options = ["--tokenizer", "small", "--workers", 2, "--shuffle-seed", 1]
    one, eight = (peaks(preparer, f"{copies}", f"out-{copies}", *options) for copies in (1, 8))
    assert (tmp_path / "out-8" / "train.safetensors").stat().st_size > 30 * MIB
    assert eight[0] < one[0] + 64
    write_json_lines(tmp_path / "huge.jsonl", [" ".join(documents * 8), "last"])
    assert (tmp_path / "huge.jsonl").stat().st_size > 50 * MIB
    one_document = peaks(preparer, "huge.jsonl", "out-huge", *options, "--validation-fraction", "0.5")
    print(f"peaks of the command and of a worker in MiB: 1x {one}, 8x {eight}, one huge document {one_document}")
    for own, worker in (one, eight, one_document):
        assert 50 < own < 640
        assert 25 < worker < 256
