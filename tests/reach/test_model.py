"""What a loss or the user reads, changes and keeps on the model, and what the user does to it between the calls."""

from __future__ import annotations

import random
import types
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Variant, beside, cases, squares
from support.helpers import assert_close, flat, plain_step
from support.programs.reach import Program

pytestmark = pytest.mark.filterwarnings("ignore:faststep:RuntimeWarning")


@pytest.mark.parametrize(("program", "variant"), cases("model"))
def test_a_program_is_its_plain_loop(program: Program, variant: Variant) -> None:
    beside(program, variant)


@pytest.mark.parametrize("kind", ["counts", "decides", "fades"])
def test_gradients_alone_count_too(kind: str) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        model.calls += 1
        if kind == "fades":
            model.share = max(0.1, model.share * 0.9)
        loss = squares(model, x) * (1 + model.share)
        return loss * 3 if kind == "decides" and model.calls % 3 == 0 else loss

    losses, left = [], []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 3), optim.SGD(0.1)
        model.calls, model.share = 0, 1.0
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        losses.append([])
        for number in range(9):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if number % 2:
                loss, _ = step.gradients(x) if fast else nn.value_and_grad(model, loss_fn)(model, x)
                losses[-1].append(float(loss))
            losses[-1].append(float(step(x).loss if fast else plain(x)[0]))
        left.append((model.calls, model.share))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    assert left[0] == left[1]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_a_loss_that_counts_may_be_the_first_call(momentum: float) -> None:
    at = types.SimpleNamespace(calls=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        at.calls += 1
        model.calls += 1
        return squares(model, x)

    model, x = nn.Linear(4, 3), mx.ones((8, 4))
    model.calls = 0
    optimizer = optim.SGD(0.1, momentum=momentum)
    step = Step(model, optimizer, loss_fn)
    wanted = nn.value_and_grad(model, squares)(model, x)[1]
    for number in range(1, 5):
        gradients = step.gradients(x)[1]
        assert mx.allclose(gradients["weight"], wanted["weight"], rtol=1e-5)
        assert (model.calls, at.calls) == (number, number)
    assert "weight" not in optimizer.state
    step(x)
    assert (model.calls, at.calls) == (5, 5)


def test_a_memory_plan_calls_the_loss_once_and_leaves_the_arrays_of_the_model() -> None:
    state, model = types.SimpleNamespace(mean=mx.zeros((2,)), log=list[int]()), nn.Linear(4, 2)
    model.steps, model._done = 0, set()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        model.steps += 1
        model._done.add(model.steps)
        out = model(x)
        state.log.append(len(x))
        state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
        return mx.square(out - state.mean).mean() * (1 + random.random())

    step, weight = Step(model, optim.SGD(0.1), loss_fn), np.array(model.weight)
    step.memory_plan(mx.ones((3, 4)))
    assert (model.steps, model._done, state.log) == (1, {1}, [3])
    np.testing.assert_allclose(np.array(state.mean), 0.1 * np.array(model(mx.ones((3, 4))).mean(0)), rtol=1e-5)
    np.testing.assert_array_equal(np.array(model.weight), weight)
    step(mx.ones((3, 4)))
    assert (model.steps, model._done, state.log) == (2, {1, 2}, [3, 3])


@pytest.mark.parametrize("make", [lambda: optim.AdamW(0.1), lambda: optim.Lion(0.1), lambda: optim.SGD(0.1)])
def test_a_parameter_of_integers_is_clipped_as_in_mlx(make: Callable[[], optim.Optimizer]) -> None:
    values = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 2), make()
        model.channels = mx.array([192])
        gradients_of = nn.value_and_grad(model, squares)
        step = Step(model, optimizer, squares, max_grad_norm=1.0)
        for number in range(4):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if fast:
                step(x)
            else:
                _, gradients = gradients_of(model, x)
                optimizer.update(model, optim.clip_grad_norm(gradients, 1.0)[0])
        values.append(np.array(model.channels))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6)


class Pair(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.second = self.first

    def __call__(self, x: mx.array) -> mx.array:
        return self.second(self.first(x))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trained_module_in_the_place_of_another_is_refused(tied: bool, at: int, compiled: bool) -> None:
    """Two modules become one in a call, or one becomes two: nothing is trained by it."""
    model, optimizer, number = Pair(tied), optim.Adam(0.1), -1
    kept = {"first": model.first, "second": model.second}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if number == at:
            model.second = nn.Linear(4, 4) if tied else model.first
        return squares(model, x)

    step = Step(model, optimizer, loss_fn, compile=compiled)
    for number in range(at):  # noqa: B007
        step(mx.ones((3, 4)))
    number = at
    optimizer.init(model.trainable_parameters())
    trees = lambda: flat({"model": kept, "state": optimizer.state, "key": mx.random.state})  # noqa: E731
    before = {name: np.array(array) for name, array in trees().items()}
    key = mx.random.state[0]
    with pytest.raises(ValueError, match=r"expected it to leave model\.second\.weight at a place of its own"):
        step(mx.ones((3, 4)))
    assert tied or mx.array_equal(key, mx.random.state[0])
    after = {name: np.array(array) for name, array in trees().items()}
    assert_close(after, before, 0)
    assert step.stats.steps == at
    number = -1
    step(mx.ones((3, 4)))
    assert step.stats.steps == at + 1
