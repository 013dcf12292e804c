"""Losses that keep something of their own: what they give and leave behind is the plain loop's at every step."""

from __future__ import annotations

import collections
import contextlib
import csv
import dataclasses
import decimal
import functools
import gc
import io
import itertools
import logging
import math
import operator
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten
from support.beside import squares
from support.helpers import plain_step

NEAR = 1e-5 if mx.default_device() == mx.cpu else 1e-3  # what a GPU rounds otherwise
SIZES = {"one": [3], "two": [3, 5], "three": [3, 5, 4]}


@dataclasses.dataclass
class Made:
    """A program: its loss, what it leaves, and what it does before a step."""

    loss_fn: Callable[..., Any]
    see: Callable[[], Any]
    before: Callable[[int], object] = lambda number: None
    model: nn.Module = dataclasses.field(default_factory=lambda: nn.Linear(4, 2))
    sizes: str = "one"


Make = Callable[[], Made]
PROGRAMS: dict[str, Make] = {}


def program(make: Make) -> Make:
    """Add a program."""
    PROGRAMS[make.__name__] = make
    return make


@pytest.mark.filterwarnings("ignore:faststep. attributes of the model have changed again and again")
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_leaves_what_it_leaves_in_the_plain_loop(name: str) -> None:
    seen: list[list[Any]] = []
    for ours in (False, True):
        random.seed(0)
        np.random.seed(0)
        mx.random.seed(0)
        made, optimizer = PROGRAMS[name](), optim.SGD(0.05)
        plain, step = plain_step(made.model, optimizer, made.loss_fn), Step(made.model, optimizer, made.loss_fn)
        sizes = SIZES[made.sizes]
        seen.append([])
        for number in range(14):
            made.before(number)
            x = mx.random.normal((sizes[number % len(sizes)], 4), key=mx.random.key(number))
            loss = step(x).loss if ours else plain(x)[0]
            seen[-1].append((loss.item(), made.see()))
    for number, (mine, theirs) in enumerate(zip(*reversed(seen), strict=True)):
        assert mine[0] == pytest.approx(theirs[0], rel=1e-4), f"loss {number}"
        assert mine[1] == theirs[1], f"left behind step {number}"


# functions, classes and modules


@program
def attribute_of_a_function_that_the_loss_makes() -> Made:
    def weigh(loss: mx.array) -> mx.array:
        made = vars(weigh)
        weigh.n = made.get("n", 0) + 1  # type: ignore[attr-defined]
        return loss * (1 + 0.1 * made["n"])

    return Made(lambda model, x: weigh(squares(model, x)), lambda: vars(weigh).get("n"))


@program
def static_variable_of_a_function() -> Made:
    def count(loss: mx.array) -> mx.array:
        if not hasattr(count, "n"):
            count.n = 0  # type: ignore[attr-defined]
        count.n += 1  # type: ignore[attr-defined]
        return loss

    return Made(lambda model, x: count(squares(model, x)), lambda: vars(count).get("n"))


@program
def attribute_of_a_class_that_the_loss_makes() -> Made:
    class Stats:
        n: int

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if not hasattr(Stats, "n"):
            Stats.n = 0
        Stats.n += 1
        return squares(model, x) * (1 + 0.1 * Stats.n)

    return Made(loss_fn, lambda: Stats.n)


@program
def attribute_of_a_subclass_over_an_inherited_one() -> Made:
    class Base:
        calls = 0

        @classmethod
        def tick(cls) -> None:
            cls.calls += 1

    class Term(Base):
        pass

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        Term.tick()
        return squares(model, x) * (1 + 0.1 * Term.calls)

    return Made(loss_fn, lambda: (Term.calls, Base.calls))


@program
def singleton_by_new() -> Made:
    class Tracker:
        _instance: Any = None
        steps: int
        weight: float

        def __new__(cls) -> Any:
            if cls._instance is None:
                cls._instance = super().__new__(cls)
                cls._instance.steps, cls._instance.weight = 0, 1.0
            return cls._instance

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        tracker = Tracker()
        tracker.steps += 1
        return squares(model, x) * tracker.weight

    def before(number: int) -> None:
        Tracker().weight = 1 + 0.1 * number

    return Made(loss_fn, lambda: Tracker().steps, before)


def module(code: str) -> Any:
    found = types.ModuleType("helpers_of_a_program")
    exec(textwrap.dedent(code), vars(found))
    return found


@program
def global_of_a_module_that_is_imported() -> Made:
    helpers = module("""
        n = 0
        def tick():
            global n
            n += 1
            return n
        """)
    return Made(lambda model, x: squares(model, x) * (1 + 0.1 * helpers.tick()), lambda: helpers.n)


@program
def count_in_a_module_that_is_imported() -> Made:
    helpers = module("""
        n = 0
        def tick():
            global n
            n += 1
        """)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        helpers.tick()
        return squares(model, x)

    return Made(loss_fn, lambda: helpers.n)


@program
def method_caller_that_is_replaced() -> Made:
    state = {"reduce": operator.methodcaller("mean")}

    def before(number: int) -> None:
        if number == 4:
            state["reduce"] = operator.methodcaller("sum")

    return Made(lambda model, x: state["reduce"](mx.square(model(x))), lambda: None, before)


@program
def name_of_a_module_that_comes_later() -> Made:
    config = module("rate = 1.0")

    def before(number: int) -> None:
        if number == 5:
            config.scale = 2.0

    return Made(lambda model, x: squares(model, x) * getattr(config, "scale", config.rate), lambda: None, before)


@program
def count_of_a_set() -> Made:
    class Sizes(set[int]):
        adds = 0

        def add(self, value: int) -> None:
            self.adds += 1
            super().add(value)

    sizes = Sizes()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        sizes.add(len(x))
        return squares(model, x) * (1 + 0.1 * sizes.adds)

    return Made(loss_fn, lambda: sizes.adds)


# what a function with a cache keeps


class State:
    """What programs count and set."""

    def __init__(self) -> None:
        self.steps, self.log, self.weight, self.mean = 0, list[int](), 1.0, mx.zeros((2,))


def cached(kind: Callable[..., Any], keyed: bool, make: Callable[[], Any] = State) -> Make:
    def build() -> Made:
        @kind
        def get(key: int = 0) -> Any:
            return make() if make is State else collections.defaultdict(float, weight=1.0)

        def of(it: Any) -> dict[str, Any]:
            return it if isinstance(it, dict) else vars(it)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            state = get(len(x)) if keyed else get()
            values = of(state)
            values["steps"] += 1
            if "mean" in values:
                state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
            return mx.square(out).mean() * values["weight"]

        def before(number: int) -> None:
            if number == 6:
                of(get(3) if keyed else get())["weight"] = 3.0

        def see() -> Any:
            values = of(get(3) if keyed else get())
            return values["steps"], round(float(mx.sum(values.get("mean", mx.array(0.0)))), 3)

        return Made(loss_fn, see, before, sizes="two" if keyed else "one")

    return build


