"""What a loss takes or changes for some batches, in some order, or in turns."""

from __future__ import annotations

import collections
import itertools
import operator
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Made,
    Make,
    Place,
    add,
    program,
    rows_of_normals,
    squares,
)

Draw = Callable[[], float]
DRAWS: dict[str, Callable[[], Draw]] = {
    "numpy": lambda: np.random.default_rng(1).random,
    "numpy of the process": lambda: (np.random.seed(1), np.random.rand)[1],
    "a counter": lambda: counter([0]),
    "a counter in a dict": lambda: counter({0: 0}),
    "a generator": lambda: (1 + 0.5 * number for number in range(99)).__next__,
}


def counter(numbers: Any) -> Draw:
    def count() -> float:
        numbers[0] += 1
        return 1 + 0.1 * numbers[0]

    return count


class Counting(nn.Module):
    """A layer that counts its calls, and does something else at each third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self._past = nn.Linear(4, 2), 0, [0]

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        self._past.append(self.calls)
        return self.linear(x) * (1.0 if self.calls % 3 else 0.5) + 0.1 * self._past[-2]


def drawn_at_some(kind: str, by: str, order: str) -> Make:
    """What is drawn for some batches: the call behind one that draws may be one that does not."""

    def make() -> Made:
        draw, model, table = DRAWS[kind](), nn.Linear(4, 2), dict[str, int]()
        state = types.SimpleNamespace(on=False, draws=None)

        def loss_fn(model: nn.Module, x: mx.array, on: bool) -> mx.array:
            draws = {
                "shape": len(x) == 8,
                "argument": on,
                "mode": model.training,
                "flag": state.on,
                "key": "on" in table,
                "function": state.draws is not None and state.draws(),
            }
            return squares(model, x) * (draw() if draws[by] else 1.0)

        def batch(number: int) -> tuple[Any, ...]:
            state.on = on = order[number] == "A"
            state.draws = (lambda: True) if on else None
            model.train(on)
            table.update({"on": 1} if on else {})
            if not on:
                table.pop("on", None)
            return rows_of_normals(number, 8 if on or by != "shape" else 6), on if by == "argument" else False

        return Made(loss_fn, model=model, optimizer=optim.SGD(0.1), batch=batch, calls=len(order))

    return make


for kind, by, order in itertools.product(
    DRAWS, ("shape", "argument", "mode", "flag", "key", "function"), ("ABAA", "BBBBABBBBABBBBA")
):
    places: dict[str, Place] = {"numpy": "process", "numpy of the process": "process", "a generator": "iterator"}
    add(places.get(kind, "closure"), f"{kind} for some batches, by a {by}, {order}", drawn_at_some(kind, by, order))


def counted_by_model(by: str, odd: int) -> Make:
    """What a model counts goes on whatever the next call is like."""

    def make() -> Made:
        model, optimizer = Counting(), optim.Adam(0.1)
        optimizer.init(model.trainable_parameters())

        def loss_fn(model: nn.Module, x: mx.array, flag: bool) -> mx.array:
            return squares(model, x)

        def batch(number: int) -> tuple[Any, ...]:
            is_odd = number == odd
            if by == "mode":
                model.train(is_odd)
            if by == "frozen":
                model.linear.freeze(keys="bias") if is_odd else model.unfreeze()
            return rows_of_normals(number, 6 if is_odd and by == "shape" else 8), is_odd and by == "argument"

        return Made(loss_fn, lambda: (model.calls, model._past), model=model, optimizer=optimizer, batch=batch)

    return make


for by, odd in itertools.product(("shape", "mode", "frozen", "argument"), range(3)):
    add("model", f"what a model counts, another {by} at call {odd}", counted_by_model(by, odd))


class Linked:
    """An object that leads to the next one."""

    def __init__(self, weight: float) -> None:
        self.weight, self.next = weight, self


def linked(*weights: float) -> Linked:
    objects = [Linked(weight) for weight in weights]
    for one, other in zip(objects, objects[1:] + objects[:1], strict=True):
        one.next = other
    return objects[0]


Weigh = Callable[[nn.Module], Any]


def in_cell() -> Weigh:
    now = linked(1.0, 1.5, 2.0)

    def weigh(_: nn.Module) -> float:
        nonlocal now
        now = now.next
        return now.weight

    return weigh


def on_model() -> Weigh:
    def weigh(model: nn.Module) -> float:
        model.now = getattr(model, "now", None) or linked(1.0, 1.5, 2.0)
        model.now = model.now.next
        return float(model.now.weight)

    return weigh


def in_turns(make: Callable[[Any], Any]) -> Callable[[], Weigh]:
    def build() -> Weigh:
        table = {name: make(weight) for name, weight in zip("abc", (1.0, 1.5, 2.0), strict=True)}

        def weigh(_: nn.Module) -> Any:
            name = next(iter(table))
            table[name] = table.pop(name)
            return table[name]

        return weigh

    return build


def rotated(make: Callable[[float], Any], read: Callable[[Any], Any]) -> Callable[[], Weigh]:
    def build() -> Weigh:
        items = collections.deque(make(weight) for weight in (1.0, 1.5, 2.0))

        def weigh(_: nn.Module) -> Any:
            items.rotate(1)
            return read(items[0])

        return weigh

    return build


def two_views() -> Weigh:
    base = np.ones((2, 3))
    row = base[0]

    def weigh(_: nn.Module) -> float:
        row[0] += 0.5
        return float(base[0, 0])

    return weigh


def late(count: Callable[[], int]) -> Weigh:
    return lambda _: 3.0 if count() >= 6 else 1.0


def in_list() -> Weigh:
    numbers = [0, 5]

    def count() -> int:
        numbers[0] += 1
        return numbers[0]

    return late(count)


def by_default() -> Weigh:
    box = types.SimpleNamespace()

    def count() -> int:
        box.calls = getattr(box, "calls", 0) + 1
        return int(box.calls)

    return late(count)


def semaphore() -> Weigh:
    permits = threading.Semaphore(100)
    return lambda _: 1.0 + 0.0 * permits.acquire()


def batches_of_a_queue() -> Weigh:
    full: queue.Queue[float] = queue.Queue(4)

    def fill() -> None:
        for number in range(8):
            full.put(1 + 0.5 * number)

    threading.Thread(target=fill, daemon=True).start()
    return lambda _: full.get(timeout=60)


CHANGES: dict[str, Callable[[], Weigh]] = {
    "an object in a cell": in_cell,
    "an object on the model": on_model,
    "the order of a dict": in_turns(float),
    "the order of a dict of arrays": in_turns(mx.array),
    "a deque of tuples": rotated(lambda weight: (0, weight), lambda item: item[1]),
    "a deque of objects": rotated(Linked, lambda item: item.weight),
    "a deque of numbers": rotated(float, float),
    "an array and its view": two_views,
    "a number in a list, later": in_list,
    "a number by its default, later": by_default,
    "a semaphore": semaphore,
    "a queue": batches_of_a_queue,
}


def in_turns_at_each_call(kind: str) -> Make:
    """What a loss changes in turns."""

    def make() -> Made:
        weigh = CHANGES[kind]()
        return Made(lambda model, x: squares(model, x) * weigh(model), optimizer=optim.SGD(0.1), calls=8)

    return make


for kind in CHANGES:
    add(
        "iterator" if kind == "a queue" else "model" if "model" in kind else "object",
        f"{kind} in turns",
        in_turns_at_each_call(kind),
    )


class Teacher(nn.Module):
    """A module that counts its calls, beside attributes of other kinds."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        return self.layer(x)


