"""The whole way of a checkpoint after its training, by the real commands: fine-tuned and judged, exported and sampled,
scored by lm-eval both ways, published, and downloaded again. In this order: each test goes on from the one before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from harness.evaluation.instruct.responses import read_responses
from tests.support.benchmark_files import write_task
from tests.support.fake_hub import FakeHub
from tests.support.fake_judge import FakeJudge, score
from tests.support.launch import Result, Workshop

pytestmark = pytest.mark.slow


PROMPT = "Below is an instruction"
ENTRIES = [
    {"instruction": f"Return {number} as text.", "input": "" if number % 3 else "x", "output": f'return "{number}"'}
    for number in range(40)
]


class Journey:
    """A checkpoint, and the places that it comes through."""

    def __init__(self, shop: Workshop, path: Path) -> None:
        self.shop, self.path = shop, path
        self.run = shop.runs / "quickstart-gpt2"
        self.tuned, self.exported = path / "tuned", path / "exported"

    def do(self, script: str, *arguments: str, **environment: str) -> Result:
        result = self.shop.command(script, *arguments, environment=environment)
        assert result.status == 0, result.stderr
        return result

    def files(self, folder: Path) -> list[str]:
        return [str(folder / "model.json"), str(folder / "model.safetensors")]

    def sample(self, folder: Path) -> str:
        options = ["--prompt", PROMPT, "--num-tokens", "30", "--temperature", "0"]
        return self.do("test_smoke.py", *self.files(folder), *options).stdout


@pytest.fixture(scope="module")
def journey(quickstart_gpt2: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    return Journey(quickstart_gpt2, tmp_path_factory.mktemp("journey"))


def test_fine_tuned_and_judged(journey: Journey) -> None:
    data = journey.path / "instructions.json"
    data.write_text(json.dumps(ENTRIES))
    checkpoint = [str(journey.run / "model.json"), str(journey.run / "checkpoints" / "best" / "model.safetensors")]
    responses = journey.path / "responses.json"
    options = ["--data", str(data), "--max-epochs", "3", "--max-new-tokens", "25", "--responses", str(responses)]
    with FakeJudge() as judge:
        judged = ["--base-url", judge.url, "--save", str(journey.tuned)]
        key = {"OPENAI_API_KEY": "sk-loopback", "NO_PROXY": "127.0.0.1"}
        printed = journey.do("test_ift.py", *checkpoint, *options, *judged, **key).stdout
        assert len(judge.paid) == 4
        # Judged again by the other command: kept answers cost nothing.
        again = journey.do("judge_ift.py", str(responses), "--base-url", judge.url, **key).stdout
        assert len(judge.paid) == 4
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", printed)]
    assert losses[-1] < losses[0], "it has learnt something"
    answers = read_responses(responses).responses
    assert [answer.instruction for answer in answers] == [entry["instruction"] for entry in ENTRIES[34:38]]
    mean = fmean(score(answer.response, answer.output) for answer in answers)
    assert f"{mean:.2f}" in printed
    assert f"{mean:.2f}" in again


def test_a_card_of_the_fine_tuned_model_says_so(journey: Journey) -> None:
    card = journey.do("convert_hf.py", "publish", str(journey.tuned), "me/tuned", "--card").stdout
    assert "fine-tuned on the instructions of `instructions.json`" in card
    assert "from `quickstart-gpt2/" in card
    assert "    ### Response:" in card
    assert "has not been taught" not in card


def test_exported_and_sampled_by_transformers(journey: Journey) -> None:
    journey.do("convert_hf.py", "export", str(journey.tuned), str(journey.exported))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(journey.exported)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(journey.exported)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert journey.sample(journey.tuned) == tokenizer.decode(output[0], skip_special_tokens=True) + "\n"


def test_scored_alike_by_lm_eval_both_ways(journey: Journey, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(journey.path / "cache"))
    tasks = [str(write_task(journey.path, kind, count=12)) for kind in ("choice", "last_word")]
    output = journey.path / "scores.json"
    arguments = [*journey.files(journey.tuned), "--tasks", ",".join(tasks), "--output", str(output)]
    cache = {"HF_DATASETS_CACHE": str(journey.path / "cache"), "HF_DATASETS_OFFLINE": "1"}
    printed = journey.do("evaluate_benchmarks.py", *arguments, **cache).stdout
    ours = json.loads(output.read_text())["results"]
    options: dict[str, Any] = {"device": "cpu", "batch_size": 4, "dtype": "float32"}
    peer = HFLM(pretrained=str(journey.exported), **options)
    manager = TaskManager(include_defaults=False)
    theirs = lm_eval.simple_evaluate(model=peer, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)["results"]
    assert ours.keys() == theirs.keys()
    for task, row in theirs.items():
        metrics = {key: value for key, value in row.items() if "," in key and "stderr" not in key}
        assert len(metrics) == 2
        for key, value in metrics.items():
            if "perplexity" in key:
                assert ours[task][key] == pytest.approx(value, rel=1e-5)
            else:
                assert ours[task][key] == value
                assert f"{value:.4f}" in printed


def test_published_and_downloaded_again(journey: Journey) -> None:
    with FakeHub() as hub:
        home = hub.environment(journey.path / "home") | {"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        best = journey.run / "checkpoints" / "best"
        options = ["--datasets-dir", str(journey.shop.datasets)]
        journey.do("convert_hf.py", "publish", str(best), "me/quickstart", *options, **home)
        assert hub.models["me/quickstart"].private
        card = hub.models["me/quickstart"].files["README.md"].content.decode()
        measured = journey.do(
            "test_loss.py", str(journey.shop.datasets), str(journey.run / "model.json"), str(best / "model.safetensors")
        ).stdout
        assert f"| test | {measured.split()[5]} |" in card
        into = ["me/quickstart", "back", "--runs-dir", str(journey.path / "runs")]
        journey.do("convert_hf.py", "import", *into, **home)
    back, sent = load_file(journey.path / "runs" / "back" / "model.safetensors"), load_file(best / "model.safetensors")
    assert back.keys() == sent.keys()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in back.items())
    original = journey.do(
        "test_smoke.py",
        str(journey.run / "model.json"),
        str(best / "model.safetensors"),
        "--prompt",
        PROMPT,
        "--num-tokens",
        "30",
        "--temperature",
        "0",
    ).stdout
    assert journey.sample(journey.path / "runs" / "back") == original
