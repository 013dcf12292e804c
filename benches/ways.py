"""The ways to take a step that are compared. Each makes ``step(*batch) -> loss`` and evaluates all state it changes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from cases import Run
from faststep import fast_step
from mlx.utils import tree_map

StepFn = Callable[..., mx.array]
IN_FLIGHT = 2  # as many as fast_step allows


def plain(run: Run) -> StepFn:
    """Take the step as MLX's documentation writes it."""

    def step(*batch: mx.array) -> mx.array:
        loss = update(run, *batch)
        mx.eval(loss, run.model.state, run.optimizer.state)
        return loss

    return step


def widened(run: Run) -> StepFn:
    """Take the plain step with the loss and its gradients in float32, from weights that stay in their own dtype."""

    def step(*batch: mx.array) -> mx.array:
        weights = run.model.parameters()
        run.model.update(tree_map(lambda a: a.astype(mx.float32), weights))
        loss, grads = nn.value_and_grad(run.model, run.loss_fn)(run.model, *batch)
        run.model.update(weights)
        grads, _ = optim.clip_grad_norm(grads, run.max_grad_norm or float("inf"))
        run.optimizer.update(run.model, tree_map(lambda g, w: g.astype(w.dtype), grads, weights))
        mx.eval(loss, run.model.state, run.optimizer.state)
        return loss

    return step


def compiled(run: Run) -> StepFn:
    """Take the plain step in ``mx.compile``, its state captured, and wait for it."""
    traced, state = compile_step(run)

    def step(*batch: mx.array) -> mx.array:
        loss = traced(*batch)
        mx.eval(loss, state)
        return loss

    return step


def compiled_async(run: Run) -> StepFn:
    """Take the compiled step and wait for the one before the last only."""
    traced, state = compile_step(run)
    running: deque[mx.array] = deque()

    def step(*batch: mx.array) -> mx.array:
        loss = traced(*batch)
        mx.async_eval(loss, state)
        running.append(loss)
        if len(running) > IN_FLIGHT:
            mx.eval(running.popleft())
        return loss

    return step


def fast(run: Run, **options: Any) -> StepFn:
    """Take the step with this package; an option more is a line more in ``WAYS``."""

    def step(*batch: mx.array) -> mx.array:
        loss: mx.array = fast_step(
            run.model, run.optimizer, run.loss_fn, *batch, max_grad_norm=run.max_grad_norm, **options
        )
        return loss

    return step


def gradients_only(run: Run) -> StepFn:
    """Take compiled gradients and no update: what no step can be faster than by much."""
    loss_and_grads = nn.value_and_grad(run.model, run.loss_fn)

    # Outputs too, though nothing changes: the trace leaves its placeholders in the model otherwise.
    @functools.partial(mx.compile, inputs=run.model.state, outputs=run.model.state)
    def traced(*batch: mx.array) -> tuple[mx.array, Any]:
        loss, grads = loss_and_grads(run.model, *batch)
        return loss, grads

    def step(*batch: mx.array) -> mx.array:
        loss, grads = traced(*batch)
        mx.eval(loss, grads)
        return loss

    return step


def update(run: Run, *batch: mx.array) -> mx.array:
    """Build the plain step, lazily."""
    loss: mx.array
    loss, grads = nn.value_and_grad(run.model, run.loss_fn)(run.model, *batch)
    if run.max_grad_norm is not None:
        grads, _ = optim.clip_grad_norm(grads, run.max_grad_norm)
    run.optimizer.update(run.model, grads)
    return loss


def compile_step(run: Run) -> tuple[StepFn, list[Any]]:
    """Compile the plain step; return it with the state that it captures."""
    run.optimizer.init(run.model.trainable_parameters())
    state = [run.model.state, run.optimizer.state, mx.random.state, [other.state for other in run.beside]]
    traced: StepFn = mx.compile(functools.partial(update, run), inputs=state, outputs=state)
    return traced, state


PLAIN = "plain MLX"
COMPILED = "mx.compile'd"
COMPILED_ASYNC = "mx.compile'd, async"
FAST = "fast_step"
EVALUATED = f"{FAST}, replay=False"
BOUND = "forward and backward alone"
FLUSHED = f"{FAST}, FASTSTEP_FLUSH_DENORMALS=1"  # in a process of its own
WAYS: dict[str, Callable[[Run], StepFn]] = {
    PLAIN: plain,
    COMPILED: compiled,
    COMPILED_ASYNC: compiled_async,
    FAST: fast,
    BOUND: gradients_only,
    EVALUATED: functools.partial(fast, replay=False),
}
