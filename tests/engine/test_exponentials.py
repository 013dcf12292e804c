"""Operations of e^x that are in no fused kernel of a step on a CPU: the bits of MLX's."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.replays import NEEDS_CPU, STEPS

pytestmark = NEEDS_CPU

OPERATIONS = {"exp": mx.exp, "sigmoid": mx.sigmoid, "erf": mx.erf}
WAYS: dict[str, Callable[[mx.array], mx.array]] = {
    "as it lies": lambda x: x,
    "turned": lambda x: x.T,
    "every second": lambda x: x[..., ::2],
    "backwards": lambda x: x[:, ::-1],
    "of equal rows": lambda x: mx.broadcast_to(x, (3, *x.shape)),
    "one": lambda x: x[:1, :1],
}


class Product(nn.Module):
    """A matrix whose products are as they were."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = mx.eye(size)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_bit_is_mlx_s(operation: str, way: str) -> None:
    values = 20 * np.random.default_rng(0).standard_normal((37, 129)).astype(np.float32)
    values[0, :6] = [np.inf, -np.inf, 88.5, -88.5, 0.0, -0.0]
    x = mx.array(np.nan_to_num(values, posinf=3e38, neginf=-3e38))
    apply = OPERATIONS[operation]

    def loss(model: Product, x: mx.array) -> tuple[mx.array, mx.array]:
        y = apply(WAYS[way](x @ model.weight))
        return mx.stop_gradient(y).max(), y

    step = Step(Product(x.shape[1]), optim.SGD(0.0), loss, nonfinite="allow")
    wanted = np.array(apply(WAYS[way](x @ mx.eye(x.shape[1]))))
    for _ in range(STEPS):  # the later ones captured
        assert np.array(step(x).aux[0]).tobytes() == wanted.tobytes()
