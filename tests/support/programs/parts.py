"""Parts of the programs: the way in which they take their steps, layers, batches and averages of weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

Losses = list[mx.array]
BATCHES = 4


class Make(Protocol):
    """Make the step of a model: what takes a batch and returns what the loss returned."""

    def __call__(
        self, model: nn.Module, optimizer: Any, loss_fn: Callable[..., Any], *, max_grad_norm: float | None = None
    ) -> Callable[..., Any]: ...


class Net(nn.Module):
    """Linear layers with one activation between them: an object that all of them share."""

    def __init__(self, sizes: Sequence[int], activation: Callable[[mx.array], mx.array] = nn.relu) -> None:
        super().__init__()
        self.layers = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
        self.activations = [activation] * (len(sizes) - 2)

    def __call__(self, x: mx.array) -> mx.array:
        for layer, activation in zip(self.layers[:-1], self.activations, strict=True):
            x = activation(layer(x))
        return self.layers[-1](x)


def normals(*shape: int, seed: int = 0) -> list[mx.array]:
    """Draw a few batches of float32 normal numbers, equal each time."""
    rng = np.random.default_rng(seed)
    return [mx.array(rng.standard_normal(shape, dtype=np.float32)) for _ in range(BATCHES)]


def integers(high: int, *shape: int, seed: int = 1) -> list[mx.array]:
    """Draw a few batches of int32 numbers below `high`, equal each time."""
    rng = np.random.default_rng(seed)
    return [mx.array(rng.integers(high, size=shape, dtype=np.int32)) for _ in range(BATCHES)]


def follow(target: nn.Module, source: nn.Module, rate: float) -> None:
    """Move a model's parameters towards another's (Polyak averaging)."""
    target.update(tree_map(lambda t, s: (1 - rate) * t + rate * s, target.parameters(), source.parameters()))
    mx.eval(target.parameters())
