"""How many weights an update rounds to no change."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step


class Coarse(nn.Module):
    """Weights around 1, where bfloat16 has steps of 1/128, and one that never gets a gradient."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = mx.ones((40, 40), dtype)
        self.unused = mx.ones((40,), dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """Return the mean of squares."""
        return mx.square(self.weight @ x).mean()


def unchanged(dtype: mx.Dtype, optimizer: optim.Optimizer, compute_dtype: mx.Dtype | None = None) -> float | None:
    step = Step(Coarse(dtype), optimizer, lambda model, x: model(x), compute_dtype=compute_dtype)
    assert step.stats.unchanged is None
    for _ in range(3):
        step(mx.ones((40,), dtype))
    return step.stats.unchanged


@pytest.mark.parametrize(
    "make", [lambda rate: optim.AdamW(rate, weight_decay=0.0), lambda rate: optim.SGD(rate, momentum=0.9)]
)
def test_half_precision_weights_that_do_not_move_are_counted(make: object) -> None:
    assert unchanged(mx.bfloat16, make(1e-4)) == 1.0  # type: ignore[operator]
    assert unchanged(mx.bfloat16, make(1e-1)) == 0.0  # type: ignore[operator]
    assert unchanged(mx.float32, make(1e-4)) == 0.0  # type: ignore[operator]
    assert unchanged(mx.bfloat16, make(1e-4), mx.bfloat16) == 0.0  # type: ignore[operator]


def test_a_step_that_is_skipped_is_no_reading() -> None:
    step = Step(Coarse(mx.float32), optim.AdamW(1e-3), lambda model, x: model(x))
    step(mx.ones((40,)))
    step(mx.full((40,), mx.nan))
    assert step.stats.skipped == 1
    assert step.stats.unchanged is None
