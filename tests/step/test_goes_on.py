"""What a loss does to its own numbers and logs is done at each step, wherever a trace stands for the call."""

from __future__ import annotations

import collections
import dataclasses
import random
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, fast_step
from support.beside import squares

pytestmark = pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")

LENGTHS: dict[str, Callable[[int], int]] = {
    "one length": lambda number: 8,
    "another at the second step": lambda number: 5 if number == 1 else 8,
    "two in turns": lambda number: 5 if number % 2 else 8,
    "the last is shorter": lambda number: 5 if number % 4 == 3 else 8,
}


class Agent:
    """Counts in attributes, a dict, a list, its class and its model; the kind says what else it changes."""

    total = 0

    def __init__(self, kind: str) -> None:
        Agent.total = 0
        self.kind, self.calls, self.seconds, self.rows, self.counts = kind, 0, 0.5, dict[str, int](), [0, 1.5]
        self.flag, self.beta, self.log, self.last = False, 1.0, list[int](), 0

    def reset(self) -> None:
        self.calls, self.flag, self.beta = 0, False, 1.0
        self.rows.clear()

    def __call__(self, model: nn.Module, x: mx.array) -> mx.array:
        kind, loss = self.kind, squares(model, x)
        if kind == "counts":
            self.calls += 1
            self.seconds += 0.25
            self.rows["rows"] = self.rows.get("rows", 0) + len(x)
            self.counts[1] += 2
            self.flag = True
            Agent.total += 1
        elif kind == "model":
            model.calls += 1
        elif kind == "log":
            self.log.append(len(x))
        elif kind == "last":
            self.last = len(x)
        elif kind == "products":
            self.beta *= 0.9
        elif kind == "circle":
            self.calls = (self.calls + 1) % 3
        elif kind == "a flag that matters":
            loss = loss * (1.0 if self.flag else 0.1)
            self.flag = True
        elif kind == "a number that matters":
            self.calls += 1
            loss = loss * (0.5 if self.calls >= 4 else 1.0)
        elif kind == "numbered":
            loss = loss * self.rows.setdefault(str(len(x)), 1 + len(self.rows))
        elif kind == "draws later":
            self.calls += 1
            loss = loss * (random.random() if self.calls > 3 else 1.0)
        return loss

    def shown(self) -> Any:
        return {**vars(self), "rows": dict(self.rows), "log": list(self.log), "counts": list(self.counts)}, Agent.total


KINDS = {
    "counts": "native",
    "model": "native",
    "log": "native",
    "last": "native",
    "products": "plain",
    "circle": "plain",
    "a flag that matters": "plain",
    "a number that matters": "plain",
    "numbered": None,
    "draws later": "plain",
}


def run(
    way: str, kind: str, length: Callable[[int], int], resets: tuple[int, ...]
) -> tuple[list[float], list[Any], str]:
    mx.random.seed(1)
    random.seed(1)
    model, optimizer, agent = nn.Linear(4, 3), optim.Adam(0.05), Agent(kind)
    losses, left = list[float](), list[Any]()
    model.calls = 0
    step, gradients = Step(model, optimizer, agent), nn.value_and_grad(model, agent)
    for number in range(12):
        if number in resets:
            agent.reset()
        x = mx.random.normal((length(number), 4), key=mx.random.key(number))
        if way == "plain":
            loss, found = gradients(model, x)
            optimizer.update(model, found)
        elif way == "step":
            loss = step(x).loss
        else:
            loss = fast_step(model, optimizer, agent, x)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(loss.item())
        left.append((agent.shown(), model.calls, random.getstate()))
    return losses, left, step.stats.mode


