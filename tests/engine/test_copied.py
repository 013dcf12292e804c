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


FACTORS: dict[str, Callable[[mx.array], mx.array]] = {  # [6, 5, 5, 6]
    "as it lies": lambda x: x.reshape(6, 5, 6, 6)[..., :5, :] + 1,
    "of heads": lambda x: x.reshape(6, 6, 5, 6).swapaxes(1, 2)[:, :, :5],
    "of a part": lambda x: x.reshape(6, 5, 6, 6)[..., 1:, :],
    "turned": lambda x: x.reshape(6, 5, 6, 6)[..., 1:].swapaxes(-1, -2),
    "of heads, turned": lambda x: x.reshape(6, 6, 5, 6).transpose(0, 2, 3, 1)[..., :5, :],
    "backwards": lambda x: x.reshape(6, 5, 6, 6)[..., :0:-1, :],
    "of equal rows": lambda x: mx.broadcast_to(x.reshape(6, 5, 6, 6)[..., :1, :], (6, 5, 5, 6)),
    "of equal matrices": lambda x: mx.broadcast_to(x.reshape(6, 5, 6, 6)[:1, :1, :5], (6, 5, 5, 6)),
}
SHAPES: dict[str, Callable[[mx.array], mx.array]] = {
    "heads that are joined": lambda x: x.swapaxes(1, 2).flatten(2, 3),
    "heads that are joined, reshaped": lambda x: x.swapaxes(1, 2).reshape(4, 7, -1),
    "all": lambda x: x.transpose(2, 0, 3, 1).reshape(-1),
    "axes that lie as one": lambda x: x.transpose(2, 3, 0, 1).reshape(7, 8, 12),
    "an axis that is divided": lambda x: x.swapaxes(0, 3).reshape(2, 4, 3, 7, 2, 2),
    "of equal rows": lambda x: mx.broadcast_to(x[:, :1], x.shape).reshape(4, 21, 8),
    "backwards": lambda x: x[..., ::-1].reshape(12, 56),
    "axes of one": lambda x: x[:, :1].swapaxes(1, 3).reshape(4, 56, 1),
    "a part": lambda x: x[:, :, 2:].reshape(12, 40),
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


@pytest.mark.parametrize("right", FACTORS)
@pytest.mark.parametrize("left", FACTORS)
def test_each_bit_of_products_of_many_matrices_is_mlx_s(left: str, right: str) -> None:
    x = mx.random.normal((6, 180), key=mx.random.key(0))
    compare(lambda x: FACTORS[left](x) @ (FACTORS[right](x) * 2).swapaxes(-1, -2), x)
    compare(lambda x: FACTORS[left](x) @ FACTORS[right](x).swapaxes(-1, -2), x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.bool_])
def test_each_element_of_another_shape_is_mlx_s(shape: str, dtype: mx.Dtype) -> None:
    x = (10 * mx.random.normal((4, 3, 7, 8), key=mx.random.key(0))).astype(dtype)
    compare(lambda x: SHAPES[shape](x), x)
    compare(lambda x: SHAPES[shape](x) + SHAPES[shape](x), x)
