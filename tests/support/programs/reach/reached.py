"""What a loss reaches in many ways; it is changed between the calls."""

from __future__ import annotations

import array
import collections
import copy
import ctypes
import enum
import functools
import itertools
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
from mlx.utils import tree_map

from support.programs.reach.registry import (
    Around,
    Build,
    Changing,
    Loss,
    Made,
    Make,
    Place,
    add,
    changed,
    changing,
    made_of,
    program,
    rows_of_normals,
    scaled,
    squares,
)

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
        "several globals": (
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


WAYS: dict[str, Place] = {
    "globals": "closure",
    "several globals": "closure",
    "closure": "closure",
    "default": "closure",
    "partial": "closure",
    "import": "process",
    "function's attributes": "closure",
    "thread's own": "process",
    "a name, later": "closure",
    "a name inside, later": "closure",
    "modules": "process",
    "a module": "process",
    "eval": "closure",
}


def by_the_way(name: str) -> Make:
    def make(around: Around) -> Made:
        around.patch.setitem(globals(), "LATER", 1.0)
        around.patch.delitem(globals(), "LATER")
        for each in ("WEIGHTS", "TEMPERATURE"):
            around.patch.setitem(globals(), each, globals()[each])
        around.patch.setitem(globals(), "TABLE", {"weight": 1.0, "arrays": [mx.array(2.0)]})
        around.patch.setattr(Agent, "discount", 0.9)
        around.patch.setitem(sys.modules, "constants_of_a_loss", types.ModuleType("constants_of_a_loss"))
        loss_fn, changes = {**reaching(), **by_way()}[name]
        return changed(loss_fn, changes, optimizer=optim.SGD(1e-4))

    return make


for name in [*reaching(), *by_way()]:
    add(WAYS.get(name, "object"), f"what a loss reaches by {name}", by_the_way(name))


@changing("object")
def contents_that_are_changed_in_place() -> Changing:
    chosen, many, large, table = {"a"}, [1.0] * 5000, np.ones(40_000, np.float32), dict.fromkeys(range(5000), 1.0)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        scale = 2.0 if "b" in chosen else 1.0
        return (squares(model, x) + mx.array(large).sum() + mx.array(many).mean()) * scale * table[4999]

    return loss_fn, [
        lambda: chosen.add("b"),
        lambda: many.__setitem__(7, 1e6),
        lambda: large.__setitem__(39_999, 1e4),
        lambda: table.update({4999: 3.0}),
    ]


@changing("object")
def more_than_is_watched() -> Changing:
    table = [[float(number)] * 4000 for number in range(20)]
    return scaled(lambda: table[19][3999]), [lambda: table.__setitem__(19, [3.0] * 4000)]


class Row:
    def __init__(self, weight: float) -> None:
        self.weight = weight


def large_container(kind: Callable[[list[Row]], Any], count: int) -> Build:
    def build() -> Changing:
        rows = kind([Row(1.0) for _ in range(count)])
        return scaled(lambda: rows[7].weight), [lambda: setattr(rows[7], "weight", 3.0)]

    return build


ROWS: dict[str, Callable[[list[Row]], Any]] = {"list": list, "tuple": tuple, "dict": lambda rows: dict(enumerate(rows))}
for (name, kind), count in itertools.product(ROWS.items(), (4000, 5000)):
    add("object", f"an object in a {name} of {count}", made_of(large_container(kind, count)))


@changing("object")
def a_large_table_of_texts_and_numbers() -> Changing:
    words, merges = {f"word{number}": number for number in range(5000)}, [("a", "b")] * 5000
    return scaled(lambda: words["word3"] * len(merges[0])), [lambda: words.update(word3=5)]


def object_array(items: Callable[[], list[Any]], anew: bool) -> Make:
    """What is in an array of objects."""

    def make() -> Made:
        held = types.SimpleNamespace(rows=np.array(items(), object))

        def weight() -> Any:
            first = held.rows[0]
            weight = first["weight"] if isinstance(first, dict) else getattr(first, "weight", first)
            return len(weight) if isinstance(weight, str) else weight

        def between(number: int) -> None:
            if anew:
                held.rows = np.array(items(), object)
            if isinstance(held.rows[0], dict):
                held.rows[0]["weight"] = 1.0 + number
            elif isinstance(held.rows[0], Row):
                held.rows[0].weight = 1.0 + number
            else:
                held.rows[0] = "a" * (1 + number) if isinstance(held.rows[0], str) else 1.0 + number

        return Made(scaled(weight), between=between, optimizer=optim.SGD(1e-4), calls=8)

    return make


ITEMS: dict[str, Callable[[], list[Any]]] = {
    "texts": lambda: ["a", "bb"],
    "numbers": lambda: [1.0, 2.0],
    "dicts": lambda: [{"weight": 1.0}],
    "objects": lambda: [Row(1.0)],
}
for (name, items), anew in itertools.product(ITEMS.items(), (False, True)):
    add("object", f"a NumPy array of {name}{' that is made anew' if anew else ''}", object_array(items, anew))


def large_numpy(view: Callable[[Any], Any]) -> Make:
    """A large NumPy array, as its elements lie, which is an argument."""

    def make() -> Made:
        table = view(np.ones((400, 300), np.float32))
        between = lambda number: table.__setitem__((3, 4), 1.0 + number % 3)  # noqa: E731
        loss_fn = lambda model, x, table: squares(model, x) * float(table[3, 4])  # noqa: E731
        return Made(loss_fn, between=between, batch=lambda number: (rows_of_normals(number), table), calls=6)

    return make


VIEWS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda it: it,
    "transposed": lambda it: it.T,
    "every second element": lambda it: it[::2, ::2],
    "in float64": lambda it: it.astype(np.float64),
}
for name, view in VIEWS.items():
    add("object", f"a large NumPy array among the arguments, {name}", large_numpy(view))


