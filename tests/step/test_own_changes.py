"""Losses that change or take something themselves, which a trace would do once: they are called at every step."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import itertools
import random
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import assert_close, plain_step, snapshot


def test_a_loss_may_append_to_a_long_list() -> None:
    log = [0.5] * 5000

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        log.append(loss := mx.square(model(x)).mean())
        return loss

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.1), loss_fn), mx.ones((2, 4))
    with pytest.warns(RuntimeWarning, match="stores a new array"):
        losses = [step(x).loss.item() for _ in range(3)]
    assert [float(value) for value in log[5000:]] == losses
    assert step.stats.mode == "plain"


def test_what_the_loss_adds_to_goes_on_without_traces() -> None:
    class Counting:
        calls = 0

        def __init__(self) -> None:
            self.seen: list[int] = []

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.calls += 1
            self.seen.append(x.shape[0])
            return mx.square(model(x)).mean()

    counting = Counting()
    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), counting.loss)
    for length in (1, 2, 3, 1, 2, 3, 1, 2, 3):
        step(mx.ones((length, 4)))
    assert counting.seen == [1, 2, 3] * 3
    assert (counting.calls, step.stats.traced) == (9, 3)


class Warming(nn.Module):
    """Counts its calls in a number, and weighs what it gives by it (annealed penalties)."""

    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.layer, self.calls, self.matters = nn.Linear(4, 2), 0, matters

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 4] to [batch, 2]."""
        self.calls += 1
        y: mx.array = self.layer(x) * (0.5**self.calls if self.matters else 1.0)
        return y


_calls = 0


def own_changes(kind: str) -> tuple[nn.Module, Callable[..., mx.array]]:
    """Make a loss that changes what it depends on, or takes from what it does not restore."""
    model: nn.Module = Warming(matters=True) if kind == "a number of the model" else nn.Linear(4, 2)
    generator, own, old = np.random.default_rng(1), random.Random(1), np.random.RandomState(1)
    numbers, listed, taken = iter(range(1, 100)), [0.5 * each for each in range(1, 100)], itertools.count(1)
    made, cell, agent = (0.5 * each for each in range(1, 100)), 0, types.SimpleNamespace(beta=1.0)
    queue, left = collections.deque(listed), set[int]()
    counted, large = np.zeros(2), np.zeros(20_000)
    context = contextvars.ContextVar("context", default=0.0)
    context.set(0.0)
    random.seed(1)
    np.random.seed(1)
    globals()["_calls"] = 0

    def factor() -> float:
        nonlocal cell
        global _calls
        if kind == "a number in a closure":
            cell += 1
            return 1.0 / cell
        if kind == "a global":
            _calls += 1
            return 1.0 / _calls
        if kind == "an attribute":
            agent.beta *= 0.9
            return agent.beta
        if kind == "a function's attribute":
            taken_by: Any = factor
            taken_by.taken.append(0)
            return 1.0 / len(taken_by.taken)
        takes: dict[str, Callable[[], float]] = {
            "numpy's generator": generator.random,
            "numpy's old generator": old.rand,
            "numpy's global generator": np.random.rand,
            "a random.Random": own.random,
            "the random module": random.random,
            "an iterator": lambda: float(next(numbers)),
            "itertools": lambda: float(next(taken)),
            "a generator": lambda: next(made),
            "a list": lambda: listed.pop(),
            "a queue": lambda: queue.popleft(),
            "a set": lambda: float(left.add(len(left)) or len(left)),  # type: ignore[func-returns-value]
            "a NumPy array": lambda: float(counted.__iadd__(1.0)[0]),
            "a large NumPy array": lambda: float(large.__iadd__(1.0)[0]),
            "a context variable": lambda: (context.set(context.get() + 1.0), context.get())[1],
        }
        return takes.get(kind, lambda: 1.0)()

    vars(factor)["taken"] = []
    return model, lambda model, x: (model(x) * factor()).square().mean()


OWN_CHANGES = """a number of the model, a number in a closure, a global, an attribute, a function's attribute, a
list, a queue, a set, a NumPy array, a large NumPy array, a context variable, numpy's generator,
numpy's old generator, numpy's global generator, a random.Random, the random module, an iterator,
itertools, a generator"""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", OWN_CHANGES.replace("\n", " ").split(", "))
def test_a_loss_that_depends_on_how_often_it_is_called_is_called_at_every_step(kind: str, accumulate: int) -> None:
    results: list[Any] = []
    batches = [mx.random.normal((8, 4), key=mx.random.key(number)) for number in range(6)]
    for ours in (False, True):
        mx.random.seed(3)
        model, loss_fn = own_changes(kind)
        optimizer = optim.SGD(0.1, momentum=0.9)
        if not ours:
            take = plain_step(model, optimizer, loss_fn, accumulate=accumulate)
            results.append(([float(take(x)[0]) for x in batches], snapshot(model, optimizer)))
            continue
        step = Step(model, optimizer, loss_fn, accumulate=accumulate)
        # by the first call without a trace, or by that behind the first trace
        with pytest.warns(RuntimeWarning, match="as it is called|what it changes itself") as caught:
            losses = [step(x).loss.item() for x in batches[:3]]
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            losses += [step(x).loss.item() for x in batches[3:]]
        results.append((losses, snapshot(model, optimizer)))
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-5)
    assert_close(results[1][1], results[0][1], 1e-5)
    assert step.stats.mode == "plain"


