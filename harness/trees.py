"""Nested dicts, lists and tuples, as states of optimizers and the like are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Leaf = TypeVar("Leaf")


def replace_leaves(tree: Any, kind: type[Leaf], function: Callable[[Leaf], Any]) -> Any:
    """The same tree with `function` of every leaf that is a `kind` in its place; in the order of the tree."""
    if isinstance(tree, kind):
        return function(tree)
    if isinstance(tree, dict):
        return {key: replace_leaves(value, kind, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(replace_leaves(value, kind, function) for value in tree)
    return tree
