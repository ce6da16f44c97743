"""Checkpoints of the lab notebook's program can be used by every command, and training can start or resume from
them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt import GPTModel, ModelConfig, load_model, load_model_config
from harness.common.errors import UserError
from harness.runs.train_config import TrainConfig
from harness.runs.upstream import optimizer_by_name
from harness.training.adamw import AdamW
from tests.support.configs import SEED_TRAIN, refusal
from tests.support.in_process import InProcess
from tests.support.launch import MODEL, meta_of, metrics, summary_of
from tests.support.notebook_model import NotebookRun, notebook_model
from tests.support.planning import plan, rows

STEPS = 4
NAME = f"20251206Z014912-iteration-{STEPS - 1}"
# The notebook's program trains on one microbatch in each step and process.
SETTINGS: dict[str, Any] = {
    "model": {"drop_rate": 0.0},
    "gradient_accumulation_steps": None,
    "min_train_tokens": 12 * 32,
    "precision": "fp32",
    "validation_interval": 100,
}


def workshop(path: Path, **shape: Any) -> tuple[InProcess, NotebookRun, Path]:
    """Return a workshop, a NotebookRun that has trained four of twelve steps, and the folder of its checkpoint in the
    run "r"."""
    shop = InProcess(path)
    shop.add_dataset()
    model = SETTINGS["model"] | shape
    run = shop.add_run("r", **SETTINGS | {"model": model})
    config = ModelConfig(**MODEL | model)
    tokens = load_file(shop.datasets / "local" / "letters" / "train.safetensors")["tokens"]
    notebook = NotebookRun(config, tokens, 2)
    notebook.train(STEPS)
    return shop, notebook, notebook.save(run / "checkpoints" / NAME)


def weights_of(run: Path, which: str = "latest") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / which / "model.safetensors")


@pytest.mark.parametrize("shape", [{}, {"qkv_bias": False, "tie_weights": True}], ids=str)
def test_training_goes_on_as_the_notebook_would(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Training that resumes from a notebook's checkpoint ends with the weights of the notebook's own further training.
    It uses the optimizer's moments and continues with the next tokens."""
    shop, notebook, _ = workshop(tmp_path, **shape)
    assert "its weights and optimizer are used, and 128 tokens" in shop.train_here("r", NAME).stdout
    notebook.train(12 - STEPS)
    state = notebook.model.state_dict()
    ours = weights_of(shop.runs / "r")
    assert ours.keys() == {name for name in state if not name.endswith("mask")}
    for name, tensor in ours.items():
        if not name.endswith("W_key.bias"):  # its gradient is only rounding error, by which AdamW makes full updates
            torch.testing.assert_close(tensor, state[name], rtol=1e-4, atol=2e-6, msg=name)
    start = weights_of(shop.runs / "r", NAME)
    moved = {name: (tensor - start[name]).abs().max() for name, tensor in ours.items() if name in start}
    assert min(moved[name] for name in moved if not name.endswith("W_key.bias")) > 1e-4, "the steps changed all of them"
    meta = meta_of(shop.runs / "r")
    assert (meta["global_step"], meta["tokens_seen"]) == (11, 12 * 32)
    assert [event["global_step"] for event in metrics(shop.runs / "r") if event["event"] == "train"][-1] == 11
    # Without a name the command resumes from this program's own checkpoint, which is finished.
    assert "is finished" in shop.attempt().stdout


def test_plans_of_going_on_from_it(tmp_path: Path) -> None:
    """A plan that would resume from a notebook's checkpoint without naming it is refused with training's message. A
    plan that names it has the steps that remain."""
    shop, _, folder = workshop(tmp_path)
    with pytest.raises(UserError, match=f"{NAME}: not written by this program; .*, give its name as CHECKPOINT; to"):
        plan(shop)
    part_of_it = f"iteration-{STEPS - 1}"
    with pytest.raises(UserError, match=f"/{part_of_it}: no such checkpoint; there are: {NAME}$"):
        plan(shop, checkpoint=part_of_it)
    (folder.parent / "latest").symlink_to(NAME)
    assert shop.attempt().refuses() == f"error: {refusal(plan, shop, begins='')}"
    planned = rows(shop, checkpoint=NAME, assume_tps=128.0)
    assert planned["done already"] == "4 steps, 128 tokens"
    assert (planned["global steps"], planned["tokens"]) == ("8 more", "256 more")
    assert planned["time"].startswith("2 s training")
    twice = rows(shop, checkpoint=NAME, ranks=2)
    assert twice["done already"] == "4 steps, 256 tokens", "on two ranks the batch has twice the tokens"
    assert rows(shop, restart=True)["global steps"] == "12"
    (shop.datasets / "local" / "letters").rename(tmp_path / "elsewhere")
    assert rows(shop, checkpoint=NAME)["global steps"] == "8 more", "the plan must not need the dataset"


