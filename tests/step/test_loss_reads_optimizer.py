"""A loss that reads the state of an optimizer: of the one that updates it, and of another step's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten, tree_map
from support.beside import Box, Program, batch, beside, squares
from support.helpers import SignedDescent, plain_step


def _sum(state: Any) -> mx.array:
    return sum((value.astype(mx.float32).sum() for _, value in tree_flatten(state)), mx.array(0.0))


READS: dict[str, Callable[[Any], Any]] = {
    "the step as a number": lambda it: it.step.item(),
    "the step as an array": lambda it: it.step.astype(mx.float32),
    "the step that decides": lambda it: 2.0 if it.step > 2 else 1.0,
    "the rate as a number": lambda it: it.learning_rate.item(),
    "the rate as an array": lambda it: it.learning_rate,
    "the moments": lambda it: _sum(it.state),
    "the step in private": lambda it: it._state["step"].item(),
    "an optimizer within": lambda it: it.optimizers[1].step.item() + _sum(it.optimizers[0].state),
}


@pytest.mark.parametrize("kind", READS)
def test_the_state_of_its_own_optimizer_is_that_of_the_plain_loop(kind: str) -> None:
    box = Box(None)

    def make() -> optim.Optimizer:
        box.value = optim.Adam(0.01)
        if kind == "an optimizer within":
            several = [optim.Adam(0.01), optim.SGD(0.1)]
            box.value = optim.MultiOptimizer(several, [lambda name, _: name == "bias"])
        box.value.init(nn.Linear(4, 2).trainable_parameters())
        return box.value  # type: ignore[no-any-return]

    def build(_: pytest.MonkeyPatch) -> Program:
        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return squares(model, x) * (1 + READS[kind](box.value))

        return loss_fn, [lambda: setattr(box.value, "learning_rate", 0.03)] if "within" not in kind else [lambda: None]

    warned = "it (reads the state|may read the `_state`) of the optimizer that updates it"
    with pytest.warns(RuntimeWarning, match=warned):
        step = beside(build, optimizer=make)
    assert step.stats.mode == "plain"


def test_the_state_is_read_where_the_step_is_not_to_be_compiled() -> None:
    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(2)
        model, optimizer = nn.Linear(4, 2), optim.Adam(0.01)

        def loss_fn(model: nn.Module, x: mx.array, optimizer: Any = optimizer) -> mx.array:
            return squares(model, x) + _sum(optimizer.state)

        optimizer.init(model.trainable_parameters())
        step: Any = Step(model, optimizer, loss_fn, compile=False) if fast else plain_step(model, optimizer, loss_fn)
        losses.append([(step(batch()).loss if fast else step(batch())[0]).item() for _ in range(4)])
    assert losses[0] == losses[1]


SCHEDULES: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda step: 0.1 / (1 + step),
    "a function of Python numbers": lambda: lambda step: mx.array(0.1 if step.item() < 3 else 0.02),
    "MLX's": lambda: optim.exponential_decay(0.1, 0.8),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"SGD": optim.SGD, "Adam": optim.Adam, "own": SignedDescent}


@pytest.mark.parametrize("way", ["compile", "uncompiled", "window"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled:RuntimeWarning")
def test_a_scheduled_rate_is_that_of_the_last_update_or_what_was_set_since(schedule: str, kind: str, way: str) -> None:
    def run(native: bool) -> list[float]:
        mx.random.seed(2)
        model, rates = nn.Linear(4, 2), list[float]()
        optimizer = OPTIMIZERS[kind](SCHEDULES[schedule]())
        optimizer.init(model.trainable_parameters())

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            rates.append(optimizer.learning_rate.item())
            return squares(model, x) * (1 + optimizer.learning_rate)

        window = 2 if way == "window" else 1
        step = Step(model, optimizer, loss_fn, compile=way != "uncompiled", accumulate=window)
        grad, sums, losses = nn.value_and_grad(model, loss_fn), list[Any](), list[float]()
        for number in range(8):
            if number in (0, 4):
                optimizer.learning_rate = 0.5
            if native:
                losses.append(step(batch()).loss.item())
                continue
            loss, gradients = grad(model, batch())
            losses.append(loss.item())
            sums.append(gradients)
            if len(sums) == window:
                optimizer.update(model, tree_map(lambda *each: sum(each[1:], each[0]) / window, *sums))
                sums.clear()
        return losses + rates

    np.testing.assert_allclose(run(native=True), run(native=False), rtol=1e-5)


class Counted(nn.Linear):
    """Has an integer, which is trained as any array is."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.count = mx.array([inputs])


