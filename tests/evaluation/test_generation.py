"""Sampling: with a cache against whole forward passes, batches against single rows, and the output of test_smoke.py."""

from __future__ import annotations

import json
import math
import re
import shutil
import unicodedata
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt import GPTModel, load_model, load_model_config
from harness.common.errors import UserError
from harness.common.messages import escape_controls
from harness.data.tokenizers import load_tokenizer, train_bpe
from harness.evaluation.generation import (
    GREEDY,
    GrowingRows,
    Sampling,
    choose,
    continue_prompts,
    prompts_of,
    sample_tokens,
)
from tests.model.test_model import random_model, random_tokens, shape
from tests.support.in_process import call

ENDLESS: Any = SimpleNamespace(eot_token=-1, vocab_size=None)  # in place of a tokenizer: no token ends a text


def logits_without_cache(model: GPTModel, row: Sequence[int]) -> Tensor:
    """Return the logits after a row's last token, from one forward pass over as much of its end as fits the context."""
    window = torch.tensor([list(row)[-model.config.context_length :]])
    with torch.no_grad():
        return model(window)[0, -1]


def sample_without_cache(model: GPTModel, prompt: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    generator, row = torch.Generator().manual_seed(sampling.seed), list(prompt)
    for _ in range(count):
        row.append(choose(logits_without_cache(model, row), sampling, generator))
    return row[len(prompt) :]


@pytest.mark.parametrize(("tied", "qkv_bias"), [(False, True), (True, False)])
def test_rows_of_unequal_lengths_are_what_each_is_alone(tied: bool, qkv_bias: bool) -> None:
    """Each row of a batch has the logits that it has alone. The rows are shorter than the context, equally long, or
    longer, and they leave the batch at different times."""
    model = random_model(shape(tie_weights=tied, qkv_bias=qkv_bias)).eval()
    text = random_tokens(model.config, 2).flatten().tolist()
    prompts = [text[:length] for length in (1, 7, 24, 30, 20)]
    rows, kept = GrowingRows(model, prompts, GREEDY, None), list(range(5))
    for step, leaving in enumerate((None, 1, None, 3, 0, None, None)):
        logits = rows.next_logits()
        for index, row in enumerate(kept):
            expected = logits_without_cache(model, [*prompts[row], *text[:step]])
            torch.testing.assert_close(logits[index], expected, rtol=1e-4, atol=1e-5)
        for grown in rows.rows:
            grown.append(text[step])
        if leaving is not None:
            kept = [row for index, row in enumerate(kept) if index != leaving]
            rows.keep([index for index in range(len(kept) + 1) if index != leaving])
    assert kept == [2, 3]


def test_tokens_in_the_context_are_computed_once() -> None:
    model = random_model(shape()).eval()
    seen: list[int] = []
    model.tok_emb.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    list(islice(sample_tokens(model, [1, 2, 3, 4, 5], GREEDY), 20))
    assert seen == [5] + [1] * 19


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 10, 7), Sampling(0.7, None, 9)])
def test_a_batch_samples_what_whole_passes_sample(sampling: Sampling) -> None:
    model = random_model(shape()).eval()
    prompts = [[1, 2, 3], [4] * 20, [5]]
    together = continue_prompts(model, ENDLESS, prompts, 30, sampling)
    for row, prompt in enumerate(prompts):
        own = Sampling(sampling.temperature, sampling.top_k, sampling.seed + row)
        assert together[row] == sample_without_cache(model, prompt, own, 30)
    assert together[0] == list(islice(sample_tokens(model, prompts[0], sampling), 30)), "and token by token"


def test_each_row_ends_by_itself() -> None:
    model = random_model(shape()).eval()
    free = continue_prompts(model, ENDLESS, [[1], [2], [3]], 12, GREEDY)
    end = free[1][4]
    ending: Any = SimpleNamespace(eot_token=end, vocab_size=None)
    ended = continue_prompts(model, ending, [[1], [2], [3]], 12, GREEDY)
    for row, new in zip(free, ended, strict=True):
        assert new == (row[: row.index(end)] if end in row else row)
    assert len(ended[1]) <= 4


def test_sampling_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model = random_model(shape(drop_rate=0.4)).train()
    before = torch.get_rng_state()
    new = continue_prompts(model, ENDLESS, [[1, 2]], 5, GREEDY)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert new == [sample_without_cache(model.eval(), [1, 2], GREEDY, 5)], "sampled without dropout"


# The command --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """model.json and model.safetensors of a random model, with its own tokenizer beside them."""
    folder = tmp_path_factory.mktemp("model")
    train_bpe(iter(["the quick brown fox jumps over the lazy dog é " * 20]), 280, folder / "tokenizer.json")
    config = shape(vocab_size=280)
    (folder / "model.json").write_text(config.model_dump_json())
    save_file(random_model(config).to_checkpoint_names(), folder / "model.safetensors")
    (folder / "meta.json").write_text(json.dumps({"tokenizer": "tokenizer.json"}))
    return folder / "model.json", folder / "model.safetensors"


def smoke(model_files: tuple[Path, Path], *options: str) -> str:
    result = call("test_smoke", *model_files, *options, folder=model_files[0].parent)
    assert (result.status, result.stderr) == (0, "")
    return result.stdout


