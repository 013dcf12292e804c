"""Which of the objects that a loss reaches are one, and which are the model's, may change between two steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.late import LATE, Program, losses, squares


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


BUILDS: dict[str, Callable[[Program], None]] = {}


def build(made: Callable[[Program], None]) -> Callable[[Program], None]:
    BUILDS[made.__name__] = made
    return made


@build
def two_objects_become_one(p: Program) -> None:
    s = SimpleNamespace(a=SimpleNamespace(v=mx.array(1.0)), b=SimpleNamespace(v=mx.array(2.0)))

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a.v = s.a.v * 0.97
        return squares(model, x) * s.b.v

    p.loss = loss
    p.change(lambda: setattr(s, "b", s.a))


@build
def two_dicts_become_one_again(p: Program) -> None:
    one = {"v": mx.array(1.0)}
    s = {"a": one, "b": one}

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s["a"]["v"] = s["a"]["v"] * 0.97
        return squares(model, x) * s["b"]["v"]

    p.loss = loss
    p.change(lambda: s.update(b={"v": mx.array(2.0)}), LATE - 4)
    p.change(lambda: s.update(b=s["a"]))


@build
def two_lists_become_one(p: Program) -> None:
    s = SimpleNamespace(a=[mx.array(1.0)], b=[mx.array(2.0)])

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a[0] = s.a[0] * 0.97
        return squares(model, x) * s.b[0]

    p.loss = loss
    p.change(lambda: setattr(s, "b", s.a))


@build
def methods_become_those_of_one_object(p: Program) -> None:
    one, other = Decaying(), Decaying()
    s = SimpleNamespace(decay=one.decay, get=other.get)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.decay()
        return squares(model, x) * s.get()

    p.loss = loss
    p.change(lambda: setattr(s, "get", one.get))


@build
def functions_come_to_share_a_cell(p: Program) -> None:
    (decay, get), (_, other) = in_cells(), in_cells()
    s = SimpleNamespace(decay=decay, get=other)

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.decay()
        return squares(model, x) * s.get()

    p.loss = loss
    p.change(lambda: setattr(s, "get", get))


@build
def an_argument_becomes_a_reached_object(p: Program) -> None:
    own, other = SimpleNamespace(v=mx.array(1.0)), SimpleNamespace(v=mx.array(2.0))

    def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
        own.v = own.v * 0.97
        return squares(model, x) * given.v

    p.loss = loss
    p.given = lambda at: (own if at >= LATE else other,)


@build
def one_of_many_new_objects_is_another_one(p: Program) -> None:
    def things() -> list[Any]:
        return [SimpleNamespace(v=mx.array(1.0 + at)) for at in range(8)]

    s = SimpleNamespace(some=things(), a=SimpleNamespace(v=mx.array(1.0)), b=SimpleNamespace(v=mx.array(2.0)))

    def loss(model: nn.Module, x: mx.array) -> mx.array:
        s.a.v = s.a.v * 0.97
        return squares(model, x) * (s.some[3].v + s.b.v)

    p.loss = loss
    for at in range(100, LATE - 3):
        p.change(lambda: setattr(s, "some", things()), at)
    for at in range(LATE - 3, LATE):
        p.change(lambda: setattr(s, "b", SimpleNamespace(v=mx.array(3.0))), at)
    p.change(lambda: s.some.__setitem__(3, s.a))


@build
def a_new_dict_in_each_step_becomes_that_of_the_model(p: Program) -> None:
    p.model.kept = {"w": mx.array(0.5)}
    s = SimpleNamespace(kept={"w": mx.array(2.0)})
    p.loss = lambda model, x: squares(model, x) + mx.square(s.kept["w"] + 0.1 * model.kept["w"])
    for at in range(100, LATE):
        p.change(lambda: setattr(s, "kept", {"w": mx.array(2.0)}), at)
    p.change(lambda: setattr(s, "kept", p.model.kept))


@build
def a_layer_that_is_kept_leaves_the_model(p: Program) -> None:
    layer = p.model.layers[0]
    p.loss = lambda model, x: squares(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.__setitem__(0, nn.Linear(3, 4)))


@build
def a_layer_comes_into_the_model(p: Program) -> None:
    layer = nn.Linear(3, 4)
    p.loss = lambda model, x: squares(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.__setitem__(0, layer))


@build
def a_layer_gets_another_place_in_the_model(p: Program) -> None:
    p.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    layer = p.model.layers[0]
    p.loss = lambda model, x: squares(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.change(lambda: p.model.layers.reverse())


@build
def a_teacher_gets_a_layer_of_the_model(p: Program) -> None:
    teacher = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    p.loss = lambda model, x: squares(model, x) + 0.1 * mx.square(model(x) - teacher(x)).mean()
    p.change(lambda: teacher.layers.__setitem__(0, p.model.layers[0]))


@build
def two_teachers_come_to_share_a_layer(p: Program) -> None:
    one, other = (nn.Sequential(Counting(), nn.Linear(3, 1)) for _ in range(2))
    p.loss = lambda model, x: squares(model, x) + mx.square(one(x)).mean() * other.layers[0]._value
    p.change(lambda: other.layers.__setitem__(0, one.layers[0]))


@build
def a_module_among_the_arguments_becomes_a_layer_of_the_model(p: Program) -> None:
    other = nn.Linear(3, 4)
    p.loss = lambda model, x, layer: squares(model, x) + 0.1 * mx.square(layer.weight).sum()
    p.given = lambda at: (p.model.layers[0] if at >= LATE else other,)


@build
def a_module_with_a_buffer_becomes_a_layer_of_the_model(p: Program) -> None:
    p.model.layers.append(Counting())
    s = SimpleNamespace(layer=Counting())
    p.loss = lambda model, x: squares(model, x) * s.layer._value
    p.change(lambda: setattr(s, "layer", p.model.layers[-1]))


@build
def two_objects_are_split_and_joined_again(p: Program) -> None:
    one, other = SimpleNamespace(k=1.0), SimpleNamespace(k=1.0)
    s = SimpleNamespace(o=one, p=one)
    p.loss = lambda model, x: squares(model, x) * (2.0 if s.o is s.p else 1.0) * s.o.k
    p.change(lambda: setattr(s, "p", other), LATE - 4)
    p.change(lambda: setattr(s, "o", other))


@build
def a_phase_comes_back(p: Program) -> None:
    first, second = Thing(), Thing()
    s = SimpleNamespace(phase=first)
    p.loss = lambda model, x: squares(model, x) * (0.1 if s.phase is first else 1.0)
    p.change(lambda: setattr(s, "phase", second), LATE - 4)
    p.change(lambda: setattr(s, "phase", first))


@build
def objects_are_equal_where_they_are_one(p: Program) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(a=one, b=other)
    p.loss = lambda model, x: squares(model, x) * (2.0 if s.a == s.b else 1.0)
    p.change(lambda: setattr(s, "b", one))


@build
def two_arrays_become_one(p: Program) -> None:
    s = SimpleNamespace(a=mx.array(1.0), b=mx.array(1.0))
    p.loss = lambda model, x: squares(model, x) * s.a * s.b * (2.0 if s.a is s.b else 1.0)
    p.change(lambda: setattr(s, "b", s.a))


@build
def another_object_is_in_no_set(p: Program) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(o=one, active={one})
    p.loss = lambda model, x: squares(model, x) * (2.0 if s.o in s.active else 1.0)
    p.change(lambda: setattr(s, "o", other))


@build
def a_frozenset_and_a_tuple_are_asked(p: Program) -> None:
    one, other = Thing(), Thing()
    s = SimpleNamespace(o=one, some=frozenset([one]), more=(one,))
    p.loss = lambda model, x: squares(model, x) * (2.0 if s.o in s.some else 1.0) * (3.0 if s.o in s.more else 1.0)
    p.change(lambda: setattr(s, "o", other), LATE - 3)
    p.change(lambda: setattr(s, "more", (other,)))


@build
def another_object_is_the_key(p: Program) -> None:
    one, other = Thing(), Thing()
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_in_the_key(p: Program) -> None:
    one, other = Thing(), Thing()
    scales, s = {("x", one): 1.0, ("x", other): 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * scales["x", s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_a_weak_key(p: Program) -> None:
    one, other = Thing(), Thing()
    scales, s = weakref.WeakKeyDictionary({one: 1.0, other: 0.5}), SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))
    p.kept = [one, other]


@build
def another_object_without_weak_references_is_the_key(p: Program) -> None:
    one, other = Slotted(), Slotted()
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_function_is_the_key(p: Program) -> None:
    one, other = (in_cells()[1] for _ in range(2))
    scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(f=one)
    p.loss = lambda model, x: squares(model, x) * scales[s.f] * s.f()
    p.change(lambda: setattr(s, "f", other))


@build
def an_argument_is_the_key(p: Program) -> None:
    one, other = Thing(), Thing()
    scales = {one: 1.0, other: 0.5}
    p.loss = lambda model, x, given: squares(model, x) * scales[given]
    p.given = lambda at: (other if at >= LATE else one,)


@build
def a_layer_has_another_address(p: Program) -> None:
    layers = p.model.layers
    scales = {id(layers[0]): 0.3, id(layers[2]): 0.1}
    p.kept = list(layers)  # no other layer gets the address of one

    def loss(model: Any, x: mx.array) -> mx.array:
        own = (model.layers[0], model.layers[2])
        return squares(model, x) + sum(scales.get(id(each), 0.0) * mx.square(each.weight).sum() for each in own)

    p.loss = loss
    p.change(lambda: p.model.layers.__setitem__(0, nn.Linear(3, 4)))


@build
def an_object_has_another_address(p: Program) -> None:
    one, other = Thing(k=1.0), Thing(k=1.0)
    scales, s = {id(one): 0.3}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * scales.get(id(s.o), s.o.k)
    p.change(lambda: setattr(s, "o", other))


@build
def a_function_that_is_a_key_reads_another_number(p: Program) -> None:
    s = SimpleNamespace(k=1.0)
    terms = {lambda loss: loss * s.k: 0.5}
    p.loss = lambda model, x: sum((term(squares(model, x)) * scale for term, scale in terms.items()), mx.array(0.0))
    p.change(lambda: setattr(s, "k", 3.0))


@build
def another_object_is_not_that_of_the_model(p: Program) -> None:
    mine, other = Thing(), Thing()
    p.model.own = mine
    p.loss = lambda model, x: squares(model, x) * (2.0 if model.own is mine else 1.0)

    def change() -> None:
        nonlocal mine
        mine = other

    p.change(change)


@build
def another_object_is_the_key_in_a_dict_of_the_model(p: Program) -> None:
    one, other = Thing(), Thing()
    p.model.scales, s = {one: 1.0, other: 0.5}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * model.scales[s.o]
    p.change(lambda: setattr(s, "o", other))


@build
def another_object_is_in_no_set_of_the_model(p: Program) -> None:
    one, other = Thing(), Thing()
    p.model.active, s = {one}, SimpleNamespace(o=one)
    p.loss = lambda model, x: squares(model, x) * (2.0 if s.o in model.active else 1.0)
    p.change(lambda: setattr(s, "o", other))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", BUILDS)
def test_a_late_change_of_what_is_one_object_is_seen_at_once(name: str, accumulate: int) -> None:
    expected = losses(BUILDS[name], False, accumulate)
    for _ in range(2):  # the second step of the process knows the graphs of the first one
        np.testing.assert_allclose(losses(BUILDS[name], True, accumulate), expected, rtol=2e-5)


@pytest.mark.parametrize("late", [0, 20])
@pytest.mark.parametrize("of_arrays", [False, True])
def test_a_loss_that_changes_a_dict_which_it_is_given_too_runs_uncompiled(of_arrays: bool, late: int) -> None:
    def made(p: Program) -> None:
        own, other = ({"k": mx.array(value) if of_arrays else value} for value in (1.0, 2.0))

        def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
            own["k"] = own["k"] + 0.01
            return squares(model, x) * given["k"]

        p.loss = loss
        p.given = lambda at: (own if at >= late else other,)

    expected = losses(made, False, 1)
    with pytest.warns(RuntimeWarning, match="is among its arguments too"):
        np.testing.assert_allclose(losses(made, True, 1), expected, rtol=2e-5)

    own, counts = {"k": mx.array(2.0)}, [mx.array(0.0)]

    def reading(model: nn.Module, x: mx.array, given: Any) -> mx.array:
        counts[0] = counts[0] + 1
        return squares(model, x) * given["k"] * own["k"]

    step = Step(nn.Linear(3, 1), optim.SGD(0.1), reading)
    step(mx.ones((8, 3)), own)
    assert step.stats.mode == "native"


@pytest.mark.parametrize("late", [0, 20])
@pytest.mark.parametrize("name", ["kept", "_kept"])
def test_a_loss_that_is_given_a_dict_of_the_model_runs_uncompiled(name: str, late: int) -> None:
    def made(p: Program) -> None:
        setattr(p.model, name, {"w": mx.array(0.5)})
        other = {"w": mx.array(0.5)}

        def loss(model: nn.Module, x: mx.array, given: Any) -> mx.array:
            if name == "_kept":
                model._kept["w"] = model._kept["w"] * 0.97
            return squares(model, x) + mx.square(given["w"] + 0.1)

        p.loss = loss
        p.given = lambda at: (getattr(p.model, name) if at >= late else other,)

    expected = losses(made, False)
    with pytest.warns(RuntimeWarning, match="a dict or a list of the model is among its arguments"):
        np.testing.assert_allclose(losses(made, True), expected, rtol=2e-5)


@pytest.mark.parametrize("of_arrays", [False, True])
def test_a_function_with_a_cache_is_called_anew(of_arrays: bool) -> None:
    made = functools.partial(clears_a_cache, of_arrays=of_arrays)
    expected = losses(made, False, accumulate=2)
    for _ in range(2):
        np.testing.assert_allclose(losses(made, True, accumulate=2), expected, rtol=2e-5)


def clears_a_cache(p: Program, of_arrays: bool) -> None:
    s = SimpleNamespace(k=1.0)

    @functools.lru_cache
    def scaled(by: float) -> Any:
        return mx.array(by * s.k) if of_arrays else by * s.k

    p.loss = lambda model, x: squares(model, x) * scaled(2.0)
    for at in (LATE - 8, LATE):  # at the first time the factor becomes an input of the trace
        p.change(lambda at=at: setattr(s, "k", at / 40.0), at)  # type: ignore[misc]
        p.change(scaled.cache_clear, at + 3)
