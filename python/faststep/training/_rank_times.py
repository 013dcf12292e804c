"""The time that each rank takes between exchanges: the slowest one has the most, and the others wait for it."""

from __future__ import annotations

from faststep._step import Ranks


class RankTimes:
    """Seconds that each rank has spent outside of exchanges since the last interval; the first has none: it traces."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before: list[float] = []

    def take(self) -> dict[str, dict[str, float]]:
        """Return the field `rank_seconds` of an interval's record, by rank; none without other ranks."""
        before, self._before = self._before, self._ranks.seconds
        seconds = {str(rank): now - then for rank, (now, then) in enumerate(zip(self._before, before, strict=False))}
        return {"rank_seconds": seconds} if any(seconds.values()) else {}
