"""test_loss.py: what it measures on, that it says so, and bits per byte against a count by hand."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_tensors

from gpt import GPTModel, ModelConfig
from harness.data.tokenizers.load import load_tokenizer
from tests.support.launch import MODEL, ROOT, Result, Workshop, finish
from tests.support.preparing import Preparer, write_json_lines

WORDS = ["a", "horse", "antidisestablishmentarianism", "日本", "if x:", "é", "\n\n", "0123456789"]


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A run with weights as they are made; no vocabulary is on the machine, and none can be downloaded."""
    made = Workshop(tmp_path, {"TIKTOKEN_CACHE_DIR": str(tmp_path / "none"), "HTTPS_PROXY": "http://127.0.0.1:9"})
    made.add_dataset()
    add_weights(made.add_run())
    return made


def add_weights(run: Path) -> GPTModel:
    torch.manual_seed(5)
    model = GPTModel(ModelConfig(**json.loads((run / "model.json").read_text())))
    save_tensors(dict(model.to_checkpoint_names()), run / "model.safetensors")
    return model.eval()


def measure(shop: Workshop, *options: str, dataset: str = "local/letters") -> Result:
    files = [str(shop.runs / "r" / name) for name in ("model.json", "model.safetensors")]
    return shop.command("test_loss.py", str(shop.datasets), *files, "--dataset", dataset, *options)


@pytest.mark.parametrize(("start", "batches"), [(0, 5), (1, 5), (300, 2), (403, 1)])
def test_a_short_split_from_any_token(shop: Workshop, start: int, batches: int) -> None:
    """All whole batches there are from there on, each 6 x 16 tokens, and the loss is theirs."""
    result = measure(shop, "--split", "validation", "--start-token", str(start))
    assert (result.status, result.stderr) == (0, "")
    end, plural = start + batches * 96, "es" if batches > 1 else ""
    place = f"local/letters, validation split, tokens {start} to {end} of 500 ({batches} batch{plural} of 6 x 16)"
    tokens = load_file(shop.datasets / "local" / "letters" / "validation.safetensors")["tokens"][start : end + 1]
    inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (tokens[:-1], tokens[1:]))
    model = add_weights(shop.runs / "r")
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(inputs.view(-1, 16)).flatten(0, 1), targets)
    loss, *measured_on = result.stdout.splitlines()
    assert loss == f"Loss on the validation split: {expected:.3f}"
    assert " ".join(map(str.strip, measured_on)) == f"Measured on {place}"
    assert all(len(line) <= 80 for line in measured_on)


def test_too_short_for_a_batch(shop: Workshop) -> None:
    result = measure(shop, "--split", "validation", "--start-token", "404")
    assert (result.status, result.stdout) == (2, "")
    assert "wanted 501 tokens (1 batch of 6 sequences of 16 tokens from 404), but there are 500" in result.stderr
    smaller = measure(shop, "--split", "validation", "--start-token", "404", "--batch-size", "1")
    assert "tokens 404 to 484 of 500 (5 batches of 1 x 16)" in " ".join(smaller.stdout.split())


def test_batches_that_are_asked_for_must_be_there(shop: Workshop) -> None:
    assert "(2 batches of 6 x 16)" in " ".join(measure(shop, "--batches", "2").stdout.split())
    assert "wanted 577 tokens (6 batches of" in measure(shop, "--batches", "6").stderr


def test_a_best_checkpoint_of_step_0_is_named_in_a_warning(shop: Workshop) -> None:
    """The rate grows from a twentieth of it, and with it the loss."""
    shop.add_run("worse", learning_rate=1.0, warmup_steps=20)
    shop.train("worse", ranks=1)
    result = shop.command("test_loss.py", str(shop.datasets), "worse", "--runs-dir", str(shop.runs))
    assert result.status == 0
    assert result.stderr.startswith("warning: worse: its best checkpoint is that of step 0")
    last = shop.command("test_loss.py", str(shop.datasets), "worse:latest", "--runs-dir", str(shop.runs))
    assert (last.status, last.stderr) == (0, "")


def test_a_bar_on_a_terminal(shop: Workshop) -> None:
    prelude = (
        "import os, pty, threading\n"
        "file = os.dup(2)\n"
        "master, slave = pty.openpty()\n"
        "os.dup2(slave, 2)\n"
        "copy = lambda: [os.write(file, os.read(master, 4096)) for _ in range(10**6)]\n"
        "threading.Thread(target=copy, daemon=True).start()\n"
    )
    command = [str(ROOT / "test_loss.py"), str(shop.datasets)]
    command += [str(shop.runs / "r" / name) for name in ("model.json", "model.safetensors")]
    result = finish([shop.fork([*command, "--dataset", "local/letters"], {}, prelude)], expect=0, timeout=60)
    assert "0/5 [" in result.stderr
    assert "5/5 [" in result.stderr


