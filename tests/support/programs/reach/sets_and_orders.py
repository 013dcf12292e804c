"""Sets, queues, orders of dicts and parts of a model, which a loss changes at some calls."""

from __future__ import annotations

import collections
import queue
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from support.programs.reach.registry import (
    Made,
    Make,
    Net,
    add,
    program,
    squares,
)

SIZES = {"one": (3,), "two": (3, 5), "three": (3, 5, 4)}


def acting(act: Callable[[Any, mx.array], object], see: Callable[[Any], Any], sizes: str = "one") -> Make:
    def build() -> Made:
        model = Net(act)
        return Made(squares, lambda: (model.steps, see(model)), model=model, rows=SIZES[sizes])

    return build


def once(model: Any, x: mx.array) -> None:
    if len(x) not in model._done:
        model._done.add(len(x))
        model.steps += 100


for name, make in {
    "a set on the model behind a warm-up": acting(
        lambda model, x: model._done.add("warm-up") if model.steps >= 5 else None, lambda model: sorted(model._done)
    ),
    "a set on the model, at the first batch of a length": acting(once, lambda model: sorted(model._done), "three"),
    "a part that is frozen later": acting(
        lambda model, x: model.encoder.freeze() if model.steps == 8 else None,
        lambda model: len(tree_flatten(model.trainable_parameters())),
    ),
    "a part that is frozen at the first call": acting(
        lambda model, x: model.encoder.freeze() if model.steps == 1 else None,
        lambda model: (
            len(tree_flatten(model.trainable_parameters())),
            round(float(model.encoder.layers[0].weight.sum()), 4),
        ),
    ),
    "a part in evaluation later": acting(
        lambda model, x: model.encoder.eval() if model.steps == 8 else None, lambda model: model.encoder.training
    ),
    "a head that is replaced": acting(
        lambda model, x: setattr(model, "head", model.spare[0]) if model.steps == 6 else None,
        lambda model: (model.head is model.spare[0], round(float(model.spare[0].weight.sum()), 4)),
    ),
}.items():
    add("model", name, make)


def keeping(value: Callable[[int, mx.array], Any], where: str) -> Make:
    def build() -> Made:
        state = types.SimpleNamespace(task=0)

        def act(model: Any, x: mx.array) -> None:
            holder = model if where == "model" else model.encoder.layers[0]
            holder._last = value(state.task, x)

        model = Net(act)
        model.encoder.eval()
        model._last = model.encoder.layers[0]._last = None

        def before(number: int) -> None:
            state.task = number % 3 if number < 9 else number * number % 3

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return squares(model, x) * (1.0 + 0.5 * state.task)

        return Made(
            loss_fn, lambda: (model.steps, model._last, model.encoder.layers[0]._last), before, model, rows=SIZES["two"]
        )

    return build


for where in ("model", "layer"):
    add("model", f"a text of each task on the {where}", keeping(lambda task, x: "abc"[task], where))
    add("model", f"none or a text on the {where}", keeping(lambda task, x: None if task == 0 else "abc"[task], where))
    add("model", f"the last length on the {where}", keeping(lambda task, x: x.shape[0], where))
    add("model", f"a tuple of each task on the {where}", keeping(lambda task, x: (task, x.shape[0]), where))


@program("model")
def set_on_another_module() -> Made:
    critic = nn.Linear(2, 2)
    critic._seen = set()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = squares(model, x)
        if len(x) not in critic._seen:
            critic._seen.add(len(x))
            loss = loss * 2
        return loss

    return Made(loss_fn, lambda: sorted(critic._seen), rows=SIZES["three"])


@program("object")
def queue_that_is_put_into_later() -> Made:
    items, count = queue.Queue[str](), [0]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        count[0] += 1
        if count[0] == 8:
            items.put("warm-up done")
        return squares(model, x)

    return Made(loss_fn, items.qsize)


@program("object")
def least_recently_used() -> Made:
    cache, count = collections.OrderedDict[int, float](), {"misses": 0}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if len(x) in cache:
            cache.move_to_end(len(x))
        else:
            count["misses"] += 1
            cache[len(x)] = 0.1 * count["misses"]
            if len(cache) > 2:
                cache.popitem(last=False)
        return squares(model, x) * (1 + cache[len(x)])

    return Made(loss_fn, lambda: (list(cache), count["misses"]), rows=SIZES["three"])


@program("object")
def rotation_of_tasks() -> Made:
    tasks = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        task = next(name for name in tasks)
        tasks.move_to_end(task)
        return squares(model, x) * tasks[task]

    return Made(loss_fn, lambda: list(tasks))


@program("model")
def count_beside_places_that_share_an_array() -> Made:
    zeros = mx.zeros((2,))
    state = types.SimpleNamespace(mean=zeros, reference=zeros)

    def count(model: Any, x: mx.array) -> None:
        model._done.add(model.steps)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        loss = mx.square(out - state.mean).mean() + mx.abs(out - state.reference).mean()
        state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
        return loss

    model = Net(count)
    return Made(loss_fn, lambda: (model.steps, sorted(model._done)), model=model)
