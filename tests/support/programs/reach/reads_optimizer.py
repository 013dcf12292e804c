"""Losses that read or set something of an optimizer: of the one that updates, or of another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from support.helpers import SignedDescent, flat
from support.programs.reach.registry import (
    Made,
    Make,
    add,
    one_batch,
    program,
    rows_of_normals,
    squares,
)


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


def reading(kind: str) -> Make:
    """A loss that reads the state of its own optimizer."""

    def make() -> Made:
        model, own = nn.Linear(4, 2), optim.Adam(0.01)
        optimizer: Any = own
        if kind == "an optimizer within":
            optimizer = optim.MultiOptimizer([own, optim.SGD(0.1)], [lambda name, _: name == "bias"])
        optimizer.init(model.trainable_parameters())

        def between(number: int) -> None:
            if number == 2 and "within" not in kind:
                optimizer.learning_rate = 0.03

        loss_fn = lambda model, x: squares(model, x) * (1 + READS[kind](optimizer))  # noqa: E731
        return Made(loss_fn, between=between, model=model, optimizer=optimizer, batch=one_batch, calls=6)

    return make


for kind in READS:
    add("optimizer", f"a loss that reads {kind}", reading(kind))


SCHEDULES: dict[str, Callable[[], Any]] = {
    "a function": lambda: lambda step: 0.1 / (1 + step),
    "a function of Python numbers": lambda: lambda step: mx.array(0.1 if step.item() < 3 else 0.02),
    "MLX's": lambda: optim.exponential_decay(0.1, 0.8),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"SGD": optim.SGD, "Adam": optim.Adam, "own": SignedDescent}


def scheduled(schedule: str, kind: str) -> Make:
    """A scheduled rate is that of the last update, or what was set since."""

    def make() -> Made:
        model, rates, optimizer = nn.Linear(4, 2), list[float](), OPTIMIZERS[kind](SCHEDULES[schedule]())
        optimizer.init(model.trainable_parameters())

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            rates.append(optimizer.learning_rate.item())
            return squares(model, x) * (1 + optimizer.learning_rate)

        def between(number: int) -> None:
            if number in (0, 4):
                optimizer.learning_rate = 0.5

        return Made(loss_fn, lambda: rates, between, model, optimizer, one_batch)

    return make


for schedule, kind in itertools.product(SCHEDULES, OPTIMIZERS):
    add("optimizer", f"a loss that reads the rate of {kind} with the schedule: {schedule}", scheduled(schedule, kind))


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


@program("optimizer", near=1e-4, without=("bad batches in windows",))
def two_steps_whose_losses_reach_both_optimizers() -> Made:
    it = Trainer()
    parts = [
        Made(it.loss, model=model, optimizer=optimizer, batch=one_batch)
        for model, optimizer in zip(it.models, (it.first, it.second), strict=True)
    ]
    parts[0].others = parts[1:]
    return parts[0]


@program("optimizer")
def what_the_loss_notes_on_its_optimizer() -> Made:
    optimizer = optim.Adam(0.01)
    optimizer.calls = optimizer.last_loss = 0

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        value = squares(model, x)
        optimizer.last_loss, optimizer.calls = value, optimizer.calls + 1
        return value

    return Made(loss_fn, lambda: (optimizer.last_loss, optimizer.calls), optimizer=optimizer)


@program("optimizer")
def attribute_of_ones_own_optimizer_that_the_loss_sets() -> Made:
    optimizer = SignedDescent(0.01)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        value = squares(model, x)
        optimizer.decay = min(value.item(), 0.9)  # type: ignore[type-var, assignment]
        return value

    return Made(loss_fn, lambda: optimizer.decay, optimizer=optimizer)


class Recurrent(nn.Module):
    """A layer with a `_state` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self._state = nn.Linear(4, 4), mx.zeros((4,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.tanh(self.write(x) + 0.5 * self._state)


@program("optimizer")
def a_state_of_the_model_that_owns_its_optimizer() -> Made:
    model = nn.Sequential(Recurrent(), nn.Linear(4, 1))
    model.optimizer = optim.AdamW(1e-3)

    def between(number: int) -> None:
        model.layers[0]._state = mx.tanh(mx.full((4,), 0.1 * number))

    return Made(squares, between=between, model=model, optimizer=model.optimizer)


@program("optimizer")
def the_rate_of_another_optimizer_that_a_loss_sets() -> Made:
    other = optim.Adam(0.01)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        other.learning_rate = 0.5 * other.learning_rate
        return squares(model, x)

    return Made(loss_fn, lambda: other.learning_rate, optimizer=optim.SGD(1e-3))


def updating_within(kind: str, begun: bool) -> Make:
    """An optimizer that updates another module within the loss."""

    def make() -> Made:
        learned = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        momentum = optim.SGD(optim.step_decay(0.05, 0.5, 3), momentum=0.9)
        several = optim.MultiOptimizer([optim.Adam(0.05), momentum], [lambda path, value: value.ndim == 2])
        inner = {"adam": optim.Adam(0.05), "momentum": momentum, "several": several}[kind]
        if begun:
            inner.init(learned.trainable_parameters())

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            seen = mx.stop_gradient(model(x))
            _, gradients = nn.value_and_grad(learned, lambda it: mx.square(it(seen) - 1).mean())(learned)
            inner.update(learned, gradients)
            return mx.square(learned(model(x))).mean()

        def between(number: int) -> None:
            if number == 5:
                inner.learning_rate = 0.02

        left = lambda: dict(sorted(flat([learned.parameters(), inner.state]).items()))  # noqa: E731
        return Made(loss_fn, left, between, nn.Linear(4, 1), optim.Adam(0.01), lambda n: (rows_of_normals(n, 8),))

    return make


for kind, begun in itertools.product(("adam", "momentum", "several"), (False, True)):
    add(
        "optimizer",
        f"{kind} that updates another module within the loss{', begun' if begun else ''}",
        updating_within(kind, begun),
    )


# schedules that count


class Halved:
    """A schedule that counts in what it holds: a number, a list, a dict, an array."""

    def __init__(self) -> None:
        self.rate, self.history, self.table, self.array = 0.1, list[float](), {"calls": 0}, mx.array(1.0)
        self.raises = False

    def __call__(self, step: mx.array) -> mx.array:
        self.rate *= 0.8
        self.history.append(self.rate)
        self.table["calls"] += 1
        self.array = self.array * 0.9
        if self.raises:
            raise LookupError("a file is gone")
        return mx.array(self.rate) * self.array / self.table["calls"]

    def shown(self) -> list[Any]:
        return [self.rate, list(self.history), dict(self.table), self.array.item()]


def _closure() -> tuple[Callable[..., mx.array], Callable[[], list[Any]]]:
    calls = 0

    def schedule(_: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return mx.array(0.1 / calls)

    return schedule, lambda: [calls]


def _object() -> tuple[Callable[..., mx.array], Callable[[], list[Any]]]:
    schedule = Halved()
    return schedule, schedule.shown


def counting_schedule(make_schedule: Callable[[], Any]) -> Make:
    def make() -> Made:
        (schedule, shown), model = make_schedule(), nn.Linear(4, 2)
        optimizer = optim.SGD(schedule)
        optimizer.init(model.trainable_parameters())
        return Made(squares, lambda: (shown(), optimizer.learning_rate), model=model, optimizer=optimizer)

    return make


add("optimizer", "a schedule that counts in a closure", counting_schedule(_closure))
add("optimizer", "a schedule that counts in an object", counting_schedule(_object), without=("bad batches",))
