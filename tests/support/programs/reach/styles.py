"""Losses in many styles; what they read is changed between the calls."""

from __future__ import annotations

import array
import collections
import configparser
import ctypes
import enum
import functools
import itertools
import logging
import queue
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Box,
    Build,
    Changing,
    Made,
    Make,
    add,
    changing,
    made_of,
    program,
    scaled,
    squares,
)

OPTIONS = {"decay": 1.0}


@changing("object")
def deque_of_arrays() -> Changing:
    last = collections.deque([mx.array(1.0), mx.array(2.0)], maxlen=2)
    return scaled(lambda: sum(last) * len(last)), [
        lambda: last.append(mx.array(5.0)),
        lambda: last[0].__imul__(3.0),
        last.popleft,
        last.clear,
        lambda: last.append(mx.array(2.0)),
    ]


@changing("object")
def deque_of_objects() -> Changing:
    last = collections.deque([Box(1.0), Box(2.0)])
    return scaled(lambda: sum(each.value for each in last)), [
        lambda: setattr(last[0], "value", 5.0),
        lambda: last.append(Box(3.0)),
        lambda: setattr(last[-1], "value", 4.0),
    ]


@changing("object")
def length_of_a_replay_buffer() -> Changing:
    buffer = collections.deque([(np.ones(3), 1.0)] * 500, maxlen=1000)
    return scaled(lambda: min(1.0, len(buffer) / 1000)), [lambda: buffer.extend([(np.ones(3), 2.0)] * 100)]


@changing("object")
def set_of_objects() -> Changing:
    one, other = Box(1.0), Box(2.0)
    chosen, known = {one}, weakref.WeakSet([one])
    return scaled(lambda: sum(each.value for each in chosen) + len(known)), [
        one.set(3.0),
        lambda: chosen.add(other),
        other.set(4.0),
        lambda: known.add(other),
    ]


@changing("object")
def keys_of_a_dict() -> Changing:
    one = Box(1.0)
    table = {one: 1.0}
    return scaled(lambda: sum(key.value * weight for key, weight in table.items())), [
        one.set(3.0),
        lambda: table.update({one: 2.0}),
    ]


@changing("object")
def order_of_a_dict() -> Changing:
    table = {"one": 1.0, "other": 2.0}
    return scaled(lambda: next(iter(table.values()))), [lambda: table.update(one=table.pop("one"))]


class Phase(enum.Enum):
    WARM, HOT = (0.5, 2), (0.9, 3)

    def __init__(self, rate: float, count: int) -> None:
        self.rate, self.count = rate, count

    def scale(self) -> float:
        return self.rate * self.count * OPTIONS["decay"]


@changing("object")
def attributes_of_an_enums_members() -> Changing:
    settings = types.SimpleNamespace(phase=Phase.WARM)
    Phase.WARM.rate, OPTIONS["decay"] = 0.5, 1.0
    return scaled(lambda: settings.phase.scale() * Phase.HOT.rate), [
        lambda: setattr(Phase.WARM, "rate", 0.7),
        lambda: setattr(settings, "phase", Phase.HOT),
        lambda: OPTIONS.update(decay=2.0),
        lambda: OPTIONS.update(decay=1.0),
    ]


@changing("object")
def values_of_an_enum() -> Changing:
    class Table(enum.Enum):
        ONE = Box(mx.array(1.0))

    return scaled(lambda: Table.ONE.value.value), [Table.ONE.value.set(mx.array(3.0)), Table.ONE.value.set(4.0)]


@changing("object")
def numbers_and_strings_of_own_classes() -> Changing:
    class Rate(float):
        pass

    class Name(str):
        __slots__ = ("scale",)

        def times(self) -> float:
            return self.scale * OPTIONS["decay"]

    rate, name = Rate(2.0), Name("name")
    rate.extra = name.scale = OPTIONS["decay"] = 1.0  # type: ignore[attr-defined]
    return scaled(lambda: rate * rate.extra * name.times()), [  # type: ignore[attr-defined]
        lambda: setattr(rate, "extra", 3.0),
        lambda: setattr(name, "scale", 2.0),
        lambda: OPTIONS.update(decay=2.0),
    ]


@changing("object")
def queues() -> Changing:
    first, best = queue.Queue[float](), queue.PriorityQueue[float]()
    first.put(1.0)
    best.put(3.0)
    return scaled(lambda: first.queue[-1] * first.qsize() * best.queue[0]), [
        lambda: first.put(5.0),
        first.get,
        lambda: best.put(1.0),
    ]


@changing("object")
def config_parser() -> Changing:
    config = configparser.ConfigParser()
    config.read_string("[loss]\nscale = 2.0")
    return scaled(lambda: config.getfloat("loss", "scale") * float(config["loss"]["scale"])), [
        lambda: config.set("loss", "scale", "3.0"),
        lambda: config["loss"].update(scale="4.0"),
    ]


