"""The batches of one epoch over a stream, and the place behind each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from faststep.data._by_length import ByLength
from faststep.data._epoch import Cut, Pieces, Sharing, Task
from faststep.data._errors import about
from faststep.data._evaluate import evaluate
from faststep.data._source import Stream


class Mark(NamedTuple):
    """A place in the stream that can be gone back to.

    Attributes:
        state: The source's own state there; None for the beginning, or where it has none.
        item: Items before it.
        piece: Pieces before it.
    """

    state: Any
    item: int
    piece: int


class Entry(NamedTuple):
    """A piece of an item that was read."""

    number: int  # of the piece in the epoch
    source: int  # number of the item in the epoch
    item: Any
    start: int
    stop: int


class Reader:
    """Reader of a stream that arranges its items, chunk by chunk, in one thread.

    A chunk is some items arranged together, and what the chunk before left over because it filled no round. The place
    after a batch is then: the mark before the oldest entry of its chunk, which entries after that mark were used by
    earlier chunks, how many entries the chunk has, and how many of its rounds were taken. To go on, the chunk is read
    again.
    """

    def __init__(
        self, source: Stream, sharing: Sharing, arranger: ByLength | None, resume: dict[str, Any] | None
    ) -> None:
        """Begin at the place of `Task.resume`; None for the beginning."""
        place = resume or {"source": None, "item": 0, "piece": 0, "used": [], "size": 0, "taken": 0}
        self.source, self.sharing, self.arranger = source, sharing, arranger
        self.mark = Mark(place["source"], place["item"], place["piece"])
        self.used = {self.mark.piece + offset for offset in place["used"]}
        self.size, self.taken = place["size"], place["taken"]
        self.chunk: list[Entry] = []
        self.item, self.piece = self.mark.item, self.mark.piece
        self.ended = False
        self.seen = resume is not None

    def tasks(self) -> Iterator[Task]:
        """Read; yield what each batch is made of.

        Raises:
            ValueError: The source gives nothing, or too little for a batch of every rank.
        """
        items = self._start()
        marks = [self.mark]
        while not self.ended or self.chunk:
            self._fill(items, self.size or self._chunk_size())
            units, pieces = self._arrange()
            rounds = self.sharing.rounds(len(units))
            held = 0 if self.ended or self.sharing.world_size == 1 else 1
            count = rounds.count if self.ended else max(len(units) // self.sharing.block - held, 0)
            if not self.ended and not count:
                self.size = 2 * len(self.chunk) + self._chunk_size()
                continue
            for number in range(self.taken, count):
                yield self._task(units[rounds.share(number, self.sharing.rank)], pieces, number + 1)
            if self.ended:
                break
            self._drop(units[: count * self.sharing.block], marks)
        if not self.seen:
            raise ValueError("source: the iterable gave no item (or not enough for one batch, with drop_last=True)")

    def _start(self) -> Iterator[Any]:
        """Return the source's iterator, at the mark."""
        items = self.source.start(self.mark.state)
        if self.mark.state is None:
            for _ in range(self.mark.item):
                next(items, None)
        return items

    def _chunk_size(self) -> int:
        """Return how many entries make a chunk: besides those, a round is held back for what the last ranks get."""
        block = self.sharing.block
        size = self.arranger.chunk(block) if self.arranger else block
        return size + (block if self.sharing.world_size > 1 else 0)

    def _fill(self, items: Iterator[Any], size: int) -> None:
        """Read until the chunk has `size` entries, or the source ends."""
        self.size = size
        while len(self.chunk) < size:
            with about("item", self.item, "of the iterable"):
                try:
                    item = next(items)
                except StopIteration:
                    self.ended = True
                    return
                evaluate(item, "item", self.item, lists=False)
                cuts = self.arranger.cut(self.arranger.length_of(item)) if self.arranger else [(0, 0)]
            for start, stop in cuts:
                if self.piece not in self.used:
                    self.chunk.append(Entry(self.piece, self.item, item, start, stop))
                self.piece += 1
            self.item += 1

    def _arrange(self) -> tuple[Any, Pieces]:
        """Arrange the chunk."""
        cuts = [[(entry.start, entry.stop)] for entry in self.chunk]
        pieces = Pieces(range(len(self.chunk)), cuts)
        if self.arranger is None:
            return np.arange(len(self.chunk))[:, None], pieces
        return self.arranger.units(pieces.lengths, self.sharing.block, None), pieces

    def _task(self, units: Any, pieces: Pieces, taken: int) -> Task:
        """Return what a batch is made of, and the place after it."""
        rows: list[list[Cut]] = [pieces.row(unit) for unit in units]
        entries = [self.chunk[cut[0]] for row in rows for cut in row]
        rows = [[(self.chunk[i].source, start, stop) for i, start, stop in row] for row in rows]
        self.seen = True
        resume = {
            "source": self.mark.state,
            "item": self.mark.item,
            "piece": self.mark.piece,
            "used": sorted(number - self.mark.piece for number in self.used),
            "size": self.size,
            "taken": taken,
        }
        items = {entry.source: entry.item for entry in entries}
        return Task(list(items), rows, items, resume)

    def _drop(self, units: Any, marks: list[Mark]) -> None:
        """Go on with what the rounds that were given out left over."""
        given = {int(i) for unit in units for i in unit}
        self.used |= {self.chunk[i].number for i in given}
        self.chunk = [entry for i, entry in enumerate(self.chunk) if i not in given]
        state = self.source.state() if self.source.stateful else None
        marks.append(Mark(state, self.item, self.piece))
        oldest = self.chunk[0].number if self.chunk else self.piece
        while len(marks) > 1 and marks[1].piece <= oldest:
            marks.pop(0)
        self.mark = marks[0]
        self.used = {number for number in self.used if number >= self.mark.piece}
        self.size = self.taken = 0
