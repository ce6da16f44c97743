"""Files that an earlier version wrote are read as that version would read them, and its runs can be resumed.

The folders in fixtures/ were written by the version before `CheckpointMeta`, `RunSummary` and the events became
classes. `one_rank` and `two_ranks` are finished runs, each with one checkpoint from before the end. `older` has files
with the keys of a still earlier version.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt import load_model, load_model_config
from harness.data.tokenizers import train_bpe
from harness.model.tensor_names import META
from harness.runs.checkpoint_meta import CheckpointMeta, read_meta, write_meta
from harness.runs.checkpoints import list_checkpoints, load_checkpoint, verify_checkpoint
from harness.runs.directory import RunDirectory
from harness.runs.metrics import Event, MetricsFile, TrainEvent, ValidationEvent, read_metrics
from harness.runs.summary import read_summary, write_summary
from tests.support.in_process import InProcess
from tests.support.launch import DATASET, TIMES, metrics

FIXTURES = Path(__file__).parent / "fixtures"
RUNS = ("one_rank", "two_ranks")


def checkpoint_of(run: Path) -> Path:
    [(_, path)] = list_checkpoints(run / "checkpoints")
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> InProcess:
    made = InProcess(tmp_path_factory.mktemp("earlier"))
    made.add_dataset(largest=15)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_as_it_did(shop: InProcess, name: str) -> None:
    """A run of an earlier version, resumed by this one from the middle, has the losses and gradients that the earlier
    version recorded, to 1e-4. The last bits differ because this version sums the loss in another order. Its files have
    the same keys in the same order."""
    then, written_by = FIXTURES / name, json.loads((FIXTURES / name / "written_by.json").read_text())
    run = Path(shutil.copytree(then, shop.runs / name))
    start = checkpoint_of(run).name
    result = shop.train(name, start, ranks=written_by["ranks"])
    assert f"continuing from {start}" in result.stdout
    assert "train.json has changed" not in result.stdout
    for recorded, now in zip(metrics(then), metrics(run), strict=True):
        assert [key for key in now if key != "dollars"] == list(recorded)
        for key in recorded.keys() - TIMES:
            value = recorded[key]
            assert now[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), key
    meta, summary = read_meta(run / "checkpoints" / "latest"), read_summary(run / "summary.json")
    assert (meta.global_step, meta.precision) == (written_by["final_step"], "fp32"), "the run must keep its precision"
    assert summary.measured is not None
    assert summary.measured.tokens == summary.tokens_seen, "seconds of the earlier version on an equal machine count"
    # the keys that the earlier version did not have
    new = {"precision", "versions", "commit", "last_step", "reported_loss", *LEVEL}
    keys = [key for key in raw_meta(run / "checkpoints" / "latest") if key not in {*new, "dollars"}]
    assert keys == list(raw_meta(checkpoint_of(then)))
    summaries = [json.loads((each / "summary.json").read_text()) for each in (then, run)]
    for part in (lambda each: each, lambda each: each["seconds"], lambda each: each["measured"]):
        before, now = (part(each) for each in summaries)
        assert [key for key in now if key not in new] == list(before)


# The level of the training loss, which that version did not follow: it begins anew.
LEVEL: dict[str, object] = dict.fromkeys(("loss_level", "lowest_loss_level", "lowest_val_loss"))
LEVEL |= {"above_level_since": None, "level_reports": 0, "has_diverged": False}


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_whole_and_says_what_it_said(name: str, tmp_path: Path) -> None:
    path = checkpoint_of(FIXTURES / name)
    verify_checkpoint(path)
    loaded = load_checkpoint(path)  # uses torch.load with weights_only, so the files have only tensors and plain values
    assert len(loaded.train_state["ranks"]) == loaded.meta.world_size == (1 if name == "one_rank" else 2)
    assert not loaded.meta.model_extra
    state = loaded.meta.state()
    assert (state.global_step, state.best_step, state.measured_from_step) == (5, 5, -1)
    recorded = {key: value for key, value in raw_meta(path).items() if key in vars(state)}
    assert state.values() == {**recorded, **LEVEL, "reported_loss": None}
    hashes = {key: value for key, value in loaded.meta.sha256.items() if key != META}
    write_meta(tmp_path, loaded.meta.model_copy(update={"sha256": hashes}))
    assert (tmp_path / META).read_bytes() == (path / META).read_bytes()


def raw_meta(path: Path) -> dict[str, object]:
    return json.loads((path / META).read_text())


@pytest.mark.parametrize("name", RUNS)
def test_summary_and_metrics_are_read_and_written_as_they_were(name: str, tmp_path: Path) -> None:
    summary = read_summary(FIXTURES / name / "summary.json")
    assert not summary.model_extra
    assert summary.tokens_seen == summary.trained_tokens == 1280
    assert summary.model == raw_meta(checkpoint_of(FIXTURES / name))["model"]
    write_summary(RunDirectory(tmp_path), summary)
    for event in read_metrics(FIXTURES / name / "metrics.jsonl"):
        assert type(event) is not Event
        assert not event.model_extra
        MetricsFile(tmp_path / "metrics.jsonl").append(event)
    for file in ("summary.json", "metrics.jsonl"):
        assert (tmp_path / file).read_bytes() == (FIXTURES / name / file).read_bytes()


def test_files_with_fewer_keys() -> None:
    """Files of a still earlier version (fixtures/older) do not record where their tokens were trained, so the speed of
    a resumed run is measured from the checkpoint on."""
    meta = CheckpointMeta.model_validate_json((FIXTURES / "older" / META).read_text())
    state = meta.state()
    assert (state.measured_from_step, state.measured_from_tokens) == (meta.global_step, meta.tokens_seen)
    assert state.measured_from_seconds == meta.seconds["training"] > 0
    assert (meta.interrupted_evaluation, meta.is_from_notebook, meta.device) == (None, False, None)
    summary = read_summary(FIXTURES / "older" / "summary.json")
    assert (summary.measured, summary.trained_tokens) == (None, None)
    assert summary.tokens_per_second is not None


def test_lines_with_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        '{"event": "train", "global_step": 1, "loss": NaN, "temperature": 3}',
        '{"event": "later", "global_step": 2}',
    ]
    path.write_text(
        "\n".join([*lines, '{"event": "validation"}', "5", '{"event": "validation", "global_step": 3, "lo'])
    )
    train, other = read_metrics(path)
    assert isinstance(train, TrainEvent)
    assert (train.loss, train.mfu, train.model_extra) == (None, None, {"temperature": 3})
    assert (type(other), other.event) == (Event, "later")
    MetricsFile(path).append(ValidationEvent(global_step=3, loss=float("inf")))
    assert path.read_text().endswith('{"event": "validation", "global_step": 3, "loss": null}\n')


def write_with_text(run: Path) -> list[str]:
    """Enlarge the vocabulary and context of an earlier version's run so that it can process text, add a tokenizer to
    its checkpoint, and return the paths of model.json and of the weights. The names of tensors, keys and files stay
    those of the earlier version."""
    checkpoint, sizes = checkpoint_of(run), {"vocab_size": 280, "context_length": 256}
    weights = load_file(checkpoint / "model.safetensors")
    for name, rows in {"tok_emb": 280, "out_head": 280, "pos_emb": 256}.items():
        old = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = old.repeat(rows // len(old) + 1, 1)[:rows].contiguous()
    save_file(weights, checkpoint / "model.safetensors")
    texts = ["Say it, and say it again, as often as you can say that it is said."] * 9
    train_bpe(iter(texts), 280, checkpoint / "t.json")
    (run / "model.json").write_text(json.dumps(json.loads((run / "model.json").read_text()) | sizes))
    meta: dict[str, Any] = json.loads((checkpoint / META).read_text())
    meta |= {"model": meta["model"] | sizes, "tokenizer": "t.json", "sha256": {}}
    (checkpoint / META).write_text(json.dumps(meta))
    return [str(run / "model.json"), str(checkpoint / "model.safetensors")]


@pytest.mark.slow
def test_the_other_commands_take_a_checkpoint(shop: InProcess, tmp_path: Path) -> None:
    """test_loss.py measures an earlier version's checkpoint. With a tokenizer added, test_smoke.py samples from it,
    test_ift.py fine-tunes it, and convert_hf.py exports it to a model with the same logits."""
    run = Path(shutil.copytree(FIXTURES / "one_rank", tmp_path / "run"))
    files = [str(run / "model.json"), str(checkpoint_of(run) / "model.safetensors")]
    printed = shop.script("test_loss.py", str(shop.datasets), *files, "--dataset", DATASET).stdout
    assert 0 < float(printed.splitlines()[0].removeprefix("Loss on the test split: ")) < math.log(16)
    files = write_with_text(run)
    assert shop.script("test_smoke.py", *files, "--prompt", "Say", "--num-tokens", "3").stdout.startswith("Say")
    (tmp_path / "data.json").write_text(json.dumps([{"instruction": "Say", "input": "", "output": "it"}] * 20))
    options = ["--data", str(tmp_path / "data.json"), "--max-epochs", "1", "--max-new-tokens", "3", "--responses-only"]
    assert "2 answers" in shop.script("test_ift.py", *files, *options).stdout
    shop.script("convert_hf.py", "export", str(checkpoint_of(run)), str(tmp_path / "hf"))
    import transformers

    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ours, tokens = (
        load_model(load_model_config(Path(files[0])), Path(files[1]), torch.device("cpu")),
        torch.arange(0, 280, 7)[None],
    )
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)
