"""A bad batch leaves no trace of itself in what a loss keeps: the run is that of a plain loop without it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten, tree_map
from support.beside import squares
from support.helpers import assert_same, plain_step
from support.left import same

STEPS = 9


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


def _state(value: Any) -> Any:
    if isinstance(value, mx.array):
        return float(value.item())
    if isinstance(value, dict):
        return [[key, _state(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [_state(item) for item in value]
    return _state(vars(value)) if hasattr(value, "__dict__") else value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self._keeper = nn.Linear(4, 3), Keeper()


class Done:
    """What the code of an optimizer keeps beside its state."""

    def __init__(self) -> None:
        self.norm, self.updates, self.all = mx.array(0.0), 0, list[int]()


def _norm(done: Done, gradients: Any) -> None:
    done.norm = 0.5 * done.norm + mx.abs(gradients["layer"]["weight"]).mean()


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


def train(
    kept: Callable[[Keeper, mx.array], Any], bad: set[int], fast: bool, window: int, how: str, change: str = ""
) -> tuple[list[float], Any, Any]:
    mx.random.seed(3)
    model, keeper, done = Net(), Keeper(), Done()
    optimizer = own(done, DONE[change]) if change else optim.Adam(0.02)

    def loss_fn(model: Net, x: mx.array) -> mx.array:
        out = model.layer(x)
        value = mx.square(out - 1).mean()
        if how == "read":
            value.item()
        where = model._keeper if how == "on the model" else keeper
        return value * (1 + 0.1 * kept(where, mx.stop_gradient(out.mean())))

    refuses = how == "raise"
    step = Step(
        model,
        optimizer,
        loss_fn,
        accumulate=window,
        compile=how != "uncompiled",
        nonfinite="raise" if refuses else "skip",
    )
    gradients_of, losses, total, taken = nn.value_and_grad(model, loss_fn), list[float](), list[Any](), 0
    for number in range(STEPS):
        x = mx.random.normal((5, 4), key=mx.random.key(number))
        is_bad = number in bad
        if fast and is_bad and refuses:
            with pytest.raises(FloatingPointError):
                step(x * float("nan"))
        elif fast:
            out = step(x * float("nan") if is_bad else x)
            if not is_bad:
                losses.append(out.loss.item())
        elif not is_bad:
            loss, gradients = gradients_of(model, x)
            mx.eval(loss, gradients)
            losses.append(loss.item())
            total.append(gradients)
        taken += not (is_bad and refuses)
        if not fast and taken % window == 0 and total:
            sums = tree_map(lambda *each: sum(each[1:], each[0]) / len(each), *total)
            optimizer.update(model, sums)
            total = []
    weights = [array.tolist() for _, array in tree_flatten(model.trainable_parameters())]
    return losses, weights, _state([keeper, model._keeper, done])


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("how", ["traced", "read", "uncompiled", "raise", "on the model"])
@pytest.mark.parametrize("bad", [{0}, {0, 1, 5}, {4}, {1, 2, 8}], ids=str)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled:RuntimeWarning")
def test_a_bad_batch_is_as_if_it_had_never_been(kept: str, bad: set[int], how: str, window: int) -> None:
    compare(KEPT[kept], bad, window, how)


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("how", ["traced", "uncompiled"])
@pytest.mark.parametrize("bad", [set(), {0}, {4}, {1, 2, 8}], ids=str)
@pytest.mark.parametrize("kept", ["an attribute", "a tuple", "a flag", "a count", "a number that is multiplied"])
@pytest.mark.parametrize("change", DONE)
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled:RuntimeWarning")
def test_an_optimizer_of_ones_own_has_not_seen_it(change: str, kept: str, bad: set[int], how: str, window: int) -> None:
    compare(KEPT[kept], bad, window, how, change)


def compare(kept: Callable[[Keeper, mx.array], Any], *how: Any) -> None:
    bad, *others = how
    losses, weights, state = train(kept, bad, True, *others)
    wanted, reference, its = train(kept, bad, False, *others)
    assert_same(losses, wanted, 2e-6)
    for one, other in zip(weights, reference, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert same(state, its), f"{state}, and by the plain loop {its}"


class Halved:
    """A schedule that counts in what it holds: a number, a list, a dict, an array."""

    def __init__(self) -> None:
        self.rate, self.history, self.table, self.array = 0.1, list[float](), {"calls": 0}, mx.array(1.0)
        self.raises = False

    def __call__(self, step: mx.array) -> mx.array:
        self.rate *= 0.8
        self.history.append(self.rate)
        self.table["calls"] += 1
        self.array = self.array * 0.9
        if self.raises:
            raise LookupError("a file is gone")
        return mx.array(self.rate) * self.array / self.table["calls"]

    def shown(self) -> list[Any]:
        return [self.rate, list(self.history), dict(self.table), self.array.item()]


def _closure() -> tuple[Callable[..., mx.array], Callable[[], list[Any]]]:
    calls = 0

    def schedule(_: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return mx.array(0.1 / calls)

    return schedule, lambda: [calls]


def _object() -> tuple[Callable[..., mx.array], Callable[[], list[Any]]]:
    schedule = Halved()
    return schedule, schedule.shown


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", ["skip", "raise", "uncompiled"])
@pytest.mark.parametrize("make", [_closure, _object], ids=["closure", "object"])
def test_a_schedule_that_counts_has_not_seen_it(make: Callable[[], Any], how: str, accumulate: int) -> None:
    found = []
    for fast in (False, True):
        mx.random.seed(1)
        model, (schedule, shown) = nn.Linear(4, 2), make()
        optimizer = optim.SGD(schedule)
        optimizer.init(model.trainable_parameters())
        nonfinite: Any = "raise" if how == "raise" else "skip"
        step = Step(model, optimizer, squares, accumulate=accumulate, nonfinite=nonfinite, compile=how != "uncompiled")
        plain = plain_step(model, optimizer, squares, accumulate=accumulate)
        found.append([])
        for number in range(10):
            for batch in range(accumulate):
                x = mx.random.normal((3, 4), key=mx.random.key(accumulate * number + batch)) + 1
                bad = number in (0, 3, 4)
                if fast:
                    with contextlib.suppress(FloatingPointError):
                        step(x * (math.nan if bad else 1))
                elif not bad:
                    plain(x)
            if not bad:
                found[-1].append([shown(), optimizer.learning_rate.item(), model.weight.tolist()])
    for theirs, ours in zip(*found, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == pytest.approx(np.array(theirs[2]), rel=1e-5)


def test_a_schedule_that_raises_has_counted_and_one_before_a_loss_that_raises_has_not() -> None:
    schedule = Halved()

    def loss_fn(model: nn.Module, x: mx.array, rows: int) -> mx.array:
        if rows > 3:
            raise LookupError("too many rows")
        return squares(model, x)

    step, x = Step(nn.Linear(4, 2), optim.SGD(schedule), loss_fn), mx.ones((3, 4))
    step(x, 3)
    begun = schedule.table["calls"]
    for raises, rows, calls in [(True, 3, 1), (False, 4, 1), (True, 3, 2), (False, 3, 3)]:
        schedule.raises = raises
        with pytest.raises(LookupError) if raises or rows > 3 else contextlib.nullcontext():
            step(x, rows)
        assert schedule.table["calls"] == begun + calls
