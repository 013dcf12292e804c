"""States that a loss keeps from one step to the next, wherever it keeps them: the numbers are the plain loop's."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from mlx.utils import tree_flatten
from support.helpers import Tree, assert_same

SIZE = 8


class Hidden(NamedTuple):
    """The two states of an LSTM."""

    hidden: mx.array
    cell: mx.array


@dataclass
class Carry:
    state: Hidden
    calls: int = 0


def zeros() -> Hidden:
    return Hidden(mx.zeros((4, SIZE)), mx.zeros((4, SIZE)))


class Recurrent(nn.Module):
    """A layer that begins each batch where the one before has ended."""

    def __init__(self, kind: Callable[[Hidden], Any], begin: bool) -> None:
        super().__init__()
        self.cell, self.head, self.kind = nn.LSTM(6, SIZE), nn.Linear(SIZE, 3), kind
        self._state = kind(zeros()) if begin else None

    def __call__(self, x: mx.array) -> mx.array:
        state = (None, None) if self._state is None else self._state
        states, cells = self.cell(x, *(state.values() if isinstance(state, dict) else state))
        self._state = self.kind(Hidden(mx.stop_gradient(states[:, -1]), mx.stop_gradient(cells[:, -1])))
        return self.head(states)


def loss_fn(model: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    return mx.square(model(x) - 1).mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(6, SIZE), nn.Linear(SIZE, 3)

    def run(self, x: mx.array, state: Hidden) -> tuple[mx.array, Hidden]:
        states, cells = self.cell(x, *state)
        last = Hidden(mx.stop_gradient(states[:, -1]), mx.stop_gradient(cells[:, -1]))
        return mx.square(self.head(states) - 1).mean(), last


def batches() -> list[mx.array]:
    mx.random.seed(5)
    made = [mx.random.normal((4, 5, 6)) for _ in range(10)]
    mx.eval(made)
    return made


Way = Callable[..., mx.array]


def plain(model: nn.Module, optimizer: optim.Optimizer, loss: Callable[..., mx.array]) -> Way:
    def step(*batch: Tree) -> mx.array:
        value, gradients = nn.value_and_grad(model, loss)(model, *batch)
        optimizer.update(model, gradients)
        mx.eval(value, model.state, optimizer.state)
        return value

    return step


def ours(steps: list[Step]) -> Callable[..., Way]:
    def make(*parts: Any) -> Way:
        steps.append(Step(*parts))
        return lambda *batch: steps[-1](*batch).loss

    return make


def numbers(tree: Tree) -> dict[str, Any]:
    return {name: array.tolist() for name, array in tree_flatten(tree) if isinstance(array, mx.array)}


def compare(run: Callable[[Callable[..., Way]], Iterator[Tree]]) -> Step:
    """Run the same with plain MLX and with a step; return the step."""
    steps: list[Step] = []
    wanted = [numbers(each) for each in run(plain)]
    for got, each in zip((numbers(each) for each in run(ours(steps))), wanted, strict=True):
        assert got.keys() == each.keys()
        for name, value in each.items():
            assert_same(got[name], value, on_gpu=1e-4)
    return steps[-1]


def as_dict(state: Hidden) -> dict[str, mx.array]:
    return state._asdict()


@pytest.mark.parametrize("begin", [True, False], ids=["zeros", "none"])
@pytest.mark.parametrize("kind", [tuple, lambda state: state, list, as_dict], ids=["tuple", "named", "list", "dict"])
def test_a_model_keeps_its_state(kind: Callable[[Hidden], Any], begin: bool) -> None:
    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model, optimizer = Recurrent(kind, begin), optim.Adam(1e-2)
        step = way(model, optimizer, loss_fn)
        first = model._state
        for number, x in enumerate(batches()):
            if number == 6:
                model._state = first
            yield [step(x), dict(model), optimizer.state]

    step = compare(run)
    # where there was none at first, there is none once more: the call runs uncompiled again
    assert (step.stats.mode, len(step.stats.traces)) == ("native", 1 if begin else 2)


@pytest.mark.parametrize("kind", ["of the model", "of an object", "a dict of metrics"])
def test_a_state_that_begins_anew_again_and_again_makes_no_traces(kind: str) -> None:
    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model, other, metrics = Recurrent(tuple, False), Carry(zeros()), dict[str, Any]()

        def loss(model: Recurrent, x: mx.array) -> mx.array:
            if kind == "of an object":
                model._state = None if other.state is None else other.state  # type: ignore[assignment]
            value = loss_fn(model, x)
            if kind == "of an object":
                other.state, model._state = model._state, None  # type: ignore[assignment]
            elif kind == "a dict of metrics":
                metrics["loss"], metrics["calls"] = metrics.get("loss", 0) + value, metrics.get("calls", 0) + 1
            return value

        step = way(model, optim.Adam(1e-2), loss)
        for number, x in enumerate(batches() * 4):
            if number % 4 == 0:
                metrics.clear()
                if kind == "of an object":
                    other.state = None  # type: ignore[assignment]
                elif kind == "of the model":
                    model._state = None
            yield [step(x), dict(model), dict(metrics), other.state]

    step = compare(run)
    assert step.stats.mode == "native"
    assert step.stats.traced <= 6


def closure(way: Callable[..., Way]) -> Iterator[Tree]:
    model, state = Layers(), zeros()
    first = state

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal state
        value, state = model.run(x, state)
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for number, x in enumerate(batches()):
        state = first if number == 5 else state
        yield [step(x), dict(model), state, first]


def attribute(way: Callable[..., Way]) -> Iterator[Tree]:
    class Kept:
        state: Any = None

    model, kept = Layers(), Kept()

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, kept.state = model.run(x, kept.state or zeros())
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), dict(model), kept.state]


def nested(way: Callable[..., Way]) -> Iterator[Tree]:
    model, states = Layers(), {"layers": [zeros(), zeros()], "name": "two"}

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal states
        one, first = model.run(x, states["layers"][0])
        two, second = model.run(-x, states["layers"][1])
        states = {"layers": [first, second], "name": "two"}
        return one + two

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), dict(model), states]


def twice(way: Callable[..., Way]) -> Iterator[Tree]:
    model, zero = Layers(), mx.zeros((4, SIZE))
    state = Hidden(zero, zero)

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal state
        value, state = model.run(x, state)
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), dict(model), state, zero]


LAST = mx.zeros(())


def only_stored(way: Callable[..., Way]) -> Iterator[Tree]:
    class Log:
        last = mx.zeros(())

    model, log = Layers(), Log()

    def loss(model: Layers, x: mx.array) -> mx.array:
        global LAST
        value, _ = model.run(x, zeros())
        LAST, log.last = value * 2, value * 3
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), LAST, log.last]


def in_new_global(way: Callable[..., Way]) -> Iterator[Tree]:
    globals().pop("NEW", None)
    model = Layers()

    def loss(model: Layers, x: mx.array) -> mx.array:
        global NEW
        value, _ = model.run(x, zeros())
        NEW = value * 2
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), NEW]


@pytest.mark.parametrize("run", [closure, attribute, nested, twice, only_stored, in_new_global])
def test_a_loss_keeps_a_state_natively(run: Callable[[Callable[..., Way]], Iterator[Tree]]) -> None:
    def seeded(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(2)
        return run(way)

    step = compare(seeded)
    assert step.stats.mode == "native"
    assert len(step.stats.traces) <= 2


def in_deque(way: Callable[..., Way]) -> Iterator[Tree]:
    model, recent = Layers(), collections.deque[mx.array](maxlen=3)

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, _ = model.run(x, zeros())
        recent.append(value)
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), list(recent)]


def in_record(way: Callable[..., Way]) -> Iterator[Tree]:
    model, kept = Layers(), {"carry": Carry(zeros())}

    def loss(model: Layers, x: mx.array) -> mx.array:
        carry = kept["carry"]
        value, state = model.run(x, carry.state)
        kept["carry"] = Carry(state, carry.calls + 1)
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), kept["carry"].state, mx.array(kept["carry"].calls)]


def in_a_cache(way: Callable[..., Way]) -> Iterator[Tree]:
    model, table = Layers(), {"scale": mx.array(2.0)}

    @functools.lru_cache
    def scale() -> mx.array:
        return table["scale"] * 2

    def loss(model: Layers, x: mx.array) -> mx.array:
        return model.run(x, zeros())[0] * scale()

    step = way(model, optim.Adam(1e-2), loss)
    for number, x in enumerate(batches()):
        if number == 5:
            table["scale"] = mx.array([3.0]).squeeze()
            table["other"] = mx.array(1.0)
            scale.cache_clear()
        yield [step(x), scale()]


def behind_a_method(way: Callable[..., Way]) -> Iterator[Tree]:
    model, kept = Layers(), dict[str, mx.array]()
    keep = kept.__setitem__

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, _ = model.run(x, zeros())
        keep("value", value)
        return value

    step = way(model, optim.Adam(1e-2), loss)
    for x in batches():
        yield [step(x), dict(kept)]


@pytest.mark.parametrize("run", [in_deque, in_record])
def test_a_state_that_no_trace_can_keep_is_kept_uncompiled(run: Callable[[Callable[..., Way]], Iterator[Tree]]) -> None:
    def seeded(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(2)
        return run(way)

    with pytest.warns(RuntimeWarning, match=r"cannot be compiled: it (stores a new array|keeps an array)"):
        assert compare(seeded).stats.mode == "plain"


def test_a_state_behind_a_bound_method_of_a_dict_is_an_output() -> None:
    def seeded(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(2)
        return behind_a_method(way)

    compare(seeded)


def test_what_a_loss_caches_is_computed_outside_of_a_trace() -> None:
    def seeded(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(2)
        return in_a_cache(way)

    assert compare(seeded).stats.mode == "native"


def test_a_mask_for_each_length_costs_one_step_each() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self._masks = nn.Linear(6, 6), dict[int, mx.array]()

        def __call__(self, x: mx.array) -> mx.array:
            if len(x) not in self._masks:
                self._masks[len(x)] = mx.tril(mx.ones_like(x @ x.T))
            return self._masks[len(x)] @ self.layer(x)

    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = Masked()
        step = way(model, optim.Adam(1e-2), loss_fn)
        for number in range(16):
            yield [step(mx.random.normal((4 + number % 3, 6))), dict(model.layer)]

    step = compare(run)
    assert (step.stats.mode, len(step.stats.traces)) == ("native", 3)


def test_a_mask_of_the_last_length_is_of_this_one() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self._mask = nn.Linear(6, 6), mx.ones((1, 1))

        def __call__(self, x: mx.array) -> mx.array:
            if len(self._mask) != len(x):
                self._mask = mx.tril(mx.ones_like(x @ x.T))
            return self._mask @ self.layer(x)

    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = Masked()
        step = way(model, optim.Adam(1e-2), loss_fn)
        for number in range(12):
            yield [step(mx.random.normal((4 + number // 4, 6))), dict(model.layer), model._mask]

    assert compare(run).stats.mode == "native"


def test_a_buffer_that_grows_to_its_size_is_traced_then() -> None:
    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = nn.Linear(6, 3)
        model._recent = None

        def loss(model: nn.Module, x: mx.array) -> mx.array:
            made = model(x)
            last = mx.stop_gradient(made)
            model._recent = last if model._recent is None else mx.concatenate([model._recent, last])[-16:]
            return mx.square(made - model._recent.mean(axis=0)).mean()

        step = way(model, optim.Adam(1e-2), loss)
        for _ in range(10):
            yield [step(mx.random.normal((4, 6))), dict(model)]

    assert compare(run).stats.mode == "native"


def test_a_trained_list_that_the_loss_replaces_is_trained_uncompiled() -> None:
    def loss(model: nn.Module, x: mx.array) -> mx.array:
        value = mx.square(model(x) * model.scales[0]).mean()
        model.scales = [scale * 2 for scale in model.scales]
        return value

    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = nn.Linear(6, 3)
        model.scales = [mx.ones((3,)), mx.ones((3,))]
        step = way(model, optim.Adam(1e-2), loss)
        for _ in range(4):
            yield [step(mx.ones((4, 6))), dict(model)]

    with pytest.warns(RuntimeWarning, match=r"puts another list or dict in the place of the one that scales.0 is in"):
        assert compare(run).stats.mode == "plain"


def test_arrays_in_tuples_of_a_model_are_inputs() -> None:
    model = nn.Linear(6, 3)
    model.scales = (mx.array(1.0), mx.array(2.0))
    step = Step(model, optim.SGD(0.0), lambda model, x: mx.square(model(x)).mean() * model.scales[0] * model.scales[1])
    x = mx.ones((4, 6))
    plain = mx.square(model(x)).mean().item()
    for number in range(20):
        assert step(x).loss.item() == pytest.approx(plain * (1 + number) * (2 - number / 10), rel=1e-5)
        model.scales = (mx.array(2.0 + number), mx.array(1.9 - number / 10))
    assert len(step.stats.traces) == 1


def test_what_is_added_to_a_model_is_watched() -> None:
    class Settings:
        scale = 1.0

    model = nn.Linear(6, 3)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        value = mx.square(model(x)).mean()
        if hasattr(model, "settings"):
            value = value * model.settings.scale * model.tuple[0]
        return value

    step, x = Step(model, optim.SGD(0.0), loss), mx.ones((4, 6))
    plain = step(x).loss.item()
    model.settings, model.tuple = Settings(), (mx.array(1.0),)
    for number in range(6):
        assert step(x).loss.item() == pytest.approx(plain * model.settings.scale * model.tuple[0].item(), rel=1e-5)
        model.settings.scale, model.tuple = 2.0 + number, (mx.array(3.0 + number),)
    assert step.stats.mode == "native"


@pytest.mark.parametrize("kind", ["flag", "argument", "stores"])
def test_a_number_that_makes_a_loss_untraceable_later_is_no_error(kind: str) -> None:
    class Settings:
        number = 0

    settings, kept = Settings(), dict[str, mx.array]()

    def loss(model: nn.Module, x: mx.array, number: int) -> mx.array:
        value = mx.square(model(x)).mean()
        if kind == "stores" and settings.number > 3:
            kept["value"] = value
        reads = {"flag": settings.number in (3, 4), "argument": number > 3}.get(kind, False)
        return value * (2 if reads and value.item() > 0 else 1)

    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        kept.clear()
        model = nn.Linear(6, 3)
        step = way(model, optim.Adam(1e-2), loss)
        for number in range(8):
            settings.number = number if kind != "argument" else 0
            yield [step(mx.random.normal((4, 6)), number if kind == "argument" else 0), dict(model), dict(kept)]

    if kind == "stores":
        assert compare(run).stats.mode == "native"
    else:
        with pytest.warns(RuntimeWarning, match="it reads the value of an array"):
            assert compare(run).stats.mode == "plain"


def test_what_functions_with_gradients_of_their_own_hold_is_not_kept() -> None:
    def bounded(x: mx.array, bound: mx.array) -> mx.array:
        function = mx.custom_function(lambda x: mx.minimum(x, bound))
        function.vjp(lambda primals, cotangent, _: cotangent * (primals[0] < 2 * bound))
        out: mx.array = function(x)
        return out

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        hidden, shift = model(x), x.mean()
        hidden = mx.checkpoint(lambda h: mx.tanh(h) * shift)(hidden)
        return mx.square(bounded(hidden, mx.abs(hidden).mean())).mean()

    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = nn.Linear(6, 3)
        step = way(model, optim.Adam(1e-2), loss)
        for _ in range(4):
            yield [step(mx.random.normal((4, 6))), dict(model)]

    assert compare(run).stats.mode == "native"


class Descent(optim.Optimizer):
    """Momentum by code of its own, which is traced."""

    def __init__(self) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", 0.05)

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        state["v"] = mx.zeros_like(parameter)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        state["v"] = 0.9 * state["v"] + gradient
        return parameter - self.learning_rate * state["v"]


def _in_another_order(state: Any) -> Any:
    """Give a tree as a file has it."""
    if not isinstance(state, dict):
        return state
    return {name: _in_another_order(state[name]) for name in reversed(state)}


CHANGES: dict[str, Callable[[Any], None]] = {
    "a rate of an int": lambda it: setattr(it, "learning_rate", 0),
    "a rate in half precision": lambda it: setattr(it, "learning_rate", mx.array(0.01, mx.float16)),
    "another dtype of the step": lambda it: it.state.update(step=it.state["step"].astype(mx.int32)),
    "another order": lambda it: setattr(it, "state", _in_another_order(it.state)),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", [optim.Adam, Descent])
def test_a_loss_counts_once_where_the_arrays_of_the_optimizer_are_made_up_anew(
    optimizer: Callable[..., optim.Optimizer], change: str, accumulate: int
) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.calls, self.log = 0, list[str]()

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            self.calls += 1
            self.log.append("x")
            return (model(x) - x).square().mean()

    trainer, model = Trainer(), nn.Linear(3, 3)
    made = optimizer(0.01) if optimizer is optim.Adam else optimizer()
    step = Step(model, made, trainer.loss, accumulate=accumulate)
    for number in range(16):
        if number == 4:
            CHANGES[change](made)
        if number == 8:
            made.learning_rate = 0.01
        if number == 12:
            CHANGES[change](made)
        mx.eval(step(mx.ones((4, 3))).loss)
        assert (trainer.calls, len(trainer.log)) == (number + 1, number + 1)
    assert step.stats.mode != "plain"


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, Descent])
def test_rates_of_two_dtypes_in_turns_have_a_trace_each(optimizer: Callable[..., optim.Optimizer]) -> None:
    def run(way: Callable[..., Way]) -> Iterator[Tree]:
        mx.random.seed(1)
        model = nn.Linear(6, 3)
        made = Descent() if optimizer is Descent else optimizer(0.1)
        step = way(model, made, lambda model, x: (model(x) - x[:, :3]).square().mean())
        for number in range(24):
            made.learning_rate = (0.1, 0, mx.array([0.05]))[number % 3]
            yield [step(mx.random.normal((4, 6))), dict(model), made.state]

    assert 3 <= compare(run).stats.traced <= 4
