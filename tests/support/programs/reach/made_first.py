"""What a loss makes at its first call, and keeps."""

from __future__ import annotations

import collections
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from support.programs.reach.registry import (
    Made,
    Make,
    Place,
    add,
    program,
    squares,
)


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
    where: Place = "object" if place == "agent" else "model"
    for uses in (False, True):
        add(where, f"{name}, {uses}", made_first(kind, place, uses))
    add(where, f"{name} beside a draw", made_first(kind, place, True, True))


@program("object")
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


for uses in (False, True):
    add("model", f"an attribute of a dict on the model, {uses}", counting(uses))
