"""Files of "upstream" or "the notebook", the training program of Giles Thomas's lab notebook, where this format comes
from: the keys of its train.json, and its checkpoints.

An upstream checkpoint holds model.safetensors, optimizer.pt (AdamW's state dict), scaler.pt and a short meta.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NOTEBOOK_KEYS: dict[str, dict[str, Any]] = {
    "minibatch_size": {"type": "integer", "deprecated": True, "description": "The notebook's microbatch_size."},
    "schedule_learning_rate": {"type": "boolean", "deprecated": True, "description": "The notebook's lr_schedule."},
    "use_amp": {"type": "boolean", "deprecated": True, "description": "The notebook's precision: fp16 or fp32."},
}
# The order of parameters in upstream's optimizer.pt. Parameters are sorted by module (MODULES), by block, by layer of
# the block (OF_BLOCK), and by PARTS, as in the classes of the book that upstream follows (Raschka, Build a Large
# Language Model (From Scratch)). Within a feed-forward layer (or the router and then each expert) modules have the
# order of our own model.
MODULES = ("tok_emb", "pos_emb", "trf_blocks", "final_norm", "out_head")
OF_BLOCK = ("att.W_query", "att.W_key", "att.W_value", "att.out_proj", "ff", "norm1", "norm2")
PARTS = ("weight", "bias", "scale", "shift")


def translate_upstream(raw: dict[str, Any], *, has_experts: bool = False) -> dict[str, Any]:
    """Return the object of a train.json with upstream's keys replaced by ours.

    `has_experts` says whether the model is a mixture of experts. If it is, and train.json has upstream's keys, the
    experts are not balanced unless train.json asks for it, as in upstream. Raises ValueError if train.json has both the
    old and the new key for the same setting.
    """
    translated: dict[str, tuple[str, Any]] = {}
    if "minibatch_size" in raw:
        translated["minibatch_size"] = "microbatch_size", raw["minibatch_size"]
    if "use_amp" in raw:
        translated["use_amp"] = "precision", "fp16" if _flag(raw, "use_amp") else "fp32"
    if "schedule_learning_rate" in raw:
        scheduled = _flag(raw, "schedule_learning_rate")
        translated["schedule_learning_rate"] = "lr_schedule", "cosine" if scheduled else "constant"
    result = {key: value for key, value in raw.items() if key not in NOTEBOOK_KEYS}
    for old, (key, value) in translated.items():
        if key in raw:
            raise ValueError(f'keys "{old}" and "{key}": two spellings of one thing; keep "{key}"')
        result[key] = value
    if raw.get("schedule_learning_rate") is False:
        result.pop("warmup_period_percent", None)  # has no effect in upstream in that case
    if has_experts and translated:
        result.setdefault("moe_router_loss_scale", 0.0)
    return result


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw[key]
    if not isinstance(value, bool):
        raise ValueError(f'key "{key}": must be true or false')
    return value


def optimizer_by_name(saved: dict[str, Any], shapes: dict[str, dict[str, torch.Size]]) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state of an upstream checkpoint by our parameters' names. In `saved`, parameters are
    numbered.

    `shapes` gives the shape of each state tensor that the run's optimizer keeps for each parameter. The result has the
    same keys, and its tensors are fp32. The state of a fused parameter is the concatenated state of its parts.

    Raises KeyError, TypeError, ValueError, AttributeError or RuntimeError if `saved` is the state of another model or
    optimizer, or no state at all.
    """
    import torch

    from harness.model.weights import checkpoint_names

    names = _numbered([part for name in shapes for part in checkpoint_names(name)])
    numbered = saved["state"]
    if sorted(numbered) != list(range(len(names))):
        raise ValueError(f"the state has {len(numbered)} parameters, the model has {len(names)}")
    state_of = {name: numbered[index] for index, name in enumerate(names)}
    result: dict[str, dict[str, Tensor]] = {}
    for name, wanted in shapes.items():
        parts = [state_of[part] for part in checkpoint_names(name)]
        result[name] = {}
        for key, shape in wanted.items():
            if shape:
                value = torch.cat([part[key].float() for part in parts])
            else:  # a scalar, which is the same for all parts
                value = torch.as_tensor(parts[0][key], dtype=torch.float32).reshape(())
            if value.shape != shape:
                raise ValueError(f"{key} of {name} is {list(value.shape)}, not {list(shape)}")
            result[name][key] = value
    return result


def _numbered(names: list[str]) -> list[str]:
    """Return the names of parameters in the order in which upstream's optimizer numbers them."""
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))

    def place(name: str) -> tuple[int, ...]:
        module, _, part = name.rpartition(".")
        first, _, inner = module.partition(".")
        block, _, layer = inner.partition(".")
        within = next((number for number, each in enumerate(OF_BLOCK) if layer.startswith(each)), 0)
        return MODULES.index(first), int(block or 0), within, modules.index(module), PARTS.index(part)

    return sorted(names, key=place)
