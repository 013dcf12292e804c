"""The step: gradients, clipping, update and evaluation in one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._loss import Losses
from faststep._native import core

Nonfinite = Literal["skip", "raise", "allow"]


@dataclass(frozen=True)
class StepOutput:
    """What one step gives. The arrays are lazy: reading one waits for that step.

    Attributes:
        loss: The loss, a scalar in the dtype in which the loss function returned it.
        aux: What the loss function returned beside the loss, an empty tuple where it returned nothing else.
        grad_norm: The global norm of the gradients before clipping, a float32 scalar; None where nothing needs it: with
            `nonfinite="allow"` and without `max_grad_norm`.
        skipped: Whether the step was not taken, a bool scalar; False with `nonfinite="allow"`.
    """

    loss: mx.array
    aux: tuple[Any, ...]
    grad_norm: mx.array | None
    skipped: mx.array | bool


@dataclass(frozen=True)
class Stats:
    """What a step has done so far.

    Attributes:
        steps: The number of steps.
        skipped: How many of them were not taken, because loss or gradients were not finite or the loss too large.
            Asking waits for the steps in flight.
        way: How the update is computed. "native": on flat buffers, in Rust. "traced": the optimizer's own Python code,
            compiled with the rest. "plain": the same step without compilation.
        traces: Every trace that was made, with its cause and how long it took.
    """

    steps: int
    skipped: int
    way: str
    traces: tuple[core.TraceRecord, ...]


class Step:
    """The training step of a model, an optimizer and a loss function.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch)
        gradients, norm = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    The loss function is called while the step is traced, which is once for each signature of the batch; afterwards the
    trace is replayed natively. What Python code in it does beside computing arrays (printing, counting) happens then
    only. Model, optimizer and `mx.random.state` are current after every call, and what is changed in them between calls
    is seen.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import Step
        >>> model, optimizer = nn.Linear(8, 1), optim.AdamW(learning_rate=1e-2)
        >>> def loss_fn(model, x, y):
        ...     return nn.losses.mse_loss(model(x), y)
        >>> step = Step(model, optimizer, loss_fn, max_grad_norm=1.0)
        >>> x, y = mx.random.normal((32, 8)), mx.zeros((32, 1))
        >>> losses = [step(x, y).loss.item() for _ in range(20)]
        >>> losses[-1] < losses[0], step.stats.way
        (True, 'native')
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        *,
        max_grad_norm: float | None = None,
        nonfinite: Nonfinite = "skip",
        max_loss: float | None = None,
        compile: bool = True,
        in_flight: int = 2,
    ) -> None:
        """Make the step; nothing is traced before its first call.

        Args:
            model: The model, of which everything trainable is updated.
            optimizer: The optimizer; it is initialised when it has not been.
            loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one, as
                for `nn.value_and_grad(model, loss_fn)`.
            max_grad_norm: Clip the gradients to this global norm, as `optim.clip_grad_norm` does. None: no clipping.
            nonfinite: What to do about a NaN or an infinity in the loss or in a gradient. "skip": leave parameters,
                optimizer state and buffers as they are, on the device, without a wait. "raise": the same, then wait
                for the step and raise `FloatingPointError`, which names the first such gradient. "allow": take every
                step, as the plain loop does. A gradient whose square overflows float32 counts as infinite.
            max_loss: A loss above this counts as not finite; None: no limit.
            compile: Compile the step. Without, the loss function is called at every step.
            in_flight: How many steps may be under way on the device when a call returns.

        Raises:
            TypeError: `model` or `optimizer` is something else.
            ValueError: An option is out of its range.
        """
        self.model, self.optimizer, self.loss_fn = model, optimizer, loss_fn
        self._program = Program(model, optimizer, max_grad_norm, nonfinite, max_loss, compile, in_flight)

    def __call__(self, *batch: Any, **named: Any) -> StepOutput:
        """Train on one batch.

        Args:
            *batch: What the loss function takes after the model: arrays, dicts, lists and tuples of them, and static
                values, of which every new one is a new trace.
            **named: The same, by name.

        Returns:
            Loss, auxiliary values and the gradients' norm, all lazy.

        Raises:
            TypeError: An argument is neither an array nor static, or the loss is no array.
            ValueError: The loss is no scalar, nothing is trainable, an array waits for another thread, or MLX refuses a
                shape. Exceptions of the loss function pass unchanged. All of these leave model, optimizer and random
                state as they were.
            RuntimeError: The step belongs to another thread, or the device failed.
            FloatingPointError: With `nonfinite="raise"`: loss or gradients are not finite. Nothing was updated.
        """
        value, norm, skipped = self._program.step(self.model, self.optimizer, self.loss_fn, batch, named)
        loss, aux = (value[0], value[1:]) if isinstance(value, tuple) else (value, ())
        return StepOutput(loss, aux, norm, False if skipped is None else skipped)

    def gradients(self, *batch: Any, **named: Any) -> tuple[Any, dict[str, Any]]:
        """Compute loss and gradients of one batch and change nothing.

        Args:
            *batch: As for a step.
            **named: As for a step.

        Returns:
            What the loss function returned, and the tree of gradients, before clipping: what
            `nn.value_and_grad(model, loss_fn)(model, *batch, **named)` returns.

        Raises:
            TypeError: As a step does.
            ValueError: As a step does.
            RuntimeError: As a step does.
        """
        return self._program.gradients(self.model, self.optimizer, self.loss_fn, batch, named)

    def synchronize(self) -> None:
        """Wait for all work in flight.

        Raises:
            RuntimeError: A step failed on the device, or the step belongs to another thread.
        """
        self._program.core.synchronize()

    @property
    def stats(self) -> Stats:
        """What the step has done so far."""
        steps, skipped, way, traces = self._program.core.stats()
        return Stats(steps, skipped, way, tuple(traces))


