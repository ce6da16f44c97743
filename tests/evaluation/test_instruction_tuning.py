"""test_ift.py: instruction data, the tokens that are learnt, when fine-tuning stops, and the command with a judge."""

from __future__ import annotations

import itertools
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from gpt import GPTModel, load_model, load_model_config
from harness.common.device import device_name
from harness.common.errors import RunError, UserError
from harness.common.files import sha256
from harness.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from harness.evaluation.instruct.finetune import (
    IGNORED,
    Example,
    FineTuneSettings,
    answer,
    batches,
    encode,
    fine_tune,
    mean_loss,
)
from harness.evaluation.instruct.responses import (
    AnsweringModel,
    Instruction,
    InstructionSplits,
    local_instructions,
    read_responses,
)
from harness.model.precision import Precision
from harness.model.weights import save_weights
from harness.runs.directory import RunDirectory
from harness.runs.results import InstructionResult, read_results
from tests.model.test_model import random_model, shape
from tests.support.configs import refusal
from tests.support.fake_judge import FakeJudge, score
from tests.support.http_server import http_server
from tests.support.in_process import call
from tests.support.launch import ROOT, Result, Workshop, finish, wait_until

CPU = torch.device("cpu")
FP32 = Precision("fp32", "cpu")
WORDS = ("red", "green", "blue", "black", "white", "brown", "gray", "pink")
ENTRIES = [
    {"instruction": f"Say {word} {number}.", "input": word if number % 2 else "", "output": f"{word}, {number}"}
    for number in range(5)
    for word in WORDS
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "instructions.json"
    path.write_text(json.dumps(ENTRIES))
    return path


@pytest.fixture(scope="module")
def tokenizer(data: Path) -> Tokenizer:
    texts = (Instruction(**entry).prompt + entry["output"] for entry in ENTRIES)
    train_bpe(texts, 330, data.parent / "tokenizer.json")
    return load_tokenizer(data.parent / "tokenizer.json")


def asked(instruction: str, given: str, output: str) -> Instruction:
    return Instruction(instruction=instruction, input=given, output=output)


def tiny(**changes: Any) -> GPTModel:
    config = shape(vocab_size=330, **{"context_length": 64, "n_layers": 2, "emb_dim": 32, **changes})
    torch.manual_seed(1)
    return GPTModel(config)


# The data ---------------------------------------------------------------------------------------------------------


def test_the_prompt_is_alpacas() -> None:
    request = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    )
    for given, heading in (("a cat", "### Input:\na cat\n\n"), ("", "")):
        prompt = f"{request}### Instruction:\nName it.\n\n{heading}### Response:\n"
        assert asked("Name it.", given, "Tom").prompt == prompt


@pytest.mark.parametrize(("count", "sizes"), [(1100, (935, 55, 110)), (40, (34, 2, 4)), (20, (17, 1, 2))])
def test_the_split_is_the_books(tmp_path: Path, count: int, sizes: tuple[int, int, int]) -> None:
    """85 % to train, the next 10 % to test, and the rest to validate, in the file's order."""
    entries = [{"instruction": str(number), "input": "", "output": "x"} for number in range(count)]
    (tmp_path / "d.json").write_text(json.dumps(entries))
    splits = InstructionSplits.load(tmp_path / "d.json")
    assert (len(splits.train), len(splits.validation), len(splits.test)) == sizes
    in_order = [int(entry.instruction) for entry in [*splits.train, *splits.test, *splits.validation]]
    assert in_order == list(range(count))


ENTRY: dict[str, Any] = {"instruction": "a", "input": "", "output": "b"}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ([ENTRY, {"instruction": "a", "input": ""}], 'entry 2: key "output": missing'),
        ([{"instruction": "a", "output": "b"}], 'entry 1: key "input": missing; the file must be a list of objects'),
        ([ENTRY | {"instruction": 3}], 'entry 1: key "instruction": '),
        ([ENTRY | {"instruction": " "}], 'entry 1: key "instruction": empty'),
        ([ENTRY | {"output": "\ud800"}], 'entry 1: key "output"'),
        (["a"], "entry 1"),
        ({"a": 1}, "must be a list of objects with instruction, input"),
        ([ENTRY] * 19, "19 entries"),
    ],
)
def test_files_that_are_no_instruction_data(tmp_path: Path, content: object, fault: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps(content))
    assert fault in refusal(InstructionSplits.load, path, begins=f"{path}: ")