def of_a_teacher(attribute: Any, decides: bool) -> Make:
    """A count on another module, beside attributes of other kinds."""

    def make() -> Made:
        teacher = Teacher(attribute=attribute)
        teacher.freeze()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = mx.square(model(x) - mx.stop_gradient(teacher(x))).mean()
            return loss * 2 if decides and teacher.calls % 5 == 4 else loss

        return Made(loss_fn, lambda: teacher.calls, model=nn.Linear(4, 3), optimizer=optim.SGD(0.1), calls=14)

    return make


ATTRIBUTES = {"none": None, "a namespace": types.SimpleNamespace(width=4), "a function": squares, "one of MLX": nn.gelu}
for (name, attribute), decides in itertools.product(ATTRIBUTES.items(), (False, True)):
    add(
        "model",
        f"a count on a teacher with {name}{', that decides' if decides else ''}",
        of_a_teacher(attribute, decides),
    )


def counted_by_some(counts_in: str) -> Make:
    """One kind of call counts, another one decides by the count."""

    def make() -> Made:
        model, optimizer = Teacher(), optim.SGD(0.1)

        def loss_fn(model: Any, x: mx.array, mode: str) -> mx.array:
            if len(x) == 8 and mode != "read":
                model.calls += 1
            loss = squares(model.layer, x)
            if (len(x) < 8 or mode == "read") and model.calls >= 7:
                loss = loss + 0.3 * mx.abs(model.layer(x)).mean()
            return loss

        def counting(model: Any, x: mx.array, mode: str) -> mx.array:
            model.calls += 1
            return squares(model.layer, x)

        def batch(number: int) -> tuple[Any, ...]:
            which = number % 2
            x = rows_of_normals(number, 5 if which and counts_in == "long batches" else 8)
            return x, "read" if which and counts_in != "long batches" else "count"

        losses = [counting, loss_fn] if counts_in == "another loss" else [loss_fn]
        parts = [
            Made(each, lambda: model.calls, model=model, optimizer=optimizer, batch=batch, calls=24) for each in losses
        ]
        parts[0].others = parts[1:]
        return parts[0]

    return make