def test_what_another_thread_draws_is_not_drawn_by_the_loss() -> None:
    drawn, done, first = threading.Event(), threading.Event(), [True]

    def draw() -> None:
        while not done.is_set():
            random.random()
            np.random.rand()
            drawn.set()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if first:
            first.clear()
            drawn.clear()
            assert drawn.wait(60)
        return model(x).square().mean()

    step, thread = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), threading.Thread(target=draw)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                step(mx.ones((3, 4)))
    finally:
        done.set()
        thread.join()
    assert (step.stats.mode, step.stats.traced) == ("native", 1)


def test_what_another_thread_draws_while_a_number_changes_is_not_drawn_by_the_loss() -> None:
    done, generator = threading.Event(), np.random.mtrand._rand
    numbers = types.SimpleNamespace(scale=1.0, noisy=False)

    def draw() -> None:
        while not done.wait(1e-2):
            np.random.rand()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return model(x).square().mean() * (generator.rand() if numbers.noisy else numbers.scale)

    step, thread = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn), threading.Thread(target=draw)
    thread.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(60):
                numbers.scale = 1.0 + 0.5 * number
                step(mx.ones((3, 4)))
    finally:
        done.set()
        thread.join()
    assert step.stats.mode == "native"


def test_a_loss_that_counts_what_does_not_matter_is_traced_once() -> None:
    history: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        history.append(1)
        return model(x).square().mean()

    model = Warming(matters=False)
    step = Step(model, optim.SGD(0.1), loss_fn)
    for _ in range(5):
        step(mx.ones((3, 4)))
    assert (step.stats.mode, step.stats.traced) == ("native", 1)
    assert (model.calls, history) == (5, [1] * 5)


def test_what_a_loss_writes_into_what_it_reaches_is_written_at_every_step() -> None:
    class Averaging:
        def __init__(self) -> None:
            self.rebound, self.changed = mx.zeros(2), mx.zeros(2)
            self.norm = nn.BatchNorm(4)

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            y = model(self.norm(x))
            self.rebound = 0.9 * self.rebound + 0.1 * mx.stop_gradient(y.mean(axis=0))
            self.changed += mx.stop_gradient(y.sum(axis=0))
            return mx.square(y - self.rebound).mean()

    results = []
    for native in (False, True):
        mx.random.seed(1)
        averaging, model, optimizer = Averaging(), nn.Linear(4, 2), optim.SGD(1e-1)
        step, held = Step(model, optimizer, averaging.loss), averaging.changed
        for number in range(5):
            x = mx.random.normal((8, 4), key=mx.random.key(number))
            if native:
                step(x)
            else:
                loss, gradients = nn.value_and_grad(model, averaging.loss)(model, x)
                optimizer.update(model, gradients)
                mx.eval(model.state, optimizer.state, loss, averaging.rebound, averaging.changed)
        assert held is averaging.changed  # `+=` changes the object that others hold
        results.append([averaging.rebound, averaging.changed, averaging.norm.running_mean, model.weight])
    assert step.stats.mode == "native"
    for ours, plain in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kept", [[], collections.deque(), collections.deque(maxlen=3)], ids=["list", "queue", "last"])
def test_a_loss_that_keeps_arrays_runs_plain(kept: list[mx.array]) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        loss = mx.square(model(x)).mean()
        kept.append(loss)
        return loss

    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), loss_fn)
    with pytest.warns(RuntimeWarning, match="it stores a new array in"):
        losses = [step(mx.ones((3, 4))).loss.item() for _ in range(3)]
    assert [each.item() for each in list(kept)[-3:]] == losses
    assert step.stats.mode == "plain"
    assert "stores a new array" in str(step.stats.reason)