def test_speed_and_cost_are_those_of_what_was_trained_here(tmp_path: Path) -> None:
    """The time of a notebook's four steps is unknown. The summary, the metrics and a plan therefore measure the speed
    and cost over the steps of this program alone, also after more steps and when the summary is written again."""
    shop, _, _ = workshop(tmp_path)
    run = shop.add_run("r", **SETTINGS, price_per_hour=3600.0, report_interval=2)
    assert shop.attempt(NAME).status == 0
    summary = summary_of(run)
    for record in (summary, meta_of(run)):
        assert (record["tokens_seen"], record.get("trained_tokens", 256)) == (12 * 32, 8 * 32)
    seconds = summary["seconds"]["training"]
    assert summary["measured"] == {"global_steps": 8, "tokens": 8 * 32, "seconds": pytest.approx(seconds, abs=0.002)}
    rounding = 0.001  # the seconds are rounded to milliseconds, and may be as few as 20
    assert 8 * 32 / summary["tokens_per_second"] == pytest.approx(seconds, abs=rounding)
    # The seconds of all lines of metrics.jsonl, each over its own steps, add up to nearly the same time. Only the time
    # after the last line is missing.
    lines = [event for event in metrics(run) if event["event"] == "train"]
    ends = [3, *(line["global_step"] for line in lines)]
    assert ends[-1] == 11
    rates = [line["tokens_per_second"] for line in lines]
    took = sum((now - before) * 32 / rate for before, now, rate in zip(ends, ends[1:], rates, strict=False))
    assert seconds / 2 < took < seconds + rounding
    assert summary["dollars"]["training"] == pytest.approx(seconds, abs=rounding)
    (run / "summary.json").unlink()  # as if the process had been killed before it wrote it
    printed = shop.attempt().stdout
    assert "Tokens seen: 384; this program trained on 256 of them" in printed
    assert re.search(
        r"^Throughput: [\d,]+ tokens/second of training \(256 tokens in [\d.]+ s with ", printed, re.MULTILINE
    )
    again = summary_of(run)
    for key in ("trained_tokens", "tokens_seen", "device", "world_size"):
        assert again[key] == summary[key]
    assert again["measured"]["tokens"] == 8 * 32
    assert 8 * 32 / again["tokens_per_second"] == pytest.approx(again["seconds"]["training"], abs=rounding)
    # A plan uses the same speed.
    again["measured"] |= {"global_steps": 20, "seconds": 10.0}
    (run / "summary.json").write_text(json.dumps(again))
    speed = rows(shop)["speed"]
    assert speed.startswith(f"{again['tokens_per_second']:,.0f} tokens/s of training alone")
    assert "measured over 20 steps, 256 tokens" in speed
    # After another resume the seconds are those of all tokens that this program has trained. After a new start from the
    # notebook's checkpoint they are those of the tokens trained since then.
    shop.add_run("r", **SETTINGS | {"min_train_tokens": 16 * 32}, price_per_hour=3600.0)
    for start in ((), (NAME,)):
        assert shop.attempt(*start).status == 0
        now = summary_of(run)
        assert (now["trained_tokens"], now["measured"]["tokens"]) == (12 * 32, 12 * 32)
        assert now["measured"]["seconds"] == pytest.approx(now["seconds"]["training"], abs=0.002)
        assert now["tokens_per_second"] == pytest.approx(12 * 32 / now["seconds"]["training"], rel=0.02)


def test_its_optimizer_is_adamw_and_another_is_refused_by_name(tmp_path: Path) -> None:
    """Training and the plan refuse to resume a notebook's AdamW state with Muon, name the remedy, and change no file. A
    checkpoint without optimizer.pt can be resumed with Muon."""
    shop, _, folder = workshop(tmp_path)
    run = shop.add_run("r", **SETTINGS, optimizer="muon")
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    line = shop.attempt(NAME).refuses(
        'made with "optimizer": "adamw", but train.json has "muon"; restore the old value, use --restart, or let',
        '"initial_weights"',
    )
    assert line == f"error: {refusal(plan, shop, checkpoint=NAME, begins='')}"
    assert sorted(path.relative_to(run) for path in run.rglob("*") if path.name != ".lock") == before
    (folder / "optimizer.pt").unlink()
    assert "its weights are used" in shop.train_here("r", NAME).stdout