for counts_in in ("long batches", "a mode", "another loss"):
    add("model", f"a count on the model that only some calls make: {counts_in}", counted_by_some(counts_in))


def milestone(kind: str) -> Make:
    """A milestone among many numbers."""

    def make() -> Made:
        at = types.SimpleNamespace(call=0, share=1.0, milestones={16})
        at.shares = {2 + number: 1.0 if number < 14 else 0.2 for number in range(20)}
        at.events = [*((2 + number, "log") for number in range(12)), (14, "drop")]
        for number in range(14):
            setattr(at, f"size{number}", 300 + 7 * number)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            at.call += 1
            share = sum([at.size0, at.size1, at.size2, at.size3, at.size4, at.size5, at.size6, at.size7]) / 2496
            sizes = at.size8, at.size9, at.size10, at.size11, at.size12, at.size13
            if kind == "a set" and at.call in at.milestones:
                share = 0.2
            if kind == "a dict" and at.call in at.shares:
                share = at.shares[at.call]
            for number, event in at.events if kind == "a list of events" else ():
                if at.call == number and event == "drop":
                    share = 0.2
            return squares(model, x) * (share if sizes else 0)

        return Made(loss_fn, lambda: at.call, calls=20)

    return make


for kind in ("a set", "a dict", "a list of events"):
    add("object", f"a milestone among many numbers in {kind}", milestone(kind))


Counter = tuple[Callable[[Any], None], Callable[[Any], int]]


PLACES: dict[str, Counter] = {
    "an item of a list": (lambda m: operator.setitem(m.counts, 0, m.counts[0] + 1), lambda m: m.counts[0]),
    "a list as a whole": (lambda m: operator.setitem(m.counts, 0, m.counts[0] + 1), lambda m: sum(m.counts)),
    "a dict as a whole": (lambda m: m.seen.update(n=m.seen["n"] + 1), lambda m: sum(m.seen.values())),
    "a layer": (lambda m: setattr(m.layer, "calls", m.layer.calls + 1), lambda m: m.layer.calls),
}


def counted_anywhere(place: str) -> Make:
    """A count anywhere on the model is seen by calls that do not make it."""

    def make() -> Made:
        (add_one, read), model = PLACES[place], Teacher(counts=[0, 0], seen={"n": 0, "m": 0})
        model.layer.calls = 0

        def loss_fn(model: Any, x: mx.array, mode: str) -> mx.array:
            if mode == "count":
                add_one(model)
            loss = squares(model.layer, x)
            if mode == "read" and read(model) >= 7:
                loss = loss + 0.3 * mx.abs(model.layer(x)).mean()
            return loss

        batch = lambda number: (rows_of_normals(number, 8), ("count", "read")[number % 2])  # noqa: E731
        return Made(loss_fn, lambda: read(model), model=model, optimizer=optim.SGD(0.1), batch=batch, calls=24)

    return make