# What is learnt ---------------------------------------------------------------------------------------------------


def test_padding_is_ignored_but_for_the_end_of_text(tokenizer: Tokenizer) -> None:
    entries = [asked("Say red 1.", "", "red"), asked("Say green and blue and pink.", "", "green, blue, pink")]
    examples = [encode(entry, tokenizer, 128) for entry in entries]
    [batch], [answers] = (
        batches(examples, 8, tokenizer.eot_token, answers_only=only, generator=None) for only in (False, True)
    )
    for row, (entry, example) in enumerate(zip(entries, examples, strict=True)):
        learnt = batch.targets[row][batch.targets[row] != IGNORED].tolist()
        whole = tokenizer.encode(entry.prompt + entry.output)
        assert learnt == [*whole[1:], tokenizer.eot_token], "everything once, and one end-of-text"
        assert batch.inputs[row][: len(whole)].tolist() == whole
        assert (batch.targets[row][len(learnt) :] == IGNORED).all()
        assert example.has_answer
        learnt = answers.targets[row][answers.targets[row] != IGNORED].tolist()
        assert learnt == [*tokenizer.encode(entry.output), tokenizer.eot_token]
    assert len({len(example.tokens) for example in examples}) == 2, "one of them is padded"


@pytest.mark.parametrize("answers_only", [False, True])
def test_a_batchs_loss_is_that_of_its_rows_without_padding(tokenizer: Tokenizer, answers_only: bool) -> None:
    """The batch size does not matter."""
    model = random_model(shape(vocab_size=330, context_length=64)).eval()
    entries = [asked(f"Say {word}.", "", f"{word} " * number) for number, word in enumerate(WORDS, start=1)]
    examples = [encode(entry, tokenizer, 64) for entry in entries]
    losses = []
    for example in examples:
        tokens = torch.tensor([example.tokens])
        with torch.no_grad():
            row = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
        losses.append(row[example.answer_start - 1 :] if answers_only else row)
    for size in (1, 3, 8):
        held_out = batches(examples, size, tokenizer.eot_token, answers_only=answers_only, generator=None)
        assert mean_loss(model, list(held_out), FP32) == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_long_entries_are_cut_at_the_context(tokenizer: Tokenizer) -> None:
    example = encode(asked("Say it.", "", "red " * 200), tokenizer, 64)
    [batch] = batches([example], 8, tokenizer.eot_token, answers_only=False, generator=None)
    assert batch.inputs.shape == batch.targets.shape == (1, 64)
    assert batch.targets[0, -1] != IGNORED
    assert tokenizer.eot_token not in batch.targets, "the answer is cut off, so there is no end to learn"
    long_question = encode(asked("red " * 200, "", "blue"), tokenizer, 64)
    assert not long_question.has_answer
    assert len(long_question.tokens) == 65


def test_every_entry_is_trained_on_once_an_epoch_in_a_seeds_order() -> None:
    examples = [Example([number, 1], 1) for number in range(2, 21)]

    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        shuffled = batches(examples, 8, 0, answers_only=False, generator=generator)
        return torch.cat([batch.inputs[:, 0] for batch in shuffled]).tolist()

    assert sorted(order(1)) == list(range(2, 21))
    assert order(1) == order(1) != order(2)