@pytest.mark.parametrize("resets", [(), (1,), (5,), (1, 6)], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_left_behind_is_what_the_plain_loop_leaves(kind: str, length: str, resets: tuple[int, ...]) -> None:
    given = (kind, LENGTHS[length], resets)
    wanted, plain, _ = run("plain", *given)
    for way in ("step", "fast_step"):
        losses, ours, mode = run(way, *given)
        np.testing.assert_allclose(losses, wanted, rtol=2e-5 if mx.default_device() == mx.cpu else 1e-3)
        assert ours == plain
        if KINDS[kind] and way == "step":
            assert mode == KINDS[kind]


def test_a_meter_of_arrays_and_numbers_has_the_plain_loops_mean() -> None:
    means = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, meter = nn.Linear(4, 3), optim.SGD(0.1), types.SimpleNamespace(sum=mx.array(0.0), count=0)

        def loss_fn(model: nn.Module, x: mx.array, meter: types.SimpleNamespace = meter) -> mx.array:
            loss = squares(model, x)
            meter.sum = meter.sum + mx.stop_gradient(loss) * len(x)
            meter.count += len(x)
            return loss

        step, means = Step(model, optimizer, loss_fn), [*means, []]
        for number in range(8):
            x = mx.random.normal((5 if number % 3 == 2 else 8, 4), key=mx.random.key(number))
            if fast:
                step(x)
            else:
                optimizer.update(model, nn.value_and_grad(model, loss_fn)(model, x)[1])
            means[-1].append(float(meter.sum) / meter.count)
    np.testing.assert_allclose(means[1], means[0], rtol=1e-5)
    assert step.stats.mode == "native"


@pytest.mark.parametrize("between", ["another loss", "the loss by hand", "a plain step"])
def test_what_others_add_to_a_count_on_the_model_is_seen(between: str) -> None:
    def one(model: nn.Module, x: mx.array) -> mx.array:
        model.calls += 1
        return squares(model, x) * (1 + 0.1 * model.calls)

    def other(model: nn.Module, x: mx.array) -> mx.array:
        model.calls += 1
        return squares(model, x) * (1 - 0.01 * model.calls)

    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 3), optim.Adam(0.05)
        model.calls = 0
        steps = {loss: Step(model, optimizer, loss) for loss in (one, other)}
        losses.append([])
        for number in range(8):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            loss_fn = other if between == "another loss" and number % 2 else one
            if fast and not (between == "a plain step" and number == 1):
                loss = steps[loss_fn](x).loss
            else:
                loss, gradients = nn.value_and_grad(model, loss_fn)(model, x)
                optimizer.update(model, gradients)
                mx.eval(model.parameters(), optimizer.state)
            losses[-1].append(loss.item())
            if between == "the loss by hand":
                losses[-1].append(one(model, x).item())
        assert model.calls == (16 if between == "the loss by hand" else 8)
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


def test_a_count_takes_no_trace_and_no_look_at_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 2), 0

        def __call__(self, x: mx.array) -> mx.array:
            print("called")
            self.calls += 1
            return self.layer(x)

    model = Counting()
    step = Step(model, optim.SGD(0.1), squares)
    step(mx.ones((3, 4)))
    capsys.readouterr()
    for _ in range(50):
        step(mx.ones((3, 4)))
    assert (model.calls, step.stats.traced, capsys.readouterr().out) == (51, 1, "")


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def add_to(place: Any, key: Any) -> None:
    if isinstance(place, dict):
        place[key] = place.get(key, 0) + 1
    elif isinstance(place, list):
        place[key] += 1
    else:
        setattr(place, key, getattr(place, key) + 1)


HOLDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "dict": (lambda: {"n": 0}, lambda it: add_to(it, "n")),
    "empty dict": (dict, lambda it: add_to(it, "n")),
    "counter": (collections.Counter, lambda it: it.update(["n"])),
    "default": (lambda: collections.defaultdict(int), lambda it: add_to(it, "n")),
    "list": (lambda: [0, 1.5], lambda it: add_to(it, 1)),
    "object": (lambda: types.SimpleNamespace(n=0), lambda it: add_to(it, "n")),
    "slots": (Slotted, lambda it: add_to(it, "count")),
    "log": (list, lambda it: it.append(1)),
    "queue": (lambda: collections.deque(maxlen=4), lambda it: it.append("a")),
}


def contents(it: Any) -> Any:
    if isinstance(it, Slotted | types.SimpleNamespace):
        return it.count if isinstance(it, Slotted) else dict(vars(it))
    return list(it.items()) if isinstance(it, dict) else list(it)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", ["replaced", "cleared", "in turns"])