@changing("process")
def level_of_a_log() -> Changing:
    log = logging.getLogger("faststep.test_programs")
    log.setLevel(logging.INFO)
    return scaled(lambda: 2.0 if log.isEnabledFor(logging.DEBUG) else 1.0), [lambda: log.setLevel(logging.DEBUG)]


@changing("closure")
def getattr_of_a_module() -> Changing:
    module, hidden = types.ModuleType("late_names"), {"scale": 1.0}
    module.__getattr__ = lambda name: hidden[name]  # type: ignore[method-assign]
    return scaled(lambda: module.scale), [lambda: hidden.update(scale=3.0), lambda: hidden.update(scale=4.0)]


@changing("object")
def weak_proxy_of_a_class() -> Changing:
    class Settings:
        scale = 1.0

        def __init__(self) -> None:
            self.scale = 2.0

    proxy, kept = weakref.proxy(Settings), Settings
    return scaled(lambda: proxy.scale), [lambda: setattr(kept, "scale", 3.0), lambda: setattr(kept, "scale", 4.0)]


@changing("object")
def bound_methods_of_builtins() -> Changing:
    table, weights = {"scale": 1.0}, [1.0, 2.0]
    get, item = table.get, weights.__getitem__
    return scaled(lambda: get("scale") * item(0)), [
        lambda: table.update(scale=3.0),
        lambda: weights.__setitem__(0, 2.0),
    ]


@changing("object")
def instances_kept_by_new() -> Changing:
    class Kept:
        known: dict[str, Any] = {}  # noqa: RUF012
        scale = 1.0

        def __new__(cls, name: str) -> Any:
            return cls.known.setdefault(name, super().__new__(cls))

    return scaled(lambda: Kept("a").scale), [
        lambda: setattr(Kept("a"), "scale", 3.0),
        lambda: setattr(Kept("a"), "scale", 4.0),
    ]


@changing("object")
def other_bases() -> Changing:
    class One:
        def scale(self) -> float:
            return 1.0

    class Other:
        def scale(self) -> float:
            return 3.0

    class Settings(One):
        pass

    settings = Settings()
    return scaled(lambda: settings.scale()), [lambda: setattr(Settings, "__bases__", (Other,))]


@changing("object")
def default_dict_whose_key_goes() -> Changing:
    weights = collections.defaultdict[str, float](lambda: 1.0)
    return scaled(lambda: weights["a"]), [
        lambda: weights.pop("a"),
        lambda: weights.update(a=3.0),
        lambda: weights.pop("a"),
    ]


@changing("object")
def class_that_hides_its_attributes() -> Changing:
    class Hiding:
        def __init__(self) -> None:
            object.__setattr__(self, "table", {"scale": 2.0})

        def __getattribute__(self, name: str) -> Any:
            if name == "scale":
                return object.__getattribute__(self, "table")["scale"]
            raise RuntimeError(name)

    hiding = Hiding()
    return scaled(lambda: hiding.scale), [lambda: object.__getattribute__(hiding, "table").update(scale=3.0)]


@changing("closure")
def cache_that_is_cleared() -> Changing:
    table = {"scale": 2.0}

    @functools.lru_cache
    def scale(times: int) -> float:
        return times * table["scale"]

    @functools.cache
    def mask(size: int) -> mx.array:
        return mx.arange(size) * table["scale"]

    return lambda model, x: (model(x) * mask(2)).mean() * scale(2), [
        lambda: table.update(scale=5.0),
        scale.cache_clear,
        mask.cache_clear,
    ]


@changing("closure")
def array_of_a_cache_in_place() -> Changing:
    @functools.lru_cache
    def mask(size: int) -> mx.array:
        return mx.arange(size) + 1.0

    mask(2)
    return lambda model, x: squares(model, x * 1) * mask(2).sum(), [lambda: mask(2).__setitem__(0, 9.0)]


@changing("object")
def scalar_of_a_structured_array() -> Changing:
    table = np.ones(2, [("scale", "f4"), ("count", "i4")])
    row = table[0]
    return scaled(lambda: float(row["scale"])), [lambda: table["scale"].__setitem__(0, 3.0)]


@changing("object")
def array_in_a_large_deque() -> Changing:
    last = collections.deque([(mx.array(1.0), 1.0)] * 500)
    return scaled(lambda: last[-1][0]), [
        lambda: last.append((mx.array(5.0), 1.0)),
        lambda: last.append((mx.array(6.0), 1.0)),
    ]


@changing("object")
def array_in_an_object_array() -> Changing:
    table = np.empty(1, object)
    table[0] = mx.array([1.0]) * 2
    return scaled(lambda: table[0].sum()), [
        lambda: table.__setitem__(0, mx.array([5.0])),
        lambda: table[0].__imul__(2),
    ]


@changing("object")
def hidden_instance_dict() -> Changing:
    class Hiding(Box):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError

    hiding = Hiding(1.0)
    return scaled(lambda: hiding.value), [hiding.set(2.0)]


