"""Arrays that a loss computes once for each number or text, and takes from a cache: beside the plain loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.helpers import plain_step

Get = Callable[[float], mx.array]  # an array of 4 for a number
STEPS = 40
KEYS: dict[str, Callable[[int], float]] = {
    "one after the other": lambda number: 0.5 ** (number // 7),
    "another one once": lambda number: 1.0 if number < 25 else 0.5,
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


def squares(model: nn.Module, x: mx.array) -> mx.array:
    return mx.square(model(x)).mean()


class Box:
    """The number of this step, and an average that the loss keeps."""

    def __init__(self) -> None:
        self.scale, self.mean = 1.0, mx.zeros((4,))

    def keep(self, value: mx.array) -> None:
        """Average a value."""
        self.mean = 0.9 * self.mean + 0.1 * mx.stop_gradient(value)


def train(cached: str, use: str, keys: str, fast: bool) -> tuple[Any, Step]:
    mx.random.seed(1)
    box, model, own = Box(), nn.Linear(3, 2), optim.Adam(0.05)
    loss_fn = LOSSES[use](CACHES[cached](), box)
    step, take = Step(model, own, loss_fn), plain_step(model, own, loss_fn)
    losses = []
    for number in range(STEPS):
        box.scale = KEYS[keys](number)
        x = mx.random.normal((4, 3))
        losses.append(step(x).loss.item() if fast else take(x)[0].item())
        mx.eval(box.mean)
    return [np.array(losses), np.array(model.weight), np.array(box.mean)], step


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
    ("cached", "use"),
    [*((cached, "the loss") for cached in CACHES), *(("without_bounds", use) for use in LOSSES if use != "the loss")],
)
@pytest.mark.filterwarnings("ignore:faststep. .* traces have been made")
def test_an_array_of_a_cache_is_that_of_the_key(cached: str, use: str, keys: str) -> None:
    plain, _ = train(cached, use, keys, fast=False)
    ours, step = train(cached, use, keys, fast=True)
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert step.stats.mode == "native"
