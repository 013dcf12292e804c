"""Packed rows for models of mlx-lm: attention within a document, by a cache that keeps nothing and masks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep._optional import need
from faststep.mlx_lm._folder import EXTRA

_LEARNED = ("wpe", "position_embeddings", "embed_positions")  # embeddings of positions in the row, by their names


class Segments:
    """In place of a layer's cache: keys and values pass, and the mask keeps tokens of one document together.

    Rotary positions count from the beginning of the row: attention depends on their differences only.

    Args:
        segments: Integers [batch, seq]: the number of each token's document.
    """

    offset = 0

    def __init__(self, segments: mx.array) -> None:
        self.segments = segments

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values as they are."""
        return keys, values

    def make_mask(self, length: int, return_array: bool = True, window_size: int | None = None) -> mx.array:
        """Return what each token sees, bool [batch, 1, seq, seq]: those before it in its document and the window."""
        same = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        mask = same & mx.tri(length, dtype=mx.bool_)
        if window_size is None:
            return mask
        at = mx.arange(length)
        return mask & (at[:, None] < at[None] + window_size)


def check_packable(model: nn.Module) -> None:
    """Refuse a model that sees more than its attention's mask lets it, or learned positions of rows.

    Raises:
        ValueError: It does.
    """
    kind, module = getattr(model, "model_type", type(model).__name__), need("mlx_lm.models.cache", EXTRA)
    attention = (module.KVCache, module.RotatingKVCache)
    made: list[Any] = model.make_cache() if hasattr(model, "make_cache") else []
    if not all(isinstance(each, attention) for each in made):
        raise ValueError(
            f"collate: {kind!r} carries a state from token to token, which no mask of a packed row stops: take `pad`"
        )
    if any(name.rpartition(".")[2] in _LEARNED for name, _ in model.named_modules()):
        raise ValueError(f"collate: {kind!r} has learned positions, which begin anew in each document: take `pad`")
