"""Arguments of a step: objects of any kind, and what a loss does to them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
import math
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import squares
from support.helpers import LossFn, Row, assert_close, plain_step, snapshot
from support.models import cross_entropy

ROW = Row("mlp", "adamw")


@pytest.fixture
def data() -> Iterator[tuple[mx.array, mx.array]]:
    return iter(ROW.case.batches(20))


def counted(model: nn.Module, x: mx.array, y: mx.array, metrics: dict[str, Any], losses: list[Any]) -> mx.array:
    loss = cross_entropy(model, x, y)
    metrics["loss"] += np.array(loss).item() * len(x)
    losses.append(loss)
    return loss


def gathered(model: nn.Module, x: mx.array, y: mx.array, metrics: dict[str, Any], losses: list[Any]) -> mx.array:
    loss = cross_entropy(model, x, y)
    metrics["loss"] += loss
    losses.append(loss)
    return loss


@pytest.mark.parametrize("loss_fn", [counted, gathered])
@pytest.mark.parametrize("kind", [lambda: collections.defaultdict(float), lambda: {"loss": 0.0}])
def test_what_a_loss_gathers_in_its_arguments_is_the_callers(loss_fn: LossFn, kind: Callable[[], Any]) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    theirs, mine = (kind(), list[Any]()), (kind(), list[Any]())
    for batch in ROW.case.batches(3):
        step(*batch, *mine)
        take(*batch, *theirs)
    assert step.stats.mode == "called"
    np.testing.assert_allclose(float(mine[0]["loss"]), float(theirs[0]["loss"]), rtol=1e-5)
    np.testing.assert_allclose([float(loss) for loss in mine[1]], [float(loss) for loss in theirs[1]], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_a_loss_may_take_its_batch_apart(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, mx.array]) -> mx.array:
        labels = batch.pop("y")
        return nn.losses.cross_entropy(model(**batch), labels).mean()

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for _ in range(3):
        x, y = next(data)
        take({"x": x, "y": y})
        step({"x": x, "y": y})
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.mode == "called"


@dataclasses.dataclass
class Carried:
    """What a loss hands to its next call."""

    last: mx.array


@pytest.mark.parametrize("kind", ["a key", "a new key", "a list", "a dataclass"])
def test_what_a_loss_leaves_in_its_arguments_is_there_at_the_next_step(kind: str) -> None:
    def loss_fn(model: nn.Module, x: mx.array, carried: Any) -> mx.array:
        y = model(x)
        left = mx.stop_gradient(y.mean(axis=0))
        if isinstance(carried, Carried):
            before, carried.last = carried.last, left
        elif isinstance(carried, list):
            before, carried[0] = carried[0], left
        else:
            before, carried["last"] = carried.get("last", mx.zeros(3)), left
        return mx.square(y + before).mean()

    kinds = {
        "a key": {"last": mx.zeros(3)},
        "a new key": {},
        "a list": [mx.zeros(3)],
        "a dataclass": Carried(mx.zeros(3)),
    }
    losses, left = [], []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, carried = nn.Linear(4, 3), optim.SGD(0.1), copy.deepcopy(kinds[kind])
        mx.eval(model.parameters())
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        xs = [mx.random.normal((8, 4), key=mx.random.key(number)) for number in range(5)]
        if fast:
            losses.append([float(step(x, carried).loss) for x in xs])
            assert step.stats.mode == "called"
        else:
            losses.append([float(plain(x, carried)[0]) for x in xs])
        left.append(
            carried.last if isinstance(carried, Carried) else carried["last" if isinstance(carried, dict) else 0]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    np.testing.assert_allclose(left[1], left[0], rtol=1e-6)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


# what is passed in the call with a number, and what the loss makes of it
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "slice": (lambda number: slice(0, 2 + number), lambda each: each.stop),
    "range": (lambda number: range(2 + number), sum),
    "set": (lambda number: {1, number + 2}, sum),
    "frozenset": (lambda number: frozenset({1, number + 2}), sum),
    "fraction": (lambda number: fractions.Fraction(1, 2 + number), float),
    "decimal": (lambda number: decimal.Decimal(number + 1) / 8, float),
    "duration": (lambda number: datetime.timedelta(number + 1), lambda each: each.days),
    "date": (lambda number: datetime.datetime(2020, 1, 1 + number), lambda each: each.day),
    "bytes": (lambda number: bytearray(b"a" * (1 + number)), len),
    "slots": (lambda number: Slotted(1.0 + number), lambda each: each.value),
    "array in slots": (lambda number: Slotted(mx.array(1.0 + number)), lambda each: each.value),
    "deque": (lambda number: collections.deque([number, 1]), sum),
    "path": (lambda number: Path("a" * (1 + number)), lambda each: len(each.name)),
    "another optimizer": (lambda number: optim.SGD(1.0 / (1 + number)), lambda each: each.learning_rate),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_may_be_any_object(kind: str) -> None:
    make, read = KINDS[kind]

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, each: Any) -> mx.array:
        return cross_entropy(model, x, y) * read(each)

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for number, batch in zip((0, 1, 1, 2, 0, 3), ROW.case.batches(6), strict=True):
        np.testing.assert_allclose(step(*batch, make(number)).loss, take(*batch, make(number))[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert step.stats.mode == "called"


CHANGES_OF_ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": (set, lambda each: each.add(len(each)), len),
    "bytes": (bytearray, lambda each: each.append(1), len),
    "slots": (lambda: Slotted(0.0), lambda each: setattr(each, "value", each.value + 1), lambda each: each.value),
    "numpy": (lambda: np.zeros(2, np.float32), lambda each: each.__setitem__(0, each[0] + 1), lambda each: each[0]),
    "numpy in place": (lambda: np.zeros(2, np.float32), lambda each: each.__iadd__(1), lambda each: each[0]),
}


@pytest.mark.parametrize("kind", CHANGES_OF_ARGUMENTS)
def test_an_argument_that_the_loss_changes_is_changed_at_each_step(kind: str) -> None:
    make, change, read = CHANGES_OF_ARGUMENTS[kind]

    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, each: Any) -> mx.array:
        change(each)
        return cross_entropy(model, x, y) * read(each)

    reference, ours, (theirs, mine) = ROW.new(), ROW.new(), (make(), make())
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for batch in ROW.case.batches(6):
        np.testing.assert_allclose(step(*batch, mine).loss, take(*batch, theirs)[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.mode == "called"
    assert read(mine) == read(theirs) == 6


@dataclasses.dataclass
class Visited:
    x: mx.array
    seen: mx.array | None = None
    visits: int = 0


def test_a_dataclass_of_which_the_loss_sets_fields_keeps_them() -> None:
    def loss_fn(model: nn.Module, batch: Visited) -> mx.array:
        y = model(batch.x)
        batch.seen = mx.stop_gradient(y.sum())
        batch.visits += 1
        return mx.square(y).mean()

    step = Step(nn.Linear(4, 3), optim.SGD(0.1), loss_fn)
    batches = [Visited(mx.ones((2, 4)) * number) for number in (1, 2)]
    for number in range(6):
        step(batches[number % 2])
    assert [batch.visits for batch in batches] == [3, 3]
    assert all(batch.seen is not None for batch in batches)
    assert step.stats.mode == "called"


@pytest.mark.parametrize("arrays", [False, True])
def test_the_order_of_an_ordered_dict_is_seen(arrays: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, terms: dict[str, Any]) -> mx.array:
        return cross_entropy(model, x, y) * next(iter(terms.values()))

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    make: Callable[[float], Any] = mx.array if arrays else float
    terms = collections.OrderedDict(one=make(1.0), two=make(2.0))
    for number, batch in enumerate(ROW.case.batches(6)):
        terms.move_to_end(("one", "two", "two")[number % 3])
        np.testing.assert_allclose(step(*batch, terms).loss, take(*batch, terms)[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 2e-5)
    assert step.stats.mode != "plain"


def test_the_optimizer_itself_may_be_an_argument() -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, optimizer: optim.Optimizer) -> mx.array:
        return cross_entropy(model, x, y) * (1 + optimizer.learning_rate)

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for batch in ROW.case.batches(4):
        reference[1].learning_rate = ours[1].learning_rate = 0.9 * ours[1].learning_rate
        np.testing.assert_allclose(step(*batch, ours[1]).loss, take(*batch, reference[1])[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.mode == "called"


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.bool_])
def test_a_scalar_of_numpy_is_a_number(kind: Callable[[float], Any], data: Iterator[tuple[mx.array, mx.array]]) -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, factor: Any) -> mx.array:
        return cross_entropy(model, x, y) * factor

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for number in range(6):
        batch, factor = next(data), kind(number % 3)
        (loss, _), out = take(*batch, factor), step(*batch, factor)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-5)
        assert out.loss.dtype == loss.dtype
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) <= 3


def test_texts_that_change_are_no_new_traces_unless_they_decide_something(
    data: Iterator[tuple[mx.array, mx.array]],
) -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any], kind: str) -> mx.array:
        assert all(batch["texts"])
        loss = nn.losses.cross_entropy(model(batch["x"]), batch["y"])
        return loss.sum() if kind == "sum" else loss.mean()

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for number in range(8):
        x, y = next(data)
        batch = {"x": x, "y": y, "texts": [f"{number}.{each}" for each in range(2)]}
        for side in (take, step):
            side(batch, "sum" if number in (3, 5) else "mean")
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) == 2


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.defaultdict])
@pytest.mark.parametrize("numpy", [False, True])
def test_what_a_loss_takes_out_of_a_dict_is_out_of_it(kind: Callable[[], Any], numpy: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array, more: list[Any]) -> mx.array:
        return squares(model, x) * more[0].pop("scale", 1.0) * more[0].get("inner", {}).pop("factor", 1.0)

    losses, left = [], []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, more = nn.Linear(4, 3), optim.SGD(0.1), kind()
        mx.eval(model.parameters())
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        more["first"] = np.ones(2) if numpy else mx.ones(2)
        losses.append([])
        left.append([])
        for number in range(8):
            if number % 3 == 0:
                more["scale"] = 5.0
            if number % 4 == 1:
                more["inner"] = {"factor": 3.0, "kept": 1}
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            losses[-1].append(float(step(x, [more]).loss if fast else plain(x, [more])[0]))
            left[-1].append((list(more), list(more.get("inner", {}))))
        taken = (
            "called" if numpy or kind is not dict else "native"
        )  # the last calls find nothing to take out of a plain dict
        assert not fast or step.stats.mode == taken
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert left[0] == left[1]


def test_what_a_loss_takes_out_of_a_dict_at_some_calls_is_taken_out_at_those() -> None:
    left = []
    for fast in (False, True):
        model, optimizer, calls = nn.Linear(4, 3), optim.SGD(0.1), [0]

        def loss_fn(model: nn.Module, x: mx.array, more: dict[str, Any], calls: list[int] = calls) -> mx.array:
            calls[0] += 1
            if calls[0] % 3 == 0:
                more.pop("once", None)
            return squares(model, x)

        left.append([])
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        for number in range(10):
            more = {"once": 1, "kept": 2}
            take = step if fast else plain
            take(mx.random.normal((8, 4), key=mx.random.key(number)), more)
            left[-1].append(list(more))
    assert left[0] == left[1]


@pytest.mark.parametrize("compute_dtype", [None, mx.bfloat16])
def test_a_list_that_the_loss_clears_is_cleared_and_one_that_it_fills_is_filled(compute_dtype: mx.Dtype | None) -> None:
    def loss_fn(model: nn.Module, x: mx.array, cleared: list[int], filled: dict[str, Any]) -> mx.array:
        scale = 1 + len(cleared)
        cleared.clear()
        filled["lengths"].append(scale)
        filled["x"], filled["again"] = x, filled["lengths"]
        return squares(model, x) * scale

    step = Step(nn.Linear(4, 3), optim.SGD(0.1), loss_fn, compute_dtype=compute_dtype)
    cleared, filled, scales = list[int](), {"lengths": list[int](), "x": None}, list[int]()
    for number in range(6):
        scales.append(1 + len(cleared))
        x = mx.random.normal((8, 4), key=mx.random.key(number))
        step(x, cleared, filled)
        assert (cleared, filled["lengths"]) == ([], scales)
        assert mx.array_equal(filled["x"], x.astype(compute_dtype or x.dtype))  # in the plain loop too another object
        assert filled["again"] is filled["lengths"]
        if number > 2:
            cleared.append(number)


def test_a_module_among_the_arguments_may_keep_statistics_and_count() -> None:
    class Normed(nn.BatchNorm):
        calls = 0

        def __call__(self, x: mx.array) -> mx.array:
            self.calls += 1
            return super().__call__(x)

    def loss_fn(model: nn.Module, x: mx.array, batch: dict[str, nn.Module]) -> mx.array:
        return squares(model, batch["norm"](x))

    left = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, norm = nn.Linear(4, 3), optim.SGD(0.1), Normed(4)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        for number in range(5):
            take = step if fast else plain
            take(mx.random.normal((8, 4), key=mx.random.key(number)), {"norm": norm})
        left.append((norm.calls, np.array(norm.running_mean), np.array(model.weight)))
        assert not fast or step.stats.mode == "called"
    assert left[0][0] == left[1][0] == 5
    np.testing.assert_allclose(left[1][1], left[0][1], rtol=1e-5)
    np.testing.assert_allclose(left[1][2], left[0][2], rtol=1e-5)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda number: np.array(["a" * (1 + number % 3), "b"]),
        lambda number: np.array(["a" * (1 + number % 3), "b"], object),
        lambda number: np.array([[0.5] * (1 + number % 3), {}], object),
        lambda number: np.array([b"a" * (1 + number % 3)]),
        lambda number: np.array([datetime.date(2020, 1, 1 + number % 5)] * (1 + number % 3), "datetime64[D]"),
        lambda number: np.ones(1 + number % 3, np.longdouble),
        lambda number: np.zeros(1 + number % 3, [("weight", "f4")]),
        lambda number: np.array([], object),
    ],
)
def test_arrays_of_numpy_that_mlx_has_none_of_are_arguments(
    make: Callable[[int], np.ndarray[Any, Any]], in_batch: bool, reads: bool
) -> None:
    """A column of texts in a batch, say."""

    def loss_fn(model: nn.Module, x: mx.array, batch: Any) -> mx.array:
        column = batch["column"] if isinstance(batch, dict) else batch
        sized = len(column) and isinstance(column[0], str | bytes | list)
        size = len(column[0]) if sized else len(column)
        return squares(model, x) * (1 + size if reads else 1)

    model, reference = nn.Linear(4, 2), nn.Linear(4, 2)
    reference.update(model.parameters())
    step, take = Step(model, optim.SGD(1e-2), loss_fn), plain_step(reference, optim.SGD(1e-2), loss_fn)
    for number in range(8):
        x, column = mx.random.normal((8, 4), key=mx.random.key(number)), make(number)
        batch = {"column": column, "label": 1} if in_batch else column
        np.testing.assert_allclose(step(x, batch).loss, take(x, batch)[0], rtol=2e-5)


@dataclasses.dataclass
class Bank:
    """Rows that a loss writes into."""

    rows: mx.array


def rows_of(kind: str) -> tuple[Any, Callable[[Any], mx.array]]:
    rows = mx.zeros((3, 2))
    found: dict[str, tuple[Any, Callable[[Any], mx.array]]] = {
        "dataclass": (Bank(rows), lambda held: held.rows),
        "dict": ({"rows": rows}, lambda held: held["rows"]),
        "list": ([rows], lambda held: held[0]),
        "tuple": ((rows,), lambda held: held[0]),
        "array": (rows, lambda held: held),
    }
    return found[kind]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", ["dataclass", "dict", "list", "tuple", "array"])
def test_arrays_of_arguments_changed_in_place_are_as_after_the_plain_loop(kind: str, adds: bool) -> None:
    found, losses = rows_of(kind)[1], list[list[float]]()
    held = [rows_of(kind)[0] for _ in range(2)]

    def loss_fn(model: nn.Module, x: mx.array, held: Any, index: int) -> mx.array:
        rows, out = found(held), model(x)
        loss = mx.square(out).mean() + mx.square(out - rows[index]).mean()
        if adds:
            rows += mx.stop_gradient(out).mean(0)
        else:
            rows[index] = mx.stop_gradient(out).mean(0)
        return loss

    mx.random.seed(1)
    reference = nn.Linear(4, 2)
    model = copy.deepcopy(reference)
    plain, step = plain_step(reference, optim.SGD(0.05), loss_fn), Step(model, optim.SGD(0.05), loss_fn)
    stays = kind in ("dataclass", "dict", "list")  # MLX copies the others
    batches = [mx.random.normal((3, 4)) for _ in range(6)]
    for number, x in enumerate(batches):
        losses.append([plain(x, held[0], number % 3)[0].item(), step(x, held[1], number % 3).loss.item()])
    np.testing.assert_allclose(*np.array(losses).T, rtol=1e-5)
    np.testing.assert_allclose(found(held[1]), found(held[0]), rtol=1e-5)
    assert step.stats.mode == "called" if stays else step.stats.mode != "plain"
    assert bool(found(held[1]).any()) == stays


def test_a_float32_array_of_an_argument_is_changed_in_place_in_mixed_precision() -> None:
    bank = Bank(mx.zeros((2,)))

    def loss_fn(model: nn.Module, x: mx.array, bank: Bank) -> mx.array:
        bank.rows[0] += 1
        return mx.square(model(x)).mean()

    step = Step(nn.Linear(4, 2), optim.SGD(0.05), loss_fn, compute_dtype=mx.bfloat16)
    losses = [step(mx.ones((3, 4)), bank).loss.item() for _ in range(3)]
    assert losses[2] < losses[0]
    assert (bank.rows.tolist(), bank.rows.dtype) == ([3.0, 0.0], mx.float32)


class Coefficient(float):
    """A number with an attribute."""

    weight = 1.0


class Name(str):
    """A text with an attribute."""

    weight: float


@dataclasses.dataclass(frozen=True)
class Key:
    """Keys are equal whatever their weight is."""

    number: int = 1
    weight: float = dataclasses.field(default=1.0, compare=False)


class Always:
    """Objects that are all equal, with slots."""

    __slots__ = ("parts", "weight")

    def __init__(self, weight: float) -> None:
        self.weight, self.parts = weight, {"a": [weight]}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Always)

    def __hash__(self) -> int:
        return 1


def weighted(made: Any, weight: float) -> Any:
    made.weight = weight
    return made


EQUAL: dict[str, tuple[Callable[[float], Any], Callable[[Any], float]]] = {
    "a number": (lambda weight: weighted(Coefficient(1.0), weight), lambda it: it.weight),
    "a text": (lambda weight: weighted(Name("a"), weight), lambda it: it.weight),
    "in a list": (lambda weight: [weighted(Name("a"), weight)], lambda it: it[0].weight),
    "a key": (lambda weight: {Key(1, weight): 1}, lambda it: next(iter(it)).weight),
    "in a key": (lambda weight: {("a", Key(1, weight)): 1}, lambda it: next(iter(it))[1].weight),
    "a member": (lambda weight: frozenset([Always(weight)]), lambda it: next(iter(it)).weight),
    "in a member": (lambda weight: {("a", Always(weight))}, lambda it: next(iter(it))[1].parts["a"][0]),
    "a range": (lambda weight: range(0, 3 + int(weight == 5), 2), lambda it: it.stop),
    "a slice": (lambda weight: slice(0, weighted(Name("a"), weight)), lambda it: it.stop.weight),
    "a time": (lambda weight: datetime.datetime(2026, 1, 1, fold=int(weight == 5)), lambda it: 1 + it.fold),
    "a decimal": (lambda weight: decimal.Decimal("1.0" if weight == 5 else "1.00"), lambda it: len(str(it))),
    "a date of NumPy's": (
        lambda weight: np.datetime64("2026-01-01", "D" if weight == 5 else "h"),
        lambda it: len(str(it)),
    ),
    "a class of a member": (lambda weight: frozenset([1.0 if weight == 5 else 1]), lambda it: len(str(set(it)))),
    "an order": (lambda weight: frozenset([0, 8] if weight == 5 else [8, 0]), lambda it: 1 + next(iter(it))),
    "a zero in a key": (
        lambda weight: {(1, 0.0 if weight == 5 else -0.0): 1},
        lambda it: 2 + math.copysign(1, min(it)[1]),
    ),
}


@pytest.mark.parametrize("where", ["argument", "reached", "on the model"])
@pytest.mark.parametrize("kind", EQUAL)
def test_objects_that_are_equal_and_not_the_same_are_told_apart(kind: str, where: str) -> None:
    make, weight_of = EQUAL[kind]
    held: dict[str, Any] = {}

    def loss_fn(model: Any, x: mx.array, given: Any = None) -> mx.array:
        it = {"argument": given, "reached": held.get("it"), "on the model": getattr(model, "it", None)}[where]
        return mx.square(model(x)).mean() * weight_of(it)

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(30):
        it = make(1.0 if number < 22 else 5.0)
        if where == "reached":
            held["it"] = it
        if where == "on the model":
            step.model.it = it
        given = [it] if where == "argument" else []
        wanted = loss_fn(step.model, x, *given).item()
        assert step(x, *given).loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda it: it, lambda it: it),
        (lambda it: [1, (it, 2)], lambda it: it[1][0]),
        (lambda it: {it: 1}, lambda it: next(iter(it))),
    ],
    ids=["itself", "in a tuple", "a key"],
)
@pytest.mark.parametrize("kind", [Name("a"), Coefficient(2.0), types.SimpleNamespace], ids=["text", "number", "object"])
def test_an_attribute_of_a_value_or_a_key_among_the_arguments_changes_in_place(
    kind: Any, make: Callable[[Any], Any], read: Callable[[Any], Any]
) -> None:
    class Object:
        weight: float

    it = weighted(Object() if kind is types.SimpleNamespace else kind, 1.0)

    def loss_fn(model: nn.Module, x: mx.array, given: Any) -> mx.array:
        weight: float = read(given).weight
        return mx.square(model(x)).mean() * weight

    step, x, given = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4)), make(it)
    for number in range(16):
        it.weight = 1.0 if number < 12 else 5.0
        assert step(x, given).loss.item() == pytest.approx(loss_fn(step.model, x, given).item(), rel=1e-5)
    assert step.stats.mode != "plain"