class Trainer:
    """Two models and their optimizers, of which the code may ask for each by a name that it makes."""

    def __init__(self) -> None:
        self.models = Counted(4, 4), nn.Linear(4, 1)
        self.first, self.second = optim.AdamW(0.01), optim.Adam(0.02)

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        sizes = [getattr(self, name) for name in vars(self) if name.startswith("scale")]
        if self.models[1] is model:
            return mx.square(model(self.models[0](x))).mean() + sum(sizes)
        value = mx.square(model(x)).mean()
        assert value.item() >= 0
        return value


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it reads the value:RuntimeWarning")
def test_two_steps_whose_losses_reach_both_optimizers_are_the_plain_loops() -> None:
    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(2)
        it = Trainer()
        pairs = zip(it.models, (it.first, it.second), strict=True)
        steps: list[Any] = [(Step if fast else plain_step)(*pair, it.loss) for pair in pairs]
        called = [step(batch()) for _ in range(4) for step in steps]
        losses.append([(out.loss if fast else out[0]).item() for out in called])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    assert mx.all(mx.isfinite(_sum(it.second.state)))


def test_an_option_that_the_loss_sets_is_an_error() -> None:
    optimizer = optim.SGD(0.1)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        optimizer.learning_rate = 0.2
        return squares(model, x)

    step = Step(nn.Linear(4, 2), optimizer, loss_fn)
    with (
        pytest.warns(RuntimeWarning, match="reads the state of the optimizer"),
        pytest.raises(RuntimeError, match="changes an option of the optimizer"),
    ):
        step(batch())


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled:RuntimeWarning")
def test_what_the_loss_notes_on_an_optimizer_is_no_option_of_it() -> None:
    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(2)
        model, optimizer = nn.Linear(4, 2), optim.Adam(0.01)

        def loss_fn(model: nn.Module, x: mx.array, optimizer: Any = optimizer) -> mx.array:
            value = squares(model, x)
            optimizer.last_loss, optimizer.calls = value, getattr(optimizer, "calls", 0) + 1
            return value

        step: Any = (Step if fast else plain_step)(model, optimizer, loss_fn)
        losses.append([(step(batch()).loss if fast else step(batch())[0]).item() for _ in range(4)])
        assert optimizer.calls == 4
        assert optimizer.last_loss.item() == losses[-1][-1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled:RuntimeWarning")
def test_an_attribute_of_ones_own_optimizer_that_the_loss_sets_is_that_of_the_plain_loop() -> None:
    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(2)
        model, optimizer = nn.Linear(4, 2), SignedDescent(0.01)

        def loss_fn(model: nn.Module, x: mx.array, optimizer: SignedDescent = optimizer) -> mx.array:
            value = squares(model, x)
            optimizer.decay = min(value.item(), 0.9)  # type: ignore[type-var, assignment]
            return value

        step: Any = (Step if fast else plain_step)(model, optimizer, loss_fn)
        losses.append([(step(batch()).loss if fast else step(batch())[0]).item() for _ in range(4)])
    assert losses[0] == losses[1]


class Recurrent(nn.Module):
    """A layer with a `_state` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self._state = nn.Linear(4, 4), mx.zeros((4,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(self.write(x) + 0.5 * self._state)


def test_a_state_of_the_model_is_not_taken_for_that_of_the_optimizer_that_it_owns() -> None:
    model = nn.Sequential(Recurrent(), nn.Linear(4, 1))
    model.optimizer = optim.AdamW(1e-3)
    step = Step(model, model.optimizer, lambda model, x: mx.square(model(x)).mean())
    for _ in range(4):
        model.layers[0]._state = mx.tanh(mx.mean(step(batch()).loss) * mx.ones((4,)))
    assert step.stats.mode == "native"


@pytest.mark.parametrize("way", ["compiled", "uncompiled"])
def test_the_rate_of_another_optimizer_that_a_loss_sets_is_put_back_behind_a_bad_batch(way: str) -> None:
    other, model = optim.Adam(0.01), nn.Linear(4, 2)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        other.learning_rate = 0.5 * other.learning_rate
        return squares(model, x)

    step = Step(model, optim.SGD(1e-3), loss_fn, compile=way == "compiled")
    for number in range(12):
        x = mx.ones((3, 4)) * (float("nan") if number in (0, 3, 8) else 1)
        mx.eval(step(x).loss)
    assert other.learning_rate.item() == pytest.approx(0.01 * 0.5**9)
