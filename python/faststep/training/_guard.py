"""The guard against too many skipped batches in a row."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from faststep._step import StepOutput


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """Leave out the step's warning of its first skipped batch: the training's log tells each of them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "faststep: the batch of step", RuntimeWarning)
        yield


@dataclass(frozen=True)
class Tried:
    """A batch with its random key, its output and its place in the data."""

    batch: Any
    key: mx.array
    output: StepOutput
    epoch: int
    position: int


class Guard:
    """Counter of batches skipped in a row, as far behind as the step runs ahead of the device.

    From the first bad batch on every one is waited for, so that the model is what the last one met when the limit is
    reached.
    """

    def __init__(self, limit: int, in_flight: int, row: int = 0) -> None:
        """Start counting.

        Args:
            limit: So many in a row are too many; 0: never.
            in_flight: How many steps may be under way.
            row: How many the row has already.
        """
        self.limit, self.row = limit, row
        self._in_flight = in_flight
        self._recent: deque[Tried] = deque()

    def push(self, tried: Tried) -> list[Tried]:
        """Add a batch; return those that are now known to have been skipped."""
        self._recent.append(tried)
        return self.settle(0 if self.row or self.limit == 1 else self._in_flight)

    def settle(self, behind: int = 0) -> list[Tried]:
        """Return those that were skipped among all but the last ones."""
        bad = []
        while len(self._recent) > behind:
            tried = self._recent.popleft()
            if bool(tried.output.skipped):
                bad.append(tried)
                self.row, behind = self.row + 1, 0
            else:
                self.row = 0
        return bad

    @property
    def full(self) -> bool:
        """True if there were too many in a row."""
        return 0 < self.limit <= self.row
