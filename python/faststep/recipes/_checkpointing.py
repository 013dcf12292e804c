"""Gradient checkpointing: activations of chosen modules are computed again in the backward pass, not kept.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016, https://arxiv.org/abs/1604.06174).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from faststep.recipes._patterns import check_matched, matches


def checkpoint_gradients(model: nn.Module, patterns: Sequence[str]) -> None:
    """Checkpoint modules: the backward pass calls them again instead of keeping their activations.

    The numbers stay the same: the second call draws the random numbers of the first (dropout), and what it stores in
    the model (running means) is not stored again. Paths of parameters stay too.

    Args:
        model: The model, whose modules' class changes: to a subclass of it with the same name.
        patterns: Patterns of the modules; inside of one that matches none is taken again.

    Raises:
        ValueError: A pattern matches no module.
    """
    modules = {path: each for path, each in model.named_modules() if path and callable(each)}
    check_matched(patterns, modules, "module")
    chosen: list[str] = []
    for path in sorted(modules, key=len):
        inside = any(path.startswith(f"{outer}.") for outer in chosen)
        if matches(path, patterns) and not inside:
            chosen.append(path)
            kind: Any = type(modules[path])
            modules[path].__class__ = _checkpointed(kind)


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """Return a subclass whose calls are checkpointed."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call(self, kind.__call__, args, kwargs)

    body = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)


def _call(module: nn.Module, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module; when MLX calls it again, let it find what it found the first time, and leave no trace."""
    trainable, calls = module.trainable_parameters(), 0
    key, others = _keys()[0], _beside(module, trainable)

    def run(parameters: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return function(module, *args, **kwargs)
        now, random = module.parameters(), _keys()[0]
        module.update(others, strict=False)
        module.update(parameters)
        _keys()[0] = key
        try:
            return function(module, *args, **kwargs)
        finally:
            _keys()[0] = random
            module.update(now)

    return mx.checkpoint(run)(trainable, args, kwargs)


def _beside(module: nn.Module, trainable: Any) -> Any:
    """Return the tree of the arrays that are not trainable: a function that kept the others would keep memory."""
    known: dict[str, mx.array] = dict(tree_flatten(trainable))
    everything: dict[str, mx.array] = dict(tree_flatten(module.parameters()))
    return tree_unflatten([(path, each) for path, each in everything.items() if path not in known]) or {}


def _keys() -> list[mx.array]:
    """Return the list that holds this thread's random key; MLX shows it only to be read."""
    state: list[mx.array] = iter(mx.random.state).__reduce__()[1][0]  # type: ignore[call-overload]
    return state
