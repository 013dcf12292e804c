"""Objects that a loss reaches beside its arguments: changes between two calls are seen, as by the plain loop."""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import ctypes
import enum
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep._step import _reach
from mlx.utils import tree_map
from support.helpers import assert_close, assert_same, flat, plain_step, snapshot

WEIGHTS = mx.array([1.0, 2.0, 3.0, 4.0])
TEMPERATURE = 1.0
TABLE = {"weight": 1.0, "arrays": [mx.array(2.0)]}


@dataclass
class Settings:
    scale: float = 1.0
    shift: mx.array = field(default_factory=lambda: mx.array(0.5))


@dataclass(frozen=True)
class Pair:
    inputs: mx.array
    targets: mx.array


class Agent:
    """An agent as published ones are: a loss that is a method, a target network, numbers as attributes."""

    discount = 0.9

    def __init__(self) -> None:
        self.target = nn.Linear(4, 2)
        self.temperature, self.calls, self.phase = 1.0, 0, "one"
        self.settings, self.fixed = Settings(), (mx.array(1.0),)
        self.arrays = {"noise": np.ones(2, np.float32)}

    @property
    def warm(self) -> float:
        return 1.0 if self.calls < 3 else 2.0

    def aim(self, x: mx.array) -> mx.array:
        return self.discount * self.target(x) / self.temperature

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        error = model(x) - self.aim(x) * self.settings.scale + self.settings.shift * self.fixed[0]
        sign = 2.0 if self.phase == "two" else 1.0
        return mx.square(error * mx.array(self.arrays["noise"])).mean() * sign * self.warm


class Slots:
    __slots__ = ("weight",)

    def __init__(self) -> None:
        self.weight = mx.array(1.5)


def by_globals(model: nn.Module, x: mx.array) -> mx.array:
    return (mx.square(model(x * WEIGHTS)) * TEMPERATURE * TABLE["weight"] * TABLE["arrays"][0]).mean()


def rebind(**names: Any) -> Callable[[], None]:
    return lambda: globals().update(names)


class Replay(collections.deque[float]):
    """The last numbers, as agents keep them: made by another constructor than a deque is."""

    def __init__(self, capacity: int) -> None:
        super().__init__(maxlen=capacity)


