"""What a function with a cache keeps: objects that count, generators, and arrays that are made once for each key."""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.reach.registry import (
    Box,
    Made,
    Make,
    add,
    program,
    rows_of_normals,
    squares,
)

SIZES = {"one": (3,), "two": (3, 5), "three": (3, 5, 4)}


class State:
    """What programs count and set."""

    def __init__(self) -> None:
        self.steps, self.log, self.weight, self.mean = 0, list[int](), 1.0, mx.zeros((2,))


def cached(kind: Callable[..., Any], keyed: bool, make: Callable[[], Any] = State) -> Make:
    def build() -> Made:
        @kind
        def get(key: int = 0) -> Any:
            return make() if make is State else collections.defaultdict(float, weight=1.0)

        def of(it: Any) -> dict[str, Any]:
            return it if isinstance(it, dict) else vars(it)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            state = get(len(x)) if keyed else get()
            values = of(state)
            values["steps"] += 1
            if "mean" in values:
                state.mean = 0.9 * state.mean + 0.1 * mx.stop_gradient(out).mean(0)
            return mx.square(out).mean() * values["weight"]

        def before(number: int) -> None:
            if number == 6:
                of(get(3) if keyed else get())["weight"] = 3.0

        def see() -> Any:
            values = of(get(3) if keyed else get())
            return values["steps"], round(float(mx.sum(values.get("mean", mx.array(0.0)))), 3)

        return Made(loss_fn, see, before, rows=SIZES["two" if keyed else "one"])

    return build


for keyed in (False, True):
    add("closure", f"state in a cache without bounds, {keyed}", cached(functools.cache, keyed))
    add("closure", f"state in a cache with bounds, {keyed}", cached(functools.lru_cache, keyed))
    add("closure", f"dict in a cache with bounds, {keyed}", cached(functools.lru_cache, keyed, dict))


@program("closure")
def cache_of_a_state_that_is_cleared() -> Made:
    get = functools.cache(State)

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        get().steps += 1
        return squares(model, x) * (1 + 0.1 * get().steps)

    def before(number: int) -> None:
        if number == 7:
            get.cache_clear()

    return Made(loss_fn, lambda: get().steps, before)


def made_once(make: Callable[[], Any], use: Callable[[Any, mx.array], mx.array], in_loss: bool) -> Make:
    def build() -> Made:
        get = functools.cache(make)
        mx.random.seed(1)
        if not in_loss:
            get()

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            y = model(x)
            return mx.square(y - mx.stop_gradient(use(get(), y))).mean()

        return Made(loss_fn, lambda: get.cache_info().currsize)

    return build


def drawn() -> mx.array:
    return mx.random.normal((2, 2))


def closure() -> Callable[[mx.array], mx.array]:
    weight = drawn()
    return lambda y: y @ weight


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any, mx.array], mx.array]]] = {
    "a module": (lambda: nn.Linear(2, 2), lambda it, y: it(y)),
    "a tuple": (lambda: (drawn(), 1.0), lambda it, y: y @ it[0]),
    "tables": (lambda: (mx.cos(mx.arange(2.0)), mx.sin(mx.arange(2.0))), lambda it, y: y * it[0] + y * it[1]),
    "a closure": (closure, lambda it, y: it(y)),
    "a list": (lambda: [drawn()], lambda it, y: y @ it[0]),
}


@program("closure")
def state_behind_a_cache_of_a_partial() -> Made:
    get = functools.cache(functools.partial(State))

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        get().steps += 1
        return squares(model, x)

    return Made(loss_fn, lambda: get().steps)


def drawing_behind_a_cache(make: Callable[[], Any], draw: Callable[[Any], float]) -> Make:
    def build() -> Made:
        get = functools.cache(make)
        return Made(lambda model, x: squares(model, x) * (1 + draw(get())), lambda: None)

    return build


BEHIND: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "a generator of NumPy's": (lambda: np.random.default_rng(1), lambda rng: float(rng.random())),
    "a generator of Python's": (lambda: random.Random(1), lambda rng: rng.random()),
    "an iterator": (lambda: itertools.cycle([0.1, 0.2, 0.3]), next),
    "a NumPy array": (lambda: np.zeros(2), lambda it: float(it.__iadd__(0.1)[0])),
}
for kind, (make, draw) in BEHIND.items():
    add("closure", f"{kind} behind a cache", drawing_behind_a_cache(make, draw))
