"""Gradients of tables that rows are taken from: one operation of the CPU, with the bits of MLX's scatters and sums."""

from __future__ import annotations

from collections.abc import Callable

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from mlx.utils import tree_flatten
from support.helpers import LossFn, plain_step

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU MLX scatters")

ROWS, WIDTH = 30, 8


class Table(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = mx.random.normal(shape)
        self.head = nn.Linear(shape[-1], shape[0])


def indices(dtype: mx.Dtype = mx.int32, low: int = 0, shape: tuple[int, ...] = (4, 6)) -> mx.array:
    return mx.array(np.random.default_rng(0).integers(low, ROWS, shape)).astype(dtype)


def taken(model: Table, i: mx.array) -> mx.array:
    return mx.tanh(model.weight[i] * 2).sum()


def bag(model: Table, i: mx.array) -> mx.array:  # the gradient of a sum is one row, seen as often as it has terms
    return mx.tanh(model.weight[i].sum(1)).sum()


def two_sides(model: Table, i: mx.array) -> mx.array:
    return mx.tanh(model.weight[i].sum(1) * model.weight[(i * 7 + 3) % ROWS].mean(1)).sum()


def three_times(model: Table, i: mx.array) -> mx.array:
    rows = [model.weight[(i * n) % ROWS] for n in (1, 3, 7)]
    return mx.tanh(rows[0] * rows[1] + rows[2]).sum()


def tied(model: Table, i: mx.array) -> mx.array:
    return nn.losses.cross_entropy(mx.tanh(model.weight[i]) @ model.weight.T, i, reduction="mean")


def all_rows_too(model: Table, i: mx.array) -> mx.array:
    return (model.weight[i] * model.weight.mean(0)).sum() + (model.weight * mx.arange(ROWS)[:, None]).square().sum()


def turned(model: Table, i: mx.array) -> mx.array:  # the elements of a gradient's row do not lie together
    return (mx.swapaxes(model.weight[i], -1, -2).reshape(-1, i.shape[0]) ** 2 @ mx.ones((i.shape[0], 3))).sum()


def activations(model: Table, i: mx.array) -> mx.array:
    nodes = mx.tanh(model.head(model.weight))
    messages = nodes[i.flatten()]
    return (mx.zeros_like(nodes).at[(i.flatten() * 3) % ROWS].add(messages) ** 2).mean()


def masked(model: Table, i: mx.array) -> mx.array:  # what is missing is no row
    rows = model.weight[mx.maximum(i, 0)] * (i >= 0)[..., None]
    return mx.tanh(rows.sum(1)).sum()


CASES: dict[str, tuple[LossFn, tuple[int, ...], Callable[[], mx.array]]] = {
    "taken": (taken, (ROWS, WIDTH), indices),
    "numbers": (taken, (ROWS,), indices),
    "matrices": (taken, (ROWS, 3, WIDTH), indices),
    "one": (taken, (ROWS, WIDTH), lambda: mx.array(3)),
    "from-the-end": (taken, (ROWS, WIDTH), lambda: indices(low=-ROWS)),
    "bytes": (taken, (ROWS, WIDTH), lambda: indices(mx.uint8)),
    "signed-bytes": (taken, (ROWS, WIDTH), lambda: indices(mx.int8, -ROWS)),
    "short": (taken, (ROWS, WIDTH), lambda: indices(mx.int16, -ROWS)),
    "unsigned": (taken, (ROWS, WIDTH), lambda: indices(mx.uint32)),
    "long": (taken, (ROWS, WIDTH), lambda: indices(mx.int64, -ROWS)),
    "every-second-index": (taken, (ROWS, WIDTH), lambda: indices(shape=(6, 8))[:, ::2].T),
    "none": (taken, (ROWS, WIDTH), lambda: indices(shape=(0, 6))),
    "bag": (bag, (ROWS, WIDTH), indices),
    "two-sides": (two_sides, (ROWS, WIDTH), indices),
    "three-times": (three_times, (ROWS, WIDTH), indices),
    "tied": (tied, (ROWS, WIDTH), indices),
    "all-rows-too": (all_rows_too, (ROWS, WIDTH), indices),
    "turned": (turned, (ROWS, 3, WIDTH), indices),
    "activations": (activations, (ROWS, WIDTH), indices),
    "masked": (masked, (ROWS, WIDTH), lambda: indices(low=-ROWS)),
    "large": (two_sides, (ROWS, 20_000), indices),
}


@pytest.mark.parametrize("case", CASES)
def test_a_table_trains_as_in_plain_mlx(case: str) -> None:
    loss_fn, shape, make = CASES[case]
    made = {}
    for way in ("plain", "step"):
        mx.random.seed(0)
        model, optimizer, batch = Table(*shape), optim.Adam(1e-2), make()
        step = plain_step(model, optimizer, loss_fn) if way == "plain" else Step(model, optimizer, loss_fn)
        for _ in range(3):
            step(batch)
        made[way] = dict(tree_flatten(model.parameters()))
    for name, weight in made["plain"].items():
        assert mx.array_equal(weight, made["step"][name]), (case, name)


def test_no_table_of_zeros_is_scattered_to() -> None:
    mx.random.seed(0)
    step = Step(Table(ROWS, WIDTH), optim.SGD(1e-2), two_sides)
    for _ in range(2):
        step(indices())
    with faststep.profile(step) as recording:
        recording.measure(indices())
    names = {operation.name for operation in recording.operations}
    assert "SumOfRows" in names
    assert not {name for name in names if name.startswith("Scatter")}
