"""Iterators and generators on the model, and ones that are taken from later."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from support.programs.reach.registry import (
    Made,
    Make,
    add,
    program,
    squares,
)


def iterating(make: Callable[[], Iterator[Any]], where: str) -> Make:
    def build() -> Made:
        model = nn.Linear(4, 2)
        model._kept = {"it": make()} if where == "dict" else [make()]
        return Made(
            lambda model, x: squares(model, x) * (1 + next(model._kept["it" if where == "dict" else 0])),
            lambda: None,
            model=model,
        )

    return build


for where in ("dict", "list"):
    add("iterator", f"a generator in a {where} of the model", iterating(lambda: (0.1 * n for n in range(30)), where))
    add("iterator", f"an iterator in a {where} of the model", iterating(lambda: itertools.count(0, 0.1), where))


@program("iterator")
def iterator_that_is_taken_from_behind_a_warm_up() -> Made:
    state = types.SimpleNamespace(it=itertools.count(1), steps=0, last=None)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.steps += 1
        if state.steps > 5:
            state.last = next(state.it)
        return squares(model, x) * (1 + (state.last or 0))

    return Made(loss_fn, lambda: (state.steps, state.last))


def numbers() -> Iterator[int]:
    yield from itertools.cycle([1, 2, 3, 4, 5])


@program("iterator")
def iterator_beside_numpy_arrays() -> Made:
    state = types.SimpleNamespace(it=itertools.count(), last=None)

    def loss_fn(model: nn.Module, x: Any) -> mx.array:
        state.last = next(state.it)
        return squares(model, mx.array(x))

    return Made(loss_fn, lambda: state.last, batch=lambda number: (np.full((3, 4), 0.1 * number, np.float32),))
