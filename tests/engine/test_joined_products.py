"""Gradients of matrices that are used step by step, on a CPU: one product each, as close to float64 as MLX's sums."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from support.places import Child
from support.replays import NEEDS_CPU

pytestmark = NEEDS_CPU

SIZE = 24


class Recurrent(nn.Module):
    """Two matrices, of which one is transposed, used at each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.plain = (0.2 * mx.random.normal((SIZE, SIZE)) for _ in range(2))

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, steps, size] to [batch, size]."""
        hidden = mx.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            hidden = mx.tanh(mx.addmm(x[:, step], hidden, self.turned.T) @ self.plain)
        return hidden


def loss_fn(model: Recurrent, x: mx.array) -> mx.array:
    """Return a sum of squares, a scalar."""
    return mx.square(model(x)).sum()


def new_run(batch: int, steps: int) -> tuple[Recurrent, mx.array]:
    """Make a model and a batch, equal each time."""
    mx.random.seed(0)
    return Recurrent(), mx.random.normal((batch, steps, SIZE))


def by_step(batch: int, steps: int) -> list[mx.array]:
    """Return both gradients of a step: SGD's first momentum."""
    (model, x), optimizer = new_run(batch, steps), optim.SGD(1e-3, momentum=0.9)
    Step(model, optimizer, loss_fn)(x)
    return [optimizer.state[name]["v"] for name in ("turned", "plain")]


def by_mlx(batch: int, steps: int, dtype: mx.Dtype = mx.float32) -> list[mx.array]:
    """Return those of plain MLX."""
    model, x = new_run(batch, steps)
    model.set_dtype(dtype)
    gradients = mx.grad(lambda parameters: loss_fn(model.update(parameters), x.astype(dtype)))(model.parameters())
    return [gradients[name] for name in ("turned", "plain")]


@pytest.mark.parametrize(("batch", "steps"), [(3, 12), (1, 40), (SIZE, 12), (3, 4)])
def test_gradients_are_as_close_to_float64(batch: int, steps: int) -> None:
    exact = [np.array(each) for each in by_mlx(batch, steps, mx.float64)]
    for ours, theirs, wanted in zip(by_step(batch, steps), by_mlx(batch, steps), exact, strict=True):
        our, their = (float(np.abs(np.array(got, np.float64) - wanted).max()) for got in (ours, theirs))
        assert our < max(2 * their, 1e-6 * float(np.abs(wanted).max()))


SAME = """
import mlx.core as mx
from engine.test_joined_products import by_mlx, by_step
assert all(mx.array_equal(*pair) for pair in zip(by_step(3, 12), by_mlx(3, 12)))
"""


def test_without_own_kernels_they_have_mlx_s_bits(child: Child) -> None:
    child(SAME, FASTSTEP_KERNELS="0")
