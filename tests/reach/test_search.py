"""The search of what a loss reads: programs with a watch list, programs without one, and changes that are noticed."""

from __future__ import annotations

import builtins
import enum
import functools
import itertools
import logging
import math
import operator
import os
import random
import sys
import threading
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step
from faststep._reach import ABSENT, Calls, Entry, Found, search
from mlx.optimizers import SGD
from support.helpers import plain_step

BETA = 0.5
TABLE = [1.0, 2.0]
ARRAY = mx.array([1.0, 2.0])
NUMBERS = np.ones(4, dtype=np.float32)
CONFIG = {"loss": {"beta": 0.5, "kinds": ("a", "b")}, "scale": 2.0}
log = logging.getLogger(__name__)
lock = threading.Lock()
local = threading.local()
counter = itertools.count()
nn.Linear.rank = 1
window: deque[float] = deque(maxlen=4)
settings = types.ModuleType("settings")
settings.gamma = 0.25


class Mixin:
    @property
    def width(self) -> int:
        return len(self.layers)  # type: ignore[attr-defined]


class MLP(Mixin, nn.Module):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4) for _ in range(2)]
        self.norm = nn.BatchNorm(4) if normed else nn.LayerNorm(4)
        self.drop, self.act, self.gain = nn.Dropout(0.5), nn.gelu, 2.0

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.gain * self.drop(self.norm(x))


