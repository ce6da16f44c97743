"""Publication of a model on the Hugging Face Hub: the upload of its exported folder, and its model card."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from jinja2 import Environment, StrictUndefined

from harness.common.hub import CARD, HubWork, upload
from harness.common.json_files import read_json_object
from harness.common.messages import amount_text
from harness.evaluation.instruct.responses import Instruction
from harness.evaluation.loss import TestLoss
from harness.hf.formats import OWN_TYPE
from harness.model.export_formats import native_class
from harness.runs.summary import read_summary
from harness.runs.train_config import TrainConfig
from harness.runs.trained_model import TrainedModel

CHART = "training-run-chart.png"
TRAINING = "training"  # the repository's folder for the files of the run
NOT_RECORDED = "not recorded"
TEMPLATE = Path(__file__).with_name("model_card.md.j2")
# Code of a model that transformers has no class for, and files that transformers would load together with the weights
# although no export writes them.
COMPANIONS = {
    *("gpt.py", "inference.py", "modeling_ddp_pretrain.py"),
    *("adapter_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt"),
    *("special_tokens_map.json", "tokenizer.model", "vocab.json"),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts for the model card. Most of them are missing for an imported model."""

    name: str  # owner/name
    files: TrainedModel
    tests: Sequence[TestLoss] = ()
    license: str | None = None

    @property
    def train(self) -> dict[str, Any]:
        """Keys of train.json that meta.json records; empty if it records none."""
        train = self.files.meta.get("train")
        return train if isinstance(train, dict) else {}

    @property
    def records_training(self) -> bool:
        """True if meta.json records that the model was trained or fine-tuned; False for an imported model."""
        return any(key in self.files.meta for key in ("train", "global_step", "tokens_seen", "fine_tuned_from"))


def upload_model(exported: Path, facts: ModelFacts, *, public: bool) -> str:
    """Upload the exported folder, the model card and the files of the model's run to the repository `facts.name`, in
    one commit. Return the repository's address.

    - The keys of train.json that can hold secrets are left out.
    - A new repository is private unless `public` is true. An existing one keeps its visibility.
    - Weights, code, chart and run files of an earlier upload are replaced or deleted.

    Raises UserError if the run's train.json is not a JSON object, if the upload fails, or as `model_card` does.
    """
    by_hand = "export the model and upload the folder by hand"
    work = HubWork(facts.name, "model", exported, "the repository's name", by_hand, verb="write to")
    files: dict[str, Path | bytes] = {path.name: path for path in sorted(exported.iterdir())}
    if run := facts.files.run:
        known = [run.model_json, run.metrics, run.summary]
        files |= {f"{TRAINING}/{path.name}": path for path in known if path.is_file()}
        if run.train_json.is_file():
            secret = {key for key, field in TrainConfig.model_fields.items() if field.exclude}
            kept = {key: value for key, value in read_json_object(run.train_json).items() if key not in secret}
            files[f"{TRAINING}/{run.train_json.name}"] = (json.dumps(kept, indent=2) + "\n").encode()
        files |= {CHART: run.chart} if run.chart.is_file() else {}
    files[CARD] = model_card(facts).encode()
    step = facts.files.meta.get("global_step")
    message = f"{facts.name}: " + ("weights" if step is None else f"weights after global step {step}")

    def is_of_model(path: str) -> bool:
        """Return True if a file with this path, left from an earlier upload, would pass for a file of the new model."""
        weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
        is_read = "/" not in path and (path.endswith(weights) or path in COMPANIONS)
        return is_read or path.startswith(f"{TRAINING}/") or path == CHART

    return upload(work, files, message, public=public, is_replaced=is_of_model)


# The model card --------------------------------------------------------------------------------------------------


def model_card(facts: ModelFacts) -> str:
    """Return the model card, which is the README.md of the repository. Raises UserError if the run's summary.json is
    not valid, or if its train.json is not valid and meta.json does not name the dataset."""
    config, run = facts.files.config, facts.files.run
    model_type = native_class(config) or OWN_TYPE
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters |= {"code": _code, "indented": lambda text: textwrap.indent(text, "    ")}
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        facts=facts,
        config=config,
        meta={"fine_tuned_from": None, "imported_from": None, "data": None, **facts.files.meta},
        front_matter=_front_matter(facts, model_type).to_yaml(),
        name=json.dumps(facts.name),
        tokens=_number(facts.files.meta, "tokens_seen"),
        prompt=Instruction(instruction="…", input="", output="").prompt.rstrip("\n"),
        brings_code=model_type == OWN_TYPE,
        losses=[row for row in _losses(facts) if row[1] is not None],
        chart=CHART if run is not None and run.chart.is_file() else None,
        rows=list(_training_rows(facts)),
        shape=json.dumps(config.model_dump(mode="json"), indent=2),
        train=json.dumps(facts.train, indent=2),
    )


