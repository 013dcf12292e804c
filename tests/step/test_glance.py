"""What a loss reaches is compared fast while nothing has changed; whatever does change is seen all the same."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from mlx.utils import tree_flatten


class Layer(nn.Linear):
    """A layer with a number, and with numbers and arrays in containers."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gain = 1.0
        self.table, self.listed, self.pair = {"a": 1.0, "b": 2.0}, [1.0, mx.ones((3,))], (1.0, 2.0)

    def __call__(self, x: mx.array) -> mx.array:
        order = sum(place for place, name in enumerate(self) if name == "bias")
        attributes = sum(place for place, name in enumerate(vars(self)) if name == "gain")
        trained = sum(len(name) for name, _ in tree_flatten(self.trainable_parameters()))
        numbers = [*self.table.values(), self.listed[0], *self.pair, order, attributes, trained, self.training]
        y = super().__call__(x) * self.gain + self.listed[1]
        return y * sum(place * number for place, number in enumerate(numbers, 1)) / 100


def again(mapping: dict[str, Any], key: str) -> None:
    """Put what stands under a key at the end."""
    mapping[key] = mapping.pop(key)


def unlike(layer: Layer, rng: random.Random) -> None:
    """Freeze one of two arrays, as many as before."""
    layer.unfreeze(recurse=False)
    layer.freeze(keys=[rng.choice(["weight", "bias"])], recurse=False)


def swap(layers: list[Any], a: int, b: int) -> None:
    """Let two layers change places."""
    layers[a], layers[b] = layers[b], layers[a]


def give(layer: Layer, other: Layer) -> None:
    """Let two layers change their weights."""
    layer.weight, other.weight = other.weight, layer.weight


Change = Callable[[nn.Sequential, Layer, random.Random], object]
CHANGES: list[Change] = [
    lambda teacher, layer, rng: None,
    lambda teacher, layer, rng: setattr(layer, "weight", mx.full((3, 3), rng.random())),
    lambda teacher, layer, rng: layer.weight.__iadd__(rng.random()),
    lambda teacher, layer, rng: layer.bias.__setitem__(1, rng.random()),
    lambda teacher, layer, rng: give(layer, teacher.layers[0]),
    lambda teacher, layer, rng: give(layer, teacher.layers[-1]),
    lambda teacher, layer, rng: again(layer, "weight"),
    lambda teacher, layer, rng: again(vars(layer), "gain"),
    lambda teacher, layer, rng: layer.unfreeze(),
    lambda teacher, layer, rng: layer.freeze(),
    lambda teacher, layer, rng: unlike(layer, rng),
    lambda teacher, layer, rng: layer.train(rng.random() < 0.5),
    lambda teacher, layer, rng: setattr(layer, "gain", rng.choice([1.0, 2.0])),
    lambda teacher, layer, rng: vars(layer).update(gain=rng.choice([1.0, 2.0])),
    lambda teacher, layer, rng: object.__setattr__(layer, "__dict__", {**vars(layer), "gain": 3.0}),
    lambda teacher, layer, rng: layer.table.update(a=rng.choice([1.0, 2.0])),
    lambda teacher, layer, rng: again(layer.table, "a"),
    lambda teacher, layer, rng: layer.listed.__setitem__(0, rng.choice([1.0, 2.0])),
    lambda teacher, layer, rng: layer.listed.__setitem__(1, mx.full((3,), rng.random())),
    lambda teacher, layer, rng: setattr(layer, "pair", (rng.choice([1.0, 2.0]), 2.0)),
    lambda teacher, layer, rng: teacher.layers.__setitem__(rng.randrange(5), Layer()),
    lambda teacher, layer, rng: swap(teacher.layers, 1, rng.randrange(5)),
]


@pytest.mark.parametrize("seed", range(3))
def test_any_change_of_a_model_that_a_loss_reaches_is_seen(seed: int) -> None:
    rng, teacher = random.Random(seed), nn.Sequential(*(Layer() for _ in range(5)))
    teacher.freeze()

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        return mx.square(model(x) - teacher(x)).mean()

    step, x = Step(nn.Linear(3, 3), optim.SGD(0.0), loss_fn, max_traces=500), mx.ones((2, 3))
    changes = [change for change in CHANGES for _ in range(2)]
    rng.shuffle(changes)
    for change in changes:
        change(teacher, rng.choice(teacher.layers), rng)
        for _ in range(2):
            wanted = loss_fn(step.model, x).item()
            assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
    assert step.stats.mode != "plain"


@pytest.mark.parametrize("kind", ["dict", "attributes"])
@pytest.mark.parametrize("arrays", [False, True], ids=["numbers", "arrays"])
def test_another_order_is_seen_and_so_is_the_first_one_again(kind: str, arrays: bool) -> None:
    values = [mx.array(float(i)) if arrays else float(i) for i in range(6)]
    table: dict[str, Any] = {f"key{i}": value for i, value in enumerate(values)}
    settings = types.SimpleNamespace()
    if kind == "attributes":
        vars(settings).update(table)

    def items() -> dict[str, Any]:
        return vars(settings) if kind == "attributes" else table

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        total = sum((place * value for place, value in enumerate(items().values(), 1)), start=mx.array(0.0))
        return mx.square(model(x)).mean() + total

    def reorder() -> None:
        kept = dict(items())
        items().clear()
        items().update((key, kept[key]) for key in sorted(kept))

    def rename() -> None:
        for key in list(items()):
            items()[f"{key[:3]}{key[3:]}"] = items().pop(key)  # an equal one

    step, x = Step(nn.Linear(3, 3), optim.SGD(0.0), loss_fn), mx.ones((2, 3))
    for change in [
        lambda: None,
        lambda: again(items(), "key2"),
        reorder,
        lambda: again(items(), "key2"),
        reorder,
        rename,
        lambda: items().update(key3=values[1]),
        lambda: items().update(key3=values[3]),
        lambda: items().update(more=values[2]),
        lambda: items().pop("more"),
        lambda: again(items(), "key0"),
        lambda: items().pop("key4"),
    ]:
        change()
        for _ in range(3):
            wanted = loss_fn(step.model, x).item()
            assert step(x).loss.item() == pytest.approx(wanted, rel=1e-5)
    assert step.stats.mode != "plain"
