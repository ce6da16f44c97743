"""The lab notebook's spellings of train.json's keys, turned into ours."""

from __future__ import annotations

from typing import Any

NOTEBOOK_KEYS: dict[str, dict[str, Any]] = {
    "minibatch_size": {"type": "integer", "deprecated": True, "description": "The notebook's microbatch_size."},
    "schedule_learning_rate": {"type": "boolean", "deprecated": True, "description": "The notebook's lr_schedule."},
    "use_amp": {"type": "boolean", "deprecated": True, "description": "The notebook's precision: fp16 or fp32."},
}


def translate_upstream(raw: dict[str, Any], *, has_experts: bool = False) -> dict[str, Any]:
    """Return train.json's object with the notebook's spellings turned into ours. `has_experts`: the model is a mixture
    of experts, which the notebook's program does not balance unless it is told to.

    Raises ValueError where an old and a new spelling of the same thing stand side by side.
    """
    result = {key: value for key, value in raw.items() if key not in NOTEBOOK_KEYS}

    def set_once(old: str, key: str, value: Any) -> None:
        if key in raw:
            raise ValueError(f'keys "{old}" and "{key}": two spellings of one thing; keep "{key}"')
        result[key] = value

    if "minibatch_size" in raw:
        set_once("minibatch_size", "microbatch_size", raw["minibatch_size"])
    if "use_amp" in raw:
        set_once("use_amp", "precision", "fp16" if _flag(raw, "use_amp") else "fp32")
    if "schedule_learning_rate" in raw:
        scheduled = _flag(raw, "schedule_learning_rate")
        set_once("schedule_learning_rate", "lr_schedule", "cosine" if scheduled else "constant")
        if not scheduled:
            result.pop("warmup_period_percent", None)  # upstream: without effect then
    if has_experts and not raw.keys().isdisjoint(NOTEBOOK_KEYS):
        result.setdefault("moe_router_loss_scale", 0.0)
    return result


def _flag(raw: dict[str, Any], key: str) -> bool:
    value = raw[key]
    if not isinstance(value, bool):
        raise ValueError(f'key "{key}": must be true or false')
    return value
