"""Large dicts, lists and sets that a loss reads."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.reach.registry import (
    Made,
    Make,
    add,
)

COUNT = 5000
MAKERS: dict[str, Callable[[], Any]] = {
    "dict of numbers": lambda: {f"key {k}": k for k in range(COUNT)},
    "dict by number": lambda: {k: k / 2 for k in range(COUNT)},
    "OrderedDict": lambda: collections.OrderedDict((k, k) for k in range(COUNT)),
    "Counter": lambda: collections.Counter({k: k + 1 for k in range(COUNT)}),
    "list of numbers": lambda: list(range(COUNT)),
    "list of texts": lambda: [f"{k}" for k in range(COUNT)],
    "list of tuples": lambda: [(k, f"{k}") for k in range(COUNT)],
    "set": lambda: set(range(COUNT)),
}


def _total(items: Any) -> float:
    """A number of all that there is, with order and types."""
    items = (
        list(items.items()) if isinstance(items, dict) else sorted(items, key=repr) if isinstance(items, set) else items
    )
    parts = (len(f"{item!r}") * (1 + at % 7) for at, item in enumerate(items))
    return 1.0 + (sum(parts) % 1009) / 1009


def _put(items: Any, value: Any) -> None:
    if isinstance(items, set):
        items.add(value)
    elif isinstance(items, dict):
        items[next(iter(items))] = value
    else:
        items[COUNT // 2] = value


def _more(items: Any, value: Any) -> None:
    if isinstance(items, set):
        items.add(-COUNT)
    elif isinstance(items, dict):
        items["another"] = value
    else:
        items.append(value)


def _fewer(items: Any, value: Any) -> None:
    del value
    items.pop(next(iter(items))) if isinstance(items, dict) else items.pop()


def _order(items: Any, value: Any) -> None:
    del value
    if isinstance(items, dict):
        first = next(iter(items))
        items[first] = items.pop(first)
    elif isinstance(items, list):
        items[0], items[-1] = items[-1], items[0]


CHANGES: dict[str, Callable[[Any, Any], None]] = {"put": _put, "more": _more, "fewer": _fewer, "order": _order}


def one_item(kind: str, change: str, attribute: str) -> Make:
    """A change of one item."""

    def make() -> Made:
        holder = SimpleNamespace(items=MAKERS[kind](), name="items")

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            items = holder.items if attribute == "items" else getattr(holder, holder.name)
            return (model(x) - 1).square().mean() * _total(items)

        def between(number: int) -> None:
            if number in (2, 3, 9):
                CHANGES[change](holder.items, (True, 1.0, "text", 7)[number % 4])
            if number == 5:
                holder.items = MAKERS[kind]()  # another one with the same items
            if number == 7:
                CHANGES[change](holder.items, 1)
                _put(holder.items, 2)

        return Made(loss_fn, between=between, optimizer=optim.SGD(0.005))

    return make


for kind, change, attribute in itertools.product(MAKERS, CHANGES, ("items", "made")):
    add("object", f"a large {kind} by {attribute}: {change}", one_item(kind, change, attribute))
