"""What a loss counts and logs, wherever it does so, and whatever comes between the calls."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.reach.registry import (
    Box,
    Made,
    Make,
    add,
    program,
    rows_of_normals,
    squares,
)

ROWS: dict[str, tuple[int, ...]] = {
    "one length": (8,),
    "another at the second call": (8, 5, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8),
    "two in turns": (8, 5),
    "the last is shorter": (8, 8, 8, 5),
}


class Agent:
    """Counts in attributes, a dict, a list, its class and its model; the kind says what else it changes."""

    total = 0

    def __init__(self, kind: str) -> None:
        Agent.total = 0
        self.kind, self.calls, self.seconds, self.rows, self.counts = kind, 0, 0.5, dict[str, int](), [0, 1.5]
        self.flag, self.beta, self.log, self.last = False, 1.0, list[int](), 0

    def reset(self) -> None:
        self.calls, self.flag, self.beta = 0, False, 1.0
        self.rows.clear()

    def __call__(self, model: nn.Module, x: mx.array) -> mx.array:
        kind, loss = self.kind, squares(model, x)
        if kind == "counts":
            self.calls += 1
            self.seconds += 0.25
            self.rows["rows"] = self.rows.get("rows", 0) + len(x)
            self.counts[1] += 2
            self.flag = True
            Agent.total += 1
        elif kind == "model":
            model.calls += 1
        elif kind == "log":
            self.log.append(len(x))
        elif kind == "last":
            self.last = len(x)
        elif kind == "products":
            self.beta *= 0.9
        elif kind == "circle":
            self.calls = (self.calls + 1) % 3
        elif kind == "a flag that matters":
            loss = loss * (1.0 if self.flag else 0.1)
            self.flag = True
        elif kind == "a number that matters":
            self.calls += 1
            loss = loss * (0.5 if self.calls >= 4 else 1.0)
        elif kind == "numbered":
            loss = loss * self.rows.setdefault(str(len(x)), 1 + len(self.rows))
        elif kind == "draws later":
            self.calls += 1
            loss = loss * (random.random() if self.calls > 3 else 1.0)
        return loss

    def shown(self) -> Any:
        return {**vars(self), "rows": dict(self.rows), "log": list(self.log), "counts": list(self.counts)}, Agent.total


def agent(kind: str, rows: tuple[int, ...], resets: tuple[int, ...]) -> Make:
    def make() -> Made:
        it, model = Agent(kind), nn.Linear(4, 3)
        model.calls = 0
        between = lambda number: it.reset() if number in resets else None  # noqa: E731
        return Made(it, lambda: (it.shown(), model.calls), between, model, optim.Adam(0.05), rows=rows)

    return make


KINDS = (
    "counts",
    "model",
    "log",
    "last",
    "products",
    "circle",
    "a flag that matters",
    "a number that matters",
    "numbered",
    "draws later",
)
for kind, (length, rows), resets in itertools.product(KINDS, ROWS.items(), ((), (1,), (5,), (1, 6))):
    name = f"an agent: {kind}, {length}{', set back at ' * bool(resets)}{' and '.join(map(str, resets))}"
    add("model" if kind == "model" else "object", name, agent(kind, rows, resets))


@program("object")
def a_meter_of_arrays_and_numbers() -> Made:
    meter = types.SimpleNamespace(sum=mx.array(0.0), count=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = squares(model, x)
        meter.sum = meter.sum + mx.stop_gradient(loss) * len(x)
        meter.count += len(x)
        return loss

    return Made(loss_fn, lambda: meter, rows=(8, 8, 5))


def what_others_add(how: str) -> Make:
    """A count on the model, to which another loss adds too, or the user who calls the loss."""

    def make() -> Made:
        model, optimizer, by_hand = nn.Linear(4, 3), optim.Adam(0.05), Box(None)
        model.calls = 0

        def one(model: nn.Module, x: mx.array) -> mx.array:
            model.calls += 1
            return squares(model, x) * (1 + 0.1 * model.calls)

        def other(model: nn.Module, x: mx.array) -> mx.array:
            model.calls += 1
            return squares(model, x) * (1 - 0.01 * model.calls)

        def between(number: int) -> None:
            if how == "the loss by hand" and number:
                by_hand.value = one(model, rows_of_normals(number))

        parts = [Made(each, lambda: (model.calls, by_hand), between, model, optimizer) for each in (one, other)]
        parts[0].others = parts[1:] if how == "another loss" else ()
        return parts[0]

    return make


for how in ("another loss", "the loss by hand"):
    add("model", f"a count on the model to which others add: {how}", what_others_add(how))


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def add_to(place: Any, key: Any) -> None:
    if isinstance(place, dict):
        place[key] = place.get(key, 0) + 1
    elif isinstance(place, list):
        place[key] += 1
    else:
        setattr(place, key, getattr(place, key) + 1)


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "dict": (lambda: {"n": 0}, lambda it: add_to(it, "n")),
    "empty dict": (dict, lambda it: add_to(it, "n")),
    "counter": (collections.Counter, lambda it: it.update(["n"])),
    "default": (lambda: collections.defaultdict(int), lambda it: add_to(it, "n")),
    "list": (lambda: [0, 1.5], lambda it: add_to(it, 1)),
    "object": (lambda: types.SimpleNamespace(n=0), lambda it: add_to(it, "n")),
    "slots": (Slotted, lambda it: add_to(it, "count")),
    "log": (list, lambda it: it.append(1)),
    "queue": (lambda: collections.deque(maxlen=4), lambda it: it.append("a")),
}


def contents(it: Any) -> Any:
    if isinstance(it, Slotted | types.SimpleNamespace):
        return it.count if isinstance(it, Slotted) else dict(vars(it))
    return list(it.items()) if isinstance(it, dict) else list(it)


def holder(kind: str, how: str, every: int) -> Make:
    """What is added goes to the object that is there."""

    def make() -> Made:
        begin, add_one = HOLDERS[kind]
        state, known = types.SimpleNamespace(kept=begin()), [begin() for _ in range(3)]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            add_one(state.kept)
            return squares(model, x)

        def between(number: int) -> None:
            if how == "in turns":
                state.kept = known[number % 3]
            elif number % every == 0 and how == "replaced":
                state.kept = begin()
            elif number % every == 0 and isinstance(state.kept, dict | collections.deque) and kind != "dict":
                state.kept.clear()

        return Made(loss_fn, lambda: (contents(state.kept), [contents(each) for each in known]), between)

    return make


for kind, how, every in itertools.product(HOLDERS, ("replaced", "cleared", "in turns"), (1, 3)):
    add(
        "object",
        f"a count in a {kind} that is {how}{f' at every {every}rd call' * (every > 1)}",
        holder(kind, how, every),
    )


class Noting:
    """Counts behind a property, whose setter notes each time that it is called."""

    def __init__(self) -> None:
        self._count, self.sets = 0, 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value
        self.sets += 1


@program("object")
def a_setter_is_called_once_in_a_call() -> Made:
    noting = Noting()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        noting.count += 1
        return squares(model, x)

    return Made(loss_fn, lambda: (noting.count, noting.sets))


@program("object")
def keys_that_a_loss_makes_keep_their_order() -> Made:
    kept: dict[str, int] = {}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        for name in ("seen", "tokens", "calls"):
            add_to(kept, name)
        return squares(model, x)

    return Made(loss_fn, lambda: kept)


def raising(how: str, at: int) -> Make:
    """What a loss adds before it raises stays."""

    def make() -> Made:
        state, model = types.SimpleNamespace(calls=0, log=[], bad=False), nn.Linear(4, 3)
        model.calls = 0

        def loss_fn(model: nn.Module, x: mx.array, kind: str) -> mx.array:
            state.calls += 1
            state.log.append(1)
            model.calls += 1
            loss = squares(model, x)
            if state.bad or kind == "bad" or len(x) == 5:
                raise ArithmeticError("a bad batch")
            return loss

        def batch(number: int) -> tuple[Any, ...]:
            is_bad = number == at
            x = rows_of_normals(number, 5 if how == "shape" and is_bad else 3)
            return x, "bad" if how == "text" and is_bad else "good"

        between = lambda number: setattr(state, "bad", how == "flag" and number == at)  # noqa: E731
        return Made(loss_fn, lambda: (state, model.calls), between, model, batch=batch)

    return make


for how, at in itertools.product(("flag", "text", "shape"), (0, 1, 4)):
    add("object", f"a loss that counts and raises by a {how} at call {at}", raising(how, at))


def raises_once(at: int) -> Make:
    """A loss that counts, and raises at one of its calls."""

    def make() -> Made:
        calls = [0]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            calls[0] += 1
            if calls[0] == at:
                raise ArithmeticError
            return squares(model, x)

        return Made(loss_fn, lambda: calls)

    return make


for at in (1, 2, 4):
    add("closure", f"a loss that counts in a list and raises at call {at}", raises_once(at))


@dataclasses.dataclass
class Held:
    """An argument that a loss counts and logs in."""

    counts: dict[str, int]
    log: list[int]


class Now:
    """A loss that does something at some of its calls; the kind says what."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls, self.epoch, self.last, self.best = kind, 0, 0, None, 0.0
        self.log: list[Any] = []
        self.tables: tuple[dict[str, int], ...] = ({}, collections.defaultdict(int), collections.Counter())
        self.held = Held({}, [])
        self.pair = types.SimpleNamespace(a=[], b=[])

    def __call__(self, model: nn.Module, x: mx.array, held: Held | None = None) -> mx.array:
        kind, loss = self.kind, squares(model, x)
        short = len(x) < 8
        if kind.startswith("arrays"):
            self.calls += 1
            if self.calls % int(kind[-1]) == 0:
                self.log.append(mx.stop_gradient(loss))
                self.last = {"loss": mx.stop_gradient(loss)}
        elif kind == "an epoch by the last batch":
            self.epoch += short
            loss = loss * 0.8**self.epoch
        elif kind == "an epoch that others read":
            if short:
                self.epoch += 1
                return loss
            loss = loss * (1 + 0.1 * min(self.epoch, 3))
        elif kind == "set back by the last batch":
            self.calls += 1
            if short:
                self.calls = 0
        elif kind == "counts by rows":
            for table in self.tables:
                table["rows"] = table.get("rows", 0) + len(x)
            self.rows = getattr(self, "rows", 0) + len(x)
            rows = [self.rows, *(table["rows"] for table in self.tables)]
            loss = loss * (1.0 if max(rows) < 60 else 0.3)
        elif kind == "the second call":
            self.calls += 1
            if self.calls == 2:
                model.stage, model.mode = 1, "b"
        elif kind == "in an argument":
            assert held is not None
            held.counts["calls"] = held.counts.get("calls", 0) + 1
            held.log.append(len(x))
            loss = loss * held.counts["calls"]
        elif kind == "in turns":
            self.pair.a.append(len(x))
        return loss


