"""What is replaced in a library, or among the builtins, between two calls."""

from __future__ import annotations

import builtins
import collections
import functools
import math
import operator
import statistics
import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from support.programs.reach.registry import (
    Around,
    Build,
    Changing,
    Made,
    Make,
    add,
    changed,
    made_of,
    program,
    squares,
)


def program_of(loss_fn: Callable[..., mx.array], *replaced: tuple[Any, str, Any]) -> Build:
    """Return a program in which attributes are replaced, one before each two steps."""

    def build(patch: pytest.MonkeyPatch) -> Changing:
        return loss_fn, [functools.partial(patch.setattr, *each, raising=False) for each in replaced]

    return build


def by_name(patch: pytest.MonkeyPatch) -> Changing:
    settings = {"activation": "gelu"}
    return lambda model, x: getattr(nn, settings["activation"])(model(x)).sum(), [
        lambda: settings.update(activation="relu"),
        lambda: patch.setattr(nn, "relu", lambda y: y * 7),
    ]


def by_mock(patch: pytest.MonkeyPatch) -> Changing:
    mock = unittest.mock.patch("mlx.core.tanh", lambda y: y * 5)
    return lambda model, x: mx.tanh(model(x)).sum(), [mock.start, mock.stop]


def by_result(patch: pytest.MonkeyPatch) -> Changing:
    mock = unittest.mock.MagicMock(return_value=2.0)
    return lambda model, x: squares(model, x) * mock(), [lambda: setattr(mock, "return_value", 5.0)]


def by_module(patch: pytest.MonkeyPatch) -> Changing:
    one, other = types.ModuleType("one"), types.ModuleType("other")
    one.scale, other.scale = 2.0, 3.0  # type: ignore[attr-defined]
    patch.setitem(globals(), "backend", one)
    return lambda model, x: squares(model, x) * backend.scale, [  # type: ignore[name-defined]  # noqa: F821
        lambda: patch.setitem(globals(), "backend", other),
        lambda: patch.setitem(globals(), "backend", types.SimpleNamespace(scale=5.0)),
    ]


def by_shadow(patch: pytest.MonkeyPatch) -> Changing:
    return lambda model, x: squares(model, x) * divmod(7.0, 2.0)[0], [
        lambda: patch.setitem(globals(), "divmod", lambda *_: (4.0, 1.0)),
        lambda: patch.delitem(globals(), "divmod"),
        lambda: patch.setattr(builtins, "divmod", lambda *_: (5.0, 1.0)),
    ]


def by_new_builtin(patch: pytest.MonkeyPatch) -> Changing:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        try:
            scale = SCALE_OF_ALL  # type: ignore[name-defined]
        except NameError:
            scale = 1.0
        return squares(model, x) * scale

    return loss_fn, [
        lambda: patch.setattr(builtins, "SCALE_OF_ALL", 3.0, raising=False),
        lambda: patch.setattr(builtins, "SCALE_OF_ALL", 4.0),
    ]


def addmm(c: mx.array, a: mx.array, b: mx.array, *, original: Callable[..., mx.array] = mx.addmm) -> mx.array:
    return original(c, a, b) * 2


counted = collections.Counter("aab")
attention = nn.MultiHeadAttention(4, 2)

METHOD = program_of(
    lambda m, x: squares(m, x).scaled(), *((mx.array, "scaled", lambda y, by=by: y * by) for by in (2, 3))
)
PROGRAMS: dict[str, Build] = {
    "nn": program_of(lambda m, x: nn.gelu(m(x)).sum(), (nn, "gelu", lambda y: y * 3), (nn, "gelu", nn.relu)),
    "a compiled function": program_of(
        lambda m, x: nn.gelu(m(x)).sum(),
        (nn, "gelu", mx.compile(lambda y: y * 3)),
        (nn, "gelu", mx.compile(lambda y: y * 4)),
    ),
    "mx.fast": program_of(
        lambda m, x: mx.fast.rms_norm(m(x), mx.ones(2), 1e-5).sum() + m(x).sum(),
        (mx.fast, "rms_norm", lambda y, weight, eps: y * 2),
    ),
    "nn.losses": program_of(
        lambda m, x: nn.losses.mse_loss(m(x), x[:, :2]), (nn.losses, "mse_loss", lambda a, b: mx.abs(a - b).sum())
    ),
    "within MLX's function": program_of(
        lambda m, x: nn.losses.binary_cross_entropy(m(x), mx.ones((8, 2))),
        (mx, "logaddexp", lambda a, b: a * 2 + b),
    ),
    "within MLX's layer": program_of(squares, (mx, "addmm", addmm)),
    "within a layer that the loss has": program_of(
        lambda m, x: squares(m, attention(x[None], x[None], x[None])),
        (mx.fast, "scaled_dot_product_attention", lambda q, k, v, **_: v * 2),
    ),
    "a layer's method": program_of(squares, (nn.Linear, "__call__", lambda self, x: x @ self.weight.T * 2)),
    "NumPy": program_of(lambda m, x: squares(m, x) * float(np.mean([1.0, 2.0])), (np, "mean", lambda a: 7.0)),
    "a number of NumPy": program_of(lambda m, x: squares(m, x) * np.pi, (np, "pi", 1.0), (np, "pi", 2.0)),
    "math": program_of(lambda m, x: squares(m, x) * math.sqrt(4.0), (math, "sqrt", lambda v: v)),
    "a number of math": program_of(lambda m, x: squares(m, x) * math.tau, (math, "tau", 2.0), (math, "tau", 3.0)),
    "the standard library": program_of(
        lambda m, x: squares(m, x) * statistics.mean([1.0, 3.0]), (statistics, "mean", lambda v: 9.0)
    ),
    "its function in C": program_of(
        lambda m, x: squares(m, x) * functools.reduce(operator.mul, [2.0, 3.0]), (operator, "mul", lambda a, b: a + b)
    ),
    "its class": program_of(
        lambda m, x: squares(m, x) * counted.most_common(1)[0][1],
        (collections.Counter, "most_common", lambda self, n: [("z", 50)]),
    ),
    "by a name in a dict": by_name,
    "unittest.mock.patch": by_mock,
    "a mock": by_result,
    "another module": by_module,
    "a global that shadows a builtin": by_shadow,
    "a new builtin": by_new_builtin,
}


for name, build in PROGRAMS.items():
    add("process", f"what is replaced in a library: {name}", made_of(build))


@program("process")
def a_method_of_an_array_that_is_replaced(around: Around) -> Made:
    around.patch.setattr(mx.array, "scaled", lambda y: y, raising=False)
    return made_of(METHOD)(around)  # type: ignore[arg-type, call-arg]


def own_class() -> Make:
    """A method of MLX's optimizer that is replaced, which a class of one's own has."""

    class Own(optim.SGD):
        pass

    original = optim.SGD.apply_single
    other = (optim.SGD, "apply_single", lambda self, g, p, state: original(self, 3 * g, p, state))
    return lambda around: changed(
        *program_of(squares, other)(around.patch),
        optimizer=Own(0.1),  # type: ignore[call-arg]
    )


add("optimizer", "a method of an optimizer that is replaced, in a class of its own", own_class())
