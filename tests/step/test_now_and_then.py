"""Losses and optimizers that change or take something at some calls, in some order: the plain loop's numbers."""

from __future__ import annotations

import collections
import operator
import queue
import threading
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map
from support.beside import squares
from support.helpers import plain_step

Draw = Callable[[], float]
DRAWS: dict[str, Callable[[], Draw]] = {
    "numpy": lambda: np.random.default_rng(1).random,
    "numpy of the process": lambda: (np.random.seed(1), np.random.rand)[1],
    "a counter": lambda: counter([0]),
    "a counter in a dict": lambda: counter({0: 0}),
    "a generator": lambda: (1 + 0.5 * number for number in range(99)).__next__,
}


def counter(numbers: Any) -> Draw:
    def count() -> float:
        numbers[0] += 1
        return 1 + 0.1 * numbers[0]

    return count


def same(build: Callable[[], tuple[nn.Module, Any, Callable[..., Any], list[Any]]], way: str = "plain") -> None:
    """Train on what a program gives by the plain loop, and by a step that falls back with a warning."""
    losses: list[list[Any]] = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, loss_fn, calls = build()
        mx.eval(model.parameters())
        step = Step(model, optimizer, loss_fn)
        plain = plain_step(model, optimizer, loss_fn)
        losses.append([])
        for arguments in calls:
            given = arguments() if callable(arguments) else arguments
            try:
                losses[-1].append(float(step(*given).loss if fast else plain(*given)[0]))
            except ArithmeticError:
                losses[-1].append(None)
    assert [each is None for each in losses[0]] == [each is None for each in losses[1]]
    pairs = zip(*losses, strict=True)
    np.testing.assert_allclose(*zip(*(pair for pair in pairs if None not in pair), strict=True), rtol=2e-5)
    assert step.stats.mode == way


def xs(*lengths: int) -> list[mx.array]:
    return [mx.random.normal((length, 4), key=mx.random.key(number)) for number, length in enumerate(lengths)]


@pytest.mark.filterwarnings("ignore:faststep")
@pytest.mark.parametrize("by", ["shape", "argument", "mode", "flag", "key", "function"])
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("order", ["ABAA", "BBBBABBBBABBBBA"])
def test_what_is_drawn_for_some_batches_is_drawn_at_each_of_them(kind: str, by: str, order: str) -> None:
    """The step behind one that draws may be one that does not."""

    def build() -> tuple[nn.Module, Any, Callable[..., Any], list[Any]]:
        draw, model, table = DRAWS[kind](), nn.Linear(4, 2), dict[str, int]()
        state = types.SimpleNamespace(on=False, draws=None)

        def loss_fn(model: nn.Module, x: mx.array, on: bool) -> mx.array:
            draws = {
                "shape": len(x) == 8,
                "argument": on,
                "mode": model.training,
                "flag": state.on,
                "key": "on" in table,
                "function": state.draws is not None and state.draws(),
            }
            return squares(model, x) * (draw() if draws[by] else 1.0)

        def call(letter: str, x: mx.array) -> Callable[[], Any]:
            def given() -> Any:
                state.on = on = letter == "A"
                state.draws = (lambda: True) if on else None
                model.train(on)
                table.update({"on": 1} if on else {})
                if not on:
                    table.pop("on", None)
                return x, on if by == "argument" else False

            return given

        lengths = [8 if letter == "A" or by != "shape" else 6 for letter in order]
        return model, optim.SGD(0.1), loss_fn, [call(*each) for each in zip(order, xs(*lengths), strict=True)]

    same(build)


