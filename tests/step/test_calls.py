"""Calls of a step: aux outputs, trees, keywords, static values, and gradients alone."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import fractions
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, StepOutput, fast_step
from faststep._step._fast_step import _programs
from faststep._step._options import Options
from support.helpers import LossFn, Row, Tree, assert_close, assert_same, flat, plain_step, snapshot
from support.models import cross_entropy

ROW = Row("mlp", "adamw")


@pytest.fixture
def data() -> Iterator[tuple[mx.array, mx.array]]:
    return iter(ROW.case.batches(20))


def with_aux(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, dict[str, mx.array], list[Any]]:
    logits = model(x)
    loss = nn.losses.cross_entropy(logits, y, reduction="mean")
    hits = (logits.argmax(axis=-1) == y).sum()
    return loss, {"logits": logits}, [hits, "named", None, 3]


def test_a_loss_alone(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    model, optimizer = ROW.new()
    out = Step(model, optimizer, cross_entropy)(*next(data))
    assert isinstance(out, StepOutput)
    assert (out.loss.shape, out.loss.dtype) == ((), mx.float32)
    assert out.aux == ()
    assert out.grad_norm is not None
    assert out.skipped.item() is False
    loss = fast_step(model, optimizer, cross_entropy, *next(data))
    assert isinstance(loss, mx.array)
    assert loss.shape == ()


def test_what_follows_the_loss_comes_back_as_it_is(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, with_aux), Step(*ours, with_aux)
    for _ in range(3):
        batch = next(data)
        (loss, logits, rest), _ = take(*batch)
        out = step(*batch)
        assert_same(out.loss, loss, 1e-6)
        assert len(out.aux) == 2
        assert_close({"": np.array(out.aux[0]["logits"])}, {"": np.array(logits["logits"])}, 1e-6, on_gpu=1e-4)
        assert out.aux[1][0].item() == rest[0].item()
        assert out.aux[1][1:] == ["named", None, 3]
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) == 1
    value = fast_step(*ours, with_aux, *next(data))
    assert isinstance(value, tuple)
    assert len(value) == 3
    assert value[1]["logits"].shape == (8, 4)


def tree_loss(model: nn.Module, batch: Tree, *, weight: mx.array, smooth: float = 0.0) -> mx.array:
    x, extra = batch["inputs"]
    losses = nn.losses.cross_entropy(model(x) + extra["bias"][0], batch["y"], label_smoothing=smooth)
    return (losses * weight).mean()


def test_batches_are_trees_and_arguments_have_names(data: Iterator[tuple[mx.array, mx.array]]) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, tree_loss), Step(*ours, tree_loss)
    for number in range(3):
        x, y = next(data)
        batch = {"inputs": (x, {"bias": [mx.array(0.1 * number), "unused"]}), "y": y}
        weight = mx.arange(8) / (number + 1)
        loss, _ = take(batch, weight=weight, smooth=0.1)
        out = step(batch, weight=weight, smooth=0.1)
        np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
        named = fast_step(*ROW.new(), tree_loss, batch, weight=weight, smooth=0.1, max_grad_norm=1.0)
        assert named.shape == ()
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert len(step.stats.traces) == 1


def test_a_number_is_a_new_trace_where_it_changes_the_form_and_an_input_where_it_varies(
    data: Iterator[tuple[mx.array, mx.array]],
) -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, tree_loss), Step(*ours, tree_loss)
    for smooth, traced in [(0.0, 1), (0.2, 2), (0.0, 2), (0.2, 2), (0.4, 3), (0.6, 3), (0.0, 3)]:
        x, y = next(data)
        batch, weight = {"inputs": [x, {"bias": [mx.array(0.0)]}], "y": y}, mx.ones(8)
        loss, _ = take(batch, weight=weight, smooth=smooth)
        np.testing.assert_allclose(step(batch, weight=weight, smooth=smooth).loss, loss, rtol=1e-5)
        assert step.stats.traced == traced
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)


def test_static_values_that_are_equal_but_not_the_same_type_are_told_apart() -> None:
    def loss_fn(model: nn.Module, x: mx.array, exponent: Tree) -> mx.array:
        seen.append(exponent)
        return (model(x) * (2.0 if exponent is True else 3.0)).mean()

    seen: list[Any] = []
    x = mx.ones((8, 16))
    losses = []
    for value in (True, 1, 1.0):
        model, optimizer = ROW.new()
        losses.append(float(Step(model, optimizer, loss_fn)(x, value).loss))
    model, optimizer = ROW.new()
    step = Step(model, optimizer, loss_fn)
    start = model.parameters()
    got = []
    for value in (True, 1, 1.0):
        model.update(start)
        got.append(float(step(x, value).loss))
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert {type(value) for value in seen[-3:]} >= {bool, int}


def test_a_new_shape_or_dtype_is_a_new_trace() -> None:
    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, cross_entropy), Step(*ours, cross_entropy)
    x, y = ROW.case.batches(1)[0]
    batches = [(x, y), (x[:3], y[:3]), (x.astype(mx.bfloat16), y), (x, y), (x[:3], y[:3])]
    for batch in batches:
        loss, _ = take(*batch)
        np.testing.assert_allclose(step(*batch).loss, loss, rtol=2e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-4)
    assert len(step.stats.traces) == 3
    for trace in step.stats.traces:
        assert trace.cause
        assert trace.seconds > 0


@pytest.mark.parametrize("name", ["mlp", "conv", "frozen", "lora", "tied"])
def test_gradients_are_those_of_value_and_grad_and_change_nothing(name: str) -> None:
    row = Row(name, "adamw")
    (model, _), ours = row.new(), row.new()
    step = Step(*ours, row.case.loss_fn)
    batch = row.case.batches(1)[0]
    mx.random.seed(5)
    loss, grads = nn.value_and_grad(model, row.case.loss_fn)(model, *batch)
    mx.random.seed(5)
    before = ours[0].parameters()
    arrays = {path: np.array(array) for path, array in flat(ours[0].trainable_parameters()).items()}
    our_loss, our_grads = step.gradients(*batch)
    np.testing.assert_allclose(our_loss, loss, rtol=1e-6)
    wanted, got = flat(grads), flat(our_grads)
    assert got.keys() == wanted.keys()
    for path, grad in wanted.items():
        np.testing.assert_allclose(got[path], grad, rtol=1e-4, atol=1e-6, err_msg=path)
    for path, array in flat(ours[0].trainable_parameters()).items():
        np.testing.assert_array_equal(array, arrays[path])
    assert list(flat(before)) == list(flat(ours[0].parameters()))
    assert step.stats.steps == 0


def test_gradients_with_aux_give_what_the_loss_returns() -> None:
    model, optimizer = ROW.new()
    value, grads = Step(model, optimizer, with_aux).gradients(*ROW.case.batches(1)[0])
    assert len(value) == 3
    assert value[1]["logits"].shape == (8, 4)
    assert grads["layers"][0]["weight"].shape == (32, 16)


def test_steps_are_counted_and_synchronize_waits() -> None:
    model, optimizer = ROW.new()
    step = Step(model, optimizer, cross_entropy, max_grad_norm=1.0, in_flight=3)
    for batch in ROW.case.batches(7):
        out = step(*batch)
    step.synchronize()
    assert step.stats.steps == 7
    assert out.grad_norm is not None
    assert out.grad_norm.item() != 0
    assert int(optimizer.state["step"]) == 7


def split(model: nn.Module, x: mx.array) -> list[mx.array]:
    parts: list[mx.array] = mx.split(model(x), 2, axis=-1)
    return parts


# what MLX 0.32.4 loses when it compiles it: an output that equals another, or an inner value
EQUAL: dict[str, Callable[[nn.Module, mx.array], tuple[mx.array, ...]]] = {
    "an output computed twice": lambda model, x: (mx.square(model(x)).mean(), model(x)),
    "a sum computed twice": lambda model, x: ((model(x) * x[:, :4]).sum() / mx.square(x).sum(), mx.square(x).sum()),
    "the loss twice": lambda model, x: (mx.square(model(x)).mean(), mx.square(model(x)).mean()),
    "equal outputs": lambda model, x: (mx.square(model(x)).mean(), mx.exp(x), mx.exp(x), model(x), model(x)),
    "one array twice": lambda model, x: (loss := mx.square(model(x)).mean(), loss, x, x),
    "constants": lambda model, x: (
        mx.square(model(x)).mean() * mx.array(2.0),
        mx.array(2.0),
        mx.array(2.0),
        mx.zeros(()),
    ),
    "copies": lambda model, x: (mx.exp(model(x)).mean(), mx.array(mx.exp(model(x))), mx.stop_gradient(mx.array(x))),
    "parts": lambda model, x: (mx.square(split(model, x)[1]).mean(), *split(model, x)),
    "a parameter": lambda model, x: (mx.square(model(x)).mean(), model.layers[0].weight),
}


@pytest.mark.parametrize("returned", EQUAL)
def test_equal_outputs_are_native_and_those_of_the_plain_loop(returned: str) -> None:
    loss_fn = EQUAL[returned]
    reference, ours = ROW.new(), ROW.new()
    step = Step(*ours, loss_fn)
    for number in range(3):
        x = mx.random.normal((8, 16), key=mx.random.key(number))
        taken, gradients = nn.value_and_grad(reference[0], loss_fn)(reference[0], x)
        mx.eval(taken)
        reference[1].update(reference[0], gradients)
        mx.eval(reference[0].parameters(), reference[1].state)
        out = step(x)
        for got, wanted in zip((out.loss, *out.aux), taken, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.mode == "native"


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
    first, *others = batches = ROW.case.batches(3)
    with pytest.warns(RuntimeWarning, match="reads the value|writes into a dict, list or dataclass"):
        step(*first, *mine)
    for batch in others:
        step(*batch, *mine)
    for batch in batches:
        take(*batch, *theirs)
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
    assert step.stats.mode == "native"


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
            with pytest.warns(RuntimeWarning, match="writes into a dict, list or dataclass"):
                losses.append([float(step(x, carried).loss) for x in xs])
            assert step.stats.mode == "plain"
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
    assert step.stats.mode == "native"


CHANGES_OF_ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "set": (set, lambda each: each.add(len(each)), len),
    "bytes": (bytearray, lambda each: each.append(1), len),
    "slots": (lambda: Slotted(0.0), lambda each: setattr(each, "value", each.value + 1), lambda each: each.value),
    "numpy": (lambda: np.zeros(2, np.float32), lambda each: each.__setitem__(0, each[0] + 1), lambda each: each[0]),
    "numpy in place": (lambda: np.zeros(2, np.float32), lambda each: each.__iadd__(1), lambda each: each[0]),
}


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
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
    assert step.stats.mode == "plain"
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
    with pytest.warns(RuntimeWarning, match="writes into a dict, list or dataclass"):
        step(batches[0])
    for number in range(1, 6):
        step(batches[number % 2])
    assert [batch.visits for batch in batches] == [3, 3]
    assert all(batch.seen is not None for batch in batches)


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
    assert step.stats.mode == "native"


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
def test_the_optimizer_itself_may_be_an_argument() -> None:
    def loss_fn(model: nn.Module, x: mx.array, y: mx.array, optimizer: optim.Optimizer) -> mx.array:
        return cross_entropy(model, x, y) * (1 + optimizer.learning_rate)

    reference, ours = ROW.new(), ROW.new()
    take, step = plain_step(*reference, loss_fn), Step(*ours, loss_fn)
    for batch in ROW.case.batches(4):
        reference[1].learning_rate = ours[1].learning_rate = 0.9 * ours[1].learning_rate
        np.testing.assert_allclose(step(*batch, ours[1]).loss, take(*batch, reference[1])[0], rtol=1e-5)
    assert_close(snapshot(*ours), snapshot(*reference), 1e-5)
    assert step.stats.reason == "it reads the state of the optimizer that updates it"


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


def test_each_option_of_fast_step_is_the_one_of_its_name() -> None:
    given: dict[str, Any] = {
        "max_grad_norm": 0.5,
        "max_grad_value": 0.25,
        "weighted": True,
        "nonfinite": "raise",
        "max_loss": 1e3,
        "compute_dtype": mx.bfloat16,
        "ema_decay": 0.75,
        "compile": False,
        "replay": False,
        "in_flight": 1,
        "max_traces": 7,
        "clear_cache_every": 5,
    }
    assert given.keys() == set(Options._fields)
    assert all(repr(given[name]) != repr(default) for name, default in Options._field_defaults.items())
    model, optimizer = nn.Linear(2, 1), optim.SGD(0.1)
    fast_step(model, optimizer, lambda model, x: (model(x).sum(), mx.array(1.0)), mx.ones((3, 2)), **given)
    kept = [options for _, its_optimizer, options in _programs if its_optimizer == id(optimizer)]
    assert kept == [Options(**given)]
