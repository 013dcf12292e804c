"""Programs in many styles beside their plain loops: what losses and optimizers read is changed between the steps."""

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
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.beside import Box, Program, beside, squares

Losses = Callable[[], Program]
OPTIONS = {"decay": 1.0}
WATCHED, UNCOMPILED = dict[str, Losses](), dict[str, Losses]()


def watched(build: Losses) -> Losses:
    WATCHED[build.__name__] = build
    return build


def uncompiled(build: Losses) -> Losses:
    UNCOMPILED[build.__name__] = build
    return build


def scaled(scale: Callable[[], Any]) -> Callable[..., mx.array]:
    return lambda model, x: squares(model, x) * scale()


@watched
def deque_of_arrays() -> Program:
    last = collections.deque([mx.array(1.0), mx.array(2.0)], maxlen=2)
    return scaled(lambda: sum(last) * len(last)), [
        lambda: last.append(mx.array(5.0)),
        lambda: last[0].__imul__(3.0),
        last.popleft,
        last.clear,
        lambda: last.append(mx.array(2.0)),
    ]


@watched
def deque_of_objects() -> Program:
    last = collections.deque([Box(1.0), Box(2.0)])
    return scaled(lambda: sum(each.value for each in last)), [
        lambda: setattr(last[0], "value", 5.0),
        lambda: last.append(Box(3.0)),
        lambda: setattr(last[-1], "value", 4.0),
    ]


@watched
def length_of_a_replay_buffer() -> Program:
    buffer = collections.deque([(np.ones(3), 1.0)] * 500, maxlen=1000)
    return scaled(lambda: min(1.0, len(buffer) / 1000)), [lambda: buffer.extend([(np.ones(3), 2.0)] * 100)]


@watched
def set_of_objects() -> Program:
    one, other = Box(1.0), Box(2.0)
    chosen, known = {one}, weakref.WeakSet([one])
    return scaled(lambda: sum(each.value for each in chosen) + len(known)), [
        one.set(3.0),
        lambda: chosen.add(other),
        other.set(4.0),
        lambda: known.add(other),
    ]


@watched
def keys_of_a_dict() -> Program:
    one = Box(1.0)
    table = {one: 1.0}
    return scaled(lambda: sum(key.value * weight for key, weight in table.items())), [
        one.set(3.0),
        lambda: table.update({one: 2.0}),
    ]


@watched
def order_of_a_dict() -> Program:
    table = {"one": 1.0, "other": 2.0}
    return scaled(lambda: next(iter(table.values()))), [lambda: table.update(one=table.pop("one"))]


class Phase(enum.Enum):
    WARM, HOT = (0.5, 2), (0.9, 3)

    def __init__(self, rate: float, count: int) -> None:
        self.rate, self.count = rate, count

    def scale(self) -> float:
        return self.rate * self.count * OPTIONS["decay"]


@watched
def attributes_of_an_enums_members() -> Program:
    settings = types.SimpleNamespace(phase=Phase.WARM)
    Phase.WARM.rate, OPTIONS["decay"] = 0.5, 1.0
    return scaled(lambda: settings.phase.scale() * Phase.HOT.rate), [
        lambda: setattr(Phase.WARM, "rate", 0.7),
        lambda: setattr(settings, "phase", Phase.HOT),
        lambda: OPTIONS.update(decay=2.0),
        lambda: OPTIONS.update(decay=1.0),
    ]


@watched
def values_of_an_enum() -> Program:
    class Table(enum.Enum):
        ONE = Box(mx.array(1.0))

    return scaled(lambda: Table.ONE.value.value), [Table.ONE.value.set(mx.array(3.0)), Table.ONE.value.set(4.0)]


@watched
def numbers_and_strings_of_own_classes() -> Program:
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


@watched
def queues() -> Program:
    first, best = queue.Queue[float](), queue.PriorityQueue[float]()
    first.put(1.0)
    best.put(3.0)
    return scaled(lambda: first.queue[-1] * first.qsize() * best.queue[0]), [
        lambda: first.put(5.0),
        first.get,
        lambda: best.put(1.0),
    ]


@watched
def config_parser() -> Program:
    config = configparser.ConfigParser()
    config.read_string("[loss]\nscale = 2.0")
    return scaled(lambda: config.getfloat("loss", "scale") * float(config["loss"]["scale"])), [
        lambda: config.set("loss", "scale", "3.0"),
        lambda: config["loss"].update(scale="4.0"),
    ]


@watched
def level_of_a_log() -> Program:
    log = logging.getLogger("faststep.test_programs")
    log.setLevel(logging.INFO)
    return scaled(lambda: 2.0 if log.isEnabledFor(logging.DEBUG) else 1.0), [lambda: log.setLevel(logging.DEBUG)]


