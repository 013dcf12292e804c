"""The norm of the gradients by part of a model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._step import call_with
from faststep.training._trainer import Callback, Trainer


class GradientNorms(Callback):
    """A callback that logs the gradients' norm of every part of the model, before the first step and when it validates.

    A part is a module of the model's top level; frozen ones have none. The gradients are those of the first batch of
    the validation data, and nothing is changed by them. A part whose gradient is zero before the first step is told of
    at once: what it gives does not reach the loss.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Log the norms, and name the parts that get no gradient.

        Raises:
            ValueError: There are no validation data.
        """
        if trainer.validation is None:
            raise ValueError("gradient_norms: expected validation data, of whose first batch the gradients are")
        self._batch = first_batch(trainer.validation)
        norms = self._log(trainer)
        dead = [name for name, norm in norms.items() if norm.item() == 0]
        if dead:
            text = f"the gradient of {' and of '.join(dead)} is zero: what it gives does not reach the loss"
            trainer.log({"gradient": text})

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        """Log the norms."""
        self._log(trainer)

    def _log(self, trainer: Trainer) -> dict[str, mx.array]:
        _, gradients = call_with(self._batch, trainer.step.gradients)
        norms = by_part(gradients)
        trainer.log({f"grad_norm/{name}": norm for name, norm in norms.items()})
        return norms


def first_batch(loader: Any) -> Any:
    """Return the first batch of a loader, and leave the loader where it was."""
    state = loader.state
    batches = iter(loader)
    try:
        return next(batches)
    finally:
        batches.close()
        loader.load_state(state)


def by_part(gradients: dict[str, Any]) -> dict[str, mx.array]:
    """Return the 2-norm of gradients by the first key of their paths, scalars."""
    squares: dict[str, mx.array] = {}
    flat: dict[str, mx.array] = dict(tree_flatten(gradients))
    for path, gradient in flat.items():
        part = path.partition(".")[0]
        squares[part] = squares.get(part, mx.array(0.0)) + gradient.astype(mx.float32).square().sum()
    return {part: mx.sqrt(each) for part, each in squares.items()}