for kind, (make, use) in MADE.items():
    for in_loss in (False, True):
        add("closure", f"{kind} of arrays in a cache, {in_loss}", made_once(make, use, in_loss))


Get = Callable[[float], mx.array]  # an array of 4 for a number
STEPS = 40
KEYS: dict[str, Callable[[int], float]] = {
    "one after the other": lambda number: 0.5 ** (number // 4),
    "another one once": lambda number: 1.0 if number < 9 else 0.5,
    "in turns": lambda number: 1.0 if number % 2 else 0.5,
    "in turns of two": lambda number: (1.0, 0.5, 0.25)[number // 2 % 3],
}


CACHES: dict[str, Callable[[], Get]] = {}


def cache(build: Callable[[], Get]) -> Callable[[], Get]:
    CACHES[build.__name__] = build
    return build


def waves(scale: float) -> mx.array:
    return mx.sin(mx.arange(4) * scale)


@cache
def without_bounds() -> Get:
    return functools.cache(waves)


@cache
def of_one() -> Get:
    return functools.lru_cache(maxsize=1)(waves)


@cache
def by_text() -> Get:
    @functools.cache
    def get(kind: str) -> mx.array:
        return mx.ones((4,)) if kind == "1.0" else mx.arange(4) * float(kind)

    return lambda scale: get(str(scale))


@cache
def of_a_method() -> Get:
    class Encoding:
        @functools.cache  # noqa: B019 (as programs have it)
        def get(self, scale: float) -> mx.array:
            return waves(scale)

    return Encoding().get


@cache
def of_two() -> Get:
    inner = functools.cache(lambda: mx.arange(4) * 0.5)
    outer = functools.cache(lambda scale: mx.cos(inner() * scale))
    return lambda scale: outer(scale) + inner()


@cache
def of_one_result_of_an_operation() -> Get:
    return functools.cache(lambda scale: mx.split(mx.arange(8) * scale, 2)[1])


@cache
def broadcast_anew() -> Get:
    return functools.lru_cache(maxsize=1)(lambda scale: mx.full((1,), scale) + mx.zeros((4,)))


@cache
def transposed_anew() -> Get:
    return functools.lru_cache(maxsize=1)(lambda scale: (mx.arange(16).reshape(4, 4) * scale).T[1])


@cache
def tuple_of_tables() -> Get:
    get = functools.cache(lambda scale: (mx.cos(mx.arange(4) * scale), waves(scale)))
    return lambda scale: get(scale)[0] * get(scale)[1]


@cache
def dict_of_arrays() -> Get:
    known: dict[float, mx.array] = {}

    def get(scale: float) -> mx.array:
        if scale not in known:
            known[scale] = waves(scale)
        return known[scale]

    return get


LOSSES: dict[str, Callable[[Get, Any], Callable[..., mx.array]]] = {
    "the loss": lambda get, box: lambda model, x: (mx.square(model(x)).sum(-1) @ get(box.scale)) / 4,
    "a checkpointed part": lambda get, box: (
        lambda model, x: mx.checkpoint(lambda y: (mx.square(y).sum(-1) @ get(box.scale)) / 4)(model(x))
    ),
    "what it keeps": lambda get, box: (
        lambda model, x: (box.keep(model(x).sum(-1) * get(box.scale)), squares(model, x))[1]
    ),
}


class Average(Box):
    """The number of this step, and an average that the loss keeps."""

    def __init__(self) -> None:
        self.scale, self.mean = 1.0, mx.zeros((4,))

    def keep(self, value: mx.array) -> None:
        """Average a value."""
        self.mean = 0.9 * self.mean + 0.1 * mx.stop_gradient(value)


def of_a_key(cached: str, use: str, keys: str) -> Make:
    def make() -> Made:
        box = Average()

        def between(number: int) -> None:
            box.scale = KEYS[keys](number)

        return Made(
            LOSSES[use](CACHES[cached](), box),
            lambda: box.mean,
            between,
            nn.Linear(3, 2),
            optim.Adam(0.05),
            lambda number: (rows_of_normals(number, 4, 3),),
            calls=16,
        )

    return make


for keys in KEYS:
    for cached_by in CACHES:
        add(
            "closure",
            f"an array of a cache {cached_by.replace('_', ' ')}, {keys}",
            of_a_key(cached_by, "the loss", keys),
        )
    for use in LOSSES:
        if use != "the loss":
            add("closure", f"an array of a cache in {use}, {keys}", of_a_key("without_bounds", use, keys))