# When it stops ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_weights_kept_are_those_from_before_the_rise(
    data: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuning keeps the weights of the last epoch before the validation loss rises. A fine-tuning that max_epochs
    ends after this epoch has exactly the same weights."""
    splits, model, other = InstructionSplits.load(data), tiny(), tiny()
    result = fine_tune(model, tokenizer, splits, FineTuneSettings(0.01, max_epochs=60))
    losses = [loss for loss in result.validation_losses if loss is not None]
    assert result.rose
    assert result.kept_epoch == len(losses) - 2 >= 2
    assert all(after <= before for before, after in itertools.pairwise(losses[:-1]))
    assert losses[-1] > losses[-2]
    assert len(capsys.readouterr().out.splitlines()) == len(losses) + 1, "one for each, and one at the end"
    assert not fine_tune(other, tokenizer, splits, FineTuneSettings(0.01, max_epochs=result.kept_epoch)).rose
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
    examples = [encode(entry, tokenizer, 64) for entry in splits.validation]
    held_out = list(batches(examples, 8, 0, answers_only=False, generator=None))
    assert mean_loss(model, held_out, FP32) == pytest.approx(min(losses), rel=1e-6)
    assert not model.training


def test_what_cannot_be_fine_tuned(data: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    splits = InstructionSplits.load(data)
    cut = [asked("red " * 200, "", "blue")] * 3
    with pytest.raises(UserError, match="context length"):
        fine_tune(tiny(), tokenizer, splits._replace(validation=cut), FineTuneSettings(0.01))
    assert capsys.readouterr().out.startswith("no room for an answer in 64 tokens: 3 instructions left out")
    broken = tiny()
    with torch.no_grad():
        for parameter in broken.final_norm.parameters():
            parameter.fill_(math.nan)
    with pytest.raises(RunError, match="not finite"):
        fine_tune(broken, tokenizer, splits, FineTuneSettings(0.01))


@pytest.mark.slow
def test_answers_are_the_same_one_by_one_and_in_batches(tokenizer: Tokenizer) -> None:
    """Answers are the same one by one and in batches, even if a question is longer than the context."""
    model = random_model(shape(vocab_size=330, context_length=64)).eval()
    entries = [asked(f"Say {word} {number}.", "", word) for number in range(3) for word in WORDS]
    entries.append(asked("red " * 100, "", "blue"))
    together = answer(model, tokenizer, entries, 20)
    assert [response.instruction for response in together] == [entry.instruction for entry in entries]
    assert together == [answer(model, tokenizer, [entry], 20)[0] for entry in entries]
    assert len({response.response for response in together}) > 5


# The command ------------------------------------------------------------------------------------------------------

JUDGED = {"OPENAI_API_KEY": "sk-loopback", "NO_PROXY": "127.0.0.1"}


@pytest.fixture
def shop(tmp_path: Path, data: Path, tokenizer: Tokenizer) -> Workshop:
    """A workshop whose run r has a checkpoint of an untrained model."""
    shop = Workshop(tmp_path)
    folder = shop.runs / "r" / "checkpoints" / "20260101Z000000-iteration-9"
    folder.mkdir(parents=True)
    model = tiny()
    (shop.runs / "r" / "model.json").write_text(model.config.model_dump_json())
    save_weights(model.to_checkpoint_names(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((data.parent / "tokenizer.json").read_bytes())
    (folder / "meta.json").write_text(json.dumps({"tokenizer": "tokenizer.json"}))
    (shop.runs / "r" / "checkpoints" / "best").symlink_to(folder.name)
    (tmp_path / "data.json").write_bytes(data.read_bytes())
    return shop


def ift(shop: Workshop, options: str, model: str = "r", **environment: str) -> Result:
    """Run test_ift.py in the workshop's folder, with at most 5 tokens in an answer unless `options` say otherwise."""
    arguments = f"{model} --max-new-tokens 5 {options}".split()
    return call("test_ift", *arguments, folder=shop.path, environment={"OPENAI_API_KEY": "", **environment})


def test_from_a_checkpoint_to_responses(shop: Workshop, data: Path) -> None:
    options = "--data data.json --learning-rate 0.01 --max-new-tokens 20 --responses-only"
    result = ift(shop, f"{options} --save tuned")
    assert result.status == 0, result.stderr
    assert "stopped: the validation loss rose; kept: epoch " in result.stdout
    responses = read_responses(shop.runs / "r" / "ift-responses.json")
    splits = InstructionSplits.load(data)
    assert [each.question for each in responses.responses] == [each.question for each in splits.test]
    assert responses.model == "r/20260101Z000000-iteration-9"
    assert responses.fine_tuning["rose"] is True
    assert responses.weights == AnsweringModel(
        checkpoint="20260101Z000000-iteration-9",
        sha256=sha256(shop.runs / "r" / "checkpoints" / "best" / "model.safetensors"),
        device=device_name(CPU),
        torch=torch.__version__,
    )
    assert responses.data is not None
    assert (responses.data.entries, responses.data.test_entries) == (40, 4)
    # The saved model is the one that answered.
    saved = shop.path / "tuned"
    tuned = load_model(load_model_config(saved / "model.json"), saved / "model.safetensors", CPU)
    assert answer(tuned, load_tokenizer(saved / "tokenizer.json"), splits.test, 20) == responses.responses
    # The same command again is refused before anything is trained. With another file, it writes the same answers.
    assert "--overwrite" in ift(shop, options).error_lines[0]
    assert ift(shop, f"{options} --responses again.json").status == 0
    assert read_responses(shop.path / "again.json").responses == responses.responses
    card = call("convert_hf", "publish", "tuned", "me/tuned", "--card", folder=shop.path).stdout
    for words in ("fine-tuned from `r/", "on the instructions of `data.json`.", "    ### Response:"):
        assert words in card
    assert "has not been taught" not in card


