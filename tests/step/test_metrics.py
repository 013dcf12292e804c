"""Metrics that a loss puts in the place of the last ones: arrays, numbers and texts in a new dict, list or tuple."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_map
from support.helpers import plain_step


class Metrics(NamedTuple):
    kl: mx.array
    beta: float


class Trainer:
    """Has the weight of a part of the loss, and the metrics of the last call."""

    def __init__(self, form: Callable[[mx.array, Trainer], Any]) -> None:
        self.beta, self.phase, self.calls, self.form = 0.0, "warm up", 0, form
        self.metrics: Any = None

    def loss(self, model: nn.Module, x: mx.array) -> mx.array:
        self.calls += 1
        y = model(x)
        kl = mx.abs(y).mean()
        self.metrics = self.form(kl, self)
        return mx.square(y - 1).mean() + self.beta * kl


FORMS: dict[str, Callable[[mx.array, Trainer], Any]] = {
    "dict": lambda kl, it: {"kl": kl, "beta": it.beta},
    "dict with a text": lambda kl, it: {"kl": kl, "beta": it.beta, "phase": it.phase},
    "dict in a dict": lambda kl, it: {"loss": {"kl": kl, "beta": it.beta}, "twice": [2 * kl, it.phase]},
    "list": lambda kl, it: [kl, it.beta],
    "tuple": lambda kl, it: (it.phase, kl, it.beta),
    "named tuple": lambda kl, it: Metrics(kl, it.beta),
    "ordered dict": lambda kl, it: collections.OrderedDict(kl=kl, beta=it.beta),
    "of another type at times": lambda kl, it: {"kl": kl, "beta": 0 if it.beta == 0 else it.beta},
    "with none at times": lambda kl, it: {"kl": kl, "beta": it.beta or None},
}
COUNTED: dict[str, Callable[[mx.array, Trainer], Any]] = {
    "a count": lambda kl, it: {"kl": kl, "calls": it.calls},
    "every third": lambda kl, it: {"kl": kl, "third": it.calls % 3 == 0},
}


def run(form: Callable[[mx.array, Trainer], Any], fast: bool) -> tuple[list[float], list[Any], list[Any], Step]:
    """Train with a weight that grows, then stays; return losses, metrics as they are read and as they are kept."""
    mx.random.seed(1)
    model, optimizer, trainer = nn.Linear(4, 3), optim.SGD(0.05), Trainer(form)
    step, plain = Step(model, optimizer, trainer.loss), plain_step(model, optimizer, trainer.loss)
    drawn = np.random.default_rng(0)
    losses, read, kept = [], [], []
    for number in range(30):
        trainer.beta, trainer.phase = min(1.0, number / 12), "warm up" if number < 12 else "steady"
        x = mx.array(drawn.normal(size=(5, 4)).astype("float32"))
        losses.append(float((step(x).loss if fast else plain(x)[0]).item()))
        read.append(values(trainer.metrics))
        kept.append(trainer.metrics)
    return losses, read, [values(each) for each in kept], step


def values(tree: Any) -> Any:
    return tree_map(lambda each: each.item() if isinstance(each, mx.array) else each, tree)


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [type(tree).__name__, *(leaf for each in tree.values() for leaf in leaves(each))]
    if isinstance(tree, list | tuple):
        return [type(tree).__name__, *(leaf for each in tree for leaf in leaves(each))]
    return [tree]


def compare(form: Callable[[mx.array, Trainer], Any]) -> Step:
    (losses, *metrics, step), (wanted, *reference, _) = run(form, fast=True), run(form, fast=False)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for ours, theirs in zip(leaves(metrics), leaves(reference), strict=True):
        assert type(ours) is type(theirs)
        assert ours == (pytest.approx(theirs, rel=1e-4) if isinstance(theirs, float) else theirs)
    return step


@pytest.mark.parametrize("name", FORMS)
def test_numbers_and_texts_among_metrics_are_those_of_the_call(name: str) -> None:
    step = compare(FORMS[name])
    assert (step.stats.mode, step.stats.traced <= 6) == ("native", True)


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.filterwarnings(
    "ignore:faststep. this step cannot be compiled. its result depends on what it changes itself"
)
def test_what_the_loss_counts_itself_is_right_among_metrics(name: str) -> None:
    compare(COUNTED[name])
