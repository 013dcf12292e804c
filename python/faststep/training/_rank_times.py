"""The time that each rank takes between exchanges: the slowest one has the most, and the others wait for it."""

from __future__ import annotations

import time

from faststep._step import Step


class RankTimes:
    """Seconds that each rank spends outside of exchanges, told to all ranks at each multiple of so many steps.

    Args:
        step: The step, whose ranks they are.
        every: Steps between two meetings.
    """

    def __init__(self, step: Step, every: int) -> None:
        self._step, self._every = step, every
        self._began: tuple[float, float] | None = None  # the time, and the seconds in exchanges until then
        self._told: dict[str, float] = {}

    def meet(self, number: int) -> None:
        """Exchange the seconds since the last meeting, where one is due; to be called on all ranks after each step.

        The first call begins: the step before it has traced, and compiled kernels.

        Raises:
            RankError: Another rank has failed, is gone, or is somewhere else.
        """
        ranks = self._step.ranks
        if ranks.size == 1:
            return
        if self._began is not None:
            if number % self._every:
                return
            now, waited = self._now()
            own = now - self._began[0] - (waited - self._began[1])
            self._told = {str(rank): each for rank, each in enumerate(ranks.gather(own, "comparison"))}
        self._began = self._now()

    def take(self) -> dict[str, dict[str, float]]:
        """Return the field `rank_seconds` of an interval's record, by rank; none where there was no meeting since."""
        told, self._told = self._told, {}
        return {"rank_seconds": told} if told else {}

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), self._step.stats.seconds["ranks"]