for place in PLACES:
    add("model", f"a count in {place} on the model", counted_anywhere(place))


def shared_cell(kind: str, decides: bool) -> Make:
    """A cell that functions share is one place."""

    def make() -> Made:
        other, count = 0, 0

        def tick() -> None:
            nonlocal count
            count += 1

        class Counter:
            def go(self) -> None:
                nonlocal count, other
                other, count = other + 1, count + 1

        counter = Counter()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            nonlocal count
            if kind != "a method":
                tick()
            if kind != "a helper":
                counter.go()
            count += 1
            loss = squares(model, x)
            return loss * (1 + count % 5) if decides else loss

        return Made(loss_fn, lambda: (count, other))

    return make


for kind, decides in itertools.product(("a helper", "a method", "both beside each other"), (False, True)):
    add(
        "closure",
        f"a cell that the loss shares with {kind}{', that decides' if decides else ''}",
        shared_cell(kind, decides),
    )


def shared_by_layers(kind: str, decides: bool) -> Make:
    """A count that parts of the model share, as statistics that are handed to every layer, and layers that are tied."""

    class Layer(nn.Module):
        def __init__(self, shared: Any) -> None:
            super().__init__()
            self.linear, self._shared, self._calls = nn.Linear(4, 4), shared, [0]

        def __call__(self, x: mx.array) -> mx.array:
            self._calls[0] += 1
            if kind == "a dict":
                self._shared["calls"] += 1
            if kind == "a list":
                self._shared.append("call")
            return nn.relu(self.linear(x))

    def make() -> Made:
        shared: Any = {"calls": 0} if kind == "a dict" else []
        layer = Layer(shared)
        model = nn.Sequential(*([layer, layer] if kind == "a layer" else [layer, Layer(shared)]))

        def count() -> int:
            return {
                "a dict": lambda: shared["calls"],
                "a list": lambda: len(shared),
                "a layer": lambda: layer._calls[0],
            }[kind]()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = squares(model, x)
            return loss * (1 + count() % 3) if decides else loss

        return Made(loss_fn, count, model=model)

    return make


for kind, decides in itertools.product(("a dict", "a list", "a layer"), (False, True)):
    add(
        "model",
        f"a count that layers share in {kind}{', that decides' if decides else ''}",
        shared_by_layers(kind, decides),
    )


def pruned(toggles: bool, begin: int) -> Make:
    """The first count on a model whose numbers are set before each call."""

    class Pruned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.progress, self.mode, self.pruned, self._log = 0.0, "dense", 0, list[str]()

        def __call__(self, x: mx.array, prune: bool) -> mx.array:
            if prune:
                self.pruned += 1
                self._log.append("pruned")
            scale = 1 + self.progress if self.mode == "dense" else 0.5
            return scale * super().__call__(x)

    def make() -> Made:
        model = Pruned()

        def loss_fn(model: nn.Module, x: mx.array, prune: bool) -> mx.array:
            return model(x, prune).square().mean()

        def between(number: int) -> None:
            model.progress = 0.1 * number
            if toggles and number % begin == 0:
                model.mode = "sparse" if model.mode == "dense" else "dense"

        batch = lambda number: (rows_of_normals(number), number >= begin)  # noqa: E731
        return Made(loss_fn, lambda: (model.pruned, model._log), between, model, batch=batch, calls=16)

    return make


for toggles, at in itertools.product((False, True), (2, 3, 5, 8)):
    add(
        "model",
        f"the first count on a model whose numbers are set, at call {at}{', with a mode' if toggles else ''}",
        pruned(toggles, at),
    )


@program("object")
def a_count_beside_numbers_that_change() -> Made:
    schedule = types.SimpleNamespace(calls=0, epoch=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        schedule.calls += 1
        return squares(model, x) * (1 + schedule.epoch)

    return Made(
        loss_fn,
        lambda: schedule,
        lambda number: setattr(schedule, "epoch", number // 6),
        optimizer=optim.SGD(1e-3),
        calls=20,
    )
