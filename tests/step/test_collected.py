"""What a program collects on the model: no part of it where no loss can read it, and seen where one does."""

from __future__ import annotations

import collections
import copy
import operator
import string
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten
from support.helpers import (
    Tree,
    assert_close,
    assert_same,
    plain_step,
    snapshot,
)


class Collecting(nn.Module):
    """A loop collects what it likes in attributes of it, before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self._history: list[float] = SHARED
        self._history.clear()
        self._metrics, self._arrays = {"last": 1.0}, [mx.ones((1,))]
        self._memory, self._note, self._seen = collections.deque[float](), "", np.ones(2)
        self._parts = list[nn.Module]()
        Viewed.items, Holder.view = self.items(), self

    def __call__(self, x: mx.array) -> mx.array:
        return self.net(x)

    def total(self) -> float:
        return sum(self._history)


class Telling(Collecting):
    def _extra_repr(self) -> str:
        return "+" * len(self._history)


SHARED: list[float] = []
COLLECTS: dict[str, Callable[[Any, int], object]] = {
    "numbers": lambda model, number: model._history.append(number / 4),
    "metrics": lambda model, number: model._metrics.update({f"step {number}": 1.0, "last": number / 2}),
    "arrays": lambda model, number: model._arrays.append(mx.full((1,), number)),
    "memory": lambda model, number: model._memory.append((np.full(3, number), number % 3)),
    "text": lambda model, number: setattr(model, "_note", "." * (number + 1)),
    "NumPy": lambda model, number: setattr(model, "_seen", np.full(2, number + 1)),
    "modules": lambda model, number: model._parts.append(nn.Linear(1, 1)),
}
HALF = "_his"


class Named(string.Template):
    """A template of one's own."""


KEYS: dict[str, Any] = {"key": "_history", "all": lambda model: len(model._history), "text": "%s"}
# each alone: one of them lets the loss read all that is collected
GETTER, TEMPLATE, OWN_TEMPLATE = operator.itemgetter("_history"), string.Template("$_history"), Named("$_history")


def merged(**view: Any) -> int:
    return passed_all(**Holder.view)


def passed_all(_history: Any = (), **_: Any) -> int:
    return len(_history)


class Holder:
    view: Any = None


class Viewed:
    items: Any = ()


def matched(model: nn.Module) -> int:
    match model:
        case {"_history": found}:
            return len(found)
    return 0


# what is collected, and how the loss reads it
READS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "by its name": ("numbers", lambda model: len(model._history)),
    "in a method": ("numbers", lambda model: model.total()),
    "in a function of a dict": ("numbers", lambda model: KEYS["all"](model)),
    "getattr": ("numbers", lambda model: len(getattr(model, HALF + "tory"))),
    "item": ("numbers", lambda model: len(model["_history"])),
    "made item": ("numbers", lambda model: len(model[HALF + "tory"])),
    "made item, or another": ("numbers", lambda model: len(model[(HALF + "tory") if HALF else "net"])),
    "item of a text": ("numbers", lambda model: len(model[KEYS["key"]])),
    "get": ("numbers", lambda model: len(model.get(HALF + "tory"))),
    "items": ("numbers", lambda model: sum(len(each) for name, each in model.items() if name.startswith(HALF))),
    "keys": ("numbers", lambda model: sum(len(model[name]) for name in model if name.startswith(HALF))),
    "unpacked": ("numbers", lambda model: len({**model}[HALF + "tory"])),
    "joined": ("numbers", lambda model: next(len(each) for each in (model | {}).values() if type(each) is list)),
    "arguments": ("numbers", lambda model: len(dict(**model)[HALF + "tory"])),
    "pattern": ("numbers", matched),
    "itemgetter": ("numbers", lambda model: len(operator.itemgetter(HALF + "tory")(model))),
    "made itemgetter": ("numbers", lambda model: len(GETTER(model))),
    "made view": ("numbers", lambda model: sum(len(each) for _, each in Viewed.items if type(each) is list)),
    "template": ("numbers", lambda model: TEMPLATE.substitute(model).count(",")),
    "own template": ("numbers", lambda model: OWN_TEMPLATE.substitute(model).count(",")),
    "formatter": ("numbers", lambda model: string.Formatter().vformat("{" + HALF + "tory}", (), model).count(",")),
    "merged": ("numbers", lambda model: merged()),
    "dunder": ("numbers", lambda model: len(model.__getitem__(HALF + "tory"))),
    "state": ("numbers", lambda model: len(model.state[HALF + "tory"])),
    "children": ("numbers", lambda model: sum(len(each) for each in model.children().values() if type(each) is list)),
    "copy": ("numbers", lambda model: len(copy.copy(model)[HALF + "tory"])),
    "repr": ("numbers", lambda model: repr(model).count("+")),
    "percent": ("numbers", lambda model: (KEYS["text"] % model).count("+")),
    "a choice": ("numbers", lambda model: f"{model if HALF else model.net.layers[0].weight.shape}".count("+")),
    "percent of a tuple": ("modules", lambda model: len(KEYS["text"] % (model,))),
    "the same list": ("numbers", lambda model: len(SHARED)),
    "a number": ("metrics", lambda model: model._metrics["last"]),
    "all numbers": ("metrics", lambda model: sum(getattr(model, "_met" + "rics").values())),
    "an array": ("arrays", lambda model: model._arrays[-1].sum()),
    "all arrays": ("arrays", lambda model: sum(each.sum() for each in model["_arr" + "ays"])),
    "a tree": ("arrays", lambda model: sum(each.sum() for name, each in tree_flatten(model) if "_arr" in name)),
    "a deque": ("memory", lambda model: float(vars(model)["_mem" + "ory"][-1][0].sum())),
    "a text": ("text", lambda model: len(model._note)),
    "a made text": ("text", lambda model: len(getattr(model, "_no" + "te"))),
    "NumPy": ("NumPy", lambda model: float(model._seen.sum())),
    "modules": ("modules", lambda model: len(model.modules())),
    "a list of modules": ("modules", lambda model: len(model._parts)),
}