class Mode(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@dataclass
class Config:
    beta: float = 0.5
    mode: Mode = Mode.MEAN
    steps: list[int] = field(default_factory=list)

    @property
    def twice(self) -> float:
        return 2 * self.beta


@dataclass(frozen=True)
class Frozen:
    beta: float = 0.5


class Point(NamedTuple):
    x: float
    y: mx.array


class Pair(tuple[float, ...]):
    beta: float


class Scale:
    factor = 3.0

    def __init__(self, by: float) -> None:
        self.by = by
        self.unread: Any = None

    def __call__(self, x: mx.array) -> mx.array:
        return self.scaled(x) * self.factor

    def scaled(self, x: mx.array) -> mx.array:
        return x * self.by

    @staticmethod
    def halved(x: mx.array) -> mx.array:
        return x / 2


class Hooked:
    """An object such as OmegaConf's."""

    def __getattr__(self, name: str) -> float:
        return 0.5


class Slotted:
    __slots__ = ("beta",)

    def __init__(self) -> None:
        self.beta = 0.5


class Computed:
    @property
    def beta(self) -> float:
        return time.time()


class Cached:
    @functools.cached_property
    def beta(self) -> float:
        return 0.5


class Weight(enum.IntEnum):
    LARGE = 2


class Memo:
    __call__ = functools.lru_cache(lambda self: 0.5)


class Timed:
    def __call__(self) -> float:
        return time.time()


class Listed(list):  # type: ignore[type-arg]
    pass


class Meta(type):
    pass


class OfMeta(metaclass=Meta):
    beta = 0.5


class Ours(SGD):
    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        return super().apply_single(gradient * BETA, parameter, state)


def squared(x: mx.array) -> mx.array:
    return mx.mean(x * x)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def items(n: int) -> Iterator[int]:
    yield from range(n)


config, frozen, scale, hooked, slotted = Config(), Frozen(), Scale(2.0), Hooked(), Slotted()
computed, cached, listed, of_meta, running = Computed(), Cached(), Listed([1.0]), OfMeta(), items(3)
memo, timed, ours = Memo(), Timed(), Ours(0.1)
scale.unread = hooked
point, teacher, weak, generator = Point(0.5, mx.array(2.0)), MLP(), weakref.ref(config), np.random.default_rng(0)
compiled = mx.compile(lambda x: x * BETA)
compiled_with_state = mx.compile(lambda x: x * ARRAY[0], inputs=[ARRAY])
pair, row = Pair(), np.ones(2, [("beta", "f4")])[0]
pair.beta = 0.5
of_config = functools.partial(getattr, config)
half = functools.partial(lambda x, by: x * by, by=0.5)
half.beta = 0.5  # type: ignore[attr-defined]


def made(beta: float = 0.3, *, eps: float = 1e-3) -> Callable[..., mx.array]:
    table, array = [beta], mx.array(beta)

    def loss(model: nn.Module, x: mx.array, default: float = 1.0, *, by: float = eps) -> mx.array:
        def inner(y: mx.array) -> mx.array:
            return y * table[0] * array + default * by

        return squared(inner(model(x)))

    return loss


def masked(model: nn.Module, x: mx.array) -> mx.array:
    mask = mx.arange(x.shape[0]) < 2
    losses = nn.losses.cross_entropy(model(x), mx.zeros(x.shape[0], dtype=mx.int32))
    return (losses * mask).sum() / mx.maximum(mask.sum(), 1)


def moded(model: nn.Module, x: mx.array) -> mx.array:
    reduced = mx.sum if config.mode is Mode.SUM else mx.mean
    total = reduced(model(x)) * config.beta
    if not math.isfinite(config.twice):
        raise ValueError(f"beta: {config.beta!r}")
    return total


def reduced(model: nn.Module, x: mx.array) -> mx.array:
    return functools.reduce(operator.mul, [squared(model(x)), math.pi, np.pi, np.float32(2.0)])


def remembering(model: nn.Module, x: mx.array) -> mx.array:
    model.last = model(x)
    TABLE[0] = 1.0
    return squared(model.last)


def nested(model: nn.Module, x: mx.array) -> mx.array:
    value, gradients = nn.value_and_grad(model, lambda y: squared(model(y)))(x)
    total = [value]
    for each in gradients["layers"]:
        total.append((lambda g=each: g["weight"].sum() * BETA)())
    return sum(total) * Weight.LARGE


def chosen(model: nn.Module, x: mx.array) -> mx.array:
    try:
        return squared(model(x)) * (getattr(config, "beta", 1.0) if hasattr(frozen, "beta") else 2.0)
    except KeyError as error:
        raise RuntimeError from error


def traced(model: nn.Module, x: mx.array) -> mx.array:
    try:
        raise ValueError
    except ValueError as error:
        return model(x) * len(str(error.__traceback__))


# programs with a watch list: the loss, and what changes something that it reads
GOOD: dict[str, tuple[Callable[..., Any], Callable[[pytest.MonkeyPatch], object] | None]] = {
    "mlp": (lambda m, x: squared(m(x)), None),
    "width": (lambda m, x: squared(m(x)) * m.width, lambda p: p.setattr(Mixin, "width", 3)),
    "masked": (masked, lambda p: p.setattr(nn.losses, "cross_entropy", squared)),
    "global": (lambda m, x: squared(m(x)) * BETA, lambda p: p.setitem(globals(), "BETA", 0.25)),
    "shadowed": (lambda m, x: abs(-1) * squared(m(x)), lambda p: p.setitem(globals(), "abs", sum)),
    "list": (lambda m, x: sum(TABLE) * squared(m(x)), lambda p: TABLE.__setitem__(0, -0.0)),
    "appended": (lambda m, x: sum(TABLE) * squared(m(x)), lambda p: TABLE.append(0.0)),
    "array": (lambda m, x: squared(m(x)) * ARRAY, lambda p: ARRAY.__setitem__(0, 3.0)),
    "array in a tuple": (lambda m, x: squared(m(x)) * point.y, lambda p: point.y.__iadd__(1.0)),
    "dict": (lambda m, x: squared(m(x)) * CONFIG["loss"]["beta"], lambda p: p.setitem(CONFIG["loss"], "beta", 1)),
    "keys": (lambda m, x: sum(squared(m(x)) for _ in CONFIG), lambda p: p.setitem(CONFIG, "more", 1)),
    "order": (lambda m, x: len(list(CONFIG)) * squared(m(x)), lambda p: CONFIG.update(loss=CONFIG.pop("loss"))),
    "dataclass": (moded, lambda p: p.setattr(config, "beta", 0.75)),
    "enum": (moded, lambda p: p.setattr(config, "mode", Mode.SUM)),
    "property": (moded, lambda p: p.setattr(Config, "twice", 1.0)),
    "frozen": (lambda m, x: squared(m(x)) * frozen.beta, lambda p: object.__setattr__(frozen, "beta", 0.25)),
    "made": (lambda m, x: squared(m(x)) * Config(0.5).beta * Frozen().beta * Point(1.0, x).x, None),
    "instance": (lambda m, x: squared(scale(m(x))), lambda p: p.setattr(scale, "by", 1.0)),
    "class attribute": (lambda m, x: squared(scale(m(x))), lambda p: p.setattr(Scale, "factor", 1.0)),
    "hidden attribute": (lambda m, x: squared(scale(m(x))), lambda p: setattr(scale, "factor", 1.0)),
    "method": (lambda m, x: squared(scale(m(x))), lambda p: p.setattr(Scale, "scaled", Scale.halved)),
    "other class": (lambda m, x: squared(scale(m(x))), lambda p: setattr(scale, "__class__", type("S", (Scale,), {}))),
    "bound": (lambda m, x, f=scale.scaled: squared(f(m(x))), lambda p: p.setattr(scale, "by", 1.5)),
    "static": (lambda m, x: squared(Scale.halved(m(x))), lambda p: p.setattr(Scale, "halved", staticmethod(squared))),
    "partial": (lambda m, x: squared(half(m(x))), lambda p: p.setitem(half.keywords, "by", 2.0)),
    "attribute of a partial": (lambda m, x: squared(half(m(x))) * half.beta, lambda p: p.setattr(half, "beta", 1.0)),
    "inside MLX": (lambda m, x: squared(m(x)), lambda p: p.setattr(mx, "addmm", mx.matmul)),
    "inside MLX's module": (masked, lambda p: p.setattr(nn.losses, "_reduce", squared)),
    "inside what MLX compiled": (lambda m, x: nn.gelu(m(x)), lambda p: p.setattr(mx, "erf", mx.tanh)),
    "a method of arrays": (lambda m, x: m(x).mean(), lambda p: p.setattr(mx.array, "mean", mx.array.sum)),
    "loss partial": (functools.partial(lambda by, m, x: squared(m(x)) * by, 2.0), None),
    "wrapped": (logged(lambda m, x: squared(m(x))), lambda p: p.setattr(squared, "__code__", Scale.halved.__code__)),
    "MLX's class": (lambda m, x: squared(m(x)) * m.layers[0].rank, lambda p: p.setattr(nn.Linear, "rank", 2)),
    "MLX's method": (lambda m, x: squared(m(x)), lambda p: p.setattr(nn.LayerNorm, "__call__", Scale.halved)),
    "teacher": (lambda m, x: squared(m(x) - teacher(x)), lambda p: teacher.update(MLP().parameters())),
    "teacher's mode": (lambda m, x: squared(m(x) - teacher(x)), lambda p: teacher.eval()),
    "teacher's number": (lambda m, x: squared(m(x) - teacher(x)), lambda p: p.setattr(teacher, "gain", 1.0)),
    "compiled": (lambda m, x: squared(compiled(m(x))), lambda p: p.setitem(globals(), "BETA", 0.25)),
    "checkpointed": (lambda m, x: squared(mx.checkpoint(scale)(m(x))), lambda p: p.setattr(scale, "by", 1.5)),
    "closure": (made(), None),
    "reduced": (reduced, lambda p: p.setattr(np, "pi", 3.0)),
    "remembering": (remembering, None),
    "nested": (nested, lambda p: p.setitem(globals(), "BETA", 0.25)),
    "module": (lambda m, x: squared(m(x)) * settings.gamma, lambda p: p.setattr(settings, "gamma", 1.0)),
    "literal name": (chosen, lambda p: p.setattr(config, "beta", 0.9)),
    "comprehension": (lambda m, x: sum(squared(m(x)) * w for w in TABLE), None),
    "generator": (lambda m, x: squared(m(x)) * sum(items(3)), None),
    "sorted": (lambda m, x: squared(m(x)) * sorted(CONFIG, key=str.upper).index("scale"), None),
    "random": (lambda m, x: squared(m(x) + mx.random.normal(x.shape)), None),
}

# programs without one: the loss, and a part of the reason
BAD: dict[str, tuple[Callable[..., Any], str]] = {
    "time": (lambda m, x: m(x) * time.time(), "calls time.time (test_search.py:"),
    "os": (lambda m, x: m(x) * len(os.environ), "reads `os.environ` of os"),
    "sys": (lambda m, x: m(x) * len(sys.modules), "reads `sys.modules` of sys"),
    "random": (lambda m, x: m(x) * random.random(), "calls random.random"),
    "numpy random": (lambda m, x: m(x) * np.random.rand(), "calls numpy.random.rand"),
    "numpy generator": (lambda m, x: m(x) * generator.random(), "reads `generator.random` of numpy"),
    "numpy array": (lambda m, x: m(x) * NUMBERS, "reads the NumPy array `NUMBERS`"),
    "numpy file": (lambda m, x: m(x) * np.load("x.npy"), "calls numpy.load"),
    "print": (lambda m, x: print(m(x)), "calls print"),
    "open": (lambda m, x: m(x) * len(open("x").read()), "calls io.open"),  # noqa: PTH123
    "input": (lambda m, x: m(x) * float(input()), "calls input"),
    "eval": (lambda m, x: m(x) * eval("BETA"), "calls eval"),
    "globals": (lambda m, x: m(x) * globals()["BETA"], "calls globals"),
    "vars": (lambda m, x: m(x) * vars(config)["beta"], "calls vars"),
    "dict of an object": (lambda m, x: m(x) * config.__dict__["beta"], "reads `__dict__` of an object"),
    "setattr": (lambda m, x: setattr(config, "beta", 1.0), "calls setattr"),
    "frames": (traced, "reads `__traceback__` of an object"),
    "set by name": (lambda m, x: config.__setattr__("beta", 1.0), "calls `__setattr__` of an object"),
    "id": (lambda m, x: m(x) * id(x), "calls id"),
    "next": (lambda m, x: m(x) * next(counter), "calls next"),
    "made name": (lambda m, x: m(x) * getattr(config, "be" + "ta" * len("x")), "name that is no constant"),
    "getattr elsewhere": (lambda m, x: list(map(getattr, [config], ["beta"])), "name that is no constant"),
    "getattr in a variable": (lambda m, x, get=getattr: get(config, "be" + "ta"), "calls getattr"),
    "getattr in part": (lambda m, x, get=of_config: get("be" + "ta"), "calls getattr"),
    "getattr of a class": (
        lambda m, x, get=object.__getattribute__: get(config, "be" + "ta"),
        "of type wrapper_descriptor",
    ),
    "getattr of a module": (lambda m, x: builtins.getattr(config, "be" + "ta"), "calls builtins.getattr"),
    "attributes of a tuple": (lambda m, x: pair.beta, "reads `pair.beta` of type Pair"),
    "numpy function": (lambda m, x: m(x) * np.mean([1.0, 2.0]), "calls numpy.mean"),
    "numpy row": (lambda m, x: m(x) * float(row["beta"]), "reads `row` of numpy"),
    "getter": (lambda m, x: operator.attrgetter("beta")(config), "calls operator.attrgetter"),
    "generator": (lambda m, x: m(x) * sum(running), "reads `running` of type generator"),
    "iterator": (lambda m, x: m(x) * sum(counter), "reads `counter` of itertools"),
    "deque": (lambda m, x: m(x) * sum(window), "reads `window` of collections"),
    "set": (lambda m, x, seen={1.0}: m(x) * sum(seen), "(seen)` of type set"),
    "hooked": (
        lambda m, x: m(x) * hooked.loss.beta,
        "reads `hooked.loss.beta` of the class Hooked, which has a `__get",
    ),
    "slots": (lambda m, x: m(x) * slotted.beta, "reads `slotted.beta` of type Slotted"),
    "property": (lambda m, x: m(x) * computed.beta, "calls time.time"),
    "cached": (lambda m, x: m(x) * cached.beta, "reads `Cached.beta` of functools"),
    "derived list": (lambda m, x: m(x) * listed[0], "reads `listed` of type Listed"),
    "metaclass": (lambda m, x: m(x) * of_meta.beta, "which has a metaclass"),
    "weak": (lambda m, x: m(x) * weak().beta, "reads `weak` of weakref"),
    "lock": (lambda m, x: lock.acquire(), "reads `lock.acquire` of _thread"),
    "local": (lambda m, x: m(x) * local.beta, "reads `local.beta` of _thread"),
    "logging": (lambda m, x: log.info("x"), "reads `log.info` of logging"),
    "cache": (lambda m, x: functools.lru_cache(squared)(m(x)), "calls functools.lru_cache"),
    "itertools": (lambda m, x: list(itertools.chain([1])), "calls itertools.chain"),
    "installed": (lambda m, x: pytest.approx(1.0), "calls pytest.approx"),
    "text": (lambda m, x: m(x) * len("{0.beta}".format(config)), "reads `format` of an object"),  # noqa: UP030, UP032
    "text of a dataclass": (lambda m, x: m(x) * len(repr(config)), "wrapper (test_search.py:"),
    "cached call": (lambda m, x: m(x) * memo(), "reads `Memo.__call__` of functools"),
    "time in a call": (lambda m, x: m(x) * timed(), "calls time.time"),
    "derived from MLX's": (lambda m, x: m(x) * ours.learning_rate, "reads `ours.learning_rate` of"),
    "stateful": (lambda m, x: compiled_with_state(m(x)), "transformed with arrays of its own"),
    "module kept": (lambda m, x: (lambda module: module.sum(x))(mx), "uses the module `mx` other than by its names"),
    "loaded": (lambda m, x: mx.load("x.npy"), "calls mlx.core.load"),
    "seeded": (lambda m, x: mx.random.seed(0), "calls mlx.core.random.seed"),
    "large": (lambda m, x, table=list(range(5000)): m(x) * table[0], "with 5,000 items"),
}


def _counting(m: nn.Module, x: mx.array) -> mx.array:
    global BETA
    BETA += 1
    return m(x)


def _nonlocal() -> Callable[..., Any]:
    count = 0

    def loss(m: nn.Module, x: mx.array) -> mx.array:
        nonlocal count
        count += 1
        return m(x)

    return loss


def _importing(m: nn.Module, x: mx.array) -> mx.array:
    from time import perf_counter as clock

    return m(x) * clock()


def _class_inside(m: nn.Module, x: mx.array) -> mx.array:
    class Inner:
        pass

    return m(x)


def _deleting(m: nn.Module, x: mx.array) -> mx.array:
    del CONFIG["scale"]
    return m(x)


BAD |= {
    "global statement": (_counting, "stores `BETA`"),
    "nonlocal": (_nonlocal(), "stores `count`"),
    "import": (_importing, "imports `time` inside a function"),
    "class": (_class_inside, "makes a class"),
    "del": (_deleting, "deletes an item"),
}


def _contents(entry: Entry, loss_fn: Any) -> Any:
    """Read what is at an entry now, as the native list does."""
    parent = loss_fn if entry.parent is None else entry.parent
    look: dict[str, Callable[[], Any]] = {
        "item": lambda: dict.get(parent, entry.key, ABSENT),
        "index": lambda: parent[entry.key],
        "attribute": lambda: object.__getattribute__(parent, "__dict__").get(entry.key, ABSENT),
        "class": lambda: type.__dict__["__dict__"].__get__(parent)[entry.key],
        "cell": lambda: parent.__closure__[entry.key].cell_contents,
        "default": lambda: parent.__defaults__[entry.key],
        "kwdefault": lambda: parent.__kwdefaults__[entry.key],
        "global": lambda: parent.__globals__.get(entry.key, getattr(builtins, str(entry.key), ABSENT)),
        "code": lambda: parent.__code__,
        "part": lambda: getattr(parent, entry.key),
        "itself": lambda: parent,
        "keys": lambda: tuple(parent),
        "length": lambda: len(vars(parent) if isinstance(parent, type) else parent),
        "type": lambda: type(parent),
        "dict": lambda: object.__getattribute__(parent, "__dict__"),
        "mro": lambda: parent.__mro__,
    }
    try:
        return look[entry.way]()
    except LookupError:
        return ABSENT


def changed(found: Found, known: list[Any], loss_fn: Any) -> list[str]:
    """The names of the entries that do not hold any more."""
    other = []
    for entry, copy in zip(found.entries, known, strict=True):
        now = _contents(entry, loss_fn)
        plain = (type(None), bool, int, float, str, bytes, tuple)
        same = type(now) is type(entry.value) and repr(now) == repr(entry.value) if isinstance(now, plain) else False
        if isinstance(now, mx.array):
            same = now is entry.value and mx.array_equal(now, copy).item()
        if not (same or (now is entry.value and not isinstance(now, mx.array))):
            other.append(entry.name)
    return other


def copies(found: Found) -> list[Any]:
    return [mx.array(each.value) if isinstance(each.value, mx.array) else None for each in found.entries]


def lookup(loss_fn: Any, model: nn.Module | None = None, arguments: Any = ()) -> Found:
    return search(loss_fn, model or MLP(), arguments, 10.0)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Put back what the changes of the table leave behind."""
    yield
    global ARRAY, point
    TABLE[:] = [1.0, 2.0]
    ARRAY, point = mx.array([1.0, 2.0]), Point(0.5, mx.array(2.0))
    object.__setattr__(frozen, "beta", 0.5)
    vars(scale).pop("factor", None)
    scale.__class__ = Scale
    teacher.train()


@pytest.mark.parametrize("name", GOOD)
def test_a_loss_on_the_white_list_has_a_watch_list(name: str) -> None:
    loss_fn, _ = GOOD[name]
    model = MLP()
    found = lookup(loss_fn, model)
    assert found.reason is None
    assert found.entries
    with Calls(found.codes) as calls:
        loss_fn(model, mx.ones((2, 4)))
    assert calls.reason is None
    assert sys.getprofile() is None


@pytest.mark.parametrize("name", [name for name, (_, change) in GOOD.items() if change])
def test_a_change_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_fn, change = GOOD[name]
    found = lookup(loss_fn)
    known = copies(found)
    assert found.reason is None
    assert changed(found, known, loss_fn) == []
    assert change is not None
    change(monkeypatch)
    assert changed(found, known, loss_fn) != []


@pytest.mark.parametrize("name", BAD)
def test_any_other_loss_is_refused_with_a_reason(name: str) -> None:
    loss_fn, part = BAD[name]
    model = MLP()
    found = lookup(loss_fn, model)
    reason = found.reason
    if reason is None:
        with Calls(found.codes) as calls:
            loss_fn(model, mx.ones((2, 4)))
        reason = calls.reason
    assert reason is not None
    assert part in reason


def test_a_loss_made_anew_at_each_call_is_compared_by_its_parts() -> None:
    found = lookup(made())
    known = copies(found)
    assert changed(found, known, made(0.4)) == ["array", "table"]
    assert [entry.name for entry in found.entries if entry.parent is None and entry.way == "cell"] == ["array", "table"]
    assert changed(found, known, made(eps=0.5)) == ["loss(by)", "array", "table"]


def test_the_model_has_no_entries_of_its_own() -> None:
    model = MLP(normed=True)
    found = lookup(lambda m, x: squared(model(x)), model)
    parents = {id(entry.parent) for entry in found.entries if entry.way != "attribute"}
    assert found.reason is None
    assert parents.isdisjoint({id(each) for each in model.modules()})
    assert [entry.name for entry in found.entries if entry.parent is model] == ["model.act"]


def test_what_the_model_keeps_is_searched() -> None:
    model = MLP()
    model.cfg = hooked
    assert lookup(lambda m, x: squared(m(x)), model).reason is None
    reason = lookup(lambda m, x: squared(m(x)) * m.cfg.beta, model).reason
    assert reason is not None
    assert "reads `model.cfg` of the class Hooked" in reason


def test_arguments_are_searched() -> None:
    loss_fn = lambda m, x, t, c: squared(m(x) - t(x)) * c.beta  # noqa: E731
    found = lookup(loss_fn, arguments=(teacher, config))
    known = copies(found)
    assert found.reason is None
    teacher.gain, config.beta = 3.0, 0.1
    try:
        assert changed(found, known, loss_fn) == ["config.beta", "mlp.gain"]
    finally:
        teacher.gain, config.beta = 2.0, 0.5
    assert lookup(lambda m, x, c: c.beta, arguments=(slotted,)).reason is not None


def test_a_library_that_defines_the_model_is_read() -> None:
    llama = pytest.importorskip("mlx_lm.models.llama")
    trainer = pytest.importorskip("mlx_lm.tuner.trainer")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    model = llama.Model(llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=64, **sizes))
    found = lookup(trainer.default_loss, model)
    assert found.reason is None
    with Calls(found.codes) as calls:
        trainer.default_loss(model, mx.zeros((2, 8), dtype=mx.int32), mx.array([[0, 7], [0, 7]]))
    assert calls.reason is None
    assert llama.Attention.__call__.__code__ in found.codes


def test_functions_that_the_search_has_not_read_are_met_in_the_call() -> None:
    with Calls(lookup(GOOD["mlp"][0]).codes) as calls:
        (lambda: time.time())()
    assert calls.reason is not None
    assert "calls" in calls.reason
    code = (lambda: None).__code__
    function: Any = types.FunctionType(code, globals())
    function.__code__ = (lambda: time.time()).__code__
    with Calls({function.__code__}) as calls:
        function()
    assert calls.reason is not None
    assert calls.reason.startswith("calls time.time (test_search.py:")


def test_a_profiler_stays() -> None:
    def profiler(*_: object) -> None:
        pass

    sys.setprofile(profiler)
    try:
        with Calls(frozenset()) as calls:
            squared(mx.ones(2))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert calls.reason == "runs under a profiler"


def test_time_is_limited() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(100)))
    found = search(GOOD["global"][0], model, (), 0.0)
    assert found.reason is not None
    assert "takes longer than a call" in found.reason


class Slotted:
    __slots__ = ("n",)


class Space:
    """Attributes."""


def grows(model: nn.Module, x: mx.array, *_: Any) -> mx.array:
    model.history.append(len(model.history))
    return squared(model.layer(x))


def renews(model: nn.Module, x: mx.array, *_: Any) -> mx.array:
    model.layer = nn.Linear(4, 2)
    return squared(model.layer(x))


def puts(model: nn.Module, x: mx.array, *_: Any) -> mx.array:
    setattr(model, f"name {len(vars(model))}", 1)
    return squared(model.layer(x))


OUTER: Any = Space()
OUTER.inner, OUTER.slotted, OUTER.other = Space(), Slotted(), types.SimpleNamespace(n=1.0)
OUTER.inner.n = OUTER.slotted.n = 1.0
# a loss, what the user does before each call, what more is passed, and the reason
CALLED: dict[
    str, tuple[Callable[..., mx.array], Callable[[Any, int], object], Callable[[int], tuple[Any, ...]], str]
] = {
    "a list": (grows, lambda *_: None, lambda _: (), "changes `model.history`"),
    "a module": (renews, lambda *_: None, lambda _: (), "changes `model.layer`"),
    "an attribute": (puts, lambda *_: None, lambda _: (), "puts attributes on the model, or takes them away"),
    "a slot": (
        lambda m, x: squared(m.layer(x)) * OUTER.slotted.n,
        lambda *_: None,
        lambda _: (),
        "reads `OUTER.slotted` of type Slotted",
    ),
    "an attribute of the standard library": (
        lambda m, x: squared(m.layer(x)) * OUTER.other.n,
        lambda *_: None,
        lambda _: (),
        "reads `OUTER.other` of types",
    ),
    "a number of the model": (
        lambda m, x: squared(m.layer(x)) * m.share,
        lambda model, number: setattr(model, "share", 1 / (1 + number)),
        lambda _: (),
        "reads `model.share`, which changes at each call",
    ),
    "an attribute of an attribute": (
        lambda m, x: squared(m.layer(x)) * OUTER.inner.n,
        lambda _, number: setattr(OUTER.inner, "n", 1 / (1 + number)),
        lambda _: (),
        "reads `OUTER.inner.n`, which changes at each call",
    ),
    "an argument": (
        lambda m, x, share: squared(m.layer(x)) * share["of"][0],
        lambda *_: None,
        lambda number: ({"of": [1 / (1 + number)]},),
        'reads `share["of"][0]`, which changes at each call',
    ),
    "the model among the arguments": (
        lambda m, x, layer: squared(m.layer(x)) + mx.square(layer["weight"]).sum(),
        lambda *_: None,
        lambda _: (),
        "has a dict or list of the model among its arguments",
    ),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_step_says_why_its_loss_is_called(name: str) -> None:
    loss_fn, change, more, reason = CALLED[name]
    model = nn.Module()
    model.layer, model.history, model.share = nn.Linear(4, 2), [], 1.0
    model.tables = {"weight": mx.ones((2,))}
    step = Step(model, SGD(1e-3), loss_fn)
    for number in range(6):
        change(model, number)
        step(mx.ones((3, 4)), *(more(number) if "model among" not in name else (model.tables,)))
        assert (step.stats.mode, bool(step.stats.reason)) == ("called", True)
    assert step.stats.reason is not None
    assert reason in step.stats.reason


@pytest.mark.parametrize("place", ["argument", "model"])
def test_one_of_two_values_in_turns_is_left_out(place: str) -> None:
    """The other one is called, and each has its own number."""
    losses, modes = [], []
    for fast in (True, False):
        mx.random.seed(0)
        model, optimizer = nn.Linear(4, 2), SGD(0.1)
        model.share = 1.0

        def loss_fn(model: nn.Module, x: mx.array, share: float) -> mx.array:
            return squared(model(x)) * share * model.share

        step, plain = Step(model, optimizer, loss_fn), plain_step(model, optimizer, loss_fn)
        losses.append([])
        for number in range(14):
            share = 0.5 * (1 + number % 2)
            model.share = share if place == "model" else 1.0
            given = mx.ones((3, 4)), share if place == "argument" else 1.0
            losses[-1].append((step(*given).loss if fast else plain(*given)[0]).item())
            modes.append((step.stats.mode, step.stats.reason))
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)
    name = "share" if place == "argument" else "model.share"
    assert sorted(modes[12:14]) == [("called", f"reads `{name}`, which changes at each call"), ("native", None)]
