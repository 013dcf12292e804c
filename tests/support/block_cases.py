"""Losses of element-wise operations, in fused kernels that are not compiled and operation by operation."""

from __future__ import annotations

import operator
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from faststep import Step
from mlx.utils import tree_flatten

Operation = Callable[[mx.array], mx.array]
GROUPS: dict[str, list[Operation]] = {
    "rounding": [mx.abs, mx.ceil, mx.floor, mx.round, mx.sign, operator.neg],
    "exponential": [mx.exp, mx.expm1, mx.sigmoid, mx.tanh, lambda x: mx.logaddexp(x, x * x)],
    "circular": [mx.sin, mx.cos, mx.tan, mx.arctan, lambda x: mx.arctan2(x, x + 2)],
    "hyperbolic": [mx.sinh, mx.cosh, lambda x: mx.erfinv(x * 0.125)],
    "logarithm": [lambda x: mx.log(x * x + 1), lambda x: mx.log2(x * x + 1), lambda x: mx.log10(x * x + 1)],
    "root": [lambda x: mx.log1p(x * x), lambda x: mx.rsqrt(x * x + 1), lambda x: mx.sqrt(mx.abs(x) + 1), mx.square],
    "two": [lambda x: mx.maximum(x, 0.25), lambda x: mx.minimum(0.25, x * x), lambda x: 1 / (x * x + 0.5)],
    "power": [lambda x: mx.abs(x) ** 1.5, lambda x: x - 0.5 * x, lambda x: mx.maximum(x * x, x)],
    "choice": [lambda x: mx.where(x > 0, x, -0.5 * x), lambda x: mx.where((x >= 0.5) | ~(x < -0.25), x * x, 0.5)],
    "bools": [lambda x: (mx.round(x) == 0) * x, lambda x: ((mx.round(x) != 0) & (x <= 1)) * x],
    "integers": [lambda x: mx.bitwise_and(mx.floor(x * 8).astype(mx.int32), 3).astype(x.dtype) * x],
    "bytes": [
        lambda x: (mx.minimum(mx.abs(x), 8) * 8).astype(mx.uint8).astype(x.dtype) * x,
        lambda x: mx.where((mx.clip(x, -8, 8) * 8).astype(mx.int8) == 0, x, 0.5),
    ],
    "unsigned": [lambda x: (mx.abs(x) * 8).astype(mx.uint32).astype(x.dtype) * x],
    "halves": [lambda x: (x.astype(mx.float16) * 2).astype(x.dtype), lambda x: x.astype(mx.bfloat16).astype(x.dtype)],
}
LAYOUTS: dict[str, Operation] = {
    "rows": lambda x: x,
    "columns": lambda x: mx.contiguous(x.T).T,
    "one row": lambda x: mx.broadcast_to(x[:1], x.shape),
    "one column": lambda x: mx.broadcast_to(x[:, :1], x.shape),
    "backwards": lambda x: x[:, ::-1],
}
SHAPE = (37, 129)  # more elements than a block, and no multiple of the processor's vectors


class Product(nn.Module):
    """A matrix and a row of numbers."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = mx.array(np.random.default_rng(1).normal(size=SHAPE)).astype(dtype)
        self.bias = mx.array(np.random.default_rng(2).normal(size=SHAPE[-1:])).astype(dtype)


def losses(dtype: mx.Dtype, x: mx.array, operations: list[Operation], *, fast: bool) -> list[np.ndarray]:
    """Return the losses of three steps, float32, and the parameters behind them."""

    def loss_fn(model: Product, x: mx.array) -> mx.array:
        y = x * model.weight + model.bias
        results = [operation(y).astype(mx.float32) for operation in operations]
        return sum((mx.abs(each).sum() * 2.0**-12 for each in results), mx.array(0.0))

    model, optimizer, taken = Product(dtype), optim.SGD(1e-3), []
    step = Step(model, optimizer, loss_fn, nonfinite="allow")
    plain = nn.value_and_grad(model, loss_fn)
    for _ in range(3):
        if fast:
            taken.append(step(x).loss)
            continue
        loss, gradients = plain(model, x)
        optimizer.update(model, gradients)
        mx.eval(loss, model.state)
        taken.append(loss)
    parameters = [parameter.astype(mx.float32) for _, parameter in tree_flatten(model.parameters())]
    return [np.array(each) for each in taken + parameters]


def compare() -> None:
    """Print each case whose parameters differ in a bit; a sum of losses may be added up in another order."""
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        x = mx.array(np.random.default_rng(3).normal(size=SHAPE)).astype(dtype)
        for layout, lay in LAYOUTS.items():
            for group, operations in GROUPS.items():
                one, other = (losses(dtype, lay(x), operations, fast=fast) for fast in (False, True))
                same = [np.array_equal(*pair, equal_nan=True) for pair in zip(one, other, strict=True)]
                if not all(same[3:]) or not np.allclose(one[:3], other[:3], 1e-6, equal_nan=True):
                    print(dtype, layout, group, one[:3], other[:3])
