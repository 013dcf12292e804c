"""The batches of one epoch over a sequence, known before any item is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from faststep.data._by_length import ByLength
from faststep.data._errors import about
from faststep.data._order import IntArray, Keys, Rounds, Units

Cut = tuple[int, int, int]  # number of the item, start, stop


class Task(NamedTuple):
    """Items and pieces that make one batch.

    Attributes:
        numbers: The numbers of the items, each once, in the order in which they are needed.
        rows: The pieces of items in each row of the batch; None where every item is a row.
        items: The items, where they have been read already.
        resume: Where a stream goes on after this batch, for the state.
    """

    numbers: list[int]
    rows: list[list[Cut]] | None = None
    items: dict[int, Any] | None = None
    resume: dict[str, Any] | None = None


class Sharing(NamedTuple):
    """Options by which units are dealt to ranks; see `Rounds`."""

    batch_size: int
    rank: int
    world_size: int
    drop_last: bool

    @property
    def block(self) -> int:
        """Units of a round."""
        return self.batch_size * self.world_size

    def rounds(self, units: int) -> Rounds:
        """Deal so many units."""
        return Rounds(units, self.batch_size, self.world_size, drop_last=self.drop_last)


class Pieces:
    """Pieces of items by number, [pieces] each: the item's number, where it starts and stops."""

    def __init__(self, items: Sequence[int] | IntArray, cuts: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Put the pieces of all items one after the other."""
        counts = [len(cut) for cut in cuts]
        self.numbers: IntArray = np.repeat(np.asarray(items, dtype=np.int64), counts)
        flat = [bounds for cut in cuts for bounds in cut]
        self.bounds: IntArray = np.asarray(flat, dtype=np.int64).reshape(-1, 2)

    @property
    def lengths(self) -> IntArray:
        """The lengths of the pieces."""
        return self.bounds[:, 1] - self.bounds[:, 0]

    def row(self, unit: Sequence[int]) -> list[Cut]:
        """Return the pieces of one unit."""
        return [(int(self.numbers[i]), *self.bounds[i].tolist()) for i in unit]


def _cut(arranger: ByLength, number: int, length: int) -> list[tuple[int, int]]:
    with about(f"item {number}"):
        return arranger.cut(length)


class Epoch:
    """Batches of an epoch: the items, or pieces of items, of each."""

    def __init__(
        self, n: int, keys: Keys | None, sharing: Sharing, arranger: ByLength | None, lengths: IntArray | None
    ) -> None:
        """Lay out the epoch; only lengths are needed for it.

        Args:
            n: How many items there are.
            keys: Random numbers of the epoch; None for the order of the source.
            sharing: How the units are dealt.
            arranger: The collate, if it arranges by length.
            lengths: The items' lengths, for that.

        Raises:
            ValueError: No batch comes out of it, or not the same number for every rank.
        """
        order = np.arange(n) if keys is None else keys.permutation(n)
        self.order: IntArray = order
        self.units: Units = order[:, None]
        self.pieces: Pieces | None = None
        if arranger is not None and lengths is not None:
            self.pieces = Pieces(order, [_cut(arranger, int(i), int(lengths[i])) for i in order])
            self.units = arranger.units(self.pieces.lengths, sharing.block, keys)
        self.sharing, self.rounds = sharing, sharing.rounds(len(self.units))

    def task(self, number: int) -> Task:
        """Return what a batch is made of."""
        share = self.rounds.share(number, self.sharing.rank)
        if self.pieces is None:
            return Task(self.order[share].tolist())
        rows = [self.pieces.row(unit) for unit in self.units[share]]
        return Task(list(dict.fromkeys(cut[0] for row in rows for cut in row)), rows)
