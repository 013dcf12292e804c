"""A network of dense layers."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn


class MLP(nn.Module):
    """Dense layers with ReLU between them.

    Args:
        sizes: The width of the input, of each hidden layer and of the output.
        dropout: The share of hidden values that training leaves out.

    Raises:
        ValueError: There are fewer than two sizes, or one is not positive.
    """

    def __init__(self, sizes: list[int], dropout: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if len(sizes) < 2 or min(sizes) < 1:
            raise ValueError(f"sizes: expected two or more numbers from 1 on, got {sizes}")
        self.layers = [nn.Linear(size, to) for size, to in itertools.pairwise(sizes)]
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., first size] to [..., last size]."""
        for layer in self.layers[:-1]:
            x = self.dropout(nn.relu(layer(x)))
        return self.layers[-1](x)
