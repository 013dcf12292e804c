"""Large dicts, lists and sets that a loss reads: a change of any one item is seen, whenever it comes."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import assert_same

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


@pytest.mark.parametrize("attribute", ["items", "made"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.filterwarnings("ignore:faststep.*what changes in them is not watched:RuntimeWarning")
def test_a_change_of_one_item_is_seen(kind: str, change: str, attribute: str) -> None:
    def run(native: bool) -> list[float]:
        mx.random.seed(0)
        holder = SimpleNamespace(items=MAKERS[kind](), name="items")
        model, optimizer = nn.Linear(4, 1), optim.SGD(0.005)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            items = holder.items if attribute == "items" else getattr(holder, holder.name)
            return (model(x) - 1).square().mean() * _total(items)

        step, grad, losses = Step(model, optimizer, loss_fn), nn.value_and_grad(model, loss_fn), list[float]()
        for number in range(24):
            if number in (2, 3, 9, 17):
                CHANGES[change](holder.items, (True, 1.0, "text", 7)[number % 4])
            if number == 12:
                holder.items = MAKERS[kind]()  # another one with the same items
            if number == 15:
                CHANGES[change](holder.items, 1)
                _put(holder.items, 2)
            x = mx.full((2, 4), 1.0 + number % 3)
            if native:
                losses.append(step(x).loss.item())
                continue
            loss, gradients = grad(model, x)
            optimizer.update(model, gradients)
            losses.append(loss.item())
        return losses

    assert_same(run(native=True), run(native=False), 2e-6)


@pytest.mark.parametrize("in_place", [False, True])
def test_former_contents_of_a_large_numpy_array_are_not_kept(in_place: bool) -> None:
    holder = SimpleNamespace(table=np.ones((512, 512), np.float32))
    step = Step(nn.Linear(512, 1), optim.SGD(1e-3), lambda model, x: model(x @ mx.array(holder.table)).square().mean())
    seen = list[int]()
    for number in range(40):
        if in_place:
            holder.table[0, 0] = number
        else:
            holder.table = np.full((512, 512), number / 40, np.float32)
        mx.eval(step(mx.ones((2, 512))).loss)
        seen.append(mx.get_active_memory())
    assert seen[-1] - seen[4] < holder.table.nbytes


def test_a_look_that_takes_most_of_a_step_is_told_of_by_name() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.data, self.kind = nn.Linear(4, 1), [np.zeros((8, 4)) for _ in range(4000)], "square_loss"

        def square_loss(self, z: mx.array) -> mx.array:
            return z.square().mean()

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            # of what no layer gives, so that its weights never rest, which another warning would tell of
            return getattr(self, self.kind)(model(x) - mx.sign(x[:, :1]))  # type: ignore[no-any-return]

    trainer = Trainer()
    step = Step(trainer.model, optim.SGD(0.1), trainer.loss)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while not told and step.stats.steps < 1000:
            step(mx.random.normal((3, 4), key=mx.random.key(step.stats.steps)))
    assert len(told) == 1
    assert "to look at what the loss reaches, most of it in self.data (4001 objects)" in str(told[0].message)
    assert step.stats.steps >= 100
