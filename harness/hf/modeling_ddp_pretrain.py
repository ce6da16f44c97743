"""Wrapper of the model of gpt.py, with the interface of transformers' models.

A copy of this file is exported with each model that transformers has no class for. `AutoModelForCausalLM` runs the copy
if `trust_remote_code` is true.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from gpt import GPTModel
from harness.model.inference import KeyValueCache


class DdpPretrainConfig(PretrainedConfig):
    """Contents of config.json. `shape` has the keys of model.json, and values computed from them, such as widths."""

    model_type = "ddp_pretrain"

    def __init__(self, shape: dict[str, Any] | None = None, **others: Any) -> None:
        self.shape = shape or {}
        super().__init__(**others)


class Shape(SimpleNamespace):
    """Shape of the model, with the attributes that gpt.py reads."""

    def __init__(self, shape: dict[str, Any]) -> None:
        moe = shape["moe"] and SimpleNamespace(**shape["moe"])
        super().__init__(**shape | {"moe": moe, "drop_rates": SimpleNamespace(**shape["drop_rates"])})

    def value_embedding_of(self, layer: int) -> int | None:
        return self.value_embedding_of_layers[layer]


class DdpPretrainForCausalLM(PreTrainedModel, GenerationMixin):
    """GPT model with the interface of transformers for evaluation and generation."""

    config_class = DdpPretrainConfig
    _supports_sdpa = True  # private: transformers has no public way to say that the model uses torch's attention
    accepts_loss_kwargs = False  # transformers' Trainer then divides the loss by the number of accumulation steps

    def __init__(self, config: DdpPretrainConfig) -> None:
        super().__init__(config)
        if config.tie_word_embeddings:
            self._tied_weights_keys = {"model.out_head.weight": "model.tok_emb.weight"}
        self.model = GPTModel(Shape(config.shape))  # type: ignore[arg-type]
        self.post_init()

    def get_input_embeddings(self) -> Any:
        return self.model.tok_emb

    def get_output_embeddings(self) -> Any:
        return self.model.out_head

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False, because gpt.py has its own cache class. This overrides a private method, because `generate` has
        no public way to leave the cache to the model."""
        return False

    def _reorder_cache(self, past_key_values: KeyValueCache, beam_idx: Tensor) -> KeyValueCache:
        """Keep the cache rows of the beams that survive, for beam search in `generate`."""
        past_key_values.keep(beam_idx.tolist())
        return past_key_values

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KeyValueCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits, (B, T, V), of `input_ids`, (B, T), and the loss if `labels` are given.

        - `attention_mask`: (B, at least T), of which only the last T columns are used. It may hide tokens at either end
          of a row.
        - `use_cache`: make a new cache if `past_key_values` is None. A cache requires `torch.no_grad()`.
        - `labels`: (B, T), like `input_ids`, with -100 for tokens to ignore. They require `logits_to_keep` 0.
        - `logits_to_keep`: the number of last tokens that get logits; 0: all.

        The loss is the mean cross-entropy in nats of the labels, each predicted from the tokens before it. Raises
        ValueError if the cached and new tokens of a row are more than the context length.
        """
        if use_cache and past_key_values is None:
            past_key_values = KeyValueCache()
        places_BxT = lengths = None
        if attention_mask is not None and not attention_mask[:, -input_ids.shape[1] :].all():
            visible_BxT = attention_mask[:, -input_ids.shape[1] :].bool()
            order_BxT = visible_BxT.int().argsort(dim=1, descending=True, stable=True)  # moves padding to the end
            input_ids, places_BxT = input_ids.gather(1, order_BxT), order_BxT.argsort(dim=1)
            lengths = visible_BxT.sum(1).tolist()
        rows, columns = input_ids.shape
        cached = (past_key_values.lengths if past_key_values is not None else []) or [0] * rows
        longest = max(map(sum, zip(cached, lengths or [columns] * rows, strict=True)), default=0)
        most = self.config.shape["context_length"]
        if longest > most:
            raise ValueError(f"{longest:,} tokens are more than this model's context length, {most:,}")
        features_BxTxC = self.model.features(input_ids, lengths, past_key_values)
        if places_BxT is not None:
            features_BxTxC = features_BxTxC.take_along_dim(places_BxT.unsqueeze(-1), dim=1)
        logits = self.model.out_head(features_BxTxC[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        cache: Any = past_key_values
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