def collect(
    what: str, reads: list[Callable[[Any], Any]], kind: type[Collecting] = Collecting, *, fast: bool
) -> tuple[list[float], Tree, list[Step], list[int]]:
    """Take 24 steps, half of them by the first way of reading, the others by the last."""
    mx.random.seed(5)
    model, optimizer = kind(), optim.SGD(0.05)

    def losses_of(read: Callable[[Any], Any]) -> Callable[..., mx.array]:
        return lambda model, x: mx.square(model(x) - x).mean() * (2 + mx.tanh(mx.array(read(model)) * 0.05))

    fns = [losses_of(read) for read in reads]
    steps = [Step(model, optimizer, fn) for fn in fns] if fast else []
    takes = [plain_step(model, optimizer, fn) for fn in fns]
    codes, found, called = {fn.__code__ for fn in fns}, list[float](), list[int]()
    for number in range(24):
        COLLECTS[what](model, number)
        at = 0 if number < 12 else -1
        x = mx.random.normal((6, 4))
        events = list[object]()
        sys.setprofile(lambda frame, event, _: events.append(event) if frame.f_code in codes else None)  # noqa: B023
        loss = steps[at](x).loss if fast else takes[at](x)[0]
        sys.setprofile(None)
        found.append(float(loss.item()))
        called.append(events.count("call"))
    return found, snapshot(model.net), steps, called


def passed(number: float, by: float) -> float:
    return number * by


def passed_on(*numbers: float, **named: float) -> float:
    return passed(*numbers, **named)


LEAVES: dict[str, Callable[[Any], Any]] = {
    "a number": lambda model: float(len(model.net.layers)),
    "relu": lambda model: nn.relu(mx.array(2.0)),
    "arguments": lambda model: passed_on(2.0, by=1.0),
    "mask": lambda model: mx.where((mx.arange(3) > 1) | (mx.arange(3) < 0), 1.0, 2.0).sum(),
    "remainder": lambda model: len(model.net.layers) % 2,
    "a shape in a text": lambda model: len(
        f"{model.net.layers[0].weight.shape}, {model.net.layers[0].weight.shape[1]}"
    ),
}


