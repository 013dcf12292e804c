"""Sums along the last axes in a step on a CPU: the bits of MLX's."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.replays import NEEDS_CPU

pytestmark = NEEDS_CPU

SHAPES = [((8, 1), [1]), ((9, 33), [1]), ((9, 5, 64), [1, 2]), ((7, 4, 129), [2]), ((64, 1000), [1]), ((8, 0), [1])]
# along several axes MLX sums in the order of memory, which is another one in a fused kernel's result
CASES = [(*case, turned) for case in SHAPES for turned in (False, True) if not turned or len(case[1]) == 1]


class Factor(nn.Module):
    """A number that is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = mx.ones(1)


@pytest.mark.parametrize(("shape", "axes", "turned"), CASES, ids=str)
def test_each_bit_is_mlx_s(shape: tuple[int, ...], axes: list[int], turned: bool) -> None:
    numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def sums(model: Factor, x: mx.array) -> list[mx.array]:
        x = (x.swapaxes(0, 1) if turned else x) * model.weight
        return [x.sum(axes), x.mean(axes, keepdims=True), x.square().sum(axes)]

    model = Factor()
    wanted = sums(model, mx.array(numbers))
    step = Step(model, optim.SGD(0.0), lambda model, x: (sums(model, x)[2].sum(), *sums(model, x)))
    for got, array in zip(step(mx.array(numbers)).aux, wanted, strict=True):
        assert np.array(got).tobytes() == np.array(array).tobytes()
