"""Model card for the Hub, from the files of the run that made the model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from harness.evaluation.instruct.responses import Instruction
from harness.evaluation.loss import TestLoss
from harness.hf.formats import OWN_TYPE
from harness.model.config import ModelConfig
from harness.runs.summary import RunSummary

CHART = "training-run-chart.png"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class ModelFacts:
    """All that is known; a notebook's checkpoint or an imported model has little of it."""

    name: str  # owner/name
    config: ModelConfig
    model_type: str  # of transformers' class, native or our own, that it is exported to
    meta: dict[str, Any]  # of the checkpoint
    summary: RunSummary | None = None
    test: TestLoss | None = None
    license: str | None = None
    has_chart: bool = False

    @property
    def train(self) -> dict[str, Any]:
        train = self.meta.get("train")
        return train if isinstance(train, dict) else {}

    def number(self, key: str) -> Any:
        """A number of meta.json, which another program may have written; None if it is none."""
        value = self.meta.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return value if is_number else None

    @property
    def dataset(self) -> str | None:
        dataset = self.meta.get("dataset")
        name = dataset.get("name") if isinstance(dataset, dict) else None
        return name if isinstance(name, str) else None


def model_card(facts: ModelFacts) -> str:
    """The repository's README.md."""
    front = ["---", _front_matter(facts).to_yaml(), "---", ""]
    return "\n".join([*front, *_summary(facts), *_use(facts), *_results(facts), *_training(facts), ""])


def _front_matter(facts: ModelFacts) -> ModelCardData:
    results = None
    if facts.test:
        text = facts.test.text
        result = EvalResult(
            task_type="text-generation",
            dataset_type=text.dataset,
            dataset_name=f"{text.dataset}, {text.split}",
            metric_type="loss",
            metric_name="loss (nats per token)",
            metric_value=round(facts.test.loss, 4),
        )
        results = [result]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts.license,
        datasets=[facts.dataset] if facts.dataset and not facts.dataset.startswith("builtin/") else None,
        tags=[facts.model_type, "ddp-pretrain"],
        model_name=facts.name if results else None,
        eval_results=results,
    )


def _summary(facts: ModelFacts) -> Iterator[str]:
    config, tokens = facts.config, facts.number("tokens_seen")
    yield from (f"# {facts.name.split('/')[-1]}", "")
    seen = f" on {tokens:,} tokens of {_code(facts.dataset)}" if tokens and facts.dataset else ""
    if facts.meta.get("fine_tuned_from"):
        data = facts.meta.get("data")
        on = f" of {_code(data.get('file'))}" if isinstance(data, dict) else ""
        yield f"A GPT-2-class model of {config.parameters:,} parameters, fine-tuned on the instructions{on}"
        yield f"from {_code(facts.meta['fine_tuned_from'])}. It expects them in Alpaca's form:"
        yield from ("", *_indented_text(Instruction("…", "", "").prompt), "")
        return
    yield f"A GPT-2-class base model of {config.parameters:,} parameters, pre-trained{seen}: it continues text,"
    yield "and has not been taught to follow instructions or to refuse anything."
    if facts.meta.get("imported_from"):
        yield f"Its weights were imported from {_code(facts.meta['imported_from'])}."
    yield ""


def _use(facts: ModelFacts) -> Iterator[str]:
    yield from ("## How to use it", "", "```python")
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer"
    yield ""
    yield f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(facts.name)})"
    trust = ", trust_remote_code=True" if facts.model_type == OWN_TYPE else ""
    yield f"model = AutoModelForCausalLM.from_pretrained({json.dumps(facts.name)}{trust})"
    yield 'inputs = tokenizer("Every effort moves you", return_tensors="pt")'
    yield "output = model.generate(**inputs, max_new_tokens=40, do_sample=True, top_k=25)"
    yield "print(tokenizer.decode(output[0]))"
    yield from ("```", "", f"It sees at most {facts.config.context_length:,} tokens at once.", "")