for keyed in (False, True):
    PROGRAMS[f"state in a cache without bounds, {keyed}"] = cached(functools.cache, keyed)
    PROGRAMS[f"state in a cache with bounds, {keyed}"] = cached(functools.lru_cache, keyed)
    PROGRAMS[f"dict in a cache with bounds, {keyed}"] = cached(functools.lru_cache, keyed, dict)


@program
def cache_of_a_state_that_is_cleared() -> Made:
    get = functools.cache(State)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        get().steps += 1
        return squares(model, x) * (1 + 0.1 * get().steps)

    def before(number: int) -> None:
        if number == 7:
            get.cache_clear()

    return Made(loss_fn, lambda: get().steps, before)


def made_once(make: Callable[[], Any], use: Callable[[Any, mx.array], mx.array], in_loss: bool) -> Make:
    def build() -> Made:
        get = functools.cache(make)
        mx.random.seed(1)
        if not in_loss:
            get()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            y = model(x)
            return mx.square(y - mx.stop_gradient(use(get(), y))).mean()

        return Made(loss_fn, lambda: get.cache_info().currsize)

    return build


def drawn() -> mx.array:
    return mx.random.normal((2, 2))


def closure() -> Callable[[mx.array], mx.array]:
    weight = drawn()
    return lambda y: y @ weight


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any, mx.array], mx.array]]] = {
    "a module": (lambda: nn.Linear(2, 2), lambda it, y: it(y)),
    "a tuple": (lambda: (drawn(), 1.0), lambda it, y: y @ it[0]),
    "tables": (lambda: (mx.cos(mx.arange(2.0)), mx.sin(mx.arange(2.0))), lambda it, y: y * it[0] + y * it[1]),
    "a closure": (closure, lambda it, y: it(y)),
    "a list": (lambda: [drawn()], lambda it, y: y @ it[0]),
}


@program
def state_behind_a_cache_of_a_partial() -> Made:
    get = functools.cache(functools.partial(State))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        get().steps += 1
        return squares(model, x)

    return Made(loss_fn, lambda: get().steps)


def drawing_behind_a_cache(make: Callable[[], Any], draw: Callable[[Any], float]) -> Make:
    def build() -> Made:
        get = functools.cache(make)
        return Made(lambda model, x: squares(model, x) * (1 + draw(get())), lambda: None)

    return build


BEHIND: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a generator of NumPy's": (lambda: np.random.default_rng(1), lambda rng: float(rng.random())),
    "a generator of Python's": (lambda: random.Random(1), lambda rng: rng.random()),
    "an iterator": (lambda: itertools.cycle([0.1, 0.2, 0.3]), next),
    "a NumPy array": (lambda: np.zeros(2), lambda it: float(it.__iadd__(0.1)[0])),
}
for kind, (make, draw) in BEHIND.items():
    PROGRAMS[f"{kind} behind a cache"] = drawing_behind_a_cache(make, draw)
for kind, (make, use) in MADE.items():
    for in_loss in (False, True):
        PROGRAMS[f"{kind} of arrays in a cache, {in_loss}"] = made_once(make, use, in_loss)


# draws


def drawing(draw: Callable[[], float], sizes: str, stores: bool) -> Make:
    def build() -> Made:
        kept: dict[str, Any] = {"last": None}

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            if stores:
                kept["last"] = mx.stop_gradient(out)
            return mx.abs(out).mean() * (1 + 0.1 * draw())

        return Made(loss_fn, lambda: (random.getstate(), str(np.random.get_state())), sizes=sizes)

    return build


for name, draw in {
    "np.random.rand": np.random.rand,
    "np.random.randn": np.random.randn,
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
}.items():
    for sizes in SIZES:
        PROGRAMS[f"{name} beside an array of sizes {sizes}"] = drawing(draw, sizes, stores=True)
    PROGRAMS[name] = drawing(draw, "one", stores=False)


def iterating(make: Callable[[], Iterator[Any]], where: str) -> Make:
    def build() -> Made:
        model = nn.Linear(4, 2)
        model._kept = {"it": make()} if where == "dict" else [make()]
        return Made(
            lambda model, x: squares(model, x) * (1 + next(model._kept["it" if where == "dict" else 0])),
            lambda: None,
            model=model,
        )

    return build


for where in ("dict", "list"):
    PROGRAMS[f"a generator in a {where} of the model"] = iterating(lambda: (0.1 * n for n in range(30)), where)
    PROGRAMS[f"an iterator in a {where} of the model"] = iterating(lambda: itertools.count(0, 0.1), where)


@program
def iterator_that_is_taken_from_behind_a_warm_up() -> Made:
    state = types.SimpleNamespace(it=itertools.count(1), steps=0, last=None)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.steps += 1
        if state.steps > 5:
            state.last = next(state.it)
        return squares(model, x) * (1 + (state.last or 0))

    return Made(loss_fn, lambda: (state.steps, state.last))


# sets, queues, orders and modules


class Net(nn.Module):
    """A model that counts its calls, and does something as it counts."""

    def __init__(self, act: Callable[[Any, mx.array], object]) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 2)
        self.spare = (nn.Linear(4, 2),)
        self.steps, self._done, self._act = 0, set[Any](), (act,)

    def __call__(self, x: mx.array) -> mx.array:
        """Give what the head gives."""
        self.steps += 1
        self._act[0](self, x)
        out: mx.array = self.head(self.encoder(x))
        return out * 0.5 if "warm-up" in self._done else out


def acting(act: Callable[[Any, mx.array], object], see: Callable[[Any], Any], sizes: str = "one") -> Make:
    def build() -> Made:
        model = Net(act)
        return Made(squares, lambda: (model.steps, see(model)), model=model, sizes=sizes)

    return build


def once(model: Any, x: mx.array) -> None:
    if len(x) not in model._done:
        model._done.add(len(x))
        model.steps += 100


PROGRAMS |= {
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
}


def in_turns(model: Any, x: mx.array) -> None:
    model.heads = getattr(model, "heads", None) or (model.head, model.spare[0])
    model.head = model.heads[model.steps % 2]


PROGRAMS["heads in turns"] = acting(
    in_turns, lambda model: [round(float(head.weight.sum()), 4) for head in (model.head, model.spare[0])]
)


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
            loss_fn, lambda: (model.steps, model._last, model.encoder.layers[0]._last), before, model, sizes="two"
        )

    return build


for where in ("model", "layer"):
    PROGRAMS[f"a text of each task on the {where}"] = keeping(lambda task, x: "abc"[task], where)
    PROGRAMS[f"none or a text on the {where}"] = keeping(lambda task, x: None if task == 0 else "abc"[task], where)
    PROGRAMS[f"the last length on the {where}"] = keeping(lambda task, x: x.shape[0], where)
    PROGRAMS[f"a tuple of each task on the {where}"] = keeping(lambda task, x: (task, x.shape[0]), where)


