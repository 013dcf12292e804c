"""The order of an epoch, and its shares by rank: functions of seed, epoch and lengths alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Units = Sequence[Sequence[int]] | IntArray  # the pieces in each, or [units, 1]


class Keys:
    """Random numbers of one epoch, the same on every machine and with every version of numpy.

    They are raw numbers of PCG64 seeded by (seed, epoch), whose stream numpy keeps as it is (NEP 19); what
    `Generator.permutation` makes of the same stream may change between versions.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        """Start the stream of an epoch."""
        self.bits = np.random.PCG64(np.random.SeedSequence((seed, epoch)))

    def permutation(self, n: int) -> IntArray:
        """Return the numbers below n in random order, int64 [n]."""
        raw: Any = self.bits.random_raw(n)
        return np.argsort(np.asarray(raw, dtype=np.uint64), kind="stable").astype(np.int64)


class Rounds:
    """Shares of the ranks in the units of an epoch: items, or rows of packed items.

    Round k takes the next `world_size * batch_size` units; rank r gets the r-th `batch_size` of them. What is left at
    the end is dropped, or given out as evenly as it goes: over one more round if every rank gets a unit of it, else
    together with the last full round over two. So each rank has the same number of batches, every unit is given out
    once, and no batch is larger than `batch_size`.
    """

    def __init__(self, units: int, batch_size: int, world_size: int, *, drop_last: bool) -> None:
        """Deal.

        Raises:
            ValueError: It cannot be done: there are too few units, or one is left for fewer ranks with batches of one.
        """
        block = batch_size * world_size
        full, rest = divmod(units, block)
        self.block, self.batch_size, self.units = block, batch_size, units
        self.regular = full
        self.even: list[tuple[int, int]] = []
        if rest and not drop_last:
            self._deal_rest(full, rest, world_size)
        self.count = self.regular + len(self.even) // world_size
        self.world_size = world_size

    def _deal_rest(self, full: int, rest: int, world_size: int) -> None:
        """Divide what does not fill a round."""
        parts = world_size
        if rest < world_size:
            if not full or self.batch_size == 1:
                raise ValueError(
                    f"world_size={world_size}: {rest} of {self.units} are left for the last round, too few for each "
                    "rank to get one: use drop_last=True"
                    + (", a batch_size above 1" if full else "")
                    + " or fewer ranks"
                )
            self.regular, parts = full - 1, 2 * world_size
        ends = np.linspace(self.regular * self.block, self.units, parts + 1).astype(int).tolist()
        self.even = list(itertools.pairwise(ends))

    def share(self, number: int, rank: int) -> slice:
        """Return the units that a rank gets in a round."""
        if number < self.regular:
            start = number * self.block + rank * self.batch_size
            return slice(start, start + self.batch_size)
        return slice(*self.even[(number - self.regular) * self.world_size + rank])