class Counting(nn.Module):
    """A layer that counts its calls, and does something else at each third."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self._past = nn.Linear(4, 2), 0, [0]

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        self._past.append(self.calls)
        return self.linear(x) * (1.0 if self.calls % 3 else 0.5) + 0.1 * self._past[-2]


@pytest.mark.filterwarnings("ignore:faststep")
@pytest.mark.parametrize("by", ["shape", "mode", "frozen", "argument"])
@pytest.mark.parametrize("odd", range(3))
def test_what_a_model_counts_goes_on_whatever_trace_the_next_step_has(by: str, odd: int) -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any], list[Any]]:
        model = Counting()

        def loss_fn(model: nn.Module, x: mx.array, flag: bool) -> mx.array:
            return squares(model, x)

        def call(number: int) -> Callable[[], Any]:
            def given() -> Any:
                assert model.calls == number
                is_odd = number == odd
                if by == "mode":
                    model.train(is_odd)
                if by == "frozen":
                    model.linear.freeze(keys="bias") if is_odd else model.unfreeze()
                return xs(*[6 if is_odd and by == "shape" else 8] * 9)[number], is_odd and by == "argument"

            return given

        optimizer = optim.Adam(0.1)
        optimizer.init(model.trainable_parameters())
        return model, optimizer, loss_fn, [call(number) for number in range(9)]

    same(build)


@pytest.mark.filterwarnings("ignore:faststep")
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_loss_that_counts_and_raises_once_goes_on(at: int) -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any], list[Any]]:
        calls = [0]

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            calls[0] += 1
            if calls[0] == at:
                raise ArithmeticError
            return squares(model, x)

        return nn.Linear(4, 2), optim.SGD(0.1), loss_fn, [(x,) for x in xs(*[8] * 7)]

    same(build, "native" if at < 3 else "plain")


class Linked:
    """An object that leads to the next one."""

    def __init__(self, weight: float) -> None:
        self.weight, self.next = weight, self


def linked(*weights: float) -> Linked:
    objects = [Linked(weight) for weight in weights]
    for one, other in zip(objects, objects[1:] + objects[:1], strict=True):
        one.next = other
    return objects[0]


Weigh = Callable[[nn.Module], Any]


def in_cell() -> Weigh:
    now = linked(1.0, 1.5, 2.0)

    def weigh(_: nn.Module) -> float:
        nonlocal now
        now = now.next
        return now.weight

    return weigh


def on_model() -> Weigh:
    def weigh(model: nn.Module) -> float:
        model.now = getattr(model, "now", None) or linked(1.0, 1.5, 2.0)
        model.now = model.now.next
        return float(model.now.weight)

    return weigh


def in_turns(make: Callable[[Any], Any]) -> Callable[[], Weigh]:
    def build() -> Weigh:
        table = {name: make(weight) for name, weight in zip("abc", (1.0, 1.5, 2.0), strict=True)}

        def weigh(_: nn.Module) -> Any:
            name = next(iter(table))
            table[name] = table.pop(name)
            return table[name]

        return weigh

    return build


def rotated(make: Callable[[float], Any], read: Callable[[Any], Any]) -> Callable[[], Weigh]:
    def build() -> Weigh:
        items = collections.deque(make(weight) for weight in (1.0, 1.5, 2.0))

        def weigh(_: nn.Module) -> Any:
            items.rotate(1)
            return read(items[0])

        return weigh

    return build


def two_views() -> Weigh:
    base = np.ones((2, 3))
    row = base[0]

    def weigh(_: nn.Module) -> float:
        row[0] += 0.5
        return float(base[0, 0])

    return weigh


def late(count: Callable[[], int]) -> Weigh:
    return lambda _: 3.0 if count() >= 6 else 1.0


def in_list() -> Weigh:
    numbers = [0, 5]

    def count() -> int:
        numbers[0] += 1
        return numbers[0]

    return late(count)


def by_default() -> Weigh:
    box = types.SimpleNamespace()

    def count() -> int:
        box.calls = getattr(box, "calls", 0) + 1
        return int(box.calls)

    return late(count)


def semaphore() -> Weigh:
    permits = threading.Semaphore(100)
    return lambda _: 1.0 + 0.0 * permits.acquire()


def batches_of_a_queue() -> Weigh:
    full: queue.Queue[float] = queue.Queue(4)

    def fill() -> None:
        for number in range(8):
            full.put(1 + 0.5 * number)

    threading.Thread(target=fill, daemon=True).start()
    return lambda _: full.get(timeout=60)


CHANGES: dict[str, Callable[[], Weigh]] = {
    "an object in a cell": in_cell,
    "an object on the model": on_model,
    "the order of a dict": in_turns(float),
    "the order of a dict of arrays": in_turns(mx.array),
    "a deque of tuples": rotated(lambda weight: (0, weight), lambda item: item[1]),
    "a deque of objects": rotated(Linked, lambda item: item.weight),
    "a deque of numbers": rotated(float, float),
    "an array and its view": two_views,
    "a number in a list, later": in_list,
    "a number by its default, later": by_default,
    "a semaphore": semaphore,
    "a queue": batches_of_a_queue,
}


@pytest.mark.filterwarnings("ignore:faststep")
@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_loss_changes_in_turns_is_changed_at_each_step(kind: str) -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any], list[Any]]:
        weigh = CHANGES[kind]()
        loss_fn = lambda model, x: squares(model, x) * weigh(model)  # noqa: E731
        return nn.Linear(4, 2), optim.SGD(0.1), loss_fn, [(x,) for x in xs(*[8] * 8)]

    same(build)


def noisy() -> optim.Optimizer:
    rng = np.random.default_rng(1)

    class Noisy(optim.SGD):
        def apply_single(self, gradient: mx.array, parameter: mx.array, state: Any) -> mx.array:
            noise = mx.array(rng.standard_normal(gradient.shape).astype(np.float32))
            return super().apply_single(gradient + 0.1 * noise, parameter, state)

    return Noisy(0.1)


def cycling(reads: bool) -> optim.Optimizer:
    numbers, log = [0], list[float]()

    class Cycling(optim.SGD):
        def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
            numbers[0] = (numbers[0] + 1) % 3
            scale = 1.0 + numbers[0]
            if reads:
                log.append(float(gradients["bias"].sum()))
                scale += 0.1 * len(log)
            return super().apply_gradients(tree_map(lambda each: each * scale, gradients), parameters)

    return Cycling(0.1)


def taking() -> optim.Optimizer:
    scales = iter(np.linspace(1, 2, 20).tolist())

    class Taking(optim.SGD):
        def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
            scale = next(scales)
            return super().apply_gradients(tree_map(lambda each: each * scale, gradients), parameters)

    return Taking(0.1)


@pytest.mark.filterwarnings("ignore:faststep")
@pytest.mark.parametrize(
    "make",
    [noisy, taking, lambda: cycling(False), lambda: cycling(True)],
    ids=["draws", "takes", "counts in a circle", "counts and reads"],
)
def test_what_an_optimizer_changes_itself_is_changed_at_each_update(make: Callable[[], optim.Optimizer]) -> None:
    def build() -> tuple[nn.Module, Any, Callable[..., Any], list[Any]]:
        return nn.Linear(4, 2), make(), squares, [(x,) for x in xs(*[8] * 8)]

    same(build)


@pytest.mark.filterwarnings("ignore:faststep")
class Schedule:
    """Counts calls of a loss; what it reads beside that is set later."""

    def __init__(self) -> None:
        self.calls, self.on, self.weight, self.phase, self.epoch = 0, False, 0.0, "warm", 0
        self.terms, self.table, self.log, self.scale = list[int](), dict[str, int](), list[int](), 1.0


# what is set after 12 steps, and what the loss reads of that
LATER: dict[str, tuple[Callable[[Schedule, nn.Module], object], Callable[[Schedule, nn.Module], bool]]] = {
    "a flag": (lambda it, _: setattr(it, "on", True), lambda it, _: it.on),
    "a weight": (lambda it, _: setattr(it, "weight", 0.1), lambda it, _: it.weight > 0),
    "a text": (lambda it, _: setattr(it, "phase", "full"), lambda it, _: it.phase == "full"),
    "an epoch": (lambda it, _: setattr(it, "epoch", 3), lambda it, _: it.epoch >= 3),
    "an item of a list": (lambda it, _: it.terms.append(1), lambda it, _: len(it.terms) > 0),
    "an item of a dict": (lambda it, _: it.table.update(on=1), lambda it, _: it.table.get("on", 0) == 1),
    "a new attribute": (lambda it, _: setattr(it, "more", 1), lambda it, _: hasattr(it, "more")),
    "a mode of the model": (lambda _, model: model.train(), lambda _, model: model.training),
    "an attribute of the model": (lambda _, model: setattr(model, "on", True), lambda _, model: "on" in vars(model)),
}


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("lengths", [1, 3])
@pytest.mark.parametrize("counts", ["a number", "a log", "a number of the model"])
@pytest.mark.parametrize("kind", LATER)
def test_what_is_set_later_may_decide_something_at_every_tenth_call(kind: str, counts: str, lengths: int) -> None:
    change, is_on = LATER[kind]
    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, schedule = nn.Linear(4, 3), optim.SGD(0.1), Schedule()
        model.calls = 0
        model.eval()

        def loss_fn(model: nn.Module, x: mx.array, schedule: Schedule = schedule) -> mx.array:
            if counts == "a log":
                schedule.log.append(1)
                calls = len(schedule.log)
            elif counts == "a number":
                schedule.calls += 1
                calls = schedule.calls
            else:
                model.calls += 1
                calls = model.calls
            loss = squares(model, x) * schedule.scale
            return loss * 3 if is_on(schedule, model) and calls % 10 == 0 else loss

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        losses.append([])
        for number in range(32):
            if number == 12:
                change(schedule, model)
            schedule.scale = 1 + number // 5 * 0.1
            x = mx.random.normal((8 - number % lengths, 4), key=mx.random.key(number))
            losses[-1].append(float(step(x).loss if fast else plain(x)[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


# what a count that goes on from another one than 0 comes to
COUNTED: dict[str, Callable[[int], object]] = {
    "a remainder": lambda count: count % 40 == 5,
    "a range of remainders": lambda count: count % 16 < 3,
    "two remainders": lambda count: count % 30 in (4, 7),
    "a share of a period": lambda count: (count % 50) / 50 < 0.1,
    "a remainder of a quotient": lambda count: (count // 12) % 3 == 1,
    "the rest of a division": lambda count: divmod(count, 50)[1] == 2,
    "the last bits": lambda count: count & 31 == 3,
    "a whole number": lambda count: int(count / 20) % 2,
    "a rounded number": lambda count: round(count / 20) % 2,
    "no remainder": lambda count: not count % 36,
}


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("counts", ["a number", "a log", "a number of the model"])
@pytest.mark.parametrize("start", [7, 1007])
@pytest.mark.parametrize("kind", COUNTED)
def test_a_count_that_begins_elsewhere_may_decide_something(kind: str, start: int, counts: str) -> None:
    if counts == "a log" and kind not in ("a remainder", "no remainder"):
        pytest.skip("a length does not note what is computed of it")
    losses, decides = [], COUNTED[kind]
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer, log = nn.Linear(4, 3), optim.SGD(1e-3), [0] * start
        agent = types.SimpleNamespace(calls=start)
        model.calls = start

        def loss_fn(model: nn.Module, x: mx.array, agent: Any = agent, log: list[int] = log) -> mx.array:
            if counts == "a log":
                log.append(1)
                calls = len(log)
            else:
                holder = agent if counts == "a number" else model
                holder.calls += 1
                calls = holder.calls
            loss = squares(model, x)
            return loss * 3 if decides(calls) else loss

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        x = mx.random.normal((8, 4), key=mx.random.key(3))
        losses.append([float(step(x).loss if fast else plain(x)[0]) for _ in range(60)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


BEHIND: dict[str, Callable[[int], bool]] = {
    "warm-up, then every": lambda n: n > 30 and n % 12 == 0,
    "every, after a warm-up": lambda n: n % 12 == 0 and n > 30,
    "a phase that begins there": lambda n: n > 18 and (n - 18) % 5 == 0,
    "an epoch and a batch": lambda n: divmod(n, 20) == (2, 7),
    "between": lambda n: 25 < n < 60 and not n % 11,
    "one that rounds": lambda n: n / 11 > 1 and (n - 11) % 25 == 0,
    "three": lambda n: n % 2 == 0 and n >= 20 and n // 16 == 2,
}


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("counts", ["a number", "a log", "a number of the model"])
@pytest.mark.parametrize("effect", ["the loss", "a count"])
@pytest.mark.parametrize("kind", BEHIND)
def test_what_is_decided_behind_another_decision_is_seen(kind: str, effect: str, counts: str) -> None:
    """As codebooks restart: `if steps > warmup and steps % every == 0`."""
    if counts == "a log" and kind == "an epoch and a batch":
        pytest.skip("a length does not note what is computed of it")

    def run(fast: bool) -> tuple[list[float], int]:
        mx.random.seed(3)
        model = nn.Linear(4, 2)
        model.calls = 0
        seen, log, events = types.SimpleNamespace(calls=0), list[int](), collections.Counter[str]()
        optimizer = optim.SGD(0.05)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = model(x).square().mean()
            seen.calls += counts == "a number"
            if counts == "a log":
                log.append(1)
            if counts == "a number of the model":
                model.calls += 1
            if BEHIND[kind](seen.calls + len(log) + model.calls):
                if effect == "a count":
                    events["n"] += 1
                else:
                    loss = 0.5 * loss
            return loss

        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        batches = [mx.random.normal((4, 4)) for _ in range(70)]
        losses = [(step(x).loss if step else take(x)[0]).item() for x in batches]
        return losses, events["n"]

    (losses, events), (wanted, expected) = run(fast=True), run(fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert events == expected


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("counts", ["a number", "a number of the model", "a deque", "a full deque"])
@pytest.mark.parametrize("at", [15, 27])
def test_a_count_that_is_set_back_is_looked_at_again(counts: str, at: int) -> None:
    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 3), optim.SGD(1e-3)
        window = collections.deque[int](maxlen=12 if counts == "a full deque" else None)
        agent = types.SimpleNamespace(calls=0, stage=1)
        model.calls = 0

        def loss_fn(model: nn.Module, x: mx.array, agent: Any = agent, window: Any = window) -> mx.array:
            if "deque" in counts:
                window.append(len(x))
                calls = len(window)
            else:
                holder = agent if counts == "a number" else model
                holder.calls += 1
                calls = holder.calls
            loss = squares(model, x)
            return loss * 3 if agent.stage == 2 and calls > 10 else loss

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        x = mx.random.normal((8, 4), key=mx.random.key(3))
        losses.append([])
        for number in range(60):
            if number % 15 == 0:
                agent.calls = model.calls = 0
                window.clear()
            if number == at:
                agent.stage = 2
            losses[-1].append(float(step(x).loss if fast else plain(x)[0]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("kind", ["counts", "decides", "fades"])
def test_gradients_alone_count_too(kind: str) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        model.calls += 1
        if kind == "fades":
            model.share = max(0.1, model.share * 0.9)
        loss = squares(model, x) * (1 + model.share)
        return loss * 3 if kind == "decides" and model.calls % 3 == 0 else loss

    losses, left = [], []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 3), optim.SGD(0.1)
        model.calls, model.share = 0, 1.0
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        losses.append([])
        for number in range(9):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if number % 2:
                loss, _ = step.gradients(x) if fast else nn.value_and_grad(model, loss_fn)(model, x)
                losses[-1].append(float(loss))
            losses[-1].append(float(step(x).loss if fast else plain(x)[0]))
        left.append((model.calls, model.share))
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    assert left[0] == left[1]


def test_a_loss_that_counts_beside_numbers_that_change_stays_native() -> None:
    schedule = Schedule()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        schedule.calls += 1
        return squares(model, x) * (1 + schedule.epoch)

    model = nn.Linear(4, 3)
    step = Step(model, optim.SGD(1e-3), loss_fn)
    for number in range(120):
        schedule.epoch = number // 30
        step(mx.ones((8, 4)))
    assert schedule.calls == 120
    assert step.stats.mode == "native"
    assert len(step.stats.traces) <= 2


@pytest.mark.parametrize("make", [lambda: optim.AdamW(0.1), lambda: optim.Lion(0.1), lambda: optim.SGD(0.1)])
def test_a_parameter_of_integers_is_clipped_as_in_mlx(make: Callable[[], optim.Optimizer]) -> None:
    values = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = nn.Linear(4, 2), make()
        model.channels = mx.array([192])
        gradients_of = nn.value_and_grad(model, squares)
        step = Step(model, optimizer, squares, max_grad_norm=1.0)
        for x in xs(*[8] * 4):
            if fast:
                step(x)
            else:
                _, gradients = gradients_of(model, x)
                optimizer.update(model, optim.clip_grad_norm(gradients, 1.0)[0])
        values.append(np.array(model.channels))
    np.testing.assert_allclose(values[1], values[0], rtol=1e-6)


class Teacher(nn.Module):
    """A module that counts its calls, beside attributes of other kinds."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 3), 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x: mx.array) -> mx.array:
        self.calls += 1
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. its result depends")
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("attribute", [None, types.SimpleNamespace(width=4), squares, nn.gelu])
def test_a_count_on_another_module_is_one_at_each_call(attribute: Any, decides: bool) -> None:
    losses, counts = [], []
    for fast in (False, True):
        mx.random.seed(1)
        teacher, model, optimizer = Teacher(attribute=attribute), nn.Linear(4, 3), optim.SGD(0.1)
        teacher.freeze()

        def loss_fn(model: nn.Module, x: mx.array, teacher: Teacher = teacher) -> mx.array:
            loss = mx.square(model(x) - mx.stop_gradient(teacher(x))).mean()
            return loss * 2 if decides and teacher.calls % 5 == 4 else loss

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        for x in xs(*[8] * 14):
            losses.append(float(step(x).loss if fast else plain(x)[0]))
            counts.append(teacher.calls)
    np.testing.assert_allclose(losses[14:], losses[:14], rtol=2e-5)
    assert counts == [*range(1, 15)] * 2


