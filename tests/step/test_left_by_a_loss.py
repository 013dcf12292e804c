"""What a loss leaves on Python objects is what the plain loop leaves: arrays, containers, and who holds them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from support.left import Case, check

WINDOWS = pytest.mark.parametrize("window", [1, 3])


# what a loss does to a deque of three arrays or of fewer, and what the user does to it between the steps

DEQUES: dict[str, Callable[[Any, mx.array], object]] = {
    "appendleft": lambda it, new: it.appendleft(new),
    "append, rotate": lambda it, new: (it.append(new), it.rotate(1)),
    "again": lambda it, new: it.append(it[0]),
}
SHORTENED: dict[str, Callable[[Any], object]] = {
    "clear": lambda it: (it.clear(), it.append(mx.array(0.3))),
    "popleft": lambda it: it.popleft(),
    "pop": lambda it: it.pop(),
}


def keep_deque(
    place: str, items: list[Any]
) -> tuple[Callable[[Any, nn.Module], None], Callable[[Any, nn.Module], Any]]:
    """Return what begins with a deque at a place, and what gives that deque."""

    def begin(kept: Any, model: nn.Module) -> None:
        it = collections.deque([item() for item in items], maxlen=3)
        if place == "of the model":
            model._it = it
        else:
            kept.it = it if place == "of an object" else [{"it": it}]

    def get(kept: Any, model: nn.Module) -> Any:
        if place == "of the model":
            return model._it
        return kept.it if place == "of an object" else kept.it[0]["it"]

    return begin, get


PLACES = pytest.mark.parametrize("place", ["of an object", "of the model", "in a dict in a list"])


@WINDOWS
@PLACES
@pytest.mark.parametrize("shortened", SHORTENED)
@pytest.mark.parametrize("kind", DEQUES)
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it stores a new array in a deque")
def test_a_deque_that_is_shortened_between_the_steps_fills_again(
    kind: str, shortened: str, place: str, window: int
) -> None:
    begin, get = keep_deque(place, [lambda: mx.array(0.1), lambda: mx.array(0.2), lambda: mx.array(0.3)])

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(kept, model)
        loss = loss * (1 + 0.1 * it[-1])
        DEQUES[kind](it, mean)
        return loss

    def between(number: int, kept: Any, model: nn.Module) -> None:
        if number in (3, 8):
            SHORTENED[shortened](get(kept, model))

    check(Case(begin, body, "it stores a new array in a deque", between, None), window, calls=12)


MOVED: dict[str, Callable[[Any, Any], object]] = {
    "appendleft": lambda it, new: it.appendleft(new),
    "append": lambda it, new: it.append(new),
    "rotate": lambda it, new: it.rotate(1),
    "the last one first": lambda it, new: it.appendleft(it.pop()),
}


@WINDOWS
@PLACES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("container", [lambda array: [array], lambda array: {0: array}], ids=["list", "dict"])
def test_containers_in_a_deque_that_are_moved(
    container: Callable[[mx.array], Any], kind: str, count: int, place: str, window: int
) -> None:
    items = [lambda at=at: container(mx.array(0.1 * at)) for at in range(1, count + 1)]
    begin, get = keep_deque(place, items)

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(kept, model)
        loss = loss * (1 + it[-1][0])
        MOVED[kind](it, container(mean))
        return loss

    check(Case(begin, body, "it stores a new array in a deque"), window)
