"""NumPy arrays among the arguments of a loss, and arrays that are passed twice."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    BAD_BATCHES,
    Loss,
    Made,
    Make,
    add,
    program,
    rows_of_normals,
    squares,
)


def before_mlxs(kind: str) -> Make:
    """NumPy arrays before MLX's."""

    def make() -> Made:
        def loss_fn(model: nn.Module, x: Any, held: Any) -> mx.array:
            if kind == "written":
                held["out"] = model(mx.array(x))
                held["n"] = held.get("n", 0) + 1
            weight = held if kind == "array" else held[0] if kind == "list" else held["w"]
            return (mx.square(model(mx.array(x))) * weight).mean()

        given: list[Any] = []

        def batch(number: int) -> tuple[Any, ...]:
            x, w = np.random.RandomState(number).randn(3, 4).astype(np.float32), mx.array([1.0, 2.0])
            held: Any = w if kind == "array" else [w] if kind == "list" else {"x": x, "w": w}
            given[:] = [x, w, held]
            return x, held

        def seen() -> Any:
            x, w, held = given
            return (held["n"], held["w"] is w, held["x"] is x) if kind == "written" else None

        return Made(loss_fn, seen, batch=batch, calls=6)

    return make


for kind in ("array", "dict", "list", "written"):
    add(
        "closure",
        f"NumPy arrays before MLX's: {kind}",
        before_mlxs(kind),
        without=BAD_BATCHES,
    )


def are_what_they_are(kind: str) -> Make:
    """NumPy arrays are what they are in the plain loop."""

    def batch(number: int) -> tuple[Any]:
        rows = np.random.RandomState(number)
        if kind in ("isinstance", "dtype"):
            return (rows.randint(0, 256, (4, 4)).astype(np.uint8),)
        return (1e6 + rows.randn(4, 4) if kind == "float64" else rows.randn(4, 4).astype(np.float32),)

    def made(x: Any) -> mx.array:
        if kind == "isinstance":
            return mx.array(x) / 255 if isinstance(x, np.ndarray) else x
        if kind == "dtype":
            return mx.array(x) / (255 if x.dtype == np.uint8 else 2550)
        if kind == "float64":
            return mx.array((x - x.mean(0)) / x.std(0))
        if kind == "mask":
            return mx.array(x[x[:, 0] > 0])
        return mx.array(x.clip(-1, 1).copy() if kind == "method" else x)

    return lambda: Made(lambda model, x: squares(model, made(x)), batch=batch, calls=6)


for kind in ("isinstance", "dtype", "float64", "mask", "method", "the same"):
    without = BAD_BATCHES if kind == "mask" else ()
    add("closure", f"NumPy arrays are what they are: {kind}", are_what_they_are(kind), near=1e-4, without=without)


def at_a_later_call(kind: str) -> Make:
    """NumPy arrays that come at a later call."""

    def weight(number: int) -> Any:
        if kind == "float64":
            return np.ones(2, np.float64 if number >= 3 else np.float32)
        is_numpy = number % 2 if kind == "by turns" else number >= 3
        return np.ones(2, np.float32) if is_numpy else mx.ones((2,))

    def loss_fn(model: nn.Module, x: mx.array, w: Any) -> mx.array:
        doubles = w.dtype == np.float64 if kind == "float64" else isinstance(w, np.ndarray)
        return squares(model, x) * (2.0 if doubles else 1.0)

    return lambda: Made(loss_fn, batch=lambda number: (rows_of_normals(number), weight(number)), calls=6)


for kind in ("by turns", "float64", "later"):
    add("closure", f"NumPy arrays that come at a later call: {kind}", at_a_later_call(kind))


@program("closure")
def an_array_that_is_passed_twice() -> Made:
    """MLX differentiates with copies of its own for each place."""
    given: list[Any] = []

    def loss_fn(model: nn.Module, x: mx.array, pair: dict[str, mx.array]) -> mx.array:
        same = x is pair["x"] or pair["x"] is pair["y"]
        pair["y"][0] = 0.0
        return squares(model, pair["x"]) * (2.0 if same else 1.0)

    def batch(number: int) -> tuple[Any, ...]:
        x = rows_of_normals(number)
        given[:] = [x, {"x": x, "y": x}]
        return x, given[1]

    return Made(loss_fn, lambda: given, batch=batch, calls=6)


def in_turns(kind: str) -> Make:
    """Two losses that set something on one model."""

    def make() -> Made:
        model, optimizer = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)), optim.SGD(0.05)
        model.phase = None

        def setting(value: bool) -> Loss:
            def loss_fn(model: Any, x: mx.array) -> mx.array:
                model.train(value) if kind == "mode" else setattr(model, "phase", value)
                return squares(model, x)

            return loss_fn

        seen = lambda: (model.phase, model.training, model.layers[1].training)  # noqa: E731
        parts = [Made(setting(value), seen, model=model, optimizer=optimizer) for value in (True, False)]
        parts[0].others = parts[1:]
        return parts[0]

    return make


for kind in ("attribute", "mode"):
    add("model", f"two losses that set a {kind} of one model in turns", in_turns(kind))
