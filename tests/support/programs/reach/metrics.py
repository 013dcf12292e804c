"""Metrics that a loss puts in the place of the last ones: arrays, numbers and texts in a new dict, list or tuple."""

from __future__ import annotations

import collections
import itertools
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from support.programs.reach.registry import (
    Box,
    Made,
    Make,
    add,
    program,
    squares,
)


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


def replaced(form: Callable[[mx.array, Trainer], Any]) -> Make:
    def make() -> Made:
        trainer = Trainer(form)

        def between(number: int) -> None:
            trainer.beta, trainer.phase = min(1.0, number / 6), "warm up" if number < 6 else "steady"

        return Made(trainer.loss, lambda: (trainer.metrics, trainer.calls), between, nn.Linear(4, 3), calls=14)

    return make


for name, form in (FORMS | COUNTED).items():
    add("object", f"metrics in an attribute: {name}", replaced(form))


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


def replaced_on_model(name: str, layers: int) -> Make:
    """A dict or list that the model replaces."""

    def make() -> Made:
        model = nn.Sequential(*(Keeping(ON_MODEL[name]) for _ in range(layers)))
        if layers == 2:
            model.layers[1].linear = nn.Linear(3, 3)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss: mx.array = mx.square(model(x) - 1).mean()
            seen = model.layers[0]._seen
            return loss + 0.1 * seen["mean"] if isinstance(seen, dict) and "mean" in seen else loss

        def between(number: int) -> None:
            for layer in model.layers:
                layer._beta, layer._phase = min(1.0, number / 6), "warm up" if number < 6 else "steady"

        return Made(loss_fn, lambda: [layer._seen for layer in model.layers], between, model)

    return make


for name, layers in itertools.product(ON_MODEL, (1, 2)):
    add("model", f"metrics on {layers} layers of the model: {name}", replaced_on_model(name, layers))


def comes_again(place: str) -> Make:
    """A number that comes again."""

    def make() -> Made:
        trainer, model = Trainer(lambda kl, it: None), nn.Linear(4, 3)
        model._kept = {}

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if place == "model":
                model._last = trainer.beta
            elif place == "dict on the model":
                model._kept["last"] = trainer.beta
            else:
                trainer.phase = trainer.beta  # type: ignore[assignment]
            return mx.square(model(x) * trainer.beta).mean()

        seen = lambda: (vars(model).get("_last"), model._kept, trainer.phase)  # noqa: E731
        return Made(loss_fn, seen, lambda number: setattr(trainer, "beta", float(number % 6)), model)

    return make


for place in ("model", "dict on the model", "object"):
    add("object" if place == "object" else "model", f"a number that comes again on a {place}", comes_again(place))


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


