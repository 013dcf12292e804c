"""Ids that an embedding has no row for: MLX would read past the end of its weights."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from faststep._records import number

_KINDS: tuple[Any, ...] = (nn.Embedding, nn.QuantizedEmbedding)
_lock = threading.Lock()
_entered = 0
_originals: list[Callable[..., mx.array]] = []


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """While it is entered, MLX's embeddings give NaN for ids that they have no row for, and the same bits for others.

    So a loss over such ids is not finite, and the step skips the batch on the device. Its graph is another one than
    outside: a step that is called in both places makes a trace for each.
    """
    global _entered
    with _lock:
        _entered += 1
        if _entered == 1:
            _originals[:] = [kind.__call__ for kind in _KINDS]
            for kind, original in zip(_KINDS, _originals, strict=True):
                kind.__call__ = _inside(original)
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if not _entered:
                for kind, original in zip(_KINDS, _originals, strict=True):
                    kind.__call__ = original


def _inside(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def call(self: Any, x: mx.array) -> mx.array:
        if not isinstance(x, mx.array) or not mx.issubdtype(x.dtype, mx.integer):
            return original(self, x)
        wide, count = x.astype(mx.int64), self.weight.shape[0]  # in 8 bits, 256 is 0
        inside = (wide >= -count) & (wide < count)
        return mx.where(inside[..., None], original(self, mx.where(inside, x, 0)), mx.nan)

    return call


def explain(loss: float, model: nn.Module, batch: Any) -> str | None:
    """Say why a loss is NaN, where the batch has integers for which an embedding of the model has no row."""
    if not math.isnan(loss):
        return None
    leaves = [each for each in dict(tree_flatten(batch)).values() if isinstance(each, mx.array)]
    integers = [each for each in leaves if mx.issubdtype(each.dtype, mx.integer) and each.size]
    rows = {path: each.weight.shape[0] for path, each in model.named_modules() if isinstance(each, _KINDS)}
    if not integers or not rows:
        return None
    ends = [number(end) for each in integers for end in (each.min(), each.max())]
    low, high = int(min(ends)), int(max(ends))
    short = {path: count for path, count in rows.items() if high >= count or low < -count}
    if not short:
        return None
    names = ", ".join(f"{path or 'the model'} {count}" for path, count in short.items())
    return f"loss nan: is an id out of range? The batch has integers from {low} to {high}, rows of embeddings: {names}"