def each_number(as_attributes: bool) -> Build:
    """Each number of many changes."""

    def build() -> Changing:
        weights: dict[str, Any] = {f"weight{i}": float(i) for i in range(40)}
        settings = types.SimpleNamespace(**weights)
        table = vars(settings) if as_attributes else weights

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            assert settings is not None
            return squares(model, x) * sum((i + 1) * table[f"weight{i}"] for i in range(40)) * 1e-4

        def reordered() -> None:
            kept = dict(table)
            table.clear()  # other keys between them
            for name in reversed(kept):
                table.update({name: kept[name], f"more {name}": 1.0})

        return loss_fn, [
            lambda: table.update(weight7=70.0),
            lambda: table.update(weight3=-3.0, weight39=2),
            lambda: (table.pop("weight20"), table.update({"".join(["weight", "20"]): 21.5})),  # the order changes
            lambda: table.update(weight21=mx.array(3.0)),
            lambda: table.update(weight21=mx.array(4.0)),
            reordered,
            lambda: table.update(weight0=9.0),
        ]

    return build


for as_attributes in (False, True):
    add(
        "object",
        f"each number of many {'attributes' if as_attributes else 'items'}",
        made_of(each_number(as_attributes)),
    )


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


def every_way(holder: str) -> Build:
    """Every way of changing what stands in a dict."""

    def build() -> Changing:
        make, table_of = HOLDERS[holder]
        held = make({name: 1.0 + i for i, name in enumerate("abcdef")})
        table = table_of(held)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            numbers = [value for name, value in table_of(held).items() if len(name) == 1]
            return squares(model, x) * sum((at + 1) * number for at, number in enumerate(numbers)) * 1e-2

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
        return loss_fn, [*changes, *changes[:3]]

    return build


for holder in HOLDERS:
    add("object", f"every way of changing a dict: {holder}", made_of(every_way(holder)))