@pytest.mark.parametrize("kind", HOLDERS)
def test_what_is_added_goes_to_the_object_that_is_there(kind: str, how: str, every: int) -> None:
    make, add = HOLDERS[kind]
    left: list[list[Any]] = []
    for fast in (False, True):
        model, optimizer, all_of_them = nn.Linear(4, 3), optim.SGD(0.0), [make() for _ in range(3)]
        state = types.SimpleNamespace(kept=make())

        def loss_fn(model: nn.Module, x: mx.array, state: types.SimpleNamespace = state) -> mx.array:
            add(state.kept)
            return squares(model, x)

        step, gradients = Step(model, optimizer, loss_fn), nn.value_and_grad(model, loss_fn)
        left.append([])
        for number in range(9):
            if how == "in turns":
                state.kept = all_of_them[number % 3]
            elif number % every == 0 and how == "replaced":
                state.kept = make()
            elif number % every == 0 and isinstance(state.kept, dict | collections.deque) and kind != "dict":
                state.kept.clear()
            if fast:
                step(mx.ones((3, 4)))
            else:
                gradients(model, mx.ones((3, 4)))
            left[-1].append((contents(state.kept), [contents(each) for each in all_of_them]))
    assert left[1] == left[0]
    if kind not in ("empty dict", "counter", "default"):  # whose key is made anew
        assert step.stats.mode == "native"


class Noting:
    """Counts behind a property, whose setter notes each time that it is called."""

    def __init__(self) -> None:
        self._count, self.sets = 0, 0

    @property
    def count(self) -> int:
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        self._count = value
        self.sets += 1


def test_a_setter_is_called_once_in_a_call() -> None:
    noting = Noting()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        noting.count += 1
        return squares(model, x)

    step = Step(nn.Linear(4, 3), optim.SGD(0.1), loss_fn)
    for number in range(6):
        step(mx.ones((3, 4)))
        assert (noting.count, noting.sets, type(noting.count)) == (number + 1, number + 1, int)
    assert step.stats.mode == "native"


def test_keys_that_a_loss_makes_keep_their_order() -> None:
    kept: dict[str, int] = {}

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        for name in ("seen", "tokens", "calls"):
            add_to(kept, name)
        return squares(model, x)

    step = Step(nn.Linear(4, 3), optim.SGD(0.1), loss_fn)
    for _ in range(4):
        step(mx.ones((3, 4)))
    assert list(kept.items()) == [("seen", 4), ("tokens", 4), ("calls", 4)]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("at", [0, 1, 4])
@pytest.mark.parametrize("how", ["flag", "text", "shape"])
def test_what_a_loss_adds_before_it_raises_stays(how: str, at: int, stores: bool, compile: bool) -> None:
    """An array beside that keeps the value of before: that of the call was one of a trace."""
    state = types.SimpleNamespace(calls=0, log=[], bad=False, last=mx.array(0.0))

    def loss_fn(model: nn.Module, x: mx.array, kind: str) -> mx.array:
        state.calls += 1
        state.log.append(1)
        model.calls += 1
        loss = squares(model, x)
        if stores:
            state.last = loss
        if state.bad or kind == "bad" or len(x) == 5:
            raise ArithmeticError("a bad batch")
        return loss

    model = nn.Linear(4, 3)
    model.calls = 0
    step = Step(model, optim.SGD(0.1), loss_fn, compile=compile)
    for number in range(8):
        state.bad = how == "flag" and number == at
        x = mx.ones((5 if how == "shape" and number == at else 3, 4))
        if number == at:
            with pytest.raises(ArithmeticError):
                step(x, "bad" if how == "text" else "good")
        else:
            step(x, "good")
        assert (state.calls, len(state.log), model.calls) == (number + 1,) * 3
        assert (state.last.item() > 0) == (stores and (not compile or number > at or at > 0))
    assert step.stats.mode == ("native" if compile else "plain")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("begins", ["by a count", "by a flag"])
@pytest.mark.parametrize("kind", ["random", "numpy", "own"])
def test_a_loss_that_begins_to_draw_and_uses_it_by_chance_is_called_at_each_step(
    kind: str, begins: str, seed: int
) -> None:
    losses: list[list[float]] = []
    for fast in (False, True):
        mx.random.seed(0)
        random.seed(seed)
        np.random.seed(seed)
        state = types.SimpleNamespace(calls=0, on=False, own=np.random.default_rng(seed))
        draw = {"random": random.random, "numpy": np.random.rand, "own": state.own.random}[kind]

        def loss_fn(model: nn.Module, x: mx.array, state: Any = state, draw: Callable[[], float] = draw) -> mx.array:
            if (state.on if begins == "by a flag" else state.calls >= 3) and draw() < 0.5:
                x = -2 * x
            if begins == "by a count":
                state.calls += 1
            return squares(model, x)

        model, optimizer = nn.Linear(4, 3), optim.SGD(0.1)
        step, gradients = Step(model, optimizer, loss_fn), nn.value_and_grad(model, loss_fn)
        losses.append([])
        for number in range(10):
            state.on = number >= 3
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if fast:
                losses[-1].append(step(x).loss.item())
            else:
                loss, found = gradients(model, x)
                optimizer.update(model, found)
                losses[-1].append(loss.item())
        losses[-1].append(draw())
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert step.stats.mode == "plain"


