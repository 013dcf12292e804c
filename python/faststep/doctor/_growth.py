"""Growth of memory over steps: a straight line through the later part, with its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_POINTS = 9
LEAST_ACTIVE = 64.0  # bytes a step of MLX's memory, which is counted exactly; a step keeps a few flags for a while


@dataclass(frozen=True)
class Growth:
    """A line fitted to bytes by step.

    Attributes:
        slope: Bytes a step.
        error: The standard error of the slope.
        rises: Whether the last third lies above the first third altogether, and both halves rise: it is no single jump.
        whole: Bytes from the first point to the last one.
    """

    slope: float
    error: float
    rises: bool
    whole: float

    def is_real(self, least: float) -> bool:
        """Return whether it is growth beyond its error, and more than so many bytes a step."""
        return self.rises and self.slope > least and self.slope > 4 * self.error

    def __str__(self) -> str:
        return f"{_bytes(self.slope)} a step (+- {_bytes(self.error)})"


def growth(values: Sequence[float]) -> Growth | None:
    """Fit a line to the last two thirds of a series; None where it is too short.

    The first steps fill caches and compile kernels: they are left out.
    """
    values = values[len(values) // 3 :]
    n = len(values)
    if n < LEAST_POINTS:
        return None
    x_mean, y_mean, squares, slope = (n - 1) / 2, sum(values) / n, _squares(n), _slope(values)
    rest = sum((y - y_mean - slope * (i - x_mean)) ** 2 for i, y in enumerate(values))
    third = n // 3
    halves = [_slope(values[: n // 2]), _slope(values[n // 2 :])]
    rises = min(values[-third:]) > max(values[:third]) and min(halves) > slope / 4 > 0
    return Growth(slope, math.sqrt(rest / (n - 2) / squares), rises, values[-1] - values[0])


def _squares(n: int) -> float:
    """Return the sum of squares of 0 to n - 1 around their mean."""
    return n * (n * n - 1) / 12


def _slope(values: Sequence[float]) -> float:
    n = len(values)
    y_mean = sum(values) / n
    return sum((i - (n - 1) / 2) * (y - y_mean) for i, y in enumerate(values)) / _squares(n)


def _bytes(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.3g} B"