def growing_history(reads: bool) -> Make:
    """A history of numbers that the user makes longer."""

    def make() -> Made:
        history, by_number = list[Any](), dict[int, float]()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            assert history is not None
            factor = 1.0 + sum(history[-2:]) + len(by_number) if reads else 1.0
            return squares(model, x) * factor

        def between(number: int) -> None:
            history.append(0.1 * number if number != 10 else mx.array(2.0))
            by_number[number] = 0.5
            if number == 11:
                history[-2] += 1.0

        return Made(loss_fn, between=between, optimizer=optim.SGD(1e-4))

    return make


for reads in (False, True):
    add("object", f"a history that grows{', which the loss reads' if reads else ''}", growing_history(reads))


@changing("object")
def an_object_that_refers_to_others_once_it_has_been_looked_at() -> Changing:
    return lambda model, x: squares(model, x) if Literal else x.sum(), [lambda: None] * 2


@program("object")
def a_number_that_varies_and_one_that_does_not_matter() -> Made:
    agent = Agent()

    def between(number: int) -> None:
        agent.temperature *= 0.9
        agent.calls -= 1

    return Made(agent.loss, between=between, optimizer=optim.SGD(1e-2))


@program("object")
def a_number_that_changes_the_form() -> Made:
    agent = Agent()
    return Made(agent.loss, between=lambda number: setattr(agent, "calls", number), optimizer=optim.SGD(1e-2))


@program("object")
def names_of_libraries_that_the_trainer_has_too() -> Made:
    """`nn.losses` is not `self.losses`."""

    class Trainer:
        def __init__(self) -> None:
            self.losses: list[Any] = [[object()] for _ in range(5000)]

        def loss(self, model: nn.Module, x: mx.array) -> mx.array:
            return nn.losses.mse_loss(model(x), mx.zeros((3, 2)))

    trainer = Trainer()
    return Made(trainer.loss, lambda: len(trainer.losses), lambda number: trainer.losses.append(0.1 * number))


@changing("object")
def an_array_in_a_large_queue_of_tuples() -> Changing:
    last = collections.deque([(mx.array([2.0]), 1.0)] * 500)
    return lambda model, x: mx.square(model(x) * last[-1][0]).sum(), [lambda: last.append((mx.array([6.0]), 1.0))]


@program("object")
def modules_dataclasses_and_numpy_arrays_that_are_arguments() -> Made:
    others = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def loss_fn(model: nn.Module, other: nn.Module, pair: Pair, weights: Any, scale: float) -> mx.array:
        error = model(other(pair.inputs)) - pair.targets
        return (mx.square(error).mean(axis=1) * mx.array(weights)).sum() * scale

    def batch(number: int) -> tuple[Any, ...]:
        other = others[number > 3]
        other.weight = other.weight + 0.1
        pair = Pair(rows_of_normals(number, 8), mx.ones((8, 2)))
        return other, pair, np.arange(8, dtype=np.float32) + number, number / 2

    return Made(loss_fn, lambda: [other.weight for other in others], optimizer=optim.SGD(1e-3), batch=batch, calls=8)


@program("object")
def a_copy_of_the_parameters_elsewhere() -> Made:
    online, target = nn.Linear(4, 2), nn.Linear(4, 2)
    target.update(online.parameters())

    def between(number: int) -> None:
        if number == 5:
            target.update(online.parameters())

    loss_fn = lambda model, x: mx.square(model(x) - target(x) + 1).mean()  # noqa: E731
    return Made(loss_fn, lambda: target.weight, between, online, optim.SGD(1e-1))


@program("closure")
def a_new_closure_at_every_call() -> Made:
    def loss(number: int) -> Loss:
        noise = mx.full((3, 4), number / 10)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            return squares(model, x + noise)

        return loss_fn

    return Made(squares, loss=loss)


@program("object")
def what_another_step_replaces_between_the_calls() -> Made:
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def between(number: int) -> None:
        if number % 2 == 0 or number > 8:
            generator.weight = mx.full((8, 4), (number + 1) / 10)

    return Made(lambda critic, x: squares(critic, generator(x)), between=between, model=critic)


