"""Checks of the batches themselves: the share of padding, a model whose dropout is off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.doctor._finding import Finding, Level
from faststep.doctor._shapes import probability
from faststep.doctor._subject import Subject, arguments

_WASTE, _MOST = 0.5, 0.75  # share of padding that is told, and that is a warning


def findings(subject: Subject) -> Iterator[Finding]:
    """Yield what is found."""
    if (padding := _padding(subject)) is not None:
        yield padding
    dropouts = [path for path, each in subject.model.named_modules() if probability(each) > 0 and not each.training]
    if dropouts and not subject.model.training:
        text = f"the model is in evaluation mode: {dropouts[0]} drops nothing, and BatchNorm keeps its averages"
        yield Finding("eval-mode", "warning", text, "switch it to training mode before the loop", "model.train()")


def _padding(subject: Subject) -> Finding | None:
    """Return the finding of batches that are mostly padding: told by the loader, or seen at the ends of rows."""
    subject.some()  # or the loader has nothing to tell yet
    stats = getattr(subject.batches, "stats", None)
    efficiency, where = getattr(stats, "efficiency", None), "batches"
    if efficiency is None:
        shares = _shares(subject)
        if not shares:
            return None
        where = min(shares, key=lambda name: shares[name])
        efficiency = shares[where]
    if efficiency >= 1 - _WASTE:
        return None
    text = f"{1 - efficiency:.0%} of {where} is padding"
    remedy = "batch samples of similar lengths together, or pack several into one row"
    level: Level = "warning" if efficiency < 1 - _MOST else "note"
    return Finding("padding", level, text, remedy, "Loader(..., collate=Pad(window=50))   # or collate=Pack(length)")


def _shares(subject: Subject) -> dict[str, float]:
    """Return the share of each argument of tokens that does not lie in a constant end of its row."""
    real: dict[str, list[float]] = {}
    for batch in subject.some():
        for name, leaf in arguments(batch):
            if isinstance(leaf, mx.array) and leaf.ndim == 2 and leaf.shape[1] >= 8 and leaf.dtype in _INTEGERS:
                real.setdefault(name, []).append(_real(np.array(leaf)))
    return {name: sum(each) / len(each) for name, each in real.items()}


_INTEGERS = (mx.int32, mx.int64, mx.uint32, mx.int16, mx.uint16, mx.uint8)


def _real(rows: np.ndarray[Any, Any]) -> float:
    """Return the share of the rows in front of the constant value that most of them end with; 1 where they do not."""
    last = rows[:, -1]
    values, counts = np.unique(last, return_counts=True)
    value = values[counts.argmax()]
    if counts.max() < 0.6 * len(rows) or len(rows) < 3 or (rows == value).all():
        return 1.0
    other = rows != value
    lengths = np.where(other.any(axis=1), rows.shape[1] - other[:, ::-1].argmax(axis=1), 0)
    return float(lengths.mean() / rows.shape[1])