class Scale:
    """A number that is reached in many ways."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.inner = scale, types.SimpleNamespace(scale=scale)

    def times(self, factor: float) -> float:
        return self.scale * factor

    doubled = functools.partialmethod(times, 2.0)
    by_getter = property(operator.attrgetter("inner.scale"))

    @functools.singledispatchmethod
    def of(self, kind: Any) -> float:
        return self.scale


def by_name_later(model: nn.Module, x: mx.array) -> mx.array:
    try:
        scale = LATER  # type: ignore[name-defined]
    except NameError:
        scale = 1.0
    return squares(model, x) * scale


def by_patterns(settings: Scale) -> Callable[..., mx.array]:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        match settings:
            case Scale(scale=scale):
                return squares(model, x) * scale
        raise AssertionError

    return loss_fn


def squares(model: nn.Module, x: mx.array) -> mx.array:
    return mx.square(model(x)).mean()


def by_way() -> dict[str, tuple[Callable[..., mx.array], list[Callable[[], object]]]]:
    """Return losses that take a number by ways of Python that name it in a text, or late, or through another object."""
    scale, table, buffer, number = Scale(), {"scale": 1.0}, array.array("f", [1.0]), ctypes.c_float(1.0)
    reference, proxy, method = weakref.ref(scale), weakref.proxy(scale), weakref.WeakMethod(scale.times)
    by_weak, chain, view = weakref.WeakValueDictionary({0: scale}), collections.ChainMap({"scale": 1.0}), table.values()
    read, getter, caller = (
        types.MappingProxyType(table),
        operator.attrgetter("inner.scale"),
        operator.methodcaller("times", 2.0),
    )
    event, queue = threading.Event(), Replay(4)
    queue.append(1.0)
    module, late = sys.modules[__name__], type("Late", (), {})

    def change(value: float) -> Callable[[], None]:
        def change() -> None:
            scale.scale = scale.inner.scale = table["scale"] = chain["scale"] = buffer[0] = number.value = value
            globals()["TEMPERATURE"] = globals()["LATER"] = value
            late.scale = value  # type: ignore[attr-defined]
            queue.append(value)
            event.set()

        return change

    ways: dict[str, Callable[[], float]] = {
        "attrgetter": lambda: getter(scale),
        "dotted": lambda: operator.attrgetter("inner.scale")(scale),
        "methodcaller": lambda: caller(scale),
        "partialmethod": lambda: scale.doubled(),
        "singledispatchmethod": lambda: scale.of(1),
        "property": lambda: scale.by_getter,
        "format": lambda: float("{.scale}".format(scale)),  # noqa: UP032
        "reduce": lambda: scale.__reduce_ex__(2)[2]["inner"].scale,  # type: ignore[index]
        "weakref": lambda: reference().scale,  # type: ignore[union-attr]
        "proxy": lambda: proxy.scale,
        "a proxy's method": lambda: proxy.times(2.0),
        "WeakMethod": lambda: method()(3.0),  # type: ignore[misc]
        "WeakValueDictionary": lambda: by_weak[0].scale,
        "ChainMap": lambda: chain["scale"],
        "MappingProxyType": lambda: read["scale"],
        "values": lambda: sum(view),
        "array": lambda: buffer[0],
        "ctypes": lambda: number.value,
        "Event": lambda: 2.0 if event.is_set() else 1.0,
        "deque of a class": lambda: queue[-1],
        "globals": lambda: globals()["TEMPERATURE"],
        "eval": lambda: eval("TEMPERATURE * 2"),
        "modules": lambda: getattr(sys.modules[__name__], "TEMPERATURE"),  # noqa: B009
        "a module": lambda: module.TEMPERATURE,
        "a name inside, later": lambda: (lambda: globals().get("LATER") or 1.0)(),
        "an attribute of a class, later": lambda: getattr(late, "scale", 1.0),
    }
    found = {way: (lambda model, x, get=get: squares(model, x) * get()) for way, get in ways.items()}
    losses = {**found, "a name, later": by_name_later, "a pattern": by_patterns(scale)}
    return {way: (loss_fn, [change(2.0), change(5.0)]) for way, loss_fn in losses.items()}


def reaching() -> dict[str, tuple[Callable[..., mx.array], list[Callable[[], object]]]]:
    """Return losses, each with what is changed between its calls."""
    agent, generator, cell, slots = Agent(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm(4)), [mx.array(2.0)], Slots()
    namespace = types.SimpleNamespace(weight=1.0, layer=nn.Linear(4, 2))
    number = 1.0
    part = functools.partial(lambda weight, model, x: (model(x) * weight).sum(), mx.array(3.0))

    def by_closure(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(generator(x)) * cell[0] * slots.weight).mean() * number

    def increase() -> None:
        nonlocal number
        number += 0.5

    def by_default(model: nn.Module, x: mx.array, table: dict[str, float] = {"weight": 1.0}) -> mx.array:  # noqa: B006
        return mx.square(model(x)).mean() * table["weight"]

    def by_namespace(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x) - namespace.layer(x)).mean() * getattr(namespace, "weight")  # noqa: B009

    target = {
        "a new array": lambda: setattr(agent.target, "weight", agent.target.weight * 3),
        "in place": lambda: agent.target.weight.__setitem__(0, 5.0),
        "another module": lambda: setattr(agent, "target", nn.Linear(4, 2)),
        "update": lambda: agent.target.update(nn.Linear(4, 2).parameters()),
        "a number": lambda: setattr(agent, "temperature", agent.temperature + 0.5),
        "a number that decides": lambda: setattr(agent, "calls", agent.calls + 2),
        "a string": lambda: setattr(agent, "phase", "two"),
        "an attribute of the class": lambda: setattr(Agent, "discount", Agent.discount / 2),
        "one that hides it": lambda: setattr(agent, "discount", 0.1),
        "in a dataclass": lambda: setattr(agent.settings, "shift", agent.settings.shift + 1),
        "another dataclass": lambda: setattr(agent, "settings", replace(agent.settings, scale=3.0)),
        "another tuple": lambda: setattr(agent, "fixed", (mx.array(4.0),)),
        "in a tuple, in place": lambda: agent.fixed[0].__setitem__(..., 7.0),
        "NumPy, in place": lambda: agent.arrays["noise"].__setitem__(0, 3.0),
    }

    last = collections.deque([1.0, 2.0], maxlen=3)
    local = threading.local()
    local.scale = 1.0
    constants = types.ModuleType("constants_of_a_loss")
    vars(constants).update(scale=1.0, weight=mx.ones(4))
    sys.modules[constants.__name__] = constants

    def by_import(model: nn.Module, x: mx.array) -> mx.array:
        import constants_of_a_loss  # type: ignore[import-not-found]
        from constants_of_a_loss import scale

        return mx.square(model(x * constants_of_a_loss.weight)).mean() * scale

    def scaled(x: mx.array) -> mx.array:
        factors: Any = scaled
        return factors.weight * x + factors.parts["shift"] * factors.scale

    vars(scaled).update(weight=mx.ones(4), parts={"shift": mx.array(1.0)}, scale=1.0)
    closure = [
        lambda: generator.layers[0].update({"bias": generator.layers[0].bias + 1}),
        generator.eval,
        lambda: cell.__setitem__(0, mx.array(5.0)),
        lambda: cell[0].__iadd__(1.0),
        lambda: setattr(slots, "weight", slots.weight + 1),
        increase,
        increase,
        increase,
    ]
    return {
        "method": (agent.loss, [*target.values(), *target.values()]),
        "globals": (
            by_globals,
            [
                rebind(WEIGHTS=mx.array([2.0, 2, 2, 2])),
                rebind(TEMPERATURE=2.0),
                rebind(TEMPERATURE=3.0),
                lambda: TABLE.update(weight=0.5),
                lambda: TABLE["arrays"].append(mx.array(1.0)),  # type: ignore[attr-defined]
                lambda: TABLE["arrays"].insert(0, mx.array(4.0)),  # type: ignore[attr-defined]
            ],
        ),
        "closure": (by_closure, closure),
        "default": (by_default, [lambda: by_default.__defaults__[0].update(weight=2.0)]),  # type: ignore[index]
        "partial": (
            lambda model, x: part(model, x),
            [lambda: part.args[0].__imul__(2.0), lambda: part.args[0].__imul__(2.0)],
        ),
        "function's attributes": (
            lambda model, x: mx.square(model(scaled(x))).mean(),
            [
                lambda: setattr(scaled, "weight", 2.0 * mx.ones(4)),
                lambda: setattr(scaled, "scale", 3.0),
                lambda: setattr(scaled, "scale", 4.0),
                lambda: vars(scaled)["parts"].update(shift=mx.array(5.0)),
            ],
        ),
        "thread's own": (
            lambda model, x: mx.square(model(x)).mean() * local.scale,
            [lambda: setattr(local, "scale", 3.0), lambda: setattr(local, "scale", 4.0)],
        ),
        "import": (
            by_import,
            [
                lambda: vars(constants).update(scale=3.0),
                lambda: vars(constants).update(scale=4.0),
                lambda: vars(constants).update(weight=mx.array([1.0, 2.0, 3.0, 4.0])),
            ],
        ),
        "deque": (
            lambda model, x: mx.square(model(x)).mean() * sum(last) / len(last),
            [lambda: last.append(4.0), lambda: last.append(5.0), lambda: last.appendleft(7.0), last.pop],
        ),
        "namespace": (
            by_namespace,
            [
                lambda: setattr(namespace, "weight", 4.0),
                lambda: setattr(namespace, "layer", nn.Linear(4, 2)),
                lambda: setattr(namespace.layer, "bias", namespace.layer.bias + 1),
            ],
        ),
    }


@pytest.mark.parametrize("name", [*reaching(), *by_way()])
def test_a_change_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LATER", 1.0)
    monkeypatch.delitem(globals(), "LATER")
    for each in ("WEIGHTS", "TEMPERATURE"):
        monkeypatch.setitem(globals(), each, globals()[each])
    monkeypatch.setitem(globals(), "TABLE", {"weight": 1.0, "arrays": [mx.array(2.0)]})
    monkeypatch.setattr(Agent, "discount", 0.9)
    loss_fn, changes = {**reaching(), **by_way()}[name]
    model, x = nn.Linear(4, 2), mx.random.normal((8, 4))
    step = Step(model, optim.SGD(0.0), loss_fn)
    assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)
    for number, change in enumerate(changes):
        change()
        wanted = loss_fn(model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5), number
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5), number
        _, gradients = step.gradients(x)
        _, plain = nn.value_and_grad(model, loss_fn)(model, x)
        np.testing.assert_allclose(gradients["weight"], plain["weight"], rtol=1e-4, atol=1e-6)
    assert step.stats.mode == "native"


def test_contents_that_are_changed_in_place_are_seen() -> None:
    chosen, many, large, table = {"a"}, [1.0] * 5000, np.ones(40_000, np.float32), dict.fromkeys(range(5000), 1.0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        scale = 2.0 if "b" in chosen else 1.0
        return (model(x).sum() + mx.array(large).sum() + mx.array(many).mean()) * scale * table[4999]

    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), loss_fn), mx.ones((3, 4))
    for change in (
        lambda: chosen.add("b"),
        lambda: many.__setitem__(7, 1e6),
        lambda: large.__setitem__(39_999, 1e4),
        lambda: table.update({4999: 3.0}),
    ):
        assert step(x).loss.item() == pytest.approx(loss_fn(step.model, x).item(), rel=1e-5)
        change()
    assert step(x).loss.item() == pytest.approx(loss_fn(step.model, x).item(), rel=1e-5)
    assert step.stats.mode == "native"


def test_what_is_too_much_to_be_watched_is_told() -> None:
    table = [[float(number)] * 4000 for number in range(20)]
    step = Step(nn.Linear(4, 1), optim.SGD(0.0), lambda model, x: model(x).sum() * table[19][3999])
    with pytest.warns(RuntimeWarning, match="more than 50,000 objects") as caught:
        step(mx.ones((2, 4)))
    assert [warning.filename for warning in caught] == [__file__]


class Row:
    def __init__(self, weight: float) -> None:
        self.weight = weight


@pytest.mark.parametrize("kind", [list, tuple, lambda rows: dict(enumerate(rows))])
def test_what_changes_in_a_large_container_of_objects_is_told(kind: Callable[[list[Row]], Any]) -> None:
    def take(count: int) -> float:
        rows = kind([Row(1.0) for _ in range(count)])
        step = Step(nn.Linear(4, 1), optim.SGD(0.0), lambda model, x: model(x).sum() * rows[7].weight)
        before = step(mx.ones((2, 4))).loss.item()
        rows[7].weight = 3.0
        return step(mx.ones((2, 4))).loss.item() / before

    assert take(4000) == pytest.approx(3)
    with pytest.warns(RuntimeWarning, match=r"reaches a \w+ of 5,000 objects: what changes") as caught:
        take(5000)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_large_table_of_texts_and_numbers_is_nothing_to_be_told() -> None:
    words, merges = {f"word{number}": number for number in range(5000)}, [("a", "b")] * 5000
    model = nn.Linear(4, 1)
    step = Step(model, optim.SGD(0.0), lambda model, x: model(x).sum() * words["word3"] * len(merges[0]))
    assert step(mx.ones((2, 4))).loss.item() == pytest.approx(6 * model(mx.ones((2, 4))).sum().item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it reaches a NumPy array of objects")
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("items", [["a", "bb"], [1.0, 2.0], [{"weight": 1.0}], [Row(1.0)]])
def test_what_is_in_an_array_of_objects_is_seen(items: list[Any], anew: bool) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        first = held.rows[0]
        weight = first["weight"] if isinstance(first, dict) else getattr(first, "weight", first)
        return model(x).sum() * (len(weight) if isinstance(weight, str) else weight)

    held = types.SimpleNamespace(rows=np.array(items, object))
    model, x = nn.Linear(4, 1), mx.ones((2, 4))
    step = Step(model, optim.SGD(0.0), loss_fn)
    for number in range(1, 8):
        if anew:
            held.rows = np.array(items, object)
        if isinstance(items[0], dict):
            held.rows[0]["weight"] = float(number)
        elif isinstance(items[0], Row):
            held.rows[0].weight = float(number)
        else:
            held.rows[0] = "a" * number if isinstance(items[0], str) else float(number)
        assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)


def test_a_large_numpy_array_is_read_as_its_elements_lie() -> None:
    rows = np.ones((400, 300), np.float32)
    for table in (rows, rows.T, rows[::2, ::2], rows.astype(np.float64)):
        step, x = (
            Step(nn.Linear(4, 1), optim.SGD(0.0), lambda model, x, t=table: model(x).sum() * float(t[3, 4])),
            mx.ones((2, 4)),
        )
        before = step(x).loss.item()
        table[3, 4] = 5.0
        assert step(x).loss.item() == pytest.approx(5 * before)
        table[3, 4] = 1.0


@pytest.mark.parametrize("as_attributes", [False, True])
def test_each_number_of_many_is_seen_to_change(as_attributes: bool) -> None:
    weights: dict[str, Any] = {f"weight{i}": float(i) for i in range(40)}
    settings = types.SimpleNamespace(**weights)
    table = vars(settings) if as_attributes else weights

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        assert settings is not None
        return model(x).square().mean() * sum((i + 1) * table[f"weight{i}"] for i in range(40))

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))

    def check() -> None:
        for _ in range(2):
            wanted = loss_fn(step.model, x).item()
            assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)

    check()
    table["weight7"] = 70.0
    check()
    table["weight3"], table["weight39"] = -3.0, 2
    check()
    del table["weight20"]  # the order changes
    table["".join(["weight", "20"])] = 21.5
    check()
    table["weight21"] = mx.array(3.0)
    check()
    table["weight21"] = mx.array(4.0)
    check()
    kept = dict(table)
    table.clear()  # other keys between them
    for name in reversed(kept):
        table.update({name: kept[name], f"more {name}": 1.0})
    check()
    table["weight0"] = 9.0
    check()


class Few:
    """An object whose attributes Python keeps in itself."""

    def __init__(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Items(nn.Module):
    """A module with numbers as items."""

    def __init__(self, values: dict[str, float]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        dict.update(self, values)


def assign(holder: Any, value: float) -> None:
    """Assign an attribute, in a line that the interpreter has met often."""
    holder.b = value


HOLDERS: dict[str, tuple[Callable[[dict[str, float]], Any], Callable[[Any], dict[str, float]]]] = {
    "dict": (dict, lambda holder: holder),
    "attributes": (Few, vars),
    "many attributes": (lambda values: Few(values | {f"more{i}": 0.0 for i in range(50)}), vars),
    "attributes of a namespace": (lambda values: types.SimpleNamespace(**values), vars),
    "items of a module": (Items, lambda holder: holder),
    "attributes of a module": (lambda values: Few.__init__(made := Items({}), values) or made, vars),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_every_way_of_changing_what_stands_in_a_dict_is_seen(holder: str) -> None:
    make, table_of = HOLDERS[holder]
    held = make({name: 1.0 + i for i, name in enumerate("abcdef")})
    table = table_of(held)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        numbers = [value for name, value in table_of(held).items() if len(name) == 1]
        return model(x).square().mean() * sum((at + 1) * number for at, number in enumerate(numbers))

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    changes: list[Callable[[], object]] = [
        lambda: table.__setitem__("a", 10.0),
        lambda: dict.update(table, b=11.0, c=12.0),
        lambda: table.__ior__({"d": 13.0}),
        lambda: table.setdefault("g", 14.0),
        lambda: table.pop("c"),
        lambda: table.popitem(),
        lambda: table.__delitem__("a"),
        lambda: table.__setitem__("a", 15.0),  # at the end now
        lambda: (kept := dict(table), table.clear(), dict.update(table, reversed(kept.items()))),
        lambda: dict.update(table, dict.fromkeys(table, 2.0), e=5.0),
    ]
    if not isinstance(held, dict) or table is not held:
        changes += [
            lambda: [assign(held, 100.0 + number) for number in range(50)],
            lambda: object.__setattr__(held, "b", 21.0),
            lambda: object.__delattr__(held, "b"),
            lambda: assign(held, 22.0),
        ]
    for change in [lambda: None, *changes, *changes[:3]]:
        change()
        for _ in range(3):
            wanted = loss_fn(step.model, x).item()
            assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("reads", [False, True])
def test_a_history_that_grows_is_looked_at_and_not_searched_again(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    history, by_number, searches = list[float](), dict[int, float](), list[int]()
    search = _reach.discover
    monkeypatch.setattr(_reach, "discover", lambda *given: searches.append(1) or search(*given))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        assert history is not None
        factor = 1.0 + sum(history[-2:]) + len(by_number) if reads else 1.0
        return model(x).square().mean() * factor

    step, x = Step(nn.Linear(4, 1), optim.SGD(0.0), loss_fn), mx.ones((2, 4))
    for number in range(40):
        wanted = loss_fn(step.model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
        history.append(0.1 * number)
        by_number[number] = 0.5
    assert len(searches) < 20
    history.append(mx.array(2.0))  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="where the step does not look") if reads else contextlib.nullcontext():
        step(x)
    history[-1] += 1.0
    assert step(x).loss.item() == pytest.approx(loss_fn(step.model, x).item(), rel=1e-5)


def test_an_object_that_refers_to_others_once_it_has_been_looked_at_is_reached() -> None:
    step = Step(nn.Linear(4, 1), optim.SGD(0.0), lambda model, x: model(x).sum() if Literal else x.sum())
    assert [step(mx.ones((2, 4))).loss.item() for _ in range(3)]
    assert step.stats.mode == "native"


def test_a_number_that_varies_is_an_input_and_one_that_does_not_matter_is_nothing() -> None:
    agent = Agent()
    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), agent.loss)
    x = mx.ones((3, 4))
    for number in range(20):
        agent.temperature *= 0.9
        agent.calls -= 1
        wanted = agent.loss(step.model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
        assert step.stats.traced == min(number + 1, 2)
    assert [trace.cause for trace in step.stats.traces] == ["what the loss reaches: self.temperature, self.calls"]


def test_a_number_that_changes_the_form_is_a_trace_for_each_form() -> None:
    agent = Agent()
    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), agent.loss)
    x = mx.ones((3, 4))
    for _ in range(8):
        wanted = agent.loss(step.model, x).item()
        assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
        agent.calls += 1
    assert step.stats.traced <= 3


def test_an_error_leaves_no_tracer_in_what_the_loss_reaches() -> None:
    teacher, cell = nn.Linear(4, 2), [mx.array(1.0)]
    before = mx.array(teacher.weight)

    def loss_fn(model: nn.Module, x: mx.array, fails: bool) -> mx.array:
        cell[0] = (teacher(x) * cell[0]).sum()
        if fails:
            raise KeyError("mine")
        return (model(x) * cell[0]).sum()

    step = Step(nn.Linear(4, 2), optim.SGD(1e-2), loss_fn)
    with pytest.raises(KeyError, match="mine"):
        step(mx.ones((3, 4)), True)
    assert cell[0].item() == 1.0
    np.testing.assert_array_equal(teacher.weight, before)


def test_an_array_that_nobody_can_watch_is_warned_of_once() -> None:
    last = collections.deque([(mx.array([2.0]), 1.0)] * 500)
    step = Step(nn.Linear(4, 2), optim.SGD(0.0), lambda model, x: (model(x) * last[-1][0]).sum())
    with pytest.warns(RuntimeWarning, match=r"test_reach.*uses an array of shape .* \(at 0 of a tuple\)"):
        before = step(mx.ones((3, 4))).loss.item()
    last.append((mx.array([6.0]), 1.0))
    assert step(mx.ones((3, 4))).loss.item() == pytest.approx(3 * before)  # a warning is an error in these tests
    assert step.stats.mode == "plain"


def test_modules_dataclasses_and_numpy_arrays_are_arguments() -> None:
    def loss_fn(
        model: nn.Module, other: nn.Module, pair: Pair, weights: np.ndarray[Any, Any], scale: float
    ) -> mx.array:
        error = model(other(pair.inputs)) - pair.targets
        return (mx.square(error).mean(axis=1) * mx.array(weights)).sum() * scale

    model, other = nn.Linear(4, 2), nn.Linear(4, 4)
    step = Step(model, optim.SGD(1e-2), loss_fn)
    for number in range(6):
        pair = Pair(mx.random.normal((8, 4)), mx.ones((8, 2)))
        weights = np.arange(8, dtype=np.float32) + number
        wanted = loss_fn(model, other, pair, weights, number / 2).item()
        assert step(other, pair, weights, number / 2).loss.item() == pytest.approx(wanted, rel=1e-5)
        other.weight = other.weight + 0.1
        if number == 3:
            other = nn.Linear(4, 4)
    assert (step.stats.mode, step.stats.traced) == ("native", 2)


def test_a_copy_of_the_parameters_elsewhere_keeps_its_value() -> None:
    online, target = nn.Linear(4, 2), nn.Linear(4, 2)
    target.update(online.parameters())
    before = mx.array(target.weight)
    step = Step(online, optim.SGD(1e-1), lambda model, x: mx.square(model(x) - target(x) + 1).mean())
    for _ in range(3):
        step(mx.ones((3, 4)))
    np.testing.assert_array_equal(target.weight, before)
    assert not mx.array_equal(online.weight, before)
    target.update(online.parameters())
    assert step(mx.ones((3, 4))).loss.item() == pytest.approx(1.0, rel=1e-6)


def test_a_new_closure_in_every_step_is_one_trace() -> None:
    model, optimizer = nn.Linear(4, 2), optim.SGD(1e-2)
    losses = []
    step = None
    for number in range(6):
        noise = mx.full((3, 4), number / 10)

        def loss_fn(model: nn.Module, noise: mx.array = noise) -> mx.array:
            return mx.square(model(noise)).mean()

        step = step or Step(model, optimizer, loss_fn)
        step.loss_fn = loss_fn
        losses.append((loss_fn(model).item(), step().loss.item()))
    assert step is not None
    assert step.stats.traced == 1
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)


def test_an_array_that_has_been_replaced_is_let_go_of_at_the_next_step() -> None:
    class Teacher:
        def __init__(self) -> None:
            self.table, self.net = mx.ones((512, 1024)), nn.Linear(4, 2)

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            return mx.square(model(x) - self.net(x)).mean() * self.table[0, 0]

    def used() -> int:
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    teacher, x = Teacher(), mx.ones((3, 4))
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), teacher.loss, replay=False)  # which keeps copies of its own
    for _ in range(3):
        step(x)
    before = used()
    changes: list[Callable[[], object]] = [
        lambda: setattr(teacher, "table", mx.ones((512, 1024))),
        lambda: setattr(teacher, "table", mx.full((1024, 512), 2.0)),  # another form, another trace
        lambda: setattr(teacher, "table", mx.full((512, 1024), 3.0)),
        lambda: setattr(teacher, "net", nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 2))),  # leads elsewhere
        lambda: setattr(teacher, "net", nn.Linear(4, 2)),
    ]
    for change in [*changes, *changes]:
        change()
        mx.eval(teacher.table, teacher.net.parameters())
        for _ in range(2):
            step(x)
        small = len(teacher.net.children()) == 0
        assert used() - before < (1 << 16 if small else 1 << 17)
    teacher.table = mx.array([[1.0]])
    step(x)
    assert before - used() > 1 << 20


@pytest.mark.parametrize("compiled", [True, False])
def test_what_another_step_replaces_between_the_calls_is_not_held(compiled: bool) -> None:
    generator, critic = nn.Linear(256, 1024), nn.Linear(1024, 1)

    def loss_fn(critic: nn.Module, x: mx.array) -> mx.array:
        fake = critic(generator(x))
        if not compiled:
            fake.tolist()
        return mx.square(fake).mean()

    def used() -> int:
        mx.synchronize()
        gc.collect()
        return mx.get_active_memory()

    step, x = Step(critic, optim.SGD(0.1), loss_fn, replay=False), mx.ones((3, 256))
    plain = copy.deepcopy(critic)
    take_plain = plain_step(plain, optim.SGD(0.1), loss_fn)
    sizes = []
    for number in range(24):
        if number % 2 == 0 or number > 12:
            generator.weight = mx.full((1024, 256), (number + 1) / 1e5)
            mx.eval(generator.weight)
        if number > 4:
            sizes.append(used())
        with contextlib.nullcontext() if compiled or number else pytest.warns(RuntimeWarning, match="uncompiled"):
            loss = step(x).loss
        expected, _ = take_plain(x)
        np.testing.assert_allclose(loss.item(), expected.item(), rtol=1e-5, atol=1e-9)
    assert max(sizes) - min(sizes) < generator.weight.nbytes / 2
    assert_close(snapshot(critic), snapshot(plain), 1e-5)


def test_each_array_of_many_is_seen_to_change() -> None:
    listed = [mx.array([float(i)]) for i in range(40)]
    table = {f"weight{i}": mx.array([float(i)]) for i in range(40)}
    teacher = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    settings = types.SimpleNamespace(**{f"value{i}": mx.array([float(i)]) for i in range(10)})
    frozen = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    frozen.freeze()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        values = [
            *listed,
            *(table[f"weight{i}"] for i in range(40)),
            *(getattr(settings, f"value{i}") for i in range(10)),
        ]
        joined = mx.concatenate([mx.array(value).reshape(-1) for value in values])
        return mx.square(model(x) - teacher(x) - frozen(x)).mean() + mx.cumsum(joined).mean()

    step, x = Step(nn.Linear(4, 4), optim.SGD(0.0), loss_fn), mx.ones((2, 4))

    def check() -> None:
        for _ in range(2):
            wanted = loss_fn(step.model, x).item()
            assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)

    check()
    changes: list[Callable[[], object]] = [
        lambda: listed.__setitem__(7, mx.array([70.0])),
        lambda: listed[39].__iadd__(3.0),
        lambda: table.update(weight3=mx.array([-3.0]), weight39=mx.array([1.0])),
        lambda: table["weight20"].__setitem__(0, 200.0),
        lambda: setattr(settings, "value9", mx.array([9.5])),
        lambda: settings.value0.__setitem__(0, 5.0),
        lambda: setattr(teacher.layers[4], "weight", mx.ones((4, 4))),
        lambda: teacher.layers[9].bias.__setitem__(2, 3.0),
        lambda: setattr(frozen.layers[1], "bias", mx.ones(4)),
        lambda: teacher.layers[0].update({"bias": mx.ones(4)}),
        lambda: teacher.layers.append(nn.Tanh()),
        lambda: teacher.layers.__setitem__(10, nn.Sigmoid()),
        lambda: teacher.layers.__setitem__(3, teacher.layers[2]),
        lambda: setattr(teacher.layers[3], "weight", 0.5 * mx.ones((4, 4))),
        lambda: listed.reverse(),
        lambda: listed.__setitem__(0, 4.0),  # a number
        lambda: listed.__setitem__(0, mx.array([5.0])),
        lambda: listed.append(mx.array([1.0])),
        lambda: listed.__setitem__(1, listed[2]),  # one array twice
        lambda: listed[1].__iadd__(2.0),
        lambda: table.update(weight5=table["weight6"]),
        lambda: table["weight6"].__iadd__(2.0),
        lambda: listed.__setitem__(5, mx.array([[1.0], [2.0]])),  # another shape
    ]
    for change in changes:
        change()
        check()
    assert step.stats.mode == "native"


def test_a_model_that_is_a_part_of_what_the_loss_reaches_is_trained() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), mx.ones((2,))

        def __call__(self, x: mx.array) -> mx.array:
            return self.last(mx.tanh(self.first(x))) * self.scale

    def run(fast: bool) -> list[Any]:
        mx.random.seed(3)
        whole, losses = Whole(), []
        parts = [(whole.first, optim.Adam(1e-2)), (whole.last, optim.SGD(1e-1, momentum=0.9))]
        steps = [
            Step(*part, lambda _, x: mx.square(whole(x) - 1).mean())
            if fast
            else plain_step(*part, lambda _, x: mx.square(whole(x) - 1).mean())
            for part in parts
        ]
        for number in range(8):
            x = mx.random.normal((3, 4))
            taken = [step(x) for step in steps]
            losses += [(each.loss if fast else each[0]).item() for each in taken]
            if number == 4:
                whole.scale = whole.scale * 2
        return losses

    assert_same(run(fast=True), run(fast=False))


def test_what_the_class_of_a_class_has_is_watched() -> None:
    class Meta(type):
        scale, weight = 1.0, mx.array(2.0)

        @property
        def shift(cls) -> float:
            return cls._shift  # type: ignore[attr-defined,no-any-return]

    class Settings(metaclass=Meta):
        _shift = 0.5

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean() * Settings.scale * Settings.weight + Settings.shift

    model, x = nn.Linear(4, 2), mx.ones((3, 4))
    step = Step(model, optim.SGD(0.0), loss_fn)
    for change in (
        lambda: setattr(Meta, "scale", 3.0),
        lambda: setattr(Meta, "weight", mx.array(5.0)),
        lambda: setattr(Settings, "_shift", 7.0),
    ):
        assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)
        change()
    assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["method", "code", "property", "base", "library"])
def test_another_method_of_a_class_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base(nn.Module):
        def turn(self, x: mx.array) -> mx.array:
            return mx.tanh(x)

    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 2), 0

        def __call__(self, x: mx.array) -> mx.array:
            return self.turn(self.layer(x)) * self.scale

        @property
        def scale(self) -> float:
            return 1.0

    def other(self: Any, x: mx.array) -> mx.array:
        return mx.sin(x) * 3

    def change() -> None:
        if kind == "method":
            Net.__call__ = lambda self, x: self.layer(x) * 5  # type: ignore[method-assign]
        elif kind == "code":
            Base.turn.__code__ = other.__code__
        elif kind == "property":
            Net.scale = property(lambda self: 7.0)  # type: ignore[assignment,method-assign]
        elif kind == "base":
            Base.turn = other  # type: ignore[method-assign]
        else:
            linear = nn.Linear.__call__
            monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: linear(self, x) + 1)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x)).mean()

    model, x = Net(), mx.ones((3, 4))
    step = Step(model, optim.SGD(0.0), loss_fn)
    for _ in range(3):
        assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)
        Net.counted = 1  # type: ignore[attr-defined]
    change()
    for _ in range(3):
        assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5)
    assert step.stats.mode == "native"
    assert len(step.stats.traces) <= 2


@pytest.mark.parametrize("kind", ["adam", "momentum", "several"])
@pytest.mark.parametrize("made", [False, True])
def test_an_optimizer_that_updates_within_the_loss_is_seen(kind: str, made: bool) -> None:
    def run(fast: bool) -> tuple[list[float], Any]:
        mx.random.seed(4)
        model, learned = nn.Linear(4, 1), nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
        momentum = optim.SGD(optim.step_decay(0.05, 0.5, 3), momentum=0.9)
        several = optim.MultiOptimizer([optim.Adam(0.05), momentum], [lambda path, value: value.ndim == 2])
        inner = {"adam": optim.Adam(0.05), "momentum": momentum, "several": several}[kind]
        if made:
            inner.init(learned.trainable_parameters())

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            seen = mx.stop_gradient(model(x))
            _, gradients = nn.value_and_grad(learned, lambda it: mx.square(it(seen) - 1).mean())(learned)
            inner.update(learned, gradients)
            return mx.square(learned(model(x))).mean()

        optimizer = optim.Adam(0.01)
        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses = []
        for number in range(8):
            if number == 5:
                inner.learning_rate = 0.02
            x = mx.random.normal((8, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
        if step:
            assert step.stats.mode == "native"
        arrays = flat([model.parameters(), learned.parameters(), inner.state])
        return losses, {path: np.array(array) for path, array in arrays.items()}

    wanted, ours = run(fast=False), run(fast=True)
    assert_same(ours[0], wanted[0], 1e-5)
    assert_close(ours[1], wanted[1], 1e-5)


class Trainer:
    """Has a loss that reads none of what its history and its special methods read."""

    factor = 2.0

    def __init__(self, **config: Any) -> None:
        self.__dict__.update(config)
        self.memory, self.history = collections.deque[Any](maxlen=100), list[mx.array]()
        self.capacity = self.memory.maxlen

    def __len__(self) -> int:
        return len(self.memory)

    def __repr__(self) -> str:
        return f"Trainer({vars(self)})"

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        return self.factor * mx.square(model(x)).mean()


def test_special_methods_that_the_loss_does_not_call_are_none_of_its_code() -> None:
    trainer = Trainer(rate=0.1)
    step, x = Step(nn.Linear(4, 2), optim.SGD(0.0), trainer.loss), mx.ones((3, 4))
    for number in range(6):
        trainer.history.append(step(x).loss)
        trainer.memory.append((x, number))
    assert (step.stats.mode, step.stats.traced) == ("native", 1)


SPECIAL: dict[str, Callable[[Any, mx.array], Any]] = {
    "len": lambda trainer, loss: loss * len(trainer),
    "truth": lambda trainer, loss: loss * (2 if bool(trainer) else 1),
    "repr": lambda trainer, loss: loss * len(repr(trainer)),
    "f-string": lambda trainer, loss: loss * len(f"{trainer}"),
    "str": lambda trainer, loss: loss * len(str(trainer)),
    "another one": lambda trainer, loss: loss * type(trainer)().made,
    "by its class": lambda trainer, loss: loss * trainer.__class__().made,
    "by its name": lambda trainer, loss: loss * Made().made,
    "from a dict": lambda trainer, loss: loss * KINDS["made"]().made,
    "a copy": lambda trainer, loss: loss * copy.copy(trainer).made,
}
SCALE = [1.0]


class Made:
    def __init__(self) -> None:
        self.made, self.items = SCALE[0], [1, 2]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return "x" * len(self.items)


KINDS = {"made": Made}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_methods_that_the_loss_calls_are_looked_into(kind: str) -> None:
    made, x, call = Made(), mx.ones((3, 4)), SPECIAL[kind]

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        found: mx.array = call(made, mx.square(model(x)).mean())
        return found

    model = nn.Linear(4, 2)
    step = Step(model, optim.SGD(0.0), loss_fn)
    try:
        for number in range(6):
            if number in (2, 4):
                SCALE[0] += 1.0
                made.items += [3] * number
                made.made += 0.5
            assert step(x).loss.item() == pytest.approx(loss_fn(model, x).item(), rel=1e-5), number
    finally:
        SCALE[0] = 1.0


@pytest.mark.parametrize("change", [1, 4])
@pytest.mark.parametrize("kind", ["modules", "attributes", "arguments"])
def test_arrays_that_are_one_as_the_loss_is_traced_may_part(kind: str, change: int) -> None:
    """As two networks that begin as the same one, by `update(model.parameters())`."""

    def run(fast: bool) -> list[float]:
        mx.random.seed(0)
        model, one, two = (nn.Linear(6, 3) for _ in range(3))
        one.update(model.parameters())
        two.update(model.parameters())
        agent = types.SimpleNamespace(
            one=one.weight, two=one.weight, teachers=(one, two), hooks=list[Callable[[mx.array], mx.array]]()
        )

        def loss_fn(model: nn.Module, x: mx.array, *given: nn.Module) -> mx.array:
            first, second = given or agent.teachers
            if kind == "attributes":
                pair = x @ agent.one.T, x @ agent.two.T
            else:
                pair = first(x), second(x)
            loss = (model(x) - pair[0]).square().mean() + (model(x) + 2 * pair[1]).square().mean()
            return functools.reduce(lambda loss, hook: hook(loss), agent.hooks, loss)

        optimizer = optim.SGD(0.02)
        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses = []
        for number in range(10):
            if number in (change, change + 4):
                one.update(tree_map(lambda p: 0.5 * p, model.parameters()))
                agent.one = 3 * agent.one
            if number == change + 2:
                one.update(model.parameters())
                two.update(model.parameters())
                agent.two = agent.one
            if number == change + 3:
                agent.hooks.append(mx.sqrt)  # a trace while they are one
            batch = (mx.random.normal((4, 6)), *((one, two) if kind == "arguments" else ()))
            losses.append((step(*batch).loss if step else take(*batch)[0]).item())
        return losses

    np.testing.assert_allclose(run(fast=True), run(fast=False), rtol=1e-5)


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        (Phase.WARM, Phase.MAIN),
        (float, int),
        (frozenset("a"), frozenset("ab")),
        (mx.tanh, mx.sin),
        (1.0, 2.0),
        (None, (1, 2)),
    ],
)
def test_an_attribute_of_a_class_is_seen_as_it_changes(values: tuple[Any, Any], derived: bool) -> None:
    def run(fast: bool) -> list[float]:
        mx.random.seed(0)

        class Config:
            phase = values[0]

        class Derived(Config):
            pass

        read = Derived if derived else Config
        model, optimizer = nn.Linear(4, 3), optim.SGD(0.02)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return model(x).square().mean() * (1.0 if read.phase == values[0] else 2.0)

        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses = []
        for number in range(12):
            Config.phase = values[number // 3 % 2]
            x = mx.random.normal((4, 4))
            losses.append((step(x).loss if step else take(x)[0]).item())
        return losses

    np.testing.assert_allclose(run(fast=True), run(fast=False), rtol=1e-5)


class Base:
    def term(self, z: mx.array) -> mx.array:
        return z.mean() ** 2


class Sub(Base):
    def term(self, z: mx.array) -> mx.array:
        return 2 * super().term(z)


SWAPPED: list[Callable[..., mx.array]] = [nn.relu]


def test_a_method_that_is_another_one_is_seen_where_what_was_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        return out.square().mean() + Sub().term(out) + SWAPPED[0](out).mean()

    def run(fast: bool) -> list[float]:
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 3), optim.SGD(0.02)
        step = Step(model, optimizer, loss_fn) if fast else None
        take = plain_step(model, optimizer, loss_fn)
        losses = []
        with monkeypatch.context() as patch:
            for number in range(12):
                if number == 5:
                    patch.setattr(Base, "term", lambda _, z: mx.abs(z).mean())
                SWAPPED[0] = nn.Tanh() if number % 3 == 0 else nn.relu
                x = mx.random.normal((4, 4))
                losses.append((step(x).loss if step else take(x)[0]).item())
        return losses

    np.testing.assert_allclose(run(fast=True), run(fast=False), rtol=1e-5)


KEPT = mx.zeros(3)


@pytest.mark.parametrize("place", ["global", "cell", "attribute"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_a_loss_keeps_before_it_raises_is_put_back(place: str, at: int) -> None:
    global KEPT
    model, kept, seen = nn.Linear(4, 3), mx.zeros(3), types.SimpleNamespace(kept=mx.zeros(3))
    KEPT = mx.zeros(3)

    def loss_fn(model: nn.Module, x: mx.array, bad: bool) -> mx.array:
        global KEPT
        nonlocal kept
        out = model(x)
        mean = mx.stop_gradient(out).mean(axis=0)
        if place == "global":
            KEPT = 0.9 * KEPT + mean
        elif place == "cell":
            kept = 0.9 * kept + mean
        else:
            seen.kept = 0.9 * seen.kept + mean
        if bad:
            raise ValueError("a bad batch")
        return out.square().mean()

    def now() -> list[float]:
        return {"global": KEPT, "cell": kept, "attribute": seen.kept}[place].tolist()

    step = Step(model, optim.SGD(0.1), loss_fn)
    for number in range(6):
        before = now()
        if number == at:
            with pytest.raises(ValueError, match="a bad batch"):
                step(mx.ones((2, 4)), True)
            assert now() == before
        else:
            step(mx.ones((2, 4)), False)
            assert now() != before