@watched
def getattr_of_a_module() -> Program:
    module, hidden = types.ModuleType("late_names"), {"scale": 1.0}
    module.__getattr__ = lambda name: hidden[name]  # type: ignore[method-assign]
    return scaled(lambda: module.scale), [lambda: hidden.update(scale=3.0), lambda: hidden.update(scale=4.0)]


@watched
def weak_proxy_of_a_class() -> Program:
    class Settings:
        scale = 1.0

        def __init__(self) -> None:
            self.scale = 2.0

    proxy, kept = weakref.proxy(Settings), Settings
    return scaled(lambda: proxy.scale), [lambda: setattr(kept, "scale", 3.0), lambda: setattr(kept, "scale", 4.0)]


@watched
def bound_methods_of_builtins() -> Program:
    table, weights = {"scale": 1.0}, [1.0, 2.0]
    get, item = table.get, weights.__getitem__
    return scaled(lambda: get("scale") * item(0)), [
        lambda: table.update(scale=3.0),
        lambda: weights.__setitem__(0, 2.0),
    ]


@watched
def instances_kept_by_new() -> Program:
    class Kept:
        known: dict[str, Any] = {}  # noqa: RUF012
        scale = 1.0

        def __new__(cls, name: str) -> Any:
            return cls.known.setdefault(name, super().__new__(cls))

    return scaled(lambda: Kept("a").scale), [
        lambda: setattr(Kept("a"), "scale", 3.0),
        lambda: setattr(Kept("a"), "scale", 4.0),
    ]


@watched
def other_bases() -> Program:
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


@watched
def default_dict_whose_key_goes() -> Program:
    weights = collections.defaultdict[str, float](lambda: 1.0)
    return scaled(lambda: weights["a"]), [
        lambda: weights.pop("a"),
        lambda: weights.update(a=3.0),
        lambda: weights.pop("a"),
    ]


@watched
def class_that_hides_its_attributes() -> Program:
    class Hiding:
        def __init__(self) -> None:
            object.__setattr__(self, "table", {"scale": 2.0})

        def __getattribute__(self, name: str) -> Any:
            if name == "scale":
                return object.__getattribute__(self, "table")["scale"]
            raise RuntimeError(name)

    hiding = Hiding()
    return scaled(lambda: hiding.scale), [lambda: object.__getattribute__(hiding, "table").update(scale=3.0)]


@watched
def cache_that_is_cleared() -> Program:
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


@watched
def array_of_a_cache_in_place() -> Program:
    @functools.lru_cache
    def mask(size: int) -> mx.array:
        return mx.arange(size) + 1.0

    mask(2)
    return lambda model, x: squares(model, x * 1) * mask(2).sum(), [lambda: mask(2).__setitem__(0, 9.0)]


@watched
def scalar_of_a_structured_array() -> Program:
    table = np.ones(2, [("scale", "f4"), ("count", "i4")])
    row = table[0]
    return scaled(lambda: float(row["scale"])), [lambda: table["scale"].__setitem__(0, 3.0)]


@uncompiled
def array_in_a_large_deque() -> Program:
    last = collections.deque([(mx.array(1.0), 1.0)] * 500)
    return scaled(lambda: last[-1][0]), [
        lambda: last.append((mx.array(5.0), 1.0)),
        lambda: last.append((mx.array(6.0), 1.0)),
    ]


@uncompiled
def array_in_an_object_array() -> Program:
    table = np.empty(1, object)
    table[0] = mx.array([1.0]) * 2
    return scaled(lambda: table[0].sum()), [
        lambda: table.__setitem__(0, mx.array([5.0])),
        lambda: table[0].__imul__(2),
    ]


@uncompiled
def hidden_instance_dict() -> Program:
    class Hiding(Box):
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError

    hiding = Hiding(1.0)
    return scaled(lambda: hiding.value), [hiding.set(2.0)]


@uncompiled
def number_of_ctypes_that_the_loss_changes() -> Program:
    number, seen, raw = ctypes.c_float(1.0), array.array("d", [1.0]), bytearray(b"a")

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        number.value += 1.0
        seen.append(1.0)
        raw.append(1)
        decided = 1.0 if x[0, 0].item() > -100 else 2.0  # where its trace is given up
        return squares(model, x) * number.value * len(seen) * len(raw) * decided

    return loss_fn, [lambda: setattr(number, "value", 10.0)]


@uncompiled
def buffers_that_the_loss_changes() -> Program:
    seen = array.array("d", [1.0])

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        seen[0] += 1.0
        return squares(model, x) * seen[0]

    return loss_fn, [lambda: seen.__setitem__(0, 10.0)]