def test_answers_that_another_process_writes_meanwhile_stay(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_late(*arguments: Any) -> Any:
        (shop.path / "late.json").write_text("of the other process")
        return answer(*arguments)

    monkeypatch.setattr("harness.evaluation.instruct.finetune.answer", answer_late)
    done = ift(shop, "--data data.json --max-epochs 1 --responses-only --responses late.json")
    assert done.status == 0, done
    assert (shop.path / "late.json").read_text() == "of the other process"
    assert len(read_responses(shop.path / "late-2.json").responses) == 4


@pytest.mark.slow
def test_scores_stay_in_the_run_whose_folder_has_the_answers(shop: Workshop) -> None:
    with FakeJudge() as judge:
        for place in ("", "--responses elsewhere.json"):
            done = ift(shop, f"--data data.json --max-epochs 1 --base-url {judge.url} {place}", **JUDGED)
            assert (done.status, done.stderr) == (0, "")
        paid = len(judge.paid)
        again = call("judge_ift", "elsewhere.json", "--base-url", judge.url, folder=shop.path, environment=JUDGED)
        assert (again.status, len(judge.paid)) == (0, paid), "judgments that were kept cost nothing"
    [kept] = read_results(RunDirectory(shop.runs / "r")).of(InstructionResult)
    assert kept.weights.checkpoint == "20260101Z000000-iteration-9"
    assert (kept.weights.is_best, kept.weights.is_latest) == (True, False)
    answers = read_responses(shop.path / "elsewhere.json").responses
    assert (kept.questions, kept.scores) == (4, [score(each.response, each.output) for each in answers])
    for printed in (done.stdout, again.stdout):
        assert f"{kept.mean:.2f}" in printed


def test_a_model_that_learns_nothing_is_told_so_and_left_as_it_came(shop: Workshop) -> None:
    start = load_file(shop.runs / "r" / "checkpoints" / "best" / "model.safetensors")
    for rate, reason in (("3", "the validation loss rose"), ("1e12", "the validation loss is not finite")):
        result = ift(
            shop, f"--data data.json --responses-only --learning-rate {rate} --responses {rate} --save m{rate}"
        )
        assert result.status == 0, result.stderr
        assert f"stopped: {reason}; kept: epoch 0" in result.stdout
        assert "try a lower --learning-rate" in result.stderr
        kept = load_file(shop.path / f"m{rate}" / "model.safetensors")
        assert all(torch.equal(tensor, start[name]) for name, tensor in kept.items())
    assert read_responses(shop.path / rate).fine_tuning["validation_losses"][-1] is None


def test_ctrl_c_while_it_is_judged_keeps_the_answers(shop: Workshop) -> None:
    with FakeJudge(honest_requests=1) as judge:
        options = f"--data data.json --max-epochs 1 --max-new-tokens 3 --responses r.json --base-url {judge.url}"
        options += " --judge-prompt book --judge-model other"
        variables = {**JUDGED, "OPENAI_BASE_URL": "not an address"}  # not used
        process = shop.fork([str(ROOT / "test_ift.py"), "r", *options.split()], variables)
        wait_until(lambda: len(judge.requests) >= 2, process)
        process.send_signal(signal.SIGINT)
        result = finish([process], expect=130, timeout=60)
    again = f"uv run --extra judge judge_ift.py r.json --model other --base-url {judge.url} --prompt book"
    assert result.error_lines == [f"stopped by SIGINT; the answers are kept; to continue: {again}"]
    assert "Respond with the integer number only." in judge.requests[0].prompt
    assert len(read_responses(shop.path / "r.json").responses) == 4


REFUSED = [
    ("r", "--data bad.json --responses-only", ["bad.json: entry 41", '"output"']),
    ("r", "--data none.json --responses-only", ["none.json: no such file"]),
    ("r", "--data data.json", ["OPENAI_API_KEY", "--responses-only"]),
    ("r", "--data data.json --responses . --responses-only", ["exists"]),
    ("r", "--data data.json --responses no/such/x.json --responses-only", ["no/such: no file can be written"]),
    ("r", "--data data.json --save . --responses-only", ["--save"]),
    ("r", "--data data.json --save bad.json/x --responses-only", ["bad.json: no file can be written"]),
    ("r", "--data data.json --responses /proc/o.json --responses-only", ["/proc: no file"]),
    ("r", "--data data.json --responses both --save both --responses-only", ["--save"]),
    ("r", "--data data.json --name \udcff --responses-only", ["--name"]),
    ("r", "--data http://127.0.0.1:1/x.json --responses-only", ["127.0.0.1:1", "--data"]),
    ("r", "--data http://[x --responses-only", ["http://[x: cannot be downloaded", "--data"]),
    ("r", "--data http://127.0.0.1:1/\udcff --responses-only", ["cannot be downloaded", "--data"]),
    ("r", f"--data http://127.0.0.1:1/{'x' * 300} --responses-only", ["File name too long", "--data"]),
    ("runs/r/model.json other.safetensors", "--data data.json --responses-only", ["not the model's weights"]),
    # Refused before anything is downloaded:
    ("none.json other.safetensors", "--data http://127.0.0.1:1/x.json", ["none.json: no such file"]),
    ("runs/r/model.json empty", "--data http://127.0.0.1:1/x.json", ["empty: no model.safetensors in this folder"]),
]


def test_bad_input_is_one_line_before_anything_is_trained(shop: Workshop) -> None:
    (shop.path / "bad.json").write_text(json.dumps([*ENTRIES, {"instruction": "x", "input": ""}]))
    save_weights(tiny(emb_dim=64).to_checkpoint_names(), shop.path / "other.safetensors")
    (shop.path / "empty").mkdir()
    for model, options, words in REFUSED:
        result = ift(shop, options, model)
        assert (result.status, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert all(word in line for word in words), line
        assert not (shop.runs / "r" / "ift-responses.json").exists()
    (shop.path / "long.json").write_text(json.dumps([asked("red " * 200, "", "blue").model_dump()] * 40))
    [line] = ift(shop, "--data long.json --responses-only").error_lines
    assert line.startswith("error: long.json: in the training or the validation part, no instruction leaves room ")
    assert line.endswith("; give a model with a longer context_length, or other --data")


def test_instructions_are_downloaded_once_and_whole_into_the_users_cache(shop: Workshop) -> None:
    """The server has ENTRIES as /good.json, fewer bytes than announced as /short.json, and HTML as /login.json."""
    requested = []

    def answer(method: str, path: str, *_: object) -> tuple[int, bytes, dict[str, str]]:
        requested.append(path)
        body = b"<html>" if "login" in path else json.dumps(ENTRIES).encode()
        announced = len(body) + (7 if "short" in path else 0)
        return 200 if "json" in path else 404, body, {"Content-Length": str(announced)}

    with http_server(answer) as address:
        cache = {"XDG_CACHE_HOME": str(shop.path / "cache")}
        for target in ("one.json", "two.json"):
            options = f"--data {address}/good.json --max-epochs 1 --responses-only --responses {target}"
            result = ift(shop, options, **cache)
            assert result.status == 0, result.stderr
            assert "stopped: --max-epochs 1 reached; kept: epoch 1" in result.stdout
        assert requested == ["/good.json"]
        for name in ("short.json", "missing", "login.json"):
            refused = ift(shop, f"--data {address}/{name} --responses-only", **cache)
            assert refused.error_lines[0].startswith(f"error: {address}/{name}:")
    [kept] = [path for path in (shop.path / "cache").rglob("*") if path.is_file()]
    assert json.loads(kept.read_text()) == ENTRIES, "nothing half-written"


def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(UserError, match="set HOME or XDG_CACHE_HOME, or give a file by --data"):
        local_instructions("https://example.com/instructions.json")
