"""Making a batch: from the numbers of its items to its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from faststep.data._by_length import ByLength, Made, Piece
from faststep.data._epoch import Task
from faststep.data._errors import about
from faststep.data._evaluate import batch_of
from faststep.data._lengths import Lengths
from faststep.data._source import Columns, Items, Stream, shown
from faststep.data._stack import stack
from faststep.data._state import name_of
from faststep.data._tree import Tree

Collate = Callable[[Sequence[Any]], Tree]


class Maker:
    """Reader of the items of a batch, which it collates, in any thread."""

    def __init__(self, source: Items | Stream, collate: Collate, lengths: Lengths | None) -> None:
        """Keep what is needed; `lengths` where the epoch was planned by them."""
        self.source, self.collate, self.lengths = source, collate, lengths

    def __call__(self, task: Task, go_on: Callable[[], None]) -> Made:
        """Make a batch.

        Args:
            task: What it is made of.
            go_on: Called between items; raises where the loop was left.
        """
        numbers = task.numbers
        if isinstance(self.source, Columns) and self.collate is stack:
            return Made(batch_of(self.source.take(numbers), "source"), len(numbers), 0, 0)
        items = task.items
        if items is None and isinstance(self.source, Items):
            items = dict(zip(numbers, self.source.read(numbers, go_on), strict=True))
        go_on()
        with about(f"the batch of items {shown(numbers)}"):
            made = self._collated(task, items or {})
            return made._replace(batch=batch_of(made.batch, name_of(self.collate)))

    def _collated(self, task: Task, items: dict[int, Any]) -> Made:
        """Call the collate."""
        collate = self.collate
        if not isinstance(collate, ByLength):
            return Made(collate(list(items.values())), len(items), 0, 0)
        lengths = {number: self._length_of(collate, item, number) for number, item in items.items()}
        if not collate.arranges:
            return collate.make([[Piece(item, *collate.cut(lengths[i])[0])] for i, item in items.items()])
        return collate.make([[Piece(items[i], start, stop) for i, start, stop in row] for row in task.rows or ()])

    def _length_of(self, collate: ByLength, item: Any, number: int) -> int:
        """Measure an item, and compare with what the epoch was planned by."""
        with about("item", number):
            length = collate.length_of(item)
            if self.lengths is not None:
                self.lengths.check(number, length)
            return length