@uncompiled
def counter_that_decides_later() -> Program:
    calls = 0

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return squares(model, x) * (2.0 if calls > 5 else 1.0)

    return loss_fn, [lambda: None] * 4


def taking(take: Callable[[], Iterator[float]]) -> Losses:
    def build() -> Program:
        settings = types.SimpleNamespace(values=take())
        return scaled(lambda: next(settings.values)), [lambda: next(settings.values)]

    return build


UNCOMPILED |= {
    "a generator": taking(lambda: (float(i) for i in range(1, 50))),
    "cycle": taking(lambda: itertools.cycle([1.0, 2.0, 3.0])),
    "map": taking(lambda: map(float, range(1, 50))),
    "zip": taking(lambda: (pair[0] for pair in zip(itertools.count(1.0), itertools.cycle([1]), strict=False))),
    "chain": taking(lambda: itertools.chain([1.0, 2.0] * 10, [3.0] * 10)),
    "islice": taking(lambda: itertools.islice((float(i) for i in range(90)), 2, None)),
    "reversed": taking(lambda: reversed([float(i) for i in range(90)])),
}


@uncompiled
def simple_queue() -> Program:
    numbers = queue.SimpleQueue[float]()
    for number in range(1, 50):
        numbers.put(float(number))
    return scaled(lambda: numbers.get()), [numbers.get]


@pytest.mark.parametrize("name", WATCHED)
def test_a_change_is_seen_as_by_the_plain_loop(name: str) -> None:
    step = beside(lambda patch: WATCHED[name]())
    assert step.stats.mode == "native"


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger traces this thread")
@pytest.mark.parametrize("name", UNCOMPILED)
def test_what_cannot_be_watched_is_right_uncompiled_after_one_warning(name: str) -> None:
    with pytest.warns(RuntimeWarning, match="this step cannot be compiled") as caught:
        step = beside(lambda patch: UNCOMPILED[name]())
    assert len(caught) == 1
    assert step.stats.mode == "plain"


class Parts(nn.Module):
    """A model whose arrays are in a list, or in a dict."""

    def __init__(self, as_list: bool) -> None:
        super().__init__()
        weight, bias = mx.full((4, 2), 0.3), mx.ones(2)
        self.parts: Any = [weight, bias] if as_list else {"0": weight, "1": bias}

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self.parts if isinstance(self.parts, list) else self.parts.values()
        return x @ weight + bias


@pytest.mark.parametrize("as_list", [True, False])
def test_a_list_of_parameters_that_the_loss_replaces_is_trained_uncompiled(as_list: bool) -> None:
    def loss_fn(model: Any, x: mx.array) -> mx.array:
        if isinstance(model.parts, list):
            model.parts = [0.9 * model.parts[0], model.parts[1]]
        else:
            model.parts = {name: 0.9 * part for name, part in model.parts.items()}
        return squares(model, x)

    with pytest.warns(RuntimeWarning, match="it puts another list or dict in the place"):
        step = beside(lambda patch: (loss_fn, [lambda: None]), model=lambda: Parts(as_list))
    assert step.stats.mode == "plain"


def test_what_layers_of_mlx_and_ordinary_caches_keep_is_native_without_a_word() -> None:
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

    model = Net()
    step = Step(model, optim.SGD(0.0), squares)
    for size in (4, 6, 4, 6):
        x = mx.random.normal((size, 4))
        assert step(x).loss.item() == pytest.approx(squares(model, x).item(), rel=1e-5)
    assert (step.stats.mode, step.stats.traced) == ("native", 2)


def test_a_dict_that_is_made_anew_with_equal_keys_is_the_same() -> None:
    box = Box({f"weight {number}": float(number) for number in range(6)})
    step = Step(nn.Linear(4, 2), optim.SGD(0.1), scaled(lambda: sum(box.value.values())))
    for _ in range(4):
        step(mx.ones((3, 4)))
        box.value = {f"weight {number}": float(number) for number in range(6)}
    assert (step.stats.mode, step.stats.traced) == ("native", 1)


def test_a_class_that_allows_no_look_is_no_error() -> None:
    class Odd(dict[str, float]):
        def __len__(self) -> int:
            raise ValueError("no length")

    def build(patch: pytest.MonkeyPatch) -> Program:
        odd = Odd(scale=2.0)
        return scaled(lambda: odd["scale"]), [lambda: odd.update(scale=3.0)]

    with pytest.warns(RuntimeWarning, match=r"cannot be looked at \(ValueError: no length\)"):
        step = beside(build)
    assert step.stats.mode == "plain"