def _results(facts: ModelFacts) -> Iterator[str]:
    losses = [
        ("training", facts.number("train_loss"), _trained_on(facts)),
        ("validation", facts.number("val_loss"), _validated_on(facts)),
    ]
    if facts.test:
        on = f"{_code(facts.test.text.dataset)}, {facts.test.text.split} split"
        losses.append(("test", facts.test.loss, on))
        if facts.test.bits_per_byte is not None:
            about = "" if facts.test.is_exact else " (approximate)"
            losses.append((f"test, bits per byte of text{about}", facts.test.bits_per_byte, on))
    known = [(what, value, on) for what, value, on in losses if value is not None]
    if not known:
        return
    yield from ("## Results", "", "| loss | nats per token, if not said otherwise | on |", "|---|---|---|")
    yield from (f"| {what} | {value:.3f} | {on} |" for what, value, on in known)
    yield ""
    if facts.has_chart:
        yield from (f"![Losses over the training]({CHART})", "")


def _trained_on(facts: ModelFacts) -> str:
    """The training loss of a checkpoint is a mean over the steps before it, on what they learnt from."""
    if not facts.dataset:
        return NOT_RECORDED
    start, seen = _count(facts.train.get("start_train_token")), _count(facts.meta.get("tokens_seen"))
    where = f" of tokens {start:,} to {start + seen:,}" if start is not None and seen else ""
    return f"{_code(facts.dataset)}, train split, the last steps{where}"


def _validated_on(facts: ModelFacts) -> str:
    if not facts.dataset:
        return NOT_RECORDED
    keys = ("start_val_token", "validation_batches", "microbatch_size")
    start, batches, rows = (_count(facts.train.get(key)) for key in keys)
    where = ""
    if start is not None and batches and rows:
        where = f", tokens {start:,} to {start + batches * rows * facts.config.context_length:,}"
    return f"{_code(facts.dataset)}, validation split{where}, at the last validation"


def _count(value: Any) -> int | None:
    """A number of tokens or batches in a file that another program may have written."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _training(facts: ModelFacts) -> Iterator[str]:
    yield from ("## Training", "", "| | |", "|---|---|")
    yield from (f"| {what} | {value} |" for what, value in _training_rows(facts))
    yield from ("", "The shape of the model (model.json):", "")
    yield from _indented(facts.config.model_dump(mode="json"))
    if facts.train:
        yield from ("", "How it was trained (train.json, with defaults filled in):", "")
        yield from _indented(facts.train)


def _training_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    meta, summary = facts.meta, facts.summary
    if facts.dataset:
        yield "data", _code(facts.dataset)
    if facts.number("tokens_seen"):
        yield "tokens", f"{meta['tokens_seen']:,}"
    if facts.number("global_step") is not None:
        yield "global steps", f"{meta['global_step'] + 1:,}"
    if summary:
        yield "machine", f"{summary.world_size} × {_plain(summary.device)}"
        if summary.tokens_per_second is not None:
            yield "speed", f"{summary.tokens_per_second:,.0f} tokens per second"
        if summary.seconds:
            yield "time of the whole run", _phases(summary.seconds, "{:,.0f} s")
        if summary.dollars:
            yield "cost of the whole run", _phases(summary.dollars, "${:,.2f}")
    yield "made with", "ddp-pretrain" + (f", torch {_plain(meta['torch'])}" if meta.get("torch") else "")


def _phases(amounts: Mapping[str, float], form: str) -> str:
    parts = ", ".join(f"{phase} {form.format(amount)}" for phase, amount in amounts.items() if phase != "total")
    return f"{form.format(amounts.get('total', sum(amounts.values())))} ({parts})"


def _indented(value: Any) -> Iterator[str]:
    return _indented_text(json.dumps(value, indent=2))


def _indented_text(text: str) -> Iterator[str]:
    return (f"    {line}".rstrip() for line in text.splitlines())


def _code(text: Any) -> str:
    """Text that no reader of the card takes for markup."""
    return f"`{_plain(text)}`"


def _plain(text: Any) -> str:
    return " ".join(str(text).replace("`", "'").replace("|", "/").split())