@program
def set_on_another_module() -> Made:
    critic = nn.Linear(2, 2)
    critic._seen = set()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = squares(model, x)
        if len(x) not in critic._seen:
            critic._seen.add(len(x))
            loss = loss * 2
        return loss

    return Made(loss_fn, lambda: sorted(critic._seen), sizes="three")


@program
def queue_that_is_put_into_later() -> Made:
    items, count = queue.Queue[str](), [0]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        count[0] += 1
        if count[0] == 8:
            items.put("warm-up done")
        return squares(model, x)

    return Made(loss_fn, items.qsize)


@program
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

    return Made(loss_fn, lambda: (list(cache), count["misses"]), sizes="three")


@program
def rotation_of_tasks() -> Made:
    tasks = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        task = next(name for name in tasks)
        tasks.move_to_end(task)
        return squares(model, x) * tasks[task]

    return Made(loss_fn, lambda: list(tasks))


@program
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


# counts that decide


def deciding(decide: Callable[[int], object]) -> Make:
    def build() -> Made:
        count = [0]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            count[0] += 1
            return squares(model, x) * (2.0 if decide(count[0]) else 1.0)

        return Made(loss_fn, lambda: count[0])

    return build


PROGRAMS |= {
    f"a count by {name}": deciding(decide)
    for name, decide in {
        "a set": lambda n: n in {5, 9},
        "a dict": lambda n: {5: 2.0, 9: 3.0}.get(n),
        "int() of a quotient": lambda n: int(n / 4) == 2,
        "its last digit": lambda n: f"{n}".endswith("2"),
        "a text": lambda n: str(n)[-1] == "7",
        "a mask": lambda n: (n ^ 5) == 12,
        "a complement": lambda n: ~n == -12,
        "a shift": lambda n: n << 1 == 18,
        "a square": lambda n: n**2 == 81,
        "a root": lambda n: math.sqrt(n) == 3,
    }.items()
}


def milestones(table: Any, nested: bool) -> Make:
    def act(model: Any, x: mx.array) -> None:
        known = model._table["at"] if nested else model._table
        if model.steps in known:
            model._done.add("warm-up")

    def build() -> Made:
        model = Net(act)
        model.encoder.eval()
        model._table = {"at": table} if nested else table
        return Made(squares, lambda: (model.steps, sorted(model._done)), model=model)

    return build


@program
def milestones_of_a_list_on_the_model() -> Made:
    def act(model: Any, x: mx.array) -> None:
        model._count[0] += 1
        if model._count[0] in model._table:
            model._done.add("warm-up")

    model = Net(act)
    model.encoder.eval()
    model._count, model._table = [0], {7: 0.3, 20: 0.6}.keys()
    return Made(squares, lambda: (model._count, sorted(model._done)), model=model)


PROGRAMS["milestones in a NumPy array on the model"] = milestones(np.array([7, 20]), nested=False)
for nested in (False, True):
    PROGRAMS[f"milestones in a dict on the model, {nested}"] = milestones({7: 0.3}, nested)
    PROGRAMS[f"milestones in a set on the model, {nested}"] = milestones({7, 20}, nested)


# what the loss makes at its first call, and keeps


class Tracker:
    """An object that counts."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Counting(dict[str, Any]):
    """A dict with a count of its own, which is an attribute of the class at first."""

    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def numbers() -> Iterator[int]:
    yield from itertools.cycle([1, 2, 3, 4, 5])


FIRST: dict[str, Callable[[], Any]] = {
    "object": Tracker,
    "deque": lambda: collections.deque(maxlen=4),
    "array of NumPy": lambda: np.zeros(3, int),
    "generator": numbers,
    "iterator": lambda: iter(range(100)),
    "generator of NumPy": lambda: np.random.default_rng(1),
    "random": lambda: random.Random(1),
    "in a tuple": lambda: (Tracker(), {"a": Tracker()}),
}


def counted(kept: Any) -> int:
    """Let what is kept count or draw."""
    if isinstance(kept, tuple):
        return counted(kept[1]["a"])
    if isinstance(kept, collections.deque):
        kept.append(len(kept))
        return sum(kept)
    if isinstance(kept, np.ndarray):
        kept[0] += 1
        return int(kept[0])
    if callable(kept):
        return int(kept())
    return next(kept) if hasattr(kept, "__next__") else int(1000 * kept.random())


def made_first(kind: str, place: str, uses: bool, draws: bool = False) -> Make:
    """A loss that makes something at its first call and keeps it on the model, a layer or an agent."""

    def make() -> Made:
        model, agent = nn.Sequential(nn.Linear(4, 2), nn.Tanh()), types.SimpleNamespace()
        owner: Any = {"model": model, "layer": model.layers[0], "agent": agent}[place]
        owner.kept, seen = None, [0]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if owner.kept is None:
                owner.kept = FIRST[kind]()
            seen[0] = counted(owner.kept)
            if draws and random.random() < 0.5:
                x = -x
            return squares(model, x) * (1 + 0.01 * min(seen[0], 9) if uses else 1)

        return Made(loss_fn, lambda: seen[0], model=model)

    return make


for kind, place in itertools.product(FIRST, ("model", "layer", "agent")):
    name = f"{kind} made first on the {place}"
    PROGRAMS |= {f"{name}, {uses}": made_first(kind, place, uses) for uses in (False, True)}
    PROGRAMS[f"{name} beside a draw"] = made_first(kind, place, True, True)


@program
def a_graph_of_dicts_that_lead_to_each_other_made_first() -> Made:
    agent = types.SimpleNamespace(start=None)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if agent.start is None:
            nodes: list[dict[str, Any]] = [{"id": number, "near": []} for number in range(12)]
            for node in nodes:
                node["near"].extend(nodes)
            agent.start = nodes[0]
        return squares(model, x) * len(agent.start["near"])

    return Made(loss_fn, lambda: agent.start["id"])


def counting(uses: bool) -> Make:
    def make() -> Made:
        model = nn.Linear(4, 2)
        model.hits = Counting()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            n = model.hits()
            return squares(model, x) * (1 + 0.01 * min(n, 9) if uses else 1)

        return Made(loss_fn, lambda: model.hits.n, model=model)

    return make


PROGRAMS |= {f"an attribute of a dict on the model, {uses}": counting(uses) for uses in (False, True)}


def changing(kind: str, place: str, every: int) -> Make:
    """A loss that changes a set, whose order and next item are the plain loop's."""

    def make() -> Made:
        model, agent, n = nn.Linear(4, 2), types.SimpleNamespace(), types.SimpleNamespace(n=0)
        owner: Any = model if place == "model" else agent
        owner.pool = {number * 37 % 1009 for number in range(20)}

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            n.n += 1
            pool = owner.pool
            if n.n % every == 0:
                if kind == "pop":
                    pool.pop()
                elif kind == "remove":
                    pool.remove(min(pool))
                elif kind == "discard":
                    pool.discard(min(pool))
                else:
                    pool.add(n.n + 2000)
            return squares(model, x)

        return Made(loss_fn, lambda: list(owner.pool), model=model)

    return make


