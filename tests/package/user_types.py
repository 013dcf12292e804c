"""Types that a user's own program keeps through the step: `mypy` checks this file, and nobody runs it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from faststep import Step, StepOutput, fast_step
from typing_extensions import assert_type


class Net(nn.Module):
    """A model with an attribute of its own."""

    classes: int = 10


def loss_fn(model: Net, x: mx.array) -> tuple[mx.array, dict[str, int]]:
    return x.mean(), {"classes": model.classes}


def train(model: Net, x: mx.array) -> Step:  # without parameters: of any model and loss
    optimizer = optim.SGD(0.1)
    step = Step(model, optimizer, loss_fn, max_grad_norm=1.0)
    assert_type(step.model.classes, int)
    assert_type(step(x), StepOutput)
    assert_type(step.gradients(x)[0], tuple[mx.array, dict[str, int]])
    with step.average() as shown:
        assert_type(shown, Net)
    assert_type(fast_step(model, optimizer, loss_fn, x), tuple[mx.array, dict[str, int]])
    return step