@pytest.mark.parametrize(
    ("what", "way"),
    [
        *((what, "a number") for what in COLLECTS if what not in ("arrays", "modules")),
        *(("numbers", w) for w in LEAVES),
    ],
)
def test_what_is_collected_on_the_model_and_not_read_is_no_part_of_it(what: str, way: str) -> None:
    reads = [LEAVES[way]]
    wanted, reference, *_ = collect(what, reads, fast=False)
    losses, parameters, steps, called = collect(what, reads, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
    assert (steps[0].stats.mode, steps[0].stats.traced <= 4) == ("called", True)
    assert max(called) == 1


@pytest.mark.parametrize("at_first", [True, False])
@pytest.mark.parametrize("way", READS)
def test_what_is_collected_on_the_model_is_seen_however_it_is_read(way: str, at_first: bool) -> None:
    """By the first loss, or by one that comes when it has been left apart."""
    what, read = READS[way]
    reads = [read] if at_first else [lambda model: 2.0, read]
    kind = Telling if way in ("repr", "percent", "a choice") else Collecting
    wanted, reference, *_ = collect(what, reads, kind, fast=False)
    losses, parameters, *_ = collect(what, reads, kind, fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)


def test_a_function_that_begins_to_read_what_is_collected_is_seen_at_once() -> None:
    def run(fast: bool) -> tuple[list[float], Step]:
        mx.random.seed(5)
        model, optimizer, hooks = Collecting(), optim.SGD(0.05), {"scale": lambda model: 2.0}

        def loss_fn(model: Collecting, x: mx.array) -> mx.array:
            return mx.square(model(x) - x).mean() * hooks["scale"](model)

        step, take = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        found = []
        for number in range(20):
            COLLECTS["numbers"](model, number)
            if number == 10:
                hooks["scale"] = lambda model: mx.array(len(model._history) / 8)
            x = mx.random.normal((6, 4))
            found.append(float((step(x).loss if fast else take(x)[0]).item()))
        return found, step

    losses, _ = run(fast=True)
    assert_same(losses, run(fast=False)[0], 1e-6)


def test_what_is_collected_on_a_model_is_seen_by_the_loss_of_another_one() -> None:
    def run(fast: bool) -> list[float]:
        mx.random.seed(5)
        model, other = Collecting(), nn.Linear(4, 4)
        optimizers = optim.SGD(0.05), optim.SGD(0.05)

        def alone(model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x)).mean()

        def loss_fn(other: nn.Module, x: mx.array) -> mx.array:
            return mx.square(other(x)).mean() * (1 + mx.tanh(model._arrays[-1].sum() * len(model._history) / 64))

        pairs = (model, alone), (other, loss_fn)
        steps = [Step(each, optimizer, fn) for (each, fn), optimizer in zip(pairs, optimizers, strict=True)]
        takes = [plain_step(each, optimizer, fn) for (each, fn), optimizer in zip(pairs, optimizers, strict=True)]
        found = []
        for number in range(16):
            for at in (0, 1) if number > 7 else (0,):
                COLLECTS["arrays"](model, number)
                COLLECTS["numbers"](model, number)
                x = mx.random.normal((6, 4))
                found.append(float((steps[at](x).loss if fast else takes[at](x)[0]).item()))
        return found

    assert_same(run(fast=True), run(fast=False), 1e-6)


class Buffered(nn.Module):
    """Collects behind or before its layer, beside a buffer that the loss reads."""

    def __init__(self, before: bool) -> None:
        super().__init__()
        if before:
            self._memory: Any = []
        self.layer = nn.Linear(4, 4)
        if not before:
            self._memory = []
        self._anchor, self.scale = mx.ones((4,)), mx.full((4,), 3.0)

    def __call__(self, x: mx.array) -> mx.array:
        return self.layer(x)


BECOMES: dict[str, Callable[[Any], Any]] = {
    "array": mx.array,
    "array of another's shape": lambda memory: mx.full((4,), 7.0),
    "module": lambda memory: nn.Linear(4, 4),
    "tuple": tuple,
    "dict": lambda memory: {"memory": memory, "sum": mx.array(7.0)},
}


@pytest.mark.parametrize("becomes", BECOMES)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("another", [True, False])
def test_what_was_collected_may_become_an_array_or_a_module(becomes: str, before: bool, another: bool) -> None:
    def one(model: Buffered, x: mx.array) -> mx.array:
        return mx.square(model(x) - x).mean() * (1 + model._anchor.mean()) + 0.01 * mx.square(model.scale).mean()

    def other(model: Buffered, x: mx.array) -> mx.array:
        return mx.square(model(x) - x).mean() * (1 + model._anchor.mean())

    def run(fast: bool) -> tuple[list[float], Tree]:
        mx.random.seed(0)
        model, optimizer = Buffered(before), optim.SGD(0.05)
        steps = [Step(model, optimizer, fn) for fn in (one, other)]
        takes = [plain_step(model, optimizer, fn) for fn in (one, other)]
        losses = []
        for number in range(20):
            if number < 8:
                model._memory.append(float(number))
            if number == 8:
                model._memory = BECOMES[becomes](model._memory)
            at, x = number >= 10 and another, mx.random.normal((6, 4))
            losses.append(float((steps[at](x).loss if fast else takes[at](x)[0]).item()))
        return losses, snapshot(model)

    wanted, reference = run(fast=False)
    losses, parameters = run(fast=True)
    assert_same(losses, wanted, 1e-6)
    assert_close(parameters, reference, 1e-6)
