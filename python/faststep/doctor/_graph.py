"""The unevaluated graph behind arrays: how many operations wait, and which names of a function keep them."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

_DEPTH = 4
_MOST = 500  # objects that are looked at


def operations(*arrays: mx.array) -> int:
    """Return how many operations have to be computed before the arrays are there."""
    return graph(*arrays).count("[label =") if arrays else 0


def graph(*arrays: mx.array, **named: mx.array) -> str:
    """Return the graph behind arrays as MLX writes it, the named arrays by their names."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays, **named)
    return text.getvalue()


def kept_by(function: Any) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays that a function refers to beside its arguments, by name; models and optimizers are left out."""
    seen: set[int] = set()
    for name, value in names_of(function):
        yield from _arrays(name, value, seen, 0)


def names_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a function names beside its arguments: its closure, globals of its code, parts of a partial."""
    while isinstance(function, functools.partial):
        yield from ((f"partial[{place}]", each) for place, each in enumerate(function.args))
        yield from function.keywords.items()
        function = function.func
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        yield type(function).__name__, function
        function = getattr(type(function), "__call__", None)  # noqa: B004, the function itself
        if not isinstance(function, types.FunctionType):
            return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _arrays(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, mx.array]]:
    if isinstance(value, mx.array):
        yield name, value
        return
    if depth > _DEPTH or id(value) in seen or len(seen) > _MOST:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module | types.ModuleType | type):
        return
    if isinstance(value, dict):
        parts: Any = [(f"{name}[{key!r}]", each) for key, each in list(value.items())[:_MOST]]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{place}]", each) for place, each in enumerate(value[-_MOST:])]
    elif isinstance(value, types.FunctionType) and depth < 2:
        parts = list(names_of(value))
    elif hasattr(value, "__dict__") and not callable(value) and not hasattr(value, "apply_gradients"):
        parts = [(f"{name}.{key}", each) for key, each in vars(value).items()]
    else:
        return
    for inner, each in parts:
        yield from _arrays(inner, each, seen, depth + 1)
