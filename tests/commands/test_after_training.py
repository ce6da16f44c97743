"""A checkpoint after its training, with the real commands: fine-tuned and judged, exported and sampled, published, and
downloaded again.

Each test uses the results of the tests before it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from harness.data.tokenizers import load_tokenizer, train_bpe
from harness.evaluation.instruct.responses import Instruction, read_responses
from tests.support.fake_hub import FakeHub
from tests.support.fake_judge import FakeJudge, score
from tests.support.in_process import call
from tests.support.launch import Result, Workshop

pytestmark = pytest.mark.slow

VOCAB_SIZE = 400
SAMPLING = ["--prompt", "Below is an instruction", "--num-tokens", "30", "--temperature", "0"]
ENTRIES = [
    {"instruction": f"Return {number} as text.", "input": "" if number % 3 else "x", "output": f'return "{number}"'}
    for number in range(40)
]


class Journey:
    """A trained run, and the folders for what is made of its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.shop = Workshop(path)
        self.tuned, self.exported = path / "tuned", path / "exported"
        folder = self.shop.datasets / "me" / "text"
        folder.mkdir(parents=True)
        texts = [Instruction(**entry).prompt + entry["output"] for entry in ENTRIES]
        train_bpe(iter(texts), VOCAB_SIZE, folder / "tokenizer.json")
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        tokens = 4 * [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eot_token]]
        for split in ("train", "validation", "test"):
            save_file({"tokens": np.array(tokens, np.uint16)}, folder / f"{split}.safetensors")
        (folder / "meta.json").write_text(json.dumps({"description": "text", "tokenizer": "tokenizer.json"}))
        model = {"vocab_size": VOCAB_SIZE, "context_length": 128, "emb_dim": 32}
        self.run = self.shop.add_run("r", model=model, dataset="me/text", min_train_tokens=4096, learning_rate=1e-3)
        self.shop.train("r", ranks=1)
        self.best = self.run / "checkpoints" / "best"

    def do(self, script: str, *arguments: object, **environment: str) -> Result:
        result = call(script, *arguments, folder=self.shop.path, environment=environment)
        assert result.status == 0, result.stderr
        return result

    def sample(self, *model: object) -> str:
        return self.do("test_smoke", *model, *SAMPLING).stdout


@pytest.fixture(scope="module")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    return Journey(tmp_path_factory.mktemp("journey"))


def test_fine_tuned_and_judged(journey: Journey) -> None:
    (journey.shop.path / "instructions.json").write_text(json.dumps(ENTRIES))
    options = "r --data instructions.json --max-epochs 3 --max-new-tokens 25 --responses responses.json --save tuned"
    with FakeJudge() as judge:
        key = {"OPENAI_API_KEY": "sk-loopback", "NO_PROXY": "127.0.0.1"}
        printed = journey.do("test_ift", *options.split(), "--base-url", judge.url, **key).stdout
        assert len(judge.paid) == 4
        # The other command judges the same answers again. Judgments that were kept cost nothing.
        again = journey.do("judge_ift", "responses.json", "--base-url", judge.url, **key).stdout
        assert len(judge.paid) == 4
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", printed)]
    assert losses[-1] < losses[0], "it has learnt something"
    answers = read_responses(journey.shop.path / "responses.json").responses
    assert [answer.instruction for answer in answers] == [entry["instruction"] for entry in ENTRIES[34:38]]
    mean = fmean(score(answer.response, answer.output) for answer in answers)
    assert f"{mean:.2f}" in printed
    assert f"{mean:.2f}" in again


def test_a_card_of_the_fine_tuned_model_says_so(journey: Journey) -> None:
    card = journey.do("convert_hf", "publish", journey.tuned, "me/tuned", "--card").stdout
    assert "fine-tuned on the instructions of `instructions.json`" in card
    assert "from `r/" in card
    assert "    ### Response:" in card
    assert "has not been taught" not in card


def test_exported_and_sampled_by_transformers(journey: Journey) -> None:
    import transformers  # imported here because the quick tests load this file, too

    journey.do("convert_hf", "export", journey.tuned, journey.exported)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(journey.exported)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(journey.exported)
    inputs = tokenizer(SAMPLING[1], return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert journey.sample(journey.tuned) == tokenizer.decode(output[0], skip_special_tokens=True) + "\n"


def test_published_and_downloaded_again(journey: Journey) -> None:
    """A published model is the same after its download. Both commands run in their own processes, because
    huggingface_hub reads the Hub's address when it is imported."""
    with FakeHub() as hub:
        home = hub.environment(journey.shop.path / "home") | {"HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0"}
        for arguments in (
            ["publish", str(journey.best), "me/r", "--datasets-dir", str(journey.shop.datasets)],
            ["import", "me/r", "back", "--runs-dir", str(journey.shop.runs)],
        ):
            done = journey.shop.command("convert_hf.py", *arguments, environment=home)
            assert done.status == 0, done.stderr
        assert hub.models["me/r"].private
        card = hub.models["me/r"].files["README.md"].content.decode()
    measured = journey.do("test_loss", journey.shop.datasets, journey.best).stdout
    assert f"| test | {measured.split()[5]} |" in card
    back, sent = (load_file(folder / "model.safetensors") for folder in (journey.shop.runs / "back", journey.best))
    assert back.keys() == sent.keys()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in back.items())
    assert journey.sample(journey.shop.runs / "back") == journey.sample(journey.best)