KEPT: dict[str, tuple[Callable[[], Any], str]] = {
    "a queue": (lambda: collections.deque(maxlen=3), "native"),
    "a set": (set, "plain"),
    "a NumPy array": (lambda: np.zeros(3), "plain"),
    "a large NumPy array": (lambda: np.zeros(20_000), "plain"),
}


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it changes")
@pytest.mark.parametrize("kind", KEPT)
def test_a_log_in_any_container_goes_on(kind: str) -> None:
    make, mode = KEPT[kind]
    kept = make()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        if isinstance(kept, collections.deque):
            kept.append(x.shape[0])
        elif isinstance(kept, set):
            kept.add(len(kept))
        else:
            kept[0] += 1
        return model(x).square().mean()

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    for number in range(5):
        step(mx.ones((3, 4)))
        assert (kept[0] if isinstance(kept, np.ndarray) else len(kept)) == min(number + 1, getattr(kept, "maxlen", 5))
    assert step.stats.mode == mode


@pytest.mark.parametrize("matters", [False, True])
def test_an_error_before_the_second_step_says_nothing_of_what_a_loss_changes(matters: bool) -> None:
    seen: list[int] = []

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        seen.append(x.shape[1])
        return model(x).square().mean() * (len(seen) if matters else 1)

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), loss_fn), mx.ones((3, 4))
    if matters:
        with pytest.warns(RuntimeWarning, match="what it changes itself"):
            first = step(x).loss.item()
    else:
        first = step(x).loss.item()
    for _ in range(6):
        with pytest.raises(ValueError, match=r"matmul|addmm"):
            step(mx.ones((3, 5)))  # a warning is an error in these tests
    before = len(seen)
    losses = [step(x).loss.item() for _ in range(2)]
    assert losses == pytest.approx([first * (before + at if matters else 1) for at in (1, 2)], rel=1e-5)
    assert (step.stats.mode, len(seen)) == ("plain" if matters else "native", before + 2)


class Counter:
    """Counts in an attribute, and decides something at one number of calls."""

    def __init__(self) -> None:
        self.calls, self.limit, self.milestones, self.table = 0, 37, [12, 37], {37: 3.0}
        self.kept = {12, 37}

    def by_match(self) -> float:
        match self.calls:
            case 37:
                return 4.0
        return 1.0


def twice(count: int) -> float:
    return 2.0 if count == 37 else 1.0