@pytest.mark.parametrize("counts_in", ["long batches", "a mode", "another loss"])
def test_a_count_on_the_model_that_only_some_calls_make_is_seen_by_all(counts_in: str) -> None:
    """One kind of call counts, another one decides by the count."""
    losses, counts = [], []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = Teacher(), optim.SGD(0.1)

        def loss_fn(model: Any, x: mx.array, mode: str) -> mx.array:
            if len(x) == 8 and mode != "read":
                model.calls += 1
            loss = squares(model.layer, x)
            if (len(x) < 8 or mode == "read") and model.calls >= 7:
                loss = loss + 0.3 * mx.abs(model.layer(x)).mean()
            return loss

        def counting(model: Any, x: mx.array, mode: str) -> mx.array:
            model.calls += 1
            return squares(model.layer, x)

        other = counting if counts_in == "another loss" else loss_fn
        plain = [plain_step(model, optimizer, each) for each in (other, loss_fn)]
        steps = [Step(model, optimizer, other), Step(model, optimizer, loss_fn)]
        for number in range(30):
            which = number % 2
            x = mx.random.normal((5 if which and counts_in == "long batches" else 8, 4), key=mx.random.key(number))
            mode = "read" if which and counts_in != "long batches" else "count"
            took = which if counts_in == "another loss" else 0
            losses.append(float(steps[took](x, mode).loss if fast else plain[took](x, mode)[0]))
            counts.append(model.calls)
    np.testing.assert_allclose(losses[30:], losses[:30], rtol=2e-5)
    assert counts[30:] == counts[:30]


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. its result depends")
@pytest.mark.parametrize("kind", ["a set", "a dict", "a list of events"])
def test_a_milestone_among_many_numbers_is_seen(kind: str) -> None:
    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        at = types.SimpleNamespace(call=0, share=1.0, milestones={160})
        at.shares = {20 + 10 * number: 1.0 if number < 14 else 0.2 for number in range(20)}
        at.events = [*((20 + 6 * number, "log") for number in range(18)), (128, "drop")]
        for number in range(14):
            setattr(at, f"size{number}", 300 + 7 * number)

        def loss_fn(model: nn.Module, x: mx.array, at: Any = at) -> mx.array:
            at.call += 1
            share = sum([at.size0, at.size1, at.size2, at.size3, at.size4, at.size5, at.size6, at.size7]) / 2496
            sizes = at.size8, at.size9, at.size10, at.size11, at.size12, at.size13
            if kind == "a set" and at.call in at.milestones:
                share = 0.2
            if kind == "a dict" and at.call in at.shares:
                share = at.shares[at.call]
            for number, event in at.events if kind == "a list of events" else ():
                if at.call == number and event == "drop":
                    share = 0.2
            return squares(model, x) * (share if sizes else 0)

        model, optimizer = nn.Linear(4, 3), optim.SGD(1e-2)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        losses.append([float(step(x).loss if fast else plain(x)[0]) for x in xs(*[4] * 190)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_of_a_loss_that_counts_may_be_the_first_call(momentum: float) -> None:
    at = types.SimpleNamespace(calls=0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        at.calls += 1
        model.calls += 1
        return squares(model, x)

    model, x = nn.Linear(4, 3), mx.ones((8, 4))
    model.calls = 0
    optimizer = optim.SGD(0.1, momentum=momentum)
    step = Step(model, optimizer, loss_fn)
    wanted = nn.value_and_grad(model, squares)(model, x)[1]
    for number in range(1, 5):
        gradients = step.gradients(x)[1]
        assert mx.allclose(gradients["weight"], wanted["weight"], rtol=1e-5)
        assert (model.calls, at.calls) == (number, number)
    assert "weight" not in optimizer.state
    step(x)
    assert (model.calls, at.calls) == (5, 5)


Place = tuple[Callable[[Any], None], Callable[[Any], int]]
PLACES: dict[str, Place] = {
    "an item of a list": (lambda m: operator.setitem(m.counts, 0, m.counts[0] + 1), lambda m: m.counts[0]),
    "a list as a whole": (lambda m: operator.setitem(m.counts, 0, m.counts[0] + 1), lambda m: sum(m.counts)),
    "a dict as a whole": (lambda m: m.seen.update(n=m.seen["n"] + 1), lambda m: sum(m.seen.values())),
    "a layer": (lambda m: setattr(m.layer, "calls", m.layer.calls + 1), lambda m: m.layer.calls),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_count_anywhere_on_the_model_is_seen_by_calls_that_do_not_make_it(place: str) -> None:
    add, read = PLACES[place]

    def loss_fn(model: Any, x: mx.array, mode: str) -> mx.array:
        if mode == "count":
            add(model)
        loss = squares(model.layer, x)
        if mode == "read" and read(model) >= 7:
            loss = loss + 0.3 * mx.abs(model.layer(x)).mean()
        return loss

    losses = []
    for fast in (False, True):
        mx.random.seed(1)
        model, optimizer = Teacher(counts=[0, 0], seen={"n": 0, "m": 0}), optim.SGD(0.1)
        model.layer.calls = 0
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        for number in range(30):
            x, mode = mx.random.normal((8, 4), key=mx.random.key(number)), ("count", "read")[number % 2]
            losses.append(float(step(x, mode).loss if fast else plain(x, mode)[0]))
        assert read(model) == 15
    np.testing.assert_allclose(losses[30:], losses[:30], rtol=2e-5)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("kind", ["a helper", "a method", "both beside each other"])
def test_a_cell_that_functions_share_is_one_place(kind: str, decides: bool) -> None:
    """As a count of a notebook's `train()`: each function had it as a change of its own, so that it went up by two."""

    def run(fast: bool) -> tuple[list[float], list[int]]:
        mx.random.seed(3)
        model, optimizer, other, count = nn.Linear(4, 2), optim.SGD(0.05), 0, 0

        def tick() -> None:
            nonlocal count
            count += 1

        class Counter:
            def go(self) -> None:
                nonlocal count, other
                other, count = other + 1, count + 1

        counter = Counter()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            nonlocal count
            if kind != "a method":
                tick()
            if kind != "a helper":
                counter.go()
            count += 1
            loss = model(x).square().mean()
            return loss * (1 + count % 5) if decides else loss

        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses, counts = list[float](), list[int]()
        for _ in range(12):
            x = mx.random.normal((4, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
            counts.append(count)
        return losses, counts

    (losses, counts), (wanted, expected) = run(fast=True), run(fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-6)
    assert counts == expected


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled")
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("kind", ["a dict", "a list", "a layer"])
def test_a_count_that_parts_of_the_model_share_is_one_at_each_call(kind: str, decides: bool) -> None:
    """As statistics that are handed to every layer, and layers that are tied."""

    class Layer(nn.Module):
        def __init__(self, shared: Any) -> None:
            super().__init__()
            self.linear, self._shared, self._calls = nn.Linear(4, 4), shared, [0]

        def __call__(self, x: mx.array) -> mx.array:
            self._calls[0] += 1
            if kind == "a dict":
                self._shared["calls"] += 1
            if kind == "a list":
                self._shared.append("call")
            return nn.relu(self.linear(x))

    def run(fast: bool) -> tuple[list[float], list[int]]:
        mx.random.seed(3)
        shared = {"calls": 0} if kind == "a dict" else []
        layer = Layer(shared)
        layers = [layer, layer] if kind == "a layer" else [layer, Layer(shared)]
        model, optimizer = nn.Sequential(*layers), optim.SGD(0.05)

        def count() -> int:
            return {
                "a dict": lambda: shared["calls"],
                "a list": lambda: len(shared),
                "a layer": lambda: layer._calls[0],
            }[kind]()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            loss = model(x).square().mean()
            return loss * (1 + count() % 3) if decides else loss

        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses, counts = list[float](), list[int]()
        for _ in range(8):
            x = mx.random.normal((4, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
            counts.append(count())
        return losses, counts

    (losses, counts), (wanted, expected) = run(fast=True), run(fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    assert counts == expected


@pytest.mark.filterwarnings("ignore:faststep. attributes of the model have changed again and again")
@pytest.mark.parametrize("begin", [2, 3, 5, 8])
@pytest.mark.parametrize("toggles", [False, True])
def test_the_first_count_on_a_model_whose_numbers_are_set_is_not_lost(toggles: bool, begin: int) -> None:
    class Pruned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.progress, self.mode, self.pruned, self._log = 0.0, "dense", 0, list[str]()

        def __call__(self, x: mx.array, prune: bool) -> mx.array:
            if prune:
                self.pruned += 1
                self._log.append("pruned")
            scale = 1 + self.progress if self.mode == "dense" else 0.5
            return scale * super().__call__(x)

    def run(fast: bool) -> tuple[list[float], int, int]:
        mx.random.seed(3)
        model, optimizer = Pruned(), optim.SGD(0.05)

        def loss_fn(model: nn.Module, x: mx.array, prune: bool) -> mx.array:
            return model(x, prune).square().mean()

        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses = list[float]()
        for number in range(16):
            model.progress = 0.1 * number
            if toggles and number % begin == 0:
                model.mode = "sparse" if model.mode == "dense" else "dense"
            batch = mx.random.normal((4, 4)), number >= begin
            losses.append((step(*batch).loss if step else take(*batch)[0]).item())
        return losses, model.pruned, len(model._log)

    (losses, *counts), (wanted, *expected) = run(fast=True), run(fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    assert counts == expected
