"""Model class for lm-eval. Importing this module imports lm_eval, which is an optional extra and takes seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from harness.common.errors import UserError
from harness.common.messages import abbreviated
from harness.data.tokenizers import Tokenizer
from harness.evaluation.generation import Sampling, continue_prompts
from harness.evaluation.likelihood import Scorer

SAMPLING_SEED = 1234  # lm-eval's default seed for torch
KNOWN_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1, "no_repeat_ngram_size": 0}  # other values change greedy texts, too
# The maximal number of new tokens, the texts that end them, and the rule by which they are chosen.
Settings = tuple[int, tuple[str, ...], Sampling]


class ModelUnderTest(TemplateLM):
    """Model class for lm-eval. Results are those of lm-eval's own `hf` model with the same weights and tokenizer, and
    with logits_cache=False, apart from rounding. `hf` fails on some requests that succeed here. Other differences:

    - Sampling draws other random numbers. If a task gives no top_k, all tokens can be drawn (`hf`: the likeliest 50).
    - If a task samples, raises UserError for an option outside KNOWN_SETTINGS.
    - If a task does not sample, raises UserError for an option in NEUTRAL with a value other than the one there.
      Other options outside KNOWN_SETTINGS, such as min_new_tokens, are ignored.
    - The name of a special token in a text ("<|endoftext|>") is ordinary text (`hf`: the token). A generated special
      token other than end-of-text becomes its name (`hf`: no text).
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer = scorer
        self.text_tokenizer = tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.eot_token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.text_tokenizer.encode(string)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        # An answer that merges with the end of its context has no tokens of its own; it is then encoded by itself. `hf`
        # fails on it, and on an answer longer than the context length, which the scorer splits into windows.
        pairs = [(context, tokens or self.tok_encode(text)) for (_, text), context, tokens in requests]
        return [(answer.total, answer.is_greedy) for answer in self.scorer.score(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        pairs = [([self.prefix_token_id], self.text_tokenizer.encode(request.args[0])) for request in requests]
        return [answer.total for answer in self.scorer.score(pairs)]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return the generated text for each request."""
        jobs = [self._job(request) for request in requests]
        # Requests with equal settings are next to each other, because all rows of a batch have the same settings. Among
        # them, the longest prompts come first, so that a batch that does not fit in memory fails at once.
        order = sorted(range(len(jobs)), key=lambda at: (repr(jobs[at][1]), -len(jobs[at][0]), at))
        batches: list[list[int]] = []
        for _, group in groupby(order, key=lambda at: jobs[at][1]):
            same = list(group)
            batches += [same[at : at + self.scorer.batch_size] for at in range(0, len(same), self.scorer.batch_size)]

        def work(batch: list[int]) -> list[str]:
            prompts = [jobs[at][0] for at in batch]
            most, stops, sampling = jobs[batch[0]][1]
            # Row i of a batch draws with the batch's seed + i, so that each request has a seed of its own.
            sampling = replace(sampling, seed=SAMPLING_SEED + order.index(batch[0]))
            with self.scorer.precision.autocast():
                added = continue_prompts(self.scorer.model, self.text_tokenizer, prompts, most, sampling, stops)
            return [
                postprocess_generated_text(self.text_tokenizer.decode(tokens), list(stops), None) for tokens in added
            ]

        found: dict[int, str] = {}
        for batch, texts in zip(batches, self.scorer.each_batch(work, batches), strict=True):
            found |= zip(batch, texts, strict=True)
        return [found[at] for at in range(len(jobs))]

    def _job(self, request: Instance) -> tuple[list[int], Settings]:
        """Return the prompt's tokens, and the settings from the task's generation_kwargs. Of a prompt that is too long,
        only the end is kept."""
        prompt, kwargs = request.args
        known = dict(normalize_gen_kwargs(kwargs))
        temperature = float(known.get("temperature", 1.0)) if known.get("do_sample") else 0.0
        strange = known.keys() - KNOWN_SETTINGS
        if not temperature:
            strange = {key for key, value in NEUTRAL.items() if (known.get(key) or value) != value}
        if strange:
            task = f'task "{request.task_name}": generation_kwargs'
            raise UserError(f"{task}: {abbreviated(sorted(strange))}: not supported; use another task")
        stops = known.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        top_k = int(known["top_k"]) if temperature and known.get("top_k") else None
        most, length = int(known["max_gen_toks"]), self.scorer.model.config.context_length
        # `hf` fails if a task asks for `length` or more new tokens. Here the prompt then keeps half the context.
        room = length - most if most < length else max(1, length // 2)
        settings = most, tuple(filter(None, stops)), Sampling(temperature, top_k)
        return (self.text_tokenizer.encode(prompt) or [self.eot_token_id])[-room:], settings
