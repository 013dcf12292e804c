"""Copies of what a training changes of the user's objects, to be put back: model, optimizer, data, random states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._random import mlx_seed, restorers, states


class Kept:
    """Model, optimizer, the place in the data and all random states, as they are now.

    Arrays are kept, not copied: they stay in memory beside those that take their places.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, batches: Any = None) -> None:
        """Keep them."""
        self._optimizers = _all_optimizers(optimizer)
        self._undo: list[Callable[[], None]] = []
        self.arrays: list[mx.array] = []
        seen: set[int] = set()
        self._keep(model, seen)
        for each in self._optimizers:
            self._keep(each.state, seen)  # the property makes it current
            self._keep_attributes(each)
        self._seed, self._random = mlx_seed(), restorers(states())
        self._data = getattr(batches, "state", None) if hasattr(batches, "load_state") else None
        self._batches = batches

    def restore(self) -> None:
        """Put all of it back."""
        for each in self._optimizers:
            _ = each.state  # the native step writes its moments now, not over what is put back
        for undo in self._undo:
            undo()
        self.reseed()
        self.rewind()

    def reseed(self) -> None:
        """Put the random states back."""
        mx.random.seed(self._seed)
        for put_back in self._random:
            put_back()

    def rewind(self) -> None:
        """Go back to where the data were."""
        if self._data is not None:
            self._batches.load_state(self._data)

    def bytes_beside(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Return how many bytes are kept that model and optimizer no longer hold."""
        now = {id(each) for each in Kept(model, optimizer).arrays}
        return sum(each.nbytes for each in self.arrays if id(each) not in now)

    def _keep(self, value: Any, seen: set[int]) -> None:
        if isinstance(value, mx.array):
            self.arrays.append(value)
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            before = dict(value)
            self._undo.append(lambda: _refill(value, before))
        elif isinstance(value, list):
            items = list(value)
            self._undo.append(lambda: value.__setitem__(slice(None), items))
        if isinstance(value, nn.Module):
            self._keep_attributes(value)
        for each in value.values() if isinstance(value, dict) else value:
            self._keep(each, seen)

    def _keep_attributes(self, holder: Any) -> None:
        attributes = {name: set(each) if isinstance(each, set) else each for name, each in vars(holder).items()}
        self._undo.append(lambda: _refill(vars(holder), attributes))


def _refill(holder: dict[str, Any], before: dict[str, Any]) -> None:
    dict.clear(holder)  # not the methods of a module, which mean its parameters
    dict.update(holder, before)


def _all_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    inner = getattr(optimizer, "optimizers", [])
    return [each for part in inner for each in _all_optimizers(part)] if inner else [optimizer]
