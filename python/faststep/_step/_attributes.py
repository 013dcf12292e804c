"""Attributes of an optimizer beside its `state`: counters and averages of a user's own class."""

from __future__ import annotations

import collections
import copy
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import MultiOptimizer, Optimizer

from faststep._native import core
from faststep._step._user_optimizer import CACHE, OwnOptimizer

_OF_MLX = ("_initialized", "_state", "_schedulers", CACHE)
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_IN_PLACE = (np.ndarray, set, collections.deque)


class Attributes:
    """An optimizer's attributes as they were when its step was made, from which those that training changes differ.

    Arrays count as changed. The `state` of an optimizer within another is one, where that is no `MultiOptimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._begun = {name: _copied(value) for name, value in _named(optimizer)}

    def changed(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the attributes that have changed, by name."""
        return {name: value for name, value in _named(optimizer) if not _same(self._begun.get(name, self), value)}

    def put(self, optimizer: Optimizer, values: dict[str, Any]) -> None:
        """Give an optimizer these attributes; numbers beside them, and what training has made, are as they were before.

        Raises:
            ValueError: One is of an optimizer that is not within this one.
        """
        owners = dict(_owners(optimizer))
        for name in self.changed(optimizer).keys() | values.keys():
            path, _, attribute = name.rpartition(".")
            if path not in owners:
                raise ValueError(f"attributes: expected those of {type(optimizer).__name__}, got {name!r}")
            begun = self._begun.get(name, self)
            if name in values:
                setattr(owners[path], attribute, values[name])
            elif begun is self:
                delattr(owners[path], attribute)
            elif isinstance(begun, _NUMBERS):
                setattr(owners[path], attribute, begun)


def _owners(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield an optimizer, those within it, and the objects that lead to them, by the path that leads there."""
    within = {id(each) for each in core.optimizers_within(optimizer)}
    root = optimizer.own if isinstance(optimizer, OwnOptimizer) else optimizer
    todo: list[tuple[str, Any, frozenset[int]]] = [("", root, frozenset({id(root)}))]
    while todo:
        path, owner, around = todo.pop()
        yield path, owner
        found = []
        for name, value in vars(owner).items():
            if name not in _OF_MLX:
                places = ((f"{path}.{place}" if path else place, each) for place, each in _places(name, value))
                found += [(place, each, around | {id(each)}) for place, each in places if id(each) in within - around]
        todo += reversed(found)


def _places(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an attribute holds, or what is in lists, tuples and dicts there, by their places."""
    if isinstance(value, list | tuple | dict) and not isinstance(value, nn.Module):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(f"{name}[{key}]", each)
    else:
        yield name, value


def _named(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes by name."""
    owners = list(_owners(optimizer))
    known = [each for _, owner in owners if isinstance(owner, MultiOptimizer) for each in owner.optimizers]
    for path, owner in owners:
        prefix = f"{path}." if path else ""
        if path and isinstance(owner, Optimizer) and not any(owner is each for each in known):
            yield f"{prefix}state", owner.state
        for name, value in vars(owner).items():
            if name not in _OF_MLX and not isinstance(value, Optimizer | nn.Module):
                yield f"{prefix}{name}", value


def _copied(value: Any) -> Any:
    """Copy containers; of arrays an ellipsis is kept."""
    if isinstance(value, mx.array):
        return ...
    if type(value) is dict:
        return {key: _copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(each) for each in value)
    return copy.copy(value) if isinstance(value, _IN_PLACE) else value


def _same(begun: Any, value: Any) -> bool:
    """Return whether a value is what was copied."""
    if type(begun) is not type(value):
        return False
    if type(value) is dict:
        return begun.keys() == value.keys() and all(_same(begun[key], each) for key, each in value.items())
    if type(value) in (list, tuple):
        return len(begun) == len(value) and all(map(_same, begun, value))
    if isinstance(value, np.ndarray):
        return begun.dtype == value.dtype and np.array_equal(begun, value)
    if isinstance(value, (*_NUMBERS, set, collections.deque)):
        return bool(begun == value) or (value != value and begun != begun)  # NaN
    return begun is value