@changing("object")
def number_of_ctypes_that_the_loss_changes() -> Changing:
    number, seen, raw = ctypes.c_float(1.0), array.array("d", [1.0]), bytearray(b"a")

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        number.value += 1.0
        seen.append(1.0)
        raw.append(1)
        decided = 1.0 if x[0, 0].item() > -100 else 2.0  # where its trace is given up
        return squares(model, x) * number.value * len(seen) * len(raw) * decided

    return loss_fn, [lambda: setattr(number, "value", 10.0)]


@changing("object")
def buffers_that_the_loss_changes() -> Changing:
    seen = array.array("d", [1.0])

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        seen[0] += 1.0
        return squares(model, x) * seen[0]

    return loss_fn, [lambda: seen.__setitem__(0, 10.0)]


@changing("closure")
def counter_that_decides_later() -> Changing:
    calls = 0

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return squares(model, x) * (2.0 if calls > 5 else 1.0)

    return loss_fn, [lambda: None] * 4


def taking(take: Callable[[], Iterator[float]]) -> Build:
    def build() -> Changing:
        settings = types.SimpleNamespace(values=take())
        return scaled(lambda: next(settings.values)), [lambda: next(settings.values)]

    return build


TAKEN: dict[str, Callable[[], Iterator[float]]] = {
    "a generator": lambda: (float(i) for i in range(1, 50)),
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "map": lambda: map(float, range(1, 50)),
    "zip": lambda: (pair[0] for pair in zip(itertools.count(1.0), itertools.cycle([1]), strict=False)),
    "chain": lambda: itertools.chain([1.0, 2.0] * 10, [3.0] * 10),
    "islice": lambda: itertools.islice((float(i) for i in range(90)), 2, None),
    "reversed": lambda: reversed([float(i) for i in range(90)]),
}
for name, take in TAKEN.items():
    add("iterator", f"{name}, from which the user takes too", made_of(taking(take)))


@changing("iterator")
def simple_queue() -> Changing:
    numbers = queue.SimpleQueue[float]()
    for number in range(1, 50):
        numbers.put(float(number))
    return scaled(lambda: numbers.get()), [numbers.get]


class Parts(nn.Module):
    """A model whose arrays are in a list, or in a dict."""

    def __init__(self, as_list: bool) -> None:
        super().__init__()
        weight, bias = mx.full((4, 2), 0.3), mx.ones(2)
        self.parts: Any = [weight, bias] if as_list else {"0": weight, "1": bias}

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.parts if isinstance(self.parts, list) else self.parts.values()
        return x @ weight + bias


def parts_that_are_replaced(as_list: bool) -> Make:
    """A list or dict of parameters, in whose place the loss puts another one."""

    def make() -> Made:
        def loss_fn(model: Any, x: mx.array) -> mx.array:
            if isinstance(model.parts, list):
                model.parts = [0.9 * model.parts[0], model.parts[1]]
            else:
                model.parts = {name: 0.9 * part for name, part in model.parts.items()}
            return squares(model, x)

        return Made(loss_fn, model=Parts(as_list))

    return make


for as_list in (False, True):
    add(
        "model",
        f"a {'list' if as_list else 'dict'} of parameters that the loss replaces",
        parts_that_are_replaced(as_list),
    )


@program("model")
def what_layers_of_mlx_and_ordinary_caches_keep() -> Made:
    @functools.lru_cache(maxsize=1)
    def mask(size: int) -> mx.array:
        return mx.tril(mx.ones((size, size)))

    class Net(nn.Module):
        table = mx.arange(4) * 0.5

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rope, self.alibi = nn.Linear(4, 2), nn.RoPE(4), nn.ALiBi()
            self.places, self._freqs = nn.SinusoidalPositionalEncoding(4), mx.arange(4) * 0.1

        def __call__(self, x: mx.array) -> mx.array:
            size = x.shape[0]
            y = self.rope(x[None, None]) + self.places(mx.arange(size)) * self._freqs * self.table
            bias = self.alibi(mx.zeros((1, 2, size, size)))[0, 0]
            return self.layer((bias + mask(size)) @ y[0, 0])

    return Made(squares, model=Net(), optimizer=optim.SGD(1e-3), rows=(4, 6))


@changing("object")
def dict_that_is_made_anew_with_equal_keys() -> Changing:
    box = Box(None)

    def again() -> None:
        box.value = {f"weight {number}": float(number) for number in range(6)}

    again()
    return scaled(lambda: sum(box.value.values())), [again] * 3


@changing("object")
def class_that_allows_no_look() -> Changing:
    class Odd(dict[str, float]):
        def __len__(self) -> int:
            raise ValueError("no length")

    odd = Odd(scale=2.0)
    return scaled(lambda: odd["scale"]), [lambda: odd.update(scale=3.0)]
