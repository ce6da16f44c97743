"""The lab notebook's model as its author published it: wrapped for transformers."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from gpt import ModelConfig
from tests.support.notebook_model import notebook_model


class PublishedConfig(PretrainedConfig):
    """Configuration like the one that the author's GPJTGPT2Config makes from model.json."""

    model_type = "gpjtgpt2"

    def __init__(self, cfg: dict[str, Any] | None = None, **others: Any) -> None:
        self.cfg = cfg
        if cfg is not None:
            self.num_hidden_layers = cfg["n_layers"]
        super().__init__(**others)
        self.tie_word_embeddings = False
        self.use_cache = False
        self.bos_token_id = self.eos_token_id = self.pad_token_id = 50256


class PublishedModel(PreTrainedModel):
    """The author's wrapper around the book's model. The author's models on the Hub were saved from it by
    transformers."""

    config_class = PublishedConfig

    def __init__(self, config: PublishedConfig) -> None:
        super().__init__(config)
        assert config.cfg is not None
        if config.cfg.get("tie_weights"):
            self._tied_weights_keys = {"model.out_head.weight": "model.tok_emb.weight"}
        self.model = notebook_model(ModelConfig(**config.cfg))
        self.post_init()
