"""Which of transformers' native classes a model is written for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from harness.hf import gpt2_format, llama_format


def native_format(shape: Any) -> ModuleType:
    """The module with the format nearest to a model of this shape (gpt.ModelConfig): rotary positions are Llama's and
    Qwen's, learned ones GPT-2's. Whether it can say all of it, its `check_exact` tells."""
    return llama_format if shape.position == "rope" else gpt2_format