@dataclasses.dataclass
class Held:
    """An argument that a loss counts and logs in."""

    counts: dict[str, int]
    log: list[int]


class Now:
    """A loss that does something at some of its calls; the kind says what."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls, self.epoch, self.last, self.best = kind, 0, 0, None, 0.0
        self.log: list[Any] = []
        self.tables: tuple[dict[str, int], ...] = ({}, collections.defaultdict(int), collections.Counter())
        self.held = Held({}, [])
        self.pair = types.SimpleNamespace(a=[], b=[])

    def __call__(self, model: nn.Module, x: mx.array, held: Held | None = None) -> mx.array:
        kind, loss = self.kind, squares(model, x)
        short = len(x) < 8
        if kind.startswith("arrays"):
            self.calls += 1
            if self.calls % int(kind[-1]) == 0:
                self.log.append(mx.stop_gradient(loss))
                self.last = {"loss": mx.stop_gradient(loss)}
        elif kind == "an epoch by the last batch":
            self.epoch += short
            loss = loss * 0.8**self.epoch
        elif kind == "an epoch that others read":
            if short:
                self.epoch += 1
                return loss
            loss = loss * (1 + 0.1 * min(self.epoch, 3))
        elif kind == "set back by the last batch":
            self.calls += 1
            if short:
                self.calls = 0
        elif kind == "counts by rows":
            for table in self.tables:
                table["rows"] = table.get("rows", 0) + len(x)
            self.rows = getattr(self, "rows", 0) + len(x)
            rows = [self.rows, *(table["rows"] for table in self.tables)]
            loss = loss * (1.0 if max(rows) < 60 else 0.3)
        elif kind == "the second call":
            self.calls += 1
            if self.calls == 2:
                model.stage, model.mode = 1, "b"
        elif kind == "in an argument":
            assert held is not None
            held.counts["calls"] = held.counts.get("calls", 0) + 1
            held.log.append(len(x))
            loss = loss * held.counts["calls"]
        elif kind == "in turns":
            self.pair.a.append(len(x))
        return loss


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "kind",
    [
        "arrays at every 2",
        "arrays at every 3",
        "arrays at every 7",
        "an epoch by the last batch",
        "an epoch that others read",
        "set back by the last batch",
        "counts by rows",
        "the second call",
        "in an argument",
        "in turns",
    ],
)
def test_what_a_loss_does_at_some_calls_or_for_some_batches_is_done_then(kind: str, length: str) -> None:
    def run(fast: bool) -> list[Any]:
        mx.random.seed(1)
        model, optimizer, loss_fn = nn.Linear(4, 3), optim.SGD(0.1), Now(kind)
        model.stage, model.mode, taken = 0, "a", list[Any]()
        for number in range(14):
            x = mx.random.normal((LENGTHS[length](number), 4), key=mx.random.key(number))
            more = (loss_fn.held,) if kind == "in an argument" else ()
            if fast:
                loss = fast_step(model, optimizer, loss_fn, x, *more, nonfinite="allow")
            else:
                loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, *more)
                optimizer.update(model, gradients)
                mx.eval(model.state, optimizer.state)
            if kind == "in turns" and number % 3 == 2:
                loss_fn.pair.a, loss_fn.pair.b = loss_fn.pair.b, loss_fn.pair.a
            logged = [round(each.item(), 4) for each in loss_fn.log]
            last = loss_fn.last and round(loss_fn.last["loss"].item(), 4)
            rows = [getattr(loss_fn, "rows", 0), *map(dict, loss_fn.tables)]
            counts = [loss_fn.calls, loss_fn.epoch, model.stage, model.mode, len(loss_fn.pair.a), len(loss_fn.pair.b)]
            held = [dict(loss_fn.held.counts), list(loss_fn.held.log)]
            taken.append([round(loss.item(), 4), logged, last, rows, counts, held])
        return taken

    assert run(fast=True) == run(fast=False)


@pytest.mark.parametrize("tries", [False, True])
def test_a_global_that_the_first_call_makes_counts_on(tries: bool) -> None:
    def run(take: Callable[..., Any], space: dict[str, Any]) -> list[Any]:
        losses = [take(mx.ones((6, 4)) * number).loss.item() for number in range(1, 20)]
        return [*losses, space["seen"]]

    source = """