@changing("object")
def each_array_of_many() -> Changing:
    listed = [mx.array([float(i)]) for i in range(40)]
    table = {f"weight{i}": mx.array([float(i)]) for i in range(40)}
    teacher = nn.Sequential(*(nn.Linear(4, 2) if i == 9 else nn.Linear(4, 4) for i in range(10)))
    settings = types.SimpleNamespace(**{f"value{i}": mx.array([float(i)]) for i in range(10)})
    frozen = nn.Sequential(*(nn.Linear(4, 2) if i == 2 else nn.Linear(4, 4) for i in range(3)))
    frozen.freeze()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        values = [
            *listed,
            *(table[f"weight{i}"] for i in range(40)),
            *(getattr(settings, f"value{i}") for i in range(10)),
        ]
        joined = mx.concatenate([mx.array(value).reshape(-1) for value in values])
        return mx.square(model(x) - teacher(x) - frozen(x)).mean() + mx.cumsum(joined).mean()

    return loss_fn, [
        lambda: listed.__setitem__(7, mx.array([70.0])),
        lambda: listed[39].__iadd__(3.0),
        lambda: table.update(weight3=mx.array([-3.0]), weight39=mx.array([1.0])),
        lambda: table["weight20"].__setitem__(0, 200.0),
        lambda: setattr(settings, "value9", mx.array([9.5])),
        lambda: settings.value0.__setitem__(0, 5.0),
        lambda: setattr(teacher.layers[4], "weight", mx.ones((4, 4))),
        lambda: teacher.layers[9].bias.__setitem__(1, 3.0),
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


@program("model", near=1e-4)
def a_model_that_is_a_part_of_what_the_loss_reaches() -> Made:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), mx.ones((2,))

        def __call__(self, x: mx.array) -> mx.array:
            return self.last(mx.tanh(self.first(x))) * self.scale

    whole = Whole()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(whole(x) - 1).mean()

    def between(number: int) -> None:
        if number == 8:
            whole.scale = whole.scale * 2

    first = Made(loss_fn, between=between, model=whole.first, optimizer=optim.Adam(1e-2))
    first.others = [Made(loss_fn, model=whole.last, optimizer=optim.SGD(1e-1, momentum=0.9))]
    return first


@changing("object")
def what_the_class_of_a_class_has() -> Changing:
    class Meta(type):
        scale, weight = 1.0, mx.array(2.0)

        @property
        def shift(cls) -> float:
            return cls._shift  # type: ignore[attr-defined,no-any-return]

    class Settings(metaclass=Meta):
        _shift = 0.5

    return lambda model, x: squares(model, x) * Settings.scale * Settings.weight + Settings.shift, [
        lambda: setattr(Meta, "scale", 3.0),
        lambda: setattr(Meta, "weight", mx.array(5.0)),
        lambda: setattr(Settings, "_shift", 7.0),
    ]


def another_method(kind: str) -> Make:
    """Another method of a class."""

    def make(around: Around) -> Made:
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
                around.patch.setattr(nn.Linear, "__call__", lambda self, x: linear(self, x) + 1)

        return changed(squares, [lambda: setattr(Net, "counted", 1), change], model=Net(), optimizer=optim.SGD(1e-3))

    return make


for kind in ("method", "code", "property", "base", "library"):
    add("process" if kind == "library" else "model", f"another {kind} of a class", another_method(kind))


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


@program("object")
def special_methods_that_the_loss_does_not_call() -> Made:
    trainer = Trainer(rate=0.1)

    def between(number: int) -> None:
        trainer.history.append(mx.array(0.1 * number))
        trainer.memory.append((rows_of_normals(number), number))

    return Made(trainer.loss, between=between)


SPECIAL: dict[str, Callable[[Any, mx.array], Any]] = {
    "len": lambda trainer, loss: loss * len(trainer),
    "truth": lambda trainer, loss: loss * (2 if bool(trainer) else 1),
    "repr": lambda trainer, loss: loss * len(repr(trainer)),
    "f-string": lambda trainer, loss: loss * len(f"{trainer}"),
    "str": lambda trainer, loss: loss * len(str(trainer)),
    "another one": lambda trainer, loss: loss * type(trainer)().made,
    "by its class": lambda trainer, loss: loss * trainer.__class__().made,
    "by its name": lambda trainer, loss: loss * Counted().made,
    "from a dict": lambda trainer, loss: loss * KINDS["made"]().made,
    "a copy": lambda trainer, loss: loss * copy.copy(trainer).made,
}
SCALE = [1.0]


