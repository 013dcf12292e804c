"""A bad batch long after the first one, where what the loss reaches has another structure at nearly every call."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten

CALLS, BAD = 110, {40, 41, 90}
TOTAL = [0]


class Row:
    def __init__(self, number: int) -> None:
        self.number, self.seen, self.notes = number, 0, list[int]()


class Slotted:
    __slots__ = ("notes", "number", "seen")

    def __init__(self, number: int) -> None:
        self.number, self.seen, self.notes = number, 0, list[int]()


class Net(nn.Module):
    def __init__(self, act: str) -> None:
        super().__init__()
        self.inner, self.norm, self.outer, self.act = nn.Linear(3, 8), nn.BatchNorm(8), nn.Linear(8, 3), act

    def __call__(self, x: mx.array) -> mx.array:
        activation = getattr(nn, self.act) if self.act else nn.relu
        return self.outer(activation(self.norm(self.inner(x))))  # type: ignore[no-any-return]


class Trainer:
    """It keeps what changes the structure, and averages and counts beside it."""

    def __init__(self, changes: Callable[[Trainer, mx.array], None], act: str) -> None:
        mx.random.seed(0)
        self.model, self.optimizer, self.changes = Net(act), optim.SGD(1e-4, momentum=0.5), changes
        self.rows, self.table, self.queue = list[Any](), dict[str, Any](), collections.deque[Any](maxlen=30)
        self.average, self.calls, self.flags = mx.zeros(()), 0, {"best": 1e9, "seen": [0]}
        self.members = set[int]()

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        loss = (model(x) - x).square().mean()
        self.average = 0.9 * self.average + 0.1 * mx.stop_gradient(loss)
        self.calls += 1
        self.flags["seen"][-1] += 2
        TOTAL[0] += 1
        self.changes(self, mx.stop_gradient(loss))
        return loss / (1e-3 + mx.stop_gradient(self.average))


def _only_the_loop(it: Trainer, loss: mx.array) -> None:
    if it.calls < 0:
        it.rows.append(loss.item())


def _rows(it: Trainer, loss: mx.array) -> None:
    it.rows.append({"step": it.calls, "of": ("a", it.calls)})


def _arrays(it: Trainer, loss: mx.array) -> None:
    it.rows.append(loss)


def _a_queue(it: Trainer, loss: mx.array) -> None:
    it.rows.append(loss)
    if len(it.rows) > 70:
        it.rows.pop(0)


def _keys(it: Trainer, loss: mx.array) -> None:
    it.table[f"call {it.calls}"] = {"loss": loss, "calls": [it.calls]}


def _attributes(it: Trainer, loss: mx.array) -> None:
    setattr(it, f"of_{it.calls}", it.calls)


def _objects(it: Trainer, loss: mx.array) -> None:
    it.rows.append(Row(it.calls))
    for row in it.rows[-3:]:
        row.seen += 1
        row.notes.append(it.calls)


def _objects_with_slots(it: Trainer, loss: mx.array) -> None:
    it.rows.append(Slotted(it.calls))
    for row in it.rows[-3:]:
        row.seen += 1
        row.notes.append(it.calls)


def _arrays_in_place(it: Trainer, loss: mx.array) -> None:
    it.table[f"{it.calls}"] = mx.zeros(())
    for key in list(it.table)[-3:]:
        it.table[key] += loss
    it.rows.append({"sum": mx.zeros((2,)), "notes": [mx.zeros(())]})
    for row in it.rows[-3:]:
        row["sum"][1] = row["sum"][1] + loss
        row["notes"][0] += 1


def _numpy_in_place(it: Trainer, loss: mx.array) -> None:
    it.rows.append((np.zeros(2), bytearray(2)))
    for counts, flags in it.rows[-3:]:
        counts[1] += 1
        flags[0] += 1


def _closures(it: Trainer, loss: mx.array) -> None:
    def counter() -> Callable[[int], int]:
        count = 0

        def add(more: int) -> int:
            nonlocal count
            count += more
            return count

        return add

    it.rows.append(counter())
    for add in it.rows[-3:]:
        add(1)


def _rows_of_the_loop_change(it: Trainer, loss: mx.array) -> None:
    for row in it.rows[-3:]:
        row["seen"] = row.get("seen", 0) + 1


def _members(it: Trainer, loss: mx.array) -> None:
    it.members.add(it.calls)
    it.queue.append({"step": it.calls})


CHANGES = {
    name[1:].replace("_", " "): change for name, change in dict(globals()).items() if name[:1] == "_" != name[1:2]
}
BY_THE_LOOP = {"only the loop", "rows of the loop change"}


def _state(value: Any) -> Any:
    if isinstance(value, mx.array):
        return [pytest.approx(each, rel=1e-3, abs=1e-6) for each in value.reshape(-1).tolist()]
    if isinstance(value, dict):
        return {key: _state(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, collections.deque)):
        return [_state(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if callable(value):
        return value(0)  # a counter
    if isinstance(value, Slotted):
        return [value.number, value.seen, value.notes]
    return _state(vars(value)) if isinstance(value, Row) else value


def run(changes: str, act: str, way: str) -> tuple[Any, ...]:
    trainer = Trainer(CHANGES[changes], act)
    TOTAL[0] = 0
    options: dict[str, Any] = {"nonfinite": "raise" if way == "raise" else "skip", "compile": way != "uncompiled"}
    step = Step(trainer.model, trainer.optimizer, trainer.loss, **options)
    grad = nn.value_and_grad(trainer.model, trainer.loss)
    for number in range(CALLS):
        if changes in BY_THE_LOOP:
            trainer.rows.append({"step": number, "average": float(number)})
        x = mx.random.normal((4, 3), key=mx.random.key(number))
        if way == "plain":
            if number not in BAD:
                _, gradients = grad(trainer.model, x)
                trainer.optimizer.update(trainer.model, gradients)
                mx.eval(trainer.model.state, trainer.optimizer.state, trainer.average)
        elif way == "raise" and number in BAD:
            with pytest.raises(FloatingPointError):
                step(x * float("nan"))
        else:
            step(x * float("nan") if number in BAD else x)
    known = ("model", "optimizer", "changes", "step")
    kept = {name: value for name, value in vars(trainer).items() if name not in known}
    return kept, TOTAL[0], [np.array(each) for _, each in tree_flatten(trainer.model.parameters())]


@pytest.mark.parametrize("way", ["skip", "raise", "uncompiled"])
@pytest.mark.parametrize("act", ["", "relu"], ids=["named", "by a made name"])
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.filterwarnings("ignore:faststep.*:RuntimeWarning")
def test_a_late_bad_batch_changes_nothing_where_the_structure_changes(changes: str, act: str, way: str) -> None:
    kept, total, weights = run(changes, act, way)
    expected, expected_total, expected_weights = run(changes, act, "plain")
    assert _state(kept) == _state(expected)
    assert total == expected_total
    for one, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


def test_a_history_that_the_loss_names_is_told_of() -> None:
    """Rows make another structure at each call, a list of numbers does not; nothing is traced again in a window."""
    for rows, window in ((True, 1), (True, 2), (False, 1)):
        trainer = Trainer(_only_the_loop, "")
        step = Step(trainer.model, trainer.optimizer, trainer.loss, accumulate=window)
        told = list[str]()
        for number in range(120):
            trainer.rows.append({"step": number} if rows else float(number))
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                step(mx.ones((4, 3)))
            told += [f"{each.message}" for each in found]
        assert len(told) == rows, told
        assert not rows or "self.rows" in told[0]
        assert step.stats.traced < 8
