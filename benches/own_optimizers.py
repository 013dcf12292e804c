"""Measure the step with optimizers of one's own whose update has to be called each time: it counts, or keeps a list.

``python benches/own_optimizers.py`` takes two minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from cases import Run
from optimizers import measure_all
from ways import COMPILED, FAST, WAYS, StepFn

BEHIND = "mx.compile'd gradients, update behind them"
State = dict[str, mx.array]


class CountingAdamW(optim.Optimizer):
    """AdamW that counts its updates in Python."""

    def __init__(self, learning_rate: float) -> None:
        """Begin with no update."""
        super().__init__()
        self.rate, self.updates = learning_rate, 0

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Begin with moments of zeros."""
        state["m"], state["v"] = mx.zeros_like(parameter), mx.zeros_like(parameter)

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Count, then update."""
        self.updates += 1
        return super().apply_gradients(gradients, parameters)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Update by moments that are corrected by the count (Loshchilov & Hutter, 2019)."""
        m = 0.9 * state["m"] + 0.1 * gradient
        v = 0.999 * state["v"] + 0.001 * mx.square(gradient)
        state["m"], state["v"] = m, v
        rate = self.rate / (1 - 0.9**self.updates)
        scale = (1 - 0.999**self.updates) ** -0.5
        return parameter * (1 - self.rate * 0.1) - rate * m / (mx.sqrt(v) * scale + 1e-8)


class ScheduledMomentum(optim.Optimizer):
    """Descent with momentum, at a rate that is a number in Python."""

    def __init__(self, learning_rate: float) -> None:
        """Begin at this rate."""
        super().__init__()
        self.first, self.updates = learning_rate, 0

    def init_single(self, parameter: mx.array, state: State) -> None:
        """Begin with a velocity of zeros."""
        state["v"] = mx.zeros_like(parameter)

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Lower the rate, then update."""
        self.updates += 1
        self.rate = self.first / (1 + 0.001 * self.updates)
        return super().apply_gradients(gradients, parameters)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: State) -> mx.array:
        """Go along the velocity."""
        state["v"] = 0.9 * state["v"] + gradient
        return parameter - self.rate * state["v"]


class ListingLion(optim.Lion):
    """Lion that keeps a list of its rates."""

    def __init__(self, learning_rate: float) -> None:
        """Begin with an empty list."""
        super().__init__(learning_rate)
        self.rates: list[float] = []

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Add to the list, then update."""
        self.rates.append(1e-4)
        return super().apply_gradients(gradients, parameters)


OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "AdamW, counts in Python": lambda: CountingAdamW(1e-3),
    "momentum, rate in Python": lambda: ScheduledMomentum(1e-3),
    "Lion, appends to a list": lambda: ListingLion(1e-4),
}


def behind(run: Run) -> StepFn:
    """Take compiled loss and clipped gradients, and call the update behind them."""
    loss_and_grads = nn.value_and_grad(run.model, run.loss_fn)

    @functools.partial(mx.compile, inputs=run.model.state, outputs=run.model.state)
    def traced(*batch: mx.array) -> tuple[mx.array, Any]:
        loss, grads = loss_and_grads(run.model, *batch)
        if run.max_grad_norm is not None:
            grads, _ = optim.clip_grad_norm(grads, run.max_grad_norm)
        return loss, grads

    def step(*batch: mx.array) -> mx.array:
        loss, grads = traced(*batch)
        run.optimizer.update(run.model, grads)
        mx.eval(loss, run.model.state, run.optimizer.state)
        return loss

    return step


COMPARED: dict[str, Callable[[Run], StepFn]] = {COMPILED: WAYS[COMPILED], BEHIND: behind, FAST: WAYS[FAST]}


if __name__ == "__main__":
    measure_all("own_optimizers", OPTIMIZERS, COMPARED, warm=24)
