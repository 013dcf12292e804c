"""Counts by which a loss decides something."""

from __future__ import annotations

import collections
import itertools
import math
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
    Net,
    Place,
    add,
    one_batch,
    program,
    squares,
)


def deciding(decide: Callable[[int], object]) -> Make:
    def build() -> Made:
        count = [0]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            count[0] += 1
            return squares(model, x) * (2.0 if decide(count[0]) else 1.0)

        return Made(loss_fn, lambda: count[0])

    return build


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
}.items():
    add("closure", f"a count by {name}", deciding(decide))


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


@program("model")
def milestones_of_a_list_on_the_model() -> Made:
    def act(model: Any, x: mx.array) -> None:
        model._count[0] += 1
        if model._count[0] in model._table:
            model._done.add("warm-up")

    model = Net(act)
    model.encoder.eval()
    model._count, model._table = [0], {7: 0.3, 20: 0.6}.keys()
    return Made(squares, lambda: (model._count, sorted(model._done)), model=model)


add("model", "milestones in a NumPy array on the model", milestones(np.array([7, 20]), nested=False))
for nested in (False, True):
    add("model", f"milestones in a dict on the model, {nested}", milestones({7: 0.3}, nested))
    add("model", f"milestones in a set on the model, {nested}", milestones({7, 20}, nested))


class Counter:
    """Counts in an attribute, and decides something at one number of calls."""

    def __init__(self) -> None:
        self.calls, self.limit, self.milestones, self.table = 0, 37, [12, 37], {37: 3.0}
        self.kept = {12, 37}

    def by_match(self) -> float:
        match self.calls:
            case 37:
                return 4.0
        return 1.0


def twice(count: int) -> float:
    return 2.0 if count == 37 else 1.0


DECIDES: dict[str, Callable[[Counter], float]] = {
    "a constant": lambda it: 2.0 if it.calls == 37 else 1.0,
    "a rest": lambda it: 2.0 if it.calls % 23 == 7 else 1.0,
    "no rest": lambda it: 1.0 if it.calls % 23 else 3.0,
    "a quotient": lambda it: 2.0 if it.calls // 17 == 2 else 1.0,
    "a rest of a quotient": lambda it: 2.0 if divmod(it.calls, 7)[0] % 5 == 4 else 1.0,
    "some constants": lambda it: 2.0 if it.calls in (13, 37) else 1.0,
    "a pattern": Counter.by_match,
    "in a function": lambda it: twice(it.calls),
    "an attribute": lambda it: 2.0 if it.calls == it.limit else 1.0,
    "a list": lambda it: 2.0 if it.calls in it.milestones else 1.0,
    "a set": lambda it: 2.0 if it.calls in it.kept else 1.0,
    "a dict": lambda it: it.table.get(it.calls, 1.0),
}


def decided(kind: str, first: bool) -> Make:
    """A loss that decides something at one call only."""

    def make() -> Made:
        counter, decide = Counter(), DECIDES[kind]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            counter.calls += first
            scale = decide(counter)
            counter.calls += not first
            return squares(model, x) * scale

        return Made(loss_fn, lambda: counter.calls, optimizer=optim.SGD(0.01), calls=40)

    return make


for kind in DECIDES:
    for first in (False, True):
        add(
            "object", f"a count that decides once by {kind}, {'before' if first else 'behind'} it", decided(kind, first)
        )


@program("object")
def counter_beside_numbers_that_it_is_not_compared_with() -> Made:
    counter = Counter()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        counter.calls += 1
        return squares(model, x) * (2.0 if counter.limit == 37 and x.shape[0] != 1500 else 1.0)

    return Made(loss_fn, lambda: counter.calls)


