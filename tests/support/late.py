"""A program beside its plain loop, in which something changes when a step is long under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from faststep import Step

from support.helpers import plain_step

LATE, STEPS = 120, 130  # behind the calls at which a step calls a loss once more to compare what it gives


class Program:
    """A model, a loss, and what is changed before a step."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.loss: Callable[..., mx.array] = lambda model, x: squares(model, x)
        self.changes: dict[int, Callable[[], object]] = {}
        self.given: Callable[[int], tuple[Any, ...]] = lambda at: ()
        self.kept: list[Any] = []

    def change(self, change: Callable[[], object], at: int = LATE) -> None:
        """Change something before a step."""
        self.changes[at] = change


def squares(model: nn.Module, x: mx.array) -> mx.array:
    """Return how far what a model gives is from 1."""
    return mx.square(model(x) - 1).mean()


def losses(made: Callable[[Program], None], fast: bool, accumulate: int = 1) -> list[float]:
    """Return the losses of a program by a step, or by the plain loop."""
    mx.random.seed(2)
    p = Program()
    made(p)
    optimizer = optim.SGD(0.02)
    mx.eval(p.model.state)
    step = Step(p.model, optimizer, p.loss, accumulate=accumulate)
    plain = plain_step(p.model, optimizer, p.loss, accumulate=accumulate)
    x = mx.random.normal((8, 3), key=mx.random.key(3))
    found = []
    for at in range(STEPS):
        p.changes.get(at, lambda: None)()
        given = p.given(at)
        found.append(step(x, *given).loss.item() if fast else plain(x, *given)[0].item())
    return found  # type: ignore[return-value]
