"""Upload of a model to the Hugging Face Hub: the exported folder, its card, and the files of the run that made it."""

from __future__ import annotations

from pathlib import Path

from harness.common.hub import CARD, HubWork, upload
from harness.hf.model_card import CHART, ModelFacts, model_card

TRAINING = "training"  # the repository's folder for the files of the run
# Files that transformers would load together with the weights, but that no export writes.
COMPANIONS = {
    *("adapter_config.json", "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt"),
    *("special_tokens_map.json", "tokenizer.model", "vocab.json"),
}


def upload_model(exported: Path, facts: ModelFacts, *, public: bool) -> str:
    """Upload an exported folder with its card as one commit to the model repository `facts.name`. Returns the
    repository's address. Raises UserError if the upload fails.
    """
    work = HubWork(
        facts.name,
        "model",
        exported,
        "the repository's name",
        "export the model and upload the folder by hand",
        "running the same command again sends what is missing",
        verb="write to",
    )
    files: dict[str, Path | bytes] = {path.name: path for path in sorted(exported.iterdir())}
    if run := facts.files.run:
        known = [run.model_json, run.train_json, run.metrics, run.summary]
        files |= {f"{TRAINING}/{path.name}": path for path in known if path.is_file()}
        files |= {CHART: run.chart} if run.chart.is_file() else {}
    files[CARD] = model_card(facts).encode()
    step = facts.files.meta.get("global_step")
    message = f"{facts.name}: " + ("weights" if step is None else f"weights after global step {step}")

    def is_models(path: str) -> bool:
        """Return True if readers would take a file with this path, left from an earlier upload, for a file of the new
        model."""
        weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
        is_read = "/" not in path and (path.endswith(weights) or path in COMPANIONS)
        return is_read or path.startswith(f"{TRAINING}/") or path == CHART

    return upload(work, files, message, public=public, is_replaced=is_models)
