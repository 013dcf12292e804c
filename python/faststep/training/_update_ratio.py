"""The ratio of an update's norm to that of the weights."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten


class UpdateRatio:
    """The ratio `|new - old| / |old|` over all trainable parameters, by the 2-norm, at one step in so many.

    That step holds the old parameters beside the new ones.
    """

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model, self._every = model, every
        self._old: dict[str, mx.array] | None = None
        self._ratio: mx.array | None = None

    def before(self, number: int) -> None:
        """Keep the parameters, where the step behind so many is one to be measured."""
        if self._every and self._old is None and (number + 1) % self._every == 0:
            self._old = dict(tree_flatten(self._model.trainable_parameters()))

    def after(self) -> None:
        """Measure, where there is something to be measured."""
        if self._old is None:
            return
        new = dict(tree_flatten(self._model.trainable_parameters()))
        changes = [_squares(new[name] - old) for name, old in self._old.items() if name in new]
        before = [_squares(old) for old in self._old.values()]
        self._ratio, self._old = mx.sqrt(sum(changes, mx.array(0.0)) / sum(before, mx.array(0.0))), None
        mx.async_eval(self._ratio)

    def read(self) -> dict[str, float]:
        """Return what was measured since the last call, by name."""
        ratio, self._ratio = self._ratio, None
        return {} if ratio is None else {"update_ratio": float(ratio)}


def _squares(array: mx.array) -> mx.array:
    return array.astype(mx.float32).square().sum()
