"""States that a loss keeps from one call to the next, wherever it keeps them."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from support.programs.reach.registry import (
    Loss,
    Made,
    Make,
    add,
    program,
    rows_of_normals,
    squares,
)

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


def as_dict(state: Hidden) -> dict[str, mx.array]:
    return state._asdict()


def batch(number: int) -> tuple[mx.array]:
    return (mx.random.normal((4, 5, 6), key=mx.random.key(number)),)


def of_the_model(kind: Callable[[Hidden], Any], begin: bool) -> Make:
    """A model keeps its state."""

    def make() -> Made:
        model = Recurrent(kind, begin)
        first = model._state

        def between(number: int) -> None:
            if number == 6:
                model._state = first

        return Made(loss_fn, lambda: model._state, between, model, optim.Adam(1e-2), batch)

    return make


KINDS: dict[str, Callable[[Hidden], Any]] = {
    "tuple": tuple,
    "named": lambda state: state,
    "list": list,
    "dict": as_dict,
}
for (name, kind), begin in itertools.product(KINDS.items(), (True, False)):
    add("model", f"a state of the model in a {name}{'' if begin else ', none at first'}", of_the_model(kind, begin))


def begun_anew(kind: str) -> Make:
    """A state that begins anew again and again."""

    def make() -> Made:
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

        def between(number: int) -> None:
            if number % 4 == 0:
                metrics.clear()
                if kind == "of an object":
                    other.state = None  # type: ignore[assignment]
                elif kind == "of the model":
                    model._state = None

        seen = lambda: [model._state, dict(metrics), other.state]  # noqa: E731
        return Made(loss, seen, between, model, optim.Adam(1e-2), batch, calls=20)

    return make


for kind in ("of the model", "of an object", "a dict of metrics"):
    add("model" if "model" in kind else "object", f"a state that begins anew again and again: {kind}", begun_anew(kind))


def of(loss: Loss, seen: Callable[[], Any], between: Callable[[int], object] = lambda number: None) -> Made:
    return Made(loss, seen, between, Layers(), optim.Adam(1e-2), batch, calls=10)


@program("closure")
def a_state_in_a_cell() -> Made:
    state = zeros()
    first = state

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal state
        value, state = model.run(x, state)
        return value

    def between(number: int) -> None:
        nonlocal state
        state = first if number == 5 else state

    return of(loss, lambda: [state, first], between)


@program("object")
def a_state_in_an_attribute() -> Made:
    class Kept:
        state: Any = None

    kept = Kept()

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, kept.state = model.run(x, kept.state or zeros())
        return value

    return of(loss, lambda: kept.state)


@program("closure")
def states_in_a_dict_in_a_cell() -> Made:
    states: Any = {"layers": [zeros(), zeros()], "name": "two"}

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal states
        one, first = model.run(x, states["layers"][0])
        two, second = model.run(-x, states["layers"][1])
        states = {"layers": [first, second], "name": "two"}
        return one + two

    return of(loss, lambda: states)


@program("closure")
def a_state_that_is_one_array_twice() -> Made:
    zero = mx.zeros((4, SIZE))
    state = Hidden(zero, zero)

    def loss(model: Layers, x: mx.array) -> mx.array:
        nonlocal state
        value, state = model.run(x, state)
        return value

    return of(loss, lambda: [state, zero])


LAST = mx.zeros(())


@program("closure")
def arrays_that_are_only_stored() -> Made:
    class Log:
        last = mx.zeros(())

    log = Log()

    def loss(model: Layers, x: mx.array) -> mx.array:
        global LAST
        value, _ = model.run(x, zeros())
        LAST, log.last = value * 2, value * 3
        return value

    return of(loss, lambda: [LAST, log.last])


@program("closure")
def an_array_in_a_new_global() -> Made:
    globals().pop("NEW", None)

    def loss(model: Layers, x: mx.array) -> mx.array:
        global NEW
        value, _ = model.run(x, zeros())
        NEW = value * 2
        return value

    return of(loss, lambda: NEW)


@program("object")
def arrays_in_a_deque() -> Made:
    recent = collections.deque[mx.array](maxlen=3)

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, _ = model.run(x, zeros())
        recent.append(value)
        return value

    return of(loss, lambda: list(recent))


@program("object")
def a_state_in_a_record() -> Made:
    kept = {"carry": Carry(zeros())}

    def loss(model: Layers, x: mx.array) -> mx.array:
        carry = kept["carry"]
        value, state = model.run(x, carry.state)
        kept["carry"] = Carry(state, carry.calls + 1)
        return value

    return of(loss, lambda: kept["carry"])


@program("closure")
def an_array_of_a_table_in_a_cache() -> Made:
    table = {"scale": mx.array(2.0)}

    @functools.lru_cache
    def scale() -> mx.array:
        return table["scale"] * 2

    def loss(model: Layers, x: mx.array) -> mx.array:
        return model.run(x, zeros())[0] * scale()

    def between(number: int) -> None:
        if number == 5:
            table["scale"] = mx.array([3.0]).squeeze()
            table["other"] = mx.array(1.0)
            scale.cache_clear()

    return of(loss, scale, between)


@program("object")
def an_array_behind_a_bound_method_of_a_dict() -> Made:
    kept = dict[str, mx.array]()
    keep = kept.__setitem__

    def loss(model: Layers, x: mx.array) -> mx.array:
        value, _ = model.run(x, zeros())
        keep("value", value)
        return value

    return of(loss, lambda: dict(kept))


@program("model")
def a_mask_for_each_length() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self._masks = nn.Linear(6, 6), dict[int, mx.array]()

        def __call__(self, x: mx.array) -> mx.array:
            if len(x) not in self._masks:
                self._masks[len(x)] = mx.tril(mx.ones_like(x @ x.T))
            return self._masks[len(x)] @ self.layer(x)

    model = Masked()
    rows = lambda number: (rows_of_normals(number, 4 + number % 3, 6),)  # noqa: E731
    return Made(loss_fn, lambda: model._masks, model=model, optimizer=optim.Adam(1e-2), batch=rows)


@program("model")
def a_mask_of_the_last_length() -> Made:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self._mask = nn.Linear(6, 6), mx.ones((1, 1))

        def __call__(self, x: mx.array) -> mx.array:
            if len(self._mask) != len(x):
                self._mask = mx.tril(mx.ones_like(x @ x.T))
            return self._mask @ self.layer(x)

    model = Masked()
    rows = lambda number: (rows_of_normals(number, 4 + number // 4, 6),)  # noqa: E731
    return Made(loss_fn, lambda: model._mask, model=model, optimizer=optim.Adam(1e-2), batch=rows)


@program("model", without=("bad batches",))
def a_buffer_that_grows_to_its_size() -> Made:
    model = nn.Linear(6, 3)
    model._recent = None

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        made = model(x)
        last = mx.stop_gradient(made)
        model._recent = last if model._recent is None else mx.concatenate([model._recent, last])[-16:]
        return mx.square(made - model._recent.mean(axis=0)).mean()

    rows = lambda number: (rows_of_normals(number, 4, 6),)  # noqa: E731
    return Made(loss, lambda: model._recent, model=model, optimizer=optim.Adam(1e-2), batch=rows)


@program("model")
def a_trained_list_that_the_loss_replaces() -> Made:
    def loss(model: nn.Module, x: mx.array) -> mx.array:
        value = mx.square(model(x) * model.scales[0]).mean()
        model.scales = [scale * 2 for scale in model.scales]
        return value

    model = nn.Linear(4, 3)
    model.scales = [mx.ones((3,)), mx.ones((3,))]
    return Made(loss, lambda: model.scales, model=model, optimizer=optim.Adam(1e-2), calls=6)


@program("model")
def arrays_in_tuples_of_a_model() -> Made:
    model = nn.Linear(4, 3)
    model.scales = (mx.array(1.0), mx.array(2.0))

    def between(number: int) -> None:
        model.scales = (mx.array(1.0 + number), mx.array(1.9 - number / 10))

    loss = lambda model, x: mx.square(model(x)).mean() * model.scales[0] * model.scales[1]  # noqa: E731
    return Made(loss, between=between, model=model, optimizer=optim.SGD(1e-3))


@program("model")
def what_is_added_to_a_model() -> Made:
    model = nn.Linear(4, 3)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        value = mx.square(model(x)).mean()
        if hasattr(model, "settings"):
            value = value * model.settings.scale * model.tuple[0]
        return value

    def between(number: int) -> None:
        if number == 1:
            model.settings, model.tuple = SimpleNamespace(scale=1.0), (mx.array(1.0),)
        elif number:
            model.settings.scale, model.tuple = 2.0 + number, (mx.array(3.0 + number),)

    return Made(loss, between=between, model=model, optimizer=optim.SGD(1e-4), calls=8)


def untraceable_later(kind: str) -> Make:
    """A number that makes a loss read a value, or store an array, later."""

    def make() -> Made:
        settings, kept = SimpleNamespace(number=0), dict[str, mx.array]()

        def loss(model: nn.Module, x: mx.array, number: int) -> mx.array:
            value = mx.square(model(x)).mean()
            if kind == "stores" and settings.number > 3:
                kept["value"] = value
            reads = {"flag": settings.number in (3, 4), "argument": number > 3}.get(kind, False)
            return value * (2 if reads and value.item() > 0 else 1)

        between = lambda number: setattr(settings, "number", number if kind != "argument" else 0)  # noqa: E731
        batch = lambda number: (rows_of_normals(number), number if kind == "argument" else 0)  # noqa: E731
        return Made(loss, lambda: dict(kept), between, optimizer=optim.Adam(1e-2), batch=batch, calls=8)

    return make


for kind in ("flag", "argument", "stores"):
    add("object", f"a number that makes a loss untraceable later: {kind}", untraceable_later(kind))


@program("closure")
def what_functions_with_gradients_of_their_own_hold() -> Made:
    def bounded(x: mx.array, bound: mx.array) -> mx.array:
        function = mx.custom_function(lambda x: mx.minimum(x, bound))
        function.vjp(lambda primals, cotangent, _: cotangent * (primals[0] < 2 * bound))
        out: mx.array = function(x)
        return out

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        hidden, shift = model(x), x.mean()
        hidden = mx.checkpoint(lambda h: mx.tanh(h) * shift)(hidden)
        return mx.square(bounded(hidden, mx.abs(hidden).mean())).mean()

    return Made(loss, optimizer=optim.Adam(1e-2))


def in_an_uncompiled_loss(layer: Callable[[], nn.Module]) -> Make:
    """A gradient within a loss that reads a value: MLX compiles some activations."""

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        slope = mx.grad(lambda x: model(x).sum())(x)
        return squares(model, x) + mx.square(slope).mean() * (1.0 if slope.sum().item() < 100 else 0.5)

    return lambda: Made(
        loss_fn, model=nn.Sequential(nn.Linear(4, 8), layer(), nn.Linear(8, 1)), optimizer=optim.Adam(1e-2), calls=6
    )


for layer in (nn.Tanh, nn.SiLU, nn.LeakyReLU):
    add("closure", f"a gradient within a loss that reads a value, of {layer.__name__}", in_an_uncompiled_loss(layer))


class InTurn(nn.Module):
    """Layers of which a private name is the one that is used, and a flag that says which one comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4) for _ in range(3)]
        self.second, self._now = False, self.layers[0]

    def seen(self) -> Any:
        return self.second, [layer is self._now for layer in self.layers], tree_flatten(self._now.parameters())