for kind, place, every in itertools.product(("pop", "remove", "discard", "add"), ("model", "agent"), (2, 3, 10)):
    PROGRAMS[f"a set on the {place}: {kind} at every {every}th call"] = changing(kind, place, every)


class Slot:
    """What a loss deletes in a slot."""

    __slots__ = ("buffer",)


def deleting(place: str, value: Any, at: int) -> Make:
    """A loss that deletes something at one of its calls."""

    def make() -> Made:
        state, kept, slot = types.SimpleNamespace(n=0), type("Kept", (), {"buffer": value}), Slot()
        slot.buffer = cell = value
        globals()["BUFFER"] = value

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            global BUFFER
            nonlocal cell
            state.n += 1
            if state.n == at:
                if place == "class":
                    del kept.buffer
                elif place == "slot":
                    del slot.buffer
                elif place == "global":
                    del BUFFER
                else:
                    del cell
            return squares(model, x)

        def see() -> Any:
            try:
                held = cell is not None
            except NameError:
                held = False
            return hasattr(kept, "buffer"), hasattr(slot, "buffer"), "BUFFER" in globals(), held

        return Made(loss_fn, see)

    return make


for place, (kind, value) in itertools.product(
    ("class", "slot", "global", "cell"), {"number": 2.5, "list": [1], "array": mx.zeros(3)}.items()
):
    PROGRAMS[f"{place}: {kind} deleted at its first call"] = deleting(place, value, 1)
    PROGRAMS[f"{place}: {kind} deleted at its tenth call"] = deleting(place, value, 10)


class Log(list[int]):
    """A list that keeps its sum."""

    total = 0

    def append(self, value: int) -> None:
        self.total += value
        super().append(value)


class Queue(collections.deque[int]):
    """A queue that counts what is done to it."""

    total = 0

    def append(self, value: int) -> None:
        super().append(value)
        self.total += 1

    def extend(self, values: Iterable[int]) -> None:
        super().extend(values)
        self.total += 100

    def clear(self) -> None:
        super().clear()
        self.total += 1000


class Members(set[int]):
    """A set that counts what is done to it."""

    total = 0

    def append(self, value: int) -> None:
        self.add(value)
        self.total += 1

    def update(self, *values: Iterable[int]) -> None:
        super().update(*values)
        self.total += 100

    def clear(self) -> None:
        super().clear()
        self.total += 1000


def logging_to(kind: Callable[[], Any], place: str, sizes: str) -> Make:
    """A loss that appends to an object of a class of its own."""

    def make() -> Made:
        model, agent = nn.Sequential(nn.Linear(4, 2), nn.Tanh()), types.SimpleNamespace()
        owner: Any = {"model": model, "layer": model.layers[0], "agent": agent}[place]
        owner._log = kind()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            owner._log.append(len(x))
            return squares(model, x)

        return Made(loss_fn, lambda: (list(owner._log), owner._log.total), model=model, sizes=sizes)

    return make


for kind, place, sizes in itertools.product((Log, Queue, Members), ("model", "layer", "agent"), ("one", "two")):
    PROGRAMS[f"a {kind.__name__} of its own on the {place}, sizes {sizes}"] = logging_to(kind, place, sizes)


def test_a_count_that_is_returned_goes_on() -> None:
    counted: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> tuple[mx.array, dict[str, Any]]:
        counted.append(1)
        return squares(model, x), {"step": len(counted), "texts": [f"step {len(counted)}"]}

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    with pytest.warns(RuntimeWarning, match="depends on what it changes itself"):
        returned = [step(mx.ones((3, 4))).aux[0] for _ in range(4)]
    assert returned == [{"step": n, "texts": [f"step {n}"]} for n in (1, 2, 3, 4)]


# what is written


OPEN = io.open


@pytest.mark.parametrize("by", ["print", "a file", "an alias", "an array"])
def test_what_is_written_at_some_calls_is_written_at_those(by: str, tmp_path: Path, capsys: Any) -> None:
    state = types.SimpleNamespace(n=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.n += 1
        if state.n % 5 == 0:
            if by == "print":
                print(state.n)
            elif by == "a file":
                with (tmp_path / str(state.n)).open("w") as file:
                    file.write("written")
            elif by == "an alias":
                with OPEN(tmp_path / str(state.n), "w") as file:
                    file.write("written")
            else:
                mx.save(str(tmp_path / str(state.n)), mx.array(1.0))
        return squares(model, x)

    def written() -> list[int]:
        return sorted(int(path.stem) for path in tmp_path.iterdir())

    step, said, found = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), list[int](), list[list[int]]()

    def take(number: int) -> None:
        step(mx.ones((3, 4)))
        said.extend(int(line) for line in capsys.readouterr().out.split())
        found.append(list(said) if by == "print" else written())

    with pytest.warns(
        RuntimeWarning, match="(prints|writes to a file|opens a file by another name than open) at some calls"
    ):
        list(map(take, range(1, 13)))
    assert found == [[each for each in (5, 10) if each <= number] for number in range(1, 13)]
    assert state.n == 12


@pytest.mark.filterwarnings("ignore:faststep. the loss reads a _csv.writer")
@pytest.mark.parametrize("by", ["print", "an open file", "a table", "a log", "a filter"])
def test_what_is_written_at_each_call_is_not_written_for_calls_to_come(by: str, tmp_path: Path, capsys: Any) -> None:
    state, logger = types.SimpleNamespace(n=0), logging.getLogger("of a loss")
    file = (tmp_path / "log").open("w")
    handler, rows, filtered = logging.StreamHandler(file), csv.writer(file), list[int]()

    def keep(record: logging.LogRecord) -> bool:
        filtered.append(record.lineno)
        return True

    logger.addHandler(handler)
    if by == "a filter":
        logger.addFilter(keep)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.n += 1
        if by == "print":
            print(state.n)
        elif by == "an open file":
            file.write(f"{state.n}\n")
        elif by == "a table":
            rows.writerow([state.n])
        else:
            logger.warning("%d", state.n)
        return squares(model, x)

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    for _ in range(4):
        step(mx.ones((3, 4)))
    logger.removeHandler(handler)
    logger.removeFilter(keep)
    file.close()
    assert len(filtered) == (by == "a filter")
    said = capsys.readouterr().out if by == "print" else (tmp_path / "log").read_text()
    assert said.split() == ["1"]  # once for a trace
    assert (state.n, step.stats.mode) == (4, "native")


LOGGER = logging.getLogger("of a loss that changes it")
CAME: list[int] = []


def cache_limit() -> int:
    limit: int = mx.set_cache_limit(1 << 30)
    mx.set_cache_limit(limit)
    return limit


def starts(path: Path) -> None:
    thread = threading.Thread(target=path.mkdir)
    thread.start()
    thread.join()


