"""Which of the objects that a loss reaches are one, and which are the model's, changes between two calls."""

from __future__ import annotations

import cmath
import functools
import itertools
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Loss,
    Made,
    Make,
    add,
    rows_of_normals,
    squares,
)

LATE, CALLS = 8, 14


class Late:
    """A model, a loss, and what is changed before a call."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.loss: Loss = lambda model, x: off_by_one(model, x)
        self.changes: dict[int, Callable[[], object]] = {}
        self.given: Callable[[int], tuple[Any, ...]] = lambda at: ()
        self.kept: list[Any] = []

    def change(self, change: Callable[[], object], at: int = LATE) -> None:
        """Change something before a call."""
        self.changes[at] = change

    def made(self) -> Made:
        """Make the program."""
        x = rows_of_normals(3, 8, 3)
        return Made(
            self.loss,
            lambda: [self.kept],
            lambda number: self.changes.get(number, lambda: None)(),
            self.model,
            optim.SGD(0.02),
            lambda number: (x, *self.given(number)),
            calls=CALLS,
        )


def off_by_one(model: nn.Module, x: mx.array) -> mx.array:
    """Return how far what a model gives is from 1."""
    return mx.square(model(x) - 1).mean()


Begin = Callable[[Late], None]


def late(begin: Begin) -> Make:
    """Make a program of what begins it."""

    def make() -> Made:
        program = Late()
        begin(program)
        return program.made()

    return make


def build(begin: Begin) -> Begin:
    """Add a program by the name of the function that begins it."""
    add(
        "model" if "model" in begin.__name__ or "layer" in begin.__name__ else "object",
        begin.__name__.replace("_", " "),
        late(begin),
    )
    return begin


class Thing:
    """An object that is compared by identity."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    """The same, to which nothing refers weakly."""

    __slots__ = ("k",)


class Decaying:
    """An object with methods that write and read an array."""

    def __init__(self) -> None:
        self.value = mx.array(1.0)

    def decay(self) -> None:
        self.value = self.value * 0.97

    def get(self) -> mx.array:
        return self.value


class Counting(nn.Module):
    """A layer with an array that it writes itself."""

    def __init__(self) -> None:
        super().__init__()
        self._value = mx.array(1.0)

    def __call__(self, x: mx.array) -> mx.array:
        self._value = self._value * 0.99
        return x


def in_cells() -> tuple[Callable[[], None], Callable[[], mx.array]]:
    value = mx.array(1.0)

    def decay() -> None:
        nonlocal value
        value = value * 0.97

    return decay, lambda: value


@build
def two_objects_become_one(p: Late) -> None:
    s = SimpleNamespace(a=SimpleNamespace(v=mx.array(1.0)), b=SimpleNamespace(v=mx.array(2.0)))

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a.v = s.a.v * 0.97
        return off_by_one(model, x) * s.b.v

    p.loss = loss
    p.change(lambda: setattr(s, "b", s.a))


@build
def two_dicts_become_one_again(p: Late) -> None:
    one = {"v": mx.array(1.0)}
    s = {"a": one, "b": one}

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s["a"]["v"] = s["a"]["v"] * 0.97
        return off_by_one(model, x) * s["b"]["v"]

    p.loss = loss
    p.change(lambda: s.update(b={"v": mx.array(2.0)}), LATE - 4)
    p.change(lambda: s.update(b=s["a"]))


@build
def two_lists_become_one(p: Late) -> None:
    s = SimpleNamespace(a=[mx.array(1.0)], b=[mx.array(2.0)])

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a[0] = s.a[0] * 0.97
        return off_by_one(model, x) * s.b[0]

    p.loss = loss
    p.change(lambda: setattr(s, "b", s.a))


@build
def methods_become_those_of_one_object(p: Late) -> None:
    one, other = Decaying(), Decaying()
    s = SimpleNamespace(decay=one.decay, get=other.get)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.decay()
        return off_by_one(model, x) * s.get()

    p.loss = loss
    p.change(lambda: setattr(s, "get", one.get))


@build
def functions_come_to_share_a_cell(p: Late) -> None:
    (decay, get), (_, other) = in_cells(), in_cells()
    s = SimpleNamespace(decay=decay, get=other)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.decay()
        return off_by_one(model, x) * s.get()

    p.loss = loss
    p.change(lambda: setattr(s, "get", get))


@build
def an_argument_becomes_a_reached_object(p: Late) -> None:
    own, other = SimpleNamespace(v=mx.array(1.0)), SimpleNamespace(v=mx.array(2.0))

    def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
        own.v = own.v * 0.97
        return off_by_one(model, x) * given.v

    p.loss = loss
    p.given = lambda at: (own if at >= LATE else other,)


@build
def one_of_many_new_objects_is_another_one(p: Late) -> None:
    def things() -> list[Any]:
        return [SimpleNamespace(v=mx.array(1.0 + at)) for at in range(8)]

    s = SimpleNamespace(some=things(), a=SimpleNamespace(v=mx.array(1.0)), b=SimpleNamespace(v=mx.array(2.0)))

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a.v = s.a.v * 0.97
        return off_by_one(model, x) * (s.some[3].v + s.b.v)

    p.loss = loss
    for at in range(2, LATE - 3):
        p.change(lambda: setattr(s, "some", things()), at)
    for at in range(LATE - 3, LATE):
        p.change(lambda: setattr(s, "b", SimpleNamespace(v=mx.array(3.0))), at)
    p.change(lambda: s.some.__setitem__(3, s.a))


@build
def a_new_dict_in_each_step_becomes_that_of_the_model(p: Late) -> None:
    p.model.kept = {"w": mx.array(0.5)}
    s = SimpleNamespace(kept={"w": mx.array(2.0)})
    p.loss = lambda model, x: off_by_one(model, x) + mx.square(s.kept["w"] + 0.1 * model.kept["w"])
    for at in range(2, LATE):
        p.change(lambda: setattr(s, "kept", {"w": mx.array(2.0)}), at)
    p.change(lambda: setattr(s, "kept", p.model.kept))


@build
def a_layer_that_is_kept_leaves_the_model(p: Late) -> None:
    layer = p.model.layers[0]
    p.loss = lambda model, x: off_by_one(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.__setitem__(0, nn.Linear(3, 4)))


@build
def a_layer_comes_into_the_model(p: Late) -> None:
    layer = nn.Linear(3, 4)
    p.loss = lambda model, x: off_by_one(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.__setitem__(0, layer))


@build
def a_layer_gets_another_place_in_the_model(p: Late) -> None:
    p.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    layer = p.model.layers[0]
    p.loss = lambda model, x: off_by_one(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.reverse())


@build
def a_teacher_gets_a_layer_of_the_model(p: Late) -> None:
    teacher = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    p.loss = lambda model, x: off_by_one(model, x) + 0.1 * mx.square(model(x) - teacher(x)).mean()
    p.change(lambda: teacher.layers.__setitem__(0, p.model.layers[0]))


@build
def two_teachers_come_to_share_a_layer(p: Late) -> None:
    one, other = (nn.Sequential(Counting(), nn.Linear(3, 1)) for _ in range(2))
    p.loss = lambda model, x: off_by_one(model, x) + mx.square(one(x)).mean() * other.layers[0]._value
    p.change(lambda: other.layers.__setitem__(0, one.layers[0]))


@build
def a_module_among_the_arguments_becomes_a_layer_of_the_model(p: Late) -> None:
    other = nn.Linear(3, 4)
    p.loss = lambda model, x, layer: off_by_one(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.given = lambda at: (p.model.layers[0] if at >= LATE else other,)


@build
def a_module_with_a_buffer_becomes_a_layer_of_the_model(p: Late) -> None:
    p.model.layers.append(Counting())
    s = SimpleNamespace(layer=Counting())
    p.loss = lambda model, x: off_by_one(model, x) * s.layer._value
    p.change(lambda: setattr(s, "layer", p.model.layers[-1]))


@build
def two_objects_are_split_and_joined_again(p: Late) -> None:
    one, other = SimpleNamespace(k=1.0), SimpleNamespace(k=1.0)
    s = SimpleNamespace(o=one, p=one)
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if s.o is s.p else 1.0) * s.o.k
    p.change(lambda: setattr(s, "p", other), LATE - 4)
    p.change(lambda: setattr(s, "o", other))


@build
def a_phase_comes_back(p: Late) -> None:
    first, second = Thing(), Thing()
    s = SimpleNamespace(phase=first)
    p.loss = lambda model, x: off_by_one(model, x) * (0.1 if s.phase is first else 1.0)
    p.change(lambda: setattr(s, "phase", second), LATE - 4)
    p.change(lambda: setattr(s, "phase", first))


@build
def objects_are_equal_where_they_are_one(p: Late) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(a=one, b=other)
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if s.a == s.b else 1.0)
    p.change(lambda: setattr(s, "b", one))


@build
def two_arrays_become_one(p: Late) -> None:
    s = SimpleNamespace(a=mx.array(1.0), b=mx.array(1.0))
    p.loss = lambda model, x: off_by_one(model, x) * s.a * s.b * (2.0 if s.a is s.b else 1.0)
    p.change(lambda: setattr(s, "b", s.a))


@build
def another_object_is_in_no_set(p: Late) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(o=one, active={one})
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if s.o in s.active else 1.0)
    p.change(lambda: setattr(s, "o", other))


@build
def a_frozenset_and_a_tuple_are_asked(p: Late) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(o=one, some=frozenset([one]), more=(one,))
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if s.o in s.some else 1.0) * (3.0 if s.o in s.more else 1.0)
    p.change(lambda: setattr(s, "o", other), LATE - 3)
    p.change(lambda: setattr(s, "more", (other,)))


@build
def another_object_is_the_key(p: Late) -> None:
    one, other = Thing(), Thing()
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_in_the_key(p: Late) -> None:
    one, other = Thing(), Thing()
    scales, s = {("x", one): 1.0, ("x", other): 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales["x", s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_a_weak_key(p: Late) -> None:
    one, other = Thing(), Thing()
    scales, s = weakref.WeakKeyDictionary({one: 1.0, other: 0.5}), SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))
    p.kept = [one, other]


@build
def another_object_without_weak_references_is_the_key(p: Late) -> None:
    one, other = Slotted(), Slotted()
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_function_is_the_key(p: Late) -> None:
    one, other = (in_cells()[1] for _ in range(2))
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(f=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales[s.f] * s.f()
    p.change(lambda: setattr(s, "f", other))


@build
def an_argument_is_the_key(p: Late) -> None:
    one, other = Thing(), Thing()
    scales = {one: 1.0, other: 0.5}
    p.loss = lambda model, x, given: off_by_one(model, x) * scales[given]
    p.given = lambda at: (other if at >= LATE else one,)


@build
def a_layer_has_another_address(p: Late) -> None:
    layers = p.model.layers
    scales = {id(layers[0]): 0.3, id(layers[2]): 0.1}
    p.kept = list(layers)  # no other layer gets the address of one

    def loss(model: Any, x: mx.array) -> mx.array:
        own = (model.layers[0], model.layers[2])
        return off_by_one(model, x) + sum(scales.get(id(each), 0.0) * mx.square(each.weight).sum() for each in own)

    p.loss = loss
    p.change(lambda: p.model.layers.__setitem__(0, nn.Linear(3, 4)))


@build
def an_object_has_another_address(p: Late) -> None:
    one, other = Thing(k=1.0), Thing(k=1.0)
    scales, s = {id(one): 0.3}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * scales.get(id(s.o), s.o.k)
    p.change(lambda: setattr(s, "o", other))


@build
def a_function_that_is_a_key_reads_another_number(p: Late) -> None:
    s = SimpleNamespace(k=1.0)
    terms = {lambda loss: loss * s.k: 0.5}
    p.loss = lambda model, x: sum((term(off_by_one(model, x)) * scale for term, scale in terms.items()), mx.array(0.0))
    p.change(lambda: setattr(s, "k", 3.0))


@build
def another_object_is_not_that_of_the_model(p: Late) -> None:
    mine, other = Thing(), Thing()
    p.model.own = mine
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if model.own is mine else 1.0)

    def change() -> None:
        nonlocal mine
        mine = other

    p.change(change)


@build
def another_object_is_the_key_in_a_dict_of_the_model(p: Late) -> None:
    one, other = Thing(), Thing()
    p.model.scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * model.scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_in_no_set_of_the_model(p: Late) -> None:
    one, other = Thing(), Thing()
    p.model.active, s = {one}, SimpleNamespace(o=one)
    p.loss = lambda model, x: off_by_one(model, x) * (2.0 if s.o in model.active else 1.0)
    p.change(lambda: setattr(s, "o", other))


def given_too(of_arrays: bool, at: int) -> Begin:
    """A loss that changes a dict which it is given too."""

    def begin(p: Late) -> None:
        own, other = ({"k": mx.array(value) if of_arrays else value} for value in (1.0, 2.0))
        p.kept = [own]

        def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
            own["k"] = own["k"] + 0.01
            return off_by_one(model, x) * given["k"]

        p.loss = loss
        p.given = lambda number: (own if number >= at else other,)

    return begin


for of_arrays, at in itertools.product((False, True), (0, 4)):
    name = f"a dict of {'arrays' if of_arrays else 'numbers'} that the loss changes and is given, from call {at} on"
    add("object", name, late(given_too(of_arrays, at)))


def dict_of_the_model(name: str, at: int) -> Begin:
    """A loss that is given a dict of the model."""

    def begin(p: Late) -> None:
        setattr(p.model, name, {"w": mx.array(0.5)})
        other = {"w": mx.array(0.5)}

        def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
            if name == "_kept":
                model._kept["w"] = model._kept["w"] * 0.97
            return off_by_one(model, x) + mx.square(given["w"] + 0.1)

        p.loss = loss
        p.given = lambda number: (getattr(p.model, name) if number >= at else other,)

    return begin


for name, at in itertools.product(("kept", "_kept"), (0, 4)):
    add(
        "model",
        f"a dict of the model ({name}) that the loss is given, from call {at} on",
        late(dict_of_the_model(name, at)),
    )


def clears_a_cache(p: Late, of_arrays: bool) -> None:
    s = SimpleNamespace(k=1.0)

    @functools.lru_cache
    def scaled(by: float) -> Any:
        return mx.array(by * s.k) if of_arrays else by * s.k

    p.loss = lambda model, x: off_by_one(model, x) * scaled(2.0)
    for at in (1, LATE):  # at the first time the factor becomes an input of the trace
        p.change(lambda at=at: setattr(s, "k", 1 + at / 4), at)  # type: ignore[misc]
        p.change(scaled.cache_clear, at + 3)


for of_arrays in (False, True):
    begin = functools.partial(clears_a_cache, of_arrays=of_arrays)
    add("closure", f"a cache of {'arrays' if of_arrays else 'numbers'} that is cleared late", late(begin))


# numbers that are equal and not the same


NUMBERS: dict[str, tuple[Any, Any]] = {
    "float": (0.0, -0.0),
    "NumPy's float32": (np.float32(0.0), np.float32(-0.0)),
    "complex": (complex(-1.0, 0.0), complex(-1.0, -0.0)),
    "class": (1, 1.0),
    "flag": (1, True),
}


class Keeping(nn.Module):
    """A model with a number."""

    def __init__(self, number: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.number = number

    def __call__(self, x: mx.array) -> Any:
        return self.layer(x) * scale(self.number)


def scale(number: Any) -> float:
    """Return another number for each of those that are equal."""
    if isinstance(number, complex):
        return 1.0 + 0.1 * cmath.phase(number)
    return 1.0 + 0.1 * math.copysign(1.0, number) + 0.01 * len(type(number).__name__)


PLACES = [(where, name) for where in ("module", "tuple") for name in NUMBERS]
PLACES += [(where, name) for where in ("model", "object") for name in ("NumPy's float32", "complex")]


def equal(where: str, name: str) -> Begin:
    """Another number that is equal."""
    one, other = NUMBERS[name]

    def begin(p: Late) -> None:
        owner: Any = Keeping(one) if where in ("model", "module") else SimpleNamespace(number=one)
        if where == "model":
            p.model = owner
            p.loss = off_by_one
        elif where == "module":
            p.loss = lambda model, x: off_by_one(model, x) * scale(owner.number) + squares(owner, x)
        elif where == "tuple":
            owner.number = tuple([one] * 5000)  # compared as a whole
            p.loss = lambda model, x: off_by_one(model, x) * scale(owner.number[7])
            p.change(lambda: setattr(owner, "number", tuple([other] * 5000)))
            return
        else:
            p.loss = lambda model, x: off_by_one(model, x) * scale(owner.number)
        p.change(lambda: setattr(owner, "number", other))

    return begin


for where, name in PLACES:
    add("model" if where == "model" else "object", f"an equal number of a {where}: {name}", late(equal(where, name)))


def turning(dtype: str) -> Begin:
    """A negative zero is one in a kernel too."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.number = nn.Linear(3, 1), 0.0

        def __call__(self, x: mx.array) -> mx.array:
            number, one = (mx.array(each, getattr(mx, dtype)) for each in (self.number, -1.0))
            return self.layer(x) * (1.0 + 0.1 * mx.arctan2(number, one).astype(mx.float32))

    def begin(p: Late) -> None:
        p.model, p.loss = Turning(), off_by_one
        for at in (1, 3, LATE):
            p.change(lambda: setattr(p.model, "number", -0.0), at)
            p.change(lambda: setattr(p.model, "number", 0.0), at + 1)

    return begin


for dtype in ("float32", "float16", "bfloat16"):
    add("model", f"a negative zero in {dtype}", late(turning(dtype)))