def totals(way: str) -> Make:
    """Numbers in a list with arrays."""

    def make() -> Made:
        totals = Totals()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = mx.square(model(x) - 1).mean()
            getattr(totals, way)(loss, len(x))
            return loss

        return Made(loss_fn, lambda: totals, lambda number: setattr(totals, "epoch", number // 5), rows=(3, 4))

    return make


for way in ("add", "note", "append"):
    add("object", f"numbers in a list with arrays: {way}", totals(way))


def written_and_replaced(kind: type[dict[str, Any]]) -> Make:
    """What is written into a dict that is replaced then."""

    def make() -> Made:
        trainer = Trainer(lambda kl, it: kind(kl=kl))
        trainer.metrics = kind()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if len(x) == 4:
                trainer.metrics["full"] = True
            return trainer.loss(model, x)

        return Made(loss_fn, lambda: trainer.metrics, rows=(3, 4))

    return make


for written in (dict, collections.OrderedDict):
    add("object", f"what is written into a {written.__name__} that is replaced then", written_and_replaced(written))


def under_another_name(place: str) -> Make:
    """A dict under another name stays that dict."""

    def make() -> Made:
        model = nn.Linear(4, 3)
        owner: Any = Box(None) if place == "object" else model
        owner._now, owner._before = {"loss": mx.zeros(()), "calls": 0}, {"loss": mx.zeros(()), "calls": 0}

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            owner._before = owner._now
            owner._now["loss"] = mx.stop_gradient(loss := mx.square(model(x) - 1).mean())
            return loss

        def between(number: int) -> None:
            if number == 3:
                owner._now = {"loss": mx.zeros(()), "calls": 0}

        return Made(loss_fn, lambda: (owner._before is owner._now, owner._before), between, model)

    return make


for place in ("object", "model"):
    add(
        "object" if place == "object" else "model",
        f"a dict under another name on the {place}",
        under_another_name(place),
    )


class Meter(nn.Module):
    """A module of its own beside the model: the last loss, a count, and a flag that the program sets."""

    def __init__(self) -> None:
        super().__init__()
        self._last, self._count, self._doubles = mx.zeros(()), 0, False


@program("model")
def a_count_in_a_module_that_the_loss_reaches() -> Made:
    meter = Meter()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = mx.square(model(x) - 1).mean() * (2 if meter._doubles else 1)
        meter._last, meter._count = mx.stop_gradient(loss), meter._count + 1
        return loss

    def between(number: int) -> None:
        meter._doubles = number >= 8
        if number == 5:
            meter._count = 100

    return Made(loss_fn, lambda: (meter._last, meter._count), between)


# arrays that a loss keeps in several ways


def skipped_outside(draws: bool) -> Make:
    """Arrays outside of the model."""

    def make() -> Made:
        state = types.SimpleNamespace(mean=mx.zeros((2,)), bank=mx.zeros((3, 2)))
        bank = state.bank

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            loss = mx.square(out - state.mean).mean()
            state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
            state.bank[0] = mx.stop_gradient(out).mean(0)
            return loss + (0.0 * random.random() if draws else 0.0)

        return Made(loss_fn, lambda: (state.mean, state.bank, state.bank is bank))

    return make


for draws in (False, True):
    add("object", f"arrays outside of the model{', beside a draw' if draws else ''}", skipped_outside(draws))


def replaced_dict(how: str) -> Make:
    """A dict that the loss replaces is that one wherever it stands."""

    def make() -> Made:
        model: Any = nn.Linear(4, 2)
        model.scale, model._trainer = 1.0, types.SimpleNamespace(epoch=0)
        trainer, cell, counts = model._trainer, [{"loss": mx.array(0.0)}], {"calls": 0}
        alias = [cell[0]]

        def loss_fn(model: Any, x: mx.array) -> mx.array:
            loss = squares(model, x) * model.scale
            if how == "two ways, by a count":
                counts["calls"] += 1
            if model._trainer.epoch >= 3:
                loss = loss + mx.square(model.weight).sum()
            if (how == "two ways" and model._trainer.epoch % 2) or counts["calls"] % 13 == 5:
                cell[0]["loss"] = loss
            else:
                cell[0] = {"loss": loss}
            return loss

        def between(number: int) -> None:
            trainer.epoch = number // 5
            model.scale = 1 - number // 4 / 100

        def seen() -> Any:
            same, alias[0] = cell[0] is alias[0], cell[0]
            return cell[0], same, model._trainer is trainer

        return Made(loss_fn, seen, between, model, calls=20)

    return make


for how in ("object on the model", "two ways", "two ways, by a count"):
    add("model", f"a dict that the loss replaces, {how}", replaced_dict(how))


def without_compile(act: str, disabled: range) -> Make:
    """What a loss leaves while MLX is told not to compile."""

    def make() -> Made:
        state = types.SimpleNamespace(mean=mx.zeros((2,)), calls=0, last={"out": mx.zeros((2,))})
        rows = collections.deque([mx.zeros((2,))] * 2, maxlen=2)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            row, loss = mx.stop_gradient(out).mean(0), mx.square(out).mean()
            if act == "average":
                state.mean = 0.9 * state.mean + 0.1 * row
                loss = loss + mx.square(out - state.mean).mean()
            elif act == "queue":
                loss = loss + (out * rows[0]).mean()
                rows.append(row)
            elif act == "count":
                state.calls += 1
            else:
                state.last = {"out": row}
            return loss

        between = lambda number: (mx.disable_compile if number in disabled else mx.enable_compile)()  # noqa: E731
        return Made(loss_fn, lambda: (state, rows), between)

    return make


for act, disabled in itertools.product(("average", "queue", "count", "replaced"), (range(8), range(5, 9), range(6, 7))):
    name = f"calls {disabled.start} to {disabled.stop} without mx.compile: {act}"
    add("process", name, without_compile(act, disabled))


def at_two_places(how: str) -> Make:
    """An array that stands at two places changes at both."""

    def make() -> Made:
        state = types.SimpleNamespace(
            one=mx.zeros((2,)), two=mx.zeros((2,)), both={"a": mx.zeros((2,)), "b": mx.zeros((2,))}
        )
        rows = collections.deque([mx.zeros((2,)), mx.zeros((2,))], maxlen=2)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if how == "a queue":
                rows[0][0] = 0.5
            elif how == "a dict":
                state.both["a"][0] = 0.5
            elif how != "by the loop":
                state.one[0] = 0.5
            out = model(x)
            row, loss = mx.stop_gradient(out.mean(0)), mx.square(out).mean()
            loss = loss + ((state.two + rows[1] + state.both["b"]) * out).mean()
            if how == "in turns":
                state.one, state.two = state.two, state.one
            elif how == "a dict":
                state.both = {"a": row, "b": row}
            elif how == "a queue":
                rows.extend((row, row))
            else:
                state.one = row
                if how == "a queue and an attribute":
                    rows.append(row)
                else:
                    state.two = row
            return loss

        def between(number: int) -> None:
            if how == "by the loop" and number and number % 3 == 2:
                state.one[1] = 0.5

        return Made(loss_fn, lambda: (state, rows), between)

    return make


for how in ("two attributes", "a queue", "a queue and an attribute", "a dict", "in turns", "by the loop"):
    add("object", f"one array at two places: {how}", at_two_places(how))