def printed_bits(result: Result) -> tuple[float, float]:
    """Loss and bits per byte."""
    found = re.match(r"Loss on the \w+ split: (\S+)\nBits per byte: (\S+)", result.stdout)
    assert found, result
    return float(found[1]), float(found[2])


def bits_by_hand(loss: float, text: bytes, tokens: int) -> float:
    return loss * tokens / (len(text) * math.log(2))


def uneven_documents() -> list[str]:
    """Beginning with long words and ending with short ones, so that slices differ from the whole."""
    random = np.random.default_rng(0)
    chosen = [random.choice(WORDS[2:4] if part < 20 else WORDS[:2], 40) for part in range(60)]
    return [" ".join(words.tolist()) for words in chosen]


def test_bits_per_byte_of_a_slice_by_a_trained_tokenizer(shop: Workshop, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "a.jsonl", uneven_documents())
    folder = Preparer(tmp_path).prepare("a.jsonl", "mine", "--validation-fraction", "0.9", "--train-tokenizer", "280")
    shop.add_run(model={"vocab_size": 280})
    add_weights(shop.runs / "r")
    meta = json.loads((folder / "meta.json").read_text())
    tokens = load_file(folder / "validation.safetensors")["tokens"]
    known = load_tokenizer(folder / meta["tokenizer"])
    whole = meta["splits"]["validation"]["bytes"] / meta["splits"]["validation"]["tokens"]
    for start in (0, len(tokens) - 200):
        result = measure(shop, "--start-token", str(start), "--batches", "2", dataset="me/mine")
        loss, bits = printed_bits(result)
        targets = [token for token in tokens[start + 1 : start + 193].tolist() if token != known.eot_token]
        text = b"".join(known._token_bytes[token] for token in targets)
        assert bits == pytest.approx(bits_by_hand(loss, text, 192), rel=1e-3)
        assert abs(192 / len(text) * whole - 1) > 0.02, "the whole split's mean would be another number"
        assert "approximate" not in result.stdout


def gpt2_dataset(shop: Workshop, tokens: list[int], text_bytes: int) -> None:
    folder = shop.datasets / "local" / "gpt2"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        save_file({"tokens": np.array(tokens, np.uint16)}, folder / f"{split}.safetensors")
    counts = {"validation": {"tokens": len(tokens), "bytes": text_bytes}}
    (folder / "meta.json").write_text(json.dumps({"tokenizer": "gpt2", "splits": counts}))
    shop.add_run(model={"vocab_size": 50257})
    add_weights(shop.runs / "r")


def test_without_the_vocabulary_the_mean_is_called_approximate(shop: Workshop) -> None:
    gpt2_dataset(shop, list(range(1000)), 4_500)
    result = measure(shop, dataset="local/gpt2")
    loss, bits = printed_bits(result)
    assert bits == pytest.approx(loss / math.log(2) / 4.5, abs=0.001)
    assert re.search(r"^Bits per byte: \S+ \(approximate: by the whole split's mean", result.stdout, re.MULTILINE)
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
    assert not (shop.path / "none").exists(), "nothing was downloaded for it"


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary")
def test_bits_per_byte_of_a_slice_by_gpt2(shop: Workshop) -> None:
    """Against tiktoken's own decoding, document ends included: they stand for no text."""
    import tiktoken

    encoding = tiktoken.get_encoding("gpt2")
    tokens: list[int] = []
    for text in uneven_documents():
        tokens += [*encoding.encode_ordinary(text), encoding.eot_token]
    gpt2_dataset(shop, tokens, sum(map(len, map(str.encode, uneven_documents()))))
    shop.environment["TIKTOKEN_CACHE_DIR"] = os.environ["TIKTOKEN_CACHE_DIR"]
    found = []
    for start in (0, len(tokens) - 200):
        result = measure(shop, "--start-token", str(start), "--batches", "2", dataset="local/gpt2")
        loss, bits = printed_bits(result)
        targets = [token for token in tokens[start + 1 : start + 193] if token != encoding.eot_token]
        assert bits == pytest.approx(bits_by_hand(loss, encoding.decode_bytes(targets), 192), rel=1e-3)
        assert "approximate" not in result.stdout
        found.append(bits)
    assert abs(found[0] / found[1] - 1) > 0.05
    assert MODEL["context_length"] == 16