class Program:
    """The native step of a model, an optimizer and options, for any loss function; keeps neither of the two alive."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        max_grad_norm: float | None,
        nonfinite: Nonfinite,
        max_loss: float | None,
        compile: bool,
        in_flight: int,
    ) -> None:
        """Check the options."""
        if in_flight < 0:
            raise ValueError(f"in_flight: expected a number from 0 on, got {in_flight}")
        self.core = core.Step(
            model,
            optimizer,
            max_grad_norm=max_grad_norm,
            nonfinite=nonfinite,
            max_loss=max_loss,
            compile=compile,
            in_flight=in_flight,
        )
        self._losses = Losses()

    def step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, mx.array | None, mx.array | None]:
        """Return what the loss function returned, the gradients' norm, and whether the step was skipped."""
        return self.core.step(model, optimizer, loss_fn, self._losses.number(loss_fn), batch, named)

    def gradients(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        batch: tuple[Any, ...],
        named: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Return what the loss function returned and the tree of gradients."""
        return self.core.gradients(model, optimizer, loss_fn, self._losses.number(loss_fn), batch, named)


_Key = tuple[int, int, float | None, Nonfinite, float | None, bool, int]
_programs: dict[_Key, tuple[weakref.ref[nn.Module], weakref.ref[Optimizer], Program]] = {}


def fast_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    *batch: Any,
    max_grad_norm: float | None = None,
    nonfinite: Nonfinite = "skip",
    max_loss: float | None = None,
    compile: bool = True,
    in_flight: int = 2,
    **named: Any,
) -> Any:
    """Train on one batch: `Step` in one call, which keeps one for each model, optimizer and set of options, weakly.

    It replaces these lines, and gives the same numbers:

        loss, gradients = nn.value_and_grad(model, loss_fn)(model, *batch, **named)
        gradients, _ = optim.clip_grad_norm(gradients, max_grad_norm)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state, mx.random.state)

    Args:
        model: The model, of which everything trainable is updated.
        optimizer: The optimizer.
        loss_fn: `loss_fn(model, *batch, **named)` returns a scalar `mx.array`, or a tuple that begins with one. A
            lambda made anew at every call is the same loss as long as its code, defaults and closure are.
        *batch: Arrays, dicts, lists and tuples of them, and static values.
        max_grad_norm: Clip the gradients to this global norm; None: no clipping.
        nonfinite: "skip" a step whose loss or gradients are not finite, "raise" for it, or "allow" it.
        max_loss: A loss above this counts as not finite; None: no limit.
        compile: Compile the step.
        in_flight: How many steps may be under way on the device when a call returns.
        **named: Arguments of the loss function by name; the options above are not among them.

    Returns:
        What the loss function returned, lazily.

    Raises:
        TypeError: As `Step` and its call do.
        ValueError: As `Step` and its call do.
        RuntimeError: As `Step` and its call do.
        FloatingPointError: As a `Step`'s call does.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import fast_step
        >>> model, optimizer = nn.Linear(4, 2), optim.Adam(learning_rate=1e-2)
        >>> x, y = mx.random.normal((16, 4)), mx.zeros((16,), mx.int32)
        >>> for _ in range(3):
        ...     loss = fast_step(
        ...         model, optimizer, lambda m, x, y: nn.losses.cross_entropy(m(x), y, reduction="mean"), x, y
        ...     )
        >>> loss.shape, optimizer.step.item()
        ((), 3)
    """
    key = (id(model), id(optimizer), max_grad_norm, nonfinite, max_loss, compile, in_flight)
    known = _programs.get(key)
    if known is None or known[0]() is not model or known[1]() is not optimizer:
        known = _keep(key, model, optimizer)
    return known[2].step(model, optimizer, loss_fn, batch, named)[0]


def _keep(
    key: _Key, model: nn.Module, optimizer: Optimizer
) -> tuple[weakref.ref[nn.Module], weakref.ref[Optimizer], Program]:
    def drop(reference: object) -> None:
        if (kept := _programs.get(key)) and reference in kept[:2]:
            del _programs[key]

    program = Program(model, optimizer, *key[2:])
    _programs[key] = weakref.ref(model, drop), weakref.ref(optimizer, drop), program
    return _programs[key]
