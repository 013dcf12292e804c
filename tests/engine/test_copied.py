"""Operations of a step on a CPU that copy rows: the bits of MLX's, which copies number by number."""

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

ADDED: dict[str, Callable[[mx.array], mx.array]] = {
    "a row": lambda x: x[0, 0, :21],
    "a column": lambda x: x[0, :, :1],
    "a number": lambda x: x[0, 0, 0],
    "as it lies": lambda x: x[0, :, :21] + 1,
    "a slice": lambda x: x[0, :, 3:24],
    "of a sequence": lambda x: x[:21, 3].T,
    "turned": lambda x: x[1, :21, :].T,
    "backwards": lambda x: x[1, ::-1, 20::-1],
}
PARTS: dict[str, Callable[[mx.array], list[mx.array]]] = {
    "as they lie": lambda x: [x + 1, x - 1, 2 * x],
    "turned": lambda x: [x.swapaxes(0, 1), x.swapaxes(1, 2), x.transpose(2, 1, 0)],
    "backwards": lambda x: [x[:, ::-1], x[..., ::-1], x[::-1]],
    "of equal rows": lambda x: [mx.broadcast_to(x[:1], x.shape), mx.broadcast_to(x[..., :1], x.shape)],
}


class Weight(nn.Module):
    """A parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones(3)


def compare(apply: Callable[[mx.array], mx.array], x: mx.array) -> None:
    """Compare what a step computes with plain MLX, each bit."""

    def loss(model: Weight, x: mx.array) -> tuple[mx.array, mx.array]:
        return mx.square(model.weight).sum(), apply(x)

    step = Step(Weight(), optim.SGD(0.0), loss)
    wanted = np.array(apply(x).astype(mx.float32)).tobytes()
    for _ in range(STEPS):  # the later ones captured
        assert np.array(step(x).aux[0].astype(mx.float32)).tobytes() == wanted


@pytest.mark.parametrize("added", ADDED)
@pytest.mark.parametrize("turned", [False, True])
def test_each_bit_of_a_sum_with_a_product_is_mlx_s(added: str, turned: bool) -> None:
    x = mx.random.normal((24, 24, 24), key=mx.random.key(0))

    def apply(x: mx.array) -> mx.array:
        weight = x[2, :21].T if turned else x[2, :, :21] * 2
        return mx.addmm(ADDED[added](x), x[3], weight)

    compare(apply, x)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32, mx.bool_])
def test_each_bit_of_a_concatenation_is_mlx_s(parts: str, axis: int, dtype: mx.Dtype) -> None:
    x = (10 * mx.random.normal((7, 7, 7), key=mx.random.key(0))).astype(dtype)
    compare(lambda x: mx.concatenate([part.astype(dtype) for part in PARTS[parts](x)], axis), x)
