"""Sets, slots, names and containers of one's own, which a loss changes or deletes at some calls."""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from support.programs.reach.registry import (
    Made,
    Make,
    add,
    squares,
)

SIZES = {"one": (3,), "two": (3, 5), "three": (3, 5, 4)}


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
    add(
        "model" if place == "model" else "object",
        f"a set on the {place}: {kind} at every {every}th call",
        changing(kind, place, every),
    )


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
    add(
        "closure" if place in ("global", "cell") else "object",
        f"{place}: {kind} deleted at its first call",
        deleting(place, value, 1),
    )
    add(
        "closure" if place in ("global", "cell") else "object",
        f"{place}: {kind} deleted at its tenth call",
        deleting(place, value, 10),
    )


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

        return Made(loss_fn, lambda: (list(owner._log), owner._log.total), model=model, rows=SIZES[sizes])

    return make


for kind, place, sizes in itertools.product((Log, Queue, Members), ("model", "layer", "agent"), ("one", "two")):
    add(
        "object" if place == "agent" else "model",
        f"a {kind.__name__} of its own on the {place}, sizes {sizes}",
        logging_to(kind, place, sizes),
    )
