"""A program beside its plain loop: each has objects of its own, which are changed between the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step

from support.helpers import plain_step

Program = tuple[Callable[..., Any], list[Callable[[], object]]]  # a loss, and what is changed between its steps


class Box:
    """An object with a number, or an array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set(self, value: Any) -> Callable[[], None]:
        """Return a change to another value."""
        return lambda: setattr(self, "value", value)


def squares(model: nn.Module, x: mx.array) -> mx.array:
    """Return the mean square of what a model gives."""
    return mx.square(model(x)).mean()


def batch() -> mx.array:
    """Draw a batch, equal each time."""
    return mx.random.normal((8, 4), key=mx.random.key(3))


def beside(
    build: Callable[[pytest.MonkeyPatch], Program],
    model: Callable[[], nn.Module] = lambda: nn.Linear(4, 2),
    optimizer: Callable[[], optim.Optimizer] = lambda: optim.SGD(0.1),
) -> Step:
    """Train by the plain loop, then by a step, each with a program that is made anew: the numbers are equal."""
    losses: list[list[float]] = []
    weights: list[Any] = []
    for fast in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            mx.random.seed(2)
            loss_fn, changes = build(patch)
            mx.random.seed(2)
            mine, own = model(), optimizer()
            mx.eval(mine.state)
            step = Step(mine, own, loss_fn)
            plain = plain_step(mine, own, loss_fn)
            losses.append([])
            for change in [lambda: None, *changes]:
                change()
                for _ in range(2):
                    losses[-1].append(step(batch()).loss.item() if fast else plain(batch())[0].item())  # type: ignore[union-attr]
            weights.append(mine.parameters())
    rtol = 2e-5 if mx.default_device() == mx.cpu else 2e-4
    np.testing.assert_allclose(losses[1], losses[0], rtol=rtol)
    for name in weights[0]:
        for ours, theirs in zip(_arrays(weights[1][name]), _arrays(weights[0][name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=1e-6)
    return step


def _arrays(tree: Any) -> list[Any]:
    if isinstance(tree, mx.array):
        return [np.array(tree)]
    items = tree.values() if isinstance(tree, dict) else tree
    return [array for item in items for array in _arrays(item)]
