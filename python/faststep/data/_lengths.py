"""Lengths of the items of a sequence, for collates that need them before an epoch."""

from __future__ import annotations

from typing import Any

import numpy as np

from faststep.data._by_length import ByLength
from faststep.data._errors import about
from faststep.data._order import IntArray
from faststep.data._source import Columns, Items


class Lengths:
    """The items' lengths: given, or read once and kept for as long as the source has as many items."""

    def __init__(self, source: Items, collate: ByLength, given: Any) -> None:
        """Keep what is needed to know them; nothing is read yet."""
        self.source, self.collate, self.given = source, collate, given
        self.known: IntArray | None = None

    def all(self, n: int) -> IntArray:
        """Return all of them, int64 [n].

        Raises:
            ValueError: Those that were given are not the lengths of n items.
        """
        if self.given is not None:
            self.known = self._checked(np.asarray(self.given), n)
        elif self.known is None or len(self.known) != n:
            self.known = self._read(n)
        return self.known

    def check(self, number: int, length: int) -> None:
        """Refuse an item that is not as long as it was taken for.

        Raises:
            ValueError: It is not; the message names it.
        """
        if self.known is not None and length != self.known[number]:
            raise ValueError(f"lengths: expected item {number} of length {self.known[number]}, got one of {length}")

    def _checked(self, given: IntArray, n: int) -> IntArray:
        if given.shape != (n,) or given.dtype.kind not in "iu" or given.min(initial=0) < 0:
            raise ValueError(f"lengths: expected {n} ints, 0 or more, got {given.dtype} {list(given.shape)}")
        return given.astype(np.int64)

    def _read(self, n: int) -> IntArray:
        """Go through all items; the first says it for all rows of arrays."""
        columns = isinstance(self.source, Columns)
        lengths = [self._read_one(index) for index in range(1 if columns else n)]
        return np.resize(np.asarray(lengths, dtype=np.int64), n)

    def _read_one(self, index: int) -> int:
        item = self.source.get(index)
        with about("item", index):
            return self.collate.length_of(item)