def now(kind: str, rows: tuple[int, ...]) -> Make:
    """What a loss does at some calls, or for some batches."""

    def make() -> Made:
        model, loss_fn = nn.Linear(4, 3), Now(kind)
        model.stage, model.mode = 0, "a"

        def between(number: int) -> None:
            if kind == "in turns" and number and number % 3 == 0:
                loss_fn.pair.a, loss_fn.pair.b = loss_fn.pair.b, loss_fn.pair.a

        def batch(number: int) -> tuple[Any, ...]:
            x = rows_of_normals(number, rows[number % len(rows)])
            return (x, loss_fn.held) if kind == "in an argument" else (x,)

        return Made(loss_fn, lambda: (vars(loss_fn), model.stage, model.mode), between, model, batch=batch, calls=14)

    return make


NOW = """arrays at every 2, arrays at every 3, arrays at every 7, an epoch by the last batch, an epoch that others read,
set back by the last batch, counts by rows, the second call, in an argument, in turns"""
for kind, (length, rows) in itertools.product(NOW.replace("\n", " ").split(", "), ROWS.items()):
    add("object", f"what a loss does now and then: {kind}, {length}", now(kind, rows))


SOURCE = """
def by_get():
    global seen
    seen = globals().get("seen", 0) + 6
    return seen
def by_try():
    global seen
    try:
        seen += 6
    except NameError:
        seen = 6
    return seen
def loss_fn(model, x):
    return (model(x) ** 2).mean() * (1.0 if count() < 60 else 0.3)
"""