def _front_matter(facts: ModelFacts, model_type: str) -> ModelCardData:
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=test.text.dataset,
            dataset_name=f"{test.text.dataset}, {test.text.split}",
            metric_type="loss",
            metric_name="loss (nats per token)",
            metric_value=round(test.loss, 4),
        )
        for test in facts.tests
    ]
    names = [name for name in facts.files.datasets if not name.startswith("builtin/")]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts.license,
        datasets=names or None,
        tags=[model_type, "ddp-pretrain"],
        model_name=facts.name if results else None,
        eval_results=results or None,
    )


def _losses(facts: ModelFacts) -> Iterator[tuple[str, float | None, str]]:
    """Yield each loss: its name, its value, and a description of the tokens it was measured on. The value is in nats
    per token if the name gives no other unit. A value that is not known is None."""
    trained_on = validated_on = NOT_RECORDED
    if facts.files.dataset:
        keys = ("start_train_token", "start_val_token", "validation_sequences", "validation_batches", "microbatch_size")
        start, first, sequences, batches, rows = (_number(facts.train, key) for key in keys)
        seen = _number(facts.files.meta, "tokens_seen")
        where = f" of the training on tokens {start:,} to {start + seen:,}" if start is not None and seen else ""
        is_mixture = len(facts.files.datasets) > 1
        if facts.train.get("shuffle") or facts.train.get("epochs") or is_mixture:
            where = f" of the training on {seen:,} tokens" if seen else ""
        trained_on = f"{_code(facts.files.dataset)}, train split, the last steps{where}"
        where = ""
        if batches and rows:
            sequences = batches * rows
        if first is not None and sequences:
            end = first + sequences * facts.files.config.context_length
            where = f", {sequences:,} sequences" if is_mixture else f", tokens {first:,} to {end:,}"
        validated_on = f"{_code(facts.files.dataset)}, validation split{where}, at the last validation"
    yield "training", _number(facts.files.meta, "train_loss"), trained_on
    yield "validation", _number(facts.files.meta, "val_loss"), validated_on
    for test in facts.tests:
        on = f"{_code(test.text.dataset)}, {test.text.split} split"
        yield "test", test.loss, on
        about = "" if test.is_exact else " (approximate)"
        yield f"test, bits per byte of text{about}", test.bits_per_byte, on


def _number(values: Mapping[str, Any], key: str) -> Any:
    """Return the number under `key`, or None if there is no finite number of at least 0. Another program may have
    written `values`."""
    value: Any = values.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and 0 <= value < math.inf else None


def _training_rows(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table on training: a name and a value as text."""
    meta, run = facts.files.meta, facts.files.run
    if facts.files.dataset:
        yield "data", _code(facts.files.dataset)
    if tokens := _number(meta, "tokens_seen"):
        yield "tokens", f"{tokens:,}"
    if (step := _number(meta, "global_step")) is not None:
        yield "global steps", f"{step + 1:,}"
    if run is not None and run.summary.is_file():
        summary = read_summary(run.summary)
        yield "machine", f"{summary.world_size} × {_plain(summary.device)}"
        if summary.tokens_per_second is not None:
            yield "speed", f"{summary.tokens_per_second:,.0f} tokens per second"
        if summary.seconds:
            yield "time of the whole run", _phases(summary.seconds, "{:,.0f} s".format)
        if summary.dollars:
            yield "cost of the whole run", _phases(summary.dollars, lambda dollars: f"${amount_text(dollars)}")
    torch_version = f", torch {_plain(meta['torch'])}" if meta.get("torch") else ""
    yield "made with" if facts.records_training else "published with", f"ddp-pretrain{torch_version}"


def _phases(amounts: Mapping[str, float], form: Callable[[float], str]) -> str:
    parts = ", ".join(f"{phase} {form(amount)}" for phase, amount in amounts.items() if phase != "total")
    return f"{form(amounts.get('total', sum(amounts.values())))} ({parts})"


def _code(text: Any) -> str:
    """Return the text as inline code, without characters that Markdown would interpret."""
    return f"`{_plain(text)}`"


def _plain(text: Any) -> str:
    return " ".join(str(text).replace("`", "'").replace("|", "/").split())
