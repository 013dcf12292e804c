"""What is replaced in a library, or among the builtins, between two steps is called from the next step on."""

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
from faststep import Step
from support.beside import Program, beside, squares

Build = Callable[[pytest.MonkeyPatch], Program]


def program(loss_fn: Callable[..., mx.array], *replaced: tuple[Any, str, Any]) -> Build:
    """Return a program in which attributes are replaced, one before each two steps."""

    def build(patch: pytest.MonkeyPatch) -> Program:
        return loss_fn, [functools.partial(patch.setattr, *each, raising=False) for each in replaced]

    return build


def by_name(patch: pytest.MonkeyPatch) -> Program:
    settings = {"activation": "gelu"}
    return lambda model, x: getattr(nn, settings["activation"])(model(x)).sum(), [
        lambda: settings.update(activation="relu"),
        lambda: patch.setattr(nn, "relu", lambda y: y * 7),
    ]


def by_mock(patch: pytest.MonkeyPatch) -> Program:
    mock = unittest.mock.patch("mlx.core.tanh", lambda y: y * 5)
    return lambda model, x: mx.tanh(model(x)).sum(), [mock.start, mock.stop]


def by_result(patch: pytest.MonkeyPatch) -> Program:
    mock = unittest.mock.MagicMock(return_value=2.0)
    return lambda model, x: squares(model, x) * mock(), [lambda: setattr(mock, "return_value", 5.0)]


def by_module(patch: pytest.MonkeyPatch) -> Program:
    one, other = types.ModuleType("one"), types.ModuleType("other")
    one.scale, other.scale = 2.0, 3.0  # type: ignore[attr-defined]
    patch.setitem(globals(), "backend", one)
    return lambda model, x: squares(model, x) * backend.scale, [  # type: ignore[name-defined]  # noqa: F821
        lambda: patch.setitem(globals(), "backend", other),
        lambda: patch.setitem(globals(), "backend", types.SimpleNamespace(scale=5.0)),
    ]


def by_shadow(patch: pytest.MonkeyPatch) -> Program:
    return lambda model, x: squares(model, x) * divmod(7.0, 2.0)[0], [
        lambda: patch.setitem(globals(), "divmod", lambda *_: (4.0, 1.0)),
        lambda: patch.delitem(globals(), "divmod"),
        lambda: patch.setattr(builtins, "divmod", lambda *_: (5.0, 1.0)),
    ]


def by_new_builtin(patch: pytest.MonkeyPatch) -> Program:
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

PROGRAMS: dict[str, Build] = {
    "nn": program(lambda m, x: nn.gelu(m(x)).sum(), (nn, "gelu", lambda y: y * 3), (nn, "gelu", nn.relu)),
    "a compiled function": program(
        lambda m, x: nn.gelu(m(x)).sum(),
        (nn, "gelu", mx.compile(lambda y: y * 3)),
        (nn, "gelu", mx.compile(lambda y: y * 4)),
    ),
    "mx.fast": program(
        lambda m, x: mx.fast.rms_norm(m(x), mx.ones(2), 1e-5).sum() + m(x).sum(),
        (mx.fast, "rms_norm", lambda y, weight, eps: y * 2),
    ),
    "nn.losses": program(
        lambda m, x: nn.losses.mse_loss(m(x), x[:, :2]), (nn.losses, "mse_loss", lambda a, b: mx.abs(a - b).sum())
    ),
    "within MLX's function": program(
        lambda m, x: nn.losses.binary_cross_entropy(m(x), mx.ones((8, 2))),
        (mx, "logaddexp", lambda a, b: a * 2 + b),
    ),
    "within MLX's layer": program(squares, (mx, "addmm", addmm)),
    "within a layer that the loss has": program(
        lambda m, x: squares(m, attention(x[None], x[None], x[None])),
        (mx.fast, "scaled_dot_product_attention", lambda q, k, v, **_: v * 2),
    ),
    "a layer's method": program(squares, (nn.Linear, "__call__", lambda self, x: x @ self.weight.T * 2)),
    "mx.array's method": program(
        lambda m, x: squares(m, x).scaled(),
        *((mx.array, "scaled", lambda y, by=by: y * by) for by in (2, 3)),
    ),
    "NumPy": program(lambda m, x: squares(m, x) * float(np.mean([1.0, 2.0])), (np, "mean", lambda a: 7.0)),
    "a number of NumPy": program(lambda m, x: squares(m, x) * np.pi, (np, "pi", 1.0), (np, "pi", 2.0)),
    "math": program(lambda m, x: squares(m, x) * math.sqrt(4.0), (math, "sqrt", lambda v: v)),
    "a number of math": program(lambda m, x: squares(m, x) * math.tau, (math, "tau", 2.0), (math, "tau", 3.0)),
    "the standard library": program(
        lambda m, x: squares(m, x) * statistics.mean([1.0, 3.0]), (statistics, "mean", lambda v: 9.0)
    ),
    "its function in C": program(
        lambda m, x: squares(m, x) * functools.reduce(operator.mul, [2.0, 3.0]), (operator, "mul", lambda a, b: a + b)
    ),
    "its class": program(
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


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it changes _mock")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_replaced_in_a_library_is_called_from_the_next_step_on(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if name == "mx.array's method":
            patch.setattr(mx.array, "scaled", lambda y: y, raising=False)
        step = beside(PROGRAMS[name])
    assert step.stats.mode == ("plain" if name == "a mock" else "native")  # which keeps what it has been called with
    assert step.stats.traced <= 3


@pytest.mark.parametrize("own", [False, True])
def test_an_optimizers_method_that_is_replaced_is_called_from_the_next_step_on(own: bool) -> None:
    class Own(optim.SGD):
        pass

    original = optim.SGD.apply_single
    build = program(squares, (optim.SGD, "apply_single", lambda self, g, p, state: original(self, 3 * g, p, state)))
    step = beside(build, optimizer=lambda: (Own if own else optim.SGD)(0.1))
    assert step.stats.mode == "traced"


def test_a_look_at_what_the_code_of_libraries_names_costs_no_trace() -> None:
    step, x = Step(nn.Linear(4, 2), optim.SGD(0.1), lambda model, x: nn.gelu(squares(model, x))), mx.ones((3, 4))
    for number in range(4):
        step(x)
        setattr(math, f"unused_{number}", number)
        delattr(math, f"unused_{number}")
    assert (step.stats.mode, step.stats.traced) == ("native", 1)
