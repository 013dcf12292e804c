"""Long series as short ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from faststep.report._log import Numbers

BUCKETS = 500  # twice as many points are more than a plot has pixels
FINE = 5000
Axis = npt.NDArray[Any]


def finite(x: Axis, y: Numbers) -> tuple[Axis, Numbers]:
    """Leave out the points whose y is unknown or not finite."""
    known = np.isfinite(y)
    return x[known], y[known]


def extremes(x: Axis, y: Numbers, buckets: int = BUCKETS) -> tuple[Axis, Numbers]:
    """Keep the lowest and the highest point of each bucket, so that no spike is lost.

    Args:
        x: [points], ascending.
        y: float64 [points].
        buckets: How many stretches of equally many points; at most twice as many points are returned.

    Returns:
        The points that are kept, those with a finite y only.
    """
    x, y = finite(x, y)
    if len(y) <= 2 * buckets:
        return x, y
    kept = []
    for part in np.array_split(np.arange(len(y)), buckets):
        kept += sorted({int(part[y[part].argmin()]), int(part[y[part].argmax()])})
    return x[kept], y[kept]


def means(x: Axis, y: Numbers, buckets: int = BUCKETS) -> tuple[Axis, Numbers]:
    """Average the finite points of each bucket."""
    x, y = finite(x, y)
    if len(y) <= buckets:
        return x, y
    parts = np.array_split(np.arange(len(y)), buckets)
    return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def smooth(x: Axis, y: Numbers) -> tuple[Axis, Numbers, int]:
    """Average over a fiftieth of the points around each one.

    Returns:
        x, the averages, and over how many points each is.
    """
    points = len(finite(x, y)[1])
    x, y = means(x, y, FINE)
    window = max(1, len(y) // 50)
    weights = np.ones(window)
    counts = np.convolve(np.ones(len(y)), weights, mode="same") if len(y) else y
    averaged = np.convolve(y, weights, mode="same") / counts if len(y) else y
    return *means(x, averaged), window * max(1, points // max(1, len(y)))


def since_last(step: Axis, resumes: list[int], first: int = 0) -> Numbers:
    """Return how many steps each interval covers: since the one before it, or since the resume between them."""
    before = np.concatenate([[first], step[:-1]]).astype(np.int64) if len(step) else step
    for at in resumes:
        place = int(np.searchsorted(step, at, side="right"))
        if place < len(step):
            before[place] = max(before[place], at)
    covered: Numbers = np.maximum(step - before, 0).astype(np.float64)
    return covered
