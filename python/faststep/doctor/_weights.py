"""Weights of micro-batches: how much of a mean over tokens or rows each has, where an accumulation averages means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from faststep.doctor._finding import Finding
from faststep.doctor._held import Losses, is_whole, leaves_of, replaced, values_of
from faststep.doctor._subject import Subject

_UNEVEN = 1.2  # the largest weight of a window by the smallest
Weight = Callable[[Any], float]


def uneven(subject: Subject, batches: list[Any]) -> Finding | None:
    """Return the finding of batches whose losses are means over different counts, and get the same weight."""
    for what, weight in dict(each for batch in batches for each in _weights(batch)).items():
        weights = [weight(batch) for batch in batches]
        if min(weights) <= 0 or max(weights) < _UNEVEN * min(weights):
            continue
        if any(_is_mean(subject, batch, weight) for batch in batches):
            shown = ", ".join(f"{each:g}" for each in weights[:8])
            text = (
                f"your step takes a mean of means: the loss of each batch is a mean over {what} ({shown}), and each "
                "batch has the same share of the update. An item of a small batch counts up to "
                f"{max(weights) / min(weights):.1f} times as much"
            )
            remedy = "weigh each batch's gradients by its count, and divide by the sum of the counts"
            code = "Step(..., accumulate=n, weighted=True)   # the loss function returns (mean_loss, count)"
            return Finding("mean-of-means", "warning", text, remedy, code)
    return None


def _weights(batch: Any) -> list[tuple[str, Weight]]:
    """Return what a loss may be a mean over: the ones of a mask, labels that are not ignored, rows."""
    found: list[tuple[str, Weight]] = []
    for place, (name, leaf) in enumerate(leaves_of(batch)):
        values = values_of(leaf)
        if np.isin(values, (0, 1)).all() and values.ndim:
            found.append((f"the ones of {name}", _sum_of(place)))
        elif is_whole(leaf) and values.min(initial=0) < 0:
            found.append((f"the labels of {name} that are not ignored", _labels_of(place)))
        if values.ndim:
            found.append((f"the numbers of {name}", _size_of(place)))
    return found


def _sum_of(place: int) -> Weight:
    return lambda batch: float(values_of(leaves_of(batch)[place][1]).sum())


def _labels_of(place: int) -> Weight:
    return lambda batch: float((values_of(leaves_of(batch)[place][1]) >= 0).sum())


def _size_of(place: int) -> Weight:
    return lambda batch: float(leaves_of(batch)[place][1].size)


def _is_mean(subject: Subject, batch: Any, weight: Weight) -> bool:
    """Return whether the loss of a batch is the mean of its parts' losses by these weights, and no other."""
    leaves, losses = [leaf for _, leaf in leaves_of(batch)], Losses(subject)
    rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves}
    whole = losses.of(batch)
    if whole is None or len(rows) != 1 or whole != losses.of(batch):
        return False
    count = rows.pop()
    for cut in {count // 2, count // 4, 1} - {0, count}:
        parts = [batch, batch]
        for leaf in leaves:
            parts = [replaced(part, leaf, half) for part, half in zip(parts, (leaf[:cut], leaf[cut:]), strict=True)]
        found, sizes = [losses.of(part) for part in parts], [weight(part) for part in parts]
        if None in found or not sum(sizes):
            continue
        mean = sum(size * each for size, each in zip(sizes, found, strict=True) if each is not None) / sum(sizes)
        rows_mean = (cut * (found[0] or 0.0) + (count - cut) * (found[1] or 0.0)) / count
        differ = sizes[0] * (count - cut) != sizes[1] * cut
        if abs(mean - whole) < 1e-4 * abs(whole) and (not differ or abs(rows_mean - whole) > 1e-3 * abs(whole)):
            return True
    return False
