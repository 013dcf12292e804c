"""Operations of e^x in a step on a CPU: the bits of MLX's, alone and where kernels would call the C library."""

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

OPERATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "exp": mx.exp,
    "sigmoid": mx.sigmoid,
    "erf": mx.erf,
    "tanh": mx.tanh,
    "cosh": mx.cosh,
    "tanh in a kernel": lambda x: 0.5 * x * (1 + mx.tanh(x)),
    "the gradient of tanh": lambda x: x / mx.square(mx.cosh(x)),
}
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
    values[1:9] /= 10  # tanh and cosh have other ways for small numbers
    values[9] *= np.float32(1e-8) ** np.arange(129).clip(max=5)
    values[0, :8] = [np.inf, -np.inf, 88.5, -88.5, 0.0, -0.0, 89.3, -1e9]
    x = mx.array(np.nan_to_num(values, posinf=3e38, neginf=-3e38))
    apply = OPERATIONS[operation]

    def loss(model: Product, x: mx.array) -> tuple[mx.array, mx.array]:
        y = apply(WAYS[way](x @ model.weight))
        return mx.stop_gradient(y).max(), y

    step = Step(Product(x.shape[1]), optim.SGD(0.0), loss, nonfinite="allow")
    wanted = np.array(apply(WAYS[way](x @ mx.eye(x.shape[1]))))
    for _ in range(STEPS):  # the later ones captured
        assert np.array(step(x).aux[0]).tobytes() == wanted.tobytes()
