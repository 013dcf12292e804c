"""The loss of a batch again, with other values in the batch or other outputs of the model."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._step import call_with
from faststep.doctor._rungs_plain import first
from faststep.doctor._subject import Subject, arguments

Leaf = Any  # an `mx.array` or a NumPy array
Answer = Callable[[int, Callable[[], Any]], Any]  # the number of an outer call, and what computes it


@dataclass(frozen=True)
class OuterCall:
    """A call of a module that no other module makes: its arrays."""

    inputs: list[mx.array]
    value: Any


@contextlib.contextmanager
def answering(model: nn.Module, answer: Answer, calls: list[OuterCall]) -> Iterator[None]:
    """Let `answer` say what each outer call of a module returns in the block."""
    changed: list[tuple[nn.Module, type]] = []
    inside = [False]

    def other(kind: Any) -> type:
        def call(self: nn.Module, *given: Any, **named: Any) -> Any:
            if inside[0]:
                return kind.__call__(self, *given, **named)
            inside[0] = True
            try:
                value = answer(len(calls), lambda: kind.__call__(self, *given, **named))
            finally:
                inside[0] = False
            inputs = [each for each in (*given, *named.values()) if isinstance(each, mx.array)]
            calls.append(OuterCall(inputs, value))
            return value

        return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__})

    try:
        for module in {id(each): each for each in model.modules() if callable(each)}.values():
            changed.append((module, type(module)))
            object.__setattr__(module, "__class__", other(type(module)))
        yield
    finally:
        for module, kind in changed:
            object.__setattr__(module, "__class__", kind)


class Losses:
    """Losses of a model's batches, each from the same random state, with everything as it was behind each."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.calls: list[OuterCall] = []  # of the last loss

    def of(self, batch: Any, answer: Answer | None = None) -> float | None:
        """Return the loss; None where it cannot be computed or is not finite."""
        model = self._subject.model
        before, self.calls = model.parameters(), []
        for seed in (mx.random.seed, random.seed, np.random.seed):
            seed(0)
        try:
            with answering(model, answer or (lambda number, compute: compute()), self.calls):
                value = float(first(call_with(batch, self._subject.loss_fn, model)))
        except Exception:  # it refuses these values: nothing can be said by them
            return None
        finally:
            model.update(before)
        return value if math.isfinite(value) else None

    def with_outputs(self, batch: Any, outputs: list[Any]) -> float | None:
        """Return the loss for these results of the model's outer calls; None where there are more or fewer calls."""

        def answer(number: int, compute: Callable[[], Any]) -> Any:
            return outputs[number]

        value = self.of(batch, answer)
        return value if len(self.calls) == len(outputs) else None


def leaves_of(batch: Any) -> list[tuple[str, Leaf]]:
    """Return the arrays of a batch by their names."""
    return [(name, leaf) for name, leaf in arguments(batch) if isinstance(leaf, mx.array | np.ndarray)]


def replaced(batch: Any, old: Leaf, new: Leaf) -> Any:
    """Return the batch with another array in the place of one."""
    if batch is old:
        return new
    if isinstance(batch, dict):
        return {key: replaced(each, old, new) for key, each in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [replaced(each, old, new) for each in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def is_whole(leaf: Leaf) -> bool:
    """Return whether an array has integers."""
    return bool(mx.issubdtype(leaf.dtype, mx.integer) if isinstance(leaf, mx.array) else leaf.dtype.kind in "iu")


def is_floating(leaf: Leaf) -> bool:
    """Return whether an array has floating numbers."""
    return bool(mx.issubdtype(leaf.dtype, mx.floating) if isinstance(leaf, mx.array) else leaf.dtype.kind == "f")


def values_of(leaf: Leaf) -> np.ndarray[Any, Any]:
    """Return an array of NumPy with the values."""
    if isinstance(leaf, mx.array):
        return np.array(leaf.astype(mx.float32) if is_floating(leaf) else leaf)
    return np.asarray(leaf)


def like(values: np.ndarray[Any, Any], leaf: Leaf) -> Leaf:
    """Return values as an array of the kind and dtype of another one."""
    return (
        mx.array(np.ascontiguousarray(values)).astype(leaf.dtype)
        if isinstance(leaf, mx.array)
        else values.astype(leaf.dtype)
    )