def test_it_is_not_sent_to_a_mirror_and_not_called_damaged(tmp_path: Path) -> None:
    """It has no hashes, by which another machine could verify it. Everything else is sent."""
    shop, _, _ = workshop(tmp_path)
    url = f"file://{tmp_path}/store"
    pushed = shop.command("mirror.py", "push", "r", url)
    assert pushed.status == 2
    assert f"warning: runs/r/checkpoints/{NAME}: not written by this program" in pushed.stderr
    assert not (tmp_path / "store/r/checkpoints").exists()
    fetched = shop.command("mirror.py", "fetch", url, "r")
    assert (fetched.status, fetched.stderr) == (0, "")


def test_a_notebooks_checkpoint_of_a_run_that_is_done(tmp_path: Path) -> None:
    """A run is finished if it resumes from a notebook's checkpoint that already has all steps. No summary is written,
    because this program has trained nothing."""
    shop, _, _ = workshop(tmp_path)
    shop.add_run("r", **SETTINGS | {"min_train_tokens": STEPS * 32})
    assert "is finished" in shop.attempt(NAME).stdout
    assert not (shop.runs / "r" / "summary.json").exists()


def test_a_ceiling_before_the_first_step_leaves_a_checkpoint_to_continue(tmp_path: Path) -> None:
    """The notebook's checkpoint has no optimizer state, and so the one saved at the ceiling has none."""
    shop, _, folder = workshop(tmp_path)
    (folder / "optimizer.pt").unlink()
    shop.add_run("r", **SETTINGS, max_hours=1.0)
    late = "from tests.support.faults import *\nbefore(WARM_UP, two_hours_later)"
    ended = shop.train("r", NAME, ranks=1, prelude=late, expect=3)
    assert "stopped by max_hours" in ended.error_lines[0]
    shop.add_run("r", **SETTINGS, max_hours=9.0)
    assert shop.attempt().status == 0


def test_damaged_notebooks_checkpoints(tmp_path: Path) -> None:
    shop, _, folder = workshop(tmp_path)
    for file, damage, words in (
        ("optimizer.pt", lambda path: path.write_bytes(b"x"), "not a readable state file"),
        ("optimizer.pt", lambda path: torch.save({"state": {0: {}}}, path), "the state has 1 parameters"),
        (
            "model.safetensors",
            lambda path: save_file({"tok_emb.weight": torch.ones(1)}, path),
            "not the model's weights",
        ),
        ("meta.json", lambda path: path.write_text('{"train_loss": 1.0}'), '"global_step"'),
        ("meta.json", lambda path: path.write_text('{"global_step": 8}'), "iteration-3"),
    ):
        whole = (folder / file).read_bytes()
        damage(folder / file)
        before = sorted(folder.parent.rglob("*"))
        shop.attempt(NAME).refuses(words)
        assert sorted(folder.parent.rglob("*")) == before
        (folder / file).write_bytes(whole)


