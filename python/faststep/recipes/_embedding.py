"""Rows of an embedding by number, where a number may be out of range."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def rows(embedding: nn.Embedding, indices: mx.array) -> mx.array:
    """Look rows up; NaN where there is none, since MLX would read past the end.

    Args:
        embedding: Of floating point weights, or quantized.
        indices: Integers [...].

    Returns:
        Floating point [..., width].
    """
    count = embedding.weight.shape[0]
    inside = (indices.astype(mx.int32) >= -count) & (indices.astype(mx.int32) < count)
    return mx.where(inside[..., None], embedding(mx.where(inside, indices, 0)), mx.nan)
