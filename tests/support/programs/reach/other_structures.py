"""Losses that give what they reach another structure at nearly every call, beside averages and counts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from support.programs.reach.registry import (
    Made,
    Make,
    add,
    rows_of_normals,
)

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
    for count in it.rows[-3:]:
        count(1)


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


def structures(change: str, act: str) -> Make:
    def make() -> Made:
        it = Trainer(CHANGES[change], act)
        TOTAL[0] = 0

        def between(number: int) -> None:
            if change in BY_THE_LOOP:
                it.rows.append({"step": number, "average": float(number)})

        def seen() -> Any:
            rows = [row(0) if callable(row) else row for row in it.rows]
            return rows, it.table, it.queue, it.average, it.calls, it.flags, it.members, TOTAL[0]

        x = lambda number: (rows_of_normals(number, 4, 3),)  # noqa: E731
        return Made(it.loss, seen, between, it.model, it.optimizer, x, calls=14)

    return make


for change, act in itertools.product(CHANGES, ("", "relu")):
    name = f"another structure at each call: {change}{', by a made name' if act else ''}"
    add("object", name, structures(change, act), near=1e-3)


# what a loss keeps, as a program would make it at its first batch


@dataclasses.dataclass
class Record:
    mean: Any = None
    count: int = 0


class Pair(tuple[Any, ...]):
    """A tuple of a class."""

    __slots__ = ()


class Keeper:
    """What a loss keeps; `made` as a program would make it at its first batch."""

    mean: Any = None
    both: Any = None

    def __init__(self) -> None:
        self.begun, self.count, self.rate, self.named = False, 0, 1.0, dict[str, Any]()
        self.listed, self.last, self.record = list[Any](), collections.deque[Any](maxlen=3), Record()
        self.sums = collections.defaultdict[str, Any](float)


def _decayed(old: Any, new: mx.array) -> mx.array:
    return new if old is None else 0.9 * old + 0.1 * new


def _mean(it: Keeper, value: mx.array) -> Any:
    it.mean = _decayed(it.mean, value)
    return it.mean


def _item(it: Keeper, value: mx.array) -> Any:
    it.named["mean"] = _decayed(it.named.get("mean"), value)
    return it.named["mean"]


def _tuple(it: Keeper, value: mx.array) -> Any:
    it.mean = (_decayed(it.mean and it.mean[0], value), value * 0.5)
    return it.mean[0] + it.mean[1]


def _new_dict(it: Keeper, value: mx.array) -> Any:
    it.named = {"mean": _decayed(it.named.get("mean"), value), "count": it.named.get("count", 0) + 1}
    return it.named["mean"]


def _record(it: Keeper, value: mx.array) -> Any:
    it.record = dataclasses.replace(it.record, mean=_decayed(it.record.mean, value), count=it.record.count + 1)
    return it.record.mean


def _attributes(it: Keeper, value: mx.array) -> Any:
    it.record.mean, it.record.count = _decayed(it.record.mean, value), it.record.count + 1
    return it.record.mean / it.record.count


def _flag(it: Keeper, value: mx.array) -> Any:
    if not it.begun:
        it.mean, it.begun = value, True
    return it.mean


def _sums(it: Keeper, value: mx.array) -> Any:
    it.sums["loss"] += value
    it.sums["count"] += 1
    return 0.0


def _count(it: Keeper, value: mx.array) -> Any:
    it.count += 1
    it.rate *= 0.9
    return it.rate


def _only_count(it: Keeper, value: mx.array) -> Any:
    it.count += 2
    return 0.0


def _numbers(it: Keeper, value: mx.array) -> Any:
    it.listed.append(it.count)
    return 0.0


def _arrays(it: Keeper, value: mx.array) -> Any:
    it.listed.append(value)
    return sum(it.listed[-3:])


def _window(it: Keeper, value: mx.array) -> Any:
    it.last.append(value)
    return sum(it.last)


def _one_object(it: Keeper, value: mx.array) -> Any:
    if it.mean is not None:
        it.mean += 1
    seen = 0.0 if it.both is None else it.both
    it.mean = it.both = value
    return seen


def _swapped(it: Keeper, value: mx.array) -> Any:
    it.mean, it.both = value, it.mean
    return 0.0 if it.both is None else it.both


def _rows(it: Keeper, value: mx.array) -> Any:
    if len(it.listed) < 3:
        it.listed = [mx.array(0.1), mx.array(0.2), mx.array(0.3)]
    it.listed[:-1] = it.listed[1:]
    it.listed[-1] = value
    it.listed[0] = it.listed[-1]
    return sum(it.listed)


KEPT: dict[str, Callable[[Keeper, mx.array], Any]] = {
    "an attribute": _mean,
    "an item": _item,
    "a tuple": _tuple,
    "a new dict": _new_dict,
    "a new dataclass": _record,
    "attributes of an object": _attributes,
    "a flag": _flag,
    "sums and counts": _sums,
    "a number that is multiplied": _count,
    "a count": _only_count,
    "a list of numbers": _numbers,
    "a list of arrays": _arrays,
    "a deque": _window,
    "one array in two places": _one_object,
    "arrays that change places": _swapped,
    "a list whose arrays move on": _rows,
}


def kept(kind: str, on_model: bool) -> Make:
    def make() -> Made:
        model, keeper = nn.Linear(4, 3), Keeper()
        model._keeper = keeper

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            where = model._keeper if on_model else keeper
            value = KEPT[kind](where, mx.stop_gradient(out.mean()))
            return mx.square(out - 1).mean() * (1 + 0.1 * value)

        return Made(loss_fn, lambda: vars(keeper), model=model, optimizer=optim.Adam(0.02))

    return make


for kind, on_model in itertools.product(KEPT, (False, True)):
    add("model" if on_model else "object", f"what is made at the first batch: {kind}", kept(kind, on_model))


class Done:
    """What the code of an optimizer keeps beside its state."""

    def __init__(self) -> None:
        self.norm, self.updates, self.all = mx.array(0.0), 0, list[int]()


def _norm(done: Done, gradients: Any) -> None:
    done.norm = 0.5 * done.norm + mx.abs(gradients["weight"]).mean()


def _updates(done: Done, gradients: Any) -> None:
    done.updates += 1


def _all(done: Done, gradients: Any) -> None:
    done.all.append(len(done.all))


def _nothing(done: Done, gradients: Any) -> None:
    pass


DONE: dict[str, Callable[[Done, Any], None]] = {
    "an array": _norm,
    "a count": _updates,
    "a list": _all,
    "nothing": _nothing,
}


def own(done: Done, change: Callable[[Done, Any], None]) -> optim.Optimizer:
    class Own(optim.SGD):
        def update(self, model: nn.Module, gradients: Any) -> None:
            change(done, gradients)
            divisor = 1 + done.norm + 0.01 * done.updates
            super().update(model, tree_map(lambda each: each / divisor, gradients))

    return Own(0.05)


def beside_an_update(kind: str, change: str) -> Make:
    """What a loss keeps, beside what the code of the optimizer keeps."""

    def make() -> Made:
        made, done = kept(kind, False)(), Done()  # type: ignore[call-arg]
        seen = made.seen
        made.seen, made.optimizer = lambda: (seen(), done), own(done, DONE[change])
        return made

    return make


ALONG = ("an attribute", "a tuple", "a flag", "a count", "a number that is multiplied")
for kind, change in itertools.product(ALONG, DONE):
    add("optimizer", f"an update that keeps {change}, beside a loss that keeps {kind}", beside_an_update(kind, change))