def by_get():
    global seen
    seen = globals().get("seen", 0) + 6
    return seen
def by_try():
    global seen
    try:
        seen += 6
    except NameError:
        seen = 6
    return seen
def loss_fn(model, x):
    return (model(x) ** 2).mean() * (1.0 if count() < 60 else 0.3)
"""
    results = []
    for compiled in (True, False):
        space: dict[str, Any] = {}
        exec(source, space)
        space["count"] = space["by_try" if tries else "by_get"]
        mx.random.seed(0)
        model = nn.Linear(4, 2)
        results.append(run(Step(model, optim.SGD(0.001), space["loss_fn"], compile=compiled), space))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)
    assert results[0][-1] == 6 * 19


@pytest.mark.parametrize("shared", ["random", "numpy"])
def test_a_generator_of_its_own_is_put_back_beside_the_process_s(shared: str) -> None:
    def run(fast: bool) -> list[float]:
        random.seed(0)
        np.random.seed(0)
        mx.random.seed(0)
        own, state = np.random.default_rng(1), types.SimpleNamespace(calls=0)
        draw = random.random if shared == "random" else np.random.random

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            state.calls += 1
            loss = squares(model, x)
            if state.calls > 6:
                loss = loss * own.random()
            if state.calls > 4 and draw() < 0.5:
                loss = loss * 0.5
            return loss

        model, optimizer, losses = nn.Linear(4, 3), optim.SGD(0.1), []
        for number in range(10):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if fast:
                loss = fast_step(model, optimizer, loss_fn, x, nonfinite="allow")
            else:
                loss, gradients = nn.value_and_grad(model, loss_fn)(model, x)
                optimizer.update(model, gradients)
            losses.append(round(loss.item(), 5))
        return [*losses, own.random()]

    assert run(fast=True) == run(fast=False)


@pytest.mark.parametrize("by", ["argument", "attribute"])
def test_a_loss_that_counts_is_not_called_for_each_step_of_two_kinds_in_turns(by: str) -> None:
    """A text says which of two traces stands for the call; both count in one number."""
    entered: list[list[int]] = []
    for counts in (False, True):

        class Tasks:
            calls, task = 0, "a"

            def loss(self, model: nn.Module, x: mx.array, task: str | None = None) -> mx.array:
                if counts:  # noqa: B023
                    self.calls += 1
                loss = squares(model, x)
                return loss if (task or self.task) == "a" else 2 * loss

        tasks = Tasks()
        step = Step(nn.Linear(4, 2), optim.SGD(0.05), tasks.loss)
        entered.append([])
        for number in range(40):
            task = "ab"[number % 2]
            tasks.task = task
            before = step.stage()[1]
            step(mx.ones((8, 4)), *([task] if by == "argument" else []))
            entered[-1].append(step.stage()[1] - before)
        assert (tasks.calls, step.stats.traced) == (40 * counts, 2)
    assert entered[1][30:] == entered[0][30:]  # before that the loss is called on trial now and then


@pytest.mark.parametrize(("by", "first", "mode"), [(0.1, 3.92, "native"), (0.001, 0, "native"), (1 / 3, 3.92, "plain")])
def test_a_float_that_the_loss_adds_to_is_the_plain_loop_s_to_the_bit(by: float, first: float, mode: str) -> None:
    """What is added differs in its last bits, as far as a difference of two floats tells."""

    class Warm:
        time, kind = float(first), 0.0

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.time += by
            self.kind = 0 if self.kind == 0.0 else self.kind
            return squares(model, x)

    warm, expected = Warm(), float(first)
    warm.time = expected
    step = Step(nn.Linear(4, 2), optim.SGD(0.05), warm.loss)
    for number in range(60):
        if number % 7 == 3:
            warm.time, warm.kind, expected = warm.time * 0.98, 0.0, expected * 0.98
        step(mx.ones((8, 4)))
        expected += by
        assert (warm.time, repr(warm.kind)) == (expected, "0")
    assert step.stats.mode == mode
