"""Which loss functions are the same: an inline lambda is a new object at every call, but not a new loss."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_Same = Callable[[Any], bool]
_MAX_KNOWN = 64
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class Losses:
    """Numbers loss functions; those that compute the same have the same number.

    Two functions are the same when their code, defaults and closures are: numbers and strings by value, every other
    object by identity. No function is kept alive, and nothing that it refers to if it can be referred to weakly.
    """

    def __init__(self) -> None:
        """Know no function."""
        self._known: list[tuple[int, _Same]] = []
        self._next = 0

    def number(self, loss_fn: Callable[..., Any]) -> int:
        """Return the number of a function, a new one if none that is known computes the same."""
        for at, (number, same) in enumerate(self._known):
            if same(loss_fn):
                if at:
                    self._known.insert(0, self._known.pop(at))
                return number
        self._next += 1
        self._known.insert(0, (self._next, _remember(loss_fn)))
        del self._known[_MAX_KNOWN:]
        return self._next


def _remember(value: Any) -> _Same:
    """Return a test for what is the same as `value`."""
    if isinstance(value, FunctionType):
        return _remember_function(value)
    if isinstance(value, MethodType):
        function, owner = _remember(value.__func__), _remember(value.__self__)
        return lambda x: isinstance(x, MethodType) and function(x.__func__) and owner(x.__self__)
    if isinstance(value, functools.partial):
        parts = _remember_all(_parts(value))
        return lambda x: isinstance(x, functools.partial) and parts(_parts(x))
    if isinstance(value, _PLAIN):
        return lambda x: type(x) is type(value) and (x is value or x == value)
    try:
        reference = weakref.ref(value)
    except TypeError:
        return lambda x: x is value
    return lambda x: reference() is x


def _remember_function(function: FunctionType) -> _Same:
    code, scope = function.__code__, id(function.__globals__)
    if not _captured(function):
        return lambda x: (
            isinstance(x, FunctionType) and x.__code__ == code and id(x.__globals__) == scope and not _captured(x)
        )
    captured = _remember_all(_captured(function))
    return lambda x: (
        isinstance(x, FunctionType) and x.__code__ == code and id(x.__globals__) == scope and captured(_captured(x))
    )


def _remember_all(values: tuple[Any, ...]) -> _Same:
    tests = tuple(_remember(value) for value in values)
    return lambda xs: len(xs) == len(tests) and all(test(x) for test, x in zip(tests, xs, strict=True))


def _captured(function: FunctionType) -> tuple[Any, ...]:
    """Return a function's defaults and the contents of its closure; a cell that is still empty stands for itself."""
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return ()
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:
            cells.append(cell)
    named = function.__kwdefaults__ or {}
    return (*(function.__defaults__ or ()), *named.keys(), *named.values(), *cells)


def _parts(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return (partial.func, *partial.args, *partial.keywords.keys(), *partial.keywords.values())
