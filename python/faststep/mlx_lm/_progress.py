"""The progress of encoding a dataset, before there is a training that could show it."""

from __future__ import annotations

import sys
import time

_SILENT, _EVERY = 2.0, 5.0  # seconds before the first line, and from one to the next


class Progress:
    """Lines on stderr about files that take long.

    Args:
        name: What is encoded.
    """

    def __init__(self, name: str) -> None:
        self._name, self._next = name, time.monotonic() + _SILENT

    def tell(self, samples: int, done: float) -> None:
        """Print a line, where it is time for one: how many samples there are, and the share of the files so far."""
        now = time.monotonic()
        if now >= self._next and done < 1:
            self._next = now + _EVERY
            print(f"{self._name}: {samples:,} samples encoded, {done:.0%}", file=sys.stderr, flush=True)