def test_the_other_commands_take_it(tmp_path: Path) -> None:
    """A model loaded from a notebook's checkpoint gives the logits of the notebook's own model, and test_loss.py
    measures the checkpoint's loss on the dataset that the run's train.json names."""
    shop, notebook, folder = workshop(tmp_path, tie_weights=True)
    files = [str(shop.runs / "r" / "model.json"), str(folder / "model.safetensors")]
    model = load_model(load_model_config(Path(files[0])), Path(files[1]), torch.device("cpu"))
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        assert (model(tokens) - notebook.model(tokens)).abs().max() < 1e-5
    printed = shop.script("test_loss.py", str(shop.datasets), *files).stdout
    assert printed.startswith("Loss on the test split: ")


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="needs GPT-2's vocabulary")
def test_the_commands_with_text_take_it(tmp_path: Path) -> None:
    """The commands that read or write text take a notebook's checkpoint. Its meta.json names no tokenizer, so they use
    GPT-2's."""
    shop, notebook, folder = workshop(tmp_path, vocab_size=50257, context_length=64)
    files = [str(shop.runs / "r" / "model.json"), str(folder / "model.safetensors")]
    assert shop.script("test_smoke.py", *files).stdout.startswith("Every effort moves you")
    entries = [{"instruction": f"Say {number}.", "input": "", "output": "It is."} for number in range(20)]
    (tmp_path / "d.json").write_text(json.dumps(entries))
    options = ["--data", str(tmp_path / "d.json"), "--max-epochs", "1", "--max-new-tokens", "5", "--responses-only"]
    assert "2 answers" in shop.script("test_ift.py", *files, *options).stdout
    shop.script("convert_hf.py", "export", str(folder), str(tmp_path / "hf"))
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    inputs = tokenizer("Every effort moves you", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert (theirs(inputs).logits - notebook.model(inputs)).abs().max() < 1e-5


def test_two_ranks_continue_it_or_start_from_its_weights(tmp_path: Path) -> None:
    """Two ranks resume from a notebook's checkpoint. With `initial_weights`, training starts at step 0 from its weights
    on all ranks, with a new optimizer."""
    shop, _, folder = workshop(tmp_path)
    assert "256 tokens\n  are counted as seen" in shop.train("r", NAME, ranks=2).stdout
    assert meta_of(shop.runs / "r")["tokens_seen"] == 12 * 32
    initial = f"../r/checkpoints/{NAME}/model.safetensors"
    shop.add_run("s", **SETTINGS, learning_rate=1e-12, initial_weights=initial)
    result = shop.train("s", ranks=2)
    assert "starting from ../r/checkpoints" in result.stdout
    start = load_file(folder / "model.safetensors")
    for name, tensor in weights_of(shop.runs / "s").items():
        torch.testing.assert_close(tensor, start[name], rtol=0, atol=1e-8, msg=name)


def test_moments_of_fewer_key_and_value_heads_are_joined_in_their_order() -> None:
    """AdamW's moments of query, key and value, which the notebook stores separately, are joined into those of the fused
    tensor, also if there are fewer key and value heads."""

    def adamw(*shape: int) -> dict[str, torch.Size]:
        return {"step": torch.Size(), "exp_avg": torch.Size(shape), "exp_avg_sq": torch.Size(shape)}

    qkv = "trf_blocks.0.att.qkv.weight"
    shapes = {name: adamw(6, 16) for name in ("tok_emb.weight", "pos_emb.weight", "out_head.weight")}
    shapes |= {qkv: adamw(32, 16), "final_norm.scale": adamw(16)}
    # Shapes of both embeddings, query, key, value, the norm and the head.
    numbered: dict[int, dict[str, Any]] = {
        index: {"step": 3.0, "exp_avg": torch.randn(*rows), "exp_avg_sq": torch.rand(*rows).double()}
        for index, rows in enumerate([(6, 16), (6, 16), (16, 16), (8, 16), (8, 16), (16,), (6, 16)])
    }
    ours = optimizer_by_name({"state": numbered}, shapes)
    assert ours.keys() == shapes.keys()
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours[qkv][key], torch.cat([numbered[index][key].float() for index in (2, 3, 4)]))
        assert torch.equal(ours["out_head.weight"][key], numbered[6][key].float())
    for name, state in ours.items():
        assert {key: value.shape for key, value in state.items()} == shapes[name]
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert state["step"] == 3
    with pytest.raises(ValueError, match=re.escape(f"exp_avg of {qkv} is [32, 16], not [48, 16]")):
        optimizer_by_name({"state": numbered}, shapes | {qkv: adamw(48, 16)})


def test_a_mixture_of_experts_is_the_notebooks_with_its_optimizers_state() -> None:
    moe = {"num_experts": 3, "num_active_experts": 2}
    config = ModelConfig(**{**MODEL, "drop_rate": 0.0, "moe": moe})
    torch.manual_seed(5)
    theirs, ours = notebook_model(config), GPTModel(config)
    ours.load_checkpoint_tensors(theirs.state_dict(), Path("model.safetensors"))
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-5)
    optimizer = torch.optim.AdamW(theirs.parameters())
    theirs(tokens).square().mean().backward()
    optimizer.step()
    own = AdamW(ours, TrainConfig.model_validate(SEED_TRAIN))
    found = optimizer_by_name(optimizer.state_dict(), own.state_shapes())
    for name, parameter in theirs.named_parameters():
        if name in found:
            assert torch.equal(found[name]["exp_avg"], optimizer.state[parameter]["exp_avg"]), name
    assert {name for name in found if ".ff." in name} == {name for name in theirs.state_dict() if ".ff." in name}
    own.load_named_state(found)
