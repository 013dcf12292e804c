"""Softmax and the logarithm of the sum of exponentials in a step on a CPU: the bits of MLX's, and of its gradients."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.replays import NEEDS_CPU

pytestmark = NEEDS_CPU

SHAPES = [(1,), (5, 1), (3, 7), (4, 8), (2, 3, 9), (6, 33), (3, 300), (2, 1027)]
WAYS: dict[str, Callable[[mx.array], mx.array]] = {
    "as it lies": lambda x: x,
    "masked": lambda x: mx.where(mx.arange(x.shape[-1]) % 3 == 1, -1e9, x),
    "without end": lambda x: mx.where(mx.arange(x.shape[-1]) % 3 == 1, -mx.inf, x),
    "far apart": lambda x: 40 * x,
    "turned": lambda x: x.T,
    "every second": lambda x: x[..., ::2],
    "of equal rows": lambda x: mx.broadcast_to(x, (3, *x.shape)),
}


def of_rows(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return both, along the last axis."""
    return mx.softmax(x, axis=-1), mx.logsumexp(x, axis=-1)


class Shift(nn.Module):
    """A number that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.zeros(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_bit_is_mlx_s(shape: tuple[int, ...], way: str) -> None:
    x = mx.array(3 * np.random.default_rng(0).standard_normal(shape).astype(np.float32))

    def loss(model: Shift, x: mx.array) -> tuple[mx.array, ...]:
        soft, most = of_rows(WAYS[way](x + model.weight))
        return soft[..., 0].sum() + most.sum(), soft, most

    model = Shift()
    wanted = of_rows(WAYS[way](x + model.weight))
    (_, *_), grads = nn.value_and_grad(model, lambda model, x: loss(model, x)[0:1])(model, x)
    step = Step(model, optim.SGD(1.0), loss)
    out = step(x)
    for got, array in zip(out.aux, wanted, strict=True):
        assert np.array(got).tobytes() == np.array(array).tobytes()
    np.testing.assert_array_equal(np.array(model.weight), -np.array(grads["weight"]))
    if way == "masked" and shape[-1] > 1:
        assert (np.array(out.aux[0])[..., 1::3] == 0).all()
