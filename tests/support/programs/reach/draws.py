"""Losses that draw random numbers, or seed a generator."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Made,
    Make,
    add,
    squares,
)

SIZES = {"one": (3,), "two": (3, 5), "three": (3, 5, 4)}


def drawing(draw: Callable[[], float], sizes: str, stores: bool) -> Make:
    def build() -> Made:
        kept: dict[str, Any] = {"last": None}

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            if stores:
                kept["last"] = mx.stop_gradient(out)
            return mx.abs(out).mean() * (1 + 0.1 * draw())

        return Made(loss_fn, lambda: kept["last"], rows=SIZES[sizes])

    return build


for name, draw in {
    "np.random.rand": np.random.rand,
    "np.random.randn": np.random.randn,
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
}.items():
    for sizes in SIZES:
        add("process", f"{name} beside an array of sizes {sizes}", drawing(draw, sizes, stores=True))
    add("process", name, drawing(draw, "one", stores=False))


SEEDED: dict[str, Callable[[int], float]] = {
    "random": lambda seed: random.Random(seed).random(),
    "the process": lambda seed: random.seed(seed) or random.random(),  # type: ignore[func-returns-value]
    "default_rng": lambda seed: np.random.default_rng([7, seed]).random(),
    "bits": lambda seed: np.random.Generator(np.random.PCG64(seed=seed)).random(),
    "NumPy's": lambda seed: np.random.seed(seed) or np.random.rand(),  # type: ignore[func-returns-value]
}


def seeded(name: str, counts: bool) -> Make:
    """What happens seldom by a generator that is seeded at each call, by a count or by one number."""

    def build() -> Made:
        state = types.SimpleNamespace(n=0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.n += 1
            chance = SEEDED[name](state.n if counts else 3)
            return squares(model, x * 0.0 if chance < 0.05 else x)

        return Made(loss_fn, lambda: state.n, calls=30)

    return build


for name in SEEDED:
    for counts in (False, True):
        add(
            "process",
            f"a generator ({name}) that is seeded {'by a count' if counts else 'alike at each call'}",
            seeded(name, counts),
        )


def begins_to_draw(kind: str, begins: str, seed: int) -> Make:
    """A loss that begins to draw, and uses it by chance."""

    def build() -> Made:
        random.seed(seed)
        np.random.seed(seed)
        state = types.SimpleNamespace(calls=0, on=False, own=np.random.default_rng(seed))

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            draw = {"random": random.random, "numpy": np.random.rand, "own": state.own.random}[kind]
            if (state.on if begins == "by a flag" else state.calls >= 3) and draw() < 0.5:
                x = -2 * x
            if begins == "by a count":
                state.calls += 1
            return squares(model, x)

        def between(number: int) -> None:
            state.on = number >= 3

        return Made(loss_fn, lambda: (state.calls, str(state.own.bit_generator.state)), between)

    return build


for kind, begins, at in itertools.product(("random", "numpy", "own"), ("by a count", "by a flag"), range(3)):
    add("process", f"a loss that begins to draw {begins}, {kind}, seed {at}", begins_to_draw(kind, begins, at))


def two_generators(shared: str) -> Make:
    """A generator of its own beside the process's, each from another call on."""

    def build() -> Made:
        own, state = np.random.default_rng(1), types.SimpleNamespace(calls=0)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            draw = random.random if shared == "random" else np.random.random
            state.calls += 1
            loss = squares(model, x)
            if state.calls > 6:
                loss = loss * own.random()
            if state.calls > 4 and draw() < 0.5:
                loss = loss * 0.5
            return loss

        return Made(loss_fn, lambda: (state.calls, str(own.bit_generator.state)), optimizer=optim.SGD(0.1))

    return build


for shared in ("random", "numpy"):
    add("process", f"a generator of its own beside the process's ({shared})", two_generators(shared))
