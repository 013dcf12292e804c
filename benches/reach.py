"""Measure what it costs to look at what a loss reaches beside its arguments: numbers, attributes, arrays.

``python benches/reach.py`` takes half a minute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from cases import Run
from samples import measure_alone
from timing import block_size, in_turns, run_block
from ways import FAST, WAYS, StepFn

COUNTS = (100, 1000)
NOTHING = "nothing"


class Settings:
    """An object with so many numbers as attributes."""

    def __init__(self, count: int) -> None:
        vars(self).update({f"value_{i}": float(i) for i in range(count)})


class Held(nn.Module):
    """A layer, and arrays beside it that do not train."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = nn.Linear(4, 1)
        self.held = arrays(count)
        self.freeze(keys=["held"], recurse=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4] to [batch, 1]."""
        y: mx.array = self.layer(x)
        return y


def arrays(count: int) -> list[mx.array]:
    """Make so many small arrays."""
    made = [mx.array([float(i)]) for i in range(count)]
    mx.eval(made)
    return made


def layers(count: int) -> nn.Module:
    """Make a frozen model of so many arrays."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count // 2)))
    model.freeze()
    mx.eval(model.parameters())
    return model


def objective(model: nn.Module, x: mx.array, reached: Any) -> mx.array:
    """Return a loss that has been given something, and makes nothing of it."""
    assert reached is not None
    loss: mx.array = model(x).square().mean()
    return loss


def build(reached: Any, held: int = 0) -> StepFn:
    """Make a step whose loss reaches this in its closure, and whose model holds so many arrays."""
    mx.random.seed(0)
    model = Held(held)
    step = WAYS[FAST](Run(model, optim.SGD(1e-3), lambda model, x: objective(model, x, reached)))
    for _ in range(4):
        mx.eval(step(batch()))
    return step


def batch() -> mx.array:
    """Draw a batch, equal each time."""
    return mx.random.normal((8, 4), key=mx.random.key(1))


def measure(rounds: int, after_round: Callable[[], None]) -> dict[str, Any]:
    """Time a step by what its loss reaches, in turns."""
    steps = {NOTHING: build(0.0)}
    for count in COUNTS:
        steps |= {
            f"numbers in a dict x {count}": build({f"value_{i}": float(i) for i in range(count)}),
            f"attributes of an object x {count}": build(Settings(count)),
            f"arrays in a list x {count}": build(arrays(count)),
            f"NumPy arrays in a list x {count}": build([np.array([float(i)]) for i in range(count)]),
            f"arrays of a frozen model x {count}": build(layers(count)),
            f"arrays of the model x {count}": build(0.0, held=count),
        }
    x = batch()
    blocks = {way: functools.partial(run_block, step, [(x,)], block_size(0.1)) for way, step in steps.items()}
    return {"ms": in_turns(blocks, rounds, after_round)}


if __name__ == "__main__":
    about = "Measure what it costs to look at what a loss reaches."
    measure_alone("reach", "slots", about, measure, rounds=40, gpu=True)
