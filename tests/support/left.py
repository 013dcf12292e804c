"""What a loss leaves on Python objects: a step beside a plain loop, with everything that is there after each call."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from mlx.utils import tree_map

Body = Callable[[Any, nn.Module, mx.array, mx.array], mx.array]
Between = Callable[[int, Any, nn.Module], object]


def nothing(number: int, kept: Any, model: nn.Module) -> None:
    """Change nothing between the steps."""


@dataclass
class Case:
    """A loss with what it keeps, on an object or on the model.

    Args:
        begin: Makes what is kept: it is given an empty object, and the model.
        body: Is given these, the loss and the mean of the output; it returns the loss.
        told: What a warning says; None of a loss that stays compiled.
        between: Is called before each step with its number, the object and the model.
        goes_on: Whether the step is compiled again by the end; None where that does not matter, nor whether it is told.
    """

    begin: Callable[[Any, nn.Module], object]
    body: Body
    told: str | None = None
    between: Between = nothing
    goes_on: bool | None = False


def as_data(value: Any) -> Any:
    """Return what is in an object: classes, keys in their order, numbers with their classes, and values of arrays."""
    if isinstance(value, mx.array):
        return ("array", np.array(value).tolist())
    if isinstance(value, Slotted):
        return [as_data(getattr(value, name, "nothing")) for name in value.__slots__]
    if isinstance(value, types.SimpleNamespace):
        return as_data(vars(value))
    if isinstance(value, dict):
        return (type(value).__name__, [(key, as_data(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, collections.deque)):
        return (type(value).__name__, [as_data(item) for item in value])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(value))
    return (type(value).__name__, None if callable(value) else value)


class Slotted:
    """An object without an instance dict."""

    __slots__ = ("one", "two")


def same(ours: Any, theirs: Any) -> bool:
    """Return whether two such are equal, apart from rounding."""
    if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return bool(np.isclose(ours, theirs, rtol=1e-4, atol=1e-5))
    return bool(ours == theirs)


def _run(case: Case, by_step: bool, window: int, compiled: bool, calls: int) -> tuple[list[Any], list[str], str]:
    mx.random.seed(1)
    kept = types.SimpleNamespace()
    model, optimizer = nn.Linear(4, 3), optim.SGD(0.1)
    case.begin(kept, model)
    body = case.body  # alone: a loss reaches all that its case has

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        return body(kept, model, mx.square(out).mean(), mx.stop_gradient(out.mean()))

    step = Step(model, optimizer, loss_fn, accumulate=window, compile=compiled)
    plain = nn.value_and_grad(model, loss_fn)
    left: list[Any] = []
    total: Any = None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(calls):
            case.between(number, kept, model)
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            if by_step:
                loss = step(x).loss
            else:
                loss, gradients = plain(model, x)
                total = gradients if number % window == 0 else tree_map(mx.add, total, gradients)
                if number % window == window - 1:
                    optimizer.update(model, tree_map(lambda g: g / window, total))
                mx.eval(model.state, loss)
            # the loss of a call within a window is not the plain loop's: it is the mean so far
            left.append(loss.item() if window == 1 else None)
            left.append([as_data(kept), as_data({**model, **vars(model)})])
    return left, [str(warning.message) for warning in told], step.stats.mode


def check(case: Case, window: int = 1, compiled: bool = True, calls: int = 8) -> None:
    """Compare what a step leaves after each call with what a plain loop does."""
    theirs, _, _ = _run(case, False, window, compiled, calls)
    ours, told, mode = _run(case, True, window, compiled, calls)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert same(one, other), f"call {number // 2}: {one}, and by the plain loop {other}"
    if not compiled or case.told is None:
        assert told == []
    elif case.goes_on is None:
        assert all(case.told in each for each in told)
    else:
        assert len(told) == 1
        assert case.told in told[0]
    if compiled and case.goes_on is not None:
        assert mode == ("native" if case.told is None or case.goes_on else "plain")