class Counted:
    def __init__(self) -> None:
        self.made, self.items = SCALE[0], [1, 2]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return "x" * len(self.items)


KINDS = {"made": Counted}


def special(kind: str) -> Make:
    """Special methods that the loss calls."""

    def make(around: Around) -> Made:
        around.patch.setitem(globals(), "SCALE", [1.0])
        made, call = Counted(), SPECIAL[kind]

        def between(number: int) -> None:
            if number in (2, 4):
                SCALE[0] += 1.0
                made.items += [3] * number
                made.made += 0.5

        return Made(lambda model, x: call(made, squares(model, x)), between=between, optimizer=optim.SGD(1e-3), calls=6)

    return make


for kind in SPECIAL:
    add("object", f"special methods that the loss calls: {kind}", special(kind))


def parting(kind: str, change: int) -> Make:
    """Arrays that are one at first part, as two networks that begin as one, by `update(model.parameters())`."""

    def make() -> Made:
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

        def between(number: int) -> None:
            if number in (change, change + 4):
                one.update(tree_map(lambda p: 0.5 * p, model.parameters()))
                agent.one = 3 * agent.one
            if number == change + 2:
                one.update(model.parameters())
                two.update(model.parameters())
                agent.two = agent.one
            if number == change + 3:
                agent.hooks.append(mx.sqrt)  # a trace while they are one

        def batch(number: int) -> tuple[Any, ...]:
            return rows_of_normals(number, 4, 6), *((one, two) if kind == "arguments" else ())

        return Made(loss_fn, between=between, model=model, optimizer=optim.SGD(0.02), batch=batch)

    return make


for kind, change in itertools.product(("modules", "attributes", "arguments"), (1, 4)):
    add("object", f"arrays of {kind} that are one and part at call {change}", parting(kind, change))


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


def attribute_of_a_class(values: tuple[Any, Any], derived: bool) -> Make:
    def make() -> Made:
        class Config:
            phase = values[0]

        class Derived(Config):
            pass

        read = Derived if derived else Config
        loss_fn = lambda model, x: squares(model, x) * (1.0 if read.phase == values[0] else 2.0)  # noqa: E731
        return Made(loss_fn, between=lambda number: setattr(Config, "phase", values[number // 3 % 2]))

    return make


VALUES: dict[str, tuple[Any, Any]] = {
    "enum": (Phase.WARM, Phase.MAIN),
    "classes": (float, int),
    "sets": (frozenset("a"), frozenset("ab")),
    "functions": (mx.tanh, mx.sin),
    "numbers": (1.0, 2.0),
    "none": (None, (1, 2)),
}
for (name, values), derived in itertools.product(VALUES.items(), (False, True)):
    add(
        "object",
        f"an attribute of a class{' that is inherited' if derived else ''}: {name}",
        attribute_of_a_class(values, derived),
    )


class Base:
    def term(self, z: mx.array) -> mx.array:
        return z.mean() ** 2


class Sub(Base):
    def term(self, z: mx.array) -> mx.array:
        return 2 * super().term(z)


SWAPPED: list[Callable[..., mx.array]] = [nn.relu]


@program("object")
def a_method_that_is_another_one_where_what_was_before_comes_back(around: Around) -> Made:
    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        out = model(x)
        return out.square().mean() + Sub().term(out) + SWAPPED[0](out).mean()

    def between(number: int) -> None:
        if number == 5:
            around.patch.setattr(Base, "term", lambda _, z: mx.abs(z).mean())
        SWAPPED[0] = nn.Tanh() if number % 3 == 0 else nn.relu

    return Made(loss_fn, between=between)