def global_made(tries: bool) -> Make:
    """A global that the first call makes."""

    def make() -> Made:
        space: dict[str, Any] = {}
        exec(SOURCE, space)
        space["count"] = space["by_try" if tries else "by_get"]
        return Made(space["loss_fn"], lambda: space["seen"], optimizer=optim.SGD(0.001), calls=16)

    return make


for tries in (False, True):
    add("closure", f"a global that the first call makes{', by an error' if tries else ''}", global_made(tries))


def two_tasks(by: str) -> Make:
    """A text says which of two tasks a call is for; both count in one number."""

    class Tasks:
        calls, task = 0, "a"

        def loss(self, model: nn.Module, x: mx.array, task: str | None = None) -> mx.array:
            self.calls += 1
            loss = squares(model, x)
            return loss if (task or self.task) == "a" else 2 * loss

    def make() -> Made:
        tasks = Tasks()

        def batch(number: int) -> tuple[Any, ...]:
            return (rows_of_normals(number), *(["ab"[number % 2]] if by == "argument" else []))

        between = lambda number: setattr(tasks, "task", "ab"[number % 2])  # noqa: E731
        return Made(tasks.loss, lambda: tasks.calls, between, batch=batch)

    return make


for by in ("argument", "attribute"):
    add("object", f"a count beside two tasks by an {by}", two_tasks(by))


def exact(by: float, first: float) -> Make:
    """A float that the loss adds to is the plain loop's to the bit."""

    class Warm:
        time, kind = float(first), 0.0

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.time += by
            self.kind = 0 if self.kind == 0.0 else self.kind
            return squares(model, x)

    def make() -> Made:
        warm = Warm()

        def between(number: int) -> None:
            if number % 7 == 3:
                warm.time, warm.kind = warm.time * 0.98, 0.0

        return Made(warm.loss, lambda: (warm.time.hex(), repr(warm.kind)), between, calls=40)

    return make


for by, begun in ((0.1, 3.92), (0.001, 0), (1 / 3, 3.92)):
    add("object", f"a float to which the loss adds {by:.3f}", exact(by, begun))


@program("closure")
def a_count_that_is_returned() -> Made:
    counted: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> tuple[mx.array, dict[str, Any]]:
        counted.append(1)
        return squares(model, x), {"step": len(counted), "texts": [f"step {len(counted)}"]}

    return Made(loss_fn)