# what a count that goes on from another one than 0 comes to
COUNTED: dict[str, Callable[[int], object]] = {
    "a remainder": lambda count: count % 40 == 5,
    "a range of remainders": lambda count: count % 16 < 3,
    "two remainders": lambda count: count % 30 in (4, 7),
    "a share of a period": lambda count: (count % 50) / 50 < 0.1,
    "a remainder of a quotient": lambda count: (count // 12) % 3 == 1,
    "the rest of a division": lambda count: divmod(count, 50)[1] == 2,
    "the last bits": lambda count: count & 31 == 3,
    "a whole number": lambda count: int(count / 20) % 2,
    "a rounded number": lambda count: round(count / 20) % 2,
    "no remainder": lambda count: not count % 36,
}


def counts(place: str, start: int = 0) -> tuple[nn.Module, Callable[[], int], Callable[[], int]]:
    """Return a model, what counts by one at a place, and what gives the count."""
    model, agent, log = nn.Linear(4, 3), types.SimpleNamespace(calls=start), [0] * start
    model.calls = start
    holder: Any = agent if place == "a number" else model

    def count() -> int:
        if place == "a log":
            log.append(1)
            return len(log)
        holder.calls += 1
        return holder.calls  # type: ignore[no-any-return]

    return model, count, lambda: len(log) if place == "a log" else holder.calls


def decided_from(kind: str, start: int, place: str) -> Make:
    """A count that begins elsewhere may decide something."""

    def make() -> Made:
        model, count, seen = counts(place, start)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            calls, loss = count(), squares(model, x)
            return loss * 3 if COUNTED[kind](calls) else loss

        return Made(loss_fn, seen, model=model, optimizer=optim.SGD(1e-3), batch=one_batch, calls=60)

    return make


for kind, start, place in itertools.product(COUNTED, (7, 1007), ("a number", "a log", "a number of the model")):
    where: Place = "model" if "model" in place else "object"
    add(where, f"{place} from {start} that decides by {kind}", decided_from(kind, start, place))


BEHIND: dict[str, Callable[[int], bool]] = {
    "warm-up, then every": lambda n: n > 30 and n % 12 == 0,
    "every, after a warm-up": lambda n: n % 12 == 0 and n > 30,
    "a phase that begins there": lambda n: n > 18 and (n - 18) % 5 == 0,
    "an epoch and a batch": lambda n: divmod(n, 20) == (2, 7),
    "between": lambda n: 25 < n < 60 and not n % 11,
    "one that rounds": lambda n: n / 11 > 1 and (n - 11) % 25 == 0,
    "three": lambda n: n % 2 == 0 and n >= 20 and n // 16 == 2,
}


def decided_behind(kind: str, effect: str, place: str) -> Make:
    """What is decided behind another decision, as codebooks restart: `if steps > warmup and steps % every == 0`."""

    def make() -> Made:
        (model, count, seen), events = counts(place), collections.Counter[str]()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = squares(model, x)
            if BEHIND[kind](count()):
                if effect == "a count":
                    events["n"] += 1
                else:
                    loss = 0.5 * loss
            return loss

        return Made(loss_fn, lambda: (seen(), events["n"]), model=model, calls=70)

    return make


for kind, effect, place in itertools.product(
    BEHIND, ("the loss", "a count"), ("a number", "a log", "a number of the model")
):
    where = "model" if "model" in place else "object"
    add(where, f"{place} that decides {effect} by {kind}", decided_behind(kind, effect, place))


def set_back(place: str, at: int) -> Make:
    """A count that is set back again and again."""

    def make() -> Made:
        model = nn.Linear(4, 3)
        window = collections.deque[int](maxlen=12 if place == "a full deque" else None)
        agent = types.SimpleNamespace(calls=0, stage=1)
        model.calls = 0

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            if "deque" in place:
                window.append(len(x))
                calls = len(window)
            else:
                holder = agent if place == "a number" else model
                holder.calls += 1
                calls = holder.calls
            loss = squares(model, x)
            return loss * 3 if agent.stage == 2 and calls > 10 else loss

        def between(number: int) -> None:
            if number % 15 == 0:
                agent.calls = model.calls = 0
                window.clear()
            if number == at:
                agent.stage = 2

        seen = lambda: (agent.calls, model.calls, window)  # noqa: E731
        return Made(loss_fn, seen, between, model, optim.SGD(1e-3), one_batch, calls=45)

    return make


for place, at in itertools.product(("a number", "a number of the model", "a deque", "a full deque"), (15, 27)):
    add("model" if "model" in place else "object", f"{place} that is set back, from {at} on", set_back(place, at))


class Schedule:
    """Counts calls of a loss; what it reads beside that is set later."""

    def __init__(self) -> None:
        self.calls, self.on, self.weight, self.phase, self.epoch = 0, False, 0.0, "warm", 0
        self.terms, self.table, self.log, self.scale = list[int](), dict[str, int](), list[int](), 1.0


# what is set after 12 steps, and what the loss reads of that
LATER: dict[str, tuple[Callable[[Schedule, nn.Module], object], Callable[[Schedule, nn.Module], bool]]] = {
    "a flag": (lambda it, _: setattr(it, "on", True), lambda it, _: it.on),
    "a weight": (lambda it, _: setattr(it, "weight", 0.1), lambda it, _: it.weight > 0),
    "a text": (lambda it, _: setattr(it, "phase", "full"), lambda it, _: it.phase == "full"),
    "an epoch": (lambda it, _: setattr(it, "epoch", 3), lambda it, _: it.epoch >= 3),
    "an item of a list": (lambda it, _: it.terms.append(1), lambda it, _: len(it.terms) > 0),
    "an item of a dict": (lambda it, _: it.table.update(on=1), lambda it, _: it.table.get("on", 0) == 1),
    "a new attribute": (lambda it, _: setattr(it, "more", 1), lambda it, _: hasattr(it, "more")),
    "a mode of the model": (lambda _, model: model.train(), lambda _, model: model.training),
    "an attribute of the model": (lambda _, model: setattr(model, "on", True), lambda _, model: "on" in vars(model)),
}


def set_later(kind: str, place: str, lengths: int) -> Make:
    """What is set later may decide something at every tenth call."""

    def make() -> Made:
        (model, count, seen), schedule, (change, is_on) = counts(place), Schedule(), LATER[kind]
        model.eval()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            calls, loss = count(), squares(model, x) * schedule.scale
            return loss * 3 if is_on(schedule, model) and calls % 10 == 0 else loss

        def between(number: int) -> None:
            if number == 12:
                change(schedule, model)
            schedule.scale = 1 + number // 5 * 0.1

        rows = [8 - number for number in range(lengths)]
        return Made(loss_fn, seen, between, model, optim.SGD(0.1), rows=rows, calls=32)

    return make


for kind, place, lengths in itertools.product(LATER, ("a number", "a log", "a number of the model"), (1, 3)):
    where = "model" if "model" in f"{kind} {place}" else "object"
    add(
        where,
        f"{kind} that is set later, beside {place}, batches of {lengths} lengths",
        set_later(kind, place, lengths),
    )
