"""Files of the training program of Giles Thomas's lab notebook: its train.json and its checkpoints. This project calls
the program "upstream" or "the notebook".

An upstream checkpoint holds model.safetensors and a short meta.json. Most also hold optimizer.pt (AdamW's state dict)
and scaler.pt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Each entry is upstream's key, our key, and our values for upstream's false and true (None if the value is unchanged).
SPELLINGS = (
    ("minibatch_size", "microbatch_size", None),
    ("schedule_learning_rate", "lr_schedule", ("constant", "cosine")),
    ("use_amp", "precision", ("fp32", "fp16")),
)
NOTEBOOK_KEYS: dict[str, dict[str, Any]] = {
    theirs: {
        "type": "boolean" if values else "integer",
        "deprecated": True,
        "description": f"The key for {ours} in Giles Thomas's lab notebook"
        + (f"; true: {values[1]}, false: {values[0]}." if values else "."),
    }
    for theirs, ours, values in SPELLINGS
}
# The order of parameters in upstream's optimizer.pt. Parameters are sorted by module (MODULES), by block, by layer of
# the block (OF_BLOCK), and by PARTS, as in the classes of the book that upstream follows (Raschka, Build a Large
# Language Model (From Scratch)). Within a feed-forward layer, modules have the order of our own model (with experts:
# the router, then each expert).
MODULES = ("tok_emb", "pos_emb", "trf_blocks", "final_norm", "out_head")
OF_BLOCK = ("att.W_query", "att.W_key", "att.W_value", "att.out_proj", "ff", "norm1", "norm2")
PARTS = ("weight", "bias", "scale", "shift")


def translate_upstream(raw: dict[str, Any], *, has_experts: bool = False) -> dict[str, Any]:
    """Return the contents `raw` of a train.json, with upstream's own keys replaced by ours. If `has_experts` is true
    and `raw` has one of upstream's own keys, a missing `moe_router_loss_scale` becomes 0. If `schedule_learning_rate`
    is false, `warmup_period_percent` is removed.

    Raises ValueError, naming the key, if `raw` gives one setting under both names, or if a boolean key of upstream is
    neither true nor false.
    """
    result = {key: value for key, value in raw.items() if key not in NOTEBOOK_KEYS}
    for old, key, values in SPELLINGS:
        if old not in raw:
            continue
        value = raw[old]
        if values is not None and not isinstance(value, bool):
            raise ValueError(f'key "{old}": must be true or false')
        if key in raw:
            raise ValueError(f'keys "{old}" and "{key}": two spellings of one thing; keep "{key}"')
        result[key] = value if values is None else values[value]
    if raw.get("schedule_learning_rate") is False:
        result.pop("warmup_period_percent", None)  # upstream ignores this key if it has no schedule
    if has_experts and not NOTEBOOK_KEYS.keys().isdisjoint(raw):
        result.setdefault("moe_router_loss_scale", 0.0)  # upstream does not balance experts
    return result


def optimizer_by_name(saved: dict[str, Any], shapes: dict[str, dict[str, torch.Size]]) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer state of an upstream checkpoint as a dict from our parameters' names to their states.

    - `saved`: the contents of optimizer.pt.
    - `shapes`: the shapes of the state tensors of each parameter in the run's optimizer. The result has the same keys
      and shapes, in fp32.

    If `saved` does not fit, raises errors of many types, which the caller must turn into UserError.
    """
    import torch

    from harness.model.weights import checkpoint_names

    names = [part for name in shapes for part in checkpoint_names(name)]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))

    def place(name: str) -> tuple[int, ...]:
        """Return the sort key of a parameter's name, for the order in which upstream's optimizer.pt numbers the
        parameters."""
        module, _, part = name.rpartition(".")
        first, _, inner = module.partition(".")
        block, _, layer = inner.partition(".")
        within = next((number for number, each in enumerate(OF_BLOCK) if layer.startswith(each)), 0)
        return MODULES.index(first), int(block or 0), within, modules.index(module), PARTS.index(part)

    numbered = saved["state"]
    if sorted(numbered) != list(range(len(names))):
        raise ValueError(f"the state has {len(numbered)} parameters; their numbers must be 0 to {len(names) - 1}")
    state_of = {name: numbered[index] for index, name in enumerate(sorted(names, key=place))}
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