# what a loss does with a path that is not there yet, and what is seen of it
EFFECTS: dict[str, tuple[Callable[[Path], object], Callable[[], object]]] = {
    "a process": (lambda path: subprocess.run(["mkdir", str(path)], check=True), lambda: None),
    "a thread": (starts, lambda: None),
    "touch": (Path.touch, lambda: None),
    "a link": (lambda path: path.symlink_to("elsewhere"), lambda: None),
    "a graph": (lambda path: mx.export_to_dot(str(path), mx.zeros(2)), lambda: None),
    "a mode": (lambda path: path.parent.chmod(0o711), lambda: None),
    "a signal": (lambda path: signal.raise_signal(signal.SIGUSR1), lambda: len(CAME)),
    "a handler": (lambda path: LOGGER.addHandler(logging.NullHandler()), lambda: len(LOGGER.handlers)),
    "a level": (lambda path: LOGGER.setLevel(logging.DEBUG), lambda: LOGGER.level),
    "no logs": (lambda path: logging.disable(10), lambda: logging.root.manager.disable),
    "a filter": (lambda path: warnings.simplefilter("ignore", ResourceWarning), lambda: warnings.filters[0]),
    "no garbage": (lambda path: gc.disable(), gc.isenabled),
    "NumPy's errors": (lambda path: np.seterr(over="ignore"), np.geterr),
    "NumPy's texts": (lambda path: np.set_printoptions(precision=3), lambda: np.get_printoptions()["precision"]),
    "decimal": (lambda path: setattr(decimal.getcontext(), "prec", 9), lambda: decimal.getcontext().prec),
    "a folder": (lambda path: os.chdir(path.parent), Path.cwd),
    "a variable": (lambda path: os.environ.update(OF_A_LOSS="1"), lambda: os.environ.get("OF_A_LOSS")),
    "recursion": (lambda path: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "a cache": (lambda path: mx.set_cache_limit(10**7), cache_limit),
    "a warning": (lambda path: warnings.warn("warm-up is over", UserWarning, stacklevel=1), lambda: None),
    "a line": (lambda path: sys.stdout.write("said"), lambda: None),
}


@pytest.fixture
def surroundings() -> Iterator[None]:
    """Put back what the losses above change."""
    limits, folder, errors = sys.getrecursionlimit(), Path.cwd(), np.geterr()
    handler = signal.signal(signal.SIGUSR1, lambda *_: CAME.append(1))
    with decimal.localcontext(), warnings.catch_warnings(), np.printoptions(), pytest.MonkeyPatch.context() as patch:
        patch.delenv("OF_A_LOSS", raising=False)
        limit = cache_limit()
        yield
        os.environ.pop("OF_A_LOSS", None)
    mx.set_cache_limit(limit)
    sys.setrecursionlimit(limits)
    os.chdir(folder)
    np.seterr(**errors)
    signal.signal(signal.SIGUSR1, handler)
    gc.enable()
    logging.disable(logging.NOTSET)
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.handlers.clear()
    CAME.clear()


@pytest.mark.skipif(sys.platform == "win32", reason="signals and links are those of Unix")
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", EFFECTS)
def test_what_is_done_at_one_call_is_done_at_that(name: str, tmp_path: Path, capsys: Any) -> None:
    state, (act, see) = types.SimpleNamespace(n=0), EFFECTS[name]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.n += 1
        if state.n == 5:
            act(tmp_path / "made")
        return squares(model, x)

    def look() -> Any:
        return tmp_path.stat().st_mode, os.path.lexists(tmp_path / "made"), see()

    tmp_path.chmod(0o700)
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    with warnings.catch_warnings(record=True) if name == "a warning" else contextlib.nullcontext([]) as caught:
        warnings.filterwarnings("default" if name == "a warning" else "ignore", ".*(faststep|warm-up)")
        before = look()
        for number in range(1, 8):
            step(mx.ones((3, 4)))
            shown = "said" in capsys.readouterr().out or any("warm-up" in str(each.message) for each in caught)
            caught.clear()
            assert shown == (number == 5 and name in ("a warning", "a line"))
            assert (look() != before) == (number >= 5 and name not in ("a warning", "a line"))
    assert (state.n, step.stats.mode) == (7, "plain")


def quiet(path: Path) -> None:
    with np.errstate(over="ignore"), decimal.localcontext() as context, warnings.catch_warnings():
        context.prec = 9
        warnings.simplefilter("error")
    gc.disable()
    gc.enable()


def recorded(path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("of the loss's own", UserWarning, stacklevel=1)
    assert len(caught) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals are those of Unix")
@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize(
    "act",
    [*(EFFECTS[name][0] for name in ("a level", "no logs", "NumPy's errors", "decimal", "a warning")), quiet, recorded],
)
def test_what_is_done_at_each_call_is_no_reason_to_run_uncompiled(act: Callable[[Path], object]) -> None:
    state = types.SimpleNamespace(n=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.n += 1
        act(Path())
        return squares(model, x)

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            step(mx.ones((3, 4)))
    assert [str(each.message) for each in caught] in ([], ["warm-up is over"])  # once for a trace
    assert (state.n, step.stats.mode) == (12, "native")


SEEDED: dict[str, Callable[[int], float]] = {
    "random": lambda seed: random.Random(seed).random(),
    "the process": lambda seed: random.seed(seed) or random.random(),  # type: ignore[func-returns-value]
    "default_rng": lambda seed: np.random.default_rng([7, seed]).random(),
    "bits": lambda seed: np.random.Generator(np.random.PCG64(seed=seed)).random(),
    "NumPy's": lambda seed: np.random.seed(seed) or np.random.rand(),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("name", SEEDED)
def test_a_generator_that_is_seeded_by_a_count_is_seeded_at_each_call(name: str, counts: bool) -> None:
    """What happens seldom by that is met by no call on trial."""
    losses: list[list[float]] = []
    for ours in (False, True):
        state, model, optimizer = types.SimpleNamespace(n=0), nn.Linear(4, 2), optim.SGD(0.05)
        model.update({"weight": mx.ones((2, 4)), "bias": mx.zeros(2)})

        def loss_fn(model: nn.Module, x: mx.array, state: types.SimpleNamespace = state) -> mx.array:
            state.n += 1
            chance = SEEDED[name](state.n if counts else 3)
            return squares(model, x * 0.0 if chance < 0.05 else x)

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        told = pytest.warns(RuntimeWarning, match="seeds a generator with") if ours and counts else None
        with contextlib.nullcontext() if told is None else told:
            losses.append(
                [(step(mx.ones((3, 4))).loss if ours else plain(mx.ones((3, 4)))[0]).item() for _ in range(60)]
            )
    assert losses[0] == pytest.approx(losses[1], rel=NEAR)
    assert step.stats.mode == ("plain" if counts else "native")


def test_a_loss_that_cannot_be_called_on_trial_is_not() -> None:
    state = types.SimpleNamespace(n=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.n += 1
        subprocess.run(["true"], check=True)
        return squares(model, x)

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    with pytest.warns(RuntimeWarning, match=r"it calls subprocess\.Popen, so that it cannot be called on trial"):
        step(mx.ones((3, 4)))
    for _ in range(3):
        step(mx.ones((3, 4)))
    assert (state.n, step.stats.mode) == (4, "plain")


# NumPy


@pytest.mark.parametrize("kind", ["array", "dict", "list", "written"])
def test_numpy_arrays_before_mlxs_in_a_step_that_runs_uncompiled(kind: str) -> None:
    def loss_fn(model: nn.Module, x: Any, held: Any) -> mx.array:
        if kind == "written":
            held["out"] = model(mx.array(x))
            held["n"] = held.get("n", 0) + 1
        weight = held if kind == "array" else held[0] if kind == "list" else held["w"]
        return (mx.square(model(mx.array(x))) * weight).mean()

    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn, compile=False)
        seen.append([])
        for number in range(4):
            x, w = np.random.RandomState(number).randn(3, 4).astype(np.float32), mx.array([1.0, 2.0])
            held: Any = w if kind == "array" else [w] if kind == "list" else {"x": x, "w": w}
            seen[-1].append((step(x, held).loss if ours else plain(x, held)[0]).item())
            if kind == "written":
                assert held["n"] == 1
                assert held["w"] is w
                assert held["x"] is x
    np.testing.assert_allclose(seen[1], seen[0], rtol=NEAR)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("how", ["value", "random", "iterator", "generator", "store", "reshape", "dict", "flag"])
def test_numpy_arrays_that_the_plain_loop_refuses_are_mlxs_at_every_step(how: str, compile: bool) -> None:
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        random.seed(0)
        kept = types.SimpleNamespace(n=0, log=[], last=None, aux={}, turns=iter(range(9)), generator=numbers())

        def loss_fn(model: nn.Module, x: Any, kept: Any = kept) -> mx.array:
            kept.n += 1
            loss = squares(model, x)  # which refuses NumPy's
            if how == "value":
                kept.log.append(loss.item())
            elif how in ("store", "reshape"):
                kept.last = mx.stop_gradient(loss if how == "store" else model(x))
            elif how == "dict":
                kept.aux.update(loss=loss)
            elif how == "flag":
                return loss * (2 if x.max() > 1 else 1)
            factors = {
                "random": random.random,
                "iterator": lambda: next(kept.turns),
                "generator": lambda: next(kept.generator),
            }
            return loss * factors[how]() if how in factors else loss

        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn, compile=compile)
        seen.append([])
        for number in range(6):
            x = np.random.RandomState(number).randn(3 + (number == 4), 4).astype(np.float32)
            loss = step(x).loss if ours else plain(mx.array(x))[0]
            seen[-1].append((round(loss.item(), 5), kept.n))
    assert seen[1] == seen[0]


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it computes something else with the NumPy")
@pytest.mark.parametrize("kind", ["isinstance", "dtype", "float64", "mask", "method", "the same"])
def test_numpy_arrays_are_what_they_are_in_the_plain_loop(kind: str) -> None:
    def batch(number: int) -> Any:
        rows = np.random.RandomState(number)
        if kind in ("isinstance", "dtype"):
            return rows.randint(0, 256, (4, 4)).astype(np.uint8)
        return 1e6 + rows.randn(4, 4) if kind == "float64" else rows.randn(4, 4).astype(np.float32)

    def made(x: Any) -> mx.array:
        if kind == "isinstance":
            return mx.array(x) / 255 if isinstance(x, np.ndarray) else x
        if kind == "dtype":
            return mx.array(x) / (255 if x.dtype == np.uint8 else 2550)
        if kind == "float64":
            return mx.array((x - x.mean(0)) / x.std(0))
        if kind == "mask":
            return mx.array(x[x[:, 0] > 0])
        return mx.array(x.clip(-1, 1).copy() if kind == "method" else x)

    def loss_fn(model: nn.Module, x: Any) -> mx.array:
        return squares(model, made(x))

    losses: list[list[float]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        losses.append([(step(x).loss if ours else plain(x)[0]).item() for x in map(batch, range(6))])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert step.stats.mode == ("native" if kind == "the same" else "plain")


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it computes something else with the NumPy")
@pytest.mark.parametrize("kind", ["by turns", "float64", "later"])
def test_numpy_arrays_that_come_at_a_later_step_are_what_they_are(kind: str) -> None:
    def weight(number: int) -> Any:
        if kind == "float64":
            return np.ones(2, np.float64 if number >= 3 else np.float32)
        is_numpy = number % 2 if kind == "by turns" else number >= 3
        return np.ones(2, np.float32) if is_numpy else mx.ones((2,))

    def loss_fn(model: nn.Module, x: mx.array, w: Any) -> mx.array:
        doubles = w.dtype == np.float64 if kind == "float64" else isinstance(w, np.ndarray)
        return squares(model, x) * (2.0 if doubles else 1.0)

    losses: list[list[float]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        x = mx.ones((3, 4))
        each = range(6)
        losses.append([(step(x, weight(n)).loss if ours else plain(x, weight(n))[0]).item() for n in each])
    np.testing.assert_allclose(losses[1], losses[0], rtol=NEAR)


def test_an_array_that_is_passed_twice_is_two_arrays_in_the_loss() -> None:
    """MLX differentiates with copies of its own for each place."""

    def loss_fn(model: nn.Module, x: mx.array, pair: dict[str, mx.array]) -> mx.array:
        same = x is pair["x"] or pair["x"] is pair["y"]
        pair["y"][0] = 0.0
        return squares(model, pair["x"]) * (2.0 if same else 1.0)

    losses: list[list[float]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn, compile=False)
        losses.append([])
        for number in range(3):
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            pair = {"x": x, "y": x}
            losses[-1] += [(step(x, pair).loss if ours else plain(x, pair)[0]).item(), x.sum().item()]
            losses[-1] += [pair["x"].sum().item(), pair["y"].sum().item()]
    np.testing.assert_allclose(losses[1], losses[0], rtol=NEAR)


def test_a_loss_is_called_in_silence_to_see_whether_numpy_matters(capsys: Any, tmp_path: Path) -> None:
    def printing(model: nn.Module, x: Any) -> mx.array:
        print("called")
        return squares(model, mx.array(x))

    def writing(model: nn.Module, x: Any) -> mx.array:
        with (tmp_path / "log").open("a") as log:
            log.write("called\n")
        return squares(model, mx.array(x))

    for loss_fn in (printing, writing):
        step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
        step(np.ones((3, 4), np.float32))
        assert step.stats.mode == "native"
    assert capsys.readouterr().out.split() == ["called"]
    assert (tmp_path / "log").read_text().split() == ["called"]


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it takes from")
def test_an_iterator_beside_numpy_arrays_is_taken_from_once_a_step() -> None:
    state = types.SimpleNamespace(it=itertools.count(), last=None)

    def loss_fn(model: nn.Module, x: Any) -> mx.array:
        state.last = next(state.it)
        return squares(model, mx.array(x))

    step, seen = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), []
    for _ in range(4):
        step(np.ones((3, 4), np.float32))
        seen.append(state.last)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [float, np.float64, np.float32])
def test_options_that_are_numbers_of_numpy_are_native(kind: Any) -> None:
    results: list[Any] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.AdamW(1e-2)
        plain, step = plain_step(model, optimizer, squares), Step(model, optimizer, squares)
        for number in range(12):
            optimizer.weight_decay, optimizer.learning_rate = kind(0.01 * number), kind(1e-2 / (1 + number))
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            step(x) if ours else plain(x)
        results.append(model.weight)
    np.testing.assert_allclose(results[1], results[0], rtol=NEAR)
    assert step.stats.mode == "native"


def test_moments_that_numpy_makes_are_kept() -> None:
    """NumPy's number on the left makes a NumPy array of MLX's: it stays in the state."""

    class Momentum(optim.SGD):
        def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
            state["v"] = np.float32(self.momentum) * state["v"] + np.array(gradient)
            return parameter - self.learning_rate.astype(gradient.dtype) * mx.array(state["v"])

    results: list[Any] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), Momentum(1e-2, momentum=0.9)
        plain = plain_step(model, optimizer, squares)
        step = Step(model, optimizer, squares, compile=False)
        for number in range(6):
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            step(x) if ours else plain(x)
        results.append([model.weight, optimizer.state["weight"]["v"]])
    for mine, theirs in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=NEAR)


@pytest.mark.parametrize("draw", ["np.random.rand()", "np.ma.masked_less(np.arange(4.0), 1).mean()"])
def test_a_part_of_numpy_may_be_imported_by_the_loss(draw: str) -> None:
    """NumPy imports these as they are asked for, which is once in a process."""
    code = f"""
        import warnings; warnings.simplefilter("ignore")
        import numpy as np, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        from faststep import Step

        def loss_fn(model, x):
            return mx.square(model(x)).mean() * (1 + float({draw}))

        step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
        losses = [step(mx.ones((3, 4))).loss.item() for _ in range(4)]
        assert all(np.isfinite(losses)), losses
        {draw}
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
def test_a_module_may_be_imported_by_the_loss_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "terms_of_a_loss.py").write_text("scale, calls = 1.0, 0\n")

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        import terms_of_a_loss  # type: ignore[import-not-found]

        terms_of_a_loss.calls += 1
        return squares(model, x) * terms_of_a_loss.scale

    step, scales = Step(nn.Linear(4, 2), optim.SGD(0.0), loss_fn), [1.0, 1.0, 3.0, 3.0]
    losses = []
    for scale in scales:
        if "terms_of_a_loss" in sys.modules:
            sys.modules["terms_of_a_loss"].scale = scale  # type: ignore[attr-defined]
        losses.append(step(mx.ones((3, 4))).loss.item())
    assert [loss / losses[0] for loss in losses] == pytest.approx(scales)
    assert sys.modules.pop("terms_of_a_loss").calls == 4


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("first", [0, 3])
def test_a_module_that_the_loss_imports_first_keeps_arrays_and_counts(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "memory_of_a_loss.py").write_text(
        "import mlx.core as mx\nmean, calls = mx.zeros(2), 0\n"
        "def update(out):\n    global mean, calls\n    calls += 1\n"
        "    mean = 0.9 * mean + 0.1 * mx.stop_gradient(out).mean(0)\n    return mean\n"
    )
    seen: list[list[Any]] = []
    for ours in (False, True):
        state = types.SimpleNamespace(uses=False)

        def loss_fn(model: nn.Module, x: mx.array, state: Any = state) -> mx.array:
            out = model(x)
            if not state.uses:
                return mx.square(out).mean()
            from memory_of_a_loss import update  # type: ignore[import-not-found]

            return mx.square(out - update(out)).mean()

        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        seen.append([])
        for number in range(7):
            state.uses = number >= first
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            seen[-1].append((step(x).loss if ours else plain(x)[0]).item())
        memory: Any = sys.modules.pop("memory_of_a_loss")
        seen[-1] += [memory.calls, *memory.mean.tolist()]
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-4)


@pytest.mark.parametrize("kind", ["attribute", "mode"])
def test_two_losses_that_set_something_on_one_model_in_turns(kind: str) -> None:
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)), optim.SGD(0.05)
        model.phase = None

        def setting(value: bool, model: nn.Module = model) -> Callable[..., mx.array]:
            def loss_fn(model: Any, x: mx.array) -> mx.array:
                model.train(value) if kind == "mode" else setattr(model, "phase", value)
                return squares(model, x)

            return loss_fn

        losses = [setting(True), setting(False)]
        steps = [Step(model, optimizer, loss) if ours else plain_step(model, optimizer, loss) for loss in losses]
        seen.append([])
        for number in range(8):
            steps[number % 2](mx.ones((3, 4)))
            seen[-1].append((model.phase, model.training, model.layers[1].training))
    assert seen[1] == seen[0]


# gradients within the loss, and what is done beside a step


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("layer", [nn.Tanh, nn.SiLU, nn.LeakyReLU])
def test_a_gradient_within_a_loss_that_runs_uncompiled(layer: Callable[[], nn.Module]) -> None:
    """MLX compiles some activations: within an inner gradient they are to be traced."""

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        slope = mx.grad(lambda x: model(x).sum())(x)
        return squares(model, x) + mx.square(slope).mean() * (1.0 if slope.sum().item() < 100 else 0.5)

    losses: list[list[float]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model, optimizer = nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 1)), optim.Adam(1e-2)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        batches = [mx.random.normal((3, 4), key=mx.random.key(number)) for number in range(4)]
        losses.append([(step(x).loss if ours else plain(x)[0]).item() for x in batches])
    np.testing.assert_allclose(losses[1], losses[0], rtol=NEAR)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
def test_a_memory_plan_leaves_everything_as_it_is() -> None:
    def act(model: Any, x: mx.array) -> None:
        model._done.add(model.steps)

    state = types.SimpleNamespace(mean=mx.zeros((2,)), log=list[int]())

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        state.log.append(len(x))
        state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
        return mx.square(out - state.mean).mean() * (1 + random.random())

    model = Net(act)
    step, drawn = Step(model, optim.SGD(0.1), loss_fn), random.getstate()
    step.memory_plan(mx.ones((3, 4)))
    assert (model.steps, model._done, state.log, state.mean.tolist()) == (0, set(), [], [0.0, 0.0])
    assert random.getstate() == drawn
    step(mx.ones((3, 4)))
    assert (model.steps, model._done, state.log) == (1, {1}, [3])


def test_names_that_modules_of_libraries_are_asked_for_are_no_attributes_of_the_trainer() -> None:
    """`nn.losses` is no reason to look at `self.losses` at each step."""

    class Trainer:
        def __init__(self) -> None:
            self.losses: list[Any] = [[object()] for _ in range(5000)]  # more than is looked at: it would be told

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            return nn.losses.mse_loss(model(x), mx.zeros((3, 2)))

    trainer = Trainer()
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), trainer.loss)
    for _ in range(3):
        trainer.losses.append(step(mx.ones((3, 4))).loss.item())  # a warning is an error in these tests
    assert (step.stats.mode, step.stats.traced) == ("native", 1)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("bad", [0, 3])
@pytest.mark.parametrize("how", ["compiled", "uncompiled", "drawing"])
def test_a_batch_that_is_skipped_leaves_arrays_outside_of_the_model(how: str, bad: int) -> None:
    state, shown = types.SimpleNamespace(mean=mx.zeros((2,)), bank=mx.zeros((3, 2)), last=None), list[mx.array]()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        loss = mx.square(out - state.mean).mean()
        state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
        state.bank[0] = mx.stop_gradient(out).mean(0)
        return loss + (0.0 * random.random() if how == "drawing" else 0.0)

    step = Step(nn.Linear(4, 2), optim.SGD(0.05), loss_fn, compile=how != "uncompiled")
    for number in range(6):
        before, bank = mx.array(state.mean), state.bank
        x = mx.random.normal((3, 4), key=mx.random.key(number))
        step(x * math.nan if number == bad else x)
        assert bool((state.mean == before).all()) == (number == bad)
        assert state.bank is bank
        shown.append(state.bank[0])
    assert step.stats.skipped == 1
    assert all(bool(mx.isfinite(row).all()) for row in shown)


@pytest.mark.parametrize("act", ["flag", "count"])
def test_the_first_update_may_make_another_dtype_of_a_parameter_beside_what_a_loss_sets(act: str) -> None:
    """A buffer of integers that is not frozen becomes float32 at Adam's first update."""
    seen: list[list[Any]] = []
    for ours in (False, True):

        def set_or_count(model: Any, x: mx.array) -> None:
            model.ready = True if act == "flag" else getattr(model, "ready", 0) + 1

        mx.random.seed(0)
        model, optimizer = Net(set_or_count), optim.Adam(1e-2)
        model.batches = mx.array(0)
        model.encoder.eval()
        plain, step = plain_step(model, optimizer, squares), Step(model, optimizer, squares)
        batches = [mx.random.normal((3, 4), key=mx.random.key(number)) for number in range(5)]
        losses = [(step(x).loss if ours else plain(x)[0]).item() for x in batches]
        seen.append([*losses, float(model.ready), model.steps])
    np.testing.assert_allclose(seen[1], seen[0], rtol=NEAR)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("how", ["object on the model", "two ways", "two ways, by a count"])
def test_a_dict_that_the_loss_replaces_is_that_one_wherever_it_stands_among_what_is_watched(how: str) -> None:
    """What is watched changes as numbers of the model vary. Two ways of storing the same give one graph."""
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        model: Any = nn.Linear(4, 2)
        model.scale, model._trainer = 1.0, types.SimpleNamespace(epoch=0)
        cell: list[dict[str, mx.array]] = [{"loss": mx.array(0.0)}]
        counts = {"calls": 0}

        def loss_fn(model: Any, x: mx.array) -> mx.array:
            loss = squares(model, x) * model.scale
            if how == "two ways, by a count":
                counts["calls"] += 1  # noqa: B023
            if model._trainer.epoch >= 3:
                loss = loss + mx.square(model.weight).sum()
            if (how == "two ways" and model._trainer.epoch % 2) or counts["calls"] % 13 == 5:  # noqa: B023
                cell[0]["loss"] = loss  # noqa: B023
            else:
                cell[0] = {"loss": loss}  # noqa: B023
            return loss

        optimizer = optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        trainer, alias, same = model._trainer, cell[0], list[bool]()
        for number in range(24):
            trainer.epoch = number // 5
            model.scale = 1 - number // 4 / 100
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            loss = step(x).loss if ours else plain(x)[0]
            same.append(cell[0] is alias)
            alias = cell[0]
            seen.append([loss.item(), cell[0]["loss"].item(), same[-1], model._trainer is trainer])
    np.testing.assert_allclose(seen[24:], seen[:24], rtol=NEAR)


@pytest.mark.parametrize("disabled", [range(8), range(5, 9), range(6, 7)])
@pytest.mark.parametrize("act", ["average", "queue", "count", "replaced"])
def test_what_a_loss_leaves_while_mlx_is_told_not_to_compile(act: str, disabled: range) -> None:
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        state = types.SimpleNamespace(mean=mx.zeros((2,)), calls=0, last={"out": mx.zeros((2,))})
        rows = collections.deque([mx.zeros((2,))] * 2, maxlen=2)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            row, loss = mx.stop_gradient(out).mean(0), mx.square(out).mean()
            if act == "average":
                state.mean = 0.9 * state.mean + 0.1 * row  # noqa: B023
                loss = loss + mx.square(out - state.mean).mean()  # noqa: B023
            elif act == "queue":
                loss = loss + (out * rows[0]).mean()  # noqa: B023
                rows.append(row)  # noqa: B023
            elif act == "count":
                state.calls += 1  # noqa: B023
            else:
                state.last = {"out": row}  # noqa: B023
            return loss

        optimizer, model = optim.SGD(0.05), nn.Linear(4, 2)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        try:
            for number in range(12):
                (mx.disable_compile if number in disabled else mx.enable_compile)()
                x = mx.random.normal((3, 4), key=mx.random.key(number))
                loss = (step(x).loss if ours else plain(x)[0]).item()
                seen.append([loss, state.mean[0].item(), state.calls, rows[0][0].item(), state.last["out"][0].item()])
                if ours and number:  # the first stores arrays where there were none, perhaps
                    assert (step.stats.mode == "plain") == (number in disabled)
        finally:
            mx.enable_compile()
    np.testing.assert_allclose(seen[12:], seen[:12], rtol=NEAR)


@pytest.mark.parametrize(
    "how", ["two attributes", "a queue", "a queue and an attribute", "a dict", "in turns", "by the loop"]
)
def test_an_array_that_stands_at_two_places_changes_at_both(how: str) -> None:
    """The loss puts one array object there; what it, or the loop, changes in it later is seen wherever it stands."""
    seen: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(0)
        state = types.SimpleNamespace(
            one=mx.zeros((2,)), two=mx.zeros((2,)), both={"a": mx.zeros((2,)), "b": mx.zeros((2,))}
        )
        rows = collections.deque([mx.zeros((2,)), mx.zeros((2,))], maxlen=2)

        def loss_fn(model: nn.Module, x: mx.array, state: Any = state, rows: Any = rows) -> mx.array:
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

        model, optimizer = nn.Linear(4, 2), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        for number in range(12):
            if how == "by the loop" and number % 3 == 2:
                state.one[1] = 0.5
            x = mx.random.normal((3, 4), key=mx.random.key(number))
            loss = (step(x).loss if ours else plain(x)[0]).item()
            seen.append([loss, *state.two.tolist(), *rows[0].tolist(), *rows[1].tolist(), *state.both["b"].tolist()])
        assert not ours or step.stats.mode == "native"
    np.testing.assert_allclose(seen[12:], seen[:12], rtol=1e-4, atol=1e-6)
