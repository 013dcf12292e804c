"""Results of a step: `StepOutput` of one call, `Stats` of all calls so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from faststep._native import core


@dataclass(frozen=True, repr=False)
class StepOutput:
    """Result of one step. The arrays are lazy: reading one waits for that step.

    Attributes:
        loss: The loss, a scalar in the dtype in which the loss function returned it; with a `group`, where there was an
            update, the mean over its window and all ranks, float32.
        aux: What the loss function returned beside the loss (and, with `weighted=True`, beside its weight), an empty
            tuple where it returned nothing else.
        grad_norm: The global norm of the gradients before clipping, a float32 scalar; with `accumulate`, that of the
            window's average. None where there was no update, and where nothing needs it: with `nonfinite="allow"` and
            without `max_grad_norm`.
        skipped: Whether nothing of the batch was taken, a bool scalar; False with `nonfinite="allow"`.
        weight: What the loss function returned as the loss's weight, with `weighted=True`; None otherwise.
        local_loss: The loss of this rank's batch: `loss` without a `group`.
    """

    loss: mx.array
    aux: tuple[Any, ...]
    grad_norm: mx.array | None
    skipped: mx.array | bool
    weight: Any
    local_loss: mx.array
    _update: mx.array | bool  # True if there was one, or the array that tells if it was missed

    def __repr__(self) -> str:
        """Show the values; waits for the step."""
        names = ("loss", "aux", "grad_norm", "skipped", "updated", "weight")
        return f"StepOutput({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def updated(self) -> mx.array | bool:
        """True if parameters and optimizer state were updated: a bool scalar, or False within a window."""
        return self._update if isinstance(self._update, bool) else mx.logical_not(self._update)


@dataclass(frozen=True)
class Stats:
    """Counts, mode, traces, times and memory of a step so far.

    Attributes:
        steps: The number of calls.
        updates: The number of updates that were made.
        skipped: How many batches were not taken, because loss or gradients were not finite or the loss too large.
            Asking waits for the steps in flight.
        mode: How the last step was computed. "native": the loss was left out, since nothing that it reads has changed.
            "called": the loss was called once, and its graph picked the compiled step. "plain": the loss was called
            once, and the step evaluated without compilation.
        reason: Why the mode is not "native": what the loss reads or does, with its line, the optimizer, or that these
            are the first calls; None where it is.
        traces: The traces that are kept, each with its cause, how long it took, and in `replay` its capture, or
            why there is none (None where `Step` was told not to replay).
        traced: The number of all traces that were made.
        seconds: Where the time of all calls went. "look": at what the user has changed. "call": the
            loss. "trace": calls that made a trace, all of them. "build": replaying traces, and calls of an optimizer
            of one's own. "evaluate": handing the work to MLX, which on a CPU does most of it then, and on a GPU holds a
            large step back until the last one has let go of its memory. "wait": for steps in flight. "show":
            giving the results to the user's objects. With a `group` "ranks": exchanging sums, and waiting for other
            ranks, which the others have not.
        bytes: What is held. "parameters", "optimizer": its state. "step": masters, average and window. "model": the
            model's other arrays. "replay": captures, and the static arrays that they read and write.
        unchanged: The share, from 0 to 1, of weights that an update rounded to no change: of up to 128 spread over each
            buffer, at one update in 128 (the second one first), weights whose first moment is zero left out. Near 1 the
            parameters are too coarse for the learning rate: see `compute_dtype`. None before the first reading.
        lazy: The most operations for which an argument or a new value of the model has waited when a call took it: the
            size of the graph that nobody had evaluated before.
        given: The bytes that this process has given to sums over the ranks of its `group`.
        warnings: The texts of the warnings that were given.
    """

    steps: int
    updates: int
    skipped: int
    mode: str
    reason: str | None
    traces: tuple[core.TraceRecord, ...]
    traced: int
    seconds: dict[str, float]
    bytes: dict[str, int]
    unchanged: float | None
    lazy: int
    given: int
    warnings: tuple[str, ...]