DECIDES: dict[str, Callable[[Counter], float]] = {
    "a constant": lambda it: 2.0 if it.calls == 37 else 1.0,
    "a rest": lambda it: 2.0 if it.calls % 23 == 7 else 1.0,
    "no rest": lambda it: 1.0 if it.calls % 23 else 3.0,
    "a quotient": lambda it: 2.0 if it.calls // 17 == 2 else 1.0,
    "a rest of a quotient": lambda it: 2.0 if divmod(it.calls, 7)[0] % 5 == 4 else 1.0,
    "some constants": lambda it: 2.0 if it.calls in (13, 37) else 1.0,
    "a pattern": Counter.by_match,
    "in a function": lambda it: twice(it.calls),
    "an attribute": lambda it: 2.0 if it.calls == it.limit else 1.0,
    "a list": lambda it: 2.0 if it.calls in it.milestones else 1.0,
    "a set": lambda it: 2.0 if it.calls in it.kept else 1.0,
    "a dict": lambda it: it.table.get(it.calls, 1.0),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", DECIDES)
def test_a_loss_that_decides_something_at_one_call_only_is_called_at_every_step(kind: str, first: bool) -> None:
    losses: list[list[float]] = []
    for ours in (False, True):
        mx.random.seed(3)
        model, optimizer, counter, decide = nn.Linear(4, 2), optim.SGD(0.01), Counter(), DECIDES[kind]

        def loss_fn(
            model: nn.Module, x: mx.array, counter: Counter = counter, decide: Callable[..., float] = decide
        ) -> mx.array:
            counter.calls += first
            scale = decide(counter)
            counter.calls += not first
            return model(x).square().mean() * scale

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        x = mx.ones((3, 4))
        if not ours:
            losses.append([float(plain(x)[0]) for _ in range(40)])
            continue
        with pytest.warns(RuntimeWarning, match=r"depends on what it changes itself \(calls\)"):
            losses.append([step(x).loss.item() for _ in range(40)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
    assert step.stats.mode == "plain"


def test_a_counter_beside_numbers_that_it_is_not_compared_with_is_traced_once() -> None:
    counter = Counter()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        counter.calls += 1
        return model(x).square().mean() * (2.0 if counter.limit == 37 and x.shape[0] != 1500 else 1.0)

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    for _ in range(5):
        step(mx.ones((3, 4)))  # a warning is an error in these tests
    assert (step.stats.mode, step.stats.traced, counter.calls) == ("native", 1, 5)


def test_a_loss_that_counts_may_reach_numpys_own_functions() -> None:
    """Their class has a descriptor where others have the name of a module."""

    class Trainer:
        kind, calls = "mse_loss", 0

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.calls += 1
            if x.ndim > 2:
                x = x[mx.array(np.random.default_rng(0).permutation(len(x)))]
            found: mx.array = getattr(nn.losses, self.kind)(model(x), mx.zeros((3, 2)))
            return found

    trainer = Trainer()
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), trainer.loss)
    for _ in range(4):
        step(mx.ones((3, 4)))
    assert (step.stats.mode, trainer.calls) == ("native", 4)


@dataclasses.dataclass(slots=True)
class Slotted:
    """What a loss keeps, in slots."""

    counts: tuple[int, int] = (0, 0)
    log: list[str] = dataclasses.field(default_factory=list)


def test_what_a_loss_puts_anew_into_slots_stays_there() -> None:
    state = Slotted()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        state.counts = (state.counts[0] + 1, state.counts[1] + len(x))
        state.log = [*state.log, "step"]
        return mx.square(model(x)).mean()

    step = Step(nn.Linear(4, 2), optim.SGD(0.1), loss_fn)
    with pytest.warns(RuntimeWarning, match="cannot be compiled: it changes"):
        losses = [step(mx.ones((3, 4))).loss.item() for _ in range(6)]
    assert losses[5] < losses[0]
    assert (state.counts, len(state.log)) == ((6, 18), 6)


class Recent(nn.Module):
    """Keeps what it gave, in a list, a dict and an attribute, for four calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self._recent: list[Any] = []
        self._by_name: dict[str, Any] = {}
        self._last: tuple[mx.array, ...] | None = None
        self.kept = 0

    def keep(self, it: Any) -> None:
        """Keep something with arrays, or forget all."""
        self.kept += 1
        if self.kept % 4:
            self._recent.append(it)
            self._by_name[str(self.kept)], self._last = it, (it,)
        else:
            self._recent.clear()
            self._by_name.clear()
            self._last = None

    def __call__(self, x: mx.array) -> mx.array:
        """Give what the layer gives, scaled by how much is kept."""
        out: mx.array = self.layer(x)
        return out * (1 + len(self._recent) + len(self._by_name) + (self._last is not None))


@pytest.mark.parametrize("kept", [lambda a: a, lambda a: [a], lambda a: {"it": a}, lambda a: (a,)])
def test_arrays_that_a_loss_keeps_and_forgets_are_there_as_in_the_plain_loop(kept: Callable[[mx.array], Any]) -> None:
    def loss_fn(model: Recent, x: mx.array) -> mx.array:
        out = model(x)
        model.keep(kept(mx.stop_gradient(out).mean()))
        return mx.square(out).mean()

    def left(model: Recent) -> tuple[int, int, bool, int]:
        return len(model._recent), len(model._by_name), model._last is None, model.kept

    seen: list[list[tuple[float, Any]]] = []
    for ours in (False, True):
        mx.random.seed(3)
        model, optimizer = Recent(), optim.SGD(0.05)
        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if ours else "error")
            losses = [(step(x).loss if ours else plain(x)[0]).item() for x in [mx.ones((3, 4))] * 11]
        seen.append([*losses, left(model)])
    np.testing.assert_allclose(seen[1][:-1], seen[0][:-1], rtol=1e-5)
    assert seen[1][-1] == seen[0][-1]


@pytest.mark.parametrize("of_model", [False, True])
def test_what_a_loss_removes_stays_away(of_model: bool) -> None:
    """What had arrays is replaced by nothing that has: no output of a trace tells so."""
    left: list[list[Any]] = []
    for ours in (False, True):
        mx.random.seed(3)
        model, optimizer = Recent(), optim.SGD(0.05)
        holder = model if of_model else types.SimpleNamespace(_last=None, _recent=[])
        holder._last = (mx.ones((2,)),)
        holder._recent = [{"it": mx.ones((2,))}]

        def loss_fn(model: Recent, x: mx.array, holder: Any = holder) -> mx.array:
            scale = 1.0 if holder._last is None else holder._last[0].sum()
            scale = scale + len(holder._recent)
            holder._last = None
            holder._recent.clear()
            return mx.square(model.layer(x)).mean() * scale

        plain, step = plain_step(model, optimizer, loss_fn), Step(model, optimizer, loss_fn)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if ours else "error")
            losses = [(step(x).loss if ours else plain(x)[0]).item() for x in [mx.ones((3, 4))] * 5]
        left.append([losses, holder._last, holder._recent])
    np.testing.assert_allclose(left[1][0], left[0][0], rtol=1e-5)
    assert left[1][1:] == left[0][1:] == [None, []]
