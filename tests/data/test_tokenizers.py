"""Tokenizers lose no text, count bytes exactly, and fail with one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from harness.common.errors import UserError
from harness.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer, train_bpe
from tests.support.configs import refusal

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 600
SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "harness" / "data").rglob("*.py"))]
# Any text, with many pieces that tokenizers are likely to get wrong.
TEXTS = st.lists(
    st.one_of(st.text(), st.sampled_from([END_OF_TEXT, "<|", "  ", "\r\n", "E\u0301", "日本", "def f():"]))
).map("".join)


@pytest.fixture(scope="module")
def trained_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(SOURCES), VOCAB_SIZE, path)
    return path


@pytest.fixture(scope="module")
def trained(trained_file: Path) -> Tokenizer:
    return load_tokenizer(trained_file)


def check_lossless(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eot_token not in tokens
    assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.token_byte_lengths()[tokens].sum() == len(text.encode())


@pytest.mark.slow
@given(TEXTS)
def test_a_trained_bpe_loses_nothing_and_counts_bytes(trained: Tokenizer, text: str) -> None:
    check_lossless(trained, text)


def test_a_trained_bpe_has_the_vocabulary_asked_for(trained: Tokenizer) -> None:
    assert (trained.vocab_size, trained.eot_token) == (VOCAB_SIZE, 0)
    lengths = trained.token_byte_lengths()
    assert lengths.shape == (VOCAB_SIZE,)
    assert [(lengths == length).sum() for length in (0, 1)] == [1, 256]
    assert lengths[0] == 0
    text = "".join(SOURCES)
    assert len(trained.encode(text)) < 0.5 * len(text), "merges were learnt"
    assert trained.decode([trained.eot_token]) == END_OF_TEXT
    assert len(trained.encode(END_OF_TEXT)) > 1
    snake = trained.encode("\U0001f40d")
    assert len(snake) > 1
    assert trained.decode(snake[:-1]) == "\ufffd"


@pytest.mark.parametrize("listed", ["as ordinary", "not"])
def test_end_of_text_is_special_even_if_the_file_does_not_say_so(
    tmp_path: Path, trained_file: Path, listed: str
) -> None:
    content = json.loads(trained_file.read_text())
    content["added_tokens"] = [{**content["added_tokens"][0], "special": False}] if listed == "as ordinary" else []
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    check_lossless(tokenizer, f"a{END_OF_TEXT}b")
    assert tokenizer.eot_token not in tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.token_byte_lengths()[tokenizer.eot_token] == 0


def test_ids_outside_the_vocabulary_and_text_that_is_not_unicode_are_refused(trained: Tokenizer) -> None:
    for token in (-1, VOCAB_SIZE):
        with pytest.raises(UserError, match=f"between 0 and {VOCAB_SIZE - 1}"):
            trained.decode([token])
    with pytest.raises(UserError, match="not valid Unicode"):
        trained.encode("\ud800")


def test_training_again_in_another_process_gives_the_same_file(trained_file: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from harness.data.tokenizers import train_bpe; "
        "texts = [path.read_text(encoding='utf-8') for path in sorted(Path('harness/data').rglob('*.py'))]; "
        f"train_bpe(iter(texts), {VOCAB_SIZE}, Path(sys.argv[1]))"
    )
    again = tmp_path / "again.json"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(again)], cwd=ROOT, env=environment, check=True)
    assert again.read_bytes() == trained_file.read_bytes()


def test_a_word_of_a_million_letters_takes_no_longer_than_short_ones(tmp_path: Path) -> None:
    begin = time.process_time()
    train_bpe(iter(["x" * 1_000_000]), 262, tmp_path / "tokenizer.json")
    assert time.process_time() - begin < 20, "in one piece, it takes minutes"
    tokens = load_tokenizer(str(tmp_path / "tokenizer.json")).encode("x" * 100_000)
    assert len(tokens) < 100_000 / 16


def test_too_little_text_names_the_vocabulary_it_would_give(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--train-tokenizer of at most 260"):
        train_bpe(iter(["aaa aaa"]), 300, tmp_path / "tokenizer.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff\xfe", b"not json", "cut"])
def test_a_missing_or_damaged_file_is_named_on_one_line(tmp_path: Path, trained_file: Path, content: Any) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(trained_file.read_bytes()[:-100] if content == "cut" else content)
    problem = "No such file or directory" if content is None else "not a readable tokenizer file"
    assert f"tokenizer.json: {problem}" in refusal(load_tokenizer, path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (END_OF_TEXT, "<|other|>", "has no <\\|endoftext\\|> or <\\|end_of_text\\|> token"),
        ('"add_prefix_space": false', '"add_prefix_space": true', "decoding does not give back"),
        ('"normalizer": null', '"normalizer": {"type": "NFC"}', "decoding does not give back"),
        ('"normalizer": null', '"normalizer": {"type": "Lowercase"}', "decoding does not give back"),
        ('"Ð":', '"ÐÐ":', "decoding does not give back"),  # without that byte, Cyrillic letters would be lost
        ('"Ġ": ', '"日": ', "not a"),
    ],
)
def test_a_tokenizer_that_changes_text_is_refused(
    tmp_path: Path, trained_file: Path, old: str, new: str, message: str
) -> None:
    text = trained_file.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "tokenizer.json"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


def test_imports_are_light() -> None:
    code = "import sys, harness.data.tokenizers, harness.data.preparation.builtin, harness.data.preparation.command"
    code += "; sys.exit(bool({'torch', 'tiktoken', 'tokenizers', 'pyarrow', 'huggingface_hub'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary in TIKTOKEN_CACHE_DIR")
def test_gpt2_is_gpt2() -> None:
    gpt2 = load_tokenizer("gpt2")
    assert (gpt2.vocab_size, gpt2.eot_token) == (50257, 50256)
    assert gpt2.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert gpt2.decode([50256]) == END_OF_TEXT
    assert gpt2.token_byte_lengths()[50256] == 0
    bare = tiktoken.get_encoding("gpt2")
    assert [gpt2.encode(text) for text in SOURCES] == [bare.encode_ordinary(text) for text in SOURCES]
    given(TEXTS)(lambda text: check_lossless(gpt2, text))()
    with pytest.raises(UserError, match="not valid Unicode"):
        gpt2.encode("\ud800")
