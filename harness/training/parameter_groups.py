"""AdamW's learning rate and weight decay for each kind of parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from harness.model.tensor_names import HEAD
from harness.runs.train_config import TrainConfig


@dataclass(frozen=True)
class Group:
    """Parameters by name that have one peak rate and one decay."""

    learning_rate: float
    weight_decay: float
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by name, each once: a head that shares the token embedding has the embedding's name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw_groups(model: nn.Module, config: TrainConfig, parameters: dict[str, nn.Parameter]) -> list[Group]:
    """Some of the model's parameters by rate and decay, in the order of each group's first."""
    embeddings: set[Tensor] = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], Group] = {}
    for name, parameter in parameters.items():
        own_rate = _own_rate(name, parameter, config, is_embedding=parameter in embeddings)
        rate = config.learning_rate if own_rate is None else own_rate
        decay = config.weight_decay if config.decay_all_parameters or parameter.dim() >= 2 else 0.0
        groups.setdefault((rate, decay), Group(rate, decay)).parameters[name] = parameter
    return list(groups.values())


def _own_rate(name: str, parameter: nn.Parameter, config: TrainConfig, *, is_embedding: bool) -> float | None:
    if parameter.dim() < 2:
        return config.vector_learning_rate
    if is_embedding:
        return config.embedding_learning_rate
    return config.head_learning_rate if name == HEAD else None
