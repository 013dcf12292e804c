"""The ways to take a step that are compared. Each makes ``step(*batch) -> loss`` and evaluates all state it changes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from cases import MAX_GRAD_NORM, loss_fn
from faststep import fast_step

StepFn = Callable[..., mx.array]
IN_FLIGHT = 2  # as many as fast_step allows


def plain(model: nn.Module, optimizer: optim.Optimizer) -> StepFn:
    """Take the step as MLX's documentation writes it."""

    def step(*batch: mx.array) -> mx.array:
        loss = update(model, optimizer, *batch)
        mx.eval(loss, model.state, optimizer.state)
        return loss

    return step


def compiled(model: nn.Module, optimizer: optim.Optimizer) -> StepFn:
    """Take the plain step in ``mx.compile``, its state captured, and wait for it."""
    traced, state = compile_step(model, optimizer)

    def step(*batch: mx.array) -> mx.array:
        loss = traced(*batch)
        mx.eval(loss, state)
        return loss

    return step


def compiled_async(model: nn.Module, optimizer: optim.Optimizer) -> StepFn:
    """Take the compiled step and wait for the one before the last only."""
    traced, state = compile_step(model, optimizer)
    running: deque[mx.array] = deque()

    def step(*batch: mx.array) -> mx.array:
        loss = traced(*batch)
        mx.async_eval(loss, state)
        running.append(loss)
        if len(running) > IN_FLIGHT:
            mx.eval(running.popleft())
        return loss

    return step


def fast(model: nn.Module, optimizer: optim.Optimizer) -> StepFn:
    """Take the step with this package."""

    def step(*batch: mx.array) -> mx.array:
        loss: mx.array = fast_step(model, optimizer, loss_fn, *batch, max_grad_norm=MAX_GRAD_NORM)
        return loss

    return step


def gradients_only(model: nn.Module, optimizer: optim.Optimizer) -> StepFn:
    """Take compiled gradients and no update: what no step can be faster than by much."""
    del optimizer
    loss_and_grads = nn.value_and_grad(model, loss_fn)

    # Outputs too, though nothing changes: the trace leaves its placeholders in the model otherwise.
    @functools.partial(mx.compile, inputs=model.state, outputs=model.state)
    def traced(*batch: mx.array) -> tuple[mx.array, Any]:
        loss, grads = loss_and_grads(model, *batch)
        return loss, grads

    def step(*batch: mx.array) -> mx.array:
        loss, grads = traced(*batch)
        mx.eval(loss, grads)
        return loss

    return step


def update(model: nn.Module, optimizer: optim.Optimizer, *batch: mx.array) -> mx.array:
    """Build the plain step, lazily."""
    loss, grads = nn.value_and_grad(model, loss_fn)(model, *batch)
    grads, _ = optim.clip_grad_norm(grads, MAX_GRAD_NORM)
    optimizer.update(model, grads)
    return loss


def compile_step(model: nn.Module, optimizer: optim.Optimizer) -> tuple[StepFn, list[Any]]:
    """Compile the plain step; return it with the state that it captures."""
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state, mx.random.state]
    traced = mx.compile(functools.partial(update, model, optimizer), inputs=state, outputs=state)
    return traced, state


FAST = "fast_step"
BOUND = "forward and backward alone"
WAYS: dict[str, Callable[[nn.Module, optim.Optimizer], StepFn]] = {
    "plain MLX": plain,
    "mx.compile'd": compiled,
    "mx.compile'd, async": compiled_async,
    FAST: fast,
    BOUND: gradients_only,
}
