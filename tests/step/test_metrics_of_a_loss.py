"""Metrics that a loss puts in the place of the last ones: arrays, numbers and texts in a new dict, list or tuple."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map
from support.beside import Box
from support.helpers import plain_step


class Metrics(NamedTuple):
    kl: mx.array
    beta: float


class Trainer:
    """Has the weight of a part of the loss, and the metrics of the last call."""

    def __init__(self, form: Callable[[mx.array, Trainer], Any]) -> None:
        self.beta, self.phase, self.calls, self.form = 0.0, "warm up", 0, form
        self.metrics: Any = None

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        self.calls += 1
        y = model(x)
        kl = mx.abs(y).mean()
        self.metrics = self.form(kl, self)
        return mx.square(y - 1).mean() + self.beta * kl


FORMS: dict[str, Callable[[mx.array, Trainer], Any]] = {
    "dict": lambda kl, it: {"kl": kl, "beta": it.beta},
    "dict with a text": lambda kl, it: {"kl": kl, "beta": it.beta, "phase": it.phase},
    "dict in a dict": lambda kl, it: {"loss": {"kl": kl, "beta": it.beta}, "twice": [2 * kl, it.phase]},
    "list": lambda kl, it: [kl, it.beta],
    "tuple": lambda kl, it: (it.phase, kl, it.beta),
    "named tuple": lambda kl, it: Metrics(kl, it.beta),
    "ordered dict": lambda kl, it: collections.OrderedDict(kl=kl, beta=it.beta),
    "of another type at times": lambda kl, it: {"kl": kl, "beta": 0 if it.beta == 0 else it.beta},
    "with none at times": lambda kl, it: {"kl": kl, "beta": it.beta or None},
}
COUNTED: dict[str, Callable[[mx.array, Trainer], Any]] = {
    "a count": lambda kl, it: {"kl": kl, "calls": it.calls},
    "every third": lambda kl, it: {"kl": kl, "third": it.calls % 3 == 0},
}


def run(form: Callable[[mx.array, Trainer], Any], fast: bool) -> tuple[list[float], list[Any], list[Any], Step]:
    """Train with a weight that grows, then stays; return losses, metrics as they are read and as they are kept."""
    mx.random.seed(1)
    model, optimizer, trainer = nn.Linear(4, 3), optim.SGD(0.05), Trainer(form)
    step, plain = Step(model, optimizer, trainer.loss), plain_step(model, optimizer, trainer.loss)
    drawn = np.random.default_rng(0)
    losses, read, kept = [], [], []
    for number in range(30):
        trainer.beta, trainer.phase = min(1.0, number / 12), "warm up" if number < 12 else "steady"
        x = mx.array(drawn.normal(size=(5, 4)).astype("float32"))
        losses.append(float((step(x).loss if fast else plain(x)[0]).item()))
        read.append(values(trainer.metrics))
        kept.append(trainer.metrics)
    return losses, read, [values(each) for each in kept], step


def values(tree: Any) -> Any:
    return tree_map(lambda each: each.item() if isinstance(each, mx.array) else each, tree)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [type(tree).__name__, *(leaf for each in tree.values() for leaf in leaves(each))]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *(leaf for each in tree for leaf in leaves(each))]
    return [tree]


def compare(form: Callable[[mx.array, Trainer], Any]) -> Step:
    (losses, *metrics, step), (wanted, *reference, _) = run(form, fast=True), run(form, fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for ours, theirs in zip(leaves(metrics), leaves(reference), strict=True):
        assert type(ours) is type(theirs)
        assert ours == (pytest.approx(theirs, rel=1e-4) if isinstance(theirs, float) else theirs)
    return step


@pytest.mark.parametrize("name", FORMS)
def test_numbers_and_texts_among_metrics_are_those_of_the_call(name: str) -> None:
    step = compare(FORMS[name])
    assert (step.stats.mode, step.stats.traced <= 6) == ("native", True)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.filterwarnings(
    "ignore:faststep. this step cannot be compiled. its result depends on what it changes itself"
)
def test_what_the_loss_counts_itself_is_right_among_metrics(name: str) -> None:
    compare(COUNTED[name])


class Keeping(nn.Module):
    """A linear layer that keeps what it has seen in a new dict or list at each call."""

    def __init__(self, form: Callable[[mx.array, Any], Any]) -> None:
        super().__init__()
        self.linear, self._seen, self._form = nn.Linear(4, 3), None, form
        self._beta, self._phase = 0.0, "warm up"

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        self._seen = self._form(y, self)
        return y


def appended(y: mx.array, _: Any) -> Any:
    kept: list[mx.array] = []
    kept.append(y.mean())
    kept.append(y)
    return kept


ON_MODEL: dict[str, Callable[[mx.array, Any], Any]] = {
    "dict": lambda y, _: {"mean": y.mean(), "max": mx.abs(y).max()},
    "list": lambda y, _: [y.mean(), y],
    "appended": appended,
    "nested": lambda y, _: {"in": {"mean": y.mean(), "all": [y, 2 * y]}, "out": [y.max()]},
    "with constants": lambda y, _: {"mean": y.mean(), "width": y.shape[-1], "name": "layer"},
    "with numbers that change": lambda y, it: {"mean": y.mean(), "beta": it._beta, "phase": [it._phase, y.min()]},
    "with the weight": lambda y, it: {"weight": it.linear.weight, "mean": y.mean()},
    "tuple": lambda y, _: (y.mean(), y),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ON_MODEL)
def test_a_dict_or_list_that_the_model_replaces(name: str, layers: int, window: int) -> None:
    results = []
    for fast in (True, False):
        mx.random.seed(1)
        model = nn.Sequential(*(Keeping(ON_MODEL[name]) for _ in range(layers)))
        if layers == 2:
            model.layers[1].linear = nn.Linear(3, 3)
        optimizer = optim.SGD(0.05)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss: mx.array = mx.square(model(x) - 1).mean()
            seen = model.layers[0]._seen
            return loss + 0.1 * seen["mean"] if isinstance(seen, dict) and "mean" in seen else loss

        step = Step(model, optimizer, loss_fn, accumulate=window)
        gradients_of, sums = nn.value_and_grad(model, loss_fn), None
        drawn, losses, read, kept = np.random.default_rng(0), [], [], []
        for number in range(16):
            for layer in model.layers:
                layer._beta, layer._phase = min(1.0, number / 6), "warm up" if number < 6 else "steady"
            x = mx.array(drawn.normal(size=(5, 4)).astype("float32"))
            if fast:
                losses.append(step(x).loss.item())
            else:
                loss, gradients = gradients_of(model, x)
                sums = gradients if sums is None else tree_map(mx.add, sums, gradients)
                if number % window == window - 1:
                    optimizer.update(model, tree_map(lambda each: each / window, sums))
                    sums = None
                losses.append(loss.item())
                mx.eval(model.state, optimizer.state)
            read.append([listed(layer._seen) for layer in model.layers])
            kept.append([layer._seen for layer in model.layers])
        results.append(leaves([losses, read, [listed(each) for each in kept], listed(model.parameters())]))
        if fast:
            assert (step.stats.mode, step.stats.traced <= 12) == ("native", True)
    for ours, theirs in zip(*results, strict=True):
        assert type(ours) is type(theirs)
        assert ours == (pytest.approx(theirs, rel=1e-4, abs=1e-6) if isinstance(theirs, float) else theirs)


def listed(tree: Any) -> Any:
    return tree_map(lambda each: each.tolist() if isinstance(each, mx.array) else each, tree)


@pytest.mark.parametrize("place", ["model", "dict on the model", "object"])
def test_a_number_that_comes_again_is_left_where_the_loss_leaves_it(place: str) -> None:
    trainer = Trainer(lambda kl, it: None)
    model = nn.Linear(4, 3)
    model._kept = {}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if place == "model":
            model._last = trainer.beta
        elif place == "dict on the model":
            model._kept["last"] = trainer.beta
        else:
            trainer.phase = trainer.beta  # type: ignore[assignment]
        return mx.square(model(x) * trainer.beta).mean()

    step = Step(model, optim.SGD(0.05), loss_fn)
    for number in range(30):
        trainer.beta = float(number % 6)
        step(mx.ones((2, 4)))
        left = {"model": lambda: model._last, "dict on the model": lambda: model._kept["last"]}
        assert left.get(place, lambda: trainer.phase)() == trainer.beta
    assert step.stats.mode == "native"


class Totals:
    """Has totals of arrays and numbers in one list, what the last batch was, and sizes behind an array."""

    def __init__(self) -> None:
        self.totals: dict[str, list[Any]] = {"loss": [mx.zeros(()), 0]}
        self.last: list[Any] = [mx.zeros(()), 0, "none"]
        self.sizes: list[Any] = [mx.zeros(())]
        self.epoch = 0

    def add(self, loss: mx.array, size: int) -> None:
        total = self.totals["loss"]
        total[0] += mx.stop_gradient(loss)
        total[1] += size

    def note(self, loss: mx.array, size: int) -> None:
        self.last[0], self.last[1], self.last[2] = mx.stop_gradient(loss), size, f"epoch {self.epoch}"

    def append(self, loss: mx.array, size: int) -> None:
        self.sizes[0] = self.sizes[0] + mx.stop_gradient(loss)
        self.sizes.append(size)


@pytest.mark.parametrize("way", ["add", "note", "append"])
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it changes a list itself")
def test_numbers_in_a_list_with_arrays(way: str) -> None:
    results = []
    for fast in (True, False):
        mx.random.seed(1)
        model, optimizer, totals = nn.Linear(4, 3), optim.SGD(0.05), Totals()

        def loss_fn(model: nn.Module, x: mx.array, totals: Totals = totals) -> mx.array:
            loss = mx.square(model(x) - 1).mean()
            getattr(totals, way)(loss, len(x))
            return loss

        step, plain = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        for number in range(20):
            totals.epoch = number // 5
            x = mx.ones((3 + number % 2, 4))
            _ = step(x) if fast else plain(x)
        results.append(leaves([values(totals.totals), values(totals.last), values(totals.sizes)]))
    assert results[0] == [pytest.approx(each, rel=1e-4) if isinstance(each, float) else each for each in results[1]]


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_what_is_written_into_a_dict_that_is_replaced_then_is_not_in_the_new_one(kind: type[dict[str, Any]]) -> None:
    trainer = Trainer(lambda kl, it: kind(kl=kl))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if len(x) == 4:
            trainer.metrics["full"] = True
        return trainer.loss(model, x)

    trainer.metrics = kind()
    step = Step(nn.Linear(4, 3), optim.SGD(0.05), loss_fn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "faststep: this step cannot be compiled")
        for number in range(9):
            step(mx.ones((3 + number % 2, 4)))
            assert list(trainer.metrics) == ["kl"]


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it stores a new")
@pytest.mark.parametrize("place", ["object", "model"])
def test_a_dict_under_another_name_stays_that_dict(place: str) -> None:
    model = nn.Linear(4, 3)
    owner: Any = Box(None) if place == "object" else model
    owner._now, owner._before = {"loss": mx.zeros(()), "calls": 0}, {"loss": mx.zeros(()), "calls": 0}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        owner._before = owner._now
        owner._now["loss"] = mx.stop_gradient(loss := mx.square(model(x) - 1).mean())
        return loss

    step = Step(model, optim.SGD(0.05), loss_fn)
    for number in range(6):
        if number == 3:
            owner._now = {"loss": mx.zeros(()), "calls": 0}
        loss = step(mx.ones((3, 4))).loss.item()
        assert owner._before is owner._now
        assert owner._before["loss"].item() == loss


class Meter(nn.Module):
    """A module of its own beside the model: the last loss, a count, and a flag that the program sets."""

    def __init__(self) -> None:
        super().__init__()
        self._last, self._count, self._doubles = mx.zeros(()), 0, False


def test_a_count_in_a_module_that_the_loss_reaches_takes_no_search() -> None:
    results = []
    for fast in (True, False):
        mx.random.seed(1)
        model, optimizer, meter = nn.Linear(4, 3), optim.SGD(0.05), Meter()

        def loss_fn(model: nn.Module, x: mx.array, meter: Meter = meter) -> mx.array:
            loss = mx.square(model(x) - 1).mean() * (2 if meter._doubles else 1)
            meter._last, meter._count = mx.stop_gradient(loss), meter._count + 1
            return loss

        step, plain = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        read = []
        for number in range(30):
            meter._doubles = number >= 20
            if number == 10:
                meter._count = 100
            _ = step(mx.ones((3, 4))) if fast else plain(mx.ones((3, 4)))
            read.append((meter._last.item(), meter._count))
        results.append(read)
        if fast:
            assert (step.stats.mode, step.stats.traced) == ("native", 2)
    assert [count for _, count in results[0]] == [count for _, count in results[1]]
    np.testing.assert_allclose([last for last, _ in results[0]], [last for last, _ in results[1]], rtol=1e-4)