def turned(loss: Callable[[InTurn, mx.array], mx.array], frozen: bool) -> Make:
    def make() -> Made:
        model = InTurn()
        if frozen:
            model.layers[0].freeze()
        return Made(loss, model.seen, model=model, optimizer=optim.Adam(0.1))

    return make


def a_flag_that_is_turned(model: InTurn, x: mx.array) -> mx.array:
    model.second = not model.second
    return mx.square(model.layers[0](x)).mean() * (2.0 if model.second else 1.0)


def a_name_for_the_other_layer(model: InTurn, x: mx.array) -> mx.array:
    model._now = model.layers[1 if model._now is model.layers[0] else 0]
    return mx.square(model._now(x)).mean()


def a_name_for_a_new_layer(model: InTurn, x: mx.array) -> mx.array:
    model._now = nn.Linear(4, 4)
    return mx.square(model._now(x) + model.layers[0](x)).mean()


def two_layers_that_change_places(model: InTurn, x: mx.array) -> mx.array:
    layers = model.layers
    layers[1], layers[2] = layers[2], layers[1]
    return mx.square(layers[1](x)).mean() + mx.square(layers[0](x)).mean()


for loss, frozen in itertools.product(
    (a_flag_that_is_turned, a_name_for_the_other_layer, a_name_for_a_new_layer, two_layers_that_change_places),
    (False, True),
):
    # a plain loop that puts arrays back by their names would put them into another layer
    bad = ("bad batches", "bad batches in windows", "bad batches that raise") if "name" in loss.__name__ else ()
    add("model", f"{loss.__name__}{', frozen' * frozen}".replace("_", " "), turned(loss, frozen), without=bad)