def test_what_is_streamed_is_what_whole_passes_sample(model_files: tuple[Path, Path]) -> None:
    model = load_model(load_model_config(model_files[0]), model_files[1], torch.device("cpu"))
    tokenizer = load_tokenizer(model_files[1].parent / "tokenizer.json")
    prompt = tokenizer.encode("the lazy")
    for options, sampling in ((("--temperature", "0"), GREEDY), (("--seed", "3", "--top-k", "9"), Sampling(1.0, 9, 3))):
        new = sample_without_cache(model, prompt, sampling, 40)
        new = new[: new.index(tokenizer.eot_token)] if tokenizer.eot_token in new else new
        expected = escape_controls(tokenizer.decode(prompt + new)) + "\n"
        assert smoke(model_files, "--prompt", "the lazy", "--num-tokens", "40", *options) == expected


@pytest.mark.parametrize("samples", ["1", "2"])
def test_control_characters_cannot_change_the_terminal(model_files: tuple[Path, Path], samples: str) -> None:
    """Tokens of a byte-level tokenizer are bytes, such as ESC and shift-out, which an untrained model samples."""
    text = smoke(model_files, "--prompt", "a\x1b[2J\x0eb\tc", "--num-tokens", "40", "--samples", samples)
    assert text.count("a\\x1b[2J\\x0eb\tc") == int(samples)
    assert not [each for each in text if unicodedata.category(each) == "Cc" and each not in "\n\t"]


def test_prompts_from_a_file_and_several_samples(model_files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"the quick"\n\n"two\\nlines"\n')
    text = smoke(model_files, "--prompts", str(tmp_path / "p.jsonl"), "--samples", "3", "--num-tokens", "5")
    headings = [line for line in text.splitlines() if line.startswith("--- ")]
    assert headings == [f"--- prompt {p} of 2, sample {s} of 3 ---" for p in (1, 2) for s in (1, 2, 3)]
    assert text.count("the quick") == 3
    assert text.count("two\nlines") == 3
    (tmp_path / "p.txt").write_text("two\nlines\n")
    alone = smoke(model_files, "--prompt", "two", "--num-tokens", "5")
    both = smoke(model_files, "--prompts", str(tmp_path / "p.txt"), "--num-tokens", "5")
    assert both.startswith(f"--- prompt 1 of 2 ---\n{alone}--- prompt 2 of 2 ---\nlines")


def changed(model_files: tuple[Path, Path], folder: Path, **values: float) -> tuple[Path, Path]:
    """Return the files of a copy of the model. Each keyword is the name of a tensor, with `__` for a dot. The tensor is
    filled with the keyword's value.

    The copy's head prefers end-of-text.
    """
    shutil.copytree(model_files[0].parent, folder)
    tensors = load_file(model_files[1])
    for name, value in values.items():
        tensors[name.replace("__", ".")].fill_(value)
    tensors["out_head.weight"][0] = 1.0  # end-of-text is token 0
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.json", folder / "model.safetensors"


def test_end_of_text_ends_a_sample(model_files: tuple[Path, Path], tmp_path: Path) -> None:
    """A model that prefers end-of-text after any token adds nothing to the prompt."""
    silent: dict[str, float] = {"final_norm__scale": 0, "final_norm__shift": 1, "out_head__weight": 0}
    files = changed(model_files, tmp_path / "silent", **silent)
    assert smoke(files, "--prompt", "the fox", "--temperature", "0") == "the fox\n"
    both = smoke(files, "--prompt", "the fox", "--temperature", "0", "--samples", "2")
    assert both == "--- sample 1 of 2 ---\nthe fox\n--- sample 2 of 2 ---\nthe fox\n"


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_broken_weights_are_one_line(model_files: tuple[Path, Path], tmp_path: Path, temperature: str) -> None:
    files = changed(model_files, tmp_path / "broken", final_norm__scale=math.nan)
    result = call("test_smoke", *files, "--prompt", "the", "--temperature", temperature, folder=tmp_path)
    assert result.status == 1
    assert result.error_lines == [result.stderr.splitlines()[-1]]
    assert "its weights are broken" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", b'"one"\n{"no": 1}\n', "line 2"),
        ("a.jsonl", b'"one"\n"two\n', "line 2: must be a JSON string"),
        ("a.jsonl", b'""\n', "line 1"),
        ("a.jsonl", b'"\\ud800"\n', "line 1"),
        ("a.txt", b"\n \n", "no prompts"),
        ("a.txt", b"\xff\n", "convert it to UTF-8"),
        ("none.txt", b"", "no such file"),
    ],
)
def test_files_without_valid_prompts_are_refused(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    path = tmp_path / name
    (tmp_path / name.replace("none", "other")).write_bytes(content)
    with pytest.raises(UserError, match=f"^{re.escape(str(path))}.*{fault}"):
        prompts_of(path, None, "x")


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    for name, text, prompts in (
        ("p.txt", "\ufeffone\u2028still one\r\ntwo\x0cstill two\n", ["one\u2028still one", "two\x0cstill two"]),
        ("p.jsonl", '\ufeff"a\u2028b"\r\n', ["a\u2028b"]),
    ):
        (tmp_path / name).write_bytes(text.encode())
        assert prompts_of(tmp_path / name, None, "x") == prompts
    with pytest.raises(UserError, match="give one of them"):
        prompts_of(tmp_path / "p.txt", "text", "x")


def test_a_stream_of_tokens_never_splits_a_character(model_files: tuple[Path, Path]) -> None:
    tokenizer = load_tokenizer(model_files[1].parent / "tokenizer.json")
    text = "naïve 日本 café 🐍"
    tokens = tokenizer.encode(text)
    pieces = list(tokenizer.decode_stream(tokens))
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len(tokens) > len(text), "characters of several tokens"
    assert "".join(tokenizer.decode_stream(tokens[:-1])).endswith("\ufffd")
