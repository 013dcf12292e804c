"""Numbers that change from step to step: read at every call, as by the plain loop, without a new trace for each."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
import queue
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map
from support.helpers import assert_close, assert_same, plain_step, snapshot

X = mx.random.normal((8, 4), key=mx.random.key(3))
STEPS = 12


class Net(nn.Module):
    def __init__(self, numbers: SimpleNamespace) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)
        self._mean = mx.zeros((6,))
        self._numbers = numbers

    def __call__(self, x: mx.array) -> mx.array:
        x = mx.tanh(self.first(x))
        if self.training:
            share = self._numbers.momentum
            self._mean = share * self._mean + (1 - share) * mx.stop_gradient(x.mean(axis=0))
        return self.second(x - self._mean)


def scaled(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    return (numbers.scale * mx.square(model(x))).mean() / max(numbers.scale, 0.5)


def only_in_the_backward(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    @mx.custom_function
    def same(y: mx.array) -> mx.array:
        return y * 1.0

    @same.vjp
    def backward(primals: mx.array, cotangents: mx.array, outputs: mx.array) -> mx.array:
        return cotangents * numbers.scale

    return mx.square(same(model(x))).mean()


def checkpointed(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    part = mx.checkpoint(lambda y: mx.sin(y * numbers.scale))
    return mx.square(part(model(x))).mean()


def of_gradients(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    slope = mx.grad(lambda y: mx.square(model(y) * numbers.scale).sum())(x)
    return mx.square(model(x)).mean() + numbers.scale * mx.square(slope).mean()


def branching(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    y = model(x)
    return mx.abs(y).mean() if numbers.scale < 0.7 else (y**2).mean() * numbers.scale


def drawing(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    return mx.square(model(x + numbers.scale * mx.random.normal(x.shape))).mean()


def as_powers(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    y = mx.abs(model(x)) + 1
    return (y**numbers.scale).mean() + mx.clip(y, 0, numbers.scale).mean()


def as_lengths(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    return mx.square(model(x[: numbers.calls % 3 + 2])).mean()


def counted_only(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    assert numbers.calls >= 0
    return mx.square(model(x)).mean()


def without_equivalents_of_mlx(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    """Operations of which MLX never calls two equal."""
    y = model(x)
    z = mx.linalg.inv(mx.stop_gradient(y.T @ y) + mx.eye(2), stream=mx.cpu)
    _, s, _ = mx.linalg.svd(z, stream=mx.cpu)
    z = z + mx.linalg.cholesky(z, stream=mx.cpu) + mx.linalg.qr(z, stream=mx.cpu)[1]
    noise = mx.random.laplace(y.shape)
    return numbers.scale * (
        mx.log1p(y * y).mean() + mx.expm1(y).mean() + (z @ y.T).mean() + (noise * y).mean() * s.sum()
    )


LOSSES = {
    loss: traces
    for loss, traces in (
        (scaled, 2),
        (only_in_the_backward, 2),
        (checkpointed, 2),
        (of_gradients, 2),
        (branching, 4),
        (drawing, 2),
        (as_powers, 2),
        (as_lengths, 6),
        (counted_only, 2),
        (without_equivalents_of_mlx, 2),
    )
}


def change(numbers: SimpleNamespace, calls: int) -> None:
    numbers.scale, numbers.momentum, numbers.calls = 0.9**calls, 0.9 - 0.01 * calls, calls


def train(
    loss: Callable[..., mx.array], optimizer: optim.Optimizer, way: Callable[..., Any], *, passed: bool = False
) -> tuple[list[Any], dict[str, Any], Any]:
    """Train with a loss that reaches the numbers, or is passed them; return losses, what is left, and the step."""
    mx.random.seed(5)
    numbers = SimpleNamespace()
    change(numbers, 0)
    model = Net(numbers)

    def reaching(model: Net, x: mx.array) -> mx.array:
        return loss(model, x, numbers)

    def given(model: Net, x: mx.array, scale: float, calls: int) -> mx.array:
        return loss(model, x, SimpleNamespace(scale=scale, calls=calls))

    step = way(model, optimizer, given if passed else reaching)
    losses = []
    for calls in range(STEPS):
        change(numbers, calls)
        output = step(X, numbers.scale, numbers.calls) if passed else step(X)
        losses.append(output[0] if way is plain_step else output.loss)
    return losses, snapshot(model, optimizer) | {"mean": np.array(model._mean)}, step


@pytest.mark.parametrize("passed", [False, True], ids=["reached", "passed"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_number_that_changes_at_every_call_is_the_plain_loops(loss: Callable[..., mx.array], passed: bool) -> None:
    wanted, left, _ = train(loss, optim.AdamW(0.01), plain_step, passed=passed)
    losses, ours, step = train(loss, optim.AdamW(0.01), Step, passed=passed)
    assert_same(losses, wanted)
    assert_close(ours, left, 0)
    assert step.stats.mode == "called"
    assert len(step.stats.traces) <= LOSSES[loss]


@pytest.mark.parametrize("passed", [False, True], ids=["reached", "passed"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_number_that_is_another_one_for_each_optimizer_is_the_plain_loops(
    loss: Callable[..., mx.array], passed: bool
) -> None:
    def rounds(way: Callable[..., Any]) -> tuple[list[Any], dict[str, Any]]:
        mx.random.seed(5)
        numbers = SimpleNamespace()
        change(numbers, 0)
        model, losses, left = Net(numbers), [], {}
        for calls in range(0, STEPS, 3):
            change(numbers, calls)
            optimizer = optim.AdamW(0.01, betas=[0.9 - 0.05 * calls, 0.99], weight_decay=0.01 * calls + 0.01)
            if passed:
                step = way(
                    model,
                    optimizer,
                    lambda model, x, *both: loss(model, x, SimpleNamespace(scale=both[0], calls=both[1])),
                )
            else:
                step = way(model, optimizer, lambda model, x: loss(model, x, numbers))
            for _ in range(2):
                output = step(X, numbers.scale, numbers.calls) if passed else step(X)
                losses.append(output[0] if way is plain_step else output.loss)
            left |= {f"{calls}.{name}": array for name, array in snapshot(model, optimizer).items()}
        return losses, left

    wanted, left = rounds(plain_step)
    losses, ours = rounds(Step)
    assert_same(losses, wanted)
    assert_close(ours, left, 0)


def keeping(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    y = model(x)
    if numbers.scale < 0.7:
        KEPT.append(y)
    return mx.square(y).mean() * numbers.scale


def hiding(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    y = model(x)
    if numbers.scale < 0.7:
        HIDDEN.put(y)
    return mx.square(y).mean() * numbers.scale


def reading(model: Net, x: mx.array, numbers: SimpleNamespace) -> mx.array:
    y = model(x)
    try:
        factor = float(y.mean()) if numbers.scale < 0.7 else 1.0
    except ValueError:
        factor = 0.5
    return mx.square(y).mean() * numbers.scale * factor


KEPT: list[mx.array] = []
HIDDEN: queue.SimpleQueue[mx.array] = queue.SimpleQueue()  # in which nobody can look


def hidden() -> list[mx.array]:
    """Take out what is hidden."""
    return [HIDDEN.get() for _ in range(HIDDEN.qsize())]


@pytest.mark.parametrize("loss", [keeping, hiding, reading])
def test_what_a_loss_does_with_values_when_a_number_first_leads_there_is_the_plain_loops(
    loss: Callable[..., mx.array],
) -> None:
    KEPT.clear()
    wanted, left, _ = train(loss, optim.AdamW(0.01), plain_step)
    wanted_kept = [np.array(kept) for kept in [*KEPT, *hidden()]]
    KEPT.clear()
    losses, ours, step = train(loss, optim.AdamW(0.01), Step)
    assert step.stats.mode == "called"
    assert_same(losses, wanted)
    assert_close(ours, left, 0)
    assert_same([*KEPT, *hidden()], wanted_kept)


OPTIONS = [
    ({"accumulate": 3}, 1e-6),
    ({"max_grad_norm": 0.1, "ema_decay": 0.9}, 1e-6),
    ({"compute_dtype": mx.bfloat16}, 1e-2),
    ({"nonfinite": "raise"}, 0),
]


@pytest.mark.parametrize(("options", "tolerance"), OPTIONS, ids=["-".join(options) for options, _ in OPTIONS])
@pytest.mark.parametrize("loss", [scaled, checkpointed], ids=lambda loss: loss.__name__)
def test_numbers_are_read_at_every_call_of_a_step_with_options(
    loss: Callable[..., mx.array], options: dict[str, Any], tolerance: float
) -> None:
    def way(compiled: bool) -> Callable[..., Step]:
        return lambda *args: Step(*args, compile=compiled, **options)

    wanted, left, _ = train(loss, optim.AdamW(0.01), way(False))
    losses, ours, step = train(loss, optim.AdamW(0.01), way(True))
    assert_same(losses, wanted, tolerance)
    assert_close(ours, left, tolerance)
    assert step.stats.mode == "called"


class Own(optim.Optimizer):
    """An optimizer of a user's own, which reads the number that the loss reads."""

    def __init__(self, numbers: SimpleNamespace) -> None:
        super().__init__()
        self.numbers = numbers

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["m"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        state["m"] = 0.9 * state["m"] + gradient
        return parameter - 0.1 * self.numbers.scale * state["m"]


@pytest.mark.parametrize("loss", [scaled, counted_only], ids=lambda loss: loss.__name__)
def test_numbers_of_an_optimizer_of_ones_own_are_read_at_every_update(loss: Callable[..., mx.array]) -> None:
    def train_own(way: Callable[..., Any]) -> dict[str, Any]:
        mx.random.seed(5)
        numbers = SimpleNamespace()
        change(numbers, 0)
        model, optimizer = Net(numbers), Own(numbers)
        step = way(model, optimizer, lambda model, x: loss(model, x, numbers))
        for calls in range(STEPS):
            change(numbers, calls)
            step(X)
        return snapshot(model, optimizer)

    assert_close(train_own(Step), train_own(plain_step), 0)


class Counted(nn.Module):
    """A loop sets `count` before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 6), nn.LayerNorm(6), nn.Dropout(0.5)
        self.count, self.inner, self.table = 1, nn.Sequential(nn.Linear(6, 6)), {"count": 1}

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(mx.tanh(self.first(x)))

    @property
    def progress(self) -> float:
        return 1 / self.count


class Shown(Counted):
    def shown(self) -> str:
        return str(self.count)

    def _extra_repr(self) -> str:
        return self.shown()


class Aliased(Counted):
    def __getattr__(self, name: str) -> Any:
        return self.count if name == "number" else super().__getattr__(name)


@dataclasses.dataclass
class Record:
    model: Counted

    def __str__(self) -> str:
        return str(self.model.count)


NAME = "cou"
UNREAD: dict[str, Callable[[Counted], float]] = {
    "not at all": lambda model: 2.0,
    "by another name": lambda model: float(len(model.inner.layers)),
}
READ: dict[str, Callable[[Any], Any]] = {
    "getattr": lambda model: getattr(model, NAME + "nt"),
    "vars": lambda model: vars(model)[NAME + "nt"],
    "instance dict": lambda model: max(value for value in model.__dict__.values() if type(value) is int),
    "property": lambda model: model.progress,
    "attrgetter": lambda model: operator.attrgetter(NAME + "nt")(model),
    "format": lambda model: float(HOOKS["form"].format(model)),
    "made format": lambda model: float(("{0." + NAME + "nt}").format(model)),
    "eval": lambda model: eval("model." + NAME + "nt"),
    "copy": lambda model: vars(copy.copy(model))[NAME + "nt"],
    "pickle": lambda model: pickle.loads(pickle.dumps(model.table | {"count": model.count}))["count"],
    "function": lambda model: HOOKS["count"](model),
    "text": lambda model: getattr(model, HOOKS["name"]),
    "repr": lambda model: float(repr(model).split("(")[1].split("\n")[0]),
    "percent": lambda model: float((HOOKS["any"] % model).split("(")[1].split("\n")[0]),
    "text of another object": lambda model: float(HOOKS["any"] % Record(model)),
    "alias": lambda model: model.number,
    "dunder": lambda model: model.__getattribute__(NAME + "nt"),
    "in a dict": lambda model: sum(model.table.values()),
    "dropout": lambda model: model.dropout(mx.ones((6,))).sum(),
    "norm": lambda model: 2 + mx.tanh(model.norm(mx.arange(6.0))[0]),
    "checkpoint": lambda model: mx.checkpoint(lambda x: x * model.count)(mx.array(2.0)),
}
HOOKS: dict[str, Any] = {"count": lambda model: model.count * 0.5, "name": "count", "form": "{0.count}", "any": "%s"}


def run_counted(
    read: Callable[[Any], Any], kind: type[Counted] = Counted, optimizer: str = "", *, fast: bool
) -> tuple[list[float], Any, Step | None, list[int]]:
    mx.random.seed(7)
    model = kind()
    schedule = {"schedule": lambda step: mx.array(0.1) / model.count}.get(optimizer, 0.1)
    rule = Decaying(0.1) if optimizer == "own" else optim.SGD(schedule)

    def loss_fn(model: Counted, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean() * read(model)

    step = Step(model, rule, loss_fn) if fast else None
    take = plain_step(model, rule, loss_fn)
    losses, calls = list[float](), list[int]()
    for number in range(STEPS):
        model.count = number + 2
        if read not in UNREAD.values():
            model.table["count"] = number + 2
            model.dropout._p_1, model.norm.eps = 0.5 + number / 64, 0.1 * (number + 1)
        entered = list[object]()
        sys.setprofile(lambda frame, event, _: entered.append(event) if frame.f_code is loss_fn.__code__ else None)  # noqa: B023
        loss = step(X).loss if step else take(X)[0]
        sys.setprofile(None)
        losses.append(loss.item())
        calls.append(entered.count("call"))
    return losses, snapshot(model), step, calls


class Decaying(optim.SGD):
    """Reads the model as it updates it."""

    def update(self, model: nn.Module, gradients: dict[str, Any]) -> None:
        super().update(model, tree_map(lambda gradient: gradient / model.count, gradients))


@pytest.mark.parametrize("way", UNREAD)
def test_a_number_of_the_model_that_the_loss_does_not_read_makes_no_trace(way: str) -> None:
    wanted, reference, *_ = run_counted(UNREAD[way], fast=False)
    losses, parameters, step, calls = run_counted(UNREAD[way], fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
    assert step is not None
    assert step.stats.traced <= 2
    assert max(calls) == 1


@pytest.mark.parametrize("way", READ)
def test_a_number_of_the_model_is_seen_however_it_is_read(way: str) -> None:
    kind = {"repr": Shown, "percent": Shown, "alias": Aliased}.get(way, Counted)
    wanted, reference, *_ = run_counted(READ[way], kind, fast=False)
    losses, parameters, *_ = run_counted(READ[way], kind, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)


def test_a_number_beside_an_optimizer_of_ones_own_costs_no_further_call_of_that() -> None:
    class Calling(optim.SGD):
        def update(self, model: nn.Module, gradients: dict[str, Any]) -> None:
            super().update(model, gradients)

    losses, calls = list[list[float]](), list[int]()
    for fast in (False, True):
        mx.random.seed(7)
        model, optimizer, weight = Counted(), Calling(0.1), {"of": 1.0}
        model.norm.freeze()  # which the loss leaves out

        def loss_fn(model: Counted, x: mx.array, weight: dict[str, float] = weight) -> mx.array:
            return mx.square(model(x)).mean() * weight["of"]

        step: Any = (Step if fast else plain_step)(model, optimizer, loss_fn)
        losses.append([])
        entered = list[object]()
        code = Calling.update.__code__
        sys.setprofile(lambda frame, event, _: entered.append(event) if frame.f_code is code else None)  # noqa: B023
        for number in range(3 * STEPS):
            weight["of"] = 1 + number / 16
            losses[-1].append((step(X).loss if fast else step(X)[0]).item())
        sys.setprofile(None)
        calls.append(entered.count("call"))
    assert_same(losses[1], losses[0], 1e-6)
    assert calls == [3 * STEPS, 3 * STEPS]


@pytest.mark.parametrize("optimizer", ["schedule", "own"])
def test_a_number_of_the_model_is_seen_where_the_update_reads_it(optimizer: str) -> None:
    read = UNREAD["not at all"]
    wanted, reference, *_ = run_counted(read, optimizer=optimizer, fast=False)
    losses, parameters, *_ = run_counted(read, optimizer=optimizer, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
